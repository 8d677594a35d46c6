/* SPDX-License-Identifier: Apache-2.0 */
/* Send queues of the soft NIC: posting, checking a message, its end, errors, cancelling. */
#include "softnic.h"

/* ---- checking the message at cur ---- */

/* A key that nobody had when the batch was submitted stays unknown to it: a region that came later
 * is not held for it, and could be taken back under way. */
static bool may_use(const struct soft_wqe *wqe, const struct kvio_table *table, uint64_t key,
		    uint64_t addr, uint64_t nbytes, uint32_t access)
{
	const struct kvio_region *region = kvio_region_find(table, key);

	return region && region->born <= wqe->births && (region->access & access) == access &&
	       kvio_region_covers(region, addr, nbytes);
}

uint32_t soft_check(struct soft_qp *qp, const struct soft_wqe *wqe)
{
	const struct kvio_wr *wr = &wqe->wr;
	const struct soft_qp *remote = qp->remote;
	bool read = wr->opcode == KVIO_OP_READ;
	struct soft_nic *nic = soft_nic_of(qp);

	if (wqe->status)
		return wqe->status;		/* found out before */
	if (nic->fail_in && --nic->fail_in == 0)
		return nic->fail_status;
	if (!read && wr->opcode != KVIO_OP_WRITE)
		return KVIO_WC_LOC_QP_OP_ERR;
	if (!remote || remote->remote != qp || remote->state != KVIO_QP_READY)
		return KVIO_WC_RETRY_EXC_ERR;
	if (qp->is_shadow)
		return KVIO_WC_SUCCESS;		/* checked when it came */
	if (wr->length == 0)
		return KVIO_WC_SUCCESS;		/* touches nothing, needs no key */
	if (wr->num_sge == 0) {
		if (!may_use(wqe, &nic->base.table, wr->lkey, wr->local_addr, wr->length,
			     read ? KVIO_LOCAL_WRITE : 0))
			return KVIO_WC_LOC_PROT_ERR;
	}
	for (uint32_t i = 0; i < wr->num_sge; i++) {
		const struct kvio_sge *sge = &qp->sges[wr->sge_first + i];

		if (sge->length && !may_use(wqe, &nic->base.table, sge->lkey, sge->addr,
					    sge->length, read ? KVIO_LOCAL_WRITE : 0))
			return KVIO_WC_LOC_PROT_ERR;
	}
	if (!may_use(wqe, qp->base.peer, wr->rkey, wr->remote_addr, wr->length,
		     read ? KVIO_REMOTE_READ : KVIO_REMOTE_WRITE))
		return KVIO_WC_REM_ACCESS_ERR;
	return KVIO_WC_SUCCESS;
}

/* Completed ones that nobody asked to hear of are passed over. */
void soft_skip_silent(struct soft_qp *qp)
{
	while (qp->seen != qp->cur) {
		const struct soft_wqe *wqe = soft_wqe_at(qp, qp->seen);

		if (!(wqe->flags & WQE_DEAD) && (wqe->status || (wqe->flags & WQE_SIGNALED)))
			return;
		qp->seen++;
	}
	if (qp->seen == qp->tail)
		soft_busy_remove(soft_nic_of(qp)->fabric, qp);
}

void soft_end(struct soft_qp *qp, struct soft_wqe *wqe, uint64_t end, uint32_t status)
{
	wqe->end = end + soft_nic_of(qp)->delay;
	wqe->status = (uint16_t)status;
	qp->sent_bytes = wqe->end_bytes;
	qp->cur++;
}

