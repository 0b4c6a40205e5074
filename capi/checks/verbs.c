/* Extended completion queues and their limits, moderation, the null region, device memory, domains, importing, invalidation. */
#include "check.h"
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

static struct ibv_context *context;
static struct ibv_pd *pd;
static uint32_t words[2] = {0x12345678, 0};
static struct ibv_mr *mr;
static struct ibv_sge from, to;

static struct ibv_cq_ex *create(uint64_t wc_flags, uint32_t comp_mask, uint32_t flags, struct ibv_pd *parent)
{
	struct ibv_cq_init_attr_ex init = {.cqe = 16, .wc_flags = wc_flags, .comp_mask = comp_mask, .flags = flags, .parent_domain = parent};
	errno = 0;
	return ibv_create_cq_ex(context, &init);
}

static void extended(void)
{
	CHECK(!create(IBV_WC_EX_WITH_CVLAN, 0, 0, NULL) && errno == EOPNOTSUPP);
	CHECK(!create(IBV_WC_EX_WITH_FLOW_TAG, 0, 0, NULL) && errno == EOPNOTSUPP);
	CHECK(!create(IBV_WC_EX_WITH_TM_INFO, 0, 0, NULL) && errno == EOPNOTSUPP);
	CHECK(!create(0, IBV_CQ_INIT_ATTR_MASK_FLAGS, IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN, NULL) && errno == EOPNOTSUPP);
	CHECK(!create(0, IBV_CQ_INIT_ATTR_MASK_PD, 0, pd) && errno == EINVAL);

	struct ibv_device_attr_ex device;
	CHECK(!ibv_query_device_ex(context, NULL, &device) && device.completion_timestamp_mask && device.hca_core_clock);
	struct ibv_values_ex before = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK}, after = before;
	CHECK(!ibv_query_rt_values_ex(context, &before) && before.comp_mask == IBV_VALUES_MASK_RAW_CLOCK);

	uint64_t times = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
	for (uint32_t flags = 0; flags <= IBV_CREATE_CQ_ATTR_SINGLE_THREADED; flags++) {
		struct ibv_cq_ex *cq = create(IBV_WC_STANDARD_FLAGS | times, IBV_CQ_INIT_ATTR_MASK_FLAGS, flags, NULL);
		CHECK(cq);
		struct ibv_cq *classic = ibv_cq_ex_to_cq(cq);
		struct ibv_qp *qp[2];
		create_pair(pd, classic, classic, qp);
		struct ibv_poll_cq_attr attr = {}, wrong = {.comp_mask = 1};
		CHECK(ibv_start_poll(cq, &wrong) == EINVAL);
		CHECK(ibv_start_poll(cq, &attr) == ENOENT);
		CHECK(ibv_start_poll(cq, &attr) == ENOENT);

		/* Both completions, one after the other. */
		words[1] = 0;
		exchange(qp, from, to, 40 + flags);
		int sends = 0, receives = 0;
		uint64_t last = 0;
		double end = now() + LONG;
		while (sends + receives < 2) {
			CHECK(now() < end);
			int found = ibv_start_poll(cq, &attr);
			if (found == ENOENT)
				continue;
			for (; !found; found = ibv_next_poll(cq)) {
				CHECK(cq->status == IBV_WC_SUCCESS && cq->wr_id == 40 + flags && !ibv_wc_read_vendor_err(cq));
				CHECK(ibv_wc_read_completion_ts(cq) >= last);
				last = ibv_wc_read_completion_ts(cq);
				uint64_t wall = ibv_wc_read_completion_wallclock_ns(cq) / 1000000000;
				CHECK(wall + 1 >= (uint64_t)time(NULL) - LONG && wall <= (uint64_t)time(NULL) + 1);
				CHECK(!ibv_wc_read_slid(cq) && !ibv_wc_read_sl(cq) && !ibv_wc_read_dlid_path_bits(cq));
				if (ibv_wc_read_opcode(cq) == IBV_WC_SEND) {
					sends++;
					CHECK(ibv_wc_read_qp_num(cq) == qp[0]->qp_num);
				} else {
					receives++;
					CHECK(ibv_wc_read_opcode(cq) == IBV_WC_RECV && ibv_wc_read_byte_len(cq) == 4);
					CHECK(ibv_wc_read_qp_num(cq) == qp[1]->qp_num && ibv_wc_read_wc_flags(cq) == IBV_WC_WITH_IMM);
					CHECK(be32toh(ibv_wc_read_imm_data(cq)) == 7 && !ibv_wc_read_src_qp(cq));
				}
			}
			CHECK(found == ENOENT);
			ibv_end_poll(cq);
		}
		CHECK(sends == 1 && receives == 1 && words[1] == words[0]);
		CHECK(!ibv_query_rt_values_ex(context, &after));
		CHECK((uint64_t)before.raw_clock.tv_nsec <= last && last <= (uint64_t)after.raw_clock.tv_nsec);

		/* Classic calls, and resizing. */
		exchange(qp, from, to, 1);
		completion(classic);
		completion(classic);
		CHECK(ibv_resize_cq(classic, 0) == EINVAL && ibv_resize_cq(classic, device.orig_attr.max_cqe + 1) == EINVAL);
		CHECK(!ibv_resize_cq(classic, 64) && classic->cqe >= 64);
		for (int i = 0; i < 2; i++)
			CHECK(!ibv_destroy_qp(qp[i]));
		CHECK(!ibv_destroy_cq(classic));
	}
}

