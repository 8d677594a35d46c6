/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in's queue pairs: made, moved from state to state, destroyed. */
#include "ibverbs_standin.h"

static int bad_qp(const struct ibv_qp_init_attr_ex *attr, const struct standin_device *device)
{
	if (attr->qp_type != IBV_QPT_RC || !attr->send_cq || !attr->recv_cq || !attr->pd)
		return EINVAL;
	if (attr->pd->context != attr->send_cq->context)
		return EINVAL;
	if (attr->cap.max_send_wr == 0 || attr->cap.max_send_wr > SETTING(device, max_qp_wr) ||
	    attr->cap.max_send_sge > SETTING(device, max_sge) || attr->cap.max_send_sge > 255)
		return EINVAL;
	return 0;
}

static struct standin_qp *allocate(const struct ibv_qp_init_attr_ex *attr)
{
	uint32_t per_wr = attr->cap.max_send_sge ? attr->cap.max_send_sge : 1;
	struct standin_qp *qp = calloc(1, sizeof(*qp));

	if (!qp)
		return NULL;
	qp->num_sges = (attr->cap.max_send_wr + 2) * per_wr;
	while (qp->mask + 1 < attr->cap.max_send_wr)
		qp->mask = 2 * qp->mask + 1;
	qp->wqes = calloc(qp->mask + 1, sizeof(*qp->wqes));
	qp->sges = calloc(qp->num_sges, sizeof(*qp->sges));
	if (!qp->wqes || !qp->sges) {
		free(qp->wqes);
		free(qp->sges);
		free(qp);
		return NULL;
	}
	qp->cap = attr->cap;
	qp->sq_sig_all = attr->sq_sig_all;
	qp->ex.qp_base = (struct ibv_qp){
		.context = attr->pd->context, .qp_context = attr->qp_context, .pd = attr->pd,
		.send_cq = attr->send_cq, .recv_cq = attr->recv_cq, .qp_type = attr->qp_type,
	};
	pthread_mutex_init(&qp->lock, NULL);
	return qp;
}

/* Queue pair numbers are not given out again soon. */
static uint32_t free_number(void)
{
	static uint32_t next = 16;

	for (uint32_t i = 0; i < MAX_OBJECTS; i++) {
		uint32_t each = ++next % MAX_OBJECTS;

		if (each > 16 && !qps[each])
			return each;
	}
	return 0;
}

struct ibv_qp *create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
	const uint64_t known = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ;
	bool wr_api = attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	struct standin_device *device = device_of(context);
	struct standin_qp *qp;
	uint32_t number;
	int error = refused("create_qp");

	if (!error && (!(attr->comp_mask & IBV_QP_INIT_ATTR_PD) || attr->pd->context != context ||
		       attr->comp_mask & ~(uint32_t)(IBV_QP_INIT_ATTR_PD |
						     IBV_QP_INIT_ATTR_SEND_OPS_FLAGS)))
		error = EINVAL;
	if (!error && wr_api && (!SETTING(device, wr_api) || attr->send_ops_flags & ~known))
		error = EOPNOTSUPP;
	if (!error)
		error = bad_qp(attr, device);
	if (error || !(qp = allocate(attr))) {
		errno = error ? error : ENOMEM;
		return NULL;
	}
	qp->has_wr_api = wr_api;
	if (wr_api)
		make_poster(qp);
	pthread_mutex_lock(&bus);
	number = free_number();
	if (!number)
		die("no queue pair numbers are left");
	qp->ex.qp_base.qp_num = qp->ex.qp_base.handle = number;
	qps[number] = qp;
	qp->next = device->qps;
	device->qps = qp;
	((struct standin_cq *)attr->send_cq)->users++;
	((struct standin_cq *)attr->recv_cq)->users++;
	use_pd(attr->pd, 1);
	pthread_mutex_unlock(&bus);
	COUNT(device, qps, 1);
	return &qp->ex.qp_base;
}

EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct ibv_qp_init_attr_ex extended = {
		.qp_context = attr->qp_context, .send_cq = attr->send_cq,
		.recv_cq = attr->recv_cq, .srq = attr->srq, .cap = attr->cap,
		.qp_type = attr->qp_type, .sq_sig_all = attr->sq_sig_all,
		.comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd,
	};

	return create_qp_ex(pd->context, &extended);
}

EXPORT struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *base)
{
	return qp_of(base)->has_wr_api ? &qp_of(base)->ex : NULL;
}

