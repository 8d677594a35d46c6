/* SPDX-License-Identifier: Apache-2.0 */
/* The soft NIC: opening, queue pairs, counters. Its send queues: softqueue.c; what moves when:
 * softfabric.c. */
#include <unistd.h>

#include "softnic.h"

/* ---- opening and closing ---- */

static int soft_open(struct kvio_nic **out, const struct kvio_nic_params *params)
{
	struct kvio_fabric *fabric = params->fabric;
	struct soft_nic *nic;

	/* At these bounds a packet's time fits into 64 bits. */
	if (!fabric || params->mtu < 64 || params->mtu > 1u << 20 ||
	    params->bytes_per_s > (uint64_t)1 << 50)
		return -EINVAL;
	nic = calloc(1, sizeof(*nic));
	if (!nic)
		return -ENOMEM;
	nic->base.domain = &fabric->domain;
	nic->fabric = fabric;
	nic->bytes_per_s = params->bytes_per_s;
	nic->mtu = params->mtu;
	nic->tx.arbiter.budget = nic->rx.arbiter.budget = fabric->arbitration.reload;
	kvio_domain_lock(&fabric->domain);
	fabric->refs++;
	pthread_mutex_unlock(&fabric->domain.lock);
	*out = &nic->base;
	return 0;
}

static void soft_close(struct kvio_nic *base)
{
	struct soft_nic *nic = (struct soft_nic *)base;
	struct kvio_fabric *fabric = nic->fabric;

	free(nic->cq);
	free(nic);
	kvio_fabric_put(fabric);
}

static int soft_reg(struct kvio_nic *nic, struct kvio_region *region)
{
	return 0;
}

static int soft_dereg(struct kvio_nic *nic, struct kvio_region *region)
{
	soft_far_retire((struct soft_nic *)nic, region->key);
	return 0;
}

/* ---- queue pairs ---- */

int soft_cq_grow(struct soft_nic *nic, uint32_t depth)
{
	/* Room for every work request that can be queued: a completion queue never overruns. What
	 * queue pairs that are gone have left serves the next ones. */
	uint32_t room = nic->cq_owed + depth;
	struct kvio_wc *larger;

	if (room > nic->cq_room) {
		larger = malloc((size_t)room * sizeof(*larger));
		if (!larger)
			return -ENOMEM;
		for (uint32_t i = 0; i < nic->cq_count; i++)
			larger[i] = nic->cq[(nic->cq_first + i) % nic->cq_room];
		free(nic->cq);
		nic->cq = larger;
		nic->cq_first = 0;
		nic->cq_room = room;
	}
	nic->cq_owed = room;
	return 0;
}

static void qp_free(struct soft_qp *qp)
{
	free(qp->sq);
	free(qp->sges);
	free(qp);
}

static int soft_qp_create(struct kvio_nic *base, const struct kvio_qp_params *params,
			  struct kvio_qp **out)
{
	struct soft_nic *nic = (struct soft_nic *)base;
	struct soft_qp *qp = calloc(1, sizeof(*qp));
	uint32_t ring = 1;
	int rc = 0;

	if (!qp)
		return -ENOMEM;
	while (ring < params->depth)
		ring *= 2;
	/* Untouched pages of these cost nothing. */
	qp->sq = calloc(ring, sizeof(*qp->sq));
	qp->sges = calloc((size_t)ring * base->max_sge, sizeof(*qp->sges));
	if (!qp->sq || !qp->sges || soft_cq_grow(nic, params->depth) < 0 ||
	    soft_busy_room(nic->fabric) < 0) {
		qp_free(qp);
		return -ENOMEM;
	}
	nic->fabric->num_qps++;
	qp->mask = ring - 1;
	qp->qpn = ++nic->fabric->next_qpn;
	*out = &qp->base;
	if (params->far && (rc = soft_far_qp_create(qp, params->far)) < 0) {
		nic->fabric->num_qps--;
		nic->cq_owed -= params->depth;
		qp_free(qp);
	}
	return rc;
}

static struct soft_qp *find_qp(struct kvio_fabric *fabric, uint32_t qpn)
{
	for (struct kvio_nic *nic = fabric->domain.nics; nic; nic = nic->next)
		for (struct kvio_qp *qp = nic->qps; qp; qp = qp->next)
			if (((struct soft_qp *)qp)->qpn == qpn)
				return (struct soft_qp *)qp;
	return NULL;
}

static int soft_qp_connect(struct kvio_qp *base, const struct kvio_endpoint *remote,
			   uint32_t count)
{
	struct soft_qp *qp = (struct soft_qp *)base;
	struct soft_nic *nic = soft_nic_of(qp);

	if (qp->state != KVIO_QP_RESET)
		return -EISCONN;
	if (qp->link)
		return soft_far_qp_connect(qp, remote);
	qp->remote = find_qp(nic->fabric, remote->qpn);
	if (!qp->remote)
		return -ECONNREFUSED;
	if (qp->remote == qp)
		return -EINVAL;
	qp->base.peer = &qp->remote->base.nic->table;
	qp->mtu = nic->mtu < remote->mtu ? nic->mtu : remote->mtu;
	qp->state = KVIO_QP_READY;
	return 0;
}

