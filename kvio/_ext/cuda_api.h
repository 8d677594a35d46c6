/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVIO_CUDA_API_H
#define KVIO_CUDA_API_H
/*
 * The part of CUDA's driver interface that kvio uses, by its documentation: no header of CUDA is
 * needed to build. A test compiles this beside the real cuda.h (12 and 13) and compares sizes,
 * offsets, values, and the types of all functions.
 */
#include <stddef.h>
#include <stdint.h>

#ifndef KVIO_CUDA_CHECK		/* the test has the real names */
typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef void (*CUhostFn)(void *arg);
typedef unsigned int CUstreamCaptureMode;
typedef unsigned int CUstreamCaptureStatus;
#endif

enum {
	CUDA_OK = 0,
	CUDA_INVALID_VALUE = 1,
	CUDA_OUT_OF_MEMORY = 2,
	CUDA_NOT_INITIALIZED = 3,
	CUDA_DEINITIALIZED = 4,
	CUDA_NO_DEVICE = 100,
	CUDA_INVALID_DEVICE = 101,
	CUDA_INVALID_CONTEXT = 201,
	CUDA_ECC_UNCORRECTABLE = 214,
	CUDA_NVLINK_UNCORRECTABLE = 220,
	CUDA_CONTAINED = 226,
	CUDA_OPERATING_SYSTEM = 304,
	CUDA_NOT_FOUND = 500,
	CUDA_NOT_READY = 600,
	CUDA_ILLEGAL_ADDRESS = 700,
	CUDA_LAUNCH_TIMEOUT = 702,
	CUDA_CONTEXT_IS_DESTROYED = 709,
	CUDA_ASSERT = 710,
	CUDA_HOST_ALREADY_REGISTERED = 712,
	CUDA_HARDWARE_STACK_ERROR = 714,
	CUDA_ILLEGAL_INSTRUCTION = 715,
	CUDA_MISALIGNED_ADDRESS = 716,
	CUDA_INVALID_ADDRESS_SPACE = 717,
	CUDA_INVALID_PC = 718,
	CUDA_LAUNCH_FAILED = 719,
	CUDA_TENSOR_MEMORY_LEAK = 721,
	CUDA_NOT_PERMITTED = 800,
	CUDA_NOT_SUPPORTED = 801,
	CUDA_MPS_CLIENT_TERMINATED = 810,
	CUDA_EXTERNAL_DEVICE = 911,
	CUDA_UNKNOWN = 999,
};

enum {
	CUDA_ATTR_MAX_PITCH = 11,
	CUDA_ATTR_SM_COUNT = 16,
	CUDA_ATTR_MAJOR = 75,
	CUDA_ATTR_MINOR = 76,
	CUDA_ATTR_HOST_POINTER_OF_REGISTERED = 91,	/* CAN_USE_HOST_POINTER_FOR_... */

	CUDA_POINTER_CONTEXT = 1,
	CUDA_POINTER_MEMORY_TYPE = 2,
	CUDA_POINTER_DEVICE_ORDINAL = 9,

	CUDA_MEMORY_HOST = 1,
	CUDA_MEMORY_DEVICE = 2,
	CUDA_MEMORY_UNIFIED = 4,

	CUDA_STREAM_NON_BLOCKING = 1,
	CUDA_EVENT_DEFAULT = 0,
	CUDA_EVENT_DISABLE_TIMING = 2,
	CUDA_HOST_ALLOC_PORTABLE = 1,
	CUDA_HOST_ALLOC_DEVICEMAP = 2,
	CUDA_HOST_REGISTER_PORTABLE = 1,
	CUDA_HOST_REGISTER_DEVICEMAP = 2,
	CUDA_HOST_REGISTER_READ_ONLY = 8,

	CUDA_CAPTURE_MODE_RELAXED = 2,
	CUDA_CAPTURE_STATUS_NONE = 0,
	CUDA_SRC_ACCESS_ORDER_STREAM = 1,
	CUDA_COPY_PREFER_OVERLAP = 1,	/* CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE */
};

/* CUDA_MEMCPY3D_v2 */
struct cuda_memcpy3d {
	size_t src_x, src_y, src_z, src_lod;
	unsigned int src_type;
	const void *src_host;
	CUdeviceptr src_device;
	void *src_array, *reserved0;
	size_t src_pitch, src_height;
	size_t dst_x, dst_y, dst_z, dst_lod;
	unsigned int dst_type;
	void *dst_host;
	CUdeviceptr dst_device;
	void *dst_array, *reserved1;
	size_t dst_pitch, dst_height;
	size_t width, height, depth;
};

/* CUDA_MEMCPY2D_v2 */
struct cuda_memcpy2d {
	size_t src_x, src_y;
	unsigned int src_type;
	const void *src_host;
	CUdeviceptr src_device;
	void *src_array;
	size_t src_pitch;
	size_t dst_x, dst_y;
	unsigned int dst_type;
	void *dst_host;
	CUdeviceptr dst_device;
	void *dst_array;
	size_t dst_pitch;
	size_t width, height;
};

