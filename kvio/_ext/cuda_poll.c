/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Completions: asking events, reporting in posting order; sleeping until there are some.
 *
 * Who sleeps has the driver run a host function behind the first unfinished op of each queue pair
 * (`armed`). It writes to the waker. One thread sleeps there, others on `moved`; what a driving
 * thread takes from under the sleeper is said by kick_fd. A device that has died runs no host
 * function, so nobody sleeps longer than WATCHDOG_NS while something is in flight.
 */
#include <poll.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "cuda_impl.h"

#define WATCHDOG_NS 20000000u
#define STOP_NS UINT64_C(100000000)	/* for the engines of a context that has died */

/* ---- finishing ops ---- */

static void give_back(struct cuda_dev *dev, struct cuda_op *op)
{
	cuda_event_give(dev, op->event);
	cuda_chunks_give(dev, op->chunks);
	op->event = NULL;
	op->chunks = NULL;
}

/* READs are counted as the other end's sending, in its class. */
static void count_bytes(struct cuda_qp *qp, const struct cuda_op *op)
{
	struct cuda_qp *remote = qp->remote;
	struct kvio_counters *mine = &cuda_nic_of(qp)->counters;
	struct kvio_counters *theirs = remote ? &cuda_nic_of(remote)->counters : NULL;
	uint8_t sl = qp->base.sl, read_sl = remote ? remote->base.sl : qp->base.sl;

	mine->tx_bytes[sl] += op->nbytes[0];
	mine->tx_packets += op->copies[0];
	mine->rx_bytes[read_sl] += op->nbytes[1];
	mine->rx_packets += op->copies[1];
	if (!theirs)
		return;
	theirs->rx_bytes[sl] += op->nbytes[0];
	theirs->rx_packets += op->copies[0];
	theirs->tx_bytes[read_sl] += op->nbytes[1];
	theirs->tx_packets += op->copies[1];
}

/*
 * Has the stream passed? A context that has died takes nothing forward: whatever the driver then
 * says, other than that the work still runs, is the end. It says nowhere when the engines have
 * stopped, so they are given STOP_NS before their memory is anybody's. Our context is current, or
 * cannot be.
 */
static bool is_past(struct cuda_qp *qp, struct cuda_op *op, bool entered)
{
	struct cuda_dev *dev = cuda_nic_of(qp)->dev;
	int code = CUDA_DEINITIALIZED;

	if (!op->event)
		return true;
	if (entered && op->unrecorded) {
		code = cuda_note(dev, cuda.event_record(op->event, qp->stream), "cuEventRecord");
		op->unrecorded = code != CUDA_OK;
		if (op->unrecorded && !dev->dead.code)
			return false;
	}
	if (entered && !op->unrecorded)
		code = cuda.event_query(op->event);
	if (code == CUDA_NOT_READY)
		return false;
	if (code == CUDA_OK) {
		count_bytes(qp, op);
		return true;
	}
	if (entered && !dev->dead.code && !cuda_is_sticky(code))
		return false;	/* proves nothing: the copy may run yet */
	if (entered)
		cuda_died(dev, code, "cuEventQuery");
	if (dev->dead.code && kvio_monotonic_ns() - dev->died_ns < STOP_NS)
		return false;
	cuda_fail(qp, true);
	op->status = KVIO_WC_FATAL_ERR;
	cuda_check_alive(dev, qp->why, sizeof(qp->why));
	return true;
}

static void moved(struct cuda_qp *qp)
{
	struct cuda_nic *nic = cuda_nic_of(qp);

	if (qp->is_moved)
		return;
	qp->is_moved = true;
	qp->next_moved = nic->moved;
	nic->moved = qp;
}

/* Finishes what the stream of each queue pair has passed. True if that was any. */
static bool finish_all(struct cuda_dev *dev)
{
	struct cuda_qp **link = &dev->busy, *qp;
	bool entered, any = false;

	if (!dev->busy)
		return false;
	entered = cuda_enter(dev);
	while ((qp = *link) != NULL) {
		while (qp->done != qp->tail && is_past(qp, cuda_op_at(qp, qp->done), entered)) {
			give_back(dev, cuda_op_at(qp, qp->done++));
			qp->armed = false;
			moved(qp);
			any = true;
		}
		if (qp->done == qp->tail) {
			*link = qp->next_busy;
			qp->is_busy = false;
		} else {
			link = &qp->next_busy;
		}
	}
	if (entered)
		cuda_leave(dev);
	return any;
}

/* ---- reporting, in posting order ---- */

static uint32_t status_of(const struct cuda_op *op)
{
	if (!op->status || op->reported == 0)
		return op->status;
	return KVIO_WC_WR_FLUSH_ERR;
}

