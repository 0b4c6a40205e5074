/* rdma_cm: calls that packaged programs seldom make, and channels from which many threads take events while ids connect,
   change their channel, and are destroyed. */
#include "cm_check.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_verbs.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <unistd.h>

enum { TAKERS = 3, CLIENTS = 3 };

static int rounds = 60;
static struct rdma_event_channel *served;
static atomic_int clients_left = CLIENTS;
/* Numbers of ids made for requests, and of those that are destroyed again. */
static atomic_int asked, gone;

/* Checks that a call fails with this errno. */
#define FAILS(call, number) CHECK((call) == -1 && errno == (number))

/* Brings up a queue pair with the attributes of its connection. */
static void bring_up_for(struct rdma_cm_id *id, struct ibv_qp *qp)
{
	for (int state = IBV_QPS_INIT; state <= IBV_QPS_RTS; state++) {
		struct ibv_qp_attr attr = {.qp_state = state};
		int mask;
		CHECK(!rdma_init_qp_attr(id, &attr, &mask));
		CHECK(!ibv_modify_qp(qp, &attr, mask));
	}
}

/* More bytes than an answer has room for. */
static char much[255];

/* Takes events of the server's ids; another thread may still hold an earlier event of an id that goes. */
static void *take(void *unused)
{
	double end = now() + 3 * LONG;
	while (atomic_load(&clients_left) || atomic_load(&asked) != atomic_load(&gone)) {
		struct pollfd wait = {.fd = served->fd, .events = POLLIN};
		CHECK(poll(&wait, 1, 50) >= 0 && now() < end);
		struct rdma_cm_event *event;
		if (rdma_get_cm_event(served, &event)) {
			CHECK(errno == EAGAIN);
			continue;
		}
		struct rdma_cm_id *id = event->id;
		struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1};
		switch (event->event) {
		case RDMA_CM_EVENT_CONNECT_REQUEST:
			atomic_fetch_add(&asked, 1);
			CHECK(event->listen_id && event->param.conn.qp_num);
			CHECK(rdma_get_dst_port(id) && ((struct sockaddr_in *)rdma_get_peer_addr(id))->sin_addr.s_addr == address.sin_addr.s_addr);
			create_qp(id);
			if (event->param.conn.private_data && *(char *)event->param.conn.private_data == 'r') {
				CHECK(!rdma_reject(id, "no", 2));
				/* The event belongs to the listening id. */
				leave(id);
				atomic_fetch_add(&gone, 1);
				CHECK(!rdma_ack_cm_event(event));
				break;
			}
			/* An answer that cannot be sent leaves the request as it was. */
			param.private_data = much, param.private_data_len = sizeof(much);
			FAILS(rdma_accept(id, &param), EINVAL);
			param.private_data_len = 0;
			if (rdma_accept(id, &param)) {
				/* The client has left. */
				leave(id);
				atomic_fetch_add(&gone, 1);
			}
			CHECK(!rdma_ack_cm_event(event));
			break;
		case RDMA_CM_EVENT_ESTABLISHED:
		/* Another thread has the event of the end, and has not destroyed the id yet. */
		case RDMA_CM_EVENT_TIMEWAIT_EXIT:
			CHECK(!rdma_ack_cm_event(event));
			break;
		case RDMA_CM_EVENT_DISCONNECTED:
			CHECK(!rdma_ack_cm_event(event));
			leave(id);
			atomic_fetch_add(&gone, 1);
			break;
		default:
			fprintf(stderr, "%s\n", rdma_event_str(event->event));
			CHECK(0);
		}
	}
	return unused;
}

