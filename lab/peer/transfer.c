// Connects by RDMA CM and transfers.
//
// The protocol, over one RC connection by RDMA CM (port space TCP), all integers big endian:
//
// * The private data of REQ (after RDMA CM's own 36-byte header) and of REP begin with the sender's memory, 24 bytes:
//   va 8, rkey 4, length 4, zero 8. It allows REMOTE_WRITE, REMOTE_READ and FLUSH_GLOBAL, never FLUSH_PERSISTENT.
// * The client requests and the server answers. L = the smaller of the two lengths. The pattern's byte at offset i is the
//   top byte of the 32-bit product (i + 1) * 2654435761. The client, one request after the other, each awaited:
//     1. WRITE L bytes of pattern to the server's va, in three requests: [0, 1), [1, 4097) and [4097, L)
//     2. FLUSH global visibility of the range [0, L) of the server's memory
//     3. READ [0, L), and compare
//     4. SEND 16 + N bytes, N = the smaller of L and 6000: the FNV-1a (64 bits) of the pattern's L bytes 8, L 4,
//        N 4, then the pattern's first N bytes
//     5. disconnect (DREQ)
// * The server has one receive of 16 + 6000 bytes posted before it accepts. When the last client is gone it compares its
//   memory and the message with the pattern and prints "ok SERVER L" or what differed.
// * "refused" makes one connection for each of: a WRITE with a wrong rkey, a WRITE and a READ past the end, a FLUSH past
//   the end, a FLUSH to persistence. Each must complete with a remote access error and leave the next connection unharmed; a
//   SEND as in 4, but with L = 0 and N = 0, then follows on a last one. Its server must serve six connections.
#include "peer.h"

#include <endian.h>
#include <errno.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MESSAGE_HEADER = 16, MESSAGE_DATA = 6000 };

struct memory_info {
  uint64_t va;
  uint32_t rkey;
  uint32_t length;
  uint64_t zero;
} __attribute__((packed));

struct connection {
  struct rdma_event_channel *events;
  struct rdma_cm_id *listener;
  struct rdma_cm_id *id;
  struct ibv_cq *cq;
  struct ibv_mr *memory_mr, *source_mr, *message_mr;
  unsigned char *memory;  // what the peer may reach; the client's READ lands here
  unsigned char *source;  // the client's pattern
  unsigned char message[MESSAGE_HEADER + MESSAGE_DATA];
  uint32_t length;
  struct memory_info peer;
};

static uint64_t fnv1a_of_pattern(uint32_t length) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (uint32_t i = 0; i < length; i++) hash = (hash ^ pattern(i)) * 0x100000001b3u;
  return hash;
}

// Waits for the next CM event, which must be the wanted one, and acknowledges it after taking the peer's memory from it.
static struct rdma_cm_id *await_event(struct connection *c, enum rdma_cm_event_type wanted) {
  struct rdma_cm_event *event;
  if (rdma_get_cm_event(c->events, &event)) die("rdma_get_cm_event");
  if (event->event != wanted) {
    fail("CM event %s (status %d), not %s", rdma_event_str(event->event), event->status, rdma_event_str(wanted));
  }
  struct rdma_cm_id *id = event->id;
  if (wanted == RDMA_CM_EVENT_CONNECT_REQUEST || (wanted == RDMA_CM_EVENT_ESTABLISHED && !c->listener)) {
    const struct rdma_conn_param *param = &event->param.conn;
    if (!param->private_data || param->private_data_len < sizeof c->peer) fail("the peer told no memory");
    memcpy(&c->peer, param->private_data, sizeof c->peer);
    c->peer.va = be64toh(c->peer.va);
    c->peer.rkey = be32toh(c->peer.rkey);
    c->peer.length = be32toh(c->peer.length);
    printf("peer: va 0x%016lx rkey 0x%08x length %u\n", c->peer.va, c->peer.rkey, c->peer.length);
  }
  rdma_ack_cm_event(event);
  return id;
}

static void make_resources(struct connection *c) {
  struct ibv_pd *pd = ibv_alloc_pd(c->id->verbs);
  if (!pd) die("ibv_alloc_pd");
  c->cq = ibv_create_cq(c->id->verbs, 16, NULL, NULL, 0);
  if (!c->cq) die("ibv_create_cq");
  struct ibv_qp_init_attr_ex attr = {
      .qp_type = IBV_QPT_RC,
      .send_cq = c->cq,
      .recv_cq = c->cq,
      .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
      .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
      .pd = pd,
      .send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_FLUSH,
      .sq_sig_all = 1,
  };
  if (rdma_create_qp_ex(c->id, &attr)) die("rdma_create_qp_ex");
  c->memory = aligned_alloc(4096, (c->length + 4095) / 4096 * 4096);
  c->source = malloc(c->length);
  if (!c->memory || !c->source) die("malloc");
  memset(c->memory, 0, c->length);
  put_pattern(c->source, 0, c->length);
  int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_FLUSH_GLOBAL;
  c->memory_mr = ibv_reg_mr(pd, c->memory, c->length, access);
  c->source_mr = ibv_reg_mr(pd, c->source, c->length, 0);
  c->message_mr = ibv_reg_mr(pd, c->message, sizeof c->message, IBV_ACCESS_LOCAL_WRITE);
  if (!c->memory_mr || !c->source_mr || !c->message_mr) die("ibv_reg_mr");
}

