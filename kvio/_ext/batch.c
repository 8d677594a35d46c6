/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Batches: one transfer of many work requests, a status for each and one completion for all.
 *
 * wr_id = place in the NIC's batch table << 32 | element. Only the last work request of a post is
 * signalled and a queue pair completes in order, so a completion of element i settles all before
 * it. What does not fit into the queue waits here and follows in halves of the queue: one half is
 * refilled while the other is in flight.
 */
#include <sys/eventfd.h>
#include <unistd.h>

#include "nic_impl.h"

/* ---- holds: a region named by a batch in flight cannot be deregistered ---- */

static int hold_add(struct kvio_batch *batch, struct kvio_region *region)
{
	struct kvio_hold *larger;

	if (batch->num_holds == batch->max_holds) {
		larger = malloc(2 * (size_t)batch->max_holds * sizeof(*larger));
		if (!larger)
			return -ENOMEM;
		memcpy(larger, batch->holds, batch->num_holds * sizeof(*larger));
		if (batch->holds != batch->some_holds)
			free(batch->holds);
		batch->holds = larger;
		batch->max_holds *= 2;
	}
	batch->holds[batch->num_holds++] = (struct kvio_hold){ region, region->key };
	region->holds++;
	return 0;
}

/* Unknown keys are not held: they complete with an error. NULL: not connected. */
static int hold_key(struct kvio_batch *batch, const struct kvio_table *table, uint64_t key)
{
	struct kvio_region *region = table ? kvio_region_find(table, key) : NULL;
	uint32_t first = batch->num_holds > 4 ? batch->num_holds - 4 : 0;

	if (!region)
		return 0;
	for (uint32_t i = batch->num_holds; i > first; i--)
		if (batch->holds[i - 1].region == region)
			return 0;
	return hold_add(batch, region);
}

static void holds_release(struct kvio_batch *batch)
{
	for (uint32_t i = 0; i < batch->num_holds; i++)
		batch->holds[i].region->holds--;
	if (batch->holds != batch->some_holds)
		free(batch->holds);
	batch->holds = batch->some_holds;
	batch->num_holds = 0;
}

/* ---- making and freeing ---- */

static void batch_free(struct kvio_batch *batch)
{
	if (batch->event_fd >= 0)
		close(batch->event_fd);
	free(batch->rest_wrs);
	free(batch->rest_sges);
	free(batch);
}

static int place_in_table(struct kvio_nic *nic, struct kvio_batch *batch)
{
	struct kvio_batch **larger;
	uint32_t length = nic->num_batches;

	for (uint32_t i = 0; i < length; i++) {
		uint32_t slot = (nic->next_batch + i) % length;

		if (!nic->batches[slot]) {
			nic->batches[slot] = batch;
			nic->next_batch = slot + 1;
			batch->slot = slot;
			return 0;
		}
	}
	larger = realloc(nic->batches, (2 * (size_t)length + 16) * sizeof(*larger));
	if (!larger)
		return -ENOMEM;
	nic->batches = larger;
	nic->num_batches = 2 * length + 16;
	memset(larger + length, 0, (nic->num_batches - length) * sizeof(*larger));
	larger[length] = batch;
	batch->slot = length;
	nic->next_batch = length + 1;
	return 0;
}

static struct kvio_batch *batch_new(struct kvio_qp *qp, uint32_t count)
{
	struct kvio_batch *batch = malloc(sizeof(*batch) + (size_t)count * 5);

	if (!batch)
		return NULL;
	memset(batch, 0, sizeof(*batch));
	batch->qp = qp;
	batch->nic = qp->nic;
	batch->refs = 2;
	batch->count = batch->limit = count;
	batch->event_fd = -1;
	batch->holds = batch->some_holds;
	batch->max_holds = sizeof(batch->some_holds) / sizeof(batch->some_holds[0]);
	batch->codes = (uint8_t *)(batch->status + count);
	memset(batch->codes, 0, count);
	for (uint32_t i = 0; i < count; i++)
		batch->status[i] = -EINPROGRESS;
	return batch;
}

