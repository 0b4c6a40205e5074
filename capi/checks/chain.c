/* Requests that are posted as one list: they are executed in order, and a request that is refused is named, while those
   before it are posted. */
#include "check.h"

enum { CHAIN = 16 };

int main(int argc, char **argv)
{
	/* Through shared memory the requests would need no packets. */
	CHECK(!setenv("RDMUX_SHM", "off", 1));
	struct ibv_context *context = open_first();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	struct ibv_qp *qp[2];
	static char from[CHAIN][8], to[CHAIN][8];
	int rounds = argc > 1 ? atoi(argv[1]) : 60;
	CHECK(pd && cq);
	create_pair(pd, cq, cq, qp);
	struct ibv_mr *source = ibv_reg_mr(pd, from, sizeof(from), 0);
	struct ibv_mr *target = ibv_reg_mr(pd, to, sizeof(to), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	CHECK(source && target);
	for (int round = 0; round < rounds; round++) {
		struct ibv_sge sge[CHAIN];
		struct ibv_send_wr wr[CHAIN] = {0}, *bad;
		for (int i = 0; i < CHAIN; i++) {
			memset(from[i], round + i, sizeof(from[i]));
			sge[i] = (struct ibv_sge){(uintptr_t)from[i], sizeof(from[i]), source->lkey};
			wr[i] = (struct ibv_send_wr){.wr_id = i, .sg_list = &sge[i], .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED};
			wr[i].wr.rdma.remote_addr = (uintptr_t)to[i];
			wr[i].wr.rdma.rkey = target->rkey;
			wr[i].next = i + 1 < CHAIN ? &wr[i + 1] : NULL;
		}
		CHECK(!ibv_post_send(qp[0], wr, &bad));
		for (int i = 0; i < CHAIN; i++)
			CHECK(completion(cq).wr_id == (uint64_t)i);
		CHECK(!memcmp(from, to, sizeof(from)));
	}

	/* A refused request is named, and those before it are posted. */
	struct ibv_sge sge = {(uintptr_t)from, 8, source->lkey};
	struct ibv_send_wr wr[3], *bad = NULL;
	for (int i = 0; i < 3; i++) {
		wr[i] = (struct ibv_send_wr){.wr_id = i, .sg_list = &sge, .num_sge = i == 1 ? 30 : 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED, .next = i < 2 ? &wr[i + 1] : NULL};
		wr[i].wr.rdma.remote_addr = (uintptr_t)to;
		wr[i].wr.rdma.rkey = target->rkey;
	}
	CHECK(ibv_post_send(qp[0], wr, &bad) == EINVAL && bad == &wr[1]);
	CHECK(completion(cq).wr_id == 0);
	CHECK(!ibv_destroy_qp(qp[0]) && !ibv_destroy_qp(qp[1]) && !ibv_dereg_mr(source) && !ibv_dereg_mr(target));
	CHECK(!ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(context));
	return 0;
}
