// Scenarios over queue pairs that are connected by hand: each side tells the other over the control connection its QPN,
// first PSN, GID (two integers), path MTU as enum ibv_mtu, address and rkey of its memory, and 1 when it is rdmux. What rxe is
// known to do differently (docs/interop.md) is expected of a peer that is not rdmux.
//
// In all of them the asker sends the pattern from its local memory, and the answerer's receives go to its own.
#define _GNU_SOURCE  // MAP_SYNC
#include "peer.h"

#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// Time in which a datagram that was sent arrives, or never does: of one that a link may lose nothing else tells.
enum { SETTLE_US = 200000 };

enum { QKEY = 0x11111111, FIRST_PSN = 0xfffff0, GRH = 40, RECEIVE = 16384, LIST_MAX = 24 };

struct end {
  struct side *side;
  struct ibv_comp_channel *channel;
  struct ibv_cq *cq;
  struct ibv_qp *qp;
  struct ibv_ah *ah;  // of a UD peer
  uint32_t peer_qpn;
  union ibv_gid peer_gid;
  uint64_t peer_va;
  uint32_t peer_rkey;
  int peer_is_rdmux;
};

enum kind { SEND, SEND_IMM, SEND_INV, WRITE, WRITE_IMM, READ, CAS, FAA, FLUSH, ATOMIC_WRITE };

// One request. What has no meaning for its kind is zero.
struct request {
  enum kind kind;
  uint32_t at;      // offset in the peer's memory
  uint32_t from;    // offset in the own local memory: source, or where the answer goes
  uint32_t length;
  uint32_t rkey;    // 0: that of the peer's memory; SEND_INV: what to invalidate
  uint32_t imm;
  uint64_t compare, value;  // value: what CAS swaps in, FAA adds, ATOMIC_WRITE writes
  uint32_t flush;   // type | level << 8
  uint32_t qkey;    // UD; 0: the right one
  int solicited;
};

static struct end make_end(struct side *s, enum ibv_qp_type type, int rights, struct ibv_srq *srq) {
  struct end e = {.side = s};
  if (!(e.channel = ibv_create_comp_channel(s->verbs))) die("ibv_create_comp_channel");
  if (!(e.cq = ibv_create_cq(s->verbs, 64, NULL, e.channel, 0))) die("ibv_create_cq");
  uint64_t sends = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
  if (type != IBV_QPT_UD) sends |= IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
  if (type == IBV_QPT_RC)
    sends |= IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD |
             IBV_QP_EX_WITH_SEND_WITH_INV | IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_FLUSH |
             IBV_QP_EX_WITH_ATOMIC_WRITE;
  struct ibv_qp_init_attr_ex init = {
      .qp_type = type,
      .send_cq = e.cq,
      .recv_cq = e.cq,
      .srq = srq,
      .cap = {.max_send_wr = LIST_MAX, .max_recv_wr = srq ? 0 : 16, .max_send_sge = 1, .max_recv_sge = 1},
      .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
      .pd = s->pd,
      .send_ops_flags = sends,
      .sq_sig_all = 1,
  };
  if (!(e.qp = ibv_create_qp_ex(s->verbs, &init))) die("ibv_create_qp_ex");
  struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY, .qp_access_flags = rights};
  int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
  errno = ibv_modify_qp(e.qp, &attr, mask | (type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS));
  if (errno) die("ibv_modify_qp to INIT");
  return e;
}

static struct ibv_ah_attr way_to(struct side *s, const union ibv_gid *gid) {
  return (struct ibv_ah_attr){
      .is_global = 1, .port_num = 1, .grh = {.dgid = *gid, .sgid_index = s->gid_index, .hop_limit = 64}};
}

static void ready_connected(struct end *e, uint32_t psn, enum ibv_mtu mtu) {
  int rc = e->qp->qp_type == IBV_QPT_RC;
  struct ibv_qp_attr attr = {
      .qp_state = IBV_QPS_RTR,
      .path_mtu = mtu,
      .dest_qp_num = e->peer_qpn,
      .rq_psn = psn,
      .ah_attr = way_to(e->side, &e->peer_gid),
      .max_dest_rd_atomic = 4,
      .min_rnr_timer = 12,
  };
  int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
  errno = ibv_modify_qp(e->qp, &attr, mask | (rc ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0));
  if (errno) die("ibv_modify_qp to RTR");
  // rxe takes a retry count of 7 as "for ever".
  attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .sq_psn = FIRST_PSN, .timeout = 14, .retry_cnt = 6,
                              .rnr_retry = 7, .max_rd_atomic = 4};
  mask = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
  errno = ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | (rc ? mask : 0));
  if (errno) die("ibv_modify_qp to RTS");
}

static void ready_datagram(struct end *e) {
  struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR};
  errno = ibv_modify_qp(e->qp, &attr, IBV_QP_STATE);
  if (errno) die("ibv_modify_qp to RTR");
  attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .sq_psn = FIRST_PSN};
  errno = ibv_modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
  if (errno) die("ibv_modify_qp to RTS");
  struct ibv_ah_attr way = way_to(e->side, &e->peer_gid);
  if (!(e->ah = ibv_create_ah(e->side->pd, &way))) die("ibv_create_ah");
}

// Connects to the other side's end and waits until that is ready too. The memory is what the peer shall reach.
static void join(struct end *e, const struct ibv_mr *memory) {
  struct side *s = e->side;
  uint64_t gid[2];
  memcpy(gid, &s->gid, 16);
  struct told told = swap_told(s, (struct told){{e->qp->qp_num, FIRST_PSN, be64toh(gid[0]), be64toh(gid[1]), s->mtu,
                                                 (uintptr_t)memory->addr, memory->rkey}});
  uint64_t peer[2] = {htobe64(told.value[2]), htobe64(told.value[3])};
  memcpy(&e->peer_gid, peer, 16);
  e->peer_qpn = told.value[0];
  e->peer_va = told.value[5];
  e->peer_rkey = told.value[6];
  e->peer_is_rdmux = told.value[7];
  if (e->qp->qp_type == IBV_QPT_UD) ready_datagram(e);
  else ready_connected(e, told.value[1], told.value[4] < s->mtu ? told.value[4] : s->mtu);
  barrier(s);
}

// Neither side's QP goes before both are done with it: an acknowledgement may still be asked for again.
static void close_end(struct end *e) {
  barrier(e->side);
  if (ibv_destroy_qp(e->qp) || ibv_destroy_cq(e->cq) || ibv_destroy_comp_channel(e->channel)) die("closing");
  if (e->ah) ibv_destroy_ah(e->ah);
}

