/* An address has 127 places for processes: the next one is told so, and has the place of the first that is killed. */
#define _GNU_SOURCE
#include "check.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PLACES = 127, HAS_NONE = 3 };

static char itself[4096];

struct process {
	pid_t pid;
	int said, lives;
};

/* Opens the device and holds it until it is killed. */
static void hold(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	CHECK(list && list[0]);
	errno = 0;
	struct ibv_context *context = ibv_open_device(list[0]);
	if (!context) {
		CHECK(errno == EBUSY);
		/* rdma_cm fails, too. */
		struct sockaddr_in address = {.sin_family = AF_INET};
		CHECK(inet_pton(AF_INET, getenv("RDMUX_DEVICES"), &address.sin_addr) == 1);
		struct rdma_event_channel *channel = rdma_create_event_channel();
		struct rdma_cm_id *id;
		CHECK(channel && !rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
		CHECK(rdma_bind_addr(id, (struct sockaddr *)&address) && errno == EBUSY);
		CHECK(!rdma_destroy_id(id));
		rdma_destroy_event_channel(channel);
		exit(HAS_NONE);
	}
	CHECK(write(STDOUT_FILENO, "o", 1) == 1);
	/* Until it is killed, or no process is left that would. */
	char end;
	CHECK(read(STDIN_FILENO, &end, 1) == 0);
}

/* Starts a process; returns false if there is no place for it. */
static bool start(struct process *process)
{
	int ends[2], lives[2];
	CHECK(!pipe2(ends, O_CLOEXEC) && !pipe2(lives, O_CLOEXEC));
	process->pid = fork();
	CHECK(process->pid >= 0);
	if (!process->pid) {
		dup2(lives[0], STDIN_FILENO);
		dup2(ends[1], STDOUT_FILENO);
		dup2(ends[1], STDERR_FILENO);
		execl(itself, itself, "hold", NULL, NULL);
		_exit(127);
	}
	close(ends[1]);
	close(lives[0]);
	process->said = ends[0];
	process->lives = lives[1];
	/* A letter when the process has a place; otherwise its message, followed by its end. */
	char said[4096];
	ssize_t bytes = 0, more;
	struct pollfd wait = {.fd = ends[0], .events = POLLIN};
	do {
		CHECK(poll(&wait, 1, 1000 * LONG) == 1);
		CHECK((more = read(ends[0], said + bytes, sizeof said - 1 - bytes)) >= 0);
		bytes += more;
		if (bytes == 1 && said[0] == 'o')
			return true;
	} while (more);
	said[bytes] = 0;
	int status;
	CHECK(waitpid(process->pid, &status, 0) == process->pid);
	close(ends[0]);
	close(lives[1]);
	fprintf(stderr, "%s", said);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == HAS_NONE);
	/* A line each time: where, what, what to do. */
	char line[128];
	snprintf(line, sizeof line, "rdmux: %s: all 127 places on UDP port 4791 are taken: end one", getenv("RDMUX_DEVICES"));
	CHECK(!strncmp(said, line, strlen(line)));
	return false;
}

static void end(struct process *process)
{
	int status;
	CHECK(!kill(process->pid, SIGKILL) && waitpid(process->pid, &status, 0) == process->pid);
	close(process->said);
	close(process->lives);
}

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "hold")) {
		hold();
		return 0;
	}
	CHECK(readlink("/proc/self/exe", itself, sizeof itself - 1) > 0);
	/* An address on which no other process has a place. */
	char address[32];
	snprintf(address, sizeof address, "127.%d.%d.3", getpid() >> 8 & 127, getpid() & 255);
	CHECK(!setenv("RDMUX_DEVICES", address, 1));
	struct process processes[PLACES], one;
	for (int i = 0; i < PLACES; i++)
		CHECK(start(&processes[i]));
	CHECK(!start(&one));
	for (int i = 0; i < PLACES; i += 42) {
		end(&processes[i]);
		CHECK(start(&processes[i]));
	}
	CHECK(!start(&one));
	for (int i = 0; i < PLACES; i++)
		end(&processes[i]);
	return 0;
}
