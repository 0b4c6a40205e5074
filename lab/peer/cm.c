// Scenarios of RDMA CM, at the port of the control connection. Private data is the pattern, in each message from an offset of
// its own: REQ 100, REP 200, REJ 300, SIDR_REQ 400, SIDR_REP 500.
#include "peer.h"

#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Bytes that each message has for private data; the kernel takes 36 of REQ and SIDR_REQ for itself.
enum { REQ_DATA = 56, REP_DATA = 196, REJ_DATA = 148, SIDR_REQ_DATA = 180, SIDR_REP_DATA = 136, REJECTED_BY_CONSUMER = 28,
       NO_SUCH_SERVICE = 8, SIDR_NO_SERVICE = 1, SIDR_REJECTED = 2, GRH = 40 };

struct call {
  struct side *side;
  struct rdma_event_channel *events;
  struct rdma_cm_id *listener;
  struct rdma_cm_id *id;
  struct ibv_cq *cq;
};

// Waits for an event, which must be the wanted one with this status and begin with this private data.
static struct rdma_cm_event *await_event(struct call *c, enum rdma_cm_event_type wanted, int status) {
  struct rdma_cm_event *event;
  if (rdma_get_cm_event(c->events, &event)) die("rdma_get_cm_event");
  if (event->event != wanted || event->status != status)
    fail("CM event %s (status %d), not %s (%d)", rdma_event_str(event->event), event->status, rdma_event_str(wanted), status);
  return event;
}

static void expect_data(const struct rdma_cm_event *event, int datagram, uint32_t from, uint32_t length) {
  const void *data = datagram ? event->param.ud.private_data : event->param.conn.private_data;
  uint32_t has = datagram ? event->param.ud.private_data_len : event->param.conn.private_data_len;
  if (has < length) fail("%u bytes of private data, not %u", has, length);
  expect_pattern("private data", data, from, length);
}

static void await(struct call *c, enum rdma_cm_event_type wanted, int status) {
  rdma_ack_cm_event(await_event(c, wanted, status));
}

static struct call make_call(struct side *s, enum rdma_port_space space) {
  struct call c = {.side = s};
  if (!(c.events = rdma_create_event_channel())) die("rdma_create_event_channel");
  if (s->asks) return c;
  if (rdma_create_id(c.events, &c.listener, NULL, space)) die("rdma_create_id");
  if (rdma_bind_addr(c.listener, (struct sockaddr *)&s->address)) die("rdma_bind_addr");
  if (rdma_listen(c.listener, 4)) die("rdma_listen");
  return c;
}

static void end_call(struct call *c) {
  if (c->listener) rdma_destroy_id(c->listener);
  rdma_destroy_event_channel(c->events);
}

static void make_qp(struct call *c, enum ibv_qp_type type) {
  if (!(c->cq = ibv_create_cq(c->id->verbs, 8, NULL, NULL, 0))) die("ibv_create_cq");
  struct ibv_qp_init_attr init = {
      .qp_type = type,
      .send_cq = c->cq,
      .recv_cq = c->cq,
      .cap = {.max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1},
      .sq_sig_all = 1,
  };
  if (rdma_create_qp(c->id, NULL, &init)) die("rdma_create_qp");
}

static void free_qp(struct call *c) {
  if (c->id->qp) {
    rdma_destroy_qp(c->id);
    ibv_destroy_cq(c->cq);
  }
  rdma_destroy_id(c->id);
}

static struct rdma_conn_param param(unsigned char *data, uint32_t from, uint32_t length) {
  put_pattern(data, from, length);
  return (struct rdma_conn_param){.private_data = data, .private_data_len = length, .responder_resources = 1,
                                  .initiator_depth = 1, .retry_count = 7, .rnr_retry_count = 7};
}