static void *client(void *unused)
{
	struct rdma_event_channel *first = rdma_create_event_channel(), *second = rdma_create_event_channel();
	CHECK(first && second);
	for (int i = 0; i < rounds; i++) {
		struct rdma_cm_id *id;
		CHECK(!rdma_create_id(first, &id, NULL, RDMA_PS_TCP));
		CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000));
		expect(first, RDMA_CM_EVENT_ADDR_RESOLVED);
		CHECK(id->verbs && id->pd && rdma_get_src_port(id));
		CHECK(!rdma_resolve_route(id, 1000));
		/* The event is on its way, and arrives at the channel that the id has then. */
		CHECK(!rdma_migrate_id(id, second));
		expect(second, RDMA_CM_EVENT_ROUTE_RESOLVED);
		struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1, .retry_count = 7, .rnr_retry_count = 7};
		if (i % 4 == 0) {
			/* A queue pair that the program brings up itself. */
			struct ibv_cq *cq = ibv_create_cq(id->verbs, 8, NULL, NULL, 0);
			struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
			struct ibv_qp *qp = ibv_create_qp(id->pd, &init);
			CHECK(qp);
			param.qp_num = qp->qp_num;
			FAILS(rdma_establish(id), EINVAL);
			CHECK(!rdma_connect(id, &param));
			expect(second, RDMA_CM_EVENT_CONNECT_RESPONSE);
			bring_up_for(id, qp);
			CHECK(!rdma_establish(id) && qp->state == IBV_QPS_RTS);
			CHECK(!rdma_disconnect(id));
			expect(second, RDMA_CM_EVENT_DISCONNECTED);
			CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq));
		} else if (i % 4 == 1) {
			/* Destroys the id without waiting. */
			create_qp(id);
			CHECK(!rdma_connect(id, &param));
		} else if (i % 4 == 2) {
			create_qp(id);
			param.private_data = "r";
			param.private_data_len = 1;
			CHECK(!rdma_connect(id, &param));
			struct rdma_cm_event *event;
			CHECK(!rdma_get_cm_event(second, &event));
			CHECK(event->event == RDMA_CM_EVENT_REJECTED && event->status == 28);
			CHECK(event->param.conn.private_data_len >= 2 && !memcmp(event->param.conn.private_data, "no", 2));
			CHECK(!rdma_ack_cm_event(event));
		} else {
			create_qp(id);
			CHECK(!rdma_connect(id, &param));
			expect(second, RDMA_CM_EVENT_ESTABLISHED);
			CHECK(!rdma_disconnect(id));
			expect(second, RDMA_CM_EVENT_DISCONNECTED);
			CHECK(!rdma_disconnect(id));
		}
		leave(id);
	}
	rdma_destroy_event_channel(first);
	rdma_destroy_event_channel(second);
	atomic_fetch_sub(&clients_left, 1);
	return unused;
}

static void race(void)
{
	CHECK(served = rdma_create_event_channel());
	struct rdma_cm_id *listener;
	CHECK(!rdma_create_id(served, &listener, NULL, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(listener, (struct sockaddr *)&address) && !rdma_listen(listener, 64));
	address.sin_port = rdma_get_src_port(listener);
	CHECK(address.sin_port);
	CHECK(!fcntl(served->fd, F_SETFL, O_NONBLOCK));
	pthread_t threads[TAKERS + CLIENTS];
	for (int i = 0; i < TAKERS + CLIENTS; i++)
		CHECK(!pthread_create(&threads[i], NULL, i < TAKERS ? take : client, NULL));
	for (int i = 0; i < TAKERS + CLIENTS; i++)
		CHECK(!pthread_join(threads[i], NULL));
	CHECK(!rdma_destroy_id(listener));
	rdma_destroy_event_channel(served);
	address.sin_port = 0;
}

static void options(void)
{
	struct rdma_cm_id *id;
	FAILS(rdma_create_id(NULL, &id, NULL, RDMA_PS_IPOIB), EOPNOTSUPP);
	CHECK(!rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP));
	CHECK(id->channel && id->qp_type == IBV_QPT_RC);
	FAILS(rdma_migrate_id(id, NULL), EINVAL);
	uint8_t byte = 40;
	int on = 1;
	CHECK(!rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &byte, sizeof byte));
	FAILS(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &on, sizeof on), EINVAL);
	FAILS(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &byte, sizeof byte), EINVAL);
	CHECK(!rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &on, sizeof on));
	CHECK(!rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &on, sizeof on));
	FAILS(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &byte, sizeof byte), EINVAL);
	FAILS(rdma_set_option(id, RDMA_OPTION_ID, 77, &on, sizeof on), ENOSYS);
	FAILS(rdma_set_option(id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, &on, 72), EINVAL);
	/* A loopback address without a device stands for the first device's address. */
	struct sockaddr_in loopback = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(0x7f634d4d)};
	CHECK(!rdma_bind_addr(id, (struct sockaddr *)&loopback));
	CHECK(((struct sockaddr_in *)rdma_get_local_addr(id))->sin_addr.s_addr == address.sin_addr.s_addr && id->verbs);
	struct sockaddr_storage ib = {.ss_family = 27 /* AF_IB */};
	FAILS(rdma_bind_addr(id, (struct sockaddr *)&ib), EAFNOSUPPORT);
	struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
	FAILS(rdma_resolve_addr(id, (struct sockaddr *)&address, (struct sockaddr *)&v6, 100), EINVAL);
	/* Only datagram ids have groups. */
	struct sockaddr_in group = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(0xef010101)};
	FAILS(rdma_join_multicast(id, (struct sockaddr *)&group, NULL), EINVAL);
	FAILS(rdma_leave_multicast(id, (struct sockaddr *)&group), EADDRNOTAVAIL);
	CHECK(!rdma_destroy_id(id));
	/* Programs that go on after an error pass ids that are none. */
	struct rdma_cm_id *none = (struct rdma_cm_id *)((char *)&group + 1);
	FAILS(rdma_bind_addr(none, (struct sockaddr *)&address), EINVAL);
	FAILS(rdma_resolve_addr(none, NULL, (struct sockaddr *)&address, 100), EINVAL);
	FAILS(rdma_resolve_route(none, 100), EINVAL);
	FAILS(rdma_destroy_id(none), EINVAL);
	struct rdma_event_channel *channel = rdma_create_event_channel();
	rdma_destroy_event_channel(channel);
	rdma_destroy_event_channel(channel);
}

