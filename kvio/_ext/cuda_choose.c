/* SPDX-License-Identifier: Apache-2.0 */
/* Which way a segment takes: the cheapest by what each was measured to cost; and how four figures
 * come from times. */
#include "cuda_impl.h"

#define KERNEL_WINS_BY 0.8		/* of the time of the others */

double cuda_predict_ns(const struct kvio_copy_cost *cost, uint32_t way,
		       const struct cuda_shape *shape)
{
	double calls = way == KVIO_COPY_STRIDED ? shape->rects : shape->copies;
	double rows = way == KVIO_COPY_STRIDED ? shape->rows : 0;

	return cost->fixed_ns + calls * cost->copy_ns + rows * cost->row_ns +
	       (double)shape->nbytes * cost->byte_ns;
}

static bool can(const struct kvio_copy_cost *cost, uint32_t way, const struct cuda_shape *shape)
{
	if (way == KVIO_COPY_KERNEL && (!shape->aligned || shape->kind == KVIO_H2H))
		return false;
	if (way == KVIO_COPY_STRIDED && shape->rects == 0)
		return false;
	return cost->there;
}

uint32_t cuda_choose(const struct kvio_copy_cost costs[KVIO_NUM_COPY_WAYS],
		     const struct cuda_shape *shape)
{
	double best = cuda_predict_ns(&costs[KVIO_COPY_LOOP], KVIO_COPY_LOOP, shape);
	uint32_t way = KVIO_COPY_LOOP;

	for (uint32_t other = KVIO_COPY_BATCH; other < KVIO_NUM_COPY_WAYS; other++) {
		double ns = cuda_predict_ns(&costs[other], other, shape);
		double limit = other == KVIO_COPY_KERNEL ? KERNEL_WINS_BY * best : best;

		if (ns < limit && can(&costs[other], other, shape)) {
			best = ns;
			way = other;
		}
	}
	return way;
}

/* In calls of cuMemcpyAsync: the batched call is worth more than four of them, a rectangle one and
 * a half; the kernel is not taken unseen. */
void cuda_rule_of_thumb(struct kvio_copy_cost costs[KVIO_NUM_COPY_WAYS])
{
	static const double fixed[] = { 0, 4.5, 0, 1e9 }, copy[] = { 1, 0.01, 1.5, 1 };

	for (uint32_t way = 0; way < KVIO_NUM_COPY_WAYS; way++)
		costs[way] = (struct kvio_copy_cost){
			.fixed_ns = 1000 * fixed[way], .copy_ns = 1000 * copy[way],
			.there = costs[way].there,
		};
}

/* ---- from times ---- */

const struct cuda_sample cuda_samples[CUDA_NUM_SAMPLES] = {
	{ 1, 1, 4 << 10 }, { 256, 1, 4 << 10 }, { 32, 1, 256 << 10 },
};
const struct cuda_sample cuda_strided_samples[CUDA_NUM_SAMPLES] = {
	{ 1, 2, 4 << 10 }, { 1, 256, 4 << 10 }, { 1, 32, 256 << 10 }, { 16, 16, 4 << 10 },
};

static double at_least_0(double ns)
{
	return ns > 0 ? ns : 0;
}

/* A sample holds so many pieces, or rows. */
static double pieces(const struct cuda_sample *sample)
{
	return (double)sample->calls * sample->rows;
}

/* The first sample is small, the second has many pieces and the third many bytes: their
 * differences give a time a piece (or row) and a time a byte. */
static void solve(const struct cuda_sample *sample, const double *ns, double *piece, double *byte)
{
	double many = pieces(&sample[1]) - pieces(&sample[0]);
	double few = pieces(&sample[2]) - pieces(&sample[0]);
	double small = pieces(&sample[1]) * (double)sample[1].width -
		       pieces(&sample[0]) * (double)sample[0].width;
	double large = pieces(&sample[2]) * (double)sample[2].width -
		       pieces(&sample[0]) * (double)sample[0].width;

	*piece = at_least_0(((ns[1] - ns[0]) * large - (ns[2] - ns[0]) * small) /
			    (many * large - few * small));
	*byte = at_least_0((ns[2] - ns[0] - few * *piece) / large);
}

struct kvio_copy_cost cuda_cost_of(uint32_t way, const double ns[CUDA_NUM_SAMPLES])
{
	const struct cuda_sample *sample = cuda_samples;
	struct kvio_copy_cost cost = { .there = 1 };

	if (way != KVIO_COPY_STRIDED) {
		solve(sample, ns, &cost.copy_ns, &cost.byte_ns);
	} else {
		sample = cuda_strided_samples;
		solve(sample, ns, &cost.row_ns, &cost.byte_ns);
		/* As many rows and bytes as the second one, in more rectangles. */
		cost.copy_ns = at_least_0((ns[3] - ns[1]) / (sample[3].calls - sample[1].calls));
	}
	cost.fixed_ns = at_least_0(ns[0] - cost.copy_ns - pieces(sample) * cost.row_ns -
				   pieces(sample) * (double)sample->width * cost.byte_ns);
	return cost;
}

uint32_t cuda_fewest(const double (*ns)[2], uint32_t count)
{
	double best[2] = { ns[0][0], ns[0][1] };

	for (uint32_t i = 1; i < count; i++)
		for (int side = 0; side < 2; side++)
			best[side] = ns[i][side] < best[side] ? ns[i][side] : best[side];
	for (uint32_t i = 0; i < count; i++)
		if (0.95 * ns[i][0] <= best[0] && 0.95 * ns[i][1] <= best[1])
			return i;
	return count - 1;
}
