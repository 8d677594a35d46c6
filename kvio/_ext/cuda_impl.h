/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVIO_CUDA_IMPL_H
#define KVIO_CUDA_IMPL_H
/*
 * The provider cuda: what its files know of each other. docs/gpu.md is the design note.
 *
 *   cuda_api.h      the part of CUDA's driver interface that is used, by its documentation
 *   cuda_lib.c      libcuda, opened at run time, and its errors
 *   cuda_dev.c      a device: its primary context, pools of events and chunks, one lock
 *   cuda_mem.c      regions
 *   cuda_alloc.c    memory of our own, pinned and on the device
 *   cuda_nic.c      NICs and queue pairs (one stream each)
 *   cuda_post.c     work requests: checked, then segments of one kind; errors in order
 *   cuda_poll.c     events, completions, sleeping, event loops
 *   cuda_stream.c   users' streams
 *   cuda_plan.c     pieces that touch become one, pieces a stride apart a rectangle (pure)
 *   cuda_ways.c     carries a segment out in one of four ways
 *   cuda_choose.c   which way (pure); cuda_measure.c: what each costs on this machine
 *
 * Every call of the driver is made with the device's context current (`cuda_enter`) and, but for
 * opening and closing, with the domain's lock held; under it the list's lock of cuda_dev.c, never
 * the other way round. The driver's host function writes to an eventfd and takes no lock.
 */
#include "cuda_api.h"
#include "kvio/gpu.h"
#include "nic_impl.h"

#define CUDA_MAX_COPIES 16384u		/* of a segment */
#define CUDA_CHUNK_PIECES 4096u		/* descriptors in one launch of the kernel */
#define CUDA_PIECE_NBYTES 16384u	/* the most that one warp copies of a descriptor */
#define CUDA_NUM_CHUNKS 32u		/* launches in flight */
#define CUDA_KERNEL_ALIGN 16u

/* One contiguous copy; the kernel reads these as they are. */
struct cuda_copy {
	uint64_t target;
	uint64_t source;
	uint64_t nbytes;
};

/* `slices` times `rows` rows of `width` bytes. Pitches between rows, steps between slices. A lone
 * row has pitches of width; a lone slice steps of 0. */
struct cuda_rect {
	uint64_t target, source;
	uint64_t width, rows, slices;
	uint64_t target_pitch, source_pitch;
	uint64_t target_step, source_step;
};

/* A failed call of the driver. */
struct cuda_failure {
	int code;			/* CUresult; 0: none */
	const char *call;		/* "cuMemcpyHtoDAsync" */
};

/* A pinned, mapped piece of memory for the descriptors of one launch. */
struct cuda_chunk {
	struct cuda_copy *copies;	/* CUDA_CHUNK_PIECES of them, as the CPU sees them */
	uint64_t device_addr;		/* and the device */
	struct cuda_chunk *next;	/* free, or of the same op */
};

/* An eventfd that host functions write to. They run when the driver comes to them, which may be
 * after the device was closed, and nobody may wait for that: others' host functions are before
 * ours, and may want what the closing thread has (Python's lock). So each holds it. */
struct cuda_waker {
	int fd;
	uint32_t refs;			/* the device's, and host functions' to come; atomic */
};

/* What is shared by all NICs of one device in this process. */
struct cuda_dev {
	struct kvio_domain domain;
	struct cuda_dev *next;
	int ordinal;
	int pid;			/* a forked child leaves the driver alone */
	uint32_t refs;			/* of the struct; under the list's lock, as is */
	uint32_t users;			/* of the driver's objects: open NICs and memory */
	CUdevice device;
	CUcontext context;
	struct cuda_failure dead;	/* the context's sticky error, see cuda_died */
	uint64_t died_ns;
	struct kvio_cuda_info info;	/* name, versions, `missing`, costs */
	CUmodule module;
	CUfunction kernel;		/* NULL: none */
	bool maps_host_as_is;		/* registered memory has the same address on the device */
	bool has_ways, has_ptx;		/* cuda_ways_open was called, and with a kernel */
	bool tried_measuring;
	int most_urgent, least_urgent;	/* priorities of streams */
	struct cuda_pin *pins;		/* ascending, disjoint */
	uint64_t max_pitch;

	CUevent *events;		/* free ones */
	uint32_t num_events, room_events;
	struct cuda_chunk *chunks;	/* free ones */
	struct cuda_chunk all_chunks[CUDA_NUM_CHUNKS];

