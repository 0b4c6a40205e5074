/* Sockets over RDMA beyond the use by Debian's programs: a thread that reads beside one that writes, many sockets in one
   process, sockets polled together with pipes, halves that are shut, signals, forks, peers that die or lie, and the results
   of wrong calls. */
#define _GNU_SOURCE
#include "check.h"
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rsocket.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAIRS = 4 };

static struct sockaddr_in address;
static int rounds = 60;

static int bound(int kind)
{
	int s = rsocket(AF_INET, kind, 0);
	struct sockaddr_in at = address;
	socklen_t length = sizeof(at);
	CHECK(s >= 0 && !rbind(s, (struct sockaddr *)&at, sizeof(at)));
	CHECK(!rgetsockname(s, (struct sockaddr *)&address, &length) && length == sizeof(at) && address.sin_port);
	return s;
}

static int listening(void)
{
	address.sin_port = 0;
	int s = bound(SOCK_STREAM);
	CHECK(!rlisten(s, 10));
	return s;
}

static int wait_for(int s, short events)
{
	struct pollfd fd = {.fd = s, .events = events};
	CHECK(rpoll(&fd, 1, LONG * 1000) == 1);
	return fd.revents;
}

/* Connects without waiting, so that one thread does both sides. */
static void pair(int listener, int s[2])
{
	s[0] = rsocket(AF_INET, SOCK_STREAM, 0);
	CHECK(s[0] >= 0 && !rfcntl(s[0], F_SETFL, O_NONBLOCK) && rfcntl(s[0], F_GETFL) & O_NONBLOCK);
	CHECK(rconnect(s[0], (struct sockaddr *)&address, sizeof(address)) == -1 && errno == EINPROGRESS);
	CHECK(wait_for(listener, POLLIN) == POLLIN);
	CHECK((s[1] = raccept(listener, NULL, NULL)) >= 0);
	CHECK(wait_for(s[0], POLLOUT) == POLLOUT);
	int error = -1;
	socklen_t length = sizeof(error);
	CHECK(!rgetsockopt(s[0], SOL_SOCKET, SO_ERROR, &error, &length) && !error);
	CHECK(!rfcntl(s[0], F_SETFL, 0));
}

static void bytes_and_calls(int listener)
{
	int s[2];
	char got[16];
	pair(listener, s);
	struct sockaddr_in peer;
	socklen_t length = sizeof(peer);
	CHECK(!rgetpeername(s[0], (struct sockaddr *)&peer, &length) && peer.sin_port == address.sin_port);
	/* The connecting side has a port, which the peer sees. */
	struct sockaddr_in own;
	length = sizeof(own);
	CHECK(!rgetsockname(s[0], (struct sockaddr *)&own, &length) && own.sin_port);
	length = sizeof(peer);
	CHECK(!rgetpeername(s[1], (struct sockaddr *)&peer, &length) && !memcmp(&peer, &own, sizeof(own)));
	CHECK(rrecv(s[1], got, sizeof(got), MSG_DONTWAIT) == -1 && errno == EAGAIN);
	struct iovec parts[3] = {{"one ", 4}, {"", 0}, {"two", 3}}, into[2] = {{got, 2}, {got + 2, 14}};
	CHECK(rwritev(s[0], parts, 3) == 7);
	CHECK(wait_for(s[1], POLLIN) & POLLIN);
	CHECK(rrecv(s[1], got, 3, MSG_PEEK | MSG_WAITALL) == 3 && !memcmp(got, "one", 3));
	CHECK(rreadv(s[1], into, 2) == 7 && !memcmp(got, "one two", 7));
	/* Shuts one half: the peer reads what was sent before, then the end; the other half goes on. */
	CHECK(rsend(s[0], "end", 3, 0) == 3 && !rshutdown(s[0], SHUT_WR));
	CHECK(rrecv(s[1], got, 4, MSG_WAITALL) == 3 && rrecv(s[1], got, 4, 0) == 0);
	CHECK(rsend(s[0], "x", 1, MSG_NOSIGNAL) == -1 && errno == EPIPE);
	CHECK(rsend(s[1], "back", 4, 0) == 4 && !rclose(s[1]));
	CHECK(rread(s[0], got, 16) == 4 && rread(s[0], got, 16) == 0);
	CHECK(wait_for(s[0], POLLIN) & POLLHUP);
	CHECK(!rclose(s[0]) && rclose(s[0]) == -1 && errno == EBADF);
}

