/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A fake libcudart over the fake libcuda: what bench_copy.py calls of the runtime, so that its
 * loops over cudaMemcpyAsync run before there is a GPU. It counts its copies.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS, INVALID_VALUE, HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2 };

static uint64_t copies;

EXPORT uint64_t fake_cudart_copies(void)
{
	return copies;
}

EXPORT int cudaSetDevice(int device)
{
	return device == 0 ? SUCCESS : INVALID_VALUE;
}

EXPORT int cudaFree(void *memory)
{
	return memory ? INVALID_VALUE : SUCCESS;
}

EXPORT int cudaRuntimeGetVersion(int *version)
{
	*version = 13000;
	return SUCCESS;
}

EXPORT int cudaMemcpyAsync(void *target, const void *source, size_t nbytes, int kind, void *stream)
{
	static int (*copy)(uint64_t, uint64_t, size_t, void *);

	if (kind != HOST_TO_DEVICE && kind != DEVICE_TO_HOST)
		return INVALID_VALUE;
	if (!copy)
		copy = (int (*)(uint64_t, uint64_t, size_t, void *))dlsym(
			dlopen(getenv("KVIO_CUDA_LIBRARY"), RTLD_NOW), "cuMemcpyAsync");
	copies++;
	return copy((uintptr_t)target, (uintptr_t)source, nbytes, stream);
}
