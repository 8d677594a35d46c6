/* SPDX-License-Identifier: Apache-2.0 */
/* A work request on its way to the device: keys to lkeys and rkeys, bounds, splitting. */
#include "verbs_plan.h"

#ifdef KVIO_HAVE_VERBS

/* ---- regions ---- */

/* The opcodes, as bits, of which stage_usual needs to ask no more. */
static uint32_t usual(const struct side *side, uint32_t to_read, uint32_t to_write)
{
	uint32_t bits = 0;

	if (side->nbytes > side->slice)
		return 0;
	if ((side->access & to_read) == to_read)
		bits |= 1u << KVIO_OP_READ;
	if ((side->access & to_write) == to_write)
		bits |= 1u << KVIO_OP_WRITE;
	return bits;
}

static void load_local(struct plan *plan, uint64_t key)
{
	const struct kvio_region *region = kvio_region_find(&plan->nic->base.table, key);
	const struct verbs_region *mine = region ? region->provider : NULL;

	plan->local = (struct side){ .key = key };
	if (!region)
		return;
	plan->local = (struct side){
		.key = key, .addr = region->addr, .nbytes = region->nbytes,
		.slice = mine->slice_nbytes, .keys = mine->lkeys + plan->rail,
		.stride = plan->nic->num_rails, .access = region->access,
	};
	plan->local.usual = usual(&plan->local, KVIO_LOCAL_WRITE, 0);
}

static void load_remote(struct plan *plan, uint64_t key)
{
	const struct kvio_far *far = plan->qp->base.far;
	const struct kvio_region *region = kvio_region_find(&far->table, key);
	const struct kvio_rkeys *theirs = region ? kvio_rkeys_of(region) : NULL;

	plan->remote = (struct side){ .key = key };
	if (!region)
		return;
	plan->remote = (struct side){
		.key = key, .addr = region->addr, .nbytes = region->nbytes,
		.slice = theirs->slice_nbytes, .keys = theirs->rkeys + plan->rail,
		.stride = far->num_rails, .access = region->access,
	};
	plan->remote.usual = usual(&plan->remote, KVIO_REMOTE_READ, KVIO_REMOTE_WRITE);
}

/* Of nonzero length; cannot overflow. A key that is unknown covers nothing. */
static inline bool covers(const struct side *side, uint64_t addr, uint64_t length,
			  uint32_t access)
{
	return addr >= side->addr && length <= side->nbytes &&
	       addr - side->addr <= side->nbytes - length && (side->access & access) == access;
}

static inline bool is_in_one_slice(const struct side *side, uint64_t addr, uint64_t length)
{
	uint64_t at = addr - side->addr;

	return side->nbytes <= side->slice || at / side->slice == (at + length - 1) / side->slice;
}

static inline uint64_t left_in_slice(const struct side *side, uint64_t addr)
{
	return side->slice - (addr - side->addr) % side->slice;
}

/* ---- one work request ---- */

static inline const struct side *local_side(struct plan *plan, uint64_t key)
{
	if (key != plan->local.key)
		load_local(plan, key);
	return &plan->local;
}

/* A status. Length is nonzero. `*whole`: one piece will do. */
static uint32_t check(struct plan *plan, const struct kvio_wr *wr, bool *whole)
{
	bool read = wr->opcode == KVIO_OP_READ;
	uint32_t need = read ? KVIO_LOCAL_WRITE : 0;
	uint64_t far = wr->remote_addr + plan->post->remote_offset;
	const struct side *side;

	*whole = wr->length <= plan->nic->max_msg &&
		 wr->num_sge <= (read ? plan->nic->max_sge_rd : plan->nic->base.max_sge);
	if (wr->num_sge == 0) {
		uint64_t addr = wr->local_addr + plan->post->local_offset;

		side = local_side(plan, wr->lkey);
		if (!covers(side, addr, wr->length, need))
			return KVIO_WC_LOC_PROT_ERR;
		*whole = *whole && is_in_one_slice(side, addr, wr->length);
	}
	for (uint32_t s = 0; s < wr->num_sge; s++) {
		const struct kvio_sge *sge = &plan->post->sges[wr->sge_first + s];
		uint64_t addr = sge->addr + plan->post->local_offset;

		if (sge->length == 0)
			continue;
		side = local_side(plan, sge->lkey);
		if (!covers(side, addr, sge->length, need))
			return KVIO_WC_LOC_PROT_ERR;
		*whole = *whole && is_in_one_slice(side, addr, sge->length);
	}
	if (wr->rkey != plan->remote.key)
		load_remote(plan, wr->rkey);
	if (!covers(&plan->remote, far, wr->length, read ? KVIO_REMOTE_READ : KVIO_REMOTE_WRITE))
		return KVIO_WC_REM_ACCESS_ERR;
	*whole = *whole && is_in_one_slice(&plan->remote, far, wr->length);
	return KVIO_WC_SUCCESS;
}

