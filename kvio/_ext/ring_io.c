// SPDX-License-Identifier: Apache-2.0
/*
 * One device operation from start to end: short results are continued, EINTR and EAGAIN are
 * tried again, faults that a test has ordered are injected here, below everything they test.
 */
#include "ring_internal.h"

#define MAX_STALLS 1000

static struct io *list_pop(struct io_list *list)
{
	struct io *io = list->head;

	if (io) {
		list->head = io->next;
		if (!list->head)
			list->tail = NULL;
	}
	return io;
}

static void list_push(struct io_list *list, struct io *io)
{
	io->next = NULL;
	if (list->tail)
		list->tail->next = io;
	else
		list->head = io;
	list->tail = io;
}

struct io *io_new(struct kvio_ring *ring)
{
	struct io *io = ring->spare_ios;

	if (io)
		ring->spare_ios = io->next;
	else
		io = malloc(sizeof(*io));
	if (io)
		memset(io, 0, sizeof(*io));
	return io;
}

/* A page for one header page on its way to or from the disk. */
void *page_get(struct kvio_ring *ring)
{
	void *page = ring->spare_pages;

	if (!page)
		return aligned_alloc(KVIO_PAGE, KVIO_PAGE);
	memcpy(&ring->spare_pages, page, sizeof(void *));
	return page;
}

void page_put(struct kvio_ring *ring, void *page)
{
	if (page) {
		memcpy(page, &ring->spare_pages, sizeof(void *));
		ring->spare_pages = page;
	}
}

void io_free_spares(struct kvio_ring *ring)
{
	while (ring->spare_ios) {
		struct io *io = ring->spare_ios;

		ring->spare_ios = io->next;
		free(io);
	}
	while (ring->spare_pages)
		free(page_get(ring));
	while (ring->spare_runs) {
		struct run *run = ring->spare_runs;

		ring->spare_runs = run->next;
		free(run);
	}
}

/* The result that a test has ordered for this operation, or 0. */
int fault_take(struct kvio_ring *ring, uint32_t op, uint64_t offset, uint64_t nbytes)
{
	int result = 0;

	if (!atomic_load_explicit(&ring->has_faults, memory_order_relaxed))
		return 0;
	pthread_mutex_lock(&ring->lock);
	for (int i = 0; i < MAX_FAULTS && result == 0; i++) {
		struct kvio_fault *fault = &ring->faults[i];

		if (!fault->count || !(fault->op_mask & op) ||
		    offset + nbytes <= fault->from_offset || offset >= fault->to_offset)
			continue;
		if (fault->skip) {
			fault->skip--;
			continue;
		}
		fault->count--;
		result = fault->result;
	}
	pthread_mutex_unlock(&ring->lock);
	return result;
}

void io_start(struct kvio_ring *ring, struct io *io)
{
	list_push(&ring->ready, io);
}

static void io_submit(struct kvio_ring *ring, struct io *io)
{
	int fault = fault_take(ring, io->op, io->offset + io->done,
			       io->op == IO_SYNC ? 1 : io->nbytes - io->done);

	ring->in_flight++;
	io->limit = io->nbytes - io->done;
	if (fault < 0) {
		io->res = fault;
		list_push(&ring->injected, io);
		return;
	}
	if (fault > 0 && (uint32_t)fault < io->limit)
		io->limit = (uint32_t)fault;
	ring->backend->start(ring, io);
}

/* Hands operations to the device up to the queue depth. */
void io_pump(struct kvio_ring *ring)
{
	struct io *io;

	while (ring->ready.head || ring->injected.head) {
		while ((io = list_pop(&ring->injected)))
			io_complete(ring, io, io->res);
		while (ring->ready.head && ring->in_flight < ring->params.queue_depth)
			io_submit(ring, list_pop(&ring->ready));
		if (!ring->injected.head)
			break;
	}
}

static void io_finish(struct kvio_ring *ring, struct io *io, int res)
{
	struct run *run = io->run;

	if (io->commit) {
		commit_done(ring, io, res);
	} else {
		if (res < 0 && run->error == 0)
			run->error = res;
		if (--run->pending == 0) {
			if (run->direction == READ)
				read_advance(ring, run);
			else
				write_advance(ring, run);
		}
	}
	io->next = ring->spare_ios;
	ring->spare_ios = io;
}

/* 0: finished well; 1: go on; < 0: failed. */
static int io_progress(struct io *io, int res)
{
	uint32_t moved;

	if (res == -EINTR)
		return 1;
	if (res == -EAGAIN)
		return ++io->stalls < MAX_STALLS ? 1 : res;
	if (res < 0 || io->op == IO_SYNC)
		return res;
	/* O_DIRECT wants aligned offsets: what is beyond the last whole page is moved again. */
	moved = (uint32_t)res >= io->nbytes - io->done ? (uint32_t)res
						       : (uint32_t)res / KVIO_PAGE * KVIO_PAGE;
	io->done += moved;
	if (io->done >= io->nbytes)
		return 0;
	if (moved)
		io->stalls = 0;
	else if (res == 0 || ++io->stalls == 8)		/* the end of the file */
		return io->op == IO_READ ? -ENODATA : -EIO;
	return 1;
}

void io_complete(struct kvio_ring *ring, struct io *io, int res)
{
	int rc = io_progress(io, res);

	ring->in_flight--;
	stats_add(&ring->stats.ios, 1);
	if (rc == 1) {
		stats_add(res < 0 ? &ring->stats.retries : &ring->stats.short_ios, 1);
		io_start(ring, io);
		return;
	}
	io_finish(ring, io, rc);
}