/* CUmemcpyAttributes; a CUmemLocation is two ints. */
struct cuda_memcpy_attributes {
	unsigned int src_access_order;
	int src_location[2], dst_location[2];
	unsigned int flags;
};

/* By cuGetProcAddress, in the version of CUDA that stands behind each (the oldest with that
 * signature). What is optional may be NULL. */
struct cuda_api {
	CUresult (*init)(unsigned int);						/* 2.0 */
	CUresult (*driver_version)(int *);					/* 2.2 */
	CUresult (*error_name)(CUresult, const char **);			/* 6.0 */
	CUresult (*error_string)(CUresult, const char **);			/* 6.0 */
	CUresult (*device_get)(CUdevice *, int);				/* 2.0 */
	CUresult (*device_count)(int *);					/* 2.0 */
	CUresult (*device_name)(char *, int, CUdevice);				/* 2.0 */
	CUresult (*device_attribute)(int *, int, CUdevice);			/* 2.0 */
	CUresult (*primary_retain)(CUcontext *, CUdevice);			/* 7.0 */
	CUresult (*primary_release)(CUdevice);					/* 11.0 */
	CUresult (*ctx_push)(CUcontext);					/* 4.0 */
	CUresult (*ctx_pop)(CUcontext *);					/* 4.0 */
	CUresult (*pointer_attribute)(void *, int, CUdeviceptr);		/* 4.0 */
	CUresult (*address_range)(CUdeviceptr *, size_t *, CUdeviceptr);	/* 3.2 */
	CUresult (*mem_alloc)(CUdeviceptr *, size_t);				/* 3.2 */
	CUresult (*mem_free)(CUdeviceptr);					/* 3.2 */
	CUresult (*mem_info)(size_t *, size_t *);				/* 3.2 */
	CUresult (*host_alloc)(void **, size_t, unsigned int);			/* 2.2 */
	CUresult (*host_free)(void *);						/* 2.0 */
	CUresult (*host_register)(void *, size_t, unsigned int);		/* 6.5 */
	CUresult (*host_unregister)(void *);					/* 4.0 */
	CUresult (*host_device_pointer)(CUdeviceptr *, void *, unsigned int);	/* 3.2 */
	CUresult (*stream_create)(CUstream *, unsigned int, int);		/* 5.5 */
	CUresult (*stream_destroy)(CUstream);					/* 4.0 */
	CUresult (*stream_priorities)(int *, int *);				/* 5.5 */
	CUresult (*stream_sync)(CUstream);					/* 2.0 */
	CUresult (*stream_wait)(CUstream, CUevent, unsigned int);		/* 3.2 */
	CUresult (*stream_context)(CUstream, CUcontext *);			/* 9.2 */
	CUresult (*event_create)(CUevent *, unsigned int);			/* 2.0 */
	CUresult (*event_destroy)(CUevent);					/* 4.0 */
	CUresult (*event_record)(CUevent, CUstream);				/* 2.0 */
	CUresult (*event_query)(CUevent);					/* 2.0 */
	CUresult (*host_func)(CUstream, CUhostFn, void *);			/* 10.0 */
	CUresult (*copy)(CUdeviceptr, CUdeviceptr, size_t, CUstream);		/* 4.0 */
	CUresult (*copy_h2d)(CUdeviceptr, const void *, size_t, CUstream);	/* 3.2 */
	CUresult (*copy_d2h)(void *, CUdeviceptr, size_t, CUstream);		/* 3.2 */
	CUresult (*copy_2d)(const struct cuda_memcpy2d *, CUstream);		/* 3.2 */
	CUresult (*copy_3d)(const struct cuda_memcpy3d *, CUstream);		/* 3.2 */
	CUresult (*fill)(CUdeviceptr, unsigned char, size_t, CUstream);		/* 3.2 */
	CUresult (*module_load)(CUmodule *, const void *);			/* 2.0 */
	CUresult (*module_unload)(CUmodule);					/* 2.0 */
	CUresult (*module_function)(CUfunction *, CUmodule, const char *);	/* 2.0 */
	CUresult (*launch)(CUfunction, unsigned int, unsigned int, unsigned int, unsigned int,
			   unsigned int, unsigned int, unsigned int, CUstream, void **,
			   void **);						/* 4.0 */
	CUresult (*capture_mode)(CUstreamCaptureMode *);			/* 10.1 */
	CUresult (*is_capturing)(CUstream, CUstreamCaptureStatus *);		/* 10.0 */
	/* Optional; one of the two, by the driver's version. */
	CUresult (*batch12)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t,
			    struct cuda_memcpy_attributes *, size_t *, size_t, size_t *,
			    CUstream);						/* 12.8 */
	CUresult (*batch13)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t,
			    struct cuda_memcpy_attributes *, size_t *, size_t,
			    CUstream);						/* 13.0 */
};

#endif
