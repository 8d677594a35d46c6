/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVIO_SOFTNIC_H
#define KVIO_SOFTNIC_H
/*
 * The soft provider: softnic.c is the NIC, softqueue.c its send queues (posting, checks, errors),
 * softport.c who may send next on a port, softfabric.c the network between NICs (which packet
 * moves when, and the copying).
 *
 * Time is link time, in ticks of 1/256 ns since the fabric was made, so that a packet's time is
 * exact to 0.4 % even at 1 ns and a fabric lives for two years. It lags the clock: whoever drives
 * makes up for all that should have happened, in order, as if it had been driven all along.
 */
#include "nic_impl.h"

#define SOFT_TICKS 256u			/* per ns */

enum { WQE_SIGNALED = 1, WQE_DEAD = 2, WQE_CANCELED = 4 };

struct soft_wqe {
	struct kvio_wr wr;
	uint64_t posted;		/* when the doorbell rang */
	uint64_t end_bytes;		/* bytes of the queue up to the end of this one */
	uint64_t end;			/* once executed: when it becomes visible */
	uint64_t births;		/* regions younger than that are not held for it */
	uint32_t signal_seq;		/* the next signalled one, maybe itself */
	uint16_t flags;
	uint16_t status;
};

/* The arbitration tables of a fabric: what its ports go by, and what can be known beforehand. */
enum { SOFT_HIGH, SOFT_LOW };

struct soft_vlarb {
	struct kvio_vlarb entries[KVIO_MAX_VLARB];
	uint32_t length;
	uint32_t vls;			/* that have a weight in it: a bit each */
	uint8_t after[KVIO_MAX_VLARB][KVIO_NUM_VL];	/* whose turn a VL takes after this one */
};

struct soft_arbitration {
	struct soft_vlarb tables[2];
	int64_t reload;			/* the budget at its start */
	uint8_t sl2vl[KVIO_NUM_SL];
};

/* Who may send next on a port. */
struct soft_arbiter {
	struct {
		uint32_t index;		/* whose turn it is */
		uint32_t used;		/* units sent in that turn */
	} turns[2];
	int64_t budget;			/* bytes for the high table before the low one may */
};

struct soft_port {			/* one direction */
	uint64_t free;			/* busy until then */
	uint64_t busy;			/* ticks so far */
	struct soft_arbiter arbiter;
	uint32_t waiting;		/* VLs, a bit each: for one decision */
	uint32_t vl;			/* the one that may: for one decision */
};

struct soft_nic {
	struct kvio_nic base;
	struct kvio_fabric *fabric;
	uint64_t bytes_per_s;
	uint32_t mtu;
	struct soft_port tx, rx;
	struct far_port *shared;	/* its sending port is other processes' as well: or NULL */
	int64_t shared_skew;		/* from ticks of the fabric to those of the port */
	struct soft_qp *grant;		/* whom the receiving port would take: for one decision */
	struct kvio_wc *cq;
	uint32_t cq_room, cq_owed, cq_first, cq_count;	/* owed: to living queue pairs */
	struct kvio_counters counters;
	uint64_t drop_in;		/* faults: 0 is none */
	uint64_t fail_in;
	uint32_t fail_status;
	uint64_t delay;
};

/*
 * The send queue, by sequence numbers: [seen, cur) has been executed and waits to become visible,
 * cur is being sent, the rest waits up to tail.
 */
struct soft_qp {
	struct kvio_qp base;
	struct soft_qp *remote;
	uint32_t qpn;
	uint32_t state;
	struct soft_wqe *sq;
	struct kvio_sge *sges;		/* max_sge for each */
	uint32_t mask;			/* of the ring */
	uint32_t seen, cur, tail;
	uint32_t busy_at;		/* place in the fabric's list */
	bool is_busy;
	/* the message at cur */
	uint16_t bad;			/* a status: it will fail with that */
	uint8_t sl, vl;			/* of the end that sends the data */
	struct soft_nic *source, *sink;
	uint32_t mtu;
	uint32_t offset;		/* bytes sent */
	uint32_t sge_index, sge_offset;
	uint8_t *local, *far;
	uint64_t ready;			/* its next packet may start then */
	uint64_t start;			/* for one decision */
	uint64_t sent_bytes;		/* of the queue */
	uint64_t posted_bytes;
	/* softfar.c: the other end is in another process */
	struct soft_link *link;
	bool is_shadow;			/* it stands for the other process's */
	bool away;			/* what is at cur is being pulled over there */
};

struct kvio_fabric {
	struct kvio_domain domain;
	struct soft_arbitration arbitration;
	uint32_t refs;
	bool is_virtual;
	uint64_t epoch_ns;
	uint64_t virtual_ns;
	uint64_t time;			/* all before this has happened */
	uint32_t next_qpn;
	struct soft_qp **busy;		/* queue pairs with seen != tail */
	uint32_t num_busy, max_busy, num_qps;
	int timer_fd;
	uint64_t armed_ns;
	struct far_engine *engine;	/* NULL: no other processes */
};

