/* Each function on all nodes: its result, and what it changes. */
#include "check.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

enum { PAGE = 4096, WORDS = 64, ROUNDS = 20, THREADS = 3 };

/* Barriers, locks, conditions and words, each kind with numbers of its own. */
enum { ALL = 1, PARTIES = 2, LOCK = 1, CONDITION = 1, COUNT = 1, SWAPPED = 2 };

static struct rdmux_dsm *session;
static uint32_t node, nodes;

static void regions(struct rdmux_dsm_thread *thread)
{
	struct rdmux_dsm_region_options options = {.row = 2};
	struct rdmux_dsm_region *region, *other;
	CHECK(rdmux_dsm_region_make(session, 8 * PAGE - 5, NULL, &region) == 0);
	CHECK(rdmux_dsm_region_make(session, PAGE, &options, &other) == 0 && other != region);
	CHECK(rdmux_dsm_region_bytes(region) == 8 * PAGE && rdmux_dsm_region_bytes(other) == PAGE);
	char *bytes = rdmux_dsm_region_address(region);
	CHECK(bytes && bytes[0] == 0 && bytes[8 * PAGE - 1] == 0);
	CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);

	/* Plain accesses: each node has a page, and reads the next one's. */
	uint32_t next = (node + 1) % nodes;
	memset(bytes + node * PAGE, 'a' + node, PAGE);
	CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
	/* Asked for, the page comes without a touch. */
	struct rdmux_dsm_stat before, after;
	CHECK(rdmux_dsm_region_stat(region, &before) == 0);
	CHECK(rdmux_dsm_prefetch(region, bytes + next * PAGE, PAGE, RDMUX_DSM_READ) == 0);
	time_t deadline = time(NULL) + LONG_MS / 1000;
	do {
		CHECK(time(NULL) < deadline);
		sched_yield();
		CHECK(rdmux_dsm_region_stat(region, &after) == 0);
	} while (after.fetches == before.fetches && nodes > 1);
	CHECK(bytes[next * PAGE] == (char)('a' + next) && bytes[(next + 1) * PAGE - 1] == (char)('a' + next));
	CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);

	/* Copies, across the boundary of two pages. */
	char text[16] = "", *place = bytes + 6 * PAGE - 6;
	if (node == 0)
		CHECK(rdmux_dsm_write(region, place, "hello, nodes", 13) == 0);
	CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
	CHECK(rdmux_dsm_read(region, place, text, 13) == 0 && strcmp(text, "hello, nodes") == 0);
	CHECK(rdmux_dsm_read(region, bytes + 8 * PAGE, NULL, 0) == 0);

	/* A node that has the right takes no fault. The others do not touch the page. */
	if (node == nodes - 1) {
		CHECK(rdmux_dsm_acquire_range(region, bytes + 7 * PAGE, PAGE, RDMUX_DSM_WRITE) == 0);
		CHECK(rdmux_dsm_region_stat(region, &before) == 0);
		bytes[7 * PAGE] = 1;
		CHECK(rdmux_dsm_region_stat(region, &after) == 0);
		CHECK(after.write_faults == before.write_faults && after.read_faults == before.read_faults);
		CHECK(after.acquires == 0 && after.log_read_bytes == 0 && after.reserved[0] == 0);
	}
	CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
	CHECK(rdmux_dsm_acquire_range(region, bytes, 8 * PAGE, RDMUX_DSM_READ) == 0);
	CHECK(bytes[7 * PAGE] == 1);

	/* Atomics of the processor. */
	_Atomic uint64_t *words = rdmux_dsm_region_address(other);
	for (int i = 0; i < ROUNDS; i++)
		atomic_fetch_add(&words[i % WORDS], 1);
	CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
	for (int i = 0; i < ROUNDS; i++)
		CHECK(atomic_load(&words[i]) == nodes);
}

