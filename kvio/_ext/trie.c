// SPDX-License-Identifier: Apache-2.0
/* The index of a store, include/kvio/index.h: places come and go. */
#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>

#include "trie_internal.h"

#define PIECE 4096u			/* blocks for which memory is reserved at once */
#define AHEAD 16u			/* blocks whose lines are fetched before their turn */

bool kvio_is_root(const uint8_t key[16])
{
	static const uint8_t zeros[16];

	return !memcmp(key, "root", 4) || !memcmp(key, zeros, 16);
}

int kvio_index_new(struct kvio_index **out)
{
	struct kvio_index *index = trie_map(sizeof(*index));

	*out = NULL;
	if (!index)
		return -ENOMEM;
	if (getrandom(index->seed, sizeof(index->seed), 0) != sizeof(index->seed)) {
		trie_unmap(index, sizeof(*index));
		return -EIO;
	}
	pthread_mutex_init(&index->lock, NULL);
	index->next_row = FIRST_ROW;
	if (trie_reserve(index, 1) < 0) {
		kvio_index_free(index);
		return -ENOMEM;
	}
	row_of(index, GHOSTS)->colder = row_of(index, GHOSTS)->hotter = GHOSTS;
	*out = index;
	return 0;
}

void kvio_index_free(struct kvio_index *index)
{
	if (!index)
		return;
	for (uint32_t i = 0; i < index->num_chunks; i++)
		trie_unmap(index->chunks[i], sizeof(struct chunk));
	if (index->buckets)
		trie_unmap(index->buckets, (index->bucket_mask + 1) * sizeof(*index->buckets));
	for (uint32_t i = 0; i < index->num_segments; i++)
		free(index->segments[i].rows);
	free(index->segments);
	pthread_mutex_destroy(&index->lock);
	trie_unmap(index, sizeof(*index));
}

/* ---- segments ---- */

static struct segment *segment_of(const struct kvio_index *index, uint32_t number)
{
	if (number >= index->num_segments ||
	    index->segments[number].state == SEGMENT_UNKNOWN)
		return NULL;
	return &index->segments[number];
}

static int add_segment(struct kvio_index *index, uint32_t number, uint32_t slots, bool own)
{
	struct segment *segment = segment_of(index, number), *larger;
	uint64_t count = index->num_segments ? index->num_segments : 16;

	if (slots == 0 || number == UINT32_MAX || (segment && segment->state == SEGMENT_OPEN))
		return -EINVAL;
	if (number >= index->num_segments) {
		while (count <= number)
			count *= 2;
		larger = realloc(index->segments, count * sizeof(*larger));
		if (!larger)
			return -ENOMEM;
		memset(larger + index->num_segments, 0,
		       (count - index->num_segments) * sizeof(*larger));
		index->segments = larger;
		index->num_segments = (uint32_t)count;
	}
	index->segments[number] = (struct segment) {
		.slots = slots, .own = own, .state = SEGMENT_OPEN };
	return 0;
}

int kvio_index_add_segment(struct kvio_index *index, uint32_t segment, uint32_t slots, bool own)
{
	int rc;

	pthread_mutex_lock(&index->lock);
	rc = add_segment(index, segment, slots, own);
	pthread_mutex_unlock(&index->lock);
	return rc;
}

int kvio_index_segment_use(struct kvio_index *index, uint32_t number, uint64_t *places,
			   uint32_t *used_s)
{
	const struct segment *segment;

	pthread_mutex_lock(&index->lock);
	segment = segment_of(index, number);
	*places = segment ? segment->places : 0;
	*used_s = segment ? segment->used_s : 0;
	pthread_mutex_unlock(&index->lock);
	return segment ? 0 : -EINVAL;
}

/* ---- one place ---- */

void trie_describe(const struct row *row, struct kvio_block_io *out)
{
	out->generation = row->generation;
	out->segment = row->segment;
	out->slot = row->slot;
	out->crc = row->crc;
	out->tokens = row->tokens;
	out->flags = row->flags & ROW_DURABLE ? KVIO_BLOCK_DURABLE : 0;
	memcpy(out->key, row->key, 16);
}

/* Takes the place out of the lists and out of its slot; its row is left without one. */
static void unlink_place(struct kvio_index *index, uint32_t id)
{
	struct row *row = row_of(index, id);
	struct segment *segment = &index->segments[row->segment];

	segment->rows[row->slot] = NIL;
	segment->places--;
	index->stats.places--;
	trie_child_unlink(index, id);
	if (is_own(row)) {
		trie_lru_unlink(index, id);
		index->stats.own_places--;
	}
	row->flags &= ROW_KEYS;
}

/* Takes the next place of a key out of its chain: an own one if there is one. */
static uint32_t pop_copy(struct kvio_index *index, struct row *head)
{
	uint32_t *at = &head->copy, id;

	for (uint32_t *own = at; *own; own = &row_of(index, *own)->copy)
		if (is_own(row_of(index, *own))) {
			at = own;
			break;
		}
	id = *at;
	*at = row_of(index, id)->copy;
	return id;
}

