/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVIO_INDEX_H
#define KVIO_INDEX_H
/*
 * The index of a store: which blocks are stored and where. A cache of the segment headers, never
 * the truth. Thread-safe; nothing here calls into Python, does I/O or blocks.
 *
 * Blocks form a trie by parent. A row is a place of a block, or a *ghost*: a key that is known as
 * somebody's parent and is not stored. An *orphan* is a block whose parent is a ghost and no
 * root (kvio_is_root()): no chain can reach it until the ancestor returns.
 *
 * One key may stand in several places (segments of several writers): all are kept, any serves.
 * Every int result is >= 0, or -errno.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvio/block.h"
#include "kvio/ring.h"

struct kvio_index;

struct kvio_index_stats {
	uint64_t blocks;		/* keys that are stored */
	uint64_t places;		/* with further copies */
	uint64_t own_places;		/* in own segments */
	uint64_t orphans;		/* own places of orphans */
	uint64_t ghosts;
	uint64_t pinned;		/* keys */
	uint64_t memory_bytes;
};

int kvio_index_new(struct kvio_index **out);
void kvio_index_free(struct kvio_index *index);	/* NULL is fine */

/* 16 zero bytes, or the mark of root_key(): the parent of a chain's first block. */
bool kvio_is_root(const uint8_t key[16]);

/* Declares a segment (the number that kvio_store_add_segment() gave) before it holds blocks. What
 * names a segment that was never declared, or a slot beyond its end, is -EINVAL. */
int kvio_index_add_segment(struct kvio_index *index, uint32_t segment, uint32_t slots, bool own);

/*
 * Adds places (segment, slot, generation, crc, tokens, flags, key, parent of each block; of the
 * flags only KVIO_BLOCK_DURABLE is kept). A slot that held another block before holds the new one
 * now. Returns how many keys were not stored before. A place that is known already (same slot and
 * generation) changes nothing. New places are the most recently used, those later in `blocks`
 * colder than those before them. -ENOMEM may leave a part of them added.
 */
int64_t kvio_index_insert(struct kvio_index *index, const struct kvio_block_io *blocks,
			  uint32_t count);

/*
 * What some slots of a segment hold now: `blocks` (sorted by slot) are all that is valid among
 * the `count` slots from `first` on; their `segment` is not looked at. What is not there any more
 * leaves the index. Returns how many places were added or removed (a slot whose block changed
 * counts for both).
 */
int64_t kvio_index_replace(struct kvio_index *index, uint32_t segment, uint32_t first,
			   uint32_t count, const struct kvio_block_io *blocks,
			   uint32_t num_blocks);

/* Forgets one place, if its generation is still this one: 1, or 0 if it was not known. */
int kvio_index_remove(struct kvio_index *index, uint32_t segment, uint32_t slot,
		      uint64_t generation);
/* Forgets all places of a segment that was lost or unlinked, and from then on ignores what is
 * inserted there, until it is declared anew; returns how many places there were. */
int64_t kvio_index_drop_segment(struct kvio_index *index, uint32_t segment);

/* How many keys from the first on are stored without a gap. Does not touch. */
uint32_t kvio_index_match(struct kvio_index *index, const struct kvio_key *keys, uint32_t count);
/*
 * A place for each key: out[i].status is -EINPROGRESS, or -ENOENT where it is not stored. Key and
 * parent are those of `keys` either way. With now_s != 0 the places that are found are touched. An
 * own place is preferred to a foreign one. Returns how many were found.
 */
uint32_t kvio_index_find(struct kvio_index *index, const struct kvio_key *keys, uint32_t count,
			 uint32_t now_s, struct kvio_block_io *out);
/* Marks blocks as used at now_s (any clock of whole seconds): those later in `keys` end up
 * colder than those before them, so that a chain is evicted from its end. Unknown keys are
 * ignored. Returns how many own places were touched. */
uint32_t kvio_index_touch(struct kvio_index *index, const struct kvio_key *keys, uint32_t count,
			  uint32_t now_s);

/* Pins keys that are stored (+1) or unpins them (-1): pinned blocks are not evicted. Returns how
 * many keys from the first on were stored (all are treated, those that are not stored ignored).
 * Pins end when the last place of their key leaves the index; there are never fewer than none. */
uint32_t kvio_index_pin(struct kvio_index *index, const struct kvio_key *keys, uint32_t count,
			int by);

/*
 * Chooses up to `count` own places to give up, takes them out of the index and writes them to
 * `out`: orphans first, then the least recently used leaves (blocks that are nobody's stored
 * parent, counting those that this call has taken as gone), then, if only inner blocks are left,
 * the least recently used of these. Never pinned blocks, nor what lies above them. The status of
 * an orphan is 1, of others 0. Returns how many.
 */
int64_t kvio_index_evict(struct kvio_index *index, uint32_t count, struct kvio_block_io *out);

/* Places in the segment, and the youngest now_s at which one of them was found or touched. */
int kvio_index_segment_use(struct kvio_index *index, uint32_t segment, uint64_t *places,
			   uint32_t *used_s);
void kvio_index_get_stats(struct kvio_index *index, struct kvio_index_stats *out);

#endif
