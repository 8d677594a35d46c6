/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake's memory. A device's is address space that the CPU cannot reach, and that is never used
 * again once it was freed; the bytes lie in a memfd, mapped elsewhere.
 */
#include "fake_cuda.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define ARENA_NBYTES (256ull << 30)

static struct memory *memories;
static uint64_t arena, arena_used, last_id;

static uint64_t pages(uint64_t nbytes)
{
	return (nbytes + PAGE - 1) / PAGE * PAGE;
}

/* Address space of devices, with a page after it that belongs to nobody; 0: there is no more. */
uint64_t take_addresses(uint64_t nbytes)
{
	uint64_t at;

	if (!arena) {
		void *made = mmap(NULL, ARENA_NBYTES, PROT_NONE,
				  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

		if (made == MAP_FAILED)
			die("no address space for the devices' memory");
		arena = (uint64_t)(uintptr_t)made;
	}
	if (nbytes > ARENA_NBYTES || pages(nbytes) + PAGE > ARENA_NBYTES - arena_used)
		return 0;
	at = arena + arena_used;
	arena_used += pages(nbytes) + PAGE;
	return at;
}

static struct memory *memory_new(enum memory_kind kind, uint64_t addr, uint64_t nbytes)
{
	struct memory *memory = calloc(1, sizeof(*memory));

	if (!memory)
		die("no memory for the description of memory");
	*memory = (struct memory){
		.next = memories, .kind = kind, .addr = addr, .nbytes = nbytes, .mapped = addr,
		.id = ++last_id, .fd = -1, .context = current_context(),
		.device = current_context() ? current_context()->device : 0,
	};
	memories = memory;
	return memory;
}

/* The memfd of a device's memory; `addr` is as deep in its first page as the driver says. */
static bool back(struct memory *memory)
{
	uint64_t skip = memory->addr % PAGE, nbytes = pages(skip + memory->nbytes);
	void *at;

	memory->fd = memfd_create("gpu", MFD_CLOEXEC);
	if (memory->fd < 0 || ftruncate(memory->fd, (off_t)nbytes) < 0)
		return false;
	at = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory->fd, 0);
	if (at == MAP_FAILED)
		return false;
	memory->bytes = (uint8_t *)at + skip;
	return true;
}

static void memory_drop(struct memory *memory)
{
	uint64_t skip = memory->addr % PAGE;

	for (struct memory **each = &memories; *each; each = &(*each)->next) {
		if (*each != memory)
			continue;
		*each = memory->next;
		break;
	}
	if (memory->kind == DEVICE_MEMORY && memory->bytes)
		munmap(memory->bytes - skip, pages(skip + memory->nbytes));
	if (memory->kind == PINNED)
		munmap(memory->bytes, pages(memory->nbytes));
	if (memory->fd >= 0)
		close(memory->fd);
	free(memory);
}

void memory_put(struct memory *memory)
{
	if (--memory->uses == 0 && memory->is_gone)
		memory_drop(memory);
}

static void memory_free(struct memory *memory)
{
	if (memory->kind == DEVICE_MEMORY && !memory->is_segment)
		devices[memory->device].used -= memory->nbytes;
	if (memory->uses && !(memory->context && memory->context->sticky))
		violation("%s memory at %#llx was freed while a queued copy uses it",
			  memory->kind == DEVICE_MEMORY ? "device" : memory->kind == PINNED ?
			  "pinned" : "registered", (unsigned long long)memory->addr);
	memory->is_gone = true;
	if (!memory->uses)
		memory_drop(memory);
}

void memory_of_context_died(CUcontext context)
{
	for (struct memory *each = memories, *next; each; each = next) {
		next = each->next;
		if (each->context != context || each->is_gone)
			continue;
		if (!context->sticky)
			violation("a context was destroyed with memory at %#llx in it",
				  (unsigned long long)each->addr);
		memory_free(each);
	}
}

/* Segments are the tests', not the driver's. */
uint64_t num_memories(enum memory_kind kind)
{
	uint64_t count = 0;

	for (struct memory *each = memories; each; each = each->next)
		count += each->kind == kind && !each->is_gone && !each->is_segment;
	return count;
}

static bool within(uint64_t addr, uint64_t base, uint64_t nbytes)
{
	return addr - base < nbytes;
}

/* By any address there is of it. */
static struct memory *find(uint64_t addr)
{
	for (struct memory *each = memories; each; each = each->next)
		if (!each->is_gone && (within(addr, each->addr, each->nbytes) ||
				       within(addr, each->mapped, each->nbytes)))
			return each;
	return NULL;
}

static uint64_t offset_in(const struct memory *memory, uint64_t addr)
{
	return within(addr, memory->addr, memory->nbytes) ? addr - memory->addr :
	       addr - memory->mapped;
}

uint8_t *reach(const struct memory *memory, uint64_t addr)
{
	return memory->bytes + offset_in(memory, addr);
}

