/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVIO_RING_INTERNAL_H
#define KVIO_RING_INTERNAL_H
/*
 * What the ring's files share. Who may touch what:
 *   - struct run, struct io, header images, queues: the ring's own thread alone, no lock;
 *   - counters and windows: written by the ring's thread alone, relaxed, so that others may look;
 *   - inbox, faults, growing windows: ring->lock;
 *   - page 1 of a segment: segment->lock;
 *   - what was seen of foreign segments, and closing files: store->watch_lock;
 *   - a batch's end: batch->lock.
 * A segment is written by one ring at a time (kvio/storage/writer.py hands them out).
 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>

#include "kvio/block.h"
#include "kvio/ring.h"

#define MAX_SEGMENTS 65536u
#define MAX_FAULTS 8
#define MAX_REGIONS 64
#define MAX_SLICES 1024
#define SLICE_BYTES (1ull << 30)	/* a larger registered buffer gives EFAULT */

enum io_op { IO_READ = 1, IO_WRITE = 2, IO_SYNC = 4, IO_REGISTER = 8 };
enum { READ, WRITE, DIRECTIONS };

struct run;

/* Runs that wait for one device operation (a header page or an fdatasync) and share it. */
struct commit {
	struct commit *next;	/* in ring->gated, or among the spare ones */
	struct commit *chained;	/* reads: in ring->checks */
	struct kvio_segment *segment;
	struct run *waiting;	/* go with the next one */
	struct run *flying;	/* go with the one in flight */
	uint32_t page;		/* header page, from 0 */
	uint8_t op;		/* IO_WRITE, IO_READ: that page; IO_SYNC */
	bool in_flight, gated;
};

/* What the poll remembers of a foreign segment. */
struct watch {
	bool known;		/* all of it was read, as of `epoch` */
	bool settled;		/* and up to the page 1 that was seen last */
	bool valid, closed;	/* that page 1 */
	bool others_known;
	uint32_t mark;		/* its CRC */
	uint64_t heartbeat, epoch, others;
	int64_t retry_ns;	/* reading failed: not before */
};

struct kvio_segment {
	int fd;
	/*
	 * Who uses the file holds the segment; a retired one cannot be held. Holding counts up and
	 * then looks at `retired`, retiring sets it and then looks at the count (both sequentially
	 * consistent): so either the holder sees that it came too late, or kvio_store_sweep() sees
	 * the holder and leaves the file open until it has let go. Numbers of segments are never
	 * used again, so who still has the number of one that is closed (a place found in the index
	 * before it was dropped) is told that it is gone and reads nobody else's file.
	 */
	atomic_uint holds;
	atomic_bool retired;
	atomic_bool file_closed;
	uint32_t index;
	bool own;
	bool buffered;		/* the kernel copies: no O_DIRECT, or one that means nothing */
	uint8_t uuid[KVIO_UUID_BYTES];
	_Atomic int64_t final_ns;	/* kvio_segment_final(); 0: it may still be written */
	/* Own: what each slot holds, 0 from before its first step is written until after its
	 * last: a reader whose payload has come compares, and any newer byte in it shows. */
	_Atomic uint64_t *generations;
	/* The owner ring's thread. */
	uint64_t generation;
	uint8_t *headers;	/* image of the header pages */
	struct commit *pages;	/* one per header page: at most one write in flight each */
	struct commit sync;
	/* Page 1. */
	pthread_mutex_t lock;
	bool dirty;
	int64_t epoch_began_ns;
	struct kvio_page1 page1;
	struct watch watch;
};

struct kvio_store {
	struct kvio_store_params params;
	pid_t pid;
	_Atomic(struct kvio_segment *) *segments;
	_Atomic uint32_t num_segments;
	_Atomic uint64_t page1_writes;
	pthread_mutex_t lock;		/* adding segments; who sleeps */
	pthread_cond_t wake;
	pthread_cond_t rouse;		/* who dozes: kvio_store_doze() */
	pthread_t keeper;
	bool dirty, stop, running, roused;
	_Atomic uint32_t num_closed;	/* files of retired segments */
	pthread_mutex_t watch_lock;
	bool watch_ended;
	uint8_t *watch_pages;		/* kept from poll to poll */
	struct kvio_block_io *watch_blocks;
	struct kvio_watch_stats watch_stats;
	char mount[256];		/* of 3FS: kvio_store_set_mount() */
};

struct kvio_ring_batch {
	struct kvio_ring_batch *next;	/* in the inbox */
	atomic_int refs;
	atomic_bool cancelled;
	_Atomic uint32_t done;	/* a futex */
	bool write;
	uint32_t count, remaining;
	uint32_t moving;	/* runs that have not finished and do not wait at a gate */
	int64_t found_ns;
	uint64_t region, region_addr, region_nbytes;
	uint64_t nbytes, tokens;
	int64_t submitted_ns, completed_ns;
	int32_t *status;
	struct kvio_block_io *blocks;
	pthread_mutex_t lock;
	int event_fd;
};