static void receive_from(struct end *e, struct ibv_srq *srq, uint64_t id, uint32_t to, uint32_t length) {
  struct ibv_sge sge = {(uintptr_t)e->side->local + to, length, e->side->local_mr->lkey};
  struct ibv_recv_wr *bad, receive = {.wr_id = id, .sg_list = &sge, .num_sge = length > 0};
  errno = srq ? ibv_post_srq_recv(srq, &receive, &bad) : ibv_post_recv(e->qp, &receive, &bad);
  if (errno) die("posting a receive");
}

static void receive(struct end *e, uint64_t id, uint32_t to, uint32_t length) { receive_from(e, NULL, id, to, length); }

static void put(struct end *e, uint64_t id, const struct request *r) {
  struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(e->qp);
  uint64_t va = e->peer_va + r->at, value = r->value;
  uint32_t rkey = r->rkey ? r->rkey : e->peer_rkey;
  qp->wr_id = id;
  qp->wr_flags = r->solicited ? IBV_SEND_SOLICITED : 0;
  switch (r->kind) {
    case SEND: ibv_wr_send(qp); break;
    case SEND_IMM: ibv_wr_send_imm(qp, htobe32(r->imm)); break;
    case SEND_INV: ibv_wr_send_inv(qp, rkey); break;
    case WRITE: ibv_wr_rdma_write(qp, rkey, va); break;
    case WRITE_IMM: ibv_wr_rdma_write_imm(qp, rkey, va, htobe32(r->imm)); break;
    case READ: ibv_wr_rdma_read(qp, rkey, va); break;
    case CAS: ibv_wr_atomic_cmp_swp(qp, rkey, va, r->compare, value); break;
    case FAA: ibv_wr_atomic_fetch_add(qp, rkey, va, value); break;
    case FLUSH: ibv_wr_flush(qp, rkey, va, r->length, r->flush & 0xff, r->flush >> 8); return;
    case ATOMIC_WRITE: ibv_wr_atomic_write(qp, rkey, va, &value); return;
  }
  if (e->ah) ibv_wr_set_ud_addr(qp, e->ah, e->peer_qpn, r->qkey ? r->qkey : QKEY);
  uint32_t length = r->kind == CAS || r->kind == FAA ? 8 : r->length;
  if (length) ibv_wr_set_sge(qp, e->side->local_mr->lkey, (uintptr_t)e->side->local + r->from, length);
}

static void post(struct end *e, const struct request *list, int n) {
  struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(e->qp);
  ibv_wr_start(qp);
  for (int i = 0; i < n; i++) put(e, i, &list[i]);
  errno = ibv_wr_complete(qp);
  if (errno) die("ibv_wr_complete");
}

// Completions of requests 0 to n - 1, in this order.
static void await_requests(struct end *e, const char *what, int n) {
  for (int i = 0; i < n; i++) {
    struct ibv_wc wc = await_completion(e->cq);
    expect_status(what, wc.status, IBV_WC_SUCCESS);
    expect_value("number of the completed request", wc.wr_id, i);
  }
}

static void request(struct end *e, const char *what, struct request r) {
  post(e, &r, 1);
  await_requests(e, what, 1);
}

// A responder in error repeats no NAK: where it can get lost, a refusal may show as retries exceeded. A FLUSH or ATOMIC WRITE that
// rxe sends again names address 0, which is refused as no access.
static void expect_refusal(const struct side *s, const char *what, enum ibv_wc_status status, enum ibv_wc_status wanted) {
  if (s->lossy && (status == IBV_WC_RETRY_EXC_ERR || status == IBV_WC_REM_ACCESS_ERR)) return;
  expect_status(what, status, wanted);
}

static void request_fails(struct end *e, const char *what, struct request r, enum ibv_wc_status wanted) {
  post(e, &r, 1);
  expect_refusal(e->side, what, await_completion(e->cq).status, wanted);
}

static struct ibv_wc await_receive(struct end *e, uint64_t id, uint32_t length) {
  struct ibv_wc wc = await_completion(e->cq);
  expect_status("receive", wc.status, IBV_WC_SUCCESS);
  expect_value("number of the receive", wc.wr_id, id);
  expect_value("bytes received", wc.byte_len, length);
  return wc;
}

static void expect_imm(struct ibv_wc wc, uint32_t imm) {
  if (!(wc.wc_flags & IBV_WC_WITH_IMM)) fail("the receive has no immediate data");
  expect_value("immediate data", be32toh(wc.imm_data), imm);
}

static uint64_t *word(struct side *s, uint32_t at) { return (uint64_t *)(s->memory + at); }
static uint64_t *local_word(struct side *s, uint32_t at) { return (uint64_t *)(s->local + at); }

// SENDs of no byte, one, one packet and several, all outstanding at once; the last has immediate data.
static const struct request sends[] = {
    {.kind = SEND, .from = 0, .length = 0},    {.kind = SEND, .from = 1, .length = 1},
    {.kind = SEND, .from = 2, .length = 4096}, {.kind = SEND, .from = 3, .length = 12289},
    {.kind = SEND_IMM, .from = 4, .length = 1000, .imm = 0x01020304},
};

static void rc_send(struct side *s) {
  struct end e = make_end(s, IBV_QPT_RC, 0, NULL);
  if (!s->asks)
    for (int i = 0; i < 5; i++) receive(&e, i, 13000 * i, 13000);
  put_pattern(s->local, 0, s->asks ? 20000 : 0);
  join(&e, s->memory_mr);
  if (s->asks) {
    post(&e, sends, 5);
    await_requests(&e, "SEND", 5);
  } else {
    for (int i = 0; i < 5; i++) {
      struct ibv_wc wc = await_receive(&e, i, sends[i].length);
      expect_pattern("SEND", s->local + 13000 * i, i, sends[i].length);
      if (i == 4) expect_imm(wc, sends[i].imm);
    }
  }
  close_end(&e);
}

static int has_event(struct end *e, int timeout_ms) {
  struct pollfd fd = {.fd = e->channel->fd, .events = POLLIN};
  return poll(&fd, 1, timeout_ms) > 0;
}

// The answerer sleeps for a solicited event: the first SEND must not wake it, the second must.
static void solicited(struct side *s) {
  struct end e = make_end(s, IBV_QPT_RC, 0, NULL);
  if (!s->asks) {
    for (int i = 0; i < 2; i++) receive(&e, i, 0, 64);
    if (ibv_req_notify_cq(e.cq, 1)) die("ibv_req_notify_cq");
  }
  join(&e, s->memory_mr);
  if (s->asks) request(&e, "SEND", (struct request){.kind = SEND, .length = 8});
  barrier(s);
  if (!s->asks && has_event(&e, 0)) fail("a SEND that is not solicited woke the receiver");
  barrier(s);
  if (s->asks) {
    request(&e, "solicited SEND", (struct request){.kind = SEND, .length = 8, .solicited = 1});
  } else {
    if (!has_event(&e, TIMEOUT_MS)) fail("a solicited SEND did not wake the receiver");
    struct ibv_cq *cq;
    void *context;
    if (ibv_get_cq_event(e.channel, &cq, &context)) die("ibv_get_cq_event");
    ibv_ack_cq_events(cq, 1);
    for (int i = 0; i < 2; i++) await_receive(&e, i, 8);
  }
  close_end(&e);
}

