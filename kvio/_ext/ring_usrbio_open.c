// SPDX-License-Identifier: Apache-2.0
/* The 3FS USRBIO back end from beginning to end: its iors, its memory, what it leaves behind. */
#include <unistd.h>

#include "ring_usrbio.h"

static int usrbio_prepare(struct kvio_ring *ring)
{
	struct usrbio *usrbio = calloc(1, sizeof(*usrbio));

	if (!usrbio)
		return -ENOMEM;
	pthread_mutex_init(&usrbio->lock, NULL);
	pthread_cond_init(&usrbio->work, NULL);
	monotonic_cond_init(&usrbio->news);
	usrbio->jobs_tail = &usrbio->jobs;
	usrbio->later_tail = &usrbio->later;
	ring->device = usrbio;
	return 0;
}

static void usrbio_discard(struct kvio_ring *ring)
{
	struct usrbio *usrbio = ring->device;

	pthread_mutex_destroy(&usrbio->lock);
	pthread_cond_destroy(&usrbio->work);
	pthread_cond_destroy(&usrbio->news);
	free(usrbio->flights);
	free(usrbio->free_flights);
	free(usrbio);
}

/* The newest of the constructors that the library has. Holes are an error where it can be said:
 * a block is written whole, so a hole is damage and not zeros. */
static int ior_create(struct kvio_ring *ring, int direction)
{
	struct usrbio *usrbio = ring->device;
	const struct usrbio_lib *lib = usrbio->lib;
	struct hf3fs_ior *ior = &usrbio->ior[direction];
	const char *mount = ring->store->mount;
	int entries = (int)ring->params.queue_depth, rc;
	bool read = direction == READ;

	if (lib->iorcreate4)
		rc = lib->iorcreate4(ior, mount, entries, read, 0, 0, -1,
				     read ? HF3FS_FORBID_READ_HOLES : 0);
	else if (lib->iorcreate3)
		rc = lib->iorcreate3(ior, mount, entries, read, 0, 0, 0, -1);
	else
		rc = lib->iorcreate2(ior, mount, entries, read, 0, 0, -1);
	if (rc < 0)
		usrbio_unlink_leftovers(mount, ior->iov.id);
	usrbio->has_ior[direction] = rc >= 0;
	return rc < 0 ? rc : 0;
}

static void sync_lengths(struct kvio_ring *ring)
{
	struct usrbio *usrbio = ring->device;

	for (uint32_t i = 0; i < atomic_load(&ring->store->num_segments); i++) {
		struct kvio_segment *segment = segment_at(ring->store, i);

		if (!(usrbio->dirty[i / 8] & 1u << (i % 8)) || !segment_hold(segment))
			continue;
		usrbio_length_sync(segment->fd);
		segment_release(segment);
		stats_add(&ring->stats.length_syncs, 1);
	}
}

static void drop_slices(struct kvio_ring *ring, struct region *region)
{
	struct usrbio *usrbio = ring->device;
	struct usrbio_iov *iov = usrbio->iovs[region->first];

	for (int i = 0; i < region->count; i++)
		usrbio->iovs[region->first + i] = NULL;
	usrbio_iov_put(iov);
}

static void usrbio_close(struct kvio_ring *ring)
{
	struct usrbio *usrbio = ring->device;

	if (usrbio->has_helper) {
		pthread_mutex_lock(&usrbio->lock);
		usrbio->stop = true;
		pthread_cond_signal(&usrbio->work);
		pthread_mutex_unlock(&usrbio->lock);
		pthread_join(usrbio->helper, NULL);
	}
	sync_lengths(ring);
	for (int i = 0; i < ring->num_regions; i++)
		if (ring->regions[i].count)
			drop_slices(ring, &ring->regions[i]);
	usrbio_stage_close(&usrbio->payload);
	usrbio_stage_close(&usrbio->pages);
	for (int d = 0; d < DIRECTIONS; d++) {
		char id[16];

		if (!usrbio->has_ior[d])
			continue;
		memcpy(id, usrbio->ior[d].iov.id, 16);
		usrbio->lib->iordestroy(&usrbio->ior[d]);
		usrbio_unlink_leftovers(ring->store->mount, id);
	}
}

static int usrbio_open(struct kvio_ring *ring)
{
	struct usrbio *usrbio = ring->device;
	uint32_t depth = ring->params.queue_depth;
	int rc = 0;

	usrbio->lib = usrbio_lib();
	if (!usrbio->lib || !ring->store->mount[0])
		return -ENODEV;
	usrbio->flights = calloc(depth, sizeof(*usrbio->flights));
	usrbio->free_flights = malloc(depth * sizeof(*usrbio->free_flights));
	if (!usrbio->flights || !usrbio->free_flights)
		return -ENOMEM;
	while (usrbio->num_free < depth) {
		usrbio->free_flights[usrbio->num_free] = (uint16_t)usrbio->num_free;
		usrbio->num_free++;
	}
	for (int d = 0; d < DIRECTIONS && rc == 0; d++)
		rc = ior_create(ring, d);
	if (rc == 0)
		rc = usrbio_stage_open(&usrbio->pages, ring->store->mount, KVIO_PAGE, depth);
	if (rc < 0)
		usrbio_close(ring);
	return rc;
}

/* A region with a name is given to the daemon whole; its slices are the blocks of its iov, which
 * no operation crosses. Any other has no slices: it is staged. */
static int add_slices(struct kvio_ring *ring, struct region *region)
{
	struct usrbio *usrbio = ring->device;
	int wanted = (int)((region->nbytes + region->slice_bytes - 1) / region->slice_bytes);
	int first, rc = 0;
	struct usrbio_iov *iov;

	region->count = 0;
	first = slices_reserve(ring, wanted);
	if (first < 0)
		return first;
	iov = usrbio_iov_of_region(ring->store->mount, region,
				   wanted > 1 ? region->slice_bytes : 0, &rc);
	if (!iov) {
		memset(ring->slice_used + first, 0, (size_t)wanted);
		return rc;
	}
	region->first = first;
	region->count = wanted;
	for (int i = 0; i < wanted; i++)
		usrbio->iovs[first + i] = iov;
	return 0;
}

const struct backend usrbio_backend = {
	.prepare = usrbio_prepare, .open = usrbio_open, .close = usrbio_close,
	.discard = usrbio_discard, .start = usrbio_start, .wait = usrbio_wait,
	.wake = usrbio_wake, .add_slices = add_slices, .drop_slices = drop_slices,
};
