/* SPDX-License-Identifier: Apache-2.0 */
/* What all providers share: the NICs of a domain and their queue pairs, names of statuses. */
#include "nic_impl.h"

#define FREE_GRACE_NS UINT64_C(1000000000)	/* beyond what the device may take to flush */
#define FREE_NAP_NS 1000000u

static const struct {
	uint32_t status;
	int code;
	const char *name;
} wc_table[] = {
	{ KVIO_WC_SUCCESS, 0, "SUCCESS" },
	{ KVIO_WC_LOC_LEN_ERR, EMSGSIZE, "LOC_LEN_ERR" },
	{ KVIO_WC_LOC_QP_OP_ERR, EINVAL, "LOC_QP_OP_ERR" },
	{ KVIO_WC_LOC_EEC_OP_ERR, EINVAL, "LOC_EEC_OP_ERR" },
	{ KVIO_WC_LOC_PROT_ERR, EFAULT, "LOC_PROT_ERR" },
	{ KVIO_WC_WR_FLUSH_ERR, ECONNABORTED, "WR_FLUSH_ERR" },
	{ KVIO_WC_MW_BIND_ERR, EINVAL, "MW_BIND_ERR" },
	{ KVIO_WC_BAD_RESP_ERR, EPROTO, "BAD_RESP_ERR" },
	{ KVIO_WC_LOC_ACCESS_ERR, EACCES, "LOC_ACCESS_ERR" },
	{ KVIO_WC_REM_INV_REQ_ERR, EBADRQC, "REM_INV_REQ_ERR" },
	{ KVIO_WC_REM_ACCESS_ERR, EACCES, "REM_ACCESS_ERR" },
	{ KVIO_WC_REM_OP_ERR, EREMOTEIO, "REM_OP_ERR" },
	{ KVIO_WC_RETRY_EXC_ERR, ETIMEDOUT, "RETRY_EXC_ERR" },
	{ KVIO_WC_RNR_RETRY_EXC_ERR, ETIMEDOUT, "RNR_RETRY_EXC_ERR" },
	{ KVIO_WC_REM_ABORT_ERR, ECONNRESET, "REM_ABORT_ERR" },
	{ KVIO_WC_FATAL_ERR, EIO, "FATAL_ERR" },
	{ KVIO_WC_RESP_TIMEOUT_ERR, ETIMEDOUT, "RESP_TIMEOUT_ERR" },
	{ KVIO_WC_GENERAL_ERR, EIO, "GENERAL_ERR" },
	{ KVIO_WC_CANCELED, ECANCELED, "CANCELED" },
	{ KVIO_WC_LOC_PRIVATE, EFAULT, "LOC_PROT_ERR" },
	{ KVIO_WC_REM_PRIVATE, EACCES, "REM_ACCESS_ERR" },
};

const char *kvio_wc_name(uint32_t status)
{
	for (size_t i = 0; i < sizeof(wc_table) / sizeof(wc_table[0]); i++)
		if (wc_table[i].status == status)
			return wc_table[i].name;
	return "UNKNOWN";
}

int kvio_wc_errno(uint32_t status)
{
	for (size_t i = 0; i < sizeof(wc_table) / sizeof(wc_table[0]); i++)
		if (wc_table[i].status == status)
			return -wc_table[i].code;
	return -EIO;
}

/* ---- NICs ---- */

int kvio_nic_open(struct kvio_nic **out, const struct kvio_nic_ops *ops,
		  const struct kvio_nic_params *params)
{
	struct kvio_nic *nic;
	int rc;

	if (params->queue_depth == 0 || params->queue_depth > 1u << 20 || params->max_sge == 0 ||
	    params->max_sge > KVIO_MAX_SGE)
		return -EINVAL;
	rc = ops->open(&nic, params);
	if (rc < 0)
		return rc;
	nic->ops = ops;
	if (nic->queue_depth == 0)		/* a device that can do less has said so */
		nic->queue_depth = params->queue_depth;
	if (nic->max_sge == 0)
		nic->max_sge = params->max_sge;
	kvio_lock(nic);
	nic->next = nic->domain->nics;
	nic->domain->nics = nic;
	kvio_unlock(nic);
	*out = nic;
	return 0;
}

