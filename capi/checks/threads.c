/* Many threads on one device: some make and destroy queues on a channel that others wait on, some take and acknowledge
   events beside that, and several post to the same queue pairs and poll. */
#include "check.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

enum { MAKERS = 4, TAKERS = 3, SENDERS = 3 };

static int rounds = 60;
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static struct ibv_comp_channel *channel;
static atomic_int makers_left = MAKERS;
static uint32_t words[2] = {1, 2};

static struct ibv_sge word(int i)
{
	return (struct ibv_sge){.addr = (uintptr_t)&words[i], .length = 4, .lkey = mr->lkey};
}

/* Number of a queue's events that were taken. */
struct maker {
	atomic_int taken;
};

/* Makes a queue and a pair on the channel, uses them, and destroys the queue while others take its events: that waits for
   their acknowledgements. */
static void *make(void *argument)
{
	struct maker *own = argument;
	for (int i = 0; i < rounds; i++) {
		struct ibv_cq *cq = ibv_create_cq(context, 64, own, channel, 0);
		CHECK(cq);
		struct ibv_qp *qp[2];
		create_pair(pd, cq, cq, qp);
		for (int j = 0; j < 3; j++) {
			int before = atomic_load(&own->taken);
			CHECK(!ibv_req_notify_cq(cq, 0));
			exchange(qp, word(0), word(1), j);
			completion(cq);
			completion(cq);
			/* The channel reports the first completion, whoever polled it. Every other queue is destroyed while
			   its event is on the way. */
			double end = now() + LONG;
			while ((i + j) % 2 == 0 && atomic_load(&own->taken) == before)
				CHECK(now() < end);
		}
		for (int j = 0; j < 2; j++)
			CHECK(!ibv_destroy_qp(qp[j]));
		CHECK(!ibv_destroy_cq(cq));
	}
	atomic_fetch_sub(&makers_left, 1);
	return NULL;
}

static void *take(void *argument)
{
	(void)argument;
	while (atomic_load(&makers_left)) {
		struct pollfd events = {.fd = channel->fd, .events = POLLIN};
		poll(&events, 1, 10);
		struct ibv_cq *cq;
		struct maker *of;
		if (ibv_get_cq_event(channel, &cq, (void **)&of)) {
			CHECK(errno == EAGAIN);
			continue;
		}
		atomic_fetch_add(&of->taken, 1);
		ibv_ack_cq_events(cq, 1);
	}
	return NULL;
}

static struct ibv_qp *shared[2];
static struct ibv_cq_ex *shared_cq;
static atomic_int done;

/* Several threads post to one queue pair, by both interfaces, and poll one extended queue. */
static void *send(void *argument)
{
	(void)argument;
	int mine = 0, before = -1;
	double end = 0;
	while (mine < rounds * 10 || atomic_load(&done) < SENDERS * rounds * 10 * 2) {
		/* Each thread may take as long as it needs, while any of them makes progress. */
		if (atomic_load(&done) != before) {
			before = atomic_load(&done);
			end = now() + LONG;
		}
		CHECK(now() < end);
		if (mine < rounds * 10) {
			struct ibv_sge to = word(1);
			struct ibv_recv_wr receive = {.sg_list = &to, .num_sge = 1}, *bad;
			if (!ibv_post_recv(shared[1], &receive, &bad)) {
				struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(shared[0]);
				int posted;
				do {
					CHECK(now() < end);
					ibv_wr_start(qp);
					qp->wr_id = 1;
					qp->wr_flags = IBV_SEND_SIGNALED;
					ibv_wr_send(qp);
					ibv_wr_set_sge(qp, mr->lkey, (uintptr_t)&words[0], 4);
					posted = ibv_wr_complete(qp);
				} while (posted == ENOMEM);
				CHECK(!posted);
				mine++;
			}
		}
		struct ibv_poll_cq_attr attr = {};
		if (ibv_start_poll(shared_cq, &attr))
			continue;
		do {
			CHECK(shared_cq->status == IBV_WC_SUCCESS);
			atomic_fetch_add(&done, 1);
		} while (!ibv_next_poll(shared_cq));
		ibv_end_poll(shared_cq);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	if (argc > 1)
		rounds = atoi(argv[1]);
	context = open_first();
	pd = ibv_alloc_pd(context);
	mr = ibv_reg_mr(pd, words, sizeof(words), IBV_ACCESS_LOCAL_WRITE);
	channel = ibv_create_comp_channel(context);
	CHECK(pd && mr && channel && !fcntl(channel->fd, F_SETFL, O_NONBLOCK));
	struct maker makers[MAKERS] = {};
	pthread_t threads[MAKERS + TAKERS + SENDERS];
	struct ibv_cq_init_attr_ex init = {.cqe = 4096, .wc_flags = IBV_WC_STANDARD_FLAGS};
	CHECK(shared_cq = ibv_create_cq_ex(context, &init));
	struct ibv_cq *classic = ibv_cq_ex_to_cq(shared_cq);
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_init_attr_ex qp = {.send_cq = classic, .recv_cq = classic, .cap = {64, 1024, 1, 1, 0}, .qp_type = IBV_QPT_RC, .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .pd = pd, .send_ops_flags = IBV_QP_EX_WITH_SEND};
		CHECK(shared[i] = ibv_create_qp_ex(context, &qp));
	}
	for (int i = 0; i < 2; i++)
		bring_up(shared[i], shared[1 - i]->qp_num);
	for (int i = 0; i < MAKERS + TAKERS + SENDERS; i++) {
		void *(*what)(void *) = i < MAKERS ? make : i < MAKERS + TAKERS ? take : send;
		CHECK(!pthread_create(&threads[i], NULL, what, i < MAKERS ? &makers[i] : NULL));
	}
	for (int i = 0; i < MAKERS + TAKERS + SENDERS; i++)
		CHECK(!pthread_join(threads[i], NULL));
	CHECK(!ibv_destroy_qp(shared[0]) && !ibv_destroy_qp(shared[1]) && !ibv_destroy_cq(classic));
	CHECK(!ibv_destroy_comp_channel(channel) && !ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd) && !ibv_close_device(context));
	return 0;
}
