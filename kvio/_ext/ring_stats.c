// SPDX-License-Identifier: Apache-2.0
/* What a ring has done, and which memory it has registered. */
#include "ring_internal.h"

#define MAX_WINDOWS (1 << 20)

/* Room for window `at`; others may be copying the array, so it moves under the lock. */
static bool windows_grow(struct kvio_ring *ring, struct windows *windows, int64_t at)
{
	int64_t room = at < 256 ? 512 : 2 * at;
	uint64_t *bytes = NULL;

	pthread_mutex_lock(&ring->lock);
	if (room <= MAX_WINDOWS)
		bytes = realloc(windows->bytes, (size_t)room * sizeof(*bytes));
	if (bytes) {
		memset(bytes + windows->room, 0, (size_t)(room - windows->room) * sizeof(*bytes));
		windows->bytes = bytes;
		windows->room = room;
	}
	pthread_mutex_unlock(&ring->lock);
	return bytes != NULL;
}

static void windows_add(struct kvio_ring *ring, struct windows *windows, uint64_t number,
			uint64_t nbytes)
{
	int64_t at;

	if (windows->count == 0)
		__atomic_store_n(&windows->first, number, __ATOMIC_RELAXED);
	at = (int64_t)(number - windows->first);
	if (at < 0)
		at = 0;
	if (at >= windows->room && !windows_grow(ring, windows, at))
		return;
	stats_add(&windows->bytes[at], nbytes);
	if (at >= windows->count)
		__atomic_store_n(&windows->count, at + 1, __ATOMIC_RELEASE);
}

/* A run is about to be reported at when_ns (never before the link has carried it). */
void stats_run(struct kvio_ring *ring, struct run *run, int64_t when_ns)
{
	struct kvio_ring_stats *stats = &ring->stats;
	bool write = run->direction == WRITE, began = run->step == STEP_DONE;
	bool paced = write ? ring->params.write_bytes_per_s : ring->params.read_bytes_per_s;
	uint64_t moved = 0, nbytes, busy_ns = (uint64_t)run->busy_ns;

	for (uint32_t i = run->first; i < run->first + run->count; i++) {
		int32_t status = run->batch->blocks[i].status;

		moved += status == 0 || status == -EBADMSG;
		if (status == 0)
			continue;
		stats_add(&stats->failed_blocks, 1);
		stats_add(&stats->checks_failed, status == -EBADMSG);
		stats_add(&stats->cancelled_blocks, status == -ECANCELED);
	}
	nbytes = moved * ring->store->params.block_nbytes;
	stats_add(write ? &stats->write_blocks : &stats->read_blocks, moved);
	stats_add(write ? &stats->write_bytes : &stats->read_bytes, nbytes);
	/* The link's time counts, however late we woke. */
	if (run->end_ns && run->end_ns < when_ns)
		when_ns = run->end_ns;
	if (nbytes)
		windows_add(ring, &ring->windows[run->direction],
			    (uint64_t)when_ns / ring->params.window_ns, nbytes);
	/* The clock is that of the last wake-up: what began since has taken no time. */
	if (began && --ring->active_by[run->direction] == 0 && !paced &&
	    when_ns > ring->active_since_ns[run->direction])
		busy_ns += (uint64_t)(when_ns - ring->active_since_ns[run->direction]);
	stats_add(write ? &stats->write_busy_ns : &stats->read_busy_ns, busy_ns);
}

void kvio_ring_get_stats(struct kvio_ring *ring, struct kvio_ring_stats *out)
{
	uint64_t *from = (uint64_t *)&ring->stats, *to = (uint64_t *)out;

	_Static_assert(sizeof(*out) % sizeof(uint64_t) == 0, "counters and nothing else");
	for (size_t i = 0; i < sizeof(*out) / sizeof(*to); i++)
		to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
}

int64_t kvio_ring_windows(struct kvio_ring *ring, int write, uint64_t *out, int64_t count,
			  uint64_t *first)
{
	struct windows *windows = &ring->windows[write ? WRITE : READ];
	int64_t there;

	pthread_mutex_lock(&ring->lock);
	there = __atomic_load_n(&windows->count, __ATOMIC_ACQUIRE);
	*first = __atomic_load_n(&windows->first, __ATOMIC_RELAXED);
	if (count > there)
		count = there;
	for (int64_t i = 0; i < count; i++)
		out[i] = __atomic_load_n(&windows->bytes[i], __ATOMIC_RELAXED);
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
	if (rc < 0)
		__atomic_store_n(&ring->stats.register_errno, (uint64_t)-rc, __ATOMIC_RELAXED);
	else
		stats_add(&ring->stats.registered_bytes, region->count ? region->nbytes : 0);
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
			stats_add(&ring->stats.registered_bytes, 0 - region->nbytes);
		}
		*region = ring->regions[--ring->num_regions];
		return;
	}
}
