/* Programs killed at any moment, while they connect, accept, send, write and destroy: two others on the address go on and
   get an event, and the next one connects at once. KILLED_TIMES gives the number of kills; KILLED_SEED replays the random
   draws, if not the moments. */
#define _GNU_SOURCE
#include "check.h"
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 32 << 10, MESSAGE = 1 << 10, SURVIVORS = 2 };

/* ---- A node: it listens, connects to the nodes that it is told, and exchanges messages on every connection, each of which
   is one queue pair by rdma_cm and one that is brought up by hand. */

/* Private data that each end sends to the other. */
struct hello {
	uint64_t area;
	uint32_t rkey, number, qpn;
};

enum state { CONNECTING, UP, ENDING, OVER };

/* State of one queue pair: what is posted and has not completed, and the next message. */
struct lane {
	struct ibv_qp *qp;
	int recvs, sends;
	uint64_t seq, turns;
};

struct connection {
	struct connection *next;
	struct rdma_cm_id *id;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	struct lane lanes[2];
	struct hello own, peer;
	enum state state;
	unsigned port;
	bool connects, leaves, is_told;
	/* For each lane the bytes received, sent, and written by the peer. */
	uint8_t memory[2][2 * MESSAGE + 2 * BYTES];
};

static struct connection *connections;
static struct rdma_event_channel *events;
static struct rdma_cm_id *listening;
static struct ibv_comp_channel *completions;
static struct ibv_pd *pd;
static unsigned own_number;
static struct sockaddr_in address = {.sin_family = AF_INET};
static uint64_t random_state;
/* Set when the other nodes may end. */
static bool ends;

static uint64_t draw(uint64_t below)
{
	random_state = random_state * 6364136223846793005 + 1442695040888963407;
	return (random_state >> 33) % below;
}

static void fill(uint8_t *to, size_t bytes, uint64_t key)
{
	for (size_t i = 0; i < bytes; i += 8) {
		uint64_t word = (key + i) * 0x9e3779b97f4a7c15;
		memcpy(to + i, &word, 8);
	}
}

static bool holds(const uint8_t *from, size_t bytes, uint64_t key)
{
	for (size_t i = 0; i < bytes; i += 8) {
		uint64_t word = (key + i) * 0x9e3779b97f4a7c15;
		if (memcmp(from + i, &word, 8))
			return false;
	}
	return true;
}

/* Returns whether a node is never killed. */
static bool survives(unsigned number) { return number < SURVIVORS; }

/* Returns the number of a message, which nothing else of the two ends has. */
static uint64_t key(const struct connection *connection, int lane, uint64_t seq)
{
	uint32_t a = connection->own.qpn, b = connection->peer.qpn;
	return seq << 34 ^ (uint64_t)(a ^ b) << 2 ^ lane;
}

static void receive(struct connection *of, int i)
{
	struct ibv_sge to = {(uintptr_t)of->memory[i], MESSAGE, of->mr->lkey};
	struct ibv_recv_wr wr = {.wr_id = i, .sg_list = &to, .num_sge = 1}, *bad;
	CHECK(!ibv_post_recv(of->lanes[i].qp, &wr, &bad));
	of->lanes[i].recvs++;
}

