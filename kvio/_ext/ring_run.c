// SPDX-License-Identifier: Apache-2.0
/*
 * Runs: planned from a batch, started in order of submission as the queue depth and the paced
 * link allow, reported no earlier than the link says.
 *
 * Pacing is arithmetic on virtual link time: start = max(link free, submitted), free = start +
 * nbytes / rate. A late wake-up therefore delays one report and loses no bandwidth.
 */
#include "ring_internal.h"

#define MAX_IO_FACTOR 4u

void run_list_push(struct run_list *list, struct run *run)
{
	run->next = NULL;
	if (list->tail)
		list->tail->next = run;
	else
		list->head = run;
	list->tail = run;
}

struct run *run_list_pop(struct run_list *list)
{
	struct run *run = list->head;

	if (run) {
		list->head = run->next;
		if (!list->head)
			list->tail = NULL;
	}
	return run;
}

/* ---- planning ---- */

static int slice_of(const struct region *region, uint64_t addr)
{
	return region && region->count
		? region->first + (int)((addr - region->addr) / region->slice_bytes) : -1;
}

/* A run of writes, or of reads that look at a header page again, stays within one such page. */
static bool extends(const struct kvio_ring *ring, const struct run *run,
		    const struct kvio_block_io *last, const struct kvio_block_io *next,
		    const struct region *region)
{
	uint64_t stride = ring->store->params.slot_stride;
	bool one_page = run->direction == WRITE || run->proof == PROOF_HEADER;

	return next->segment == last->segment && next->slot == last->slot + 1 &&
	       next->addr == last->addr + stride && next->flags == last->flags &&
	       (run->count + 1) * stride <= ring->params.io_bytes &&
	       slice_of(region, next->addr) == run->buffer &&
	       !(one_page && next->slot % KVIO_HEADERS_PER_PAGE == 0);
}

static void run_report(struct kvio_ring *ring, struct run *run);

static struct run *run_new(struct kvio_ring *ring, struct kvio_ring_batch *batch, uint32_t first)
{
	const struct kvio_block_io *block = &batch->blocks[first];
	struct run *run = ring->spare_runs;

	if (run)
		ring->spare_runs = run->next;
	else
		run = malloc(sizeof(*run));
	if (run)
		*run = (struct run){
			.batch = batch, .segment = segment_at(ring->store, block->segment),
			.first = first, .count = 1, .direction = batch->write ? WRITE : READ,
			.proof = batch->write ? 0 : segment_proof(ring, batch, block),
		};
	return run;
}

static void run_free(struct kvio_ring *ring, struct run *run)
{
	run->next = ring->spare_runs;
	ring->spare_runs = run;
}

uint64_t run_nbytes(const struct kvio_ring *ring, const struct run *run)
{
	return run->count * ring->store->params.slot_stride;
}

/* A run of this batch waits for a commit, or has finished: those that wait may wait no more. */
void batch_less(struct kvio_ring *ring, struct kvio_ring_batch *batch)
{
	if (--batch->moving == 0 && ring->gated)
		ring->gates_due = true;
}

static void batch_ends(struct kvio_ring *ring, struct kvio_ring_batch *batch)
{
	__atomic_fetch_add(&ring->stats.batches_completed, 1, __ATOMIC_RELAXED);
	atomic_fetch_sub(&ring->batches_in_flight, 1);
	batch_complete(batch);
}

static void unqueue(struct kvio_ring *ring, const struct kvio_ring_batch *batch, uint32_t first,
		    uint32_t count)
{
	struct kvio_segment *segment = segment_at(ring->store, batch->blocks[first].segment);
	uint64_t tokens = 0;

	atomic_fetch_sub(&segment->holds, count);
	if (batch->write)
		return;
	for (uint32_t i = first; i < first + count; i++)
		tokens += batch->blocks[i].tokens;
	atomic_fetch_sub(&ring->queued_bytes, count * ring->store->params.block_nbytes);
	atomic_fetch_sub(&ring->queued_tokens, tokens);
}

void runs_plan(struct kvio_ring *ring, struct kvio_ring_batch *batch)
{
	int index = slices_for(ring, batch);
	const struct region *region = index < 0 ? NULL : &ring->regions[index];
	uint64_t *backlog = &ring->backlog[batch->write ? WRITE : READ];
	struct run *run = NULL;
	uint32_t last = 0;

	for (uint32_t i = 0; i < batch->count; i++) {
		struct kvio_block_io *block = &batch->blocks[i];

		if (block->status != -EINPROGRESS)
			continue;
		if (run && last + 1 == i &&
		    extends(ring, run, &batch->blocks[last], block, region)) {
			run->count++;
			*backlog += ring->store->params.slot_stride;
		} else if ((run = run_new(ring, batch, i))) {
			run->buffer = (int16_t)slice_of(region, block->addr);
			run_list_push(&ring->queue[run->direction], run);
			*backlog += ring->store->params.slot_stride;
			batch->moving++;
		} else {
			block->status = batch->status[i] = -ENOMEM;
			unqueue(ring, batch, i, 1);
			batch->remaining--;
		}
		last = i;
	}
	if (batch->remaining == 0)
		batch_ends(ring, batch);
}

