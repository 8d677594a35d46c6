/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVIO_NIC_IMPL_H
#define KVIO_NIC_IMPL_H
/* What nicbase.c, nic_region.c, batch.c and the providers know of each other, under the domain's
 * lock. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kvio/nic.h"

#define KVIO_INDEX_BITS 24
#define KVIO_INDEX_MASK ((1u << KVIO_INDEX_BITS) - 1)

/* A provider's NIC starts with this. */
struct kvio_nic {
	const struct kvio_nic_ops *ops;
	struct kvio_domain *domain;
	struct kvio_nic *next;		/* of the domain */
	struct kvio_qp *qps;
	struct kvio_table table;	/* its regions */
	uint32_t queue_depth;
	uint32_t max_sge;
	struct kvio_batch **batches;	/* by the upper half of the wr_id; NULL: free */
	uint32_t num_batches;
	uint32_t next_batch;		/* where to look for a free place first */
	uint32_t in_flight;
	uint64_t drain_ns;		/* a queue pair in error may take so long to flush */
	bool closed;
	bool dying;			/* for good: wait for nobody */
};

/* A provider's queue pair starts with this. */
struct kvio_qp {
	struct kvio_nic *nic;
	const struct kvio_table *peer;	/* the other end's regions; NULL: unconnected */
	struct kvio_far *far;		/* they are another process's */
	struct kvio_qp *next;		/* of the NIC */
	struct kvio_batch *first_waiting, *last_waiting;	/* not posted to the end yet */
	uint32_t depth;
	uint32_t outstanding;		/* posted and not settled */
	uint32_t in_flight;		/* batches */
	uint8_t sl;
	uint8_t tclass;
};

struct kvio_hold {
	struct kvio_region *region;
	uint64_t key;
};

struct kvio_batch {
	struct kvio_qp *qp;
	struct kvio_nic *nic;
	struct kvio_batch *next_waiting;
	uint32_t slot;			/* upper half of its wr_ids */
	uint32_t refs;			/* the caller's, and the engine's until drained */
	uint32_t count;
	uint32_t posted;		/* handed to the queue pair */
	uint32_t settled;		/* known, in order */
	uint32_t limit;			/* count, or where a cancel cut it off */
	uint32_t ways;			/* see kvio_wc */
	bool drained;
	bool canceled;
	int event_fd;
	uint64_t nbytes;
	uint64_t submitted_ns;
	uint64_t completed_ns;
	struct kvio_post rest;		/* points into rest_wrs and rest_sges */
	struct kvio_wr *rest_wrs;
	struct kvio_sge *rest_sges;
	struct kvio_hold *holds;
	uint32_t num_holds;
	uint32_t max_holds;
	struct kvio_hold some_holds[4];	/* usually one region a side: no malloc */
	uint8_t *codes;
	int32_t status[];
};

static inline void kvio_domain_lock(struct kvio_domain *domain)
{
	if (pthread_mutex_trylock(&domain->lock) == 0)
		return;
	__atomic_add_fetch(&domain->waiting, 1, __ATOMIC_RELAXED);
	pthread_mutex_lock(&domain->lock);
	__atomic_sub_fetch(&domain->waiting, 1, __ATOMIC_RELAXED);
}

static inline void kvio_lock(struct kvio_nic *nic)
{
	kvio_domain_lock(nic->domain);
}

static inline void kvio_unlock(struct kvio_nic *nic)
{
	pthread_mutex_unlock(&nic->domain->lock);
}

/* Unlocking alone would get us the lock back every time: the others, who may hold the GIL, need
 * some 50 us to wake up. */
static inline void kvio_let_others_in(struct kvio_domain *domain)
{
	const struct timespec nap = { 0, 1000 };

	if (__atomic_load_n(&domain->waiting, __ATOMIC_RELAXED) == 0)
		return;
	pthread_mutex_unlock(&domain->lock);
	nanosleep(&nap, NULL);
	kvio_domain_lock(domain);
}

static inline uint64_t kvio_monotonic_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline struct kvio_region *kvio_region_find(const struct kvio_table *table, uint64_t key)
{
	uint32_t index = (uint32_t)key & KVIO_INDEX_MASK;
	struct kvio_region *region = index < table->length ? table->regions[index] : NULL;

	return region && region->key == key ? region : NULL;
}

/* True if [addr, addr + length) lies in the region; cannot overflow. */
static inline bool kvio_region_covers(const struct kvio_region *region, uint64_t addr,
				      uint64_t length)
{
	return addr >= region->addr && length <= region->nbytes &&
	       addr - region->addr <= region->nbytes - length;
}

static inline const struct kvio_rkeys *kvio_rkeys_of(const struct kvio_region *far_region)
{
	return far_region->provider;
}

/* Between the files, the lock held. */
int kvio_region_dereg_locked(struct kvio_nic *nic, uint64_t key);
void kvio_batch_dispatch(struct kvio_nic *nic);
void kvio_batch_feed(struct kvio_qp *qp);
int kvio_batch_cancel_locked(struct kvio_batch *batch);
void kvio_nic_drive_locked(struct kvio_nic *nic);

#endif
