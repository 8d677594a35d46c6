/* SPDX-License-Identifier: Apache-2.0 */
/* The far end of a connection to another process, and of its queue pairs; their death. */
#include <fcntl.h>
#include <unistd.h>

#include "softfar.h"

/* ---- the connection ---- */

int soft_far_open(struct kvio_far *base)
{
	struct soft_nic *nic = (struct soft_nic *)base->nic;
	struct soft_far *far;

	if (nic->fabric->is_virtual)		/* theirs would have to stand still too */
		return -EOPNOTSUPP;
	far = calloc(1, sizeof(*far));
	if (!far)
		return -ENOMEM;
	far->nic.base = (struct kvio_nic){
		.ops = nic->base.ops, .domain = nic->base.domain, .queue_depth = FAR_SLOTS,
		.max_sge = FAR_SGES,
	};
	far->nic.fabric = nic->fabric;
	far->nic.mtu = nic->mtu;
	far->nic.tx.arbiter = nic->tx.arbiter;
	far->nic.rx.arbiter = nic->rx.arbiter;
	far->base = base;
	far->wake_fd = far->their_wake_fd = far->pid_fd = -1;
	base->provider = far;
	return 0;
}

static void close_fds(struct soft_far *far)
{
	int *fds[] = { &far->wake_fd, &far->their_wake_fd, &far->pid_fd };

	for (int i = 0; i < 3; i++) {
		if (*fds[i] >= 0)
			close(*fds[i]);
		*fds[i] = -1;
	}
}

void soft_far_close(struct kvio_far *base)
{
	struct soft_far *far = base->provider;

	far_engine_leave(far);
	close_fds(far);
	free(far->nic.cq);
	free(far);
}

static int keep(int *out, int fd)
{
	*out = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	return *out < 0 ? -errno : 0;
}

int kvio_soft_far_join(struct kvio_far *base, const struct kvio_soft_join *join)
{
	struct soft_far *far = base->provider;
	int rc;

	if (base->nic->ops != &kvio_soft_ops || join->bytes_per_s > (uint64_t)1 << 50 ||
	    join->ring_nbytes < sizeof(struct far_ring) || !join->mine || !join->theirs)
		return -EINVAL;
	far_engines_lock();
	kvio_lock(base->nic);
	rc = far->theirs ? -EISCONN : keep(&far->wake_fd, join->wake_fd);
	if (rc == 0)
		rc = keep(&far->their_wake_fd, join->their_wake_fd);
	if (rc == 0)
		rc = keep(&far->pid_fd, join->pid_fd);
	if (rc == 0) {
		far->nic.bytes_per_s = join->bytes_per_s;
		far->mine = join->mine;
		far->mine->magic = FAR_MAGIC;
		if (join->port)
			rc = soft_port_share(&far->nic, join->port, false);
	}
	if (rc == 0)
		rc = far_engine_join(far);
	if (rc == 0)
		far->theirs = join->theirs;
	else if (rc != -EISCONN)
		close_fds(far);
	kvio_unlock(base->nic);
	far_engines_unlock();
	return rc;
}

int kvio_soft_far_lost(struct kvio_far *base)
{
	kvio_lock(base->nic);
	soft_far_dead(base->provider);
	kvio_nic_drive_locked(base->nic);
	kvio_unlock(base->nic);
	return 0;
}

/* Nothing comes from there any more. What it was pulling from us may be reused: who is dead does
 * not write. */
void soft_far_dead(struct soft_far *far)
{
	uint64_t now = soft_ticks(far->nic.fabric, soft_clock_ns(far->nic.fabric));

	if (far->dead)
		return;
	far->dead = true;
	for (uint32_t lane = 0; lane < FAR_LANES; lane++) {
		struct soft_link *link = far->links[lane];
		struct soft_qp *qp;

		if (!link)
			continue;
		qp = link->qp;
		far_shadow_stop(link, KVIO_WC_RETRY_EXC_ERR);
		if (qp->away) {
			qp->away = false;
			soft_finish(qp, now > qp->ready ? now : qp->ready, KVIO_WC_RETRY_EXC_ERR);
		} else if (qp->cur != qp->tail) {
			qp->bad = KVIO_WC_RETRY_EXC_ERR;
		}
	}
}

/* ---- queue pairs ---- */

static uint32_t next_life(struct soft_far *far, uint32_t lane)
{
	far->lives[lane] = far->lives[lane] + 1 < FAR_ANY_LIFE ? far->lives[lane] + 1 : 1;
	return far->lives[lane];
}

