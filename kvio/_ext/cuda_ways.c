/* SPDX-License-Identifier: Apache-2.0 */
/* Puts the copies of a segment into a stream, in one of four ways. */
#include <stdio.h>

#include "cuda_impl.h"

#define BLOCK_THREADS 1024u		/* as the kernel's launch bounds say */
#define NEEDS_CAPABILITY 80		/* as its PTX does */
#define NEEDS_DRIVER 12010

/* ---- one call of the driver ---- */

static void say_failure(char *why, size_t room, CUresult code, const char *call)
{
	snprintf(why, room, "%s: %s (%d)", call, cuda_error_name(code), code);
}

static bool failed(struct cuda_carry *carry, int code, const char *call)
{
	if (code != CUDA_OK)
		carry->failure = (struct cuda_failure){ code, call };
	return code != CUDA_OK;
}

static bool copy_one(struct cuda_carry *carry, uint64_t target, uint64_t source, uint64_t nbytes)
{
	switch (carry->kind) {
	case KVIO_H2D:
		return !failed(carry, cuda.copy_h2d(target, (const void *)source, nbytes,
						    carry->stream), "cuMemcpyHtoDAsync");
	case KVIO_D2H:
		return !failed(carry, cuda.copy_d2h((void *)target, source, nbytes,
						    carry->stream), "cuMemcpyDtoHAsync");
	default:
		return !failed(carry, cuda.copy(target, source, nbytes, carry->stream),
			       "cuMemcpyAsync");
	}
}

static int by_loop(struct cuda_carry *carry, const struct cuda_copy *copies, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++) {
		carry->copies[KVIO_COPY_LOOP]++;
		if (!copy_one(carry, copies[i].target, copies[i].source, copies[i].nbytes))
			return -1;
	}
	return 1 << KVIO_COPY_LOOP;
}

/* ---- the batched call ---- */

void cuda_rule_out(struct cuda_dev *dev, uint32_t kind, uint32_t way,
		   const struct cuda_failure *failure)
{
	dev->info.costs[kind][way].there = 0;
	if (kind == KVIO_H2D || kind == KVIO_D2H)
		say_failure(dev->info.missing[way], sizeof(dev->info.missing[way]), failure->code,
			    failure->call);
}

static CUresult call_batch(struct cuda_dev *dev, uint32_t count, CUstream stream)
{
	/* Sources are read in the stream's order, not before; SMs are left to the model. */
	struct cuda_memcpy_attributes attributes = {
		.src_access_order = CUDA_SRC_ACCESS_ORDER_STREAM,
		.flags = CUDA_COPY_PREFER_OVERLAP,
	};
	size_t first = 0, failing = 0;		/* the attributes are of all, from the first on */

	if (cuda.batch13)
		return cuda.batch13(dev->targets, dev->sources, dev->sizes, count, &attributes,
				    &first, 1, stream);
	return cuda.batch12(dev->targets, dev->sources, dev->sizes, count, &attributes, &first, 1,
			    &failing, stream);
}

static int by_batch(struct cuda_carry *carry, const struct cuda_copy *copies, uint32_t count)
{
	struct cuda_dev *dev = carry->dev;
	CUresult code;

	for (uint32_t i = 0; i < count; i++) {
		dev->targets[i] = copies[i].target;
		dev->sources[i] = copies[i].source;
		dev->sizes[i] = copies[i].nbytes;
	}
	code = call_batch(dev, count, carry->stream);
	if (code == CUDA_NOT_SUPPORTED) {	/* a driver that has no more than its name */
		cuda_rule_out(dev, carry->kind, KVIO_COPY_BATCH,
			      &(struct cuda_failure){ code, "cuMemcpyBatchAsync" });
		return by_loop(carry, copies, count);
	}
	carry->copies[KVIO_COPY_BATCH]++;
	return failed(carry, code, "cuMemcpyBatchAsync") ? -1 : 1 << KVIO_COPY_BATCH;
}

/* ---- rectangles ---- */

static CUresult copy_rows(const struct cuda_rect *rect, bool to_device, uint64_t slice,
			  CUstream stream)
{
	uint64_t target = rect->target + slice * rect->target_step;
	uint64_t source = rect->source + slice * rect->source_step;
	struct cuda_memcpy2d what = {
		.src_type = to_device ? CUDA_MEMORY_HOST : CUDA_MEMORY_DEVICE,
		.dst_type = to_device ? CUDA_MEMORY_DEVICE : CUDA_MEMORY_HOST,
		.src_pitch = rect->source_pitch, .dst_pitch = rect->target_pitch,
		.width = rect->width, .height = rect->rows,
	};

	if (to_device) {
		what.src_host = (const void *)source;
		what.dst_device = target;
	} else {
		what.src_device = source;
		what.dst_host = (void *)target;
	}
	return cuda.copy_2d(&what, stream);
}

