/* A hash table of fixed-size records in a distributed shared memory, with locks over groups of buckets.
 *
 *   cc -O2 -o kv dsm_kv.c $(pkg-config --cflags --libs rdmux-dsm)
 *   rdmux dsm run -n 2 -- ./kv [OPERATIONS [KEYS [SEED]]]
 *
 * As in dsm_kv.rs, each node puts, gets and deletes keys of its own, in an order that the seed decides, and gets those of others too. The outcomes
 * of operations on its own keys depend on nobody else, so they are checked against those of an array of this process; a record of another's key has
 * to be whole. Then all keys are counted, and each node compares all records. A group of buckets is a page, so who has its lock is not disturbed
 * by other groups. Accesses are plain ones, since the locks order them. */
#include <inttypes.h>
#include <rdmux_dsm.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum {
	RECORD_WORDS = 8,
	BUCKET_RECORDS = 8,
	GROUP_BUCKETS = 8,
	GROUP_RECORDS = GROUP_BUCKETS * BUCKET_RECORDS,
	VALUES = RECORD_WORDS - 1,
};

/* A record. Its key is 0 if there is none. The value is there this often, as a record that is torn has different ones. */
struct record {
	uint64_t key, values[VALUES];
};

/* A value, or none. */
struct outcome {
	bool is_there;
	uint64_t value;
};

static _Noreturn void fail(const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	fprintf(stderr, "dsm_kv: ");
	vfprintf(stderr, format, arguments);
	fprintf(stderr, "\n");
	va_end(arguments);
	exit(1);
}

/* Ends the program with the library's reason if a call fails. */
static void check(int status)
{
	if (status < 0)
		fail("%s", rdmux_dsm_error());
}

static double seconds(void)
{
	struct timespec at;
	clock_gettime(CLOCK_MONOTONIC, &at);
	return at.tv_sec + at.tv_nsec / 1e9;
}

static void *allocate(size_t items, size_t bytes)
{
	void *memory = calloc(items, bytes);
	if (!memory)
		fail("no memory");
	return memory;
}

/* A key's bucket. The multiplier is 2^64 divided by the golden ratio; the upper half depends on all bits. */
static size_t bucket_of(uint64_t key, size_t groups) { return (key * 0x9e3779b97f4a7c15u >> 32) % (groups * GROUP_BUCKETS); }

/* Number of groups with which no bucket can overflow, whichever of the keys 1 to `keys` are there. */
static size_t groups_for(uint64_t keys)
{
	for (size_t groups = 1;; groups *= 2) {
		unsigned char *counts = allocate(groups * GROUP_BUCKETS, 1);
		bool fits = true;
		for (uint64_t key = 1; key <= keys && fits; key++)
			fits = ++counts[bucket_of(key, groups)] <= BUCKET_RECORDS;
		free(counts);
		if (fits)
			return groups;
	}
}

static uint64_t value_of(const struct record *record)
{
	for (size_t i = 1; i < VALUES; i++)
		if (record->values[i] != record->values[0])
			fail("the record of key %" PRIu64 " is torn", record->key);
	return record->values[0];
}

/* The table in shared memory, or the array of one process, whose `thread` is null. */
struct store {
	struct rdmux_dsm_thread *thread;
	struct record *records;
	size_t groups;
	struct outcome *array;
};

enum action { GET, PUT, DELETE };

/* Carries out an operation, and returns the value before. */
static struct outcome act(const struct store *store, enum action action, uint64_t key, uint64_t value)
{
	struct outcome new = {action == PUT, value};
	if (!store->thread) {
		struct outcome before = store->array[key];
		if (action != GET)
			store->array[key] = new;
		return before;
	}
	size_t bucket = bucket_of(key, store->groups), group = bucket / GROUP_BUCKETS;
	check(action == GET ? rdmux_dsm_lock_shared(store->thread, group) : rdmux_dsm_lock(store->thread, group));
	struct record *records = store->records + bucket * BUCKET_RECORDS, *found = NULL, *free = NULL;
	for (size_t i = BUCKET_RECORDS; i-- > 0;) {
		if (records[i].key == key)
			found = records + i;
		if (records[i].key == 0)
			free = records + i;
	}
	struct outcome before = {found, found ? value_of(found) : 0};
	struct record *record = found ? found : free;
	if (action == PUT) {
		if (!record)
			fail("a bucket overflows");
		record->key = key;
		for (size_t i = 0; i < VALUES; i++)
			record->values[i] = value;
	} else if (action == DELETE && found) {
		found->key = 0;
	}
	check(rdmux_dsm_unlock(store->thread, group));
	return before;
}

