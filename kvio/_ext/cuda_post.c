/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Posting: work requests are checked in their order, as softqueue.c does, and what is sound goes
 * into the queue pair's stream in segments: pieces of one opcode between the same two kinds of
 * memory, and of one allocation on either side, because what merges pieces must not merge across.
 *
 * A post becomes one op, what was handed to the stream, or two: if a work request is bad or a call
 * of the driver fails, that one and what follows.
 */
#include <stdio.h>

#include "cuda_impl.h"

/* A post under way. */
struct work {
	struct cuda_qp *qp;
	struct cuda_nic *nic;
	const struct kvio_post *post;
	struct cuda_op *op;		/* what is handed to the stream belongs to it */
	/* The segment that is being collected in dev->copies. */
	uint32_t count;
	uint32_t first;			/* work request that its first piece belongs to */
	uint32_t kind, opcode;
	uint64_t target_span, source_span;
	uint64_t nbytes;
	struct cuda_failure failure;
};

/* One end of a piece. */
struct side {
	uint64_t addr;
	const struct kvio_region *region;
};

/* ---- checking a work request ---- */

/* A key that nobody had when the batch was submitted stays unknown to it: a region that came later
 * is not held for it, and could be taken back under way. */
static const struct kvio_region *may_use(const struct kvio_post *post,
					 const struct kvio_table *table, uint64_t key,
					 uint64_t addr, uint64_t nbytes, uint32_t access)
{
	const struct kvio_region *region = kvio_region_find(table, key);

	return region && region->born <= post->births && (region->access & access) == access &&
	       kvio_region_covers(region, addr, nbytes) ? region : NULL;
}

/* Where the local side of entry s lies: a work request without a list is its own entry. */
static struct side local_side(const struct work *work, const struct kvio_wr *wr, uint32_t s,
			      uint64_t *nbytes)
{
	const struct kvio_table *mine = &work->nic->base.table;
	const struct kvio_post *post = work->post;
	uint32_t access = wr->opcode == KVIO_OP_READ ? KVIO_LOCAL_WRITE : 0;
	struct kvio_sge entry = { .addr = wr->local_addr, .lkey = wr->lkey };
	struct side side;

	*nbytes = wr->length;
	if (wr->num_sge) {
		entry = post->sges[wr->sge_first + s];
		*nbytes = entry.length;
	}
	side.addr = entry.addr + post->local_offset;
	side.region = *nbytes ? may_use(post, mine, entry.lkey, side.addr, *nbytes, access) : NULL;
	return side;
}

static uint32_t check(const struct work *work, const struct kvio_wr *wr, struct side *remote)
{
	const struct cuda_qp *qp = work->qp;
	bool read = wr->opcode == KVIO_OP_READ;
	uint64_t nbytes;

	if (!read && wr->opcode != KVIO_OP_WRITE)
		return KVIO_WC_LOC_QP_OP_ERR;
	if (!qp->remote || qp->remote->remote != qp || qp->remote->state != KVIO_QP_READY)
		return KVIO_WC_RETRY_EXC_ERR;
	if (wr->length == 0)
		return KVIO_WC_SUCCESS;		/* touches nothing, needs no key */
	for (uint32_t s = 0; s < (wr->num_sge ? wr->num_sge : 1); s++)
		if (!local_side(work, wr, s, &nbytes).region && nbytes)
			return KVIO_WC_LOC_PROT_ERR;
	remote->addr = wr->remote_addr + work->post->remote_offset;
	remote->region = may_use(work->post, qp->base.peer, wr->rkey, remote->addr, wr->length,
				 read ? KVIO_REMOTE_READ : KVIO_REMOTE_WRITE);
	return remote->region ? KVIO_WC_SUCCESS : KVIO_WC_REM_ACCESS_ERR;
}

/* ---- segments ---- */

/* Hands the collected segment to the stream. False: work->failure. */
static bool submit(struct work *work)
{
	struct cuda_nic *nic = work->nic;
	uint32_t count = work->count, read = work->opcode == KVIO_OP_READ;
	int ways;

	work->count = 0;
	if (count == 0)
		return true;
	ways = cuda_submit(nic, work->qp->stream, work->kind, nic->dev->copies, count,
			   &work->op->chunks, &work->failure);
	if (ways < 0)
		return false;
	work->op->ways |= (uint32_t)ways;
	work->op->nbytes[read] += work->nbytes;
	work->op->copies[read] += count;
	work->nbytes = 0;
	return true;
}

static uint32_t kind_of(struct side target, struct side source)
{
	const struct cuda_region *to = target.region->provider, *from = source.region->provider;

	if (from->is_device)
		return to->is_device ? KVIO_D2D : KVIO_D2H;
	return to->is_device ? KVIO_H2D : KVIO_H2H;
}

/* Adds a piece of work request i, in parts where memory is pinned in parts. */
static bool add(struct work *work, uint32_t i, struct side target, struct side source,
		uint64_t nbytes)
{
	uint32_t kind = kind_of(target, source), opcode = work->post->wrs[i].opcode;

	while (nbytes) {
		uint64_t length = nbytes;
		uint64_t target_span = cuda_span(target.region, target.addr, &length);
		uint64_t source_span = cuda_span(source.region, source.addr, &length);

		if (work->count == CUDA_MAX_COPIES || kind != work->kind ||
		    opcode != work->opcode || target_span != work->target_span ||
		    source_span != work->source_span)
			if (!submit(work))
				return false;
		if (work->count == 0) {
			work->first = i;
			work->kind = kind;
			work->opcode = opcode;
			work->target_span = target_span;
			work->source_span = source_span;
		}
		work->nic->dev->copies[work->count++] = (struct cuda_copy){
			.target = target.addr, .source = source.addr, .nbytes = length,
		};
		work->nbytes += length;
		target.addr += length;
		source.addr += length;
		nbytes -= length;
	}
	return true;
}