static CUresult copy_box(const struct cuda_rect *rect, bool to_device, CUstream stream)
{
	struct cuda_memcpy3d what = {
		.src_type = to_device ? CUDA_MEMORY_HOST : CUDA_MEMORY_DEVICE,
		.dst_type = to_device ? CUDA_MEMORY_DEVICE : CUDA_MEMORY_HOST,
		.src_pitch = rect->source_pitch, .dst_pitch = rect->target_pitch,
		.src_height = rect->source_step / rect->source_pitch,
		.dst_height = rect->target_step / rect->target_pitch,
		.width = rect->width, .height = rect->rows, .depth = rect->slices,
	};

	if (to_device) {
		what.src_host = (const void *)rect->source;
		what.dst_device = rect->target;
	} else {
		what.src_device = rect->source;
		what.dst_host = (void *)rect->target;
	}
	return cuda.copy_3d(&what, stream);
}

static bool copy_rect(struct cuda_carry *carry, const struct cuda_rect *rect)
{
	bool to_device = carry->kind == KVIO_H2D;
	CUresult code;

	if (rect->rows == 1) {
		carry->copies[KVIO_COPY_STRIDED]++;
		return copy_one(carry, rect->target, rect->source, rect->width);
	}
	if (rect->slices > 1) {
		carry->copies[KVIO_COPY_STRIDED]++;
		code = copy_box(rect, to_device, carry->stream);
		/* No document bounds the height of a slice; if a driver does, slice by slice. */
		if (code != CUDA_INVALID_VALUE)
			return !failed(carry, code, "cuMemcpy3DAsync");
	}
	for (uint64_t slice = 0; slice < rect->slices; slice++) {
		carry->copies[KVIO_COPY_STRIDED]++;
		code = copy_rows(rect, to_device, slice, carry->stream);
		if (failed(carry, code, "cuMemcpy2DAsync"))
			return false;
	}
	return true;
}

/* Between host and device only: on one device cuMemcpy2D takes no pitch but cuMemAllocPitch's. */
static int by_rects(struct cuda_carry *carry, const struct cuda_copy *copies, uint32_t count)
{
	struct cuda_rect *rects = carry->dev->rects;
	uint32_t made = carry->num_rects;

	if (made == 0)
		made = cuda_rects(copies, count, carry->dev->max_pitch, rects, count);
	for (uint32_t i = 0; i < made; i++)
		if (!copy_rect(carry, &rects[i]))
			return -1;
	return 1 << KVIO_COPY_STRIDED;
}

/* ---- the kernel ---- */

static struct cuda_chunk *take_chunk(struct cuda_carry *carry)
{
	struct cuda_chunk *chunk = carry->dev->chunks;

	if (chunk) {
		carry->dev->chunks = chunk->next;
		chunk->next = carry->chunks;
		carry->chunks = chunk;
	}
	return chunk;
}

void cuda_chunks_give(struct cuda_dev *dev, struct cuda_chunk *chunks)
{
	struct cuda_chunk *next;

	for (; chunks; chunks = next) {
		next = chunks->next;
		chunks->next = dev->chunks;
		dev->chunks = chunks;
	}
}

static CUresult launch(struct cuda_dev *dev, const struct cuda_chunk *chunk, uint32_t count,
		       uint32_t sms, CUstream stream)
{
	CUdeviceptr pieces = chunk->device_addr;
	void *arguments[] = { &pieces, &count };
	uint32_t blocks = count < sms ? count : sms;

	return cuda.launch(dev->kernel, blocks ? blocks : 1, 1, 1, BLOCK_THREADS, 1, 1, 0, stream,
			   arguments, NULL);
}

