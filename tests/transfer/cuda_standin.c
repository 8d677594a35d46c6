/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for libcuda, which it is not: what kvio asks it about pointers. "GPU memory" is
 * address space that the CPU cannot reach, made of segments; the bytes of each lie in a memfd,
 * which an export gives as its dma-buf. The tests read and write them there.
 */
#define _GNU_SOURCE
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_SEGMENTS 64
#define PAGE 4096u

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_CONTEXT = 201,
       NOT_SUPPORTED = 801 };

struct segment { uint64_t base, nbytes; int fd; void *context; };

static struct segment segments[MAX_SEGMENTS];
static void *current[8];
static int depth, exports, pcie_exports;
static int initialised, dma_buf, pcie;		/* what this "driver" can do */

EXPORT void cuda_reset(int is_initialised, int has_dma_buf, int has_pcie)
{
	initialised = is_initialised;
	dma_buf = has_dma_buf;
	pcie = has_pcie;
	exports = pcie_exports = 0;
}

EXPORT int cuda_exports(void)
{
	return exports;
}

EXPORT int cuda_pcie_exports(void)
{
	return pcie_exports;
}

EXPORT int cuda_depth(void)
{
	return depth;
}

static struct segment *segment_of(uint64_t addr)
{
	for (int i = 0; i < MAX_SEGMENTS; i++)
		if (segments[i].base && addr - segments[i].base < segments[i].nbytes)
			return &segments[i];
	return NULL;
}

/* Room for segments one after another; 0: none. */
EXPORT uint64_t cuda_reserve(uint64_t nbytes)
{
	void *at = mmap(NULL, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	return at == MAP_FAILED ? 0 : (uint64_t)(uintptr_t)at;
}

EXPORT void cuda_release(uint64_t addr, uint64_t nbytes)
{
	for (int i = 0; i < MAX_SEGMENTS; i++) {
		if (segments[i].base - addr >= nbytes)
			continue;
		close(segments[i].fd);
		segments[i] = (struct segment){ 0 };
	}
	munmap((void *)(uintptr_t)addr, nbytes);
}

/* A segment at addr; its memfd, which begins with the page that addr lies in. */
EXPORT int cuda_segment(uint64_t addr, uint64_t nbytes, uintptr_t context)
{
	for (int i = 0; i < MAX_SEGMENTS; i++) {
		if (segments[i].base)
			continue;
		segments[i] = (struct segment){
			.base = addr, .nbytes = nbytes, .fd = memfd_create("gpu", MFD_CLOEXEC),
			.context = (void *)context,
		};
		if (ftruncate(segments[i].fd, (off_t)((addr % PAGE + nbytes + PAGE - 1) / PAGE *
						      PAGE)) < 0)
			abort();
		return segments[i].fd;
	}
	return -1;
}

/* ---- what kvio calls ---- */

EXPORT int cuPointerGetAttribute(void *out, int attribute, uint64_t addr)
{
	struct segment *segment = segment_of(addr);

	if (!initialised)
		return NOT_INITIALIZED;
	if (!segment)
		return INVALID_VALUE;
	if (attribute == 1)
		memcpy(out, &segment->context, sizeof(segment->context));
	else if (attribute == 2)
		memcpy(out, &(unsigned int){ 2 }, sizeof(unsigned int));
	else
		return INVALID_VALUE;
	return SUCCESS;
}

EXPORT int cuCtxPushCurrent_v2(void *context)
{
	if (depth == sizeof(current) / sizeof(current[0]))
		abort();
	current[depth++] = context;
	return SUCCESS;
}

EXPORT int cuCtxPopCurrent_v2(void **out)
{
	if (depth == 0)
		return INVALID_CONTEXT;
	*out = current[--depth];
	return SUCCESS;
}

static bool is_current(const struct segment *segment)
{
	return !segment->context || (depth && current[depth - 1] == segment->context);
}

EXPORT int cuMemGetAddressRange_v2(uint64_t *base, size_t *nbytes, uint64_t addr)
{
	struct segment *segment = segment_of(addr);

	if (!segment || !is_current(segment))
		return segment ? INVALID_CONTEXT : INVALID_VALUE;
	*base = segment->base;
	*nbytes = segment->nbytes;
	return SUCCESS;
}

EXPORT int cuMemGetHandleForAddressRange(void *out, uint64_t addr, size_t nbytes, int type,
					 unsigned long long flags)
{
	struct segment *segment = segment_of(addr + PAGE - 1);	/* its first page, or inside */
	int fd;

	if (!dma_buf || (flags && !pcie))
		return NOT_SUPPORTED;
	if (!segment || type != 1 || flags > 1 || addr % PAGE || nbytes % PAGE ||
	    addr != segment->base / PAGE * PAGE ||
	    addr + nbytes > (segment->base + segment->nbytes + PAGE - 1) / PAGE * PAGE)
		return INVALID_VALUE;
	if (!is_current(segment))
		return INVALID_CONTEXT;
	fd = dup(segment->fd);
	memcpy(out, &fd, sizeof(fd));
	exports++;
	pcie_exports += flags == 1;
	return SUCCESS;
}