EXPORT int ibv_destroy_qp(struct ibv_qp *base)
{
	struct standin_device *device = device_of(base->context);
	struct standin_qp *qp = qp_of(base), **link = &device->qps;

	if (SETTING(device, clings))
		return EBUSY;
	pthread_mutex_lock(&bus);
	if (qp->unacked)
		die("ibv_destroy_qp would wait for ever: %u events are unacknowledged",
		    qp->unacked);
	while (*link != qp)
		link = &(*link)->next;
	*link = qp->next;
	qps[base->qp_num] = NULL;
	forget_completions((struct standin_cq *)base->send_cq, qp);
	((struct standin_cq *)base->send_cq)->users--;
	((struct standin_cq *)base->recv_cq)->users--;
	use_pd(base->pd, -1);
	pthread_mutex_unlock(&bus);
	COUNT(device, qps, -1);
	free(qp->wqes);
	free(qp->sges);
	free(qp);
	return 0;
}

/* ---- states ---- */

#define TO_INIT (IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
#define TO_RTR (IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | \
		IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)
#define TO_RTS (IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | \
		IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)

/* Attributes that a transition must have; 0: there is no such transition. */
static int mandatory(uint32_t from, uint32_t to)
{
	if (to == IBV_QPS_ERR || to == IBV_QPS_RESET)
		return IBV_QP_STATE;
	if (from == IBV_QPS_RESET && to == IBV_QPS_INIT)
		return TO_INIT;
	if (from == IBV_QPS_INIT && to == IBV_QPS_RTR)
		return TO_RTR;
	return from == IBV_QPS_RTR && to == IBV_QPS_RTS ? TO_RTS : 0;
}

static int bad_address(const struct standin_device *device, const struct ibv_ah_attr *ah)
{
	bool is_ib = SETTING(device, link_layer) == IBV_LINK_LAYER_INFINIBAND;

	if (ah->sl > 15 || ah->port_num != 1 || (!is_ib && !ah->is_global))
		return EINVAL;
	return ah->is_global && ah->grh.sgid_index >= (is_ib ? 1 : NUM_GIDS) ? EINVAL : 0;
}

static int bad_attributes(const struct standin_device *device, const struct ibv_qp_attr *attr,
			  int mask)
{
	if (mask & IBV_QP_AV && bad_address(device, &attr->ah_attr))
		return EINVAL;
	if (mask & IBV_QP_PATH_MTU && (attr->path_mtu < IBV_MTU_256 ||
				       attr->path_mtu > SETTING(device, active_mtu)))
		return EINVAL;
	if (mask & IBV_QP_MAX_QP_RD_ATOMIC &&
	    attr->max_rd_atomic > SETTING(device, max_rd_atomic))
		return EINVAL;
	if (mask & IBV_QP_MAX_DEST_RD_ATOMIC &&
	    attr->max_dest_rd_atomic > SETTING(device, max_rd_atomic))
		return EINVAL;
	if ((mask & IBV_QP_SQ_PSN && attr->sq_psn >> 24) ||
	    (mask & IBV_QP_RQ_PSN && attr->rq_psn >> 24) ||
	    (mask & IBV_QP_PORT && attr->port_num != 1) ||
	    (mask & IBV_QP_PKEY_INDEX && attr->pkey_index))
		return EINVAL;
	return mask & IBV_QP_TIMEOUT && attr->timeout > 31 ? EINVAL : 0;
}

#define TAKE(flag, field) do { if (mask & (flag)) qp->attr.field = attr->field; } while (0)

static void take(struct standin_qp *qp, const struct ibv_qp_attr *attr, int mask)
{
	TAKE(IBV_QP_ACCESS_FLAGS, qp_access_flags);
	TAKE(IBV_QP_PKEY_INDEX, pkey_index);
	TAKE(IBV_QP_PORT, port_num);
	TAKE(IBV_QP_AV, ah_attr);
	TAKE(IBV_QP_PATH_MTU, path_mtu);
	TAKE(IBV_QP_DEST_QPN, dest_qp_num);
	TAKE(IBV_QP_RQ_PSN, rq_psn);
	TAKE(IBV_QP_SQ_PSN, sq_psn);
	TAKE(IBV_QP_TIMEOUT, timeout);
	TAKE(IBV_QP_RETRY_CNT, retry_cnt);
	TAKE(IBV_QP_RNR_RETRY, rnr_retry);
	TAKE(IBV_QP_MIN_RNR_TIMER, min_rnr_timer);
	TAKE(IBV_QP_MAX_QP_RD_ATOMIC, max_rd_atomic);
	TAKE(IBV_QP_MAX_DEST_RD_ATOMIC, max_dest_rd_atomic);
}

