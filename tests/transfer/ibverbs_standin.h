/* SPDX-License-Identifier: Apache-2.0 */
#ifndef IBVERBS_STANDIN_H
#define IBVERBS_STANDIN_H
/*
 * A stand-in for libibverbs, which it is not: the symbols and the structures of the real headers,
 * queues in memory, and a thread a device that carries out what a reliable connection does between
 * queue pairs of one process. It counts, and fails where the tests ask it to (ibverbs_standin.py).
 *
 * It is stricter than most hardware: a mandatory attribute that is missing, a protection domain or
 * GID that does not match is refused; overrunning a completion queue, destroying what still has
 * unacknowledged events (libibverbs would wait for ever) or what is in use ends the process.
 * Like hardware, send queue slots come free when a completion behind them is polled.
 *
 * `bus` guards the tables of objects and is held while one work request is carried out: who has
 * destroyed or deregistered something knows that no device touches it any more. Locks are taken in
 * the order queue pair, bus, completion queue, channel or door.
 */
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <infiniband/verbs.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_DEVICES 8
#define MAX_OBJECTS 65536
#define NUM_GIDS 4

/* What the tests set, by these names: in KVIO_STANDIN ("devices=3,max_sge=4") or one at a time. */
#define SETTINGS(X) \
	X(devices, 1)			/* of these, only as the library is loaded */ \
	X(max_msg_sz, 1u << 30) \
	X(max_mr_size, 1ull << 40) \
	X(max_sge, 30) \
	X(max_sge_rd, 30) \
	X(max_qp_wr, 32768) \
	X(max_cqe, 1u << 22) \
	X(max_rd_atomic, 16) \
	X(port_state, IBV_PORT_ACTIVE) \
	X(link_layer, IBV_LINK_LAYER_ETHERNET) \
	X(active_mtu, IBV_MTU_4096) \
	X(wr_api, 1)			/* create_qp_ex takes SEND_OPS_FLAGS */ \
	X(peermem, 0)			/* reg_mr takes memory that the CPU cannot reach */ \
	X(dmabuf, 1)			/* reg_dmabuf_mr is supported */ \
	X(rkeys, 1)			/* 0: it does not know them any more */ \
	X(frozen, 0)			/* nothing is carried out; queue pairs in error flush */ \
	X(mute, 0)			/* nor do they flush */ \
	X(clings, 0)			/* to queue pairs: they are not destroyed */ \
	X(delay_ns, 0)			/* carried out that long after the doorbell */

/* What is counted, by device. The last ones are how many there are, and are not reset. */
#define COUNTERS(X) \
	X(post_calls) X(work_requests) X(signalled) X(sges) X(reads) X(writes) X(cqes) \
	X(errors) X(nbytes) X(notifies) X(events) X(wr_starts) X(reg_mrs) X(reg_dmabufs) \
	X(event_ns)			/* CLOCK_MONOTONIC before the last completion event */ \
	X(contexts) X(pds) X(mrs) X(channels) X(cqs) X(qps)

#define AS_SETTING(name, value) uint64_t name;
#define AS_COUNTER(name) uint64_t name;

struct standin_device {
	struct ibv_device base;
	uint32_t index;
	struct { SETTINGS(AS_SETTING) } is;
	struct { COUNTERS(AS_COUNTER) } count;
	uint64_t fail_in;		/* the nth work request from now fails, 0: none does */
	enum ibv_wc_status fail_status;
	struct standin_qp *qps;
	pthread_t engine;		/* runs once a context was opened */
	bool running;
	pthread_mutex_t door;
	pthread_cond_t rung_cond;
	uint64_t rung;			/* atomic: doorbells and other reasons to look */
	uint32_t sleeping;		/* atomic */
};

struct standin_context {
	struct verbs_context v;		/* its last member is the ibv_context */
	struct standin_context *next;
	int async_write;
};

struct standin_mr {
	struct ibv_mr base;
	uint64_t iova;
	uint8_t *bytes;			/* NULL: the CPU cannot reach them */
	void *mapping;			/* of a dma-buf */
	size_t mapping_nbytes;
	uint32_t access;
};

