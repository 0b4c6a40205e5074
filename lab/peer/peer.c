// lab-peer: a program of the kernel's side of the lab. It speaks to an RDMA device by libibverbs and librdmacm, in the
// guest rxe, and does by turns what rdmux does, so that each can be the other's peer.
//
//   lab-peer server ADDR PORT [BYTES [N]]   transfer.c: serves BYTES (1048576) of zeroes to N (1) connections in turn
//   lab-peer client ADDR PORT [BYTES]       transfer.c: connects and transfers
//   lab-peer refused ADDR PORT              transfer.c: connects and makes requests that must fail
//   lab-peer answer ADDR PORT               scenarios of verbs.c and cm.c: the side that is asked, at ADDR
//   lab-peer ask ADDR PORT OWN [-l] [NAME...]   the side that asks, at OWN: those named, or all. -l: the link is lossy
//
// Scenarios are carried out by two programs that hold each other's hands over TCP, at the same address and port:
// * The asker begins with 16 bytes: "lossy", or "whole", and zeroes. For each scenario it sends its name and zeroes, 16
//   bytes; at the end it closes the connection.
// * In a scenario both swap, at points that both know, eight integers of 64 bits, big endian; where no more is meant
//   than that both have come there, they are zeroes (a barrier). A scenario ends with a barrier.
//
// Exit status 0 when all held. A line "ok NAME" says that a scenario did.
#include "peer.h"

#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NAME = 16, SCENARIO_SECONDS = 30 };

void die(const char *what) {
  fprintf(stderr, "lab-peer: %s: %s\n", what, strerror(errno));
  exit(1);
}

void fail(const char *format, ...) {
  va_list values;
  va_start(values, format);
  fprintf(stderr, "lab-peer: ");
  vfprintf(stderr, format, values);
  fprintf(stderr, "\n");
  exit(1);
}

unsigned char pattern(uint32_t i) { return (uint32_t)((i + 1) * 2654435761u) >> 24; }

void put_pattern(unsigned char *to, uint32_t from, uint32_t length) {
  for (uint32_t i = 0; i < length; i++) to[i] = pattern(from + i);
}

void expect_pattern(const char *what, const unsigned char *bytes, uint32_t from, uint32_t length) {
  for (uint32_t i = 0; i < length; i++)
    if (bytes[i] != pattern(from + i)) fail("%s: byte %u is 0x%02x, not 0x%02x", what, i, bytes[i], pattern(from + i));
}

void expect_value(const char *what, uint64_t value, uint64_t wanted) {
  if (value != wanted) fail("%s is 0x%lx, not 0x%lx", what, value, wanted);
}

void expect_status(const char *what, enum ibv_wc_status status, enum ibv_wc_status wanted) {
  if (status != wanted) fail("%s: \"%s\", not \"%s\"", what, ibv_wc_status_str(status), ibv_wc_status_str(wanted));
}

// Gives way while it waits: in the guest both sides share one CPU.
struct ibv_wc await_completion(struct ibv_cq *cq) {
  struct ibv_wc wc;
  int n;
  while ((n = ibv_poll_cq(cq, 1, &wc)) == 0) sched_yield();
  if (n < 0) die("ibv_poll_cq");
  return wc;
}

// False when the other side has closed the connection before the first byte.
static int read_all(int from, void *bytes, size_t length) {
  for (size_t done = 0; done < length;) {
    ssize_t n = read(from, (char *)bytes + done, length - done);
    if (n == 0 && done == 0) return 0;
    if (n <= 0) fail("the other side went away");
    done += n;
  }
  return 1;
}

static void write_all(int to, const void *bytes, size_t length) {
  if (write(to, bytes, length) != (ssize_t)length) fail("the other side went away");
}

struct told swap_told(struct side *s, struct told mine) {
  struct told theirs;
  for (int i = 0; i < 8; i++) mine.value[i] = htobe64(mine.value[i]);
  write_all(s->control, &mine, sizeof mine);
  if (!read_all(s->control, &theirs, sizeof theirs)) fail("the other side went away");
  for (int i = 0; i < 8; i++) theirs.value[i] = be64toh(theirs.value[i]);
  return theirs;
}

void barrier(struct side *s) { swap_told(s, (struct told){0}); }