/* A completion vector for each CPU, and no other. */
static void vectors(void)
{
	int count = context->num_comp_vectors;
	CHECK(count == sysconf(_SC_NPROCESSORS_ONLN));
	struct ibv_cq *last = ibv_create_cq(context, 4, NULL, NULL, count - 1);
	CHECK(last && !ibv_destroy_cq(last));
	for (int wrong = -1; wrong <= count; wrong += count + 1) {
		errno = 0;
		CHECK(!ibv_create_cq(context, 4, NULL, NULL, wrong) && errno == EINVAL);
	}
	struct ibv_cq_init_attr_ex init = {.cqe = 4, .comp_vector = count};
	errno = 0;
	CHECK(!ibv_create_cq_ex(context, &init) && errno == EINVAL);
}

/* One event for several completions: a sleeping thread is woken when the first completion is old enough. */
static void moderation(void)
{
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	struct ibv_cq *sends = ibv_create_cq(context, 16, NULL, NULL, 0), *receives = ibv_create_cq(context, 16, &words, channel, 0);
	struct ibv_modify_cq_attr attr = {.attr_mask = IBV_CQ_ATTR_MODERATE, .moderate = {.cq_count = 100, .cq_period = 2000}}, wrong = {};
	CHECK(ibv_modify_cq(receives, &wrong) == EINVAL && !ibv_modify_cq(receives, &attr));
	struct ibv_qp *qp[2];
	create_pair(pd, sends, receives, qp);
	CHECK(!ibv_req_notify_cq(receives, 0));
	for (int i = 0; i < 3; i++)
		exchange(qp, from, to, i);
	struct pollfd events = {.fd = channel->fd, .events = POLLIN};
	CHECK(poll(&events, 1, LONG * 1000) == 1);
	struct ibv_cq *of;
	void *cq_context;
	CHECK(!ibv_get_cq_event(channel, &of, &cq_context) && of == receives && cq_context == &words);
	ibv_ack_cq_events(of, 1);
	CHECK(!fcntl(channel->fd, F_SETFL, O_NONBLOCK) && ibv_get_cq_event(channel, &of, &cq_context) == -1 && errno == EAGAIN);
	for (int i = 0; i < 3; i++)
		completion(receives);
	for (int i = 0; i < 2; i++)
		CHECK(!ibv_destroy_qp(qp[i]));
	CHECK(ibv_destroy_comp_channel(channel) == EBUSY);
	CHECK(!ibv_destroy_cq(sends) && !ibv_destroy_cq(receives) && !ibv_destroy_comp_channel(channel));
}

