/* Traffic that begins before the passive side has the RTU. The active side sends as soon as it gets the event of the
   connection, and the passive side as soon as rdma_accept has returned, as rdma_cm allows both: with CM messages in time,
   late or lost, and with more runnable processes than CPUs. Every connection is established, every message arrives, and
   there is no asynchronous event. */
#include "check.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SPINNERS = 16, AT_ONCE = 10, BYTES = 64, RECEIVES = 2 };
/* Completions that each side waits for: that of its send, and that of its receive. */
enum { SENT = 1, RECEIVED = 2 };

static const char *faults;
static int connections;

struct end {
	struct rdma_cm_id *id;
	/* The peer's message, followed by its own. */
	char bytes[2][BYTES];
	struct ibv_mr *mr;
	int completed, established;
};

struct side {
	struct rdma_event_channel *events;
	struct ibv_context *context;
	struct ibv_comp_channel *completions;
	struct ibv_cq *cq;
	struct end *ends;
	int over;
};

static void set_nonblocking(int fd) { CHECK(!fcntl(fd, F_SETFL, O_NONBLOCK)); }

/* Makes the objects that the ends of a side share, when the first one has its device. */
static void share(struct side *side, struct ibv_context *context)
{
	if (side->context) {
		CHECK(side->context == context);
		return;
	}
	side->context = context;
	CHECK(side->completions = ibv_create_comp_channel(context));
	CHECK(side->cq = ibv_create_cq(context, 8 * connections, NULL, side->completions, 0));
	CHECK(!ibv_req_notify_cq(side->cq, 0));
	set_nonblocking(side->completions->fd);
	set_nonblocking(context->async_fd);
}

/* Makes an end's queue pair, and posts its receive before the peer can learn of it. */
static void prepare(struct side *side, struct end *end, struct rdma_cm_id *id)
{
	end->id = id;
	id->context = end;
	share(side, id->verbs);
	struct ibv_qp_init_attr init = {.send_cq = side->cq, .recv_cq = side->cq, .cap = {2, RECEIVES, 1, 1, 0}, .qp_type = IBV_QPT_RC};
	CHECK(!rdma_create_qp(id, NULL, &init));
	CHECK(end->mr = ibv_reg_mr(id->qp->pd, end->bytes, sizeof end->bytes, IBV_ACCESS_LOCAL_WRITE));
	struct ibv_sge sge = {.addr = (uintptr_t)end->bytes[0], .length = BYTES, .lkey = end->mr->lkey};
	struct ibv_recv_wr receive = {.wr_id = end - side->ends, .sg_list = &sge, .num_sge = 1}, *bad;
	CHECK(!ibv_post_recv(id->qp, &receive, &bad));
}

