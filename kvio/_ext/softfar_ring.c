/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rings: WRITEs of ours that the other end shall pull (push, settle), and its, that we pull
 * (take, harvest).
 *
 * Order: slots are filled before `tail` is stored with release, and read after it was loaded with
 * acquire. `ack` is stored with release after the copying, and loaded with acquire before memory
 * is given back.
 */
#include <unistd.h>

#include "softfar.h"

#if defined(__SANITIZE_THREAD__)
char far_order;
#endif

void far_wake(const struct soft_far *far)
{
	uint64_t one = 1;

	if (far->their_wake_fd >= 0 && write(far->their_wake_fd, &one, sizeof(one)) < 0)
		return;		/* EAGAIN: it is readable already */
}

/* ---- ours, to be pulled over there ---- */

static void put(struct soft_link *link, const struct kvio_wr *wr)
{
	struct far_lane *lane = far_mine(link);
	union far_slot *slot = &lane->slots[link->tail++ & (FAR_SLOTS - 1)];

	slot->request.addr = wr->local_addr;
	slot->request.lkey = wr->lkey;
	slot->request.remote_addr = wr->remote_addr;
	slot->request.rkey = wr->rkey;
	slot->request.length = wr->length;
	slot->request.num_sge = wr->num_sge;
	for (uint32_t i = 0; i < wr->num_sge; i++) {
		if (i % 2 == 0)
			slot = &lane->slots[link->tail++ & (FAR_SLOTS - 1)];
		slot->sges[i % 2] = link->qp->sges[wr->sge_first + i];
	}
}

/* As many of the WRITEs from link->pushed on as there is room for; what does not fit follows when
 * some have been pulled. The first one at cur has been checked. */
void soft_far_push(struct soft_qp *qp)
{
	struct soft_link *link = qp->link;
	uint32_t before = link->tail;

	if (!qp->away)
		link->pushed = qp->cur;
	if (qp->state != KVIO_QP_READY)
		return;
	for (; link->pushed != qp->tail; link->pushed++) {
		struct soft_wqe *wqe = soft_wqe_at(qp, link->pushed);

		if (wqe->flags & WQE_DEAD)
			continue;
		if (wqe->flags & WQE_CANCELED || wqe->wr.opcode != KVIO_OP_WRITE ||
		    link->tail - link->acked + far_slots_of(wqe->wr.num_sge) > FAR_SLOTS)
			break;
		if (link->pushed != qp->cur) {
			wqe->status = (uint16_t)soft_check(qp, wqe);
			if (wqe->status)
				break;		/* it fails when its turn comes */
		}
		put(link, &wqe->wr);
		qp->away = true;
	}
	if (link->tail == before)
		return;
	far_tell(&far_mine(link)->tail, far_word(link->life, 0, link->tail));
	far_wake(link->far);
}

/* Whatever a peer has written into the place of a status: one that we know. */
static uint32_t known_status(uint32_t status)
{
	return status == KVIO_WC_CANCELED || strcmp(kvio_wc_name(status), "UNKNOWN") == 0 ?
	       KVIO_WC_GENERAL_ERR : status;
}