/* Bytes received into the null region are discarded, and bytes sent from it are zero. */
static void null_region(void)
{
	struct ibv_mr *null = ibv_alloc_null_mr(pd);
	CHECK(null);
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	struct ibv_qp *qp[2];
	create_pair(pd, cq, cq, qp);
	struct ibv_sge nowhere = {.addr = 0x1000, .length = 4, .lkey = null->lkey};
	words[1] = 1;
	exchange(qp, from, nowhere, 0);
	completion(cq);
	completion(cq);
	CHECK(words[1] == 1);
	exchange(qp, nowhere, to, 0);
	completion(cq);
	completion(cq);
	CHECK(words[1] == 0);
	for (int i = 0; i < 2; i++)
		CHECK(!ibv_destroy_qp(qp[i]));
	CHECK(!ibv_destroy_cq(cq) && !ibv_dereg_mr(null));
}

static void device_memory(void)
{
	struct ibv_device_attr_ex device;
	CHECK(!ibv_query_device_ex(context, NULL, &device));
	struct ibv_alloc_dm_attr attr = {.length = device.max_dm_size + 1};
	CHECK(!ibv_alloc_dm(context, &attr) && errno == ENOMEM);
	attr.length = 64;
	struct ibv_dm *memory = ibv_alloc_dm(context, &attr);
	CHECK(memory);
	CHECK(!ibv_reg_dm_mr(pd, memory, 0, 64, IBV_ACCESS_LOCAL_WRITE) && errno == EINVAL);
	CHECK(!ibv_reg_dm_mr(pd, memory, 32, 64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ZERO_BASED) && errno == EINVAL);
	struct ibv_mr *region = ibv_reg_dm_mr(pd, memory, 32, 32, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ZERO_BASED);
	CHECK(region && ibv_free_dm(memory) == EBUSY);
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	struct ibv_qp *qp[2];
	create_pair(pd, cq, cq, qp);
	struct ibv_sge inside = {.addr = 8, .length = 4, .lkey = region->lkey};
	uint32_t read = 0;
	exchange(qp, from, inside, 0);
	completion(cq);
	completion(cq);
	CHECK(!ibv_memcpy_from_dm(&read, memory, 40, 4) && read == words[0]);
	/* The region's rights change, and its location stays. */
	CHECK(!ibv_rereg_mr(region, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_ZERO_BASED));
	read = 5;
	CHECK(!ibv_memcpy_to_dm(memory, 40, &read, 4) && ibv_memcpy_to_dm(memory, 41, &read, 4) == EINVAL);
	exchange(qp, inside, to, 0);
	completion(cq);
	completion(cq);
	CHECK(words[1] == 5);
	for (int i = 0; i < 2; i++)
		CHECK(!ibv_destroy_qp(qp[i]));
	CHECK(!ibv_destroy_cq(cq) && !ibv_dereg_mr(region) && !ibv_free_dm(memory));
}

/* The port's GID, and the contents of an empty entry of its table. */
static void gids(void)
{
	struct ibv_port_attr port;
	union ibv_gid gid, none = {};
	struct ibv_gid_entry entries[4];
	CHECK(!ibv_query_port(context, 1, &port) && port.gid_tbl_len == 2);
	CHECK(!ibv_query_gid(context, 1, 0, &gid) && memcmp(&gid, &none, sizeof(gid)));
	CHECK(!ibv_query_gid(context, 1, 1, &gid) && !memcmp(&gid, &none, sizeof(gid)));
	CHECK(ibv_query_gid(context, 1, 2, &gid) && errno == EINVAL);
	CHECK(!ibv_query_gid_ex(context, 1, 0, entries, 0) && ibv_query_gid_ex(context, 1, 1, entries, 0) == ENODATA);
	CHECK(ibv_query_gid_ex(context, 1, 2, entries, 0) == EINVAL && ibv_query_gid_table(context, entries, 4, 0) == 1);
}

