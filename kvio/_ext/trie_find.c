// SPDX-License-Identifier: Apache-2.0
/* The index of a store: what is asked of it. */
#include <errno.h>

#include "trie_internal.h"

static bool stored(const struct kvio_index *index, uint32_t id)
{
	return id && !(row_of(index, id)->flags & ROW_GHOST);
}

static uint32_t at_most(uint32_t count, uint32_t most)
{
	return count < most ? count : most;
}

uint32_t kvio_index_match(struct kvio_index *index, const struct kvio_key *keys, uint32_t count)
{
	uint32_t rows[TRIE_BATCH], done = 0, here, i;

	pthread_mutex_lock(&index->lock);
	while (done < count) {
		here = at_most(count - done, TRIE_BATCH);
		trie_lookup_batch(index, keys + done, here, rows);
		for (i = 0; i < here && stored(index, rows[i]); i++)
			;
		done += i;
		if (i < here)
			break;
	}
	pthread_mutex_unlock(&index->lock);
	return done;
}

static void touch_place(struct kvio_index *index, uint32_t id, uint32_t now_s)
{
	const struct row *row = row_of(index, id);
	struct segment *segment = &index->segments[row->segment];

	if (segment->used_s < now_s)
		segment->used_s = now_s;
	if (is_own(row))
		trie_lru_touch(index, id);
}

uint32_t kvio_index_find(struct kvio_index *index, const struct kvio_key *keys, uint32_t count,
			 uint32_t now_s, struct kvio_block_io *out)
{
	uint32_t rows[TRIE_BATCH], found = 0;

	pthread_mutex_lock(&index->lock);
	for (uint32_t i = 0; i < count; i++) {
		uint32_t id;

		if (i % TRIE_BATCH == 0)
			trie_lookup_batch(index, keys + i, at_most(count - i, TRIE_BATCH), rows);
		id = rows[i % TRIE_BATCH];
		memset(&out[i], 0, sizeof(out[i]));
		memcpy(out[i].key, keys[i].key, 16);
		memcpy(out[i].parent, keys[i].parent, 16);
		out[i].status = -ENOENT;
		if (!stored(index, id))
			continue;
		out[i].addr = id;		/* until it is touched */
		out[i].status = -EINPROGRESS;
		trie_describe(row_of(index, id), &out[i]);
		found++;
	}
	for (uint32_t i = count; i-- > 0;) {	/* the chain's end first: it ends up colder */
		if (now_s && out[i].addr)
			touch_place(index, (uint32_t)out[i].addr, now_s);
		out[i].addr = 0;
	}
	pthread_mutex_unlock(&index->lock);
	return found;
}

uint32_t kvio_index_touch(struct kvio_index *index, const struct kvio_key *keys, uint32_t count,
			  uint32_t now_s)
{
	uint32_t rows[TRIE_BATCH], touched = 0, here;

	pthread_mutex_lock(&index->lock);
	for (uint32_t left = count; left; left -= here) {
		here = at_most(left, TRIE_BATCH);
		trie_lookup_batch(index, keys + left - here, here, rows);
		for (uint32_t i = here; i-- > 0;) {
			if (!stored(index, rows[i]))
				continue;
			for (uint32_t id = rows[i]; id; id = row_of(index, id)->copy) {
				touch_place(index, id, now_s);
				touched += is_own(row_of(index, id));
			}
		}
	}
	pthread_mutex_unlock(&index->lock);
	return touched;
}

static void pin(struct kvio_index *index, uint32_t id, int by)
{
	struct row *row = row_of(index, id);
	struct side *side = side_of(index, id);
	int64_t pins = (int64_t)side->pins + by;
	bool was = side->pins != 0;

	side->pins = pins < 0 ? 0 : pins > UINT32_MAX ? UINT32_MAX : (uint32_t)pins;
	row->flags = (row->flags & ~ROW_PINNED) | (side->pins ? ROW_PINNED : 0);
	index->stats.pinned += (side->pins != 0) - was;
	if (was)
		trie_maybe_leaf(index, id);
}

uint32_t kvio_index_pin(struct kvio_index *index, const struct kvio_key *keys, uint32_t count,
			int by)
{
	uint32_t rows[TRIE_BATCH], prefix = 0;
	bool gap = false;

	pthread_mutex_lock(&index->lock);
	for (uint32_t i = 0; i < count; i++) {
		if (i % TRIE_BATCH == 0)
			trie_lookup_batch(index, keys + i, at_most(count - i, TRIE_BATCH), rows);
		if (stored(index, rows[i % TRIE_BATCH]))
			pin(index, rows[i % TRIE_BATCH], by);
		else
			gap = true;
		prefix += !gap;
	}
	pthread_mutex_unlock(&index->lock);
	return prefix;
}

void kvio_index_get_stats(struct kvio_index *index, struct kvio_index_stats *out)
{
	pthread_mutex_lock(&index->lock);
	*out = index->stats;
	out->memory_bytes = sizeof(*index) + index->slot_bytes +
			    index->next_row * (sizeof(struct row) + sizeof(struct side)) +
			    (index->bucket_mask + 1) * sizeof(struct bucket) +
			    index->num_segments * sizeof(struct segment);
	pthread_mutex_unlock(&index->lock);
}
