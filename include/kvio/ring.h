/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVIO_RING_H
#define KVIO_RING_H
/*
 * Rings: batches of blocks between pool memory and the segment files of a store.
 *
 * A ring is a C thread that owns one queue of the device (io_uring, or `threads` workers that
 * block in preadv and pwritev). It plans, paces, submits, checks and completes on its own: a
 * batch finishes though its submitter sleeps or has exited. The order of a write (invalidate,
 * payload, header, each complete before the next) is kept here and nowhere else.
 *
 * Every int result is >= 0, or -errno. Nothing here calls into Python.
 * The bytes on disk are those of docs/format.md.
 */
#include <stddef.h>
#include <stdint.h>

#define KVIO_PAGE 4096u
#define KVIO_UUID_BYTES 16
#define KVIO_HEADER_BYTES 128u
#define KVIO_HEADERS_PER_PAGE 32u
#define KVIO_FIRST_HEADER_PAGE 2u
#define KVIO_MAX_HEADER_PAGES 15000u
#define KVIO_BITMAP_BYTES 1880u

enum kvio_block_flags {
	KVIO_BLOCK_INVALIDATE = 1,	/* write: the slot was valid once, or may have been */
	KVIO_BLOCK_SUSPECT = 2,		/* out: failed after its header may have been written */
	KVIO_BLOCK_DURABLE = 4,		/* the payload was synced before the header was written */
};

/* One block of a batch, 72 bytes. A write fills in crc and generation. */
struct kvio_block_io {
	uint64_t addr;			/* of slot_stride bytes inside the batch's region */
	uint64_t generation;
	uint32_t segment;		/* index from kvio_store_add_segment() */
	uint32_t slot;
	uint32_t crc;			/* CRC-32C of the payload's block_nbytes */
	uint32_t tokens;
	uint32_t flags;			/* enum kvio_block_flags */
	int32_t  status;		/* in: -EINPROGRESS: do it; anything else is final */
	uint8_t  key[16];
	uint8_t  parent[16];
};

/* ---- format: what a script that reads docs/format.md would compute as well ---- */

void kvio_header_encode(uint8_t *out, const struct kvio_block_io *block, const uint8_t *uuid,
			uint64_t nbytes);
/* 1: a valid header of this slot, copied to `out`; 0: empty (zeros); -EBADMSG: anything else. */
int kvio_header_decode(const uint8_t *header, const uint8_t *uuid, uint32_t slot,
		       uint64_t nbytes, struct kvio_block_io *out);
/* Decodes `count` headers from slot 0 on; returns how many are valid (written to `out`). */
int64_t kvio_headers_scan(const uint8_t *headers, uint32_t count, const uint8_t *uuid,
			  uint64_t nbytes, struct kvio_block_io *out, uint32_t *damaged);

struct kvio_page1 {
	uint8_t uuid[KVIO_UUID_BYTES];	/* of the segment */
	uint32_t header_pages;
	uint64_t heartbeat;
	uint64_t epoch;
	uint64_t others;		/* moves with every page 1 of the writer's other segments */
	uint8_t changed[KVIO_BITMAP_BYTES];		/* in this epoch */
	uint8_t changed_before[KVIO_BITMAP_BYTES];	/* in the previous one */
};
#define KVIO_CLOSED UINT64_MAX		/* a heartbeat: nobody writes this segment any more */
void kvio_page1_encode(uint8_t *out, const struct kvio_page1 *page);
/* 0, or -EBADMSG: not a page 1 of this segment. */
int kvio_page1_decode(const uint8_t *bytes, const uint8_t *uuid, uint32_t header_pages,
		      struct kvio_page1 *out);

/* ---- store: the open files, and the keeper thread that rewrites page 1 ---- */

struct kvio_store;
struct kvio_store_params {
	uint64_t block_nbytes;
	uint64_t slot_stride;
	uint64_t payload_offset;
	uint32_t slots;
	uint32_t header_pages;
	uint32_t verify;		/* 1: payload CRC on read; 0: header again after it */
	uint32_t durable;		/* 1: fdatasync between the steps of a write */
};
struct kvio_segment_params {
	int fd;				/* the store closes it */
	uint32_t own;			/* created by this store: writes go there */
	uint8_t uuid[KVIO_UUID_BYTES];
};
int kvio_store_new(struct kvio_store **out, const struct kvio_store_params *params);
/* Returns the segment's index. */
int kvio_store_add_segment(struct kvio_store *store, const struct kvio_segment_params *params);
/*
 * Nobody writes this segment any more (its writer has closed) and the index has been brought up
 * to date since: places that are looked up from now on (kvio_ring_batch_params.found_ns) need no
 * second look at their header. There is no way back.
 */
