/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Posting: keys to lkeys and rkeys, bounds, splitting, dealing out to rails, one doorbell each.
 *
 * A post is staged first and then handed to each rail in one call. Only the last piece of each
 * rail is signalled. A work request that must fail never gets to a device: it fails alone when
 * all before it have completed, and what follows is flushed.
 */
#include "verbs.h"

#ifdef KVIO_HAVE_VERBS

#define STRIPE_BYTES (256u << 10)	/* less is not dealt out to several rails */

struct side {			/* the region named last: most work requests name the same */
	uint64_t key;
	uint64_t addr, nbytes, slice;
	const uint32_t *keys;		/* of this rail's slices, `stride` apart */
	uint32_t stride;
	uint32_t access;
};

struct run {				/* consecutive pieces on one rail */
	uint32_t rail, first, count;
};

struct plan {
	struct verbs_qp *qp;
	struct verbs_nic *nic;
	const struct kvio_post *post;
	struct side local, remote;
	struct run runs[KVIO_MAX_RAILS];
	uint32_t num_runs;
	uint32_t pieces, sges;		/* staged */
	uint32_t room;			/* places left on the rail of this run */
	uint32_t tail;			/* its piece number before this run */
	uint32_t rail;
	uint32_t max_msg;
	bool some_lists;		/* pieces with several entries */
	bool some_local;		/* records that no device will speak of */
};

/* ---- regions ---- */

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