static bool add_wr(struct work *work, uint32_t i, struct side remote)
{
	const struct kvio_wr *wr = &work->post->wrs[i];
	bool read = wr->opcode == KVIO_OP_READ;
	uint64_t nbytes;

	for (uint32_t s = 0; s < (wr->num_sge ? wr->num_sge : 1) && wr->length; s++) {
		struct side local = local_side(work, wr, s, &nbytes);

		if (nbytes && !add(work, i, read ? local : remote, read ? remote : local, nbytes))
			return false;
		remote.addr += nbytes;
	}
	return true;
}

/* Hands all work requests to the stream, up to one that cannot be: its index, and *status. */
static uint32_t hand_over(struct work *work, uint32_t count, uint32_t *status)
{
	struct side remote = { 0 };
	uint32_t i, bad = KVIO_WC_SUCCESS;

	for (i = 0; i < count; i++) {
		bad = check(work, &work->post->wrs[i], &remote);
		if (bad)
			break;
		if (!add_wr(work, i, remote))
			goto failed;
	}
	if (!submit(work))
		goto failed;
	*status = bad;
	return i;
failed:
	cuda_note(work->nic->dev, work->failure.code, work->failure.call);
	cuda_explain(work->nic->dev->ordinal, &work->failure, work->qp->why,
		     sizeof(work->qp->why));
	memcpy(work->nic->why, work->qp->why, sizeof(work->nic->why));
	*status = cuda_is_sticky(work->failure.code) ? KVIO_WC_FATAL_ERR : KVIO_WC_GENERAL_ERR;
	return work->first;
}

/* ---- ops ---- */

void cuda_fail(struct cuda_qp *qp, bool flush)
{
	qp->state = KVIO_QP_ERROR;
	for (uint32_t at = qp->done; flush && at != qp->tail; at++) {
		struct cuda_op *op = cuda_op_at(qp, at);

		if (!op->status)
			op->status = KVIO_WC_WR_FLUSH_ERR;
	}
}

static struct cuda_op *next_op(struct cuda_qp *qp, const struct kvio_post *post, uint32_t first)
{
	struct cuda_op *op = cuda_op_at(qp, qp->tail);

	*op = (struct cuda_op){
		.wr_id = post->wr_id + first, .every = post->flags & KVIO_POST_SIGNAL_ALL,
	};
	return op;
}

/* Work requests from `first` on were not handed over: the first has this status. */
static void refuse_rest(struct cuda_qp *qp, const struct kvio_post *post, uint32_t first,
			uint32_t count, uint32_t status)
{
	struct cuda_op *op = next_op(qp, post, first);

	op->count = count - first;
	op->last = true;
	op->status = status;
	qp->tail++;
	cuda_fail(qp, false);
	/* A responder that refuses an access is in error as well, as on hardware. */
	if (status == KVIO_WC_REM_ACCESS_ERR && qp->remote)
		cuda_fail(qp->remote, true);
}

/* The context is current, the event at hand. */
static void post_ready(struct cuda_qp *qp, const struct kvio_post *post, uint32_t count,
		       CUevent event)
{
	struct cuda_nic *nic = cuda_nic_of(qp);
	struct work work = { .qp = qp, .nic = nic, .post = post, .op = next_op(qp, post, 0) };
	struct cuda_op *op = work.op;
	uint32_t status, done = hand_over(&work, count, &status);
	CUresult code;

	op->count = done;
	op->last = done == count;
	op->event = event;
	if (op->ways || op->chunks || work.failure.code) {
		/* Also behind a segment that failed: part of it may be in the stream. */
		code = cuda.event_record(event, qp->stream);
		op->unrecorded = cuda_note(nic->dev, code, "cuEventRecord") != CUDA_OK;
	} else {
		cuda_event_give(nic->dev, event);
		op->event = NULL;
	}
	if (done || op->event)
		qp->tail++;
	if (done < count)
		refuse_rest(qp, post, done, count, status);
}

int cuda_post(struct kvio_qp *base, const struct kvio_post *post)
{
	struct cuda_qp *qp = (struct cuda_qp *)base;
	struct cuda_nic *nic = cuda_nic_of(qp);
	uint32_t room = base->depth - qp->taken;
	uint32_t count = post->count < room ? post->count : room;
	CUevent event;
	int rc = cuda_check_alive(nic->dev, nic->why, sizeof(nic->why));

	if (qp->state == KVIO_QP_RESET)
		return -ENOTCONN;
	if (rc < 0)
		return rc;
	if (count == 0)
		return 0;
	if (qp->state == KVIO_QP_ERROR) {
		refuse_rest(qp, post, 0, count, KVIO_WC_WR_FLUSH_ERR);
	} else {
		if (!cuda_enter(nic->dev))
			return -EIO;
		event = cuda_event_take(nic->dev);
		if (event)
			post_ready(qp, post, count, event);
		else
			snprintf(nic->why, sizeof(nic->why), "cuda:%d: cuEventCreate: the driver "
				 "has no memory for more events", nic->dev->ordinal);
		cuda_leave(nic->dev);
		if (!event)
			return -ENOMEM;
	}
	qp->taken += count;
	nic->counters.doorbells++;
	nic->counters.work_requests += count;
	cuda_busy(qp);
	return (int)count;
}

/* What was posted is in the stream, which takes nothing back. */
int cuda_cancel(struct kvio_qp *qp, uint64_t wr_id, uint32_t count)
{
	return 0;
}
