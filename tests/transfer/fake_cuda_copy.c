/* SPDX-License-Identifier: Apache-2.0 */
/* The fake's copies. Whatever the call, its work is a list of contiguous pieces, checked then. */
#include "fake_cuda.h"

#include <stdio.h>

/* ---- their work, without the lock ---- */

static uint8_t *target_of(const struct piece *piece)
{
	return piece->to ? reach(piece->to, piece->target) : (uint8_t *)(uintptr_t)piece->target;
}

void copy_run(struct op *op)
{
	uint64_t nbytes = 0;

	for (uint32_t i = 0; i < op->num_pieces; i++) {
		const struct piece *piece = &op->pieces[i];
		const uint8_t *source = piece->from ? reach(piece->from, piece->source) :
					(const uint8_t *)(uintptr_t)piece->source;

		memmove(target_of(piece), source, piece->nbytes);
		nbytes += piece->nbytes;
	}
	work_takes(op->fn, op->num_pieces, nbytes);
}

void fill_run(struct op *op)
{
	memset(target_of(op->pieces), (int)op->pieces->source, op->pieces->nbytes);
	work_takes(op->fn, 1, op->pieces->nbytes);
}

/* ---- what a call asks for ---- */

struct sides { enum side target, source; };

static const struct sides any = { EITHER_SIDE, EITHER_SIDE };

/* Into the op, or why not. */
static CUresult add_piece(struct op *op, CUstream stream, struct sides sides, uint64_t target,
			  uint64_t source, uint64_t nbytes)
{
	struct piece *piece = &op->pieces[op->num_pieces];
	CUresult rc = memory_at(target, nbytes, sides.target, &piece->to);

	if (!rc)
		rc = memory_at(source, nbytes, sides.source, &piece->from);
	if (!rc && piece->to && piece->to->read_only)
		rc = CUDA_ERROR_INVALID_VALUE;
	if (rc) {
		piece->to = piece->from = NULL;
		return rc;
	}
	piece->target = target;
	piece->source = source;
	piece->nbytes = nbytes;
	if (piece->to)
		piece->to->uses++;
	if (piece->from)
		piece->from->uses++;
	op->num_pieces++;
	if (!piece->to || !piece->from)
		stream->pageable = true;
	return CUDA_SUCCESS;
}

static CUresult submit_or_free(CUstream stream, struct op *op, CUresult rc)
{
	if (rc || !op->num_pieces)
		op_free(op);
	else
		stream_add(stream, op);
	return rc;
}

static CUresult copy_one(enum function fn, CUstream stream, struct sides sides, uint64_t target,
			 uint64_t source, uint64_t nbytes)
{
	struct op *op;

	stream = stream_here(stream);
	if (!stream)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!nbytes)
		return CUDA_SUCCESS;
	op = op_new(COPY, fn, 1);
	return submit_or_free(stream, op, add_piece(op, stream, sides, target, source, nbytes));
}

CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t nbytes, CUstream stream)
{
	ENTER(cuMemcpyAsync, CONTEXT, stream, target, nbytes);
	return leave(copy_one(FN_cuMemcpyAsync, stream, any, target, source, nbytes));
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void *source, size_t nbytes,
			      CUstream stream)
{
	ENTER(cuMemcpyHtoDAsync_v2, CONTEXT, stream, target, nbytes);
	return leave(copy_one(FN_cuMemcpyHtoDAsync_v2, stream,
			      (struct sides){ DEVICE_SIDE, HOST_SIDE }, target,
			      (uint64_t)(uintptr_t)source, nbytes));
}

CUresult cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr source, size_t nbytes, CUstream stream)
{
	ENTER(cuMemcpyDtoHAsync_v2, CONTEXT, stream, (uintptr_t)target, nbytes);
	return leave(copy_one(FN_cuMemcpyDtoHAsync_v2, stream,
			      (struct sides){ HOST_SIDE, DEVICE_SIDE },
			      (uint64_t)(uintptr_t)target, source, nbytes));
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, size_t nbytes,
			      CUstream stream)
{
	ENTER(cuMemcpyDtoDAsync_v2, CONTEXT, stream, target, nbytes);
	return leave(copy_one(FN_cuMemcpyDtoDAsync_v2, stream,
			      (struct sides){ DEVICE_SIDE, DEVICE_SIDE }, target, source,
			      nbytes));
}

/* ---- synchronous ones, in the default stream ---- */

static CUresult copy_now(enum function fn, uint64_t target, uint64_t source, uint64_t nbytes)
{
	CUresult rc = copy_one(fn, NULL, any, target, source, nbytes);

	return rc ? rc : stream_finish(stream_here(NULL));
}