struct standin_channel {
	struct ibv_comp_channel base;
	int write_fd;
};

struct standin_wc {
	struct ibv_wc wc;
	struct standin_qp *qp;
	uint64_t slot;			/* all up to this one come free */
};

struct standin_cq {
	struct ibv_cq base;
	struct standin_cq *next;
	pthread_mutex_t lock;
	struct standin_wc *ring;
	uint64_t head, tail;		/* polled, pushed */
	bool armed;
	uint32_t users;			/* queue pairs */
	uint32_t unacked;		/* events that somebody has read */
};

struct standin_wqe {
	uint64_t wr_id;
	uint64_t remote_addr;
	uint64_t due_ns;
	uint32_t rkey;
	uint32_t sge_first;
	uint32_t num_sge;
	uint16_t opcode;		/* enum ibv_wr_opcode */
	bool signalled;
};

struct standin_qp {
	struct ibv_qp_ex ex;		/* its first member is the ibv_qp */
	struct standin_qp *next;	/* of the device */
	struct ibv_qp_attr attr;
	struct ibv_qp_cap cap;
	uint32_t state;			/* atomic: enum ibv_qp_state */
	bool sq_sig_all;
	bool has_wr_api;
	bool dropped;			/* does not answer any more */
	pthread_mutex_t lock;		/* of posting */
	struct standin_wqe *wqes;	/* a ring of mask + 1, of which max_send_wr are used */
	uint64_t mask;
	struct ibv_sge *sges;		/* a ring: each list lies in one piece */
	uint32_t num_sges;
	uint32_t next_sge;
	uint64_t posted;		/* atomic: slots with a doorbell behind them */
	uint64_t building;		/* posted, and those of the open wr_start */
	uint64_t done;			/* carried out */
	uint64_t freed;			/* atomic: a completion behind them was polled */
	uint32_t first_sge;		/* next_sge as the wr_start found it */
	uint64_t due_ns;
	uint64_t num_entries, num_signalled, num_reads;	/* of the open wr_start */
	int error;			/* likewise */
	bool open;
	uint32_t unacked;		/* asynchronous events that somebody has read */
};

extern pthread_mutex_t bus;
extern struct standin_device devices[MAX_DEVICES];
extern uint32_t num_devices;
extern struct standin_mr *mrs[MAX_OBJECTS];
extern struct standin_qp *qps[MAX_OBJECTS];
extern struct standin_cq *cqs;

#define COUNT(device, name, more) \
	__atomic_add_fetch(&(device)->count.name, (uint64_t)(more), __ATOMIC_RELAXED)
#define SETTING(device, name) __atomic_load_n(&(device)->is.name, __ATOMIC_RELAXED)

__attribute__((noreturn, format(printf, 1, 2))) void die(const char *format, ...);
/* The errno that the tests want this call to fail with, or 0. */
int refused(const char *call);
void ring_doorbell(struct standin_device *device);
void start_engine(struct standin_device *device);
void async_event(struct standin_device *device, struct ibv_async_event event);
void gid_of(const struct standin_device *device, uint32_t index, struct ibv_gid_entry *out);
struct ibv_qp *create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);
void use_pd(struct ibv_pd *pd, int more);
void make_poster(struct standin_qp *qp);
int post_send(struct ibv_qp *base, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int poll_cq(struct ibv_cq *base, int count, struct ibv_wc *out);
int req_notify_cq(struct ibv_cq *base, int solicited_only);
/* Drop the completions of a queue pair that is reset or destroyed; the bus is held. */
void forget_completions(struct standin_cq *cq, const struct standin_qp *qp);

static inline struct standin_device *device_of(struct ibv_context *context)
{
	return (struct standin_device *)context->device;
}

static inline struct standin_qp *qp_of(struct ibv_qp *base)
{
	return (struct standin_qp *)base;
}

static inline uint32_t state_of(const struct standin_qp *qp)
{
	return __atomic_load_n(&qp->state, __ATOMIC_ACQUIRE);
}

static inline void set_state(struct standin_qp *qp, uint32_t state)
{
	__atomic_store_n(&qp->state, state, __ATOMIC_RELEASE);
}

#endif
