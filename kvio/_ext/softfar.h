/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVIO_SOFTFAR_H
#define KVIO_SOFTFAR_H
/*
 * Soft NICs across processes of one host: the receiver pulls. softfar.c: the far end of a
 * connection and of its queue pairs; softfar_ring.c: what the two say to each other;
 * softfar_engine.c: the thread that listens; softfar_port.c: ports that several processes use.
 *
 * The other process's NIC has a stand-in in our fabric, struct soft_far, and each of its queue
 * pairs a shadow. A READ of ours is a message from the stand-in to us, copied from where the
 * peer's memory is mapped here. A WRITE of ours is put into our ring; the other end takes it from
 * there and lets the shadow of our queue pair post it in its fabric, so that it is a message from
 * our stand-in to its NIC. Each ring is written by its owner alone and mapped read-only by the
 * other end. What is read from the other end's ring is copied once, checked, and never trusted.
 */
#include "softnic.h"

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern char far_order;			/* for it alone */
#endif

#define FAR_LANES 16u
#define FAR_SLOTS 1024u			/* a power of two */
#define FAR_SGES 64u			/* KVIO_MAX_SGE: what a peer may ask for */
#define FAR_GROUP 128u			/* requests between two acknowledgements */
#define FAR_RETIRED 1024u		/* a power of two */
#define FAR_ANY_LIFE 0xffffffu		/* a queue pair that was closed, for all its lives */
#define FAR_MAGIC UINT64_C(0x3172666f69766b)	/* "kviofr1" */

/* A request; if it has scatter-gather entries, they follow, two in a slot. */
union far_slot {
	struct {
		uint64_t addr;
		uint64_t lkey;
		uint64_t remote_addr;
		uint64_t rkey;
		uint32_t length;
		uint32_t num_sge;
	} request;
	struct kvio_sge sges[2];
	uint8_t bytes[64];
};

/*
 * One for each queue pair of the owner. A word is life << 40 | status << 32 | count: which life of
 * the queue pair that posts (it changes with each reset), and how many slots.
 *   tail  the slots that the owner has filled; a status: forget them
 *   ack   the other end's slots that the owner is done with; a status: that of the next request,
 *         and no more are taken
 */
struct far_lane {
	uint64_t tail __attribute__((aligned(64)));
	uint64_t ack __attribute__((aligned(64)));
	union far_slot slots[FAR_SLOTS] __attribute__((aligned(64)));
};

/* `retired` counts the owner's regions that are no more; their keys, the last ones: */
struct far_ring {
	uint64_t magic;
	uint64_t retired __attribute__((aligned(64)));
	uint64_t keys[FAR_RETIRED] __attribute__((aligned(64)));
	struct far_lane lanes[FAR_LANES];
};

/* A sending port that several processes use. All of them write it: nothing but time. */
struct far_port {
	uint64_t epoch_ns;		/* CLOCK_MONOTONIC; ticks count from here */
	uint64_t free __attribute__((aligned(64)));	/* in ticks: sending until then */
};

struct soft_far {
	struct soft_nic nic;		/* the stand-in; must be first */
	struct kvio_far *base;
	struct soft_far *next;		/* of the engine */
	struct far_ring *mine;
	const struct far_ring *theirs;	/* NULL: not joined */
	struct soft_link *links[FAR_LANES];
	uint32_t lives[FAR_LANES];
	uint64_t retired;		/* of theirs: heard of */
	uint64_t id;
	int wake_fd, their_wake_fd, pid_fd;
	bool dead;			/* nothing comes from there any more */
};

/* A queue pair of ours that leads to another process, and the shadow of the one over there. */
struct soft_link {
	struct soft_qp shadow;
	struct soft_qp *qp;
	struct soft_far *far;
	uint32_t lane, their_lane;
	uint32_t life, their_life;
	bool connected;
	/* what we have put into our lane: slots, and up to which place of the send queue */
	uint32_t tail, acked, pushed;
	/* what they have put into theirs: slots seen, slots done; regions of the shadow's requests
	 * before this place are no longer held */
	uint32_t taken, done, released;
	uint8_t status;			/* told; nonzero: we take no more */
	struct kvio_region **held;	/* FAR_SGES + 1 for each place of the shadow's queue */
};

/*
 * Tell, and hear, by a word of a ring: what was done before the one has happened after the other.
 * ThreadSanitizer knows memory by its address, so it cannot see that of a ring which two NICs of
 * one process have mapped, each elsewhere: it is told, as if all words were one.
 */
static inline void far_tell(uint64_t *word, uint64_t value)
{
#if defined(__SANITIZE_THREAD__)
	__tsan_release(&far_order);
#endif
	__atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline uint64_t far_hear(const uint64_t *word)
{
	uint64_t value = __atomic_load_n(word, __ATOMIC_ACQUIRE);

#if defined(__SANITIZE_THREAD__)
	__tsan_acquire(&far_order);
#endif
	return value;
}

static inline uint64_t far_word(uint32_t life, uint32_t status, uint32_t count)
{
	return (uint64_t)(life & 0xffffff) << 40 | (uint64_t)(status & 255) << 32 | count;
}

static inline uint32_t far_life(uint64_t word)
{
	return (uint32_t)(word >> 40);
}

static inline uint32_t far_status(uint64_t word)
{
	return (uint32_t)(word >> 32) & 255;
}

static inline uint32_t far_slots_of(uint32_t num_sge)
{
	return 1 + (num_sge + 1) / 2;
}

static inline struct far_lane *far_mine(const struct soft_link *link)
{
	return &link->far->mine->lanes[link->lane];
}

static inline const struct far_lane *far_theirs(const struct soft_link *link)
{
	return &link->far->theirs->lanes[link->their_lane];
}

/* softfar.c */
void soft_far_dead(struct soft_far *far);
void far_shadow_stop(struct soft_link *link, uint32_t status);

/* softfar_port.c. is_new: the page is ours and empty; else -EINVAL if it cannot be a port. */
int soft_port_share(struct soft_nic *nic, struct far_port *port, bool is_new);

/* softfar_ring.c */
void far_wake(const struct soft_far *far);
void far_acknowledge(struct soft_link *link);
void far_release(struct soft_link *link);
void far_hear_retired(struct soft_far *far);
void far_poll(struct soft_far *far, uint64_t limit);

/* softfar_engine.c; the engine's lock is taken before a fabric's. */
void far_engines_lock(void);
void far_engines_unlock(void);
int far_engine_join(struct soft_far *far);
void far_engine_leave(struct soft_far *far);
struct soft_far *far_first(const struct kvio_fabric *fabric);

_Static_assert(sizeof(union far_slot) == 64, "it is shared");
_Static_assert(sizeof(struct far_lane) == 128 + 64 * FAR_SLOTS, "it is shared");
_Static_assert(offsetof(struct far_lane, slots) == 128, "it is shared");
_Static_assert(sizeof(struct far_ring) == KVIO_SOFT_RING_NBYTES, "it is shared");
_Static_assert(sizeof(struct far_port) == KVIO_SOFT_PORT_NBYTES, "it is shared");

#endif
