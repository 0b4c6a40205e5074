/* The library's own threads: none takes a signal of the program, which may wait for it in a thread of its own; and if the
   system refuses the thread that handles the events of connections, the calls that need it fail. */
#include "check.h"
#include <dirent.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <rdma/rsocket.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static struct sockaddr_in device = {.sin_family = AF_INET};
static struct rdma_event_channel *channel;
static struct rdma_cm_id *listening;
static int rlistening;

static struct rdma_cm_id *new_id(void)
{
	struct rdma_cm_id *id;
	CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	return id;
}

static struct rdma_cm_id *expect(enum rdma_cm_event_type kind)
{
	struct rdma_cm_event *event;
	CHECK(!rdma_get_cm_event(channel, &event) && event->event == kind && !event->status);
	struct rdma_cm_id *id = event->id;
	CHECK(!rdma_ack_cm_event(event));
	return id;
}

static void give_pair(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = {.cap = {8, 8, 1, 1, 0}, .qp_type = IBV_QPT_RC};
	CHECK(!rdma_create_qp(id, NULL, &init));
}

/* Returns an id that only has to connect. */
static struct rdma_cm_id *resolved(void)
{
	struct rdma_cm_id *id = new_id();
	CHECK(!rdma_resolve_addr(id, NULL, rdma_get_local_addr(listening), 2000));
	CHECK(expect(RDMA_CM_EVENT_ADDR_RESOLVED) == id && !rdma_resolve_route(id, 2000));
	CHECK(expect(RDMA_CM_EVENT_ROUTE_RESOLVED) == id);
	give_pair(id);
	return id;
}

static struct rdma_conn_param param = {.retry_count = 7, .rnr_retry_count = 7};

/* Listens and connects, with ids and with sockets: each listener gets a request. */
static void begin(void)
{
	CHECK((channel = rdma_create_event_channel()));
	listening = new_id();
	CHECK(!rdma_bind_addr(listening, (struct sockaddr *)&device) && !rdma_listen(listening, 4));
	CHECK(!rdma_connect(resolved(), &param));
	expect(RDMA_CM_EVENT_CONNECT_REQUEST);

	struct sockaddr_in at = device;
	socklen_t length = sizeof(at);
	rlistening = rsocket(AF_INET, SOCK_STREAM, 0);
	CHECK(!rbind(rlistening, (struct sockaddr *)&at, sizeof(at)) && !rlisten(rlistening, 4));
	CHECK(!rgetsockname(rlistening, (struct sockaddr *)&at, &length));
	int s = rsocket(AF_INET, SOCK_STREAM, 0);
	CHECK(s >= 0 && !rfcntl(s, F_SETFL, O_NONBLOCK));
	CHECK(rconnect(s, (struct sockaddr *)&at, sizeof(at)) == -1 && errno == EINPROGRESS);
	struct pollfd fd = {.fd = rlistening, .events = POLLIN};
	CHECK(rpoll(&fd, 1, LONG * 1000) == 1);
}

/* Returns whether a thread of this process has a signal blocked. */
static int blocks(const char *thread, int signal)
{
	char path[300], line[300];
	unsigned long long mask = 0;
	snprintf(path, sizeof(path), "/proc/self/task/%s/status", thread);
	FILE *file = fopen(path, "r");
	/* The thread has ended. */
	if (!file)
		return -1;
	int found = 0;
	while (fgets(line, sizeof(line), file))
		found |= sscanf(line, "SigBlk: %llx", &mask) == 1;
	fclose(file);
	return found ? mask >> (signal - 1) & 1 : -1;
}

static void signals(void)
{
	DIR *tasks = opendir("/proc/self/task");
	struct dirent *task;
	int seen = 0;
	CHECK(tasks);
	while ((task = readdir(tasks))) {
		if (task->d_name[0] == '.' || atoi(task->d_name) == getpid())
			continue;
		int terms[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGCHLD, SIGALRM, SIGIO, SIGRTMIN};
		for (size_t i = 0; i < sizeof(terms) / sizeof(*terms); i++)
			CHECK(blocks(task->d_name, terms[i]) != 0);
		/* A fault reaches a handler of the program. The C library starts a thread with all signals blocked, and unblocks them once
		   the thread runs. */
		for (double end = now() + LONG; blocks(task->d_name, SIGSEGV) == 1;)
			CHECK(now() < end);
		seen++;
	}
	CHECK(!closedir(tasks) && seen >= 3);
	/* The signal mask of the calling thread is unchanged. */
	sigset_t mask, wanted;
	CHECK(!pthread_sigmask(SIG_SETMASK, NULL, &mask) && !sigismember(&mask, SIGTERM) && !sigismember(&mask, SIGUSR1));
	sigemptyset(&wanted);
	sigaddset(&wanted, SIGTERM);
	int got;
	CHECK(!pthread_sigmask(SIG_BLOCK, &wanted, NULL) && !kill(getpid(), SIGTERM) && !sigwait(&wanted, &got) && got == SIGTERM);
}

/* Makes the system refuse new threads from now on. */
static void refuse(void)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 1, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAGAIN),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {sizeof(filter) / sizeof(*filter), filter};
	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
}

/* A child has no thread of its parent. It opens a device, and is then refused the thread that handles the events of its connections. */
static void refused(void)
{
	struct sockaddr_in at = device;
	struct rdma_cm_id *another, *asks, *datagrams;
	CHECK((channel = rdma_create_event_channel()));
	CHECK((another = new_id()) && !rdma_bind_addr(another, (struct sockaddr *)&device));
	at.sin_port = rdma_get_src_port(another);
	CHECK((asks = new_id()) && !rdma_resolve_addr(asks, NULL, (struct sockaddr *)&at, 2000));
	CHECK(expect(RDMA_CM_EVENT_ADDR_RESOLVED) == asks && !rdma_resolve_route(asks, 2000));
	CHECK(expect(RDMA_CM_EVENT_ROUTE_RESOLVED) == asks);
	give_pair(asks);
	CHECK(!rdma_create_id(channel, &datagrams, NULL, RDMA_PS_UDP));
	CHECK(!rdma_resolve_addr(datagrams, NULL, (struct sockaddr *)&at, 2000));
	CHECK(expect(RDMA_CM_EVENT_ADDR_RESOLVED) == datagrams && !rdma_resolve_route(datagrams, 2000));
	CHECK(expect(RDMA_CM_EVENT_ROUTE_RESOLVED) == datagrams);
	int s = rsocket(AF_INET, SOCK_STREAM, 0);
	CHECK(s >= 0);
	refuse();
	/* The calls can be repeated. */
	for (int i = 0; i < 2; i++) {
		CHECK(rdma_listen(another, 4) == -1 && errno == EAGAIN);
		CHECK(rdma_connect(asks, &param) == -1 && errno == EAGAIN);
		CHECK(rdma_connect(datagrams, &param) == -1 && errno == EAGAIN);
		CHECK(rconnect(s, (struct sockaddr *)&at, sizeof(at)) == -1 && errno == EAGAIN);
	}
	CHECK(!rclose(s));
}

int main(void)
{
	struct ibv_context *context = open_first();
	union ibv_gid gid;
	CHECK(!ibv_query_gid(context, 1, 0, &gid));
	memcpy(&device.sin_addr, gid.raw + 12, 4);
	begin();
	signals();
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		alarm(LONG);
		refused();
		exit(0);
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	return 0;
}
