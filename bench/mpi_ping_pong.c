/* MPI ping-pong between two ranks, on CPU 0 and 1. `mpi_ping_pong BYTES ROUNDS` prints the median half round trip, in microseconds. */
#include "measure.h"

#include <mpi.h>

/* Round trips timed together: reading the clock takes as long as a part of one. */
enum { GROUP = 2 };

int main(int argc, char **argv)
{
	int rank;
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	if (argc != 3)
		MPI_Abort(MPI_COMM_WORLD, 2);
	int bytes = atoi(argv[1]), groups = atoi(argv[2]) / GROUP, warm_up = groups / 10;
	pin(rank);
	char *message = calloc(bytes, 1);
	double *us = calloc(groups + warm_up + 1, sizeof *us);
	for (int i = 0; i < groups + warm_up; i++) {
		double begin = MPI_Wtime();
		for (int round = 0; round < GROUP; round++) {
			if (rank == 0)
				MPI_Send(message, bytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
			MPI_Recv(message, bytes, MPI_BYTE, 1 - rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			if (rank == 1)
				MPI_Send(message, bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
		}
		us[i] = (MPI_Wtime() - begin) * 1e6 / GROUP / 2;
	}
	if (rank == 0)
		printf("%.4f\n", percentile(us + warm_up, groups, 50));
	MPI_Finalize();
	return 0;
}
