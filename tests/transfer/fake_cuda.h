/* SPDX-License-Identifier: Apache-2.0 */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H
/*
 * A fake libcuda, for tests: no GPU and nothing of NVIDIA's but the header, whose declarations its
 * functions are compiled against. Bytes really move, on one thread per stream.
 *
 *   fake_cuda.c          settings, counts, the log of calls, faults, violations
 *   fake_cuda_context.c  the driver, its devices and contexts; what GetProcAddress says
 *   fake_cuda_memory.c   memory of devices, pinned, registered
 *   fake_cuda_segment.c  device memory at addresses that a test chooses; dma-bufs
 *   fake_cuda_stream.c   streams and their threads, host functions
 *   fake_cuda_event.c    events
 *   fake_cuda_copy.c     copies of one, two and three dimensions, and batches
 *   fake_cuda_kernel.c   modules; runs the copy kernel's own source on the CPU
 *
 * One lock guards everything. A thread lets go of it while it moves bytes or calls a host function.
 * A violation is what a GPU would answer with corrupt memory, or not at all: it is counted and its
 * text kept, and a test that has one fails.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Declares all versions of a function, by the names that the library exports. */
#define __CUDA_API_VERSION_INTERNAL
#pragma GCC visibility push(default)
#include <cuda.h>
#pragma GCC visibility pop

#define EXPORT __attribute__((visibility("default")))
#define PAGE 4096u
#define MAX_DEVICES 4
#define ALL ((CUstream)(uintptr_t)-1)

/* What this "driver" and its devices are like: name, value at first. */
#define SETTINGS(X) \
	X(devices, 2) \
	X(driver, 13000) \
	X(uninitialised, 0)		/* calls answer as if nobody had called cuInit */ \
	X(total, 16ull << 30)		/* bytes of a device */ \
	X(capturing, 0)			/* what IsCapturing says of any stream */ \
	X(pinned_limit, 16ull << 30)	/* bytes pinned and registered */ \
	X(offset, 0)			/* of an allocation within its page */ \
	X(host_shift, 0)		/* device address of registered memory less the host's */ \
	X(host_ranges, 1)		/* does GetAddressRange know pinned memory? */ \
	X(read_only_register, 1) \
	X(dma_buf, 1) \
	X(pcie, 1)			/* dma-bufs with a mapping by PCIe */ \
	X(capability, 90) \
	X(sms, 132) \
	X(max_pitch, 0x7fffffff) \
	X(patience, 10)			/* seconds to wait for a stream that the test holds */ \
	X(seed, 1)			/* of the order within a batch; 0: as given */

/* The functions there are: name, exported name, the version of CUDA that brought it. Versions of
 * one name follow each other, the oldest first. */
