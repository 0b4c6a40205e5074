/* A library to be preloaded into the programs that `cargo xtask instructions` counts.
 *
 * Time proceeds by a step with each look at the clock. What a device does now and then, such as a look at its sockets, then happens after the
 * same number of messages in every run, and as often as at full speed: under valgrind a program is fifty times slower. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>

enum { STEP_NS = 100, SECOND_NS = 1000000000, GET_AUXV = 0x41555856 };

static _Atomic uint64_t now_ns = SECOND_NS;

int clock_gettime(clockid_t clock, struct timespec *at)
{
	(void)clock;
	uint64_t now = atomic_fetch_add_explicit(&now_ns, STEP_NS, memory_order_relaxed);
	at->tv_sec = now / SECOND_NS;
	at->tv_nsec = now % SECOND_NS;
	return 0;
}

/* rustix asks the kernel for the auxiliary vector, and jumps to the functions of the vDSO that it finds there. valgrind passes the call on, so
 * these are not the program's, and it would crash. Where the call fails, rustix reads /proc/self/auxv, which valgrind shows as it should be. */
__attribute__((constructor)) static void without_auxv(void)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_prctl, 0, 3),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, GET_AUXV, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		abort();
}
