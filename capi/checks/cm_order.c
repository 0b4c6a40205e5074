/* rdma_cm: an event channel reports connections in the order in which their peers acted. When a peer connects again after
   its connection was established, or has ended, the channel reports that later. */
#include "cm_check.h"
#include <pthread.h>

enum { PER_ROUND = 3 };

static int rounds = 60;

/* Makes some connections, each once the one before is established; then ends one and makes another, so that there are two at
   most. */
static void *client(void *unused)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	CHECK(channel);
	for (int round = 0; round < rounds; round++) {
		struct rdma_cm_id *id[PER_ROUND];
		for (int i = 0; i < PER_ROUND; i++) {
			if (i > 1) {
				CHECK(!rdma_disconnect(id[i - 2]));
				expect(channel, RDMA_CM_EVENT_DISCONNECTED);
			}
			CHECK(!rdma_create_id(channel, &id[i], NULL, RDMA_PS_TCP));
			CHECK(!rdma_resolve_addr(id[i], NULL, (struct sockaddr *)&address, 1000));
			expect(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
			CHECK(!rdma_resolve_route(id[i], 1000));
			expect(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
			create_qp(id[i]);
			CHECK(!rdma_connect(id[i], NULL));
			expect(channel, RDMA_CM_EVENT_ESTABLISHED);
			if (i > 1)
				leave(id[i - 2]);
		}
		for (int i = PER_ROUND - 2; i < PER_ROUND; i++) {
			CHECK(!rdma_disconnect(id[i]));
			expect(channel, RDMA_CM_EVENT_DISCONNECTED);
			leave(id[i]);
		}
	}
	rdma_destroy_event_channel(channel);
	return unused;
}

static struct rdma_cm_id *accept_next(struct rdma_event_channel *channel)
{
	struct rdma_cm_event *event = event_of(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *id = event->id;
	CHECK(!rdma_ack_cm_event(event));
	create_qp(id);
	CHECK(!rdma_accept(id, NULL));
	event = event_of(channel, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(event->id == id && !rdma_ack_cm_event(event));
	return id;
}

static void ended(struct rdma_event_channel *channel, struct rdma_cm_id *id)
{
	struct rdma_cm_event *event = event_of(channel, RDMA_CM_EVENT_DISCONNECTED);
	CHECK(event->id == id && !rdma_ack_cm_event(event));
	leave(id);
}

int main(int argc, char **argv)
{
	if (argc > 1)
		rounds = atoi(argv[1]);
	CHECK(inet_pton(AF_INET, getenv("RDMUX_DEVICES"), &address.sin_addr) == 1);
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *listener;
	CHECK(channel && !rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(listener, (struct sockaddr *)&address) && !rdma_listen(listener, 8));
	address.sin_port = rdma_get_src_port(listener);
	pthread_t peer;
	CHECK(!pthread_create(&peer, NULL, client, NULL));
	for (int round = 0; round < rounds; round++) {
		struct rdma_cm_id *id[PER_ROUND];
		for (int i = 0; i < PER_ROUND; i++) {
			if (i > 1)
				ended(channel, id[i - 2]);
			id[i] = accept_next(channel);
		}
		for (int i = PER_ROUND - 2; i < PER_ROUND; i++)
			ended(channel, id[i]);
	}
	CHECK(!pthread_join(peer, NULL));
	CHECK(!rdma_destroy_id(listener));
	rdma_destroy_event_channel(channel);
	return 0;
}
