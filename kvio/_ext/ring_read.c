// SPDX-License-Identifier: Apache-2.0
/*
 * A read: the payload, then the proof that it is the block that was asked for, since its slot may
 * have been given to another block meanwhile. verify=always compares the payload's CRC with that
 * of the header. verify=never looks at the header again after the payload: in memory where this
 * store writes the segment, not at all where nobody does any more, on the disk otherwise. Blocks
 * that were not written durably are compared by CRC in any case: a power cut can leave their
 * header without them.
 */
#include "ring_internal.h"

static void check_payload(struct kvio_ring *ring, struct run *run)
{
	uint64_t nbytes = ring->store->params.block_nbytes;

	for (uint32_t i = run->first; i < run->first + run->count; i++) {
		struct kvio_block_io *block = &run->batch->blocks[i];

		if (kvio_crc32c(0, (const void *)(uintptr_t)block->addr, nbytes) != block->crc)
			block->status = -EBADMSG;
	}
	run_finished(ring, run);
}

/* The payload has come; a slot's number is cleared before anything newer is written there. */
static void check_memory(struct kvio_ring *ring, struct run *run)
{
	for (uint32_t i = run->first; i < run->first + run->count; i++) {
		struct kvio_block_io *block = &run->batch->blocks[i];

		if (atomic_load(&run->segment->generations[block->slot]) != block->generation)
			block->status = -ENOENT;
	}
	stats_add(&ring->stats.memory_checks, run->count);
	run_finished(ring, run);
}

static void check_disk(struct kvio_ring *ring, struct run *run)
{
	uint32_t page = run->batch->blocks[run->first].slot / KVIO_HEADERS_PER_PAGE;
	struct commit *commit = commit_check(ring, run->segment, page);

	if (!commit) {
		run->error = -ENOMEM;
		run_finished(ring, run);
		return;
	}
	commit_join(ring, run, commit, STEP_CHECK);
}

/*
 * The header page has been read after the payload. A damaged header is read once more: its page
 * may have been in the middle of a write.
 */
void read_checked(struct kvio_ring *ring, struct run *run, const uint8_t *page)
{
	uint64_t nbytes = ring->store->params.block_nbytes;
	struct kvio_block_io *blocks = run->batch->blocks;
	struct kvio_block_io found;

	for (uint32_t i = run->first; i < run->first + run->count; i++) {
		const uint8_t *header = page + blocks[i].slot % KVIO_HEADERS_PER_PAGE *
				       KVIO_HEADER_BYTES;
		int rc = kvio_header_decode(header, run->segment->uuid, blocks[i].slot, nbytes,
					    &found);

		if (rc < 0 && run->rereads++ == 0) {
			check_disk(ring, run);
			return;
		}
		if (rc < 0)
			blocks[i].status = -EBADMSG;
		else if (rc == 0 || found.generation != blocks[i].generation ||
			 memcmp(found.key, blocks[i].key, 16))
			blocks[i].status = -ENOENT;
	}
	run_finished(ring, run);
}

/* The step that `run` was in has ended, but for a header page that came: read_checked(). */
void read_advance(struct kvio_ring *ring, struct run *run)
{
	if (run->step == STEP_NEW) {
		run_payload(ring, run, IO_READ);
	} else if (run->error) {
		if (run_split(ring, run))
			return;
		if (run->error == -ENODATA)	/* the file ends before the payload does */
			run->error = -EBADMSG;
		run_finished(ring, run);
	} else if (run->proof == PROOF_CRC) {
		check_payload(ring, run);
	} else if (run->proof == PROOF_MEMORY) {
		check_memory(ring, run);
	} else if (run->proof == PROOF_FINAL) {
		run_finished(ring, run);
	} else {
		check_disk(ring, run);
	}
}