/* A node that writes a page at home there asks nobody. */
static void homes(struct rdmux_dsm_thread *thread)
{
	struct rdmux_dsm_region_options all[] = {
		{.homes = RDMUX_DSM_HOMES_NODE, .node = nodes - 1},
		{.homes = RDMUX_DSM_HOMES_FIRST_TOUCH},
		{.homes = RDMUX_DSM_HOMES_HASH},
	};
	for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
		struct rdmux_dsm_region *region;
		struct rdmux_dsm_stat stat;
		CHECK(rdmux_dsm_region_make(session, 16 * PAGE, &all[i], &region) == 0);
		char *bytes = rdmux_dsm_region_address(region);
		if (node == nodes - 1)
			for (int page = 0; page < 16; page++)
				bytes[page * PAGE] = page + 1;
		CHECK(rdmux_dsm_region_stat(region, &stat) == 0);
		CHECK(i == 2 || stat.fetches == 0);
		CHECK(i != 0 || stat.messages == 0);
		CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
		for (int page = 0; page < 16; page++)
			CHECK(bytes[page * PAGE] == page + 1);
		CHECK(rdmux_dsm_region_stat(region, &stat) == 0);
		CHECK(i == 2 || stat.fetches == (node == nodes - 1 ? 0 : 16));
		CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
	}
}

/* All nodes write bytes of the same units at the same time. */
static void releases(struct rdmux_dsm_thread *thread)
{
	struct rdmux_dsm_region_options all[] = {
		{.consistency = RDMUX_DSM_CONSISTENCY_RELEASE},
		{.consistency = RDMUX_DSM_CONSISTENCY_RELEASE, .unit = 1024, .homes = RDMUX_DSM_HOMES_FIRST_TOUCH},
		{.consistency = RDMUX_DSM_CONSISTENCY_RELEASE, .unit = 4 * PAGE, .homes = RDMUX_DSM_HOMES_HASH},
	};
	for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
		struct rdmux_dsm_region *region;
		struct rdmux_dsm_stat stat;
		CHECK(rdmux_dsm_region_make(session, 8 * PAGE, &all[i], &region) == 0);
		for (int round = 1; round < 5; round++) {
			for (uint64_t at = node; at < 8 * PAGE; at += nodes)
				*(char *)rdmux_dsm_region_place(region, at) = round + at;
			CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
			for (uint64_t at = 0; at < 8 * PAGE; at++)
				CHECK(*(char *)rdmux_dsm_region_place(region, at) == (char)(round + at));
			CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
		}
		/* Each barrier acquires, and every other one has something to release. */
		CHECK(rdmux_dsm_region_stat(region, &stat) == 0);
		CHECK(stat.releases == 4 && stat.acquires == 8 && stat.reserved[0] == 0);
		/* Other nodes are the homes of some pages, which they need not be for few units by hash, or where one node has touched all first. */
		CHECK(i > 0 || ((stat.twins > 0) == (nodes > 1) && (stat.flushes_sent > 0) == (nodes > 1)));
		CHECK((stat.flushes > 0) == (stat.landed_units + stat.merged_units > 0));
		CHECK((stat.log_read_bytes > 0) == (nodes > 1));
	}
}

/* Waits until a word of a sequential region has a value. */
static void await_step(_Atomic uint64_t *word, uint64_t step)
{
	time_t deadline = time(NULL) + LONG_MS / 1000;
	while (atomic_load(word) != step) {
		CHECK(time(NULL) < deadline);
		sched_yield();
	}
}

/* One node after the other writes, and tells it by a word of a sequential region, which orders nothing of the other one. */
static void messages(struct rdmux_dsm_thread *thread)
{
	struct rdmux_dsm_region_options options = {.consistency = RDMUX_DSM_CONSISTENCY_RELEASE};
	struct rdmux_dsm_region *region, *sequential;
	CHECK(rdmux_dsm_region_make(session, 8 * PAGE, &options, &region) == 0);
	CHECK(rdmux_dsm_region_make(session, PAGE, NULL, &sequential) == 0);
	char *bytes = rdmux_dsm_region_address(region);
	_Atomic uint64_t *word = rdmux_dsm_region_address(sequential);
	/* From the second round on, all have the pages of the round before. */
	for (uint64_t round = 1; round < 5; round++) {
		if (node == round % nodes) {
			memset(bytes, round, 8 * PAGE);
			CHECK(rdmux_dsm_release(thread) == 0);
			atomic_store(word, round);
		} else {
			await_step(word, round);
			CHECK(rdmux_dsm_acquire(thread) == 0);
		}
		for (int at = 0; at < 8 * PAGE; at++)
			CHECK(bytes[at] == (char)round);
		CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
	}
}

