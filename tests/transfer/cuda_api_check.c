/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvio/_ext/cuda_api.h beside the real cuda.h: compiled, never run. Where one of them says a number
 * and the other a name of the same size and meaning (an enum, a struct whose layout is compared),
 * the signature is written once and compared with both.
 */
#include <cuda.h>
#include <cudaTypedefs.h>
#include <stddef.h>

#define KVIO_CUDA_CHECK
#include CUDA_API_H

#define SAME_TYPE(a, b) __builtin_types_compatible_p(a, b)

/* ---- types ---- */

_Static_assert(sizeof(CUresult) == sizeof(int) && sizeof(CUdeviceptr) == 8, "results, addresses");
_Static_assert(SAME_TYPE(CUdevice, int) && SAME_TYPE(CUdeviceptr, unsigned long long), "numbers");
_Static_assert(SAME_TYPE(CUhostFn, void (*)(void *)), "CUhostFn");

/* ---- values ---- */

#define VALUE(ours, theirs) \
	_Static_assert((long long)(ours) == (long long)(theirs), #ours " is not " #theirs);

VALUE(CUDA_OK, CUDA_SUCCESS)
VALUE(CUDA_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE)
VALUE(CUDA_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY)
VALUE(CUDA_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED)
VALUE(CUDA_DEINITIALIZED, CUDA_ERROR_DEINITIALIZED)
VALUE(CUDA_NO_DEVICE, CUDA_ERROR_NO_DEVICE)
VALUE(CUDA_INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE)
VALUE(CUDA_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT)
VALUE(CUDA_ECC_UNCORRECTABLE, CUDA_ERROR_ECC_UNCORRECTABLE)
VALUE(CUDA_NVLINK_UNCORRECTABLE, CUDA_ERROR_NVLINK_UNCORRECTABLE)
VALUE(CUDA_CONTAINED, CUDA_ERROR_CONTAINED)
VALUE(CUDA_OPERATING_SYSTEM, CUDA_ERROR_OPERATING_SYSTEM)
VALUE(CUDA_NOT_FOUND, CUDA_ERROR_NOT_FOUND)
VALUE(CUDA_NOT_READY, CUDA_ERROR_NOT_READY)
VALUE(CUDA_ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS)
VALUE(CUDA_LAUNCH_TIMEOUT, CUDA_ERROR_LAUNCH_TIMEOUT)
VALUE(CUDA_CONTEXT_IS_DESTROYED, CUDA_ERROR_CONTEXT_IS_DESTROYED)
VALUE(CUDA_ASSERT, CUDA_ERROR_ASSERT)
VALUE(CUDA_HOST_ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
VALUE(CUDA_HARDWARE_STACK_ERROR, CUDA_ERROR_HARDWARE_STACK_ERROR)
VALUE(CUDA_ILLEGAL_INSTRUCTION, CUDA_ERROR_ILLEGAL_INSTRUCTION)
VALUE(CUDA_MISALIGNED_ADDRESS, CUDA_ERROR_MISALIGNED_ADDRESS)
VALUE(CUDA_INVALID_ADDRESS_SPACE, CUDA_ERROR_INVALID_ADDRESS_SPACE)
VALUE(CUDA_INVALID_PC, CUDA_ERROR_INVALID_PC)
VALUE(CUDA_LAUNCH_FAILED, CUDA_ERROR_LAUNCH_FAILED)
VALUE(CUDA_TENSOR_MEMORY_LEAK, CUDA_ERROR_TENSOR_MEMORY_LEAK)
VALUE(CUDA_NOT_PERMITTED, CUDA_ERROR_NOT_PERMITTED)
VALUE(CUDA_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED)
VALUE(CUDA_MPS_CLIENT_TERMINATED, CUDA_ERROR_MPS_CLIENT_TERMINATED)
VALUE(CUDA_EXTERNAL_DEVICE, CUDA_ERROR_EXTERNAL_DEVICE)
VALUE(CUDA_UNKNOWN, CUDA_ERROR_UNKNOWN)

VALUE(CUDA_ATTR_MAX_PITCH, CU_DEVICE_ATTRIBUTE_MAX_PITCH)
VALUE(CUDA_ATTR_SM_COUNT, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
VALUE(CUDA_ATTR_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
VALUE(CUDA_ATTR_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
VALUE(CUDA_ATTR_HOST_POINTER_OF_REGISTERED,
      CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)
VALUE(CUDA_POINTER_CONTEXT, CU_POINTER_ATTRIBUTE_CONTEXT)
VALUE(CUDA_POINTER_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
VALUE(CUDA_POINTER_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
VALUE(CUDA_MEMORY_HOST, CU_MEMORYTYPE_HOST)
VALUE(CUDA_MEMORY_DEVICE, CU_MEMORYTYPE_DEVICE)
VALUE(CUDA_MEMORY_UNIFIED, CU_MEMORYTYPE_UNIFIED)
VALUE(CUDA_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING)
VALUE(CUDA_EVENT_DEFAULT, CU_EVENT_DEFAULT)
VALUE(CUDA_EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING)
VALUE(CUDA_HOST_ALLOC_PORTABLE, CU_MEMHOSTALLOC_PORTABLE)
VALUE(CUDA_HOST_ALLOC_DEVICEMAP, CU_MEMHOSTALLOC_DEVICEMAP)
VALUE(CUDA_HOST_REGISTER_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE)
VALUE(CUDA_HOST_REGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_DEVICEMAP)
VALUE(CUDA_HOST_REGISTER_READ_ONLY, CU_MEMHOSTREGISTER_READ_ONLY)
VALUE(CUDA_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED)
VALUE(CUDA_CAPTURE_STATUS_NONE, CU_STREAM_CAPTURE_STATUS_NONE)
VALUE(CUDA_SRC_ACCESS_ORDER_STREAM, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM)
VALUE(CUDA_COPY_PREFER_OVERLAP, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)

/* ---- structures ---- */

#define FIELD(ours, our_field, theirs, their_field) \
	_Static_assert(offsetof(struct ours, our_field) == offsetof(theirs, their_field) && \
		       sizeof(((struct ours *)0)->our_field) == \
		       sizeof(((theirs *)0)->their_field), #ours "." #our_field);
#define WHOLE(ours, theirs) \
	_Static_assert(sizeof(struct ours) == sizeof(theirs) && \
		       _Alignof(struct ours) == _Alignof(theirs), #ours);

/* What both structures of copies have, of one end. */
#define END(ours, theirs, end) \
	FIELD(ours, end##_x, theirs, end##XInBytes) \
	FIELD(ours, end##_y, theirs, end##Y) \
	FIELD(ours, end##_type, theirs, end##MemoryType) \
	FIELD(ours, end##_host, theirs, end##Host) \
	FIELD(ours, end##_device, theirs, end##Device) \
	FIELD(ours, end##_array, theirs, end##Array) \
	FIELD(ours, end##_pitch, theirs, end##Pitch)
#define END_3D(end) \
	END(cuda_memcpy3d, CUDA_MEMCPY3D_v2, end) \
	FIELD(cuda_memcpy3d, end##_z, CUDA_MEMCPY3D_v2, end##Z) \
	FIELD(cuda_memcpy3d, end##_lod, CUDA_MEMCPY3D_v2, end##LOD) \
	FIELD(cuda_memcpy3d, end##_height, CUDA_MEMCPY3D_v2, end##Height)

WHOLE(cuda_memcpy2d, CUDA_MEMCPY2D_v2)
END(cuda_memcpy2d, CUDA_MEMCPY2D_v2, src)
END(cuda_memcpy2d, CUDA_MEMCPY2D_v2, dst)
FIELD(cuda_memcpy2d, width, CUDA_MEMCPY2D_v2, WidthInBytes)
FIELD(cuda_memcpy2d, height, CUDA_MEMCPY2D_v2, Height)

WHOLE(cuda_memcpy3d, CUDA_MEMCPY3D_v2)
END_3D(src)
END_3D(dst)
FIELD(cuda_memcpy3d, reserved0, CUDA_MEMCPY3D_v2, reserved0)
FIELD(cuda_memcpy3d, reserved1, CUDA_MEMCPY3D_v2, reserved1)
FIELD(cuda_memcpy3d, width, CUDA_MEMCPY3D_v2, WidthInBytes)
FIELD(cuda_memcpy3d, height, CUDA_MEMCPY3D_v2, Height)
FIELD(cuda_memcpy3d, depth, CUDA_MEMCPY3D_v2, Depth)

_Static_assert(sizeof(CUmemLocation) == 2 * sizeof(int) && offsetof(CUmemLocation, type) == 0 &&
	       offsetof(CUmemLocation, id) == sizeof(int), "CUmemLocation");
WHOLE(cuda_memcpy_attributes, CUmemcpyAttributes)
FIELD(cuda_memcpy_attributes, src_access_order, CUmemcpyAttributes, srcAccessOrder)
FIELD(cuda_memcpy_attributes, src_location, CUmemcpyAttributes, srcLocHint)
FIELD(cuda_memcpy_attributes, dst_location, CUmemcpyAttributes, dstLocHint)
FIELD(cuda_memcpy_attributes, flags, CUmemcpyAttributes, flags)

/* ---- functions, each in the version that cuda_api.h names ---- */

#define OURS(field) typeof(((struct cuda_api *)0)->field)
#define FUNCTION(field, name, version) \
	_Static_assert(SAME_TYPE(OURS(field), PFN_##name##_v##version), #field);
/* The same, but for one type: the signature as a macro of it. */
#define FUNCTION_BUT(field, name, version, signature, our_type, their_type) \
	_Static_assert(SAME_TYPE(OURS(field), signature(our_type)), #field); \
	_Static_assert(SAME_TYPE(PFN_##name##_v##version, signature(their_type)), #name); \
	_Static_assert(sizeof(our_type) == sizeof(their_type), #our_type);

#define DEVICE_ATTRIBUTE(type) CUresult (*)(int *, type, CUdevice)
#define POINTER_ATTRIBUTE(type) CUresult (*)(void *, type, CUdeviceptr)
#define COPY_OF(type) CUresult (*)(const type *, CUstream)
#define BATCH12(type) CUresult (*)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, type *, \
				   size_t *, size_t, size_t *, CUstream)
#define BATCH13(type) CUresult (*)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, type *, \
				   size_t *, size_t, CUstream)

FUNCTION(init, cuInit, 2000)
FUNCTION(driver_version, cuDriverGetVersion, 2020)
FUNCTION(error_name, cuGetErrorName, 6000)
FUNCTION(error_string, cuGetErrorString, 6000)
FUNCTION(device_get, cuDeviceGet, 2000)
FUNCTION(device_count, cuDeviceGetCount, 2000)
FUNCTION(device_name, cuDeviceGetName, 2000)
FUNCTION_BUT(device_attribute, cuDeviceGetAttribute, 2000, DEVICE_ATTRIBUTE, int,
	     CUdevice_attribute)
FUNCTION(primary_retain, cuDevicePrimaryCtxRetain, 7000)
FUNCTION(primary_release, cuDevicePrimaryCtxRelease, 11000)
FUNCTION(ctx_push, cuCtxPushCurrent, 4000)
FUNCTION(ctx_pop, cuCtxPopCurrent, 4000)
FUNCTION_BUT(pointer_attribute, cuPointerGetAttribute, 4000, POINTER_ATTRIBUTE, int,
	     CUpointer_attribute)
FUNCTION(address_range, cuMemGetAddressRange, 3020)
FUNCTION(mem_alloc, cuMemAlloc, 3020)
FUNCTION(mem_free, cuMemFree, 3020)
FUNCTION(mem_info, cuMemGetInfo, 3020)
FUNCTION(host_alloc, cuMemHostAlloc, 2020)
FUNCTION(host_free, cuMemFreeHost, 2000)
FUNCTION(host_register, cuMemHostRegister, 6050)
FUNCTION(host_unregister, cuMemHostUnregister, 4000)
FUNCTION(host_device_pointer, cuMemHostGetDevicePointer, 3020)
FUNCTION(stream_create, cuStreamCreateWithPriority, 5050)
FUNCTION(stream_destroy, cuStreamDestroy, 4000)
FUNCTION(stream_priorities, cuCtxGetStreamPriorityRange, 5050)
FUNCTION(stream_sync, cuStreamSynchronize, 2000)
FUNCTION(stream_wait, cuStreamWaitEvent, 3020)
FUNCTION(stream_context, cuStreamGetCtx, 9020)
FUNCTION(capture_mode, cuThreadExchangeStreamCaptureMode, 10010)
FUNCTION(is_capturing, cuStreamIsCapturing, 10000)
FUNCTION(event_create, cuEventCreate, 2000)
FUNCTION(event_destroy, cuEventDestroy, 4000)
FUNCTION(event_record, cuEventRecord, 2000)
FUNCTION(event_query, cuEventQuery, 2000)
FUNCTION(host_func, cuLaunchHostFunc, 10000)
FUNCTION(copy, cuMemcpyAsync, 4000)
FUNCTION(copy_h2d, cuMemcpyHtoDAsync, 3020)
FUNCTION(copy_d2h, cuMemcpyDtoHAsync, 3020)
FUNCTION_BUT(copy_2d, cuMemcpy2DAsync, 3020, COPY_OF, struct cuda_memcpy2d, CUDA_MEMCPY2D_v2)
FUNCTION_BUT(copy_3d, cuMemcpy3DAsync, 3020, COPY_OF, struct cuda_memcpy3d, CUDA_MEMCPY3D_v2)
FUNCTION(fill, cuMemsetD8Async, 3020)
FUNCTION(module_load, cuModuleLoadData, 2000)
FUNCTION(module_unload, cuModuleUnload, 2000)
FUNCTION(module_function, cuModuleGetFunction, 2000)
FUNCTION(launch, cuLaunchKernel, 4000)
FUNCTION_BUT(batch12, cuMemcpyBatchAsync, 12080, BATCH12, struct cuda_memcpy_attributes,
	     CUmemcpyAttributes)
#if CUDA_VERSION >= 13000
FUNCTION_BUT(batch13, cuMemcpyBatchAsync, 13000, BATCH13, struct cuda_memcpy_attributes,
	     CUmemcpyAttributes)
#endif
