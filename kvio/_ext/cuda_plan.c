/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the pieces of a segment have in common: those that touch become one, those at equal strides
 * a rectangle. No memory is allocated, nothing is sorted, and no piece is looked at more than a
 * few times, for this runs in every post.
 *
 * A layer of a BlockPool -> LayerPool with consecutive ids is rows of one Layer Block, the Full
 * Block's stride apart on one side and touching on the other: one rectangle. All layers of it,
 * block by block, are a grid: a row of layers for each block or a row of blocks for each layer,
 * whichever is fewer. Scattered ids give short rows, and the loop or the batched call its work.
 */
#include "cuda_impl.h"

/* ---- pieces that touch ---- */

static inline bool touches(const struct cuda_copy *before, const struct cuda_copy *after)
{
	/* After one that ends with the address space nothing comes. */
	return after->source - before->source == before->nbytes &&
	       after->target - before->target == before->nbytes &&
	       after->source > before->source && after->target > before->target;
}

uint32_t cuda_coalesce(struct cuda_copy *copies, uint32_t count)
{
	uint32_t left = 0;

	for (uint32_t i = 0; i < count; i++) {
		if (copies[i].nbytes == 0)
			continue;
		if (left && touches(&copies[left - 1], &copies[i]))
			copies[left - 1].nbytes += copies[i].nbytes;
		else if (left++ != i)
			copies[left - 1] = copies[i];
	}
	return left;
}

/* ---- pieces at equal strides ---- */

/* From one piece to another; sane where it ascends and does not overlap. */
struct stride {
	uint64_t target, source;
};

static inline struct stride between(const struct cuda_copy *from, const struct cuda_copy *to)
{
	return (struct stride){ to->target - from->target, to->source - from->source };
}

static inline bool is_equal(struct stride a, struct stride b)
{
	return a.target == b.target && a.source == b.source;
}

/* No stride that is taken is so long that 16,384 of them go around the address space twice. */
#define MAX_STEP (1ull << 48)

static inline bool ascends(const struct cuda_copy *first, const struct cuda_copy *last)
{
	return last->target > first->target && last->source > first->source;
}

/* A descending stride is a huge one. */
static inline bool is_pitch(struct stride stride, uint64_t width, uint64_t max_pitch)
{
	return stride.target >= width && stride.source >= width &&
	       stride.target <= max_pitch && stride.source <= max_pitch;
}

/* How many of the copies lie `stride` behind the one `apart` places earlier, all of one width;
 * the first `apart` are taken for granted. */
static inline uint32_t repeats(const struct cuda_copy *copies, uint32_t count, uint32_t apart,
			       struct stride stride)
{
	uint32_t at = apart;

	while (at < count && copies[at].nbytes == copies[0].nbytes &&
	       is_equal(between(&copies[at - apart], &copies[at]), stride))
		at++;
	return at;
}

static inline struct cuda_rect rect_of(const struct cuda_copy *first, uint32_t rows,
				       struct stride pitch)
{
	return (struct cuda_rect){
		.target = first->target, .source = first->source, .width = first->nbytes,
		.rows = rows, .slices = 1,
		.target_pitch = pitch.target, .source_pitch = pitch.source,
	};
}

/* A slice has to be a whole number of pitches, and end before the next one begins. */
static inline bool is_step(struct stride step, struct stride pitch, uint64_t rows)
{
	return step.target % pitch.target == 0 && step.target / pitch.target >= rows &&
	       step.source % pitch.source == 0 && step.source / pitch.source >= rows &&
	       step.target <= MAX_STEP && step.source <= MAX_STEP;
}

/* What repeats a row of `rows` pieces: slices of a box, or a grid, which is cut into the fewer
 * rows. Either way all of it at once, so that nothing is compared twice. How many rectangles, of
 * which no more than `room` are written; `*taken`: of the copies. */
static uint32_t add_slices(const struct cuda_copy *copies, uint32_t slices, uint32_t rows,
			   struct stride pitch, uint64_t max_pitch, struct cuda_rect *out,
			   uint32_t room, uint32_t *taken)
{
	struct stride step = between(&copies[0], &copies[rows]);
	bool up = ascends(copies, &copies[*taken - 1]);
	uint32_t made;

	if (up && is_step(step, pitch, rows)) {
		*out = rect_of(copies, rows, pitch);
		out->slices = slices;
		out->target_step = step.target;
		out->source_step = step.source;
		return 1;
	}
	if (up && rows < slices && is_pitch(step, copies->nbytes, max_pitch)) {
		for (made = 0; made < rows && made < room; made++)
			out[made] = rect_of(&copies[made], slices, step);
		return rows;
	}
	for (made = 0; made < slices && made < room; made++) {
		const struct cuda_copy *first = &copies[rows * made];

		if (!ascends(first, first + rows - 1))
			break;
		out[made] = rect_of(first, rows, pitch);
	}
	*taken = rows * made;
	return made;
}

uint32_t cuda_rects(const struct cuda_copy *copies, uint32_t count, uint64_t max_pitch,
		    struct cuda_rect *out, uint32_t room)
{
	uint32_t made = 0, taken;

	for (uint32_t at = 0; at < count; at += taken) {
		const struct cuda_copy *first = &copies[at];
		uint64_t width = first->nbytes;
		struct stride lone = { width, width }, pitch = lone;
		uint32_t left = count - at, rows = 1;

		if (made == room)
			return 0;
		if (left > 1)
			pitch = between(&first[0], &first[1]);
		if (left > 1 && is_pitch(pitch, width, max_pitch))
			rows = repeats(first, left, 1, pitch);
		if (!ascends(first, &first[rows - 1]))
			rows = 1;
		taken = rows;
		if (rows > 1 && rows < left)
			taken *= repeats(first, left, rows, between(first, &first[rows])) / rows;
		if (taken == rows)
			out[made++] = rect_of(first, rows, rows > 1 ? pitch : lone);
		else
			made += add_slices(first, taken / rows, rows, pitch, max_pitch,
					   &out[made], room - made, &taken);
		if (made > room)
			return 0;
	}
	return made;
}

/* ---- for the kernel ---- */

uint32_t cuda_split(const struct cuda_copy *copies, uint32_t count, struct cuda_place *place,
		    struct cuda_copy *out, uint32_t room)
{
	uint32_t made = 0;

	while (made < room && place->at < count) {
		const struct cuda_copy *copy = &copies[place->at];
		uint64_t left = copy->nbytes - place->nbytes;
		uint64_t nbytes = left < CUDA_PIECE_NBYTES ? left : CUDA_PIECE_NBYTES;

		if (nbytes)
			out[made++] = (struct cuda_copy){
				copy->target + place->nbytes, copy->source + place->nbytes, nbytes,
			};
		place->nbytes += nbytes;
		if (nbytes == left)
			*place = (struct cuda_place){ place->at + 1, 0 };
	}
	return made;
}

bool cuda_is_aligned(const struct cuda_copy *copies, uint32_t count)
{
	uint64_t bits = 0;

	for (uint32_t i = 0; i < count; i++)
		bits |= copies[i].target | copies[i].source | copies[i].nbytes;
	return bits % CUDA_KERNEL_ALIGN == 0;
}