// RNR NAKs that the device has sent so far, as rxe counts them.
static unsigned long rnr_naks(struct side *s) {
  char path[256], text[32] = "";
  snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/1/hw_counters/send_rnr_err", ibv_get_device_name(s->verbs->device));
  FILE *file = fopen(path, "r");
  if (!file || !fgets(text, sizeof text, file)) die(path);
  fclose(file);
  return strtoul(text, NULL, 10);
}

// Waits until a SEND has found no receive since the count was `before`; the alarm ends a wait for ever.
static void await_rnr_nak(struct side *s, unsigned long before) {
  while (rnr_naks(s) == before) sched_yield();
}

// A SEND for which there is no receive yet waits and is then delivered once.
static void not_ready(struct side *s) {
  struct end e = make_end(s, IBV_QPT_RC, 0, NULL);
  put_pattern(s->local, 0, s->asks ? 100 : 0);
  unsigned long before = rnr_naks(s);
  join(&e, s->memory_mr);
  if (s->asks) {
    struct request r = {.kind = SEND, .length = 100};
    post(&e, &r, 1);
    await_requests(&e, "SEND", 1);
  } else {
    await_rnr_nak(s, before);
    for (int i = 0; i < 2; i++) receive(&e, i, 100 * i, 100);
    await_receive(&e, 0, 100);
    expect_pattern("SEND", s->local, 0, 100);
  }
  barrier(s);
  struct ibv_wc wc;
  if (ibv_poll_cq(e.cq, 1, &wc)) fail("there is a completion too many");
  close_end(&e);
}

// WRITEs of one packet and several, of no byte with a key that nobody has, and with immediate data.
static void rc_write(struct side *s) {
  struct end e = make_end(s, IBV_QPT_RC, IBV_ACCESS_REMOTE_WRITE, NULL);
  if (!s->asks) receive(&e, 0, 0, 0);
  put_pattern(s->local, 0, s->asks ? 30000 : 0);
  join(&e, s->memory_mr);
  const struct request list[] = {
      {.kind = WRITE, .length = 1},
      {.kind = WRITE, .rkey = 0x12345678},
      {.kind = WRITE, .at = 1, .from = 1, .length = 4096},
      {.kind = WRITE_IMM, .at = 4097, .from = 4097, .length = 25903, .imm = 0xfffefdfc},
  };
  if (s->asks) {
    post(&e, list, 4);
    await_requests(&e, "WRITE", 4);
  } else {
    expect_imm(await_receive(&e, 0, 25903), 0xfffefdfc);
    expect_pattern("WRITE", s->memory, 0, 30000);
    for (uint32_t i = 30000; i < MEMORY; i++) expect_value("a byte past the WRITE", s->memory[i], 0);
  }
  close_end(&e);
}

static void rc_read(struct side *s) {
  struct end e = make_end(s, IBV_QPT_RC, IBV_ACCESS_REMOTE_READ, NULL);
  put_pattern(s->memory, 0, s->asks ? 0 : 40000);
  join(&e, s->memory_mr);
  const struct request list[] = {
      {.kind = READ, .at = 5, .from = 0, .length = 1},
      {.kind = READ, .rkey = 0x12345678},
      {.kind = READ, .at = 1, .from = 1, .length = 4096},
      {.kind = READ, .at = 4097, .from = 4097, .length = 35903},
  };
  if (s->asks) {
    post(&e, list, 4);
    await_requests(&e, "READ", 4);
    expect_pattern("READ", s->local, 5, 1);
    expect_pattern("READ", s->local + 1, 1, 39999);
  }
  close_end(&e);
}

// More atomics at once than the responder keeps answers for, then CAS that hits and CAS that misses.
static void atomics(struct side *s) {
  struct end e = make_end(s, IBV_QPT_RC, IBV_ACCESS_REMOTE_ATOMIC, NULL);
  *word(s, 8) = 1000;
  join(&e, s->memory_mr);
  if (s->asks) {
    struct request list[20];
    for (int i = 0; i < 20; i++) list[i] = (struct request){.kind = FAA, .at = 8, .from = 8 * i, .value = 3};
    post(&e, list, 20);
    await_requests(&e, "FETCH ADD", 20);
    for (int i = 0; i < 20; i++) expect_value("FETCH ADD's answer", *local_word(s, 8 * i), 1000 + 3 * i);
    const struct request more[] = {
        {.kind = CAS, .at = 8, .from = 0, .compare = 1060, .value = 7},
        {.kind = CAS, .at = 8, .from = 8, .compare = 1060, .value = 9},
        {.kind = FAA, .at = 8, .from = 16, .value = -8},
        {.kind = CAS, .at = 8, .from = 24, .compare = -1, .value = 0x0102030405060708},
    };
    post(&e, more, 4);
    await_requests(&e, "COMPARE SWAP", 4);
    expect_value("answer of a CAS that hits", *local_word(s, 0), 1060);
    expect_value("answer of a CAS that misses", *local_word(s, 8), 7);
    expect_value("answer of a FETCH ADD of -8", *local_word(s, 16), 7);
    expect_value("answer of a CAS of 64 bits", *local_word(s, 24), -1);
  }
  barrier(s);
  if (!s->asks) {
    expect_value("the word before", *word(s, 0), 0);
    expect_value("the word", *word(s, 8), 0x0102030405060708);
    expect_value("the word behind", *word(s, 16), 0);
  }
  close_end(&e);
}

// ATOMIC WRITE stores its eight bytes as they stand.
static void atomic_write(struct side *s) {
  struct end e = make_end(s, IBV_QPT_RC, IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ, NULL);
  join(&e, s->memory_mr);
  if (s->asks) {
    uint64_t value;
    memcpy(&value, "rdmux/rc", 8);
    const struct request list[] = {
        {.kind = WRITE, .length = 64},
        {.kind = ATOMIC_WRITE, .at = 16, .value = value},
        {.kind = READ, .from = 64, .length = 64},
    };
    put_pattern(s->local, 0, 64);
    post(&e, list, 3);
    await_requests(&e, "ATOMIC WRITE", 3);
    expect_value("what ATOMIC WRITE wrote", *local_word(s, 64 + 16), value);
  }
  barrier(s);
  if (!s->asks) {
    expect_pattern("before the ATOMIC WRITE", s->memory, 0, 16);
    if (memcmp(s->memory + 16, "rdmux/rc", 8)) fail("ATOMIC WRITE wrote something else");
    expect_pattern("behind the ATOMIC WRITE", s->memory + 24, 24, 40);
  }
  close_end(&e);
}

