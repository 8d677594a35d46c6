/* SPDX-License-Identifier: Apache-2.0 */
/* The provider cuda: NICs and queue pairs (one stream each), counters. */
#include <stdio.h>

#include "cuda_impl.h"

#define DRAIN_NS UINT64_C(5000000000)	/* copies in a stream cannot be taken back */

static const char *const way_names[KVIO_NUM_COPY_WAYS] = { "loop", "batch", "strided", "kernel" };

/* ---- opening and closing ---- */

static int parse_ordinal(const struct kvio_nic_params *params, int *out)
{
	const char *text = params->device ? params->device : "";
	char *end;
	long ordinal = strtol(text, &end, 10);

	if (*text >= '0' && *text <= '9' && !*end && ordinal < 1 << 16) {
		*out = (int)ordinal;
		return 0;
	}
	snprintf(params->why, params->why_room, "\"cuda:%s\" names no GPU: \"cuda:0\" is the first "
		 "one", text);
	return -EINVAL;
}

/* The kernel, once for the device. */
static void open_ways(struct cuda_dev *dev, const char *ptx)
{
	if (dev->has_ways && (dev->has_ptx || !ptx))
		return;
	if (dev->has_ways)
		cuda_ways_close(dev);
	dev->has_ways = true;
	dev->tried_measuring = false;
	dev->has_ptx = ptx != NULL;
	dev->info.missing[KVIO_COPY_KERNEL][0] = 0;
	cuda_ways_open(dev, ptx);
}

/* Everything that can be wrong with what was asked for. The lock is held. */
static int set_up(struct cuda_nic *nic, const struct kvio_nic_params *params)
{
	struct cuda_dev *dev = nic->dev;
	uint32_t way = params->copy_way, sms = params->max_sms;
	const char *missing;

	if (way > KVIO_COPY_AUTO || sms == 0) {
		snprintf(params->why, params->why_room, "cuda:%d: no such copy way, or no SMs",
			 dev->ordinal);
		return -EINVAL;
	}
	if (cuda_check_alive(dev, params->why, params->why_room) < 0)
		return -EIO;
	if (!cuda_enter(dev))
		return cuda_check_alive(dev, params->why, params->why_room);
	open_ways(dev, params->ptx);
	if (way == KVIO_COPY_AUTO && !dev->tried_measuring) {
		dev->tried_measuring = true;
		cuda_measure(dev, sms);
	}
	cuda_leave(dev);
	if (cuda_check_alive(dev, params->why, params->why_room) < 0)
		return -EIO;
	if (way == KVIO_COPY_AUTO)
		return 0;
	missing = dev->info.missing[way];
	if (!*missing)
		return 0;
	snprintf(params->why, params->why_room, "cuda:%d: copy=\"%s\" cannot be had: %s",
		 dev->ordinal, way_names[way], missing);
	return -ENOSYS;
}

static int nic_open(struct kvio_nic **out, const struct kvio_nic_params *asked)
{
	struct kvio_nic_params params = *asked;
	struct cuda_nic *nic;
	char unwanted[192];
	int ordinal, rc;

	if (!params.why || !params.why_room) {
		params.why = unwanted;
		params.why_room = sizeof(unwanted);
	}
	rc = parse_ordinal(&params, &ordinal);
	if (rc < 0)
		return rc;
	nic = calloc(1, sizeof(*nic));
	if (!nic)
		return -ENOMEM;
	rc = cuda_dev_get(ordinal, &nic->dev, params.why, params.why_room);
	if (rc < 0) {
		free(nic);
		return rc;
	}
	kvio_domain_lock(&nic->dev->domain);
	rc = set_up(nic, &params);
	if (rc < 0)
		cuda_dev_leave(nic->dev);
	pthread_mutex_unlock(&nic->dev->domain.lock);
	if (rc < 0) {
		cuda_dev_put(nic->dev);
		free(nic);
		return rc;
	}
	nic->base.domain = &nic->dev->domain;
	nic->base.drain_ns = DRAIN_NS;
	nic->copy_way = params.copy_way;
	nic->max_sms = params.max_sms;
	nic->busy_poll = params.flags & KVIO_NIC_BUSY_POLL;
	*out = &nic->base;
	return 0;
}

static void nic_shut(struct kvio_nic *base)
{
	cuda_dev_leave(((struct cuda_nic *)base)->dev);
}

static void nic_close(struct kvio_nic *base)
{
	struct cuda_nic *nic = (struct cuda_nic *)base;

	cuda_dev_put(nic->dev);		/* nic_shut was before */
	free(nic);
}

/* ---- queue pairs ---- */

static uint32_t next_qpn(void)
{
	static uint32_t last;

	return __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
}

static int make_stream(struct cuda_nic *nic, struct cuda_qp *qp, uint8_t sl)
{
	struct cuda_dev *dev = nic->dev;
	CUresult code;
	int rc = cuda_check_alive(dev, nic->why, sizeof(nic->why));

	if (rc < 0)
		return rc;
	if (!cuda_enter(dev))
		return -EIO;
	code = cuda.stream_create(&qp->stream, CUDA_STREAM_NON_BLOCKING,
				  sl == 0 ? dev->most_urgent : dev->least_urgent);
	cuda_leave(dev);
	if (code == CUDA_OK)
		return 0;
	return cuda_refuse(dev, code, "cuStreamCreateWithPriority", nic->why, sizeof(nic->why));
}

static int qp_create(struct kvio_nic *base, const struct kvio_qp_params *params,
		     struct kvio_qp **out)
{
	struct cuda_nic *nic = (struct cuda_nic *)base;
	struct cuda_qp *qp;
	uint32_t ring = 1;
	int rc;