static void say(struct side *side, struct end *end)
{
	snprintf(end->bytes[1], BYTES, "from %d", end->id->qp->qp_num);
	struct ibv_sge sge = {.addr = (uintptr_t)end->bytes[1], .length = BYTES, .lkey = end->mr->lkey};
	struct ibv_send_wr send = {.wr_id = end - side->ends, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
	CHECK(end->id->qp->state == IBV_QPS_RTS);
	CHECK(!ibv_post_send(end->id->qp, &send, &bad));
}

static void take_completions(struct side *side)
{
	struct ibv_cq *cq;
	void *unused;
	if (ibv_get_cq_event(side->completions, &cq, &unused)) {
		CHECK(errno == EAGAIN);
		return;
	}
	ibv_ack_cq_events(cq, 1);
	CHECK(!ibv_req_notify_cq(cq, 0));
	struct ibv_wc wc;
	int found;
	while ((found = ibv_poll_cq(cq, 1, &wc)) > 0) {
		struct end *end = &side->ends[wc.wr_id];
		if (wc.status)
			fprintf(stderr, "connection %d: %s\n", (int)wc.wr_id, ibv_wc_status_str(wc.status));
		CHECK(!wc.status);
		end->completed |= wc.opcode == IBV_WC_RECV ? RECEIVED : SENT;
		CHECK(wc.opcode != IBV_WC_RECV || !strncmp(end->bytes[0], "from ", 5));
	}
	CHECK(!found);
}

/* Waits for an event of a side, and takes its completions. Null: there is no connection event. */
static struct rdma_cm_event *next(struct side *side)
{
	struct pollfd wait[3] = {{.fd = side->events->fd, .events = POLLIN}};
	if (side->context) {
		wait[1] = (struct pollfd){.fd = side->completions->fd, .events = POLLIN};
		wait[2] = (struct pollfd){.fd = side->context->async_fd, .events = POLLIN};
	}
	int found = poll(wait, side->context ? 3 : 1, LONG * 1000);
	if (!found)
		fprintf(stderr, "%d of %d connections are over\n", side->over, connections);
	CHECK(found > 0);
	if (side->context) {
		struct ibv_async_event event;
		if (!ibv_get_async_event(side->context, &event)) {
			fprintf(stderr, "asynchronous event: %s\n", ibv_event_type_str(event.event_type));
			CHECK(0);
		}
		take_completions(side);
	}
	struct rdma_cm_event *event = NULL;
	CHECK(!rdma_get_cm_event(side->events, &event) || errno == EAGAIN);
	return event;
}

static struct side begin(void)
{
	struct side side = {.events = rdma_create_event_channel(), .ends = calloc(connections, sizeof(struct end))};
	CHECK(side.events && side.ends);
	set_nonblocking(side.events->fd);
	return side;
}

static void leave(struct end *end)
{
	rdma_destroy_qp(end->id);
	CHECK(!ibv_dereg_mr(end->mr) && !rdma_destroy_id(end->id));
}

static void unexpected(struct rdma_cm_event *event)
{
	fprintf(stderr, "%s, status %d\n", rdma_event_str(event->event), event->status);
	CHECK(0);
}

static void serve(struct sockaddr_in *at, int tell)
{
	struct side side = begin();
	struct rdma_cm_id *listener;
	int asked = 0;
	CHECK(!rdma_create_id(side.events, &listener, NULL, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(listener, (struct sockaddr *)at) && !rdma_listen(listener, AT_ONCE));
	at->sin_port = rdma_get_src_port(listener);
	CHECK(write(tell, at, sizeof *at) == sizeof *at);
	while (side.over < connections) {
		struct rdma_cm_event *event = next(&side);
		if (!event)
			continue;
		struct end *end = event->id->context;
		switch (event->event) {
		case RDMA_CM_EVENT_CONNECT_REQUEST:
			CHECK(asked < connections);
			end = &side.ends[asked++];
			prepare(&side, end, event->id);
			struct rdma_conn_param param = {.rnr_retry_count = 7};
			CHECK(!rdma_accept(event->id, &param));
			say(&side, end);
			CHECK(!rdma_ack_cm_event(event));
			break;
		case RDMA_CM_EVENT_ESTABLISHED:
			end->established++;
			CHECK(!rdma_ack_cm_event(event));
			break;
		case RDMA_CM_EVENT_DISCONNECTED:
			CHECK(!rdma_ack_cm_event(event));
			/* The peer has ended the connection because it has finished. */
			while (end->completed != (SENT | RECEIVED))
				take_completions(&side);
			CHECK(end->established == 1);
			leave(end);
			side.over++;
			break;
		case RDMA_CM_EVENT_TIMEWAIT_EXIT:
			CHECK(!rdma_ack_cm_event(event));
			break;
		default:
			unexpected(event);
		}
	}
	CHECK(!rdma_destroy_id(listener));
}

static void ask(struct side *side, struct sockaddr_in *to)
{
	struct rdma_cm_id *id;
	CHECK(!rdma_create_id(side->events, &id, NULL, RDMA_PS_TCP));
	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)to, 1000));
}

