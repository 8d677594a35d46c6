/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The soft network: a discrete-event simulation in link time that copies the bytes.
 *
 * Each queue pair offers one packet at a time. It starts once its doorbell has rung, the packet
 * before it has ended, and both the sending port and the receiving port are free; it occupies
 * each port for bytes / rate of that port and ends when both are done. The receiving port stands
 * for the switch port that faces it, so both ends arbitrate (softport.c).
 */
#include <sys/timerfd.h>
#include <unistd.h>

#include "softnic.h"

#define DRIVE_BYTES (1u << 20)		/* copied before the lock is given up: some 100 us */
#define SOFT_LAST_NS (UINT64_MAX / SOFT_TICKS / 2)
#define SLEEP_NS 2000000u		/* wake to copy: a burst at the end would come late */

uint64_t soft_clock_ns(const struct kvio_fabric *fabric)
{
	return fabric->is_virtual ? fabric->virtual_ns : kvio_monotonic_ns();
}

/* ---- the list of queue pairs with something to do ---- */

void soft_busy_add(struct kvio_fabric *fabric, struct soft_qp *qp)
{
	if (qp->is_busy)
		return;
	qp->is_busy = true;
	qp->busy_at = fabric->num_busy;
	fabric->busy[fabric->num_busy++] = qp;	/* room was made when it was created */
}

void soft_busy_remove(struct kvio_fabric *fabric, struct soft_qp *qp)
{
	struct soft_qp *last;

	if (!qp->is_busy)
		return;
	qp->is_busy = false;
	last = fabric->busy[--fabric->num_busy];
	fabric->busy[qp->busy_at] = last;
	last->busy_at = qp->busy_at;
}

/* Room in the list for one more queue pair: adding it later cannot fail. */
int soft_busy_room(struct kvio_fabric *fabric)
{
	struct soft_qp **larger;
	uint32_t room = 2 * fabric->max_busy + 16;

	if (fabric->num_qps < fabric->max_busy)
		return 0;
	larger = realloc(fabric->busy, room * sizeof(*larger));
	if (!larger)
		return -ENOMEM;
	fabric->busy = larger;
	fabric->max_busy = room;
	return 0;
}

/* ---- sending ---- */

static void copy_part(uint8_t *local, uint8_t *far, uint64_t nbytes, bool read)
{
	if (nbytes)		/* what is empty may lie nowhere */
		memmove(read ? local : far, read ? far : local, nbytes);
}

static void copy_packet(struct soft_qp *qp, const struct kvio_wr *wr, uint64_t nbytes)
{
	bool read = wr->opcode == KVIO_OP_READ;
	uint8_t *far = qp->far + qp->offset;

	if (wr->num_sge == 0) {
		copy_part(qp->local + qp->offset, far, nbytes, read);
		return;
	}
	while (nbytes) {
		const struct kvio_sge *sge = &qp->sges[wr->sge_first + qp->sge_index];
		uint64_t left = sge->length - qp->sge_offset;
		uint64_t take = nbytes < left ? nbytes : left;
		uint8_t *local = (uint8_t *)(uintptr_t)sge->addr + qp->sge_offset;

		copy_part(local, far, take, read);
		far += take;
		nbytes -= take;
		qp->sge_offset += (uint32_t)take;
		if (take == left) {
			qp->sge_index++;
			qp->sge_offset = 0;
		}
	}
}

static uint64_t duration(const struct soft_nic *nic, uint64_t nbytes)
{
	uint64_t rate = nic->bytes_per_s;

	return rate ? (nbytes * (SOFT_TICKS * UINT64_C(1000000000)) + rate - 1) / rate : 0;
}

struct run {			/* packets of one message, back to back */
	uint64_t packets;
	uint64_t nbytes;
	uint64_t last;		/* bytes of the last one */
	uint64_t step;		/* ticks from start to start */
};

