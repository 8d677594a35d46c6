// SPDX-License-Identifier: Apache-2.0
/*
 * The io_uring back end. The ring's thread creates the ring, so SINGLE_ISSUER and DEFER_TASKRUN
 * hold; others wake it through an eventfd that the ring itself reads.
 *
 * With IOPOLL there is a second ring for the payload of O_DIRECT files: a ring that is polled can
 * do nothing else. While it has something in flight the thread spins, which is what IOPOLL means.
 */
#ifdef KVIO_HAVE_URING
#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include "ring_internal.h"

#define MAX_FILES 1024u
#define MIN_WORKERS 4u	/* of io-wq; a cold buffered file keeps them waiting */
#define SQ_THREAD_IDLE_MS 20
#define SEVERAL_NS 500000	/* how long one completion waits for company */
#define PATIENCE 32		/* waits without company before that is tried again */

struct queue {
	struct io_uring ring;
	bool has_files, has_buffers;
	uint8_t file_known[MAX_FILES];
};

struct uring {
	struct queue main, poll;
	int wake_fd;
	uint64_t wake_value;
	atomic_bool wake_pending;
	bool wake_armed, has_poll, polling;
	uint32_t in_poll;		/* operations that the polled ring has */
	uint32_t num_files;
	uint32_t alone;			/* waits until company is waited for again */
};

static int queue_init(struct io_uring *ring, uint32_t entries, unsigned extra, uint64_t *flags)
{
	static const unsigned choices[] = {
		IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_CLAMP,
		IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_CLAMP,
		IORING_SETUP_COOP_TASKRUN | IORING_SETUP_CLAMP,
		0,
	};
	int rc = -EINVAL;

	for (size_t i = 0; i < sizeof(choices) / sizeof(*choices) && rc == -EINVAL; i++) {
		struct io_uring_params params = {
			.flags = choices[i] | extra,
			.sq_thread_idle = extra & IORING_SETUP_SQPOLL ? SQ_THREAD_IDLE_MS : 0,
		};

		rc = io_uring_queue_init_params(entries, ring, &params);
		*flags = choices[i] | extra;
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
	int rc = queue_init(&ring, 2, 0, &flags);

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

/* Both tables are an economy, and so is the ring's own number: plain ones serve elsewhere. */
static void queue_tables(struct queue *queue, uint32_t num_files)
{
	queue->has_files = !io_uring_register_files_sparse(&queue->ring, num_files);
	queue->has_buffers = !io_uring_register_buffers_sparse(&queue->ring, MAX_SLICES);
	io_uring_register_ring_fd(&queue->ring);
}

static void open_poll(struct kvio_ring *ring, struct uring *uring, uint32_t entries)
{
	int rc = queue_init(&uring->poll.ring, entries, IORING_SETUP_IOPOLL,
			    &ring->stats.poll_setup_flags);

	if (rc < 0) {
		ring->stats.poll_setup_flags = 0;
		ring->stats.poll_errno = (uint64_t)-rc;
		return;
	}
	queue_tables(&uring->poll, uring->num_files);
	uring->has_poll = uring->polling = true;
}

static int uring_open(struct kvio_ring *ring)
{
	struct uring *uring = ring->device;
	struct rlimit limit = { MAX_FILES, MAX_FILES };
	uint32_t entries = ring->params.queue_depth * 2 + 2;
	unsigned workers[2] = { ring->num_cpus < MIN_WORKERS ? MIN_WORKERS : ring->num_cpus, 0 };
	int rc = -EINVAL;

	if (ring->params.flags & KVIO_RING_SQPOLL) {
		rc = queue_init(&uring->main.ring, entries, IORING_SETUP_SQPOLL,
				&ring->stats.setup_flags);
		ring->stats.sqpoll_errno = rc < 0 ? (uint64_t)-rc : 0;
	}
	if (rc < 0)
		rc = queue_init(&uring->main.ring, entries, 0, &ring->stats.setup_flags);
	if (rc < 0)
		return rc;
	getrlimit(RLIMIT_NOFILE, &limit);
	uring->num_files = limit.rlim_cur < MAX_FILES ? (uint32_t)limit.rlim_cur : MAX_FILES;
	queue_tables(&uring->main, uring->num_files);
	/* Copies of buffered files: more workers than CPUs would only take turns. */
	io_uring_register_iowq_max_workers(&uring->main.ring, workers);
	if (ring->params.flags & KVIO_RING_IOPOLL)
		open_poll(ring, uring, entries);
	return 0;
}

static struct io_uring_sqe *get_sqe(struct queue *queue)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&queue->ring);

	while (!sqe) {
		io_uring_submit(&queue->ring);
		io_uring_sqring_wait(&queue->ring);	/* SQPOLL: the kernel's thread takes them */
		sqe = io_uring_get_sqe(&queue->ring);
	}
	return sqe;
}

/* The registered number of a file, or -1. */
static int file_number(const struct uring *uring, struct queue *queue,
		       const struct kvio_segment *segment)
{
	uint32_t index = segment->index;

	if (!queue->has_files || index >= uring->num_files)
		return -1;
	if (!queue->file_known[index]) {
		if (io_uring_register_files_update(&queue->ring, index, &segment->fd, 1) != 1)
			return -1;
		queue->file_known[index] = 1;
	}
	return (int)index;
}