/* It begins its life with an empty lane. */
static void renew(struct soft_link *link)
{
	link->life = next_life(link->far, link->lane);
	link->tail = link->acked = link->pushed = 0;
	link->connected = false;
	far_tell(&far_mine(link)->tail, far_word(link->life, 0, 0));
}

static void shadow_free(struct soft_link *link)
{
	free(link->shadow.sq);
	free(link->shadow.sges);
	free(link->held);
	free(link);
}

int soft_far_qp_create(struct soft_qp *qp, struct kvio_far *base)
{
	struct soft_far *far = base->provider;
	struct kvio_fabric *fabric = far->nic.fabric;
	struct soft_link *link;
	struct soft_qp *shadow;
	uint32_t lane = 0;

	while (lane < FAR_LANES && far->links[lane])
		lane++;
	if (lane == FAR_LANES)
		return -ENOSPC;
	if (!far->theirs)
		return -ENOTCONN;
	link = calloc(1, sizeof(*link));
	if (!link)
		return -ENOMEM;
	shadow = &link->shadow;
	/* Untouched pages of these cost nothing. */
	shadow->sq = calloc(FAR_SLOTS, sizeof(*shadow->sq));
	shadow->sges = calloc((size_t)FAR_SLOTS * FAR_SGES, sizeof(*shadow->sges));
	link->held = calloc((size_t)FAR_SLOTS * (FAR_SGES + 1), sizeof(*link->held));
	if (!shadow->sq || !shadow->sges || !link->held || soft_busy_room(fabric) < 0 ||
	    soft_cq_grow(&far->nic, FAR_SLOTS) < 0) {
		shadow_free(link);
		return -ENOMEM;
	}
	fabric->num_qps++;
	shadow->base.nic = &far->nic.base;
	shadow->base.depth = FAR_SLOTS;
	shadow->mask = FAR_SLOTS - 1;
	shadow->qpn = ++fabric->next_qpn;
	shadow->state = KVIO_QP_ERROR;
	shadow->link = link;
	shadow->is_shadow = true;
	link->qp = qp;
	link->far = far;
	link->lane = lane;
	renew(link);
	far->links[lane] = link;
	qp->link = link;
	return 0;
}

int soft_far_qp_connect(struct soft_qp *qp, const struct kvio_endpoint *remote)
{
	struct soft_link *link = qp->link;
	struct soft_qp *shadow = &link->shadow;
	struct soft_nic *nic = soft_nic_of(qp);

	if (remote->lid >= FAR_LANES || remote->sl >= KVIO_NUM_SL || remote->mtu < 64 ||
	    remote->mtu > 1u << 20 || remote->psn == 0 || remote->psn >= FAR_ANY_LIFE)
		return -EINVAL;
	link->their_lane = remote->lid;
	link->their_life = remote->psn;
	link->taken = link->done = link->released = 0;
	link->status = link->far->dead ? KVIO_WC_RETRY_EXC_ERR : 0;
	link->connected = true;
	shadow->seen = shadow->cur = shadow->tail = 0;
	shadow->ready = nic->fabric->time;
	shadow->mtu = qp->mtu = nic->mtu < remote->mtu ? nic->mtu : remote->mtu;
	shadow->base.sl = remote->sl;
	shadow->base.tclass = remote->tclass;
	shadow->base.peer = &nic->base.table;
	shadow->remote = qp;
	shadow->state = link->far->dead ? KVIO_QP_ERROR : KVIO_QP_READY;
	qp->base.peer = &link->far->base->table;
	qp->remote = shadow;
	qp->state = KVIO_QP_READY;
	far_acknowledge(link);
	return 0;
}

void soft_far_qp_query(const struct soft_qp *qp, struct kvio_endpoint *local)
{
	local->lid = (uint16_t)qp->link->lane;
	local->psn = qp->link->life;
}

void soft_far_qp_reset(struct soft_qp *qp)
{
	far_shadow_stop(qp->link, KVIO_WC_RETRY_EXC_ERR);
	renew(qp->link);
}

void soft_far_qp_destroy(struct soft_qp *qp)
{
	struct soft_link *link = qp->link;
	struct soft_far *far = link->far;

	far_shadow_stop(link, KVIO_WC_RETRY_EXC_ERR);
	link->their_life = FAR_ANY_LIFE;
	far_acknowledge(link);
	far_tell(&far_mine(link)->tail, far_word(link->life, 1, link->tail));
	far->links[link->lane] = NULL;
	far->nic.fabric->num_qps--;
	shadow_free(link);
}

