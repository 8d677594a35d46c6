// SPDX-License-Identifier: Apache-2.0
/*
 * The 3FS USRBIO back end. The ring's thread owns two iors, one that reads and one that writes:
 * it prepares, submits once a turn, and waits. USRBIO has no descriptor to sleep on, so while
 * operations are in flight it waits in slices and looks at the inbox in between; with none in
 * flight it sleeps on a condition variable and costs nothing.
 *
 * io_depth is 0 (the daemon takes what it finds): a positive one waits for a full round, a
 * negative one is refused by newer daemons. A completion is matched by its userdata, the number
 * of a flight, which is checked: it comes out of memory that another process writes.
 */
#include <unistd.h>

#include "ring_usrbio.h"

#define SLICE_WAIT_NS 1000000		/* USRBIO's own granularity */
#define MAX_REFUSALS 2000		/* slices in which a full ring has nothing in flight */
#define REAP 64

static int direction_of(const struct io *io)
{
	return io->op == IO_READ ? READ : WRITE;
}

static void fail(struct usrbio *usrbio, struct io *io, int rc)
{
	io->res = rc;
	io->next = usrbio->failed;
	usrbio->failed = io;
}

/* ---- fdatasync: in a thread of its own, so that other operations go on ---- */

static int sync_file(int fd)
{
	int rc = usrbio_length_sync(fd);

	if (rc < 0 && rc != -EIO)	/* not 3FS, or one without this ioctl */
		rc = fdatasync(fd) < 0 ? -errno : 0;
	return rc;
}

static void *helper_main(void *arg)
{
	struct usrbio *usrbio = arg;

	pthread_mutex_lock(&usrbio->lock);
	for (;;) {
		struct io *io = usrbio->jobs;

		if (!io) {
			if (usrbio->stop)
				break;
			pthread_cond_wait(&usrbio->work, &usrbio->lock);
			continue;
		}
		usrbio->jobs = io->next;
		if (!usrbio->jobs)
			usrbio->jobs_tail = &usrbio->jobs;
		pthread_mutex_unlock(&usrbio->lock);
		io->res = sync_file(io->segment->fd);
		pthread_mutex_lock(&usrbio->lock);
		io->next = usrbio->synced;
		usrbio->synced = io;
		atomic_store(&usrbio->woken, true);
		pthread_cond_signal(&usrbio->news);
	}
	pthread_mutex_unlock(&usrbio->lock);
	return NULL;
}

static void sync_start(struct usrbio *usrbio, struct io *io)
{
	uint32_t index = io->segment->index;

	usrbio->dirty[index / 8] &= (uint8_t)~(1u << (index % 8));
	if (!usrbio->has_helper) {
		int rc = -pthread_create(&usrbio->helper, NULL, helper_main, usrbio);

		usrbio->has_helper = rc == 0;
		if (rc < 0) {
			fail(usrbio, io, sync_file(io->segment->fd));
			return;
		}
	}
	io->next = NULL;
	pthread_mutex_lock(&usrbio->lock);
	*usrbio->jobs_tail = io;
	usrbio->jobs_tail = &io->next;
	pthread_cond_signal(&usrbio->work);
	pthread_mutex_unlock(&usrbio->lock);
}

/* ---- preparing ---- */

static void flight_end(struct usrbio *usrbio, struct flight *flight)
{
	if (flight->stage)
		flight->stage->free[flight->stage->num_free++] = (uint16_t)flight->slot;
	flight->io = NULL;
	usrbio->free_flights[usrbio->num_free++] = (uint16_t)(flight - usrbio->flights);
}

static int stage_ready(struct kvio_ring *ring, struct usrbio *usrbio)
{
	int rc = 0;

	if (!usrbio->payload.iov) {
		rc = usrbio_stage_open(&usrbio->payload, ring->store->mount,
				       ring->params.io_bytes, ring->params.queue_depth);
		if (rc == 0)
			stats_add(&ring->stats.staging_bytes, usrbio->payload.nbytes);
	}
	return rc;
}

/* Where the bytes of this operation are to lie: in the pool if the daemon has that, else in a
 * slot of the ring's own. 1, 0 if no slot is free, or -errno. */