static void forget_on(struct kvio_ring *ring, struct queue *queue, uint32_t num_files)
{
	uint32_t count = atomic_load(&ring->store->num_segments);
	int none = -1;

	for (uint32_t i = 0; i < count && i < num_files; i++) {
		if (!queue->file_known[i] ||
		    !atomic_load(&segment_at(ring->store, i)->file_closed))
			continue;
		io_uring_register_files_update(&queue->ring, i, &none, 1);
		queue->file_known[i] = 0;
	}
}

/* A registered file stays open, and its disk space in use, until the ring lets go of it. */
static void forget_files(struct kvio_ring *ring)
{
	struct uring *uring = ring->device;

	forget_on(ring, &uring->main, uring->num_files);
	if (uring->has_poll)
		forget_on(ring, &uring->poll, uring->num_files);
}

static void start_on(struct kvio_ring *ring, struct queue *queue, struct io *io)
{
	int number = file_number(ring->device, queue, io->segment);
	int fd = number < 0 ? io->segment->fd : number;
	struct io_uring_sqe *sqe = get_sqe(queue);
	uint8_t *addr = io->addr + io->done;
	uint64_t offset = io->offset + io->done;
	bool fixed = io->buffer >= 0 && queue->has_buffers;

	if (io->op == IO_SYNC)
		io_uring_prep_fsync(sqe, fd, IORING_FSYNC_DATASYNC);
	else if (io->op == IO_READ && fixed)
		io_uring_prep_read_fixed(sqe, fd, addr, io->limit, offset, io->buffer);
	else if (io->op == IO_READ)
		io_uring_prep_read(sqe, fd, addr, io->limit, offset);
	else if (fixed)
		io_uring_prep_write_fixed(sqe, fd, addr, io->limit, offset, io->buffer);
	else
		io_uring_prep_write(sqe, fd, addr, io->limit, offset);
	if (number >= 0)
		sqe->flags |= IOSQE_FIXED_FILE;
	/* A copy would be made by this thread, one after the other: the workers are several. */
	if (io->op == IO_READ && io->segment->buffered && io->limit >= MIN_ASYNC_BYTES &&
	    !io->here) {
		sqe->flags |= IOSQE_ASYNC;
		stats_add(&ring->stats.async_ios, 1);
	}
	stats_add(&ring->stats.fixed_ios, fixed);
	io_uring_sqe_set_data(sqe, io);
}

static void uring_start(struct kvio_ring *ring, struct io *io)
{
	struct uring *uring = ring->device;
	bool poll = uring->polling && io->run && !io->segment->buffered;

	uring->in_poll += poll;
	start_on(ring, poll ? &uring->poll : &uring->main, io);
}

static void uring_flush(struct kvio_ring *ring)
{
	struct uring *uring = ring->device;

	io_uring_submit(&uring->main.ring);
	if (uring->in_poll)
		io_uring_submit(&uring->poll.ring);
}

static void arm_wake(struct uring *uring)
{
	struct io_uring_sqe *sqe = get_sqe(&uring->main);

	io_uring_prep_read(sqe, uring->wake_fd, &uring->wake_value, sizeof(uring->wake_value), 0);
	io_uring_sqe_set_data(sqe, NULL);
	uring->wake_armed = true;
}

/* Returns how many completions there were. */
static unsigned reap(struct kvio_ring *ring, struct uring *uring)
{
	struct io_uring_cqe *cqe;
	unsigned head, count = 0;

	io_uring_for_each_cqe(&uring->main.ring, head, cqe) {
		struct io *io = io_uring_cqe_get_data(cqe);

		count++;
		if (io) {
			io_complete(ring, io, cqe->res);
		} else {
			uring->wake_armed = false;
			atomic_store(&uring->wake_pending, false);
		}
	}
	io_uring_cq_advance(&uring->main.ring, count);
	return count;
}

/* What a device cannot do by polling is done again the usual way, and so is all that follows. */
static unsigned reap_polled(struct kvio_ring *ring, struct uring *uring)
{
	struct io_uring_cqe *cqe;
	unsigned head, count = 0;

	io_uring_for_each_cqe(&uring->poll.ring, head, cqe) {
		struct io *io = io_uring_cqe_get_data(cqe);

		count++;
		uring->in_poll--;
		if (cqe->res == -EOPNOTSUPP) {
			uring->polling = false;
			__atomic_store_n(&ring->stats.poll_errno, EOPNOTSUPP, __ATOMIC_RELAXED);
			start_on(ring, &uring->main, io);
		} else {
			stats_add(&ring->stats.poll_ios, 1);
			io_complete(ring, io, cqe->res);
		}
	}
	io_uring_cq_advance(&uring->poll.ring, count);
	return count;
}

