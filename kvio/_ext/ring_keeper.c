// SPDX-License-Identifier: Apache-2.0
/*
 * The open segments of a store, and the keeper: one thread that rewrites page 1 of the segments
 * this store writes. Page 1 only tells readers where to look; no write waits for it.
 *
 * Readers look at the newest segment alone until its `others` moves. So page 1 of the others is
 * written first and the newest one's after them, in the same round. `others` is the sum of the
 * others' heartbeats: it moves with each of their rewrites, also with those from when another
 * segment was the newest.
 */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ring_internal.h"

#define PAGE1_GAP_NS 20000000		/* at most 50 rewrites a second */
#define HEARTBEAT_NS 1000000000
#define EPOCH_NS 1000000000		/* an epoch lasts at least this long */

int monotonic_cond_init(pthread_cond_t *cond)
{
	pthread_condattr_t attr;
	int rc;

	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	rc = -pthread_cond_init(cond, &attr);
	pthread_condattr_destroy(&attr);
	return rc;
}

/* 0, or -ETIMEDOUT; deadline < 0: none. */
int monotonic_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t deadline_ns)
{
	struct timespec at = { deadline_ns / 1000000000, deadline_ns % 1000000000 };

	if (deadline_ns < 0)
		return -pthread_cond_wait(cond, lock);
	return -pthread_cond_timedwait(cond, lock, &at);
}

/* A header page has just been written: name it in page 1. */
void segment_page_changed(struct kvio_store *store, struct kvio_segment *segment, uint32_t page)
{
	struct kvio_page1 *page1 = &segment->page1;
	int64_t now = now_ns();

	pthread_mutex_lock(&segment->lock);
	if (now - segment->epoch_began_ns >= EPOCH_NS) {
		memcpy(page1->changed_before, page1->changed, KVIO_BITMAP_BYTES);
		memset(page1->changed, 0, KVIO_BITMAP_BYTES);
		page1->epoch++;
		segment->epoch_began_ns = now;
	}
	page1->changed[page / 8] |= (uint8_t)(1u << (page % 8));
	segment->dirty = true;
	pthread_mutex_unlock(&segment->lock);

	pthread_mutex_lock(&store->lock);
	if (!store->dirty) {
		store->dirty = true;
		pthread_cond_signal(&store->wake);
	}
	pthread_mutex_unlock(&store->lock);
}

enum why { IF_DIRTY, BEAT, CLOSING };

static void write_page1(struct kvio_store *store, struct kvio_segment *segment, enum why why,
			uint8_t *buffer)
{
	bool due, done;

	if (!segment_hold(segment))
		return;
	pthread_mutex_lock(&segment->lock);
	due = segment->dirty || why != IF_DIRTY;
	if (due) {
		if (why == CLOSING)
			segment->page1.heartbeat = KVIO_CLOSED;
		else
			segment->page1.heartbeat++;
		kvio_page1_encode(buffer, &segment->page1);
		segment->dirty = false;
	}
	pthread_mutex_unlock(&segment->lock);
	done = due && pwrite(segment->fd, buffer, KVIO_PAGE, KVIO_PAGE) == KVIO_PAGE;
	segment_release(segment);
	if (done)
		atomic_fetch_add(&store->page1_writes, 1);
	if (!due || done)
		return;
	pthread_mutex_lock(&segment->lock);	/* the next round, a heartbeat away, tries again */
	segment->dirty = true;
	pthread_mutex_unlock(&segment->lock);
}

/*
 * The closed mark goes to all segments, so that each of them tells for itself that it is final:
 * the newest one may be unlinked before the others are (it may even be empty).
 */
