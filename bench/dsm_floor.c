/* The floor of a page fault between two bare processes of one host: what userfaultfd, a word in shared memory and a copy cost, without a protocol.
 * `dsm_floor FAULT HOME [BUSY_US]` prints a line of JSON with percentiles in microseconds; without arguments, one for each pair.
 *
 * The process on CPU 0 faults; the other one, the home, on CPU 1, has the contents of all pages. Its memory is a file mapped twice, the view,
 * which faults, and the alias. The handler of SIGBUS asks the home, waits without sleeping, and then installs the page.
 *
 * FAULT   read     the home copies 4 KiB into the alias; the page is installed for reading
 *         write    the same, installed for writing at once
 *         upgrade  a write to a page that is installed for reading: the home only answers
 *         push     no fault: the process copies 1,024 pages, which it has written, from its alias to the home's
 *         pull     the same, but the home copies them
 * HOME    polling    looks for requests all the time
 *         computing  looks each BUSY_US (20); faults come at random times
 *         asleep     sleeps in a futex; a millisecond passes before each fault
 *         none       is not asked: the fault alone; not for push and pull
 *
 * The numbers of userfaultfd are defined here, since headers of older systems lack the newer ones. Needs Linux 6.4, no privilege. */
#include "measure.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGES = 1024, BYTES = PAGES * PAGE };

/* ioctl_userfaultfd(2) */
#define UFFD_USER_MODE_ONLY 1
#define API 0xaa
#define FEATURE_SIGBUS (1ull << 7)
#define FEATURE_MINOR_SHMEM (1ull << 10)
#define FEATURE_WP_SHMEM (1ull << 12)
#define REGISTER_WP (1ull << 1)
#define REGISTER_MINOR (1ull << 2)
#define CONTINUE_DONTWAKE (1ull << 0)
#define CONTINUE_WP (1ull << 1)
#define WRITEPROTECT_DONTWAKE (1ull << 1)

struct api {
	uint64_t api, features, ioctls;
};

struct registration {
	uint64_t start, bytes, mode, ioctls;
};

struct protection {
	uint64_t start, bytes, mode;
};

struct installation {
	uint64_t start, bytes, mode;
	int64_t mapped;
};

#define ASK_API _IOWR(API, 0x3f, struct api)
#define REGISTER _IOWR(API, 0, struct registration)
#define WRITEPROTECT _IOWR(API, 6, struct protection)
#define CONTINUE _IOWR(API, 7, struct installation)

enum fault { READ, WRITE, UPGRADE, PUSH, PULL, FAULTS };
static const char *const FAULT_NAMES[] = {"read", "write", "upgrade", "push", "pull"};
enum home { POLLING, COMPUTING, ASLEEP, NONE, HOMES };
static const char *const HOME_NAMES[] = {"polling", "computing", "asleep", "none"};

/* Requests: a number, which differs from the one before, and a page to copy or one of these. */
enum { NO_PAGE = 0xffff, ALL_PAGES = 0xfffe, END = 0xfffd };

/* Words that the two processes share; a line apart, and the next one, which the processor may fetch along. */
static struct {
	_Alignas(128) _Atomic uint32_t request;
	_Alignas(128) _Atomic uint32_t answer;
} *words;

static enum fault fault;
static enum home home;
static double busy_us = 20;
static int uffd;
static char *view, *alias, *home_alias;

static long futex(_Atomic uint32_t *word, int operation, uint32_t value)
{
	return syscall(SYS_futex, word, operation, value, NULL, NULL, 0);
}

/* Waits as a home does until there is another request than the last one. */
static uint32_t next_request(uint32_t last)
{
	uint32_t request;
	while ((request = atomic_load_explicit(&words->request, memory_order_acquire)) == last) {
		switch (home) {
		case COMPUTING: spin_us(busy_us); break;
		case ASLEEP: futex(&words->request, FUTEX_WAIT, last); break;
		default: relax();
		}
	}
	return request;
}

static void serve(void)
{
	uint32_t request = 0;
	while ((request = next_request(request)) % 0x10000 != END) {
		uint32_t page = request % 0x10000;
		if (page < PAGES)
			memcpy(alias + page * PAGE, home_alias + page * PAGE, PAGE);
		for (page = 0; request % 0x10000 == ALL_PAGES && page < PAGES; page++)
			memcpy(home_alias + page * PAGE, alias + page * PAGE, PAGE);
		atomic_store_explicit(&words->answer, request, memory_order_release);
	}
}

static void ask(uint32_t page)
{
	uint32_t last = atomic_load_explicit(&words->request, memory_order_relaxed);
	uint32_t request = (last & ~0xffffu) + 0x10000 + page;
	atomic_store_explicit(&words->request, request, memory_order_release);
	if (home == ASLEEP)
		futex(&words->request, FUTEX_WAKE, 1);
	while (page != END && atomic_load_explicit(&words->answer, memory_order_acquire) != request)
		relax();
}