/* Hear what has become of what we have put; `now` is when it completes. */
static void settle(struct soft_link *link, uint64_t now)
{
	uint64_t word = far_hear(&far_theirs(link)->ack);
	struct soft_qp *qp = link->qp;
	uint32_t done = (uint32_t)word, status = far_status(word);

	if (far_life(word) == FAR_ANY_LIFE && status)
		done = link->acked;
	else if (far_life(word) != link->life)
		return;
	if (done - link->acked > link->tail - link->acked) {
		soft_far_dead(link->far);	/* what we never asked for cannot be done */
		return;
	}
	if (done == link->acked && (!status || (link->shadow.state == KVIO_QP_ERROR && !qp->away)))
		return;
	now = now > qp->ready ? now : qp->ready;
	while (qp->away && qp->cur != link->pushed) {
		struct soft_wqe *wqe = soft_wqe_at(qp, qp->cur);
		uint32_t slots = far_slots_of(wqe->wr.num_sge);

		if (wqe->flags & WQE_DEAD) {
			qp->sent_bytes = wqe->end_bytes;
			qp->cur++;
			continue;
		}
		if (done - link->acked < slots)
			break;
		link->acked += slots;
		qp->ready = now;
		soft_end(qp, wqe, now, KVIO_WC_SUCCESS);
	}
	/* Who fails waits for what it has put: of that we take no more, and say so. */
	if (status && link->shadow.state != KVIO_QP_ERROR)
		far_shadow_stop(link, KVIO_WC_RETRY_EXC_ERR);
	if (status && qp->away && qp->cur != link->pushed) {
		qp->away = false;
		soft_finish(qp, now, known_status(status));
	} else if (qp->away && qp->cur == link->pushed) {
		qp->away = false;
		if (qp->state == KVIO_QP_ERROR)
			soft_fail(qp);
		else
			soft_load(qp);
	} else {
		if (qp->away)
			soft_far_push(qp);
		soft_skip_silent(qp);
	}
}

/* ---- theirs, which we pull ---- */

static void copy_slot(union far_slot *out, const struct soft_link *link, uint32_t at)
{
	memcpy(out, &far_theirs(link)->slots[at & (FAR_SLOTS - 1)], sizeof(*out));
	__asm__ volatile("" ::: "memory");	/* from now on the copy, whatever they do to it */
}

/* `addr` becomes where those bytes of the other end's memory are mapped here. */
static uint32_t reach(const struct soft_link *link, uint64_t key, uint64_t *addr, uint32_t length,
		      struct kvio_region **held)
{
	struct kvio_region *region = kvio_region_find(&link->far->base->table, key);
	const struct kvio_rkeys *keys;

	if (!region || !kvio_region_covers(region, *addr, length))
		return KVIO_WC_LOC_PROT_ERR;
	keys = kvio_rkeys_of(region);
	if (!keys->mapping)
		return keys->is_private ? KVIO_WC_LOC_PRIVATE : KVIO_WC_LOC_PROT_ERR;
	region->holds++;
	*held = region;
	*addr = (uint64_t)(uintptr_t)keys->mapping + (*addr - region->addr);
	return KVIO_WC_SUCCESS;
}

/* The checks of soft_check, for a request that came in; its addresses become ours, and the regions
 * are held until it has been copied. */
static uint32_t resolve(struct soft_link *link, struct kvio_wr *wr, struct kvio_region **held)
{
	struct kvio_region *target;
	uint32_t status = KVIO_WC_SUCCESS;
	uint64_t sum = 0;

	memset(held, 0, (FAR_SGES + 1) * sizeof(*held));
	if (wr->length == 0)
		return KVIO_WC_SUCCESS;
	if (wr->num_sge == 0)
		status = reach(link, wr->lkey, &wr->local_addr, wr->length, &held[1]);
	for (uint32_t i = 0; i < wr->num_sge && status == KVIO_WC_SUCCESS; i++) {
		struct kvio_sge *sge = &link->shadow.sges[wr->sge_first + i];

		sum += sge->length;
		if (sge->length)
			status = reach(link, sge->lkey, &sge->addr, sge->length, &held[1 + i]);
	}
	if (status != KVIO_WC_SUCCESS)
		return status;
	if (wr->num_sge && sum != wr->length)
		return KVIO_WC_REM_INV_REQ_ERR;
	target = kvio_region_find(&link->qp->base.nic->table, wr->rkey);
	if (!target || !(target->access & KVIO_REMOTE_WRITE) ||
	    !kvio_region_covers(target, wr->remote_addr, wr->length))
		return KVIO_WC_REM_ACCESS_ERR;
	target->holds++;
	held[0] = target;
	return KVIO_WC_SUCCESS;
}

