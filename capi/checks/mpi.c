/* An MPI job of 20 processes on this host, with one device: more than the 15 processes that had a place in QPNs of four bits. Each rank sends
 * to its neighbour, to all at once, and to their memory, and checks what it gets.
 *
 * launcher: mpicc mpirun -n 20 --oversubscribe --allow-run-as-root --mca pml ucx --mca osc ucx --mca btl ^openib -x UCX_TLS=rc_v,self */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define BYTES_MAX (1 << 20)

static int rank, ranks;

static void check(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "rank %d: wrong: %s\n", rank, what);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* The byte that a rank sends at a position in a round. */
static uint8_t byte_of(int sender, int round, int at) {
    return (uint8_t)(sender * 31 + round * 7 + at * 13 + (at >> 8));
}

static void to_the_neighbour(int round, int bytes) {
    static uint8_t out[BYTES_MAX], in[BYTES_MAX];
    int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
    for (int at = 0; at < bytes; at++) out[at] = byte_of(rank, round, at);
    MPI_Sendrecv(out, bytes, MPI_BYTE, next, round, in, bytes, MPI_BYTE, previous, round, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    int same = 1;
    for (int at = 0; at < bytes; at++) same &= in[at] == byte_of(previous, round, at);
    check(same, "the neighbour's message");
}

static void to_all(int round) {
    int *out = malloc(sizeof(int) * ranks), *in = malloc(sizeof(int) * ranks), sum = 0, own = rank + round;
    for (int to = 0; to < ranks; to++) out[to] = rank * 1000 + to + round;
    MPI_Alltoall(out, 1, MPI_INT, in, 1, MPI_INT, MPI_COMM_WORLD);
    for (int from = 0; from < ranks; from++) check(in[from] == from * 1000 + rank + round, "a message of an exchange of all");
    MPI_Allreduce(&own, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    check(sum == ranks * (ranks - 1) / 2 + ranks * round, "a sum over all");
    free(out);
    free(in);
}

static void to_memory(int round, MPI_Win window, int *memory) {
    int own = rank + round, fetched = -1, next = (rank + 1) % ranks;
    memory[0] = memory[1] = -1;
    MPI_Win_fence(0, window);
    MPI_Put(&own, 1, MPI_INT, next, 0, 1, MPI_INT, window);
    MPI_Win_fence(0, window);
    check(memory[0] == (rank + ranks - 1) % ranks + round, "what the neighbour has put");
    MPI_Get(&fetched, 1, MPI_INT, next, 0, 1, MPI_INT, window);
    MPI_Win_fence(0, window);
    check(fetched == own, "what was got back from the neighbour");
}

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) / 10 : 6, *memory;
    MPI_Win window;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Win_allocate(2 * sizeof(int), sizeof(int), MPI_INFO_NULL, MPI_COMM_WORLD, &memory, &window);
    for (int round = 0; round < rounds; round++) {
        const int sizes[] = {8, 8192, BYTES_MAX};
        for (int i = 0; i < 3; i++) to_the_neighbour(round, sizes[i]);
        to_all(round);
        to_memory(round, window, memory);
    }
    MPI_Win_free(&window);
    if (rank == 0) printf("%d ranks, %d rounds\n", ranks, rounds);
    MPI_Finalize();
    return 0;
}
