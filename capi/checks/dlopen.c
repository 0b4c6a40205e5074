/* Opens and closes the libraries several times: by themselves, and with a plugin that is linked with them, which this file
   is too (-DPLUGIN). Their threads never run code that is gone, and the program ends in its own way. */
#include "check.h"
#include <dlfcn.h>
#include <rdma/rdma_cma.h>
#include <stdbool.h>

#ifdef PLUGIN
static uint32_t words[2];

/* Sends something, and listens; then destroys all objects, or leaves them. */
void use(bool leave)
{
	struct ibv_context *context = open_first();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 8, NULL, NULL, 0);
	struct ibv_mr *mr = ibv_reg_mr(pd, words, sizeof words, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_qp *qp[2];
	CHECK(pd && cq && mr);
	create_pair(pd, cq, cq, qp);
	words[0]++;
	exchange(qp, (struct ibv_sge){(uintptr_t)&words[0], 4, mr->lkey}, (struct ibv_sge){(uintptr_t)&words[1], 4, mr->lkey}, 1);
	completion(cq);
	completion(cq);
	CHECK(words[1] == words[0]);

	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *id;
	union ibv_gid gid;
	struct sockaddr_in at = {.sin_family = AF_INET};
	CHECK(!ibv_query_gid(context, 1, 0, &gid));
	memcpy(&at.sin_addr, gid.raw + 12, 4);
	CHECK(channel && !rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(id, (struct sockaddr *)&at) && !rdma_listen(id, 1));
	if (leave)
		return;
	CHECK(!rdma_destroy_id(id));
	rdma_destroy_event_channel(channel);
	CHECK(!ibv_destroy_qp(qp[0]) && !ibv_destroy_qp(qp[1]) && !ibv_dereg_mr(mr) && !ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(context));
}
#else
#include <pthread.h>

/* Opens a library as one part of a program does, unknown to the other parts. */
static void *opened(const char *name)
{
	void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
	if (!library)
		fprintf(stderr, "%s\n", dlerror());
	CHECK(library);
	return library;
}

static void *found(void *library, const char *name)
{
	void *symbol = dlsym(library, name);
	CHECK(symbol);
	return symbol;
}

static void call(void *library, const char *name)
{
	int count;
	void **(*list)(int *) = found(library, name);
	void **devices = list(&count);
	CHECK(devices && count > 0);
}

/* Checks that the library is still where it was: its threads run, objects left open may be used, and no turn loses anything. */
static void check_stays(void)
{
	bool is_mapped = false;
	char line[4096];
	FILE *maps = fopen("/proc/self/maps", "r");
	CHECK(maps);
	while (fgets(line, sizeof line, maps))
		is_mapped |= strstr(line, "libibverbs.so") != NULL;
	fclose(maps);
	CHECK(is_mapped);
}

struct use {
	void (*function)(bool leave);
	bool leave;
};

static void *call_use(void *use)
{
	((struct use *)use)->function(((struct use *)use)->leave);
	return NULL;
}

int main(int argc, char **argv)
{
	/* This program has no symbol that stands in for the library's. */
	CHECK(!dlsym(RTLD_DEFAULT, "ibv_open_device"));
	char plugin[4096];
	snprintf(plugin, sizeof plugin, "%s.so", argv[0]);
	for (int i = 0; i < 6; i++) {
		void *verbs = opened("libibverbs.so.1");
		call(verbs, "ibv_get_device_list");
		CHECK(!dlclose(verbs));
		check_stays();
		void *rdmacm = opened("librdmacm.so.1");
		call(rdmacm, "rdma_get_devices");
		CHECK(!dlclose(rdmacm));
		void *library = opened(plugin);
		struct use use = {found(library, "use"), i >= 4};
		pthread_t thread;
		if (i % 2)
			call_use(&use);
		else
			CHECK(!pthread_create(&thread, NULL, call_use, &use) && !pthread_join(thread, NULL));
		CHECK(!dlclose(library));
		check_stays();
	}
	return 0;
}
#endif
