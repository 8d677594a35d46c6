/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Posting: work requests are staged (verbs_stage.c), dealt out to rails and handed over.
 *
 * What a rail gets of a post is handed over in one call, and only the last piece is signalled. A
 * work request that must fail never gets to a device: it fails alone when all before it have
 * completed, and what follows is flushed.
 */
#include "verbs_plan.h"

#ifdef KVIO_HAVE_VERBS

#define STRIPE_BYTES (256u << 10)	/* less is not dealt out to several rails */
#define BLOCK 32u			/* pieces staged at a time, some 5 KiB */

/* What nearly all are: one range at either end, of the regions named before, in one slice, within
 * bounds and permitted. False: somebody else has to look at it. */
static inline bool stage_usual(struct plan *plan, const struct kvio_wr *wr, uint32_t number)
{
	const struct side *near = &plan->local, *far = &plan->remote;
	uint64_t addr = wr->local_addr + plan->post->local_offset;
	uint64_t to = wr->remote_addr + plan->post->remote_offset;
	uint32_t length = wr->length, opcode = wr->opcode;

	if (wr->num_sge || wr->lkey != near->key || wr->rkey != far->key ||
	    opcode > KVIO_OP_WRITE || !(near->usual & far->usual & 1u << opcode) ||
	    length - 1 >= plan->nic->max_msg || length > near->nbytes ||
	    addr - near->addr > near->nbytes - length || length > far->nbytes ||
	    to - far->addr > far->nbytes - length || plan->room == 0)
		return false;
	plan->nic->sges[plan->sges++] = (struct ibv_sge){
		.addr = addr, .length = length, .lkey = near->keys[0],
	};
	add_piece(plan, opcode, to, plan->sges - 1, number);
	plan->room--;
	return true;
}

/* ---- handing over ---- */

/*
 * Writes staged pieces into the send queue; the last `keep` stay. By blocks, so that what is
 * staged stays in the cache. Each has one entry: of lists librxe (seen with rdma-core 44)
 * takes the first one's length for all, so lists go by chains.
 */
static __attribute__((noinline)) void build(struct plan *plan, uint32_t keep)
{
	struct ibv_qp_ex *ex = plan->qp->ends[plan->rail].ex;
	struct ibv_send_wr *wr = plan->nic->wrs;
	uint32_t count = plan->pieces - keep;

	if (!plan->building)
		ibv_wr_start(ex);
	plan->building = true;
	for (uint32_t i = 0; i < count; i++, wr++) {
		ex->wr_id = wr->wr_id;
		ex->wr_flags = wr->send_flags;
		if (wr->opcode == IBV_WR_RDMA_READ)
			ibv_wr_rdma_read(ex, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr);
		else
			ibv_wr_rdma_write(ex, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr);
		ibv_wr_set_sge(ex, wr->sg_list->lkey, wr->sg_list->addr, wr->sg_list->length);
	}
	for (uint32_t i = 0; i < keep; i++) {
		plan->nic->sges[i] = plan->nic->sges[count + i];
		plan->nic->wrs[i] = plan->nic->wrs[count + i];
		plan->nic->wrs[i].sg_list = &plan->nic->sges[i];
	}
	plan->pieces = plan->sges = keep;
}

/* The device would not take all of a run: what it did take may be unsignalled, so it is stopped,
 * and all of this queue pair fails, beginning with the record of this number. */
static void refused(struct verbs_qp *qp, uint32_t rail, uint32_t number)
{
	verbs_record_at(qp, number)->status = KVIO_WC_GENERAL_ERR;
	verbs_fail(qp);
	verbs_stop(qp, rail);
	qp->spoiled = true;
}

static inline void ask_for_completion(struct plan *plan, struct ibv_send_wr *wr)
{
	plan->nic->counters.signalled += wr->send_flags == 0;
	wr->send_flags = IBV_SEND_SIGNALED;
}