static void names(void)
{
	struct rdma_addrinfo *found, hints = {.ai_flags = RAI_NUMERICHOST, .ai_port_space = RDMA_PS_UDP};
	FAILS(rdma_getaddrinfo(NULL, NULL, NULL, &found), EINVAL);
	FAILS(rdma_getaddrinfo("localhost", "7174", &hints, &found), ENODATA);
	CHECK(!rdma_getaddrinfo("127.0.0.1", "7174", &hints, &found));
	CHECK(found->ai_family == AF_INET && found->ai_qp_type == IBV_QPT_UD && found->ai_port_space == RDMA_PS_UDP);
	CHECK(found->ai_dst_len == sizeof address && !found->ai_src_len && !found->ai_src_addr);
	CHECK(((struct sockaddr_in *)found->ai_dst_addr)->sin_port == htons(7174));
	rdma_freeaddrinfo(found);
	hints = (struct rdma_addrinfo){.ai_flags = RAI_PASSIVE, .ai_family = AF_INET6, .ai_qp_type = IBV_QPT_RC};
	CHECK(!rdma_getaddrinfo(NULL, "7174", &hints, &found));
	CHECK(found->ai_family == AF_INET6 && found->ai_port_space == RDMA_PS_TCP && found->ai_src_len == sizeof(struct sockaddr_in6));
	CHECK(!found->ai_dst_addr);
	rdma_freeaddrinfo(found);
}

/* The shared receive queue of an id serves its queue pair, and a group's datagram reaches its member. */
static void group(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *id;
	CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_UDP));
	CHECK(!rdma_bind_addr(id, (struct sockaddr *)&address));
	struct ibv_srq_init_attr queue = {.attr = {.max_wr = 4, .max_sge = 1}};
	CHECK(!rdma_create_srq(id, NULL, &queue) && id->srq);
	struct ibv_qp_init_attr init = {.cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_UD};
	CHECK(!rdma_create_qp(id, NULL, &init) && id->qp->srq == id->srq);
	static char bytes[2][64];
	struct ibv_mr *mr = rdma_reg_msgs(id, bytes, sizeof bytes);
	CHECK(mr);
	struct ibv_sge sge = {.addr = (uintptr_t)bytes[0], .length = 64, .lkey = mr->lkey};
	struct ibv_recv_wr receive = {.wr_id = 1, .sg_list = &sge, .num_sge = 1}, *bad;
	CHECK(!ibv_post_srq_recv(id->srq, &receive, &bad));
	struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(0xef010909)};
	CHECK(!rdma_join_multicast(id, (struct sockaddr *)&to, &sge));
	struct rdma_cm_event *event = event_of(channel, RDMA_CM_EVENT_MULTICAST_JOIN);
	CHECK(event->param.ud.private_data == &sge && event->param.ud.qp_num == 0xffffff);
	struct ibv_ah *ah = ibv_create_ah(id->pd, &event->param.ud.ah_attr);
	CHECK(ah);
	strcpy(bytes[1], "to all");
	CHECK(!rdma_post_ud_send(id, NULL, bytes[1], 7, mr, IBV_SEND_SIGNALED, ah, event->param.ud.qp_num));
	CHECK(!rdma_ack_cm_event(event));
	struct ibv_wc wc;
	CHECK(rdma_get_send_comp(id, &wc) == 1 && !wc.status);
	CHECK(rdma_get_recv_comp(id, &wc) == 1 && !wc.status && wc.byte_len == 47 && !strcmp(bytes[0] + 40, "to all"));
	CHECK(!rdma_leave_multicast(id, (struct sockaddr *)&to));
	FAILS(rdma_leave_multicast(id, (struct sockaddr *)&to), EADDRNOTAVAIL);
	CHECK(!ibv_destroy_ah(ah) && !rdma_dereg_mr(mr));
	rdma_destroy_qp(id);
	rdma_destroy_srq(id);
	CHECK(!id->srq && !rdma_destroy_id(id));
	rdma_destroy_event_channel(channel);
}

