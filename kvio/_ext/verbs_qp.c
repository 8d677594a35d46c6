/* SPDX-License-Identifier: Apache-2.0 */
/* Queue pairs: made, connected, read back, failed, reset and given up, on every rail. */
#include <sys/random.h>

#include "verbs.h"

#ifdef KVIO_HAVE_VERBS

/* What a responder keeps for READs under way, per connection; a ConnectX has no more. */
#define RD_ATOMIC 16

/* ---- path MTU ---- */

uint32_t verbs_mtu_bytes(enum ibv_mtu mtu)
{
	return mtu >= IBV_MTU_256 && mtu <= IBV_MTU_4096 ? 128u << mtu : 256;
}

static enum ibv_mtu mtu_within(uint32_t nbytes)
{
	enum ibv_mtu mtu = IBV_MTU_256;

	while (mtu < IBV_MTU_4096 && verbs_mtu_bytes(mtu + 1) <= nbytes)
		mtu++;
	return mtu;
}

static uint32_t our_mtu(const struct verbs_nic *nic, const struct verbs_rail *rail)
{
	uint32_t active = verbs_mtu_bytes(rail->port_attr.active_mtu);

	return verbs_mtu_bytes(mtu_within(nic->mtu < active ? nic->mtu : active));
}

/* READs that we answer at a time. */
static uint32_t our_rd_atomic(const struct verbs_rail *rail)
{
	uint32_t most = (uint32_t)rail->device.max_qp_rd_atom;

	return most < RD_ATOMIC ? most : RD_ATOMIC;
}

/* ---- states of one end ---- */

static int modify(struct verbs_end *end, struct ibv_qp_attr *attr, int mask)
{
	int rc;

	errno = 0;
	rc = verbs.modify_qp(end->qp, attr, mask);
	if (rc == 0)
		return 0;
	return rc > 0 ? -rc : errno ? -errno : -EIO;	/* some providers return -1 */
}

static int to_state(struct verbs_end *end, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = { .qp_state = state };

	return modify(end, &attr, IBV_QP_STATE);
}

/* Ready for a connection, with a sequence that packets of an older one hit only by chance. */
static int to_init(struct verbs_end *end, const struct verbs_rail *rail)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT, .port_num = rail->port,
		.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE,
	};

	if (getrandom(&end->psn, sizeof(end->psn), GRND_NONBLOCK) != (ssize_t)sizeof(end->psn))
		end->psn = (uint32_t)kvio_monotonic_ns();
	end->psn &= 0xffffff;
	return modify(end, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
		      IBV_QP_ACCESS_FLAGS);
}