	/* Scratch of post, under the lock; made with the device. */
	struct cuda_copy *copies;	/* CUDA_MAX_COPIES */
	struct cuda_rect *rects;	/* CUDA_MAX_COPIES */
	CUdeviceptr *targets, *sources;	/* CUDA_MAX_COPIES each, for the batched call */
	size_t *sizes;

	CUstream own;			/* for kvio_cuda_copy, _fill and measuring */
	struct cuda_qp *busy;		/* with ops that are not finished */
	struct cuda_waker *waker;	/* what the driver's host functions write to */
	int epoll_fd, timer_fd, kick_fd;	/* see cuda_poll.c */
	uint64_t timer_ns;		/* when timer_fd goes off; 0: it does not */
	bool sleeping, kicked;
};

struct cuda_nic {
	struct kvio_nic base;
	struct cuda_dev *dev;
	uint32_t copy_way;		/* enum kvio_copy_way or KVIO_COPY_AUTO */
	uint32_t max_sms;
	bool busy_poll;
	struct cuda_qp *moved;		/* with finished ops that are not reported */
	struct kvio_counters counters;
	uint64_t copies[KVIO_NUM_COPY_WAYS];
	uint64_t segments[KVIO_NUM_COPY_WAYS];
	char why[192];			/* see kvio_cuda_info */
};

/* What was handed to the stream by one post, or work requests that fail in their turn. Until its
 * event has passed nothing is said of it, and what it uses is not used again. */
struct cuda_op {
	CUevent event;			/* NULL: nothing to wait for but the ops before it */
	uint64_t wr_id;			/* of its first work request */
	uint32_t count;			/* work requests: places in the queue that it takes */
	uint32_t reported;		/* of them, passed over in silence or not */
	uint32_t status;		/* enum kvio_wc_status of the first; later ones flush */
	uint32_t ways;
	bool every;			/* each was to be signalled, */
	bool last;			/* or its last one, or none */
	bool unrecorded;		/* the event could not be recorded yet */
	struct cuda_chunk *chunks;
	uint64_t nbytes[2], copies[2];	/* handed to the stream: written, read */
};

struct cuda_qp {
	struct kvio_qp base;
	CUstream stream;
	CUstream notify;		/* made when somebody first sleeps */
	struct cuda_qp *remote;
	uint32_t qpn;
	uint32_t state;			/* enum kvio_qp_state */
	uint32_t taken;			/* places in the queue */
	bool armed;			/* a host function waits for the first op's event */
	bool is_busy, is_moved;
	struct cuda_qp *next_busy, *next_moved;
	struct cuda_op *ops;		/* a ring: reported, head, finished, done, tail */
	uint32_t mask, head, done, tail;
	char why[192];
};

/* Host memory that is pinned in one piece: the driver takes no copy that crosses its ends. */
struct cuda_pin {
	struct cuda_pin *next;
	uint64_t addr, end;		/* pages; of others' memory, as far as regions need it */
	uint32_t regions;		/* that lie in it; one of kvio_cuda_alloc counts as one */
	bool is_ours;			/* registered by us: to be unregistered with the last */
	bool read_only;
};

/* `provider` of a region. */
struct cuda_region {
	bool is_device;
	bool in_parts;			/* over several pins, from `pin` on */
	uint64_t span;			/* address of the pin, or of the device's allocation */
	struct cuda_pin *pin;
};

static inline struct cuda_nic *cuda_nic_of(const struct cuda_qp *qp)
{
	return (struct cuda_nic *)qp->base.nic;
}

/* ---- cuda_lib.c ---- */

/* The driver's functions, once it is open; see cuda_api.h. */
extern struct cuda_api cuda;

/* Opens libcuda (KVIO_CUDA_LIBRARY, or libcuda.so.1) once for the process. -ENOSYS, with a text. */
int cuda_load(char *why, size_t room);
const char *cuda_error_name(int code);	/* "CUDA_ERROR_OUT_OF_MEMORY" */
int cuda_errno(int code);		/* as -errno */
bool cuda_is_sticky(int code);		/* the context is of no use any more */
/* "cuda:0: cuMemcpyHtoDAsync: CUDA_ERROR_ILLEGAL_ADDRESS (700): ..." */
void cuda_explain(int ordinal, const struct cuda_failure *failure, char *why, size_t room);

/* ---- cuda_dev.c ---- */

/* A device, opened with its first user. */
int cuda_dev_get(int ordinal, struct cuda_dev **out, char *why, size_t room);
/* One that is open and ours, or NULL. */
struct cuda_dev *cuda_dev_find(int ordinal);
/* A user goes: with the last one go the driver's objects. The struct, and its lock, which is held
 * here, stay until cuda_dev_put. */