/* How many slots it took, or -EPROTO. */
static int take_one(struct soft_link *link, uint32_t available, uint64_t now)
{
	struct soft_qp *shadow = &link->shadow;
	uint32_t place = shadow->tail & shadow->mask, slots;
	struct soft_wqe *wqe = &shadow->sq[place];
	union far_slot head, entries;

	copy_slot(&head, link, link->taken);
	slots = far_slots_of(head.request.num_sge);
	if (head.request.num_sge > FAR_SGES || slots > available)
		return -EPROTO;
	memset(wqe, 0, sizeof(*wqe));
	wqe->wr = (struct kvio_wr){
		.wr_id = (uint64_t)link->lane << 40 | (uint64_t)slots << 32 | link->taken,
		.opcode = KVIO_OP_WRITE, .local_addr = head.request.addr,
		.lkey = head.request.lkey, .remote_addr = head.request.remote_addr,
		.rkey = head.request.rkey, .length = head.request.length,
		.num_sge = head.request.num_sge, .sge_first = place * FAR_SGES,
	};
	for (uint32_t i = 0; i < wqe->wr.num_sge; i++) {
		if (i % 2 == 0)
			copy_slot(&entries, link, link->taken + 1 + i / 2);
		shadow->sges[place * FAR_SGES + i] = entries.sges[i % 2];
	}
	wqe->status = (uint16_t)resolve(link, &wqe->wr, &link->held[place * (FAR_SGES + 1)]);
	wqe->posted = now;
	shadow->posted_bytes += wqe->wr.length;
	wqe->end_bytes = shadow->posted_bytes;
	shadow->tail++;
	return (int)slots;
}

/* The last one is signalled, and some on the way there, so that the other end can follow up. */
static void signal_some(struct soft_qp *shadow, uint32_t first)
{
	uint32_t signal = shadow->tail - 1;

	for (uint32_t seq = shadow->tail; seq-- != first; ) {
		struct soft_wqe *wqe = soft_wqe_at(shadow, seq);

		if (seq % FAR_GROUP == 0)
			signal = seq;
		wqe->signal_seq = signal;
		wqe->flags = signal == seq ? WQE_SIGNALED : 0;
	}
}

static void take(struct soft_link *link)
{
	struct kvio_fabric *fabric = link->far->nic.fabric;
	struct soft_qp *shadow = &link->shadow;
	uint64_t word = far_hear(&far_theirs(link)->tail);
	uint32_t count = (uint32_t)word, first;
	uint64_t now;
	bool idle;

	if (link->status || shadow->state != KVIO_QP_READY || count == link->taken ||
	    far_life(word) != link->their_life || far_status(word))
		return;
	if (count - link->done > FAR_SLOTS || count - link->taken > count - link->done) {
		soft_far_dead(link->far);
		return;
	}
	if (shadow->seen == shadow->tail) {	/* reuse what is in the cache */
		far_release(link);
		shadow->seen = shadow->cur = shadow->tail = link->released = 0;
	}
	now = soft_ticks(fabric, soft_clock_ns(fabric));
	first = shadow->tail;
	idle = shadow->cur == first;
	while (link->taken != count) {
		int slots = take_one(link, count - link->taken, now);

		if (slots < 0) {
			soft_far_dead(link->far);
			return;
		}
		link->taken += (uint32_t)slots;
	}
	signal_some(shadow, first);
	soft_busy_add(fabric, shadow);
	if (idle)
		soft_load(shadow);
}

/* Regions of what has been copied, or given up. */
void far_release(struct soft_link *link)
{
	struct soft_qp *shadow = &link->shadow;

	for (; link->released != shadow->cur; link->released++) {
		uint32_t place = link->released & shadow->mask;
		struct kvio_region **held = &link->held[place * (FAR_SGES + 1)];
		uint32_t count = 1 + (shadow->sq[place].wr.num_sge ?: 1);

		for (uint32_t i = 0; i < count; i++)
			if (held[i])
				held[i]->holds--;
	}
}

