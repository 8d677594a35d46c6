/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Completions: heard of per rail, reported per queue pair in posting order; sleeping until there
 * are some; what the device says unasked.
 */
#include <poll.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "verbs.h"

#ifdef KVIO_HAVE_VERBS

#define POLL_BATCH 32
#define LOOK_EVERY 256u			/* drives between looks at what costs a system call */
#define AGAIN_NS 100000000u		/* between attempts to stop a device */

/* ---- hearing of pieces ---- */

static void hear_one(struct verbs_nic *nic, uint32_t rail, const struct ibv_wc *wc)
{
	uint32_t slot = (uint32_t)(wc->wr_id >> (2 * VERBS_NUMBER_BITS)), ahead;
	uint32_t number = (uint32_t)(wc->wr_id >> VERBS_NUMBER_BITS) & VERBS_NUMBER;
	struct verbs_qp *qp = slot < nic->num_slots ? nic->slots[slot] : NULL;
	struct verbs_end *end = qp ? &qp->ends[rail] : NULL;
	struct verbs_record *record;

	if (!end || !end->qp || end->qp->qp_num != wc->qp_num)
		return;				/* of one that is gone */
	ahead = ((uint32_t)wc->wr_id + 1 - end->done) & VERBS_NUMBER;
	if (ahead == 0 || ahead > end->tail - end->done)
		return;				/* of before it was stopped */
	end->done += ahead;
	verbs_moved(qp);
	if (wc->status == IBV_WC_SUCCESS)
		return;
	record = verbs_record_at(qp, number);
	if (!record->status)
		record->status = (uint8_t)(wc->status <= IBV_WC_GENERAL_ERR ? wc->status :
					   IBV_WC_GENERAL_ERR);
	verbs_fail(qp);
}

void verbs_hear(struct verbs_nic *nic, struct verbs_rail *rail)
{
	uint32_t r = (uint32_t)(rail - nic->rails);
	struct ibv_wc wc[POLL_BATCH];

	for (uint32_t i = 0; i < rail->num_cqs; i++) {
		struct ibv_cq *cq = rail->cqs[i]->cq;
		int got;

		do {
			got = ibv_poll_cq(cq, POLL_BATCH, wc);
			for (int n = 0; n < got; n++)
				hear_one(nic, r, &wc[n]);
		} while (got == POLL_BATCH);
	}
}

/* ---- reporting, in posting order ---- */

static void account(struct verbs_qp *qp, const struct verbs_record *record, uint32_t status)
{
	struct kvio_counters *counters = &verbs_nic_of(qp)->counters;

	if (status)
		counters->errors++;
	else if (record->read)
		counters->rx_bytes[qp->base.sl] += record->length;
	else
		counters->tx_bytes[qp->base.sl] += record->length;
}

static uint32_t report(struct verbs_qp *qp, struct kvio_wc *wc, uint32_t room, uint64_t now)
{
	uint32_t count = 0;

	while (qp->head != qp->tail && count < room) {
		const struct verbs_record *record = verbs_record_at(qp, qp->head);
		bool local = record->rail == VERBS_LOCAL;
		uint32_t status = record->status;

		if (!local && (int32_t)(qp->ends[record->rail].done - record->end) < 0)
			break;
		if (local && qp->flushing)
			status = KVIO_WC_WR_FLUSH_ERR;
		if (status) {
			qp->flushing = true;
			verbs_fail(qp);
		}
		account(qp, record, status);
		if (status || record->report)
			wc[count++] = (struct kvio_wc){
				.wr_id = record->wr_id, .time_ns = now, .status = status,
			};
		qp->head++;
	}
	return count;
}

/* Wakes the thread that sleeps: what it waits for may have happened without its help. */
static void kick(struct verbs_nic *nic)
{
	uint64_t one = 1;

	if (!nic->sleeping || nic->kicked)
		return;
	nic->kicked = write(nic->kick_fd, &one, sizeof(one)) == sizeof(one);
}

int verbs_poll(struct kvio_nic *base, struct kvio_wc *wc, uint32_t count)
{
	struct verbs_nic *nic = (struct verbs_nic *)base;
	struct verbs_qp *qp;
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
	nic->counters.completions += got;
	if (got)
		kick(nic);
	return (int)got;
}

