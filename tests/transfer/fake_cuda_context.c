/* SPDX-License-Identifier: Apache-2.0 */
/* The fake driver itself, its devices, contexts, and what cuGetProcAddress says. */
#include "fake_cuda.h"

#include <cudaTypedefs.h>
#include <stdio.h>

#define MAX_DEPTH 16

static CUcontext contexts;		/* also those that are destroyed: a handle stays one */
static __thread CUcontext stack[MAX_DEPTH];
static __thread int depth;

CUcontext current_context(void)
{
	return depth ? stack[depth - 1] : NULL;
}

bool is_context(CUcontext context)
{
	for (CUcontext each = contexts; each; each = each->next)
		if (each == context)
			return each->refs > 0;
	return false;
}

bool is_device(CUdevice device)
{
	return device >= 0 && (uint64_t)device < is.devices;
}

/* References count: one that is not given back is a leak as well. */
uint64_t num_contexts(void)
{
	uint64_t count = 0;

	for (CUcontext each = contexts; each; each = each->next)
		count += each->refs;
	return count;
}

void context_died(CUcontext context, CUresult code)
{
	if (!context->sticky)
		context->sticky = code;
	streams_wake();
}

/* ---- the driver ---- */

CUresult cuDriverGetVersion(int *version)
{
	ENTER(cuDriverGetVersion, NOTHING, NULL, 0, 0);
	*version = (int)is.driver;
	return leave(CUDA_SUCCESS);
}