/* One packet; or, when nobody else could send before `until`, all that start by then. */
static struct run plan(const struct soft_qp *qp, uint64_t left, uint64_t until, bool alone)
{
	uint64_t mtu = qp->mtu, tx, rx, fit;
	struct run run = { .packets = 1, .nbytes = left < mtu ? left : mtu };

	if (alone && left > mtu && !qp->source->drop_in) {
		tx = duration(qp->source, mtu);
		rx = duration(qp->sink, mtu);
		run.step = tx > rx ? tx : rx;
		fit = run.step ? (until - qp->start) / run.step + 1 : UINT64_MAX;
		run.packets = (left + mtu - 1) / mtu;
		if (run.packets > DRIVE_BYTES / mtu + 1)
			run.packets = DRIVE_BYTES / mtu + 1;
		if (run.packets > fit)
			run.packets = fit;
		run.nbytes = run.packets * mtu < left ? run.packets * mtu : left;
	}
	run.last = run.nbytes - (run.packets - 1) * mtu;
	return run;
}

static uint64_t occupy(struct soft_port *port, const struct soft_nic *nic, const struct run *run,
		       uint32_t mtu, uint64_t last_start)
{
	uint64_t last = duration(nic, run->last);

	port->busy += last;
	if (run->packets > 1)
		port->busy += (run->packets - 1) * duration(nic, mtu);
	port->free = last_start + last;
	return port->free;
}

static uint64_t send_packets(struct soft_qp *qp, uint64_t until, bool alone)
{
	const struct kvio_wr *wr = &soft_wqe_at(qp, qp->cur)->wr;
	struct run run = plan(qp, wr->length - qp->offset, until, alone);
	uint64_t last_start = qp->start + (run.packets - 1) * run.step, tx_end, rx_end;
	struct soft_nic *source = qp->source, *sink = qp->sink;
	const struct soft_arbitration *rules = &source->fabric->arbitration;

	if (source->shared && !soft_port_take(source, qp->start,
					      last_start + duration(source, run.last)))
		return 0;
	source->counters.tx_packets += run.packets;
	source->counters.tx_bytes[qp->sl] += run.nbytes;
	if (source->drop_in && --source->drop_in == 0) {
		/* Lost, and nobody notices: that counters count copies is tested with it. */
	} else {
		copy_packet(qp, wr, run.nbytes);
		sink->counters.rx_packets += run.packets;
		sink->counters.rx_bytes[qp->sl] += run.nbytes;
	}
	soft_arbiter_sent(rules, &source->tx.arbiter, qp->vl, run.nbytes, qp->mtu);
	soft_arbiter_sent(rules, &sink->rx.arbiter, qp->vl, run.nbytes, qp->mtu);
	tx_end = occupy(&source->tx, source, &run, qp->mtu, last_start);
	rx_end = occupy(&sink->rx, sink, &run, qp->mtu, last_start);
	qp->ready = tx_end > rx_end ? tx_end : rx_end;
	qp->offset += (uint32_t)run.nbytes;
	qp->sent_bytes += run.nbytes;
	if (qp->offset == wr->length)
		soft_finish(qp, qp->ready, KVIO_WC_SUCCESS);
	return run.nbytes;
}

/* ---- where bytes take no time ---- */

/* May whole messages go at once? Nobody else waits, nothing is to be told first, no fault looms,
 * and none holds the lock for longer than a share of the copying (nor is it empty). */
static bool may_burst(const struct soft_qp *qp)
{
	const struct soft_wqe *wqe = soft_wqe_at(qp, qp->cur);

	if (qp->link)		/* mapped elsewhere, and each message is verified */
		return false;
	return !qp->source->bytes_per_s && !qp->sink->bytes_per_s && !qp->source->drop_in &&
	       !soft_nic_of(qp)->fail_in && qp->remote && qp->remote->remote == qp &&
	       qp->remote->state == KVIO_QP_READY && qp->seen == qp->cur && qp->offset == 0 &&
	       wqe->wr.num_sge == 0 && wqe->wr.length - 1 < DRIVE_BYTES;
}

