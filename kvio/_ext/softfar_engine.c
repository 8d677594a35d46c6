/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The thread that listens to other processes: one for a fabric, as long as it has peers there. It
 * sleeps until a peer has posted or pulled something, or has died, and drives the fabric then;
 * also while WRITEs of peers, whom nobody here waits for, take their time on the link.
 *
 * A forked child has no such thread, and its parent's rings are none of its business: for it all
 * peers are dead, and private pages stand where the rings were.
 */
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "softfar.h"

enum { OF_STOP = 0, OF_TIMER = 1 };	/* below the ids of far ends: id << 1 | is_pid */

struct far_engine {
	struct far_engine *next;	/* of the process */
	struct soft_nic driver;		/* of nobody: it outlives all NICs that come and go */
	struct kvio_fabric *fabric;
	struct soft_far *fars;
	uint64_t next_id;
	int epoll_fd, stop_fd, timer_fd;
	bool stopping;			/* atomic: fork looks without the fabric's lock */
	bool forking;			/* fork has the fabric's lock */
};

static pthread_mutex_t engines_lock = PTHREAD_MUTEX_INITIALIZER;
static struct far_engine *engines;

void far_engines_lock(void)
{
	pthread_mutex_lock(&engines_lock);
}

void far_engines_unlock(void)
{
	pthread_mutex_unlock(&engines_lock);
}

struct soft_far *far_first(const struct kvio_fabric *fabric)
{
	return fabric->engine->fars;
}

/* ---- forks ---- */

static void before_fork(void)
{
	far_engines_lock();
	for (struct far_engine *each = engines; each; each = each->next) {
		each->forking = !__atomic_load_n(&each->stopping, __ATOMIC_ACQUIRE);
		if (each->forking)
			kvio_domain_lock(&each->fabric->domain);
	}
}

static void unlock_after_fork(void)
{
	for (struct far_engine *each = engines; each; each = each->next)
		if (each->forking)
			pthread_mutex_unlock(&each->fabric->domain.lock);
	far_engines_unlock();
}