static void wait_polled(struct kvio_ring *ring, struct uring *uring, int64_t timeout_ns)
{
	int64_t deadline = timeout_ns < 0 ? INT64_MAX : now_ns() + timeout_ns;
	unsigned count = 0;

	while (count == 0 && ring->clock_ns < deadline) {
		io_uring_submit_and_get_events(&uring->poll.ring);
		io_uring_submit_and_get_events(&uring->main.ring);
		ring->clock_ns = now_ns();
		count = reap_polled(ring, uring) + reap(ring, uring);
	}
}

/*
 * With a full queue and more to start nobody waits for a single completion, so a few are taken at
 * a time: one wake-up of the thread instead of several.
 */
static unsigned company(const struct kvio_ring *ring, const struct uring *uring)
{
	uint32_t depth = ring->params.queue_depth;

	if (ring->in_flight < depth || depth < 8 || !has_backlog(ring) || uring->alone)
		return 1;
	return depth / 4;
}

static void uring_wait(struct kvio_ring *ring, int64_t timeout_ns)
{
	struct uring *uring = ring->device;
	unsigned several = timeout_ns < 0 ? company(ring, uring) : 1;
	struct __kernel_timespec ts = { timeout_ns / 1000000000, timeout_ns % 1000000000 };
	struct io_uring_cqe *cqe;
	int rc;

	if (!uring->wake_armed)
		arm_wake(uring);
	stats_add(&ring->stats.waits, 1);
	if (uring->in_poll) {
		wait_polled(ring, uring, timeout_ns);
		return;
	}
	if (several > 1)
		ts = (struct __kernel_timespec){ 0, SEVERAL_NS };
	else if (uring->alone)
		uring->alone--;
	rc = io_uring_submit_and_wait_timeout(&uring->main.ring, &cqe, several,
					      timeout_ns < 0 && several == 1 ? NULL : &ts, NULL);
	if (rc == -ETIME && several > 1)
		uring->alone = PATIENCE;
	/* The kernel is short of memory: what is in flight will free some. */
	if (rc == -EAGAIN || rc == -EBUSY) {
		struct timespec nap = { 0, 1000000 };

		nanosleep(&nap, NULL);
	}
	ring->clock_ns = now_ns();
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

		io_uring_submit_and_wait(&uring->main.ring, 1);
		if (io_uring_peek_cqe(&uring->main.ring, &cqe) == 0)
			reap(ring, uring);
	}
	io_uring_queue_exit(&uring->main.ring);
	if (uring->has_poll)
		io_uring_queue_exit(&uring->poll.ring);
}

static void queue_drop(struct queue *queue, struct region *region)
{
	struct iovec none = { NULL, 0 };

	for (int i = 0; i < region->count; i++)
		io_uring_register_buffers_update_tag(&queue->ring, (unsigned)(region->first + i),
						     &none, NULL, 1);
}

static void drop_slices(struct kvio_ring *ring, struct region *region)
{
	struct uring *uring = ring->device;

	queue_drop(&uring->main, region);
	if (uring->has_poll && uring->poll.has_buffers)
		queue_drop(&uring->poll, region);
}

/* Pins the slices region->count .. wanted - 1; stops at the first that the kernel refuses. */
static int queue_add(struct queue *queue, struct region *region, int wanted)
{
	int rc = 0;

	for (region->count = 0; region->count < wanted && rc >= 0; region->count += rc >= 0) {
		uint64_t at = (uint64_t)region->count * region->slice_bytes;
		uint64_t left = region->nbytes - at;
		struct iovec iov = {
			(void *)(uintptr_t)(region->addr + at),
			left < region->slice_bytes ? left : region->slice_bytes,
		};

		rc = io_uring_register_buffers_update_tag(
			&queue->ring, (unsigned)(region->first + region->count), &iov, NULL, 1);
	}
	return rc < 0 ? rc : 0;
}

/* Pins the region's pages once, in block-aligned slices; nothing stays pinned on failure. */
static int add_slices(struct kvio_ring *ring, struct region *region)
{
	struct uring *uring = ring->device;
	int wanted = (int)((region->nbytes + region->slice_bytes - 1) / region->slice_bytes);
	int rc;

	if (!uring->main.has_buffers)
		return -EOPNOTSUPP;
	rc = slices_reserve(ring, wanted);
	if (rc < 0)
		return rc;
	region->first = rc;
	rc = queue_add(&uring->main, region, wanted);
	if (rc == 0 && uring->has_poll && uring->poll.has_buffers) {
		/* The polled ring has the same table, or is not used. */
		if (queue_add(&uring->poll, region, wanted) < 0) {
			queue_drop(&uring->poll, region);
			uring->polling = false;
			__atomic_store_n(&ring->stats.poll_errno, ENOMEM, __ATOMIC_RELAXED);
		}
		region->count = wanted;
	}
	if (rc < 0) {
		queue_drop(&uring->main, region);
		memset(ring->slice_used + region->first, 0, (size_t)wanted);
		region->count = 0;
	}
	return rc;
}

const struct backend uring_backend = {
	.prepare = uring_prepare, .open = uring_open, .close = uring_close,
	.discard = uring_discard, .start = uring_start, .flush = uring_flush, .wait = uring_wait,
	.wake = uring_wake, .add_slices = add_slices, .drop_slices = drop_slices,
	.forget_files = forget_files,
};
#endif