#define FUNCTIONS(X) \
	X(cuInit, cuInit, 2000) \
	X(cuDriverGetVersion, cuDriverGetVersion, 2020) \
	X(cuGetErrorName, cuGetErrorName, 6000) \
	X(cuGetErrorString, cuGetErrorString, 6000) \
	X(cuGetProcAddress, cuGetProcAddress, 11030) \
	X(cuGetProcAddress, cuGetProcAddress_v2, 12000) \
	X(cuDeviceGet, cuDeviceGet, 2000) \
	X(cuDeviceGetCount, cuDeviceGetCount, 2000) \
	X(cuDeviceGetName, cuDeviceGetName, 2000) \
	X(cuDeviceGetAttribute, cuDeviceGetAttribute, 2000) \
	X(cuDeviceTotalMem, cuDeviceTotalMem_v2, 3020) \
	X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000) \
	X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, 11000) \
	X(cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState, 7000) \
	X(cuCtxCreate, cuCtxCreate_v2, 3020) \
	X(cuCtxCreate, cuCtxCreate_v4, 12050) \
	X(cuCtxDestroy, cuCtxDestroy_v2, 4000) \
	X(cuCtxPushCurrent, cuCtxPushCurrent_v2, 4000) \
	X(cuCtxPopCurrent, cuCtxPopCurrent_v2, 4000) \
	X(cuCtxSetCurrent, cuCtxSetCurrent, 4000) \
	X(cuCtxGetCurrent, cuCtxGetCurrent, 4000) \
	X(cuCtxGetDevice, cuCtxGetDevice, 2000) \
	X(cuCtxSynchronize, cuCtxSynchronize, 2000) \
	X(cuCtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange, 5050) \
	X(cuPointerGetAttribute, cuPointerGetAttribute, 4000) \
	X(cuMemGetAddressRange, cuMemGetAddressRange_v2, 3020) \
	X(cuMemGetHandleForAddressRange, cuMemGetHandleForAddressRange, 11070) \
	X(cuMemGetInfo, cuMemGetInfo_v2, 3020) \
	X(cuMemAlloc, cuMemAlloc_v2, 3020) \
	X(cuMemFree, cuMemFree_v2, 3020) \
	X(cuMemHostAlloc, cuMemHostAlloc, 2020) \
	X(cuMemFreeHost, cuMemFreeHost, 2000) \
	X(cuMemHostRegister, cuMemHostRegister, 4000) \
	X(cuMemHostRegister, cuMemHostRegister_v2, 6050) \
	X(cuMemHostUnregister, cuMemHostUnregister, 4000) \
	X(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2, 3020) \
	X(cuStreamCreate, cuStreamCreate, 2000) \
	X(cuStreamCreateWithPriority, cuStreamCreateWithPriority, 5050) \
	X(cuStreamDestroy, cuStreamDestroy_v2, 4000) \
	X(cuStreamSynchronize, cuStreamSynchronize, 2000) \
	X(cuStreamQuery, cuStreamQuery, 2000) \
	X(cuStreamWaitEvent, cuStreamWaitEvent, 3020) \
	X(cuStreamGetCtx, cuStreamGetCtx, 9020) \
	X(cuStreamGetCtx, cuStreamGetCtx_v2, 12050) \
	X(cuStreamGetPriority, cuStreamGetPriority, 5050) \
	X(cuStreamIsCapturing, cuStreamIsCapturing, 10000) \
	X(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, 10010) \
	X(cuEventCreate, cuEventCreate, 2000) \
	X(cuEventDestroy, cuEventDestroy_v2, 4000) \
	X(cuEventRecord, cuEventRecord, 2000) \
	X(cuEventQuery, cuEventQuery, 2000) \
	X(cuEventSynchronize, cuEventSynchronize, 2000) \
	X(cuEventElapsedTime, cuEventElapsedTime, 2000) \
	X(cuEventElapsedTime, cuEventElapsedTime_v2, 12080) \
	X(cuLaunchHostFunc, cuLaunchHostFunc, 10000) \
	X(cuMemcpy, cuMemcpy, 4000) \
	X(cuMemcpyHtoD, cuMemcpyHtoD_v2, 3020) \
	X(cuMemcpyDtoH, cuMemcpyDtoH_v2, 3020) \
	X(cuMemcpyAsync, cuMemcpyAsync, 4000) \
	X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, 3020) \
	X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, 3020) \
	X(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, 3020) \
	X(cuMemcpy2DAsync, cuMemcpy2DAsync_v2, 3020) \
	X(cuMemcpy3DAsync, cuMemcpy3DAsync_v2, 3020) \
	X(cuMemcpyBatchAsync, cuMemcpyBatchAsync, 12080) \
	X(cuMemcpyBatchAsync, cuMemcpyBatchAsync_v2, 13000) \
	X(cuMemsetD8Async, cuMemsetD8Async, 3020) \
	X(cuModuleLoadData, cuModuleLoadData, 2000) \
	X(cuModuleUnload, cuModuleUnload, 2000) \
	X(cuModuleGetFunction, cuModuleGetFunction, 2000) \
	X(cuLaunchKernel, cuLaunchKernel, 4000)

enum function {
#define FUNCTION_ENUM(name, exported, version) FN_##exported,
	FUNCTIONS(FUNCTION_ENUM)
	NUM_FUNCTIONS
};

struct settings {
#define SETTING_FIELD(name, value) uint64_t name;
	SETTINGS(SETTING_FIELD)
};

struct device {
	struct CUctx_st *primary;
	uint64_t used;			/* bytes allocated */
};

struct CUctx_st {
	struct CUctx_st *next;
	int device;
	uint32_t refs;			/* 0: destroyed */
	bool is_primary;
	CUresult sticky;		/* what every call answers from now on */
	CUstream legacy, per_thread;	/* its default streams, made when first used */
};

enum memory_kind { DEVICE_MEMORY, PINNED, REGISTERED };

struct memory {
	struct memory *next;
	enum memory_kind kind;
	uint64_t addr, nbytes;		/* as the driver gave it, or as it was registered */
	uint64_t mapped;		/* the device's address of host memory */
	uint8_t *bytes;			/* where this process reaches them */
	CUcontext context;		/* NULL: mapped segments belong to none */
	int device;
	int fd;				/* device memory: its memfd, whose first page holds addr */
	uint64_t id;
	uint32_t uses;			/* by pieces of copies that are queued or running */
	bool read_only;
	bool is_segment;		/* made by the tests, without MemAlloc */
	bool is_gone;			/* freed, though used: a violation */
};

/* The state of an event as one record left it. */
struct record {
	uint32_t refs;
	bool done;
	uint64_t at_ns;
};

struct CUevent_st {
	CUevent next;
	CUcontext context;		/* NULL: not in use */
	struct record *record;		/* the most recent; NULL: never recorded */
	unsigned int flags;
};

