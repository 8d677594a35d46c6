/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake's modules and kernels. It knows one kernel, whose own source it runs as C, thread after
 * thread: on a list of descriptors with addresses that this process can reach.
 */
#include "fake_cuda.h"

#include <stdio.h>

#include "../../kvio/_ext/copy_kernel.cu"

#define KERNEL_NAME "kvio_copy"

struct CUfunc_st { CUmodule module; };

struct CUmod_st {
	CUmodule next;
	CUcontext context;		/* NULL: unloaded */
	struct CUfunc_st function;
};

struct kernel_run {
	CUdeviceptr descriptors;
	unsigned int count, blocks, threads;
};

static CUmodule modules;
static unsigned int last_blocks, last_threads;

uint64_t num_modules(void)
{
	uint64_t count = 0;

	for (CUmodule each = modules; each; each = each->next)
		count += each->context != NULL;
	return count;
}

void modules_of_context_died(CUcontext context)
{
	for (CUmodule each = modules; each; each = each->next)
		if (each->context == context)
			each->context = NULL;
}

/* ---- modules ---- */

/* The newest PTX that each driver takes, by their release notes. */
static int newest_ptx(void)
{
	static const struct { int driver, ptx; } table[] = {
		{ 11020, 72 }, { 11030, 73 }, { 11040, 74 }, { 11050, 75 }, { 11060, 76 },
		{ 11070, 77 }, { 11080, 78 }, { 12000, 80 }, { 12010, 81 }, { 12020, 82 },
		{ 12030, 83 }, { 12040, 84 }, { 12050, 85 }, { 12070, 86 }, { 12080, 87 },
		{ 12090, 88 }, { 13000, 90 },
	};
	int newest = 0;

	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++)
		if ((uint64_t)table[i].driver <= is.driver)
			newest = table[i].ptx;
	return newest;
}

static CUresult check_ptx(const char *text)
{
	const char *version = strstr(text, ".version"), *target = strstr(text, ".target");
	int major, minor, capability;

	if (!version || sscanf(version, ".version %d.%d", &major, &minor) != 2 || !target ||
	    sscanf(target, ".target sm_%d", &capability) != 1)
		return CUDA_ERROR_INVALID_IMAGE;
	if (major * 10 + minor > newest_ptx())
		return CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
	if ((uint64_t)capability > is.capability)
		return CUDA_ERROR_NO_BINARY_FOR_GPU;
	return strstr(text, ".address_size 64") ? CUDA_SUCCESS : CUDA_ERROR_INVALID_PTX;
}

CUresult cuModuleLoadData(CUmodule *out, const void *image)
{
	CUmodule module;
	CUresult rc;

	ENTER(cuModuleLoadData, CONTEXT, NULL, (uintptr_t)image, 0);
	rc = image ? check_ptx(image) : CUDA_ERROR_INVALID_VALUE;
	if (rc)
		return leave(rc);
	module = calloc(1, sizeof(*module));
	if (!module)
		die("no memory for a module");
	module->context = current_context();
	module->next = modules;
	if (strstr(image, ".entry " KERNEL_NAME "("))
		module->function.module = module;
	*out = modules = module;
	return leave(CUDA_SUCCESS);
}

static bool is_module(CUmodule module)
{
	for (CUmodule each = modules; each; each = each->next)
		if (each == module)
			return each->context == current_context();
	return false;
}

CUresult cuModuleUnload(CUmodule module)
{
	ENTER(cuModuleUnload, DRIVER, NULL, (uintptr_t)module, 0);
	if (!current_context() || !is_module(module))
		return leave(CUDA_ERROR_INVALID_HANDLE);
	module->context = NULL;
	return leave(current_context()->sticky);
}

CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name)
{
	ENTER(cuModuleGetFunction, CONTEXT, NULL, (uintptr_t)module, 0);
	if (!is_module(module))
		return leave(CUDA_ERROR_INVALID_HANDLE);
	if (strcmp(name, KERNEL_NAME) || !module->function.module)
		return leave(CUDA_ERROR_NOT_FOUND);
	*out = &module->function;
	return leave(CUDA_SUCCESS);
}