static void resolve(struct call *c, enum rdma_port_space space, int port_offset) {
  struct sockaddr_storage to = c->side->address;
  in_port_t *port = to.ss_family == AF_INET ? &((struct sockaddr_in *)&to)->sin_port : &((struct sockaddr_in6 *)&to)->sin6_port;
  *port = htons(ntohs(*port) + port_offset);
  if (rdma_create_id(c->events, &c->id, NULL, space)) die("rdma_create_id");
  if (rdma_resolve_addr(c->id, NULL, (struct sockaddr *)&to, TIMEOUT_MS)) die("rdma_resolve_addr");
  await(c, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
  if (rdma_resolve_route(c->id, TIMEOUT_MS)) die("rdma_resolve_route");
  await(c, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
}

static void post_receive(struct call *c, struct ibv_mr *mr) {
  struct ibv_sge sge = {(uintptr_t)c->side->local, GRH, mr ? mr->lkey : 0};
  struct ibv_recv_wr *bad, receive = {.sg_list = &sge, .num_sge = mr != NULL};
  errno = ibv_post_recv(c->id->qp, &receive, &bad);
  if (errno) die("ibv_post_recv");
}

static void send_nothing(struct call *c, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey) {
  struct ibv_send_wr *bad, send = {.opcode = IBV_WR_SEND, .wr.ud = {ah, qpn, qkey}};
  errno = ibv_post_send(c->id->qp, &send, &bad);
  if (errno) die("ibv_post_send");
  expect_status("SEND", await_completion(c->cq).status, IBV_WC_SUCCESS);
}

// One connection with private data of full size both ways and a message each way.
static void connect_once(struct call *c) {
  unsigned char data[REP_DATA];
  if (c->side->asks) {
    resolve(c, RDMA_PS_TCP, 0);
    make_qp(c, IBV_QPT_RC);
    post_receive(c, NULL);
    struct rdma_conn_param with = param(data, 100, REQ_DATA);
    if (rdma_connect(c->id, &with)) die("rdma_connect");
    struct rdma_cm_event *event = await_event(c, RDMA_CM_EVENT_ESTABLISHED, 0);
    expect_data(event, 0, 200, REP_DATA);
    rdma_ack_cm_event(event);
    send_nothing(c, NULL, 0, 0);
  } else {
    struct rdma_cm_event *event = await_event(c, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    expect_data(event, 0, 100, REQ_DATA);
    c->id = event->id;
    rdma_ack_cm_event(event);
    make_qp(c, IBV_QPT_RC);
    post_receive(c, NULL);
    struct rdma_conn_param with = param(data, 200, REP_DATA);
    if (rdma_accept(c->id, &with)) die("rdma_accept");
    await(c, RDMA_CM_EVENT_ESTABLISHED, 0);
    send_nothing(c, NULL, 0, 0);
  }
  expect_status("receive", await_completion(c->cq).status, IBV_WC_SUCCESS);
}

// Two connections: the first is ended by the asker, the second by the answerer. The other's receive is flushed.
static void cm_connect(struct side *s) {
  struct call c = make_call(s, RDMA_PS_TCP);
  barrier(s);
  for (int i = 0; i < 2; i++) {
    connect_once(&c);
    post_receive(&c, NULL);
    barrier(s);
    int begins = s->asks == (i == 0);
    if (begins && rdma_disconnect(c.id)) die("rdma_disconnect");
    await(&c, RDMA_CM_EVENT_DISCONNECTED, 0);
    if (!begins && rdma_disconnect(c.id)) die("rdma_disconnect");  // answers the DREQ
    expect_status("receive", await_completion(c.cq).status, IBV_WC_WR_FLUSH_ERR);
    barrier(s);
    free_qp(&c);
  }
  end_call(&c);
}

// Rejects what comes until the asker is done: a request whose answer got lost comes again, and to the kernel is a new one.
static void reject_requests(struct call *c, int datagram, uint32_t from, uint32_t length) {
  unsigned char data[REJ_DATA];
  struct pollfd fds[2] = {{.fd = c->events->fd, .events = POLLIN}, {.fd = c->side->control, .events = POLLIN}};
  put_pattern(data, 300, REJ_DATA);
  for (;;) {
    if (poll(fds, 2, -1) < 0) die("poll");
    if (!fds[0].revents) return;
    struct rdma_cm_event *event = await_event(c, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    expect_data(event, datagram, from, length);
    struct rdma_cm_id *id = event->id;
    rdma_ack_cm_event(event);
    if (rdma_reject(id, data, datagram ? 0 : REJ_DATA)) die("rdma_reject");
    rdma_destroy_id(id);
  }
}

// A request that the answerer's program rejects, and one for a port where nobody listens.
static void cm_reject(struct side *s) {
  struct call c = make_call(s, RDMA_PS_TCP);
  unsigned char data[REQ_DATA];
  barrier(s);
  if (s->asks) {
    for (int i = 0; i < 2; i++) {
      resolve(&c, RDMA_PS_TCP, i);
      make_qp(&c, IBV_QPT_RC);
      struct rdma_conn_param with = param(data, 100, REQ_DATA);
      if (rdma_connect(c.id, &with)) die("rdma_connect");
      struct rdma_cm_event *event = await_event(&c, RDMA_CM_EVENT_REJECTED, i == 0 ? REJECTED_BY_CONSUMER : NO_SUCH_SERVICE);
      if (i == 0) expect_data(event, 0, 300, REJ_DATA);
      rdma_ack_cm_event(event);
      free_qp(&c);
    }
  } else {
    reject_requests(&c, 0, 100, REQ_DATA);
  }
  barrier(s);
  end_call(&c);
}

// Answers what comes until a datagram has.
static struct ibv_wc answer_until_received(struct call *c, struct rdma_conn_param *with) {
  struct pollfd event_there = {.fd = c->events->fd, .events = POLLIN};
  struct ibv_wc wc;
  int n;
  while ((n = ibv_poll_cq(c->cq, 1, &wc)) == 0) {
    if (poll(&event_there, 1, 10) <= 0) continue;
    struct rdma_cm_event *event = await_event(c, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
    expect_data(event, 1, 400, SIDR_REQ_DATA);
    struct rdma_cm_id *id = event->id;
    rdma_ack_cm_event(event);
    if (rdma_accept(id, with)) die("rdma_accept");
    rdma_destroy_id(id);
  }
  if (n < 0) die("ibv_poll_cq");
  return wc;
}

// Serves one datagram. The QP is that of the first request.
static void serve_datagram(struct call *c) {
  unsigned char data[SIDR_REP_DATA];
  struct rdma_cm_event *event = await_event(c, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
  expect_data(event, 1, 400, SIDR_REQ_DATA);
  c->id = event->id;
  rdma_ack_cm_event(event);
  make_qp(c, IBV_QPT_UD);
  struct ibv_mr *mr = ibv_reg_mr(c->id->pd, c->side->local, MEMORY, IBV_ACCESS_LOCAL_WRITE);
  if (!mr) die("ibv_reg_mr");
  post_receive(c, mr);
  struct rdma_conn_param with = param(data, 500, SIDR_REP_DATA);
  with.qp_num = c->id->qp->qp_num;
  if (rdma_accept(c->id, &with)) die("rdma_accept");
  struct ibv_wc wc = answer_until_received(c, &with);
  expect_status("receive", wc.status, IBV_WC_SUCCESS);
  expect_value("bytes received", wc.byte_len, GRH);
  barrier(c->side);
  ibv_dereg_mr(mr);
  free_qp(c);
}

static void use_service(struct call *c, const struct rdma_ud_param *ud) {
  struct ibv_ah *ah = ibv_create_ah(c->id->pd, (struct ibv_ah_attr *)&ud->ah_attr);
  if (!ah) die("ibv_create_ah");
  for (int tries = 0; tries < (c->side->lossy ? 16 : 1); tries++) send_nothing(c, ah, ud->qp_num, ud->qkey);
  barrier(c->side);
  ibv_destroy_ah(ah);
}

// One that serves, one that is rejected, one that nobody has.
static void ask_services(struct call *c) {
  static const int outcome[3] = {0, SIDR_REJECTED, SIDR_NO_SERVICE};
  unsigned char data[SIDR_REQ_DATA];
  for (int i = 0; i < 3; i++) {
    resolve(c, RDMA_PS_UDP, i == 2);
    make_qp(c, IBV_QPT_UD);
    struct rdma_conn_param with = param(data, 400, SIDR_REQ_DATA);
    if (rdma_connect(c->id, &with)) die("rdma_connect");
    struct rdma_cm_event *event =
        await_event(c, i == 0 ? RDMA_CM_EVENT_ESTABLISHED : RDMA_CM_EVENT_UNREACHABLE, outcome[i]);
    if (i == 0) {
      expect_data(event, 1, 500, SIDR_REP_DATA);
      use_service(c, &event->param.ud);
    }
    rdma_ack_cm_event(event);
    free_qp(c);
  }
}

// UD: the service's QP is found by SIDR and gets a message; then a request is rejected, and one finds nobody.
static void cm_datagram(struct side *s) {
  struct call c = make_call(s, RDMA_PS_UDP);
  barrier(s);
  if (s->asks) {
    ask_services(&c);
  } else {
    serve_datagram(&c);
    reject_requests(&c, 1, 400, SIDR_REQ_DATA);
  }
  barrier(s);
  end_call(&c);
}

const struct scenario cm_scenarios[] = {
    {"cm-connect", cm_connect},
    {"cm-reject", cm_reject},
    {"cm-datagram", cm_datagram},
    {NULL, NULL},
};