static void what_is_wrong(int listener)
{
	char byte;
	int s = rsocket(AF_INET, SOCK_STREAM, 0);
	CHECK(rrecv(s, &byte, 1, 0) == -1 && errno == ENOTCONN);
	CHECK(rbind(s, (struct sockaddr *)&address, sizeof(address)) == -1 && errno == EADDRINUSE);
	CHECK(raccept(s, NULL, NULL) == -1 && errno == EINVAL);
	struct sockaddr_in nobody = address;
	nobody.sin_port = htons(1);
	CHECK(rconnect(s, (struct sockaddr *)&nobody, sizeof(nobody)) == -1 && errno == ECONNREFUSED);
	CHECK(!rfcntl(listener, F_SETFL, O_NONBLOCK) && raccept(listener, NULL, NULL) == -1 && errno == EAGAIN);
	CHECK(!rfcntl(listener, F_SETFL, 0));
	CHECK(rsocket(AF_UNIX, SOCK_STREAM, 0) == -1 && errno == EAFNOSUPPORT);
	CHECK(rsend(0, &byte, 1, 0) == -1 && errno == EBADF);
	int one = 1, value = 0;
	socklen_t length = sizeof(value);
	CHECK(!rsetsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)));
	CHECK(!rgetsockopt(s, IPPROTO_TCP, TCP_NODELAY, &value, &length) && value == 1);
	CHECK(rsetsockopt(s, SOL_SOCKET, SO_SNDBUF, &one, 1) == -1 && errno == EINVAL);
	CHECK(rsetsockopt(s, SOL_SOCKET, 12345, &one, sizeof(one)) == -1 && errno == ENOPROTOOPT);
	CHECK(!rclose(s));
}

/* Polls and selects sockets and pipes together. */
static void mixed(int listener)
{
	int s[2], p[2];
	pair(listener, s);
	CHECK(!pipe(p));
	struct pollfd fds[3] = {{p[0], POLLIN, 7}, {-1, POLLIN, 7}, {s[1], POLLIN, 7}};
	CHECK(rpoll(fds, 3, 0) == 0 && !fds[0].revents && !fds[1].revents && !fds[2].revents);
	CHECK(rpoll(fds, 3, 20) == 0);
	CHECK(write(p[1], "x", 1) == 1 && rpoll(fds, 3, -1) == 1 && fds[0].revents == POLLIN && !fds[2].revents);
	CHECK(rwrite(s[0], "y", 1) == 1);
	fd_set set;
	double end = now() + LONG;
	int found;
	do {
		FD_ZERO(&set);
		FD_SET(p[0], &set);
		FD_SET(s[1], &set);
		struct timeval time = {1, 0};
		found = rselect(FD_SETSIZE, &set, NULL, NULL, &time);
		CHECK(found > 0 && now() < end);
	} while (found == 1);
	CHECK(FD_ISSET(p[0], &set) && FD_ISSET(s[1], &set));
	CHECK(!close(p[0]) && !close(p[1]) && !rclose(s[0]) && !rclose(s[1]));
}

/* Returns the byte that a stream carries at a place. */
static unsigned char at(size_t place, int seed)
{
	return place * 2654435761u >> 11 ^ seed;
}

struct way {
	int s, seed;
	size_t bytes;
};

static void *writes(void *argument)
{
	struct way *own = argument;
	unsigned char part[5000];
	for (size_t done = 0, n; done < own->bytes; done += n) {
		n = 1 + (done * 7 + own->seed) % sizeof(part);
		n = n < own->bytes - done ? n : own->bytes - done;
		for (size_t i = 0; i < n; i++)
			part[i] = at(done + i, own->seed);
		CHECK(rwrite(own->s, part, n) == (ssize_t)n);
	}
	return NULL;
}