static uint32_t report_op(struct cuda_qp *qp, struct cuda_op *op, struct kvio_wc *wc,
			  uint32_t room, uint64_t now)
{
	struct kvio_counters *counters = &cuda_nic_of(qp)->counters;
	uint32_t count = 0;

	while (op->reported < op->count && count < room) {
		uint32_t status = status_of(op);
		bool last = op->last && op->reported + 1 == op->count;

		if (status || op->every || last) {
			wc[count++] = (struct kvio_wc){
				.wr_id = op->wr_id + op->reported, .time_ns = now,
				.status = status, .ways = op->ways,
			};
			counters->signalled += op->every || last;
			counters->errors += status != 0;
			op->reported++;
		} else {		/* nobody asked for the others */
			op->reported = op->last ? op->count - 1 : op->count;
		}
	}
	counters->completions += count;
	return count;
}

static uint32_t report(struct cuda_qp *qp, struct kvio_wc *wc, uint32_t room, uint64_t now)
{
	uint32_t count = 0;

	while (qp->head != qp->done) {
		struct cuda_op *op = cuda_op_at(qp, qp->head);
		uint32_t before = op->reported;

		count += report_op(qp, op, wc + count, room - count, now);
		qp->taken -= op->reported - before;
		if (op->reported < op->count)
			break;
		qp->head++;
	}
	return count;
}

static void kick(struct cuda_dev *dev)
{
	uint64_t one = 1;

	if (!dev->sleeping || dev->kicked)
		return;
	dev->kicked = write(dev->kick_fd, &one, sizeof(one)) == sizeof(one);
}

int cuda_poll(struct kvio_nic *base, struct kvio_wc *wc, uint32_t count)
{
	struct cuda_nic *nic = (struct cuda_nic *)base;
	struct cuda_qp *qp;
	uint32_t got = 0;

	if (!nic->moved)
		return 0;
	for (uint64_t now = kvio_monotonic_ns(); got < count && (qp = nic->moved) != NULL; ) {
		got += report(qp, wc + got, count - got, now);
		if (got < count) {
			nic->moved = qp->next_moved;
			qp->is_moved = false;
		}
	}
	if (got)
		kick(nic->dev);
	return (int)got;
}

/* ---- being woken ---- */

struct cuda_waker *cuda_waker_new(void)
{
	struct cuda_waker *waker = calloc(1, sizeof(*waker));

	if (!waker)
		return NULL;
	waker->refs = 1;
	waker->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (waker->fd >= 0)
		return waker;
	free(waker);
	return NULL;
}

void cuda_waker_put(struct cuda_waker *waker)
{
	if (__atomic_sub_fetch(&waker->refs, 1, __ATOMIC_ACQ_REL))
		return;
	close(waker->fd);
	free(waker);
}

static void wake(struct cuda_waker *waker)
{
	uint64_t one = 1;

	if (write(waker->fd, &one, sizeof(one)) < 0)
		return;		/* EAGAIN: it is readable already */
}

/* Called by a thread of the driver, which must not be kept waiting. */
static void has_passed(void *arg)
{
	wake(arg);
	cuda_waker_put(arg);
}

/* In the notifying stream now. What a context that died never calls keeps the waker for good. */
static CUresult launch_waker(struct cuda_qp *qp)
{
	struct cuda_waker *waker = cuda_nic_of(qp)->dev->waker;
	CUresult code;

	__atomic_add_fetch(&waker->refs, 1, __ATOMIC_RELAXED);
	code = cuda.host_func(qp->notify, has_passed, waker);
	if (code != CUDA_OK)
		cuda_waker_put(waker);
	return code;
}

/* A host function behind the first unfinished op. A stream of its own, for copies that follow in
 * ours would wait for it. Where this fails the watchdog serves. */
static void arm_one(struct cuda_qp *qp)
{
	struct cuda_dev *dev = cuda_nic_of(qp)->dev;
	struct cuda_op *op = cuda_op_at(qp, qp->done);
	CUresult code = CUDA_OK;

	if (!op->event) {
		wake(dev->waker);
		return;
	}
	if (op->unrecorded)
		return;
	if (!qp->notify)
		code = cuda.stream_create(&qp->notify, CUDA_STREAM_NON_BLOCKING,
					  dev->least_urgent);
	if (cuda_note(dev, code, "cuStreamCreateWithPriority") != CUDA_OK) {
		qp->notify = NULL;
		return;
	}
	code = cuda_note(dev, cuda.stream_wait(qp->notify, op->event, 0), "cuStreamWaitEvent");
	if (code == CUDA_OK)
		code = cuda_note(dev, launch_waker(qp), "cuLaunchHostFunc");
	qp->armed = code == CUDA_OK;
}

static void arm_all(struct cuda_dev *dev)
{
	if (!dev->busy || !cuda_enter(dev))
		return;
	for (struct cuda_qp *qp = dev->busy; qp; qp = qp->next_busy)
		if (!qp->armed)
			arm_one(qp);
	cuda_leave(dev);
}

void cuda_busy(struct cuda_qp *qp)
{
	struct cuda_dev *dev = cuda_nic_of(qp)->dev;

	if (!qp->is_busy) {
		qp->is_busy = true;
		qp->next_busy = dev->busy;
		dev->busy = qp;
	}
	if (dev->domain.has_event_fd)
		cuda_arm(qp->base.nic);
	else if (dev->sleeping)
		arm_all(dev);
}

