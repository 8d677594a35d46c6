/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcuda, opened at run time and never closed: other libraries of the process use it too, and it
 * has threads of its own. Every function is asked for in the version of CUDA whose signature
 * cuda_api.h has, so a newer driver's other signature cannot be called by mistake.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

#include "cuda_impl.h"

#define CUDA_LIBRARY "libcuda.so.1"
#define OLDEST_DRIVER 11030		/* cuGetProcAddress */
#define FIND_CHANGED 12000
#define BATCH_SINCE 12080
#define BATCH_CHANGED 13000
#define LEGACY_STREAM 1u		/* CU_GET_PROC_ADDRESS_LEGACY_STREAM */

typedef CUresult (*proc_address)(const char *name, void **out, int version, uint64_t flags);
typedef CUresult (*proc_address_v2)(const char *name, void **out, int version, uint64_t flags,
				    int *status);

struct cuda_api cuda;

static struct {
	pthread_mutex_t lock;
	void *handle;
	proc_address find;		/* of 11.3; or */
	proc_address_v2 find_v2;	/* of 12.0 */
	int driver_version;
	int pid;			/* that called cuInit; 0: nobody has */
} library = { .lock = PTHREAD_MUTEX_INITIALIZER };

/* ---- functions ---- */

/* A driver gives NULL, or an error, for what it does not know. */
static bool find(const char *name, int since, void *to)
{
	int version = since < library.driver_version ? since : library.driver_version;
	void *found = NULL;
	CUresult rc;

	if (library.find_v2)
		rc = library.find_v2(name, &found, version, LEGACY_STREAM, NULL);
	else
		rc = library.find(name, &found, version, LEGACY_STREAM);
	if (rc != CUDA_OK)
		found = NULL;
	memcpy(to, &found, sizeof(found));
	return found != NULL;
}

static const struct {
	const char *name;
	int since;
	void *to;
} required_symbols[] = {
	{ "cuInit", 2000, &cuda.init },
	{ "cuDriverGetVersion", 2020, &cuda.driver_version },
	{ "cuGetErrorName", 6000, &cuda.error_name },
	{ "cuGetErrorString", 6000, &cuda.error_string },
	{ "cuDeviceGet", 2000, &cuda.device_get },
	{ "cuDeviceGetCount", 2000, &cuda.device_count },
	{ "cuDeviceGetName", 2000, &cuda.device_name },
	{ "cuDeviceGetAttribute", 2000, &cuda.device_attribute },
	{ "cuDevicePrimaryCtxRetain", 7000, &cuda.primary_retain },
	{ "cuDevicePrimaryCtxRelease", 11000, &cuda.primary_release },
	{ "cuCtxPushCurrent", 4000, &cuda.ctx_push },
	{ "cuCtxPopCurrent", 4000, &cuda.ctx_pop },
	{ "cuPointerGetAttribute", 4000, &cuda.pointer_attribute },
	{ "cuMemGetAddressRange", 3020, &cuda.address_range },
	{ "cuMemAlloc", 3020, &cuda.mem_alloc },
	{ "cuMemFree", 3020, &cuda.mem_free },
	{ "cuMemGetInfo", 3020, &cuda.mem_info },
	{ "cuMemHostAlloc", 2020, &cuda.host_alloc },
	{ "cuMemFreeHost", 2000, &cuda.host_free },
	{ "cuMemHostRegister", 6050, &cuda.host_register },
	{ "cuMemHostUnregister", 4000, &cuda.host_unregister },
	{ "cuMemHostGetDevicePointer", 3020, &cuda.host_device_pointer },
	{ "cuStreamCreateWithPriority", 5050, &cuda.stream_create },
	{ "cuStreamDestroy", 4000, &cuda.stream_destroy },
	{ "cuCtxGetStreamPriorityRange", 5050, &cuda.stream_priorities },
	{ "cuStreamSynchronize", 2000, &cuda.stream_sync },
	{ "cuStreamWaitEvent", 3020, &cuda.stream_wait },
	{ "cuStreamGetCtx", 9020, &cuda.stream_context },
	{ "cuThreadExchangeStreamCaptureMode", 10010, &cuda.capture_mode },
	{ "cuStreamIsCapturing", 10000, &cuda.is_capturing },
	{ "cuEventCreate", 2000, &cuda.event_create },
	{ "cuEventDestroy", 4000, &cuda.event_destroy },
	{ "cuEventRecord", 2000, &cuda.event_record },
	{ "cuEventQuery", 2000, &cuda.event_query },
	{ "cuLaunchHostFunc", 10000, &cuda.host_func },
	{ "cuMemcpyAsync", 4000, &cuda.copy },
	{ "cuMemcpyHtoDAsync", 3020, &cuda.copy_h2d },
	{ "cuMemcpyDtoHAsync", 3020, &cuda.copy_d2h },
	{ "cuMemcpy2DAsync", 3020, &cuda.copy_2d },
	{ "cuMemcpy3DAsync", 3020, &cuda.copy_3d },
	{ "cuMemsetD8Async", 3020, &cuda.fill },
	{ "cuModuleLoadData", 2000, &cuda.module_load },
	{ "cuModuleUnload", 2000, &cuda.module_unload },
	{ "cuModuleGetFunction", 2000, &cuda.module_function },
	{ "cuLaunchKernel", 4000, &cuda.launch },
};

