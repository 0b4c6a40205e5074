/* Memory of the program that moves into a file while it is in use, and back: a peer writes and reads regions of all kinds while a thread of
   the program increments words of them, while it forks, and while it frees and reuses the memory at once; and pairs of which one side is
   killed meanwhile. CONVERT_ROUNDS gives the rounds of each mode, and CONVERT_KILLS the number of kills; CONVERT_SEED replays the random
   draws. */
#define _GNU_SOURCE
#include "check.h"
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, MARGIN = 3 * PAGE, BYTES_MAX = 5 << 20, COUNTERS = 2 * PAGE, REQUESTS = 150, INLINE = 64 };

struct hello {
	uint64_t area, bytes;
	/* Of one region, or of two of the same bytes. */
	uint32_t rkey[2];
	uint32_t qpn[2];
};

static uint64_t random_state;

static uint64_t draw(uint64_t below)
{
	random_state = random_state * 6364136223846793005 + 1442695040888963407;
	return (random_state >> 33) % below;
}

static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qp[2];
static int with_peer;

static void say(const struct hello *own) { CHECK(send(with_peer, own, sizeof *own, MSG_NOSIGNAL) == sizeof *own); }

static struct hello hear(void)
{
	struct hello peer;
	CHECK(recv(with_peer, &peer, sizeof peer, MSG_WAITALL) == sizeof peer);
	return peer;
}

static void connect_pair(void)
{
	struct ibv_context *context = open_first();
	CHECK(pd = ibv_alloc_pd(context));
	CHECK(cq = ibv_create_cq(context, 64, NULL, NULL, 0));
	struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .cap = {32, 32, 1, 1, INLINE}, .qp_type = IBV_QPT_RC};
	for (int i = 0; i < 2; i++)
		CHECK(qp[i] = ibv_create_qp(pd, &init));
	say(&(struct hello){.qpn = {qp[0]->qp_num, qp[1]->qp_num}});
	struct hello peer = hear();
	struct ibv_qp_attr rights = {.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ};
	for (int i = 0; i < 2; i++) {
		bring_up(qp[i], peer.qpn[i]);
		CHECK(!ibv_modify_qp(qp[i], &rights, IBV_QP_ACCESS_FLAGS));
	}
}

static uint8_t pattern(uint64_t at, uint64_t key) { return (at * 31 + at / PAGE * 7 + key * 101) | 1; }

/* ---- The peer: it writes and reads, and checks what it reads. */

/* The second queue pair asks for the memory while the first waits for it to move. */
static void request(unsigned n, enum ibv_wr_opcode opcode, struct ibv_sge sge, uint64_t at, uint32_t rkey)
{
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED}, *bad;
	wr.wr.rdma.remote_addr = at;
	wr.wr.rdma.rkey = rkey;
	if (opcode == IBV_WR_RDMA_WRITE && sge.length <= INLINE && draw(2))
		wr.send_flags |= IBV_SEND_INLINE;
	CHECK(!ibv_post_send(qp[n > 16 && draw(2)], &wr, &bad));
	completion(cq);
}

static void be_peer(unsigned rounds)
{
	connect_pair();
	uint8_t *own = malloc(BYTES_MAX), *seen = malloc(BYTES_MAX);
	struct ibv_mr *mr, *read;
	CHECK(own && seen);
	CHECK(mr = ibv_reg_mr(pd, own, BYTES_MAX, IBV_ACCESS_LOCAL_WRITE));
	CHECK(read = ibv_reg_mr(pd, seen, BYTES_MAX, IBV_ACCESS_LOCAL_WRITE));
	for (unsigned round = 0; round < rounds; round++) {
		struct hello at = hear();
		/* What has been written so far, and what was there before. */
		for (uint64_t i = 0; i < at.bytes; i++)
			own[i] = pattern(i, round);
		for (unsigned n = 0; n < REQUESTS; n++) {
			uint64_t len = 1 + draw(draw(4) ? draw(2) ? INLINE : 600 : at.bytes), from = draw(at.bytes - len + 1);
			uint64_t key = round + n + 1;
			for (uint64_t i = from; i < from + len; i++)
				own[i] = pattern(i, key);
			request(n, IBV_WR_RDMA_WRITE, (struct ibv_sge){(uintptr_t)own + from, len, mr->lkey}, at.area + from, at.rkey[draw(2)]);
			len = 1 + draw(draw(4) ? 600 : at.bytes);
			from = draw(at.bytes - len + 1);
			request(n, IBV_WR_RDMA_READ, (struct ibv_sge){(uintptr_t)seen + from, len, read->lkey}, at.area + from, at.rkey[draw(2)]);
			CHECK(!memcmp(seen + from, own + from, len));
		}
		/* The owner compares. */
		say(&at);
		CHECK(send(with_peer, own, at.bytes, MSG_NOSIGNAL) == (ssize_t)at.bytes);
	}
	hear();
}