void cuda_dev_leave(struct cuda_dev *dev);
void cuda_dev_put(struct cuda_dev *dev);
bool cuda_is_ours(const struct cuda_dev *dev);	/* not a forked parent's */
/* The device's context, current until cuda_leave; whatever was current comes back. False: it
 * cannot be had (a forked child, a dead driver). */
bool cuda_enter(struct cuda_dev *dev);
void cuda_leave(struct cuda_dev *dev);
CUevent cuda_event_take(struct cuda_dev *dev);		/* NULL: out of memory */
void cuda_event_give(struct cuda_dev *dev, CUevent event);
/* The context is of no use any more: the first reason is kept. */
void cuda_died(struct cuda_dev *dev, int code, const char *call);
/* Remembers a sticky error. Returns code. */
int cuda_note(struct cuda_dev *dev, int code, const char *call);
/* The same, with a text. As -errno. */
int cuda_refuse(struct cuda_dev *dev, int code, const char *call, char *why, size_t room);
/* -EIO, with a text, if the context is of no use any more. */
int cuda_check_alive(struct cuda_dev *dev, char *why, size_t room);

/* ---- cuda_mem.c ---- */

int cuda_reg(struct kvio_nic *nic, struct kvio_region *region);
int cuda_dereg(struct kvio_nic *nic, struct kvio_region *region);
/* Which allocation or pin an address of the region lies in; *nbytes from there on may be less. */
uint64_t cuda_span(const struct kvio_region *region, uint64_t addr, uint64_t *nbytes);
/* Host memory that the driver has allocated for us, which is pinned. */
void cuda_pin_add(struct cuda_dev *dev, uint64_t addr, uint64_t nbytes);
void cuda_pin_remove(struct cuda_dev *dev, uint64_t addr);
/* Is it a GPU's memory, and whose? -EINVAL: it is not. Sticky errors are in `failure`. */
int cuda_ordinal_of(uint64_t addr, struct cuda_failure *failure);

/* ---- cuda_post.c ---- */

int cuda_post(struct kvio_qp *qp, const struct kvio_post *post);
int cuda_cancel(struct kvio_qp *qp, uint64_t wr_id, uint32_t count);
/* To the error state. `flush`: what the stream has, too; it is reported once the stream is done. */
void cuda_fail(struct cuda_qp *qp, bool flush);

/* ---- cuda_poll.c ---- */

static inline struct cuda_op *cuda_op_at(const struct cuda_qp *qp, uint32_t at)
{
	return &qp->ops[at & qp->mask];
}

/* There is something to finish, for whoever sleeps. */
void cuda_busy(struct cuda_qp *qp);
struct cuda_waker *cuda_waker_new(void);	/* NULL: out of memory or file descriptors */
void cuda_waker_put(struct cuda_waker *waker);
void cuda_disarm(struct cuda_qp *qp);		/* it is going */
int cuda_drive(struct kvio_nic *nic, uint64_t now_ns);
int cuda_poll(struct kvio_nic *nic, struct kvio_wc *wc, uint32_t count);
int cuda_sleep(struct kvio_nic *nic, uint64_t timeout_ns);
int cuda_event_fd(struct kvio_nic *nic);
int cuda_arm(struct kvio_nic *nic);

/* ---- cuda_stream.c ---- */

int cuda_after(struct kvio_qp *qp, uint64_t stream);
int cuda_before(struct kvio_qp *qp, uint64_t wr_id, uint64_t stream);

/* ---- cuda_plan.c: pure ---- */

/* How far one has come: so many of the copies, and bytes of the next one. */
struct cuda_place {
	uint32_t at;
	uint64_t nbytes;
};

/* Pieces that follow one another on both sides become one, empty ones none; in place, in their
 * order. How many are left. */
uint32_t cuda_coalesce(struct cuda_copy *copies, uint32_t count);
/* Rectangles that a scan from the left finds, as few as they can be written with, none with a
 * pitch above max_pitch. How many; 0: more than `room`, which is seen early (with room for count
 * there is always enough). Only ascending rows that do not overlap make one, and only slices
 * whose step is a multiple of the pitch, on both sides. Order within a regular grid of pieces may
 * change. No copy is empty. */
uint32_t cuda_rects(const struct cuda_copy *copies, uint32_t count, uint64_t max_pitch,
		    struct cuda_rect *out, uint32_t room);
