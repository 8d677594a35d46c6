/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVIO_TRIE_INTERNAL_H
#define KVIO_TRIE_INTERNAL_H
/*
 * The index's memory. A row is a place of a key, or a ghost; its id never changes meaning while it
 * lives. It is a cache line, which is all that a look-up at random touches, and 8 bytes aside.
 * A key's first row, its *head*, is what the hash table knows: it also carries what belongs to the
 * key (children, pins, copies). Where a head loses its place while copies are left, one of them
 * moves into the head, so that children never change parents.
 */
#include <pthread.h>
#include <string.h>

#include "kvio/index.h"

#define CHUNK_BITS 18			/* rows: 9 huge pages a chunk */
#define CHUNK_ROWS (1u << CHUNK_BITS)
#define MAX_CHUNKS (1u << (32 - CHUNK_BITS))
#define HUGE_PAGE (2u << 20)

/* Rows that are no blocks: ends of the two circular lists. NIL is also "none". */
enum { NIL = 0, LRU = NIL, GHOSTS = 1, FIRST_ROW = 2 };

enum row_flags {
	ROW_GHOST = 1,
	ROW_COPY = 2,			/* not the head of its key */
	ROW_OWN = 4,
	ROW_DURABLE = 8,
	ROW_BEHIND = 16,		/* colder than `cursor`, and was no leaf or pinned */
	ROW_FREE = 32,
	ROW_PINNED = 64,		/* head: `pins` of its side is not 0 */
};
#define ROW_KEYS (ROW_COPY | ROW_PINNED)	/* of the key and its row, not of the place */
#define TOKENS_BITS 24

struct row {
	uint8_t key[16];
	uint64_t generation;
	uint32_t segment;
	uint32_t slot;
	uint32_t crc;
	uint32_t tokens : TOKENS_BITS;
	uint32_t flags : 32 - TOKENS_BITS;
	uint32_t copy;			/* next place of the same key; next free row */
	uint32_t parent;		/* head or ghost; NIL for a ghost */
	uint32_t sibling_next;		/* circular; own places before foreign ones */
	uint32_t child;			/* first place whose parent this key is */
	uint32_t colder, hotter;	/* own places: LRU; ghosts with own children: GHOSTS */
};
struct side {
	uint32_t sibling_prev;
	uint32_t pins;
};
struct chunk {
	struct row rows[CHUNK_ROWS];
	struct side sides[CHUNK_ROWS];
};
_Static_assert(sizeof(struct row) == 64, "one cache line");
_Static_assert(sizeof(struct chunk) % HUGE_PAGE == 0, "nothing of a huge page is left over");

/* A cache line: tags (0: free) are compared before any row is looked at. */
#define BUCKET_ROWS 12
struct bucket {
	uint8_t tags[BUCKET_ROWS];
	uint8_t overflow;		/* entries that went on to later buckets; 255 stays */
	uint8_t unused[3];
	uint32_t rows[BUCKET_ROWS];
};
_Static_assert(sizeof(struct bucket) == 64, "one cache line");

enum segment_state { SEGMENT_UNKNOWN, SEGMENT_OPEN, SEGMENT_DROPPED };
struct segment {
	uint32_t *rows;			/* of each slot; made when the first block comes */
	uint64_t places;
	uint32_t slots;
	uint32_t used_s;
	uint8_t state;			/* enum segment_state */
	uint8_t own;
};

struct kvio_index {
	pthread_mutex_t lock;
	uint64_t seed[2];
	struct chunk *chunks[MAX_CHUNKS];
	uint32_t num_chunks;
	uint32_t next_row;		/* never used before; FIRST_ROW first */
	uint32_t free_row;		/* list through `copy` */
	uint32_t num_free;
	struct bucket *buckets;
	uint64_t bucket_mask;
	uint64_t entries, max_entries;
	struct segment *segments;
	uint32_t num_segments;
	uint64_t slot_bytes;
	/* Everything colder than `cursor` is ROW_BEHIND; LRU: all is. New places go below `anchor`,
	 * so that a batch's later ones are colder. `leaf` is a row behind that has become one. */
	uint32_t cursor, anchor, leaf;
	bool evicting, rescan;
	struct kvio_index_stats stats;
};

