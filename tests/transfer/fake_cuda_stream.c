/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake's streams, each with a thread that runs its queue in order. What the default streams add
 * to that order is made of hidden records and waits.
 */
#include "fake_cuda.h"

#include <time.h>

__thread bool in_host_function;

static CUstream streams;		/* also those that are destroyed: a handle stays one */
static bool all_held;
static uint64_t last_id;

static bool is_gone(CUstream stream)
{
	return stream->closing || stream->gone;
}

uint64_t num_streams(void)
{
	uint64_t count = 0;

	for (CUstream each = streams; each; each = each->next)
		count += !each->is_default && !is_gone(each);
	return count;
}

/* ---- ops ---- */

struct op *op_new(int kind, enum function fn, uint32_t num_pieces)
{
	struct op *op = calloc(1, sizeof(*op) + num_pieces * sizeof(struct piece));

	if (!op)
		die("no memory for work");
	op->kind = kind;
	op->fn = fn;
	return op;
}

void op_free(struct op *op)
{
	for (uint32_t i = 0; i < op->num_pieces; i++) {
		if (op->pieces[i].to)
			memory_put(op->pieces[i].to);
		if (op->pieces[i].from)
			memory_put(op->pieces[i].from);
	}
	record_put(op->record);
	if (op->kernel)
		kernel_free(op->kernel);
	free(op);
}

/* May the op at the head run, or at least be taken away? */
static bool is_due(CUstream stream)
{
	struct op *op = stream->head;

	if (!op)
		return false;
	if (stream->context->sticky || stream->gone)
		return true;
	return !stream->held && !all_held && (op->kind != WAIT || op->record->done);
}

/* With the lock, which it lets go of where work is done. A context that died does no more. */
static void run(CUstream stream, struct op *op)
{
	bool works = op->kind == COPY || op->kind == FILL || op->kind == KERNEL;
	CUresult rc = CUDA_SUCCESS;

	if (stream->context->sticky || stream->gone || (works && run_fails(stream->context))) {
		if (op->kind == RECORD)
			op->record->done = true;
		return;
	}
	if (op->kind == WAIT)
		return;
	if (op->kind == RECORD) {
		op->record->done = true;
		op->record->at_ns = now_ns();
		return;
	}
	pthread_mutex_unlock(&lock);
	if (op->kind == COPY) {
		copy_run(op);
	} else if (op->kind == FILL) {
		fill_run(op);
	} else if (op->kind == KERNEL) {
		rc = kernel_run(op->kernel);
	} else {
		in_host_function = true;
		op->host_function(op->argument);
		in_host_function = false;
	}
	pthread_mutex_lock(&lock);
	if (rc)
		context_died(stream->context, rc);
}

static void *stream_thread(void *argument)
{
	CUstream stream = argument;

	pthread_mutex_lock(&lock);
	while (!is_gone(stream) || stream->head) {
		struct op *op = stream->head;

		if (!is_due(stream)) {
			pthread_cond_wait(&stream->more, &lock);
			continue;
		}
		stream->running = true;
		run(stream, op);
		stream->running = false;
		stream->head = op->next;
		if (!stream->head)
			stream->tail = &stream->head;
		stream->done++;
		if (op->kind == RECORD)
			streams_wake();		/* waits for it, in other streams */
		op_free(op);
		pthread_cond_broadcast(&changed);
	}
	stream->gone = true;
	pthread_mutex_unlock(&lock);
	return NULL;
}

static void start_thread(CUstream stream)
{
	pthread_attr_t attributes;
	pthread_t thread;

	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attributes, 512 << 10);
	if (pthread_create(&thread, &attributes, stream_thread, stream))
		die("no thread for a stream");
	pthread_attr_destroy(&attributes);
	stream->has_thread = true;
}

static void enqueue(CUstream stream, struct op *op)
{
	if (!stream->has_thread)
		start_thread(stream);
	*stream->tail = op;
	stream->tail = &op->next;
	stream->queued++;
	pthread_cond_signal(&stream->more);
}

/* `stream` waits for all that `other` has been given. */
static void wait_for(CUstream stream, CUstream other)
{
	struct op *mark, *wait;

	if (other == stream || other->queued == other->done)
		return;
	mark = op_new(RECORD, FN_cuEventRecord, 0);
	wait = op_new(WAIT, FN_cuStreamWaitEvent, 0);
	mark->record = record_new();
	wait->record = record_get(mark->record);
	enqueue(other, mark);
	enqueue(stream, wait);
}