static inline struct soft_wqe *soft_wqe_at(const struct soft_qp *qp, uint32_t seq)
{
	return &qp->sq[seq & qp->mask];
}

static inline struct soft_nic *soft_nic_of(const struct soft_qp *qp)
{
	return (struct soft_nic *)qp->base.nic;
}

static inline uint64_t soft_ticks(const struct kvio_fabric *fabric, uint64_t ns)
{
	return ns > fabric->epoch_ns ? (ns - fabric->epoch_ns) * SOFT_TICKS : 0;
}

static inline uint64_t soft_ns(const struct kvio_fabric *fabric, uint64_t ticks)
{
	return fabric->epoch_ns + (ticks + SOFT_TICKS - 1) / SOFT_TICKS;
}

static inline bool soft_is_waiting(const struct soft_qp *qp)
{
	return qp->cur != qp->tail && !qp->away;
}

static inline uint64_t soft_earliest_start(const struct soft_qp *qp)
{
	uint64_t start = qp->ready;

	if (!qp->bad) {
		start = qp->source->tx.free > start ? qp->source->tx.free : start;
		start = qp->sink->rx.free > start ? qp->sink->rx.free : start;
	}
	return start;
}

/* softport.c: of the packets that can start at `time` (qp->start says so) the one that does; then
 * both of its ports are told of `nbytes` of the lane, in packets of at most `mtu`. */
int soft_arbitration_init(struct soft_arbitration *rules, const struct kvio_fabric_params *params);
struct soft_qp *soft_choose(struct kvio_fabric *fabric, uint64_t time);
void soft_arbiter_sent(const struct soft_arbitration *rules, struct soft_arbiter *arbiter,
		       uint32_t vl, uint64_t nbytes, uint32_t mtu);

/* softfabric.c */
uint64_t soft_clock_ns(const struct kvio_fabric *fabric);
void soft_busy_add(struct kvio_fabric *fabric, struct soft_qp *qp);
int soft_busy_room(struct kvio_fabric *fabric);
void soft_busy_remove(struct kvio_fabric *fabric, struct soft_qp *qp);
int soft_drive(struct kvio_nic *nic, uint64_t now_ns);
int soft_sleep(struct kvio_nic *nic, uint64_t timeout_ns);
int soft_event_fd(struct kvio_nic *nic);
int soft_arm(struct kvio_nic *nic);

/* softqueue.c: post, poll and cancel as in kvio_nic_ops; look at the message at cur (skipping what
 * was given up); end the message at cur; put the queue pair in error. */
int soft_post(struct kvio_qp *base, const struct kvio_post *post);
int soft_poll(struct kvio_nic *base, struct kvio_wc *wc, uint32_t count);
int soft_cancel(struct kvio_qp *base, uint64_t wr_id, uint32_t count);
void soft_load(struct soft_qp *qp);
void soft_skip_silent(struct soft_qp *qp);
void soft_finish(struct soft_qp *qp, uint64_t end, uint32_t status);
void soft_fail(struct soft_qp *qp);
void soft_complete(struct soft_qp *qp, const struct soft_wqe *wqe);
uint32_t soft_check(struct soft_qp *qp, const struct soft_wqe *wqe);
void soft_end(struct soft_qp *qp, struct soft_wqe *wqe, uint64_t end, uint32_t status);
int soft_cq_grow(struct soft_nic *nic, uint32_t depth);		/* softnic.c */

/* softfar.c and softfar_*.c: the other end is in another process. */
int soft_far_open(struct kvio_far *base);
void soft_far_close(struct kvio_far *base);
int soft_far_qp_create(struct soft_qp *qp, struct kvio_far *base);
int soft_far_qp_connect(struct soft_qp *qp, const struct kvio_endpoint *remote);
void soft_far_qp_query(const struct soft_qp *qp, struct kvio_endpoint *local);
void soft_far_qp_reset(struct soft_qp *qp);
void soft_far_qp_destroy(struct soft_qp *qp);
/* The message at cur has passed the checks; the status it fails with after all. */
uint32_t soft_far_load(struct soft_qp *qp, struct soft_wqe *wqe);
/* What was posted behind messages that are away may follow them. */
void soft_far_push(struct soft_qp *qp);
bool soft_far_has(const struct soft_qp *qp, uint32_t seq);	/* is it away? */
/* The message has been copied: were those the bytes? */
uint32_t soft_far_verify(const struct soft_qp *qp);
/* A region of ours is no more: other processes are told. */
void soft_far_retire(struct soft_nic *nic, uint64_t key);
/* False: what the other end is pulling has to end first; soft_fail follows by itself. */
bool soft_far_fail(struct soft_qp *qp);
/* Look what other processes have to say. */
void soft_far_drive(struct kvio_fabric *fabric, uint64_t limit);
uint64_t soft_next_visible_ns(const struct kvio_fabric *fabric);
/* Reserve [start, end) of a sending port that others use too; false: taken, look again. */
bool soft_port_take(struct soft_nic *nic, uint64_t start, uint64_t end);

#endif