static void *reads(void *argument)
{
	struct way *own = argument;
	unsigned char part[7000];
	ssize_t n;
	for (size_t done = 0; done < own->bytes; done += n) {
		CHECK((n = rread(own->s, part, sizeof(part))) > 0);
		for (ssize_t i = 0; i < n; i++)
			CHECK(part[i] == at(done + i, own->seed));
	}
	return NULL;
}

/* Uses both directions of several streams at the same time: each end has a thread that reads and one that writes. */
static void threads(int listener)
{
	int s[PAIRS][2];
	struct way ways[PAIRS][2][2];
	pthread_t thread[PAIRS][2][2];
	for (int i = 0; i < PAIRS; i++) {
		pair(listener, s[i]);
		for (int j = 0; j < 2; j++)
			for (int k = 0; k < 2; k++) {
				/* The second end reads the bytes that the first one writes. */
				ways[i][j][k] = (struct way){s[i][j], i * 2 + (j ^ k), rounds * 10000};
				CHECK(!pthread_create(&thread[i][j][k], NULL, k ? reads : writes, &ways[i][j][k]));
			}
	}
	for (int i = 0; i < PAIRS; i++)
		for (int j = 0; j < 2; j++)
			for (int k = 0; k < 2; k++)
				CHECK(!pthread_join(thread[i][j][k], NULL));
	for (int i = 0; i < PAIRS; i++)
		CHECK(!rclose(s[i][0]) && !rclose(s[i][1]));
}

/* A thread that waits in a call on a socket. */
struct waiter {
	int s;
	int (*waits)(int s);
	int is_stream;
	atomic_int thread;
};

static int waits_to_read(int s)
{
	char byte;
	return rread(s, &byte, 1);
}

static int waits_to_accept(int s)
{
	return raccept(s, NULL, NULL);
}

static void *waits(void *argument)
{
	struct waiter *own = argument;
	atomic_store(&own->thread, syscall(SYS_gettid));
	int got = own->waits(own->s);
	/* A stream is shut first, so the call returns its end. */
	CHECK((got == -1 && errno == EBADF) || (got == 0 && own->is_stream));
	return NULL;
}

/* Waits until the thread sleeps, which it does only inside of its call. */
static void until_asleep(int thread)
{
	char path[64], state;
	double end = now() + LONG;
	snprintf(path, sizeof(path), "/proc/self/task/%d/stat", thread);
	do {
		FILE *file = fopen(path, "r");
		CHECK(file && fscanf(file, "%*d (%*[^)]) %c", &state) == 1 && !fclose(file) && now() < end);
	} while (state != 'S');
}

/* When another thread closes a socket, a thread that waits for it returns with the error that there is no such socket. */
static void closed(int listener)
{
	int s[2];
	pair(listener, s);
	address.sin_port = 0;
	struct waiter waiters[] = {{s[1], waits_to_read, 1}, {bound(SOCK_DGRAM), waits_to_read}, {listening(), waits_to_accept}};
	for (int i = 0; i < 3; i++) {
		pthread_t thread;
		CHECK(!pthread_create(&thread, NULL, waits, &waiters[i]));
		while (!atomic_load(&waiters[i].thread))
			;
		until_asleep(waiters[i].thread);
		CHECK(!rclose(waiters[i].s) && !pthread_join(thread, NULL));
	}
	socklen_t length = sizeof(address);
	CHECK(!rclose(s[0]) && !rgetsockname(listener, (struct sockaddr *)&address, &length));
}

