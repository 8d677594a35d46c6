/* SPDX-License-Identifier: Apache-2.0 */
/* The fake's events. */
#include "fake_cuda.h"

static CUevent events;			/* also those that are destroyed: a handle stays one */
static uint64_t events_used;

uint64_t num_events(void)
{
	return events_used;
}

static void event_drop(CUevent event)
{
	record_put(event->record);
	event->record = NULL;
	event->context = NULL;
	events_used--;
}

void events_of_context_died(CUcontext context)
{
	uint32_t left = 0;

	for (CUevent each = events; each; each = each->next) {
		if (each->context != context)
			continue;
		event_drop(each);
		left++;
	}
	if (left && !context->sticky)
		violation("a context was destroyed with %u events in it", left);
}

/* ---- records: what an event was at one time ---- */

struct record *record_new(void)
{
	struct record *record = calloc(1, sizeof(*record));

	if (!record)
		die("no memory for a record");
	record->refs = 1;
	return record;
}

struct record *record_get(struct record *record)
{
	record->refs++;
	return record;
}

void record_put(struct record *record)
{
	if (record && --record->refs == 0)
		free(record);
}

/* ---- events ---- */

static bool is_event(CUevent event)
{
	return event && event->context && is_context(event->context);
}

CUresult cuEventCreate(CUevent *out, unsigned int flags)
{
	ENTER(cuEventCreate, CONTEXT, NULL, flags, 0);
	if (flags & ~(unsigned int)(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING))
		return leave(CUDA_ERROR_INVALID_VALUE);
	*out = calloc(1, sizeof(**out));
	if (!*out)
		die("no memory for an event");
	(*out)->context = current_context();
	(*out)->flags = flags;
	(*out)->next = events;
	events = *out;
	events_used++;
	return leave(CUDA_SUCCESS);
}

CUresult cuEventDestroy_v2(CUevent event)
{
	CUresult rc = enter(FN_cuEventDestroy_v2, DRIVER, NULL, (uint64_t)(uintptr_t)event, 0);

	if (rc)
		return rc;
	if (!is_event(event))
		return leave(CUDA_ERROR_INVALID_HANDLE);
	rc = event->context->sticky;
	event_drop(event);
	return leave(rc);
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
	struct op *op;

	ENTER(cuEventRecord, CONTEXT, stream, (uintptr_t)event, 0);
	stream = stream_here(stream);
	if (!stream || !is_event(event) || event->context != stream->context)
		return leave(CUDA_ERROR_INVALID_HANDLE);
	op = op_new(RECORD, FN_cuEventRecord, 0);
	op->record = record_new();
	record_put(event->record);
	event->record = record_get(op->record);
	stream_add(stream, op);
	return leave(CUDA_SUCCESS);
}

/* For what the event is now: a record that comes later does not matter, none at all is no wait.
 * The event may be of another context or device. */
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
	struct op *op;

	ENTER(cuStreamWaitEvent, CONTEXT, stream, (uintptr_t)event, flags);
	stream = stream_here(stream);
	if (!stream || !is_event(event))
		return leave(CUDA_ERROR_INVALID_HANDLE);
	if (!event->record || event->record->done)
		return leave(CUDA_SUCCESS);
	op = op_new(WAIT, FN_cuStreamWaitEvent, 0);
	op->record = record_get(event->record);
	stream_add(stream, op);
	return leave(CUDA_SUCCESS);
}

static bool has_passed(CUevent event)
{
	return !event->record || event->record->done;
}

CUresult cuEventQuery(CUevent event)
{
	ENTER(cuEventQuery, CONTEXT, NULL, (uintptr_t)event, 0);
	if (!is_event(event))
		return leave(CUDA_ERROR_INVALID_HANDLE);
	return leave(has_passed(event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

CUresult cuEventSynchronize(CUevent event)
{
	struct record *record;
	CUcontext context;

	ENTER(cuEventSynchronize, CONTEXT, NULL, (uintptr_t)event, 0);
	if (!is_event(event))
		return leave(CUDA_ERROR_INVALID_HANDLE);
	context = event->context;
	record = event->record ? record_get(event->record) : NULL;
	while (record && !record->done && !context->sticky)
		pthread_cond_wait(&changed, &lock);
	record_put(record);
	return leave(context->sticky);
}

static CUresult elapsed(float *out, CUevent start, CUevent end)
{
	if (!is_event(start) || !is_event(end) || !start->record || !end->record ||
	    (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!has_passed(start) || !has_passed(end))
		return CUDA_ERROR_NOT_READY;
	*out = (float)((double)((int64_t)end->record->at_ns - (int64_t)start->record->at_ns) / 1e6);
	return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *out, CUevent start, CUevent end)
{
	ENTER(cuEventElapsedTime, CONTEXT, NULL, (uintptr_t)start, (uintptr_t)end);
	return leave(elapsed(out, start, end));
}

CUresult cuEventElapsedTime_v2(float *out, CUevent start, CUevent end)
{
	ENTER(cuEventElapsedTime_v2, CONTEXT, NULL, (uintptr_t)start, (uintptr_t)end);
	return leave(elapsed(out, start, end));
}