static int to_ready(struct verbs_qp *qp, uint32_t r, const struct kvio_endpoint *remote)
{
	struct verbs_rail *rail = &verbs_nic_of(qp)->rails[r];
	struct verbs_end *end = &qp->ends[r];
	uint32_t ours = our_mtu(verbs_nic_of(qp), rail);
	uint32_t most = (uint32_t)rail->device.max_qp_init_rd_atom;
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = mtu_within(remote->mtu < ours ? remote->mtu : ours),
		.dest_qp_num = remote->qpn & 0xffffff, .rq_psn = remote->psn & 0xffffff,
		.max_dest_rd_atomic = (uint8_t)our_rd_atomic(rail), .min_rnr_timer = 12,
		.ah_attr = {
			.dlid = remote->lid, .sl = qp->base.sl, .port_num = rail->port,
			.is_global = rail->is_global,
		},
	};
	int rc;

	if (rail->is_global) {
		memcpy(attr.ah_attr.grh.dgid.raw, remote->gid, sizeof(remote->gid));
		attr.ah_attr.grh.sgid_index = (uint8_t)rail->gid_index;
		attr.ah_attr.grh.hop_limit = 64;
		attr.ah_attr.grh.traffic_class = qp->base.tclass;
	}
	rc = modify(end, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
		    IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	if (rc < 0)
		return rc;
	most = most < RD_ATOMIC ? most : RD_ATOMIC;
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTS, .sq_psn = end->psn, .timeout = verbs_nic_of(qp)->timeout,
		.retry_cnt = verbs_nic_of(qp)->retry_cnt, .rnr_retry = 7,
		.max_rd_atomic = (uint8_t)(remote->rd_atomic < most ? remote->rd_atomic : most),
	};
	return modify(end, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
		      IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

/* ---- making ---- */

/* By ibv_create_qp_ex where the provider posts by ibv_wr_start; otherwise for chains. */
static int make_qp(struct verbs_nic *nic, struct verbs_rail *rail, struct verbs_end *end)
{
	struct ibv_qp_init_attr_ex ex = {
		.send_cq = end->cq->cq, .recv_cq = end->cq->cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = end->room, .max_recv_wr = 1, .max_recv_sge = 1,
			 .max_send_sge = nic->base.max_sge },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = rail->pd,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ,
	};
	struct ibv_qp_init_attr plain = {
		.send_cq = ex.send_cq, .recv_cq = ex.recv_cq, .cap = ex.cap,
		.qp_type = IBV_QPT_RC,
	};
	struct verbs_context *extended = verbs_get_ctx_op(rail->context, create_qp_ex);
	struct verbs_end made = { .cq = end->cq, .room = end->room, .done = end->done,
				  .tail = end->tail };
	int rc;

	errno = 0;
	if (extended && nic->uses_wr_api) {
		made.qp = extended->create_qp_ex(rail->context, &ex);
		if (made.qp)
			made.ex = verbs.qp_to_qp_ex(made.qp);
	}
	if (!made.qp)
		made.qp = verbs.create_qp(rail->pd, &plain);
	if (!made.qp)
		return errno ? -errno : -ENOMEM;
	nic->uses_wr_api = made.ex != NULL;
	rc = to_init(&made, rail);
	if (rc < 0) {
		verbs.destroy_qp(made.qp);
		return rc;
	}
	if (end->qp && verbs.destroy_qp(end->qp)) {
		verbs.destroy_qp(made.qp);
		return -EBUSY;
	}
	*end = made;
	return 0;
}

static void unmake(struct verbs_qp *qp)
{
	struct verbs_nic *nic = verbs_nic_of(qp);

	for (uint32_t r = 0; r < nic->num_rails; r++) {
		struct verbs_end *end = &qp->ends[r];

		if (end->qp)
			verbs.destroy_qp(end->qp);
		if (end->cq)
			end->cq->taken -= end->room;
	}
	free(qp->records);
	free(qp);
}

static int take_slot(struct verbs_nic *nic, uint32_t *slot)
{
	struct verbs_qp **larger;
	uint32_t room = nic->num_slots ? 2 * nic->num_slots : 16;

	for (*slot = 0; *slot < nic->num_slots; ++*slot)
		if (!nic->slots[*slot])
			return 0;
	if (room > VERBS_MAX_QPS)
		return -ENOSPC;
	larger = realloc(nic->slots, room * sizeof(*larger));
	if (!larger)
		return -ENOMEM;
	memset(larger + nic->num_slots, 0, (room - nic->num_slots) * sizeof(*larger));
	nic->slots = larger;
	nic->num_slots = room;
	return 0;
}

static int make_ends(struct verbs_qp *qp, uint32_t depth)
{
	struct verbs_nic *nic = verbs_nic_of(qp);
	uint32_t places = depth + VERBS_SPARE;
	int rc = 0;

	places = places < nic->max_pieces ? places : nic->max_pieces;
	for (uint32_t r = 0; r < nic->num_rails && rc == 0; r++) {
		struct verbs_end *end = &qp->ends[r];

		end->room = places;
		end->cq = verbs_cq_take(nic, &nic->rails[r], places);
		if (!end->cq)
			return -errno;
		rc = make_qp(nic, &nic->rails[r], end);
	}
	return rc;
}

