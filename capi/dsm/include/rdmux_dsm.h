/* Distributed shared memory of rdmux: processes of one host or many have memory in common, at the same address. rdmux_dsm(3) has an introduction.
 *
 * A function that returns int returns a negative number of errno.h if it fails: rdmux_dsm_error() then says why. The structures are opaque. A null
 * pointer, and one that this library did not give out or that has ended, is -EINVAL, and nothing is done. */
#ifndef RDMUX_DSM_H
#define RDMUX_DSM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* This process as a node of a cluster. */
struct rdmux_dsm;
/* Memory that all nodes have in common. */
struct rdmux_dsm_region;
/* Memory that any node allocates and frees. */
struct rdmux_dsm_heap;
/* A thread of this node, as the other nodes know it. */
struct rdmux_dsm_thread;

/* Errors of the calling thread: rdmux_dsm_error(3). */

/* The last error, in a line; an empty string if there was none. It is valid until the thread's next call that fails. */
const char *rdmux_dsm_error(void);
/* The node that the last error is about, or -1 if it is about none. */
int rdmux_dsm_error_node(void);

/* Joining and leaving: rdmux_dsm_join(3). */

/* Joins the cluster that `rdmux dsm run` has set in the environment. */
int rdmux_dsm_join(unsigned int timeout_ms, struct rdmux_dsm **session);
/* Joins the cluster of a file as one of its nodes. Without a key file it is the user's own key. */
int rdmux_dsm_join_file(const char *file, uint32_t node, const char *key_file, unsigned int timeout_ms, struct rdmux_dsm **session);
/* Ends the threads and regions of a session, and leaves the cluster. */
int rdmux_dsm_leave(struct rdmux_dsm *session);
/* Number of this node, from 0 on. */
int rdmux_dsm_node(struct rdmux_dsm *session);
/* Number of nodes at the beginning. */
int rdmux_dsm_nodes(struct rdmux_dsm *session);

/* Regions: rdmux_dsm_region_make(3). */

/* Ways of answering the page faults of a node. */
enum rdmux_dsm_faults {
	RDMUX_DSM_FAULTS_DEFAULT = 0, /* as RDMUX_DSM_FAULTS says, which `rdmux dsm run --faults` sets */
	RDMUX_DSM_FAULTS_THREAD = 1,
	RDMUX_DSM_FAULTS_INLINE = 2,
	RDMUX_DSM_FAULTS_MPROTECT = 3,
};

/* Homes of the units of a region: the node that knows who has a unit, and needs no message for it as long as nobody else has it. */
enum rdmux_dsm_homes {
	RDMUX_DSM_HOMES_IN_TURN = 0,     /* the field row says how many units in a row have one home */
	RDMUX_DSM_HOMES_HASH = 1,        /* spread over the nodes */
	RDMUX_DSM_HOMES_FIRST_TOUCH = 2, /* the first node that touches a unit is its home */
	RDMUX_DSM_HOMES_NODE = 3,        /* the field node says which */
};

/* Orders in which nodes see each other's accesses to a region or a heap. */
enum rdmux_dsm_consistency {
	RDMUX_DSM_CONSISTENCY_SEQUENTIAL = 0, /* all nodes see all in one order */
	RDMUX_DSM_CONSISTENCY_RELEASE = 1,    /* a node sees the writes of another one when it has synchronised with it by a call of a thread; several nodes may write a unit */
};

/* Settings of a region, the same on all nodes but for faults. A field of 0 has its default. */
struct rdmux_dsm_region_options {
	uint64_t row;         /* units in a row whose home is one node, then the next node has as many; default 1 */
	uint32_t faults;      /* enum rdmux_dsm_faults */
	uint32_t homes;       /* enum rdmux_dsm_homes */
	uint32_t node;        /* home of all units, with RDMUX_DSM_HOMES_NODE alone */
	uint32_t unit;        /* bytes to which nodes have rights as a whole: a power of two from 64 to 2 MiB; default a page */
	uint32_t consistency; /* enum rdmux_dsm_consistency */
	uint32_t reserved[1]; /* 0 */
};

enum rdmux_dsm_access {
	RDMUX_DSM_READ = 1,
	RDMUX_DSM_WRITE = 2, /* and reading */
};