static void domains(void)
{
	struct ibv_td_init_attr td_attr = {};
	struct ibv_td *td = ibv_alloc_td(context, &td_attr);
	CHECK(td);
	struct ibv_parent_domain_init_attr attr = {.td = td};
	CHECK(!ibv_alloc_parent_domain(context, &attr) && errno == EINVAL);
	attr.pd = pd;
	struct ibv_pd *parent = ibv_alloc_parent_domain(context, &attr);
	CHECK(parent);
	struct ibv_cq_ex *cq = create(IBV_WC_STANDARD_FLAGS, IBV_CQ_INIT_ATTR_MASK_PD, 0, parent);
	CHECK(cq);
	struct ibv_qp *qp[2];
	/* Queue pairs of the parent domain reach the regions of its protection domain. */
	create_pair(parent, ibv_cq_ex_to_cq(cq), ibv_cq_ex_to_cq(cq), qp);
	exchange(qp, from, to, 0);
	completion(ibv_cq_ex_to_cq(cq));
	completion(ibv_cq_ex_to_cq(cq));
	CHECK(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) == EBUSY && ibv_dealloc_pd(parent) == EBUSY && ibv_dealloc_td(td) == EBUSY);
	for (int i = 0; i < 2; i++)
		CHECK(!ibv_destroy_qp(qp[i]));
	CHECK(!ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) && ibv_dealloc_pd(pd) == EBUSY);
	CHECK(!ibv_dealloc_pd(parent) && !ibv_dealloc_td(td));
}

/* Attributes and states that a queue pair refuses. */
static void modify(void)
{
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	CHECK(cq && qp);
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};
	int all = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
	CHECK(ibv_modify_qp(qp, &attr, all & ~IBV_QP_PORT) == EINVAL && ibv_modify_qp(qp, &attr, all & ~IBV_QP_PKEY_INDEX) == EINVAL);
	CHECK(ibv_modify_qp(qp, &attr, all & ~IBV_QP_ACCESS_FLAGS) == EINVAL && ibv_modify_qp(qp, &attr, all | 1 << 22) == EINVAL);
	attr.port_num = 2;
	CHECK(ibv_modify_qp(qp, &attr, all) == EINVAL);
	attr.port_num = 1;
	attr.pkey_index = 1;
	CHECK(ibv_modify_qp(qp, &attr, all) == EINVAL && qp->state == IBV_QPS_RESET);
	attr.pkey_index = 0;
	attr.cur_qp_state = IBV_QPS_INIT;
	CHECK(ibv_modify_qp(qp, &attr, all | IBV_QP_CUR_STATE) == EINVAL);
	attr.cur_qp_state = IBV_QPS_RESET;
	CHECK(!ibv_modify_qp(qp, &attr, all | IBV_QP_CUR_STATE) && qp->state == IBV_QPS_INIT);
	attr.qp_state = IBV_QPS_RTS;
	CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE) == EINVAL && qp->state == IBV_QPS_INIT);
	CHECK(!ibv_destroy_qp(qp));

	struct ibv_qp *pair[2];
	create_pair(pd, cq, cq, pair);
	CHECK(ibv_modify_qp(pair[0], &attr, IBV_QP_ALT_PATH) == EOPNOTSUPP && ibv_modify_qp(pair[0], &attr, IBV_QP_CAP) == EOPNOTSUPP);
	attr.path_mig_state = IBV_MIG_REARM;
	CHECK(ibv_modify_qp(pair[0], &attr, IBV_QP_PATH_MIG_STATE) == EOPNOTSUPP);
	struct ibv_device_attr_ex device;
	CHECK(!ibv_query_device_ex(context, NULL, &device) && device.packet_pacing_caps.supported_qpts & 1 << IBV_QPT_RC);
	struct ibv_qp_rate_limit_attr limit = {.rate_limit = 1000000}, burst = {.max_burst_sz = 1};
	CHECK(!ibv_modify_qp_rate_limit(pair[0], &limit) && ibv_modify_qp_rate_limit(pair[0], &burst) == EOPNOTSUPP);
	struct ibv_qp_init_attr made_with;
	CHECK(!ibv_query_qp(pair[0], &attr, IBV_QP_RATE_LIMIT, &made_with) && attr.rate_limit == 1000000);
	exchange(pair, from, to, 0);
	completion(cq);
	completion(cq);
	CHECK(!ibv_destroy_qp(pair[0]) && !ibv_destroy_qp(pair[1]) && !ibv_destroy_cq(cq));
}