// The answerer's memory is a device of persistent memory, named by the variable LAB_DAX.
static void flush_dax(struct side *s) {
  enum { BYTES = 2 << 20 };
  int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_FLUSH_GLOBAL |
               IBV_ACCESS_FLUSH_PERSISTENT;
  struct ibv_mr *mr = s->memory_mr;
  unsigned char *memory = NULL;
  if (!s->asks) {
    const char *name = getenv("LAB_DAX");
    int dax = name ? open(name, O_RDWR) : -1;
    if (dax < 0) fail("LAB_DAX names no device");
    memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED_VALIDATE | MAP_SYNC, dax, 0);
    if (memory == MAP_FAILED) die(name);
    close(dax);
    memset(memory, 0, 32768);
    if (!(mr = ibv_reg_mr(s->pd, memory, BYTES, rights))) die("ibv_reg_mr of persistent memory");
  }
  struct end e = make_end(s, IBV_QPT_RC, rights & ~IBV_ACCESS_LOCAL_WRITE, NULL);
  put_pattern(s->local, 0, s->asks ? 10000 : 0);
  join(&e, mr);
  uint64_t value;
  memcpy(&value, "rdmux/pm", 8);
  const struct request list[] = {
      {.kind = WRITE, .length = 10000},
      {.kind = FLUSH, .length = 10000, .flush = IBV_FLUSH_PERSISTENT | IBV_FLUSH_RANGE << 8},
      {.kind = WRITE, .at = 20003, .length = 100},
      {.kind = FLUSH, .flush = IBV_FLUSH_GLOBAL | IBV_FLUSH_PERSISTENT | IBV_FLUSH_MR << 8},
      {.kind = ATOMIC_WRITE, .at = 30000, .value = value},
      {.kind = FLUSH, .at = 30000, .length = 8, .flush = IBV_FLUSH_PERSISTENT | IBV_FLUSH_RANGE << 8},
      {.kind = READ, .from = 20000, .length = 10000},
  };
  if (s->asks) {
    post(&e, list, 7);
    await_requests(&e, "FLUSH to persistence", 7);
    expect_pattern("READ behind FLUSH", s->local + 20000, 0, 10000);
  }
  barrier(s);
  if (!s->asks) {
    expect_pattern("memory", memory, 0, 10000);
    expect_pattern("memory of the second WRITE", memory + 20003, 0, 100);
    if (memcmp(memory + 30000, "rdmux/pm", 8)) fail("ATOMIC WRITE wrote something else");
  }
  close_end(&e);
  if (!s->asks && (ibv_dereg_mr(mr) || munmap(memory, BYTES))) die("closing");
}

static void flush(struct side *s) {
  struct end e = make_end(s, IBV_QPT_RC, IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_FLUSH_GLOBAL, NULL);
  put_pattern(s->local, 0, s->asks ? 10000 : 0);
  join(&e, s->memory_mr);
  const struct request list[] = {
      {.kind = WRITE, .length = 10000},
      {.kind = FLUSH, .length = 10000, .flush = IBV_FLUSH_GLOBAL | IBV_FLUSH_RANGE << 8},
      {.kind = FLUSH, .flush = IBV_FLUSH_GLOBAL | IBV_FLUSH_MR << 8},
      {.kind = READ, .from = 20000, .length = 10000},
  };
  if (s->asks) {
    post(&e, list, 4);
    await_requests(&e, "FLUSH", 4);
    expect_pattern("READ behind FLUSH", s->local + 20000, 0, 10000);
  }
  barrier(s);
  if (!s->asks) expect_pattern("memory", s->memory, 0, 10000);
  close_end(&e);
}

// Binds bytes [4096, 8192) of the memory to the window; its new rkey.
static uint32_t bind_window(struct end *e, struct ibv_mw *window, uint32_t length) {
  struct ibv_mw_bind_info info = {e->side->memory_mr, (uintptr_t)e->side->memory + 4096, length,
                                  IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC};
  if (window->type == IBV_MW_TYPE_1) {
    struct ibv_mw_bind bind = {.bind_info = info, .send_flags = IBV_SEND_SIGNALED};
    errno = ibv_bind_mw(e->qp, window, &bind);
    if (errno) die("ibv_bind_mw");
  } else {
    struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(e->qp);
    ibv_wr_start(qp);
    qp->wr_id = 0;
    qp->wr_flags = 0;
    ibv_wr_bind_mw(qp, window, ibv_inc_rkey(window->rkey), &info);
    errno = ibv_wr_complete(qp);
    if (errno) die("binding a window");
    window->rkey = ibv_inc_rkey(window->rkey);
  }
  await_requests(e, "BIND", 1);
  return window->rkey;
}

static void invalidate(struct end *e, uint32_t rkey) {
  struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(e->qp);
  ibv_wr_start(qp);
  qp->wr_id = 0;
  qp->wr_flags = 0;
  ibv_wr_local_inv(qp, rkey);
  errno = ibv_wr_complete(qp);
  if (errno) die("LOCAL INVALIDATE");
  await_requests(e, "LOCAL INVALIDATE", 1);
}

static struct ibv_mw *make_window(struct side *s, enum ibv_mw_type type) {
  struct ibv_mw *window = ibv_alloc_mw(s->pd, type);
  if (!window) die("ibv_alloc_mw");
  return window;
}

static uint32_t tell_rkey(struct side *s, uint32_t rkey) { return swap_told(s, (struct told){{rkey}}).value[0]; }

enum { WINDOW_RIGHTS = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC };

// The asker reaches a window that the answerer has bound.
static void use_window(struct end *e, uint32_t rkey) {
  struct side *s = e->side;
  const struct request list[] = {
      {.kind = WRITE, .at = 4096, .from = 0, .length = 4096, .rkey = rkey},
      {.kind = FAA, .at = 8192 - 8, .from = 8192, .value = 1, .rkey = rkey},
      {.kind = READ, .at = 4097, .from = 4096, .length = 4000, .rkey = rkey},
  };
  put_pattern(s->local, 0, 4096);
  post(e, list, 3);
  await_requests(e, "access to a window", 3);
  expect_pattern("READ of a window", s->local + 4096, 1, 4000);
  expect_value("FETCH ADD on a window", *local_word(s, 8192), *local_word(s, 4096 - 8));
}

