/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in's data path: posting by both interfaces, the engines, completions. */
#include <time.h>
#include <unistd.h>

#include "ibverbs_standin.h"

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- posting ---- */

static void begin(struct standin_qp *qp)
{
	struct standin_device *device = device_of(qp->ex.qp_base.context);
	uint64_t delay = SETTING(device, delay_ns);

	pthread_mutex_lock(&qp->lock);
	if (qp->open)
		die("ibv_wr_start inside of another one on queue pair %u", qp->ex.qp_base.qp_num);
	qp->open = true;
	qp->error = 0;
	qp->num_entries = qp->num_signalled = qp->num_reads = 0;
	qp->building = qp->posted;
	qp->first_sge = qp->next_sge;
	qp->due_ns = delay ? now_ns() + delay : 0;
	if (state_of(qp) != IBV_QPS_RTS && state_of(qp) != IBV_QPS_ERR)
		qp->error = EINVAL;
}

static struct standin_wqe *add(struct standin_qp *qp, uint64_t wr_id, uint32_t flags)
{
	struct standin_wqe *wqe;

	if (qp->error)
		return NULL;
	if (qp->building - __atomic_load_n(&qp->freed, __ATOMIC_ACQUIRE) >= qp->cap.max_send_wr) {
		qp->error = ENOMEM;
		return NULL;
	}
	wqe = &qp->wqes[qp->building++ & qp->mask];
	wqe->wr_id = wr_id;
	wqe->due_ns = qp->due_ns;
	wqe->num_sge = 0;
	wqe->sge_first = qp->next_sge;
	wqe->signalled = qp->sq_sig_all || flags & IBV_SEND_SIGNALED;
	return wqe;
}

/* Once a work request, last. There is room for max_sge more entries than all can have. */
static void add_sges(struct standin_qp *qp, size_t count, const struct ibv_sge *sges)
{
	struct standin_wqe *wqe = &qp->wqes[(qp->building - 1) & qp->mask];
	struct standin_device *device = device_of(qp->ex.qp_base.context);
	uint64_t most = qp->cap.max_send_sge;

	if (qp->error)
		return;
	if (wqe->opcode == IBV_WR_RDMA_READ && SETTING(device, max_sge_rd) < most)
		most = SETTING(device, max_sge_rd);
	if (count > most) {
		qp->error = EINVAL;
		return;
	}
	if (qp->next_sge + count > qp->num_sges)
		qp->next_sge = 0;
	wqe->sge_first = qp->next_sge;
	wqe->num_sge = (uint32_t)count;
	for (size_t i = 0; i < count; i++)
		qp->sges[qp->next_sge + i] = sges[i];
	qp->next_sge += (uint32_t)count;
	qp->num_entries += count;
	qp->num_signalled += wqe->signalled;
	qp->num_reads += wqe->opcode == IBV_WR_RDMA_READ;
}

static void count_posted(struct standin_qp *qp, struct standin_device *device)
{
	uint64_t count = qp->building - qp->posted;

	COUNT(device, post_calls, 1);
	COUNT(device, work_requests, count);
	COUNT(device, signalled, qp->num_signalled);
	COUNT(device, sges, qp->num_entries);
	COUNT(device, reads, qp->num_reads);
	COUNT(device, writes, count - qp->num_reads);
}

/* The doorbell, also where an error follows: what is before it is posted. */
static int end(struct standin_qp *qp, bool keep)
{
	struct standin_device *device = device_of(qp->ex.qp_base.context);
	int error = qp->error;

	if (keep && qp->building > qp->posted) {
		count_posted(qp, device);
		__atomic_store_n(&qp->posted, qp->building, __ATOMIC_RELEASE);
	} else {
		qp->next_sge = qp->first_sge;
	}
	qp->open = false;
	pthread_mutex_unlock(&qp->lock);
	ring_doorbell(device);
	return error;
}

int post_send(struct ibv_qp *base, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct standin_qp *qp = qp_of(base);
	struct standin_wqe *wqe;

	begin(qp);
	if (refused("post_send"))
		qp->error = ENOMEM;
	for (; wr; wr = wr->next) {
		wqe = add(qp, wr->wr_id, wr->send_flags);
		if (!wqe)
			break;
		wqe->opcode = (uint16_t)wr->opcode;
		wqe->rkey = wr->wr.rdma.rkey;
		wqe->remote_addr = wr->wr.rdma.remote_addr;
		if (wr->opcode != IBV_WR_RDMA_READ && wr->opcode != IBV_WR_RDMA_WRITE)
			qp->error = EINVAL;
		add_sges(qp, (size_t)wr->num_sge, wr->sg_list);
		if (qp->error) {
			qp->building--;
			break;
		}
	}
	if (wr)
		*bad = wr;
	return end(qp, true);
}

