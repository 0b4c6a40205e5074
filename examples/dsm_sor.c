/* Red-black successive over-relaxation (SOR) of a grid in a distributed shared memory, checked against a run of its own without one.
 *
 *   cc -O2 -o sor dsm_sor.c $(pkg-config --cflags --libs rdmux-dsm)
 *   rdmux dsm run -n 2 -- ./sor [EDGE [ITERATIONS]]
 *
 * As in dsm_sor.rs, the nodes divide the rows. Each reads the row beyond its first and its last one, which are all that moves. Each colour has pages
 * of its own: while all change one colour, nobody writes what the others read. Accesses are plain ones, since the barriers order them. */
#include <inttypes.h>
#include <rdmux_dsm.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Factor of over-relaxation. */
static const double OMEGA = 1.25;

/* Doubles of a page. On a system with larger pages only the homes are worse. */
enum { PAGE = 4096 / sizeof(double) };

/* Ends the program with the library's reason if a call fails. */
static void check(int status)
{
	if (status < 0) {
		fprintf(stderr, "dsm_sor: %s\n", rdmux_dsm_error());
		exit(1);
	}
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
	if (!memory) {
		fprintf(stderr, "dsm_sor: no memory for the grid\n");
		exit(1);
	}
	return memory;
}

/* First row of a node among those within the border, which are numbered from 1 on; that of the node after the last one is beyond them. */
static size_t first_row(size_t edge, size_t nodes, size_t node) { return 1 + node * edge / nodes; }

/* A grid with a border of fixed values. The points whose row and column add up to an odd number have colour 0, the others colour 1. */
struct grid {
	double *numbers;
	size_t edge;
	size_t layer;   /* numbers from a node's first colour to its second one */
	size_t *starts; /* first number of each row, in its first colour */
	size_t count;   /* all numbers */
};

/* Divides a grid among nodes. The border belongs to the first and the last one. */
static struct grid divide(size_t edge, size_t nodes)
{
	struct grid grid = {.edge = edge, .starts = allocate(edge + 2, sizeof *grid.starts)};
	size_t half = (edge + 3) / 2, most = edge / nodes + 3;
	grid.layer = (most * half + PAGE - 1) / PAGE * PAGE;
	grid.count = nodes * 2 * grid.layer;
	for (size_t node = 0; node < nodes; node++) {
		size_t begin = node == 0 ? 0 : first_row(edge, nodes, node);
		size_t end = node + 1 == nodes ? edge + 2 : first_row(edge, nodes, node + 1);
		for (size_t row = begin; row < end; row++)
			grid.starts[row] = node * 2 * grid.layer + (row - begin) * half;
	}
	return grid;
}

static double *at(const struct grid *grid, size_t row, size_t column)
{
	size_t colour = (row + column + 1) % 2;
	return grid->numbers + grid->starts[row] + colour * grid->layer + column / 2;
}

/* Sets the border and the points of some rows: heat at the first row. */
static void begin(const struct grid *grid, size_t from, size_t to)
{
	for (size_t row = from; row < to; row++)
		for (size_t column = 0; column < grid->edge + 2; column++)
			*at(grid, row, column) = row == 0 ? 100 : 0;
}

/* Gets a right to the points of one colour in a row. */
static void acquire(struct rdmux_dsm_region *region, const struct grid *grid, size_t row, size_t colour, enum rdmux_dsm_access access)
{
	/* The first column of the colour in this row. */
	const double *start = at(grid, row, (row + colour + 1) % 2);
	check(rdmux_dsm_acquire_range(region, start, (grid->edge + 3) / 2 * sizeof *start, access));
}

/* Gets the rights to relax the points of one colour in some rows: to the rows beyond them, and to those that others have read. All nodes do this at the
 * same time and wait: a node that computes answers when the system has scheduled its service thread. */
static void prepare(struct rdmux_dsm_region *region, const struct grid *grid, size_t from, size_t to, size_t colour)
{
	acquire(region, grid, from - 1, 1 - colour, RDMUX_DSM_READ);
	acquire(region, grid, to, 1 - colour, RDMUX_DSM_READ);
	acquire(region, grid, from, colour, RDMUX_DSM_WRITE);
	acquire(region, grid, to - 1, colour, RDMUX_DSM_WRITE);
}