static const struct request write_in_window = {.kind = WRITE, .at = 4096, .length = 8};

// A window of type 1: reached, then bound anew, after which the old key is none.
static void window_1(struct side *s) {
  struct ibv_mw *window = s->asks ? NULL : make_window(s, IBV_MW_TYPE_1);
  struct end e = make_end(s, IBV_QPT_RC, WINDOW_RIGHTS, NULL);
  join(&e, s->memory_mr);
  uint32_t old = tell_rkey(s, s->asks ? 0 : bind_window(&e, window, 4096));
  if (s->asks) use_window(&e, old);
  barrier(s);
  uint32_t rkey = tell_rkey(s, s->asks ? 0 : bind_window(&e, window, 2048));
  if (s->asks) {
    struct request r = write_in_window;
    r.rkey = rkey;
    request(&e, "WRITE to a window bound anew", r);
    r.rkey = old;
    request_fails(&e, "WRITE by a window's old key", r, IBV_WC_REM_ACCESS_ERR);
  }
  close_end(&e);
  // The window is still bound: another QP may use it, within its bounds.
  e = make_end(s, IBV_QPT_RC, WINDOW_RIGHTS, NULL);
  join(&e, s->memory_mr);
  if (s->asks) {
    struct request r = write_in_window;
    r.rkey = rkey;
    request(&e, "WRITE through another QP to a window of type 1", r);
    r.at = 4096 + 2048 - 7;
    request_fails(&e, "WRITE past the end of a window", r, e.peer_is_rdmux ? IBV_WC_REM_ACCESS_ERR : IBV_WC_SUCCESS);
  }
  close_end(&e);
  if (window && ibv_dealloc_mw(window)) die("ibv_dealloc_mw");
}

// A window of type 2B: reached, then invalidated by its owner. It belongs to one QP.
static void window_2(struct side *s) {
  struct ibv_mw *window = s->asks ? NULL : make_window(s, IBV_MW_TYPE_2);
  struct end other = make_end(s, IBV_QPT_RC, WINDOW_RIGHTS, NULL);
  join(&other, s->memory_mr);
  struct end e = make_end(s, IBV_QPT_RC, WINDOW_RIGHTS, NULL);
  join(&e, s->memory_mr);
  struct request r = write_in_window;
  r.rkey = tell_rkey(s, s->asks ? 0 : bind_window(&e, window, 4096));
  if (s->asks) {
    use_window(&e, r.rkey);
    request_fails(&other, "WRITE through another QP to a window of type 2", r, IBV_WC_REM_ACCESS_ERR);
  }
  barrier(s);
  if (!s->asks) invalidate(&e, r.rkey = window->rkey);
  barrier(s);
  if (s->asks) request_fails(&e, "WRITE to an invalidated window", r, IBV_WC_REM_ACCESS_ERR);
  close_end(&other);
  close_end(&e);
  if (window && ibv_dealloc_mw(window)) die("ibv_dealloc_mw");
}

// SEND with invalidate ends a window of type 2 and says so in the receive's completion.
static void send_invalidate(struct side *s) {
  struct ibv_mw *window = s->asks ? NULL : make_window(s, IBV_MW_TYPE_2);
  struct end e = make_end(s, IBV_QPT_RC, WINDOW_RIGHTS, NULL);
  if (!s->asks) receive(&e, 0, 0, 5000);
  put_pattern(s->local, 0, s->asks ? 5000 : 0);
  join(&e, s->memory_mr);
  struct request r = write_in_window;
  r.rkey = tell_rkey(s, s->asks ? 0 : bind_window(&e, window, 4096));
  if (s->asks) {
    request(&e, "WRITE", r);
    request(&e, "SEND with invalidate", (struct request){.kind = SEND_INV, .length = 5000, .rkey = r.rkey});
    request_fails(&e, "WRITE to a window that the peer invalidated", r, IBV_WC_REM_ACCESS_ERR);
  } else {
    struct ibv_wc wc = await_receive(&e, 0, 5000);
    // rxe gives programs the flag that the kernel has for it.
    if (!(wc.wc_flags & (IBV_WC_WITH_INV | IBV_WC_IP_CSUM_OK))) fail("the receive does not tell of an invalidation");
    expect_value("invalidated rkey", wc.invalidated_rkey, window->rkey);
    expect_pattern("SEND with invalidate", s->local, 0, 5000);
  }
  close_end(&e);
  if (window && ibv_dealloc_mw(window)) die("ibv_dealloc_mw");
}

static void await_srq_limit(struct side *s) {
  struct ibv_async_event event;
  do {
    if (ibv_get_async_event(s->verbs, &event)) die("ibv_get_async_event");
    ibv_ack_async_event(&event);
  } while (event.event_type != IBV_EVENT_SRQ_LIMIT_REACHED);
}

// Two connections to one shared receive queue of 5: 3 SENDs each, the sixth of which waits for a receive. Message i goes over
// connection i % 2. The answerer's limit of 2 is reached when the fourth receive is taken.
static void shared_receives(struct side *s) {
  struct ibv_srq_init_attr init = {.attr = {.max_wr = 16, .max_sge = 1}};
  struct ibv_srq *srq = s->asks ? NULL : ibv_create_srq(s->pd, &init);
  if (!s->asks && !srq) die("ibv_create_srq");
  struct end ends[2];
  for (int i = 0; i < 2; i++) ends[i] = make_end(s, IBV_QPT_RC, 0, srq);
  if (!s->asks) {
    for (int i = 0; i < 5; i++) receive_from(&ends[0], srq, i, 5000 * i, 5000);
    struct ibv_srq_attr limit = {.srq_limit = 2};
    errno = ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT);
    if (errno) die("ibv_modify_srq");
  }
  put_pattern(s->local, 0, s->asks ? 6000 : 0);
  unsigned long before = rnr_naks(s);
  for (int i = 0; i < 2; i++) join(&ends[i], s->memory_mr);
  for (int i = 0; i < 6; i++) {
    struct end *e = &ends[i % 2];
    const struct request r = {.kind = SEND, .from = i, .length = 5000};
    if (s->asks) {
      post(e, &r, 1);
      if (i == 5) barrier(s);
      await_requests(e, "SEND", 1);
    } else {
      if (i == 5) {
        await_srq_limit(s);
        barrier(s);
        await_rnr_nak(s, before);
        receive_from(e, srq, i, 5000 * i, 5000);
      }
      struct ibv_wc wc = await_receive(e, i, 5000);
      expect_value("QP of the receive", wc.qp_num, e->qp->qp_num);
      expect_pattern("SEND", s->local + 5000 * i, i, 5000);
    }
  }
  for (int i = 0; i < 2; i++) close_end(&ends[i]);
  if (srq && ibv_destroy_srq(srq)) die("ibv_destroy_srq");
}

