/* SPDX-License-Identifier: Apache-2.0 */
/* Regions: a NIC's own, what it tells other processes of them, and what those tell us of theirs. */
#include <sys/random.h>

#include "nic_impl.h"

/* ---- ours ---- */

/*
 * Generations start at random and rise over all NICs of the process: a key is never repeated,
 * and one kept from another run is refused instead of naming somebody's memory.
 */
static uint64_t next_generation(void)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	static uint64_t generation;
	uint64_t mine;

	pthread_mutex_lock(&lock);
	if (generation == 0) {
		if (getrandom(&generation, sizeof(generation), GRND_NONBLOCK) !=
		    (ssize_t)sizeof(generation))
			generation = kvio_monotonic_ns();
		generation &= UINT64_MAX >> (KVIO_INDEX_BITS + 1);	/* room to rise */
	}
	mine = ++generation;
	pthread_mutex_unlock(&lock);
	return mine;
}

static int table_grow(struct kvio_table *table, uint32_t length)
{
	struct kvio_region **larger;

	larger = realloc(table->regions, length * sizeof(*larger));
	if (!larger)
		return -ENOMEM;
	memset(larger + table->length, 0, (length - table->length) * sizeof(*larger));
	table->regions = larger;
	table->length = length;
	return 0;
}

/* The first free place, which stays free until it is used. */
static int region_place(struct kvio_table *table, uint32_t *index)
{
	uint32_t length = table->length, larger = 2 * length + 8;

	while (table->first < length && table->regions[table->first])
		table->first++;
	*index = table->first;
	if (table->first < length)
		return 0;
	if (length >= KVIO_MAX_REGIONS)
		return -ENOSPC;
	return table_grow(table, larger < KVIO_MAX_REGIONS ? larger : KVIO_MAX_REGIONS);
}

int kvio_nic_reg(struct kvio_nic *nic, uint64_t addr, uint64_t nbytes, uint32_t access,
		 uint64_t *key)
{
	struct kvio_region *region;
	uint32_t index = 0;
	int rc;

	if (addr == 0 || nbytes == 0 || addr + nbytes < addr)
		return -EINVAL;
	if (access & ~(uint32_t)(KVIO_LOCAL_WRITE | KVIO_REMOTE_WRITE | KVIO_REMOTE_READ))
		return -EINVAL;
	if ((access & KVIO_REMOTE_WRITE) && !(access & KVIO_LOCAL_WRITE))
		return -EINVAL;		/* as in verbs */
	region = calloc(1, sizeof(*region));
	if (!region)
		return -ENOMEM;
	kvio_lock(nic);
	rc = region_place(&nic->table, &index);
	if (rc == 0) {
		*region = (struct kvio_region){
			.addr = addr, .nbytes = nbytes, .access = access,
			.key = next_generation() << KVIO_INDEX_BITS | index,
		};
		rc = nic->ops->reg(nic, region);
	}
	if (rc == 0) {
		region->born = ++nic->domain->births;
		nic->table.regions[index] = region;
		*key = region->key;
	}
	kvio_unlock(nic);
	if (rc < 0)
		free(region);
	return rc;
}

int kvio_region_dereg_locked(struct kvio_nic *nic, uint64_t key)
{
	struct kvio_region *region = kvio_region_find(&nic->table, key);
	uint32_t index;
	int rc;

	if (!region)
		return -ENOENT;
	if (region->holds)
		return -EBUSY;
	rc = nic->ops->dereg(nic, region);
	if (rc < 0)
		return rc;
	index = (uint32_t)key & KVIO_INDEX_MASK;
	nic->table.regions[index] = NULL;
	if (index < nic->table.first)
		nic->table.first = index;
	free(region);
	return 0;
}

int kvio_nic_dereg(struct kvio_nic *nic, uint64_t key)
{
	int rc;

	kvio_lock(nic);
	rc = kvio_region_dereg_locked(nic, key);
	kvio_unlock(nic);
	return rc;
}

int kvio_nic_names(struct kvio_nic *nic, uint64_t key)
{
	int named = 0;

	kvio_lock(nic);
	for (uint32_t slot = 0; slot < nic->num_batches && !named; slot++) {
		const struct kvio_batch *batch = nic->batches[slot];

		for (uint32_t i = 0; batch && i < batch->num_holds; i++)
			named |= batch->holds[i].key == key;
	}
	kvio_unlock(nic);
	return named;
}

/* ---- what others are told ---- */

int64_t kvio_nic_describe(struct kvio_nic *nic, uint64_t key, void *out, size_t room)
{
	const struct kvio_region *region;
	struct kvio_region_ad ad;
	int64_t rc = -ENOENT;
	int count = 0;

	kvio_lock(nic);
	region = kvio_region_find(&nic->table, key);
	if (region && !(region->access & (KVIO_REMOTE_READ | KVIO_REMOTE_WRITE))) {
		rc = -EACCES;
	} else if (region) {
		ad = (struct kvio_region_ad){
			.key = key, .addr = region->addr, .nbytes = region->nbytes,
			.access = region->access, .slice_nbytes = region->nbytes,
		};
		if (nic->ops->rkeys)
			count = nic->ops->rkeys(nic, region, &ad.slice_nbytes, NULL, 0);
		rc = count < 0 ? count : (int64_t)(sizeof(ad) + (size_t)count * sizeof(uint32_t));
	}
	if (rc > 0 && (size_t)rc > room) {
		rc = -ENOSPC;
	} else if (rc > 0) {
		ad.num_rkeys = (uint32_t)count;
		memcpy(out, &ad, sizeof(ad));
		if (count)
			nic->ops->rkeys(nic, region, &ad.slice_nbytes,
					(uint32_t *)((char *)out + sizeof(ad)), (uint32_t)count);
	}
	kvio_unlock(nic);
	return rc;
}