/* ---- The owner of the regions. */

static _Atomic(uint64_t *) counters;
static _Atomic uint64_t counted;
static atomic_bool counts, ends;

/* Increments words of the region, with plain memory accesses alone. */
static void *count(void *unused)
{
	(void)unused;
	for (uint64_t i = 0; !atomic_load(&ends); i++) {
		atomic_store(&counts, true);
		uint64_t *at = atomic_load(&counters);
		if (at) {
			__atomic_fetch_add(at + i % (COUNTERS / 8), 1, __ATOMIC_SEQ_CST);
			atomic_fetch_add(&counted, 1);
		}
		atomic_store(&counts, false);
	}
	return NULL;
}

/* Returns when the thread uses the words no more. */
static void stop_counting(void)
{
	atomic_store(&counters, NULL);
	while (atomic_load(&counts))
		sched_yield();
}

static bool is_converted(void)
{
	char line[512];
	bool found = false;
	FILE *maps = fopen("/proc/self/maps", "r");
	CHECK(maps);
	while (fgets(line, sizeof line, maps))
		found |= strstr(line, "memfd:rdmux-mr") != NULL;
	fclose(maps);
	return found;
}

/* Returns whether the words before and behind the region are as they were filled. */
static bool has_margins(const uint8_t *all, uint64_t offset, uint64_t bytes, uint64_t key)
{
	for (uint64_t i = 0; i < MARGIN; i++)
		if (all[offset - MARGIN + i] != pattern(i, key) || all[offset + bytes + i] != pattern(i, key + 1))
			return false;
	return true;
}

/* A child that looks at the region and overwrites what it has. */
static void check_child(uint8_t *all, uint64_t offset, uint64_t bytes, uint64_t key)
{
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		bool right = has_margins(all, offset, bytes, key);
		memset(all, 0xee, offset + bytes + MARGIN);
		_exit(!right);
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child);
	CHECK(status == 0);
}