// Requests that a responder must refuse. Each has a connection of its own, behind it waits a WRITE that must be flushed.
struct refusal {
  const char *what;
  struct request request;
  int qp_lacks, mr_lacks;  // rights
  enum ibv_wc_status wanted;
  enum ibv_wc_status of_rxe;  // when it answers something else
};

#define WRONG 0xdeadbe00u
static const struct refusal refusals[] = {
    {"CAS, wrong rkey", {.kind = CAS, .rkey = WRONG}, 0, 0, IBV_WC_REM_ACCESS_ERR, 0},
    {"FAA, wrong rkey", {.kind = FAA, .rkey = WRONG}, 0, 0, IBV_WC_REM_ACCESS_ERR, 0},
    {"ATOMIC WRITE, wrong rkey", {.kind = ATOMIC_WRITE, .rkey = WRONG}, 0, 0, IBV_WC_REM_ACCESS_ERR, 0},
    {"FLUSH, wrong rkey", {.kind = FLUSH, .rkey = WRONG, .length = 8, .flush = IBV_FLUSH_GLOBAL}, 0, 0, IBV_WC_REM_ACCESS_ERR, 0},
    {"CAS, misaligned", {.kind = CAS, .at = 4}, 0, 0, IBV_WC_REM_INV_REQ_ERR, 0},
    {"FAA, misaligned", {.kind = FAA, .at = 1}, 0, 0, IBV_WC_REM_INV_REQ_ERR, 0},
    {"ATOMIC WRITE, misaligned", {.kind = ATOMIC_WRITE, .at = 4}, 0, 0, IBV_WC_REM_INV_REQ_ERR, 0},
    {"FAA past the end", {.kind = FAA, .at = MEMORY}, 0, 0, IBV_WC_REM_ACCESS_ERR, 0},
    {"ATOMIC WRITE past the end", {.kind = ATOMIC_WRITE, .at = MEMORY}, 0, 0, IBV_WC_REM_ACCESS_ERR, 0},
    {"CAS, region without right", {.kind = CAS}, 0, IBV_ACCESS_REMOTE_ATOMIC, IBV_WC_REM_ACCESS_ERR, 0},
    {"WRITE, region without right", {.kind = WRITE, .length = 8}, 0, IBV_ACCESS_REMOTE_WRITE, IBV_WC_REM_ACCESS_ERR, 0},
    {"ATOMIC WRITE, region without right", {.kind = ATOMIC_WRITE}, 0, IBV_ACCESS_REMOTE_WRITE, IBV_WC_REM_ACCESS_ERR, 0},
    {"READ, region without right", {.kind = READ, .length = 8}, 0, IBV_ACCESS_REMOTE_READ, IBV_WC_REM_ACCESS_ERR, 0},
    {"FLUSH, region without right", {.kind = FLUSH, .length = 8, .flush = IBV_FLUSH_GLOBAL}, 0, IBV_ACCESS_FLUSH_GLOBAL,
     IBV_WC_REM_ACCESS_ERR, 0},
    {"CAS, QP without right", {.kind = CAS}, IBV_ACCESS_REMOTE_ATOMIC, 0, IBV_WC_REM_INV_REQ_ERR, 0},
    {"WRITE, QP without right", {.kind = WRITE, .length = 8}, IBV_ACCESS_REMOTE_WRITE, 0, IBV_WC_REM_INV_REQ_ERR, 0},
    {"READ, QP without right", {.kind = READ, .length = 8}, IBV_ACCESS_REMOTE_READ, 0, IBV_WC_REM_INV_REQ_ERR, 0},
    {"SEND longer than the receive", {.kind = SEND, .length = 65}, 0, 0, IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_OP_ERR},
};

static void refuse(struct side *s, const struct refusal *one) {
  struct ibv_mr *mr = ibv_reg_mr(s->pd, s->memory, MEMORY, ALL_RIGHTS & ~one->mr_lacks);
  if (!mr) die("ibv_reg_mr");
  struct end e = make_end(s, IBV_QPT_RC, ALL_RIGHTS & ~one->qp_lacks, NULL);
  if (!s->asks)
    for (int i = 0; i < 2; i++) receive(&e, i, 0, 64);
  join(&e, mr);
  if (s->asks) {
    const struct request list[] = {one->request, {.kind = WRITE, .length = 8}};
    post(&e, list, 2);
    enum ibv_wc_status wanted = one->of_rxe && !e.peer_is_rdmux ? one->of_rxe : one->wanted;
    expect_refusal(s, one->what, await_completion(e.cq).status, wanted);
    expect_status("the WRITE behind it", await_completion(e.cq).status, IBV_WC_WR_FLUSH_ERR);
  } else {
    enum ibv_wc_status first = await_completion(e.cq).status;
    if (one->request.kind != SEND) expect_status(one->what, first, IBV_WC_WR_FLUSH_ERR);
    else if (first != IBV_WC_LOC_LEN_ERR && first != IBV_WC_LOC_QP_OP_ERR)
      fail("the receive that is too short: %s", ibv_wc_status_str(first));
    expect_status("a receive", await_completion(e.cq).status, IBV_WC_WR_FLUSH_ERR);
  }
  barrier(s);
  for (uint32_t i = 0; i < MEMORY; i++) expect_value("a byte of the memory", s->memory[i], 0);
  close_end(&e);
  if (ibv_dereg_mr(mr)) die("ibv_dereg_mr");
}

static void refusals_all(struct side *s) {
  memset(s->local, 0xff, s->asks ? MEMORY : 0);
  for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
    printf("%s\n", refusals[i].what);
    refuse(s, &refusals[i]);
  }
}

// SEND with invalidate of a key that nobody has comes whole, yet its receive ends in an error and so does the responder's QP.
// The specification (9.9.3, class J) does not have the requester told.
static void wrong_invalidate(struct side *s) {
  struct end e = make_end(s, IBV_QPT_RC, ALL_RIGHTS, NULL);
  if (!s->asks)
    for (int i = 0; i < 2; i++) receive(&e, i, 0, 64);
  join(&e, s->memory_mr);
  if (s->asks) {
    request_fails(&e, "SEND with invalidate, wrong rkey", (struct request){.kind = SEND_INV, .length = 8, .rkey = WRONG},
                  e.peer_is_rdmux ? IBV_WC_RETRY_EXC_ERR : IBV_WC_SUCCESS);
  } else {
    expect_status("its receive", await_completion(e.cq).status, IBV_WC_REM_INV_REQ_ERR);
    expect_status("a receive", await_completion(e.cq).status, IBV_WC_WR_FLUSH_ERR);
  }
  close_end(&e);
}