/* A copy of memory that may be paged out is one the caller has to wait for, at once. */
static void check_pageable(CUstream stream)
{
	if (stream->pageable && !stream->context->sticky)
		violation("stream %llu: a copy of pageable memory was not synchronised",
			  (unsigned long long)stream->id);
}

/* The legacy default stream waits for the blocking ones, and they for it. */
void stream_add(CUstream stream, struct op *op)
{
	CUcontext context = stream->context;

	if (op->kind != COPY)
		check_pageable(stream);
	if (stream == context->legacy) {
		for (CUstream each = streams; each; each = each->next)
			if (each->context == context && !each->gone &&
			    !(each->flags & CU_STREAM_NON_BLOCKING))
				wait_for(stream, each);
	} else if (context->legacy && !(stream->flags & CU_STREAM_NON_BLOCKING)) {
		wait_for(stream, context->legacy);
	}
	enqueue(stream, op);
}

/* Whoever hears that the context has died may free the memory of what ran in it. */
void context_stops(CUcontext context)
{
	CUstream each = streams;

	while (each) {
		if (each->context == context && each->running && each->head &&
		    each->head->kind != HOST_FUNCTION) {
			pthread_cond_wait(&changed, &lock);
			each = streams;		/* they may be others now */
		} else {
			each = each->next;
		}
	}
}

void streams_wake(void)
{
	for (CUstream each = streams; each; each = each->next)
		pthread_cond_signal(&each->more);
	pthread_cond_broadcast(&changed);
}

/* ---- streams ---- */

static CUstream stream_new(CUcontext context, unsigned int flags, int priority)
{
	CUstream stream = calloc(1, sizeof(*stream));

	if (!stream)
		die("no memory for a stream");
	*stream = (struct CUstream_st){
		.next = streams, .context = context, .id = ++last_id, .flags = flags,
		.priority = priority > 0 ? 0 : priority < -5 ? -5 : priority,
	};
	stream->tail = &stream->head;
	pthread_cond_init(&stream->more, NULL);
	streams = stream;
	return stream;
}

static CUstream default_of(CUstream *place)
{
	if (!*place) {
		*place = stream_new(current_context(), CU_STREAM_DEFAULT, 0);
		(*place)->is_default = true;
	}
	return *place;
}

/* Of whichever context. There is one "per thread" stream for a context here, not one a thread. */
static CUstream stream_of(CUstream stream)
{
	if (!stream || stream == CU_STREAM_LEGACY)
		return default_of(&current_context()->legacy);
	if (stream == CU_STREAM_PER_THREAD)
		return default_of(&current_context()->per_thread);
	for (CUstream each = streams; each; each = each->next)
		if (each == stream && !is_gone(each) && is_context(each->context))
			return each;
	return NULL;
}

CUstream stream_here(CUstream stream)
{
	CUstream found = stream_of(stream);

	return found && found->context == current_context() ? found : NULL;
}

/* Something changed. False: nothing does, because the test holds the stream that is waited for. */
static bool wait_for_change(bool held)
{
	struct timespec until;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += (time_t)is.patience;
	if (pthread_cond_timedwait(&changed, &lock, &until) && held) {
		violation("%llu s were waited for a stream that the test holds",
			  (unsigned long long)is.patience);
		return false;
	}
	return true;
}

CUresult stream_finish(CUstream stream)
{
	uint64_t target = stream->queued;
	CUcontext context = stream->context;

	while (stream->done < target && !context->sticky)
		if (!wait_for_change(stream->held || all_held))
			return CUDA_ERROR_LAUNCH_TIMEOUT;
	stream->pageable = false;
	return context->sticky;
}

CUresult context_finish(CUcontext context)
{
	for (CUstream each = streams; each; each = each->next)
		if (each->context == context)
			stream_finish(each);
	return context->sticky;
}

static void stream_close(CUstream stream)
{
	check_pageable(stream);
	stream->closing = true;
	if (!stream->has_thread)
		stream->gone = true;
	pthread_cond_signal(&stream->more);
}

void streams_of_context_died(CUcontext context)
{
	uint32_t left = 0;

	for (CUstream each = streams; each; each = each->next) {
		if (each->context != context || is_gone(each))
			continue;
		left += !each->is_default;
		stream_close(each);
	}
	if (left && !context->sticky)
		violation("a context was destroyed with %u streams in it", left);
}