int kvio_segment_final(struct kvio_store *store, uint32_t index);
/* 1 if the file is O_DIRECT and its file system means it; tmpfs takes the flag and copies. */
int kvio_file_is_direct(int fd);
/* Reserves disk space; -EOPNOTSUPP, -ENOSPC, -EFBIG as the file system says. */
int kvio_allocate(int fd, uint64_t offset, uint64_t nbytes);
/* fsync of one segment; one that was retired has nothing to lose. Blocks. */
int kvio_store_sync_segment(struct kvio_store *store, uint32_t segment);
/*
 * The segment's file is gone: blocks of it that are submitted from now on get -ENOENT (reads) or
 * -ESTALE (writes) and its page 1 is not written any more. kvio_store_sweep() closes the files
 * of retired segments that no batch in flight uses; returns how many are left. Rings hold the
 * files too (registered files): kvio_ring_wake() lets each one give up what was closed.
 */
int kvio_store_retire(struct kvio_store *store, uint32_t segment);
int kvio_store_sweep(struct kvio_store *store);
/* Stops the keeper after a last page 1, which marks all own segments as closed, and closes all
 * files. No ring may be open. */
void kvio_store_stop(struct kvio_store *store);
uint64_t kvio_store_page1_writes(const struct kvio_store *store);
/* Stops; NULL is fine. In a forked child it only lets go of memory. */
void kvio_store_free(struct kvio_store *store);

/* ---- watch: what other writers' segments hold now ---- */

/* Takes what `count` slots from `first` on hold now: kvio_index_replace() of index.h. */
typedef int64_t (*kvio_replace_fn)(void *index, uint32_t segment, uint32_t first, uint32_t count,
				   const struct kvio_block_io *blocks, uint32_t num_blocks);
enum kvio_news {
	KVIO_NEWS_BEAT = 1,		/* page 1 of one of the writer's segments was rewritten */
	KVIO_NEWS_CLOSED = 2,		/* the newest segment, and all read up to its last change */
	KVIO_NEWS_FAILED = 4,		/* something could not be read; tried again in a second */
};
/* One writer: `count` of the segments that are passed with it, from `first` on, newest first. */
struct kvio_watched {
	uint32_t first, count;
	uint32_t news;			/* out: enum kvio_news */
	int32_t error;			/* out: the last -errno of reading, or 0 */
};
struct kvio_watch_stats {
	uint64_t page1_reads, page1_damaged;	/* damaged: twice in a row */
	uint64_t header_pages_read;
	uint64_t full_reads;			/* of all header pages of a segment */
	uint64_t headers_damaged, headers_beyond_end;
	uint64_t blocks_seen;			/* valid headers that were read */
	uint64_t places_changed;		/* what `replace` returned */
};
/*
 * One look at each of these writers. A segment that is looked at for the first time is read
 * whole. Blocks in pread; looks of several threads take turns. Returns how many writers have news.
 */
int64_t kvio_store_poll(struct kvio_store *store, kvio_replace_fn replace, void *index,
			const uint32_t *segments, struct kvio_watched *writers, uint32_t count);
/* Own segments whose file has no name any more: others took this writer for dead and reclaimed
 * them. Returns how many (at most `count`) numbers were written to `out`. */
int kvio_store_unlinked(struct kvio_store *store, uint32_t *out, uint32_t count);
/*
 * For who would poll but has nobody to poll: looks every poll_ns at the directory's time of change
 * and at the own segments' names, and returns how often it has looked once one of them is another
 * one, until_ns (CLOCK_MONOTONIC) has come, or kvio_store_rouse() was called.
 */
int64_t kvio_store_doze(struct kvio_store *store, const char *folder, int64_t mtime_ns,
			int64_t poll_ns, int64_t until_ns);
void kvio_store_rouse(struct kvio_store *store);	/* this doze and all later ones */
void kvio_store_watch_stats(struct kvio_store *store, struct kvio_watch_stats *out);

/* ---- rings ---- */

