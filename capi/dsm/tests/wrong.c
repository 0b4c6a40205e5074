/* Wrong arguments, at a node that is alone: each call fails, says why, and changes nothing. */
#include "check.h"
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096 };

/* Checks that a call fails, and that the error of this thread has a word. */
#define FAILS(call, number, word) \
	do { \
		int status = (call); \
		if (status != -(number) || !strstr(rdmux_dsm_error(), word)) { \
			fprintf(stderr, "%s:%d: %s: %d (last error: %s)\n", __FILE__, __LINE__, #call, status, rdmux_dsm_error()); \
			exit(1); \
		} \
	} while (0)

static struct rdmux_dsm *session;
static struct rdmux_dsm_thread *thread;

static void *has_no_error(void *is_empty)
{
	*(int *)is_empty = rdmux_dsm_error()[0] == 0 && rdmux_dsm_error_node() == -1;
	return NULL;
}

static void *waits(void *unused)
{
	(void)unused;
	int status;
	while ((status = rdmux_dsm_barrier(thread, 2, 2)) == -EBUSY)
		sched_yield();
	CHECK(status == 0);
	return NULL;
}

/* Pointers of other kinds, of nothing, and of the program's own objects. */
static void pointers(struct rdmux_dsm_region *region)
{
	uint64_t own[8] = {0};
	void *foreign[] = {NULL, own, (char *)own + 1, thread, region, (void *)1, (void *)UINTPTR_MAX, (void *)(uintptr_t)pointers};
	for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) {
		void *it = foreign[i];
		const char *word = it ? "is no" : "null pointer";
		FAILS(rdmux_dsm_node(it), EINVAL, word);
		FAILS(rdmux_dsm_leave(it), EINVAL, word);
		if (it != region) {
			FAILS(rdmux_dsm_acquire_range(it, rdmux_dsm_region_address(region), 1, RDMUX_DSM_READ), EINVAL, word);
			CHECK(rdmux_dsm_region_address(it) == NULL && strstr(rdmux_dsm_error(), word));
			CHECK(rdmux_dsm_region_bytes(it) == 0);
		}
		if (it != thread) {
			FAILS(rdmux_dsm_lock(it, 1), EINVAL, word);
			FAILS(rdmux_dsm_release(it), EINVAL, word);
			FAILS(rdmux_dsm_acquire(it), EINVAL, word);
			FAILS(rdmux_dsm_thread_end(it), EINVAL, word);
		}
	}
	CHECK(own[0] == 0);
}