/* ---- what the device says unasked ---- */

static void device_died(struct verbs_nic *nic, struct verbs_rail *rail)
{
	rail->dead = true;
	for (struct kvio_qp *each = nic->base.qps; each; each = each->next) {
		struct verbs_qp *qp = (struct verbs_qp *)each;

		verbs_fail(qp);
		verbs_stop(qp, (uint32_t)(rail - nic->rails));
	}
}

/* A queue pair that the device put in error by itself: a peer's access that it refused, say. */
static void qp_died(struct verbs_nic *nic, const struct ibv_qp *which)
{
	for (struct kvio_qp *each = nic->base.qps; each; each = each->next) {
		struct verbs_qp *qp = (struct verbs_qp *)each;

		for (uint32_t r = 0; r < nic->num_rails; r++)
			if (qp->ends[r].qp == which)
				verbs_fail(qp);
	}
}

static void read_async(struct verbs_nic *nic, struct verbs_rail *rail)
{
	struct ibv_async_event event;

	while (verbs.get_async_event(rail->context, &event) == 0) {
		enum ibv_event_type type = event.event_type;
		const struct ibv_qp *qp = event.element.qp;

		verbs.ack_async_event(&event);
		nic->async_events++;
		if (type == IBV_EVENT_DEVICE_FATAL)
			device_died(nic, rail);
		else if (type == IBV_EVENT_QP_FATAL || type == IBV_EVENT_QP_REQ_ERR ||
			 type == IBV_EVENT_QP_ACCESS_ERR)
			qp_died(nic, qp);
	}
}

static void read_channel(struct verbs_nic *nic, struct verbs_rail *rail)
{
	struct ibv_cq *cq;
	void *context;

	while (verbs.get_cq_event(rail->channel, &cq, &context) == 0) {
		struct verbs_cq *mine = context;

		verbs.ack_cq_events(cq, 1);
		nic->num_armed -= mine->armed;
		mine->armed = false;
	}
}

static void read_events(struct verbs_nic *nic)
{
	struct epoll_event events[2 * KVIO_MAX_RAILS + 1];
	int count = epoll_wait(nic->epoll_fd, events, 2 * KVIO_MAX_RAILS + 1, 0);

	for (int i = 0; i < count; i++) {
		uint32_t from = events[i].data.u32;

		if (from == VERBS_TIMER)
			continue;			/* stop_silent sets it anew */
		if (from % 2)
			read_async(nic, &nic->rails[from / 2]);
		else
			read_channel(nic, &nic->rails[from / 2]);
	}
}

/* Nothing may be lost between the last look and the request: so look again after it. True if
 * there is something to report. */
static bool arm_all(struct verbs_nic *nic)
{
	bool asked = false;

	for (uint32_t r = 0; r < nic->num_rails; r++) {
		struct verbs_rail *rail = &nic->rails[r];

		for (uint32_t i = 0; i < rail->num_cqs; i++) {
			struct verbs_cq *cq = rail->cqs[i];

			if (cq->armed)
				continue;
			cq->armed = ibv_req_notify_cq(cq->cq, 0) == 0;
			nic->num_armed += cq->armed;
			asked = true;
		}
	}
	for (uint32_t r = 0; r < nic->num_rails && asked; r++)
		verbs_hear(nic, &nic->rails[r]);
	return nic->moved != NULL;
}

/* ---- driving and sleeping ---- */

static void set_timer(struct verbs_nic *nic, uint64_t when_ns)
{
	struct itimerspec timer = { 0 };		/* that is never */

	nic->silent_ns = when_ns;
	if (when_ns != KVIO_NEVER) {
		timer.it_value.tv_sec = (time_t)(when_ns / 1000000000u);
		timer.it_value.tv_nsec = (long)(when_ns % 1000000000u);
	}
	timerfd_settime(nic->timer_fd, TFD_TIMER_ABSTIME, &timer, NULL);
}

void verbs_look_at(struct verbs_nic *nic, uint64_t when_ns)
{
	if (when_ns < nic->silent_ns)
		set_timer(nic, when_ns);
}

