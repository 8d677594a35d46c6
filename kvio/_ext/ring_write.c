// SPDX-License-Identifier: Apache-2.0
/*
 * A write: invalidate -> payload -> header, each complete before the next begins, with an
 * fdatasync between the steps in a durable store. After a crash at any point a slot therefore
 * holds its old block, no block, or the whole new one. Header pages and fdatasyncs are shared
 * (ring_commit.c).
 */
#include "ring_internal.h"

static uint8_t *header_at(const struct kvio_segment *segment, uint32_t slot)
{
	return segment->headers + (size_t)slot * KVIO_HEADER_BYTES;
}

static void clear_headers(struct run *run, bool suspect)
{
	for (uint32_t i = run->first; i < run->first + run->count; i++) {
		struct kvio_block_io *block = &run->batch->blocks[i];

		memset(header_at(run->segment, block->slot), 0, KVIO_HEADER_BYTES);
		if (suspect)
			block->flags |= KVIO_BLOCK_SUSPECT;
	}
}

static struct commit *page_of(const struct run *run)
{
	uint32_t slot = run->batch->blocks[run->first].slot;

	return &run->segment->pages[slot / KVIO_HEADERS_PER_PAGE];
}

/* What readers in this process compare with; see struct kvio_segment. */
static void set_generations(struct run *run, bool valid)
{
	for (uint32_t i = run->first; i < run->first + run->count; i++) {
		struct kvio_block_io *block = &run->batch->blocks[i];

		atomic_store(&run->segment->generations[block->slot],
			     valid ? block->generation : 0);
	}
}

static void write_payload(struct kvio_ring *ring, struct run *run)
{
	uint64_t nbytes = ring->store->params.block_nbytes;

	/* The device works on the runs before this one while its CRC is computed. */
	if (ring->backend->flush)
		ring->backend->flush(ring);
	for (uint32_t i = run->first; i < run->first + run->count; i++) {
		struct kvio_block_io *block = &run->batch->blocks[i];

		block->crc = kvio_crc32c(0, (const void *)(uintptr_t)block->addr, nbytes);
	}
	run_payload(ring, run, IO_WRITE);
}

static void write_headers(struct kvio_ring *ring, struct run *run)
{
	for (uint32_t i = run->first; i < run->first + run->count; i++) {
		struct kvio_block_io *block = &run->batch->blocks[i];

		block->generation = ++run->segment->generation;
		if (ring->store->params.durable)
			block->flags |= KVIO_BLOCK_DURABLE;
		kvio_header_encode(header_at(run->segment, block->slot), block,
				   run->segment->uuid, ring->store->params.block_nbytes);
	}
	commit_join(ring, run, page_of(run), STEP_HEADER);
}

static void write_failed(struct kvio_ring *ring, struct run *run)
{
	if (run->step == STEP_PAYLOAD && run_split(ring, run))
		return;
	if (run->step != STEP_PAYLOAD && run->step != STEP_PAYLOAD_SYNC)
		clear_headers(run, true);
	run_finished(ring, run);
}

/* The step that `run` was in has ended; every arrow of the diagram above is one case. */
void write_advance(struct kvio_ring *ring, struct run *run)
{
	bool durable = ring->store->params.durable;
	bool was_valid = run->batch->blocks[run->first].flags & KVIO_BLOCK_INVALIDATE;

	if (run->error) {
		write_failed(ring, run);
		return;
	}
	switch (run->step) {
	case STEP_NEW:
		set_generations(run, false);
		if (was_valid) {
			clear_headers(run, false);
			commit_join(ring, run, page_of(run), STEP_INVALIDATE);
			return;
		}
		write_payload(ring, run);
		return;
	case STEP_INVALIDATE:
		if (durable)
			commit_join(ring, run, &run->segment->sync, STEP_INVALIDATE_SYNC);
		else
			write_payload(ring, run);
		return;
	case STEP_INVALIDATE_SYNC:
		write_payload(ring, run);
		return;
	case STEP_PAYLOAD:
		if (durable)
			commit_join(ring, run, &run->segment->sync, STEP_PAYLOAD_SYNC);
		else
			write_headers(ring, run);
		return;
	case STEP_PAYLOAD_SYNC:
		write_headers(ring, run);
		return;
	case STEP_HEADER:
		if (durable) {
			commit_join(ring, run, &run->segment->sync, STEP_HEADER_SYNC);
			return;
		}
		/* fall through */
	default:
		set_generations(run, true);
		run_finished(ring, run);
	}
}
