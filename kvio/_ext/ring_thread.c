// SPDX-License-Identifier: Apache-2.0
/* A ring's thread, and what others may ask of it. */
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include "ring_internal.h"

static const struct backend *backend_of(uint32_t number)
{
#ifdef KVIO_HAVE_URING
	if (number == KVIO_BACKEND_URING)
		return &uring_backend;
#endif
	if (number == KVIO_BACKEND_USRBIO)
		return &usrbio_backend;
	return number == KVIO_BACKEND_THREADS ? &threads_backend : NULL;
}

int kvio_backend_probe(uint32_t number)
{
#ifdef KVIO_HAVE_URING
	if (number == KVIO_BACKEND_URING)
		return uring_probe();
#endif
	return backend_of(number) ? 0 : -ENOSYS;
}

/* Takes what others have left for the ring; false once it has nothing more to do. */
static bool intake(struct kvio_ring *ring)
{
	struct kvio_ring_batch *batch, *next;
	uint64_t *forget;
	uint32_t num_forget;
	bool cancel, stop;

	pthread_mutex_lock(&ring->lock);
	batch = ring->inbox;
	ring->inbox = NULL;
	ring->inbox_tail = &ring->inbox;
	forget = ring->forget;
	num_forget = ring->num_forget;
	ring->forget = NULL;
	ring->num_forget = 0;
	stop = ring->stop;
	cancel = ring->cancel || stop;
	ring->cancel = false;
	pthread_mutex_unlock(&ring->lock);

	for (uint32_t i = 0; i < num_forget; i++)
		slices_forget(ring, forget[i]);
	free(forget);
	for (; batch; batch = next) {
		next = batch->next;
		runs_plan(ring, batch);
	}
	if (cancel)
		runs_cancel(ring, stop);
	return !stop || !runs_idle(ring);
}

static int64_t sooner(int64_t a, int64_t b)
{
	return a < 0 || (b >= 0 && b < a) ? b : a;
}

static void *ring_main(void *arg)
{
	struct kvio_ring *ring = arg;
	sigset_t all;
	int rc;

	sigfillset(&all);	/* signals are for the threads of the program */
	pthread_sigmask(SIG_BLOCK, &all, NULL);
	rc = ring->backend->open(ring);
	pthread_mutex_lock(&ring->lock);
	ring->opened_rc = rc;
	pthread_cond_signal(&ring->opened);
	pthread_mutex_unlock(&ring->lock);
	if (rc < 0)
		return NULL;
	while (intake(ring)) {
		uint32_t closed = atomic_load(&ring->store->num_closed);
		int64_t due, now;

		if (closed != ring->closed_seen && ring->backend->forget_files)
			ring->backend->forget_files(ring);
		ring->closed_seen = closed;
		due = runs_launch(ring);
		due = sooner(due, runs_release(ring));
		if (due < 0) {
			ring->backend->wait(ring, -1);
			continue;
		}
		now = now_ns();
		ring->backend->wait(ring, due > now ? due - now : 0);
	}
	ring->backend->close(ring);
	return NULL;
}

static void ring_free(struct kvio_ring *ring)
{
	for (int i = 0; i < DIRECTIONS; i++)
		free(ring->windows[i].bytes);
	if (ring->device)
		ring->backend->discard(ring);
	io_free_spares(ring);
	commits_free(ring);
	free(ring->forget);
	pthread_mutex_destroy(&ring->lock);
	free(ring);
}

static uint32_t usable_cpus(void)
{
	cpu_set_t set;
	int count = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;

	return count > 0 ? (uint32_t)count : 1;
}

int kvio_ring_open(struct kvio_ring **out, struct kvio_store *store,
		   const struct kvio_ring_params *params)
{
	const struct backend *backend = backend_of(params->backend);
	struct kvio_ring *ring;
	int rc;

	if (!backend)
		return -ENOSYS;
	if (!params->queue_depth || !params->window_ns || params->io_bytes % KVIO_PAGE ||
	    !params->io_bytes)
		return -EINVAL;
	ring = calloc(1, sizeof(*ring));
	if (!ring)
		return -ENOMEM;
	ring->store = store;
	ring->params = *params;
	ring->backend = backend;
	ring->pid = getpid();
	ring->num_cpus = usable_cpus();
	ring->inbox_tail = &ring->inbox;
	ring->opened_rc = 1;
	pthread_mutex_init(&ring->lock, NULL);
	monotonic_cond_init(&ring->opened);
	rc = backend->prepare(ring);
	if (rc == 0)
		rc = -pthread_create(&ring->thread, NULL, ring_main, ring);
	if (rc == 0) {
		pthread_mutex_lock(&ring->lock);
		while (ring->opened_rc == 1)
			pthread_cond_wait(&ring->opened, &ring->lock);
		rc = ring->opened_rc;
		pthread_mutex_unlock(&ring->lock);
		if (rc < 0)
			pthread_join(ring->thread, NULL);
	}
	if (rc < 0) {
		ring_free(ring);
		return rc;
	}
	*out = ring;
	return 0;
}

void kvio_ring_close(struct kvio_ring *ring)
{
	if (!ring || ring->pid != getpid())	/* a forked child has no such thread */
		return;
	pthread_mutex_lock(&ring->lock);
	ring->stop = true;
	pthread_mutex_unlock(&ring->lock);
	atomic_store(&ring->paused, false);
	ring->backend->wake(ring);
	pthread_join(ring->thread, NULL);
	ring_free(ring);
}

void kvio_ring_read_queue(const struct kvio_ring *ring, uint64_t *nbytes, uint64_t *tokens)
{
	*nbytes = atomic_load(&ring->queued_bytes);
	*tokens = atomic_load(&ring->queued_tokens);
}

uint64_t kvio_ring_in_flight(const struct kvio_ring *ring)
{
	return atomic_load(&ring->batches_in_flight);
}

int kvio_ring_forget(struct kvio_ring *ring, uint64_t region)
{
	uint64_t *more;
	int rc = -ENOMEM;

	pthread_mutex_lock(&ring->lock);
	more = realloc(ring->forget, (ring->num_forget + 1) * sizeof(*more));
	if (more) {
		more[ring->num_forget++] = region;
		ring->forget = more;
		rc = 0;
	}
	pthread_mutex_unlock(&ring->lock);
	ring->backend->wake(ring);
	return rc;
}

int kvio_ring_fault(struct kvio_ring *ring, const struct kvio_fault *fault)
{
	int rc = -ENOSPC;

	pthread_mutex_lock(&ring->lock);
	atomic_store(&ring->has_faults, fault->op_mask != 0);
	if (fault->op_mask == 0) {
		memset(ring->faults, 0, sizeof(ring->faults));
		rc = 0;
	}
	for (int i = 0; i < MAX_FAULTS && rc < 0; i++) {
		if (ring->faults[i].count == 0) {
			ring->faults[i] = *fault;
			rc = i;
		}
	}
	pthread_mutex_unlock(&ring->lock);
	return rc;
}

void kvio_ring_wake(struct kvio_ring *ring)
{
	ring->backend->wake(ring);
}

void kvio_ring_pause(struct kvio_ring *ring, int paused)
{
	atomic_store(&ring->paused, paused);
	ring->backend->wake(ring);
}