void trie_remove_place(struct kvio_index *index, uint32_t id)
{
	struct row *row = row_of(index, id);

	unlink_place(index, id);
	if (row->flags & ROW_COPY) {
		uint32_t *at = &row_of(index, trie_head_of(index, id))->copy;

		while (*at != id)
			at = &row_of(index, *at)->copy;
		*at = row->copy;
		trie_free_row(index, id);
	} else if (row->copy) {
		uint32_t copy = pop_copy(index, row);

		trie_move_place(index, copy, id);
		trie_free_row(index, copy);
	} else {
		index->stats.blocks--;
		index->stats.pinned -= row->flags & ROW_PINNED ? 1 : 0;
		side_of(index, id)->pins = 0;
		row->flags = 0;
		if (row->child) {
			row->flags = ROW_GHOST;
			index->stats.ghosts++;
			trie_children_orphaned(index, id);
		} else {
			trie_leave(index, id);
			trie_free_row(index, id);
		}
	}
}

/* The row for a further place of a key: the head if it is an own one, so that own ones are found
 * first. */
static uint32_t add_copy(struct kvio_index *index, uint32_t head, bool own)
{
	uint32_t id = trie_new_row(index, row_of(index, head)->key);
	struct row *row = row_of(index, id), *first = row_of(index, head);

	row->flags = ROW_COPY;
	row->copy = first->copy;
	first->copy = id;
	if (!own)
		return id;
	trie_move_place(index, head, id);
	return head;
}

/* A row without a place, for a place of `key`; adds to *fresh if it was not stored before. */
static uint32_t row_for(struct kvio_index *index, const uint8_t *key, bool own, uint64_t *fresh)
{
	uint32_t id = trie_lookup(index, key, hash_key(index, key));

	if (id && !(row_of(index, id)->flags & ROW_GHOST))
		return add_copy(index, id, own);
	if (id) {
		trie_children_saved(index, id);
		row_of(index, id)->flags = 0;
		index->stats.ghosts--;
	} else {
		id = trie_new_row(index, key);
		trie_enter(index, id);
	}
	index->stats.blocks++;
	++*fresh;
	return id;
}

static uint32_t parent_for(struct kvio_index *index, const uint8_t *key)
{
	uint32_t id = trie_lookup(index, key, hash_key(index, key));

	if (!id) {
		id = trie_new_row(index, key);
		row_of(index, id)->flags = ROW_GHOST;
		trie_enter(index, id);
		index->stats.ghosts++;
	}
	return id;
}

/* Two rows are reserved. Returns how many places were added and removed: 0, 1 or 2. */
static int add_place(struct kvio_index *index, const struct kvio_block_io *block,
		     uint64_t *fresh)
{
	struct segment *segment = &index->segments[block->segment];
	uint32_t before = segment->rows[block->slot], id;
	struct row *row;

	if (before && row_of(index, before)->generation == block->generation)
		return 0;
	if (before)
		trie_remove_place(index, before);
	id = row_for(index, block->key, segment->own, fresh);
	row = row_of(index, id);
	row->generation = block->generation;
	row->segment = block->segment;
	row->slot = block->slot;
	row->crc = block->crc;
	row->tokens = block->tokens >> TOKENS_BITS ? (1u << TOKENS_BITS) - 1 : block->tokens;
	row->flags = (row->flags & ROW_KEYS) | (segment->own ? ROW_OWN : 0) |
		     (block->flags & KVIO_BLOCK_DURABLE ? ROW_DURABLE : 0);
	segment->rows[block->slot] = id;
	segment->places++;
	index->stats.places++;
	row->parent = parent_for(index, block->parent);
	trie_child_link(index, id);
	if (segment->own) {
		index->stats.own_places++;
		trie_lru_link(index, id, index->anchor);
		index->anchor = id;
	}
	return before ? 2 : 1;
}

/* Room for `count` places more, and for the slots' rows. */
static int reserve_places(struct kvio_index *index, struct segment *segment, uint32_t count)
{
	if (!segment->rows) {
		segment->rows = calloc(segment->slots, sizeof(*segment->rows));
		if (!segment->rows)
			return -ENOMEM;
		index->slot_bytes += segment->slots * sizeof(*segment->rows);
	}
	return trie_reserve(index, 2 * count);
}

/* ---- many places ---- */

/* A parent that is not the block before: its bucket and its row are misses as well. */
static void prefetch(const struct kvio_index *index, const struct kvio_block_io *blocks,
		     uint32_t left)
{
	if (left > AHEAD) {
		trie_prefetch(index, blocks[AHEAD].key);
		if (memcmp(blocks[AHEAD].parent, blocks[AHEAD - 1].key, 16))
			trie_prefetch(index, blocks[AHEAD].parent);
	}
	if (left > AHEAD / 2 &&
	    memcmp(blocks[AHEAD / 2].parent, blocks[AHEAD / 2 - 1].key, 16))
		trie_prefetch_row(index, hash_key(index, blocks[AHEAD / 2].parent));
}