static void wr_start(struct ibv_qp_ex *ex)
{
	struct standin_qp *qp = (struct standin_qp *)ex;

	begin(qp);
	COUNT(device_of(ex->qp_base.context), wr_starts, 1);
}

static void rdma(struct ibv_qp_ex *ex, uint16_t opcode, uint32_t rkey, uint64_t remote_addr)
{
	struct standin_qp *qp = (struct standin_qp *)ex;
	struct standin_wqe *wqe = add(qp, ex->wr_id, ex->wr_flags);

	if (!qp->open)
		die("a work request without ibv_wr_start");
	if (wqe) {
		wqe->opcode = opcode;
		wqe->rkey = rkey;
		wqe->remote_addr = remote_addr;
	}
}

static void wr_rdma_read(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote_addr)
{
	rdma(ex, IBV_WR_RDMA_READ, rkey, remote_addr);
}

static void wr_rdma_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote_addr)
{
	rdma(ex, IBV_WR_RDMA_WRITE, rkey, remote_addr);
}

static void wr_set_sge_list(struct ibv_qp_ex *ex, size_t count, const struct ibv_sge *sges)
{
	add_sges((struct standin_qp *)ex, count, sges);
}

static void wr_set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t addr, uint32_t length)
{
	struct ibv_sge sge = { .addr = addr, .length = length, .lkey = lkey };

	add_sges((struct standin_qp *)ex, 1, &sge);
}

/* An error drops the whole batch, as the manual says. */
static int wr_complete(struct ibv_qp_ex *ex)
{
	struct standin_qp *qp = (struct standin_qp *)ex;

	if (!qp->open)
		die("ibv_wr_complete without ibv_wr_start");
	if (refused("post_send"))
		qp->error = ENOMEM;
	return end(qp, qp->error == 0);
}

static void wr_abort(struct ibv_qp_ex *ex)
{
	end((struct standin_qp *)ex, false);
}

void make_poster(struct standin_qp *qp)
{
	qp->ex.wr_start = wr_start;
	qp->ex.wr_rdma_read = wr_rdma_read;
	qp->ex.wr_rdma_write = wr_rdma_write;
	qp->ex.wr_set_sge = wr_set_sge;
	qp->ex.wr_set_sge_list = wr_set_sge_list;
	qp->ex.wr_complete = wr_complete;
	qp->ex.wr_abort = wr_abort;
}

/* ---- completions ---- */

static void push(struct standin_qp *qp, const struct standin_wqe *wqe, uint32_t status)
{
	struct standin_cq *cq = (struct standin_cq *)qp->ex.qp_base.send_cq;
	struct standin_channel *channel = (struct standin_channel *)cq->base.channel;
	struct standin_device *device = device_of(cq->base.context);

	pthread_mutex_lock(&cq->lock);
	if (cq->tail - cq->head == (uint64_t)cq->base.cqe)
		die("completion queue overrun: it holds %d and more than that are due",
		    cq->base.cqe);
	cq->ring[cq->tail++ % (uint64_t)cq->base.cqe] = (struct standin_wc){
		.wc = {
			.wr_id = wqe->wr_id, .status = status, .qp_num = qp->ex.qp_base.qp_num,
			.opcode = wqe->opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ :
				  IBV_WC_RDMA_WRITE,
		},
		.qp = qp, .slot = qp->done + 1,
	};
	COUNT(device, cqes, 1);
	if (cq->armed && channel) {
		cq->armed = false;
		COUNT(device, events, 1);
		__atomic_store_n(&device->count.event_ns, now_ns(), __ATOMIC_RELAXED);
		if (write(channel->write_fd, &cq, sizeof(cq)) != (ssize_t)sizeof(cq))
			die("nobody reads the completion channel");
	}
	pthread_mutex_unlock(&cq->lock);
}