static bool stop_all(struct verbs_qp *qp)
{
	bool stopped = true;

	for (uint32_t r = 0; r < verbs_nic_of(qp)->num_rails; r++)
		if (qp->ends[r].done != qp->ends[r].tail)
			stopped &= verbs_stop(qp, r);
	return stopped;
}

/* Devices that do not say what became of their pieces: take them away. */
static void stop_silent(struct verbs_nic *nic, uint64_t now_ns)
{
	uint64_t next = KVIO_NEVER;

	for (struct kvio_qp *each = nic->base.qps; each; each = each->next) {
		struct verbs_qp *qp = (struct verbs_qp *)each;
		uint64_t due = qp->failed_ns + nic->base.drain_ns;

		if (qp->state != KVIO_QP_ERROR || qp->head == qp->tail)
			continue;
		if (due <= now_ns)
			due = stop_all(qp) ? KVIO_NEVER : now_ns + AGAIN_NS;
		next = due < next ? due : next;
	}
	set_timer(nic, next);
}

int verbs_drive(struct kvio_nic *base, uint64_t now_ns)
{
	struct verbs_nic *nic = (struct verbs_nic *)base;
	bool look = nic->drives++ % LOOK_EVERY == 0;

	if (nic->sleeping && base->in_flight != nic->sleep_in_flight)
		kick(nic);
	if (look || nic->num_armed || base->domain->has_event_fd)
		read_events(nic);
	for (uint32_t r = 0; r < nic->num_rails; r++)
		verbs_hear(nic, &nic->rails[r]);
	if (now_ns >= nic->silent_ns)
		stop_silent(nic, now_ns);
	if (nic->moved)
		return 1;
	return nic->sleeping && arm_all(nic);	/* we may have read the sleeper's event */
}

/* One thread sleeps on the device; others on `moved`, which is signalled with every batch that
 * drains, and when the first one wakes. */
static void sleep_with_others(struct verbs_nic *nic, uint64_t timeout_ns)
{
	uint64_t until_ns = kvio_monotonic_ns() + timeout_ns;
	struct timespec until = {
		.tv_sec = (time_t)(until_ns / 1000000000u),
		.tv_nsec = (long)(until_ns % 1000000000u),
	};

	pthread_cond_timedwait(&nic->own_domain.moved, &nic->own_domain.lock, &until);
}

int verbs_sleep(struct kvio_nic *base, uint64_t timeout_ns)
{
	struct verbs_nic *nic = (struct verbs_nic *)base;
	struct pollfd fds[2] = {
		{ .fd = nic->epoll_fd, .events = POLLIN },
		{ .fd = nic->kick_fd, .events = POLLIN },
	};
	struct timespec timeout = {
		.tv_sec = (time_t)(timeout_ns / 1000000000u),
		.tv_nsec = (long)(timeout_ns % 1000000000u),
	};
	uint64_t kicks;

	if (nic->busy_poll) {
		kvio_let_others_in(base->domain);
		return 0;
	}
	if (nic->moved || arm_all(nic))
		return 0;
	if (nic->sleeping) {
		sleep_with_others(nic, timeout_ns);
		return 0;
	}
	nic->sleeping = true;
	nic->kicked = false;
	nic->sleep_in_flight = base->in_flight;
	kvio_unlock(base);
	ppoll(fds, 2, &timeout, NULL);
	kvio_lock(base);
	nic->sleeping = false;
	if (nic->kicked && read(nic->kick_fd, &kicks, sizeof(kicks)) < 0)
		kicks = 0;	/* EAGAIN: somebody was quicker, which cannot be */
	pthread_cond_broadcast(&nic->own_domain.moved);
	return 0;
}

int verbs_event_fd(struct kvio_nic *nic)
{
	return ((struct verbs_nic *)nic)->epoll_fd;
}

int verbs_arm(struct kvio_nic *base)
{
	struct verbs_nic *nic = (struct verbs_nic *)base;

	while (nic->moved || arm_all(nic))
		kvio_batch_dispatch(base);
	return 0;
}

#endif