/* ---- starting ---- */

static void run_begin(struct kvio_ring *ring, struct run *run)
{
	ring->backlog[run->direction] -= run_nbytes(ring, run);
	ring->active++;
	if (ring->active_by[run->direction]++ == 0)
		ring->active_since_ns[run->direction] = now_ns();
	if (run->direction == READ)
		read_advance(ring, run);
	else
		write_advance(ring, run);
}

/* Gives the head of a queue its time on the link; false, and when, if that has not come. */
static bool link_grants(struct kvio_ring *ring, struct run *run, int64_t *due)
{
	uint64_t rate = run->direction == READ ? ring->params.read_bytes_per_s
					       : ring->params.write_bytes_per_s;
	int64_t *free_ns = &ring->link_free_ns[run->direction];
	int64_t start = run->batch->submitted_ns;
	uint64_t nbytes = run->count * ring->store->params.block_nbytes;

	if (rate == 0)
		return true;
	if (*free_ns > start)
		start = *free_ns;
	if (start > now_ns()) {
		if (*due < 0 || start < *due)
			*due = start;
		return false;
	}
	run->busy_ns = (int64_t)((unsigned __int128)nbytes * 1000000000u / rate);
	run->start_ns = start;
	run->end_ns = *free_ns = start + run->busy_ns;
	return true;
}

static bool device_has_room(const struct kvio_ring *ring)
{
	return !ring->ready.head && ring->in_flight < ring->params.queue_depth;
}

/* Until no gate opens any more: an operation that fails at once can open the next. */
static void commits_launch_due(struct kvio_ring *ring)
{
	do {
		if (ring->gates_due)
			commits_launch(ring);
		io_pump(ring);
	} while (ring->gates_due);
}

/* Starts what may start; returns when the next run may, or -1. */
int64_t runs_launch(struct kvio_ring *ring)
{
	int64_t due = -1;
	bool more = !atomic_load(&ring->paused);

	commits_launch_due(ring);
	while (more && device_has_room(ring)) {
		more = false;
		due = -1;
		if (ring->restart.head) {
			struct run *run = run_list_pop(&ring->restart);

			run->direction == READ ? read_advance(ring, run)
					       : write_advance(ring, run);
			more = true;
		}
		for (int i = 0; i < DIRECTIONS; i++) {
			struct run *run = ring->queue[i].head;

			if (run && link_grants(ring, run, &due)) {
				run_begin(ring, run_list_pop(&ring->queue[i]));
				more = true;
			}
		}
		commits_launch_due(ring);
	}
	return due;
}

/*
 * How large one device operation is. io_bytes, so that a large block travels in parallel; more
 * where the queue is full of such anyway, since an operation costs CPU; less where the kernel
 * copies and there is nothing else for its workers to do.
 */
static uint64_t piece_nbytes(const struct kvio_ring *ring, const struct run *run)
{
	uint64_t io_bytes = ring->params.io_bytes, nbytes = run_nbytes(ring, run), piece;

	if (!run->segment->buffered) {
		piece = (ring->backlog[run->direction] + nbytes) / ring->params.queue_depth;
		if (piece > MAX_IO_FACTOR * io_bytes)
			piece = MAX_IO_FACTOR * io_bytes;
		return piece > io_bytes ? piece / KVIO_PAGE * KVIO_PAGE : io_bytes;
	}
	if (run->direction == WRITE || has_backlog(ring) || ring->in_flight >= ring->num_cpus)
		return io_bytes;
	piece = (nbytes / ring->num_cpus + KVIO_PAGE - 1) / KVIO_PAGE * KVIO_PAGE;
	if (piece < MIN_ASYNC_BYTES)
		piece = MIN_ASYNC_BYTES;
	return piece < io_bytes ? piece : io_bytes;
}

/* Payload of all blocks of the run. */
void run_payload(struct kvio_ring *ring, struct run *run, uint8_t op)
{
	const struct kvio_block_io *block = &run->batch->blocks[run->first];
	uint64_t left = run_nbytes(ring, run), piece = piece_nbytes(ring, run), at = 0;
	bool alone = !has_backlog(ring) && ring->in_flight == 0;

	run->step = STEP_PAYLOAD;
	run->pending = 0;
	while (left) {
		struct io *io = io_new(ring);

		if (!io) {
			run->error = -ENOMEM;
			break;
		}
		io->run = run;
		io->op = op;
		io->segment = run->segment;
		io->buffer = run->buffer;
		io->addr = (uint8_t *)(uintptr_t)block->addr + at;
		io->offset = slot_offset(ring->store, block->slot) + at;
		io->nbytes = (uint32_t)(left < piece ? left : piece);
		/* Of a copy that is alone the last piece is made here, while workers wake up. */
		io->here = alone && at && left <= piece;
		at += io->nbytes;
		left -= io->nbytes;
		run->pending++;
		io_start(ring, io);
	}
	if (run->pending == 0)
		run_finished(ring, run);
}