/* Another program connects, sends something and is killed. */
static void peer_dies(int listener, const char *program)
{
	char port[8];
	snprintf(port, sizeof(port), "%d", ntohs(address.sin_port));
	pid_t child = fork();
	if (!child) {
		execl(program, program, "peer", inet_ntoa(address.sin_addr), port, NULL);
		_exit(127);
	}
	int s = raccept(listener, NULL, NULL);
	char got[8];
	CHECK(s >= 0 && rrecv(s, got, 5, MSG_WAITALL) == 5 && !kill(child, SIGKILL));
	CHECK(rread(s, got, 1) == -1 && errno == ECONNRESET);
	CHECK(wait_for(s, POLLIN) & POLLERR);
	int error = 0;
	socklen_t length = sizeof(error);
	CHECK(!rgetsockopt(s, SOL_SOCKET, SO_ERROR, &error, &length) && error == ECONNRESET);
	CHECK(rwrite(s, got, 1) == -1 && errno == ECONNRESET);
	int status;
	CHECK(!rclose(s) && waitpid(child, &status, 0) == child && WIFSIGNALED(status));
}

static _Thread_local int system_calls;

/* In place of the C library's function, for the libraries too: sets errno, as a wait does for a lock that is free by then. */
long syscall(long number, ...)
{
	long (*real)(long, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
	long of[6];
	va_list list;
	va_start(list, number);
	for (int i = 0; i < 6; i++)
		of[i] = va_arg(list, long);
	va_end(list);
	long result = real(number, of[0], of[1], of[2], of[3], of[4], of[5]);
	system_calls++;
	if (result >= 0)
		errno = EAGAIN;
	return result;
}

/* A call that succeeds leaves errno as it was, like the system's calls. */
static void errno_stays(int listener)
{
	int s[2], p[2], before = system_calls;
	pair(listener, s);
	CHECK(!pipe(p));
	struct pollfd fds[2] = {{s[0], POLLIN}, {p[0], POLLIN}};
	errno = EINPROGRESS;
	CHECK(rpoll(fds, 2, 0) == 0 && system_calls > before && errno == EINPROGRESS);
	CHECK(!rclose(s[0]) && !rclose(s[1]) && !close(p[0]) && !close(p[1]));
}

static void rings(int signal)
{
	(void)signal;
}

/* A signal ends a call that waits, at the latest the second signal. */
static void signals(int listener)
{
	int s[2];
	char byte;
	struct sigaction handler = {.sa_handler = rings};
	struct itimerval often = {{0, 20000}, {0, 20000}}, never = {};
	struct pollfd fd = {.events = POLLIN};
	pair(listener, s);
	fd.fd = s[0];
	CHECK(!sigaction(SIGALRM, &handler, NULL) && !setitimer(ITIMER_REAL, &often, NULL));
	CHECK(rread(s[0], &byte, 1) == -1 && errno == EINTR);
	CHECK(rpoll(&fd, 1, -1) == -1 && errno == EINTR);
	CHECK(raccept(listener, NULL, NULL) == -1 && errno == EINTR);
	CHECK(!setitimer(ITIMER_REAL, &never, NULL) && !rclose(s[0]) && !rclose(s[1]));
}

/* A child has no part in its parent's sockets, whatever it does with them. */
static void forks(int listener)
{
	int s[2], status;
	char byte;
	pair(listener, s);
	pid_t child = fork();
	if (!child) {
		CHECK(rwrite(s[0], "x", 1) == -1 && errno == EBADF);
		CHECK(!rclose(s[0]) && !rclose(listener));
		/* Sockets that the child makes are its own. */
		alarm(LONG);
		int own = listening();
		pair(own, s);
		CHECK(rwrite(s[0], "x", 1) == 1 && rread(s[1], &byte, 1) == 1 && byte == 'x');
		exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status));
	CHECK(rwrite(s[0], "y", 1) == 1 && rread(s[1], &byte, 1) == 1 && byte == 'y');
	CHECK(!rclose(s[0]) && !rclose(s[1]));
}

/* A peer that violates the protocol: the private data with which it connects, and the immediate data of its message after
   that, without bytes. */
struct liar {
	unsigned char says[40];
	uint32_t sends;
	int refused;
	atomic_int done;
};

