/* What crates/soft/benches/instructions.rs is for rdmux's own API, for libibverbs: SENDs between two devices of one process, which one thread
 * posts and polls. `drop_in MESSAGE STEP COUNT`; callgrind collects in counted() alone.
 *
 * valgrind 3.19 refuses userfaultfd(2) and pidfd_open(2). So the memory stays the program's own, and the library copies by calls of the kernel;
 * and peers get no access to it, so that a WRITE would go by packets, as it does in no program that valgrind does not run. */
#include "../capi/checks/check.h"

enum { BYTES = 64, WARM_UP = 200 };

static struct ibv_cq *cq[2];
static struct ibv_qp *qp[2];
static struct ibv_mr *mr[2];
static uint8_t memory[2][BYTES];
static const char *chosen = "";

static void post(void)
{
	struct ibv_sge from = {(uintptr_t)memory[0], 8, mr[0]->lkey};
	struct ibv_send_wr request = {.wr_id = 1, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
	CHECK(!ibv_post_send(qp[0], &request, &bad));
}

static void post_receive(void)
{
	struct ibv_sge to = {(uintptr_t)memory[1], BYTES, mr[1]->lkey};
	struct ibv_recv_wr request = {.wr_id = 2, .sg_list = &to, .num_sge = 1}, *bad;
	CHECK(!ibv_post_recv(qp[1], &request, &bad));
}

static void look(void)
{
	struct ibv_wc wc;
	CHECK(!ibv_poll_cq(cq[0], 1, &wc));
}

static void receive(void)
{
	completion(cq[1]);
}

static void complete(void)
{
	struct ibv_wc wc;
	int found;
	while (!(found = ibv_poll_cq(cq[0], 1, &wc)))
		CHECK(!ibv_poll_cq(cq[1], 1, &wc));
	CHECK(found == 1 && wc.status == IBV_WC_SUCCESS);
}

/* callgrind knows this function by its name. */
__attribute__((noinline)) static void counted(void (*step)(void))
{
	step();
	/* Keeps the call above from becoming a jump, which would end this function early. */
	__asm__ volatile("");
}

static void step(const char *name, void (*step)(void))
{
	if (!strcmp(chosen, name) || !strcmp(chosen, "all"))
		counted(step);
	else
		step();
}

static void send_one(void)
{
	step("post", post);
	step("receive", receive);
	step("post-receive", post_receive);
	step("complete", complete);
}

int main(int argc, char **argv)
{
	CHECK(argc == 4);
	for (int i = 0; i < 2; i++) {
		struct ibv_context *context = open_first();
		struct ibv_pd *pd = ibv_alloc_pd(context);
		CHECK(pd);
		CHECK(cq[i] = ibv_create_cq(context, 64, NULL, NULL, 0));
		struct ibv_qp_init_attr init = {.send_cq = cq[i], .recv_cq = cq[i], .cap = {32, 32, 1, 1, 0}, .qp_type = IBV_QPT_RC};
		CHECK(qp[i] = ibv_create_qp(pd, &init));
		CHECK(mr[i] = ibv_reg_mr(pd, memory[i], BYTES, IBV_ACCESS_LOCAL_WRITE));
	}
	for (int i = 0; i < 2; i++)
		bring_up(qp[i], qp[1 - i]->qp_num);
	int is_poll = !strcmp(argv[1], "poll");
	CHECK(is_poll || !strcmp(argv[1], "send-8"));
	for (int i = 0; i < 8; i++)
		post_receive();
	for (int i = 0; i < WARM_UP; i++)
		send_one();
	chosen = argv[2];
	for (int i = atoi(argv[3]); i > 0; i--) {
		if (is_poll)
			step("poll", look);
		else
			send_one();
	}
	return 0;
}