/* Once over the descriptors: shape, opcode, bytes, holds. */
static int inspect(struct kvio_batch *batch, const struct kvio_post *post)
{
	const struct kvio_table *mine = &batch->nic->table, *peer = batch->qp->peer;
	uint64_t lkey = 0, rkey = 0;
	int rc = 0;

	for (uint32_t i = 0; i < post->count && rc == 0; i++) {
		const struct kvio_wr *wr = &post->wrs[i];
		uint64_t sum = 0;

		if (post->opcode && wr->opcode != post->opcode)
			return -EINVAL;
		batch->nbytes += wr->length;
		if (wr->rkey != rkey)
			rc = hold_key(batch, peer, rkey = wr->rkey);
		if (wr->num_sge == 0) {
			if (wr->lkey != lkey && rc == 0)
				rc = hold_key(batch, mine, lkey = wr->lkey);
			continue;
		}
		if (wr->num_sge > batch->nic->max_sge ||
		    (uint64_t)wr->sge_first + wr->num_sge > post->num_sges)
			return -EINVAL;
		for (uint32_t s = 0; s < wr->num_sge && rc == 0; s++) {
			const struct kvio_sge *sge = &post->sges[wr->sge_first + s];

			sum += sge->length;
			if (sge->lkey != lkey)
				rc = hold_key(batch, mine, lkey = sge->lkey);
		}
		if (rc == 0 && sum != wr->length)
			return -EINVAL;
	}
	return rc;
}

/* ---- completion ---- */

static void put_ref(struct kvio_batch *batch)
{
	if (--batch->refs == 0)
		batch_free(batch);
}

static void tell(struct kvio_batch *batch)
{
	uint64_t one = 1;

	if (batch->event_fd >= 0 && write(batch->event_fd, &one, sizeof(one)) < 0)
		return;		/* EAGAIN: it is readable already */
}

static void drained(struct kvio_batch *batch, uint64_t now_ns)
{
	batch->drained = true;
	batch->completed_ns = now_ns;
	holds_release(batch);
	batch->nic->batches[batch->slot] = NULL;
	batch->nic->in_flight--;
	batch->qp->in_flight--;
	tell(batch);
	pthread_cond_broadcast(&batch->nic->domain->moved);
	put_ref(batch);
}

/* Elements that never reached the queue. */
static void give_up_rest(struct kvio_batch *batch, int32_t status, uint8_t code)
{
	for (uint32_t i = batch->posted; i < batch->limit; i++) {
		batch->status[i] = status;
		batch->codes[i] = code;
	}
	batch->limit = batch->posted;
}

static int element_status(const struct kvio_batch *batch, uint32_t wc_status)
{
	if (wc_status == KVIO_WC_WR_FLUSH_ERR && batch->canceled)
		return -ECANCELED;	/* providers that cancel by flushing */
	return kvio_wc_errno(wc_status);
}

static void settle(struct kvio_nic *nic, const struct kvio_wc *wc)
{
	struct kvio_batch *batch = nic->batches[wc->wr_id >> 32];
	struct kvio_qp *qp = batch->qp;
	uint32_t element = (uint32_t)wc->wr_id;

	qp->outstanding -= element + 1 - batch->settled;
	for (uint32_t i = batch->settled; i < element; i++)
		batch->status[i] = 0;
	batch->status[element] = element_status(batch, wc->status);
	batch->codes[element] = (uint8_t)wc->status;
	batch->ways |= wc->ways;
	batch->settled = element + 1;
	if (batch->settled == batch->limit)
		drained(batch, wc->time_ns);
	if (qp->first_waiting)
		kvio_batch_feed(qp);
}

void kvio_batch_dispatch(struct kvio_nic *nic)
{
	struct kvio_wc wc[32];
	int got;

	while ((got = nic->ops->poll(nic, wc, 32)) > 0)
		for (int i = 0; i < got; i++)
			settle(nic, &wc[i]);
}

/* ---- posting ---- */

