// SPDX-License-Identifier: Apache-2.0
/* Rows of the index and the hash table that finds them. */
#include <errno.h>
#include <sys/mman.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "trie_internal.h"

#define MAX_LOAD 85u			/* per cent; at 10 M keys the table is 76 % full */
#define FIRST_BUCKETS 64u
#define OVERFLOW_STAYS 255

/* Zeroed, on huge pages where it is large: a look-up at random would miss the TLB twice. */
void *trie_map(uint64_t nbytes)
{
	uint64_t slack = nbytes >= HUGE_PAGE ? HUGE_PAGE : 0, before;
	uint8_t *memory = mmap(NULL, nbytes + slack, PROT_READ | PROT_WRITE,
			       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (memory == MAP_FAILED)
		return NULL;
	if (slack) {
		before = -(uintptr_t)memory & (HUGE_PAGE - 1);
		if (before)
			munmap(memory, before);
		if (slack - before)
			munmap(memory + before + nbytes, slack - before);
		memory += before;
		madvise(memory, nbytes, MADV_HUGEPAGE);	/* where there are none: small pages */
	}
	return memory;
}

void trie_unmap(void *memory, uint64_t nbytes)
{
	if (memory)
		munmap(memory, nbytes);
}

/* ---- rows ---- */

uint32_t trie_new_row(struct kvio_index *index, const uint8_t *key)
{
	uint32_t id = index->free_row;
	struct row *row;

	if (id) {
		row = row_of(index, id);
		index->free_row = row->copy;
		index->num_free--;
		memset(row, 0, sizeof(*row));
		*side_of(index, id) = (struct side) { 0 };
	} else {
		id = index->next_row++;
		row = row_of(index, id);
	}
	memcpy(row->key, key, 16);
	return id;
}

void trie_free_row(struct kvio_index *index, uint32_t id)
{
	struct row *row = row_of(index, id);

	row->flags = ROW_FREE;
	row->copy = index->free_row;
	index->free_row = id;
	index->num_free++;
}

/* ---- hash table ---- */

static uint8_t tag_of(uint64_t hash)
{
	return 1 + (uint8_t)((hash >> 56) % 255);
}

/* Bit i: tags[i] is `tag`. Without branches, which a random tag would mislead. */
static uint32_t tag_matches(const struct bucket *bucket, uint8_t tag)
{
	uint32_t matches = 0;

#ifdef __SSE2__
	__m128i tags = _mm_load_si128((const __m128i *)bucket->tags);

	matches = (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(tags, _mm_set1_epi8((char)tag)));
#else
	for (uint32_t i = 0; i < BUCKET_ROWS; i++)
		matches |= (uint32_t)(bucket->tags[i] == tag) << i;
#endif
	return matches & ((1u << BUCKET_ROWS) - 1);
}

static bool same_key(const uint8_t *a, const uint8_t *b)
{
	return !memcmp(a, b, 16);
}

uint32_t trie_lookup(const struct kvio_index *index, const uint8_t *key, uint64_t hash)
{
	uint8_t tag = tag_of(hash);

	for (;; hash++) {
		const struct bucket *bucket = bucket_of(index, hash);
		uint32_t matches = tag_matches(bucket, tag);

		for (; matches; matches &= matches - 1) {
			uint32_t id = bucket->rows[__builtin_ctz(matches)];

			if (same_key(row_of(index, id)->key, key))
				return id;
		}
		if (!bucket->overflow)
			return NIL;
	}
}

/* The first row whose tag fits, or NIL; its line is on its way. */
uint32_t trie_prefetch_row(const struct kvio_index *index, uint64_t hash)
{
	const struct bucket *bucket = bucket_of(index, hash);
	uint32_t matches = tag_matches(bucket, tag_of(hash));
	uint32_t id = matches ? bucket->rows[__builtin_ctz(matches)] : NIL;

	__builtin_prefetch(row_of(index, id));
	return id;
}

/* Two rounds of misses for the whole batch instead of two for each key. */
void trie_lookup_batch(const struct kvio_index *index, const struct kvio_key *keys,
		       uint32_t count, uint32_t *out)
{
	uint64_t hashes[TRIE_BATCH];

	for (uint32_t i = 0; i < count; i++) {
		hashes[i] = hash_key(index, keys[i].key);
		__builtin_prefetch(bucket_of(index, hashes[i]));
	}
	for (uint32_t i = 0; i < count; i++)
		out[i] = trie_prefetch_row(index, hashes[i]);
	for (uint32_t i = 0; i < count; i++)
		if (!out[i] || !same_key(row_of(index, out[i])->key, keys[i].key))
			out[i] = trie_lookup(index, keys[i].key, hashes[i]);
}

static void enter_hashed(struct kvio_index *index, uint32_t id, uint64_t hash)
{
	uint8_t tag = tag_of(hash);

	for (;; hash++) {
		struct bucket *bucket = bucket_of(index, hash);
		uint32_t free = tag_matches(bucket, 0);

		if (free) {
			bucket->tags[__builtin_ctz(free)] = tag;
			bucket->rows[__builtin_ctz(free)] = id;
			return;
		}
		if (bucket->overflow != OVERFLOW_STAYS)
			bucket->overflow++;
	}
}

void trie_enter(struct kvio_index *index, uint32_t id)
{
	enter_hashed(index, id, hash_key(index, row_of(index, id)->key));
	index->entries++;
}

void trie_leave(struct kvio_index *index, uint32_t id)
{
	uint64_t hash = hash_key(index, row_of(index, id)->key);

	for (;; hash++) {
		struct bucket *bucket = bucket_of(index, hash);

		for (uint32_t at = 0; at < BUCKET_ROWS; at++) {
			if (bucket->rows[at] == id && bucket->tags[at]) {
				bucket->tags[at] = 0;
				index->entries--;
				return;
			}
		}
		if (bucket->overflow != OVERFLOW_STAYS)
			bucket->overflow--;
	}
}

static int grow_table(struct kvio_index *index, uint64_t num_buckets)
{
	struct bucket *old = index->buckets, *made = trie_map(num_buckets * sizeof(*made));
	uint64_t old_count = old ? index->bucket_mask + 1 : 0;

	if (!made)
		return -ENOMEM;
	index->buckets = made;
	index->bucket_mask = num_buckets - 1;
	index->max_entries = num_buckets * BUCKET_ROWS * MAX_LOAD / 100;
	for (uint64_t i = 0; i < old_count; i++) {
		if (i + 2 < old_count)
			for (uint32_t at = 0; at < BUCKET_ROWS; at++)
				if (old[i + 2].tags[at])
					__builtin_prefetch(row_of(index, old[i + 2].rows[at]));
		for (uint32_t at = 0; at < BUCKET_ROWS; at++)
			if (old[i].tags[at])
				enter_hashed(index, old[i].rows[at], hash_key(
					index, row_of(index, old[i].rows[at])->key));
	}
	trie_unmap(old, old_count * sizeof(*old));
	return 0;
}

/* Makes sure that `count` rows can be made and entered. */
int trie_reserve(struct kvio_index *index, uint32_t count)
{
	uint64_t num_buckets = index->buckets ? index->bucket_mask + 1 : FIRST_BUCKETS;
	int rc;

	while (num_buckets * BUCKET_ROWS * MAX_LOAD / 100 < index->entries + count)
		num_buckets *= 2;
	if (!index->buckets || num_buckets > index->bucket_mask + 1) {
		rc = grow_table(index, num_buckets);
		if (rc < 0)
			return rc;
	}
	while ((uint64_t)index->num_chunks * CHUNK_ROWS + index->num_free <
	       (uint64_t)index->next_row + count) {
		if (index->num_chunks == MAX_CHUNKS)
			return -ENOMEM;
		index->chunks[index->num_chunks] = trie_map(sizeof(struct chunk));
		if (!index->chunks[index->num_chunks])
			return -ENOMEM;
		index->num_chunks++;
	}
	return 0;
}
