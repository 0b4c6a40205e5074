/* Common beginning of the programs here: a device, and two queue pairs of it that are connected to each other. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Ends the program if a condition does not hold. */
#define CHECK(holds) \
	do { \
		if (!(holds)) { \
			fprintf(stderr, "%s:%d: %s (errno %d: %s)\n", __FILE__, __LINE__, #holds, errno, strerror(errno)); \
			exit(1); \
		} \
	} while (0)

/* Seconds after which nothing more arrives. */
enum { LONG = 60 };

static inline double now(void)
{
	struct timespec at;
	clock_gettime(CLOCK_MONOTONIC, &at);
	return at.tv_sec + at.tv_nsec / 1e9;
}

static inline struct ibv_context *open_first(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	CHECK(list && list[0]);
	struct ibv_context *context = ibv_open_device(list[0]);
	CHECK(context);
	ibv_free_device_list(list);
	return context;
}

/* Takes a queue pair to RTS, towards another of the same device's address. */
static inline void bring_up_within(struct ibv_qp *qp, uint32_t to, uint8_t timeout)
{
	struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE};
	CHECK(!ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = to, .max_dest_rd_atomic = 1, .min_rnr_timer = 1};
	rtr.ah_attr.is_global = 1;
	rtr.ah_attr.port_num = 1;
	CHECK(!ibv_query_gid(qp->context, 1, 0, &rtr.ah_attr.grh.dgid));
	CHECK(!ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS, .timeout = timeout, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1};
	CHECK(!ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

static inline void bring_up(struct ibv_qp *qp, uint32_t to) { bring_up_within(qp, to, 14); }

static inline void create_pair(struct ibv_pd *pd, struct ibv_cq *send_cq, struct ibv_cq *recv_cq, struct ibv_qp *qp[2])
{
	struct ibv_qp_init_attr init = {.send_cq = send_cq, .recv_cq = recv_cq, .cap = {32, 32, 1, 1, 0}, .qp_type = IBV_QPT_RC};
	for (int i = 0; i < 2; i++)
		CHECK(qp[i] = ibv_create_qp(pd, &init));
	for (int i = 0; i < 2; i++)
		bring_up(qp[i], qp[1 - i]->qp_num);
}

/* Posts a receive to one queue pair, and a send of four bytes to the other. */
static inline void exchange(struct ibv_qp *qp[2], struct ibv_sge from, struct ibv_sge to, uint64_t wr_id)
{
	struct ibv_recv_wr receive = {.wr_id = wr_id, .sg_list = &to, .num_sge = 1}, *bad_receive;
	struct ibv_send_wr send = {.wr_id = wr_id, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM, .send_flags = IBV_SEND_SIGNALED, .imm_data = htobe32(7)}, *bad_send;
	CHECK(!ibv_post_recv(qp[1], &receive, &bad_receive));
	CHECK(!ibv_post_send(qp[0], &send, &bad_send));
}

/* Returns the next completion, which must be a success. */
static inline struct ibv_wc completion(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	double end = now() + LONG;
	int found;
	while ((found = ibv_poll_cq(cq, 1, &wc)) == 0)
		CHECK(now() < end);
	CHECK(found == 1 && wc.status == IBV_WC_SUCCESS);
	return wc;
}
