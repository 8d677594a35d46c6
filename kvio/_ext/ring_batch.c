// SPDX-License-Identifier: Apache-2.0
/* A batch: what its submitter holds and what the ring completes. Each side has a reference. */
#include <limits.h>
#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ring_internal.h"

void kvio_ring_batch_put(struct kvio_ring_batch *batch)
{
	if (!batch || atomic_fetch_sub(&batch->refs, 1) != 1)
		return;
	if (batch->event_fd >= 0)
		close(batch->event_fd);
	pthread_mutex_destroy(&batch->lock);
	free(batch->status);
	free(batch->blocks);
	free(batch);
}

static struct kvio_ring_batch *batch_new(const struct kvio_ring_batch_params *params)
{
	struct kvio_ring_batch *batch = calloc(1, sizeof(*batch));
	size_t count = params->count ? params->count : 1;

	if (!batch)
		return NULL;
	batch->status = malloc(count * sizeof(*batch->status));
	batch->blocks = malloc(count * sizeof(*batch->blocks));
	if (!batch->status || !batch->blocks) {
		free(batch->status);
		free(batch->blocks);
		free(batch);
		return NULL;
	}
	memcpy(batch->blocks, params->blocks, params->count * sizeof(*batch->blocks));
	atomic_init(&batch->refs, 2);
	batch->event_fd = -1;
	batch->write = params->write;
	batch->count = params->count;
	batch->region = params->region;
	batch->found_ns = params->found_ns;
	batch->region_addr = params->region_addr;
	batch->region_nbytes = params->region_nbytes;
	pthread_mutex_init(&batch->lock, NULL);
	return batch;
}

/* A wrong address would be a wild write: every block must lie in the region and in a segment. */
static int block_check(const struct kvio_ring *ring, const struct kvio_ring_batch *batch,
		       const struct kvio_block_io *block)
{
	const struct kvio_store *store = ring->store;
	uint64_t stride = store->params.slot_stride;
	uint64_t into = block->addr - batch->region_addr;

	if (block->segment >= atomic_load(&store->num_segments) ||
	    block->slot >= store->params.slots)
		return -EINVAL;
	if (batch->write && !segment_at(store, block->segment)->own)
		return -EPERM;
	if (block->addr < batch->region_addr || into > batch->region_nbytes ||
	    batch->region_nbytes - into < stride || block->addr % KVIO_PAGE)
		return -EFAULT;
	return 0;
}

/* The batch was refused: lets go of the segments of its first `count` blocks. */
static void batch_release(const struct kvio_ring *ring, struct kvio_ring_batch *batch,
			  uint32_t count)
{
	while (count--)
		if (batch->blocks[count].status == -EINPROGRESS)
			segment_release(segment_at(ring->store, batch->blocks[count].segment));
}

/* Each block holds its segment from here until it has its status. */
static int batch_check(const struct kvio_ring *ring, struct kvio_ring_batch *batch)
{
	for (uint32_t i = 0; i < batch->count; i++) {
		struct kvio_block_io *block = &batch->blocks[i];
		int rc;

		batch->status[i] = block->status;
		if (block->status != -EINPROGRESS)
			continue;
		rc = block_check(ring, batch, block);
		if (rc < 0) {
			batch_release(ring, batch, i);
			return rc;
		}
		if (!segment_hold(segment_at(ring->store, block->segment))) {
			batch->status[i] = block->status = batch->write ? -ESTALE : -ENOENT;
			continue;
		}
		batch->remaining++;
		batch->tokens += block->tokens;
	}
	batch->nbytes = (uint64_t)batch->remaining * ring->store->params.block_nbytes;
	return 0;
}

