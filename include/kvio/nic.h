/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVIO_NIC_H
#define KVIO_NIC_H
/*
 * NICs: registered memory, queue pairs, batches, completions; one table of operations for every
 * provider. Every int result is >= 0, or -errno. Nothing here calls into Python.
 *
 *   region    memory a NIC may touch, under a key of kvio's own
 *   qp        queue pair: one connection in one traffic class (its sl and tclass)
 *   post      hands work requests to a queue pair and rings its doorbell once
 *   batch     one transfer: work requests, a status for each, one completion for all
 *   far       the regions of the process at the other end of a connection, as we know them
 *   domain    what shares one lock: the NICs of one soft fabric, or one verbs NIC
 */
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvio/block.h"

#define KVIO_NUM_SL 16
#define KVIO_NUM_VL 15		/* virtual lanes of data: 0..14; 15 is management's alone */
#define KVIO_MAX_VLARB 64		/* entries of an arbitration table */
#define KVIO_MAX_SGE 64
#define KVIO_MAX_RAILS 8		/* devices that one NIC stripes over */
#define KVIO_MAX_REGIONS (1u << 16)	/* of a NIC: nor can a peer make us remember more */
#define KVIO_NEVER UINT64_MAX	/* a time that does not come */

enum kvio_access {
	KVIO_LOCAL_WRITE = 1,
	KVIO_REMOTE_WRITE = 2,	/* the values of enum ibv_access_flags */
	KVIO_REMOTE_READ = 4,
};

/*
 * Work completion status: the values of enum ibv_wc_status; CANCELED is ours, and so are the two
 * that say why: LOC_PROT_ERR and REM_ACCESS_ERR of memory that its process keeps to itself.
 */
enum kvio_wc_status {
	KVIO_WC_SUCCESS = 0,
	KVIO_WC_LOC_LEN_ERR = 1,
	KVIO_WC_LOC_QP_OP_ERR = 2,
	KVIO_WC_LOC_EEC_OP_ERR = 3,
	KVIO_WC_LOC_PROT_ERR = 4,
	KVIO_WC_WR_FLUSH_ERR = 5,
	KVIO_WC_MW_BIND_ERR = 6,
	KVIO_WC_BAD_RESP_ERR = 7,
	KVIO_WC_LOC_ACCESS_ERR = 8,
	KVIO_WC_REM_INV_REQ_ERR = 9,
	KVIO_WC_REM_ACCESS_ERR = 10,
	KVIO_WC_REM_OP_ERR = 11,
	KVIO_WC_RETRY_EXC_ERR = 12,
	KVIO_WC_RNR_RETRY_EXC_ERR = 13,
	KVIO_WC_REM_ABORT_ERR = 16,
	KVIO_WC_FATAL_ERR = 19,
	KVIO_WC_RESP_TIMEOUT_ERR = 20,
	KVIO_WC_GENERAL_ERR = 21,
	KVIO_WC_CANCELED = 64,
	KVIO_WC_LOC_PRIVATE = 65,
	KVIO_WC_REM_PRIVATE = 66,
};

enum kvio_qp_state { KVIO_QP_RESET, KVIO_QP_READY, KVIO_QP_ERROR };

struct kvio_nic;
struct kvio_qp;
struct kvio_batch;
struct kvio_fabric;
struct kvio_nic_ops;

/* The NICs that share a lock. Whoever drives one drives all of them. */
struct kvio_domain {
	pthread_mutex_t lock;
	pthread_cond_t moved;		/* a batch drained, or a virtual clock advanced */
	struct kvio_nic *nics;
	bool has_event_fd;		/* somebody sleeps on it: keep it armed */
	uint32_t waiting;		/* threads at the lock; atomic */
	uint64_t births;		/* of regions, ours and other processes' */
};

enum kvio_nic_flags {
	KVIO_NIC_BUSY_POLL = 1,		/* waiting spins, no completion channel */
};

