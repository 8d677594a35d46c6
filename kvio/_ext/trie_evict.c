// SPDX-License-Identifier: Apache-2.0
/* The index of a store: what it gives up first. */
#include "trie_internal.h"

struct taken {
	struct kvio_block_io *out;
	uint32_t count, most;
	uint32_t skipped;		/* pinned and the coldest of all so far, or LRU */
};

static bool pinned(const struct kvio_index *index, uint32_t id)
{
	return row_of(index, trie_head_of(index, id))->flags & ROW_PINNED;
}

static bool takeable_leaf(const struct kvio_index *index, uint32_t id)
{
	const struct row *head = row_of(index, trie_head_of(index, id));

	return !head->child && !(head->flags & ROW_PINNED);
}

/* Is anything pinned below this head? Each row has one parent, so that nothing is seen twice; keys
 * that users make up may lead back to `top`. */
static bool pinned_below(const struct kvio_index *index, uint32_t top)
{
	uint32_t id = row_of(index, top)->child;

	while (id) {
		const struct row *row = row_of(index, id);

		if (!(row->flags & ROW_COPY) && id != top) {
			if (row->flags & ROW_PINNED)
				return true;
			if (row->child) {
				id = row->child;
				continue;
			}
		}
		while (row_of(index, id)->sibling_next ==
		       row_of(index, row_of(index, id)->parent)->child) {
			id = row_of(index, id)->parent;
			if (id == top)
				return false;
		}
		id = row_of(index, id)->sibling_next;
	}
	return false;
}

static void take(struct kvio_index *index, uint32_t id, bool orphan, struct taken *taken)
{
	const struct row *row = row_of(index, id);
	struct kvio_block_io *out = &taken->out[taken->count++];

	memset(out, 0, sizeof(*out));
	trie_describe(row, out);
	memcpy(out->parent, row_of(index, row->parent)->key, 16);
	out->status = orphan;
	trie_remove_place(index, id);
}

/* Own children of one ghost. Those that are pinned stay and come first in what is left. */
static void take_children(struct kvio_index *index, uint32_t ghost, struct taken *taken)
{
	uint32_t kept = NIL, id = row_of(index, ghost)->child;

	while (taken->count < taken->most && is_own(row_of(index, id))) {
		if (pinned(index, id)) {
			kept = id;
		} else {
			take(index, id, true, taken);
			if (!kept && !(row_of(index, ghost)->flags & ROW_GHOST))
				return;				/* that was the last child */
		}
		id = kept ? row_of(index, kept)->sibling_next : row_of(index, ghost)->child;
		if (kept && id == row_of(index, ghost)->child)
			return;					/* once round */
	}
}

/* An orphan with children leaves a ghost behind, which joins the end of the list: a chain goes
 * block by block. */
static void take_orphans(struct kvio_index *index, struct taken *taken)
{
	uint32_t kept = GHOSTS, ghost;

	while (taken->count < taken->most) {
		ghost = row_of(index, kept)->hotter;
		if (ghost == GHOSTS)
			return;
		take_children(index, ghost, taken);
		if (row_of(index, kept)->hotter == ghost)
			kept = ghost;				/* pinned children only */
	}
}

/* Something that the scan had passed over may be a leaf again: begin at the coldest. */
static void start_over(struct kvio_index *index)
{
	uint32_t id = row_of(index, LRU)->hotter;

	for (; id != index->cursor; id = row_of(index, id)->hotter)
		row_of(index, id)->flags &= ~ROW_BEHIND;
	index->cursor = row_of(index, LRU)->hotter;
	index->leaf = NIL;
	index->rescan = false;
}

/*
 * The coldest leaf, or NIL. What the scan passes over is remembered between calls. Of all that lies
 * behind it only the parent of what was taken can have become a leaf, and that is colder than
 * everything ahead: `leaf`.
 */
static uint32_t next_leaf(struct kvio_index *index)
{
	uint32_t id;

	if (index->rescan)
		start_over(index);
	id = index->leaf;
	index->leaf = NIL;			/* its own parent may take its place */
	if (id)
		return id;
	while ((id = index->cursor) != LRU) {
		if (takeable_leaf(index, id))
			return id;
		row_of(index, id)->flags |= ROW_BEHIND;
		index->cursor = row_of(index, id)->hotter;
	}
	return NIL;
}

/* The coldest of what has only others' blocks below it. */
static uint32_t next_inner(const struct kvio_index *index, struct taken *taken)
{
	uint32_t id;

	while ((id = row_of(index, taken->skipped)->hotter) != LRU &&
	       (pinned(index, id) || pinned_below(index, trie_head_of(index, id))))
		taken->skipped = id;
	return id;
}

int64_t kvio_index_evict(struct kvio_index *index, uint32_t count, struct kvio_block_io *out)
{
	struct taken taken = { .out = out, .most = count, .skipped = LRU };
	uint64_t orphans;
	uint32_t id;

	pthread_mutex_lock(&index->lock);
	index->evicting = true;
	take_orphans(index, &taken);
	while (taken.count < count) {
		id = next_leaf(index);
		if (!id)
			id = next_inner(index, &taken);
		if (!id)
			break;
		orphans = index->stats.orphans;
		take(index, id, false, &taken);
		if (index->stats.orphans > orphans)
			take_orphans(index, &taken);
	}
	if (index->leaf)
		index->rescan = true;
	index->leaf = NIL;
	index->evicting = false;
	pthread_mutex_unlock(&index->lock);
	return taken.count;
}
