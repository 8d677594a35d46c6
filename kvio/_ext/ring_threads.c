// SPDX-License-Identifier: Apache-2.0
/* The back end for machines that refuse io_uring: workers that block in pread and pwrite. */
#include <unistd.h>

#include "ring_internal.h"

#define MAX_WORKERS 32u

struct threads {
	pthread_mutex_t lock;
	pthread_cond_t work, news;
	struct io *jobs, **jobs_tail;
	struct io *finished;
	bool woken, stop;
	uint32_t idle;			/* workers that wait for a job */
	uint32_t num_jobs;		/* that no worker has taken */
	uint32_t num_workers;
	pthread_t workers[MAX_WORKERS];
};

static int io_perform(const struct io *io)
{
	uint8_t *addr = io->addr + io->done;
	off_t offset = (off_t)(io->offset + io->done);
	ssize_t rc;

	if (io->op == IO_READ)
		rc = pread(io->segment->fd, addr, io->limit, offset);
	else if (io->op == IO_WRITE)
		rc = pwrite(io->segment->fd, addr, io->limit, offset);
	else
		rc = fdatasync(io->segment->fd);
	return rc < 0 ? -errno : (int)rc;
}

static void *worker_main(void *arg)
{
	struct threads *threads = arg;

	pthread_mutex_lock(&threads->lock);
	for (;;) {
		struct io *io = threads->jobs;

		if (!io) {
			if (threads->stop)
				break;
			threads->idle++;
			pthread_cond_wait(&threads->work, &threads->lock);
			threads->idle--;
			continue;
		}
		threads->jobs = io->next;
		threads->num_jobs--;
		if (!threads->jobs)
			threads->jobs_tail = &threads->jobs;
		pthread_mutex_unlock(&threads->lock);
		io->res = io_perform(io);
		pthread_mutex_lock(&threads->lock);
		io->next = threads->finished;
		threads->finished = io;
		pthread_cond_signal(&threads->news);
	}
	pthread_mutex_unlock(&threads->lock);
	return NULL;
}

static void threads_close(struct kvio_ring *ring)
{
	struct threads *threads = ring->device;

	pthread_mutex_lock(&threads->lock);
	threads->stop = true;
	pthread_cond_broadcast(&threads->work);
	pthread_mutex_unlock(&threads->lock);
	for (uint32_t i = 0; i < threads->num_workers; i++)
		pthread_join(threads->workers[i], NULL);
}

static int threads_prepare(struct kvio_ring *ring)
{
	struct threads *threads = calloc(1, sizeof(*threads));

	if (!threads)
		return -ENOMEM;
	pthread_mutex_init(&threads->lock, NULL);
	pthread_cond_init(&threads->work, NULL);
	monotonic_cond_init(&threads->news);
	threads->jobs_tail = &threads->jobs;
	ring->device = threads;
	return 0;
}

/* One worker more, up to one for each operation that may be in flight. */
static int add_worker(struct kvio_ring *ring)
{
	struct threads *threads = ring->device;
	int rc;

	if (threads->num_workers == MAX_WORKERS ||
	    threads->num_workers >= ring->params.queue_depth)
		return -EAGAIN;
	rc = -pthread_create(&threads->workers[threads->num_workers], NULL, worker_main, threads);
	threads->num_workers += rc == 0;
	return rc;
}

/* The first, so that there is one at least; the others come with the work. */
static int threads_open(struct kvio_ring *ring)
{
	return add_worker(ring);
}

static void threads_start(struct kvio_ring *ring, struct io *io)
{
	struct threads *threads = ring->device;
	bool short_of_workers;

	io->next = NULL;
	pthread_mutex_lock(&threads->lock);
	*threads->jobs_tail = io;
	threads->jobs_tail = &io->next;
	short_of_workers = ++threads->num_jobs > threads->idle;
	pthread_cond_signal(&threads->work);
	pthread_mutex_unlock(&threads->lock);
	if (short_of_workers)
		add_worker(ring);
}

static void threads_wait(struct kvio_ring *ring, int64_t timeout_ns)
{
	struct threads *threads = ring->device;
	int64_t deadline = timeout_ns < 0 ? -1 : now_ns() + timeout_ns;
	struct io *io, *next;
	int rc = 0;

	pthread_mutex_lock(&threads->lock);
	while (!threads->finished && !threads->woken && rc == 0)
		rc = monotonic_cond_wait(&threads->news, &threads->lock, deadline);
	io = threads->finished;
	threads->finished = NULL;
	threads->woken = false;
	pthread_mutex_unlock(&threads->lock);
	stats_add(&ring->stats.waits, 1);
	ring->clock_ns = now_ns();
	for (; io; io = next) {
		next = io->next;
		io_complete(ring, io, io->res);
	}
}

static void threads_wake(struct kvio_ring *ring)
{
	struct threads *threads = ring->device;

	pthread_mutex_lock(&threads->lock);
	threads->woken = true;
	pthread_cond_signal(&threads->news);
	pthread_mutex_unlock(&threads->lock);
}

static void threads_discard(struct kvio_ring *ring)
{
	struct threads *threads = ring->device;

	pthread_mutex_destroy(&threads->lock);
	pthread_cond_destroy(&threads->work);
	pthread_cond_destroy(&threads->news);
	free(threads);
}

const struct backend threads_backend = {
	.prepare = threads_prepare, .open = threads_open, .close = threads_close,
	.discard = threads_discard, .start = threads_start, .wait = threads_wait,
	.wake = threads_wake,
};
