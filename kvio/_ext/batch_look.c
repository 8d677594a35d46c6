/* SPDX-License-Identifier: Apache-2.0 */
/* What is known of a batch, and streams of work that wait for it. */
#include "nic_impl.h"

void kvio_batch_look(struct kvio_batch *batch, struct kvio_batch_info *out)
{
	kvio_lock(batch->nic);
	*out = (struct kvio_batch_info){
		.count = batch->count, .drained = batch->drained, .nbytes = batch->nbytes,
		.submitted_ns = batch->submitted_ns, .completed_ns = batch->completed_ns,
		.status = batch->status, .codes = batch->codes, .ways = batch->ways,
	};
	kvio_unlock(batch->nic);
}

static bool has_failed(const struct kvio_batch *batch)
{
	uint32_t settled = batch->drained ? batch->count : batch->settled;

	for (uint32_t i = 0; i < settled; i++)
		if (batch->status[i])
			return true;
	return batch->limit < batch->count;
}

int kvio_batch_block_stream(struct kvio_batch *batch, uint64_t stream)
{
	struct kvio_nic *nic = batch->nic;
	int rc = 0;

	kvio_lock(nic);
	if (!nic->ops->before)
		rc = -EOPNOTSUPP;
	else if (has_failed(batch))
		rc = -EIO;
	else if (!batch->drained && batch->posted < batch->limit)
		rc = -EAGAIN;
	else if (!batch->drained)
		rc = nic->ops->before(batch->qp,
				      (uint64_t)batch->slot << 32 | (batch->limit - 1), stream);
	kvio_unlock(nic);
	return rc;
}
