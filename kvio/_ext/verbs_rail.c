/* SPDX-License-Identifier: Apache-2.0 */
/* One rail: a device's port, by which GID it is addressed, its protection domain, completions. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <net/if.h>
#include <stdio.h>

#include "verbs.h"

#ifdef KVIO_HAVE_VERBS

#define SOME_GIDS 512

/* ---- the GID ---- */

static const char *gid_type_name(uint32_t type)
{
	static const char *const names[] = { "IB", "RoCEv1", "RoCEv2" };

	return type < sizeof(names) / sizeof(*names) ? names[type] : "unknown";
}

/* How much we want to be addressed by it: 0 is not at all. */
static int rank(const struct ibv_gid_entry *entry)
{
	static const uint8_t v4[12] = { [10] = 0xff, [11] = 0xff }, none[16];
	const uint8_t *raw = entry->gid.raw;

	if (memcmp(raw, none, sizeof(none)) == 0)
		return 0;
	if (entry->gid_type != IBV_GID_TYPE_ROCE_V2)
		return 1;
	if (memcmp(raw, v4, sizeof(v4)) == 0)
		return raw[12] == 169 && raw[13] == 254 ? 3 : 5;
	return raw[0] == 0xfe && (raw[1] & 0xc0) == 0x80 ? 2 : 4;	/* fe80::/10: one link */
}

/* Without the library's table of types: an InfiniBand port's, or RoCEv2, which is all there is. */
static ssize_t gids_one_by_one(struct verbs_rail *rail, struct ibv_gid_entry *out)
{
	bool ethernet = rail->port_attr.link_layer == IBV_LINK_LAYER_ETHERNET;
	ssize_t count = 0;

	for (int i = 0; i < rail->port_attr.gid_tbl_len && count < SOME_GIDS; i++) {
		struct ibv_gid_entry *entry = &out[count];

		if (verbs.query_gid(rail->context, rail->port, i, &entry->gid))
			continue;
		entry->gid_index = (uint32_t)i;
		entry->port_num = rail->port;
		entry->gid_type = ethernet ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_IB;
		count++;
	}
	return count;
}

static int choose_gid(struct verbs_rail *rail, int wanted, char *why, size_t room)
{
	struct ibv_gid_entry *entries = calloc(SOME_GIDS, sizeof(*entries)), *best = NULL;
	ssize_t count = -1;

	if (!entries)
		return -ENOMEM;
	if (verbs.query_gid_table)
		count = verbs.query_gid_table(rail->context, entries, SOME_GIDS, 0,
					      sizeof(*entries));
	if (count < 0)
		count = gids_one_by_one(rail, entries);
	for (ssize_t i = 0; i < count; i++) {
		if (entries[i].port_num != rail->port || rank(&entries[i]) == 0)
			continue;
		if (wanted >= 0 && entries[i].gid_index != (uint32_t)wanted)
			continue;
		if (!best || rank(&entries[i]) > rank(best))
			best = &entries[i];
	}
	if (best) {
		rail->gid = best->gid;
		rail->gid_index = (int)best->gid_index;
		rail->gid_type = gid_type_name(best->gid_type);
		if (best->ndev_ifindex)
			if_indextoname(best->ndev_ifindex, rail->netdev);
	} else {
		snprintf(why, room, wanted < 0 ? "%s port %u has no GID: give its network "
			 "interface an address" : "%s port %u has no GID of index %d",
			 rail->name, rail->port, wanted);
	}
	free(entries);
	return best ? 0 : -EADDRNOTAVAIL;
}

/* ---- the port ---- */

static const char *state_name(enum ibv_port_state state)
{
	static const char *const names[] = { "unknown", "down", "initialising", "armed", "active",
					     "deferred" };

	return (unsigned int)state < sizeof(names) / sizeof(*names) ? names[state] : "unknown";
}

