/* Children of a program that has connections by rdma_cm: they destroy only their own copies, and the connection lives on;
   and a child that connects has its own connection. */
#include "check.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <rdma/rdma_cma.h>
#include <sys/wait.h>
#include <unistd.h>

static struct rdma_event_channel *channel;
static struct rdma_cm_id *listening, *ids[2];
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static uint32_t words[2] = {1, 0};

static void give_pair(struct rdma_cm_id *id)
{
	if (!pd) {
		CHECK(pd = ibv_alloc_pd(id->verbs));
		CHECK(cq = ibv_create_cq(id->verbs, 64, NULL, NULL, 0));
		CHECK(mr = ibv_reg_mr(pd, words, sizeof(words), IBV_ACCESS_LOCAL_WRITE));
	}
	struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .cap = {32, 32, 1, 1, 0}, .qp_type = IBV_QPT_RC};
	CHECK(!rdma_create_qp(id, pd, &init));
}

/* Connects both ends, in one process. */
static void meet(void)
{
	struct rdma_addrinfo hints = {.ai_port_space = RDMA_PS_TCP}, *found;
	char address[INET_ADDRSTRLEN];
	struct ibv_context **devices = rdma_get_devices(NULL);
	union ibv_gid gid;
	CHECK(devices && devices[0] && !ibv_query_gid(devices[0], 1, 0, &gid));
	CHECK(inet_ntop(AF_INET, &gid.raw[12], address, sizeof(address)));
	rdma_free_devices(devices);

	CHECK((channel = rdma_create_event_channel()));
	CHECK(!rdma_create_id(channel, &listening, NULL, RDMA_PS_TCP) && !rdma_create_id(channel, &ids[0], NULL, RDMA_PS_TCP));
	struct sockaddr_in at = {.sin_family = AF_INET};
	CHECK(inet_pton(AF_INET, address, &at.sin_addr) == 1);
	CHECK(!rdma_bind_addr(listening, (struct sockaddr *)&at) && !rdma_listen(listening, 4));
	char port[8];
	snprintf(port, sizeof(port), "%u", ntohs(rdma_get_src_port(listening)));
	CHECK(!rdma_getaddrinfo(address, port, &hints, &found));
	CHECK(!rdma_resolve_addr(ids[0], NULL, found->ai_dst_addr, 2000));
	rdma_freeaddrinfo(found);
	for (int established = 0; established < 2;) {
		struct rdma_cm_event *event;
		struct rdma_conn_param param = {.retry_count = 7, .rnr_retry_count = 7};
		CHECK(!rdma_get_cm_event(channel, &event) && !event->status);
		switch (event->event) {
		case RDMA_CM_EVENT_ADDR_RESOLVED:
			CHECK(!rdma_resolve_route(ids[0], 2000));
			break;
		case RDMA_CM_EVENT_ROUTE_RESOLVED:
			give_pair(ids[0]);
			CHECK(!rdma_connect(ids[0], &param));
			break;
		case RDMA_CM_EVENT_CONNECT_REQUEST:
			ids[1] = event->id;
			give_pair(ids[1]);
			CHECK(!rdma_accept(ids[1], &param));
			break;
		default:
			CHECK(event->event == RDMA_CM_EVENT_ESTABLISHED);
			established++;
		}
		CHECK(!rdma_ack_cm_event(event));
	}
	CHECK(!fcntl(channel->fd, F_SETFL, O_NONBLOCK));
}

static void use(int rounds)
{
	struct ibv_sge from = {(uintptr_t)&words[0], 4, mr->lkey}, to = {(uintptr_t)&words[1], 4, mr->lkey};
	struct ibv_qp *qp[2] = {ids[0]->qp, ids[1]->qp};
	for (int i = 0; i < rounds; i++) {
		words[0] = i + 1;
		exchange(qp, from, to, i);
		completion(cq);
		completion(cq);
		CHECK(words[1] == (uint32_t)i + 1);
	}
	struct rdma_cm_event *event;
	CHECK(rdma_get_cm_event(channel, &event) == -1 && errno == EAGAIN);
}

static void end_all(void)
{
	for (int i = 0; i < 2; i++) {
		rdma_destroy_qp(ids[i]);
		CHECK(!rdma_destroy_id(ids[i]));
	}
	CHECK(!rdma_destroy_id(listening) && !ibv_destroy_cq(cq) && !ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd));
	rdma_destroy_event_channel(channel);
}

int main(void)
{
	meet();
	use(5);
	for (int i = 0; i < 4; i++) {
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			alarm(LONG);
			if (i == 1)
				end_all();
			if (i == 2)
				rdma_disconnect(ids[0]);
			if (i == 3) {
				/* This child makes its own connection: it needs nothing of the parent's. */
				pd = NULL;
				meet();
				use(20);
				end_all();
			}
			exit(0);
		}
		use(20);
		int status;
		CHECK(waitpid(child, &status, 0) == child && status == 0);
		use(200);
	}
	end_all();
	return 0;
}