// UC: what RC's SEND and WRITE do, unacknowledged. A WRITE with a wrong key vanishes, what follows does not.
static void unreliable(struct side *s) {
  struct end e = make_end(s, IBV_QPT_UC, IBV_ACCESS_REMOTE_WRITE, NULL);
  if (!s->asks)
    for (int i = 0; i < 5; i++) receive(&e, i, 13000 * i, 13000);
  put_pattern(s->local, 0, s->asks ? 20000 : 0);
  join(&e, s->memory_mr);
  const struct request list[] = {
      {.kind = SEND, .from = 0, .length = 0},
      {.kind = SEND, .from = 1, .length = 12289},
      {.kind = WRITE, .at = 0, .from = 0, .length = 10000},
      {.kind = WRITE, .at = 0, .from = 1, .length = 100, .rkey = WRONG},
      {.kind = SEND_IMM, .from = 2, .length = 4096, .imm = 0x01020304},
      {.kind = WRITE_IMM, .at = 10000, .from = 10000, .length = 10000, .imm = 0x05060708},
      {.kind = SEND, .from = 4, .length = 1},
  };
  if (s->asks) {
    post(&e, list, 7);
    await_requests(&e, "UC request", 7);
  } else {
    await_receive(&e, 0, 0);
    await_receive(&e, 1, 12289);
    expect_imm(await_receive(&e, 2, 4096), 0x01020304);
    expect_imm(await_receive(&e, 3, 10000), 0x05060708);
    await_receive(&e, 4, 1);
    expect_pattern("SEND", s->local + 13000, 1, 12289);
    expect_pattern("SEND with immediate", s->local + 26000, 2, 4096);
    expect_pattern("SEND", s->local + 52000, 4, 1);
    expect_pattern("WRITE", s->memory, 0, 20000);
  }
  close_end(&e);
}

// The 40 bytes in front of a datagram: the IPv6 header, or 20 bytes of no meaning and the IPv4 header.
static void expect_header(const unsigned char *header, const union ibv_gid *from, const union ibv_gid *to) {
  static const unsigned char v4[12] = {[10] = 0xff, [11] = 0xff};
  if (!memcmp(from, v4, 12)) {
    expect_value("IPv4 version and length", header[20], 0x45);
    expect_value("IPv4 protocol", header[20 + 9], IPPROTO_UDP);
    if (memcmp(header + 20 + 12, from->raw + 12, 4) || memcmp(header + 20 + 16, to->raw + 12, 4)) fail("IPv4 addresses");
  } else {
    expect_value("IPv6 version", header[0] >> 4, 6);
    if (memcmp(header + 8, from, 16) || memcmp(header + 24, to, 16)) fail("IPv6 addresses");
  }
}

// UD: three messages, between them one with a wrong Q_Key that vanishes, and an answer to where the last came from.
static void datagrams(struct side *s) {
  struct end e = make_end(s, IBV_QPT_UD, 0, NULL);
  for (int i = 0; i < 3; i++) receive(&e, i, 2000 * i, GRH + 1000);
  put_pattern(s->local + 8000, 0, 2000);
  join(&e, s->memory_mr);
  const struct request list[] = {
      {.kind = SEND, .from = 8000, .length = 1000},
      {.kind = SEND, .from = 8001, .length = 1000, .qkey = QKEY + 1},
      {.kind = SEND, .length = 0},
      {.kind = SEND_IMM, .from = 8002, .length = 999, .imm = 0x01020304},
  };
  if (s->asks) {
    post(&e, list, 4);
    await_requests(&e, "UD SEND", 4);
    await_receive(&e, 0, GRH + 500);
    expect_header(s->local, &e.peer_gid, &s->gid);
    expect_pattern("UD answer", s->local + GRH, 3, 500);
  } else {
    const struct { uint32_t from, length; } wanted[] = {{0, 1000}, {0, 0}, {2, 999}};
    struct ibv_wc wc;
    for (int i = 0; i < 3; i++) {
      wc = await_receive(&e, i, GRH + wanted[i].length);
      if (!(wc.wc_flags & IBV_WC_GRH)) fail("the receive has no GRH");
      expect_value("source QP", wc.src_qp, e.peer_qpn);
      expect_header(s->local + 2000 * i, &e.peer_gid, &s->gid);
      expect_pattern("UD SEND", s->local + 2000 * i + GRH, wanted[i].from, wanted[i].length);
    }
    expect_imm(wc, 0x01020304);
    struct ibv_ah *there = e.ah;
    if (!(e.ah = ibv_create_ah_from_wc(s->pd, &wc, (struct ibv_grh *)(s->local + 4000), 1))) die("ibv_create_ah_from_wc");
    ibv_destroy_ah(there);
    request(&e, "UD answer", (struct request){.kind = SEND, .from = 8003, .length = 500});
  }
  close_end(&e);
}

// Sixteen messages that a lossy link may swallow: what comes is whole and in order. Message i has i as immediate data.
static void many(struct side *s, enum ibv_qp_type type, uint32_t length) {
  struct end e = make_end(s, type, 0, NULL);
  uint32_t header = type == IBV_QPT_UD ? GRH : 0;
  if (!s->asks)
    for (int i = 0; i < 16; i++) receive(&e, i, 4096 * i, header + length);
  put_pattern(s->local, 0, s->asks ? MEMORY : 0);
  join(&e, s->memory_mr);
  if (s->asks) {
    for (int i = 0; i < 16; i++) {
      request(&e, "SEND", (struct request){.kind = SEND_IMM, .from = i, .length = length, .imm = i});
    }
    barrier(s);
  } else {
    barrier(s);
    if (s->lossy) usleep(SETTLE_US);
    struct ibv_wc wc;
    int n = 0;
    for (uint32_t last = 0; n < 16; n++) {
      if (!s->lossy) wc = await_completion(e.cq);
      else if (ibv_poll_cq(e.cq, 1, &wc) <= 0) break;
      uint32_t number = be32toh(wc.imm_data);
      expect_status("receive", wc.status, IBV_WC_SUCCESS);
      expect_value("number of the receive", wc.wr_id, n);
      expect_value("bytes received", wc.byte_len, header + length);
      if (number > 15 || (n > 0 && number <= last)) fail("message %u came behind message %u", number, last);
      expect_pattern("SEND", s->local + 4096 * n + header, number, length);
      last = number;
    }
    if (n < (s->lossy ? 4 : 16)) fail("only %d of 16 messages came", n);
  }
  close_end(&e);
}