/* Writes into the peer's memory, and sends the message about it. */
static void say(struct connection *of, int i)
{
	struct lane *lane = &of->lanes[i];
	uint8_t *message = of->memory[i] + MESSAGE, *area = message + MESSAGE;
	fill(message, MESSAGE, key(of, i, lane->seq));
	fill(area, BYTES, ~key(of, i, lane->seq));
	struct ibv_sge from[2] = {{(uintptr_t)message, MESSAGE, of->mr->lkey}, {(uintptr_t)area, BYTES, of->mr->lkey}};
	struct ibv_send_wr second = {.wr_id = 2 + i, .sg_list = &from[0], .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
	struct ibv_send_wr first = {.wr_id = 2 + i, .next = &second, .sg_list = &from[1], .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED}, *bad;
	first.wr.rdma.remote_addr = of->peer.area + i * sizeof of->memory[0];
	first.wr.rdma.rkey = of->peer.rkey;
	CHECK(!ibv_post_send(lane->qp, &first, &bad));
	lane->sends += 2;
	lane->seq++;
}

/* Sends an empty message, which completes with an error when the peer is gone. */
static void ask(struct connection *of)
{
	struct ibv_send_wr wr = {.wr_id = 3, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
	CHECK(!ibv_post_send(of->lanes[1].qp, &wr, &bad));
	of->lanes[1].sends++;
}

static void fatal(const struct connection *of, const char *what)
{
	fprintf(stderr, "%u: %s, of the connection with %u, state %d\n", own_number, what, of->peer.number, of->state);
	exit(1);
}

static void create_queues(struct connection *of)
{
	CHECK(of->cq = ibv_create_cq(of->id->verbs, 32, of, completions, 0));
	CHECK(!ibv_req_notify_cq(of->cq, 0));
	CHECK(of->mr = ibv_reg_mr(pd, of->memory, sizeof of->memory, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	struct ibv_qp_init_attr init = {.send_cq = of->cq, .recv_cq = of->cq, .cap = {8, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
	CHECK(!rdma_create_qp(of->id, pd, &init));
	of->lanes[0].qp = of->id->qp;
	CHECK(of->lanes[1].qp = ibv_create_qp(pd, &init));
	of->own = (struct hello){(uintptr_t)of->memory + 2 * MESSAGE + BYTES, of->mr->rkey, own_number, of->lanes[1].qp->qp_num};
	receive(of, 0);
}

static struct rdma_conn_param parameters(const struct connection *of)
{
	return (struct rdma_conn_param){.private_data = &of->own, .private_data_len = sizeof of->own, .responder_resources = 1, .initiator_depth = 1, .retry_count = 7, .rnr_retry_count = 7};
}

/* Brings up the second queue pair, as soon as the peer's is known. */
static void bring_up_second(struct connection *of, const struct rdma_cm_event *event)
{
	CHECK(event->param.conn.private_data_len >= sizeof of->peer);
	memcpy(&of->peer, event->param.conn.private_data, sizeof of->peer);
	/* A peer that may die is retried for no longer than 2 s. */
	bring_up_within(of->lanes[1].qp, of->peer.qpn, survives(of->peer.number) ? 14 : 13);
	receive(of, 1);
}

static struct connection *add(struct rdma_cm_id *id, bool connects)
{
	struct connection *of = calloc(1, sizeof *of);
	CHECK(of);
	*of = (struct connection){.next = connections, .id = id, .connects = connects};
	id->context = of;
	connections = of;
	return of;
}

static void connect_to(unsigned port, unsigned number)
{
	struct rdma_cm_id *id;
	CHECK(!rdma_create_id(events, &id, NULL, RDMA_PS_TCP));
	struct connection *of = add(id, true);
	of->peer.number = number;
	of->port = port;
	struct sockaddr_in to = address;
	to.sin_port = htons(port);
	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 1000 * LONG));
}

/* Handles the end of the connection: everything that was posted has to complete. Nothing reports the end to the second queue
   pair, so the survivor sends on it. */
static void end(struct connection *of)
{
	if (of->state != UP)
		return;
	if (survives(of->peer.number) && !of->leaves && !ends)
		fatal(of, "it ended");
	of->state = ENDING;
	rdma_disconnect(of->id);
	struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};
	if (of->leaves)
		CHECK(!ibv_modify_qp(of->lanes[1].qp, &error, IBV_QP_STATE));
	else if (!of->lanes[1].sends)
		ask(of);
}

static void destroy(struct connection *of)
{
	if (of->lanes[0].qp)
		rdma_destroy_qp(of->id);
	CHECK(!of->lanes[1].qp || !ibv_destroy_qp(of->lanes[1].qp));
	CHECK(!of->cq || !ibv_destroy_cq(of->cq));
	CHECK(!of->mr || !ibv_dereg_mr(of->mr));
	CHECK(!rdma_destroy_id(of->id));
	free(of);
}

static void completed(struct connection *of, const struct ibv_wc *wc)
{
	int i = wc->wr_id % 2;
	struct lane *lane = &of->lanes[i];
	if (wc->wr_id < 2)
		lane->recvs--;
	else
		lane->sends--;
	if (wc->status != IBV_WC_SUCCESS) {
		if (wc->status != IBV_WC_WR_FLUSH_ERR && wc->status != IBV_WC_RETRY_EXC_ERR)
			fatal(of, ibv_wc_status_str(wc->status));
		end(of);
	} else if (of->state == OVER) {
		return;
	} else if (of->state == ENDING) {
		/* The peer had not ended its side yet. */
		if (i == 1 && !lane->sends)
			ask(of);
	} else if (wc->wr_id < 2 && wc->byte_len) {
		/* Both ends count the messages of a lane, which alternate. */
		uint8_t *area = of->memory[i] + 2 * MESSAGE + BYTES;
		if (wc->byte_len != MESSAGE || !holds(of->memory[i], MESSAGE, key(of, i, lane->seq)))
			fatal(of, "a message is wrong");
		if (!holds(area, BYTES, ~key(of, i, lane->seq)))
			fatal(of, "what was written is wrong");
		lane->turns++;
		lane->seq++;
		receive(of, i);
		if (!survives(own_number) && of->connects && draw(100) == 0)
			of->leaves = !rdma_disconnect(of->id);
		else
			say(of, i);
	}
}

/* Returns whether everything has completed, and the end was reported. */
static bool is_over(const struct connection *of)
{
	return of->state == OVER || (of->state == ENDING && of->is_told && !of->lanes[0].recvs && !of->lanes[0].sends && !of->lanes[1].recvs && !of->lanes[1].sends);
}

static void happened(struct rdma_cm_event *event)
{
	struct connection *of = event->id->context;
	struct rdma_conn_param param;
	switch (event->event) {
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		CHECK(!rdma_resolve_route(event->id, 1000 * LONG));
		break;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		create_queues(of);
		param = parameters(of);
		CHECK(!rdma_connect(event->id, &param));
		break;
	case RDMA_CM_EVENT_CONNECT_REQUEST:
		of = add(event->id, false);
		create_queues(of);
		bring_up_second(of, event);
		param = parameters(of);
		/* The peer may have gone meanwhile. */
		if (rdma_accept(event->id, &param))
			of->state = OVER;
		break;
	case RDMA_CM_EVENT_ESTABLISHED:
		of->state = UP;
		if (!of->connects)
			break;
		bring_up_second(of, event);
		say(of, 0);
		say(of, 1);
		break;
	case RDMA_CM_EVENT_DISCONNECTED:
		of->is_told = true;
		if (of->state == CONNECTING)
			of->state = OVER;
		end(of);
		break;
	case RDMA_CM_EVENT_REJECTED:
	case RDMA_CM_EVENT_UNREACHABLE:
		if (survives(of->peer.number) || of->state != CONNECTING)
			fatal(of, rdma_event_str(event->event));
		of->state = OVER;
		break;
	case RDMA_CM_EVENT_TIMEWAIT_EXIT:
		break;
	default:
		fatal(of, rdma_event_str(event->event));
	}
}

/* Returns the number of descriptors in a folder of /proc, or of files. */
static int entries(const char *path)
{
	DIR *folder = opendir(path);
	int count = -2;
	if (!folder)
		return 0;
	while (readdir(folder))
		count++;
	closedir(folder);
	return count;
}

static int mappings(void)
{
	int lines = 0, c;
	FILE *maps = fopen("/proc/self/maps", "r");
	while ((c = fgetc(maps)) != EOF)
		lines += c == '\n';
	fclose(maps);
	return lines;
}

static void node(unsigned number)
{
	own_number = number;
	struct ibv_context *context = open_first();
	union ibv_gid gid;
	CHECK(!ibv_query_gid(context, 1, 0, &gid));
	memcpy(&address.sin_addr, gid.raw + 12, 4);
	CHECK(events = rdma_create_event_channel());
	CHECK(!rdma_create_id(events, &listening, NULL, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(listening, (struct sockaddr *)&address) && !rdma_listen(listening, 64));
	CHECK(pd = ibv_alloc_pd(listening->verbs));
	CHECK(completions = ibv_create_comp_channel(listening->verbs));
	int fds[] = {STDIN_FILENO, events->fd, completions->fd};
	for (int i = 0; i < 3; i++)
		CHECK(!fcntl(fds[i], F_SETFL, O_NONBLOCK));
	printf("ready %u\n", ntohs(rdma_get_src_port(listening)));
	/* Turns of the lanes with the other survivor at the last mark, and the answer that is pending. */
	uint64_t marks[2] = {0};
	enum { NOT, ASKED, MARKED } mark = NOT;
	bool settles = false, is_up = false;
	for (;;) {
		struct pollfd waits[3];
		for (int i = 0; i < 3; i++)
			waits[i] = (struct pollfd){.fd = fds[i], .events = POLLIN};
		CHECK(poll(waits, 3, 1000 * LONG) > 0 || survives(number));
		struct rdma_cm_event *event;
		while (!rdma_get_cm_event(events, &event)) {
			happened(event);
			CHECK(!rdma_ack_cm_event(event));
		}
		struct ibv_cq *cq;
		void *of;
		while (!ibv_get_cq_event(completions, &cq, &of)) {
			ibv_ack_cq_events(cq, 1);
			CHECK(!ibv_req_notify_cq(cq, 0));
			struct ibv_wc wc;
			while (ibv_poll_cq(cq, 1, &wc) == 1)
				completed(of, &wc);
		}
		char line[256];
		ssize_t bytes = waits[0].revents ? read(STDIN_FILENO, line, sizeof line - 1) : -1;
		if (bytes == 0)
			break;
		line[bytes > 0 ? bytes : 0] = 0;
		for (char *rest = line, *word; (word = strsep(&rest, "\n")) && *word;) {
			unsigned port, to;
			if (sscanf(word, "connect %u %u", &port, &to) == 2)
				connect_to(port, to);
			if (!strcmp(word, "mark"))
				mark = ASKED;
			settles |= !strcmp(word, "settle");
			if (!strcmp(word, "end")) {
				ends = true;
				printf("ends\n");
			}
		}
		bool has_others = false;
		unsigned up = 0;
		for (struct connection **at = &connections, *one; (one = *at);) {
			if (is_over(one)) {
				*at = one->next;
				if (one->leaves)
					connect_to(one->port, one->peer.number);
				destroy(one);
				continue;
			}
			at = &one->next;
			if (!survives(one->peer.number)) {
				has_others = true;
				continue;
			}
			uint64_t turns[2] = {one->lanes[0].turns, one->lanes[1].turns};
			if (turns[0] && turns[1])
				up |= 1 << one->peer.number;
			if (mark == ASKED) {
				memcpy(marks, turns, sizeof marks);
				mark = MARKED;
			} else if (mark == MARKED && turns[0] > marks[0] + 1 && turns[1] > marks[1] + 1) {
				mark = NOT;
				printf("goes on\n");
			}
		}
		if (!is_up && up == 3) {
			is_up = true;
			printf("up\n");
		}
		if (settles && !has_others) {
			settles = false;
			printf("settled %d %d\n", entries("/proc/self/fd"), mappings());
		}
	}
	while (connections) {
		struct connection *one = connections;
		connections = one->next;
		destroy(one);
	}
	CHECK(!rdma_destroy_id(listening) && !ibv_dealloc_pd(pd) && !ibv_destroy_comp_channel(completions));
	rdma_destroy_event_channel(events);
	CHECK(!ibv_close_device(context));
}

/* ---- The process that starts and kills them. */

struct process {
	pid_t pid;
	unsigned number, port;
	int in;
	FILE *out;
};

static char itself[4096];

static struct process start(unsigned number)
{
	struct process process = {.number = number};
	char number_text[16], random_text[32];
	int in[2], out[2];
	CHECK(!pipe2(in, O_CLOEXEC) && !pipe2(out, O_CLOEXEC));
	snprintf(number_text, sizeof number_text, "%u", number);
	snprintf(random_text, sizeof random_text, "%lu", (unsigned long)draw(1u << 31));
	process.pid = fork();
	CHECK(process.pid >= 0);
	if (!process.pid) {
		dup2(in[0], STDIN_FILENO);
		dup2(out[1], STDOUT_FILENO);
		execl(itself, itself, "node", number_text, random_text, NULL);
		_exit(127);
	}
	close(in[0]);
	close(out[1]);
	process.in = in[1];
	CHECK(process.out = fdopen(out[0], "r"));
	return process;
}

/* Waits for a word that a process prints, and reads the numbers behind it. */
static void hear(struct process *process, const char *word, int numbers[2])
{
	char line[256];
	struct pollfd wait = {.fd = fileno(process->out), .events = POLLIN};
	for (;;) {
		if (poll(&wait, 1, 1000 * LONG) != 1 || !fgets(line, sizeof line, process->out)) {
			fprintf(stderr, "%u does not say: %s\n", process->number, word);
			exit(1);
		}
		if (strncmp(line, word, strlen(word)))
			continue;
		if (numbers)
			sscanf(line + strlen(word), "%d %d", &numbers[0], &numbers[1]);
		return;
	}
}

static void tell(struct process *process, const char *line)
{
	CHECK(write(process->in, line, strlen(line)) == (ssize_t)strlen(line));
}

static void tell_connect(struct process *process, const struct process *to)
{
	char line[64];
	snprintf(line, sizeof line, "connect %u %u\n", to->port, to->number);
	tell(process, line);
}

static int status_of(struct process *process)
{
	int status;
	CHECK(waitpid(process->pid, &status, 0) == process->pid);
	fclose(process->out);
	return status;
}

static void check_goes_on(struct process *processes)
{
	for (int i = 0; i < SURVIVORS; i++)
		tell(&processes[i], "mark\n");
	for (int i = 0; i < SURVIVORS; i++)
		hear(&processes[i], "goes on", NULL);
}

/* Reads the descriptors and mappings of each survivor, once it has got the event of every end. */
static void settle(struct process *processes, int figures[SURVIVORS][2])
{
	for (int i = 0; i < SURVIVORS; i++)
		tell(&processes[i], "settle\n");
	for (int i = 0; i < SURVIVORS; i++)
		hear(&processes[i], "settled", figures[i]);
}

static void kill_some(int kills)
{
	struct process survivors[SURVIVORS];
	int port[2], early[SURVIVORS][2], late[SURVIVORS][2];
	for (unsigned i = 0; i < SURVIVORS; i++) {
		survivors[i] = start(i);
		hear(&survivors[i], "ready", port);
		survivors[i].port = port[0];
	}
	tell_connect(&survivors[1], &survivors[0]);
	check_goes_on(survivors);
	/* The last process is not killed. */
	for (int i = 0; i <= kills; i++) {
		struct process process = start(SURVIVORS + i);
		bool is_last = i == kills, opens = !is_last && draw(4) == 0;
		if (!opens) {
			hear(&process, "ready", port);
			process.port = port[0];
			bool is_connected_to = draw(2);
			for (int j = 0; j < SURVIVORS; j++) {
				tell_connect(&process, &survivors[j]);
				if (is_connected_to)
					tell_connect(&survivors[j], &process);
			}
			if (is_last || draw(2))
				hear(&process, "up", NULL);
		}
		if (is_last) {
			close(process.in);
			CHECK(status_of(&process) == 0);
			break;
		}
		/* The delay is time, not progress: the moment of death is random, wherever the process is by then. */
		usleep(draw(30000));
		CHECK(!kill(process.pid, SIGKILL));
		close(process.in);
		CHECK(WIFSIGNALED(status_of(&process)));
		/* Nobody listens there any more. */
		if (!opens && draw(2))
			tell_connect(&survivors[draw(SURVIVORS)], &process);
		check_goes_on(survivors);
		if (i == kills / 5)
			settle(survivors, early);
	}
	settle(survivors, late);
	check_goes_on(survivors);
	for (int i = 0; i < SURVIVORS; i++) {
		printf("%d: descriptors %d, %d; mappings %d, %d\n", i, early[i][0], late[i][0], early[i][1], late[i][1]);
		/* The library keeps a socket for each place on the port that was ever sent to; the C library keeps stacks. */
		CHECK(late[i][0] <= early[i][0] + 15 && late[i][1] <= early[i][1] + 64);
		tell(&survivors[i], "end\n");
	}
	for (int i = 0; i < SURVIVORS; i++)
		hear(&survivors[i], "ends", NULL);
	for (int i = 0; i < SURVIVORS; i++) {
		close(survivors[i].in);
		CHECK(status_of(&survivors[i]) == 0);
	}
}

static char runtime[] = "/tmp/killed-XXXXXX";

static void remove_runtime(void)
{
	char command[64];
	snprintf(command, sizeof command, "rm -r %s", runtime);
	if (system(command))
		fprintf(stderr, "%s is left\n", runtime);
}

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc > 3) {
		random_state = strtoull(argv[3], NULL, 0);
		node(atoi(argv[2]));
		return 0;
	}
	const char *seed = getenv("KILLED_SEED");
	random_state = seed ? strtoull(seed, NULL, 0) : (uint64_t)time(NULL) << 16 ^ getpid();
	printf("KILLED_SEED=%llu\n", (unsigned long long)random_state);
	signal(SIGPIPE, SIG_IGN);
	CHECK(readlink("/proc/self/exe", itself, sizeof itself - 1) > 0);
	/* Files that killed processes leave there are counted. */
	char files[64];
	CHECK(mkdtemp(runtime) && !atexit(remove_runtime) && !setenv("XDG_RUNTIME_DIR", runtime, 1));
	const char *times = getenv("KILLED_TIMES");
	int kills = times ? atoi(times) : 12;
	kill_some(kills);
	snprintf(files, sizeof files, "%s/rdmux", runtime);
	printf("%d killed, %d files left\n", kills, entries(files));
	CHECK(entries(files) <= 16 + SURVIVORS + 1);
	return 0;
}
