/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of our own, pinned and on the device, and what is done with it outside of transfers. */
#include <stdio.h>
#include <unistd.h>

#include "cuda_impl.h"

#define ALLOC_FLAGS (CUDA_HOST_ALLOC_PORTABLE | CUDA_HOST_ALLOC_DEVICEMAP)

/* ---- allocating ---- */

static int refuse_alloc(struct cuda_dev *dev, int code, const char *call, uint64_t nbytes,
			char *why, size_t room)
{
	size_t left = 0, total = 0;
	int length;

	cuda_note(dev, code, call);
	length = snprintf(why, room, "cuda:%d: %s of %llu bytes: %s (%d)", dev->ordinal, call,
			  (unsigned long long)nbytes, cuda_error_name(code), code);
	if (code == CUDA_OUT_OF_MEMORY && length > 0 && (size_t)length < room &&
	    cuda.mem_info(&left, &total) == CUDA_OK)
		snprintf(why + length, room - (size_t)length, ": the GPU has %zu of %zu bytes left",
			 left, total);
	return cuda_errno(code);
}

static CUresult alloc(uint64_t nbytes, uint32_t memory, uint64_t *addr)
{
	CUdeviceptr device = 0;
	void *host = NULL;
	CUresult code;

	if (memory == KVIO_CUDA_DEVICE) {
		code = cuda.mem_alloc(&device, nbytes);
		*addr = device;
	} else {
		code = cuda.host_alloc(&host, nbytes, ALLOC_FLAGS);
		*addr = (uint64_t)(uintptr_t)host;
	}
	return code;
}

static int note_alloc(struct cuda_dev *dev, CUresult code, uint64_t nbytes, uint32_t memory,
		      const uint64_t *addr, char *why, size_t room)
{
	if (code == CUDA_OK && memory == KVIO_CUDA_PINNED)
		cuda_pin_add(dev, *addr, nbytes);
	if (code == CUDA_OK)
		return 0;
	return refuse_alloc(dev, code, memory == KVIO_CUDA_DEVICE ? "cuMemAlloc" : "cuMemHostAlloc",
			    nbytes, why, room);
}

/* The driver may wait for the GPU here, and when it frees, thus for others' host functions: so the
 * domain's lock is not held, for which a thread may wait that they wait for. */
int kvio_cuda_alloc(int device, uint64_t nbytes, uint32_t memory, uint64_t *addr,
		    char *why, size_t room)
{
	CUresult code = CUDA_OK;
	struct cuda_dev *dev;
	bool entered = false;
	int rc;

	if (nbytes == 0) {
		snprintf(why, room, "memory of 0 bytes cannot be allocated");
		return -EINVAL;
	}
	rc = cuda_dev_get(device, &dev, why, room);
	if (rc < 0)
		return rc;
	kvio_domain_lock(&dev->domain);
	rc = cuda_check_alive(dev, why, room);
	if (rc == 0) {
		entered = cuda_enter(dev);
		rc = cuda_check_alive(dev, why, room);
	}
	pthread_mutex_unlock(&dev->domain.lock);
	if (entered)
		code = alloc(nbytes, memory, addr);
	kvio_domain_lock(&dev->domain);
	if (entered) {
		rc = note_alloc(dev, code, nbytes, memory, addr, why, room);
		cuda_leave(dev);
	}
	if (rc < 0)
		cuda_dev_leave(dev);
	pthread_mutex_unlock(&dev->domain.lock);
	if (rc < 0)
		cuda_dev_put(dev);
	return rc;
}

/* The memory has held the device, so it is there, unless this process is a forked child. */
void kvio_cuda_free(int device, uint64_t addr, uint32_t memory)
{
	struct cuda_dev *dev = cuda_dev_find(device);
	CUresult code = CUDA_OK;
	bool entered;

	if (!dev)
		return;
	kvio_domain_lock(&dev->domain);
	entered = cuda_enter(dev);
	if (entered && memory == KVIO_CUDA_PINNED)
		cuda_pin_remove(dev, addr);
	pthread_mutex_unlock(&dev->domain.lock);
	if (entered) {
		code = memory == KVIO_CUDA_DEVICE ? cuda.mem_free(addr) :
		       cuda.host_free((void *)(uintptr_t)addr);
		cuda_leave(dev);
	}
	kvio_domain_lock(&dev->domain);
	cuda_note(dev, code, "cuMemFree");	/* of a dead device: gone already */
	cuda_dev_leave(dev);
	pthread_mutex_unlock(&dev->domain.lock);
	cuda_dev_put(dev);
}

