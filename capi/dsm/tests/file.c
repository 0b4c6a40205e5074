/* Joins the cluster of a file: `file FILE NODE KEYFILE`. */
#include "check.h"

int main(int argc, char **argv)
{
	struct rdmux_dsm *session;
	struct rdmux_dsm_thread *thread;
	CHECK(argc == 4);
	CHECK(rdmux_dsm_join_file(argv[1], atoi(argv[2]), argv[3], LONG_MS, &session) == 0);
	CHECK(rdmux_dsm_thread_begin(session, 0, &thread) == 0);
	uint32_t nodes = rdmux_dsm_nodes(session);
	uint64_t sum;
	CHECK(rdmux_dsm_reduce_u64(thread, 1, nodes, RDMUX_DSM_SUM, rdmux_dsm_node(session), &sum) == 0);
	printf("%u nodes, sum %lu\n", nodes, (unsigned long)sum);
	CHECK(rdmux_dsm_barrier(thread, 1, nodes) == 0);
	CHECK(rdmux_dsm_leave(session) == 0);
	return 0;
}