CUresult cuStreamCreateWithPriority(CUstream *out, unsigned int flags, int priority)
{
	ENTER(cuStreamCreateWithPriority, CONTEXT, NULL, flags, priority);
	if (flags > CU_STREAM_NON_BLOCKING)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*out = stream_new(current_context(), flags, priority);
	return leave(CUDA_SUCCESS);
}

CUresult cuStreamCreate(CUstream *out, unsigned int flags)
{
	ENTER(cuStreamCreate, CONTEXT, NULL, flags, 0);
	if (flags > CU_STREAM_NON_BLOCKING)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*out = stream_new(current_context(), flags, 0);
	return leave(CUDA_SUCCESS);
}

/* What is queued runs to its end. A stream of a context that died goes as well. */
CUresult cuStreamDestroy_v2(CUstream stream)
{
	CUcontext context = current_context();
	CUresult rc = enter(FN_cuStreamDestroy_v2, DRIVER, stream, 0, 0);

	if (rc)
		return rc;
	if (!context || !is_context(context))
		return leave(CUDA_ERROR_INVALID_CONTEXT);
	stream = stream_of(stream);
	if (!stream || stream->is_default)
		return leave(CUDA_ERROR_INVALID_HANDLE);
	stream_close(stream);
	return leave(stream->context->sticky);
}

CUresult cuStreamSynchronize(CUstream stream)
{
	ENTER(cuStreamSynchronize, CONTEXT, stream, 0, 0);
	stream = stream_here(stream);
	return leave(stream ? stream_finish(stream) : CUDA_ERROR_INVALID_HANDLE);
}

CUresult cuStreamQuery(CUstream stream)
{
	ENTER(cuStreamQuery, CONTEXT, stream, 0, 0);
	stream = stream_here(stream);
	if (!stream)
		return leave(CUDA_ERROR_INVALID_HANDLE);
	return leave(stream->done < stream->queued ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

CUresult cuStreamGetCtx(CUstream stream, CUcontext *out)
{
	ENTER(cuStreamGetCtx, CONTEXT, stream, 0, 0);
	stream = stream_of(stream);
	*out = stream ? stream->context : NULL;
	return leave(stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}

CUresult cuStreamGetCtx_v2(CUstream stream, CUcontext *out, CUgreenCtx *green)
{
	ENTER(cuStreamGetCtx_v2, CONTEXT, stream, 0, 0);
	stream = stream_of(stream);
	*out = stream ? stream->context : NULL;
	*green = NULL;
	return leave(stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}

CUresult cuStreamGetPriority(CUstream stream, int *out)
{
	ENTER(cuStreamGetPriority, CONTEXT, stream, 0, 0);
	stream = stream_here(stream);
	*out = stream ? stream->priority : 0;
	return leave(stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE);
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument)
{
	struct op *op;

	ENTER(cuLaunchHostFunc, CONTEXT, stream, (uintptr_t)function, (uintptr_t)argument);
	stream = stream_here(stream);
	if (!stream || !function)
		return leave(function ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE);
	op = op_new(HOST_FUNCTION, FN_cuLaunchHostFunc, 0);
	op->host_function = function;
	op->argument = argument;
	stream_add(stream, op);
	return leave(CUDA_SUCCESS);
}

/* ---- controls ---- */

/* Keeps a stream (NULL: a default one is not meant; ALL: every one) from running, or lets it. */
EXPORT int fake_cuda_hold(CUstream stream, int held)
{
	int rc = -1;

	pthread_mutex_lock(&lock);
	if (stream == ALL) {
		all_held = held;
		rc = 0;
	}
	for (CUstream each = streams; each; each = each->next) {
		if (each != stream && (stream != ALL || held))
			continue;
		each->held = held;
		rc = 0;
	}
	streams_wake();
	pthread_mutex_unlock(&lock);
	return rc;
}

/* Work that was given to a stream and has not been done. */
EXPORT uint64_t fake_cuda_queued(CUstream stream)
{
	uint64_t count = UINT64_MAX;

	pthread_mutex_lock(&lock);
	for (CUstream each = streams; each; each = each->next)
		if (each == stream)
			count = each->queued - each->done;
	pthread_mutex_unlock(&lock);
	return count;
}