static inline uint32_t key_at(const struct side *side, uint64_t addr)
{
	if (side->nbytes <= side->slice)
		return side->keys[0];
	return side->keys[(addr - side->addr) / side->slice * side->stride];
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

	*whole = wr->length <= plan->max_msg &&
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

/* The piece whose entries from `first` on are staged. */
static inline void add_piece(struct plan *plan, uint32_t opcode, uint64_t far, uint32_t first,
			     uint32_t number)
{
	struct verbs_qp *qp = plan->qp;
	struct run *run = &plan->runs[plan->num_runs - 1];
	struct ibv_send_wr *to = &plan->nic->wrs[plan->pieces++];
	uint32_t piece = plan->tail + run->count++;

	to->wr_id = (uint64_t)qp->slot << (2 * VERBS_NUMBER_BITS) |
		    (uint64_t)(number & VERBS_NUMBER) << VERBS_NUMBER_BITS |
		    (piece & VERBS_NUMBER);
	to->next = to + 1;
	to->sg_list = &plan->nic->sges[first];
	to->num_sge = (int)(plan->sges - first);
	plan->some_lists |= to->num_sge > 1;
	to->opcode = opcode == KVIO_OP_READ ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
	to->send_flags = 0;
	to->wr.rdma.remote_addr = far;
	to->wr.rdma.rkey = key_at(&plan->remote, far);
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

/* By message size, by slices of either side and by the length of a list. False: no room. */
static bool add_split(struct plan *plan, const struct kvio_wr *wr, uint32_t number)
{
	const struct kvio_sge alone = { wr->local_addr, wr->lkey, wr->length, 0 }, *segment;
	uint32_t most = wr->opcode == KVIO_OP_READ ? plan->nic->max_sge_rd :
						     plan->nic->base.max_sge;
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
			if (take > plan->max_msg - nbytes)
				take = plan->max_msg - nbytes;
			add_sge(plan, side, addr, (uint32_t)take);
			addr += take;
			far += take;
			left -= (uint32_t)take;
			nbytes += (uint32_t)take;
			if (plan->sges - first == most || nbytes == plan->max_msg ||
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

/* A status; -1: the rail has no room for it now, nothing was staged. */
static int stage(struct plan *plan, const struct kvio_wr *wr, uint32_t number)
{
	struct run *run = &plan->runs[plan->num_runs - 1];
	uint32_t pieces = plan->pieces, sges = plan->sges, count = run->count;
	const struct verbs_end *end = &plan->qp->ends[plan->rail];
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
		run->count = count;
		/* Not even an empty queue would take it. */
		return plan->room == end->room ? KVIO_WC_LOC_LEN_ERR : -1;
	}
	plan->room -= run->count - count;
	return KVIO_WC_SUCCESS;
}

/* ---- handing over ---- */

/* As one chain: works everywhere. */
static int hand_over_chain(struct verbs_end *end, struct ibv_send_wr *wrs, uint32_t count,
			   uint32_t *accepted)
{
	struct ibv_send_wr *bad = NULL;
	int rc;

	wrs[count - 1].next = NULL;
	rc = ibv_post_send(end->qp, wrs, &bad);
	*accepted = rc ? bad ? (uint32_t)(bad - wrs) : 0 : count;
	return rc;
}

/* Written straight into the send queue, without lists of several entries: of these librxe (up to
 * rdma-core 60 at least) takes the first one's length for all. */
static int hand_over_built(struct verbs_end *end, const struct ibv_send_wr *wrs, uint32_t count,
			   uint32_t *accepted)
{
	struct ibv_qp_ex *ex = end->ex;
	int rc;

	ibv_wr_start(ex);
	for (uint32_t i = 0; i < count; i++) {
		const struct ibv_send_wr *wr = &wrs[i];

		ex->wr_id = wr->wr_id;
		ex->wr_flags = wr->send_flags;
		if (wr->opcode == IBV_WR_RDMA_READ)
			ibv_wr_rdma_read(ex, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr);
		else
			ibv_wr_rdma_write(ex, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr);
		ibv_wr_set_sge(ex, wr->sg_list->lkey, wr->sg_list->addr, wr->sg_list->length);
	}
	rc = ibv_wr_complete(ex);
	*accepted = rc ? 0 : count;
	return rc;
}

/* The device would not take all of a run: what it did take may be unsignalled, so it is stopped,
 * and all of this queue pair fails. */
static void refused(struct verbs_qp *qp, uint32_t rail, const struct ibv_send_wr *bad)
{
	struct verbs_record *record = verbs_record_at(qp, (uint32_t)(bad->wr_id >>
							   VERBS_NUMBER_BITS));

	record->status = KVIO_WC_GENERAL_ERR;
	verbs_fail(qp);
	verbs_stop(qp, rail);
}

static inline void ask_for_completion(struct plan *plan, struct ibv_send_wr *wr)
{
	plan->nic->counters.signalled += wr->send_flags == 0;
	wr->send_flags = IBV_SEND_SIGNALED;
}

static void ring(struct plan *plan)
{
	struct verbs_qp *qp = plan->qp;
	struct kvio_counters *counters = &plan->nic->counters;

	for (uint32_t i = 0; i < plan->num_runs; i++) {
		const struct run *run = &plan->runs[i];
		struct ibv_send_wr *wrs = &plan->nic->wrs[run->first];
		struct verbs_end *end = &qp->ends[run->rail];
		uint32_t accepted;
		int rc;

		if (run->count == 0)
			continue;
		ask_for_completion(plan, &wrs[run->count - 1]);
		end->tail += run->count;
		if (qp->state == KVIO_QP_ERROR) {	/* another rail's doorbell failed */
			verbs_stop(qp, run->rail);
			continue;
		}
		counters->doorbells++;
		rc = end->ex && !plan->some_lists ?
		     hand_over_built(end, wrs, run->count, &accepted) :
		     hand_over_chain(end, wrs, run->count, &accepted);
		if (rc)
			refused(qp, run->rail, &wrs[accepted]);
		counters->work_requests += accepted;
	}
}

/* ---- a post ---- */

static void begin_run(struct plan *plan, uint32_t rail)
{
	const struct verbs_end *end = &plan->qp->ends[rail];

	plan->runs[plan->num_runs++] = (struct run){ .rail = rail, .first = plan->pieces };
	plan->rail = rail;
	plan->room = end->room - (end->tail - end->done);
	plan->tail = end->tail;
	plan->local.key = plan->remote.key = 0;		/* keys differ by rail */
	plan->local.nbytes = plan->remote.nbytes = 0;
}

/* How many bytes each rail gets: all on one, or equal shares in consecutive runs. */
static uint64_t share_of_rail(const struct verbs_qp *qp, const struct kvio_post *post,
			      uint32_t count)
{
	uint64_t total = 0;

	if (qp->num_rails == 1)
		return UINT64_MAX;
	for (uint32_t i = 0; i < count; i++)
		total += post->wrs[i].length;
	return total < STRIPE_BYTES ? UINT64_MAX : total / qp->num_rails + 1;
}

static void record(struct verbs_qp *qp, const struct kvio_post *post, uint32_t i, uint32_t rail,
		   uint32_t end, uint32_t status)
{
	*verbs_record_at(qp, qp->tail++) = (struct verbs_record){
		.wr_id = post->wr_id + i, .end = end, .length = post->wrs[i].length,
		.rail = (uint8_t)rail, .status = (uint8_t)status,
		.read = post->wrs[i].opcode == KVIO_OP_READ,
		.report = post->flags & KVIO_POST_SIGNAL_ALL,
	};
}

/* Stages up to `count`; how many have a record now. */
static uint32_t stage_all(struct plan *plan, uint32_t count)
{
	struct verbs_qp *qp = plan->qp;
	const struct kvio_post *post = plan->post;
	uint64_t share = share_of_rail(qp, post, count), dealt = 0;
	uint32_t i;

	for (i = 0; i < count; i++) {
		uint32_t before = plan->pieces;
		int status;

		if (qp->spoiled) {
			record(qp, post, i, VERBS_LOCAL, 0, KVIO_WC_WR_FLUSH_ERR);
			plan->some_local = true;
			continue;
		}
		if (dealt >= share && plan->num_runs < qp->num_rails) {
			begin_run(plan, (plan->rail + 1) % qp->num_rails);
			dealt = 0;
		}
		status = stage(plan, &post->wrs[i], qp->tail);
		if (status < 0)
			break;
		dealt += post->wrs[i].length;
		if (plan->pieces != before) {
			record(qp, post, i, plan->rail,
			       plan->tail + plan->runs[plan->num_runs - 1].count, 0);
			if (post->flags & KVIO_POST_SIGNAL_ALL)
				ask_for_completion(plan, &plan->nic->wrs[plan->pieces - 1]);
			continue;
		}
		record(qp, post, i, VERBS_LOCAL, 0, (uint32_t)status);
		plan->some_local = true;
		qp->spoiled = status != 0;
	}
	return i;
}

int verbs_post(struct kvio_qp *base, const struct kvio_post *post)
{
	struct verbs_qp *qp = (struct verbs_qp *)base;
	struct plan plan = {
		.qp = qp, .nic = verbs_nic_of(qp), .post = post,
		.max_msg = verbs_nic_of(qp)->max_msg,
	};
	uint32_t room = base->depth - (qp->tail - qp->head);
	uint32_t count = post->count < room ? post->count : room;

	if (qp->state == KVIO_QP_RESET)
		return -ENOTCONN;
	if (post->event)
		return -EOPNOTSUPP;
	if (count == 0)
		return 0;
	if (qp->state == KVIO_QP_ERROR)
		qp->spoiled = true;
	begin_run(&plan, qp->next_rail);
	count = stage_all(&plan, count);
	if (count == 0)
		return 0;
	verbs_record_at(qp, qp->tail - 1)->report = true;
	qp->next_rail = (plan.rail + 1) % qp->num_rails;
	ring(&plan);
	if (plan.some_local)
		verbs_moved(qp);
	return (int)count;
}

/* A device cannot take back what it was given. */
int verbs_cancel(struct kvio_qp *base, uint64_t wr_id, uint32_t count)
{
	return 0;
}

#endif
