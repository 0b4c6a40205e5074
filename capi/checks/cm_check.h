/* Shared by the checks of rdma_cm: the server's address, and an id's next event, queue pair and end. */
#include "check.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <rdma/rdma_cma.h>

static struct sockaddr_in address = {.sin_family = AF_INET};

static inline struct rdma_cm_event *event_of(struct rdma_event_channel *channel, enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event;
	CHECK(!rdma_get_cm_event(channel, &event));
	if (event->event != type)
		fprintf(stderr, "%s, not %s\n", rdma_event_str(event->event), rdma_event_str(type));
	CHECK(event->event == type && !event->status);
	return event;
}

static inline void expect(struct rdma_event_channel *channel, enum rdma_cm_event_type type)
{
	CHECK(!rdma_ack_cm_event(event_of(channel, type)));
}

static inline void create_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = {.cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
	CHECK(!rdma_create_qp(id, NULL, &init));
	CHECK(id->qp && id->send_cq && id->recv_cq);
}

static inline void leave(struct rdma_cm_id *id)
{
	if (id->qp)
		rdma_destroy_qp(id);
	CHECK(!rdma_destroy_id(id));
}
