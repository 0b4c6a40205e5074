/* A program that ends as soon as it has a message still acknowledges its peer's request, as an RNIC does, which acknowledges
   by itself. */
#include "check.h"

#include <sys/wait.h>
#include <unistd.h>

struct side {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	char bytes[8];
};

static void open_side(struct side *side)
{
	side->context = open_first();
	CHECK((side->pd = ibv_alloc_pd(side->context)) && (side->cq = ibv_create_cq(side->context, 4, NULL, NULL, 0)));
	struct ibv_qp_init_attr init = {.send_cq = side->cq, .recv_cq = side->cq, .cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
	CHECK((side->qp = ibv_create_qp(side->pd, &init)) && (side->mr = ibv_reg_mr(side->pd, side->bytes, sizeof(side->bytes), IBV_ACCESS_LOCAL_WRITE)));
}

/* Exchanges queue pair numbers with the peer, and connects. */
static void meet(struct side *side, int from, int to)
{
	uint32_t peer;
	CHECK(write(to, &side->qp->qp_num, sizeof(peer)) == sizeof(peer) && read(from, &peer, sizeof(peer)) == sizeof(peer));
	bring_up(side->qp, peer);
}

/* Waits until both sides have come this far. */
static void both(int from, int to)
{
	char byte = 0;
	CHECK(write(to, &byte, 1) == 1 && read(from, &byte, 1) == 1);
}

int main(void)
{
	for (int round = 0; round < 10; round++) {
		struct side side = {0};
		int up[2], down[2], status;
		CHECK(!pipe(up) && !pipe(down));
		pid_t child = fork();
		CHECK(child >= 0);
		open_side(&side);
		struct ibv_sge sge = {(uintptr_t)side.bytes, sizeof(side.bytes), side.mr->lkey};
		if (child == 0) {
			struct ibv_recv_wr receive = {.sg_list = &sge, .num_sge = 1}, *bad;
			meet(&side, down[0], up[1]);
			CHECK(!ibv_post_recv(side.qp, &receive, &bad));
			both(down[0], up[1]);
			completion(side.cq);
			exit(0);
		}
		meet(&side, up[0], down[1]);
		both(up[0], down[1]);
		struct ibv_send_wr send = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
		CHECK(!ibv_post_send(side.qp, &send, &bad));
		/* The child ends before this side polls. */
		CHECK(waitpid(child, &status, 0) == child && status == 0);
		completion(side.cq);
		CHECK(!ibv_destroy_qp(side.qp) && !ibv_dereg_mr(side.mr) && !ibv_destroy_cq(side.cq) && !ibv_dealloc_pd(side.pd) && !ibv_close_device(side.context));
		for (int i = 0; i < 2; i++)
			CHECK(!close(up[i]) && !close(down[i]));
	}
	return 0;
}
