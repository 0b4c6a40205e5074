/* Red-black successive over-relaxation of an N x N grid by MPI: what a distributed shared memory is compared with.
 * `mpi_sor N ITERATIONS` prints a line of JSON: seconds of the iterations, and a checksum in full precision. One rank is the sequential program.
 *
 * Point (i, j) begins as (31 i + 17 j) mod 101 / 101; the outermost rows and columns stay as they are. An iteration updates all points with even
 * i + j, then all others: x += OMEGA * (((up + down) + (left + right)) * 0.25 - x). Each rank, on the CPU of its number, has a block of rows as
 * equal as possible, and exchanges boundary rows with its neighbours before each half. The checksum is the sum of the rows' sums, each from left to
 * right, in the order of the rows; so it is the same to the last bit with any number of ranks, and for any other program that follows this. */
#include "measure.h"

#include <mpi.h>

static const double OMEGA = 1.5;

/* Exchanges boundary rows of `n` points; `grid` has one row of each neighbour around its own `rows`. */
static void exchange(double *grid, int n, int rows, int above, int below)
{
	double *first = grid + n, *last = grid + (size_t)n * rows;
	MPI_Sendrecv(first, n, MPI_DOUBLE, above, 0, last + n, n, MPI_DOUBLE, below, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	MPI_Sendrecv(last, n, MPI_DOUBLE, below, 0, grid, n, MPI_DOUBLE, above, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

/* Updates the points of one colour in row `i` of the whole grid. */
static void relax_row(double *row, int n, int i, int colour)
{
	for (int j = 1 + (i + 1 + colour) % 2; j < n - 1; j += 2) {
		double mean = ((row[j - n] + row[j + n]) + (row[j - 1] + row[j + 1])) * 0.25;
		row[j] += OMEGA * (mean - row[j]);
	}
}

static double checksum(const double *grid, int n, int begin, int rows)
{
	double *mine = calloc(n, sizeof *mine), *all = calloc(n, sizeof *all), sum = 0;
	CHECK(mine && all);
	for (int i = begin; i < begin + rows; i++)
		for (int j = 0; j < n; j++)
			mine[i] += grid[(size_t)(i - begin + 1) * n + j];
	/* One rank alone has a row that is not zero, so this adds nothing. */
	MPI_Reduce(mine, all, n, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
	for (int i = 0; i < n; i++)
		sum += all[i];
	free(mine);
	free(all);
	return sum;
}

int main(int argc, char **argv)
{
	int rank, ranks;
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	int n = argc == 3 ? atoi(argv[1]) : 0, iterations = argc == 3 ? atoi(argv[2]) : 0;
	if (n < 3 || n > 30000 || n < ranks || iterations < 1)
		MPI_Abort(MPI_COMM_WORLD, 2);
	pin(rank);
	int begin = (long)n * rank / ranks, rows = (long)n * (rank + 1) / ranks - begin;
	int above = rank > 0 ? rank - 1 : MPI_PROC_NULL, below = rank < ranks - 1 ? rank + 1 : MPI_PROC_NULL;
	double *grid = calloc((size_t)n * (rows + 2), sizeof *grid);
	CHECK(grid);
	for (int i = begin; i < begin + rows; i++)
		for (int j = 0; j < n; j++)
			grid[(size_t)(i - begin + 1) * n + j] = (31L * i + 17L * j) % 101 / 101.0;

	MPI_Barrier(MPI_COMM_WORLD);
	double start = now_us();
	for (int half = 0; half < 2 * iterations; half++) {
		exchange(grid, n, rows, above, below);
		for (int i = begin; i < begin + rows; i++)
			if (i > 0 && i < n - 1)
				relax_row(grid + (size_t)(i - begin + 1) * n, n, i, half % 2);
	}
	MPI_Barrier(MPI_COMM_WORLD);
	double seconds = (now_us() - start) / 1e6, sum = checksum(grid, n, begin, rows);
	if (rank == 0)
		printf("{\"n\":%d,\"iterations\":%d,\"ranks\":%d,\"seconds\":%.4f,\"checksum\":%.17g}\n", n, iterations, ranks, seconds, sum);
	free(grid);
	MPI_Finalize();
	return 0;
}