static inline struct row *row_of(const struct kvio_index *index, uint32_t id)
{
	return &index->chunks[id >> CHUNK_BITS]->rows[id & (CHUNK_ROWS - 1)];
}

static inline struct side *side_of(const struct kvio_index *index, uint32_t id)
{
	return &index->chunks[id >> CHUNK_BITS]->sides[id & (CHUNK_ROWS - 1)];
}

/* All 16 bytes, since keys that users make up may differ in any of them. */
static inline uint64_t hash_key(const struct kvio_index *index, const uint8_t *key)
{
	uint64_t words[2];
	unsigned __int128 product;

	memcpy(words, key, 16);
	product = (unsigned __int128)(words[0] ^ index->seed[0]) * (words[1] ^ index->seed[1]);
	words[0] = (uint64_t)product ^ (uint64_t)(product >> 64);
	product = (unsigned __int128)words[0] * 0x9e3779b97f4a7c15ull;
	return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline struct bucket *bucket_of(const struct kvio_index *index, uint64_t hash)
{
	return &index->buckets[hash & index->bucket_mask];
}

static inline bool is_own(const struct row *row)
{
	return row->flags & ROW_OWN;
}

/* trie_rows.c: memory and the hash table. Inserting needs a reserve before. */
void *trie_map(uint64_t nbytes);
void trie_unmap(void *memory, uint64_t nbytes);
int trie_reserve(struct kvio_index *index, uint32_t count);
uint32_t trie_new_row(struct kvio_index *index, const uint8_t *key);
void trie_free_row(struct kvio_index *index, uint32_t id);
/* Head or ghost of a key, or NIL. */
uint32_t trie_lookup(const struct kvio_index *index, const uint8_t *key, uint64_t hash);
/* Fetches the line of a key's bucket; of the row that it seems to lead to. */
static inline void trie_prefetch(const struct kvio_index *index, const uint8_t *key)
{
	__builtin_prefetch(bucket_of(index, hash_key(index, key)));
}
uint32_t trie_prefetch_row(const struct kvio_index *index, uint64_t hash);
/* trie_lookup() of up to TRIE_BATCH keys at once, whose lines are fetched together. */
#define TRIE_BATCH 64u
void trie_lookup_batch(const struct kvio_index *index, const struct kvio_key *keys,
		       uint32_t count, uint32_t *out);
void trie_enter(struct kvio_index *index, uint32_t id);
void trie_leave(struct kvio_index *index, uint32_t id);

static inline uint32_t trie_head_of(const struct kvio_index *index, uint32_t id)
{
	const struct row *row = row_of(index, id);

	return row->flags & ROW_COPY ? trie_lookup(index, row->key, hash_key(index, row->key)) : id;
}

/* trie_links.c: the lists. */
void trie_lru_link(struct kvio_index *index, uint32_t id, uint32_t hotter);
void trie_lru_unlink(struct kvio_index *index, uint32_t id);
void trie_lru_touch(struct kvio_index *index, uint32_t id);
void trie_child_link(struct kvio_index *index, uint32_t id);
/* A parent that was a ghost for this child alone is freed. */
void trie_child_unlink(struct kvio_index *index, uint32_t id);
/* The children of a key that came or went. */
void trie_children_saved(struct kvio_index *index, uint32_t id);
void trie_children_orphaned(struct kvio_index *index, uint32_t id);
/* A key has no children, or no pins, any more: what the scan passed over may be a leaf now. */
void trie_maybe_leaf(struct kvio_index *index, uint32_t head);
/* The place in `from` goes to row `to`, which has none. */
void trie_move_place(struct kvio_index *index, uint32_t from, uint32_t to);

/* trie.c */
void trie_remove_place(struct kvio_index *index, uint32_t id);
void trie_describe(const struct row *row, struct kvio_block_io *out);

#endif