/* ---- and what they tell us ---- */

int kvio_far_open(struct kvio_nic *nic, uint32_t num_rails, struct kvio_far **out)
{
	struct kvio_far *far = calloc(1, sizeof(*far));
	int rc = 0;

	if (!far)
		return -ENOMEM;
	far->nic = nic;
	far->num_rails = num_rails;
	if (nic->ops->far_open) {
		kvio_lock(nic);
		rc = nic->ops->far_open(far);
		kvio_unlock(nic);
	}
	if (rc < 0)
		free(far);
	else
		*out = far;
	return rc;
}

/* Is what came in a description of a region, and of this many rails? */
static bool is_sound(const struct kvio_far *far, const struct kvio_region_ad *ad, size_t nbytes)
{
	uint64_t slices;

	if (ad->key == 0 || ad->addr == 0 || ad->nbytes == 0 || ad->addr + ad->nbytes < ad->addr ||
	    ad->slice_nbytes == 0 || ((uint32_t)ad->key & KVIO_INDEX_MASK) >= KVIO_MAX_REGIONS ||
	    ad->access & ~(uint32_t)(KVIO_LOCAL_WRITE | KVIO_REMOTE_WRITE | KVIO_REMOTE_READ))
		return false;
	slices = (ad->nbytes - 1) / ad->slice_nbytes + 1;
	return slices <= UINT32_MAX / KVIO_MAX_RAILS && ad->num_rkeys == slices * far->num_rails &&
	       nbytes == sizeof(*ad) + (size_t)ad->num_rkeys * sizeof(uint32_t);
}

static struct kvio_region *region_from(const struct kvio_region_ad *ad, const void *rkeys,
				       const void *mapping)
{
	size_t nbytes = (size_t)ad->num_rkeys * sizeof(uint32_t);
	struct kvio_region *region = calloc(1, sizeof(*region));
	struct kvio_rkeys *keys = malloc(sizeof(*keys) + nbytes);

	if (!region || !keys) {
		free(region);
		free(keys);
		return NULL;
	}
	keys->slice_nbytes = ad->slice_nbytes;
	keys->mapping = mapping;
	keys->is_private = !mapping;
	keys->num_rkeys = ad->num_rkeys;
	memcpy(keys->rkeys, rkeys, nbytes);
	*region = (struct kvio_region){
		.addr = ad->addr, .nbytes = ad->nbytes, .key = ad->key, .access = ad->access,
		.provider = keys,
	};
	return region;
}

int kvio_far_add(struct kvio_far *far, const void *bytes, size_t nbytes, const void *mapping)
{
	struct kvio_region *region;
	struct kvio_region_ad ad;
	uint32_t index;
	int rc = 0;

	if (nbytes < sizeof(ad))
		return -EINVAL;
	memcpy(&ad, bytes, sizeof(ad));
	if (!is_sound(far, &ad, nbytes))
		return -EINVAL;
	region = region_from(&ad, (const char *)bytes + sizeof(ad), mapping);
	if (!region)
		return -ENOMEM;
	index = (uint32_t)ad.key & KVIO_INDEX_MASK;
	kvio_lock(far->nic);
	if (index >= far->table.length)
		rc = table_grow(&far->table, index < 8 ? 8 : 2 * index);
	else if (far->table.regions[index])
		rc = -EEXIST;
	if (rc == 0) {
		region->born = ++far->nic->domain->births;
		far->table.regions[index] = region;
	}
	kvio_unlock(far->nic);
	if (rc < 0) {
		free(region->provider);
		free(region);
	}
	return rc;
}

int kvio_far_remove(struct kvio_far *far, uint64_t key)
{
	struct kvio_region *region;
	int rc = 0;

	kvio_lock(far->nic);
	region = kvio_region_find(&far->table, key);
	if (!region)
		rc = -ENOENT;
	else if (region->holds)
		rc = -EBUSY;
	else
		far->table.regions[(uint32_t)key & KVIO_INDEX_MASK] = NULL;
	kvio_unlock(far->nic);
	if (rc == 0) {
		free(region->provider);
		free(region);
	}
	return rc;
}

int kvio_far_close(struct kvio_far *far)
{
	struct kvio_nic *nic = far->nic;
	bool busy;

	kvio_lock(nic);
	busy = far->qps != 0;
	if (!busy && nic->ops->far_close)
		nic->ops->far_close(far);
	kvio_unlock(nic);
	if (busy)
		return -EBUSY;
	for (uint32_t i = 0; i < far->table.length; i++) {
		if (!far->table.regions[i])
			continue;
		free(far->table.regions[i]->provider);
		free(far->table.regions[i]);
	}
	free(far->table.regions);
	free(far);
	return 0;
}