int poll_cq(struct ibv_cq *base, int count, struct ibv_wc *out)
{
	struct standin_cq *cq = (struct standin_cq *)base;
	int got = 0;

	pthread_mutex_lock(&cq->lock);
	for (; got < count && cq->head < cq->tail; got++) {
		struct standin_wc *each = &cq->ring[cq->head++ % (uint64_t)base->cqe];

		out[got] = each->wc;
		__atomic_store_n(&each->qp->freed, each->slot, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&cq->lock);
	return got;
}

/* What is there already raises no event: poll once more after arming. */
int req_notify_cq(struct ibv_cq *base, int solicited_only)
{
	struct standin_cq *cq = (struct standin_cq *)base;

	pthread_mutex_lock(&cq->lock);
	cq->armed = !solicited_only;
	pthread_mutex_unlock(&cq->lock);
	COUNT(device_of(base->context), notifies, 1);
	return 0;
}

void forget_completions(struct standin_cq *cq, const struct standin_qp *qp)
{
	uint64_t kept;

	pthread_mutex_lock(&cq->lock);
	kept = cq->head;
	for (uint64_t i = cq->head; i < cq->tail; i++) {
		struct standin_wc *each = &cq->ring[i % (uint64_t)cq->base.cqe];

		if (each->qp != qp)
			cq->ring[kept++ % (uint64_t)cq->base.cqe] = *each;
	}
	cq->tail = kept;
	pthread_mutex_unlock(&cq->lock);
}

/* ---- what a reliable connection does; the bus is held ---- */

/* The bytes, or NULL: not registered, in another domain, out of bounds or without the right. */
static uint8_t *reach(const struct standin_qp *qp, uint32_t key, uint32_t which, uint64_t addr,
		      uint64_t length, uint32_t right)
{
	struct standin_mr *mr = key >> 8 < MAX_OBJECTS ? mrs[key >> 8] : NULL;

	if (!mr || (which ? mr->base.rkey : mr->base.lkey) != key ||
	    mr->base.pd != qp->ex.qp_base.pd || (mr->access & right) != right || !mr->bytes)
		return NULL;
	if (addr < mr->iova || length > mr->base.length ||
	    addr - mr->iova > mr->base.length - length)
		return NULL;
	return mr->bytes + (addr - mr->iova);
}

/* The queue pair at the other end, if packets reach it and it answers. */
static struct standin_qp *far_end(const struct standin_qp *qp)
{
	uint32_t qpn = qp->attr.dest_qp_num, me = qp->ex.qp_base.qp_num;
	struct standin_qp *far = qpn < MAX_OBJECTS ? qps[qpn] : NULL;
	const struct ibv_global_route *out = &qp->attr.ah_attr.grh, *back;
	struct standin_device *here = device_of(qp->ex.qp_base.context), *there;
	struct ibv_gid_entry mine, theirs;

	if (!far || far->dropped || (state_of(far) != IBV_QPS_RTR && state_of(far) != IBV_QPS_RTS))
		return NULL;
	there = device_of(far->ex.qp_base.context);
	back = &far->attr.ah_attr.grh;
	if (far->attr.dest_qp_num != me || far->attr.rq_psn != qp->attr.sq_psn ||
	    SETTING(here, port_state) != IBV_PORT_ACTIVE ||
	    SETTING(there, port_state) != IBV_PORT_ACTIVE)
		return NULL;
	if (!qp->attr.ah_attr.is_global)
		return qp->attr.ah_attr.dlid == there->index + 1 ? far : NULL;
	gid_of(here, out->sgid_index, &mine);
	gid_of(there, back->sgid_index, &theirs);
	if (memcmp(&theirs.gid, &out->dgid, 16) || memcmp(&mine.gid, &back->dgid, 16) ||
	    mine.gid_type != theirs.gid_type)
		return NULL;
	return far;
}

/* The far end has found a fault of ours: its queue pair is in error as well. */
static uint32_t far_fault(struct standin_qp *far, uint32_t status, enum ibv_event_type event)
{
	set_state(far, IBV_QPS_ERR);
	async_event(device_of(far->ex.qp_base.context), (struct ibv_async_event){
		.element.qp = &far->ex.qp_base, .event_type = event });
	ring_doorbell(device_of(far->ex.qp_base.context));
	return status;
}

static uint32_t carry_out(struct standin_qp *qp, const struct standin_wqe *wqe)
{
	struct standin_device *device = device_of(qp->ex.qp_base.context);
	bool is_read = wqe->opcode == IBV_WR_RDMA_READ;
	const struct ibv_sge *sges = qp->sges + wqe->sge_first;
	uint8_t *local[256], *remote = NULL;
	struct standin_qp *far;
	uint64_t length = 0;
	uint32_t right = is_read ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;

	for (uint32_t i = 0; i < wqe->num_sge; i++) {
		local[i] = reach(qp, sges[i].lkey, 0, sges[i].addr, sges[i].length,
				 is_read ? IBV_ACCESS_LOCAL_WRITE : 0);
		if (!local[i] && sges[i].length)
			return IBV_WC_LOC_PROT_ERR;
		length += sges[i].length;
	}
	if (length > SETTING(device, max_msg_sz))
		return IBV_WC_LOC_LEN_ERR;
	if (is_read && qp->attr.max_rd_atomic == 0)
		return IBV_WC_LOC_QP_OP_ERR;
	far = far_end(qp);
	if (!far)
		return IBV_WC_RETRY_EXC_ERR;
	if (!(far->attr.qp_access_flags & right) || far->attr.path_mtu != qp->attr.path_mtu ||
	    (is_read && qp->attr.max_rd_atomic > far->attr.max_dest_rd_atomic))
		return far_fault(far, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
	if (length && SETTING(device_of(far->ex.qp_base.context), rkeys))
		remote = reach(far, wqe->rkey, 1, wqe->remote_addr, length, right);
	if (length && !remote)
		return far_fault(far, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);
	for (uint32_t i = 0; i < wqe->num_sge; i++) {
		if (sges[i].length)
			memmove(is_read ? local[i] : remote, is_read ? remote : local[i],
				sges[i].length);
		remote += sges[i].length;
	}
	COUNT(device, nbytes, length);
	return IBV_WC_SUCCESS;
}

static void carry_out_next(struct standin_qp *qp, struct standin_device *device)
{
	struct standin_wqe *wqe = &qp->wqes[qp->done & qp->mask];
	uint32_t status = IBV_WC_WR_FLUSH_ERR;

	if (state_of(qp) != IBV_QPS_ERR) {
		if (device->fail_in && --device->fail_in == 0)
			status = device->fail_status;
		else
			status = carry_out(qp, wqe);
		if (status != IBV_WC_SUCCESS)
			set_state(qp, IBV_QPS_ERR);
	}
	if (status != IBV_WC_SUCCESS)
		COUNT(device, errors, 1);
	if (wqe->signalled || status != IBV_WC_SUCCESS)
		push(qp, wqe, status);
	qp->done++;
}

/* ---- engines ---- */

/* One work request of each queue pair of the device that has one: 0 if there was any, else when
 * the next one is due. */
static uint64_t turn(struct standin_device *device)
{
	uint64_t soonest = UINT64_MAX;

	pthread_mutex_lock(&bus);
	for (struct standin_qp *qp = device->qps; qp; qp = qp->next) {
		uint32_t state = state_of(qp);
		uint64_t due;

		if (SETTING(device, mute) ||
		    qp->done == __atomic_load_n(&qp->posted, __ATOMIC_ACQUIRE) ||
		    (state != IBV_QPS_ERR &&
		     (state != IBV_QPS_RTS || SETTING(device, frozen))))
			continue;
		due = qp->wqes[qp->done & qp->mask].due_ns;
		if (state == IBV_QPS_RTS && due && due > now_ns()) {
			soonest = due < soonest ? due : soonest;
			continue;
		}
		carry_out_next(qp, device);
		soonest = 0;
	}
	pthread_mutex_unlock(&bus);
	return soonest;
}

static void sleep_at_door(struct standin_device *device, uint64_t seen, uint64_t until_ns)
{
	struct timespec until = { .tv_sec = (time_t)(until_ns / 1000000000u),
				  .tv_nsec = (long)(until_ns % 1000000000u) };
	int rc = 0;

	pthread_mutex_lock(&device->door);
	__atomic_store_n(&device->sleeping, 1, __ATOMIC_SEQ_CST);
	while (rc == 0 && __atomic_load_n(&device->rung, __ATOMIC_SEQ_CST) == seen) {
		if (until_ns == UINT64_MAX)
			rc = pthread_cond_wait(&device->rung_cond, &device->door);
		else
			rc = pthread_cond_timedwait(&device->rung_cond, &device->door, &until);
	}
	__atomic_store_n(&device->sleeping, 0, __ATOMIC_SEQ_CST);
	pthread_mutex_unlock(&device->door);
}

static void *engine(void *argument)
{
	struct standin_device *device = argument;

	for (;;) {
		uint64_t seen = __atomic_load_n(&device->rung, __ATOMIC_SEQ_CST);
		uint64_t due = turn(device);

		if (due)
			sleep_at_door(device, seen, due);
	}
	return NULL;
}

void ring_doorbell(struct standin_device *device)
{
	__atomic_add_fetch(&device->rung, 1, __ATOMIC_SEQ_CST);
	if (!__atomic_load_n(&device->sleeping, __ATOMIC_SEQ_CST))
		return;
	pthread_mutex_lock(&device->door);
	pthread_cond_signal(&device->rung_cond);
	pthread_mutex_unlock(&device->door);
}

/* It runs until the process ends, as a device does. */
void start_engine(struct standin_device *device)
{
	pthread_condattr_t monotonic;

	if (device->running)
		return;
	device->running = true;
	pthread_mutex_init(&device->door, NULL);
	pthread_condattr_init(&monotonic);
	pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
	pthread_cond_init(&device->rung_cond, &monotonic);
	pthread_condattr_destroy(&monotonic);
	if (pthread_create(&device->engine, NULL, engine, device))
		die("no thread for a device");
	pthread_detach(device->engine);
}