struct piece {
	uint64_t target, source, nbytes;	/* source: the byte, where there is no `from` */
	struct memory *to, *from;		/* NULL: pageable host memory */
};

struct kernel_run;

/* What a stream's queue is made of. */
struct op {
	struct op *next;
	enum { COPY, FILL, RECORD, WAIT, HOST_FUNCTION, KERNEL } kind;
	enum function fn;
	struct record *record;
	CUhostFn host_function;
	void *argument;
	struct kernel_run *kernel;
	uint32_t num_pieces;
	struct piece pieces[];
};

struct CUstream_st {
	struct CUstream_st *next;
	CUcontext context;
	uint64_t id;
	unsigned int flags;
	int priority;
	bool is_default;		/* a context's own: not to be destroyed */
	bool closing, gone;
	bool held;			/* the tests keep it from running */
	bool running;			/* its thread is at the head of the queue */
	bool pageable;			/* a copy of pageable memory has yet to be synchronised */
	bool has_thread;
	struct op *head, **tail;
	uint64_t queued, done;		/* ops */
	pthread_cond_t more;
};

extern pthread_mutex_t lock;
extern pthread_cond_t changed;		/* anything that somebody may wait for */
extern struct settings is;
extern struct device devices[MAX_DEVICES];
extern __thread bool in_host_function;

/* ---- fake_cuda.c ---- */

enum needs { NOTHING, DRIVER, CONTEXT };	/* to be called at all */

void die(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
void violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Every function of the driver: counts and logs the call, spends what it costs, and answers with
 * what is wrong with it; else takes the lock. */
CUresult enter(enum function fn, enum needs needs, CUstream stream, uint64_t a, uint64_t b);
CUresult leave(CUresult rc);		/* lets go of the lock */
bool run_fails(CUcontext context);	/* a fault for the work about to run; sets `sticky` */
void work_takes(enum function fn, uint64_t pieces, uint64_t nbytes);
uint64_t now_ns(void);

#define ENTER(name, needs, stream, a, b) do { \
	CUresult entered_ = enter(FN_##name, needs, stream, (uint64_t)(a), (uint64_t)(b)); \
	if (entered_) \
		return entered_; \
} while (0)

/* ---- fake_cuda_context.c ---- */

CUcontext current_context(void);
bool is_context(CUcontext context);
bool is_device(CUdevice device);
uint64_t num_contexts(void);
void context_died(CUcontext context, CUresult code);

/* ---- fake_cuda_memory.c ---- */

enum side { DEVICE_SIDE, HOST_SIDE, EITHER_SIDE };

/* The memory that has [addr, +nbytes), or NULL with a result: pageable memory is SUCCESS. */
CUresult memory_at(uint64_t addr, uint64_t nbytes, enum side side, struct memory **out);
uint8_t *reach(const struct memory *memory, uint64_t addr);
struct memory *memory_of_kernel(uint64_t addr, uint64_t nbytes);	/* by device address */
void memory_put(struct memory *memory);		/* one use less */
uint64_t num_memories(enum memory_kind kind);
void memory_of_context_died(CUcontext context);
/* Address space of devices, with a page behind it that belongs to nobody; 0: there is no more. */
uint64_t take_addresses(uint64_t nbytes);
struct memory *memory_in_page(uint64_t addr);	/* a device's, by its pages */
void memory_segment(uint64_t addr, uint64_t nbytes, CUcontext context);
void memory_segment_release(uint64_t addr);

/* ---- fake_cuda_segment.c ---- */

void exports_reset(void);

/* ---- fake_cuda_stream.c ---- */

/* NULL: no such stream, or of another context. */
CUstream stream_here(CUstream stream);
struct op *op_new(int kind, enum function fn, uint32_t num_pieces);
void op_free(struct op *op);
void stream_add(CUstream stream, struct op *op);
CUresult stream_finish(CUstream stream);	/* waits until all that was queued is done */
uint64_t num_streams(void);
void streams_of_context_died(CUcontext context);
CUresult context_finish(CUcontext context);
void streams_wake(void);
void context_stops(CUcontext context);

/* ---- fake_cuda_event.c ---- */

struct record *record_new(void);
struct record *record_get(struct record *record);
void record_put(struct record *record);		/* NULL is fine */
uint64_t num_events(void);
void events_of_context_died(CUcontext context);

/* ---- fake_cuda_copy.c ---- */

void copy_run(struct op *op);
void fill_run(struct op *op);

/* ---- fake_cuda_kernel.c ---- */

CUresult kernel_run(struct kernel_run *run);	/* without the lock */
void kernel_free(struct kernel_run *run);
uint64_t num_modules(void);
void modules_of_context_died(CUcontext context);

#endif