/* cuda: how bytes are moved. As bits (1 << way) they say how a batch was. */
enum kvio_copy_way {
	KVIO_COPY_LOOP,			/* one cuMemcpyAsync a piece */
	KVIO_COPY_BATCH,		/* cuMemcpyBatchAsync: CUDA 12.8 */
	KVIO_COPY_STRIDED,		/* cuMemcpy2DAsync, cuMemcpy3DAsync */
	KVIO_COPY_KERNEL,		/* a few SMs gather and scatter */
	KVIO_NUM_COPY_WAYS,
	KVIO_COPY_AUTO = KVIO_NUM_COPY_WAYS,	/* by sizes, as measured once */
};

/* cuda: between which kinds of memory. */
enum kvio_copy_kind { KVIO_H2H, KVIO_H2D, KVIO_D2H, KVIO_D2D, KVIO_NUM_COPY_KINDS };

struct kvio_nic_params {
	const char *device;		/* verbs: "HCA[:port][,HCA[:port]...]"; cuda: ordinal */
	const char *ptx;		/* cuda: copy_kernel.ptx; NULL: no kernel */
	struct kvio_fabric *fabric;	/* soft: the network this NIC is plugged into */
	uint64_t bytes_per_s;		/* soft: link rate each way; 0 = as fast as memory */
	uint64_t pd;			/* verbs: another library's ibv_pd*; 0: one of our own */
	int32_t gid_index;		/* verbs: -1 chooses */
	uint32_t mtu;
	uint32_t queue_depth;		/* work requests per queue pair */
	uint32_t max_sge;
	uint32_t flags;			/* enum kvio_nic_flags */
	uint32_t copy_way;		/* cuda: enum kvio_copy_way, or KVIO_COPY_AUTO */
	uint32_t max_sms;		/* cuda: the most SMs that the kernel takes */
	char *why;			/* filled with a text if open fails; NULL: not wanted */
	size_t why_room;
};

/*
 * Registered memory. `key` is kvio's own, for both ends: an index in the low 24 bits, above it a
 * generation that is never repeated, so a stale key is refused and never means another region.
 * The provider keeps its lkey and rkey (of each rail and slice) behind `provider`.
 */
struct kvio_region {
	uint64_t addr;
	uint64_t nbytes;
	uint64_t key;
	uint32_t access;
	uint32_t holds;			/* batches in flight that name it, from either end */
	uint64_t born;			/* the domain's births, with it */
	void *provider;			/* in a far table: struct kvio_rkeys */
};

/* Regions by the index in their key. */
struct kvio_table {
	struct kvio_region **regions;
	uint32_t length;		/* holes included */
	uint32_t first;			/* no hole before this one */
};

/*
 * What one end tells the other of a region, as it travels (little endian), followed by num_rkeys
 * rkeys of 4 bytes: those of slice 0 on every rail, then of slice 1, ...
 */
struct kvio_region_ad {
	uint64_t key;
	uint64_t addr;
	uint64_t nbytes;
	uint64_t slice_nbytes;		/* all slices but the last one */
	uint32_t access;
	uint32_t num_rkeys;
};

/* `provider` of a region in a far table. */
struct kvio_rkeys {
	uint64_t slice_nbytes;
	const uint8_t *mapping;		/* soft: where its bytes are mapped here; NULL: nowhere */
	bool is_private;		/* soft: and never were */
	uint32_t num_rkeys;
	uint32_t rkeys[];
};

/* The other end's regions. One for a connection, shared by its queue pairs. */
struct kvio_far {
	struct kvio_nic *nic;
	struct kvio_table table;
	uint32_t num_rails;		/* of the other end; 0: its rkeys are not used */
	uint32_t qps;			/* that refer to it */
	void *provider;
};

struct kvio_qp_params {
	uint8_t sl;			/* 0..15 */
	uint8_t tclass;			/* GRH traffic class / IP ToS byte */
	uint32_t depth;			/* 0: the NIC's queue_depth */
	struct kvio_far *far;		/* the peer is another process's; NULL: of this fabric */
};

/* What a handshake carries from one end to the other, for each rail, as it travels. */
struct kvio_endpoint {
	uint32_t qpn;
	uint32_t psn;
	uint32_t mtu;
	uint32_t rd_atomic;
	uint16_t lid;
	uint8_t sl;
	uint8_t tclass;
	uint8_t gid[16];
};