static void free_resources(struct connection *c) {
  struct ibv_pd *pd = c->id->pd ? c->id->pd : c->memory_mr->pd;
  rdma_destroy_qp(c->id);
  ibv_dereg_mr(c->memory_mr);
  ibv_dereg_mr(c->source_mr);
  ibv_dereg_mr(c->message_mr);
  ibv_destroy_cq(c->cq);
  ibv_dealloc_pd(pd);
  rdma_destroy_id(c->id);
  free(c->memory);
  free(c->source);
}

static struct rdma_conn_param told_memory(const struct connection *c, struct memory_info *info) {
  *info = (struct memory_info){htobe64((uintptr_t)c->memory), htobe32(c->memory_mr->rkey), htobe32(c->length), 0};
  return (struct rdma_conn_param){
      .private_data = info,
      .private_data_len = sizeof *info,
      .responder_resources = 4,
      .initiator_depth = 4,
      .retry_count = 7,
      .rnr_retry_count = 7,
  };
}

static struct ibv_wc finish_request(struct connection *c, struct ibv_qp_ex *qp) {
  errno = ibv_wr_complete(qp);
  if (errno) die("ibv_wr_complete");
  return await_completion(c->cq);
}

static void expect(const char *what, struct ibv_wc wc, enum ibv_wc_status wanted) {
  printf("%s: %s\n", what, ibv_wc_status_str(wc.status));
  expect_status(what, wc.status, wanted);
}

static struct ibv_qp_ex *start_request(struct connection *c) {
  struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(c->id->qp);
  ibv_wr_start(qp);
  return qp;
}

static struct ibv_wc write_bytes(struct connection *c, uint32_t rkey, uint32_t from, uint32_t to) {
  struct ibv_qp_ex *qp = start_request(c);
  ibv_wr_rdma_write(qp, rkey, c->peer.va + from);
  ibv_wr_set_sge(qp, c->source_mr->lkey, (uintptr_t)c->source + from, to - from);
  return finish_request(c, qp);
}

static struct ibv_wc read_bytes(struct connection *c, uint64_t va, uint32_t length) {
  struct ibv_qp_ex *qp = start_request(c);
  ibv_wr_rdma_read(qp, c->peer.rkey, va);
  ibv_wr_set_sge(qp, c->memory_mr->lkey, (uintptr_t)c->memory, length);
  return finish_request(c, qp);
}

static struct ibv_wc flush_range(struct connection *c, uint8_t type, uint64_t va, uint32_t length) {
  struct ibv_qp_ex *qp = start_request(c);
  ibv_wr_flush(qp, c->peer.rkey, va, length, type, IBV_FLUSH_RANGE);
  return finish_request(c, qp);
}

static struct ibv_wc send_message(struct connection *c, uint32_t length) {
  uint32_t data = length < MESSAGE_DATA ? length : MESSAGE_DATA;
  uint64_t hash = htobe64(fnv1a_of_pattern(length));
  uint32_t lengths[2] = {htobe32(length), htobe32(data)};
  memcpy(c->message, &hash, 8);
  memcpy(c->message + 8, lengths, 8);
  memcpy(c->message + MESSAGE_HEADER, c->source, data);
  struct ibv_qp_ex *qp = start_request(c);
  ibv_wr_send(qp);
  ibv_wr_set_sge(qp, c->message_mr->lkey, (uintptr_t)c->message, MESSAGE_HEADER + data);
  return finish_request(c, qp);
}

static void connect_to(struct connection *c, struct sockaddr_storage *address, uint32_t length) {
  c->length = length;
  if (!c->events && !(c->events = rdma_create_event_channel())) die("rdma_create_event_channel");
  if (rdma_create_id(c->events, &c->id, NULL, RDMA_PS_TCP)) die("rdma_create_id");
  if (rdma_resolve_addr(c->id, NULL, (struct sockaddr *)address, TIMEOUT_MS)) die("rdma_resolve_addr");
  await_event(c, RDMA_CM_EVENT_ADDR_RESOLVED);
  if (rdma_resolve_route(c->id, TIMEOUT_MS)) die("rdma_resolve_route");
  await_event(c, RDMA_CM_EVENT_ROUTE_RESOLVED);
  make_resources(c);
  struct memory_info info;
  struct rdma_conn_param param = told_memory(c, &info);
  if (rdma_connect(c->id, &param)) die("rdma_connect");
  await_event(c, RDMA_CM_EVENT_ESTABLISHED);
}

