/* SPDX-License-Identifier: Apache-2.0 */
/* The provider cuda: NICs and queue pairs (one stream each), counters. */
#include <stdio.h>

#include "cuda_impl.h"

static int nic_open(struct kvio_nic **out, const struct kvio_nic_params *params)
{
	int rc = cuda_load(params->why, params->why_room);

	return rc < 0 ? rc : -ENOSYS;
}

const struct kvio_nic_ops kvio_cuda_ops = { .name = "cuda", .open = nic_open };

int kvio_cuda_look(struct kvio_nic *nic, struct kvio_cuda_info *out)
{
	return -EOPNOTSUPP;
}

int kvio_cuda_alloc(int device, uint64_t nbytes, uint32_t memory, uint64_t *addr,
		    char *why, size_t room)
{
	return -ENOSYS;
}

void kvio_cuda_free(int device, uint64_t addr, uint32_t memory)
{
}

int kvio_cuda_copy(int device, uint64_t target, uint64_t source, uint64_t nbytes,
		   char *why, size_t room)
{
	return -ENOSYS;
}

int kvio_cuda_fill(int device, uint64_t target, uint8_t value, uint64_t nbytes,
		   char *why, size_t room)
{
	return -ENOSYS;
}

int kvio_cuda_device_of(uint64_t addr, char *why, size_t room)
{
	return -ENOSYS;
}