static int resolve(char *why, size_t room)
{
	int version = library.driver_version;

	for (size_t i = 0; i < sizeof(required_symbols) / sizeof(required_symbols[0]); i++) {
		if (find(required_symbols[i].name, required_symbols[i].since,
			 required_symbols[i].to))
			continue;
		snprintf(why, room, "the NVIDIA driver (CUDA %d.%d) has no %s: install a newer one",
			 version / 1000, version % 1000 / 10, required_symbols[i].name);
		return -ENOSYS;
	}
	if (version >= BATCH_CHANGED)
		find("cuMemcpyBatchAsync", BATCH_CHANGED, &cuda.batch13);
	else if (version >= BATCH_SINCE)
		find("cuMemcpyBatchAsync", BATCH_SINCE, &cuda.batch12);
	return 0;
}

/* ---- opening ---- */

static int open_library(char *why, size_t room)
{
	const char *name = getenv("KVIO_CUDA_LIBRARY"), *error;

	name = name && *name ? name : CUDA_LIBRARY;
	library.handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
	if (library.handle)
		return 0;
	error = dlerror();
	snprintf(why, room, "the CUDA driver cannot be opened (%s): install NVIDIA's driver, or "
		 "use Nic.open(\"soft\"), which works anywhere", error ? error : name);
	return -ENOSYS;
}

static int look_up(char *why, size_t room)
{
	CUresult (*driver_version)(int *);
	int version = 0;

	driver_version = (CUresult (*)(int *))dlsym(library.handle, "cuDriverGetVersion");
	if (!driver_version || driver_version(&version) != CUDA_OK) {
		snprintf(why, room, "the CUDA driver does not tell its version "
			 "(cuDriverGetVersion)");
		return -ENOSYS;
	}
	library.driver_version = version;
	if (version >= FIND_CHANGED)
		library.find_v2 = (proc_address_v2)dlsym(library.handle, "cuGetProcAddress_v2");
	library.find = (proc_address)dlsym(library.handle, "cuGetProcAddress");
	if (version < OLDEST_DRIVER || (!library.find && !library.find_v2)) {
		snprintf(why, room, "this NVIDIA driver knows CUDA %d.%d; cuGetProcAddress needs "
			 "11.3: install a newer driver", version / 1000, version % 1000 / 10);
		return -ENOSYS;
	}
	return resolve(why, room);
}

static int initialise(char *why, size_t room)
{
	CUresult code = cuda.init(0);

	if (code == CUDA_OK) {
		library.pid = (int)getpid();
		return 0;
	}
	snprintf(why, room, "cuInit: %s (%d): %s", cuda_error_name(code), code,
		 code == CUDA_NOT_INITIALIZED ?
		 "CUDA does not outlive a fork: start processes by \"spawn\"" :
		 "the driver is installed, but no GPU can be used");
	return -ENODEV;
}

static int load(char *why, size_t room)
{
	int rc = 0;

	if (library.pid == (int)getpid())
		return 0;
	if (library.pid) {
		snprintf(why, room, "this process was forked from one that uses CUDA, which does "
			 "not outlive a fork: start it by \"spawn\"");
		return -ENODEV;
	}
	if (!library.handle)
		rc = open_library(why, room);
	if (rc == 0 && !cuda.init)
		rc = look_up(why, room);
	return rc < 0 ? rc : initialise(why, room);
}

int cuda_load(char *why, size_t room)
{
	int rc;

	pthread_mutex_lock(&library.lock);
	rc = load(why, room);
	pthread_mutex_unlock(&library.lock);
	return rc;
}

/* ---- errors ---- */

const char *cuda_error_name(int code)
{
	const char *name = NULL;

	if (!cuda.error_name || cuda.error_name(code, &name) != CUDA_OK || !name)
		return "an error that the driver has no name for";
	return name;
}

int cuda_errno(int code)
{
	switch (code) {
	case CUDA_OK:
		return 0;
	case CUDA_INVALID_VALUE:
		return -EINVAL;
	case CUDA_OUT_OF_MEMORY:
		return -ENOMEM;
	case CUDA_NO_DEVICE:
	case CUDA_INVALID_DEVICE:
	case CUDA_NOT_INITIALIZED:
		return -ENODEV;
	case CUDA_NOT_FOUND:
	case CUDA_NOT_SUPPORTED:
		return -ENOSYS;
	case CUDA_NOT_PERMITTED:
		return -EPERM;
	default:
		return -EIO;
	}
}

/* After one of these every call that needs the context returns it again. */
bool cuda_is_sticky(int code)
{
	switch (code) {
	case CUDA_DEINITIALIZED:
	case CUDA_ECC_UNCORRECTABLE:
	case CUDA_NVLINK_UNCORRECTABLE:
	case CUDA_CONTAINED:
	case CUDA_ILLEGAL_ADDRESS:
	case CUDA_LAUNCH_TIMEOUT:
	case CUDA_CONTEXT_IS_DESTROYED:
	case CUDA_ASSERT:
	case CUDA_HARDWARE_STACK_ERROR:
	case CUDA_ILLEGAL_INSTRUCTION:
	case CUDA_MISALIGNED_ADDRESS:
	case CUDA_INVALID_ADDRESS_SPACE:
	case CUDA_INVALID_PC:
	case CUDA_LAUNCH_FAILED:
	case CUDA_TENSOR_MEMORY_LEAK:
	case CUDA_MPS_CLIENT_TERMINATED:
	case CUDA_EXTERNAL_DEVICE:
	case CUDA_UNKNOWN:
		return true;
	default:
		return false;
	}
}

void cuda_explain(int ordinal, const struct cuda_failure *failure, char *why, size_t room)
{
	const char *text = NULL;

	if (!why || !room)
		return;
	if (cuda.error_string)
		cuda.error_string(failure->code, &text);
	snprintf(why, room, "cuda:%d: %s: %s (%d)%s%s", ordinal, failure->call,
		 cuda_error_name(failure->code), failure->code, text ? ": " : "", text ? text : "");
}