/* Objects of all sizes that other nodes read and free. */
static void objects(struct rdmux_dsm_thread *thread)
{
	enum { SIZES = 5, EACH = 4 };
	static const size_t sizes[SIZES] = {1, 64, 700, PAGE, 2 * PAGE + 1};
	struct rdmux_dsm_heap *heap;
	struct rdmux_dsm_region *board;
	CHECK(rdmux_dsm_heap_make(session, 64 * PAGE, RDMUX_DSM_FAULTS_DEFAULT, &heap) == 0);
	CHECK(rdmux_dsm_region_make(session, nodes * PAGE, NULL, &board) == 0);
	char **own = (char **)((char *)rdmux_dsm_region_address(board) + node * PAGE);
	uint32_t next = (node + 1) % nodes;
	char **theirs = (char **)((char *)rdmux_dsm_region_address(board) + next * PAGE);
	for (int i = 0; i < SIZES * EACH; i++) {
		static const int places[EACH] = {RDMUX_DSM_HERE, 0, RDMUX_DSM_IN_TURN, RDMUX_DSM_IN_TURN};
		void *object = NULL;
		CHECK(rdmux_dsm_alloc(heap, sizes[i / EACH], places[i % EACH], &object) == 0 && (uintptr_t)object % 16 == 0);
		memset(object, 'a' + (i + node) % 26, sizes[i / EACH]);
		own[i] = object;
	}
	CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
	for (int i = 0; i < SIZES * EACH; i++) {
		size_t bytes = sizes[i / EACH];
		char value = 'a' + (i + next) % 26;
		CHECK(theirs[i][0] == value && theirs[i][bytes - 1] == value);
		CHECK(rdmux_dsm_free(heap, theirs[i]) == 0);
	}
	CHECK(rdmux_dsm_free(heap, NULL) == 0);
	CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
	CHECK(rdmux_dsm_free(heap, theirs[0]) == -EINVAL && strstr(rdmux_dsm_error(), "freed already"));

	/* Small units are beside each other in their pages, each with an address of its own. */
	struct rdmux_dsm_region_options options = {.unit = 128};
	struct rdmux_dsm_region *small;
	CHECK(rdmux_dsm_region_make(session, PAGE, &options, &small) == 0);
	CHECK(rdmux_dsm_region_bytes(small) == PAGE && rdmux_dsm_region_place(small, 0) == rdmux_dsm_region_address(small));
	for (int unit = node; unit < PAGE / 128; unit += nodes)
		memset(rdmux_dsm_region_place(small, unit * 128), unit + 1, 128);
	struct rdmux_dsm_stat stat;
	CHECK(rdmux_dsm_region_stat(small, &stat) == 0 && stat.fetches == 0);
	CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
	for (int unit = 0; unit < PAGE / 128; unit++) {
		char byte = 0, *place = rdmux_dsm_region_place(small, unit * 128 + 127);
		CHECK(*place == unit + 1);
		CHECK(rdmux_dsm_read(small, place, &byte, 1) == 0 && byte == unit + 1);
	}
	CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
}

/* Objects that one node has written and freed, and another one allocates and writes, in part with the bytes of its old copy. Words of a sequential
 * region tell the two of each other. */
