/* Calls that wait for an event: a signal whose handler was set with SA_RESTART leaves them waiting, one without that flag
 * ends them, and so does pthread_cancel(3), as with rdma-core, whose calls wait in read(2). */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

static struct ibv_context *context;
static struct ibv_comp_channel *completions;
static struct rdma_event_channel *events;

static atomic_int handled, thread_id;
static void handle(int signal) { (void)signal; handled++; }

/* The calls; each returns 0 if it has its event. */
static int get_cq_event(void)
{
	struct ibv_cq *cq;
	void *cq_context;
	return ibv_get_cq_event(completions, &cq, &cq_context);
}
static int get_async_event(void)
{
	struct ibv_async_event event;
	return ibv_get_async_event(context, &event);
}
static int get_cm_event(void)
{
	struct rdma_cm_event *event;
	return rdma_get_cm_event(events, &event) || rdma_ack_cm_event(event);
}

/* Returns 0, or the errno with which the call failed. */
static void *call(void *of)
{
	thread_id = gettid();
	return (void *)(intptr_t)(((int (*)(void))of)() ? errno : 0);
}

/* Starts a thread in a call that waits. */
static pthread_t waiting(int (*of)(void))
{
	pthread_t thread;
	char path[64], state = 0;
	thread_id = 0;
	CHECK(!pthread_create(&thread, NULL, call, of));
	for (double end = now() + LONG; state != 'S'; sched_yield()) {
		CHECK(now() < end);
		if (!thread_id)
			continue;
		snprintf(path, sizeof(path), "/proc/self/task/%d/stat", thread_id);
		FILE *file = fopen(path, "r");
		CHECK(file && fscanf(file, "%*d (%*[^)]) %c", &state) == 1);
		fclose(file);
	}
	return thread;
}

static intptr_t joined(pthread_t thread)
{
	void *result;
	CHECK(!pthread_join(thread, &result));
	return (intptr_t)result;
}

static void interrupt(pthread_t thread, int signal)
{
	int before = handled;
	CHECK(!pthread_kill(thread, signal));
	for (double end = now() + LONG; handled == before; sched_yield())
		CHECK(now() < end);
}

int main(void)
{
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp[2];
	struct rdma_cm_id *id;
	char bytes[8] = "bytes";
	context = open_first();
	CHECK((pd = ibv_alloc_pd(context)) && (completions = ibv_create_comp_channel(context)));
	CHECK((cq = ibv_create_cq(context, 16, NULL, completions, 0)) && (events = rdma_create_event_channel()));
	create_pair(pd, cq, cq, qp);
	struct ibv_mr *mr = ibv_reg_mr(pd, bytes, sizeof(bytes), IBV_ACCESS_LOCAL_WRITE);
	CHECK(mr);

	/* glibc's signal(3) sets SA_RESTART. */
	CHECK(signal(SIGUSR1, handle) != SIG_ERR);
	CHECK(!ibv_req_notify_cq(cq, 0));
	pthread_t thread = waiting(get_cq_event);
	for (int i = 0; i < 3; i++)
		interrupt(thread, SIGUSR1);
	exchange(qp, (struct ibv_sge){(uintptr_t)bytes, 4, mr->lkey}, (struct ibv_sge){(uintptr_t)bytes + 4, 4, mr->lkey}, 1);
	CHECK(joined(thread) == 0);
	ibv_ack_cq_events(cq, 1);

	thread = waiting(get_cm_event);
	interrupt(thread, SIGUSR1);
	struct sockaddr_in nowhere = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	CHECK(!rdma_create_id(events, &id, NULL, RDMA_PS_TCP) && !rdma_resolve_addr(id, NULL, (struct sockaddr *)&nowhere, 1000));
	CHECK(joined(thread) == 0);
	CHECK(!rdma_destroy_id(id));

	int (*calls[])(void) = {get_cq_event, get_async_event, get_cm_event};
	for (int i = 0; i < 3; i++) {
		thread = waiting(calls[i]);
		CHECK(!pthread_cancel(thread) && joined(thread) == (intptr_t)PTHREAD_CANCELED);
	}

	struct sigaction plain = {.sa_handler = handle};
	CHECK(!sigaction(SIGUSR2, &plain, NULL));
	for (int i = 0; i < 3; i++) {
		thread = waiting(calls[i]);
		interrupt(thread, SIGUSR2);
		CHECK(joined(thread) == EINTR);
	}

	CHECK(!ibv_destroy_qp(qp[0]) && !ibv_destroy_qp(qp[1]) && !ibv_destroy_cq(cq) && !ibv_destroy_comp_channel(completions));
	CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd) && !ibv_close_device(context));
	rdma_destroy_event_channel(events);
	return 0;
}