static int flight_place(struct kvio_ring *ring, struct flight *flight, uint8_t **at)
{
	struct usrbio *usrbio = ring->device;
	struct io *io = flight->io;
	struct usrbio_stage *stage = &usrbio->pages;

	flight->stage = NULL;
	*at = io->addr + io->done;
	flight->iov = io->buffer >= 0 ? usrbio->iovs[io->buffer] : NULL;
	if (flight->iov && !atomic_load(&flight->iov->denied))
		return 1;
	if (io->limit > KVIO_PAGE) {
		int rc = stage_ready(ring, usrbio);

		if (rc < 0)
			return rc == -ENOSPC || rc == -EFBIG ? -ENOMEM : rc;
		stage = &usrbio->payload;
	}
	if (stage->num_free == 0)
		return 0;
	flight->stage = stage;
	flight->iov = stage->iov;
	flight->slot = stage->free[--stage->num_free];
	if (io->limit > stage->slot_nbytes)
		io->limit = stage->slot_nbytes;
	if (io->op == IO_WRITE)
		memcpy(usrbio_stage_at(stage, flight->slot), *at, io->limit);
	*at = usrbio_stage_at(stage, flight->slot);
	return 1;
}

static void count_flight(struct kvio_ring *ring, const struct flight *flight)
{
	if (!flight->stage) {
		stats_add(&ring->stats.fixed_ios, 1);
	} else if (flight->stage == &((struct usrbio *)ring->device)->payload) {
		stats_add(&ring->stats.staged_ios, 1);
		stats_add(&ring->stats.staged_bytes, flight->io->limit);
	}
}

/* False: not now. An operation that cannot be prepared at all is put among the failed. */
static bool prepare_io(struct kvio_ring *ring, struct io *io)
{
	struct usrbio *usrbio = ring->device;
	int direction = direction_of(io), rc = usrbio_fd_use(io->segment->fd);
	struct flight *flight;
	uint8_t *at = NULL;
	uintptr_t number;

	if (rc < 0) {
		fail(usrbio, io, rc);
		return true;
	}
	if (usrbio->num_free == 0)
		return false;
	number = usrbio->free_flights[--usrbio->num_free];
	flight = &usrbio->flights[number];
	flight->io = io;
	rc = flight_place(ring, flight, &at);
	if (rc > 0)
		rc = usrbio->lib->prep_io(&usrbio->ior[direction], &flight->iov->iov,
					  direction == READ, at, io->segment->fd,
					  io->offset + io->done, io->limit,
					  (const void *)(number + 1));
	else if (rc == 0)
		rc = -EAGAIN;
	if (rc >= 0) {
		usrbio->refusals = 0;
		usrbio->flying[direction]++;
		usrbio->prepared[direction] = true;
		count_flight(ring, flight);
		return true;
	}
	flight_end(usrbio, flight);
	if (rc == -EAGAIN)
		return false;
	fail(usrbio, io, rc);
	return true;
}

static void put_off(struct usrbio *usrbio, struct io *io)
{
	io->next = NULL;
	*usrbio->later_tail = io;
	usrbio->later_tail = &io->next;
}

void usrbio_start(struct kvio_ring *ring, struct io *io)
{
	struct usrbio *usrbio = ring->device;

	if (io->op == IO_SYNC)
		sync_start(usrbio, io);
	else if (!prepare_io(ring, io))
		put_off(usrbio, io);
}

static void later_again(struct kvio_ring *ring)
{
	struct usrbio *usrbio = ring->device;
	struct io *io = usrbio->later, *next;

	usrbio->later = NULL;
	usrbio->later_tail = &usrbio->later;
	for (; io; io = next) {
		next = io->next;
		if (prepare_io(ring, io))
			continue;
		if (usrbio->refusals > MAX_REFUSALS)
			fail(usrbio, io, -EBUSY);
		else
			put_off(usrbio, io);
	}
}

/* ---- completions ---- */

static void flight_landed(struct kvio_ring *ring, struct flight *flight, int64_t result)
{
	struct usrbio *usrbio = ring->device;
	struct io *io = flight->io;
	uint32_t index = io->segment->index;

	if (result > (int64_t)io->limit || result < INT_MIN)
		result = -EIO;
	if (result > 0 && io->op == IO_READ && flight->stage)
		memcpy(io->addr + io->done, usrbio_stage_at(flight->stage, flight->slot),
		       (size_t)result);
	if (io->op == IO_WRITE)
		usrbio->dirty[index / 8] |= (uint8_t)(1u << (index % 8));
	flight_end(usrbio, flight);
	usrbio->flying[direction_of(io)]--;
	if (result == -EACCES && !flight->stage) {
		/* The daemon could not register the pool with its NIC: it only says so now. */
		atomic_store(&flight->iov->denied, true);
		__atomic_store_n(&ring->stats.register_errno, EACCES, __ATOMIC_RELAXED);
		put_off(usrbio, io);
		return;
	}
	io_complete(ring, io, (int)result);
}