// The group of the scenarios, in the address family of the link.
static struct sockaddr_storage group_of(const struct side *s) {
  struct sockaddr_storage group = {.ss_family = s->address.ss_family};
  const char *text = group.ss_family == AF_INET ? "239.9.0.9" : "ff05::909";
  void *to = group.ss_family == AF_INET ? (void *)&((struct sockaddr_in *)&group)->sin_addr
                                        : (void *)&((struct sockaddr_in6 *)&group)->sin6_addr;
  inet_pton(group.ss_family, text, to);
  return group;
}

static union ibv_gid gid_of(const struct sockaddr_storage *address) {
  union ibv_gid gid = {.raw = {[10] = 0xff, [11] = 0xff}};
  if (address->ss_family == AF_INET) memcpy(gid.raw + 12, &((struct sockaddr_in *)address)->sin_addr, 4);
  else memcpy(gid.raw, &((struct sockaddr_in6 *)address)->sin6_addr, 16);
  return gid;
}

// What has our interface receive what is sent to a group; the QP is attached by ibv_attach_mcast.
struct membership {
  struct rdma_cm_id *id;  // IPv4: the kernel's RDMA CM has joined
  int socket;             // IPv6: it does not join such groups (ENOTSUPP), a socket has
};

static struct membership join_group(struct side *s, struct sockaddr_storage *group) {
  struct membership m = {.socket = -1};
  if (group->ss_family == AF_INET6) {
    struct ipv6_mreq request = {((struct sockaddr_in6 *)group)->sin6_addr, s->interface};
    if ((m.socket = socket(AF_INET6, SOCK_DGRAM, 0)) < 0) die("socket");
    if (setsockopt(m.socket, IPPROTO_IPV6, IPV6_JOIN_GROUP, &request, sizeof request)) die("IPV6_JOIN_GROUP");
    return m;
  }
  struct sockaddr_in own = {.sin_family = AF_INET};
  memcpy(&own.sin_addr, s->gid.raw + 12, 4);
  struct rdma_event_channel *channel = rdma_create_event_channel();
  struct rdma_cm_event *event;
  if (!channel || rdma_create_id(channel, &m.id, NULL, RDMA_PS_UDP)) die("rdma_create_id");
  if (rdma_bind_addr(m.id, (struct sockaddr *)&own)) die("rdma_bind_addr");
  if (rdma_join_multicast(m.id, (struct sockaddr *)group, NULL)) die("rdma_join_multicast");
  if (rdma_get_cm_event(channel, &event)) die("rdma_get_cm_event");
  expect_value("event of joining the group", event->event, RDMA_CM_EVENT_MULTICAST_JOIN);
  union ibv_gid wanted = gid_of(group);
  if (memcmp(&event->param.ud.ah_attr.grh.dgid, &wanted, 16)) fail("the group's GID");
  rdma_ack_cm_event(event);
  return m;
}

static void leave_group(struct membership m, struct sockaddr_storage *group) {
  if (m.socket >= 0) {
    close(m.socket);
    return;
  }
  struct rdma_event_channel *channel = m.id->channel;
  if (rdma_leave_multicast(m.id, (struct sockaddr *)group) || rdma_destroy_id(m.id)) die("rdma_leave_multicast");
  rdma_destroy_event_channel(channel);
}

// UD multicast: the answerer gets what is sent to the group until it leaves; then the asker does.
static void multicast(struct side *s) {
  struct sockaddr_storage group = group_of(s);
  union ibv_gid gid = gid_of(&group);
  struct end e = make_end(s, IBV_QPT_UD, 0, NULL);
  receive(&e, 0, 0, GRH + 1000);
  put_pattern(s->local + 8000, 0, 2000);
  join(&e, s->memory_mr);
  struct ibv_ah_attr way = way_to(s, &gid);
  struct ibv_ah *to_peer = e.ah;
  uint32_t peer_qpn = e.peer_qpn;
  if (!(e.ah = ibv_create_ah(s->pd, &way))) die("ibv_create_ah of the group");
  e.peer_qpn = 0xffffff;
  for (int receiver_asks = 0; receiver_asks < 2; receiver_asks++) {
    if (s->asks == receiver_asks) {
      struct membership member = join_group(s, &group);
      errno = ibv_attach_mcast(e.qp, &gid, 0);
      if (errno) die("ibv_attach_mcast");
      barrier(s);
      struct ibv_wc wc = await_receive(&e, 0, GRH + 1000);
      expect_value("source QP", wc.src_qp, peer_qpn);
      expect_header(s->local, &e.peer_gid, &gid);
      expect_pattern("multicast", s->local + GRH, receiver_asks, 1000);
      for (int i = 1; i < 3; i++) receive(&e, i, 0, GRH + 1000);
      errno = ibv_detach_mcast(e.qp, &gid, 0);
      if (errno) die("ibv_detach_mcast");
      leave_group(member, &group);
      barrier(s);
      // What comes is the datagram behind the one to the group.
      await_receive(&e, 1, GRH + 1000);
      expect_header(s->local, &e.peer_gid, &s->gid);
      if (ibv_poll_cq(e.cq, 1, &wc)) fail("a datagram after the QP was detached");
    } else {
      barrier(s);
      request(&e, "SEND to the group", (struct request){.kind = SEND, .from = 8000 + receiver_asks, .length = 1000});
      barrier(s);
      request(&e, "SEND to the group", (struct request){.kind = SEND, .from = 8000, .length = 1000});
      struct end unicast = e;
      unicast.ah = to_peer;
      unicast.peer_qpn = peer_qpn;
      request(&unicast, "SEND to the peer", (struct request){.kind = SEND, .from = 8000, .length = 1000});
    }
    barrier(s);
  }
  ibv_destroy_ah(to_peer);
  close_end(&e);
}

static void uc_many(struct side *s) { many(s, IBV_QPT_UC, 3000); }
static void ud_many(struct side *s) { many(s, IBV_QPT_UD, 1000); }

const struct scenario verbs_scenarios[] = {
    {"send", rc_send},
    {"solicited", solicited},
    {"not-ready", not_ready},
    {"write", rc_write},
    {"read", rc_read},
    {"atomics", atomics},
    {"atomic-write", atomic_write},
    {"flush", flush},
    {"flush-dax", flush_dax},
    {"window-1", window_1},
    {"window-2", window_2},
    {"send-invalidate", send_invalidate},
    {"srq", shared_receives},
    {"refusals", refusals_all},
    {"wrong-invalidate", wrong_invalidate},
    {"uc", unreliable},
    {"uc-many", uc_many},
    {"ud", datagrams},
    {"ud-many", ud_many},
    {"multicast", multicast},
    {NULL, NULL},
};
