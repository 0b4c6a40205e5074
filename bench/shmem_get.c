/* Measures the same as mpi_get.c, by shmem_getmem of OpenSHMEM: PE 0 on CPU 0 from PE 1 on CPU 1, which waits in a barrier. */
#include "measure.h"

#include <shmem.h>

enum { PAGES = 1024, BYTES = PAGES * PAGE, ROUNDS = 20, WARM_UP = 2 };

static char local[BYTES];
static double us[PAGES * (ROUNDS + WARM_UP)];

int main(void)
{
	shmem_init();
	CHECK(shmem_n_pes() == 2);
	pin(shmem_my_pe());
	char *memory = shmem_malloc(BYTES);
	CHECK(memory);
	memset(memory, shmem_my_pe() + 1, BYTES);
	shmem_barrier_all();
	if (shmem_my_pe() == 0) {
		for (size_t i = 0; i < PAGES * (ROUNDS + WARM_UP); i++) {
			size_t at = i % PAGES * PAGE;
			double begin = now_us();
			shmem_getmem(local + at, memory + at, PAGE, 1);
			us[i] = now_us() - begin;
		}
		CHECK(local[0] == 2 && local[BYTES - 1] == 2);
		print_line("shmem_getmem", us + PAGES * WARM_UP, PAGES * ROUNDS);
	}
	shmem_barrier_all();
	/* shmem_finalize of Debian's Open MPI 4.1.4 crashes. */
	shmem_global_exit(0);
}