static void *lies(void *argument)
{
	struct liar *own = argument;
	struct rdma_cm_id *id;
	struct ibv_qp_init_attr init = {.cap = {8, 8, 1, 1, 0}, .qp_type = IBV_QPT_RC, .sq_sig_all = 1};
	struct rdma_conn_param param = {.private_data = own->says, .private_data_len = sizeof(own->says), .retry_count = 7, .rnr_retry_count = 7};
	CHECK(!rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP));
	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 2000) && !rdma_resolve_route(id, 2000));
	CHECK(!rdma_create_qp(id, NULL, &init));
	int connected = rdma_connect(id, &param);
	CHECK(own->refused ? connected == -1 && errno == ECONNREFUSED : !connected);
	if (!connected) {
		struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .imm_data = htobe32(own->sends)}, *bad;
		struct ibv_wc wc;
		CHECK(!ibv_post_send(id->qp, &wr, &bad));
		double end = now() + LONG;
		while (ibv_poll_cq(id->send_cq, 1, &wc) == 0)
			CHECK(now() < end);
		CHECK(!rdma_disconnect(id) || errno == EINVAL);
	}
	rdma_destroy_qp(id);
	CHECK(!rdma_destroy_id(id));
	atomic_store(&own->done, 1);
	return NULL;
}

static void liars(int listener)
{
	uint32_t sends[] = {0x1fffffff, (1 << 17) + 1, 0xa0000000, 0x20000001, 0xe0000003, 0};
	for (int i = 0; i < 6; i++) {
		/* Version, flags, credits; two entries of a table; one byte of a buffer. The last one is of another version. */
		struct liar liar = {.says = {1, 2, 0, 16, [23] = 2, [39] = 1}, .sends = sends[i], .refused = i == 5};
		struct pollfd fd = {.fd = listener, .events = POLLIN};
		pthread_t thread;
		char byte;
		if (liar.refused)
			liar.says[0] = 2;
		CHECK(!pthread_create(&thread, NULL, lies, &liar));
		if (!liar.refused) {
			int s;
			CHECK(wait_for(listener, POLLIN) == POLLIN && (s = raccept(listener, NULL, NULL)) >= 0);
			CHECK(rread(s, &byte, 1) == -1 && errno == ECONNRESET);
			CHECK(rwrite(s, &byte, 1) == -1 && errno == ECONNRESET && !rclose(s));
		}
		/* There is no connection to accept. */
		do
			CHECK(rpoll(&fd, 1, 5) == 0);
		while (!atomic_load(&liar.done));
		CHECK(!pthread_join(thread, NULL));
	}
}

static void datagrams(void)
{
	address.sin_port = 0;
	int a = bound(SOCK_DGRAM), b = rsocket(AF_INET, SOCK_DGRAM, 0);
	struct sockaddr_in from;
	socklen_t length;
	char got[3000] = {};
	CHECK(b >= 0 && rsend(b, "x", 1, 0) == -1 && errno == EDESTADDRREQ);
	CHECK(!rconnect(b, (struct sockaddr *)&address, sizeof(address)));
	CHECK(rsend(b, got, 3000, 0) == -1 && errno == EMSGSIZE);
	/* The call returns the system's error: nothing can be sent to port 0. */
	struct sockaddr_in nowhere = address;
	nowhere.sin_port = 0;
	CHECK(rsendto(b, "x", 1, 0, (struct sockaddr *)&nowhere, sizeof(nowhere)) == -1 && errno == EINVAL);
	for (int i = 0; i < 4; i++) {
		/* The first datagram goes by UDP. */
		CHECK(rsend(b, "question", 8, 0) == 8);
		length = sizeof(from);
		CHECK(wait_for(a, POLLIN) & POLLIN);
		CHECK(rrecvfrom(a, got, 4, MSG_PEEK | MSG_TRUNC, (struct sockaddr *)&from, &length) == 8);
		struct iovec part = {got, 4};
		struct msghdr message = {.msg_name = &from, .msg_namelen = sizeof(from), .msg_iov = &part, .msg_iovlen = 1};
		CHECK(rrecvmsg(a, &message, 0) == 4 && message.msg_flags == MSG_TRUNC && message.msg_namelen == sizeof(from));
		CHECK(rsendto(a, "answer", 6, 0, (struct sockaddr *)&from, sizeof(from)) == 6);
		CHECK(rrecv(b, got, sizeof(got), 0) == 6 && !memcmp(got, "answer", 6));
	}
	CHECK(!rclose(a) && !rclose(b));
}