/* What is left goes by copy engines when no chunk is free: they are all in flight. */
static int by_kernel(struct cuda_carry *carry, struct cuda_copy *copies, uint32_t count)
{
	struct cuda_place place = { 0, 0 };
	struct cuda_chunk *chunk;
	uint32_t way = KVIO_COPY_LOOP, made;
	int ways = 0, more;

	while (place.at < count && (chunk = take_chunk(carry)) != NULL) {
		made = cuda_split(copies, count, &place, chunk->copies, CUDA_CHUNK_PIECES);
		carry->copies[KVIO_COPY_KERNEL] += made;
		if (failed(carry, launch(carry->dev, chunk, made, carry->sms, carry->stream),
			   "cuLaunchKernel"))
			return -1;
		ways = 1 << KVIO_COPY_KERNEL;
	}
	if (place.at == count)
		return ways;
	copies[place.at].target += place.nbytes;
	copies[place.at].source += place.nbytes;
	copies[place.at].nbytes -= place.nbytes;
	if (carry->dev->info.costs[carry->kind][KVIO_COPY_BATCH].there)
		way = KVIO_COPY_BATCH;
	more = cuda_carry_by(carry, way, copies + place.at, count - place.at);
	return more < 0 ? -1 : ways | more;
}

/* ---- a segment ---- */

int cuda_carry_by(struct cuda_carry *carry, uint32_t way, struct cuda_copy *copies, uint32_t count)
{
	switch (way) {
	case KVIO_COPY_BATCH:
		return by_batch(carry, copies, count);
	case KVIO_COPY_STRIDED:
		return by_rects(carry, copies, count);
	case KVIO_COPY_KERNEL:
		return by_kernel(carry, copies, count);
	default:
		return by_loop(carry, copies, count);
	}
}

static uint32_t cheapest(struct cuda_carry *carry, const struct cuda_copy *copies, uint32_t count)
{
	const struct kvio_copy_cost *costs = carry->dev->info.costs[carry->kind];
	struct cuda_shape shape = {
		.kind = carry->kind, .copies = count, .rows = count,
		.aligned = cuda_is_aligned(copies, count),
	};
	uint32_t room = count / 4 + 1;		/* more of them are no gain, and not looked for */

	for (uint32_t i = 0; i < count; i++)
		shape.nbytes += copies[i].nbytes;
	if (costs[KVIO_COPY_STRIDED].there)
		shape.rects = cuda_rects(copies, count, carry->dev->max_pitch, carry->dev->rects,
					 room);
	carry->num_rects = shape.rects;
	return cuda_choose(costs, &shape);
}

static uint32_t way_of(struct cuda_carry *carry, uint32_t asked, const struct cuda_copy *copies,
		       uint32_t count)
{
	if (asked == KVIO_COPY_AUTO)
		return cheapest(carry, copies, count);
	if (!carry->dev->info.costs[carry->kind][asked].there ||
	    (asked == KVIO_COPY_KERNEL && !cuda_is_aligned(copies, count)))
		return KVIO_COPY_LOOP;
	return asked;
}

static uint32_t sms_of(const struct cuda_nic *nic)
{
	uint32_t sms = nic->dev->info.kernel_sms;

	return sms && sms < nic->max_sms ? sms : nic->max_sms;
}

int cuda_submit(struct cuda_nic *nic, CUstream stream, uint32_t kind, struct cuda_copy *copies,
		uint32_t count, struct cuda_chunk **chunks, struct cuda_failure *failure)
{
	struct cuda_carry carry = {
		.dev = nic->dev, .stream = stream, .kind = kind, .sms = sms_of(nic),
	};
	struct cuda_chunk **last = &carry.chunks;
	int ways;

	count = cuda_coalesce(copies, count);
	if (count == 0)
		return 0;
	ways = cuda_carry_by(&carry, way_of(&carry, nic->copy_way, copies, count), copies, count);
	for (uint32_t way = 0; way < KVIO_NUM_COPY_WAYS; way++) {
		nic->copies[way] += carry.copies[way];
		nic->segments[way] += ways > 0 && ways >> way & 1;
	}
	while (*last)
		last = &(*last)->next;
	*last = *chunks;
	*chunks = carry.chunks;
	*failure = carry.failure;
	return ways;
}

/* ---- opening ---- */

