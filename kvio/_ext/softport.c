/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who may send next: InfiniBand's two tables of virtual lanes (docs/transfer.md, "The arbiter").
 *
 * Both ends of a link arbitrate, by the same tables: of the packets that could start now, each
 * receiving port grants one, and a sending port takes one of its grants. To a sending port, a
 * packet without a grant has no credits.
 */
#include "softnic.h"

#define UNIT_BYTES 64u			/* of weights */
#define LIMIT_BYTES 4096		/* of high_limit */
#define ONE_PACKET 0
#define NO_LIMIT 255

/* ---- the tables ---- */

static int table_init(struct soft_vlarb *table, const struct kvio_vlarb *entries, uint32_t length)
{
	if (length > KVIO_MAX_VLARB)
		return -EINVAL;
	table->length = length;
	for (uint32_t i = 0; i < length; i++) {
		if (entries[i].vl >= KVIO_NUM_VL)
			return -EINVAL;
		table->entries[i] = entries[i];
		if (entries[i].weight)
			table->vls |= 1u << entries[i].vl;
	}
	for (uint32_t i = 0; i < length; i++)
		for (uint32_t step = length; step > 0; step--) {	/* the nearest one stays */
			uint32_t e = (i + step) % length;

			if (entries[e].weight)
				table->after[i][entries[e].vl] = (uint8_t)e;
		}
	return 0;
}

int soft_arbitration_init(struct soft_arbitration *rules, const struct kvio_fabric_params *params)
{
	struct soft_vlarb *high = &rules->tables[SOFT_HIGH], *low = &rules->tables[SOFT_LOW];

	if (table_init(high, params->vlarb_high, params->num_high) < 0 ||
	    table_init(low, params->vlarb_low, params->num_low) < 0)
		return -EINVAL;
	for (uint32_t sl = 0; sl < KVIO_NUM_SL; sl++) {
		if (params->sl2vl[sl] >= KVIO_NUM_VL ||
		    !((high->vls | low->vls) & 1u << params->sl2vl[sl]))
			return -EINVAL;
		rules->sl2vl[sl] = params->sl2vl[sl];
	}
	if (params->high_limit == NO_LIMIT)
		rules->reload = INT64_MAX;	/* no fabric lives long enough to spend that */
	else if (params->high_limit == ONE_PACKET)
		rules->reload = 1;
	else
		rules->reload = params->high_limit * LIMIT_BYTES;
	return 0;
}

/* ---- one port ---- */

/* The table that serves one of these lanes. Each of them has a weight somewhere. */
static uint32_t which_table(const struct soft_arbitration *rules,
			    const struct soft_arbiter *arbiter, uint32_t waiting)
{
	uint32_t first = arbiter->budget <= 0 ? SOFT_LOW : SOFT_HIGH;

	return rules->tables[first].vls & waiting ? first : !first;
}

/* The lane that may send: from the current entry on the first that has weight left, with one
 * step more than there are entries, for the current one comes last again, afresh. */
static uint32_t arbiter_pick(const struct soft_arbitration *rules,
			     const struct soft_arbiter *arbiter, uint32_t waiting)
{
	uint32_t which = which_table(rules, arbiter, waiting);
	const struct soft_vlarb *table = &rules->tables[which];
	uint32_t used = arbiter->turns[which].used, at = arbiter->turns[which].index;

	for (;;) {
		const struct kvio_vlarb *entry = &table->entries[at];

		if (used < entry->weight && waiting & 1u << entry->vl)
			return entry->vl;
		at = at + 1 < table->length ? at + 1 : 0;
		used = 0;
	}
}

/*
 * Packets of the lane that was picked have left. Which entry's turn it was follows from the lane
 * alone: of those that waited it was the first, so it is the first with that lane as well. So a
 * run of packets of a lane that waits alone is told of here at once.
 */
void soft_arbiter_sent(const struct soft_arbitration *rules, struct soft_arbiter *arbiter,
		       uint32_t vl, uint64_t nbytes, uint32_t mtu)
{
	uint32_t which, at, size;
	uint64_t left = nbytes;

	do {
		size = left < mtu ? (uint32_t)left : mtu;
		left -= size;
		size = size < UNIT_BYTES ? UNIT_BYTES : size;	/* an empty message costs a unit */
		which = which_table(rules, arbiter, 1u << vl);
		at = arbiter->turns[which].index;
		if (rules->tables[which].entries[at].vl != vl ||
		    arbiter->turns[which].used >= rules->tables[which].entries[at].weight) {
			arbiter->turns[which].index = rules->tables[which].after[at][vl];
			arbiter->turns[which].used = 0;
		}
		arbiter->turns[which].used += (size + UNIT_BYTES - 1) / UNIT_BYTES;
		if (which == SOFT_HIGH)
			arbiter->budget -= size;
		else
			arbiter->budget = rules->reload;
	} while (left);
}

/* ---- both ends ---- */

/* First come, first served. The tie-break depends on nothing that late driving could change. */
static bool is_older(const struct soft_qp *a, const struct soft_qp *b)
{
	return !b || a->ready < b->ready || (a->ready == b->ready && a->qpn < b->qpn);
}

/* Of the packets that can start at `time` (qp->start says so): the one that does. */
struct soft_qp *soft_choose(struct kvio_fabric *fabric, uint64_t time)
{
	struct soft_qp *first = NULL, *bad = NULL, *chosen = NULL, *qp;
	const struct soft_arbitration *rules = &fabric->arbitration;
	struct soft_nic *source;

#define FOR_EACH_CANDIDATE					\
	for (uint32_t i = 0; i < fabric->num_busy; i++)		\
		if (qp = fabric->busy[i], soft_is_waiting(qp) && qp->start == time)
	FOR_EACH_CANDIDATE {
		if (qp->bad) {
			bad = is_older(qp, bad) ? qp : bad;
			continue;
		}
		qp->source->tx.waiting = qp->sink->rx.waiting = 0;
		qp->sink->rx.vl = KVIO_NUM_VL;
		qp->sink->grant = NULL;
	}
	if (bad)
		return bad;
	FOR_EACH_CANDIDATE
		qp->sink->rx.waiting |= 1u << qp->vl;
	FOR_EACH_CANDIDATE {
		struct soft_nic *sink = qp->sink;

		if (sink->rx.vl == KVIO_NUM_VL)
			sink->rx.vl = arbiter_pick(rules, &sink->rx.arbiter, sink->rx.waiting);
		if (qp->vl == sink->rx.vl && is_older(qp, sink->grant))
			sink->grant = qp;
	}
	FOR_EACH_CANDIDATE {
		if (qp->sink->grant != qp)
			continue;
		qp->source->tx.waiting |= 1u << qp->vl;
		first = is_older(qp, first) ? qp : first;
	}
	source = first->source;
	source->tx.vl = arbiter_pick(rules, &source->tx.arbiter, source->tx.waiting);
	FOR_EACH_CANDIDATE
		if (qp->sink->grant == qp && qp->source == source && qp->vl == source->tx.vl)
			chosen = is_older(qp, chosen) ? qp : chosen;
#undef FOR_EACH_CANDIDATE
	return chosen;
}
