/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVIO_VERBS_PLAN_H
#define KVIO_VERBS_PLAN_H
/* One post under way: what verbs_post.c and verbs_stage.c share. */
#include "verbs.h"

#ifdef KVIO_HAVE_VERBS

struct side {			/* the region named last: most work requests name the same */
	uint64_t key;
	uint64_t addr, nbytes, slice;
	const uint32_t *keys;		/* of this rail's slices, `stride` apart */
	uint32_t stride;
	uint32_t access;
	uint32_t usual;			/* by opcode: permitted, and there is one slice only */
};

/* Work requests are staged and handed over by runs: consecutive ones on one rail. */
struct plan {
	struct verbs_qp *qp;
	struct verbs_nic *nic;
	const struct kvio_post *post;
	struct side local, remote;
	uint64_t slot;			/* of each wr_id */
	uint32_t runs;			/* begun */
	uint32_t rail;			/* of this run, ... */
	uint32_t room;			/* places left on it */
	uint32_t count;			/* pieces so far */
	uint32_t first;			/* number of the record of its first piece */
	uint32_t pieces, sges;		/* staged and not handed over */
	bool builds;			/* by ibv_wr_start and so on; else a chain */
	bool building;			/* it has begun */
	bool some_local;		/* records that no device will speak of */
};

static inline uint32_t key_at(const struct side *side, uint64_t addr)
{
	if (side->nbytes <= side->slice)
		return side->keys[0];
	return side->keys[(addr - side->addr) / side->slice * side->stride];
}

/* The piece whose entries from `first` on are staged. */
static inline void add_piece(struct plan *plan, uint32_t opcode, uint64_t far, uint32_t first,
			     uint32_t number)
{
	struct ibv_send_wr *to = &plan->nic->wrs[plan->pieces++];
	uint32_t piece = plan->qp->ends[plan->rail].tail + plan->count++;

	to->wr_id = plan->slot | (uint64_t)(number & VERBS_NUMBER) << VERBS_NUMBER_BITS |
		    (piece & VERBS_NUMBER);
	to->next = to + 1;
	to->sg_list = &plan->nic->sges[first];
	to->num_sge = (int)(plan->sges - first);
	to->opcode = opcode == KVIO_OP_READ ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
	to->send_flags = 0;
	to->wr.rdma.remote_addr = far;
	to->wr.rdma.rkey = key_at(&plan->remote, far);
}

/* verbs_stage.c: any work request. A status; -1: the rail has no room for it now, nothing was
 * staged. `number`: of its record. */
int verbs_stage(struct plan *plan, const struct kvio_wr *wr, uint32_t number);

#endif
#endif