CUresult memory_at(uint64_t addr, uint64_t nbytes, enum side side, struct memory **out)
{
	struct memory *found = *out = find(addr);

	if (!found) {
		if (side == DEVICE_SIDE || !addr || within(addr, arena, ARENA_NBYTES))
			return CUDA_ERROR_INVALID_VALUE;
		return CUDA_SUCCESS;
	}
	if (nbytes > found->nbytes - offset_in(found, addr))
		return CUDA_ERROR_INVALID_VALUE;
	if (found->kind != DEVICE_MEMORY)
		return CUDA_SUCCESS;
	if (side == HOST_SIDE || (found->context && found->context != current_context()))
		return CUDA_ERROR_INVALID_VALUE;
	return CUDA_SUCCESS;
}

struct memory *memory_of_kernel(uint64_t addr, uint64_t nbytes)
{
	for (struct memory *each = memories; each; each = each->next)
		if (!each->is_gone && within(addr, each->mapped, each->nbytes))
			return nbytes <= each->nbytes - (addr - each->mapped) ? each : NULL;
	return NULL;
}

struct memory *memory_in_page(uint64_t addr)
{
	for (struct memory *each = memories; each; each = each->next)
		if (each->kind == DEVICE_MEMORY && !each->is_gone &&
		    within(addr, each->addr / PAGE * PAGE,
			   each->addr % PAGE + each->nbytes))
			return each;
	return NULL;
}

void memory_segment(uint64_t addr, uint64_t nbytes, CUcontext context)
{
	struct memory *memory = memory_new(DEVICE_MEMORY, addr, nbytes);

	memory->is_segment = true;
	memory->context = context;
	if (!back(memory))
		die("no memory for a segment");
}

void memory_segment_release(uint64_t addr)
{
	struct memory *memory = find(addr);

	if (!memory || !memory->is_segment)
		die("no segment at %#llx", (unsigned long long)addr);
	memory_free(memory);
}

/* ---- devices' memory ---- */

CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t nbytes)
{
	struct device *device;
	struct memory *memory;
	uint64_t addr;

	ENTER(cuMemAlloc_v2, CONTEXT, NULL, nbytes, 0);
	device = &devices[current_context()->device];
	if (!nbytes)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (nbytes > is.total || device->used > is.total - nbytes)
		return leave(CUDA_ERROR_OUT_OF_MEMORY);
	addr = take_addresses(nbytes + is.offset);
	if (!addr)
		return leave(CUDA_ERROR_OUT_OF_MEMORY);
	memory = memory_new(DEVICE_MEMORY, addr + is.offset, nbytes);
	device->used += nbytes;
	if (!back(memory)) {
		memory_free(memory);
		return leave(CUDA_ERROR_OUT_OF_MEMORY);
	}
	*out = memory->addr;
	return leave(CUDA_SUCCESS);
}

CUresult cuMemFree_v2(CUdeviceptr addr)
{
	struct memory *memory;

	ENTER(cuMemFree_v2, CONTEXT, NULL, addr, 0);
	memory = find(addr);
	if (!memory || memory->addr != addr || memory->kind != DEVICE_MEMORY)
		return leave(addr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS);
	memory_free(memory);
	return leave(CUDA_SUCCESS);
}

CUresult cuMemGetInfo_v2(size_t *free_nbytes, size_t *total)
{
	ENTER(cuMemGetInfo_v2, CONTEXT, NULL, 0, 0);
	*total = is.total;
	*free_nbytes = is.total - devices[current_context()->device].used;
	return leave(CUDA_SUCCESS);
}

/* ---- the host's memory ---- */

static uint64_t host_nbytes(void)
{
	uint64_t nbytes = 0;

	for (struct memory *each = memories; each; each = each->next)
		if (each->kind != DEVICE_MEMORY && !each->is_gone)
			nbytes += each->nbytes;
	return nbytes;
}

