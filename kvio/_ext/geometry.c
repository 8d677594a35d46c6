/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Work requests for one layer of many blocks. A request of 511 blocks and 61 layers builds them
 * once (<= 5 us); other layers are offsets that a post adds while it copies (struct kvio_post).
 */
#include <errno.h>

#include "kvio/block.h"

static inline uint64_t address(const struct kvio_side *side, size_t i)
{
	uint64_t block = side->block_ids ? (uint64_t)side->block_ids[i] : i;

	return side->base + block * side->block_stride + side->layer_offset;
}

int64_t kvio_describe(struct kvio_wr *out, uint32_t opcode, const struct kvio_side *local,
		      const struct kvio_side *remote, size_t count, uint32_t nbytes,
		      uint32_t tail_nbytes, uint32_t max_length)
{
	struct kvio_wr *wr = out;
	uint64_t local_end = 0, remote_end = 0;
	size_t i;

	if (nbytes == 0 || tail_nbytes == 0 || tail_nbytes > nbytes || nbytes > max_length)
		return -EINVAL;
	for (i = 0; i < count; i++) {
		uint64_t local_addr = address(local, i), remote_addr = address(remote, i);
		uint32_t length = i + 1 == count ? tail_nbytes : nbytes;

		if (i && local_addr == local_end && remote_addr == remote_end &&
		    (uint64_t)wr[-1].length + length <= max_length) {
			wr[-1].length += length;
		} else {
			*wr++ = (struct kvio_wr){
				.wr_id = i, .local_addr = local_addr, .remote_addr = remote_addr,
				.lkey = local->key, .rkey = remote->key, .length = length,
				.opcode = opcode,
			};
		}
		local_end = local_addr + length;
		remote_end = remote_addr + length;
	}
	return wr - out;
}