/* Like the message at the head, which has been checked: the same regions and rights, due now. */
static bool is_alike(const struct soft_qp *qp, const struct soft_wqe *wqe,
		     const struct kvio_wr *head)
{
	return wqe->wr.lkey == head->lkey && wqe->wr.rkey == head->rkey &&
	       wqe->wr.opcode == head->opcode && wqe->wr.num_sge == 0 &&
	       wqe->wr.length - 1 < DRIVE_BYTES && wqe->posted <= qp->ready &&
	       !(wqe->flags & (WQE_DEAD | WQE_CANCELED));
}

static void count_run(struct soft_qp *qp, uint64_t packets, uint64_t nbytes)
{
	struct kvio_counters *tx = &qp->source->counters, *rx = &qp->sink->counters;
	const struct soft_arbitration *rules = &qp->source->fabric->arbitration;

	tx->tx_packets += packets;
	tx->tx_bytes[qp->sl] += nbytes;
	rx->rx_packets += packets;
	rx->rx_bytes[qp->sl] += nbytes;
	soft_arbiter_sent(rules, &qp->source->tx.arbiter, qp->vl, nbytes, qp->mtu);
	soft_arbiter_sent(rules, &qp->sink->rx.arbiter, qp->vl, nbytes, qp->mtu);
}

/* Message after message, up to the first of which somebody wants to hear. The bytes. */
static uint64_t burst(struct soft_qp *qp)
{
	const struct kvio_wr *head = &soft_wqe_at(qp, qp->cur)->wr;
	const struct kvio_region *mine = kvio_region_find(&qp->base.nic->table, head->lkey);
	const struct kvio_region *theirs = kvio_region_find(qp->base.peer, head->rkey);
	uint64_t run_packets = 0, run_nbytes = 0, sent = 0;
	bool read = head->opcode == KVIO_OP_READ, silent = true;

	qp->ready = qp->source->tx.free = qp->sink->rx.free = qp->start;
	while (qp->cur != qp->tail && silent && sent < DRIVE_BYTES) {
		struct soft_wqe *wqe = soft_wqe_at(qp, qp->cur);
		void *local = (void *)(uintptr_t)wqe->wr.local_addr;
		void *far = (void *)(uintptr_t)wqe->wr.remote_addr;
		uint32_t length = wqe->wr.length, packets;

		if (!is_alike(qp, wqe, head) ||
		    !kvio_region_covers(mine, wqe->wr.local_addr, length) ||
		    !kvio_region_covers(theirs, wqe->wr.remote_addr, length))
			break;			/* soft_load says what becomes of it */
		memmove(read ? local : far, read ? far : local, length);
		sent += length;
		run_nbytes += length;
		run_packets += packets = (length + qp->mtu - 1) / qp->mtu;
		if ((uint64_t)packets * qp->mtu != length) {	/* a short packet ends the run */
			count_run(qp, run_packets, run_nbytes);
			run_packets = run_nbytes = 0;
		}
		wqe->end = qp->ready + soft_nic_of(qp)->delay;
		qp->sent_bytes = wqe->end_bytes;
		qp->cur++;
		silent = !(wqe->flags & WQE_SIGNALED);
		qp->seen += silent;
	}
	if (run_packets)
		count_run(qp, run_packets, run_nbytes);
	soft_load(qp);
	return sent;
}

/* ---- time passes ---- */

/* Completions due at `time` become visible. */
static void show(struct kvio_fabric *fabric, uint64_t time)
{
	for (uint32_t i = fabric->num_busy; i-- > 0; ) {	/* backwards: one may be removed */
		struct soft_qp *qp = fabric->busy[i];

		while (qp->seen != qp->cur) {
			struct soft_wqe *wqe = soft_wqe_at(qp, qp->seen);

			if (wqe->end > time)
				break;
			soft_complete(qp, wqe);
			qp->seen++;
			soft_skip_silent(qp);
		}
	}
}

