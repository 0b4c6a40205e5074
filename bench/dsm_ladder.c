/* The round trip of a short message between two bare processes of one host, by the context in which the other one handles it.
 * `dsm_ladder RUNG` prints a line of JSON with percentiles in microseconds; without an argument, one for each rung.
 *
 * RUNG    inline       both look for messages all the time, on CPU 0 and 1
 *         same-cpu     both sleep in an eventfd, on CPU 0
 *         other-cpu    the same, on CPU 0 and 1; the next message follows at once
 *         idle-cpu     the same, but a millisecond passes before each message, so that CPU 1 is idle
 *
 * The message is a word in shared memory on all of them. */
#include "measure.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum rung { INLINE, SAME_CPU, OTHER_CPU, IDLE_CPU, RUNGS };
static const char *const NAMES[] = {"inline", "same-cpu", "other-cpu", "idle-cpu"};

#define END UINT32_MAX

/* Place at which one side takes messages: a word, a line apart and the next one, which the processor may fetch along, and the event that wakes it. */
struct side {
	_Alignas(128) _Atomic uint32_t word;
	int event;
} *sides;

static void send(struct side *to, uint32_t message, enum rung rung)
{
	uint64_t one = 1;
	atomic_store_explicit(&to->word, message, memory_order_release);
	if (rung != INLINE)
		CHECK(write(to->event, &one, sizeof one) == sizeof one);
}

static uint32_t receive(struct side *from, uint32_t last, enum rung rung)
{
	uint64_t events;
	uint32_t message;
	if (rung != INLINE)
		CHECK(read(from->event, &events, sizeof events) == sizeof events);
	while ((message = atomic_load_explicit(&from->word, memory_order_acquire)) == last)
		relax();
	return message;
}

static void answer(enum rung rung)
{
	uint32_t message = 0;
	while ((message = receive(&sides[1], message, rung)) != END)
		send(&sides[0], message, rung);
}

static void measure(enum rung rung)
{
	enum { COUNT_MAX = 200000 };
	static double us[COUNT_MAX];
	uint32_t count = rung == INLINE ? COUNT_MAX : rung == IDLE_CPU ? 1000 : 20000, warm_up = count / 10;
	for (uint32_t message = 1; message <= count + warm_up; message++) {
		if (rung == IDLE_CPU)
			spin_us(1000);
		double begin = now_us();
		send(&sides[1], message, rung);
		receive(&sides[0], message - 1, rung);
		if (message > warm_up)
			us[message - warm_up - 1] = now_us() - begin;
	}
	print_line(NAMES[rung], us, count);
}

static void run(enum rung rung)
{
	sides[0].word = sides[1].word = 0;
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		/* Else it would go on to spin. */
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		pin(rung != SAME_CPU);
		answer(rung);
		_exit(0);
	}
	measure(rung);
	send(&sides[1], END, rung);
	CHECK(waitpid(child, NULL, 0) == child);
}

int main(int argc, char **argv)
{
	sides = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(sides != MAP_FAILED);
	for (int i = 0; i < 2; i++)
		CHECK((sides[i].event = eventfd(0, 0)) >= 0);
	pin(0);
	if (argc > 1) {
		run(find_word(argv[1], NAMES, RUNGS));
		return 0;
	}
	for (enum rung rung = 0; rung < RUNGS; rung++)
		run(rung);
	return 0;
}