static int soft_qp_query(struct kvio_qp *base, struct kvio_qp_info *out)
{
	struct soft_qp *qp = (struct soft_qp *)base;

	out->num_rails = 1;
	out->local[0] = (struct kvio_endpoint){
		.qpn = qp->qpn, .mtu = soft_nic_of(qp)->mtu, .sl = base->sl,
		.tclass = base->tclass,
	};
	if (qp->link)
		soft_far_qp_query(qp, &out->local[0]);
	out->state = qp->state;
	out->depth = base->depth;
	out->max_sge = base->nic->max_sge;
	out->free = base->depth - (qp->tail - qp->seen);
	return 0;
}

static int soft_qp_fail(struct kvio_qp *base)
{
	struct soft_qp *qp = (struct soft_qp *)base;

	if (qp->state != KVIO_QP_RESET)
		soft_fail(qp);
	for (uint32_t seq = qp->seen; seq != qp->cur; seq++)
		soft_wqe_at(qp, seq)->end = 0;		/* nothing is left to wait for */
	return 0;
}

static int soft_qp_reset(struct kvio_qp *base)
{
	struct soft_qp *qp = (struct soft_qp *)base;

	if (qp->seen != qp->tail)
		return -EBUSY;
	qp->state = KVIO_QP_RESET;
	qp->remote = NULL;
	qp->base.peer = NULL;
	if (qp->link)
		soft_far_qp_reset(qp);
	return 0;
}

static void soft_qp_destroy(struct kvio_qp *base)
{
	struct soft_qp *qp = (struct soft_qp *)base;
	struct soft_nic *nic = soft_nic_of(qp);

	for (struct kvio_nic *other = nic->base.domain->nics; other; other = other->next) {
		for (struct kvio_qp *each = other->qps; each; each = each->next) {
			struct soft_qp *peer = (struct soft_qp *)each;

			if (peer->remote != qp)
				continue;
			peer->remote = NULL;		/* it will not hear from us again */
			peer->base.peer = NULL;
			peer->bad = KVIO_WC_RETRY_EXC_ERR;
		}
	}
	if (qp->link)
		soft_far_qp_destroy(qp);
	soft_busy_remove(nic->fabric, qp);
	nic->fabric->num_qps--;
	nic->cq_owed -= qp->base.depth;
	qp_free(qp);
}

/* ---- figures and faults ---- */

static uint64_t soft_clock(struct kvio_nic *nic)
{
	return soft_clock_ns(((struct soft_nic *)nic)->fabric);
}

static void soft_counters(struct kvio_nic *base, struct kvio_counters *out)
{
	struct soft_nic *nic = (struct soft_nic *)base;

	*out = nic->counters;
	out->tx_busy_ns = nic->tx.busy / SOFT_TICKS;
	out->rx_busy_ns = nic->rx.busy / SOFT_TICKS;
}

int kvio_soft_fault(struct kvio_nic *base, uint32_t fault, uint64_t nth, uint64_t value)
{
	struct soft_nic *nic = (struct soft_nic *)base;
	int rc = 0;

	if (base->ops != &kvio_soft_ops)
		return -EOPNOTSUPP;
	kvio_lock(base);
	if (fault == KVIO_FAULT_DROP) {
		nic->drop_in = nth;
	} else if (fault == KVIO_FAULT_DELAY) {
		nic->delay = value * SOFT_TICKS;
	} else if (fault == KVIO_FAULT_STATUS) {
		nic->fail_in = nth;
		nic->fail_status = (uint32_t)value;
	} else {
		rc = -EINVAL;
	}
	kvio_unlock(base);
	return rc;
}

static void soft_info(struct kvio_nic *base, struct kvio_nic_info *out)
{
	out->max_sge = out->max_sge_rd = base->max_sge;
	out->max_msg_nbytes = UINT32_MAX;	/* all that a work request can say */
}

const struct kvio_nic_ops kvio_soft_ops = {
	.name = "soft",
	.open = soft_open,
	.close = soft_close,
	.reg = soft_reg,
	.dereg = soft_dereg,
	.far_open = soft_far_open,
	.far_close = soft_far_close,
	.qp_create = soft_qp_create,
	.qp_connect = soft_qp_connect,
	.qp_query = soft_qp_query,
	.qp_fail = soft_qp_fail,
	.qp_reset = soft_qp_reset,
	.qp_destroy = soft_qp_destroy,
	.post = soft_post,
	.cancel = soft_cancel,
	.drive = soft_drive,
	.poll = soft_poll,
	.clock = soft_clock,
	.sleep = soft_sleep,
	.event_fd = soft_event_fd,
	.arm = soft_arm,
	.counters = soft_counters,
	.info = soft_info,
};