/* Read back from the device, not remembered. */
struct kvio_qp_info {
	struct kvio_endpoint local[KVIO_MAX_RAILS];
	uint32_t num_rails;
	uint32_t state;			/* enum kvio_qp_state */
	uint32_t depth;
	uint32_t max_sge;
	uint32_t free;			/* work requests that a post would take now */
	uint32_t in_flight;		/* batches */
	char why[192];			/* what the device said when it failed; "": nothing */
};

enum kvio_post_flags {
	KVIO_POST_SIGNAL_ALL = 1,	/* a completion for each, not only for the last */
	KVIO_POST_FEED = 2,		/* in answer to a completion: its time is the doorbell's */
	KVIO_POST_AFTER = 4,		/* cuda: not before what is in `stream` now */
};

/*
 * One post: one doorbell. The descriptors are copied; offsets are added to their addresses while
 * copying, so one set of descriptors serves every layer. Work request i completes as wr_id + i.
 * Only the last one is signalled; failed ones are always reported.
 */
struct kvio_post {
	const struct kvio_wr *wrs;
	const struct kvio_sge *sges;
	uint64_t local_offset;
	uint64_t remote_offset;
	uint64_t wr_id;
	uint64_t stream;		/* with KVIO_POST_AFTER: a CUstream */
	uint32_t count;
	uint32_t num_sges;
	uint32_t flags;			/* enum kvio_post_flags */
	uint32_t opcode;		/* 0, or what every work request must be */
	uint64_t births;		/* the domain's when it was submitted; set by batch.c */
};

struct kvio_wc {
	uint64_t wr_id;
	uint64_t time_ns;		/* when it became visible */
	uint32_t status;		/* enum kvio_wc_status */
	uint32_t ways;			/* cuda: bits of enum kvio_copy_way */
};

/* Bytes and packets are counted where packets are copied. */
struct kvio_counters {
	uint64_t doorbells;
	uint64_t work_requests;
	uint64_t signalled;		/* completions that were asked for */
	uint64_t completions;		/* all, with those of failures */
	uint64_t errors;		/* work requests that failed, with flushes and cancels */
	uint64_t tx_packets;
	uint64_t rx_packets;
	uint64_t tx_busy_ns;
	uint64_t rx_busy_ns;
	uint64_t tx_bytes[KVIO_NUM_SL];
	uint64_t rx_bytes[KVIO_NUM_SL];
};

/* What `kvio doctor` and errors say of a NIC. */
struct kvio_nic_info {
	uint32_t num_rails;
	uint32_t max_sge;		/* of a WRITE */
	uint32_t max_sge_rd;		/* of a READ */
	uint32_t max_rd_atomic;
	uint64_t max_msg_nbytes;
	uint64_t async_events;		/* what the device has said unasked: a port down, ... */
	uint64_t pd;			/* addresses of the library's own objects, of rail 0 */
	uint64_t context;
	struct kvio_rail_info {
		char device[64];
		char netdev[32];
		char link_layer[16];
		char gid_type[16];
		uint8_t gid[16];
		int32_t gid_index;
		int32_t numa_node;
		uint32_t port;
		uint32_t mtu;
		uint32_t lid;
		uint32_t uses_wr_api;	/* posts by ibv_wr_start, not ibv_post_send */
		uint64_t bits_per_s;
	} rails[KVIO_MAX_RAILS];
};

/*
 * A provider. All are called with the domain's lock held, except open and close.
 * Device addresses, dma-buf exports, completion channels: the provider's business.
 */
