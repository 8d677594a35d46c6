// SPDX-License-Identifier: Apache-2.0
/* What a ring has to know of a segment: whether the kernel copies, and what proves a payload. */
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/vfs.h>

#include "ring_internal.h"

int kvio_file_is_direct(int fd)
{
	int flags = fcntl(fd, F_GETFL);
	struct statfs fs;

	if (flags < 0 || fstatfs(fd, &fs) < 0)
		return -errno;
	return (flags & O_DIRECT) && fs.f_type != TMPFS_MAGIC && fs.f_type != RAMFS_MAGIC;
}

static int prepare_own(struct kvio_store *store, struct kvio_segment *segment)
{
	segment->generations = calloc(store->params.slots, sizeof(*segment->generations));
	if (!segment->generations)
		return -ENOMEM;
	segment->sync.op = IO_SYNC;
	segment->sync.segment = segment;
	for (uint32_t i = 0; i < store->params.header_pages; i++)
		segment->pages[i] = (struct commit){ .segment = segment, .page = i,
						     .op = IO_WRITE };
	return 0;
}

int segment_prepare(struct kvio_store *store, struct kvio_segment *segment)
{
	segment->buffered = segment->fd >= 0 && kvio_file_is_direct(segment->fd) == 0;
	return segment->own ? prepare_own(store, segment) : 0;
}

void segment_discard(struct kvio_segment *segment)
{
	free(segment->generations);
}

int kvio_segment_final(struct kvio_store *store, uint32_t index)
{
	int64_t never = 0;

	if (index >= atomic_load(&store->num_segments))
		return -EINVAL;
	atomic_compare_exchange_strong(&segment_at(store, index)->final_ns, &never, now_ns());
	return 0;
}

/*
 * Fixed for as long as the batch lives: a segment that becomes final later than the batch looked
 * its places up does not change what the batch has to prove.
 */
enum proof segment_proof(const struct kvio_ring *ring, const struct kvio_ring_batch *batch,
			 const struct kvio_block_io *block)
{
	struct kvio_segment *segment = segment_at(ring->store, block->segment);
	int64_t final_ns = atomic_load(&segment->final_ns);

	if (ring->store->params.verify || !(block->flags & KVIO_BLOCK_DURABLE))
		return PROOF_CRC;
	if (segment->own)
		return PROOF_MEMORY;
	return final_ns && batch->found_ns > final_ns ? PROOF_FINAL : PROOF_HEADER;
}
