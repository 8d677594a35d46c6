/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVIO_VERBS_H
#define KVIO_VERBS_H
/*
 * The verbs provider: verbs_lib.c opens libibverbs, verbs_nic.c devices, verbs_rail.c one device's
 * port (GID, completion queues), verbs_mr.c and verbs_gpu.c register, verbs_qp.c makes and connects
 * queue pairs, verbs_stage.c and verbs_post.c post, verbs_poll.c hears what became of it.
 *
 * A queue pair of kvio is one RC queue pair on each rail. It keeps a record of every work request
 * in posting order; each lies on one rail as one or more pieces (what the device is given), which
 * the rail numbers. A completion on a rail settles all pieces up to its own, and records are
 * reported from the head of the queue, so completions are in posting order whatever rail was
 * faster. The first failure moves all rails to the error state; all that was posted is heard of
 * (a flush for each), before the last of it is reported.
 */
#include "nic_impl.h"

#if defined(__has_include)
#if __has_include(<infiniband/verbs.h>)
#define KVIO_HAVE_VERBS 1
#endif
#endif

#ifdef KVIO_HAVE_VERBS
#include <infiniband/verbs.h>

#define VERBS_LIBRARY "libibverbs.so.1"
#define VERBS_SLICE_BYTES (UINT64_C(3) << 30)	/* < 3.5 GiB: what every device registers at once */
#define VERBS_SPARE 64			/* places for pieces beyond the depth of a queue pair */
#define VERBS_TIMER (2 * KVIO_MAX_RAILS)	/* in epoll_fd, behind what the rails have there */
#define VERBS_LOCAL 0xff		/* a record that no rail has */
#define VERBS_NUMBER_BITS 22		/* of the two numbers in a wr_id; the rest is the slot */
#define VERBS_NUMBER ((1u << VERBS_NUMBER_BITS) - 1)
#define VERBS_MAX_QPS (1u << (64 - 2 * VERBS_NUMBER_BITS))

/* What of libibverbs is called by its symbol. The macros of its header stay out of the way. */
struct verbs_lib {
	struct ibv_device **(*get_device_list)(int *);
	void (*free_device_list)(struct ibv_device **);
	const char *(*get_device_name)(struct ibv_device *);
	struct ibv_context *(*open_device)(struct ibv_device *);
	int (*close_device)(struct ibv_context *);
	int (*query_device)(struct ibv_context *, struct ibv_device_attr *);
	int (*query_port)(struct ibv_context *, uint8_t, void *);	/* of old providers */
	int (*query_gid)(struct ibv_context *, uint8_t, int, union ibv_gid *);
	ssize_t (*query_gid_table)(struct ibv_context *, struct ibv_gid_entry *, size_t, uint32_t,
				   size_t);
	struct ibv_pd *(*alloc_pd)(struct ibv_context *);
	int (*dealloc_pd)(struct ibv_pd *);
	struct ibv_mr *(*reg_mr)(struct ibv_pd *, void *, size_t, int);
	struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *, uint64_t, size_t, uint64_t, int, int);
	int (*dereg_mr)(struct ibv_mr *);
	struct ibv_comp_channel *(*create_comp_channel)(struct ibv_context *);
	int (*destroy_comp_channel)(struct ibv_comp_channel *);
	struct ibv_cq *(*create_cq)(struct ibv_context *, int, void *, struct ibv_comp_channel *,
				    int);
	int (*destroy_cq)(struct ibv_cq *);
	int (*get_cq_event)(struct ibv_comp_channel *, struct ibv_cq **, void **);
	void (*ack_cq_events)(struct ibv_cq *, unsigned int);
	int (*get_async_event)(struct ibv_context *, struct ibv_async_event *);
	void (*ack_async_event)(struct ibv_async_event *);
	struct ibv_qp *(*create_qp)(struct ibv_pd *, struct ibv_qp_init_attr *);
	struct ibv_qp_ex *(*qp_to_qp_ex)(struct ibv_qp *);
	int (*modify_qp)(struct ibv_qp *, struct ibv_qp_attr *, int);
	int (*query_qp)(struct ibv_qp *, struct ibv_qp_attr *, int, struct ibv_qp_init_attr *);
	int (*destroy_qp)(struct ibv_qp *);
};

/* Room for `room` completions; it never overruns, for no more than that can be posted to its
 * queue pairs: `taken`. */
struct verbs_cq {
	struct ibv_cq *cq;
	uint32_t room, taken;
	bool armed;			/* the next completion is an event on the channel */
};

struct verbs_rail {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct verbs_cq **cqs;
	uint32_t num_cqs;
	bool owns_context, owns_pd, dead;
	uint8_t port;
	bool is_global;			/* addresses by GID */
	int gid_index;
	union ibv_gid gid;
	struct ibv_port_attr port_attr;
	struct ibv_device_attr device;
	char name[64], netdev[32];
	const char *gid_type;
};

struct verbs_nic {
	struct kvio_nic base;
	struct kvio_domain own_domain;
	struct verbs_rail rails[KVIO_MAX_RAILS];
	uint32_t num_rails;
	uint32_t mtu;			/* what was asked for, in bytes */
	uint32_t max_sge_rd;
	uint32_t max_msg;
	uint32_t max_pieces;		/* places in a send queue of the device, at most */
	uint64_t slice_nbytes;
	uint8_t timeout, retry_cnt;
	bool busy_poll, uses_wr_api;
	struct verbs_qp **slots;	/* by the number in wr_ids; NULL: free */
	uint32_t num_slots;
	struct verbs_qp *moved;		/* queue pairs of which something may be reported */
	struct ibv_send_wr *wrs;	/* one post, on its way to the device */
	struct ibv_sge *sges;
	int epoll_fd;			/* all channels and asynchronous events */
	int kick_fd;			/* wakes the thread that sleeps on the above */
	int timer_fd;			/* so does that, at */
	uint64_t silent_ns;		/* when some queue pair in error should have flushed */
	bool sleeping, kicked;
	uint32_t sleep_in_flight;	/* batches when it fell asleep */
	uint32_t num_armed, drives;
	uint64_t async_events;
	struct kvio_counters counters;
};

