/* Calls of rdma-core 65 that older headers do not have: buffers that the library allocates, with the allocators of a parent
   domain if it has some, and registration by one structure of attributes. */
#define _GNU_SOURCE
#include "check.h"
#include <dlfcn.h>
#include <stdbool.h>
#include <unistd.h>

enum { ADDR = 1 << 1, FD = 1 << 2, BUF = 1 << 5 };

/* `struct ibv_mr_init_attr` */
struct mr_init_attr {
	size_t length;
	int access;
	uint64_t comp_mask, iova;
	void *addr;
	int fd;
	uint64_t fd_offset;
	void *dmah, *buf;
};

/* `IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC` */
enum { ALLOW_CC = 1 << 2 };

static void *(*alloc_buf)(struct ibv_pd *, size_t, void **);
static void (*free_buf)(void *);
static struct ibv_mr *(*reg_buf_mr)(struct ibv_pd *, void *, void *, size_t, int);
static struct ibv_mr *(*reg_mr_ex)(struct ibv_pd *, struct mr_init_attr *);
static int (*export_buf)(void *);

static struct ibv_context *context;
static size_t page;
static int allocated, freed;
static bool use_default;
static struct ibv_pd *asked_for;

static void *program_alloc(struct ibv_pd *pd, void *given, size_t size, size_t alignment, uint64_t type)
{
	CHECK(pd == asked_for && given == &allocated && alignment == page);
	allocated++;
	return use_default ? IBV_ALLOCATOR_USE_DEFAULT : aligned_alloc(alignment, size);
}

static void program_free(struct ibv_pd *pd, void *given, void *at, uint64_t type)
{
	CHECK(pd == asked_for && given == &allocated);
	freed++;
	free(at);
}

/* A buffer's halves are regions, and data goes from one to the other. */
static void use(struct ibv_pd *pd)
{
	void *buf;
	char *bytes = alloc_buf(pd, 2 * page, &buf);
	CHECK(bytes && (uintptr_t)bytes % page == 0);
	struct ibv_mr *from = reg_buf_mr(pd, buf, bytes, page, 0);
	struct mr_init_attr attr = {.length = page, .access = IBV_ACCESS_LOCAL_WRITE, .comp_mask = BUF | ADDR, .addr = bytes + page, .buf = buf};
	struct ibv_mr *to = reg_mr_ex(pd, &attr);
	CHECK(from && to && from->addr == bytes && to->addr == bytes + page && to->length == page && from->lkey != to->lkey);
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	struct ibv_qp *qp[2];
	create_pair(pd, cq, cq, qp);
	memcpy(bytes, "told", 4);
	exchange(qp, (struct ibv_sge){(uintptr_t)bytes, 4, from->lkey}, (struct ibv_sge){(uintptr_t)bytes + page, 4, to->lkey}, 0);
	completion(cq);
	completion(cq);
	CHECK(!memcmp(bytes + page, "told", 4));
	/* The registration refuses a range beyond the buffer, another domain's buffer, and a file that has no such buffer. */
	attr.length = page + 1;
	CHECK(!reg_mr_ex(pd, &attr) && errno == EINVAL);
	attr.length = SIZE_MAX;
	CHECK(!reg_mr_ex(pd, &attr) && errno == EINVAL);
	attr.length = page;
	attr.addr = bytes - 1;
	CHECK(!reg_mr_ex(pd, &attr) && errno == EINVAL);
	attr.addr = bytes;
	attr.comp_mask = BUF;
	CHECK(!reg_mr_ex(pd, &attr) && errno == EINVAL);
	attr.comp_mask = BUF | ADDR | FD;
	CHECK(!reg_mr_ex(pd, &attr) && errno == EINVAL);
	attr.comp_mask = FD;
	CHECK(!reg_mr_ex(pd, &attr) && errno == EOPNOTSUPP);
	struct ibv_pd *other = ibv_alloc_pd(context);
	CHECK(other && !reg_buf_mr(other, buf, bytes, page, 0) && errno == EINVAL && !ibv_dealloc_pd(other));
	CHECK(export_buf(buf) == -1 && errno == ENODATA);
	for (int i = 0; i < 2; i++)
		CHECK(!ibv_destroy_qp(qp[i]));
	CHECK(!ibv_destroy_cq(cq) && !ibv_dereg_mr(from) && !ibv_dereg_mr(to));
	CHECK(ibv_dealloc_pd(pd) == EBUSY);
	free_buf(buf);
}

static struct ibv_pd *parent_of(struct ibv_pd *pd, uint32_t comp_mask)
{
	struct ibv_parent_domain_init_attr attr = {.pd = pd, .comp_mask = comp_mask, .alloc = program_alloc, .free = program_free, .pd_context = &allocated};
	return ibv_alloc_parent_domain(context, &attr);
}

#define FIND(into, version, name) CHECK(into = dlvsym(RTLD_DEFAULT, name, "IBVERBS_" version))

int main(void)
{
	FIND(alloc_buf, "1.17", "ibv_alloc_buf");
	FIND(free_buf, "1.17", "ibv_free_buf");
	FIND(reg_buf_mr, "1.17", "ibv_reg_buf_mr");
	FIND(reg_mr_ex, "1.15", "ibv_reg_mr_ex");
	FIND(export_buf, "1.18", "ibv_export_buf_dmabuf_fd");
	context = open_first();
	page = sysconf(_SC_PAGESIZE);
	struct ibv_pd *pd = ibv_alloc_pd(context);
	CHECK(pd);
	void *buf;
	CHECK(!alloc_buf(pd, 0, &buf) && errno == EINVAL && !alloc_buf(pd, SIZE_MAX / 2, &buf) && errno == ENOMEM);

	/* Memory that confidential guests share with a device is ordinary memory here. */
	struct ibv_pd *parent = parent_of(pd, ALLOW_CC);
	CHECK(parent);
	use(parent);
	CHECK(!ibv_dealloc_pd(parent) && allocated == 0);
	CHECK(!parent_of(pd, ALLOW_CC << 1) && errno == EINVAL);

	uint32_t both = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
	asked_for = parent = parent_of(pd, both);
	CHECK(parent);
	use(parent);
	CHECK(allocated == 1 && freed == 1);
	use_default = true;
	use(parent);
	CHECK(allocated == 2 && freed == 1 && !ibv_dealloc_pd(parent));

	use(pd);
	CHECK(!ibv_close_device(context));
	return 0;
}