static const struct { CUresult code; const char *name, *text; } errors[] = {
#define ERROR_ROW(code, text) { code, #code, text },
	ERROR_ROW(CUDA_SUCCESS, "no error")
	ERROR_ROW(CUDA_ERROR_INVALID_VALUE, "invalid argument")
	ERROR_ROW(CUDA_ERROR_OUT_OF_MEMORY, "out of memory")
	ERROR_ROW(CUDA_ERROR_NOT_INITIALIZED, "not initialised")
	ERROR_ROW(CUDA_ERROR_DEINITIALIZED, "shutting down")
	ERROR_ROW(CUDA_ERROR_NO_DEVICE, "no device was found")
	ERROR_ROW(CUDA_ERROR_INVALID_DEVICE, "no such device")
	ERROR_ROW(CUDA_ERROR_INVALID_IMAGE, "not a module")
	ERROR_ROW(CUDA_ERROR_INVALID_CONTEXT, "invalid context")
	ERROR_ROW(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error")
	ERROR_ROW(CUDA_ERROR_INVALID_PTX, "PTX could not be compiled")
	ERROR_ROW(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "PTX is newer than the driver")
	ERROR_ROW(CUDA_ERROR_INVALID_HANDLE, "invalid handle")
	ERROR_ROW(CUDA_ERROR_NOT_FOUND, "no such symbol")
	ERROR_ROW(CUDA_ERROR_NOT_READY, "not ready")
	ERROR_ROW(CUDA_ERROR_ILLEGAL_ADDRESS, "illegal memory access")
	ERROR_ROW(CUDA_ERROR_LAUNCH_TIMEOUT, "the launch timed out")
	ERROR_ROW(CUDA_ERROR_CONTEXT_IS_DESTROYED, "the context is destroyed")
	ERROR_ROW(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "already registered")
	ERROR_ROW(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "not registered")
	ERROR_ROW(CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned address")
	ERROR_ROW(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure")
	ERROR_ROW(CUDA_ERROR_NOT_PERMITTED, "not permitted")
	ERROR_ROW(CUDA_ERROR_NOT_SUPPORTED, "not supported")
	ERROR_ROW(CUDA_ERROR_UNKNOWN, "unknown error")
};

static CUresult error_row(CUresult code, size_t *row)
{
	for (*row = 0; *row < sizeof(errors) / sizeof(errors[0]); ++*row)
		if (errors[*row].code == code)
			return CUDA_SUCCESS;
	return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult code, const char **out)
{
	size_t row;
	CUresult rc = error_row(code, &row);

	*out = rc ? NULL : errors[row].name;
	return rc;
}

CUresult cuGetErrorString(CUresult code, const char **out)
{
	size_t row;
	CUresult rc = error_row(code, &row);

	*out = rc ? NULL : errors[row].text;
	return rc;
}

/* That a function is the one that this version of CUDA brought, CUDA's own list says. */
#define SYMBOL_CHECK(name, exported, version) \
	_Static_assert(__builtin_types_compatible_p(typeof(&exported), PFN_##name##_v##version), \
		       #exported);
FUNCTIONS(SYMBOL_CHECK)

static const struct { const char *name; void *address; uint64_t version; } symbols[] = {
#define SYMBOL_ROW(name, exported, version) { #name, (void *)exported, version },
	FUNCTIONS(SYMBOL_ROW)
};

/* The newest version of a symbol that both the caller and the driver know. */
static CUresult find_symbol(const char *symbol, void **out, int version, cuuint64_t flags,
			    CUdriverProcAddressQueryResult *status)
{
	CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;

	if (!symbol || !out || version < 0 || (uint64_t)version > is.driver || flags > 2)
		return CUDA_ERROR_INVALID_VALUE;
	*out = NULL;
	for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
		if (strcmp(symbols[i].name, symbol) || symbols[i].version > is.driver)
			continue;
		if (symbols[i].version <= (uint64_t)version)
			*out = symbols[i].address;
		found = *out ? CU_GET_PROC_ADDRESS_SUCCESS :
			CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
	}
	if (status)
		*status = found;
	return CUDA_SUCCESS;
}

/* Of 11.3, without a status; the newer one is another function. */
CUresult cuGetProcAddress(const char *symbol, void **out, int version, cuuint64_t flags)
{
	CUresult rc;

	ENTER(cuGetProcAddress, NOTHING, NULL, version, flags);
	rc = find_symbol(symbol, out, version, flags, NULL);
	return leave(rc == CUDA_SUCCESS && !*out ? CUDA_ERROR_NOT_FOUND : rc);
}

CUresult cuGetProcAddress_v2(const char *symbol, void **out, int version, cuuint64_t flags,
			     CUdriverProcAddressQueryResult *status)
{
	ENTER(cuGetProcAddress_v2, NOTHING, NULL, version, flags);
	return leave(find_symbol(symbol, out, version, flags, status));
}

/* ---- devices ---- */

CUresult cuDeviceGet(CUdevice *out, int ordinal)
{
	ENTER(cuDeviceGet, DRIVER, NULL, ordinal, 0);
	*out = ordinal;
	return leave(is_device(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE);
}

CUresult cuDeviceGetCount(int *out)
{
	ENTER(cuDeviceGetCount, DRIVER, NULL, 0, 0);
	*out = (int)is.devices;
	return leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetName(char *out, int room, CUdevice device)
{
	ENTER(cuDeviceGetName, DRIVER, NULL, device, 0);
	if (!is_device(device) || room <= 0)
		return leave(CUDA_ERROR_INVALID_DEVICE);
	snprintf(out, (size_t)room, "fake GPU %d", device);
	return leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute attribute, CUdevice device)
{
	ENTER(cuDeviceGetAttribute, DRIVER, NULL, attribute, device);
	if (!is_device(device))
		return leave(CUDA_ERROR_INVALID_DEVICE);
	switch ((int)attribute) {
	case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
		*out = (int)is.max_pitch;
		break;
	case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
		*out = (int)is.sms;
		break;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
		*out = (int)(is.capability / 10);
		break;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
		*out = (int)(is.capability % 10);
		break;
	case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
	case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
	case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
		*out = 1;
		break;
	case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
		*out = is.host_shift == 0;
		break;
	case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
		*out = is.read_only_register != 0;
		break;
	case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
		*out = 3;
		break;
	default:
		die("device attribute %d is not known here", (int)attribute);
	}
	return leave(CUDA_SUCCESS);
}

CUresult cuDeviceTotalMem_v2(size_t *out, CUdevice device)
{
	ENTER(cuDeviceTotalMem_v2, DRIVER, NULL, device, 0);
	*out = is.total;
	return leave(is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE);
}

/* ---- contexts ---- */

static CUcontext context_new(CUdevice device, bool is_primary)
{
	CUcontext context = calloc(1, sizeof(*context));

	if (!context)
		die("no memory for a context");
	context->device = device;
	context->refs = 1;
	context->is_primary = is_primary;
	context->next = contexts;
	contexts = context;
	return context;
}

/* All that was made in it goes with it. */
static void context_put(CUcontext context)
{
	if (--context->refs)
		return;
	if (context->is_primary)
		devices[context->device].primary = NULL;
	streams_of_context_died(context);
	events_of_context_died(context);
	memory_of_context_died(context);
	modules_of_context_died(context);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
	ENTER(cuDevicePrimaryCtxRetain, DRIVER, NULL, device, 0);
	if (!is_device(device))
		return leave(CUDA_ERROR_INVALID_DEVICE);
	if (devices[device].primary)
		devices[device].primary->refs++;
	else
		devices[device].primary = context_new(device, true);
	*out = devices[device].primary;
	return leave(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
	ENTER(cuDevicePrimaryCtxRelease_v2, DRIVER, NULL, device, 0);
	if (!is_device(device))
		return leave(CUDA_ERROR_INVALID_DEVICE);
	if (!devices[device].primary)
		return leave(CUDA_ERROR_INVALID_CONTEXT);
	context_put(devices[device].primary);
	return leave(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
	ENTER(cuDevicePrimaryCtxGetState, DRIVER, NULL, device, 0);
	if (!is_device(device))
		return leave(CUDA_ERROR_INVALID_DEVICE);
	*flags = 0;
	*active = devices[device].primary != NULL;
	return leave(CUDA_SUCCESS);
}

static CUresult push(CUcontext context)
{
	if (!context)
		return CUDA_ERROR_INVALID_VALUE;
	if (!is_context(context))
		return CUDA_ERROR_INVALID_CONTEXT;
	if (depth == MAX_DEPTH)
		die("contexts are pushed and not popped");
	stack[depth++] = context;
	return CUDA_SUCCESS;
}

static CUresult create(CUcontext *out, unsigned int flags, CUdevice device)
{
	if (!is_device(device))
		return CUDA_ERROR_INVALID_DEVICE;
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	*out = context_new(device, false);
	return push(*out);
}

CUresult cuCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice device)
{
	ENTER(cuCtxCreate_v2, DRIVER, NULL, flags, device);
	return leave(create(out, flags, device));
}

CUresult cuCtxCreate_v4(CUcontext *out, CUctxCreateParams *params, unsigned int flags,
			CUdevice device)
{
	ENTER(cuCtxCreate_v4, DRIVER, NULL, flags, device);
	return leave(create(out, flags, device));
}

CUresult cuCtxDestroy_v2(CUcontext context)
{
	ENTER(cuCtxDestroy_v2, DRIVER, NULL, (uintptr_t)context, 0);
	if (!is_context(context) || context->is_primary)
		return leave(CUDA_ERROR_INVALID_CONTEXT);
	context_put(context);
	if (current_context() == context)
		depth--;
	return leave(CUDA_SUCCESS);
}

CUresult cuCtxPushCurrent_v2(CUcontext context)
{
	ENTER(cuCtxPushCurrent_v2, DRIVER, NULL, (uintptr_t)context, 0);
	return leave(push(context));
}

CUresult cuCtxPopCurrent_v2(CUcontext *out)
{
	ENTER(cuCtxPopCurrent_v2, DRIVER, NULL, 0, 0);
	if (!depth)
		return leave(CUDA_ERROR_INVALID_CONTEXT);
	depth--;
	if (out)
		*out = stack[depth];
	return leave(CUDA_SUCCESS);
}

CUresult cuCtxSetCurrent(CUcontext context)
{
	ENTER(cuCtxSetCurrent, DRIVER, NULL, (uintptr_t)context, 0);
	if (context && !is_context(context))
		return leave(CUDA_ERROR_INVALID_CONTEXT);
	if (depth)
		depth--;
	return leave(context ? push(context) : CUDA_SUCCESS);
}

CUresult cuCtxGetCurrent(CUcontext *out)
{
	ENTER(cuCtxGetCurrent, DRIVER, NULL, 0, 0);
	*out = current_context();
	return leave(CUDA_SUCCESS);
}

CUresult cuCtxGetDevice(CUdevice *out)
{
	ENTER(cuCtxGetDevice, CONTEXT, NULL, 0, 0);
	*out = current_context()->device;
	return leave(CUDA_SUCCESS);
}

CUresult cuCtxSynchronize(void)
{
	ENTER(cuCtxSynchronize, CONTEXT, NULL, 0, 0);
	return leave(context_finish(current_context()));
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
	ENTER(cuCtxGetStreamPriorityRange, CONTEXT, NULL, 0, 0);
	*least = 0;
	*greatest = -5;
	return leave(CUDA_SUCCESS);
}

/* How many contexts this thread has pushed. */
EXPORT int fake_cuda_depth(void)
{
	return depth;
}

/* ---- captures: there are none, but a test may have a stream say so ---- */

static __thread CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
	CUstreamCaptureMode before = capture_mode;

	ENTER(cuThreadExchangeStreamCaptureMode, DRIVER, NULL, *mode, before);
	if (*mode > CU_STREAM_CAPTURE_MODE_RELAXED)
		return leave(CUDA_ERROR_INVALID_VALUE);
	capture_mode = *mode;
	*mode = before;
	return leave(CUDA_SUCCESS);
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *out)
{
	ENTER(cuStreamIsCapturing, CONTEXT, stream, 0, 0);
	*out = is.capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
	return leave(CUDA_SUCCESS);
}
