/* Red-black successive over-relaxation by MPI, of the same grid and in the same order as examples/dsm_sor.rs, beside which it is measured.
 * `mpi_sor EDGE ITERATIONS` prints a line of JSON: seconds of the iterations, and a checksum in full precision. One rank is the sequential program.
 *
 * The grid has EDGE x EDGE points and a border: its first row is 100, all else begins at 0. An iteration updates the points of one colour, then the
 * others. Each rank, on the CPU of its number, has a block of rows, and exchanges boundary rows with its neighbours before each half. The
 * checksum adds the rows' sums in the order of the rows, so it is the same to the last bit with any number of ranks. */
#include "measure.h"

#include <mpi.h>

/* Factor of over-relaxation. */
static const double OMEGA = 1.25;

/* Exchanges boundary rows; `grid` has one row of each neighbour, or of the border, around its own `rows`. */
static void exchange(double *grid, int width, int rows, int above, int below)
{
	double *first = grid + width, *last = grid + (size_t)width * rows;
	MPI_Sendrecv(first, width, MPI_DOUBLE, above, 0, last + width, width, MPI_DOUBLE, below, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	MPI_Sendrecv(last, width, MPI_DOUBLE, below, 0, grid, width, MPI_DOUBLE, above, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

/* Updates the points of one colour in a row, whose number is that in the whole grid. */
static void relax_row(double *row, int width, int number, int colour)
{
	for (int j = 1 + (number + colour) % 2; j < width - 1; j += 2) {
		double around = row[j - width] + row[j + width] + row[j - 1] + row[j + 1];
		row[j] += OMEGA * (around / 4 - row[j]);
	}
}

/* Returns, to rank 0, the sum of all points; the others get another number. */
static double checksum(const double *grid, int edge, int begin, int rows)
{
	double *mine = calloc(edge, sizeof *mine), *all = calloc(edge, sizeof *all), sum = 0;
	CHECK(mine && all);
	for (int i = 0; i < rows; i++)
		for (int j = 1; j <= edge; j++)
			mine[begin + i] += grid[(size_t)(i + 1) * (edge + 2) + j];
	/* One rank alone has a sum of a row, so this rounds nothing. */
	MPI_Reduce(mine, all, edge, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
	for (int i = 0; i < edge; i++)
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
	int edge = argc == 3 ? atoi(argv[1]) : 0, iterations = argc == 3 ? atoi(argv[2]) : 0;
	if (edge < ranks || edge > 30000 || iterations < 1)
		MPI_Abort(MPI_COMM_WORLD, 2);
	pin(rank);
	int width = edge + 2, begin = (long)edge * rank / ranks, rows = (long)edge * (rank + 1) / ranks - begin;
	int above = rank > 0 ? rank - 1 : MPI_PROC_NULL, below = rank < ranks - 1 ? rank + 1 : MPI_PROC_NULL;
	double *grid = calloc((size_t)width * (rows + 2), sizeof *grid);
	CHECK(grid);
	for (int j = 0; rank == 0 && j < width; j++)
		grid[j] = 100;

	MPI_Barrier(MPI_COMM_WORLD);
	double start = now_us();
	for (int half = 0; half < 2 * iterations; half++) {
		exchange(grid, width, rows, above, below);
		for (int i = 1; i <= rows; i++)
			relax_row(grid + (size_t)i * width, width, begin + i, half % 2);
	}
	MPI_Barrier(MPI_COMM_WORLD);
	double seconds = (now_us() - start) / 1e6, sum = checksum(grid, edge, begin, rows);
	if (rank == 0)
		printf("{\"edge\":%d,\"iterations\":%d,\"ranks\":%d,\"seconds\":%.4f,\"checksum\":%.17g}\n", edge, iterations, ranks, seconds, sum);
	free(grid);
	MPI_Finalize();
	return 0;
}