void soft_load(struct soft_qp *qp)
{
	struct kvio_fabric *fabric = soft_nic_of(qp)->fabric;

	for (; qp->cur != qp->tail; ) {
		struct soft_wqe *wqe = soft_wqe_at(qp, qp->cur);

		if (wqe->flags & WQE_DEAD) {
			qp->sent_bytes = wqe->end_bytes;
			qp->cur++;
			continue;
		}
		if (qp->ready < wqe->posted)
			qp->ready = wqe->posted;
		if (wqe->flags & WQE_CANCELED) {
			soft_end(qp, wqe, qp->ready > fabric->time ? qp->ready : fabric->time,
				KVIO_WC_CANCELED);
			continue;
		}
		qp->offset = qp->sge_index = qp->sge_offset = 0;
		qp->bad = (uint16_t)soft_check(qp, wqe);
		if (!qp->bad) {
			bool read = wqe->wr.opcode == KVIO_OP_READ;

			qp->source = soft_nic_of(read ? qp->remote : qp);
			qp->sink = soft_nic_of(read ? qp : qp->remote);
			qp->sl = read ? qp->remote->base.sl : qp->base.sl;
			qp->vl = fabric->arbitration.sl2vl[qp->sl];
			qp->local = (uint8_t *)(uintptr_t)wqe->wr.local_addr;
			qp->far = (uint8_t *)(uintptr_t)wqe->wr.remote_addr;
			if (qp->link)
				qp->bad = (uint16_t)soft_far_load(qp, wqe);
		}
		break;
	}
	soft_skip_silent(qp);
}

void soft_finish(struct soft_qp *qp, uint64_t end, uint32_t status)
{
	struct soft_qp *remote = qp->remote;

	if (qp->link && status == KVIO_WC_SUCCESS)
		status = soft_far_verify(qp);
	soft_end(qp, soft_wqe_at(qp, qp->cur), end, status);
	if (status == KVIO_WC_SUCCESS) {
		soft_load(qp);
		return;
	}
	soft_fail(qp);
	/* A responder that refuses an access is in error as well, as on hardware. */
	if (remote && (status == KVIO_WC_REM_ACCESS_ERR || status == KVIO_WC_REM_PRIVATE ||
		       status == KVIO_WC_REM_INV_REQ_ERR || status == KVIO_WC_REM_OP_ERR))
		soft_fail(remote);
}

void soft_fail(struct soft_qp *qp)
{
	struct kvio_fabric *fabric = soft_nic_of(qp)->fabric;

	qp->state = KVIO_QP_ERROR;
	if (qp->link && !soft_far_fail(qp))
		return;
	while (qp->cur != qp->tail) {
		struct soft_wqe *wqe = soft_wqe_at(qp, qp->cur);

		soft_end(qp, wqe, qp->ready > fabric->time ? qp->ready : fabric->time,
			KVIO_WC_WR_FLUSH_ERR);
	}
	soft_skip_silent(qp);
}

/* ---- posting, completions, cancelling ---- */

static void post_one(struct soft_qp *qp, const struct kvio_post *post, uint32_t i,
		     uint64_t now, uint32_t last_seq)
{
	struct soft_wqe *wqe = soft_wqe_at(qp, qp->tail);

	wqe->wr = post->wrs[i];
	wqe->wr.wr_id = post->wr_id + i;
	wqe->wr.remote_addr += post->remote_offset;
	if (wqe->wr.num_sge) {
		uint32_t first = (qp->tail & qp->mask) * qp->base.nic->max_sge;

		for (uint32_t s = 0; s < wqe->wr.num_sge; s++) {
			qp->sges[first + s] = post->sges[wqe->wr.sge_first + s];
			qp->sges[first + s].addr += post->local_offset;
		}
		wqe->wr.sge_first = first;
	} else {
		wqe->wr.local_addr += post->local_offset;
	}
	qp->posted_bytes += wqe->wr.length;
	wqe->end_bytes = qp->posted_bytes;
	wqe->posted = now;
	wqe->births = post->births;
	wqe->status = 0;
	wqe->signal_seq = post->flags & KVIO_POST_SIGNAL_ALL ? qp->tail : last_seq;
	wqe->flags = wqe->signal_seq == qp->tail ? WQE_SIGNALED : 0;
	qp->tail++;
}

