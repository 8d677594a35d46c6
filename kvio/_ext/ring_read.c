// SPDX-License-Identifier: Apache-2.0
/*
 * A read: the payload, then the proof that it is the block that was asked for. verify=always
 * compares the payload's CRC with that of the header; verify=never reads the header again after
 * the payload, since a slot may have been given to another block meanwhile. Blocks that were not
 * written durably are compared in any case: a power cut can leave their header without them.
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

static void read_header_page(struct kvio_ring *ring, struct run *run)
{
	uint32_t page = run->batch->blocks[run->first].slot / KVIO_HEADERS_PER_PAGE;
	struct io *io = io_new(ring);

	if (!run->page)
		run->page = page_get(ring);
	if (!io || !run->page) {
		free(io);
		run->error = -ENOMEM;
		run_finished(ring, run);
		return;
	}
	run->step = STEP_CHECK;
	run->pending = 1;
	io->run = run;
	io->op = IO_READ;
	io->segment = run->segment;
	io->buffer = -1;
	io->addr = run->page;
	io->offset = (uint64_t)(KVIO_FIRST_HEADER_PAGE + page) * KVIO_PAGE;
	io->nbytes = KVIO_PAGE;
	io_start(ring, io);
}

/* A damaged header is read once more (its page may have been in the middle of a write). */
static void check_headers(struct kvio_ring *ring, struct run *run)
{
	uint64_t nbytes = ring->store->params.block_nbytes;
	struct kvio_block_io *blocks = run->batch->blocks;
	struct kvio_block_io found;

	for (uint32_t i = run->first; i < run->first + run->count; i++) {
		const uint8_t *header = run->page + blocks[i].slot % KVIO_HEADERS_PER_PAGE *
				       KVIO_HEADER_BYTES;
		int rc = kvio_header_decode(header, run->segment->uuid, blocks[i].slot, nbytes,
					    &found);

		if (rc < 0 && run->rereads++ == 0) {
			read_header_page(ring, run);
			return;
		}
		if (rc < 0)
			blocks[i].status = -EBADMSG;
		else if (rc == 0 || found.generation != blocks[i].generation ||
			 memcmp(found.key, blocks[i].key, 16))
			blocks[i].status = -ENOENT;
	}
	page_put(ring, run->page);
	run->page = NULL;
	run_finished(ring, run);
}

void read_advance(struct kvio_ring *ring, struct run *run)
{
	if (run->step == STEP_NEW) {
		run_payload(ring, run, IO_READ);
	} else if (run->error) {
		page_put(ring, run->page);
		run->page = NULL;
		if (run_split(ring, run))
			return;
		if (run->error == -ENODATA)	/* the file ends before the payload does */
			run->error = -EBADMSG;
		run_finished(ring, run);
	} else if (run->step == STEP_CHECK) {
		check_headers(ring, run);
	} else if (ring->store->params.verify ||
		   !(run->batch->blocks[run->first].flags & KVIO_BLOCK_DURABLE)) {
		check_payload(ring, run);
	} else {
		read_header_page(ring, run);
	}
}
