/* A program that forks: its children do not disturb it, whatever they do with their copies of its objects, and a child that
   opens the device again has its own. */
#include "check.h"
#include <sys/wait.h>
#include <unistd.h>

struct end {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *qp[2];
	struct ibv_ah *ah;
	struct ibv_mw *mw;
	struct ibv_srq *srq;
	uint32_t words[2];
};

static void make(struct end *end)
{
	end->context = open_first();
	end->pd = ibv_alloc_pd(end->context);
	end->mr = ibv_reg_mr(end->pd, end->words, sizeof(end->words), IBV_ACCESS_LOCAL_WRITE);
	end->channel = ibv_create_comp_channel(end->context);
	end->cq = ibv_create_cq(end->context, 64, NULL, end->channel, 0);
	CHECK(end->pd && end->mr && end->channel && end->cq);
	create_pair(end->pd, end->cq, end->cq, end->qp);
	struct ibv_ah_attr ah = {.is_global = 1, .port_num = 1};
	CHECK(!ibv_query_gid(end->context, 1, 0, &ah.grh.dgid));
	struct ibv_srq_init_attr srq = {.attr = {.max_wr = 4, .max_sge = 1}};
	CHECK(end->ah = ibv_create_ah(end->pd, &ah));
	CHECK(end->mw = ibv_alloc_mw(end->pd, IBV_MW_TYPE_1));
	CHECK(end->srq = ibv_create_srq(end->pd, &srq));
}

/* Sends and receives, sleeping until the completions arrive. */
static void use(struct end *end, int rounds)
{
	struct ibv_sge from = {(uintptr_t)&end->words[0], 4, end->mr->lkey}, to = {(uintptr_t)&end->words[1], 4, end->mr->lkey};
	for (int i = 0; i < rounds; i++) {
		end->words[0] = i + 1;
		CHECK(!ibv_req_notify_cq(end->cq, 0));
		exchange(end->qp, from, to, i);
		struct ibv_cq *of;
		void *cq_context;
		CHECK(!ibv_get_cq_event(end->channel, &of, &cq_context) && of == end->cq);
		ibv_ack_cq_events(of, 1);
		completion(end->cq);
		completion(end->cq);
		CHECK(end->words[1] == (uint32_t)i + 1);
	}
}

static void end_all(struct end *end)
{
	CHECK(!ibv_destroy_ah(end->ah) && !ibv_dealloc_mw(end->mw) && !ibv_destroy_srq(end->srq));
	for (int i = 0; i < 2; i++)
		CHECK(!ibv_destroy_qp(end->qp[i]));
	CHECK(!ibv_destroy_cq(end->cq) && !ibv_destroy_comp_channel(end->channel));
	CHECK(!ibv_dereg_mr(end->mr) && !ibv_dealloc_pd(end->pd) && !ibv_close_device(end->context));
}

/* Actions of children. */
static void leave(struct end *end) { (void)end; _exit(0); }
static void run_exit_handlers(struct end *end) { (void)end; exit(0); }
static void execute(struct end *end) { (void)end; execlp("true", "true", NULL); _exit(1); }
static void close_descriptors(struct end *end)
{
	(void)end;
	for (int fd = 3; fd < 256; fd++)
		close(fd);
	exit(0);
}
static void destroy_objects(struct end *end) { end_all(end); exit(0); }
static void have_its_own(struct end *end)
{
	(void)end;
	struct end own = {};
	make(&own);
	use(&own, 20);
	end_all(&own);
	exit(0);
}
static void destroy_and_have_its_own(struct end *end)
{
	end_all(end);
	have_its_own(NULL);
}

int main(void)
{
	CHECK(!ibv_fork_init());
	static void (*const does[])(struct end *) = {leave, run_exit_handlers, execute, close_descriptors, destroy_objects, have_its_own, destroy_and_have_its_own};
	struct end end = {};
	make(&end);
	use(&end, 5);
	for (size_t i = 0; i < sizeof(does) / sizeof(*does); i++) {
		fflush(NULL);
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			/* Distinguishes a child that hangs from one that works. */
			alarm(LONG);
			does[i](&end);
			_exit(2);
		}
		use(&end, 20);
		int status;
		CHECK(waitpid(child, &status, 0) == child);
		if (status)
			fprintf(stderr, "child %zu: status %#x\n", i, status);
		CHECK(status == 0);
		use(&end, 20);
	}
	end_all(&end);
	/* Nothing was closed for good: the device can be opened again. */
	memset(&end, 0, sizeof(end));
	make(&end);
	use(&end, 5);
	end_all(&end);
	return 0;
}