/* Makes a datagram endpoint at the device's address and a port, or one that resolves the peer that serves there. */
static struct rdma_cm_id *endpoint(int passive, const char *port)
{
	char host[INET_ADDRSTRLEN];
	CHECK(inet_ntop(AF_INET, &address.sin_addr, host, sizeof host));
	struct rdma_addrinfo *found, hints = {.ai_flags = passive ? RAI_PASSIVE : 0, .ai_port_space = RDMA_PS_UDP};
	CHECK(!rdma_getaddrinfo(host, port, &hints, &found));
	struct ibv_qp_init_attr init = {.cap = {4, 4, 1, 1, 0}};
	struct rdma_cm_id *id;
	CHECK(!rdma_create_ep(&id, found, NULL, &init));
	rdma_freeaddrinfo(found);
	CHECK(id->qp_type == IBV_QPT_UD && (id->qp == NULL) == passive);
	return id;
}

/* Port of the datagram client. */
static atomic_int asks_from;

static void *serve_datagrams(void *listener)
{
	struct rdma_cm_id *id;
	CHECK(!rdma_get_request(listener, &id) && id->qp);
	CHECK(rdma_get_dst_port(id) == atomic_load(&asks_from));
	CHECK(id->event->param.ud.private_data && !strcmp(id->event->param.ud.private_data, "who"));
	struct rdma_conn_param param = {.private_data = much, .private_data_len = sizeof(much)};
	FAILS(rdma_accept(id, &param), EINVAL);
	param.private_data = "me", param.private_data_len = 3;
	CHECK(!rdma_accept(id, &param));
	rdma_destroy_ep(id);
	CHECK(!rdma_get_request(listener, &id) && !rdma_reject(id, NULL, 0));
	rdma_destroy_ep(id);
	return NULL;
}

/* Datagrams without a channel: the client learns which queue pair serves, or that none does. */
static void datagrams(void)
{
	struct rdma_cm_id *listener = endpoint(1, NULL), *id;
	CHECK(!rdma_listen(listener, 0));
	char port[8];
	snprintf(port, sizeof port, "%d", ntohs(rdma_get_src_port(listener)));
	pthread_t thread;
	CHECK(!pthread_create(&thread, NULL, serve_datagrams, listener));
	id = endpoint(0, port);
	CHECK(rdma_get_src_port(id));
	atomic_store(&asks_from, rdma_get_src_port(id));
	struct rdma_conn_param param = {.private_data = "who", .private_data_len = 4};
	CHECK(!rdma_connect(id, &param) && id->event->event == RDMA_CM_EVENT_ESTABLISHED);
	struct rdma_ud_param *told = &id->event->param.ud;
	CHECK(told->qkey == RDMA_UDP_QKEY && told->qp_num && told->ah_attr.is_global && !strcmp(told->private_data, "me"));
	rdma_destroy_ep(id);
	id = endpoint(0, port);
	FAILS(rdma_connect(id, &param), ECONNREFUSED);
	rdma_destroy_ep(id);
	CHECK(!pthread_join(thread, NULL));
	rdma_destroy_ep(listener);
}