static void reuses(struct rdmux_dsm_thread *thread)
{
	enum { SIZES = 2, OLD = 7 };
	static const size_t sizes[SIZES] = {64, 2 * PAGE};
	struct rdmux_dsm_heap_options options = {.consistency = RDMUX_DSM_CONSISTENCY_RELEASE};
	struct rdmux_dsm_heap *heap, *defaults;
	struct rdmux_dsm_region *board;
	CHECK(rdmux_dsm_heap_make_with(session, 64 * PAGE, &options, &heap) == 0);
	CHECK(rdmux_dsm_heap_make_with(session, 64 * PAGE, NULL, &defaults) == 0 && defaults != heap);
	CHECK(rdmux_dsm_region_make(session, PAGE, NULL, &board) == 0);
	_Atomic uint64_t *step = rdmux_dsm_region_address(board);
	char **place = (char **)step + 1;
	uint32_t owner = nodes - 1;
	for (uint32_t i = 0; i < SIZES * nodes; i++) {
		size_t bytes = sizes[i % SIZES];
		void *object = NULL;
		if (node == 0) {
			CHECK(rdmux_dsm_alloc(heap, bytes, i / SIZES, &object) == 0);
			memset(object, OLD, bytes);
			*place = object;
		}
		CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
		char *shared_object = *place;
		CHECK(shared_object[0] == OLD && shared_object[bytes - 1] == OLD);
		CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
		if (node == 0) {
			memset(shared_object, 5, bytes);
			CHECK(rdmux_dsm_free(heap, shared_object) == 0);
			atomic_store(step, 2 * i + 1);
		}
		if (node == owner) {
			await_step(step, 2 * i + 1);
			CHECK(rdmux_dsm_alloc(heap, bytes, i / SIZES, &object) == 0 && object == shared_object);
			memset(object, OLD, bytes / 2);
			memset((char *)object + bytes / 2, 9, bytes / 2);
			CHECK(rdmux_dsm_release(thread) == 0);
			atomic_store(step, 2 * i + 2);
		}
		await_step(step, 2 * i + 2);
		CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
		for (size_t at = 0; at < bytes; at++)
			CHECK(shared_object[at] == (at < bytes / 2 ? OLD : 9));
		CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
		if (node == owner)
			CHECK(rdmux_dsm_free(heap, shared_object) == 0);
		CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
	}
}

static void reductions(struct rdmux_dsm_thread *thread)
{
	double real;
	uint64_t word;
	int64_t integer;
	CHECK(rdmux_dsm_reduce_f64(thread, ALL, nodes, RDMUX_DSM_SUM, node + 0.5, &real) == 0 && real == nodes * (nodes - 1) / 2 + nodes * 0.5);
	CHECK(rdmux_dsm_reduce_f64(thread, ALL, nodes, RDMUX_DSM_MIN, node + 0.5, &real) == 0 && real == 0.5);
	CHECK(rdmux_dsm_reduce_f64(thread, ALL, nodes, RDMUX_DSM_MAX, node + 0.5, &real) == 0 && real == nodes - 0.5);
	CHECK(rdmux_dsm_reduce_u64(thread, ALL, nodes, RDMUX_DSM_SUM, 1ull << 63, &word) == 0 && word == (nodes % 2 ? 1ull << 63 : 0));
	CHECK(rdmux_dsm_reduce_u64(thread, ALL, nodes, RDMUX_DSM_MIN, UINT64_MAX - node, &word) == 0 && word == UINT64_MAX - (nodes - 1));
	CHECK(rdmux_dsm_reduce_u64(thread, ALL, nodes, RDMUX_DSM_MAX, UINT64_MAX - node, &word) == 0 && word == UINT64_MAX);
	CHECK(rdmux_dsm_reduce_i64(thread, ALL, nodes, RDMUX_DSM_SUM, -1, &integer) == 0 && integer == -(int64_t)nodes);
	CHECK(rdmux_dsm_reduce_i64(thread, ALL, nodes, RDMUX_DSM_MIN, -(int64_t)node, &integer) == 0 && integer == 1 - (int64_t)nodes);
	CHECK(rdmux_dsm_reduce_i64(thread, ALL, nodes, RDMUX_DSM_MAX, -(int64_t)node, &integer) == 0 && integer == 0);
	CHECK(rdmux_dsm_reduce_u64(thread, ALL, nodes, RDMUX_DSM_SUM, 1, NULL) == 0);
}

