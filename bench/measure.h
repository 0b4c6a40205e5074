/* Shared by the C programs of the bench: the clock, CPUs, percentiles. Include it first. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PAGE = 4096 };

/* Ends the program if a call failed. */
#define CHECK(call)                                                                                        \
	do {                                                                                               \
		if (!(call)) {                                                                             \
			fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, strerror(errno)); \
			_Exit(1);                                                                          \
		}                                                                                          \
	} while (0)

static inline double now_us(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1e6 + now.tv_nsec / 1e3;
}

/* Waits without sleeping. */
static inline void spin_us(double us)
{
	for (double end = now_us() + us; now_us() < end;)
		;
}

/* Keeps this process on a CPU. */
static inline void pin(int cpu)
{
	cpu_set_t cpus;
	CPU_ZERO(&cpus);
	CPU_SET(cpu, &cpus);
	CHECK(!sched_setaffinity(0, sizeof cpus, &cpus));
}

/* Says to the processor that a loop waits for another one. */
static inline void relax(void)
{
#if defined __x86_64__
	__builtin_ia32_pause();
#elif defined __aarch64__
	__asm__ volatile("yield");
#endif
}

/* Returns the place of a word among some, or ends the program. */
static inline int find_word(const char *word, const char *const *words, int count)
{
	for (int i = 0; i < count; i++)
		if (!strcmp(word, words[i]))
			return i;
	fprintf(stderr, "%s: no such choice\n", word);
	exit(2);
}

static inline int order(const void *a, const void *b)
{
	double difference = *(const double *)a - *(const double *)b;
	return (difference > 0) - (difference < 0);
}

/* Sorts the times; returns the one that `percent` of them do not exceed. */
static inline double percentile(double *us, size_t count, unsigned percent)
{
	qsort(us, count, sizeof *us, order);
	return us[(count - 1) * percent / 100];
}

/* Prints a line of JSON: the name, and percentiles in microseconds. */
static inline void print_line(const char *name, double *us, size_t count)
{
	double p10 = percentile(us, count, 10), p50 = percentile(us, count, 50), p99 = percentile(us, count, 99);
	printf("{\"name\":\"%s\",\"p10\":%.3f,\"p50\":%.3f,\"p99\":%.3f}\n", name, p10, p50, p99);
	fflush(stdout);
}