/* An object in use is not destroyed. */
static void busy(void)
{
	struct ibv_pd *own = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	struct ibv_srq_init_attr attr = {.attr = {.max_wr = 4, .max_sge = 1}};
	struct ibv_srq *srq = ibv_create_srq(own, &attr);
	CHECK(own && cq && srq && ibv_dealloc_pd(own) == EBUSY);
	struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .srq = srq, .cap = {4, 4, 1, 1, 0}, .qp_type = IBV_QPT_RC};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	CHECK(qp && ibv_destroy_srq(srq) == EBUSY && ibv_destroy_cq(cq) == EBUSY);
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_srq(srq) && !ibv_destroy_cq(cq));

	struct ibv_ah_attr to = {.is_global = 1, .port_num = 1};
	CHECK(!ibv_query_gid(context, 1, 0, &to.grh.dgid));
	struct ibv_ah *ah = ibv_create_ah(own, &to);
	CHECK(ah && ibv_dealloc_pd(own) == EBUSY && !ibv_destroy_ah(ah));
	struct ibv_mw *window = ibv_alloc_mw(own, IBV_MW_TYPE_2);
	CHECK(window && ibv_dealloc_pd(own) == EBUSY && !ibv_dealloc_mw(window));

	/* A region that moves to another domain leaves its first. */
	struct ibv_mr *region = ibv_reg_mr(own, words, sizeof(words), IBV_ACCESS_LOCAL_WRITE);
	CHECK(region && ibv_dealloc_pd(own) == EBUSY);
	struct ibv_pd *second = ibv_alloc_pd(context);
	CHECK(second && !ibv_rereg_mr(region, IBV_REREG_MR_CHANGE_PD, second, NULL, 0, 0) && region->pd == second);
	CHECK(!ibv_dealloc_pd(own) && ibv_dealloc_pd(second) == EBUSY);
	CHECK(!ibv_dereg_mr(region) && !ibv_dealloc_pd(second));
}