static void words(struct rdmux_dsm_thread *thread)
{
	uint64_t word = 9;
	for (int i = 0; i < ROUNDS; i++)
		CHECK(rdmux_dsm_fetch_add(thread, COUNT, 1, i == 0 ? NULL : &word) == 0 && word < nodes * ROUNDS);
	CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
	CHECK(rdmux_dsm_load(thread, COUNT, &word) == 0 && word == nodes * ROUNDS);
	/* One node is the first. */
	CHECK(rdmux_dsm_compare_swap(thread, SWAPPED, 0, node + 1, &word) == 0);
	uint64_t first = word == 0 ? node + 1 : word, is_first = word == 0, count;
	CHECK(rdmux_dsm_reduce_u64(thread, ALL, nodes, RDMUX_DSM_SUM, is_first, &count) == 0 && count == 1);
	CHECK(rdmux_dsm_load(thread, SWAPPED, &word) == 0 && word == first);
}

static struct rdmux_dsm_region *shared;

/* The threads of all nodes add to a number, and take turns by a condition. */
static void *adds(void *number)
{
	struct rdmux_dsm_thread *thread;
	uint16_t own = (uintptr_t)number;
	CHECK(rdmux_dsm_thread_begin(session, own, &thread) == 0);
	uint64_t *sum = rdmux_dsm_region_address(shared), *turn = sum + 1, all = nodes * THREADS;
	for (int i = 0; i < ROUNDS; i++) {
		CHECK(rdmux_dsm_lock(thread, LOCK) == 0);
		++*sum;
		CHECK(rdmux_dsm_unlock(thread, LOCK) == 0);
	}
	CHECK(rdmux_dsm_barrier(thread, PARTIES, all) == 0);
	CHECK(rdmux_dsm_lock_shared(thread, LOCK) == 0);
	CHECK(*sum == all * ROUNDS);
	CHECK(rdmux_dsm_unlock(thread, LOCK) == 0);

	CHECK(rdmux_dsm_lock(thread, LOCK) == 0);
	while (*turn != node * THREADS + own - 1u)
		CHECK(rdmux_dsm_wait(thread, CONDITION, LOCK) == 0);
	++*turn;
	CHECK(rdmux_dsm_broadcast(thread, CONDITION) == 0);
	/* Nobody waits for this one. */
	CHECK(rdmux_dsm_signal(thread, CONDITION + 1) == 0);
	/* Its end gives the lock back. */
	CHECK(rdmux_dsm_thread_end(thread) == 0);
	CHECK(rdmux_dsm_unlock(thread, LOCK) == -EINVAL);
	return NULL;
}

static void threads(void)
{
	CHECK(rdmux_dsm_region_make(session, PAGE, NULL, &shared) == 0);
	pthread_t all[THREADS];
	for (uintptr_t i = 0; i < THREADS; i++)
		CHECK(pthread_create(&all[i], NULL, adds, (void *)(i + 1)) == 0);
	for (int i = 0; i < THREADS; i++)
		CHECK(pthread_join(all[i], NULL) == 0);
}

int main(void)
{
	struct rdmux_dsm_thread *thread;
	CHECK(rdmux_dsm_join(LONG_MS, &session) == 0);
	CHECK(rdmux_dsm_error()[0] == 0 && rdmux_dsm_error_node() == -1);
	node = rdmux_dsm_node(session);
	nodes = rdmux_dsm_nodes(session);
	CHECK(node < nodes);
	CHECK(rdmux_dsm_thread_begin(session, 0, &thread) == 0);
	regions(thread);
	homes(thread);
	releases(thread);
	messages(thread);
	objects(thread);
	reuses(thread);
	reductions(thread);
	words(thread);
	threads();
	CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
	CHECK(rdmux_dsm_leave(session) == 0);
	CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == -EINVAL);
	printf("node %u of %u\n", node, nodes);
	return 0;
}