/* Asks for a connection, whose peer retries so often on RNR NAK. */
static struct rdma_cm_id *ask(struct rdma_event_channel *channel, uint8_t rnr_retry)
{
	struct rdma_cm_id *id;
	struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1, .rnr_retry_count = rnr_retry};
	CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000));
	expect(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(!rdma_resolve_route(id, 1000));
	expect(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
	create_qp(id);
	CHECK(!rdma_connect(id, &param));
	return id;
}

static void wait_for_event(struct rdma_event_channel *channel)
{
	struct pollfd wait = {.fd = channel->fd, .events = POLLIN};
	CHECK(poll(&wait, 1, LONG * 1000) == 1);
}

/* No more requests wait than a listener allows. */
static void backlog(void)
{
	struct rdma_event_channel *there = rdma_create_event_channel(), *here = rdma_create_event_channel();
	struct rdma_cm_id *listener, *first, *second;
	CHECK(!rdma_create_id(there, &listener, NULL, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(listener, (struct sockaddr *)&address));
	CHECK(rdma_get_src_port(listener) && !rdma_listen(listener, 1));
	address.sin_port = rdma_get_src_port(listener);
	first = ask(here, 0);
	wait_for_event(there);
	second = ask(here, 0);
	struct rdma_cm_event *event;
	CHECK(!rdma_get_cm_event(here, &event) && event->id == second && event->event == RDMA_CM_EVENT_REJECTED);
	CHECK(!rdma_ack_cm_event(event));
	leave(second);
	/* The first request is refused when the listener is destroyed. */
	CHECK(!rdma_destroy_id(listener));
	CHECK(!rdma_get_cm_event(here, &event) && event->id == first && event->event == RDMA_CM_EVENT_REJECTED);
	CHECK(!rdma_ack_cm_event(event));
	leave(first);
	rdma_destroy_event_channel(here);
	rdma_destroy_event_channel(there);
	address.sin_port = 0;
}

/* Ends a part of this check: nobody listens any more, and the next listener takes another port. */
static void over(struct rdma_cm_id *listener, struct rdma_event_channel *there, struct rdma_event_channel *here)
{
	CHECK(!rdma_destroy_id(listener));
	rdma_destroy_event_channel(here);
	rdma_destroy_event_channel(there);
	address.sin_port = 0;
}

/* Checks that the channel gets no further event. */
static void nothing(struct rdma_event_channel *channel)
{
	struct rdma_cm_event *event;
	CHECK(!fcntl(channel->fd, F_SETFL, O_NONBLOCK));
	FAILS(rdma_get_cm_event(channel, &event), EAGAIN);
	CHECK(!fcntl(channel->fd, F_SETFL, 0));
}

static struct rdma_cm_id *listening(struct rdma_event_channel *channel)
{
	struct rdma_cm_id *listener;
	address.sin_port = 0;
	CHECK(!rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(listener, (struct sockaddr *)&address));
	address.sin_port = rdma_get_src_port(listener);
	return listener;
}

/* Takes the request of an id, and accepts it. */
static struct rdma_cm_id *answer(struct rdma_event_channel *channel, struct rdma_cm_id *of)
{
	struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1};
	for (;;) {
		struct rdma_cm_event *event = event_of(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
		struct rdma_cm_id *id = event->id;
		CHECK(!rdma_ack_cm_event(event));
		if (rdma_get_dst_port(id) == rdma_get_src_port(of)) {
			create_qp(id);
			CHECK(!rdma_accept(id, &param));
			return id;
		}
		leave(id);
	}
}

/* Ends a connection at one end; both ends get an event. */
static void end(struct rdma_cm_id *id, struct rdma_cm_id *other)
{
	expect(id->channel, RDMA_CM_EVENT_ESTABLISHED);
	expect(other->channel, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(!rdma_disconnect(id));
	expect(id->channel, RDMA_CM_EVENT_DISCONNECTED);
	expect(other->channel, RDMA_CM_EVENT_DISCONNECTED);
}

/* A program that asks for a few RNR retries has seconds to post its receive, as with the RDMA CM of Linux. */
static void late_receive(void)
{
	struct rdma_event_channel *there = rdma_create_event_channel(), *here = rdma_create_event_channel();
	struct rdma_cm_id *listener = listening(there);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	CHECK(!rdma_listen(listener, 0));
	struct rdma_cm_id *id = ask(here, 2), *sender = answer(there, id);
	expect(here, RDMA_CM_EVENT_ESTABLISHED);
	expect(there, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(!ibv_query_qp(sender->qp, &attr, IBV_QP_RNR_RETRY, &init) && attr.rnr_retry == 2);
	CHECK(!rdma_post_sendv(sender, NULL, NULL, 0, IBV_SEND_SIGNALED));
	CHECK(!usleep(50000));
	CHECK(!rdma_post_recvv(id, NULL, NULL, 0));
	completion(sender->send_cq);
	completion(id->recv_cq);
	leave(id);
	leave(sender);
	over(listener, there, here);
}

/* A program may disconnect a connection any number of times, from the request on, and after the event of its end. */
static void disconnects(void)
{
	struct rdma_event_channel *there = rdma_create_event_channel(), *here = rdma_create_event_channel();
	struct rdma_cm_id *listener = listening(there), *id[2];
	struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1};
	CHECK(!rdma_listen(listener, 0));
	CHECK(!rdma_create_id(here, &id[0], NULL, RDMA_PS_TCP));
	FAILS(rdma_disconnect(id[0]), EINVAL);
	CHECK(!rdma_destroy_id(id[0]));
	for (int ends = 0; ends < 2; ends++) {
		id[0] = ask(here, 0);
		id[1] = answer(there, id[0]);
		end(id[ends], id[1 - ends]);
		/* At the end that disconnected, and at the one that got the peer's disconnect. */
		for (int i = 0; i < 4; i++)
			CHECK(!rdma_disconnect(id[i % 2]));
		expect(here, RDMA_CM_EVENT_TIMEWAIT_EXIT);
		expect(there, RDMA_CM_EVENT_TIMEWAIT_EXIT);
		for (int i = 0; i < 2; i++) {
			CHECK(!rdma_disconnect(id[i]));
			leave(id[i]);
		}
	}
	/* Disconnecting an id whose request was not answered takes its queue pair out of the connection. */
	id[0] = ask(here, 0);
	struct rdma_cm_event *event = event_of(there, RDMA_CM_EVENT_CONNECT_REQUEST);
	id[1] = event->id;
	CHECK(!rdma_ack_cm_event(event));
	create_qp(id[1]);
	for (int i = 0; i < 2; i++)
		CHECK(!rdma_disconnect(id[i]));
	CHECK(rdma_accept(id[1], &param) == -1);
	CHECK(!rdma_reject(id[1], NULL, 0));
	CHECK(!rdma_get_cm_event(here, &event) && event->event == RDMA_CM_EVENT_REJECTED && !rdma_ack_cm_event(event));
	nothing(here);
	nothing(there);
	leave(id[0]);
	leave(id[1]);
	over(listener, there, here);
}

/* Some time after a connection's end its numbers may be used again: both ends get an event, unless they have been destroyed. */
static void time_wait(void)
{
	struct rdma_event_channel *there = rdma_create_event_channel(), *here = rdma_create_event_channel(), *other = rdma_create_event_channel();
	struct rdma_cm_id *listener = listening(there), *id[2];
	CHECK(!rdma_listen(listener, 0));
	for (int ends = 0; ends < 2; ends++) {
		id[0] = ask(here, 0);
		id[1] = answer(there, id[0]);
		end(id[ends], id[1 - ends]);
		struct rdma_cm_event *event = event_of(there, RDMA_CM_EVENT_TIMEWAIT_EXIT);
		CHECK(event->id == id[1] && !event->listen_id && !rdma_ack_cm_event(event));
		/* The event goes where its id goes, and is dropped with it. */
		wait_for_event(here);
		CHECK(!rdma_migrate_id(id[0], other));
		nothing(here);
		wait_for_event(other);
		if (ends)
			expect(other, RDMA_CM_EVENT_TIMEWAIT_EXIT);
		leave(id[0]);
		nothing(other);
		leave(id[1]);
	}
	/* Destroyed ids get no event. */
	id[0] = ask(here, 0);
	id[1] = answer(there, id[0]);
	end(id[0], id[1]);
	leave(id[0]);
	expect(there, RDMA_CM_EVENT_TIMEWAIT_EXIT);
	leave(id[1]);
	nothing(here);
	rdma_destroy_event_channel(other);
	over(listener, there, here);
}

static void *serve_once(void *listener)
{
	struct rdma_cm_id *id;
	struct rdma_cm_event *event;
	struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1};
	CHECK(!rdma_get_request(listener, &id));
	create_qp(id);
	CHECK(!rdma_accept(id, &param));
	CHECK(!rdma_get_cm_event(id->channel, &event) && event->event == RDMA_CM_EVENT_DISCONNECTED && !rdma_ack_cm_event(event));
	CHECK(!rdma_disconnect(id) && id->event->event == RDMA_CM_EVENT_TIMEWAIT_EXIT);
	CHECK(!rdma_disconnect(id));
	leave(id);
	return NULL;
}

/* The same for ids without a channel of the program. */
static void time_wait_alone(void)
{
	struct rdma_cm_id *listener = listening(NULL), *id;
	CHECK(!rdma_listen(listener, 0));
	pthread_t thread;
	CHECK(!pthread_create(&thread, NULL, serve_once, listener));
	struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1};
	CHECK(!rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP));
	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000) && !rdma_resolve_route(id, 1000));
	create_qp(id);
	CHECK(!rdma_connect(id, &param) && !rdma_disconnect(id) && id->event->event == RDMA_CM_EVENT_DISCONNECTED);
	CHECK(!rdma_disconnect(id));
	expect(id->channel, RDMA_CM_EVENT_TIMEWAIT_EXIT);
	CHECK(!pthread_join(thread, NULL));
	leave(id);
	CHECK(!rdma_destroy_id(listener));
	address.sin_port = 0;
}