/* IBV_DEVICE_MEM_MGT_EXTENSIONS promises windows of type 2 that their owner, or a peer by its SEND, invalidates. */
static void invalidate(void)
{
	struct ibv_device_attr device;
	struct ibv_device_attr_ex whole;
	CHECK(!ibv_query_device(context, &device) && device.device_cap_flags & IBV_DEVICE_MEM_MGT_EXTENSIONS);
	CHECK(!ibv_query_device_ex(context, NULL, &whole) && whole.device_cap_flags_ex & IBV_DEVICE_MEM_MGT_EXTENSIONS);
	struct ibv_cq *sends = ibv_create_cq(context, 16, NULL, NULL, 0), *receives = ibv_create_cq(context, 16, NULL, NULL, 0);
	struct ibv_mr *region = ibv_reg_mr(pd, words, sizeof(words), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
	struct ibv_mw *window = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	struct ibv_qp *qp[2];
	CHECK(sends && receives && region && window);
	create_pair(pd, sends, receives, qp);
	struct ibv_send_wr bind = {.opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED}, *bad_send;
	bind.bind_mw.mw = window;
	bind.bind_mw.bind_info = (struct ibv_mw_bind_info){.mr = region, .addr = (uintptr_t)words, .length = sizeof(words), .mw_access_flags = IBV_ACCESS_REMOTE_WRITE};
	for (int round = 0; round < 2; round++) {
		uint32_t key = bind.bind_mw.rkey = ibv_inc_rkey(window->rkey);
		CHECK(!ibv_post_send(qp[1], &bind, &bad_send) && completion(sends).opcode == IBV_WC_BIND_MW);
		window->rkey = key;
		if (round) {
			struct ibv_send_wr local = {.opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = key};
			CHECK(!ibv_post_send(qp[1], &local, &bad_send) && completion(sends).opcode == IBV_WC_LOCAL_INV);
		} else {
			struct ibv_recv_wr receive = {.sg_list = &to, .num_sge = 1}, *bad_receive;
			struct ibv_send_wr send = {.sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_INV, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = key};
			CHECK(!ibv_post_recv(qp[1], &receive, &bad_receive) && !ibv_post_send(qp[0], &send, &bad_send));
			completion(sends);
			struct ibv_wc wc = completion(receives);
			CHECK(wc.wc_flags & IBV_WC_WITH_INV && wc.invalidated_rkey == key);
		}
	}
	/* The key is no longer valid. */
	struct ibv_send_wr write = {.sg_list = &from, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED};
	write.wr.rdma.remote_addr = (uintptr_t)&words[1];
	write.wr.rdma.rkey = window->rkey;
	CHECK(!ibv_post_send(qp[0], &write, &bad_send));
	struct ibv_wc wc;
	double end = now() + LONG;
	while (!ibv_poll_cq(sends, 1, &wc))
		CHECK(now() < end);
	CHECK(wc.status == IBV_WC_REM_ACCESS_ERR);
	CHECK(!ibv_destroy_qp(qp[0]) && !ibv_destroy_qp(qp[1]) && !ibv_dealloc_mw(window) && !ibv_dereg_mr(region));
	CHECK(!ibv_destroy_cq(sends) && !ibv_destroy_cq(receives));
}

static void import(void)
{
	int other = open("/dev/null", O_RDONLY);
	CHECK(other >= 0 && !ibv_import_device(other) && errno == EOPNOTSUPP);
	CHECK(!ibv_import_device(-1) && errno == EBADF);
	close(other);
	struct ibv_context *second = ibv_import_device(dup(context->cmd_fd));
	CHECK(second);
	CHECK(!ibv_import_pd(second, 0xffffff) && errno == ENOENT);
	struct ibv_pd *shared = ibv_import_pd(second, pd->handle);
	CHECK(shared && shared->context == second && !ibv_import_mr(shared, 0xffffff) && errno == ENOENT);
	struct ibv_mr *region = ibv_import_mr(shared, mr->handle);
	CHECK(region && region->lkey == mr->lkey && region->rkey == mr->rkey);
	struct ibv_cq *cq = ibv_create_cq(second, 16, NULL, NULL, 0);
	struct ibv_qp *qp[2];
	create_pair(shared, cq, cq, qp);
	exchange(qp, from, to, 0);
	completion(cq);
	completion(cq);
	for (int i = 0; i < 2; i++)
		CHECK(!ibv_destroy_qp(qp[i]));
	CHECK(!ibv_destroy_cq(cq));
	ibv_unimport_mr(region);
	ibv_unimport_pd(shared);
	CHECK(!ibv_close_device(second));
	/* The imported objects still exist. */
	CHECK(region = ibv_import_mr(pd, mr->handle));
	ibv_unimport_mr(region);
}

/* Returns the number at the beginning of a file that the device has in /sys. */
static unsigned shown(const char *file)
{
	char path[256];
	unsigned value;
	snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/1/%s", ibv_get_device_name(context->device), file);
	FILE *open = fopen(path, "r");
	CHECK(open && fscanf(open, "%i", (int *)&value) == 1 && !fclose(open));
	return value;
}

/* Programs that query the library, and those that read /sys, get the same values of a port. */
static void port(void)
{
	struct ibv_port_attr attr;
	CHECK(!ibv_query_port(context, 1, &attr));
	CHECK(shown("state") == attr.state && shown("phys_state") == attr.phys_state && shown("cap_mask") == attr.port_cap_flags);
	CHECK(shown("lid") == attr.lid && shown("lid_mask_count") == attr.lmc && shown("sm_lid") == attr.sm_lid && shown("sm_sl") == attr.sm_sl);
	/* 4X, lanes of QDR. */
	CHECK(attr.active_width == 2 && attr.active_speed == 4 && shown("rate") == 4 * 10);
}

int main(void)
{
	context = open_first();
	port();
	pd = ibv_alloc_pd(context);
	mr = ibv_reg_mr(pd, words, sizeof(words), IBV_ACCESS_LOCAL_WRITE);
	CHECK(pd && mr);
	from = (struct ibv_sge){.addr = (uintptr_t)&words[0], .length = 4, .lkey = mr->lkey};
	to = (struct ibv_sge){.addr = (uintptr_t)&words[1], .length = 4, .lkey = mr->lkey};
	extended();
	vectors();
	moderation();
	null_region();
	device_memory();
	gids();
	domains();
	modify();
	busy();
	invalidate();
	import();
	CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd) && !ibv_close_device(context));
	return 0;
}