void far_acknowledge(struct soft_link *link)
{
	far_tell(&far_mine(link)->ack, far_word(link->their_life, link->status, link->done));
	/* If we take no more: told before anything of ours is used for something else. */
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	far_wake(link->far);
}

static void credit(struct soft_link *link, uint64_t wr_id, uint32_t status)
{
	if (link->status)
		return;
	link->done = (uint32_t)wr_id;
	if (status == KVIO_WC_SUCCESS)
		link->done += (uint32_t)(wr_id >> 32) & 255;
	else
		link->status = status == KVIO_WC_WR_FLUSH_ERR ? KVIO_WC_RETRY_EXC_ERR :
			       (uint8_t)status;
}

/* Tell them what has been pulled. */
static void harvest(struct soft_far *far)
{
	uint32_t news = 0;
	struct kvio_wc wc[32];
	int got;

	while ((got = soft_poll(&far->nic.base, wc, 32)) > 0) {
		for (int i = 0; i < got; i++) {
			uint32_t lane = (uint32_t)(wc[i].wr_id >> 40) % FAR_LANES;

			if (!far->links[lane])
				continue;
			credit(far->links[lane], wc[i].wr_id, wc[i].status);
			news |= 1u << lane;
		}
	}
	for (uint32_t lane = 0; news; lane++, news >>= 1) {
		if (news & 1) {
			far_release(far->links[lane]);
			far_acknowledge(far->links[lane]);
		}
	}
}

/* We pull no more for this queue pair: `status` for the first that is not done. */
void far_shadow_stop(struct soft_link *link, uint32_t status)
{
	struct soft_qp *shadow = &link->shadow;

	harvest(link->far);
	for (uint32_t seq = shadow->seen; seq != shadow->cur; seq++)
		credit(link, soft_wqe_at(shadow, seq)->wr.wr_id, soft_wqe_at(shadow, seq)->status);
	if (!link->status)
		link->status = (uint8_t)status;
	shadow->state = KVIO_QP_ERROR;
	shadow->seen = shadow->cur = shadow->tail;
	soft_busy_remove(link->far->nic.fabric, shadow);
	far_release(link);
	if (link->connected)
		far_acknowledge(link);
}

/*
 * Regions of theirs that are no more. They say so before the memory is used for something else; the
 * control connection says it as well, but who is stopped does not hear that in time.
 */
void far_hear_retired(struct soft_far *far)
{
	uint64_t retired = far_hear(&far->theirs->retired);
	uint64_t first = far->retired;

	if (retired - first >= FAR_RETIRED) {	/* it cannot be told any more which */
		soft_far_dead(far);
		return;
	}
	for (; far->retired != retired; far->retired++) {
		uint64_t key = __atomic_load_n(&far->theirs->keys[far->retired % FAR_RETIRED],
					       __ATOMIC_RELAXED);
		struct kvio_region *region = kvio_region_find(&far->base->table, key);

		if (region)
			((struct kvio_rkeys *)region->provider)->mapping = NULL;
	}
	/* A key is written before it is counted: the next one may have gone over the first. */
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	if (__atomic_load_n(&far->theirs->retired, __ATOMIC_RELAXED) - first >= FAR_RETIRED)
		soft_far_dead(far);
}

void far_poll(struct soft_far *far, uint64_t limit)
{
	if (__atomic_load_n(&far->theirs->retired, __ATOMIC_RELAXED) != far->retired)
		far_hear_retired(far);
	for (uint32_t lane = 0; lane < FAR_LANES && !far->dead; lane++) {
		struct soft_link *link = far->links[lane];

		if (!link || !link->connected)
			continue;
		settle(link, limit);
		if (!far->dead)
			take(link);
	}
	if (far->nic.cq_count)
		harvest(far);
}