/* rail->port, or the first active one. */
static int choose_port(struct verbs_rail *rail, char *why, size_t room)
{
	uint8_t first = rail->port ? rail->port : 1;
	uint8_t last = rail->port ? rail->port : rail->device.phys_port_cnt;

	if (first > rail->device.phys_port_cnt) {
		snprintf(why, room, "%s has no port %u: it has %u", rail->name, first,
			 rail->device.phys_port_cnt);
		return -ENODEV;
	}
	for (unsigned int port = first; port <= last; port++) {
		int rc = verbs_query_port(rail->context, (uint8_t)port, &rail->port_attr);

		if (rc < 0) {
			snprintf(why, room, "%s port %u cannot be queried (%s)", rail->name, port,
				 strerror(-rc));
			return rc;
		}
		if (rail->port_attr.state == IBV_PORT_ACTIVE) {
			rail->port = (uint8_t)port;
			return 0;
		}
	}
	snprintf(why, room, "%s port %u is %s, not active: bring the link of its network up",
		 rail->name, last, state_name(rail->port_attr.state));
	return -ENETDOWN;
}

static int nonblocking(int fd)
{
	int flags = fcntl(fd, F_GETFL);

	return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ||
	       fcntl(fd, F_SETFD, FD_CLOEXEC) < 0 ? -errno : 0;
}

int verbs_rail_open(struct verbs_nic *nic, struct verbs_rail *rail, int gid_index, char *why,
		    size_t room)
{
	bool roce;
	int rc;

	rc = verbs.query_device(rail->context, &rail->device);
	if (rc) {
		snprintf(why, room, "%s cannot be queried (%s)", rail->name, strerror(abs(rc)));
		return -abs(rc);
	}
	rc = choose_port(rail, why, room);
	if (rc < 0)
		return rc;
	/* On InfiniBand a GRH carries the traffic class, but within a subnet nobody looks at it. */
	roce = rail->port_attr.link_layer == IBV_LINK_LAYER_ETHERNET;
	rail->is_global = roce || gid_index >= 0 ||
			  rail->port_attr.flags & IBV_QPF_GRH_REQUIRED;
	rc = choose_gid(rail, gid_index, why, room);
	if (rc < 0)
		return rc;
	errno = 0;
	if (!rail->pd) {
		rail->pd = verbs.alloc_pd(rail->context);
		rail->owns_pd = rail->pd != NULL;
	}
	if (rail->pd)
		rail->channel = verbs.create_comp_channel(rail->context);
	if (!rail->channel || nonblocking(rail->channel->fd) < 0 ||
	    nonblocking(rail->context->async_fd) < 0) {
		rc = errno ? -errno : -ENOMEM;
		snprintf(why, room, "%s gives no protection domain or completion channel (%s)",
			 rail->name, strerror(-rc));
		return rc;
	}
	return 0;
}

void verbs_rail_close(struct verbs_rail *rail)
{
	for (uint32_t i = 0; i < rail->num_cqs; i++) {
		verbs.destroy_cq(rail->cqs[i]->cq);
		free(rail->cqs[i]);
	}
	free(rail->cqs);
	if (rail->channel)
		verbs.destroy_comp_channel(rail->channel);
	if (rail->owns_pd)
		verbs.dealloc_pd(rail->pd);
	if (rail->owns_context)
		verbs.close_device(rail->context);
	memset(rail, 0, sizeof(*rail));
}

/* ---- completion queues ---- */

/*
 * One with room for that many more completions. Failed and flushed pieces complete whether they
 * are signalled or not, so each place in a send queue needs its own. A queue that is full is
 * joined by another one rather than resized, which not every device can do.
 */
struct verbs_cq *verbs_cq_take(struct verbs_nic *nic, struct verbs_rail *rail, uint32_t places)
{
	uint32_t most = (uint32_t)rail->device.max_cqe, room = 4 * nic->max_pieces;
	struct verbs_cq **larger, *cq;

	for (uint32_t i = 0; i < rail->num_cqs; i++) {
		cq = rail->cqs[i];
		if (cq->room - cq->taken >= places) {
			cq->taken += places;
			return cq;
		}
	}
	room = room > most ? most : room;
	room = room < places ? places : room;
	larger = realloc(rail->cqs, (rail->num_cqs + 1) * sizeof(*larger));
	cq = calloc(1, sizeof(*cq));
	if (larger)
		rail->cqs = larger;
	errno = ENOMEM;
	if (larger && cq)
		cq->cq = verbs.create_cq(rail->context, (int)room, cq, rail->channel, 0);
	if (!larger || !cq || !cq->cq) {
		free(cq);
		return NULL;
	}
	cq->room = room;
	cq->taken = places;
	rail->cqs[rail->num_cqs++] = cq;
	return cq;
}

#endif
