/* A server of 64 connections that sleeps in one epoll set: each connection has a completion queue and a non-blocking channel of its own, which
 * the server arms and then polls until it is empty, before it sleeps again. A client in another process waits for events in the same way.
 *
 *   epoll_server ROUNDS [poll]      poll: both sides poll instead; prints the median of half a round trip
 */
#include "check.h"

#include <fcntl.h>
#include <stdbool.h>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CONNECTIONS = 64 };

struct connection {
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	uint64_t number;
	int sent, received;
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct connection all[CONNECTIONS];
static int epoll_fd;
static bool polls;

static void receive(struct connection *one)
{
	struct ibv_sge sge = {(uintptr_t)&one->number, sizeof(one->number), one->mr->lkey};
	struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;
	CHECK(!ibv_post_recv(one->qp, &wr, &bad));
}

static void send_number(struct connection *one)
{
	struct ibv_sge sge = {(uintptr_t)&one->number, sizeof(one->number), one->mr->lkey};
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
	CHECK(!ibv_post_send(one->qp, &wr, &bad));
}

static void open_side(void)
{
	context = open_first();
	CHECK(pd = ibv_alloc_pd(context));
	CHECK((epoll_fd = epoll_create1(EPOLL_CLOEXEC)) >= 0);
	for (int i = 0; i < CONNECTIONS; i++) {
		struct connection *one = &all[i];
		struct epoll_event event = {.events = EPOLLIN, .data.ptr = one};
		CHECK(one->channel = ibv_create_comp_channel(context));
		CHECK(!fcntl(one->channel->fd, F_SETFL, fcntl(one->channel->fd, F_GETFL) | O_NONBLOCK));
		CHECK(!epoll_ctl(epoll_fd, EPOLL_CTL_ADD, one->channel->fd, &event));
		CHECK(one->cq = ibv_create_cq(context, 16, one, one->channel, 0));
		struct ibv_qp_init_attr init = {.send_cq = one->cq, .recv_cq = one->cq, .cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
		CHECK(one->qp = ibv_create_qp(pd, &init));
		CHECK(one->mr = ibv_reg_mr(pd, &one->number, sizeof(one->number), IBV_ACCESS_LOCAL_WRITE));
		if (!polls)
			CHECK(!ibv_req_notify_cq(one->cq, 0));
	}
}

static void connect_all(int from, int to)
{
	uint32_t numbers[CONNECTIONS];
	for (int i = 0; i < CONNECTIONS; i++)
		numbers[i] = all[i].qp->qp_num;
	CHECK(write(to, numbers, sizeof(numbers)) == sizeof(numbers) && read(from, numbers, sizeof(numbers)) == sizeof(numbers));
	for (int i = 0; i < CONNECTIONS; i++) {
		bring_up(all[i].qp, numbers[i]);
		receive(&all[i]);
	}
	/* Both sides have posted their receives. */
	CHECK(write(to, numbers, 1) == 1 && read(from, numbers, 1) == 1);
}

/* Takes the completions of a connection until there are no more. */
static void drain(struct connection *one)
{
	struct ibv_wc wc;
	int found;
	while ((found = ibv_poll_cq(one->cq, 1, &wc)) > 0) {
		CHECK(wc.status == IBV_WC_SUCCESS);
		*(wc.opcode == IBV_WC_RECV ? &one->received : &one->sent) += 1;
	}
	CHECK(found == 0);
}

/* Sleeps until some connections have events, and drains those. */
static void sleep_and_drain(void)
{
	struct epoll_event events[CONNECTIONS];
	int n = epoll_wait(epoll_fd, events, CONNECTIONS, LONG * 1000);
	CHECK(n > 0);
	for (int i = 0; i < n; i++) {
		struct connection *one = events[i].data.ptr;
		struct ibv_cq *cq;
		void *of;
		CHECK(!ibv_get_cq_event(one->channel, &cq, &of) && cq == one->cq && of == one);
		ibv_ack_cq_events(cq, 1);
		CHECK(!ibv_req_notify_cq(cq, 0));
		drain(one);
	}
}

/* Answers one message of a connection, if it is there. */
static int answer(struct connection *one)
{
	if (one->received == 0)
		return 0;
	one->received--;
	CHECK(one->number % CONNECTIONS == (uint64_t)(one - all));
	one->number++;
	send_number(one);
	receive(one);
	return 1;
}

static void serve(int rounds)
{
	for (int i = 0, answered = 0; answered < rounds; i = (i + 1) % CONNECTIONS) {
		if (polls) {
			drain(&all[i]);
			answered += answer(&all[i]);
			continue;
		}
		sleep_and_drain();
		for (int j = 0; j < CONNECTIONS; j++)
			answered += answer(&all[j]);
	}
	/* The last answer has arrived. */
	for (int i = 0; i < CONNECTIONS; i++)
		while (all[i].sent < rounds / CONNECTIONS + (i < rounds % CONNECTIONS))
			polls ? drain(&all[i]) : sleep_and_drain();
}

static int by_size(const void *a, const void *b) { return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b); }

static void ask(int rounds)
{
	double *took = calloc(rounds, sizeof(*took));
	CHECK(took);
	for (int round = 0; round < rounds; round++) {
		struct connection *one = &all[round % CONNECTIONS];
		double began = now();
		one->number = round;
		send_number(one);
		/* The answer may come before the SEND's acknowledgement. */
		while (one->received == 0 || one->sent == 0)
			polls ? drain(one) : sleep_and_drain();
		took[round] = now() - began;
		CHECK(one->number == (uint64_t)round + 1);
		one->received = one->sent = 0;
		receive(one);
	}
	qsort(took, rounds, sizeof(*took), by_size);
	printf("half a round trip: %.2f us\n", took[rounds / 2] * 1e6 / 2);
	free(took);
}

static void close_side(void)
{
	for (int i = 0; i < CONNECTIONS; i++) {
		struct connection *one = &all[i];
		CHECK(!ibv_destroy_qp(one->qp) && !ibv_dereg_mr(one->mr) && !ibv_destroy_cq(one->cq) && !ibv_destroy_comp_channel(one->channel));
	}
	CHECK(!ibv_dealloc_pd(pd) && !ibv_close_device(context) && !close(epoll_fd));
}

int main(int argc, char **argv)
{
	int rounds = argc > 1 ? atoi(argv[1]) : 60, up[2], down[2], status;
	rounds *= 10;
	polls = argc > 2;
	CHECK(!pipe(up) && !pipe(down));
	pid_t client = fork();
	CHECK(client >= 0);
	open_side();
	if (client == 0) {
		connect_all(down[0], up[1]);
		ask(rounds);
		close_side();
		exit(0);
	}
	connect_all(up[0], down[1]);
	serve(rounds);
	CHECK(waitpid(client, &status, 0) == client && status == 0);
	close_side();
	return 0;
}