struct kvio_nic_ops {
	const char *name;
	int (*open)(struct kvio_nic **out, const struct kvio_nic_params *params);
	/* Frees everything. Queue pairs and regions are gone by then. */
	void (*close)(struct kvio_nic *nic);
	int (*reg)(struct kvio_nic *nic, struct kvio_region *region);
	int (*dereg)(struct kvio_nic *nic, struct kvio_region *region);
	/* Rkeys of one region, as in kvio_region_ad: how many there are; at most `room` written.
	 * NULL: this provider has none. */
	int (*rkeys)(struct kvio_nic *nic, const struct kvio_region *region,
		     uint64_t *slice_nbytes, uint32_t *out, uint32_t room);
	/* A far table comes or goes; NULL: nothing to do. */
	int (*far_open)(struct kvio_far *far);
	void (*far_close)(struct kvio_far *far);
	int (*qp_create)(struct kvio_nic *nic, const struct kvio_qp_params *params,
			 struct kvio_qp **out);
	/* `count`: rails of the other end. */
	int (*qp_connect)(struct kvio_qp *qp, const struct kvio_endpoint *remote, uint32_t count);
	int (*qp_query)(struct kvio_qp *qp, struct kvio_qp_info *out);
	/* To the error state: what is queued flushes; at once where no device could write later. */
	int (*qp_fail)(struct kvio_qp *qp);
	/* Out of the error state, to be connected again. -EBUSY while something is queued. */
	int (*qp_reset)(struct kvio_qp *qp);
	void (*qp_destroy)(struct kvio_qp *qp);
	/* cuda: whatever is posted from now on starts after what is in the stream now. -EXDEV: not
	 * a stream of this device's primary context. NULL: there are no streams. */
	int (*after)(struct kvio_qp *qp, uint64_t stream);
	/* cuda: the stream's later work starts after the work request wr_id, which was posted and
	 * has not been reported. -EIO: it has failed. NULL as above. */
	int (*before)(struct kvio_qp *qp, uint64_t wr_id, uint64_t stream);
	/* Number posted: short when the queue is full. */
	int (*post)(struct kvio_qp *qp, const struct kvio_post *post);
	/* Give up those of wr_id .. wr_id + count that have not started: KVIO_WC_CANCELED. */
	int (*cancel)(struct kvio_qp *qp, uint64_t wr_id, uint32_t count);
	/* Let time pass in the domain, at most to now_ns. 1: completions are there, call again;
	 * 2: a bounded share of the copying is done, call again; 0: nothing left to do. */
	int (*drive)(struct kvio_nic *nic, uint64_t now_ns);
	int (*poll)(struct kvio_nic *nic, struct kvio_wc *wc, uint32_t count);
	uint64_t (*clock)(struct kvio_nic *nic);
	/* Sleep, the lock released, until something may have happened; at most timeout_ns. */
	int (*sleep)(struct kvio_nic *nic, uint64_t timeout_ns);
	/* An fd that is readable when driving would complete something; arm: from now on. */
	int (*event_fd)(struct kvio_nic *nic);
	int (*arm)(struct kvio_nic *nic);
	void (*counters)(struct kvio_nic *nic, struct kvio_counters *out);
	/* NULL: nothing to tell. */
	void (*info)(struct kvio_nic *nic, struct kvio_nic_info *out);
	/* The NIC is closed, queue pairs and regions are gone: give the device back now, not only
	 * when `close` frees the rest. NULL: nothing to give. */
	void (*shut)(struct kvio_nic *nic);
};

extern const struct kvio_nic_ops kvio_soft_ops;
extern const struct kvio_nic_ops kvio_verbs_ops;
extern const struct kvio_nic_ops kvio_cuda_ops;

/* ---- what users of a NIC call; these take the domain's lock ---- */

int kvio_nic_open(struct kvio_nic **out, const struct kvio_nic_ops *ops,
		  const struct kvio_nic_params *params);
/* -EBUSY while a batch is in flight or a region is in use. Queue pairs and regions are gone
 * afterwards; drained batches may still be looked at until kvio_nic_free. */
int kvio_nic_close(struct kvio_nic *nic);
/* Until nothing is in flight, at most timeout_ns; `cancel` gives up what has not started.
 * How many batches are left. */
int kvio_nic_drain(struct kvio_nic *nic, int cancel, uint64_t timeout_ns);
/* For destructors: gives up what is in flight. NULL is fine. Not 0: that many batches are still the
 * device's, which neither says what became of them nor lets their queue pair go. Then nothing was
 * freed, ever will be, and their memory must never be used for anything else. */