int soft_drive(struct kvio_nic *nic, uint64_t now_ns)
{
	struct kvio_fabric *fabric = ((struct soft_nic *)nic)->fabric;
	uint64_t limit = soft_ticks(fabric, now_ns), copied = 0;

	if (fabric->engine)
		soft_far_drive(fabric, limit);
	while (copied < DRIVE_BYTES) {
		uint64_t visible = KVIO_NEVER, start = KVIO_NEVER;
		struct soft_qp *qp = NULL;
		uint32_t waiting = 0;

		for (uint32_t i = 0; i < fabric->num_busy; i++) {
			struct soft_qp *each = fabric->busy[i];

			if (each->seen != each->cur) {
				uint64_t end = soft_wqe_at(each, each->seen)->end;

				visible = end < visible ? end : visible;
			}
			if (soft_is_waiting(each)) {
				waiting++;
				each->start = soft_earliest_start(each);
				if (each->start < start) {
					start = each->start;
					qp = each;
				}
			}
		}
		if (visible <= start && visible <= limit) {
			fabric->time = visible > fabric->time ? visible : fabric->time;
			show(fabric, visible);
			return 1;
		}
		if (start > limit) {
			fabric->time = limit > fabric->time ? limit : fabric->time;
			return 0;
		}
		fabric->time = start > fabric->time ? start : fabric->time;
		if (waiting > 1)
			qp = soft_choose(fabric, start);
		if (qp->bad)
			soft_finish(qp, start, qp->bad);
		else if (waiting == 1 && may_burst(qp))
			copied += burst(qp);
		else
			copied += send_packets(qp, limit < visible ? limit : visible - 1,
					       waiting == 1);
	}
	return 2;
}

/* The earliest time at which a signalled completion could become visible: a lower bound. */
uint64_t soft_next_visible_ns(const struct kvio_fabric *fabric)
{
	uint64_t earliest = KVIO_NEVER;

	for (uint32_t i = 0; i < fabric->num_busy; i++) {
		const struct soft_qp *qp = fabric->busy[i];
		uint64_t when, tx, rx, rate;

		if (qp->seen != qp->cur) {
			when = soft_wqe_at(qp, qp->seen)->end;
		} else if (!soft_is_waiting(qp)) {
			continue;		/* another process will wake us */
		} else {
			uint32_t signal = soft_wqe_at(qp, qp->cur)->signal_seq;
			uint64_t left = soft_wqe_at(qp, signal)->end_bytes - qp->sent_bytes;

			when = soft_earliest_start(qp);
			tx = qp->bad ? 0 : qp->source->bytes_per_s;
			rx = qp->bad ? 0 : qp->sink->bytes_per_s;
			rate = tx && (tx < rx || !rx) ? tx : rx;
			if (rate)
				when += (uint64_t)((unsigned __int128)left * SOFT_TICKS *
						   1000000000u / rate);
		}
		earliest = when < earliest ? when : earliest;
	}
	return earliest == KVIO_NEVER ? KVIO_NEVER : soft_ns(fabric, earliest);
}

int soft_sleep(struct kvio_nic *nic, uint64_t timeout_ns)
{
	struct kvio_fabric *fabric = ((struct soft_nic *)nic)->fabric;
	uint64_t next = soft_next_visible_ns(fabric), now = kvio_monotonic_ns();
	uint64_t nap = timeout_ns < SLEEP_NS ? timeout_ns : SLEEP_NS;
	struct timespec until;

	if (!fabric->is_virtual && next <= now)
		return 0;
	if (!fabric->is_virtual && next - now < nap)
		nap = next - now;
	now += nap;
	until.tv_sec = (time_t)(now / 1000000000u);
	until.tv_nsec = (long)(now % 1000000000u);
	pthread_cond_timedwait(&fabric->domain.moved, &fabric->domain.lock, &until);
	return 0;
}

/* ---- the timer that event loops sleep on ---- */

