/* librpma, which is linked with the system's rdma-core: writes, reads, flushes and messages to a peer in another thread.
 * needs: -lrpma librpma.h */
#include "check.h"
#include <librpma.h>
#include <pthread.h>

#define ADDRESS (getenv("RDMUX_DEVICES"))
#define PORT "7471"
enum { BYTES = 1 << 16 };

#define RPMA(call) \
	do { \
		int error = (call); \
		if (error) { \
			fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, rpma_err_2str(error)); \
			exit(1); \
		} \
	} while (0)

static char server_memory[BYTES] __attribute__((aligned(4096))), client_memory[BYTES] __attribute__((aligned(4096)));

static struct rpma_peer *peer_of(enum rpma_util_ibv_context_type where)
{
	struct ibv_context *context;
	struct rpma_peer *peer;
	RPMA(rpma_utils_get_ibv_context(ADDRESS, where, &context));
	int pages_on_demand = 0;
	RPMA(rpma_utils_ibv_context_is_odp_capable(context, &pages_on_demand));
	CHECK(pages_on_demand);
	RPMA(rpma_peer_new(context, &peer));
	return peer;
}

static void expect(struct rpma_conn *conn, enum rpma_conn_event wanted)
{
	enum rpma_conn_event event;
	RPMA(rpma_conn_next_event(conn, &event));
	CHECK(event == wanted);
}

static struct ibv_wc complete(struct rpma_conn *conn)
{
	struct rpma_cq *cq;
	struct ibv_wc wc;
	RPMA(rpma_conn_get_cq(conn, &cq));
	RPMA(rpma_cq_wait(cq));
	RPMA(rpma_cq_get_wc(cq, 1, &wc, NULL));
	CHECK(wc.status == IBV_WC_SUCCESS);
	return wc;
}

static void *serve(void *ep_of)
{
	struct rpma_ep *ep = ep_of;
	struct rpma_peer *peer = peer_of(RPMA_UTIL_IBV_CONTEXT_LOCAL);
	struct rpma_mr_local *mr;
	struct rpma_conn_req *request;
	struct rpma_conn *conn;
	char descriptor[64];
	size_t size;
	RPMA(rpma_ep_listen(peer, ADDRESS, PORT, &ep));
	*(struct rpma_ep **)ep_of = ep;
	int usage = RPMA_MR_USAGE_READ_SRC | RPMA_MR_USAGE_WRITE_DST | RPMA_MR_USAGE_RECV | RPMA_MR_USAGE_FLUSH_TYPE_VISIBILITY;
	RPMA(rpma_mr_reg(peer, server_memory, BYTES, usage, &mr));
	RPMA(rpma_mr_get_descriptor_size(mr, &size));
	CHECK(size <= sizeof descriptor);
	RPMA(rpma_mr_get_descriptor(mr, descriptor));
	RPMA(rpma_ep_next_conn_req(ep, NULL, &request));
	RPMA(rpma_conn_req_recv(request, mr, BYTES / 2, 64, NULL));
	struct rpma_conn_private_data data = {descriptor, size};
	RPMA(rpma_conn_req_connect(&request, &data, &conn));
	expect(conn, RPMA_CONN_ESTABLISHED);
	struct ibv_wc wc = complete(conn);
	CHECK(wc.byte_len == 5 && !memcmp(server_memory + BYTES / 2, "hello", 5));
	CHECK(!memcmp(server_memory, "written by librpma", 19) && !memcmp(server_memory + 64, "atomical", 8));
	expect(conn, RPMA_CONN_CLOSED);
	RPMA(rpma_conn_disconnect(conn));
	RPMA(rpma_conn_delete(&conn));
	RPMA(rpma_mr_dereg(&mr));
	RPMA(rpma_ep_shutdown(&ep));
	RPMA(rpma_peer_delete(&peer));
	return NULL;
}

int main(void)
{
	struct rpma_ep *ep = NULL;
	pthread_t server;
	CHECK(!pthread_create(&server, NULL, serve, &ep));
	struct rpma_peer *peer = peer_of(RPMA_UTIL_IBV_CONTEXT_REMOTE);
	struct rpma_mr_local *mr;
	struct rpma_mr_remote *remote;
	struct rpma_conn *conn;
	struct rpma_conn_private_data data;
	int usage = RPMA_MR_USAGE_READ_DST | RPMA_MR_USAGE_WRITE_SRC | RPMA_MR_USAGE_SEND | RPMA_MR_USAGE_FLUSH_TYPE_VISIBILITY;
	RPMA(rpma_mr_reg(peer, client_memory, BYTES, usage, &mr));
	/* Nothing tells when the other thread listens. */
	for (double end = now() + LONG;;) {
		struct rpma_conn_req *request;
		enum rpma_conn_event event;
		RPMA(rpma_conn_req_new(peer, ADDRESS, PORT, NULL, &request));
		RPMA(rpma_conn_req_connect(&request, NULL, &conn));
		RPMA(rpma_conn_next_event(conn, &event));
		if (event == RPMA_CONN_ESTABLISHED)
			break;
		CHECK(now() < end);
		RPMA(rpma_conn_delete(&conn));
	}
	RPMA(rpma_conn_get_private_data(conn, &data));
	RPMA(rpma_mr_remote_from_descriptor(data.ptr, data.len, &remote));
	strcpy(client_memory, "written by librpma");
	RPMA(rpma_write(conn, remote, 0, mr, 0, 64, RPMA_F_COMPLETION_ALWAYS, NULL));
	CHECK(complete(conn).opcode == IBV_WC_RDMA_WRITE);
	RPMA(rpma_atomic_write(conn, remote, 64, "atomical", RPMA_F_COMPLETION_ALWAYS, NULL));
	complete(conn);
	RPMA(rpma_flush(conn, remote, 0, 128, RPMA_FLUSH_TYPE_VISIBILITY, RPMA_F_COMPLETION_ALWAYS, NULL));
	complete(conn);
	RPMA(rpma_read(conn, mr, 4096, remote, 0, 128, RPMA_F_COMPLETION_ALWAYS, NULL));
	CHECK(complete(conn).opcode == IBV_WC_RDMA_READ);
	CHECK(!memcmp(client_memory + 4096, "written by librpma", 19) && !memcmp(client_memory + 4096 + 64, "atomical", 8));
	memcpy(client_memory, "hello", 5);
	RPMA(rpma_send(conn, mr, 0, 5, RPMA_F_COMPLETION_ALWAYS, NULL));
	complete(conn);
	RPMA(rpma_conn_disconnect(conn));
	expect(conn, RPMA_CONN_CLOSED);
	RPMA(rpma_mr_remote_delete(&remote));
	RPMA(rpma_conn_delete(&conn));
	RPMA(rpma_mr_dereg(&mr));
	RPMA(rpma_peer_delete(&peer));
	CHECK(!pthread_join(server, NULL));
	return 0;
}