static void install(size_t at, size_t bytes, uint64_t mode)
{
	struct installation installation = {(uintptr_t)view + at, bytes, mode | CONTINUE_DONTWAKE, 0};
	CHECK(!ioctl(uffd, CONTINUE, &installation));
}

static void on_fault(int signal, siginfo_t *info, void *context)
{
	(void)signal, (void)context;
	size_t at = (uintptr_t)info->si_addr / PAGE * PAGE - (uintptr_t)view;
	CHECK(at < BYTES);
	if (home != NONE)
		ask(fault == UPGRADE ? NO_PAGE : at / PAGE);
	if (fault == UPGRADE) {
		struct protection protection = {(uintptr_t)view + at, PAGE, WRITEPROTECT_DONTWAKE};
		CHECK(!ioctl(uffd, WRITEPROTECT, &protection));
	} else {
		install(at, PAGE, fault == READ ? CONTINUE_WP : 0);
	}
}

static int new_file(void)
{
	int fd = memfd_create("dsm_floor", MFD_CLOEXEC);
	CHECK(fd >= 0 && !ftruncate(fd, BYTES));
	return fd;
}

static char *map(int fd)
{
	char *mapping = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
	CHECK(mapping != MAP_FAILED);
	return mapping;
}

static void catch_faults(void)
{
	uffd = syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
	CHECK(uffd >= 0);
	struct api api = {API, FEATURE_SIGBUS | FEATURE_MINOR_SHMEM | FEATURE_WP_SHMEM, 0};
	CHECK(!ioctl(uffd, ASK_API, &api));
	/* A child would touch the view without faults. */
	CHECK(!madvise(view, BYTES, MADV_DONTFORK));
	struct registration registration = {(uintptr_t)view, BYTES, REGISTER_MINOR | REGISTER_WP, 0};
	CHECK(!ioctl(uffd, REGISTER, &registration));
	struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
	CHECK(!sigaction(SIGBUS, &action, NULL));
}

/* Returns the time of a touch of a page, in microseconds. */
static double touch(size_t page)
{
	volatile char *at = view + page * PAGE;
	char value = fault == UPGRADE ? *at : 0;
	if (home == COMPUTING)
		spin_us(2 * busy_us * rand() / RAND_MAX);
	if (home == ASLEEP)
		spin_us(1000);
	double begin = now_us();
	if (fault == READ)
		value = *at;
	else
		*at = value + 1;
	return now_us() - begin;
}

/* Returns the time of copying all pages, in microseconds. */
static double copy(void)
{
	memset(alias, rand(), BYTES);
	double begin = now_us();
	if (fault == PULL)
		ask(ALL_PAGES);
	for (size_t page = 0; fault == PUSH && page < PAGES; page++)
		memcpy(home_alias + page * PAGE, alias + page * PAGE, PAGE);
	return now_us() - begin;
}

/* Measures each page once. */
static size_t measure_pages(double *us)
{
	CHECK(!madvise(view, BYTES, MADV_DONTNEED));
	if (fault == UPGRADE)
		install(0, BYTES, CONTINUE_WP);
	for (size_t page = 0; page < PAGES; page++)
		us[page] = touch(page);
	return PAGES;
}

static void measure(void)
{
	static double us[PAGES * 22];
	bool copies = fault == PUSH || fault == PULL;
	/* Faults of a home that computes or sleeps take much longer. */
	size_t rounds = copies ? 200 : home == COMPUTING ? 4 : home == ASLEEP ? 1 : 20;
	size_t count = 0, warm_up = 0;
	for (size_t round = 0; round < rounds + rounds / 10; round++) {
		if (round == rounds / 10)
			warm_up = count;
		if (copies)
			us[count++] = copy();
		else
			count += measure_pages(us + count);
	}
	char name[64];
	snprintf(name, sizeof name, "%s, %s", FAULT_NAMES[fault], HOME_NAMES[home]);
	print_line(name, us + warm_up, count - warm_up);
}

static void run(void)
{
	words->request = words->answer = 0;
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		/* Else it would go on to spin. */
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		pin(1);
		serve();
		_exit(0);
	}
	measure();
	ask(END);
	CHECK(waitpid(child, NULL, 0) == child);
}

int main(int argc, char **argv)
{
	words = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(words != MAP_FAILED);
	int file = new_file();
	alias = map(file);
	view = map(file);
	home_alias = map(new_file());
	pin(0);
	catch_faults();
	if (argc > 3)
		busy_us = atof(argv[3]);
	if (argc > 2) {
		fault = find_word(argv[1], FAULT_NAMES, FAULTS);
		home = find_word(argv[2], HOME_NAMES, HOMES);
		run();
		return 0;
	}
	for (fault = 0; fault < FAULTS; fault++)
		for (home = 0; home < HOMES; home++)
			run();
	return 0;
}