static int set_timer(struct kvio_fabric *fabric, uint64_t at_ns)
{
	struct itimerspec timer = { 0 };

	timer.it_value.tv_sec = (time_t)(at_ns / 1000000000u);
	timer.it_value.tv_nsec = (long)(at_ns % 1000000000u);
	return timerfd_settime(fabric->timer_fd, TFD_TIMER_ABSTIME, &timer, NULL) < 0 ? -errno : 0;
}

/* Setting a timer also takes back an expiry that nobody read. */
static int arm_fabric(struct kvio_fabric *fabric)
{
	uint64_t next = soft_next_visible_ns(fabric), now = soft_clock_ns(fabric);

	if (next == fabric->armed_ns && next > now)
		return 0;
	fabric->armed_ns = next;
	if (next == KVIO_NEVER || (fabric->is_virtual && next > now))
		return set_timer(fabric, 0);			/* never, or not by itself */
	return set_timer(fabric, fabric->is_virtual || next == 0 ? 1 : next);
}

int soft_event_fd(struct kvio_nic *nic)
{
	struct kvio_fabric *fabric = ((struct soft_nic *)nic)->fabric;

	if (fabric->timer_fd < 0) {
		fabric->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
		fabric->armed_ns = KVIO_NEVER;
	}
	return fabric->timer_fd < 0 ? -errno : fabric->timer_fd;
}

int soft_arm(struct kvio_nic *nic)
{
	return arm_fabric(((struct soft_nic *)nic)->fabric);
}

/* ---- the fabric itself ---- */

int kvio_fabric_open(struct kvio_fabric **out, const struct kvio_fabric_params *params)
{
	struct kvio_fabric *fabric = calloc(1, sizeof(*fabric));
	pthread_condattr_t attributes;

	if (!fabric)
		return -ENOMEM;
	if (soft_arbitration_init(&fabric->arbitration, params) < 0) {
		free(fabric);
		return -EINVAL;
	}
	pthread_mutex_init(&fabric->domain.lock, NULL);
	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(&fabric->domain.moved, &attributes);
	pthread_condattr_destroy(&attributes);
	fabric->refs = 1;
	fabric->timer_fd = -1;
	fabric->is_virtual = params->virtual_clock;
	fabric->epoch_ns = params->virtual_clock ? 0 : kvio_monotonic_ns();
	*out = fabric;
	return 0;
}

void kvio_fabric_put(struct kvio_fabric *fabric)
{
	bool last;

	if (!fabric)
		return;
	kvio_domain_lock(&fabric->domain);
	last = --fabric->refs == 0;
	pthread_mutex_unlock(&fabric->domain.lock);
	if (!last)
		return;
	if (fabric->timer_fd >= 0)
		close(fabric->timer_fd);
	pthread_cond_destroy(&fabric->domain.moved);
	pthread_mutex_destroy(&fabric->domain.lock);
	free(fabric->busy);
	free(fabric);
}

int kvio_fabric_advance(struct kvio_fabric *fabric, uint64_t to_ns)
{
	int rc = 0;

	kvio_domain_lock(&fabric->domain);
	if (!fabric->is_virtual || to_ns < fabric->virtual_ns || to_ns > SOFT_LAST_NS)
		rc = -EINVAL;
	else
		fabric->virtual_ns = to_ns;
	if (rc == 0 && fabric->domain.has_event_fd)
		rc = arm_fabric(fabric);
	pthread_cond_broadcast(&fabric->domain.moved);
	pthread_mutex_unlock(&fabric->domain.lock);
	return rc;
}

uint64_t kvio_fabric_now(struct kvio_fabric *fabric)
{
	uint64_t now;

	kvio_domain_lock(&fabric->domain);
	now = soft_clock_ns(fabric);
	pthread_mutex_unlock(&fabric->domain.lock);
	return now;
}

uint64_t kvio_fabric_next(struct kvio_fabric *fabric)
{
	uint64_t next;

	kvio_domain_lock(&fabric->domain);
	next = soft_next_visible_ns(fabric);
	pthread_mutex_unlock(&fabric->domain.lock);
	return next;
}