/* ---- launches ---- */

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
			unsigned int grid_z, unsigned int block_x, unsigned int block_y,
			unsigned int block_z, unsigned int shared, CUstream stream,
			void **arguments, void **extra)
{
	struct op *op;

	ENTER(cuLaunchKernel, CONTEXT, stream, grid_x, block_x);
	stream = stream_here(stream);
	if (!stream || !function || !is_module(function->module))
		return leave(CUDA_ERROR_INVALID_HANDLE);
	if (!grid_x || grid_y != 1 || grid_z != 1 || !block_x || block_x > 1024 || block_y != 1 ||
	    block_z != 1 || shared || !arguments || extra)
		return leave(CUDA_ERROR_INVALID_VALUE);
	op = op_new(KERNEL, FN_cuLaunchKernel, 0);
	op->kernel = calloc(1, sizeof(*op->kernel));
	if (!op->kernel)
		die("no memory for a launch");
	*op->kernel = (struct kernel_run){
		.descriptors = *(const CUdeviceptr *)arguments[0],
		.count = *(const unsigned int *)arguments[1],
		.blocks = grid_x, .threads = block_x,
	};
	last_blocks = grid_x;
	last_threads = block_x;
	stream_add(stream, op);
	return leave(CUDA_SUCCESS);
}

void kernel_free(struct kernel_run *run)
{
	free(run);
}

/* A piece as the process reaches it; a kernel that leaves its memory is what ends contexts. */
static CUresult translate(struct kvio_piece *piece)
{
	struct memory *to = memory_of_kernel(piece->target, piece->nbytes);
	struct memory *from = memory_of_kernel(piece->source, piece->nbytes);

	if ((piece->target | piece->source | piece->nbytes) % 16)
		return CUDA_ERROR_MISALIGNED_ADDRESS;
	if (!to || !from || to->read_only)
		return CUDA_ERROR_ILLEGAL_ADDRESS;
	piece->target = (uint64_t)(uintptr_t)(to->bytes + (piece->target - to->mapped));
	piece->source = (uint64_t)(uintptr_t)(from->bytes + (piece->source - from->mapped));
	return CUDA_SUCCESS;
}

/* The descriptors as they are when it runs; to be freed. */
static CUresult translated(const struct kernel_run *run, struct kvio_piece **out)
{
	uint64_t nbytes = (uint64_t)run->count * sizeof(**out);
	struct memory *memory;
	CUresult rc = CUDA_SUCCESS;

	*out = NULL;
	if (!nbytes)
		return CUDA_SUCCESS;
	pthread_mutex_lock(&lock);
	memory = memory_of_kernel(run->descriptors, nbytes);
	if (!memory || run->descriptors % 8) {
		pthread_mutex_unlock(&lock);
		return memory ? CUDA_ERROR_MISALIGNED_ADDRESS : CUDA_ERROR_ILLEGAL_ADDRESS;
	}
	*out = malloc(nbytes);
	if (!*out)
		die("no memory for %u descriptors", run->count);
	memcpy(*out, memory->bytes + (run->descriptors - memory->mapped), nbytes);
	for (unsigned int i = 0; i < run->count && !rc; i++)
		rc = translate(&(*out)[i]);
	pthread_mutex_unlock(&lock);
	return rc;
}

CUresult kernel_run(struct kernel_run *run)
{
	struct kvio_piece *pieces;
	CUresult rc = translated(run, &pieces);
	uint64_t nbytes = 0;

	for (unsigned int i = 0; i < run->count && !rc; i++)
		nbytes += pieces[i].nbytes;
	gridDim.x = run->blocks;
	blockDim.x = run->threads;
	for (blockIdx.x = 0; !rc && blockIdx.x < run->blocks; blockIdx.x++)
		for (threadIdx.x = 0; threadIdx.x < run->threads; threadIdx.x++)
			kvio_copy(pieces, run->count);
	free(pieces);
	work_takes(FN_cuLaunchKernel, run->count, nbytes);
	return rc;
}

/* Of the most recent launch: blocks in the low 32 bits, threads of one in the high ones. */
EXPORT uint64_t fake_cuda_grid(void)
{
	uint64_t grid;

	pthread_mutex_lock(&lock);
	grid = last_blocks | (uint64_t)last_threads << 32;
	pthread_mutex_unlock(&lock);
	return grid;
}