static void write_all(struct kvio_store *store, enum why why, uint8_t *buffer)
{
	uint32_t count = atomic_load(&store->num_segments);
	struct kvio_segment *newest = NULL;
	uint64_t others = 0;

	for (uint32_t i = 0; i < count; i++)
		if (segment_at(store, i)->own && !atomic_load(&segment_at(store, i)->retired))
			newest = segment_at(store, i);
	if (!newest)
		return;
	for (uint32_t i = 0; i < count; i++) {
		struct kvio_segment *segment = segment_at(store, i);

		if (!segment->own || segment == newest)
			continue;
		write_page1(store, segment, why == BEAT ? IF_DIRTY : why, buffer);
		others += segment->page1.heartbeat;	/* this thread's own */
	}
	pthread_mutex_lock(&newest->lock);
	newest->dirty |= others != newest->page1.others;
	newest->page1.others = others;
	pthread_mutex_unlock(&newest->lock);
	write_page1(store, newest, why, buffer);
}

static void *keeper_main(void *arg)
{
	struct kvio_store *store = arg;
	uint8_t *buffer = aligned_alloc(KVIO_PAGE, KVIO_PAGE);
	int64_t written = 0, beaten = now_ns();
	bool stop = buffer == NULL;

	while (!stop) {
		bool beat;

		pthread_mutex_lock(&store->lock);
		while (!store->stop) {
			int64_t due = beaten + HEARTBEAT_NS;

			if (store->dirty && written + PAGE1_GAP_NS < due)
				due = written + PAGE1_GAP_NS;
			if (due <= now_ns())
				break;
			monotonic_cond_wait(&store->wake, &store->lock, due);
		}
		stop = store->stop;
		store->dirty = false;
		pthread_mutex_unlock(&store->lock);
		written = now_ns();
		beat = written - beaten >= HEARTBEAT_NS;
		if (beat)
			beaten = written;
		write_all(store, stop ? CLOSING : beat ? BEAT : IF_DIRTY, buffer);
	}
	free(buffer);
	return NULL;
}

int kvio_store_new(struct kvio_store **out, const struct kvio_store_params *params)
{
	struct kvio_store *store = calloc(1, sizeof(*store));

	if (!store)
		return -ENOMEM;
	store->segments = calloc(MAX_SEGMENTS, sizeof(*store->segments));
	if (!store->segments) {
		free(store);
		return -ENOMEM;
	}
	store->params = *params;
	store->pid = getpid();
	pthread_mutex_init(&store->lock, NULL);
	pthread_mutex_init(&store->watch_lock, NULL);
	monotonic_cond_init(&store->wake);
	monotonic_cond_init(&store->rouse);
	*out = store;
	return 0;
}

static struct kvio_segment *segment_new(struct kvio_store *store,
					const struct kvio_segment_params *params)
{
	struct kvio_segment *segment = calloc(1, sizeof(*segment));
	uint32_t pages = store->params.header_pages;

	if (!segment)
		return NULL;
	segment->fd = params->fd;
	segment->own = params->own;
	memcpy(segment->uuid, params->uuid, KVIO_UUID_BYTES);
	if (segment->own) {
		segment->headers = aligned_alloc(KVIO_PAGE, (size_t)pages * KVIO_PAGE);
		segment->pages = calloc(pages, sizeof(*segment->pages));
		if (!segment->headers || !segment->pages) {
			free(segment->headers);
			free(segment->pages);
			free(segment);
			return NULL;
		}
		memset(segment->headers, 0, (size_t)pages * KVIO_PAGE);
		memcpy(segment->page1.uuid, params->uuid, KVIO_UUID_BYTES);
		segment->page1.header_pages = pages;
		segment->page1.epoch = 1;
		segment->epoch_began_ns = now_ns();
		segment->dirty = true;	/* readers that see it look for `others` there */
	}
	if (segment_prepare(store, segment) < 0) {
		free(segment->headers);
		free(segment->pages);
		free(segment);
		return NULL;
	}
	pthread_mutex_init(&segment->lock, NULL);
	return segment;
}

