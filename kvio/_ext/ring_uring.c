// SPDX-License-Identifier: Apache-2.0
/*
 * The io_uring back end. The ring's thread creates the ring, so SINGLE_ISSUER and DEFER_TASKRUN
 * hold; others wake it through an eventfd that the ring itself reads.
 */
#ifdef KVIO_HAVE_URING
#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include "ring_internal.h"

#define MAX_FILES 1024u

struct uring {
	struct io_uring ring;
	int wake_fd;
	uint64_t wake_value;
	atomic_bool wake_pending;
	bool wake_armed, has_files, has_buffers;
	uint32_t num_files;
	uint8_t file_known[MAX_FILES];
};

static int uring_setup(struct io_uring *ring, uint32_t entries, uint64_t *flags)
{
	static const unsigned choices[] = {
		IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_CLAMP,
		IORING_SETUP_COOP_TASKRUN | IORING_SETUP_CLAMP,
		0,
	};
	int rc = -EINVAL;

	for (size_t i = 0; i < sizeof(choices) / sizeof(*choices) && rc == -EINVAL; i++) {
		rc = io_uring_queue_init(entries, ring, choices[i]);
		*flags = choices[i];
	}
	/* The timeout of a wait travels with io_uring_enter: Linux 5.11. */
	if (rc == 0 && !(ring->features & IORING_FEAT_EXT_ARG)) {
		io_uring_queue_exit(ring);
		rc = -ENOSYS;
	}
	return rc;
}

int uring_probe(void)
{
	struct io_uring ring;
	uint64_t flags;
	int rc = uring_setup(&ring, 2, &flags);

	if (rc == 0)
		io_uring_queue_exit(&ring);
	return rc;
}

static int uring_prepare(struct kvio_ring *ring)
{
	struct uring *uring = calloc(1, sizeof(*uring));

	if (!uring)
		return -ENOMEM;
	uring->wake_fd = eventfd(0, EFD_CLOEXEC);
	if (uring->wake_fd < 0) {
		int rc = -errno;

		free(uring);
		return rc;
	}
	ring->device = uring;
	return 0;
}

static void uring_discard(struct kvio_ring *ring)
{
	struct uring *uring = ring->device;

	close(uring->wake_fd);
	free(uring);
}

static int uring_open(struct kvio_ring *ring)
{
	struct uring *uring = ring->device;
	struct rlimit limit = { MAX_FILES, MAX_FILES };
	uint64_t flags = 0;
	int rc = uring_setup(&uring->ring, ring->params.queue_depth * 2 + 2, &flags);

	if (rc < 0)
		return rc;
	ring->stats.setup_flags = flags;
	getrlimit(RLIMIT_NOFILE, &limit);
	uring->num_files = limit.rlim_cur < MAX_FILES ? (uint32_t)limit.rlim_cur : MAX_FILES;
	/* Both tables are an economy: where the kernel refuses them, plain ones serve. */
	uring->has_files = !io_uring_register_files_sparse(&uring->ring, uring->num_files);
	uring->has_buffers = !io_uring_register_buffers_sparse(&uring->ring, MAX_SLICES);
	return 0;
}

static struct io_uring_sqe *get_sqe(struct uring *uring)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&uring->ring);

	while (!sqe) {
		io_uring_submit(&uring->ring);
		sqe = io_uring_get_sqe(&uring->ring);
	}
	return sqe;
}

/* The registered number of a file, or -1. */
static int file_number(struct uring *uring, const struct kvio_segment *segment)
{
	uint32_t index = segment->index;

	if (!uring->has_files || index >= uring->num_files)
		return -1;
	if (!uring->file_known[index]) {
		if (io_uring_register_files_update(&uring->ring, index, &segment->fd, 1) != 1)
			return -1;
		uring->file_known[index] = 1;
	}
	return (int)index;
}

/* A registered file stays open, and its disk space in use, until the ring lets go of it. */
static void forget_files(struct kvio_ring *ring)
{
	struct uring *uring = ring->device;
	uint32_t count = atomic_load(&ring->store->num_segments);
	int none = -1;

	for (uint32_t i = 0; i < count && i < uring->num_files; i++) {
		if (!uring->file_known[i] ||
		    !atomic_load(&segment_at(ring->store, i)->file_closed))
			continue;
		io_uring_register_files_update(&uring->ring, i, &none, 1);
		uring->file_known[i] = 0;
	}
}