int verbs_qp_create(struct kvio_nic *base, const struct kvio_qp_params *params,
		    struct kvio_qp **out)
{
	struct verbs_nic *nic = (struct verbs_nic *)base;
	uint32_t ring = 1, slot;
	struct verbs_qp *qp;
	int rc;

	if (!params->far || params->far->num_rails == 0)
		return -EINVAL;		/* without the other end's rkeys there is nothing to post */
	qp = calloc(1, sizeof(*qp));
	if (!qp)
		return -ENOMEM;
	while (ring < params->depth)
		ring *= 2;
	qp->base.nic = base;
	qp->mask = ring - 1;
	qp->num_rails = nic->num_rails;
	qp->records = calloc(ring, sizeof(*qp->records));
	rc = qp->records ? take_slot(nic, &slot) : -ENOMEM;
	if (rc == 0)
		rc = make_ends(qp, params->depth);
	if (rc < 0) {
		unmake(qp);
		return rc;
	}
	qp->slot = slot;
	nic->slots[slot] = qp;
	*out = &qp->base;
	return 0;
}

void verbs_qp_destroy(struct kvio_qp *base)
{
	struct verbs_qp *qp = (struct verbs_qp *)base;
	struct verbs_nic *nic = verbs_nic_of(qp);

	while (qp->is_moved) {		/* nothing is left to report: off the list */
		struct verbs_qp **link = &nic->moved;

		while (*link != qp)
			link = &(*link)->next_moved;
		*link = qp->next_moved;
		qp->is_moved = false;
	}
	nic->slots[qp->slot] = NULL;
	unmake(qp);
	/* Whatever else it left in the completion queues must not meet its successor. */
	for (uint32_t r = 0; r < nic->num_rails; r++)
		verbs_hear(nic, &nic->rails[r]);
}

/* ---- connecting ---- */

/*
 * Unconnected again, by new queue pairs in the place of the old ones: their numbers differ, so no
 * late packet or completion finds them, and of what a device makes of the reset state (Soft-RoCE
 * may fall back into the error state) we need to know nothing.
 */
static int make_anew(struct verbs_qp *qp)
{
	struct verbs_nic *nic = verbs_nic_of(qp);
	int rc = 0;

	for (uint32_t r = 0; r < nic->num_rails && rc == 0; r++) {
		rc = make_qp(nic, &nic->rails[r], &qp->ends[r]);
		verbs_hear(nic, &nic->rails[r]);
	}
	return rc;
}

int verbs_qp_connect(struct kvio_qp *base, const struct kvio_endpoint *remote, uint32_t count)
{
	struct verbs_qp *qp = (struct verbs_qp *)base;
	struct verbs_nic *nic = verbs_nic_of(qp);
	int rc = 0;

	if (qp->state != KVIO_QP_RESET)
		return -EISCONN;
	count = count < nic->num_rails ? count : nic->num_rails;
	if (count > base->far->num_rails)
		return -EINVAL;
	for (uint32_t r = 0; r < count; r++)
		if (remote[r].mtu < 256 || remote[r].qpn > 0xffffff || remote[r].rd_atomic == 0)
			return -EINVAL;
	for (uint32_t r = 0; r < count && rc == 0; r++)
		rc = to_ready(qp, r, &remote[r]);
	if (rc < 0) {
		make_anew(qp);		/* if that fails as well, so will the next attempt */
		return rc;
	}
	qp->num_rails = count;
	qp->next_rail = 0;
	qp->base.peer = &base->far->table;
	qp->state = KVIO_QP_READY;
	return 0;
}