/* How many of the batch the queue takes at once: all, or half a queue, or none yet. */
static uint32_t share(const struct kvio_qp *qp, const struct kvio_batch *batch)
{
	uint32_t left = batch->limit - batch->posted;
	uint32_t room = qp->depth - qp->outstanding;
	uint32_t half = qp->depth > 1 ? qp->depth / 2 : 1;

	if (left <= room)
		return left;
	return room >= half ? half : 0;
}

/* Posts what fits; `post` describes the elements from `posted` on. 0 or -errno. */
static int post_some(struct kvio_batch *batch, struct kvio_post *post)
{
	struct kvio_qp *qp = batch->qp;
	uint32_t count;
	int done;

	while (batch->posted < batch->limit && (count = share(qp, batch)) > 0) {
		post->count = count;
		post->wr_id = (uint64_t)batch->slot << 32 | batch->posted;
		done = qp->nic->ops->post(qp, post);
		if (done <= 0)
			return done;
		post->wrs += done;
		batch->posted += (uint32_t)done;
		qp->outstanding += (uint32_t)done;
	}
	return 0;
}

/* Oldest first; called when places in the queue came free. */
void kvio_batch_feed(struct kvio_qp *qp)
{
	struct kvio_batch *batch;
	int rc;

	while ((batch = qp->first_waiting) != NULL) {
		rc = post_some(batch, &batch->rest);
		if (rc < 0)
			give_up_rest(batch, rc, KVIO_WC_GENERAL_ERR);
		if (batch->posted < batch->limit)
			return;
		qp->first_waiting = batch->next_waiting;
		if (batch->settled == batch->limit)
			drained(batch, qp->nic->ops->clock(qp->nic));
	}
}

/* Copies what did not fit, so that the caller may change its descriptors at once. */
static int keep_rest(struct kvio_batch *batch, const struct kvio_post *post)
{
	size_t left = batch->limit - batch->posted;
	struct kvio_qp *qp = batch->qp;

	batch->rest_wrs = malloc(left * sizeof(*post->wrs));
	batch->rest_sges = malloc((post->num_sges + (size_t)1) * sizeof(*post->sges));
	if (!batch->rest_wrs || !batch->rest_sges)
		return -ENOMEM;
	memcpy(batch->rest_wrs, post->wrs, left * sizeof(*post->wrs));
	if (post->num_sges)
		memcpy(batch->rest_sges, post->sges, post->num_sges * sizeof(*post->sges));
	batch->rest = *post;
	batch->rest.wrs = batch->rest_wrs;
	batch->rest.sges = batch->rest_sges;
	batch->rest.flags |= KVIO_POST_FEED;
	batch->rest.flags &= ~(uint32_t)KVIO_POST_AFTER;	/* the queue has heard of it */
	if (qp->first_waiting)
		qp->last_waiting->next_waiting = batch;
	else
		qp->first_waiting = batch;
	qp->last_waiting = batch;
	return 0;
}

static int submit(struct kvio_batch *batch, const struct kvio_post *asked)
{
	struct kvio_nic *nic = batch->nic;
	struct kvio_post post = *asked;
	int rc;

	/* Before it has to wait for room: what time has freed already. It then never starts at a
	 * completion that was older than itself. */
	if (batch->qp->first_waiting || share(batch->qp, batch) < batch->limit)
		kvio_nic_drive_locked(nic);
	batch->submitted_ns = nic->ops->clock(nic);
	post.births = nic->domain->births;
	if ((post.flags & KVIO_POST_AFTER) && !nic->ops->after)
		return -EOPNOTSUPP;
	rc = inspect(batch, &post);
	if (rc == 0 && (post.flags & KVIO_POST_AFTER))
		rc = nic->ops->after(batch->qp, post.stream);
	if (rc == 0)
		rc = place_in_table(nic, batch);
	if (rc < 0)
		return rc;
	nic->in_flight++;
	batch->qp->in_flight++;
	if (!batch->qp->first_waiting)		/* never overtake */
		rc = post_some(batch, &post);
	if (rc == 0 && batch->posted < batch->limit)
		rc = keep_rest(batch, &post);
	if (rc < 0 && batch->posted == 0) {
		nic->batches[batch->slot] = NULL;
		nic->in_flight--;
		batch->qp->in_flight--;
		return rc;
	}
	if (rc < 0)
		give_up_rest(batch, rc, KVIO_WC_GENERAL_ERR);
	if (batch->settled == batch->limit)
		drained(batch, batch->submitted_ns);	/* an empty batch */
	return 0;
}

