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

static inline struct kvio_sge local_side(const struct kvio_wr *wr)
{
	return (struct kvio_sge){ .addr = wr->local_addr, .lkey = wr->lkey, .length = wr->length };
}

static inline int joins(const struct kvio_wr *run, const struct kvio_wr *wr, uint32_t max_sge,
			uint32_t max_length)
{
	return wr->remote_addr == run->remote_addr + run->length && wr->rkey == run->rkey &&
	       wr->opcode == run->opcode && run->num_sge < max_sge &&
	       (uint64_t)run->length + wr->length <= max_length;
}

int64_t kvio_gather(struct kvio_wr *wrs, size_t count, struct kvio_sge *sges, uint32_t max_sge,
		    uint32_t max_length, size_t *num_sges)
{
	struct kvio_wr *run = wrs;	/* the last one that is left */
	size_t used = 0;

	*num_sges = 0;
	for (size_t i = 0; i < count; i++)
		if (wrs[i].num_sge)
			return -EINVAL;
	if (count == 0 || max_sge < 2)
		return (int64_t)count;
	for (size_t i = 1; i < count; i++) {
		const struct kvio_wr wr = wrs[i];

		if (!joins(run, &wr, max_sge, max_length)) {
			*++run = wr;
			continue;
		}
		if (run->num_sge == 0) {
			run->sge_first = (uint32_t)used;
			run->num_sge = 1;
			sges[used++] = local_side(run);
		}
		sges[used++] = local_side(&wr);
		run->num_sge++;
		run->length += wr.length;
	}
	*num_sges = used;
	return run - wrs + 1;
}