/* Takes what has completed, waiting for the first one until `wait_ns` from now. */
static uint32_t reap(struct kvio_ring *ring, int direction, int64_t wait_ns)
{
	struct usrbio *usrbio = ring->device;
	struct hf3fs_cqe cqes[REAP];
	struct timespec until;
	int count;

	if (usrbio->flying[direction] == 0)
		return 0;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_nsec += wait_ns;
	until.tv_sec += until.tv_nsec / 1000000000;
	until.tv_nsec %= 1000000000;
	count = usrbio->lib->wait_for_ios(&usrbio->ior[direction], cqes, REAP, wait_ns > 0,
					  &until);
	if (count < 0 && wait_ns > 0) {
		struct timespec nap = { 0, wait_ns };

		nanosleep(&nap, NULL);
	}
	for (int i = 0; i < count; i++) {
		uintptr_t number = (uintptr_t)cqes[i].userdata - 1;
		struct flight *flight = NULL;

		if (number < ring->params.queue_depth)
			flight = &usrbio->flights[number];
		if (!flight || !flight->io || direction_of(flight->io) != direction)
			stats_add(&ring->stats.stray_completions, 1);
		else
			flight_landed(ring, flight, cqes[i].result);
	}
	return count > 0 ? (uint32_t)count : 0;
}

static void submit(struct usrbio *usrbio)
{
	for (int d = 0; d < DIRECTIONS; d++) {
		if (usrbio->prepared[d])
			usrbio->lib->submit_ios(&usrbio->ior[d]);
		usrbio->prepared[d] = false;
	}
}

/* Nothing is in flight: the condition variable tells. A full ring that is not ours is asked again
 * after a slice. */
static void sleep_idle(struct usrbio *usrbio, int64_t deadline)
{
	int rc = 0;

	if (usrbio->later) {
		usrbio->refusals++;
		if (deadline < 0 || deadline > now_ns() + SLICE_WAIT_NS)
			deadline = now_ns() + SLICE_WAIT_NS;
	}
	pthread_mutex_lock(&usrbio->lock);
	while (!atomic_load(&usrbio->woken) && rc == 0)
		rc = monotonic_cond_wait(&usrbio->news, &usrbio->lock, deadline);
	pthread_mutex_unlock(&usrbio->lock);
}

static void wait_flying(struct kvio_ring *ring, int64_t deadline)
{
	struct usrbio *usrbio = ring->device;
	bool both = usrbio->flying[READ] && usrbio->flying[WRITE];
	int turn = usrbio->flying[READ] ? READ : WRITE;

	while (reap(ring, READ, 0) + reap(ring, WRITE, 0) == 0 && !atomic_load(&usrbio->woken)) {
		int64_t left = deadline < 0 ? SLICE_WAIT_NS : deadline - now_ns();

		if (left <= 0)
			break;
		if (left > SLICE_WAIT_NS)
			left = SLICE_WAIT_NS;
		if (reap(ring, turn, left))
			break;
		if (both)
			turn = !turn;
	}
}

static bool complete_helped(struct kvio_ring *ring)
{
	struct usrbio *usrbio = ring->device;
	struct io *done[2], *next;

	pthread_mutex_lock(&usrbio->lock);
	done[0] = usrbio->synced;
	usrbio->synced = NULL;
	pthread_mutex_unlock(&usrbio->lock);
	ring->clock_ns = now_ns();
	done[1] = usrbio->failed;
	usrbio->failed = NULL;
	for (int i = 0; i < 2; i++) {
		for (struct io *io = done[i]; io; io = next) {
			next = io->next;
			io_complete(ring, io, io->res);
		}
	}
	return done[0] || done[1];
}

void usrbio_wait(struct kvio_ring *ring, int64_t timeout_ns)
{
	struct usrbio *usrbio = ring->device;
	int64_t deadline = timeout_ns < 0 ? -1 : now_ns() + timeout_ns;

	later_again(ring);
	submit(usrbio);
	if (!complete_helped(ring)) {
		if (usrbio->flying[READ] || usrbio->flying[WRITE])
			wait_flying(ring, deadline);
		else
			sleep_idle(usrbio, deadline);
	}
	atomic_store(&usrbio->woken, false);
	complete_helped(ring);
}

void usrbio_wake(struct kvio_ring *ring)
{
	struct usrbio *usrbio = ring->device;

	pthread_mutex_lock(&usrbio->lock);
	atomic_store(&usrbio->woken, true);
	pthread_cond_signal(&usrbio->news);
	pthread_mutex_unlock(&usrbio->lock);
}