	if (params->far)		/* another process: there is no way to its memory */
		return -EOPNOTSUPP;
	qp = calloc(1, sizeof(*qp));
	if (!qp)
		return -ENOMEM;
	while (ring < params->depth + 1)	/* one may take no place: see post_ready */
		ring *= 2;
	qp->ops = calloc(ring, sizeof(*qp->ops));	/* untouched pages cost nothing */
	rc = qp->ops ? make_stream(nic, qp, params->sl) : -ENOMEM;
	if (rc < 0) {
		free(qp->ops);
		free(qp);
		return rc;
	}
	qp->mask = ring - 1;
	qp->qpn = next_qpn();
	*out = &qp->base;
	return 0;
}

static struct cuda_qp *find_qp(struct kvio_domain *domain, uint32_t qpn)
{
	for (struct kvio_nic *nic = domain->nics; nic; nic = nic->next)
		for (struct kvio_qp *qp = nic->qps; qp; qp = qp->next)
			if (((struct cuda_qp *)qp)->qpn == qpn)
				return (struct cuda_qp *)qp;
	return NULL;
}

static int qp_connect(struct kvio_qp *base, const struct kvio_endpoint *remote, uint32_t count)
{
	struct cuda_qp *qp = (struct cuda_qp *)base;

	if (qp->state != KVIO_QP_RESET)
		return -EISCONN;
	qp->remote = find_qp(base->nic->domain, remote->qpn);
	if (!qp->remote)
		return -ECONNREFUSED;
	if (qp->remote == qp) {
		qp->remote = NULL;
		return -EINVAL;
	}
	base->peer = &qp->remote->base.nic->table;
	qp->state = KVIO_QP_READY;
	return 0;
}

static int qp_query(struct kvio_qp *base, struct kvio_qp_info *out)
{
	struct cuda_qp *qp = (struct cuda_qp *)base;

	/* Copy engines have no lanes: sl 0 and tclass 0 are all that can be read back. */
	out->num_rails = 1;
	out->local[0] = (struct kvio_endpoint){ .qpn = qp->qpn };
	out->state = qp->state;
	out->depth = base->depth;
	out->max_sge = base->nic->max_sge;
	out->free = base->depth - qp->taken;
	memcpy(out->why, qp->why, sizeof(out->why));
	return 0;
}

static int qp_fail(struct kvio_qp *base)
{
	struct cuda_qp *qp = (struct cuda_qp *)base;

	if (qp->state != KVIO_QP_RESET)
		cuda_fail(qp, true);
	return 0;
}

static int qp_reset(struct kvio_qp *base)
{
	struct cuda_qp *qp = (struct cuda_qp *)base;

	if (qp->head != qp->tail)
		return -EBUSY;
	qp->state = KVIO_QP_RESET;
	qp->remote = NULL;
	qp->why[0] = 0;
	base->peer = NULL;
	return 0;
}

static void qp_destroy(struct kvio_qp *base)
{
	struct cuda_qp *qp = (struct cuda_qp *)base;
	struct cuda_dev *dev = cuda_nic_of(qp)->dev;

	for (struct kvio_nic *nic = base->nic->domain->nics; nic; nic = nic->next) {
		for (struct kvio_qp *each = nic->qps; each; each = each->next) {
			struct cuda_qp *peer = (struct cuda_qp *)each;

			if (peer->remote != qp)
				continue;
			peer->remote = NULL;		/* RETRY_EXC_ERR from now on */
			peer->base.peer = NULL;
		}
	}
	cuda_disarm(qp);
	if (cuda_enter(dev)) {
		cuda.stream_destroy(qp->stream);
		if (qp->notify)
			cuda.stream_destroy(qp->notify);
		cuda_leave(dev);
	}
	free(qp->ops);
	free(qp);
}

/* ---- figures ---- */

static uint64_t nic_clock(struct kvio_nic *nic)
{
	return kvio_monotonic_ns();
}

static void nic_counters(struct kvio_nic *base, struct kvio_counters *out)
{
	*out = ((struct cuda_nic *)base)->counters;
}

static void nic_info(struct kvio_nic *base, struct kvio_nic_info *out)
{
	out->max_sge = out->max_sge_rd = base->max_sge;
	out->max_msg_nbytes = UINT32_MAX;	/* all that a work request can say */
}

int kvio_cuda_look(struct kvio_nic *base, struct kvio_cuda_info *out)
{
	struct cuda_nic *nic = (struct cuda_nic *)base;

	if (base->ops != &kvio_cuda_ops)
		return -EOPNOTSUPP;
	kvio_lock(base);
	*out = nic->dev->info;
	out->copy_way = nic->copy_way;
	memcpy(out->copies, nic->copies, sizeof(out->copies));
	memcpy(out->segments, nic->segments, sizeof(out->segments));
	memcpy(out->why, nic->why, sizeof(out->why));
	kvio_unlock(base);
	return 0;
}

const struct kvio_nic_ops kvio_cuda_ops = {
	.name = "cuda",
	.open = nic_open,
	.close = nic_close,
	.shut = nic_shut,
	.reg = cuda_reg,
	.dereg = cuda_dereg,
	.qp_create = qp_create,
	.qp_connect = qp_connect,
	.qp_query = qp_query,
	.qp_fail = qp_fail,
	.qp_reset = qp_reset,
	.qp_destroy = qp_destroy,
	.after = cuda_after,
	.before = cuda_before,
	.post = cuda_post,
	.cancel = cuda_cancel,
	.drive = cuda_drive,
	.poll = cuda_poll,
	.clock = nic_clock,
	.sleep = cuda_sleep,
	.event_fd = cuda_event_fd,
	.arm = cuda_arm,
	.counters = nic_counters,
	.info = nic_info,
};