static int check_blocks(const struct kvio_index *index, const struct kvio_block_io *blocks,
			uint32_t count)
{
	for (uint32_t i = 0; i < count; i++) {
		const struct segment *segment = segment_of(index, blocks[i].segment);

		if (!segment || blocks[i].slot >= segment->slots)
			return -EINVAL;
	}
	return 0;
}

static int64_t insert(struct kvio_index *index, const struct kvio_block_io *blocks,
		      uint32_t count)
{
	uint64_t fresh = 0;
	int rc = check_blocks(index, blocks, count);

	index->anchor = LRU;
	for (uint32_t i = 0; i < count && rc >= 0; i++) {
		struct segment *segment = &index->segments[blocks[i].segment];

		if (i % PIECE == 0)
			rc = trie_reserve(index, 2 * (count - i < PIECE ? count - i : PIECE));
		if (rc >= 0 && !segment->rows && segment->state == SEGMENT_OPEN)
			rc = reserve_places(index, segment, 0);
		if (rc < 0)
			break;
		prefetch(index, blocks + i, count - i);
		if (segment->state == SEGMENT_OPEN)
			add_place(index, &blocks[i], &fresh);
	}
	return rc < 0 ? rc : (int64_t)fresh;
}

int64_t kvio_index_insert(struct kvio_index *index, const struct kvio_block_io *blocks,
			  uint32_t count)
{
	int64_t rc;

	pthread_mutex_lock(&index->lock);
	rc = insert(index, blocks, count);
	pthread_mutex_unlock(&index->lock);
	return rc;
}

static bool sorted_within(const struct kvio_block_io *blocks, uint32_t num_blocks, uint32_t first,
			  uint32_t count)
{
	for (uint32_t i = 0; i < num_blocks; i++)
		if (blocks[i].slot < first || blocks[i].slot - first >= count ||
		    (i && blocks[i].slot <= blocks[i - 1].slot))
			return false;
	return true;
}

static int64_t replace(struct kvio_index *index, uint32_t number, uint32_t first, uint32_t count,
		       const struct kvio_block_io *blocks, uint32_t num_blocks)
{
	struct segment *segment = segment_of(index, number);
	uint64_t changed = 0, fresh = 0;
	uint32_t next = 0;
	int rc;

	if (!segment || first > segment->slots || count > segment->slots - first ||
	    !sorted_within(blocks, num_blocks, first, count))
		return -EINVAL;
	if (segment->state != SEGMENT_OPEN || (!segment->rows && !num_blocks))
		return 0;
	index->anchor = LRU;
	for (uint32_t slot = first; slot < first + count; slot++) {
		if ((slot - first) % PIECE == 0) {
			rc = reserve_places(index, segment, num_blocks - next < PIECE ?
					    num_blocks - next : PIECE);
			if (rc < 0)
				return rc;
		}
		if (next < num_blocks && blocks[next].slot == slot) {
			struct kvio_block_io block = blocks[next];

			prefetch(index, blocks + next, num_blocks - next);
			next++;
			block.segment = number;
			changed += add_place(index, &block, &fresh);
		} else if (segment->rows[slot]) {
			trie_remove_place(index, segment->rows[slot]);
			changed++;
		}
	}
	return (int64_t)changed;
}

int64_t kvio_index_replace(struct kvio_index *index, uint32_t segment, uint32_t first,
			   uint32_t count, const struct kvio_block_io *blocks,
			   uint32_t num_blocks)
{
	int64_t rc;

	pthread_mutex_lock(&index->lock);
	rc = replace(index, segment, first, count, blocks, num_blocks);
	pthread_mutex_unlock(&index->lock);
	return rc;
}

int kvio_index_remove(struct kvio_index *index, uint32_t number, uint32_t slot,
		      uint64_t generation)
{
	struct segment *segment;
	uint32_t id = NIL;

	pthread_mutex_lock(&index->lock);
	segment = segment_of(index, number);
	if (segment && segment->rows && slot < segment->slots)
		id = segment->rows[slot];
	if (id && row_of(index, id)->generation != generation)
		id = NIL;
	if (id)
		trie_remove_place(index, id);
	pthread_mutex_unlock(&index->lock);
	return id != NIL;
}

int64_t kvio_index_drop_segment(struct kvio_index *index, uint32_t number)
{
	struct segment *segment;
	int64_t dropped = -EINVAL;

	pthread_mutex_lock(&index->lock);
	segment = segment_of(index, number);
	if (segment) {
		dropped = (int64_t)segment->places;
		for (uint32_t slot = 0; segment->places; slot++)
			if (segment->rows[slot])
				trie_remove_place(index, segment->rows[slot]);
		if (segment->rows)
			index->slot_bytes -= segment->slots * sizeof(*segment->rows);
		free(segment->rows);
		segment->rows = NULL;
		segment->state = SEGMENT_DROPPED;
	}
	pthread_mutex_unlock(&index->lock);
	return dropped;
}