static void arguments(struct rdmux_dsm_region *region)
{
	char *bytes = rdmux_dsm_region_address(region), text[2 * PAGE] = "";
	struct rdmux_dsm_region *other = (void *)text;
	struct rdmux_dsm_thread *second = (void *)text;
	struct {
		struct rdmux_dsm_region_options options;
		const char *word;
	} wrong[] = {
		{{.faults = 4}, "enum rdmux_dsm_faults"},
		{{.homes = 4}, "enum rdmux_dsm_homes"},
		{{.homes = RDMUX_DSM_HOMES_HASH, .row = 1}, "row belongs"},
		{{.homes = RDMUX_DSM_HOMES_FIRST_TOUCH, .node = 1}, "row belongs"},
		{{.node = 1}, "row belongs"},
		{{.consistency = 2}, "enum rdmux_dsm_consistency"},
		{{.reserved = {1}}, "reserved"},
	};
	for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
		FAILS(rdmux_dsm_region_make(session, PAGE, &wrong[i].options, &other), EINVAL, wrong[i].word);
	FAILS(rdmux_dsm_region_make(session, PAGE, NULL, NULL), EINVAL, "no place");

	FAILS(rdmux_dsm_acquire_range(region, bytes - 1, 1, RDMUX_DSM_READ), EINVAL, "not in the region");
	FAILS(rdmux_dsm_acquire_range(region, bytes, PAGE + 1, RDMUX_DSM_READ), EINVAL, "not in the region");
	FAILS(rdmux_dsm_acquire_range(region, bytes + PAGE, 1, RDMUX_DSM_READ), EINVAL, "not in the region");
	FAILS(rdmux_dsm_acquire_range(region, bytes + PAGE + 1, 0, RDMUX_DSM_READ), EINVAL, "not in the region");
	FAILS(rdmux_dsm_acquire_range(region, bytes + 1, SIZE_MAX, RDMUX_DSM_READ), EINVAL, "not in the region");
	FAILS(rdmux_dsm_acquire_range(region, bytes, 1, 3), EINVAL, "enum rdmux_dsm_access");
	FAILS(rdmux_dsm_acquire_range(region, bytes, 1, 0), EINVAL, "enum rdmux_dsm_access");
	FAILS(rdmux_dsm_prefetch(region, bytes, PAGE + 1, RDMUX_DSM_READ), EINVAL, "not in the region");
	FAILS(rdmux_dsm_prefetch(region, bytes, 1, 3), EINVAL, "enum rdmux_dsm_access");
	FAILS(rdmux_dsm_read(region, bytes, NULL, 1), EINVAL, "no memory");
	FAILS(rdmux_dsm_read(region, bytes, bytes + 8, 8), EINVAL, "in a region");
	FAILS(rdmux_dsm_write(region, bytes, bytes - 4, 8), EINVAL, "in a region");
	FAILS(rdmux_dsm_write(region, bytes, NULL, 8), EINVAL, "no memory");
	FAILS(rdmux_dsm_write(region, bytes, text, 2 * PAGE), EINVAL, "not in the region");
	FAILS(rdmux_dsm_region_stat(region, NULL), EINVAL, "no place");

	struct rdmux_dsm_region_options units = {.unit = 64};
	struct rdmux_dsm_region *small;
	CHECK(rdmux_dsm_region_make(session, PAGE, &units, &small) == 0);
	char *area = rdmux_dsm_region_address(small);
	FAILS(rdmux_dsm_acquire_range(small, area, 65, RDMUX_DSM_READ), EINVAL, "not in one of its units");
	FAILS(rdmux_dsm_acquire_range(small, area + 64, 1, RDMUX_DSM_READ), EINVAL, "rdmux_dsm_region_place");
	FAILS(rdmux_dsm_acquire_range(small, area + 64 * PAGE, 1, RDMUX_DSM_READ), EINVAL, "not in the region");
	CHECK(rdmux_dsm_region_place(small, PAGE) == NULL && strstr(rdmux_dsm_error(), "byte 4096 of a region of 4096"));
	CHECK(rdmux_dsm_acquire_range(small, rdmux_dsm_region_place(small, 64), 64, RDMUX_DSM_WRITE) == 0);

	struct rdmux_dsm_heap *heap = (void *)text;
	void *object = text, *same;
	FAILS(rdmux_dsm_heap_make(session, PAGE, 4, &heap), EINVAL, "enum rdmux_dsm_faults");
	FAILS(rdmux_dsm_heap_make(session, PAGE, 0, NULL), EINVAL, "no place");
	FAILS(rdmux_dsm_heap_make_with(session, PAGE, NULL, NULL), EINVAL, "no place");
	FAILS(rdmux_dsm_heap_make_with((void *)region, PAGE, NULL, &heap), EINVAL, "is no session");
	static const struct {
		struct rdmux_dsm_heap_options options;
		const char *text;
	} bad_heaps[] = {
		{{.faults = 4}, "enum rdmux_dsm_faults"},
		{{.consistency = 2}, "enum rdmux_dsm_consistency"},
		{{.reserved = {1}}, "reserved"},
		{{.reserved = {[5] = 1}}, "reserved"},
	};
	for (size_t i = 0; i < sizeof bad_heaps / sizeof *bad_heaps; i++)
		FAILS(rdmux_dsm_heap_make_with(session, PAGE, &bad_heaps[i].options, &heap), EINVAL, bad_heaps[i].text);
	CHECK(rdmux_dsm_heap_make(session, PAGE, 0, &heap) == 0);
	FAILS(rdmux_dsm_alloc(heap, 1, 1, &object), EINVAL, "node 1 cannot be a home");
	FAILS(rdmux_dsm_alloc(heap, 1, -3, &object), EINVAL, "cannot be a home");
	FAILS(rdmux_dsm_alloc(heap, PAGE + 1, 0, &object), ENOMEM, "no room");
	FAILS(rdmux_dsm_alloc(heap, SIZE_MAX, 0, &object), EINVAL, "no process has");
	FAILS(rdmux_dsm_alloc(heap, 1, 0, NULL), EINVAL, "no place");
	FAILS(rdmux_dsm_alloc((void *)region, 1, 0, &object), EINVAL, "is no heap");
	CHECK(object == text);
	CHECK(rdmux_dsm_alloc(heap, 100, RDMUX_DSM_HERE, &object) == 0);
	void *foreign[] = {text, (void *)1, (void *)UINTPTR_MAX, bytes, (char *)object + 1, (char *)object + 128, malloc(100)};
	for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++)
		FAILS(rdmux_dsm_free(heap, foreign[i]), EINVAL, "no object begins");
	FAILS(rdmux_dsm_free((void *)region, object), EINVAL, "is no heap");
	FAILS(rdmux_dsm_read(region, bytes, object, 8), EINVAL, "in a region");
	CHECK(rdmux_dsm_free(heap, object) == 0);
	FAILS(rdmux_dsm_free(heap, object), EINVAL, "freed already");
	CHECK(rdmux_dsm_alloc(heap, 100, RDMUX_DSM_HERE, &same) == 0 && same == object);
	free(foreign[6]);

	FAILS(rdmux_dsm_thread_begin(session, 0, &second), EBUSY, "thread 0");
	FAILS(rdmux_dsm_thread_begin(session, 4096, &second), EINVAL, "thread 4096");
	FAILS(rdmux_dsm_thread_begin(session, 1, NULL), EINVAL, "no place");
	CHECK((void *)second == text && (void *)other == text);
	FAILS(rdmux_dsm_barrier(thread, 1, 0), EINVAL, "at least one party");
	FAILS(rdmux_dsm_reduce_u64(thread, 1, 1, 0, 1, NULL), EINVAL, "enum rdmux_dsm_operation");
	FAILS(rdmux_dsm_reduce_f64(thread, 1, 1, 4, 1, NULL), EINVAL, "enum rdmux_dsm_operation");
	FAILS(rdmux_dsm_unlock(thread, 1), EPERM, "does not have the lock");
	FAILS(rdmux_dsm_wait(thread, 1, 1), EPERM, "does not have the lock");
	CHECK(rdmux_dsm_lock(thread, 1) == 0);
	FAILS(rdmux_dsm_lock(thread, 1), EDEADLK, "already");
	FAILS(rdmux_dsm_lock_shared(thread, 1), EDEADLK, "already");
	CHECK(rdmux_dsm_unlock(thread, 1) == 0);
	CHECK(rdmux_dsm_barrier(thread, 1, 1) == 0);
	FAILS(rdmux_dsm_barrier(thread, 1, 2), EPROTO, "do not agree");
}