/* Empty, and as new: what is in its completion queue is lost, so poll before. */
static void reset(struct standin_qp *qp)
{
	forget_completions((struct standin_cq *)qp->ex.qp_base.send_cq, qp);
	memset(&qp->attr, 0, sizeof(qp->attr));
	qp->posted = qp->building = qp->done = qp->freed = 0;
	qp->next_sge = 0;
	qp->dropped = false;
}

EXPORT int ibv_modify_qp(struct ibv_qp *base, struct ibv_qp_attr *attr, int mask)
{
	struct standin_device *device = device_of(base->context);
	struct standin_qp *qp = qp_of(base);
	int error = refused("modify_qp"), needed;

	if (error)
		return error;
	pthread_mutex_lock(&qp->lock);
	pthread_mutex_lock(&bus);
	needed = mask & IBV_QP_STATE ? mandatory(state_of(qp), attr->qp_state) : 0;
	if (needed == 0 || (mask & needed) != needed || bad_attributes(device, attr, mask)) {
		error = EINVAL;
	} else {
		if (attr->qp_state == IBV_QPS_RESET)
			reset(qp);
		take(qp, attr, mask);
		set_state(qp, attr->qp_state);
		base->state = attr->qp_state;
	}
	pthread_mutex_unlock(&bus);
	pthread_mutex_unlock(&qp->lock);
	ring_doorbell(device);
	return error;
}

EXPORT int ibv_query_qp(struct ibv_qp *base, struct ibv_qp_attr *attr, int mask,
			struct ibv_qp_init_attr *init)
{
	struct standin_qp *qp = qp_of(base);

	(void)mask;
	pthread_mutex_lock(&bus);
	*attr = qp->attr;
	attr->qp_state = attr->cur_qp_state = (enum ibv_qp_state)state_of(qp);
	attr->cap = qp->cap;
	base->state = attr->qp_state;
	*init = (struct ibv_qp_init_attr){
		.qp_context = base->qp_context, .send_cq = base->send_cq,
		.recv_cq = base->recv_cq, .cap = qp->cap, .qp_type = base->qp_type,
		.sq_sig_all = qp->sq_sig_all,
	};
	pthread_mutex_unlock(&bus);
	return 0;
}

/* ---- for programs that post without a C compiler ---- */

EXPORT struct ibv_qp *standin_qp(uint32_t qpn)
{
	return qpn < MAX_OBJECTS && qps[qpn] ? &qps[qpn]->ex.qp_base : NULL;
}

/* What <infiniband/verbs.h> has as an inline function. */
EXPORT int standin_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	return ibv_post_send(qp, wr, bad);
}

/* Forget what was posted and not carried out; nobody hears of it. */
EXPORT void standin_discard(struct ibv_qp *base)
{
	struct standin_qp *qp = qp_of(base);

	pthread_mutex_lock(&qp->lock);
	pthread_mutex_lock(&bus);
	qp->done = qp->freed = qp->posted;
	pthread_mutex_unlock(&bus);
	pthread_mutex_unlock(&qp->lock);
}

/* ---- names ---- */

EXPORT const char *ibv_wc_status_str(enum ibv_wc_status status)
{
	static const char *const names[] = {
		"success", "local length error", "local QP operation error",
		"local EE context operation error", "local protection error",
		"Work Request Flushed Error", "memory management operation error",
		"bad response error", "local access error", "remote invalid request error",
		"remote access error", "remote operation error",
		"transport retry counter exceeded", "RNR retry counter exceeded",
	};

	return status < sizeof(names) / sizeof(names[0]) ? names[status] : "unknown";
}

EXPORT const char *ibv_port_state_str(enum ibv_port_state state)
{
	return state == IBV_PORT_ACTIVE ? "PORT_ACTIVE" : state == IBV_PORT_DOWN ? "PORT_DOWN" :
	       "PORT_INIT";
}

EXPORT const char *ibv_event_type_str(enum ibv_event_type event)
{
	static const char *const names[] = {
		"CQ error", "local work queue catastrophic error",
		"invalid request local work queue error", "local access violation work queue error",
	};

	if (event < sizeof(names) / sizeof(names[0]))
		return names[event];
	return event == IBV_EVENT_PORT_ERR ? "port error" : event == IBV_EVENT_PORT_ACTIVE ?
	       "port active" : event == IBV_EVENT_DEVICE_FATAL ? "device fatal" : "unknown";
}