static void qp_destroy_locked(struct kvio_qp *qp)
{
	struct kvio_qp **link = &qp->nic->qps;

	while (*link != qp)
		link = &(*link)->next;
	*link = qp->next;
	if (qp->far)
		qp->far->qps--;
	qp->nic->ops->qp_destroy(qp);
}

/* Nothing is in flight. What is left answers "closed" until kvio_nic_free. */
static void close_locked(struct kvio_nic *nic)
{
	struct kvio_nic **link = &nic->domain->nics;

	while (nic->qps)
		qp_destroy_locked(nic->qps);
	for (uint32_t i = 0; i < nic->table.length; i++)
		if (nic->table.regions[i])
			kvio_region_dereg_locked(nic, nic->table.regions[i]->key);
	while (*link != nic)
		link = &(*link)->next;
	*link = nic->next;
	nic->closed = true;
	if (nic->ops->shut)
		nic->ops->shut(nic);
}

int kvio_nic_close(struct kvio_nic *nic)
{
	bool busy;

	kvio_lock(nic);
	busy = nic->in_flight != 0;
	for (uint32_t i = 0; i < nic->table.length && !busy; i++)
		busy = nic->table.regions[i] && nic->table.regions[i]->holds;
	if (!busy && !nic->closed)
		close_locked(nic);
	kvio_unlock(nic);
	return busy ? -EBUSY : 0;
}

int kvio_nic_free(struct kvio_nic *nic)
{
	uint64_t start = kvio_monotonic_ns();
	int left;

	if (!nic)
		return 0;
	kvio_lock(nic);
	nic->dying = true;
	while (nic->in_flight) {
		for (struct kvio_qp *qp = nic->qps; qp; qp = qp->next)
			nic->ops->qp_fail(qp);
		kvio_nic_drive_locked(nic);
		left = (int)nic->in_flight;
		if (left && kvio_monotonic_ns() - start >= nic->drain_ns + FREE_GRACE_NS) {
			kvio_unlock(nic);
			return left;
		}
		if (left)
			nic->ops->sleep(nic, FREE_NAP_NS);
	}
	if (!nic->closed)
		close_locked(nic);
	kvio_unlock(nic);
	free(nic->table.regions);
	free(nic->batches);
	nic->ops->close(nic);
	return 0;
}

int kvio_nic_drain(struct kvio_nic *nic, int cancel, uint64_t timeout_ns)
{
	uint64_t start = kvio_monotonic_ns(), passed;
	int left;

	kvio_lock(nic);
	for (uint32_t slot = 0; cancel && slot < nic->num_batches; slot++)
		if (nic->batches[slot])
			kvio_batch_cancel_locked(nic->batches[slot]);
	for (;;) {
		kvio_nic_drive_locked(nic);
		left = (int)nic->in_flight;
		passed = kvio_monotonic_ns() - start;
		if (left == 0 || passed >= timeout_ns)
			break;
		nic->ops->sleep(nic, timeout_ns - passed);
	}
	kvio_unlock(nic);
	return left;
}

void kvio_nic_drive_locked(struct kvio_nic *nic)
{
	uint64_t now = nic->ops->clock(nic);
	int more;

	for (;;) {
		more = nic->ops->drive(nic, now);
		for (struct kvio_nic *each = nic->domain->nics; each; each = each->next)
			kvio_batch_dispatch(each);
		if (more <= 0)
			break;
		if (more == 2)			/* one of them goes on copying */
			kvio_let_others_in(nic->domain);
	}
	if (nic->domain->has_event_fd)
		nic->ops->arm(nic);
}

int kvio_nic_drive(struct kvio_nic *nic)
{
	kvio_lock(nic);
	kvio_nic_drive_locked(nic);
	kvio_unlock(nic);
	return 0;
}

int kvio_nic_event_fd(struct kvio_nic *nic)
{
	int fd;

	kvio_lock(nic);
	fd = nic->ops->event_fd(nic);
	if (fd >= 0) {
		nic->domain->has_event_fd = true;
		nic->ops->arm(nic);
	}
	kvio_unlock(nic);
	return fd;
}