/* An object that another thread uses is busy. */
static void busy(void)
{
	struct rdmux_dsm_thread *other;
	pthread_t waiting;
	CHECK(rdmux_dsm_thread_begin(session, 1, &other) == 0);
	CHECK(pthread_create(&waiting, NULL, waits, NULL) == 0);
	/* Until it is in its call, this thread may use it. */
	while (rdmux_dsm_load(thread, 1, NULL) == 0)
		sched_yield();
	FAILS(rdmux_dsm_load(thread, 1, NULL), EBUSY, "another thread");
	FAILS(rdmux_dsm_release(thread), EBUSY, "another thread");
	FAILS(rdmux_dsm_acquire(thread), EBUSY, "another thread");
	FAILS(rdmux_dsm_thread_end(thread), EBUSY, "another thread");
	FAILS(rdmux_dsm_leave(session), EBUSY, "another thread");
	CHECK(rdmux_dsm_barrier(other, 2, 2) == 0);
	CHECK(pthread_join(waiting, NULL) == 0);
	CHECK(rdmux_dsm_thread_end(other) == 0);
	FAILS(rdmux_dsm_release(other), EINVAL, "has ended");
	FAILS(rdmux_dsm_acquire(other), EINVAL, "has ended");
}

/* A child has nothing, and ends nothing of its parent's. */
static void children(struct rdmux_dsm_region *region)
{
	pid_t child = fork();
	if (child == 0) {
		struct rdmux_dsm *other;
		FAILS(rdmux_dsm_node(session), EINVAL, "fork(2)");
		FAILS(rdmux_dsm_leave(session), EINVAL, "fork(2)");
		FAILS(rdmux_dsm_lock(thread, 1), EINVAL, "fork(2)");
		FAILS(rdmux_dsm_join(1000, &other), EINVAL, "fork(2)");
		CHECK(rdmux_dsm_region_address(region) == NULL);
		exit(0);
	}
	int status;
	CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
	CHECK(rdmux_dsm_node(session) == 0);
}

int main(void)
{
	FAILS(rdmux_dsm_join(1000, NULL), EINVAL, "no place");
	FAILS(rdmux_dsm_join_file(NULL, 0, NULL, 1000, &session), EINVAL, "no cluster file");
	FAILS(rdmux_dsm_join_file("/does/not/exist", 0, "/does/not/exist", 1000, &session), EACCES, "key file /does/not/exist");
	CHECK(session == NULL);
	CHECK(rdmux_dsm_join(60000, &session) == 0 && rdmux_dsm_node(session) == 0);
	CHECK(rdmux_dsm_thread_begin(session, 0, &thread) == 0);
	struct rdmux_dsm_region *region;
	CHECK(rdmux_dsm_region_make(session, PAGE, NULL, &region) == 0);
	pointers(region);
	arguments(region);
	busy();
	children(region);

	/* Errors are a thread's own. */
	int is_empty = 0;
	pthread_t other;
	CHECK(rdmux_dsm_error()[0] != 0);
	CHECK(pthread_create(&other, NULL, has_no_error, &is_empty) == 0 && pthread_join(other, NULL) == 0 && is_empty);

	/* No region can be made after one that failed, so this is the last one. */
	struct rdmux_dsm_region *none;
	FAILS(rdmux_dsm_region_make(session, 0, NULL, &none), EINVAL, "0 bytes");
	CHECK(rdmux_dsm_leave(session) == 0);
	FAILS(rdmux_dsm_leave(session), EINVAL, "has ended");
	FAILS(rdmux_dsm_lock(thread, 1), EINVAL, "has ended");
	CHECK(rdmux_dsm_region_address(region) == NULL);
	return 0;
}
