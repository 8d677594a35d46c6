// SPDX-License-Identifier: Apache-2.0
/*
 * Watching other writers' segments: page 1 tells which header pages have changed, they are read,
 * and the index is told what their slots hold now.
 *
 * Why no change is missed. A writer names a header page in page 1 only after it has written it,
 * and page 1 is read here before the header pages it names. Suppose a page 1 of epoch e was seen
 * and everything that it named was read. A header page written later is named in the epoch that
 * is current then, which is e or later; as long as the page 1 that is read next says e or e + 1
 * its two bitmaps (of its own epoch and the one before) hold every such name. In any other case,
 * and if its CRC was wrong twice in a row, all header pages are read. What was seen is remembered
 * only once all that it named has been read, so a failed read is made up for by the next look.
 */
#include <sys/stat.h>
#include <unistd.h>

#include "ring_internal.h"

#define CHUNK_PAGES 256u
#define CHUNK_SLOTS (CHUNK_PAGES * KVIO_HEADERS_PER_PAGE)
#define RETRY_NS 1000000000

struct poller {
	struct kvio_store *store;
	struct kvio_watch_stats *stats;
	kvio_replace_fn replace;
	void *index;
	uint8_t *pages;			/* CHUNK_PAGES, aligned for O_DIRECT, and one more */
	struct kvio_block_io *blocks;	/* CHUNK_SLOTS */
	int64_t now;
};

/* Reads pages; what lies beyond the end of the file reads as zeros. */
static int pages_read(int fd, uint8_t *to, uint64_t first, uint32_t count)
{
	size_t nbytes = (size_t)count * KVIO_PAGE, done = 0;

	while (done < nbytes) {
		ssize_t got = pread(fd, to + done, nbytes - done,
				    (off_t)(first * KVIO_PAGE + done));

		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return -errno;
		/* O_DIRECT goes on at whole pages only; less than one is the end of the file. */
		if (got < KVIO_PAGE) {
			memset(to + done + got, 0, nbytes - done - (size_t)got);
			return 0;
		}
		done += (size_t)got / KVIO_PAGE * KVIO_PAGE;
	}
	return 0;
}

/* Headers of one page; how many are valid, and whether any was damaged. */
static uint32_t page_decode(struct poller *poller, const struct kvio_segment *segment,
			    const uint8_t *page, uint32_t first, struct kvio_block_io *out,
			    uint32_t *damaged)
{
	const struct kvio_store_params *params = &poller->store->params;
	uint32_t found = 0;

	*damaged = 0;
	for (uint32_t i = 0; i < KVIO_HEADERS_PER_PAGE && first + i < params->slots; i++) {
		int rc = kvio_header_decode(page + i * KVIO_HEADER_BYTES, segment->uuid, first + i,
					    params->block_nbytes, &out[found]);

		if (rc == 1)
			found++;
		else if (rc < 0)
			++*damaged;
	}
	return found;
}

/* A slot that does not lie wholly in the file holds no block. */
static uint32_t drop_beyond_end(struct poller *poller, struct kvio_block_io *blocks,
				uint32_t count, uint64_t file_nbytes)
{
	uint32_t kept = 0;

	for (uint32_t i = 0; i < count; i++) {
		if (slot_offset(poller->store, blocks[i].slot) +
		    poller->store->params.slot_stride > file_nbytes)
			poller->stats->headers_beyond_end++;
		else
			blocks[kept++] = blocks[i];
	}
	return kept;
}

/* At most CHUNK_PAGES header pages: read, decoded, given to the index. */
static int chunk_look(struct poller *poller, struct kvio_segment *segment, uint32_t first,
		      uint32_t count, uint64_t file_nbytes)
{
	uint32_t first_slot = first * KVIO_HEADERS_PER_PAGE, found = 0, damaged;
	uint32_t slots = poller->store->params.slots - first_slot;
	int64_t changed;
	int rc = pages_read(segment->fd, poller->pages, KVIO_FIRST_HEADER_PAGE + first, count);

	if (rc < 0)
		return rc;
	for (uint32_t i = 0; i < count; i++) {
		uint8_t *page = poller->pages + (size_t)i * KVIO_PAGE;
		uint32_t slot = first_slot + i * KVIO_HEADERS_PER_PAGE;
		uint32_t more = page_decode(poller, segment, page, slot, &poller->blocks[found],
					    &damaged);

		if (damaged) {		/* it may have been in the middle of a write: once more */
			rc = pages_read(segment->fd, page, KVIO_FIRST_HEADER_PAGE + first + i, 1);
			if (rc < 0)
				return rc;
			more = page_decode(poller, segment, page, slot, &poller->blocks[found],
					   &damaged);
			poller->stats->headers_damaged += damaged;
		}
		found += more;
	}
	poller->stats->header_pages_read += count;
	found = drop_beyond_end(poller, poller->blocks, found, file_nbytes);
	poller->stats->blocks_seen += found;
	for (uint32_t i = 0; i < found; i++)
		poller->blocks[i].segment = segment->index;
	if (slots > count * KVIO_HEADERS_PER_PAGE)
		slots = count * KVIO_HEADERS_PER_PAGE;
	changed = poller->replace(poller->index, segment->index, first_slot, slots,
				  poller->blocks, found);
	if (changed < 0)
		return (int)changed;
	poller->stats->places_changed += (uint64_t)changed;
	return 0;
}