static void connect_all(struct sockaddr_in *to)
{
	struct side side = begin();
	int asked = 0, prepared = 0;
	while (side.over < connections) {
		for (; asked < connections && asked < side.over + AT_ONCE; asked++)
			ask(&side, to);
		struct rdma_cm_event *event = next(&side);
		if (event) {
			struct rdma_cm_id *id = event->id;
			struct end *end = id->context;
			enum rdma_cm_event_type type = event->event;
			if (event->status)
				unexpected(event);
			CHECK(!rdma_ack_cm_event(event));
			switch (type) {
			case RDMA_CM_EVENT_ADDR_RESOLVED:
				CHECK(!rdma_resolve_route(id, 1000));
				break;
			case RDMA_CM_EVENT_ROUTE_RESOLVED:
				prepare(&side, &side.ends[prepared++], id);
				struct rdma_conn_param param = {.retry_count = 7, .rnr_retry_count = 7};
				CHECK(!rdma_connect(id, &param));
				break;
			case RDMA_CM_EVENT_ESTABLISHED:
				end->established++;
				say(&side, end);
				break;
			case RDMA_CM_EVENT_DISCONNECTED:
				CHECK(end->established == 1);
				leave(end);
				side.over++;
				break;
			case RDMA_CM_EVENT_TIMEWAIT_EXIT:
				break;
			default:
				fprintf(stderr, "%s\n", rdma_event_str(type));
				CHECK(0);
			}
		}
		for (int i = 0; i < prepared; i++)
			if (side.ends[i].completed == (SENT | RECEIVED)) {
				side.ends[i].completed = 0;
				CHECK(!rdma_disconnect(side.ends[i].id));
			}
	}
}

/* Forks a process that ends with this one. */
static pid_t child(void)
{
	pid_t parent = getpid(), pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		CHECK(!prctl(PR_SET_PDEATHSIG, SIGKILL));
		if (getppid() != parent)
			_exit(1);
	}
	return pid;
}

static void ends_well(pid_t pid)
{
	int status;
	CHECK(waitpid(pid, &status, 0) == pid);
	if (status)
		fprintf(stderr, "with %s\n", faults);
	CHECK(!status);
}

/* Returns the address of the first device. Another process looks it up, so that this one has no threads when it forks. */
static struct sockaddr_in first_address(void)
{
	struct sockaddr_in at = {.sin_family = AF_INET};
	int pipes[2];
	CHECK(!pipe(pipes));
	pid_t pid = child();
	if (!pid) {
		union ibv_gid gid;
		CHECK(!ibv_query_gid(open_first(), 1, 0, &gid));
		CHECK(write(pipes[1], gid.raw + 12, 4) == 4);
		exit(0);
	}
	ends_well(pid);
	CHECK(read(pipes[0], &at.sin_addr, 4) == 4);
	close(pipes[0]);
	close(pipes[1]);
	return at;
}

/* Connects so many times, with these faults in the CM messages of the active side. */
static void run(const char *with, int times)
{
	struct sockaddr_in at = first_address();
	int pipes[2];
	faults = with, connections = times;
	CHECK(!pipe(pipes));
	pid_t server = child();
	if (!server) {
		serve(&at, pipes[1]);
		exit(0);
	}
	close(pipes[1]);
	pid_t client = child();
	if (!client) {
		CHECK(!setenv("RDMUX_FAULT", with, 1));
		CHECK(read(pipes[0], &at, sizeof at) == sizeof at);
		connect_all(&at);
		exit(0);
	}
	close(pipes[0]);
	ends_well(client);
	ends_well(server);
}

int main(void)
{
	pid_t spinners[SPINNERS];
	faults = "nothing";
	for (int i = 0; i < SPINNERS; i++)
		if (!(spinners[i] = child()))
			for (;;)
				;
	run("", 100);
	run("delay=50ms,only=cm", 100);
	run("loss=20%,only=cm", 50);
	for (int i = 0; i < SPINNERS; i++) {
		CHECK(!kill(spinners[i], SIGKILL));
		CHECK(waitpid(spinners[i], NULL, 0) == spinners[i]);
	}
	return 0;
}