/* A destroyed id sends no further request: a later listener gets the requests of existing ids only. */
static void given_up(void)
{
	struct rdma_event_channel *there = rdma_create_event_channel(), *here = rdma_create_event_channel();
	struct rdma_cm_id *listener = listening(there), *early[8], *id, *accepted;
	/* So many ids that the first have asked when the last are made. */
	for (int i = 0; i < 8; i++)
		early[i] = ask(here, 0);
	for (int i = 0; i < 8; i++)
		leave(early[i]);
	CHECK(!rdma_listen(listener, 0));
	id = ask(here, 0);
	accepted = answer(there, id);
	end(id, accepted);
	/* By then the destroyed ids would have asked again. */
	expect(here, RDMA_CM_EVENT_TIMEWAIT_EXIT);
	expect(there, RDMA_CM_EVENT_TIMEWAIT_EXIT);
	nothing(there);
	nothing(here);
	leave(id);
	leave(accepted);
	over(listener, there, here);
}

/* Makes an id of an address and a port; 0: any. */
static struct rdma_cm_id *bound(in_addr_t host, in_port_t port)
{
	struct rdma_cm_id *id;
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = host, .sin_port = port};
	CHECK(!rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) && !rdma_bind_addr(id, (struct sockaddr *)&at));
	CHECK(rdma_get_src_port(id) && (!port || rdma_get_src_port(id) == port));
	return id;
}