static bool bit_of(const uint8_t *map, uint32_t i)
{
	return map[i / 8] >> (i % 8) & 1;
}

/* Header pages named in a bitmap (NULL: all), neighbours together. */
static int headers_look(struct poller *poller, struct kvio_segment *segment, const uint8_t *map)
{
	uint32_t pages = poller->store->params.header_pages, first = 0;
	struct stat file;
	int rc = 0;

	if (fstat(segment->fd, &file) < 0)
		return -errno;
	poller->stats->full_reads += map == NULL;
	while (rc == 0 && first < pages) {
		uint32_t count = 0;

		if (map && map[first / 8] == 0 && first % 8 == 0) {
			first += 8;
			continue;
		}
		while (first + count < pages && count < CHUNK_PAGES &&
		       (!map || bit_of(map, first + count)))
			count++;
		if (count)
			rc = chunk_look(poller, segment, first, count, (uint64_t)file.st_size);
		first += count ? count : 1;
	}
	return rc;
}

/* 1: read; 0: its CRC was wrong twice; -errno. *mark differs from that of any other page 1. */
static int page1_look(struct poller *poller, struct kvio_segment *segment,
		      struct kvio_page1 *page1, uint32_t *mark)
{
	uint8_t *page = poller->pages + (size_t)CHUNK_PAGES * KVIO_PAGE;

	for (int attempt = 0; attempt < 2; attempt++) {
		int rc = pages_read(segment->fd, page, 1, 1);

		if (rc < 0)
			return rc;
		poller->stats->page1_reads++;
		*mark = kvio_crc32c(0, page, KVIO_PAGE);
		if (kvio_page1_decode(page, segment->uuid, poller->store->params.header_pages,
				      page1) == 0) {
			memcpy(mark, page + KVIO_PAGE - 4, 4);
			return 1;
		}
	}
	poller->stats->page1_damaged++;
	return 0;
}

/* Is this the page 1 that was seen last? One that stays damaged is not read again and again. */
static bool is_same(const struct watch *watch, bool valid, const struct kvio_page1 *page1,
		    uint32_t mark)
{
	if (valid != watch->valid || watch->mark != mark)
		return false;
	return !valid || (watch->heartbeat == page1->heartbeat);
}

/* One look at a segment; adds to *news. 0, or -errno. */
static int segment_look(struct poller *poller, struct kvio_segment *segment, uint32_t *news,
			struct kvio_page1 *page1)
{
	struct watch *watch = &segment->watch;
	uint8_t map[KVIO_BITMAP_BYTES];
	bool marked;
	uint32_t mark;
	int rc;

	if (atomic_load(&segment->retired) || watch->closed || poller->now < watch->retry_ns)
		return 0;
	rc = page1_look(poller, segment, page1, &mark);
	if (rc < 0) {
		watch->retry_ns = poller->now + RETRY_NS;
		return rc;
	}
	if (!is_same(watch, rc == 1, page1, mark)) {
		*news |= KVIO_NEWS_BEAT;
		watch->settled = false;
	}
	watch->valid = rc == 1;
	watch->mark = mark;
	watch->heartbeat = rc == 1 ? page1->heartbeat : 0;
	if (watch->settled)
		return 0;
	marked = watch->valid && watch->known &&
		 (page1->epoch == watch->epoch || page1->epoch == watch->epoch + 1);
	if (marked)
		for (uint32_t i = 0; i < KVIO_BITMAP_BYTES; i++)
			map[i] = page1->changed[i] | page1->changed_before[i];
	rc = headers_look(poller, segment, marked ? map : NULL);
	if (rc < 0) {
		watch->retry_ns = poller->now + RETRY_NS;
		return rc;
	}
	watch->settled = true;
	if (watch->valid) {
		watch->epoch = page1->epoch;
		watch->known = true;
		watch->closed = page1->heartbeat == KVIO_CLOSED;
	}
	return 0;
}

static void note(struct kvio_watched *writer, int rc)
{
	if (rc < 0) {
		writer->news |= KVIO_NEWS_FAILED;
		writer->error = rc;
	}
}

/* The newest segment, and if its `others` moved (or it cannot say so) the others too. */
static void writer_look(struct poller *poller, const uint32_t *segments,
			struct kvio_watched *writer)
{
	struct kvio_segment *newest = segment_at(poller->store, segments[writer->first]);
	struct watch *watch = &newest->watch;
	struct kvio_page1 page1, other;
	bool closed = watch->closed;
	int rc;

