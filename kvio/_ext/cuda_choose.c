/* SPDX-License-Identifier: Apache-2.0 */
/* Which way a segment takes: the cheapest by what each was measured to cost. */
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