/* A merged run failed: each of its blocks is tried alone, so that only the bad one fails. */
bool run_split(struct kvio_ring *ring, struct run *run)
{
	struct run_list singles = { NULL, NULL };

	if (run->count == 1)
		return false;
	for (uint32_t i = 0; i < run->count; i++) {
		struct run *single = run_new(ring, run->batch, run->first + i);

		if (!single) {
			while ((single = run_list_pop(&singles)))
				run_free(ring, single);
			return false;
		}
		single->buffer = run->buffer;
		single->start_ns = run->start_ns;
		single->end_ns = run->end_ns;
		single->busy_ns = i == 0 ? run->busy_ns : 0;
		run_list_push(&singles, single);
	}
	ring->active += run->count - 1;
	ring->active_by[run->direction] += run->count - 1;
	run->batch->moving += run->count - 1;
	while (singles.head)
		run_list_push(&ring->restart, run_list_pop(&singles));
	stats_add(&ring->stats.retries, 1);
	run_free(ring, run);
	return true;
}

/* ---- ending ---- */

static void run_report(struct kvio_ring *ring, struct run *run)
{
	struct kvio_ring_batch *batch = run->batch;

	stats_run(ring, run, run->end_ns ? now_ns() : ring->clock_ns);
	for (uint32_t i = run->first; i < run->first + run->count; i++)
		__atomic_store_n(&batch->status[i], batch->blocks[i].status, __ATOMIC_RELAXED);
	unqueue(ring, batch, run->first, run->count);
	batch->remaining -= run->count;
	run_free(ring, run);
	if (batch->remaining == 0)
		batch_ends(ring, batch);
}

static void run_hold(struct kvio_ring *ring, struct run *run)
{
	struct run_list *held = &ring->held;
	struct run **at = &held->head;

	if (held->tail && held->tail->end_ns <= run->end_ns) {
		run_list_push(held, run);
		return;
	}
	while (*at && (*at)->end_ns <= run->end_ns)
		at = &(*at)->next;
	run->next = *at;
	*at = run;
	if (!run->next)
		held->tail = run;
}

/* The device is done with this run. Blocks that no step gave a status get the run's. */
void run_finished(struct kvio_ring *ring, struct run *run)
{
	struct kvio_block_io *blocks = run->batch->blocks;

	for (uint32_t i = run->first; i < run->first + run->count; i++)
		if (blocks[i].status == -EINPROGRESS)
			blocks[i].status = run->error;
	ring->active--;
	run->step = STEP_DONE;
	batch_less(ring, run->batch);
	if (run->end_ns && run->end_ns > now_ns() && !atomic_load(&run->batch->cancelled))
		run_hold(ring, run);
	else
		run_report(ring, run);
}

/* Reports what the link has carried by now; returns when the next is due, or -1. */
int64_t runs_release(struct kvio_ring *ring)
{
	while (ring->held.head && ring->held.head->end_ns <= now_ns())
		run_report(ring, run_list_pop(&ring->held));
	return ring->held.head ? ring->held.head->end_ns : -1;
}

/* What the device has done and only the emulated link still carries is reported at once. */
static void held_cancel(struct kvio_ring *ring, bool all)
{
	struct run_list held = ring->held;
	struct run *run;

	ring->held = (struct run_list){ NULL, NULL };
	while ((run = run_list_pop(&held))) {
		if (all || atomic_load(&run->batch->cancelled))
			run_report(ring, run);
		else
			run_list_push(&ring->held, run);
	}
}

/* Takes back what has not started of the batches that were cancelled, or of all. */
void runs_cancel(struct kvio_ring *ring, bool all)
{
	held_cancel(ring, all);
	for (int d = 0; d < DIRECTIONS; d++) {
		struct run_list queue = ring->queue[d];
		struct run *run;

		ring->queue[d] = (struct run_list){ NULL, NULL };
		while ((run = run_list_pop(&queue))) {
			if (!all && !atomic_load(&run->batch->cancelled)) {
				run_list_push(&ring->queue[d], run);
				continue;
			}
			for (uint32_t i = run->first; i < run->first + run->count; i++)
				run->batch->blocks[i].status = -ECANCELED;
			ring->backlog[d] -= run_nbytes(ring, run);
			batch_less(ring, run->batch);
			run_report(ring, run);
		}
	}
}

bool runs_idle(const struct kvio_ring *ring)
{
	return !ring->queue[READ].head && !ring->queue[WRITE].head && !ring->held.head &&
	       ring->active == 0 && ring->in_flight == 0;
}