static inline void add_sge(struct plan *plan, const struct side *side, uint64_t addr,
			   uint32_t length)
{
	plan->nic->sges[plan->sges++] = (struct ibv_sge){
		.addr = addr, .length = length, .lkey = key_at(side, addr),
	};
}

static void add_whole(struct plan *plan, const struct kvio_wr *wr, uint32_t number)
{
	uint64_t offset = plan->post->local_offset;
	uint32_t first = plan->sges;

	if (wr->num_sge == 0)
		add_sge(plan, &plan->local, wr->local_addr + offset, wr->length);
	for (uint32_t s = 0; s < wr->num_sge; s++) {
		const struct kvio_sge *sge = &plan->post->sges[wr->sge_first + s];

		if (sge->length)
			add_sge(plan, local_side(plan, sge->lkey), sge->addr + offset,
				sge->length);
	}
	add_piece(plan, wr->opcode, wr->remote_addr + plan->post->remote_offset, first, number);
}

/* How many entries a piece may have. */
static uint32_t most_sges(const struct plan *plan, uint32_t opcode)
{
	if (plan->builds)
		return 1;
	return opcode == KVIO_OP_READ ? plan->nic->max_sge_rd : plan->nic->base.max_sge;
}

/* By message size, by slices of either side and by the length of a list. False: no room. */
static bool add_split(struct plan *plan, const struct kvio_wr *wr, uint32_t number)
{
	const struct kvio_sge alone = { wr->local_addr, wr->lkey, wr->length, 0 }, *segment;
	uint32_t most = most_sges(plan, wr->opcode), max_msg = plan->nic->max_msg;
	uint32_t count = wr->num_sge ? wr->num_sge : 1, first = plan->sges, nbytes = 0, pieces = 0;
	uint64_t far = wr->remote_addr + plan->post->remote_offset, start = far;

	segment = wr->num_sge ? &plan->post->sges[wr->sge_first] : &alone;
	for (uint32_t s = 0; s < count; s++, segment++) {
		uint64_t addr = segment->addr + plan->post->local_offset;
		uint32_t left = segment->length;

		while (left) {
			const struct side *side = local_side(plan, segment->lkey);
			uint64_t take = left;

			if (pieces == plan->room)
				return false;
			if (take > left_in_slice(side, addr))
				take = left_in_slice(side, addr);
			if (take > left_in_slice(&plan->remote, far))
				take = left_in_slice(&plan->remote, far);
			if (take > max_msg - nbytes)
				take = max_msg - nbytes;
			add_sge(plan, side, addr, (uint32_t)take);
			addr += take;
			far += take;
			left -= (uint32_t)take;
			nbytes += (uint32_t)take;
			if (plan->sges - first == most || nbytes == max_msg ||
			    left_in_slice(&plan->remote, far) == plan->remote.slice) {
				add_piece(plan, wr->opcode, start, first, number);
				pieces++;
				start = far;
				first = plan->sges;
				nbytes = 0;
			}
		}
	}
	if (plan->sges != first) {
		if (pieces == plan->room)
			return false;
		add_piece(plan, wr->opcode, start, first, number);
	}
	return true;
}

int verbs_stage(struct plan *plan, const struct kvio_wr *wr, uint32_t number)
{
	uint32_t pieces = plan->pieces, sges = plan->sges, count = plan->count;
	uint32_t status;
	bool whole;

	if (wr->opcode != KVIO_OP_READ && wr->opcode != KVIO_OP_WRITE)
		return KVIO_WC_LOC_QP_OP_ERR;
	if (wr->length == 0)
		return KVIO_WC_SUCCESS;		/* touches nothing, needs no key */
	status = check(plan, wr, &whole);
	if (status)
		return (int)status;
	if (plan->room == 0)
		return -1;
	if (whole) {
		add_whole(plan, wr, number);
	} else if (!add_split(plan, wr, number)) {
		plan->pieces = pieces;
		plan->sges = sges;
		plan->count = count;
		/* Not even an empty queue would take it. */
		return plan->room == plan->qp->ends[plan->rail].room ? KVIO_WC_LOC_LEN_ERR : -1;
	}
	plan->room -= plan->count - count;
	return KVIO_WC_SUCCESS;
}

#endif