/* Returns the limit that allows no more descriptors than now: all numbers below the next one are taken. */
static struct rlimit no_more(struct rlimit had)
{
	int next = dup(0);
	CHECK(next >= 0 && !close(next));
	return (struct rlimit){.rlim_cur = next, .rlim_max = had.rlim_max};
}

/* One id listens on a port, at all of its addresses, or the call gives the reason for its failure. */
static void ports(void)
{
	struct rdma_cm_id *late = bound(address.sin_addr.s_addr, 0), *client;
	in_port_t port = rdma_get_src_port(late);
	/* Another id has the port when `late` is to listen on it; the library does not exchange it for a port that nobody
	   knows. */
	struct rdma_cm_id *early = bound(address.sin_addr.s_addr, port), *all = bound(INADDR_ANY, port);
	CHECK(!rdma_listen(early, 0));
	FAILS(rdma_listen(late, 0), EADDRINUSE);
	FAILS(rdma_listen(all, 0), EADDRINUSE);
	CHECK(rdma_get_src_port(late) == port && rdma_get_src_port(all) == port);
	CHECK(!rdma_destroy_id(early));
	/* The error that is returned when no port at all can be listened on. */
	struct rlimit had;
	struct rdma_cm_id *any;
	CHECK(!getrlimit(RLIMIT_NOFILE, &had));
	CHECK(!rdma_create_id(NULL, &any, NULL, RDMA_PS_TCP));
	struct rlimit none = no_more(had);
	CHECK(!setrlimit(RLIMIT_NOFILE, &none));
	FAILS(rdma_listen(any, 0), EMFILE);
	FAILS(rdma_listen(late, 0), EMFILE);
	CHECK(!setrlimit(RLIMIT_NOFILE, &had));
	CHECK(!rdma_listen(any, 0) && rdma_get_src_port(any) && !rdma_listen(late, 0));
	/* A request waits until it can be taken. */
	struct rdma_event_channel *here = rdma_create_event_channel();
	struct rdma_cm_event *event;
	address.sin_port = port;
	client = ask(here, 0);
	wait_for_event(late->channel);
	struct rdma_cm_id *asked;
	none = no_more(had);
	CHECK(!setrlimit(RLIMIT_NOFILE, &none));
	FAILS(rdma_get_request(late, &asked), EMFILE);
	CHECK(!setrlimit(RLIMIT_NOFILE, &had));
	CHECK(!rdma_get_request(late, &asked) && asked->verbs && asked->pd && !rdma_reject(asked, NULL, 0));
	CHECK(!rdma_get_cm_event(here, &event) && event->event == RDMA_CM_EVENT_REJECTED && !rdma_ack_cm_event(event));
	leave(client);
	leave(asked);
	rdma_destroy_event_channel(here);
	CHECK(!rdma_destroy_id(late) && !rdma_destroy_id(all) && !rdma_destroy_id(any));
	address.sin_port = 0;
}

/* A shared receive queue that cannot be made leaves existing objects untouched. */
static void no_queue(void)
{
	struct rdma_cm_id *id;
	CHECK(!rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(id, (struct sockaddr *)&address));
	struct ibv_srq_init_attr queue = {.attr = {.max_wr = 0, .max_sge = 1}};
	struct ibv_srq_init_attr_ex xrc = {.attr = {.max_wr = 0, .max_sge = 1}, .comp_mask = IBV_SRQ_INIT_ATTR_TYPE, .srq_type = IBV_SRQT_XRC};
	FAILS(rdma_create_srq_ex(id, &xrc), EINVAL);
	CHECK(!id->srq && !id->recv_cq && !id->recv_cq_channel);
	create_qp(id);
	struct ibv_cq *send_cq = id->send_cq, *recv_cq = id->recv_cq;
	FAILS(rdma_create_srq(id, NULL, &queue), EINVAL);
	FAILS(rdma_create_srq_ex(id, &xrc), EINVAL);
	CHECK(!id->srq && id->send_cq == send_cq && id->recv_cq == recv_cq && id->send_cq_channel && id->recv_cq_channel);
	leave(id);
}

/* A queue pair that is destroyed while its connection is requested takes no receives of a shared queue, and no event reports
   it. */