static bool open_chunks(struct cuda_dev *dev, char *why, size_t room)
{
	size_t each = CUDA_CHUNK_PIECES * sizeof(struct cuda_copy);
	CUdeviceptr device_addr = 0;
	void *memory = NULL;
	CUresult code = cuda.host_alloc(&memory, CUDA_NUM_CHUNKS * each,
					CUDA_HOST_ALLOC_PORTABLE | CUDA_HOST_ALLOC_DEVICEMAP);

	if (code != CUDA_OK) {
		say_failure(why, room, code, "cuMemHostAlloc");
		return false;
	}
	dev->all_chunks[0].copies = memory;
	code = cuda.host_device_pointer(&device_addr, memory, 0);
	if (code != CUDA_OK) {
		say_failure(why, room, code, "cuMemHostGetDevicePointer");
		return false;
	}
	for (uint32_t i = CUDA_NUM_CHUNKS; i-- > 0; ) {
		dev->all_chunks[i] = (struct cuda_chunk){
			.copies = (struct cuda_copy *)((char *)memory + i * each),
			.device_addr = device_addr + i * each, .next = dev->chunks,
		};
		dev->chunks = &dev->all_chunks[i];
	}
	return true;
}

/* Launched once, over nothing: the driver may load it only then, which is not for a post. */
static bool open_kernel(struct cuda_dev *dev, const char *ptx, char *why, size_t room)
{
	const char *call = "cuModuleLoadData";
	CUresult code = cuda.module_load(&dev->module, ptx);

	if (code == CUDA_OK) {
		call = "cuModuleGetFunction";
		code = cuda.module_function(&dev->kernel, dev->module, "kvio_copy");
	}
	if (code == CUDA_OK && !open_chunks(dev, why, room))
		return false;
	if (code == CUDA_OK) {
		call = "cuLaunchKernel";
		code = launch(dev, dev->chunks, 0, 1, dev->own);
	}
	if (code == CUDA_OK)
		code = cuda.stream_sync(dev->own);
	if (code != CUDA_OK)
		say_failure(why, room, cuda_note(dev, code, call), call);
	return code == CUDA_OK;
}

static bool has_kernel(struct cuda_dev *dev, const char *ptx, char *why, size_t room)
{
	const struct kvio_cuda_info *info = &dev->info;

	if (!ptx)
		snprintf(why, room, "no PTX was given");
	else if (info->capability < NEEDS_CAPABILITY || info->driver_version < NEEDS_DRIVER)
		snprintf(why, room, "the kernel needs sm_80 and CUDA 12.1: this is sm_%d, "
			 "CUDA %d.%d", info->capability, info->driver_version / 1000,
			 info->driver_version % 1000 / 10);
	else if (!dev->maps_host_as_is)
		snprintf(why, room, "this device has other addresses for registered host memory");
	else if (open_kernel(dev, ptx, why, room))
		return true;
	else
		cuda_ways_close(dev);
	return false;
}

void cuda_ways_open(struct cuda_dev *dev, const char *ptx)
{
	struct kvio_cuda_info *info = &dev->info;
	int max_pitch = 0;
	bool batch = cuda.batch12 || cuda.batch13;
	bool kernel = has_kernel(dev, ptx, info->missing[KVIO_COPY_KERNEL],
				 sizeof(info->missing[KVIO_COPY_KERNEL]));

	info->measured = info->kernel_sms = 0;
	if (!batch)
		snprintf(info->missing[KVIO_COPY_BATCH], sizeof(info->missing[KVIO_COPY_BATCH]),
			 "cuMemcpyBatchAsync needs a driver of CUDA 12.8: this is CUDA %d.%d",
			 info->driver_version / 1000, info->driver_version % 1000 / 10);
	if (cuda.device_attribute(&max_pitch, CUDA_ATTR_MAX_PITCH, dev->device) == CUDA_OK)
		dev->max_pitch = (uint64_t)(max_pitch > 0 ? max_pitch : 0);
	for (uint32_t kind = 0; kind < KVIO_NUM_COPY_KINDS; kind++) {
		struct kvio_copy_cost *costs = info->costs[kind];

		costs[KVIO_COPY_LOOP].there = 1;
		costs[KVIO_COPY_BATCH].there = batch;
		costs[KVIO_COPY_STRIDED].there = kind == KVIO_H2D || kind == KVIO_D2H;
		costs[KVIO_COPY_KERNEL].there = kernel && kind != KVIO_H2H;
		cuda_rule_of_thumb(costs);
	}
}

void cuda_ways_close(struct cuda_dev *dev)
{
	if (dev->module)
		cuda.module_unload(dev->module);
	if (dev->all_chunks[0].copies)
		cuda.host_free(dev->all_chunks[0].copies);
	dev->module = NULL;
	dev->kernel = NULL;
	dev->chunks = NULL;
	memset(dev->all_chunks, 0, sizeof(dev->all_chunks));
}