int kvio_batch_post(struct kvio_qp *qp, const struct kvio_post *post, struct kvio_batch **out)
{
	struct kvio_nic *nic = qp->nic;
	struct kvio_batch *batch = batch_new(qp, post->count);
	int rc;

	if (!batch)
		return -ENOMEM;
	kvio_lock(nic);
	rc = submit(batch, post);
	if (rc < 0) {
		holds_release(batch);
		batch_free(batch);
	} else {
		*out = batch;
		if (nic->domain->has_event_fd)
			nic->ops->arm(nic);
	}
	kvio_unlock(nic);
	return rc;
}

/* ---- waiting, cancelling, looking ---- */

int kvio_batch_poll(struct kvio_batch *batch)
{
	int done;

	kvio_lock(batch->nic);
	if (!batch->drained)
		kvio_nic_drive_locked(batch->nic);
	done = batch->drained;
	kvio_unlock(batch->nic);
	return done;
}

int kvio_batch_wait(struct kvio_batch *batch, uint64_t timeout_ns)
{
	struct kvio_nic *nic = batch->nic;
	uint64_t start = kvio_monotonic_ns(), passed;
	int done;

	kvio_lock(nic);
	for (;;) {
		if (!batch->drained)
			kvio_nic_drive_locked(nic);
		done = batch->drained;
		passed = kvio_monotonic_ns() - start;
		if (done || passed >= timeout_ns)
			break;
		nic->ops->sleep(nic, timeout_ns - passed);
	}
	kvio_unlock(nic);
	return done;
}

static void unlink_waiting(struct kvio_batch *batch)
{
	struct kvio_qp *qp = batch->qp;
	struct kvio_batch *before = NULL, *each = qp->first_waiting;

	for (; each && each != batch; each = each->next_waiting)
		before = each;
	if (!each)
		return;
	if (before)
		before->next_waiting = batch->next_waiting;
	else
		qp->first_waiting = batch->next_waiting;
	if (qp->last_waiting == batch)
		qp->last_waiting = before;
}

int kvio_batch_cancel_locked(struct kvio_batch *batch)
{
	struct kvio_nic *nic = batch->nic;
	int rc = 0;

	if (batch->drained)
		return 0;
	batch->refs++;
	batch->canceled = true;
	unlink_waiting(batch);
	give_up_rest(batch, -ECANCELED, KVIO_WC_CANCELED);
	if (batch->settled < batch->limit)
		rc = nic->ops->cancel(batch->qp, (uint64_t)batch->slot << 32 | batch->settled,
				      batch->limit - batch->settled);
	else
		drained(batch, nic->ops->clock(nic));
	kvio_nic_drive_locked(nic);
	kvio_batch_feed(batch->qp);
	put_ref(batch);
	return rc;
}

int kvio_batch_cancel(struct kvio_batch *batch)
{
	struct kvio_nic *nic = batch->nic;
	int rc;

	kvio_lock(nic);
	rc = kvio_batch_cancel_locked(batch);
	kvio_unlock(nic);
	return rc;
}

int kvio_batch_event_fd(struct kvio_batch *batch)
{
	int fd;

	kvio_lock(batch->nic);
	if (batch->event_fd < 0) {
		batch->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
		if (batch->event_fd >= 0 && batch->drained)
			tell(batch);
	}
	fd = batch->event_fd < 0 ? -errno : batch->event_fd;
	kvio_unlock(batch->nic);
	return fd;
}

void kvio_batch_put(struct kvio_batch *batch)
{
	struct kvio_nic *nic = batch->nic;

	kvio_lock(nic);
	put_ref(batch);
	kvio_unlock(nic);
}
