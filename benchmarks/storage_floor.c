/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The floor of block I/O: liburing from C with a registered file and registered buffers, one
 * thread, a sliding window of `depth` whole blocks; and preadv from several threads. No index, no
 * checksum, no header, no Python in the loop. Every int result is >= 0, or -errno.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

struct floor {
	struct io_uring ring;
	int fd;
	uint8_t *memory;		/* depth * nbytes */
	uint32_t nbytes, depth;
};

static int setup(struct floor *f)
{
	struct iovec iov = {f->memory, (size_t)f->depth * f->nbytes};
	struct io_uring_params params = {
		.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN};
	int rc = io_uring_queue_init_params(f->depth + 1, &f->ring, &params);

	if (rc == -EINVAL)		/* before Linux 6.1 */
		rc = io_uring_queue_init(f->depth + 1, &f->ring, 0);
	if (rc < 0)
		return rc;
	rc = io_uring_register_buffers(&f->ring, &iov, 1);
	if (rc == 0)
		rc = io_uring_register_files(&f->ring, &f->fd, 1);
	if (rc < 0)
		io_uring_queue_exit(&f->ring);
	return rc;
}

int floor_open(struct floor **out, const char *path, int flags, uint8_t *memory, uint32_t nbytes,
	       uint32_t depth)
{
	struct floor *f = calloc(1, sizeof(*f));
	int rc;

	if (!f)
		return -ENOMEM;
	f->memory = memory;
	f->nbytes = nbytes;
	f->depth = depth;
	f->fd = open(path, flags);
	rc = f->fd < 0 ? -errno : setup(f);
	if (rc < 0) {
		if (f->fd >= 0)
			close(f->fd);
		free(f);
		return rc;
	}
	*out = f;
	return 0;
}

void floor_close(struct floor *f)
{
	io_uring_queue_exit(&f->ring);
	close(f->fd);
	free(f);
}

static void put(struct floor *f, int write, uint64_t offset, uint32_t slot)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&f->ring);
	uint8_t *memory = f->memory + (size_t)slot * f->nbytes;

	if (write)
		io_uring_prep_write_fixed(sqe, 0, memory, f->nbytes, offset, 0);
	else
		io_uring_prep_read_fixed(sqe, 0, memory, f->nbytes, offset, 0);
	sqe->flags |= IOSQE_FIXED_FILE;
	io_uring_sqe_set_data64(sqe, slot);
}

/* All blocks before it first, none after it until it is done. */
static void put_sync(struct floor *f)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&f->ring);

	io_uring_prep_fsync(sqe, 0, IORING_FSYNC_DATASYNC);
	sqe->flags |= IOSQE_FIXED_FILE | IOSQE_IO_DRAIN;
	io_uring_sqe_set_data64(sqe, UINT64_MAX);
}

/*
 * Moves `count` blocks; slots[i] tells whose memory block i was moved to or from. With sync_every
 * an fdatasync follows each so many blocks, and the last one.
 */
int floor_run(struct floor *f, int write, const uint64_t *offsets, uint32_t *slots, uint32_t count,
	      uint32_t sync_every)
{
	uint32_t next = 0, in_flight = 0, free_count = f->depth, *unused;
	struct io_uring_cqe *cqe;
	int rc = 0;

	unused = malloc(f->depth * sizeof(*unused));
	if (!unused)
		return -ENOMEM;
	for (uint32_t i = 0; i < f->depth; i++)
		unused[i] = i;
	while (rc == 0 && (next < count || in_flight)) {
		unsigned int head, seen = 0;

		while (next < count && free_count) {
			slots[next] = unused[--free_count];
			put(f, write, offsets[next], slots[next]);
			in_flight++;
			next++;
			if (sync_every && (next % sync_every == 0 || next == count)) {
				put_sync(f);
				in_flight++;
				break;		/* the queue has room for one of them */
			}
		}
		rc = io_uring_submit_and_wait(&f->ring, 1);
		rc = rc < 0 && rc != -EINTR ? rc : 0;
		io_uring_for_each_cqe(&f->ring, head, cqe) {
			uint64_t slot = cqe->user_data;

			if (slot == UINT64_MAX)
				rc = cqe->res < 0 ? cqe->res : rc;
			else if (cqe->res != (int)f->nbytes)
				rc = cqe->res < 0 ? cqe->res : -EIO;
			else
				unused[free_count++] = (uint32_t)slot;
			seen++;
		}
		io_uring_cq_advance(&f->ring, seen);
		in_flight -= seen;
	}
	free(unused);
	return rc;
}

/* ---- pread from several threads, into one block of memory after the other ---- */

struct team {
	int fd;
	uint8_t *memory;
	const uint64_t *offsets;
	uint32_t *slots;
	uint32_t nbytes, count, num_slots;
	atomic_uint next;
	atomic_int error;
};

static void *member(void *arg)
{
	struct team *team = arg;
	uint32_t i;

	while ((i = atomic_fetch_add(&team->next, 1)) < team->count) {
		uint32_t slot = i % team->num_slots;
		uint8_t *memory = team->memory + (size_t)slot * team->nbytes;
		ssize_t got = pread(team->fd, memory, team->nbytes, (off_t)team->offsets[i]);

		if (got != (ssize_t)team->nbytes)
			atomic_store(&team->error, got < 0 ? -errno : -EIO);
		team->slots[i] = slot;
	}
	return NULL;
}

/* num_slots: blocks of memory, more than threads. */
int pread_run(int fd, uint8_t *memory, uint32_t nbytes, uint32_t num_slots,
	      const uint64_t *offsets, uint32_t *slots, uint32_t count, uint32_t threads)
{
	struct team team = {.fd = fd, .memory = memory, .offsets = offsets, .slots = slots,
			    .nbytes = nbytes, .count = count, .num_slots = num_slots};
	pthread_t ids[16];
	uint32_t started = 1;

	while (started < threads && started < 16 &&
	       pthread_create(&ids[started], NULL, member, &team) == 0)
		started++;
	member(&team);
	for (uint32_t i = 1; i < started; i++)
		pthread_join(ids[i], NULL);
	return atomic_load(&team.error);
}