static void destroyed(void)
{
	struct rdma_event_channel *there = rdma_create_event_channel(), *here = rdma_create_event_channel();
	struct rdma_cm_id *listener = listening(there), *id, *accepted;
	struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1};
	struct ibv_srq_init_attr queue = {.attr = {.max_wr = 4, .max_sge = 1}};
	struct rdma_cm_event *event;
	CHECK(!rdma_listen(listener, 0));
	CHECK(!rdma_create_id(here, &id, NULL, RDMA_PS_TCP));
	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000));
	expect(here, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(!rdma_resolve_route(id, 1000));
	expect(here, RDMA_CM_EVENT_ROUTE_RESOLVED);
	CHECK(!rdma_create_srq(id, NULL, &queue));
	create_qp(id);
	CHECK(id->qp->srq == id->srq && !rdma_connect(id, &param));
	wait_for_event(there);
	rdma_destroy_qp(id);
	accepted = answer(there, id);
	CHECK(!rdma_get_cm_event(here, &event) && event->event == RDMA_CM_EVENT_CONNECT_ERROR && !rdma_ack_cm_event(event));
	/* The peer learns that there is no connection. */
	expect(there, RDMA_CM_EVENT_DISCONNECTED);
	struct pollfd told = {.fd = id->verbs->async_fd, .events = POLLIN};
	CHECK(!poll(&told, 1, 0));
	rdma_destroy_srq(id);
	leave(id);
	leave(accepted);
	over(listener, there, here);
}

/* None of these calls is allowed in an id's state. */
static void refuses(struct rdma_cm_id *id)
{
	struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1};
	uint16_t port = rdma_get_src_port(id);
	FAILS(rdma_bind_addr(id, (struct sockaddr *)&(struct sockaddr_in){.sin_family = AF_INET, .sin_addr = address.sin_addr}), EINVAL);
	FAILS(rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000), EINVAL);
	FAILS(rdma_resolve_route(id, 1000), EINVAL);
	FAILS(rdma_connect(id, &param), EINVAL);
	FAILS(rdma_listen(id, 0), EINVAL);
	CHECK(rdma_get_src_port(id) == port);
}

/* A call out of order is refused and changes nothing, as with the kernel's rdma_cm. */
static void order(void)
{
	struct rdma_event_channel *there = rdma_create_event_channel(), *here = rdma_create_event_channel();
	struct rdma_cm_id *listener = listening(there), *id, *accepted;
	struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1, .private_data = much, .private_data_len = 57};
	CHECK(!rdma_listen(listener, 0));
	refuses(listener);
	CHECK(!rdma_create_id(here, &id, NULL, RDMA_PS_TCP));
	FAILS(rdma_resolve_route(id, 1000), EINVAL);
	FAILS(rdma_connect(id, &param), EINVAL);
	CHECK(!rdma_bind_addr(id, (struct sockaddr *)&(struct sockaddr_in){.sin_family = AF_INET, .sin_addr = address.sin_addr}));
	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000));
	expect(here, RDMA_CM_EVENT_ADDR_RESOLVED);
	FAILS(rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 1000), EINVAL);
	FAILS(rdma_connect(id, &param), EINVAL);
	CHECK(!rdma_resolve_route(id, 1000));
	expect(here, RDMA_CM_EVENT_ROUTE_RESOLVED);
	FAILS(rdma_resolve_route(id, 1000), EINVAL);
	create_qp(id);
	/* Private data for which a request has no room: the call fails, and can be repeated. */
	FAILS(rdma_connect(id, &param), EINVAL);
	param.private_data_len = 56;
	CHECK(!rdma_connect(id, &param));
	refuses(id);
	accepted = answer(there, id);
	expect(here, RDMA_CM_EVENT_ESTABLISHED);
	expect(there, RDMA_CM_EVENT_ESTABLISHED);
	refuses(id);
	refuses(accepted);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	CHECK(!ibv_query_qp(id->qp, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_RTS);
	CHECK(!rdma_disconnect(id));
	expect(here, RDMA_CM_EVENT_DISCONNECTED);
	expect(there, RDMA_CM_EVENT_DISCONNECTED);
	refuses(id);
	leave(id);
	leave(accepted);
	over(listener, there, here);
}

int main(int count, char **arguments)
{
	if (count > 1)
		rounds = atoi(arguments[1]);
	int devices;
	struct ibv_context **list = rdma_get_devices(&devices);
	CHECK(list && devices > 0 && list[0] && !list[devices]);
	union ibv_gid gid;
	CHECK(!ibv_query_gid(list[0], 1, 0, &gid));
	memcpy(&address.sin_addr, gid.raw + 12, 4);
	names();
	options();
	group();
	datagrams();
	backlog();
	late_receive();
	disconnects();
	time_wait();
	time_wait_alone();
	given_up();
	order();
	no_queue();
	destroyed();
	ports();
	race();
	rdma_free_devices(list);
	return 0;
}