/* The end of a run: its doorbell. */
static void ring(struct plan *plan)
{
	struct kvio_counters *counters = &plan->nic->counters;
	struct verbs_end *end = &plan->qp->ends[plan->rail];
	struct ibv_send_wr *wrs = plan->nic->wrs, *bad = NULL;
	uint32_t number = plan->first, accepted = plan->count;
	int rc;

	if (plan->count == 0)
		return;
	ask_for_completion(plan, &wrs[plan->pieces - 1]);
	if (plan->builds) {
		build(plan, 0);
		rc = ibv_wr_complete(end->ex);
		accepted = rc ? 0 : accepted;
	} else {
		wrs[plan->pieces - 1].next = NULL;
		rc = ibv_post_send(end->qp, wrs, &bad);
		if (rc && bad) {
			accepted = (uint32_t)(bad - wrs);
			number = (uint32_t)(bad->wr_id >> VERBS_NUMBER_BITS) & VERBS_NUMBER;
		}
	}
	end->tail += plan->count;
	counters->doorbells++;
	counters->work_requests += accepted;
	if (rc)
		refused(plan->qp, plan->rail, number);
	plan->pieces = plan->sges = 0;
	plan->building = false;
}

/* ---- a post ---- */

static void begin_run(struct plan *plan, uint32_t rail)
{
	const struct verbs_end *end = &plan->qp->ends[rail];

	plan->rail = rail;
	plan->room = end->room - (end->tail - end->done);
	plan->count = 0;
	plan->first = plan->qp->tail;
	plan->builds = end->ex && plan->post->num_sges == 0;
	plan->local = plan->remote = (struct side){ 0 };	/* their keys differ by rail */
	plan->runs++;
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

/* Up to `count`; how many have a record now. */
static uint32_t post_all(struct plan *plan, uint32_t count)
{
	struct verbs_qp *qp = plan->qp;
	const struct kvio_post *post = plan->post;
	uint64_t share = share_of_rail(qp, post, count), dealt = 0;
	uint32_t i;

	for (i = 0; i < count; i++) {
		uint32_t before = plan->count;
		int status;

		if (dealt >= share && plan->runs < qp->num_rails) {
			ring(plan);
			begin_run(plan, (plan->rail + 1) % qp->num_rails);
			before = dealt = 0;
		}
		if (qp->spoiled)
			status = KVIO_WC_WR_FLUSH_ERR;
		else if (stage_usual(plan, &post->wrs[i], qp->tail))
			status = KVIO_WC_SUCCESS;
		else
			status = verbs_stage(plan, &post->wrs[i], qp->tail);
		if (status < 0)
			break;
		if (plan->count == before) {
			record(qp, post, i, VERBS_LOCAL, 0, (uint32_t)status);
			plan->some_local = true;
			qp->spoiled |= status != 0;
			continue;
		}
		if (before == 0)
			plan->first = qp->tail;
		dealt += post->wrs[i].length;
		record(qp, post, i, plan->rail, qp->ends[plan->rail].tail + plan->count, 0);
		if (post->flags & KVIO_POST_SIGNAL_ALL)
			ask_for_completion(plan, &plan->nic->wrs[plan->pieces - 1]);
		if (plan->builds && plan->pieces >= BLOCK)
			build(plan, 1);
	}
	ring(plan);
	return i;
}

int verbs_post(struct kvio_qp *base, const struct kvio_post *post)
{
	struct verbs_qp *qp = (struct verbs_qp *)base;
	struct plan plan = {
		.qp = qp, .nic = verbs_nic_of(qp), .post = post,
		.slot = (uint64_t)qp->slot << (2 * VERBS_NUMBER_BITS),
	};
	uint32_t room = base->depth - (qp->tail - qp->head);
	uint32_t count = post->count < room ? post->count : room;

	if (qp->state == KVIO_QP_RESET)
		return -ENOTCONN;
	if (count == 0)
		return 0;
	if (qp->state == KVIO_QP_ERROR)
		qp->spoiled = true;
	begin_run(&plan, qp->next_rail);
	count = post_all(&plan, count);
	if (count == 0)
		return 0;
	verbs_record_at(qp, qp->tail - 1)->report = true;
	qp->next_rail = (plan.rail + 1) % qp->num_rails;
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
