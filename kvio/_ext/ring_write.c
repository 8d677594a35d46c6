// SPDX-License-Identifier: Apache-2.0
/*
 * A write: invalidate -> payload -> header, each complete before the next begins, with an
 * fdatasync between the steps in a durable store. After a crash at any point a slot therefore
 * holds its old block, no block, or the whole new one.
 *
 * Header pages and fdatasyncs are commits: one at a time, and whatever arrives meanwhile shares
 * the next one. Two racing O_DIRECT writes of one page may land in either order, so at most one
 * is in flight per header page.
 */
#include "ring_internal.h"

static void commit_ends(struct kvio_ring *ring, struct kvio_segment *segment,
			struct commit *commit, int res);

static uint32_t page_number(const struct kvio_segment *segment, const struct commit *commit)
{
	return (uint32_t)(commit - segment->pages);
}

/* Sends the commit with everything that waits for it. */
static void commit_fly(struct kvio_ring *ring, struct kvio_segment *segment,
		       struct commit *commit)
{
	bool sync = commit == &segment->sync;
	struct io *io = io_new(ring);
	void *page = sync ? NULL : page_get(ring);

	commit->flying = commit->waiting;
	commit->waiting = NULL;
	commit->in_flight = true;
	if (!io || (!sync && !page)) {
		free(io);
		page_put(ring, page);
		commit_ends(ring, segment, commit, -ENOMEM);
		return;
	}
	io->commit = commit;
	io->segment = segment;
	io->buffer = -1;
	io->op = sync ? IO_SYNC : IO_WRITE;
	if (!sync) {
		uint64_t number = page_number(segment, commit);

		/* A copy: the image may change while the device reads the page. */
		memcpy(page, segment->headers + number * KVIO_PAGE, KVIO_PAGE);
		io->addr = page;
		io->nbytes = KVIO_PAGE;
		io->offset = (KVIO_FIRST_HEADER_PAGE + number) * KVIO_PAGE;
	}
	io_start(ring, io);
}

static void commit_join(struct kvio_ring *ring, struct run *run, struct commit *commit,
			enum step step)
{
	run->step = step;
	run->next = commit->waiting;
	commit->waiting = run;
	if (!commit->in_flight)
		commit_fly(ring, run->segment, commit);
}

/* Runs that failed take their headers out of the image before the page may be written again. */
static void commit_ends(struct kvio_ring *ring, struct kvio_segment *segment,
			struct commit *commit, int res)
{
	struct run *run = commit->flying, *next;

	commit->flying = NULL;
	for (; run; run = next) {
		next = run->next;
		run->error = res;
		write_advance(ring, run);
	}
	commit->in_flight = false;
	if (commit->waiting)
		commit_fly(ring, segment, commit);
}

void commit_done(struct kvio_ring *ring, struct io *io, int res)
{
	struct kvio_segment *segment = io->segment;

	if (io->op == IO_SYNC) {
		stats_add(ring, &ring->stats.syncs, 1);
	} else {
		page_put(ring, io->addr);
		stats_add(ring, &ring->stats.header_writes, 1);
		if (res == 0)
			segment_page_changed(ring->store, segment,
					     page_number(segment, io->commit));
	}
	commit_ends(ring, segment, io->commit, res);
}

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

static void write_payload(struct kvio_ring *ring, struct run *run)
{
	uint64_t nbytes = ring->store->params.block_nbytes;

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
		run_finished(ring, run);
	}
}
