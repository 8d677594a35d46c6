/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who may send next. Both ends of a link arbitrate: of the packets that could start now, each
 * receiving port grants one, and a sending port takes one of its grants.
 */
#include "softnic.h"

/* The seam for the two-table arbiter of InfiniBand: here round robin over the VLs that wait. */
static uint32_t arbiter_pick(const struct soft_arbiter *arbiter, uint32_t mask)
{
	uint32_t vl = arbiter->last;

	do
		vl = (vl + 1) % KVIO_NUM_VL;
	while (!(mask & 1u << vl));
	return vl;
}

void soft_arbiter_sent(struct soft_arbiter *arbiter, uint32_t vl, uint64_t nbytes)
{
	arbiter->last = vl;
}

/* First come, first served. The tie-break depends on nothing that late driving could change. */
static bool is_older(const struct soft_qp *a, const struct soft_qp *b)
{
	return !b || a->ready < b->ready || (a->ready == b->ready && a->qpn < b->qpn);
}

/* Of the packets that can start at `time` (qp->start says so): the one that does. */
struct soft_qp *soft_choose(struct kvio_fabric *fabric, uint64_t time)
{
	struct soft_qp *first = NULL, *bad = NULL, *chosen = NULL, *qp;
	struct soft_nic *source;
	uint32_t vl;

#define FOR_EACH_CANDIDATE					\
	for (uint32_t i = 0; i < fabric->num_busy; i++)		\
		if (qp = fabric->busy[i], soft_is_waiting(qp) && qp->start == time)
	FOR_EACH_CANDIDATE {
		if (qp->bad) {
			bad = is_older(qp, bad) ? qp : bad;
			continue;
		}
		qp->source->tx.mask = qp->sink->rx.mask = 0;
		qp->sink->grant = NULL;
	}
	if (bad)
		return bad;
	FOR_EACH_CANDIDATE
		qp->sink->rx.mask |= 1u << soft_vl_of(qp);
	FOR_EACH_CANDIDATE {
		struct soft_nic *sink = qp->sink;

		if (soft_vl_of(qp) == arbiter_pick(&sink->rx.arbiter, sink->rx.mask) &&
		    is_older(qp, sink->grant))
			sink->grant = qp;
	}
	FOR_EACH_CANDIDATE {
		if (qp->sink->grant != qp)
			continue;
		qp->source->tx.mask |= 1u << soft_vl_of(qp);
		first = is_older(qp, first) ? qp : first;
	}
	source = first->source;
	vl = arbiter_pick(&source->tx.arbiter, source->tx.mask);
	FOR_EACH_CANDIDATE
		if (qp->sink->grant == qp && qp->source == source && soft_vl_of(qp) == vl)
			chosen = is_older(qp, chosen) ? qp : chosen;
#undef FOR_EACH_CANDIDATE
	return chosen;
}
