/* SPDX-License-Identifier: Apache-2.0 */
/* Users' streams: ours wait for them, they wait for our batches, and the host for nobody. */
#include <stdio.h>

#include "cuda_impl.h"

/* 0, or -EXDEV: not one of the device's primary context, or being captured. The context is
 * current. */
static int check_stream(struct cuda_nic *nic, uint64_t stream)
{
	CUstreamCaptureStatus capture = CUDA_CAPTURE_STATUS_NONE;
	CUcontext context = NULL;
	CUresult code = cuda.stream_context((CUstream)(uintptr_t)stream, &context);

	cuda_note(nic->dev, code, "cuStreamGetCtx");
	if (cuda_is_sticky(code))
		return cuda_check_alive(nic->dev, nic->why, sizeof(nic->why));
	if (code == CUDA_OK && context == nic->dev->context) {
		/* Our stream would become part of the graph, and what is in it wait for ever. */
		code = cuda.is_capturing((CUstream)(uintptr_t)stream, &capture);
		if (code != CUDA_OK) {	/* the default one: another's capture would be spoilt */
			cuda_refuse(nic->dev, code, "cuStreamIsCapturing", nic->why,
				    sizeof(nic->why));
			return -EXDEV;
		}
		if (capture == CUDA_CAPTURE_STATUS_NONE)
			return 0;
		snprintf(nic->why, sizeof(nic->why), "cuda:%d: stream %#llx is being captured into "
			 "a graph: transfers cannot be part of one", nic->dev->ordinal,
			 (unsigned long long)stream);
		return -EXDEV;
	}
	snprintf(nic->why, sizeof(nic->why), "cuda:%d: stream %#llx is not one of this device's "
		 "primary context (cuStreamGetCtx: %s)", nic->dev->ordinal,
		 (unsigned long long)stream, code == CUDA_OK ? "another one" :
		 cuda_error_name(code));
	return -EXDEV;
}

int cuda_after(struct kvio_qp *base, uint64_t stream)
{
	struct cuda_qp *qp = (struct cuda_qp *)base;
	struct cuda_nic *nic = cuda_nic_of(qp);
	struct cuda_dev *dev = nic->dev;
	int rc = cuda_check_alive(dev, nic->why, sizeof(nic->why));
	CUevent event;
	CUresult code;

	if (rc < 0)
		return rc;
	if (!cuda_enter(dev))
		return -EIO;
	rc = check_stream(nic, stream);
	event = rc < 0 ? NULL : cuda_event_take(dev);
	if (rc == 0 && !event)
		rc = -ENOMEM;
	if (rc == 0) {
		code = cuda.event_record(event, (CUstream)(uintptr_t)stream);
		if (code != CUDA_OK)
			rc = cuda_refuse(dev, code, "cuEventRecord", nic->why, sizeof(nic->why));
	}
	if (rc == 0) {
		code = cuda.stream_wait(qp->stream, event, 0);
		if (code != CUDA_OK)
			rc = cuda_refuse(dev, code, "cuStreamWaitEvent", nic->why,
					 sizeof(nic->why));
	}
	cuda_event_give(dev, event);	/* a wait is for what the event stood for at the call */
	cuda_leave(dev);
	return rc;
}

int cuda_before(struct kvio_qp *base, uint64_t wr_id, uint64_t stream)
{
	struct cuda_qp *qp = (struct cuda_qp *)base;
	struct cuda_nic *nic = cuda_nic_of(qp);
	struct cuda_op *op = NULL;
	CUresult code;
	int rc;

	for (uint32_t at = qp->head; at != qp->tail && !op; at++)
		if (wr_id - cuda_op_at(qp, at)->wr_id < cuda_op_at(qp, at)->count)
			op = cuda_op_at(qp, at);
	if (op && op->status)
		return -EIO;
	if (!op || !op->event)
		return 0;		/* it has passed */
	rc = cuda_check_alive(nic->dev, nic->why, sizeof(nic->why));
	if (rc < 0 || op->unrecorded)
		return -EIO;
	if (!cuda_enter(nic->dev))
		return -EIO;
	rc = check_stream(nic, stream);
	if (rc == 0) {
		code = cuda.stream_wait((CUstream)(uintptr_t)stream, op->event, 0);
		if (code != CUDA_OK)
			rc = cuda_refuse(nic->dev, code, "cuStreamWaitEvent", nic->why,
					 sizeof(nic->why));
	}
	cuda_leave(nic->dev);
	return rc;
}