/* Relaxes the points of one colour in some rows. */
static void relax(const struct grid *grid, size_t from, size_t to, size_t colour)
{
	for (size_t row = from; row < to; row++) {
		size_t first = 1 + (row + colour) % 2, count = (grid->edge + 2 - first) / 2;
		double *own = at(grid, row, first);
		const double *above = at(grid, row - 1, first), *below = at(grid, row + 1, first), *beside = at(grid, row, first - 1);
		for (size_t i = 0; i < count; i++) {
			double around = above[i] + below[i] + beside[i] + beside[i + 1];
			own[i] += OMEGA * (around / 4 - own[i]);
		}
	}
}

/* Returns an argument of the program, or a default. */
static size_t number(char **argv, int argc, int place, size_t otherwise)
{
	if (place >= argc)
		return otherwise;
	char *end;
	unsigned long number = strtoul(argv[place], &end, 10);
	if (*end || number == 0 || number > 30000) {
		fprintf(stderr, "dsm_sor: %s: not a number from 1 to 30000\n", argv[place]);
		exit(2);
	}
	return number;
}

int main(int argc, char **argv)
{
	size_t edge = number(argv, argc, 1, 1022), iterations = number(argv, argc, 2, 20);
	struct rdmux_dsm *session;
	check(rdmux_dsm_join(30000, &session));
	size_t node = rdmux_dsm_node(session), nodes = rdmux_dsm_nodes(session);
	if (edge < nodes) {
		fprintf(stderr, "dsm_sor: %zu rows for %zu nodes\n", edge, nodes);
		return 1;
	}
	struct rdmux_dsm_thread *thread;
	check(rdmux_dsm_thread_begin(session, 0, &thread));

	struct grid grid = divide(edge, nodes);
	/* Each node is the home of its own rows. */
	struct rdmux_dsm_region_options options = {.row = 2 * grid.layer / PAGE};
	struct rdmux_dsm_region *region;
	check(rdmux_dsm_region_make(session, grid.count * sizeof(double), &options, &region));
	grid.numbers = rdmux_dsm_region_address(region);

	size_t from = first_row(edge, nodes, node), to = first_row(edge, nodes, node + 1);
	bool is_first = node == 0, is_last = node + 1 == nodes;
	begin(&grid, from - is_first, to + is_last);
	check(rdmux_dsm_barrier(thread, 0, nodes));
	struct rdmux_dsm_stat before, after;
	check(rdmux_dsm_region_stat(region, &before));
	/* No node may begin before all have taken the counts. */
	check(rdmux_dsm_barrier(thread, 0, nodes));
	double start = seconds();
	for (size_t half = 0; half < 2 * iterations; half++) {
		prepare(region, &grid, from, to, half % 2);
		check(rdmux_dsm_barrier(thread, 0, nodes));
		relax(&grid, from, to, half % 2);
		check(rdmux_dsm_barrier(thread, 0, nodes));
	}
	double shared = seconds() - start;
	check(rdmux_dsm_region_stat(region, &after));
	double sum = 0;
	for (size_t row = from; row < to; row++)
		for (size_t column = 0; column < edge + 2; column++)
			sum += *at(&grid, row, column);
	check(rdmux_dsm_reduce_f64(thread, 0, nodes, RDMUX_DSM_SUM, sum, &sum));

	struct grid alone = divide(edge, 1);
	alone.numbers = allocate(alone.count, sizeof *alone.numbers);
	begin(&alone, 0, edge + 2);
	start = seconds();
	for (size_t half = 0; half < 2 * iterations; half++)
		relax(&alone, 1, edge + 1, half % 2);
	double sequential = seconds() - start;
	for (size_t row = from; row < to; row++)
		for (size_t column = 0; column < edge + 2; column++)
			if (*at(&grid, row, column) != *at(&alone, row, column)) {
				fprintf(stderr, "dsm_sor: row %zu column %zu: %.17g instead of %.17g\n", row, column, *at(&grid, row, column), *at(&alone, row, column));
				return 1;
			}
	printf("node %zu: %.3f s, alone %.3f s, %" PRIu64 " pages read, sum %.17g: correct\n", node, shared, sequential, after.fetches - before.fetches, sum);
	fflush(stdout);

	/* The others may still need this node's pages. */
	check(rdmux_dsm_barrier(thread, 0, nodes));
	check(rdmux_dsm_leave(session));
	free(alone.numbers);
	free(alone.starts);
	free(grid.starts);
	return 0;
}