static void uring_start(struct kvio_ring *ring, struct io *io)
{
	struct uring *uring = ring->device;
	int number = file_number(uring, io->segment);
	int fd = number < 0 ? io->segment->fd : number;
	struct io_uring_sqe *sqe = get_sqe(uring);
	uint8_t *addr = io->addr + io->done;
	uint64_t offset = io->offset + io->done;

	if (io->op == IO_SYNC)
		io_uring_prep_fsync(sqe, fd, IORING_FSYNC_DATASYNC);
	else if (io->op == IO_READ && io->buffer >= 0)
		io_uring_prep_read_fixed(sqe, fd, addr, io->limit, offset, io->buffer);
	else if (io->op == IO_READ)
		io_uring_prep_read(sqe, fd, addr, io->limit, offset);
	else if (io->buffer >= 0)
		io_uring_prep_write_fixed(sqe, fd, addr, io->limit, offset, io->buffer);
	else
		io_uring_prep_write(sqe, fd, addr, io->limit, offset);
	if (number >= 0)
		sqe->flags |= IOSQE_FIXED_FILE;
	if (io->buffer >= 0)
		stats_add(ring, &ring->stats.fixed_ios, 1);
	io_uring_sqe_set_data(sqe, io);
}

static void arm_wake(struct uring *uring)
{
	struct io_uring_sqe *sqe = get_sqe(uring);

	io_uring_prep_read(sqe, uring->wake_fd, &uring->wake_value, sizeof(uring->wake_value), 0);
	io_uring_sqe_set_data(sqe, NULL);
	uring->wake_armed = true;
}

static void reap(struct kvio_ring *ring, struct uring *uring)
{
	struct io_uring_cqe *cqes[64];
	unsigned count;

	while ((count = io_uring_peek_batch_cqe(&uring->ring, cqes, 64))) {
		for (unsigned i = 0; i < count; i++) {
			struct io *io = io_uring_cqe_get_data(cqes[i]);
			int res = cqes[i]->res;

			io_uring_cqe_seen(&uring->ring, cqes[i]);
			if (io) {
				io_complete(ring, io, res);
			} else {
				uring->wake_armed = false;
				atomic_store(&uring->wake_pending, false);
			}
		}
	}
}

static void uring_wait(struct kvio_ring *ring, int64_t timeout_ns)
{
	struct uring *uring = ring->device;
	struct __kernel_timespec ts = { timeout_ns / 1000000000, timeout_ns % 1000000000 };
	struct io_uring_cqe *cqe;
	int rc;

	if (!uring->wake_armed)
		arm_wake(uring);
	rc = io_uring_submit_and_wait_timeout(&uring->ring, &cqe, 1, timeout_ns < 0 ? NULL : &ts,
					      NULL);
	/* The kernel is short of memory: what is in flight will free some. */
	if (rc == -EAGAIN || rc == -EBUSY) {
		struct timespec nap = { 0, 1000000 };

		nanosleep(&nap, NULL);
	}
	reap(ring, uring);
}

static void uring_wake(struct kvio_ring *ring)
{
	struct uring *uring = ring->device;

	if (!atomic_exchange(&uring->wake_pending, true))
		eventfd_write(uring->wake_fd, 1);
}

/* The read of the eventfd is finished first: the kernel must not write it later. */
static void uring_close(struct kvio_ring *ring)
{
	struct uring *uring = ring->device;

	eventfd_write(uring->wake_fd, 1);
	while (uring->wake_armed) {
		struct io_uring_cqe *cqe;

		io_uring_submit_and_wait(&uring->ring, 1);
		if (io_uring_peek_cqe(&uring->ring, &cqe) == 0)
			reap(ring, uring);
	}
	io_uring_queue_exit(&uring->ring);
}

static void drop_slices(struct kvio_ring *ring, struct region *region)
{
	struct uring *uring = ring->device;
	struct iovec none = { NULL, 0 };

	for (int i = 0; i < region->count; i++)
		io_uring_register_buffers_update_tag(&uring->ring, (unsigned)(region->first + i),
						     &none, NULL, 1);
}

/* Pins the region's pages once, in block-aligned slices; nothing stays pinned on failure. */
static int add_slices(struct kvio_ring *ring, struct region *region)
{
	struct uring *uring = ring->device;
	int wanted = (int)((region->nbytes + region->slice_bytes - 1) / region->slice_bytes);
	int rc;

	if (!uring->has_buffers)
		return -EOPNOTSUPP;
	rc = slices_reserve(ring, wanted);
	if (rc < 0)
		return rc;
	region->first = rc;
	region->count = 0;
	for (int i = 0; i < wanted; i++) {
		uint64_t at = (uint64_t)i * region->slice_bytes, left = region->nbytes - at;
		struct iovec iov = {
			(void *)(uintptr_t)(region->addr + at),
			left < region->slice_bytes ? left : region->slice_bytes,
		};

		rc = io_uring_register_buffers_update_tag(
			&uring->ring, (unsigned)(region->first + i), &iov, NULL, 1);
		if (rc < 0)
			break;
		region->count++;
	}
	if (rc < 0) {
		drop_slices(ring, region);
		memset(ring->slice_used + region->first, 0, (size_t)wanted);
		region->count = 0;
		return rc;
	}
	return 0;
}

const struct backend uring_backend = {
	.prepare = uring_prepare, .open = uring_open, .close = uring_close,
	.discard = uring_discard, .start = uring_start, .wait = uring_wait, .wake = uring_wake,
	.add_slices = add_slices, .drop_slices = drop_slices, .forget_files = forget_files,
};
#endif
