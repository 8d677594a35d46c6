/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What kvio's copies are held against: a loop in C over the pieces, one call each. The function is
 * whichever library's the caller found at run time, so no header of CUDA is needed. Each returns
 * the first error of the library (0: none), and in *ns how long the loop took; a call of an
 * asynchronous copy returns before its bytes have moved.
 */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

struct piece {
	uint64_t target, source;
};

/* cudaMemcpyAsync; cuMemcpyHtoDAsync, cuMemcpyDtoHAsync (addresses have the size of pointers). */
typedef int (*runtime_copy)(void *target, const void *source, size_t nbytes, int kind,
			    void *stream);
typedef int (*driver_copy)(uint64_t target, uint64_t source, size_t nbytes, void *stream);

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void *pointer(uint64_t addr)
{
	return (void *)(uintptr_t)addr;
}

EXPORT int copy_loop_runtime(runtime_copy copy, const struct piece *pieces, uint32_t count,
			     size_t nbytes, int kind, void *stream, uint64_t *ns)
{
	uint64_t start = now_ns();
	int rc = 0;

	for (uint32_t i = 0; rc == 0 && i < count; i++)
		rc = copy(pointer(pieces[i].target), pointer(pieces[i].source), nbytes, kind,
			  stream);
	*ns = now_ns() - start;
	return rc;
}

EXPORT int copy_loop_driver(driver_copy copy, const struct piece *pieces, uint32_t count,
			    size_t nbytes, void *stream, uint64_t *ns)
{
	uint64_t start = now_ns();
	int rc = 0;

	for (uint32_t i = 0; rc == 0 && i < count; i++)
		rc = copy(pieces[i].target, pieces[i].source, nbytes, stream);
	*ns = now_ns() - start;
	return rc;
}

EXPORT int copy_loop_memcpy(const struct piece *pieces, uint32_t count, size_t nbytes,
			    uint64_t *ns)
{
	uint64_t start = now_ns();

	for (uint32_t i = 0; i < count; i++)
		memcpy(pointer(pieces[i].target), pointer(pieces[i].source), nbytes);
	*ns = now_ns() - start;
	return 0;
}
