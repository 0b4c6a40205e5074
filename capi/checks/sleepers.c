/* Threads that sleep in ibv_get_cq_event, of which one is in the place of the device's engine: packets wake that one. Whoever leaves the
 * place, by its event, by pthread_cancel(3) or by a signal, leaves no other thread asleep, and the children of a fork disturb none. */
#define _GNU_SOURCE
#include "check.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

/* Each has a channel, and a queue of its own. */
static struct end {
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *qp[2];
	struct ibv_mr *mr;
	uint32_t words[2];
	atomic_int thread_id;
} ends[2];

static void make(struct ibv_context *context, struct ibv_pd *pd, struct end *end)
{
	CHECK((end->channel = ibv_create_comp_channel(context)) && (end->cq = ibv_create_cq(context, 16, NULL, end->channel, 0)));
	CHECK(end->mr = ibv_reg_mr(pd, end->words, sizeof(end->words), IBV_ACCESS_LOCAL_WRITE));
	/* Without a timeout: no timer of the sender wakes the engine's thread, which would take in what nobody watches for. */
	struct ibv_qp_init_attr init = {.send_cq = end->cq, .recv_cq = end->cq, .cap = {32, 32, 1, 1, 0}, .qp_type = IBV_QPT_RC};
	for (int i = 0; i < 2; i++)
		CHECK(end->qp[i] = ibv_create_qp(pd, &init));
	for (int i = 0; i < 2; i++)
		bring_up_within(end->qp[i], end->qp[1 - i]->qp_num, 0);
}

/* Sends a message from one of the queue pairs to the other. */
static void send_message(struct end *end)
{
	exchange(end->qp, (struct ibv_sge){(uintptr_t)&end->words[0], 4, end->mr->lkey}, (struct ibv_sge){(uintptr_t)&end->words[1], 4, end->mr->lkey}, 1);
}

static void take_completions(struct end *end)
{
	completion(end->cq);
	completion(end->cq);
}

/* Returns 0, or the errno with which the call failed. */
static void *get_event(void *of)
{
	struct end *end = of;
	struct ibv_cq *cq;
	void *cq_context;
	end->thread_id = gettid();
	if (ibv_get_cq_event(end->channel, &cq, &cq_context))
		return (void *)(intptr_t)errno;
	ibv_ack_cq_events(cq, 1);
	return NULL;
}

/* Starts a thread that sleeps until the queue, which is armed, has an event. */
static pthread_t sleeper(struct end *end)
{
	pthread_t thread;
	char path[64], state = 0;
	end->thread_id = 0;
	CHECK(!ibv_req_notify_cq(end->cq, 0) && !pthread_create(&thread, NULL, get_event, end));
	for (double limit = now() + LONG; state != 'S'; sched_yield()) {
		CHECK(now() < limit);
		if (!end->thread_id)
			continue;
		snprintf(path, sizeof(path), "/proc/self/task/%d/stat", end->thread_id);
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

/* A message wakes the thread. */
static void wakes(struct end *end, pthread_t thread)
{
	send_message(end);
	CHECK(joined(thread) == 0);
	take_completions(end);
}

/* A message makes the descriptor readable though no thread is in a call: the engine's own thread has its place back. */
static void notifies(struct end *end)
{
	struct pollfd entry = {.fd = end->channel->fd, .events = POLLIN};
	CHECK(!ibv_req_notify_cq(end->cq, 0));
	send_message(end);
	CHECK(poll(&entry, 1, LONG * 1000) == 1);
	CHECK(get_event(end) == NULL);
	take_completions(end);
}

static atomic_int handled;
static void handle(int signal) { (void)signal; handled++; }

static void wait_for(pid_t child)
{
	int status;
	CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
}

/* Forks, and ends the child in the middle of a call of its only thread. */
static void fork_and_exit(int signal)
{
	(void)signal;
	pid_t child = fork();
	if (!child)
		exit(0);
	wait_for(child);
	handled++;
}

static void interrupt(pthread_t thread, int signal)
{
	int before = handled;
	CHECK(!pthread_kill(thread, signal));
	for (double limit = now() + LONG; handled == before; sched_yield())
		CHECK(now() < limit);
}

int main(int argc, char **argv)
{
	int rounds = argc > 1 ? atoi(argv[1]) : 60;
	struct ibv_context *context = open_first();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	CHECK(pd);
	for (int i = 0; i < 2; i++)
		make(context, pd, &ends[i]);
	struct sigaction ends_call = {.sa_handler = handle}, forks = {.sa_handler = fork_and_exit, .sa_flags = SA_RESTART};
	CHECK(!sigaction(SIGUSR2, &forks, NULL));

	/* One sleeps for long, while the other gets events. */
	pthread_t first = sleeper(&ends[0]);
	for (int i = 0; i < rounds; i++)
		wakes(&ends[1], sleeper(&ends[1]));
	notifies(&ends[1]);
	wakes(&ends[0], first);

	for (int i = 0; i < rounds; i++) {
		/* The first of two leaves, in one way or the other, while the second sleeps. */
		first = sleeper(&ends[0]);
		pthread_t second = sleeper(&ends[1]);
		if (i % 2) {
			CHECK(!pthread_cancel(first) && joined(first) == (intptr_t)PTHREAD_CANCELED);
		} else {
			/* While there is a handler without SA_RESTART, each signal ends calls. */
			CHECK(!sigaction(SIGUSR1, &ends_call, NULL));
			interrupt(first, SIGUSR1);
			CHECK(joined(first) == EINTR && signal(SIGUSR1, SIG_IGN) != SIG_ERR);
		}
		wakes(&ends[1], second);
		notifies(&ends[0]);
		notifies(&ends[1]);

		/* Children that end in the middle of the call, and outside. */
		first = sleeper(&ends[0]);
		interrupt(first, SIGUSR2);
		pid_t child = fork();
		if (!child)
			exit(0);
		wait_for(child);
		wakes(&ends[0], first);
	}

	for (int i = 0; i < 2; i++) {
		CHECK(!ibv_destroy_qp(ends[i].qp[0]) && !ibv_destroy_qp(ends[i].qp[1]) && !ibv_dereg_mr(ends[i].mr));
		CHECK(!ibv_destroy_cq(ends[i].cq) && !ibv_destroy_comp_channel(ends[i].channel));
	}
	CHECK(!ibv_dealloc_pd(pd) && !ibv_close_device(context));
	return 0;
}