int kvio_ring_batch_submit(struct kvio_ring_batch **out, struct kvio_ring *ring,
		      const struct kvio_ring_batch_params *params)
{
	struct kvio_ring_batch *batch = batch_new(params);
	bool nothing;	/* to do; the ring owns batch->remaining once it has the batch */
	int rc;

	if (!batch)
		return -ENOMEM;
	rc = batch_check(ring, batch);
	nothing = batch->remaining == 0 && batch->count;
	if (rc == 0) {
		pthread_mutex_lock(&ring->lock);
		rc = ring->stop ? -ESHUTDOWN : 0;
		batch->submitted_ns = now_ns();
		if (rc == 0 && nothing) {
			stats_add(&ring->stats.batches_submitted, 1);	/* under the lock */
			__atomic_fetch_add(&ring->stats.batches_completed, 1, __ATOMIC_RELAXED);
		} else if (rc == 0) {
			stats_add(&ring->stats.batches_submitted, 1);
			atomic_fetch_add(&ring->batches_in_flight, 1);
			if (!batch->write) {
				atomic_fetch_add(&ring->queued_bytes, batch->nbytes);
				atomic_fetch_add(&ring->queued_tokens, batch->tokens);
			}
			*ring->inbox_tail = batch;
			ring->inbox_tail = &batch->next;
		}
		pthread_mutex_unlock(&ring->lock);
		if (rc < 0)
			batch_release(ring, batch, batch->count);
	}
	if (rc < 0) {
		atomic_store(&batch->refs, 1);
		kvio_ring_batch_put(batch);
		return rc;
	}
	*out = batch;
	if (nothing)
		batch_complete(batch);
	else
		ring->backend->wake(ring);
	return 0;
}

/* Called by the ring once every element has its status and no device touches its memory. */
void batch_complete(struct kvio_ring_batch *batch)
{
	pthread_mutex_lock(&batch->lock);
	batch->completed_ns = now_ns();
	atomic_store(&batch->done, 1);
	if (batch->event_fd >= 0)
		eventfd_write(batch->event_fd, 1);
	pthread_mutex_unlock(&batch->lock);
	syscall(SYS_futex, &batch->done, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
	kvio_ring_batch_put(batch);
}

int kvio_ring_batch_done(struct kvio_ring_batch *batch)
{
	return (int)atomic_load(&batch->done);
}

int kvio_ring_batch_wait(struct kvio_ring_batch *batch, int64_t timeout_ns)
{
	int64_t end = timeout_ns < 0 ? 0 : now_ns() + timeout_ns;
	struct timespec at = { end / 1000000000, end % 1000000000 };
	long rc = 0;

	while (!atomic_load(&batch->done) && (rc == 0 || errno == EAGAIN))
		rc = syscall(SYS_futex, &batch->done, FUTEX_WAIT_BITSET_PRIVATE, 0,
			     timeout_ns < 0 ? NULL : &at, NULL, FUTEX_BITSET_MATCH_ANY);
	return (int)atomic_load(&batch->done);
}

int kvio_ring_batch_fd(struct kvio_ring_batch *batch)
{
	int fd;

	pthread_mutex_lock(&batch->lock);
	if (batch->event_fd < 0) {
		fd = eventfd(atomic_load(&batch->done), EFD_CLOEXEC | EFD_NONBLOCK);
		batch->event_fd = fd < 0 ? -1 : fd;
		fd = fd < 0 ? -errno : fd;
	} else {
		fd = batch->event_fd;
	}
	pthread_mutex_unlock(&batch->lock);
	return fd;
}

void kvio_ring_batch_cancel(struct kvio_ring_batch *batch, struct kvio_ring *ring)
{
	atomic_store(&batch->cancelled, true);
	pthread_mutex_lock(&ring->lock);
	ring->cancel = true;
	pthread_mutex_unlock(&ring->lock);
	ring->backend->wake(ring);
}

const int32_t *kvio_ring_batch_status(const struct kvio_ring_batch *batch)
{
	return batch->status;
}

const struct kvio_block_io *kvio_ring_batch_blocks(const struct kvio_ring_batch *batch)
{
	return batch->blocks;
}

void kvio_ring_batch_times(struct kvio_ring_batch *batch, uint64_t *nbytes, int64_t *submitted_ns,
		      int64_t *completed_ns)
{
	pthread_mutex_lock(&batch->lock);
	*nbytes = batch->nbytes;
	*submitted_ns = batch->submitted_ns;
	*completed_ns = batch->completed_ns;
	pthread_mutex_unlock(&batch->lock);
}