struct verbs_record {			/* one work request of kvio */
	uint64_t wr_id;
	uint32_t end;			/* the rail's piece number after its last */
	uint32_t length;
	uint8_t rail;			/* or VERBS_LOCAL: the device never had it */
	uint8_t status;
	bool report;			/* even if it succeeds */
	bool read;
};

struct verbs_end {			/* a queue pair of the device */
	struct ibv_qp *qp;
	struct ibv_qp_ex *ex;		/* NULL: chains of ibv_post_send */
	struct verbs_cq *cq;
	uint32_t room;			/* places in its send queue */
	uint32_t done, tail;		/* piece numbers: heard of, given out */
	uint32_t psn;
};

struct verbs_qp {
	struct kvio_qp base;
	struct verbs_qp *next_moved;
	struct verbs_end ends[KVIO_MAX_RAILS];
	uint32_t num_rails;		/* of the connection: of the end that has fewer */
	uint32_t slot;
	uint32_t state;			/* enum kvio_qp_state */
	struct verbs_record *records;
	uint32_t mask, head, tail;
	uint32_t next_rail;		/* for batches too small to be dealt out */
	uint64_t failed_ns;
	bool is_moved;
	bool spoiled;			/* a work request that must fail is queued */
	bool flushing;			/* a failure was reported */
};

struct verbs_region {
	uint64_t slice_nbytes;
	uint32_t num_slices, num_mrs;
	struct ibv_mr **mrs;
	uint32_t lkeys[];		/* slice-major, rail-minor, as the rkeys that travel */
};

static inline struct verbs_nic *verbs_nic_of(const struct verbs_qp *qp)
{
	return (struct verbs_nic *)qp->base.nic;
}

static inline struct verbs_record *verbs_record_at(const struct verbs_qp *qp, uint32_t number)
{
	return &qp->records[number & qp->mask];
}

/* Something of this queue pair may be reported. */
static inline void verbs_moved(struct verbs_qp *qp)
{
	struct verbs_nic *nic = verbs_nic_of(qp);

	if (qp->is_moved)
		return;
	qp->is_moved = true;
	qp->next_moved = nic->moved;
	nic->moved = qp;
}

/* verbs_lib.c; `verbs` is filled once by verbs_load. */
extern struct verbs_lib verbs;
int verbs_load(char *why, size_t room);
int verbs_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *out);

/* verbs_rail.c: opens rail `rail` on a device's context (which it then owns, unless pd is given)
 * and port, 0 for the first active one. `why` says what is wrong. */
int verbs_rail_open(struct verbs_nic *nic, struct verbs_rail *rail, int gid_index, char *why,
		    size_t room);
void verbs_rail_close(struct verbs_rail *rail);
struct verbs_cq *verbs_cq_take(struct verbs_nic *nic, struct verbs_rail *rail, uint32_t places);

/* verbs_mr.c */
int verbs_reg(struct kvio_nic *nic, struct kvio_region *region);
int verbs_dereg(struct kvio_nic *nic, struct kvio_region *region);
int verbs_rkeys(struct kvio_nic *nic, const struct kvio_region *region, uint64_t *slice_nbytes,
		uint32_t *out, uint32_t room);

/* verbs_gpu.c: a GPU's memory, which consists of segments that are physically one. From its export
 * on, base and nbytes are the dma-buf's, and fd is the caller's. */
struct verbs_segment {
	uint64_t base, nbytes;
	int fd;
};
bool verbs_gpu_has(uint64_t addr);
int verbs_gpu_segment(uint64_t addr, struct verbs_segment *out);
int verbs_gpu_export(struct verbs_segment *segment);

/* verbs_qp.c */
int verbs_qp_create(struct kvio_nic *nic, const struct kvio_qp_params *params,
		    struct kvio_qp **out);
int verbs_qp_connect(struct kvio_qp *qp, const struct kvio_endpoint *remote, uint32_t count);
int verbs_qp_query(struct kvio_qp *qp, struct kvio_qp_info *out);
int verbs_qp_fail(struct kvio_qp *qp);
int verbs_qp_reset(struct kvio_qp *qp);
void verbs_qp_destroy(struct kvio_qp *qp);
/* All rails to the error state; an end whose device cannot be made to say what became of its
 * pieces is stopped: they count as flushed. */
void verbs_fail(struct verbs_qp *qp);
bool verbs_stop(struct verbs_qp *qp, uint32_t rail);
uint32_t verbs_mtu_bytes(enum ibv_mtu mtu);

/* verbs_post.c */
int verbs_post(struct kvio_qp *qp, const struct kvio_post *post);
int verbs_cancel(struct kvio_qp *qp, uint64_t wr_id, uint32_t count);

/* verbs_poll.c */
int verbs_drive(struct kvio_nic *nic, uint64_t now_ns);
int verbs_poll(struct kvio_nic *nic, struct kvio_wc *wc, uint32_t count);
int verbs_sleep(struct kvio_nic *nic, uint64_t timeout_ns);
int verbs_event_fd(struct kvio_nic *nic);
int verbs_arm(struct kvio_nic *nic);
void verbs_hear(struct verbs_nic *nic, struct verbs_rail *rail);
/* A queue pair in error should have flushed by then: look for it, and wake up for it. */
void verbs_look_at(struct verbs_nic *nic, uint64_t when_ns);

#endif
#endif
