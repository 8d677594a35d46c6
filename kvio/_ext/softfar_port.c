/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A sending port that several processes use: whoever pulls from a NIC sends on its port. Its time
 * is reserved by compare-and-swap in a page of the NIC's owner that all of them can write. Nothing
 * but time stands there: a peer that spoils it delays others, by a bounded time, and no more.
 */
#include "softfar.h"

#define PORT_AGE_NS (UINT64_C(1) << 55)		/* a year: ticks since then fit */
#define PORT_AHEAD_NS UINT64_C(1000000000)	/* nobody reserves further ahead than this */

int soft_port_share(struct soft_nic *nic, struct far_port *port, bool is_new)
{
	uint64_t now = kvio_monotonic_ns(), epoch = is_new ? nic->fabric->epoch_ns : port->epoch_ns;

	if (epoch > now || now - epoch > PORT_AGE_NS)
		return -EINVAL;
	if (is_new) {
		port->epoch_ns = epoch;
		__atomic_store_n(&port->free, nic->tx.free, __ATOMIC_RELEASE);
	}
	nic->shared_skew = ((int64_t)nic->fabric->epoch_ns - (int64_t)epoch) * SOFT_TICKS;
	nic->shared = port;
	return 0;
}

int kvio_soft_share_port(struct kvio_nic *base, void *page, size_t nbytes)
{
	struct soft_nic *nic = (struct soft_nic *)base;
	int rc;

	if (base->ops != &kvio_soft_ops || !page || nbytes < sizeof(struct far_port))
		return -EINVAL;
	kvio_lock(base);
	rc = nic->shared ? -EEXIST : soft_port_share(nic, page, true);
	kvio_unlock(base);
	return rc;
}

bool soft_port_take(struct soft_nic *nic, uint64_t start, uint64_t end)
{
	uint64_t free_at = __atomic_load_n(&nic->shared->free, __ATOMIC_ACQUIRE);
	uint64_t skew = (uint64_t)nic->shared_skew, mine = start + skew;
	uint64_t ahead = (end - start) + PORT_AHEAD_NS * SOFT_TICKS, now;

	do {
		if ((int64_t)(free_at - mine) <= 0)
			continue;
		now = soft_ticks(nic->fabric, kvio_monotonic_ns()) + skew;
		if ((int64_t)(free_at - now) > (int64_t)ahead)
			continue;		/* no reservation of an honest peer */
		nic->tx.free = free_at - skew;
		return false;
	} while (!__atomic_compare_exchange_n(&nic->shared->free, &free_at, end + skew, false,
					      __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
	return true;
}
