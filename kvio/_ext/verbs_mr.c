/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Regions: one memory region of the device for each slice on each rail. A GPU's memory is
 * registered by dma-buf, which the drivers of NIC and GPU have to know; otherwise as if it were
 * the host's, which works where nvidia-peermem is loaded.
 */
#include <unistd.h>

#include "verbs.h"

#ifdef KVIO_HAVE_VERBS

/* kvio's access flags are those of verbs, and no more are asked for than were given. segment: of
 * a GPU, exported; NULL: the host's. */
static struct ibv_mr *reg_slice(struct verbs_rail *rail, uint64_t addr, uint64_t nbytes,
				uint32_t access, const struct verbs_segment *segment)
{
	struct ibv_mr *mr;

	errno = 0;
	if (segment)
		mr = verbs.reg_dmabuf_mr(rail->pd, addr - segment->base, nbytes, addr,
					 segment->fd, (int)access);
	else
		mr = verbs.reg_mr(rail->pd, (void *)(uintptr_t)addr, nbytes, (int)access);
	if (!mr && errno == 0)
		errno = ENOMEM;
	return mr;
}

static int dereg_mrs(struct verbs_region *mine)
{
	while (mine->num_mrs) {
		struct ibv_mr *mr = mine->mrs[mine->num_mrs - 1];
		int rc = mr ? verbs.dereg_mr(mr) : 0;

		if (rc)
			return -abs(rc);
		mine->num_mrs--;
	}
	return 0;
}

static void region_free(struct verbs_region *mine)
{
	free(mine->mrs);
	free(mine);
}

static struct verbs_region *region_new(uint64_t nbytes, uint64_t slice_nbytes, uint32_t num_rails)
{
	uint64_t slices = (nbytes - 1) / slice_nbytes + 1;
	struct verbs_region *mine;

	if (slices > UINT32_MAX / KVIO_MAX_RAILS)
		return NULL;
	mine = calloc(1, sizeof(*mine) + slices * num_rails * sizeof(mine->lkeys[0]));
	if (!mine)
		return NULL;
	mine->mrs = calloc(slices * num_rails, sizeof(*mine->mrs));
	if (!mine->mrs) {
		free(mine);
		return NULL;
	}
	mine->slice_nbytes = slice_nbytes;
	mine->num_slices = (uint32_t)slices;
	return mine;
}

/* One slice on every rail. */
static int reg_on_rails(struct verbs_nic *nic, const struct kvio_region *region,
			struct verbs_region *mine, uint32_t slice,
			const struct verbs_segment *segment)
{
	uint64_t at = slice * mine->slice_nbytes, left = region->nbytes - at;

	for (uint32_t r = 0; r < nic->num_rails; r++) {
		struct ibv_mr *mr = reg_slice(&nic->rails[r], region->addr + at,
					      left < mine->slice_nbytes ? left :
					      mine->slice_nbytes, region->access, segment);

		if (!mr)
			return -errno;
		mine->lkeys[mine->num_mrs] = mr->lkey;
		mine->mrs[mine->num_mrs++] = mr;
	}
	return 0;
}

static int reg_plain(struct verbs_nic *nic, const struct kvio_region *region,
		     struct verbs_region *mine)
{
	int rc = 0;

	for (uint32_t slice = 0; slice < mine->num_slices && rc == 0; slice++)
		rc = reg_on_rails(nic, region, mine, slice, NULL);
	if (rc < 0)
		dereg_mrs(mine);
	return rc;
}

/* ---- a GPU's ---- */

static bool ends_in(const struct verbs_segment *segment, uint64_t addr, uint64_t nbytes)
{
	return addr >= segment->base && nbytes <= segment->nbytes &&
	       addr - segment->base <= segment->nbytes - nbytes;
}

/*
 * How long its slices are. What is in one segment is cut as the host's is. Memory that was mapped
 * together of several (cuMemMap; PyTorch's expandable_segments) is cut where they touch, which
 * takes segments of one size and a region that begins with one: -EXDEV otherwise.
 */
static int gpu_slices(const struct verbs_nic *nic, const struct kvio_region *region,
		      uint64_t *slice_nbytes)
{
	uint64_t end = region->addr + region->nbytes;
	struct verbs_segment first, next;
	int rc = verbs_gpu_segment(region->addr, &first);

	*slice_nbytes = nic->slice_nbytes;
	if (rc < 0 || ends_in(&first, region->addr, region->nbytes))
		return rc;
	*slice_nbytes = first.nbytes;
	if (first.base != region->addr || first.nbytes > nic->slice_nbytes)
		return -EXDEV;
	for (uint64_t at = first.base + first.nbytes; at < end; at += first.nbytes) {
		uint64_t left = end - at < first.nbytes ? end - at : first.nbytes;

		rc = verbs_gpu_segment(at, &next);
		if (rc < 0)
			return rc;
		if (next.base != at || !ends_in(&next, at, left))
			return -EXDEV;
	}
	return 0;
}

/* Each segment is exported once, for all slices in it and all rails: an export takes a window of
 * the GPU's BAR. The device's regions hold the dma-buf, so the descriptor is closed at once. */
static int reg_dma_buf(struct verbs_nic *nic, const struct kvio_region *region,
		       struct verbs_region *mine)
{
	struct verbs_segment segment = { .fd = -1 };
	int rc = verbs.reg_dmabuf_mr ? 0 : -EOPNOTSUPP;

	for (uint32_t slice = 0; slice < mine->num_slices && rc == 0; slice++) {
		uint64_t addr = region->addr + slice * mine->slice_nbytes;

		if (segment.fd < 0 || !ends_in(&segment, addr, 1)) {
			if (segment.fd >= 0)
				close(segment.fd);
			segment.fd = -1;
			rc = verbs_gpu_segment(addr, &segment);
			if (rc == 0)
				rc = verbs_gpu_export(&segment);
		}
		if (rc == 0)
			rc = reg_on_rails(nic, region, mine, slice, &segment);
	}
	if (segment.fd >= 0)
		close(segment.fd);
	if (rc < 0)
		dereg_mrs(mine);
	return rc;
}

/* ---- operations ---- */

int verbs_reg(struct kvio_nic *base, struct kvio_region *region)
{
	struct verbs_nic *nic = (struct verbs_nic *)base;
	bool is_gpu = verbs_gpu_has(region->addr);
	uint64_t slice_nbytes = nic->slice_nbytes;
	struct verbs_region *mine;
	int rc = 0;

	if (is_gpu)
		rc = gpu_slices(nic, region, &slice_nbytes);
	if (rc < 0)
		return rc;
	mine = region_new(region->nbytes, slice_nbytes, nic->num_rails);
	if (!mine)
		return -ENOMEM;
	if (is_gpu)
		rc = reg_dma_buf(nic, region, mine);
	if (!is_gpu || rc < 0)
		rc = reg_plain(nic, region, mine);
	if (rc < 0)
		region_free(mine);
	else
		region->provider = mine;
	return rc;
}

/* If the device refuses half-way the region is of no more use, but it can be tried again. */
int verbs_dereg(struct kvio_nic *base, struct kvio_region *region)
{
	int rc = dereg_mrs(region->provider);

	if (rc == 0) {
		region_free(region->provider);
		region->provider = NULL;
	}
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