int kvio_nic_free(struct kvio_nic *nic);
void kvio_nic_counters(struct kvio_nic *nic, struct kvio_counters *out);
uint64_t kvio_nic_clock(struct kvio_nic *nic);
int kvio_nic_in_flight(struct kvio_nic *nic);
int kvio_nic_event_fd(struct kvio_nic *nic);
/* Complete what can be completed now, on all NICs of the domain. */
int kvio_nic_drive(struct kvio_nic *nic);

/* -ENOSPC: KVIO_MAX_REGIONS are there already. */
int kvio_nic_reg(struct kvio_nic *nic, uint64_t addr, uint64_t nbytes, uint32_t access,
		 uint64_t *key);
int kvio_nic_dereg(struct kvio_nic *nic, uint64_t key);	/* -EBUSY in flight, -ENOENT unknown */
/* Does a batch of this NIC that is in flight name the region? */
int kvio_nic_names(struct kvio_nic *nic, uint64_t key);

/* The advertisement of a region that others may use: its length, or -ENOSPC if it is longer than
 * room, -ENOENT for an unknown key, -EACCES if no remote access is given. */
int64_t kvio_nic_describe(struct kvio_nic *nic, uint64_t key, void *out, size_t room);
void kvio_nic_look(struct kvio_nic *nic, struct kvio_nic_info *out);

/* num_rails: of the other end, as its queue pairs say; 0 where rkeys are not used. */
int kvio_far_open(struct kvio_nic *nic, uint32_t num_rails, struct kvio_far **out);
/* An advertisement came in; `mapping`: see kvio_rkeys. -EINVAL if it is malformed, -EEXIST. */
int kvio_far_add(struct kvio_far *far, const void *ad, size_t nbytes, const void *mapping);
int kvio_far_remove(struct kvio_far *far, uint64_t key);	/* -EBUSY in flight, -ENOENT */
int kvio_far_close(struct kvio_far *far);		/* -EBUSY while a queue pair refers to it */

int kvio_qp_create(struct kvio_nic *nic, const struct kvio_qp_params *params,
		   struct kvio_qp **out);
int kvio_qp_connect(struct kvio_qp *qp, const struct kvio_endpoint *remote, uint32_t count);
int kvio_qp_query(struct kvio_qp *qp, struct kvio_qp_info *out);
int kvio_qp_fail(struct kvio_qp *qp);
int kvio_qp_reset(struct kvio_qp *qp);
int kvio_qp_destroy(struct kvio_qp *qp);		/* -EBUSY in flight */

/*
 * Submit a batch. What does not fit into the queue is copied and follows by itself, with further
 * doorbells. -EINVAL for malformed scatter-gather lists or another opcode than post->opcode;
 * then nothing was posted. Unknown keys and bad bounds are completions, not errors of this call.
 */
int kvio_batch_post(struct kvio_qp *qp, const struct kvio_post *post, struct kvio_batch **out);
int kvio_batch_poll(struct kvio_batch *batch);		/* drives; 1 once drained */
/* Drives or sleeps, at most timeout_ns; 1 once drained, 0 otherwise. */
int kvio_batch_wait(struct kvio_batch *batch, uint64_t timeout_ns);
int kvio_batch_cancel(struct kvio_batch *batch);	/* then wait */
int kvio_batch_event_fd(struct kvio_batch *batch);	/* readable once drained */
void kvio_batch_put(struct kvio_batch *batch);		/* the caller lets go; it drains anyway */
/* cuda: later work in this CUstream starts after the batch; nobody waits here. 0 at once if it has
 * drained. -EAGAIN: not all of it is posted (the queue is full); -EIO: something of it has failed;
 * -EXDEV: not a stream of the device's primary context; -EOPNOTSUPP: no streams here. */
int kvio_batch_block_stream(struct kvio_batch *batch, uint64_t stream);

struct kvio_batch_info {
	uint32_t count;
	uint32_t drained;
	uint64_t nbytes;
	uint64_t submitted_ns;
	uint64_t completed_ns;
	const int32_t *status;		/* 0, -EINPROGRESS or -errno for each */
	const uint8_t *codes;		/* enum kvio_wc_status of those that failed */
	uint32_t ways;			/* cuda: bits of enum kvio_copy_way */
};
void kvio_batch_look(struct kvio_batch *batch, struct kvio_batch_info *out);

