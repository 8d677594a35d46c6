/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVIO_GPU_H
#define KVIO_GPU_H
/*
 * The provider cuda: its devices, what copies cost there, and memory of our own. NICs, queue pairs
 * and batches are those of kvio/nic.h; `device` is CUDA's ordinal. Nothing here needs a toolkit:
 * libcuda is opened at run time, and its absence is -ENOSYS.
 */
#include "kvio/nic.h"

/* What one way costs between two kinds of memory, as measured when the device was first opened:
 * fixed_ns + copies * copy_ns + rows * row_ns + nbytes * byte_ns, all of it until completion. */
struct kvio_copy_cost {
	double fixed_ns, copy_ns, row_ns, byte_ns;
	uint32_t there;			/* 0: this way cannot be taken here */
};

struct kvio_cuda_info {
	char name[128];			/* of the device */
	int32_t device;
	int32_t driver_version;		/* 12080: CUDA 12.8 */
	int32_t capability;		/* 90: sm_90 */
	int32_t num_sms;
	uint32_t copy_way;		/* as asked for */
	uint32_t kernel_sms;		/* that the kernel takes */
	uint32_t measured;		/* are the costs real? */
	char missing[KVIO_NUM_COPY_WAYS][96];	/* why a way cannot be taken; "": it can */
	struct kvio_copy_cost costs[KVIO_NUM_COPY_KINDS][KVIO_NUM_COPY_WAYS];
	uint64_t copies[KVIO_NUM_COPY_WAYS];	/* calls of the driver, or descriptors of kernels */
	uint64_t segments[KVIO_NUM_COPY_WAYS];	/* times that this way was chosen */
	char why[192];			/* of this NIC's last failed registration, post or stream */
};

/* -EOPNOTSUPP: the NIC is of another provider. */
int kvio_cuda_look(struct kvio_nic *nic, struct kvio_cuda_info *out);

enum kvio_cuda_memory { KVIO_CUDA_PINNED, KVIO_CUDA_DEVICE };

/* All of these: `why` gets a text if they fail. -ENOSYS: no libcuda, -ENODEV, -ENOMEM, -EIO. */
int kvio_cuda_alloc(int device, uint64_t nbytes, uint32_t memory, uint64_t *addr,
		    char *why, size_t room);
void kvio_cuda_free(int device, uint64_t addr, uint32_t memory);
/* Synchronous, for set-up, tests and engines on the CPU. Either side may be either memory; what is
 * filled has to be the GPU's, or pinned. -EINVAL: it was freed. */
int kvio_cuda_copy(int device, uint64_t target, uint64_t source, uint64_t nbytes,
		   char *why, size_t room);
int kvio_cuda_fill(int device, uint64_t target, uint8_t value, uint64_t nbytes,
		   char *why, size_t room);
/* The ordinal of the device that the memory belongs to; -EINVAL: not a GPU's. */
int kvio_cuda_device_of(uint64_t addr, char *why, size_t room);

#endif