int kvio_store_add_segment(struct kvio_store *store, const struct kvio_segment_params *params)
{
	struct kvio_segment *segment = segment_new(store, params);
	uint32_t index;
	int rc = 0;

	if (!segment)
		return -ENOMEM;
	pthread_mutex_lock(&store->lock);
	index = atomic_load(&store->num_segments);
	if (index == MAX_SEGMENTS)
		rc = -EMFILE;
	else if (params->own && !store->running)
		rc = -pthread_create(&store->keeper, NULL, keeper_main, store);
	if (rc == 0) {
		store->running |= params->own != 0;
		segment->index = index;
		atomic_store_explicit(&store->segments[index], segment, memory_order_release);
		atomic_store(&store->num_segments, index + 1);
		if (params->own) {
			store->dirty = true;
			pthread_cond_signal(&store->wake);
		}
	}
	pthread_mutex_unlock(&store->lock);
	if (rc < 0) {
		segment_discard(segment);
		free(segment->headers);
		free(segment->pages);
		free(segment);
		return rc;
	}
	return (int)index;
}

int kvio_allocate(int fd, uint64_t offset, uint64_t nbytes)
{
	int rc;

	do
		rc = fallocate(fd, 0, (off_t)offset, (off_t)nbytes) < 0 ? -errno : 0;
	while (rc == -EINTR);
	return rc;
}

int kvio_store_sync_segment(struct kvio_store *store, uint32_t number)
{
	struct kvio_segment *segment;
	int rc;

	if (number >= atomic_load(&store->num_segments))
		return -EINVAL;
	segment = segment_at(store, number);
	if (!segment_hold(segment))
		return 0;
	rc = fsync(segment->fd) < 0 ? -errno : 0;
	segment_release(segment);
	return rc;
}

int kvio_store_retire(struct kvio_store *store, uint32_t number)
{
	if (number >= atomic_load(&store->num_segments))
		return -EINVAL;
	atomic_store(&segment_at(store, number)->retired, true);
	return 0;
}

int kvio_store_sweep(struct kvio_store *store)
{
	uint32_t count = atomic_load(&store->num_segments);
	int left = 0;

	pthread_mutex_lock(&store->watch_lock);
	for (uint32_t i = 0; i < count && !store->watch_ended; i++) {
		struct kvio_segment *segment = segment_at(store, i);

		if (!atomic_load(&segment->retired) || atomic_load(&segment->file_closed))
			continue;
		if (atomic_load(&segment->holds)) {
			left++;
			continue;
		}
		usrbio_fd_forget(segment->fd);
		close(segment->fd);
		segment->fd = -1;
		atomic_store(&segment->file_closed, true);
		atomic_fetch_add(&store->num_closed, 1);
	}
	pthread_mutex_unlock(&store->watch_lock);
	return left;
}

uint64_t kvio_store_page1_writes(const struct kvio_store *store)
{
	return atomic_load(&store->page1_writes);
}

void kvio_store_stop(struct kvio_store *store)
{
	bool running;

	if (store->pid != getpid())
		return;
	pthread_mutex_lock(&store->lock);
	running = store->running;
	store->running = false;
	store->stop = true;
	pthread_cond_signal(&store->wake);
	pthread_mutex_unlock(&store->lock);
	if (running)
		pthread_join(store->keeper, NULL);
	pthread_mutex_lock(&store->watch_lock);
	store->watch_ended = true;
	for (uint32_t i = 0; i < atomic_load(&store->num_segments); i++) {
		struct kvio_segment *segment = segment_at(store, i);

		/* No ring is left, but another thread may be in a sync. */
		atomic_store(&segment->retired, true);
		while (atomic_load(&segment->holds))
			usleep(1000);
		usrbio_fd_forget(segment->fd);
		if (segment->fd >= 0)
			close(segment->fd);
		segment->fd = -1;
	}
	pthread_mutex_unlock(&store->watch_lock);
}

void kvio_store_free(struct kvio_store *store)
{
	if (!store)
		return;
	kvio_store_stop(store);
	for (uint32_t i = 0; i < atomic_load(&store->num_segments); i++) {
		struct kvio_segment *segment = segment_at(store, i);

		segment_discard(segment);
		free(segment->headers);
		free(segment->pages);
		free(segment);
	}
	free(store->watch_pages);
	free(store->watch_blocks);
	free(store->segments);
	free(store);
}
