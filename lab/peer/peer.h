// What the parts of lab-peer share.
#include <infiniband/verbs.h>
#include <stdint.h>
#include <sys/socket.h>

enum {
  TIMEOUT_MS = 20000,
  MEMORY = 65536,  // bytes of a side's memory, and of its local memory
  ALL_RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC |
               IBV_ACCESS_MW_BIND | IBV_ACCESS_FLUSH_GLOBAL,
};

// One of the two programs that carry out scenarios together: the asker or the answerer.
struct side {
  int asks;
  int lossy;   // the link loses datagrams: those of UC and UD may be missing, all else must hold
  int control; // TCP connection to the other side
  struct sockaddr_storage address;  // of the answerer
  struct ibv_context *verbs;
  struct ibv_pd *pd;
  union ibv_gid gid;
  int gid_index;
  uint32_t interface;  // of the device, its index
  enum ibv_mtu mtu;
  unsigned char *memory;     // what peers reach, zeroed before each scenario
  unsigned char *local;      // own source of requests and target of receives
  struct ibv_mr *memory_mr;  // all rights
  struct ibv_mr *local_mr;   // no remote right
};

// What one side tells the other.
struct told {
  uint64_t value[8];
};

struct scenario {
  const char *name;
  void (*run)(struct side *);
};

extern const struct scenario verbs_scenarios[], cm_scenarios[];  // each ends with a name of NULL

// peer.c
void die(const char *what) __attribute__((noreturn));  // with errno
void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
unsigned char pattern(uint32_t i);
void put_pattern(unsigned char *to, uint32_t from, uint32_t length);
void expect_pattern(const char *what, const unsigned char *bytes, uint32_t from, uint32_t length);
void expect_value(const char *what, uint64_t value, uint64_t wanted);
void expect_status(const char *what, enum ibv_wc_status status, enum ibv_wc_status wanted);
struct ibv_wc await_completion(struct ibv_cq *cq);
struct told swap_told(struct side *s, struct told mine);
void barrier(struct side *s);

// transfer.c
void serve(struct sockaddr_storage *address, uint32_t bytes, int connections);
void client(struct sockaddr_storage *address, uint32_t bytes);
void refused(struct sockaddr_storage *address);