static unsigned own_regions(unsigned rounds, bool with_thread)
{
	connect_pair();
	pthread_t thread;
	if (with_thread)
		CHECK(!pthread_create(&thread, NULL, count, NULL));
	unsigned converted = 0;
	uint8_t *theirs = mmap(NULL, BYTES_MAX, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(theirs != MAP_FAILED);
	for (unsigned round = 0; round < rounds; round++) {
		uint64_t bytes = PAGE + draw(draw(3) ? 40 * PAGE : BYTES_MAX - PAGE), offset = MARGIN + draw(2) * draw(PAGE);
		/* Behind what the peer writes are the counters, in whole pages of the region. */
		uint64_t whole = bytes + 2 * PAGE + COUNTERS, all_bytes = offset + whole + MARGIN;
		bool by_malloc = draw(2);
		uint8_t *all = by_malloc ? malloc(all_bytes) : mmap(NULL, all_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		CHECK(all && all != MAP_FAILED);
		for (uint64_t i = 0; i < MARGIN; i++) {
			all[offset - MARGIN + i] = pattern(i, round);
			all[offset + whole + i] = pattern(i, round + 1);
		}
		for (uint64_t i = 0; i < bytes; i++)
			all[offset + i] = pattern(i, round);
		uint64_t *words = (uint64_t *)(((uintptr_t)all + offset + bytes + PAGE - 1) & ~(uintptr_t)(PAGE - 1));
		memset(words, 0, COUNTERS);
		atomic_store(&counted, 0);
		atomic_store(&counters, words);
		const int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
		struct ibv_mr *mr, *again = NULL;
		CHECK(mr = ibv_reg_mr(pd, all + offset, whole, rights));
		if (draw(2))
			CHECK(again = ibv_reg_mr(pd, all + offset, whole, rights | IBV_ACCESS_REMOTE_ATOMIC));
		say(&(struct hello){(uintptr_t)all + offset, bytes, {mr->rkey, (again ? again : mr)->rkey}, {0}});
		bool forks = draw(3) == 0;
		/* The device works in the calls of this thread; a thread of the library stands in for it meanwhile. */
		struct ibv_wc wc;
		char ready;
		while (recv(with_peer, &ready, 1, MSG_PEEK | MSG_DONTWAIT) != 1) {
			CHECK(ibv_poll_cq(cq, 1, &wc) == 0);
			if (forks && draw(2000) == 0)
				check_child(all, offset, whole, round);
		}
		hear();
		CHECK(recv(with_peer, theirs, bytes, MSG_WAITALL) == (ssize_t)bytes);
		CHECK(!memcmp(theirs, all + offset, bytes));
		CHECK(has_margins(all, offset, whole, round));
		converted += is_converted();
		bool early = !by_malloc && draw(4) == 0;
		if (early) {
			/* An RNIC has the pages pinned: a program may unmap them first. */
			stop_counting();
			CHECK(!munmap(all, all_bytes));
		}
		CHECK(!ibv_dereg_mr(mr));
		if (again)
			CHECK(!ibv_dereg_mr(again));
		CHECK(!is_converted());
		if (early)
			continue;
		check_child(all, offset, whole, round);
		stop_counting();
		uint64_t sum = 0;
		for (uint64_t i = 0; i < COUNTERS / 8; i++)
			sum += words[i];
		CHECK(sum == atomic_load(&counted));
		CHECK(!memcmp(theirs, all + offset, bytes));
		CHECK(!madvise(words, PAGE, MADV_DONTNEED));
		CHECK(words[0] == 0 && words[PAGE / 8 - 1] == 0);
		if (by_malloc)
			free(all);
		else
			CHECK(!munmap(all, all_bytes));
	}
	atomic_store(&ends, true);
	if (with_thread)
		CHECK(!pthread_join(thread, NULL));
	say(&(struct hello){0});
	return converted;
}

/* ---- Pairs of which one side is killed. */

static int connected;
/* Number of survivors whose region had moved, shared with the children. */
static _Atomic unsigned *moved;

static void connect_and_tell(void)
{
	connect_pair();
	CHECK(write(connected, "", 1) == 1);
}

/* Sends, writes and reads until the owner is gone. */
static void work_until_the_owner_is_gone(void)
{
	connect_and_tell();
	uint8_t *own = malloc(BYTES_MAX);
	struct ibv_mr *mr;
	struct ibv_wc wc;
	struct hello at;
	CHECK(own);
	CHECK(mr = ibv_reg_mr(pd, own, BYTES_MAX, IBV_ACCESS_LOCAL_WRITE));
	if (recv(with_peer, &at, sizeof at, MSG_WAITALL) != sizeof at)
		return;
	memset(own, 0x5a, at.bytes);
	for (unsigned n = 0;; n++) {
		uint64_t len = 1 + draw(draw(4) ? 600 : at.bytes), from = draw(at.bytes - len + 1);
		struct ibv_sge sge = {(uintptr_t)own + from, len, mr->lkey};
		struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED}, *bad;
		wr.opcode = n % 4 == 3 ? IBV_WR_SEND : n % 4 == 2 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
		if (wr.opcode == IBV_WR_SEND)
			sge.length = 8;
		wr.wr.rdma.remote_addr = at.area + from;
		wr.wr.rdma.rkey = at.rkey[0];
		if (ibv_post_send(qp[0], &wr, &bad))
			return;
		int found;
		char end;
		/* The retries of a request to an owner that is gone take seconds. */
		while ((found = ibv_poll_cq(cq, 1, &wc)) == 0)
			if (recv(with_peer, &end, 1, MSG_PEEK | MSG_DONTWAIT) == 0)
				return;
		CHECK(found == 1);
		if (wc.status != IBV_WC_SUCCESS)
			return;
	}
}

/* Owns a region until the peer is gone, and finds it as the peer and its own threads have left it. */
static void own_until_the_peer_is_gone(void)
{
	enum { BYTES = 40 * PAGE };
	connect_and_tell();
	pthread_t thread;
	CHECK(!pthread_create(&thread, NULL, count, NULL));
	uint64_t whole = BYTES + 2 * PAGE + COUNTERS;
	/* The messages' region has no whole page, so it stays where it is. */
	uint8_t *all = malloc(2 * MARGIN + whole), *received = malloc(INLINE);
	CHECK(all && received);
	for (uint64_t i = 0; i < MARGIN; i++) {
		all[i] = pattern(i, 0);
		all[MARGIN + whole + i] = pattern(i, 1);
	}
	memset(all + MARGIN, 0x5a, BYTES);
	uint64_t *words = (uint64_t *)(((uintptr_t)all + MARGIN + BYTES + PAGE - 1) & ~(uintptr_t)(PAGE - 1));
	memset(words, 0, COUNTERS);
	atomic_store(&counters, words);
	struct ibv_mr *mr, *in;
	CHECK(mr = ibv_reg_mr(pd, all + MARGIN, whole, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ));
	CHECK(in = ibv_reg_mr(pd, received, INLINE, IBV_ACCESS_LOCAL_WRITE));
	struct ibv_sge sge = {(uintptr_t)received, INLINE, in->lkey};
	struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;
	for (int i = 0; i < 16; i++)
		CHECK(!ibv_post_recv(qp[0], &wr, &bad));
	struct hello own = {.area = (uintptr_t)all + MARGIN, .bytes = BYTES, .rkey = {mr->rkey}};
	/* The peer may be gone already. */
	(void)!send(with_peer, &own, sizeof own, MSG_NOSIGNAL);
	char end;
	while (recv(with_peer, &end, 1, MSG_DONTWAIT) != 0) {
		struct ibv_wc wc;
		if (ibv_poll_cq(cq, 1, &wc) == 1 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV)
			CHECK(!ibv_post_recv(qp[0], &wr, &bad));
	}
	check_child(all, MARGIN, whole, 0);
	atomic_fetch_add(moved, is_converted());
	CHECK(!ibv_dereg_mr(mr));
	CHECK(!is_converted());
	stop_counting();
	atomic_store(&ends, true);
	CHECK(!pthread_join(thread, NULL));
	uint64_t sum = 0;
	for (uint64_t i = 0; i < COUNTERS / 8; i++)
		sum += words[i];
	CHECK(sum == atomic_load(&counted));
	CHECK(has_margins(all, MARGIN, whole, 0));
	for (uint64_t i = 0; i < BYTES; i++)
		CHECK(all[MARGIN + i] == 0x5a);
	free(all);
}

static void kill_one(unsigned number)
{
	int ends_of[2], told[2];
	pid_t pids[2];
	char both[2];
	CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends_of));
	CHECK(!pipe(told));
	for (int i = 0; i < 2; i++) {
		CHECK((pids[i] = fork()) >= 0);
		if (pids[i] == 0) {
			close(ends_of[1 - i]);
			with_peer = ends_of[i];
			connected = told[1];
			random_state ^= (uint64_t)number << 32;
			if (i == 0)
				own_until_the_peer_is_gone();
			else
				work_until_the_owner_is_gone();
			_exit(0);
		}
	}
	close(ends_of[0]);
	close(ends_of[1]);
	close(told[1]);
	CHECK(read(told[0], both, 1) == 1 && read(told[0], both + 1, 1) == 1);
	close(told[0]);
	/* Time itself is meant: the kill is to come at any moment of the traffic and of the move. */
	usleep(draw(20000));
	unsigned victim = draw(2);
	int status;
	CHECK(!kill(pids[victim], SIGKILL));
	CHECK(waitpid(pids[victim], &status, 0) == pids[victim]);
	CHECK(waitpid(pids[1 - victim], &status, 0) == pids[1 - victim]);
	CHECK(status == 0);
}