/* These pages were not inherited. */
static void stand_in(const void *at, size_t nbytes)
{
	void *page = (void *)((uintptr_t)at & ~(uintptr_t)4095);

	nbytes += (size_t)((uintptr_t)at & 4095);
	mmap(page, (nbytes + 4095) & ~(size_t)4095, PROT_READ | PROT_WRITE,
	     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

static void in_child(void)
{
	for (struct far_engine *each = engines; each; each = each->next) {
		for (struct kvio_nic *nic = each->fabric->domain.nics; nic; nic = nic->next)
			if (((struct soft_nic *)nic)->shared)
				stand_in(((struct soft_nic *)nic)->shared, sizeof(struct far_port));
		for (struct soft_far *far = each->fars; far; far = far->next) {
			stand_in(far->mine, sizeof(*far->mine));
			stand_in(far->theirs, sizeof(*far->theirs));
			if (far->nic.shared)
				stand_in(far->nic.shared, sizeof(struct far_port));
			close(far->their_wake_fd);
			far->their_wake_fd = -1;
			far->dead = true;
		}
		if (each->forking)
			each->fabric->engine = NULL;
	}
	unlock_after_fork();
	engines = NULL;
}

static void watch_forks(void)
{
	pthread_atfork(before_fork, unlock_after_fork, in_child);
}

/* ---- the thread ---- */

static bool has_shadows_at_work(const struct far_engine *engine)
{
	for (const struct soft_far *far = engine->fars; far; far = far->next)
		for (uint32_t lane = 0; lane < FAR_LANES; lane++)
			if (far->links[lane] && far->links[lane]->shadow.is_busy)
				return true;
	return false;
}

/* Until nothing is to be done now, the fabric's lock held. */
static void serve(struct far_engine *engine)
{
	struct itimerspec timer = { 0 };
	uint64_t next;

	while (!engine->stopping) {
		kvio_nic_drive_locked(&engine->driver.base);
		if (engine->stopping || !has_shadows_at_work(engine))
			return;
		next = soft_next_visible_ns(engine->fabric);
		if (next > kvio_monotonic_ns()) {
			timer.it_value.tv_sec = (time_t)(next / 1000000000u);
			timer.it_value.tv_nsec = (long)(next % 1000000000u);
			timerfd_settime(engine->timer_fd, TFD_TIMER_ABSTIME, &timer, NULL);
			return;
		}
		/* A peer that posts without pause must not keep the fabric from our own threads. */
		kvio_let_others_in(&engine->fabric->domain);
	}
}

static void bury(struct far_engine *engine, uint64_t id)
{
	for (struct soft_far *far = engine->fars; far; far = far->next)
		if (far->id == id)
			soft_far_dead(far);
}

static void engine_free(struct far_engine *engine)
{
	close(engine->epoll_fd);
	close(engine->stop_fd);
	close(engine->timer_fd);
	free(engine);
}

static void *run(void *argument)
{
	struct far_engine *engine = argument, **place = &engines;
	struct kvio_fabric *fabric = engine->fabric;
	struct epoll_event events[16];
	bool stopping = false;

	while (!stopping) {
		int got = epoll_wait(engine->epoll_fd, events, 16, -1);

		pthread_mutex_lock(&fabric->domain.lock);
		for (int i = 0; i < got; i++)
			if (events[i].data.u64 > OF_TIMER && events[i].data.u64 & 1)
				bury(engine, events[i].data.u64 >> 1);
		serve(engine);
		stopping = engine->stopping;
		pthread_mutex_unlock(&fabric->domain.lock);
	}
	far_engines_lock();
	while (*place != engine)
		place = &(*place)->next;
	*place = engine->next;
	far_engines_unlock();
	engine_free(engine);
	kvio_fabric_put(fabric);
	return NULL;
}

/* ---- coming and going ---- */

/* Edges, so that nothing has to be read: a write wakes us, however many there were before. */
static int watch(struct far_engine *engine, int fd, uint64_t data)
{
	struct epoll_event event = { .events = EPOLLIN | EPOLLET, .data.u64 = data };

	return epoll_ctl(engine->epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0 ? -errno : 0;
}

static int start(struct far_engine *engine)
{
	pthread_attr_t attributes;
	sigset_t all, before;
	pthread_t thread;
	int rc;

	rc = watch(engine, engine->stop_fd, OF_STOP);
	if (rc == 0)
		rc = watch(engine, engine->timer_fd, OF_TIMER);
	if (rc < 0)
		return rc;
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attributes, 256 << 10);
	sigfillset(&all);			/* signals are for Python's threads */
	pthread_sigmask(SIG_SETMASK, &all, &before);
	rc = -pthread_create(&thread, &attributes, run, engine);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attributes);
	return rc;
}

static int engine_new(struct kvio_fabric *fabric)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	struct far_engine *engine = calloc(1, sizeof(*engine));
	int rc = -EMFILE;

	if (!engine)
		return -ENOMEM;
	pthread_once(&once, watch_forks);
	engine->fabric = fabric;
	engine->driver.fabric = fabric;
	engine->driver.base.ops = &kvio_soft_ops;
	engine->driver.base.domain = &fabric->domain;
	engine->next_id = 1;
	engine->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	engine->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	engine->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
	if (engine->epoll_fd >= 0 && engine->stop_fd >= 0 && engine->timer_fd >= 0)
		rc = start(engine);
	if (rc < 0) {
		engine_free(engine);
		return rc;
	}
	fabric->refs++;
	fabric->engine = engine;
	engine->next = engines;
	engines = engine;
	return 0;
}

static void engine_stop(struct far_engine *engine)
{
	uint64_t one = 1;

	engine->fabric->engine = NULL;
	__atomic_store_n(&engine->stopping, true, __ATOMIC_RELEASE);
	if (write(engine->stop_fd, &one, sizeof(one)) < 0)
		return;			/* cannot be: it is ours and was 0 */
}

/* Both locks are held. */
int far_engine_join(struct soft_far *far)
{
	struct kvio_fabric *fabric = far->nic.fabric;
	struct far_engine *engine;
	int rc = fabric->engine ? 0 : engine_new(fabric);

	if (rc < 0)
		return rc;
	engine = fabric->engine;
	far->id = engine->next_id++;
	rc = watch(engine, far->wake_fd, far->id << 1);
	if (rc == 0)
		rc = watch(engine, far->pid_fd, far->id << 1 | 1);
	if (rc < 0) {
		epoll_ctl(engine->epoll_fd, EPOLL_CTL_DEL, far->wake_fd, NULL);
		if (!engine->fars)
			engine_stop(engine);
		return rc;
	}
	far->next = engine->fars;
	engine->fars = far;
	return 0;
}

/* The fabric's lock is held. */
void far_engine_leave(struct soft_far *far)
{
	struct far_engine *engine = far->nic.fabric->engine;
	struct soft_far **place;

	if (!engine)
		return;			/* a forked child */
	for (place = &engine->fars; *place && *place != far; )
		place = &(*place)->next;
	if (!*place)
		return;			/* it has never joined */
	*place = far->next;
	epoll_ctl(engine->epoll_fd, EPOLL_CTL_DEL, far->wake_fd, NULL);
	epoll_ctl(engine->epoll_fd, EPOLL_CTL_DEL, far->pid_fd, NULL);
	if (!engine->fars)
		engine_stop(engine);
}