/* What the device says. Unconnected, it has no path yet: then what it will be asked for. */
static int query_end(struct verbs_qp *qp, uint32_t r, struct kvio_endpoint *out, uint32_t *state)
{
	const struct verbs_rail *rail = &verbs_nic_of(qp)->rails[r];
	struct verbs_end *end = &qp->ends[r];
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	bool connected;
	int rc;

	if (!end->qp) {				/* it had to be stopped */
		*state = KVIO_QP_ERROR;
		return 0;
	}
	memset(&attr, 0, sizeof(attr));
	rc = verbs.query_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU, &init);
	if (rc)
		return rc > 0 ? -rc : -EIO;
	connected = qp->state != KVIO_QP_RESET && r < qp->num_rails;
	*out = (struct kvio_endpoint){
		.qpn = end->qp->qp_num, .psn = end->psn,
		.mtu = connected ? verbs_mtu_bytes(attr.path_mtu) :
				   our_mtu(verbs_nic_of(qp), rail),
		.rd_atomic = our_rd_atomic(rail), .lid = rail->port_attr.lid,
		.sl = connected ? attr.ah_attr.sl : qp->base.sl,
		.tclass = connected ? attr.ah_attr.grh.traffic_class : qp->base.tclass,
	};
	memcpy(out->gid, rail->gid.raw, sizeof(out->gid));
	if (connected && (attr.qp_state == IBV_QPS_ERR || attr.qp_state == IBV_QPS_SQE ||
			  attr.qp_state == IBV_QPS_RESET))
		*state = KVIO_QP_ERROR;
	return 0;
}

int verbs_qp_query(struct kvio_qp *base, struct kvio_qp_info *out)
{
	struct verbs_qp *qp = (struct verbs_qp *)base;
	int rc = 0;

	out->state = qp->state;
	out->num_rails = qp->state == KVIO_QP_RESET ? verbs_nic_of(qp)->num_rails : qp->num_rails;
	for (uint32_t r = 0; r < out->num_rails && rc == 0; r++)
		rc = query_end(qp, r, &out->local[r], &out->state);
	out->depth = base->depth;
	out->max_sge = base->nic->max_sge;
	out->free = base->depth - (qp->tail - qp->head);
	return rc;
}

/* ---- failing and recovering ---- */

/*
 * Takes a rail's pieces from the device for good, with their queue pair. False if that is refused
 * and the device not known to be dead: then it may still write.
 */
bool verbs_stop(struct verbs_qp *qp, uint32_t r)
{
	struct verbs_end *end = &qp->ends[r];
	int rc = end->qp ? verbs.destroy_qp(end->qp) : 0;

	if (rc && abs(rc) != ENODEV && abs(rc) != EIO && !verbs_nic_of(qp)->rails[r].dead)
		return false;
	end->qp = NULL;
	end->ex = NULL;
	for (uint32_t n = qp->head; n != qp->tail; n++) {
		struct verbs_record *record = verbs_record_at(qp, n);

		if (record->rail == r && (int32_t)(record->end - end->done) > 0 && !record->status)
			record->status = KVIO_WC_WR_FLUSH_ERR;
	}
	end->done = end->tail;
	verbs_moved(qp);
	return true;
}

void verbs_fail(struct verbs_qp *qp)
{
	if (qp->state != KVIO_QP_READY)
		return;
	qp->state = KVIO_QP_ERROR;
	qp->failed_ns = kvio_monotonic_ns();
	verbs_look_at(verbs_nic_of(qp), qp->failed_ns + qp->base.nic->drain_ns);
	for (uint32_t r = 0; r < qp->num_rails; r++)
		if (qp->ends[r].qp && to_state(&qp->ends[r], IBV_QPS_ERR) < 0)
			verbs_stop(qp, r);
}

int verbs_qp_fail(struct kvio_qp *base)
{
	verbs_fail((struct verbs_qp *)base);
	return 0;
}

int verbs_qp_reset(struct kvio_qp *base)
{
	struct verbs_qp *qp = (struct verbs_qp *)base;
	int rc;

	if (qp->head != qp->tail)
		return -EBUSY;
	rc = make_anew(qp);
	if (rc < 0)
		return rc;
	qp->state = KVIO_QP_RESET;
	qp->spoiled = qp->flushing = false;
	qp->num_rails = verbs_nic_of(qp)->num_rails;
	qp->base.peer = NULL;
	return 0;
}

#endif