/* The operations of the nodes. */
struct mix {
	size_t operations;
	uint64_t keys, seed;
	size_t nodes;
};

/* Next number of SplitMix64 (Steele, Lea and Flood, 2014). */
static uint64_t next(uint64_t *state)
{
	uint64_t z = *state += 0x9e3779b97f4a7c15u;
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}

/* Carries out the operations of one node. Returns a digest of the outcomes of those on its own keys. */
static uint64_t play(const struct mix *mix, const struct store *store, size_t node)
{
	uint64_t random = mix->seed * mix->nodes + node, digest = 0;
	for (size_t i = 0; i < mix->operations; i++) {
		uint64_t first = 1 + next(&random) % mix->keys * mix->nodes, value = next(&random), kind = next(&random) % 10;
		if (kind == 5) {
			act(store, GET, first + next(&random) % mix->nodes, 0);
			continue;
		}
		enum action action = kind < 5 ? GET : kind < 9 ? PUT : DELETE;
		struct outcome outcome = act(store, action, first + node, value);
		uint64_t word = outcome.is_there ? outcome.value | 2 : 1;
		digest = (digest << 5 | digest >> 59) * 0x100000001b3u ^ word;
	}
	return digest;
}

/* Returns an argument of the program, or a default. */
static uint64_t number(char **argv, int argc, int place, uint64_t otherwise)
{
	if (place >= argc)
		return otherwise;
	char *end;
	unsigned long number = strtoul(argv[place], &end, 10);
	if (*end || number == 0 || number > 100000000)
		fail("%s: not a number from 1 to 100000000", argv[place]);
	return number;
}

int main(int argc, char **argv)
{
	struct mix mix = {number(argv, argc, 1, 20000), number(argv, argc, 2, 2000), number(argv, argc, 3, 7), 0};
	struct rdmux_dsm *session;
	check(rdmux_dsm_join(30000, &session));
	size_t node = rdmux_dsm_node(session), nodes = mix.nodes = rdmux_dsm_nodes(session);
	struct store table = {.groups = groups_for(mix.keys * nodes)}, alone = {0};
	check(rdmux_dsm_thread_begin(session, 0, &table.thread));
	size_t records = table.groups * GROUP_RECORDS;
	struct rdmux_dsm_region *region;
	check(rdmux_dsm_region_make(session, records * sizeof(struct record), NULL, &region));
	table.records = rdmux_dsm_region_address(region);

	check(rdmux_dsm_barrier(table.thread, 0, nodes));
	double start = seconds();
	uint64_t digest = play(&mix, &table, node);
	check(rdmux_dsm_barrier(table.thread, 0, nodes));
	double shared = seconds() - start;
	/* Each node counts the records of some groups. */
	uint64_t count = 0;
	for (size_t i = node * table.groups / nodes * GROUP_RECORDS; i < (node + 1) * table.groups / nodes * GROUP_RECORDS; i++)
		count += table.records[i].key != 0;
	check(rdmux_dsm_reduce_u64(table.thread, 0, nodes, RDMUX_DSM_SUM, count, &count));

	alone.array = allocate(mix.keys * nodes + 1, sizeof *alone.array);
	start = seconds();
	for (size_t other = 0; other < nodes; other++) {
		uint64_t expected = play(&mix, &alone, other);
		if (other == node && digest != expected)
			fail("seed %" PRIu64 ": node %zu had other outcomes than alone", mix.seed, node);
	}
	double sequential = seconds() - start;
	uint64_t there = 0;
	for (uint64_t key = 1; key <= mix.keys * nodes; key++)
		there += alone.array[key].is_there;
	if (count != there)
		fail("seed %" PRIu64 ": %" PRIu64 " keys instead of %" PRIu64, mix.seed, count, there);
	for (size_t i = 0; i < records; i++) {
		const struct record *record = table.records + i;
		if (record->key > mix.keys * nodes || (record->key != 0 && !alone.array[record->key].is_there))
			fail("seed %" PRIu64 ": key %" PRIu64 " should not be there", mix.seed, record->key);
		if (record->key != 0 && value_of(record) != alone.array[record->key].value)
			fail("seed %" PRIu64 ": key %" PRIu64 " has another value than alone", mix.seed, record->key);
	}
	printf("node %zu: %.3f s, alone %.3f s, keys %" PRIu64 ": correct\n", node, shared, sequential, count);
	fflush(stdout);

	/* The others may still need this node's pages. */
	check(rdmux_dsm_barrier(table.thread, 0, nodes));
	check(rdmux_dsm_leave(session));
	free(alone.array);
	return 0;
}
