/* Nodes that lock, write and meet until one is gone; then each says which one that was. Node 1 has another lock all the time, which the others then
 * get with a mark, or not any more if its home was the node that is gone. */
#include "check.h"
#include <stdint.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 4, ALL = 100, HELD = 7 };

static struct rdmux_dsm_region *region;
static uint32_t nodes;

/* Adds to a number of a page. */
static int add(char *place, uint64_t number)
{
	uint64_t sum;
	int status = rdmux_dsm_read(region, place, &sum, sizeof sum);
	sum += number;
	return status < 0 ? status : rdmux_dsm_write(region, place, &sum, sizeof sum);
}

/* Returns a failure of a round, after which the thread has no lock of a page. */
static int work(struct rdmux_dsm_thread *thread, uint64_t round)
{
	char *bytes = rdmux_dsm_region_address(region);
	for (int page = 0; page < PAGES; page++) {
		int status = rdmux_dsm_lock(thread, page);
		if (status < 0)
			return status;
		status = add(bytes + page * PAGE, round);
		int end = rdmux_dsm_unlock(thread, page);
		if (status < 0 || end < 0)
			return end < 0 ? end : status;
	}
	return rdmux_dsm_barrier(thread, ALL, nodes);
}

int main(void)
{
	struct rdmux_dsm *session;
	struct rdmux_dsm_thread *thread;
	CHECK(rdmux_dsm_join(LONG_MS, &session) == 0);
	CHECK(rdmux_dsm_region_make(session, PAGES * PAGE, NULL, &region) == 0);
	CHECK(rdmux_dsm_thread_begin(session, 0, &thread) == 0);
	nodes = rdmux_dsm_nodes(session);
	if (rdmux_dsm_node(session) == 1)
		CHECK(rdmux_dsm_lock(thread, HELD) == 0);
	CHECK(rdmux_dsm_barrier(thread, ALL, nodes) == 0);
	printf("@ begins\n");
	fflush(stdout);
	int status = 0;
	for (uint64_t round = 1; (status = work(thread, round)) == 0; round++)
		;
	CHECK(status == -EHOSTDOWN);
	printf("@ misses %d: %s\n", rdmux_dsm_error_node(), rdmux_dsm_error());
	if (rdmux_dsm_node(session) == 1) {
		status = rdmux_dsm_unlock(thread, HELD);
		CHECK(status == 0 || status == -EHOSTDOWN);
	}
	status = rdmux_dsm_lock(thread, HELD);
	CHECK(status == 0 || status == EOWNERDEAD || status == -EHOSTDOWN);
	if (status != 0)
		printf("@ lock %s %d: %s\n", status > 0 ? "recovered from" : "lost with", rdmux_dsm_error_node(), rdmux_dsm_error());
	if (status >= 0)
		CHECK(rdmux_dsm_unlock(thread, HELD) == 0);
	printf("@ ends\n");
	fflush(stdout);
	/* The others would miss this node, too. */
	for (;;)
		pause();
}
