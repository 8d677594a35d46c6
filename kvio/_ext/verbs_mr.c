/* SPDX-License-Identifier: Apache-2.0 */
/* Regions: one memory region of the device for each slice on each rail. */
#include "verbs.h"

#ifdef KVIO_HAVE_VERBS

/* kvio's access flags are those of verbs, and no more are asked for than were given. */
static struct ibv_mr *reg_slice(struct verbs_rail *rail, uint64_t addr, uint64_t nbytes,
				uint32_t access)
{
	struct ibv_mr *mr;

	errno = 0;
	mr = verbs.reg_mr(rail->pd, (void *)(uintptr_t)addr, nbytes, (int)access);
	if (!mr && errno == 0)
		errno = ENOMEM;
	return mr;
}

static int dereg_all(struct verbs_region *mine)
{
	while (mine->num_mrs) {
		struct ibv_mr *mr = mine->mrs[mine->num_mrs - 1];
		int rc = mr ? verbs.dereg_mr(mr) : 0;

		if (rc)
			return -abs(rc);
		mine->num_mrs--;
	}
	free(mine->mrs);
	free(mine);
	return 0;
}

int verbs_reg(struct kvio_nic *base, struct kvio_region *region)
{
	struct verbs_nic *nic = (struct verbs_nic *)base;
	uint64_t slices = (region->nbytes - 1) / nic->slice_nbytes + 1;
	struct verbs_region *mine;
	uint32_t total;
	int rc;

	if (slices > UINT32_MAX / KVIO_MAX_RAILS)
		return -EFBIG;
	total = (uint32_t)slices * nic->num_rails;
	mine = calloc(1, sizeof(*mine) + total * sizeof(mine->lkeys[0]));
	if (!mine)
		return -ENOMEM;
	mine->mrs = calloc(total, sizeof(*mine->mrs));
	if (!mine->mrs) {
		free(mine);
		return -ENOMEM;
	}
	mine->slice_nbytes = nic->slice_nbytes;
	mine->num_slices = (uint32_t)slices;
	for (uint32_t i = 0; i < total; i++) {
		uint64_t at = i / nic->num_rails * nic->slice_nbytes;
		uint64_t left = region->nbytes - at;

		mine->mrs[i] = reg_slice(&nic->rails[i % nic->num_rails], region->addr + at,
					 left < nic->slice_nbytes ? left : nic->slice_nbytes,
					 region->access);
		if (!mine->mrs[i]) {
			rc = -errno;
			dereg_all(mine);
			return rc;
		}
		mine->num_mrs = i + 1;
		mine->lkeys[i] = mine->mrs[i]->lkey;
	}
	region->provider = mine;
	return 0;
}

/* If the device refuses half-way the region is of no more use, but it can be tried again. */
int verbs_dereg(struct kvio_nic *base, struct kvio_region *region)
{
	int rc = dereg_all(region->provider);

	if (rc == 0)
		region->provider = NULL;
	return rc;
}

int verbs_rkeys(struct kvio_nic *base, const struct kvio_region *region, uint64_t *slice_nbytes,
		uint32_t *out, uint32_t room)
{
	const struct verbs_region *mine = region->provider;

	*slice_nbytes = mine->slice_nbytes;
	for (uint32_t i = 0; i < mine->num_mrs && i < room; i++)
		out[i] = mine->mrs[i]->rkey;
	return (int)mine->num_mrs;
}

#endif