void cuda_disarm(struct cuda_qp *qp)
{
	struct cuda_nic *nic = cuda_nic_of(qp);
	struct cuda_dev *dev = nic->dev;
	struct cuda_qp **link;

	for (link = &dev->busy; *link; link = &(*link)->next_busy)
		if (*link == qp) {
			*link = qp->next_busy;
			break;
		}
	for (link = &nic->moved; *link; link = &(*link)->next_moved)
		if (*link == qp) {
			*link = qp->next_moved;
			break;
		}
}

/* ---- driving and sleeping ---- */

static void read_all(int fd)
{
	uint64_t count;

	if (read(fd, &count, sizeof(count)) < 0)
		return;		/* EAGAIN: nothing was there */
}

int cuda_drive(struct kvio_nic *base, uint64_t now_ns)
{
	struct cuda_dev *dev = ((struct cuda_nic *)base)->dev;

	if ((dev->sleeping || base->domain->has_event_fd) && cuda_is_ours(dev))
		read_all(dev->waker->fd);	/* before the events are asked: nothing is lost */
	if (finish_all(dev))
		return 1;
	if (dev->sleeping)
		arm_all(dev);			/* we may have read the sleeper's wake */
	return 0;
}

/* One thread sleeps on the device; others on `moved`, which is signalled with every batch that
 * drains, and when the first one wakes. */
static void sleep_with_others(struct cuda_dev *dev, uint64_t timeout_ns)
{
	uint64_t until_ns = kvio_monotonic_ns() + timeout_ns;
	struct timespec until = {
		.tv_sec = (time_t)(until_ns / 1000000000u),
		.tv_nsec = (long)(until_ns % 1000000000u),
	};

	pthread_cond_timedwait(&dev->domain.moved, &dev->domain.lock, &until);
}

int cuda_sleep(struct kvio_nic *base, uint64_t timeout_ns)
{
	struct cuda_nic *nic = (struct cuda_nic *)base;
	struct cuda_dev *dev = nic->dev;
	struct pollfd fds[2] = {
		{ .fd = dev->waker->fd, .events = POLLIN },
		{ .fd = dev->kick_fd, .events = POLLIN },
	};
	uint64_t nap_ns = timeout_ns < WATCHDOG_NS ? timeout_ns : WATCHDOG_NS;
	struct timespec nap = { .tv_nsec = (long)nap_ns };

	if (nic->busy_poll || !cuda_is_ours(dev)) {
		kvio_let_others_in(base->domain);
		return 0;
	}
	arm_all(dev);
	if (dev->sleeping) {
		sleep_with_others(dev, nap_ns);
		return 0;
	}
	dev->sleeping = true;
	dev->kicked = false;
	kvio_unlock(base);
	ppoll(fds, 2, &nap, NULL);
	kvio_lock(base);
	dev->sleeping = false;
	if (dev->kicked)
		read_all(dev->kick_fd);
	read_all(dev->waker->fd);
	pthread_cond_broadcast(&dev->domain.moved);
	return 0;
}

/* ---- event loops ---- */

static int make_epoll(struct cuda_dev *dev)
{
	struct epoll_event event = { .events = EPOLLIN };
	int fd = epoll_create1(EPOLL_CLOEXEC);

	dev->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
	if (fd >= 0 && dev->timer_fd >= 0 &&
	    epoll_ctl(fd, EPOLL_CTL_ADD, dev->waker->fd, &event) == 0 &&
	    epoll_ctl(fd, EPOLL_CTL_ADD, dev->timer_fd, &event) == 0)
		return fd;
	if (fd >= 0)
		close(fd);
	if (dev->timer_fd >= 0)
		close(dev->timer_fd);
	dev->timer_fd = -1;
	return -EMFILE;
}

int cuda_event_fd(struct kvio_nic *base)
{
	struct cuda_dev *dev = ((struct cuda_nic *)base)->dev;

	if (dev->epoll_fd < 0)
		dev->epoll_fd = make_epoll(dev);
	return dev->epoll_fd;
}

static void set_timer(struct cuda_dev *dev, uint64_t when_ns)
{
	struct itimerspec timer = {
		.it_value.tv_sec = (time_t)(when_ns / 1000000000u),
		.it_value.tv_nsec = (long)(when_ns % 1000000000u),
	};

	dev->timer_ns = when_ns;
	timerfd_settime(dev->timer_fd, TFD_TIMER_ABSTIME, &timer, NULL);
}

/* The watchdog of a loop: it goes off, is seen by the next drive, and set anew while there is
 * something in flight. */
int cuda_arm(struct kvio_nic *base)
{
	struct cuda_dev *dev = ((struct cuda_nic *)base)->dev;
	uint64_t now = kvio_monotonic_ns();

	if (!cuda_is_ours(dev))
		return 0;
	arm_all(dev);
	if (dev->timer_fd >= 0 && now >= dev->timer_ns && (dev->busy || dev->timer_ns))
		set_timer(dev, dev->busy ? now + WATCHDOG_NS : 0);
	return 0;
}
