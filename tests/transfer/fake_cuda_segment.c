/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory at addresses that a test chooses, and device memory as a dma-buf. */
#include "fake_cuda.h"

#include <unistd.h>

static uint64_t exports, pcie_exports;

CUresult cuMemGetHandleForAddressRange(void *out, CUdeviceptr addr, size_t nbytes,
				       CUmemRangeHandleType type, unsigned long long flags)
{
	struct memory *memory;
	int fd;

	ENTER(cuMemGetHandleForAddressRange, DRIVER, NULL, addr, nbytes);
	if (!is.dma_buf || (flags && !is.pcie))
		return leave(CUDA_ERROR_NOT_SUPPORTED);
	memory = memory_in_page(addr);
	if (!memory || type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || flags > 1 || addr % PAGE ||
	    nbytes % PAGE || addr != memory->addr / PAGE * PAGE ||
	    addr + nbytes > (memory->addr + memory->nbytes + PAGE - 1) / PAGE * PAGE)
		return leave(CUDA_ERROR_INVALID_VALUE);
	if (memory->context && memory->context != current_context())
		return leave(CUDA_ERROR_INVALID_CONTEXT);
	fd = dup(memory->fd);
	memcpy(out, &fd, sizeof(fd));
	exports++;
	pcie_exports += flags == CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE;
	return leave(CUDA_SUCCESS);
}

/* Address space for segments one after another; 0: there is no more. */
EXPORT uint64_t fake_cuda_reserve(uint64_t nbytes)
{
	uint64_t addr;

	pthread_mutex_lock(&lock);
	addr = take_addresses(nbytes);
	pthread_mutex_unlock(&lock);
	return addr;
}

/* A segment of device 0's memory at `addr`. Its context; NULL: mapped memory has none. */
EXPORT void fake_cuda_segment(uint64_t addr, uint64_t nbytes, CUcontext context)
{
	pthread_mutex_lock(&lock);
	memory_segment(addr, nbytes, context);
	pthread_mutex_unlock(&lock);
}

EXPORT void fake_cuda_release(uint64_t addr)
{
	pthread_mutex_lock(&lock);
	memory_segment_release(addr);
	pthread_mutex_unlock(&lock);
}

void exports_reset(void)
{
	exports = pcie_exports = 0;
}

/* dma-bufs that were given out since the reset. */
EXPORT uint64_t fake_cuda_exports(int with_pcie)
{
	uint64_t count;

	pthread_mutex_lock(&lock);
	count = with_pcie ? pcie_exports : exports;
	pthread_mutex_unlock(&lock);
	return count;
}

/* Where this process reaches memory of a device; NULL: there is no such memory. */
EXPORT void *fake_cuda_alias(uint64_t addr, uint64_t nbytes)
{
	struct memory *memory;
	void *at = NULL;

	pthread_mutex_lock(&lock);
	memory = memory_in_page(addr);
	if (memory && addr - memory->addr < memory->nbytes &&
	    nbytes <= memory->nbytes - (addr - memory->addr))
		at = reach(memory, addr);
	pthread_mutex_unlock(&lock);
	return at;
}