struct kvio_ring;
enum kvio_backend { KVIO_BACKEND_URING = 1, KVIO_BACKEND_THREADS = 2, KVIO_BACKEND_USRBIO = 3 };
/* Wishes: what the machine refuses is done the usual way, and stats say why. */
enum kvio_ring_flags {
	KVIO_RING_IOPOLL = 1,		/* payload of O_DIRECT files by a ring that is polled */
	KVIO_RING_SQPOLL = 2,		/* a kernel thread submits */
};
struct kvio_ring_params {
	uint32_t backend;		/* enum kvio_backend */
	uint32_t queue_depth;		/* device operations in flight */
	uint32_t io_bytes;		/* a larger block is split, neighbours merge up to this */
	uint32_t flags;			/* enum kvio_ring_flags */
	uint64_t read_bytes_per_s;	/* emulated SNIC bandwidth; 0: as fast as the device */
	uint64_t write_bytes_per_s;
	uint64_t window_ns;		/* of kvio_ring_windows() */
};
struct kvio_ring_stats {
	uint64_t read_bytes, write_bytes;		/* payload of completed blocks */
	uint64_t read_blocks, write_blocks;
	uint64_t read_busy_ns, write_busy_ns;		/* the link's (virtual where paced) */
	uint64_t batches_submitted, batches_completed;
	uint64_t failed_blocks, checks_failed, cancelled_blocks;
	uint64_t ios, short_ios, retries;		/* device operations */
	uint64_t header_writes, syncs;
	uint64_t fixed_ios, registered_bytes;		/* through registered buffers */
	uint64_t register_errno;			/* why some region is not registered */
	uint64_t setup_flags;				/* IORING_SETUP_* in force */
	uint64_t check_reads;		/* header pages read again for verify=never */
	uint64_t memory_checks;		/* blocks compared with memory instead */
	uint64_t async_ios;		/* copies handed to the kernel's workers */
	uint64_t poll_ios;		/* completed by the polled ring */
	uint64_t poll_setup_flags;	/* IORING_SETUP_* of the polled ring; 0: there is none */
	uint64_t poll_errno, sqpoll_errno;	/* why a wish was not granted */
	uint64_t waits;			/* times the thread waited in the kernel */
	/* USRBIO: payload copied through the ring's own memory, and the size of that. */
	uint64_t staged_ios, staged_bytes, staging_bytes;
	uint64_t stray_completions, length_syncs;
};
/* What the tests inject: the next `count` matching operations after `skip` get `result`. */
struct kvio_fault {
	uint32_t op_mask;		/* 1 read, 2 write, 4 sync, 8 register; 0: end all */
	uint32_t skip;
	uint32_t count;
	int32_t  result;		/* -errno; or > 0: move at most so many bytes */
	uint64_t from_offset;		/* it matches if it touches these file offsets */
	uint64_t to_offset;
};

/* 0 if the back end runs on this machine, else why not. */
int kvio_backend_probe(uint32_t backend);
int kvio_ring_open(struct kvio_ring **out, struct kvio_store *store,
		   const struct kvio_ring_params *params);
/* Cancels what has not started, drains the rest, stops the threads; NULL is fine. */
void kvio_ring_close(struct kvio_ring *ring);
/* What is outstanding: the reading queue that schedulers look at. */
void kvio_ring_read_queue(const struct kvio_ring *ring, uint64_t *nbytes, uint64_t *tokens);
uint64_t kvio_ring_in_flight(const struct kvio_ring *ring);
void kvio_ring_get_stats(struct kvio_ring *ring, struct kvio_ring_stats *out);
/*
 * Payload bytes completed per window of window_ns; windows are aligned to multiples of window_ns
 * of CLOCK_MONOTONIC, so those of two rings line up. Returns how many there are (at most `count`
 * are copied); *first is the number of the first one.
 */
int64_t kvio_ring_windows(struct kvio_ring *ring, int write, uint64_t *out, int64_t count,
			  uint64_t *first);
/* Something happened that the ring's thread should look at. */
void kvio_ring_wake(struct kvio_ring *ring);
/* The memory of a region is gone: give up its registration. */
int kvio_ring_forget(struct kvio_ring *ring, uint64_t region);
/* For tests. */
int kvio_ring_fault(struct kvio_ring *ring, const struct kvio_fault *fault);
void kvio_ring_pause(struct kvio_ring *ring, int paused);

/* ---- batches ---- */

struct kvio_ring_batch;
struct kvio_ring_batch_params {
	uint32_t write;			/* 0: read */
	uint32_t count;
	uint64_t region;		/* number of the region, never reused; 0: do not register */
	uint64_t region_addr;
	uint64_t region_nbytes;
	int64_t found_ns;		/* CLOCK_MONOTONIC before places were looked up; 0: old */
	const struct kvio_block_io *blocks;	/* copied */
};
/* Submits; the ring completes it on its own. The caller owns one reference. An empty batch
 * registers its region and nothing else: pinning fresh memory takes about 3 s per GiB. */
int kvio_ring_batch_submit(struct kvio_ring_batch **out, struct kvio_ring *ring,
			   const struct kvio_ring_batch_params *params);
int kvio_ring_batch_done(struct kvio_ring_batch *batch);
/* 1 when drained, 0 after timeout_ns (< 0: none) or when a signal came to this thread. */
int kvio_ring_batch_wait(struct kvio_ring_batch *batch, int64_t timeout_ns);
/* An eventfd that becomes readable when the batch has drained; made on the first call. */
int kvio_ring_batch_fd(struct kvio_ring_batch *batch);
/* What has not started gets -ECANCELED. Returns at once: wait for the rest. */
void kvio_ring_batch_cancel(struct kvio_ring_batch *batch, struct kvio_ring *ring);
const int32_t *kvio_ring_batch_status(const struct kvio_ring_batch *batch);
const struct kvio_block_io *kvio_ring_batch_blocks(const struct kvio_ring_batch *batch);
void kvio_ring_batch_times(struct kvio_ring_batch *batch, uint64_t *nbytes, int64_t *submitted_ns,
		      int64_t *completed_ns);
void kvio_ring_batch_put(struct kvio_ring_batch *batch);	/* NULL is fine */

_Static_assert(sizeof(struct kvio_block_io) == 72, "the numpy dtype says 72");

#endif
