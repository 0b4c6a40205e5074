/* Measures a library call instead of a page fault: 4 KiB by MPI_Get from a passive target's window, rank 0 on CPU 0 from rank 1 on CPU 1.
 * `mpi_get` prints a line of JSON with percentiles in microseconds. The pages are 1,024 in turn, as in dsm_floor.c; the target waits in a barrier. */
#include "measure.h"

#include <mpi.h>

enum { PAGES = 1024, BYTES = PAGES * PAGE, ROUNDS = 20, WARM_UP = 2 };

static char local[BYTES];
static double us[PAGES * (ROUNDS + WARM_UP)];

int main(int argc, char **argv)
{
	int rank, size;
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &size);
	if (size != 2)
		MPI_Abort(MPI_COMM_WORLD, 2);
	pin(rank);
	char *memory;
	MPI_Win window;
	MPI_Win_allocate(BYTES, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &memory, &window);
	memset(memory, rank + 1, BYTES);
	MPI_Barrier(MPI_COMM_WORLD);
	if (rank == 0) {
		MPI_Win_lock_all(MPI_MODE_NOCHECK, window);
		for (size_t i = 0; i < PAGES * (ROUNDS + WARM_UP); i++) {
			size_t at = i % PAGES * PAGE;
			double begin = now_us();
			MPI_Get(local + at, PAGE, MPI_BYTE, 1, at, PAGE, MPI_BYTE, window);
			MPI_Win_flush(1, window);
			us[i] = now_us() - begin;
		}
		MPI_Win_unlock_all(window);
		CHECK(local[0] == 2 && local[BYTES - 1] == 2);
		print_line("MPI_Get", us + PAGES * WARM_UP, PAGES * ROUNDS);
	}
	MPI_Barrier(MPI_COMM_WORLD);
	MPI_Win_free(&window);
	MPI_Finalize();
	return 0;
}
