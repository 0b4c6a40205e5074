/* Ended objects can no longer be reached: a queue pair that is destroyed while its connection exists, and the objects that a
   program leaves in a context that it closes. */
#include "check.h"
#include <rdma/rdma_cma.h>

static uint32_t words[2] = {1, 2};

/* Checks that a write to the second word fails, and changes nothing. */
static void unreachable(struct ibv_qp *qp, struct ibv_cq *cq, uint32_t lkey, uint32_t rkey)
{
	struct ibv_sge from = {.addr = (uintptr_t)&words[0], .length = 4, .lkey = lkey};
	struct ibv_send_wr write = {.sg_list = &from, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED}, *bad;
	write.wr.rdma.remote_addr = (uintptr_t)&words[1];
	write.wr.rdma.rkey = rkey;
	CHECK(!ibv_post_send(qp, &write, &bad));
	struct ibv_wc wc;
	double end = now() + LONG;
	int found;
	while ((found = ibv_poll_cq(cq, 1, &wc)) == 0)
		CHECK(now() < end);
	CHECK(found == 1 && wc.status != IBV_WC_SUCCESS && words[1] == 2);
}

static struct rdma_cm_id *expect(struct rdma_event_channel *channel, enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event;
	CHECK(!rdma_get_cm_event(channel, &event));
	struct rdma_cm_id *id = event->id;
	CHECK(event->event == type && !rdma_ack_cm_event(event));
	return id;
}

static struct ibv_mr *reg(struct ibv_pd *pd)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, words, sizeof words, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	CHECK(mr);
	return mr;
}

static struct ibv_cq *create_qp(struct rdma_cm_id *id)
{
	struct ibv_cq *cq = ibv_create_cq(id->verbs, 8, NULL, NULL, 0);
	struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
	CHECK(cq && !rdma_create_qp(id, NULL, &init));
	return cq;
}

static void destroyed(struct sockaddr_in address)
{
	struct rdma_event_channel *there = rdma_create_event_channel(), *here = rdma_create_event_channel();
	struct rdma_cm_id *listener, *client, *server;
	CHECK(there && here && !rdma_create_id(there, &listener, NULL, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(listener, (struct sockaddr *)&address) && !rdma_listen(listener, 1));
	address.sin_port = rdma_get_src_port(listener);
	CHECK(!rdma_create_id(here, &client, NULL, RDMA_PS_TCP));
	CHECK(!rdma_resolve_addr(client, NULL, (struct sockaddr *)&address, 1000));
	expect(here, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(!rdma_resolve_route(client, 1000));
	expect(here, RDMA_CM_EVENT_ROUTE_RESOLVED);
	struct ibv_cq *cq = create_qp(client);
	struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1, .retry_count = 1, .rnr_retry_count = 1};
	CHECK(!rdma_connect(client, &param));
	server = expect(there, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct ibv_cq *served = create_qp(server);
	struct ibv_mr *mr = reg(server->pd), *own = reg(client->pd);
	struct ibv_sge to = {.addr = (uintptr_t)&words[1], .length = 4, .lkey = mr->lkey};
	struct ibv_recv_wr receive = {.sg_list = &to, .num_sge = 1}, *bad;
	CHECK(!ibv_post_recv(server->qp, &receive, &bad) && !rdma_accept(server, &param));
	expect(here, RDMA_CM_EVENT_ESTABLISHED);
	expect(there, RDMA_CM_EVENT_ESTABLISHED);

	rdma_destroy_qp(server);
	unreachable(client->qp, cq, own->lkey, mr->rkey);
	CHECK(!rdma_disconnect(client));
	expect(here, RDMA_CM_EVENT_DISCONNECTED);
	expect(there, RDMA_CM_EVENT_DISCONNECTED);
	struct ibv_wc wc;
	CHECK(ibv_poll_cq(served, 1, &wc) == 0);
	rdma_destroy_qp(client);
	CHECK(!ibv_dereg_mr(mr) && !ibv_dereg_mr(own) && !ibv_destroy_cq(served) && !ibv_destroy_cq(cq));
	CHECK(!rdma_destroy_id(server) && !rdma_destroy_id(client) && !rdma_destroy_id(listener));
	rdma_destroy_event_channel(here);
	rdma_destroy_event_channel(there);
}

static void closed(void)
{
	struct ibv_context *contexts[2] = {open_first(), open_first()};
	struct ibv_qp *qp[2];
	struct ibv_cq *cq[2];
	struct ibv_mr *mr[2];
	for (int i = 0; i < 2; i++) {
		struct ibv_pd *pd = ibv_alloc_pd(contexts[i]);
		struct ibv_comp_channel *channel = ibv_create_comp_channel(contexts[i]);
		CHECK(pd && channel && (cq[i] = ibv_create_cq(contexts[i], 16, NULL, channel, 0)));
		struct ibv_srq_init_attr attr = {.attr = {.max_wr = 4, .max_sge = 1}};
		struct ibv_qp_init_attr init = {.send_cq = cq[i], .recv_cq = cq[i], .srq = ibv_create_srq(pd, &attr), .cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
		CHECK(init.srq && (qp[i] = ibv_create_qp(pd, &init)));
		mr[i] = reg(pd);
	}
	bring_up(qp[0], qp[1]->qp_num);
	bring_up(qp[1], qp[0]->qp_num);
	uint32_t rkey = mr[1]->rkey, handle = mr[1]->handle;
	CHECK(!ibv_close_device(contexts[1]));
	unreachable(qp[0], cq[0], mr[0]->lkey, rkey);
	CHECK(!ibv_import_mr(mr[0]->pd, handle) && errno == ENOENT);
	/* The next event belongs to the other context, and to an existing object. */
	struct ibv_async_event event;
	CHECK(!ibv_get_async_event(contexts[0], &event) && event.element.qp == qp[0]);
	ibv_ack_async_event(&event);
	CHECK(!ibv_close_device(contexts[0]));
}

int main(void)
{
	struct ibv_context *context = open_first();
	union ibv_gid gid;
	struct sockaddr_in address = {.sin_family = AF_INET};
	CHECK(!ibv_query_gid(context, 1, 0, &gid));
	memcpy(&address.sin_addr, gid.raw + 12, 4);
	destroyed(address);
	closed();
	CHECK(!ibv_close_device(context));
	return 0;
}