static void hang_up(struct connection *c) {
  if (rdma_disconnect(c->id)) die("rdma_disconnect");
  await_event(c, RDMA_CM_EVENT_DISCONNECTED);
  free_resources(c);
}

void client(struct sockaddr_storage *address, uint32_t bytes) {
  struct connection c = {0};
  connect_to(&c, address, bytes);
  uint32_t length = c.peer.length < bytes ? c.peer.length : bytes;
  uint32_t cuts[] = {0, 1, 4097, length};
  for (int i = 0; i < 3; i++) {
    uint32_t from = cuts[i] < length ? cuts[i] : length, to = cuts[i + 1] < length ? cuts[i + 1] : length;
    expect("WRITE", write_bytes(&c, c.peer.rkey, from, to), IBV_WC_SUCCESS);
  }
  expect("FLUSH global", flush_range(&c, IBV_FLUSH_GLOBAL, c.peer.va, length), IBV_WC_SUCCESS);
  expect("READ", read_bytes(&c, c.peer.va, length), IBV_WC_SUCCESS);
  expect_pattern("READ", c.memory, 0, length);
  expect("SEND", send_message(&c, length), IBV_WC_SUCCESS);
  hang_up(&c);
  printf("ok CLIENT %u\n", length);
}

void refused(struct sockaddr_storage *address) {
  struct connection c = {0};
  for (int i = 0; i < 6; i++) {
    connect_to(&c, address, 8192);
    uint64_t end = c.peer.va + c.peer.length;
    switch (i) {
      case 0: expect("WRITE, wrong rkey", write_bytes(&c, c.peer.rkey ^ 0x100, 0, 64), IBV_WC_REM_ACCESS_ERR); break;
      case 1:
        c.peer.va = end - 63;
        expect("WRITE past the end", write_bytes(&c, c.peer.rkey, 0, 64), IBV_WC_REM_ACCESS_ERR);
        break;
      case 2: expect("READ past the end", read_bytes(&c, end - 63, 64), IBV_WC_REM_ACCESS_ERR); break;
      case 3:
        expect("FLUSH past the end", flush_range(&c, IBV_FLUSH_GLOBAL, end - 63, 64), IBV_WC_REM_ACCESS_ERR);
        break;
      case 4:
        expect("FLUSH to persistence", flush_range(&c, IBV_FLUSH_PERSISTENT, c.peer.va, 64), IBV_WC_REM_ACCESS_ERR);
        break;
      case 5: expect("SEND", send_message(&c, 0), IBV_WC_SUCCESS); break;
    }
    hang_up(&c);
  }
  printf("ok REFUSED\n");
}

static void accept_one(struct connection *c, uint32_t bytes) {
  c->length = bytes;
  c->id = await_event(c, RDMA_CM_EVENT_CONNECT_REQUEST);
  make_resources(c);
  struct ibv_sge sge = {(uintptr_t)c->message, sizeof c->message, c->message_mr->lkey};
  struct ibv_recv_wr *bad, receive = {.sg_list = &sge, .num_sge = 1};
  errno = ibv_post_recv(c->id->qp, &receive, &bad);
  if (errno) die("ibv_post_recv");
  struct memory_info info;
  struct rdma_conn_param param = told_memory(c, &info);
  if (rdma_accept(c->id, &param)) die("rdma_accept");
  await_event(c, RDMA_CM_EVENT_ESTABLISHED);
}

static void check_served(struct connection *c) {
  struct ibv_wc wc = await_completion(c->cq);
  expect("receive", wc, IBV_WC_SUCCESS);
  uint64_t hash;
  uint32_t lengths[2];
  memcpy(&hash, c->message, 8);
  memcpy(lengths, c->message + 8, 8);
  uint32_t length = be32toh(lengths[0]), data = be32toh(lengths[1]);
  if (length > c->length || data > MESSAGE_DATA || data > length) fail("the message's lengths are out of bounds");
  if (wc.byte_len != MESSAGE_HEADER + data) fail("the message has another length than it says");
  if (be64toh(hash) != fnv1a_of_pattern(length)) fail("the message's checksum is not the pattern's");
  expect_pattern("message", c->message + MESSAGE_HEADER, 0, data);
  expect_pattern("memory", c->memory, 0, length);
  printf("ok SERVER %u\n", length);
}

void serve(struct sockaddr_storage *address, uint32_t bytes, int connections) {
  struct connection c = {0};
  if (!(c.events = rdma_create_event_channel())) die("rdma_create_event_channel");
  if (rdma_create_id(c.events, &c.listener, NULL, RDMA_PS_TCP)) die("rdma_create_id");
  if (rdma_bind_addr(c.listener, (struct sockaddr *)address)) die("rdma_bind_addr");
  if (rdma_listen(c.listener, 8)) die("rdma_listen");
  printf("listening\n");
  while (connections-- > 0) {
    accept_one(&c, bytes);
    await_event(&c, RDMA_CM_EVENT_DISCONNECTED);
    if (connections == 0) check_served(&c);
    free_resources(&c);
  }
}