/* ---- Modes. */

/* Refuses userfaultfd(2), as filters of containers do. */
static void refuse_userfaultfd(void)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_userfaultfd, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
}

struct mode {
	const char *name, *convert;
	bool with_thread, refused, converts;
};

static void run(const struct mode *mode, unsigned rounds)
{
	int ends_of[2];
	CHECK(!setenv("RDMUX_CONVERT", mode->convert, 1));
	CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends_of));
	pid_t peer = fork();
	CHECK(peer >= 0);
	if (peer == 0) {
		close(ends_of[0]);
		with_peer = ends_of[1];
		be_peer(rounds);
		_exit(0);
	}
	pid_t owner = fork();
	CHECK(owner >= 0);
	if (owner == 0) {
		close(ends_of[1]);
		with_peer = ends_of[0];
		if (mode->refused)
			refuse_userfaultfd();
		int fault = syscall(SYS_userfaultfd, O_CLOEXEC | 1);
		bool can = fault >= 0;
		close(fault);
		unsigned converted = own_regions(rounds, mode->with_thread);
		printf("%-12s %3u of %u regions converted\n", mode->name, converted, rounds);
		fflush(stdout);
		CHECK(mode->converts && can ? converted > 0 : converted == 0);
		_exit(0);
	}
	close(ends_of[0]);
	close(ends_of[1]);
	int status;
	CHECK(waitpid(owner, &status, 0) == owner && status == 0);
	CHECK(waitpid(peer, &status, 0) == peer && status == 0);
}

int main(void)
{
	static const struct mode modes[] = {
		{"off", "off", true, false, false},
		{"one thread", "on", false, false, true},
		{"threads", "user-mode", true, false, true},
		{"refused", "user-mode", true, true, false},
	};
	const char *seed = getenv("CONVERT_SEED"), *rounds = getenv("CONVERT_ROUNDS");
	random_state = seed ? strtoull(seed, NULL, 0) : (uint64_t)time(NULL) << 20 ^ getpid();
	printf("CONVERT_SEED=%llu\n", (unsigned long long)random_state);
	fflush(stdout);
	for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
		run(&modes[i], rounds ? strtoul(rounds, NULL, 0) : 40);
	const char *kills = getenv("CONVERT_KILLS");
	unsigned number = kills ? strtoul(kills, NULL, 0) : 20;
	CHECK(!setenv("RDMUX_CONVERT", "user-mode", 1));
	moved = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(moved != MAP_FAILED);
	for (unsigned i = 0; i < number; i++)
		kill_one(i);
	printf("%-12s %3u sides killed; the regions of %u survivors had moved\n", "kills", number, atomic_load(moved));
	return 0;
}