enum step { STEP_NEW, STEP_INVALIDATE, STEP_INVALIDATE_SYNC, STEP_PAYLOAD, STEP_PAYLOAD_SYNC,
	    STEP_HEADER, STEP_HEADER_SYNC, STEP_CHECK, STEP_DONE };

/* What proves that a payload which was read is the block that was asked for. */
enum proof { PROOF_CRC, PROOF_MEMORY, PROOF_FINAL, PROOF_HEADER };

/* Blocks of a batch that are adjacent in the file and in memory: the unit of merging, pacing. */
struct run {
	struct run *next;
	struct kvio_ring_batch *batch;
	struct kvio_segment *segment;
	uint32_t first, count;		/* elements of the batch */
	enum step step;
	uint8_t direction;
	uint8_t proof;			/* reads: enum proof */
	uint8_t rereads;
	int16_t buffer;			/* registered slice, or -1 */
	uint32_t pending;		/* device operations in flight */
	int32_t error;
	int64_t start_ns, end_ns;	/* on the paced link */
	int64_t busy_ns;
};

/* One device operation. */
struct io {
	struct io *next;
	struct run *run;		/* whom to tell, or NULL: a commit */
	struct commit *commit;
	struct kvio_segment *segment;
	uint8_t *addr;
	uint64_t offset;
	uint32_t nbytes, done;
	uint32_t limit;			/* at most so many bytes this time */
	uint32_t stalls;		/* results in a row that moved nothing */
	int32_t res;
	int16_t buffer;
	uint8_t op;
	bool here;			/* a copy that the ring's thread makes itself */
};

struct io_list { struct io *head, *tail; };
struct run_list { struct run *head, *tail; };

struct region {
	uint64_t id, addr, nbytes, slice_bytes;
	int first, count;		/* slices of the table; count 0: plain buffers */
};

struct backend {
	int (*prepare)(struct kvio_ring *ring);	/* what wake needs, before the thread runs */
	void (*discard)(struct kvio_ring *ring);	/* and after it has ended */
	int (*open)(struct kvio_ring *ring);	/* this and all below but wake: in the thread */
	void (*close)(struct kvio_ring *ring);
	void (*start)(struct kvio_ring *ring, struct io *io);
	/* What was started goes to the device now, not with the next wait; NULL: it has gone. */
	void (*flush)(struct kvio_ring *ring);
	/* Submits, then sleeps until a completion, a wake or the timeout (< 0: none). */
	void (*wait)(struct kvio_ring *ring, int64_t timeout_ns);
	void (*wake)(struct kvio_ring *ring);
	void (*forget_files)(struct kvio_ring *ring);	/* those that are closed; may be NULL */
	int (*add_slices)(struct kvio_ring *ring, struct region *region);
	void (*drop_slices)(struct kvio_ring *ring, struct region *region);
};

struct windows { uint64_t *bytes; int64_t count, room; uint64_t first; };

#define CHECK_CHAINS 64u
#define MIN_ASYNC_BYTES (256u << 10)	/* a smaller copy is not worth waking a worker */

struct kvio_ring {
	struct kvio_store *store;
	struct kvio_ring_params params;
	const struct backend *backend;
	void *device;			/* the back end's own */
	pthread_t thread;
	pid_t pid;
	/* The ring's thread. */
	struct run_list queue[DIRECTIONS];	/* not started, in order of submission */
	struct run_list restart;		/* singles of a merged run that failed */
	struct run_list held;			/* finished, not before end_ns; sorted by it */
	struct io_list ready, injected;
	struct commit *gated;			/* have runs that wait, and are not in flight */
	struct commit *checks[CHECK_CHAINS];	/* reads of header pages, by segment and page */
	uint64_t gated_bytes;
	uint32_t gated_runs;
	bool gates_due;				/* some gate may have to open */
	struct io *spare_ios;
	struct run *spare_runs;
	struct commit *spare_commits;
	void *spare_pages;
	int64_t clock_ns;			/* when the thread last woke */
	uint32_t num_cpus;
	uint64_t backlog[DIRECTIONS];		/* bytes of queued runs */
	uint32_t in_flight;			/* device operations */
	uint32_t active;			/* runs between start and report */
	uint32_t active_by[DIRECTIONS];
	int64_t active_since_ns[DIRECTIONS];
	int64_t link_free_ns[DIRECTIONS];
	struct region regions[MAX_REGIONS];
	int num_regions;
	uint8_t slice_used[MAX_SLICES];
	uint32_t closed_seen;			/* of store->num_closed */
	/* Everybody. */
	_Atomic uint64_t queued_bytes, queued_tokens, batches_in_flight;
	atomic_bool paused;
	pthread_mutex_t lock;
	pthread_cond_t opened;
	int opened_rc;				/* 1 until the thread has opened the device */
	bool stop, cancel;
	struct kvio_ring_batch *inbox, **inbox_tail;
	uint64_t *forget;			/* regions whose memory is gone */
	uint32_t num_forget;
	struct kvio_fault faults[MAX_FAULTS];
	atomic_bool has_faults;
	struct kvio_ring_stats stats;
	struct windows windows[DIRECTIONS];
};