int soft_post(struct kvio_qp *base, const struct kvio_post *post)
{
	struct soft_qp *qp = (struct soft_qp *)base;
	struct soft_nic *nic = soft_nic_of(qp);
	struct kvio_fabric *fabric = nic->fabric;
	uint64_t now = fabric->time;
	uint32_t room, count;
	bool idle = qp->cur == qp->tail;

	if (qp->seen == qp->tail)	/* empty: reuse the part of the ring that is in the cache */
		qp->seen = qp->cur = qp->tail = 0;
	room = base->depth - (qp->tail - qp->seen);
	count = post->count < room ? post->count : room;
	if (qp->state == KVIO_QP_RESET)
		return -ENOTCONN;
	if (count == 0)
		return 0;
	if (!(post->flags & KVIO_POST_FEED)) {
		uint64_t clock = soft_ticks(fabric, soft_clock_ns(fabric));

		now = clock > now ? clock : now;
	}
	for (uint32_t i = 0, last_seq = qp->tail + count - 1; i < count; i++)
		post_one(qp, post, i, now, last_seq);
	nic->counters.doorbells++;
	nic->counters.work_requests += count;
	soft_busy_add(fabric, qp);
	if (qp->state == KVIO_QP_ERROR) {
		qp->ready = now > qp->ready ? now : qp->ready;
		soft_fail(qp);
	} else if (idle) {
		soft_load(qp);
	} else if (qp->away) {
		soft_far_push(qp);
	}
	return (int)count;
}

void soft_complete(struct soft_qp *qp, const struct soft_wqe *wqe)
{
	struct soft_nic *nic = soft_nic_of(qp);
	uint32_t at = (nic->cq_first + nic->cq_count++) % nic->cq_room;

	nic->counters.completions++;
	nic->counters.signalled += wqe->flags & WQE_SIGNALED;
	nic->counters.errors += wqe->status != 0;
	nic->cq[at] = (struct kvio_wc){
		.wr_id = wqe->wr.wr_id, .status = wqe->status,
		.time_ns = soft_ns(nic->fabric, wqe->end ? wqe->end : nic->fabric->time),
	};
}

int soft_poll(struct kvio_nic *base, struct kvio_wc *wc, uint32_t count)
{
	struct soft_nic *nic = (struct soft_nic *)base;
	uint32_t got = nic->cq_count < count ? nic->cq_count : count;

	for (uint32_t i = 0; i < got; i++)
		wc[i] = nic->cq[(nic->cq_first + i) % nic->cq_room];
	if (got) {
		nic->cq_first = (nic->cq_first + got) % nic->cq_room;
		nic->cq_count -= got;
	}
	return (int)got;
}

int soft_cancel(struct kvio_qp *base, uint64_t wr_id, uint32_t count)
{
	struct soft_qp *qp = (struct soft_qp *)base;
	struct kvio_fabric *fabric = soft_nic_of(qp)->fabric;
	bool head = true;	/* a batch that has begun completes in order, behind its head */

	for (uint32_t seq = qp->cur; seq != qp->tail; seq++) {
		struct soft_wqe *wqe = soft_wqe_at(qp, seq);

		if (wqe->wr.wr_id - wr_id >= count || wqe->flags & WQE_DEAD) {
			head = false;
			continue;
		}
		if ((seq == qp->cur && qp->offset > 0) ||
		    (qp->away && soft_far_has(qp, seq)))
			continue;		/* it is on the wire */
		if (head) {
			wqe->flags |= WQE_CANCELED;
			continue;
		}
		/* One that has not begun waits for nobody. */
		wqe->status = KVIO_WC_CANCELED;
		wqe->end = fabric->time;
		soft_complete(qp, wqe);
		wqe->flags = WQE_DEAD;
	}
	if (qp->cur != qp->tail && soft_wqe_at(qp, qp->cur)->flags & WQE_CANCELED)
		soft_load(qp);
	return 0;
}