int kvio_nic_in_flight(struct kvio_nic *nic)
{
	int count;

	kvio_lock(nic);
	count = (int)nic->in_flight;
	kvio_unlock(nic);
	return count;
}

uint64_t kvio_nic_clock(struct kvio_nic *nic)
{
	uint64_t now;

	kvio_lock(nic);
	now = nic->ops->clock(nic);
	kvio_unlock(nic);
	return now;
}

void kvio_nic_look(struct kvio_nic *nic, struct kvio_nic_info *out)
{
	memset(out, 0, sizeof(*out));
	kvio_lock(nic);
	if (nic->ops->info)
		nic->ops->info(nic, out);
	kvio_unlock(nic);
}

void kvio_nic_counters(struct kvio_nic *nic, struct kvio_counters *out)
{
	kvio_lock(nic);
	nic->ops->counters(nic, out);
	kvio_unlock(nic);
}

/* ---- queue pairs ---- */

int kvio_qp_create(struct kvio_nic *nic, const struct kvio_qp_params *params,
		   struct kvio_qp **out)
{
	struct kvio_qp_params asked = *params;
	struct kvio_qp *qp;
	int rc;

	if (asked.depth == 0)
		asked.depth = nic->queue_depth;
	if (asked.sl >= KVIO_NUM_SL || asked.depth > nic->queue_depth ||
	    (asked.far && asked.far->nic != nic))
		return -EINVAL;
	kvio_lock(nic);
	rc = nic->ops->qp_create(nic, &asked, &qp);
	if (rc == 0) {
		qp->nic = nic;
		qp->depth = asked.depth;
		qp->sl = asked.sl;
		qp->tclass = asked.tclass;
		qp->far = asked.far;
		if (qp->far)
			qp->far->qps++;
		qp->next = nic->qps;
		nic->qps = qp;
		*out = qp;
	}
	kvio_unlock(nic);
	return rc;
}

int kvio_qp_connect(struct kvio_qp *qp, const struct kvio_endpoint *remote, uint32_t count)
{
	int rc;

	if (count == 0 || count > KVIO_MAX_RAILS)
		return -EINVAL;
	kvio_lock(qp->nic);
	rc = qp->nic->ops->qp_connect(qp, remote, count);
	kvio_unlock(qp->nic);
	return rc;
}

int kvio_qp_query(struct kvio_qp *qp, struct kvio_qp_info *out)
{
	int rc;

	memset(out, 0, sizeof(*out));
	kvio_lock(qp->nic);
	rc = qp->nic->ops->qp_query(qp, out);
	out->in_flight = qp->in_flight;
	kvio_unlock(qp->nic);
	return rc;
}

int kvio_qp_fail(struct kvio_qp *qp)
{
	int rc;

	kvio_lock(qp->nic);
	rc = qp->nic->ops->qp_fail(qp);
	kvio_nic_drive_locked(qp->nic);
	kvio_unlock(qp->nic);
	return rc;
}

int kvio_qp_reset(struct kvio_qp *qp)
{
	int rc;

	kvio_lock(qp->nic);
	kvio_nic_drive_locked(qp->nic);
	rc = qp->in_flight ? -EBUSY : qp->nic->ops->qp_reset(qp);
	kvio_unlock(qp->nic);
	return rc;
}

int kvio_qp_destroy(struct kvio_qp *qp)
{
	struct kvio_nic *nic = qp->nic;
	int rc = 0;

	kvio_lock(nic);
	if (qp->in_flight)
		rc = -EBUSY;
	else
		qp_destroy_locked(qp);
	kvio_unlock(nic);
	return rc;
}

void kvio_memcpy_loop(const struct kvio_wr *wrs, size_t count)
{
	for (size_t i = 0; i < count; i++)
		memcpy((void *)(uintptr_t)wrs[i].local_addr,
		       (const void *)(uintptr_t)wrs[i].remote_addr, wrs[i].length);
}