/* Buffers that the peer writes: it learns of them before later data, and cannot write them after they are unmapped. */
static void mapped(void)
{
	int mappings = 2;
	address.sin_port = 0;
	int listener = rsocket(AF_INET, SOCK_STREAM, 0), s[2];
	CHECK(!rsetsockopt(listener, SOL_RDMA, RDMA_IOMAPSIZE, &mappings, sizeof(mappings)));
	CHECK(!rbind(listener, (struct sockaddr *)&address, sizeof(address)) && !rlisten(listener, 1));
	socklen_t length = sizeof(address);
	CHECK(!rgetsockname(listener, (struct sockaddr *)&address, &length));
	pair(listener, s);
	/* The accepting side's table has two entries, the connecting side's none. */
	static char here[100000], there[100000];
	CHECK(riomap(s[1], there, sizeof(there), PROT_WRITE, 0, 0) == -1 && errno == ENOMEM);
	CHECK(riomap(s[0], here, 10, PROT_WRITE, 0, 500) == 500);
	CHECK(riomap(s[0], here + 10, sizeof(here) - 10, PROT_WRITE, 0, 1000) == 1000);
	CHECK(riomap(s[0], there, 1, PROT_WRITE, 0, -1) == -1 && errno == ENOMEM);
	CHECK(rwrite(s[0], "m", 1) == 1 && rrecv(s[1], there, 1, MSG_WAITALL) == 1);
	memset(there, 'z', sizeof(there));
	CHECK(riowrite(s[1], there, 10, 0, 0) == (size_t)-1 && errno == EINVAL);
	CHECK(riowrite(s[1], there, 10, 500, 0) == 10);
	CHECK(riowrite(s[1], there, sizeof(here) - 10, 1000, 0) == sizeof(here) - 10);
	CHECK(rwrite(s[1], "w", 1) == 1 && rrecv(s[0], there, 1, MSG_WAITALL) == 1);
	for (size_t i = 0; i < sizeof(here); i++)
		CHECK(here[i] == 'z');
	CHECK(riounmap(s[0], there, 1) == -1 && errno == EINVAL && !riounmap(s[0], here, 10));
	here[0] = 'a';
	/* The buffer stays as it is, and the writer is no longer connected. */
	CHECK(riowrite(s[1], there, 10, 500, 0) == 10);
	CHECK(rrecv(s[1], there, 1, 0) == -1 && errno == ECONNRESET && here[0] == 'a');
	CHECK(!rclose(s[0]) && !rclose(s[1]) && !rclose(listener));
}

static int peer(char **argv)
{
	address = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(atoi(argv[3]))};
	CHECK(inet_pton(AF_INET, argv[2], &address.sin_addr) == 1);
	int s = rsocket(AF_INET, SOCK_STREAM, 0);
	CHECK(!rconnect(s, (struct sockaddr *)&address, sizeof(address)) && rwrite(s, "hello", 5) == 5);
	for (;;)
		pause();
}

int main(int argc, char **argv)
{
	if (argc == 4)
		return peer(argv);
	if (argc > 1)
		rounds = atoi(argv[1]);
	union ibv_gid gid;
	struct ibv_context *context = open_first();
	CHECK(!ibv_query_gid(context, 1, 0, &gid));
	address.sin_family = AF_INET;
	memcpy(&address.sin_addr, gid.raw + 12, 4);
	int listener = listening();
	bytes_and_calls(listener);
	what_is_wrong(listener);
	mixed(listener);
	errno_stays(listener);
	threads(listener);
	closed(listener);
	signals(listener);
	forks(listener);
	liars(listener);
	peer_dies(listener, argv[0]);
	CHECK(!rclose(listener));
	datagrams();
	mapped();
	return 0;
}