/* ---- the message at cur ---- */

uint32_t soft_far_load(struct soft_qp *qp, struct soft_wqe *wqe)
{
	const struct kvio_region *region;
	const struct kvio_rkeys *keys;

	if (qp->is_shadow)
		return KVIO_WC_SUCCESS;		/* its addresses are ours already */
	if (wqe->wr.opcode == KVIO_OP_WRITE) {
		soft_far_push(qp);
		return KVIO_WC_SUCCESS;
	}
	if (wqe->wr.length == 0)
		return KVIO_WC_SUCCESS;
	region = kvio_region_find(qp->base.peer, wqe->wr.rkey);
	keys = kvio_rkeys_of(region);
	if (!keys->mapping)			/* or it has been taken back */
		return keys->is_private ? KVIO_WC_REM_PRIVATE : KVIO_WC_REM_ACCESS_ERR;
	qp->far = (uint8_t *)(uintptr_t)keys->mapping + (wqe->wr.remote_addr - region->addr);
	return KVIO_WC_SUCCESS;
}

/* Something of theirs is no more: is it what this message has read? */
static bool still_there(struct soft_far *far, const struct soft_wqe *wqe)
{
	const struct kvio_region *region;

	far_hear_retired(far);
	region = kvio_region_find(&far->base->table, wqe->wr.rkey);
	return !far->dead && (wqe->wr.length == 0 || (region && kvio_rkeys_of(region)->mapping));
}

/* A region of ours is no more. */
void soft_far_retire(struct soft_nic *nic, uint64_t key)
{
	struct soft_far *far = nic->fabric->engine ? far_first(nic->fabric) : NULL;

	for (; far; far = far->next) {
		uint64_t count = far->mine->retired;

		if (far->base->nic != &nic->base)
			continue;
		__atomic_store_n(&far->mine->keys[count % FAR_RETIRED], key, __ATOMIC_RELAXED);
		far_tell(&far->mine->retired, count + 1);
		if (count % (FAR_RETIRED / 4) == 0)
			far_wake(far);		/* before they lose count */
	}
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
}

/*
 * The bytes are copied. Whoever takes memory back says so in its ring before it uses it for
 * something else; if nothing is said there now, what was copied is what was meant.
 */
uint32_t soft_far_verify(const struct soft_qp *qp)
{
	const struct soft_link *link = qp->link;
	const struct far_lane *theirs = far_theirs(link);
	uint64_t word;

	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	if (link->far->dead)
		return KVIO_WC_RETRY_EXC_ERR;
	if (qp->is_shadow) {
		word = __atomic_load_n(&theirs->tail, __ATOMIC_RELAXED);
		return far_life(word) != link->their_life || far_status(word) ?
		       KVIO_WC_RETRY_EXC_ERR : KVIO_WC_SUCCESS;
	}
	if (__atomic_load_n(&link->far->theirs->retired, __ATOMIC_RELAXED) != link->far->retired &&
	    !still_there(link->far, soft_wqe_at(qp, qp->cur)))
		return KVIO_WC_REM_ACCESS_ERR;
	word = __atomic_load_n(&theirs->ack, __ATOMIC_RELAXED);
	return far_status(word) && (far_life(word) == link->life ||
				    far_life(word) == FAR_ANY_LIFE) ?
	       KVIO_WC_RETRY_EXC_ERR : KVIO_WC_SUCCESS;
}

bool soft_far_has(const struct soft_qp *qp, uint32_t seq)
{
	return seq - qp->cur < qp->link->pushed - qp->cur;
}

bool soft_far_fail(struct soft_qp *qp)
{
	struct soft_link *link = qp->link;

	if (qp->is_shadow)
		return true;
	far_shadow_stop(link, KVIO_WC_RETRY_EXC_ERR);
	if (!qp->away)
		return true;
	if (!qp->base.nic->dying && !link->far->dead)
		return false;
	/* Our memory goes: whatever is still being pulled is not what was meant. */
	qp->away = false;
	far_tell(&far_mine(link)->tail, far_word(link->life, 1, link->tail));
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	return true;
}

void soft_far_drive(struct kvio_fabric *fabric, uint64_t limit)
{
	for (struct soft_far *far = far_first(fabric); far; far = far->next)
		if (!far->dead)
			far_poll(far, limit);
}