CUresult cuMemcpy(CUdeviceptr target, CUdeviceptr source, size_t nbytes)
{
	ENTER(cuMemcpy, CONTEXT, NULL, target, nbytes);
	return leave(copy_now(FN_cuMemcpy, target, source, nbytes));
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void *source, size_t nbytes)
{
	ENTER(cuMemcpyHtoD_v2, CONTEXT, NULL, target, nbytes);
	return leave(copy_now(FN_cuMemcpyHtoD_v2, target, (uint64_t)(uintptr_t)source, nbytes));
}

CUresult cuMemcpyDtoH_v2(void *target, CUdeviceptr source, size_t nbytes)
{
	ENTER(cuMemcpyDtoH_v2, CONTEXT, NULL, (uintptr_t)target, nbytes);
	return leave(copy_now(FN_cuMemcpyDtoH_v2, (uint64_t)(uintptr_t)target, source, nbytes));
}

CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t nbytes, CUstream stream)
{
	struct op *op;
	CUresult rc;

	ENTER(cuMemsetD8Async, CONTEXT, stream, target, nbytes);
	stream = stream_here(stream);
	if (!stream)
		return leave(CUDA_ERROR_INVALID_HANDLE);
	if (!nbytes)
		return leave(CUDA_SUCCESS);
	op = op_new(FILL, FN_cuMemsetD8Async, 1);
	rc = memory_at(target, nbytes, DEVICE_SIDE, &op->pieces->to);
	if (!rc) {
		op->pieces->target = target;
		op->pieces->source = value;
		op->pieces->nbytes = nbytes;
		op->pieces->to->uses++;
		op->num_pieces = 1;
	}
	return leave(submit_or_free(stream, op, rc));
}

/* ---- two and three dimensions ---- */

/* What is copied, and one side of it: where its first byte is, and how far from one row and slice
 * to the next. */
struct extent { size_t width, rows, slices; };
struct lattice { uint64_t first, pitch, step; enum side side; };

/* A pitch of 0 is one that was not given, which will do for a single row; `height` alike. */
static bool lattice_of(struct lattice *out, const struct extent *extent, CUmemorytype type,
		       const void *host, CUdeviceptr device, size_t x, size_t y, size_t z,
		       size_t pitch, size_t height)
{
	uint64_t base = type == CU_MEMORYTYPE_HOST ? (uint64_t)(uintptr_t)host : device;

	if (type != CU_MEMORYTYPE_HOST && type != CU_MEMORYTYPE_DEVICE &&
	    type != CU_MEMORYTYPE_UNIFIED)
		return false;
	if (pitch > is.max_pitch || (pitch ? pitch < x + extent->width : extent->rows > 1) ||
	    (height ? height < y + extent->rows : extent->slices > 1))
		return false;
	out->side = type == CU_MEMORYTYPE_HOST ? HOST_SIDE :
		    type == CU_MEMORYTYPE_DEVICE ? DEVICE_SIDE : EITHER_SIDE;
	out->pitch = pitch;
	out->step = pitch * height;
	out->first = base + (z * height + y) * pitch + x;
	return true;
}

static CUresult copy_lattice(enum function fn, CUstream stream, const struct lattice *target,
			     const struct lattice *source, const struct extent *extent)
{
	struct sides sides = { target->side, source->side };
	CUresult rc = CUDA_SUCCESS;
	struct op *op;

	stream = stream_here(stream);
	if (!stream)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!extent->width || !extent->rows || !extent->slices)
		return CUDA_SUCCESS;
	op = op_new(COPY, fn, (uint32_t)(extent->rows * extent->slices));
	for (size_t z = 0; z < extent->slices && !rc; z++)
		for (size_t y = 0; y < extent->rows && !rc; y++)
			rc = add_piece(op, stream, sides,
				       target->first + z * target->step + y * target->pitch,
				       source->first + z * source->step + y * source->pitch,
				       extent->width);
	return submit_or_free(stream, op, rc);
}

CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copy, CUstream stream)
{
	struct extent extent = { copy->WidthInBytes, copy->Height, 1 };
	struct lattice target, source;

	ENTER(cuMemcpy2DAsync_v2, CONTEXT, stream, copy->WidthInBytes, copy->Height);
	if (!lattice_of(&target, &extent, copy->dstMemoryType, copy->dstHost, copy->dstDevice,
			copy->dstXInBytes, copy->dstY, 0, copy->dstPitch, 0) ||
	    !lattice_of(&source, &extent, copy->srcMemoryType, copy->srcHost, copy->srcDevice,
			copy->srcXInBytes, copy->srcY, 0, copy->srcPitch, 0))
		return leave(CUDA_ERROR_INVALID_VALUE);
	return leave(copy_lattice(FN_cuMemcpy2DAsync_v2, stream, &target, &source, &extent));
}

CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *copy, CUstream stream)
{
	struct extent extent = { copy->WidthInBytes, copy->Height, copy->Depth };
	struct lattice target, source;

	ENTER(cuMemcpy3DAsync_v2, CONTEXT, stream, copy->WidthInBytes, copy->Height);
	if (copy->srcLOD || copy->dstLOD || copy->reserved0 || copy->reserved1 ||
	    !lattice_of(&target, &extent, copy->dstMemoryType, copy->dstHost, copy->dstDevice,
			copy->dstXInBytes, copy->dstY, copy->dstZ, copy->dstPitch,
			copy->dstHeight) ||
	    !lattice_of(&source, &extent, copy->srcMemoryType, copy->srcHost, copy->srcDevice,
			copy->srcXInBytes, copy->srcY, copy->srcZ, copy->srcPitch,
			copy->srcHeight))
		return leave(CUDA_ERROR_INVALID_VALUE);
	return leave(copy_lattice(FN_cuMemcpy3DAsync_v2, stream, &target, &source, &extent));
}

/* ---- batches: in any order, so in an unlikely one ---- */

static void shuffle(struct op *op)
{
	uint64_t state = is.seed;

	for (uint32_t i = op->num_pieces; state && i > 1; i--) {
		struct piece piece = op->pieces[i - 1];
		uint32_t other;

		state = state * 6364136223846793005u + 1442695040888963407u;
		other = (uint32_t)((state >> 33) % i);
		op->pieces[i - 1] = op->pieces[other];
		op->pieces[other] = piece;
	}
	is.seed = state;
}

static bool is_attributed(const CUmemcpyAttributes *attributes, const size_t *first,
			  size_t num_attributes, size_t count)
{
	if (!attributes || !first || !num_attributes || num_attributes > count || first[0])
		return false;
	for (size_t i = 0; i < num_attributes; i++)
		if (first[i] >= count || (i && first[i] <= first[i - 1]) ||
		    attributes[i].srcAccessOrder < CU_MEMCPY_SRC_ACCESS_ORDER_STREAM ||
		    attributes[i].srcAccessOrder > CU_MEMCPY_SRC_ACCESS_ORDER_ANY ||
		    attributes[i].flags > CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
			return false;
	return true;
}

/* *failed: the copy that was wrong, SIZE_MAX if it is none of them. */
static CUresult copy_batch(enum function fn, CUdeviceptr *targets, CUdeviceptr *sources,
			   size_t *sizes, size_t count, CUmemcpyAttributes *attributes,
			   size_t *first, size_t num_attributes, size_t *failed, CUstream stream)
{
	CUresult rc = CUDA_SUCCESS;
	struct op *op;

	*failed = SIZE_MAX;
	if (!stream || stream == CU_STREAM_LEGACY || !count || count > UINT32_MAX ||
	    !is_attributed(attributes, first, num_attributes, count))
		return CUDA_ERROR_INVALID_VALUE;
	stream = stream_here(stream);
	if (!stream)
		return CUDA_ERROR_INVALID_HANDLE;
	op = op_new(COPY, fn, (uint32_t)count);
	for (size_t i = 0; i < count && !rc; i++) {
		rc = sizes[i] ? add_piece(op, stream, any, targets[i], sources[i], sizes[i]) :
		     CUDA_ERROR_INVALID_VALUE;
		*failed = rc ? i : SIZE_MAX;
	}
	shuffle(op);
	return submit_or_free(stream, op, rc);
}

CUresult cuMemcpyBatchAsync(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes,
			    size_t count, CUmemcpyAttributes *attributes, size_t *first,
			    size_t num_attributes, size_t *fail_index, CUstream stream)
{
	size_t failed;
	CUresult rc;

	ENTER(cuMemcpyBatchAsync, CONTEXT, stream, count, num_attributes);
	rc = copy_batch(FN_cuMemcpyBatchAsync, targets, sources, sizes, count, attributes, first,
			num_attributes, &failed, stream);
	if (rc && fail_index)
		*fail_index = failed;
	return leave(rc);
}

CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes,
			       size_t count, CUmemcpyAttributes *attributes, size_t *first,
			       size_t num_attributes, CUstream stream)
{
	size_t failed;

	ENTER(cuMemcpyBatchAsync_v2, CONTEXT, stream, count, num_attributes);
	return leave(copy_batch(FN_cuMemcpyBatchAsync_v2, targets, sources, sizes, count,
				attributes, first, num_attributes, &failed, stream));
}
