// SPDX-License-Identifier: Apache-2.0
/* The lists of the index: own places by their last use, children of a key, ghosts with orphans. */
#include "trie_internal.h"

static void list_insert(struct kvio_index *index, uint32_t id, uint32_t hotter)
{
	struct row *row = row_of(index, id), *next = row_of(index, hotter);

	row->colder = next->colder;
	row->hotter = hotter;
	row_of(index, next->colder)->hotter = id;
	next->colder = id;
}

static void list_remove(struct kvio_index *index, uint32_t id)
{
	struct row *row = row_of(index, id);

	row_of(index, row->colder)->hotter = row->hotter;
	row_of(index, row->hotter)->colder = row->colder;
	row->colder = row->hotter = NIL;
}

/* ---- own places, coldest first ---- */

/* Next to `hotter`; LRU makes it the hottest of all. */
void trie_lru_link(struct kvio_index *index, uint32_t id, uint32_t hotter)
{
	list_insert(index, id, hotter);
	if (index->cursor == hotter)
		index->cursor = id;
}

void trie_lru_unlink(struct kvio_index *index, uint32_t id)
{
	struct row *row = row_of(index, id);

	if (index->cursor == id)
		index->cursor = row->hotter;
	if (index->anchor == id)
		index->anchor = row->hotter;
	if (index->leaf == id)
		index->leaf = NIL;
	row->flags &= ~ROW_BEHIND;
	list_remove(index, id);
}

void trie_lru_touch(struct kvio_index *index, uint32_t id)
{
	if (row_of(index, LRU)->colder == id)
		return;					/* is the hottest */
	trie_lru_unlink(index, id);
	trie_lru_link(index, id, LRU);
}

/* ---- children ---- */

static bool has_orphans(const struct kvio_index *index, uint32_t id)
{
	const struct row *row = row_of(index, id);

	return row->flags & ROW_GHOST && row->child && is_own(row_of(index, row->child)) &&
	       !kvio_is_root(row->key);
}

void trie_child_link(struct kvio_index *index, uint32_t id)
{
	struct row *row = row_of(index, id), *parent = row_of(index, row->parent);
	struct side *first;
	bool listed = has_orphans(index, row->parent);

	if (parent->child) {
		first = side_of(index, parent->child);
		row->sibling_next = parent->child;
		side_of(index, id)->sibling_prev = first->sibling_prev;
		row_of(index, first->sibling_prev)->sibling_next = id;
		first->sibling_prev = id;
	} else {
		row->sibling_next = side_of(index, id)->sibling_prev = id;
	}
	if (is_own(row) || !parent->child)
		parent->child = id;
	if (is_own(row) && has_orphans(index, row->parent)) {
		index->stats.orphans++;
		if (!listed)
			list_insert(index, row->parent, GHOSTS);
	}
}

void trie_child_unlink(struct kvio_index *index, uint32_t id)
{
	struct row *row = row_of(index, id), *parent = row_of(index, row->parent);
	uint32_t parent_id = row->parent, before = side_of(index, id)->sibling_prev;
	bool listed = has_orphans(index, parent_id);

	if (row->sibling_next == id) {
		parent->child = NIL;
	} else {
		row_of(index, before)->sibling_next = row->sibling_next;
		side_of(index, row->sibling_next)->sibling_prev = before;
		if (parent->child == id)
			parent->child = row->sibling_next;
	}
	row->parent = row->sibling_next = NIL;
	if (listed) {
		index->stats.orphans -= is_own(row);
		if (!has_orphans(index, parent_id))
			list_remove(index, parent_id);
	}
	if (parent->child)
		return;
	if (parent->flags & ROW_GHOST) {
		trie_leave(index, parent_id);
		trie_free_row(index, parent_id);
		index->stats.ghosts--;
	} else {
		trie_maybe_leaf(index, parent_id);
	}
}

static uint64_t count_own(const struct kvio_index *index, uint32_t first)
{
	uint64_t count = 0;
	uint32_t id = first;

	while (id && is_own(row_of(index, id))) {	/* own ones come first */
		count++;
		id = row_of(index, id)->sibling_next;
		if (id == first)
			break;
	}
	return count;
}

/* The ghost is about to become a stored key. */
void trie_children_saved(struct kvio_index *index, uint32_t id)
{
	if (has_orphans(index, id)) {
		index->stats.orphans -= count_own(index, row_of(index, id)->child);
		list_remove(index, id);
	}
}

/* The stored key has become a ghost. */
void trie_children_orphaned(struct kvio_index *index, uint32_t id)
{
	if (has_orphans(index, id)) {
		index->stats.orphans += count_own(index, row_of(index, id)->child);
		list_insert(index, id, GHOSTS);
	}
}

void trie_maybe_leaf(struct kvio_index *index, uint32_t head)
{
	const struct row *row = row_of(index, head);

	if (row->flags & (ROW_GHOST | ROW_PINNED) || row->child)
		return;
	for (uint32_t id = head; id; id = row_of(index, id)->copy) {
		if (!(row_of(index, id)->flags & ROW_BEHIND))
			continue;
		if (index->evicting && !index->leaf)
			index->leaf = id;
		else
			index->rescan = true;
	}
}

/* ---- a place changes rows ---- */

void trie_move_place(struct kvio_index *index, uint32_t from, uint32_t to)
{
	struct row *source = row_of(index, from), *target = row_of(index, to), *parent;
	uint32_t before;

	target->generation = source->generation;
	target->segment = source->segment;
	target->slot = source->slot;
	target->crc = source->crc;
	target->tokens = source->tokens;
	target->flags = (target->flags & ROW_KEYS) | (source->flags & ~ROW_KEYS);
	index->segments[source->segment].rows[source->slot] = to;

	parent = row_of(index, source->parent);
	target->parent = source->parent;
	before = side_of(index, from)->sibling_prev;
	if (before == from) {
		target->sibling_next = side_of(index, to)->sibling_prev = to;
	} else {
		target->sibling_next = source->sibling_next;
		side_of(index, to)->sibling_prev = before;
		side_of(index, source->sibling_next)->sibling_prev = to;
		row_of(index, before)->sibling_next = to;
	}
	if (parent->child == from)
		parent->child = to;
	source->parent = source->sibling_next = NIL;

	if (is_own(source)) {
		target->colder = source->colder;
		target->hotter = source->hotter;
		row_of(index, source->colder)->hotter = to;
		row_of(index, source->hotter)->colder = to;
		source->colder = source->hotter = NIL;
		index->cursor = index->cursor == from ? to : index->cursor;
		index->anchor = index->anchor == from ? to : index->anchor;
		index->leaf = index->leaf == from ? to : index->leaf;
	}
	source->flags &= ROW_KEYS;
}