CUresult cuMemHostAlloc(void **out, size_t nbytes, unsigned int flags)
{
	struct memory *memory;
	void *at;

	ENTER(cuMemHostAlloc, CONTEXT, NULL, nbytes, flags);
	if (!nbytes || flags > 7)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (nbytes > is.pinned_limit || host_nbytes() > is.pinned_limit - nbytes)
		return leave(CUDA_ERROR_OUT_OF_MEMORY);
	at = mmap(NULL, pages(nbytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (at == MAP_FAILED)
		return leave(CUDA_ERROR_OUT_OF_MEMORY);
	memory = memory_new(PINNED, (uint64_t)(uintptr_t)at, nbytes);
	memory->bytes = at;
	*out = at;
	return leave(CUDA_SUCCESS);
}

CUresult cuMemFreeHost(void *at)
{
	struct memory *memory;

	ENTER(cuMemFreeHost, CONTEXT, NULL, (uintptr_t)at, 0);
	memory = find((uint64_t)(uintptr_t)at);
	if (!memory || memory->kind != PINNED || memory->addr != (uint64_t)(uintptr_t)at)
		return leave(at ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS);
	memory_free(memory);
	return leave(CUDA_SUCCESS);
}

/* Is all of it mapped here, and writable if it has to be? By what the kernel says. */
static bool is_mapped(uint64_t start, uint64_t end, bool writable)
{
	FILE *maps = fopen("/proc/self/maps", "re");
	unsigned long long first, last;
	char mode[8], line[512];

	while (maps && start < end && fgets(line, sizeof(line), maps)) {
		if (sscanf(line, "%llx-%llx %7s", &first, &last, mode) != 3 || last <= start)
			continue;
		if (first > start || mode[0] != 'r' || (writable && mode[1] != 'w'))
			break;
		start = last;
	}
	if (maps)
		fclose(maps);
	return start >= end;
}

CUresult cuMemHostRegister_v2(void *at, size_t nbytes, unsigned int flags)
{
	uint64_t addr = (uint64_t)(uintptr_t)at, first = addr / PAGE * PAGE;
	bool read_only = flags & CU_MEMHOSTREGISTER_READ_ONLY;
	struct memory *memory;

	ENTER(cuMemHostRegister_v2, CONTEXT, NULL, addr, nbytes);
	if (!at || !nbytes || flags > 15 || addr + nbytes < addr)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (read_only && !is.read_only_register)
		return leave(CUDA_ERROR_NOT_SUPPORTED);
	for (struct memory *each = memories; each; each = each->next)
		if (each->kind != DEVICE_MEMORY && !each->is_gone &&
		    each->addr / PAGE * PAGE < pages(addr + nbytes) &&
		    first < pages(each->addr + each->nbytes))
			return leave(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
	if (nbytes > is.pinned_limit || host_nbytes() > is.pinned_limit - nbytes)
		return leave(CUDA_ERROR_OUT_OF_MEMORY);
	if (!is_mapped(first, addr + nbytes, !read_only))
		return leave(CUDA_ERROR_INVALID_VALUE);
	memory = memory_new(REGISTERED, addr, nbytes);
	memory->bytes = at;
	memory->read_only = read_only;
	memory->mapped = addr + is.host_shift;
	return leave(CUDA_SUCCESS);
}

CUresult cuMemHostRegister(void *at, size_t nbytes, unsigned int flags)
{
	return cuMemHostRegister_v2(at, nbytes, flags);
}

CUresult cuMemHostUnregister(void *at)
{
	struct memory *memory;

	ENTER(cuMemHostUnregister, CONTEXT, NULL, (uintptr_t)at, 0);
	memory = find((uint64_t)(uintptr_t)at);
	if (!memory || memory->kind != REGISTERED || memory->addr != (uint64_t)(uintptr_t)at)
		return leave(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
	memory_free(memory);
	return leave(CUDA_SUCCESS);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *at, unsigned int flags)
{
	uint64_t addr = (uint64_t)(uintptr_t)at;
	struct memory *memory;

	ENTER(cuMemHostGetDevicePointer_v2, CONTEXT, NULL, addr, flags);
	memory = find(addr);
	if (!memory || memory->kind == DEVICE_MEMORY || flags)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*out = memory->mapped + offset_in(memory, addr);
	return leave(CUDA_SUCCESS);
}

/* ---- what an address is ---- */

static CUresult attribute_of(void *out, int attribute, const struct memory *memory, uint64_t addr)
{
	bool on_device = memory->kind == DEVICE_MEMORY;
	uint64_t offset = offset_in(memory, addr), host = memory->addr + offset;

	switch (attribute) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		*(CUcontext *)out = memory->context;
		break;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		*(unsigned int *)out = on_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
		break;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
		*(CUdeviceptr *)out = memory->mapped + offset;
		break;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		if (on_device)
			return CUDA_ERROR_INVALID_VALUE;
		*(void **)out = (void *)(uintptr_t)host;
		break;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID:
		*(unsigned long long *)out = memory->id;
		break;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
		*(unsigned int *)out = 0;
		break;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		*(int *)out = memory->device;
		break;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
		*(CUdeviceptr *)out = memory->addr;
		break;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
		*(size_t *)out = memory->nbytes;
		break;
	default:
		die("pointer attribute %d is not known here", attribute);
	}
	return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr addr)
{
	struct memory *memory;

	ENTER(cuPointerGetAttribute, DRIVER, NULL, attribute, addr);
	memory = find(addr);
	return leave(memory ? attribute_of(out, attribute, memory, addr) :
		     CUDA_ERROR_INVALID_VALUE);
}

/* The driver wants the context of the memory, where it has one. */
static CUresult is_here(const struct memory *memory)
{
	if (!memory)
		return CUDA_ERROR_INVALID_VALUE;
	return memory->context && memory->context != current_context() ?
	       CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *nbytes, CUdeviceptr addr)
{
	struct memory *memory;
	CUresult rc;

	ENTER(cuMemGetAddressRange_v2, DRIVER, NULL, addr, 0);
	memory = find(addr);
	if (memory && memory->kind != DEVICE_MEMORY && !is.host_ranges)
		memory = NULL;
	rc = memory && memory->kind != DEVICE_MEMORY ? CUDA_SUCCESS : is_here(memory);
	if (rc)
		return leave(rc);
	if (base)
		*base = memory->addr;
	if (nbytes)
		*nbytes = memory->nbytes;
	return leave(CUDA_SUCCESS);
}
