/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of a GPU, for verbs_mr.c: is an address one's, which physical segment is it in, and that
 * segment as a dma-buf. Only addresses are handled: the CPU touches nothing of it.
 *
 * libcuda is used if the process has it loaded already: without it there are no such addresses. It
 * is never initialised here.
 */
#include "verbs.h"

#ifdef KVIO_HAVE_VERBS
#include <unistd.h>

#include "symbols.h"

/* Of CUDA's driver interface, by its documentation. */
#define CUDA_SUCCESS 0
#define POINTER_CONTEXT 1		/* CU_POINTER_ATTRIBUTE_CONTEXT */
#define POINTER_MEMORY_TYPE 2		/* CU_POINTER_ATTRIBUTE_MEMORY_TYPE */
#define MEMORY_TYPE_DEVICE 2		/* CU_MEMORYTYPE_DEVICE */
#define HANDLE_DMA_BUF_FD 1		/* CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD */
#define MAPPING_PCIE 1u			/* CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE, 12.8 */

static struct {
	bool loaded;
	int (*pointer_attribute)(void *out, int attribute, uint64_t addr);
	int (*address_range)(uint64_t *base, size_t *nbytes, uint64_t addr);
	int (*push_context)(void *context);
	int (*pop_context)(void **context);
	int (*handle)(void *out, uint64_t addr, size_t nbytes, int type, unsigned long long flags);
} cuda;

static bool resolve(void *library)
{
	const struct kvio_symbol symbols[] = {
		{ "cuPointerGetAttribute", &cuda.pointer_attribute, false },
		{ "cuMemGetAddressRange_v2", &cuda.address_range, false },
		{ "cuCtxPushCurrent_v2", &cuda.push_context, false },
		{ "cuCtxPopCurrent_v2", &cuda.pop_context, false },
		{ "cuMemGetHandleForAddressRange", &cuda.handle, true },	/* 11.7 */
	};

	return !kvio_resolve(library, symbols, sizeof(symbols) / sizeof(*symbols));
}

/* It may be loaded later, so a miss is not remembered: it costs about a microsecond. */
static bool has_cuda(void)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	const char *name = getenv("KVIO_CUDA_LIBRARY");
	void *library;

	pthread_mutex_lock(&lock);
	if (!cuda.loaded) {
		library = name && *name ? dlopen(name, RTLD_NOW | RTLD_LOCAL) :
			  dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
		cuda.loaded = library && resolve(library);
	}
	pthread_mutex_unlock(&lock);
	return cuda.loaded;
}

bool verbs_gpu_has(uint64_t addr)
{
	unsigned int type = 0;

	return has_cuda() &&
	       cuda.pointer_attribute(&type, POINTER_MEMORY_TYPE, addr) == CUDA_SUCCESS &&
	       type == MEMORY_TYPE_DEVICE;
}

/* The context that the memory belongs to, while it is asked about; mapped memory has none, and
 * then the caller's is as good. */
static bool enter(uint64_t addr)
{
	void *context = NULL;

	return cuda.pointer_attribute(&context, POINTER_CONTEXT, addr) == CUDA_SUCCESS && context &&
	       cuda.push_context(context) == CUDA_SUCCESS;
}

static void leave(bool entered)
{
	void *context;

	if (entered)
		cuda.pop_context(&context);
}

int verbs_gpu_segment(uint64_t addr, struct verbs_segment *out)
{
	size_t nbytes = 0;
	bool entered = enter(addr);
	int rc = cuda.address_range(&out->base, &nbytes, addr);

	leave(entered);
	out->nbytes = nbytes;
	return rc == CUDA_SUCCESS && nbytes ? 0 : -EFAULT;
}

/*
 * Whole pages of the host: a small allocation shares them with its neighbours. Grace's GPUs need
 * the mapping by PCIe; where that is not known or not supported, the plain one.
 */
int verbs_gpu_export(struct verbs_segment *segment)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), base = segment->base & ~(page - 1);
	uint64_t end = (segment->base + segment->nbytes + page - 1) & ~(page - 1);
	bool entered;
	int fd = -1, rc;

	if (!cuda.handle)
		return -EOPNOTSUPP;
	entered = enter(segment->base);
	rc = cuda.handle(&fd, base, end - base, HANDLE_DMA_BUF_FD, MAPPING_PCIE);
	if (rc != CUDA_SUCCESS)
		rc = cuda.handle(&fd, base, end - base, HANDLE_DMA_BUF_FD, 0);
	leave(entered);
	if (rc != CUDA_SUCCESS || fd < 0)
		return -EOPNOTSUPP;
	segment->base = base;
	segment->nbytes = end - base;
	segment->fd = fd;
	return 0;
}

#endif