static socklen_t parse_address(const char *host, const char *port, struct sockaddr_storage *address) {
  struct sockaddr_in *v4 = (struct sockaddr_in *)address;
  struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)address;
  memset(address, 0, sizeof *address);
  if (inet_pton(AF_INET, host, &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(atoi(port));
    return sizeof *v4;
  }
  if (inet_pton(AF_INET6, host, &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(atoi(port));
    return sizeof *v6;
  }
  fail("%s is not an IPv4 or IPv6 address", host);
}

// Finds the device and the index of the GID that is this address.
static void open_device(struct side *s, const struct sockaddr_storage *own) {
  union ibv_gid gid = {.raw = {[10] = 0xff, [11] = 0xff}};
  if (own->ss_family == AF_INET) memcpy(gid.raw + 12, &((struct sockaddr_in *)own)->sin_addr, 4);
  else memcpy(gid.raw, &((struct sockaddr_in6 *)own)->sin6_addr, 16);
  int n;
  struct ibv_device **devices = ibv_get_device_list(&n);
  for (int i = 0; i < n; i++) {
    struct ibv_context *verbs = ibv_open_device(devices[i]);
    struct ibv_gid_entry entries[64];
    int m = verbs ? ibv_query_gid_table(verbs, entries, 64, 0) : 0;
    for (int j = 0; j < m; j++)
      if (entries[j].gid_type == IBV_GID_TYPE_ROCE_V2 && !memcmp(&entries[j].gid, &gid, sizeof gid)) {
        struct ibv_port_attr port;
        errno = ibv_query_port(verbs, 1, &port);
        if (errno) die("ibv_query_port");
        s->verbs = verbs;
        s->gid = gid;
        s->gid_index = entries[j].gid_index;
        s->interface = entries[j].ndev_ifindex;
        s->mtu = port.active_mtu;
        return;
      }
  }
  fail("no RDMA device has the address");
}

static void open_side(struct side *s, const struct sockaddr_storage *own) {
  open_device(s, own);
  if (!(s->pd = ibv_alloc_pd(s->verbs))) die("ibv_alloc_pd");
  s->memory = aligned_alloc(4096, MEMORY);
  s->local = aligned_alloc(4096, MEMORY);
  if (!s->memory || !s->local) die("aligned_alloc");
  s->memory_mr = ibv_reg_mr(s->pd, s->memory, MEMORY, ALL_RIGHTS);
  s->local_mr = ibv_reg_mr(s->pd, s->local, MEMORY, IBV_ACCESS_LOCAL_WRITE);
  if (!s->memory_mr || !s->local_mr) die("ibv_reg_mr");
}

// Names none: all.
static const struct scenario *find_scenario(const char *name) {
  const struct scenario *lists[] = {verbs_scenarios, cm_scenarios};
  for (int i = 0; i < 2; i++)
    for (const struct scenario *one = lists[i]; one->name; one++)
      if (!strcmp(one->name, name)) return one;
  fail("no scenario %s", name);
}

static void run_scenario(struct side *s, const char *name) {
  const struct scenario *one = find_scenario(name);
  alarm(SCENARIO_SECONDS);  // a request or message that is never answered
  memset(s->memory, 0, MEMORY);
  memset(s->local, 0, MEMORY);
  one->run(s);
  barrier(s);
  printf("ok %s\n", name);
}

static void answer(const struct sockaddr_storage *address, socklen_t length) {
  struct side s = {.address = *address};
  open_side(&s, address);
  int listener = socket(address->ss_family, SOCK_STREAM, 0), on = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(listener, (const struct sockaddr *)address, length) || listen(listener, 1)) die("bind");
  printf("listening\n");
  if ((s.control = accept(listener, NULL, NULL)) < 0) die("accept");
  char name[NAME + 1] = "";
  if (!read_all(s.control, name, NAME)) fail("the asker said nothing");
  s.lossy = !strcmp(name, "lossy");
  while (read_all(s.control, name, NAME)) run_scenario(&s, name);
}

static void ask_for(struct side *s, const char *name) {
  char padded[NAME + 1] = "";
  snprintf(padded, sizeof padded, "%s", name);
  write_all(s->control, padded, NAME);
}

static void ask(const struct sockaddr_storage *address, socklen_t length, const char *own, char **names) {
  struct side s = {.asks = 1, .address = *address};
  struct sockaddr_storage own_address;
  parse_address(own, "0", &own_address);
  open_side(&s, &own_address);
  s.control = socket(address->ss_family, SOCK_STREAM, 0);
  if (connect(s.control, (const struct sockaddr *)address, length)) die("connect");
  if (*names && !strcmp(*names, "-l")) {
    s.lossy = 1;
    names++;
  }
  ask_for(&s, s.lossy ? "lossy" : "whole");
  const char *all[32] = {0};
  int n = 0;
  for (const struct scenario *one = verbs_scenarios; one->name; one++) all[n++] = one->name;
  for (const struct scenario *one = cm_scenarios; one->name; one++) all[n++] = one->name;
  for (const char **name = *names ? (const char **)names : all; *name; name++) {
    ask_for(&s, *name);
    run_scenario(&s, *name);
  }
}

static void usage(void) {
  fail("usage: lab-peer server|client|refused ADDR PORT [BYTES [CONNECTIONS]], "
       "lab-peer answer ADDR PORT, lab-peer ask ADDR PORT OWN [-l] [NAME...]");
}

int main(int argc, char **argv) {
  setvbuf(stdout, NULL, _IOLBF, 0);
  alarm(60);  // a peer that never comes or never answers
  if (argc < 4) usage();
  struct sockaddr_storage address;
  socklen_t length = parse_address(argv[2], argv[3], &address);
  uint32_t bytes = argc > 4 ? strtoul(argv[4], NULL, 10) : 1 << 20;
  if (!strcmp(argv[1], "server")) serve(&address, bytes, argc > 5 ? atoi(argv[5]) : 1);
  else if (!strcmp(argv[1], "client")) client(&address, bytes);
  else if (!strcmp(argv[1], "refused")) refused(&address);
  else if (!strcmp(argv[1], "answer")) answer(&address, length);
  else if (!strcmp(argv[1], "ask") && argc > 4) ask(&address, length, argv[4], argv + 5);
  else usage();
  return 0;
}