/* ---- copying and filling, while the caller waits ---- */

/* Enqueued in the device's own stream. Returns CUDA_OK or what failed. */
typedef CUresult (*enqueue)(struct cuda_dev *dev, uint64_t target, uint64_t what,
			    uint64_t nbytes);

static uint64_t left_in_page(uint64_t addr)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

	return page - (addr & (page - 1));
}

/* The driver takes no copy that begins in registered pages and ends outside of them, as an array
 * may that shares a page with a region. No page is in two states: so then page by page. */
static CUresult enqueue_copy(struct cuda_dev *dev, uint64_t target, uint64_t source,
			     uint64_t nbytes)
{
	CUresult code = cuda.copy(target, source, nbytes, dev->own), all = code;

	for (uint64_t at = 0; all == CUDA_INVALID_VALUE && at < nbytes; ) {
		uint64_t length = nbytes - at, here = left_in_page(source + at);
		uint64_t there = left_in_page(target + at);

		length = here < length ? here : length;
		length = there < length ? there : length;
		code = cuda.copy(target + at, source + at, length, dev->own);
		if (code != CUDA_OK)
			return code;
		at += length;
	}
	return code;
}

static CUresult enqueue_fill(struct cuda_dev *dev, uint64_t target, uint64_t value,
			     uint64_t nbytes)
{
	unsigned int type = 0;
	CUresult code = cuda.pointer_attribute(&type, CUDA_POINTER_MEMORY_TYPE, target);

	if (code == CUDA_OK && type == CUDA_MEMORY_HOST)
		memset((void *)(uintptr_t)target, (int)value, nbytes);
	else if (code == CUDA_OK)
		code = cuda.fill(target, (unsigned char)value, nbytes, dev->own);
	return code;		/* INVALID_VALUE: the driver knows no such memory (freed?) */
}

/* The domain's lock is not held: who drives transfers does not wait for this. A stream may be used
 * by several threads. */
static int now(int device, enqueue what, const char *call, uint64_t target, uint64_t argument,
	       uint64_t nbytes, char *why, size_t room)
{
	struct cuda_failure failure = { 0 };
	struct cuda_dev *dev;
	bool entered = false;
	int rc = cuda_dev_get(device, &dev, why, room);

	if (rc < 0)
		return rc;
	kvio_domain_lock(&dev->domain);
	rc = cuda_check_alive(dev, why, room);
	if (rc == 0 && nbytes) {
		entered = cuda_enter(dev);
		rc = cuda_check_alive(dev, why, room);
	}
	pthread_mutex_unlock(&dev->domain.lock);
	if (entered) {
		failure = (struct cuda_failure){ what(dev, target, argument, nbytes), call };
		if (failure.code == CUDA_OK)
			failure = (struct cuda_failure){ cuda.stream_sync(dev->own),
							 "cuStreamSynchronize" };
		cuda_leave(dev);
	}
	kvio_domain_lock(&dev->domain);
	if (failure.code)
		rc = cuda_refuse(dev, failure.code, failure.call, why, room);
	cuda_dev_leave(dev);
	pthread_mutex_unlock(&dev->domain.lock);
	cuda_dev_put(dev);
	return rc;
}

int kvio_cuda_copy(int device, uint64_t target, uint64_t source, uint64_t nbytes,
		   char *why, size_t room)
{
	return now(device, enqueue_copy, "cuMemcpyAsync", target, source, nbytes, why, room);
}

int kvio_cuda_fill(int device, uint64_t target, uint8_t value, uint64_t nbytes,
		   char *why, size_t room)
{
	return now(device, enqueue_fill, "cuMemsetD8Async", target, value, nbytes, why, room);
}

int kvio_cuda_device_of(uint64_t addr, char *why, size_t room)
{
	struct cuda_failure failure;
	int rc = cuda_load(why, room);

	if (rc < 0)
		return rc;
	rc = cuda_ordinal_of(addr, &failure);
	if (rc < 0)
		snprintf(why, room, "the address belongs to no GPU: %s: %s (%d)", failure.call,
			 cuda_error_name(failure.code), failure.code);
	return rc;
}