/* Counts of a region at this node. */
struct rdmux_dsm_stat {
	uint64_t read_faults;
	uint64_t write_faults;
	uint64_t fetches;       /* units that were read from other nodes */
	uint64_t invalidations; /* rights that others have taken */
	uint64_t messages;      /* messages sent */
	/* Of a region with release consistency, otherwise 0. */
	uint64_t releases;       /* releases of units that were written; threads that come at the same time share one */
	uint64_t acquires;       /* acquires, in the same way */
	uint64_t twins;          /* copies of units before they were written, whose home is another node */
	uint64_t flushes_sent;   /* flushes that were sent to homes, each of neighbouring units */
	uint64_t flushes;        /* flushes of other nodes that this node has carried out as their home */
	uint64_t landed_units;   /* units that were read for those straight into the own ones */
	uint64_t merged_units;   /* units that were read for those with their twins, which are as many bytes again */
	uint64_t log_read_bytes; /* bytes of other nodes' logs that acquires have read */
	uint64_t reserved[3];    /* 0 */
};

/* Makes a region of zeros. All nodes call it, in the same order with the same settings, or with a null pointer for the defaults. */
int rdmux_dsm_region_make(struct rdmux_dsm *session, uint64_t bytes, const struct rdmux_dsm_region_options *options, struct rdmux_dsm_region **region);
/* Address of the first byte, the same on all nodes, until the session is left; a null pointer if there is no such region. */
void *rdmux_dsm_region_address(struct rdmux_dsm_region *region);
/* Bytes of the region, which are whole pages and units; 0 if there is no such region. */
uint64_t rdmux_dsm_region_bytes(struct rdmux_dsm_region *region);
/* Address of a byte. In a region whose units are smaller than a page, only the bytes of one unit are side by side. A null pointer if there is none. */
void *rdmux_dsm_region_place(struct rdmux_dsm_region *region, uint64_t offset);
/* Gets a right to bytes of the region, which other nodes may take again at once. */
int rdmux_dsm_acquire_range(struct rdmux_dsm_region *region, const volatile void *start, size_t bytes, enum rdmux_dsm_access access);
/* Asks for a right to bytes of the region without waiting: a later touch of them waits less. At most 256 units that are away are asked for, and 1 MiB, but at least two. */
int rdmux_dsm_prefetch(struct rdmux_dsm_region *region, const volatile void *start, size_t bytes, enum rdmux_dsm_access access);
/* Copies bytes of the region into memory that is in no region. */
int rdmux_dsm_read(struct rdmux_dsm_region *region, const volatile void *from, void *to, size_t bytes);
/* Copies bytes from memory that is in no region into the region. */
int rdmux_dsm_write(struct rdmux_dsm_region *region, volatile void *to, const void *from, size_t bytes);
int rdmux_dsm_region_stat(struct rdmux_dsm_region *region, struct rdmux_dsm_stat *stat);

/* Heaps: rdmux_dsm_alloc(3). */

/* Homes of an object that is allocated, besides the numbers of nodes. */
#define RDMUX_DSM_HERE (-1)    /* this node */
#define RDMUX_DSM_IN_TURN (-2) /* the nodes in turn, for the objects that this node allocates */

/* Settings of a heap, the same on all nodes but for faults. A field of 0 has its default. */
struct rdmux_dsm_heap_options {
	uint32_t faults;      /* enum rdmux_dsm_faults */
	uint32_t consistency; /* enum rdmux_dsm_consistency */
	uint32_t reserved[6]; /* 0 */
};

/* Makes a heap, of which each node has so many bytes for the objects of each size. All nodes call it, in the order of regions and heaps. */
int rdmux_dsm_heap_make(struct rdmux_dsm *session, uint64_t bytes, enum rdmux_dsm_faults faults, struct rdmux_dsm_heap **heap);
/* The same, with settings, or with a null pointer for the defaults. */
int rdmux_dsm_heap_make_with(struct rdmux_dsm *session, uint64_t bytes, const struct rdmux_dsm_heap_options *options, struct rdmux_dsm_heap **heap);
/* Allocates an object at home at a node. Its address is the same on all nodes, each of which may free it. */
int rdmux_dsm_alloc(struct rdmux_dsm_heap *heap, size_t bytes, int node, void **object);
/* Frees an object. What is none, or was freed already, is -EINVAL. A null pointer is nothing. After an error nothing is freed. */
int rdmux_dsm_free(struct rdmux_dsm_heap *heap, void *object);