	writer->news = 0;
	writer->error = 0;
	page1.others = 0;
	rc = segment_look(poller, newest, &writer->news, &page1);
	note(writer, rc);
	if (closed || watch->closed) {
		writer->news |= KVIO_NEWS_CLOSED;
	} else if (rc < 0 || poller->now < watch->retry_ns) {
		return;
	} else if (watch->valid && watch->others_known && watch->others == page1.others) {
		return;
	}
	for (uint32_t i = 1; i < writer->count; i++) {
		struct kvio_segment *segment;

		segment = segment_at(poller->store, segments[writer->first + i]);
		rc = segment_look(poller, segment, &writer->news, &other);
		note(writer, rc);
		if (poller->now < segment->watch.retry_ns)
			writer->news |= KVIO_NEWS_FAILED;
	}
	watch->others_known = watch->valid && !(writer->news & KVIO_NEWS_FAILED);
	watch->others = page1.others;
	if (writer->news & KVIO_NEWS_FAILED)	/* not all that it wrote is known yet */
		writer->news &= ~(uint32_t)KVIO_NEWS_CLOSED;
}

static int poller_open(struct poller *poller)
{
	struct kvio_store *store = poller->store;

	if (!store->watch_pages)
		store->watch_pages = aligned_alloc(KVIO_PAGE, (CHUNK_PAGES + 1) * KVIO_PAGE);
	if (!store->watch_blocks)
		store->watch_blocks = malloc(CHUNK_SLOTS * sizeof(*store->watch_blocks));
	poller->pages = store->watch_pages;
	poller->blocks = store->watch_blocks;
	return poller->pages && poller->blocks ? 0 : -ENOMEM;
}

static int segments_check(struct kvio_store *store, const uint32_t *segments,
			  const struct kvio_watched *writers, uint32_t count)
{
	uint32_t known = atomic_load(&store->num_segments);

	for (uint32_t i = 0; i < count; i++) {
		if (writers[i].count == 0)
			return -EINVAL;
		for (uint32_t j = 0; j < writers[i].count; j++) {
			uint32_t number = segments[writers[i].first + j];

			if (number >= known || segment_at(store, number)->own)
				return -EINVAL;
		}
	}
	return store->watch_ended ? -ESHUTDOWN : 0;
}

int64_t kvio_store_poll(struct kvio_store *store, kvio_replace_fn replace, void *index,
			const uint32_t *segments, struct kvio_watched *writers, uint32_t count)
{
	struct poller poller = { .store = store, .stats = &store->watch_stats,
				 .replace = replace, .index = index, .now = now_ns() };
	int64_t news = 0;
	int rc;

	pthread_mutex_lock(&store->watch_lock);
	rc = segments_check(store, segments, writers, count);
	if (rc == 0)
		rc = poller_open(&poller);
	for (uint32_t i = 0; i < count && rc == 0; i++) {
		writer_look(&poller, segments, &writers[i]);
		news += writers[i].news != 0;
	}
	pthread_mutex_unlock(&store->watch_lock);
	return rc < 0 ? rc : news;
}

int kvio_store_unlinked(struct kvio_store *store, uint32_t *out, uint32_t count)
{
	uint32_t known = atomic_load(&store->num_segments);
	int found = 0;

	/* Without the lock: it is held for as long as a poll takes. */
	for (uint32_t i = 0; i < known && (uint32_t)found < count; i++) {
		struct kvio_segment *segment = segment_at(store, i);
		struct stat file;

		if (!segment->own || !segment_hold(segment))
			continue;
		if (fstat(segment->fd, &file) < 0 ? errno == ESTALE || errno == ENOENT
						  : file.st_nlink == 0)
			out[found++] = i;
		segment_release(segment);
	}
	return found;
}

/* False: somebody wants us up. */
static bool sleep_until(struct kvio_store *store, int64_t due_ns)
{
	bool roused;

	pthread_mutex_lock(&store->lock);
	while (!store->roused && now_ns() < due_ns)
		monotonic_cond_wait(&store->rouse, &store->lock, due_ns);
	roused = store->roused;
	pthread_mutex_unlock(&store->lock);
	return !roused;
}

int64_t kvio_store_doze(struct kvio_store *store, const char *folder, int64_t mtime_ns,
			int64_t poll_ns, int64_t until_ns)
{
	int64_t looks = 0;
	uint32_t gone;
	struct stat now;

	while (sleep_until(store, now_ns() + poll_ns)) {
		looks++;
		if (now_ns() >= until_ns || stat(folder, &now) < 0 ||
		    (int64_t)now.st_mtim.tv_sec * 1000000000 + now.st_mtim.tv_nsec != mtime_ns ||
		    kvio_store_unlinked(store, &gone, 1))
			break;
	}
	return looks;
}

void kvio_store_rouse(struct kvio_store *store)
{
	pthread_mutex_lock(&store->lock);
	store->roused = true;
	pthread_cond_broadcast(&store->rouse);
	pthread_mutex_unlock(&store->lock);
}

void kvio_store_watch_stats(struct kvio_store *store, struct kvio_watch_stats *out)
{
	pthread_mutex_lock(&store->watch_lock);
	*out = store->watch_stats;
	pthread_mutex_unlock(&store->watch_lock);
}
