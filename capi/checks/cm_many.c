/* Many connections, both ends in one process: the library needs as many threads for them as for one, and opens no descriptor for an id. Where
 * it makes the completion queues of an id, each has a channel with a descriptor, as with the system's library.
 *
 *   cm_many ROUNDS [CONNECTIONS]
 */
#include "cm_check.h"
#include <dirent.h>

static struct rdma_event_channel *listens, *connects;
static struct rdma_cm_id *listener;
static struct ibv_cq *cq;

/* Returns the number of entries of a directory. */
static int entries(const char *path)
{
	DIR *directory = opendir(path);
	struct dirent *entry;
	int found = 0;
	CHECK(directory);
	while ((entry = readdir(directory)))
		found += entry->d_name[0] != '.';
	CHECK(!closedir(directory));
	return found;
}

struct count {
	int threads, descriptors;
};

static struct count count(void)
{
	/* The descriptor of the directory itself counts each time. */
	return (struct count){entries("/proc/self/task"), entries("/proc/self/fd")};
}

static void give_qp(struct rdma_cm_id *id, int own_queues)
{
	struct ibv_qp_init_attr init = {.cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
	if (!own_queues) {
		if (!cq)
			CHECK(cq = ibv_create_cq(id->verbs, 64, NULL, NULL, 0));
		init.send_cq = init.recv_cq = cq;
	}
	CHECK(!rdma_create_qp(id, NULL, &init));
}

static struct rdma_cm_id *requested(void)
{
	struct rdma_cm_event *event = event_of(listens, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *id = event->id;
	CHECK(!rdma_ack_cm_event(event));
	return id;
}

static struct rdma_conn_param param = {.retry_count = 7, .rnr_retry_count = 7};

/* Makes an id that asks for a connection, and the one that is asked. */
static void ask(struct rdma_cm_id *ends[2], int own_queues)
{
	CHECK(!rdma_create_id(connects, &ends[0], NULL, RDMA_PS_TCP));
	CHECK(!rdma_resolve_addr(ends[0], NULL, rdma_get_local_addr(listener), 2000));
	expect(connects, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(!rdma_resolve_route(ends[0], 2000));
	expect(connects, RDMA_CM_EVENT_ROUTE_RESOLVED);
	give_qp(ends[0], own_queues);
	CHECK(!rdma_connect(ends[0], &param));
	ends[1] = requested();
	give_qp(ends[1], own_queues);
}

static void open_both(struct rdma_cm_id *ends[2], int own_queues)
{
	ask(ends, own_queues);
	CHECK(!rdma_accept(ends[1], &param));
	expect(connects, RDMA_CM_EVENT_ESTABLISHED);
	expect(listens, RDMA_CM_EVENT_ESTABLISHED);
}

/* The events of connections that end come in any order. */
static void expect_all(struct rdma_event_channel *channel, int connections)
{
	int ended = 0, left = 0;
	while (ended < connections || left < connections) {
		struct rdma_cm_event *event;
		CHECK(!rdma_get_cm_event(channel, &event));
		ended += event->event == RDMA_CM_EVENT_DISCONNECTED;
		left += event->event == RDMA_CM_EVENT_TIMEWAIT_EXIT;
		CHECK(event->event == RDMA_CM_EVENT_DISCONNECTED || event->event == RDMA_CM_EVENT_TIMEWAIT_EXIT);
		CHECK(!rdma_ack_cm_event(event));
	}
}

static void many(int connections, int own_queues)
{
	struct rdma_cm_id *(*ends)[2] = calloc(connections, sizeof(*ends));
	CHECK(ends);
	open_both(ends[0], own_queues);
	struct count one = count();
	for (int i = 1; i < connections; i++)
		open_both(ends[i], own_queues);
	int channels = own_queues ? 4 * (connections - 1) : 0;
	struct count all = count();
	printf("%d connections, %s queues: %d threads and %d descriptors more than one\n", connections, own_queues ? "own" : "shared", all.threads - one.threads, all.descriptors - one.descriptors);
	/* The device opens some for a moment, when it meets another one. */
	for (double end = now() + LONG; all.threads > one.threads || all.descriptors > one.descriptors + channels; all = count())
		CHECK(now() < end);
	for (int i = 0; i < connections; i++)
		CHECK(!rdma_disconnect(ends[i][0]));
	expect_all(connects, connections);
	expect_all(listens, connections);
	for (int i = 0; i < connections; i++)
		for (int end = 0; end < 2; end++)
			leave(ends[i][end]);
	free(ends);
}

/* Ids that are destroyed while one waits for the other: either end may go first. Nothing of them stays. */
static void abandoned(int connections)
{
	struct rdma_cm_id *ends[2];
	struct count before = count();
	for (int i = 0; i < connections; i++) {
		ask(ends, 0);
		leave(ends[i % 2]);
		leave(ends[!(i % 2)]);
	}
	for (double end = now() + LONG; count().threads > before.threads || count().descriptors > before.descriptors;)
		CHECK(now() < end);
}

int main(int argc, char **argv)
{
	int connections = argc > 2 ? atoi(argv[2]) : 50;
	struct ibv_context *context = open_first();
	union ibv_gid gid;
	CHECK(!ibv_query_gid(context, 1, 0, &gid));
	memcpy(&address.sin_addr, gid.raw + 12, 4);
	CHECK((listens = rdma_create_event_channel()) && (connects = rdma_create_event_channel()));
	CHECK(!rdma_create_id(listens, &listener, NULL, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(listener, (struct sockaddr *)&address) && !rdma_listen(listener, 0));
	for (int own_queues = 0; own_queues < 2; own_queues++)
		many(connections, own_queues);
	abandoned(connections);
	CHECK(!ibv_destroy_cq(cq));
	leave(listener);
	rdma_destroy_event_channel(connects);
	rdma_destroy_event_channel(listens);
	CHECK(!ibv_close_device(context));
	return 0;
}