static inline int64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline struct kvio_segment *segment_at(const struct kvio_store *store, uint32_t index)
{
	return atomic_load_explicit(&store->segments[index], memory_order_acquire);
}

static inline uint64_t slot_offset(const struct kvio_store *store, uint32_t slot)
{
	return store->params.payload_offset + (uint64_t)slot * store->params.slot_stride;
}

/* Counters of the ring's thread: nobody else writes them. */
static inline void stats_add(uint64_t *counter, uint64_t more)
{
	__atomic_store_n(counter, *counter + more, __ATOMIC_RELAXED);
}

/* Is there more to start as soon as something ends? */
static inline bool has_backlog(const struct kvio_ring *ring)
{
	return ring->ready.head || ring->queue[READ].head || ring->queue[WRITE].head;
}

/* False: the segment was retired. See struct kvio_segment. */
static inline bool segment_hold(struct kvio_segment *segment)
{
	atomic_fetch_add(&segment->holds, 1);
	if (!atomic_load(&segment->retired))
		return true;
	atomic_fetch_sub(&segment->holds, 1);
	return false;
}

static inline void segment_release(struct kvio_segment *segment)
{
	atomic_fetch_sub(&segment->holds, 1);
}

int monotonic_cond_init(pthread_cond_t *cond);
int monotonic_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t deadline_ns);

/* ring_keeper.c */
void segment_page_changed(struct kvio_store *store, struct kvio_segment *segment, uint32_t page);

/* ring_segment.c */
int segment_prepare(struct kvio_store *store, struct kvio_segment *segment);
void segment_discard(struct kvio_segment *segment);
enum proof segment_proof(const struct kvio_ring *ring, const struct kvio_ring_batch *batch,
			 const struct kvio_block_io *block);

/* ring_batch.c */
void batch_complete(struct kvio_ring_batch *batch);

/* ring_io.c */
struct io *io_new(struct kvio_ring *ring);
void io_start(struct kvio_ring *ring, struct io *io);
void io_pump(struct kvio_ring *ring);
void io_complete(struct kvio_ring *ring, struct io *io, int res);
int fault_take(struct kvio_ring *ring, uint32_t op, uint64_t offset, uint64_t nbytes);
void *page_get(struct kvio_ring *ring);
void page_put(struct kvio_ring *ring, void *page);
void io_free_spares(struct kvio_ring *ring);

/* ring_run.c */
void runs_plan(struct kvio_ring *ring, struct kvio_ring_batch *batch);
void runs_cancel(struct kvio_ring *ring, bool all);
int64_t runs_launch(struct kvio_ring *ring);
uint64_t run_nbytes(const struct kvio_ring *ring, const struct run *run);
void batch_less(struct kvio_ring *ring, struct kvio_ring_batch *batch);
int64_t runs_release(struct kvio_ring *ring);
bool runs_idle(const struct kvio_ring *ring);
void run_payload(struct kvio_ring *ring, struct run *run, uint8_t op);
void run_finished(struct kvio_ring *ring, struct run *run);
bool run_split(struct kvio_ring *ring, struct run *run);
void run_list_push(struct run_list *list, struct run *run);
struct run *run_list_pop(struct run_list *list);

/* ring_read.c, ring_write.c: a step of this run has ended */
void read_advance(struct kvio_ring *ring, struct run *run);
void write_advance(struct kvio_ring *ring, struct run *run);
void read_checked(struct kvio_ring *ring, struct run *run, const uint8_t *page);

/* ring_commit.c */
void commit_join(struct kvio_ring *ring, struct run *run, struct commit *commit, enum step step);
void commit_done(struct kvio_ring *ring, struct io *io, int res);
void commits_launch(struct kvio_ring *ring);
struct commit *commit_check(struct kvio_ring *ring, struct kvio_segment *segment, uint32_t page);
void commits_free(struct kvio_ring *ring);

/* ring_stats.c */
void stats_run(struct kvio_ring *ring, struct run *run, int64_t when_ns);
int slices_for(struct kvio_ring *ring, const struct kvio_ring_batch *batch);
void slices_forget(struct kvio_ring *ring, uint64_t id);
int slices_reserve(struct kvio_ring *ring, int count);

#ifdef KVIO_HAVE_URING
extern const struct backend uring_backend;
int uring_probe(void);
#endif
extern const struct backend threads_backend;

/* ring_usrbio.c, ring_usrbio_lib.c */
extern const struct backend usrbio_backend;
void usrbio_fd_forget(int fd);		/* before a segment's file is closed */

#endif