const char *kvio_wc_name(uint32_t status);
int kvio_wc_errno(uint32_t status);			/* as -errno */

/* ---- the soft provider's network and clock ---- */

/* An entry of an arbitration table. */
struct kvio_vlarb {
	uint8_t vl;
	uint8_t weight;			/* units of 64 bytes in its turn; 0: it is skipped */
};

/* Every port of the fabric arbitrates by these tables. */
struct kvio_fabric_params {
	bool virtual_clock;		/* stands at 0, moves by kvio_fabric_advance; else
					   CLOCK_MONOTONIC */
	uint8_t high_limit;		/* units of 4096 bytes; 0: one packet, 255: no bound */
	uint8_t sl2vl[KVIO_NUM_SL];
	uint32_t num_high, num_low;
	struct kvio_vlarb vlarb_high[KVIO_MAX_VLARB];
	struct kvio_vlarb vlarb_low[KVIO_MAX_VLARB];
};

/* -EINVAL: a table is too long, a VL is not one of data, or an SL maps to one without a weight,
 * whose packets would never leave. */
int kvio_fabric_open(struct kvio_fabric **out, const struct kvio_fabric_params *params);
void kvio_fabric_put(struct kvio_fabric *fabric);	/* freed with its last NIC */
int kvio_fabric_advance(struct kvio_fabric *fabric, uint64_t to_ns);
uint64_t kvio_fabric_now(struct kvio_fabric *fabric);
/* No completion becomes visible before this time; UINT64_MAX: nothing is under way. Where packets
 * wait for one another it is too early, never too late: advance, drive, ask again. */
uint64_t kvio_fabric_next(struct kvio_fabric *fabric);

/*
 * To another process of this host. Both rings are memfds, mapped here: `mine` is written by us and
 * read by the other end, `theirs` is mapped read-only; they stay mapped as long as the far table.
 * The descriptors are duplicated. wake_fd: an eventfd that the other end writes to wake us.
 */
struct kvio_soft_join {
	void *mine;
	const void *theirs;
	void *port;			/* the other NIC's, if it has a rate: see share_port */
	uint64_t ring_nbytes;		/* of each, at least KVIO_SOFT_RING_NBYTES */
	uint64_t bytes_per_s;		/* of the other NIC */
	int wake_fd, their_wake_fd;
	int pid_fd;			/* the other process: its end is that of the connection */
};
#define KVIO_SOFT_RING_NBYTES (128u + 8 * 1024 + 16 * (128 + 64 * 1024))
#define KVIO_SOFT_PORT_NBYTES 128u

/* Before the first queue pair. -EINVAL, -EISCONN. */
int kvio_soft_far_join(struct kvio_far *far, const struct kvio_soft_join *join);
/* The connection is over: what is in flight fails with RETRY_EXC_ERR. */
int kvio_soft_far_lost(struct kvio_far *far);
/* From now on the NIC's sending port is reserved in this page, which others map too. -EEXIST. */
int kvio_soft_share_port(struct kvio_nic *nic, void *page, size_t nbytes);

/* Faults to inject, for tests. */
enum kvio_soft_fault {
	KVIO_FAULT_DROP = 1,		/* the nth packet from now that leaves this NIC is lost */
	KVIO_FAULT_DELAY = 2,		/* completions of this NIC become visible value ns later */
	KVIO_FAULT_STATUS = 3,		/* the nth work request from now completes with value */
};
int kvio_soft_fault(struct kvio_nic *nic, uint32_t fault, uint64_t nth, uint64_t value);

/* The floor for benchmarks: one memcpy per work request, remote to local, nothing checked. */
void kvio_memcpy_loop(const struct kvio_wr *wrs, size_t count);

_Static_assert(sizeof(struct kvio_region_ad) == 40, "it travels");
_Static_assert(sizeof(struct kvio_endpoint) == 36, "it travels");

#endif