/* Pieces of at most CUDA_PIECE_NBYTES from `place` on, which moves; at most `room` are written. */
uint32_t cuda_split(const struct cuda_copy *copies, uint32_t count, struct cuda_place *place,
		    struct cuda_copy *out, uint32_t room);
bool cuda_is_aligned(const struct cuda_copy *copies, uint32_t count);	/* for the kernel */

/* ---- cuda_choose.c: pure ---- */

/* What is known of a segment when its way is chosen. */
struct cuda_shape {
	uint32_t kind;			/* enum kvio_copy_kind */
	uint32_t copies;		/* after coalescing */
	uint32_t rects, rows;		/* calls of the strided way (0: not worth it), their rows */
	uint64_t nbytes;
	bool aligned;
};

/* The cheapest way that is there, or LOOP. The kernel must win by a fifth: it takes SMs. */
uint32_t cuda_choose(const struct kvio_copy_cost costs[KVIO_NUM_COPY_WAYS],
		     const struct cuda_shape *shape);
double cuda_predict_ns(const struct kvio_copy_cost *cost, uint32_t way,
		       const struct cuda_shape *shape);
/* The rule where nothing was measured; `there` stays as it is. */
void cuda_rule_of_thumb(struct kvio_copy_cost costs[KVIO_NUM_COPY_WAYS]);

/* What is measured: `calls` pieces, or rectangles of `rows` rows (1: of the other ways). */
struct cuda_sample {
	uint32_t calls, rows;
	uint64_t width;			/* bytes of a piece or row */
};
#define CUDA_NUM_SAMPLES 4u		/* the last one is of the strided way alone */
extern const struct cuda_sample cuda_samples[CUDA_NUM_SAMPLES];		/* of pieces */
extern const struct cuda_sample cuda_strided_samples[CUDA_NUM_SAMPLES];
/* The cost that explains the time of each sample; nothing in it is below 0. `there`: true. */
struct kvio_copy_cost cuda_cost_of(uint32_t way, const double ns[CUDA_NUM_SAMPLES]);
/* The fewest SMs that reach 95 % of the best rate both ways: an index into ns[..][count], times of
 * the same bytes. */
uint32_t cuda_fewest(const double (*ns)[2], uint32_t count);

/* ---- cuda_ways.c and cuda_measure.c ---- */

/* One segment under way. */
struct cuda_carry {
	struct cuda_dev *dev;
	CUstream stream;		/* never NULL: the batched call refuses that one */
	uint32_t kind;			/* enum kvio_copy_kind */
	uint32_t sms;			/* for the kernel */
	struct cuda_chunk *chunks;	/* taken, to be given back once the stream has passed */
	uint64_t copies[KVIO_NUM_COPY_WAYS];	/* calls, or descriptors */
	uint32_t num_rects;		/* planned already, in dev->rects; 0: not yet */
	struct cuda_failure failure;
};

/* Puts a segment into the stream, all of it of one kind, by nic->copy_way, and counts it in the
 * NIC; `copies` may be changed. Bits of enum kvio_copy_way: what carried it (two of them where
 * chunks ran out); 0: it was empty; -1 with `failure` (some of it may be in the stream). Chunks
 * are put in front of *chunks, after a failure too. */
int cuda_submit(struct cuda_nic *nic, CUstream stream, uint32_t kind, struct cuda_copy *copies,
		uint32_t count, struct cuda_chunk **chunks, struct cuda_failure *failure);
/* The same by one way, of copies that are coalesced and not empty. Bits, or -1. */
int cuda_carry_by(struct cuda_carry *carry, uint32_t way, struct cuda_copy *copies,
		  uint32_t count);
/* A way that the driver has refused is not taken again between these memories. */
void cuda_rule_out(struct cuda_dev *dev, uint32_t kind, uint32_t way,
		   const struct cuda_failure *failure);
/* Chunks back to the device, in any order. */
void cuda_chunks_give(struct cuda_dev *dev, struct cuda_chunk *chunks);
/* Loads the kernel from PTX, makes the chunks, and fills info.missing and info.costs (by the rule
 * of thumb). The context is current, as in the next two. */
void cuda_ways_open(struct cuda_dev *dev, const char *ptx);
void cuda_ways_close(struct cuda_dev *dev);
/* Measures info.costs and info.kernel_sms, under the lock: some tens of milliseconds. Once for a
 * device, in the first open that chooses by itself. Without memory info.measured stays 0. */
void cuda_measure(struct cuda_dev *dev, uint32_t max_sms);

#endif