/* Threads and locks: rdmux_dsm_lock(3). Locks, conditions, barriers and words are numbers, which all nodes share; each kind has numbers of its own. */

/* Makes a thread of this node known under a number below 4096, which no other thread of it has. */
int rdmux_dsm_thread_begin(struct rdmux_dsm *session, uint16_t number, struct rdmux_dsm_thread **thread);
/* Ends that. Locks that the thread still has are given back. */
int rdmux_dsm_thread_end(struct rdmux_dsm_thread *thread);
/* Takes a lock for this thread alone. Returns EOWNERDEAD, not negative, if it has the lock from a node that left with it. */
int rdmux_dsm_lock(struct rdmux_dsm_thread *thread, uint64_t lock);
/* Takes a lock together with others that share it. */
int rdmux_dsm_lock_shared(struct rdmux_dsm_thread *thread, uint64_t lock);
/* Gives a lock back, taken by either of these. */
int rdmux_dsm_unlock(struct rdmux_dsm_thread *thread, uint64_t lock);
/* Gives back a lock that the thread has for itself, waits until the condition is signalled, and takes the lock again. */
int rdmux_dsm_wait(struct rdmux_dsm_thread *thread, uint64_t condition, uint64_t lock);
/* Wakes the thread that has waited for a condition longest, if there is one. */
int rdmux_dsm_signal(struct rdmux_dsm_thread *thread, uint64_t condition);
/* Wakes all threads that wait for a condition. */
int rdmux_dsm_broadcast(struct rdmux_dsm_thread *thread, uint64_t condition);

/* Barriers and words: rdmux_dsm_barrier(3). A result may be a null pointer where nobody wants it. */

enum rdmux_dsm_operation {
	RDMUX_DSM_SUM = 1, /* in the order of nodes and threads; integers wrap */
	RDMUX_DSM_MIN = 2,
	RDMUX_DSM_MAX = 3,
};

/* Waits until so many threads of all nodes have come. */
int rdmux_dsm_barrier(struct rdmux_dsm_thread *thread, uint64_t barrier, uint32_t parties);
/* The same, and reduces their values to one. */
int rdmux_dsm_reduce_f64(struct rdmux_dsm_thread *thread, uint64_t barrier, uint32_t parties, enum rdmux_dsm_operation operation, double value, double *result);
int rdmux_dsm_reduce_u64(struct rdmux_dsm_thread *thread, uint64_t barrier, uint32_t parties, enum rdmux_dsm_operation operation, uint64_t value, uint64_t *result);
int rdmux_dsm_reduce_i64(struct rdmux_dsm_thread *thread, uint64_t barrier, uint32_t parties, enum rdmux_dsm_operation operation, int64_t value, int64_t *result);
/* Adds to a word of 64 bits, wrapping. Its value before is the result. */
int rdmux_dsm_fetch_add(struct rdmux_dsm_thread *thread, uint64_t word, uint64_t value, uint64_t *before);
/* Sets a word to a new value if it has the expected one. Its value before is the result. */
int rdmux_dsm_compare_swap(struct rdmux_dsm_thread *thread, uint64_t word, uint64_t expected, uint64_t value, uint64_t *before);
/* Reads a word. */
int rdmux_dsm_load(struct rdmux_dsm_thread *thread, uint64_t word, uint64_t *value);

/* Release and acquire, in regions and heaps with release consistency: rdmux_dsm_release(3). The functions of threads above do it, so programs that synchronise by them need neither. */

/* Releases what this node has written: threads of other nodes that acquire after that see it. */
int rdmux_dsm_release(struct rdmux_dsm_thread *thread);
/* Acquires what other nodes have released before. */
int rdmux_dsm_acquire(struct rdmux_dsm_thread *thread);

#ifdef __cplusplus
}
#endif

#endif
