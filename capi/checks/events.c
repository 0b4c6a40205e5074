/* Asynchronous events: each concerns the right object, and an object can be destroyed whatever events the program has asked
   for. */
#include "check.h"

/* Returns a queue pair with a shared receive queue, which has reached its last receive and so has an event. */
static struct ibv_qp *reached(struct ibv_pd *pd, struct ibv_cq *cq, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .srq = srq, .cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
	struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	CHECK(qp && !ibv_modify_qp(qp, &error, IBV_QP_STATE));
	return qp;
}

/* Takes the next event, which must concern the queue pair. */
static void expect(struct ibv_context *context, struct ibv_qp *qp, struct ibv_async_event *event)
{
	CHECK(!ibv_get_async_event(context, event));
	CHECK(event->event_type == IBV_EVENT_QP_LAST_WQE_REACHED && event->element.qp == qp);
}

int main(void)
{
	struct ibv_context *contexts[2] = {open_first(), open_first()};
	struct ibv_pd *pd[2];
	struct ibv_cq *cq[2];
	struct ibv_srq *srq[2];
	for (int i = 0; i < 2; i++) {
		struct ibv_srq_init_attr attr = {.attr = {.max_wr = 4, .max_sge = 1}};
		CHECK((pd[i] = ibv_alloc_pd(contexts[i])) && (cq[i] = ibv_create_cq(contexts[i], 16, NULL, NULL, 0)));
		CHECK(srq[i] = ibv_create_srq(pd[i], &attr));
	}
	struct ibv_async_event event;

	/* The program has not asked for the events of the second and the third: both can be destroyed at once. */
	struct ibv_qp *first = reached(pd[0], cq[0], srq[0]), *second = reached(pd[0], cq[0], srq[0]);
	struct ibv_qp *third = reached(pd[1], cq[1], srq[1]);
	expect(contexts[0], first, &event);
	CHECK(!ibv_destroy_qp(second) && !ibv_destroy_qp(third));
	ibv_ack_async_event(&event);
	CHECK(!ibv_destroy_qp(first));

	/* Nor are their events given afterwards. */
	for (int i = 0; i < 2; i++) {
		first = reached(pd[i], cq[i], srq[i]);
		expect(contexts[i], first, &event);
		ibv_ack_async_event(&event);
		CHECK(!ibv_destroy_qp(first) && !ibv_destroy_srq(srq[i]) && !ibv_destroy_cq(cq[i]));
		CHECK(!ibv_dealloc_pd(pd[i]) && !ibv_close_device(contexts[i]));
	}
	return 0;
}
