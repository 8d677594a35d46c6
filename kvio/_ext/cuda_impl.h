/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVIO_CUDA_IMPL_H
#define KVIO_CUDA_IMPL_H
/*
 * The provider cuda: what its files know of each other. docs/gpu.md is the design note.
 *
 *   cuda_api.h      the part of CUDA's driver interface that is used, by its documentation
 *   cuda_lib.c      libcuda, opened at run time, and its errors
 *   cuda_dev.c      a device: its primary context, pools of events and chunks, one lock
 *   cuda_mem.c      regions; memory of our own, pinned and on the device
 *   cuda_nic.c      NICs and queue pairs (one stream each)
 *   cuda_post.c     work requests: checked, then segments of one kind; errors in order
 *   cuda_poll.c     events, completions, sleeping, event loops, users' streams
 *   cuda_plan.c     pieces that touch become one, pieces a stride apart a rectangle (pure)
 *   cuda_ways.c     carries a segment out in one of four ways
 *   cuda_choose.c   which way (pure); cuda_measure.c: what each costs on this machine
 *
 * Every call of the driver is made with the device's context current (`cuda_enter`) and, but for
 * opening and closing, with the domain's lock held. The driver never calls us with that lock: its
 * host function writes to an eventfd and does nothing else.
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

/* What is shared by all NICs of one device in this process. */
struct cuda_dev {
	struct kvio_domain domain;
	struct cuda_dev *next;
	int ordinal;
	int pid;			/* a forked child leaves the driver alone */
	uint32_t refs;			/* under the list's lock */
	CUdevice device;
	CUcontext context;
	struct cuda_failure dead;	/* the context's sticky error */
	struct kvio_cuda_info info;	/* name, versions, `missing`, costs */
	CUmodule module;
	CUfunction kernel;		/* NULL: none */
	bool maps_host_as_is;		/* registered memory has the same address on the device */

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
	int wake_fd;			/* eventfd: the driver's host function writes it */
	int epoll_fd, timer_fd, kick_fd;	/* see cuda_poll.c */
	uint32_t num_armed;		/* queue pairs whose next event will write wake_fd */
	bool sleeping, kicked;
};

struct cuda_nic {
	struct kvio_nic base;
	struct cuda_dev *dev;
	uint32_t copy_way;		/* enum kvio_copy_way or KVIO_COPY_AUTO */
	uint32_t max_sms;
	bool busy_poll;
	struct kvio_counters counters;
	uint64_t copies[KVIO_NUM_COPY_WAYS];
	uint64_t segments[KVIO_NUM_COPY_WAYS];
};

/* What was handed to the stream by one post, or work requests that fail in their turn. */
struct cuda_op {
	CUevent event;			/* NULL: nothing was (all fail, or were empty) */
	uint64_t wr_id;			/* of the first one that is to be reported */
	uint32_t count;			/* completions to report: 1 (the last one) or all */
	uint32_t status;		/* enum kvio_wc_status, of `wr_id`; later ones flush */
	uint32_t ways;
	uint32_t work_requests;		/* places in the queue that it takes */
	bool every;			/* a completion for each of `count`, not only the last */
	struct cuda_chunk *chunks;
};

struct cuda_qp {
	struct kvio_qp base;
	CUstream stream;
	CUstream notify;		/* made when somebody first sleeps */
	struct cuda_qp *remote;
	uint32_t qpn;
	uint32_t state;			/* enum kvio_qp_state */
	bool armed;			/* a host function waits for the first op's event */
	struct cuda_op *ops;		/* a ring */
	uint32_t mask, head, tail;
	char why[192];
};

/* `provider` of a region. */
struct cuda_region {
	bool is_device;
	bool registered;		/* by us, with cuMemHostRegister */
	uint64_t device_delta;		/* host memory: device address - host address */
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

int cuda_dev_get(int ordinal, const char *ptx, struct cuda_dev **out, char *why, size_t room);
void cuda_dev_put(struct cuda_dev *dev);
/* The device's context, current until cuda_leave; whatever was current comes back. False: it
 * cannot be had (a forked child, a dead driver). */
bool cuda_enter(struct cuda_dev *dev);
void cuda_leave(struct cuda_dev *dev);
CUevent cuda_event_take(struct cuda_dev *dev);		/* NULL: out of memory */
void cuda_event_give(struct cuda_dev *dev, CUevent event);
/* Remembers a sticky error. Returns code. */
int cuda_note(struct cuda_dev *dev, int code, const char *call);

/* ---- cuda_mem.c ---- */

int cuda_reg(struct kvio_nic *nic, struct kvio_region *region);
int cuda_dereg(struct kvio_nic *nic, struct kvio_region *region);

/* ---- cuda_post.c ---- */

int cuda_post(struct kvio_qp *qp, const struct kvio_post *post);
int cuda_cancel(struct kvio_qp *qp, uint64_t wr_id, uint32_t count);

/* ---- cuda_poll.c ---- */

int cuda_drive(struct kvio_nic *nic, uint64_t now_ns);
int cuda_poll(struct kvio_nic *nic, struct kvio_wc *wc, uint32_t count);
int cuda_sleep(struct kvio_nic *nic, uint64_t timeout_ns);
int cuda_event_fd(struct kvio_nic *nic);
int cuda_arm(struct kvio_nic *nic);
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
 * pitch above max_pitch; `out` has room for count. How many. Only ascending rows that do not
 * overlap make one, and only slices whose step is a multiple of the pitch, on both sides. Order
 * within a regular grid of pieces may change. No copy is empty. */
uint32_t cuda_rects(const struct cuda_copy *copies, uint32_t count, uint64_t max_pitch,
		    struct cuda_rect *out);
/* Pieces of at most CUDA_PIECE_NBYTES from `place` on, which moves; at most `room` are written. */
uint32_t cuda_split(const struct cuda_copy *copies, uint32_t count, struct cuda_place *place,
		    struct cuda_copy *out, uint32_t room);
bool cuda_is_aligned(const struct cuda_copy *copies, uint32_t count);	/* for the kernel */

/* ---- cuda_choose.c: pure ---- */

/* What is known of a segment when its way is chosen. */
struct cuda_shape {
	uint32_t kind;			/* enum kvio_copy_kind */
	uint32_t copies;		/* after coalescing */
	uint32_t rects, rows;		/* calls of the strided way, and rows in them */
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

/* ---- cuda_ways.c and cuda_measure.c ---- */

/* One segment under way. */
struct cuda_carry {
	struct cuda_dev *dev;
	CUstream stream;		/* never NULL: the batched call refuses that one */
	uint32_t kind;			/* enum kvio_copy_kind */
	uint32_t sms;			/* for the kernel */
	struct cuda_chunk *chunks;	/* taken, to be given back once the stream has passed */
	uint64_t copies[KVIO_NUM_COPY_WAYS];	/* calls, or descriptors */
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
