// SPDX-License-Identifier: Apache-2.0
/* What a ring has done, and which memory it has registered. */
#include "ring_internal.h"

#define MAX_WINDOWS (1 << 20)

void stats_add(struct kvio_ring *ring, uint64_t *counter, uint64_t more)
{
	pthread_mutex_lock(&ring->lock);
	*counter += more;
	pthread_mutex_unlock(&ring->lock);
}

static void windows_add(struct windows *windows, uint64_t number, uint64_t nbytes)
{
	int64_t at;

	if (windows->count == 0)
		windows->first = number;
	at = (int64_t)(number - windows->first);
	if (at < 0)
		at = 0;
	if (at >= windows->room) {
		int64_t room = at < 256 ? 512 : 2 * at;
		uint64_t *bytes = room > MAX_WINDOWS ? NULL
			: realloc(windows->bytes, (size_t)room * sizeof(*bytes));

		if (!bytes)
			return;
		memset(bytes + windows->room, 0, (size_t)(room - windows->room) * sizeof(*bytes));
		windows->bytes = bytes;
		windows->room = room;
	}
	windows->bytes[at] += nbytes;
	if (at >= windows->count)
		windows->count = at + 1;
}

/* A run is about to be reported at when_ns (never before the link has carried it). */
void stats_run(struct kvio_ring *ring, struct run *run, int64_t when_ns)
{
	struct kvio_ring_stats *stats = &ring->stats;
	bool write = run->direction == WRITE, began = run->step == STEP_DONE;
	uint64_t nbytes = 0, *busy = write ? &stats->write_busy_ns : &stats->read_busy_ns;
	bool paced = write ? ring->params.write_bytes_per_s : ring->params.read_bytes_per_s;

	pthread_mutex_lock(&ring->lock);
	for (uint32_t i = run->first; i < run->first + run->count; i++) {
		int32_t status = run->batch->blocks[i].status;

		stats->checks_failed += status == -EBADMSG;
		stats->cancelled_blocks += status == -ECANCELED;
		stats->failed_blocks += status != 0;
		if (status != 0 && status != -EBADMSG)
			continue;
		nbytes += ring->store->params.block_nbytes;
		++*(write ? &stats->write_blocks : &stats->read_blocks);
	}
	*(write ? &stats->write_bytes : &stats->read_bytes) += nbytes;
	/* The link's time counts, however late we woke. */
	if (run->end_ns && run->end_ns < when_ns)
		when_ns = run->end_ns;
	if (nbytes)
		windows_add(&ring->windows[run->direction],
			    (uint64_t)when_ns / ring->params.window_ns, nbytes);
	*busy += (uint64_t)run->busy_ns;
	if (began && --ring->active_by[run->direction] == 0 && !paced)
		*busy += (uint64_t)(when_ns - ring->active_since_ns[run->direction]);
	pthread_mutex_unlock(&ring->lock);
}

void kvio_ring_get_stats(struct kvio_ring *ring, struct kvio_ring_stats *out)
{
	pthread_mutex_lock(&ring->lock);
	*out = ring->stats;
	pthread_mutex_unlock(&ring->lock);
}

int64_t kvio_ring_windows(struct kvio_ring *ring, int write, uint64_t *out, int64_t count,
			  uint64_t *first)
{
	struct windows *windows = &ring->windows[write ? WRITE : READ];
	int64_t there;

	pthread_mutex_lock(&ring->lock);
	there = windows->count;
	*first = windows->first;
	if (count > there)
		count = there;
	if (count > 0)
		memcpy(out, windows->bytes, (size_t)count * sizeof(*out));
	pthread_mutex_unlock(&ring->lock);
	return there;
}

/* ---- registered memory ---- */

/* The first of `count` free slots of the buffer table, or -ENOSPC. */
int slices_reserve(struct kvio_ring *ring, int count)
{
	int run = 0;

	for (int i = 0; i < MAX_SLICES; i++) {
		run = ring->slice_used[i] ? 0 : run + 1;
		if (run == count) {
			memset(ring->slice_used + i + 1 - count, 1, (size_t)count);
			return i + 1 - count;
		}
	}
	return -ENOSPC;
}

static int region_add(struct kvio_ring *ring, struct region *region)
{
	int rc = fault_take(ring, IO_REGISTER, 0, 1);

	if (rc == 0)
		rc = ring->backend->add_slices(ring, region);
	pthread_mutex_lock(&ring->lock);
	if (rc < 0)
		ring->stats.register_errno = (uint64_t)-rc;
	else
		ring->stats.registered_bytes += region->count ? region->nbytes : 0;
	pthread_mutex_unlock(&ring->lock);
	return rc;
}

/* The region of a batch, registered on its first use; -1: use plain buffers. */
int slices_for(struct kvio_ring *ring, const struct kvio_ring_batch *batch)
{
	uint64_t stride = ring->store->params.slot_stride;
	struct region *region;

	if (!batch->region || !ring->backend->add_slices)
		return -1;
	for (int i = 0; i < ring->num_regions; i++)
		if (ring->regions[i].id == batch->region)
			return i;
	if (ring->num_regions == MAX_REGIONS)
		return -1;
	region = &ring->regions[ring->num_regions];
	*region = (struct region){
		.id = batch->region, .addr = batch->region_addr, .nbytes = batch->region_nbytes,
		.slice_bytes = SLICE_BYTES / stride * stride,
	};
	if (region->slice_bytes == 0)
		return -1;
	if (region_add(ring, region) < 0)
		region->count = 0;
	return ring->num_regions++;
}

void slices_forget(struct kvio_ring *ring, uint64_t id)
{
	for (int i = 0; i < ring->num_regions; i++) {
		struct region *region = &ring->regions[i];

		if (region->id != id)
			continue;
		if (region->count) {
			ring->backend->drop_slices(ring, region);
			memset(ring->slice_used + region->first, 0, (size_t)region->count);
			pthread_mutex_lock(&ring->lock);
			ring->stats.registered_bytes -= region->nbytes;
			pthread_mutex_unlock(&ring->lock);
		}
		*region = ring->regions[--ring->num_regions];
		return;
	}
}
