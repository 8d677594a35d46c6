/* SPDX-License-Identifier: Apache-2.0 */
/* The verbs NIC: which devices, what they can do together, figures; the table of operations. */
#include <stdarg.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "verbs.h"

#ifdef KVIO_HAVE_VERBS

#define WHY_ROOM 400

/* ---- devices by name ---- */

/* The names of all devices, for who named another one. */
static void name_devices(struct ibv_device **devices, int count, char *out, size_t room)
{
	size_t used = 0;

	out[0] = 0;
	for (int i = 0; i < count && used < room; i++)
		used += (size_t)snprintf(out + used, room - used, "%s%s", i ? ", " : "",
					 verbs.get_device_name(devices[i]));
}

static int open_context(struct verbs_rail *rail, struct ibv_device *device, char *why)
{
	snprintf(rail->name, sizeof(rail->name), "%s", verbs.get_device_name(device));
	errno = 0;
	rail->context = verbs.open_device(device);
	if (!rail->context) {
		int rc = errno ? -errno : -EIO;

		snprintf(why, WHY_ROOM, "the RDMA device %s cannot be opened (%s)%s", rail->name,
			 strerror(-rc), rc == -EACCES || rc == -EPERM ?
			 ": this user may not use /dev/infiniband" : "");
		return rc;
	}
	rail->owns_context = true;
	return 0;
}

/* "HCA" or "HCA:port". */
static int open_named(struct verbs_nic *nic, const char *name, size_t length,
		      struct ibv_device **devices, int count, int gid_index, char *why)
{
	struct verbs_rail *rail = &nic->rails[nic->num_rails];
	const char *colon = memchr(name, ':', length);
	size_t stem = colon ? (size_t)(colon - name) : length;
	char there[256], *end = NULL;
	long port = 0;
	int rc;

	if (colon) {
		port = strtol(colon + 1, &end, 10);
		if (end != name + length || end == colon + 1 || port < 1 || port > 255) {
			snprintf(why, WHY_ROOM, "\"%.*s\" is not HCA or HCA:port", (int)length,
				 name);
			return -EINVAL;
		}
	}
	for (int i = 0; i < count; i++) {
		const char *each = verbs.get_device_name(devices[i]);

		if (strlen(each) != stem || memcmp(each, name, stem) != 0)
			continue;
		nic->num_rails++;
		rail->port = (uint8_t)port;
		rc = open_context(rail, devices[i], why);
		return rc < 0 ? rc : verbs_rail_open(nic, rail, gid_index, why, WHY_ROOM);
	}
	name_devices(devices, count, there, sizeof(there));
	snprintf(why, WHY_ROOM, "there is no RDMA device \"%.*s\" here, but %s", (int)stem, name,
		 there);
	return -ENODEV;
}

static int open_list(struct verbs_nic *nic, const char *list, struct ibv_device **devices,
		     int count, int gid_index, char *why)
{
	int rc = 0;

	for (const char *at = list; rc == 0; ) {
		size_t length = strcspn(at, ",");

		if (nic->num_rails == KVIO_MAX_RAILS) {
			snprintf(why, WHY_ROOM, "\"%s\" names more than %d devices", list,
				 KVIO_MAX_RAILS);
			return -EINVAL;
		}
		rc = open_named(nic, at, length, devices, count, gid_index, why);
		if (!at[length])
			break;
		at += length + 1;
	}
	return rc;
}

/* The first device that has an active port; if none has, why the last one is of no use. */
static int open_any(struct verbs_nic *nic, struct ibv_device **devices, int count, int gid_index,
		    char *why)
{
	int rc = -ENODEV;

	nic->num_rails = 1;
	for (int i = 0; i < count && rc < 0; i++) {
		rc = open_context(&nic->rails[0], devices[i], why);
		if (rc == 0)
			rc = verbs_rail_open(nic, &nic->rails[0], gid_index, why, WHY_ROOM);
		if (rc < 0)
			verbs_rail_close(&nic->rails[0]);
	}
	return rc;
}

/* Another library's protection domain, of the same libibverbs; never freed by us. */
static int open_adopted(struct verbs_nic *nic, const struct kvio_nic_params *params, char *why)
{
	struct ibv_pd *pd = (struct ibv_pd *)(uintptr_t)params->pd;
	struct verbs_rail *rail = &nic->rails[0];
	const char *wanted = params->device ? params->device : "";
	const char *colon = strchr(wanted, ':'), *name;
	size_t stem = colon ? (size_t)(colon - wanted) : strlen(wanted);

	rail->pd = pd;
	rail->context = pd->context;
	nic->num_rails = 1;
	name = verbs.get_device_name(pd->context->device);
	snprintf(rail->name, sizeof(rail->name), "%s", name);
	if (stem && (strlen(name) != stem || memcmp(name, wanted, stem) != 0)) {
		snprintf(why, WHY_ROOM, "the protection domain that was passed belongs to %s, not "
			 "to \"%s\"", name, wanted);
		return -EINVAL;
	}
	rail->port = colon ? (uint8_t)atoi(colon + 1) : 0;
	return verbs_rail_open(nic, rail, params->gid_index, why, WHY_ROOM);
}

static int open_rails(struct verbs_nic *nic, const struct kvio_nic_params *params, char *why)
{
	const char *wanted = params->device ? params->device : "";
	struct ibv_device **devices;
	int count = 0, rc;

	if (params->pd)
		return open_adopted(nic, params, why);
	devices = verbs.get_device_list(&count);
	if (!devices || count == 0) {
		rc = -ENODEV;
		snprintf(why, WHY_ROOM, "this machine has no RDMA device%s%s", wanted[0] ?
			 ", so no " : "", wanted);
	} else if (wanted[0]) {
		rc = open_list(nic, wanted, devices, count, params->gid_index, why);
	} else {
		rc = open_any(nic, devices, count, params->gid_index, why);
	}
	if (devices)
		verbs.free_device_list(devices);
	return rc;
}

/* ---- what they can do together ---- */

static uint64_t from_env(const char *name, uint64_t fallback, uint64_t least, uint64_t most)
{
	const char *text = getenv(name);
	char *end;
	unsigned long long value;

	if (!text || !*text)
		return fallback;
	value = strtoull(text, &end, 0);
	return *end || value < least || value > most ? fallback : value;
}

static uint32_t least(uint32_t a, uint32_t b)
{
	return a < b ? a : b;
}

static int set_limits(struct verbs_nic *nic, const struct kvio_nic_params *params, char *why)
{
	uint32_t max_wr = UINT32_MAX;

	nic->base.max_sge = nic->max_sge_rd = params->max_sge;
	nic->max_msg = UINT32_MAX;
	for (uint32_t r = 0; r < nic->num_rails; r++) {
		const struct verbs_rail *rail = &nic->rails[r];
		uint32_t sge = (uint32_t)rail->device.max_sge;
		uint32_t sge_rd = (uint32_t)rail->device.max_sge_rd;

		nic->base.max_sge = least(nic->base.max_sge, sge ? sge : 1);
		nic->max_sge_rd = least(nic->max_sge_rd, sge_rd ? sge_rd : sge ? sge : 1);
		nic->max_msg = least(nic->max_msg, rail->port_attr.max_msg_sz);
		max_wr = least(max_wr, (uint32_t)rail->device.max_qp_wr);
		max_wr = least(max_wr, (uint32_t)rail->device.max_cqe);
	}
	nic->max_sge_rd = least(nic->max_sge_rd, nic->base.max_sge);
	nic->max_msg = nic->max_msg ? nic->max_msg : 1u << 30;
	nic->base.queue_depth = least(params->queue_depth, max_wr);
	nic->max_pieces = least(nic->base.queue_depth + VERBS_SPARE, max_wr);
	nic->mtu = params->mtu;
	/* 268 ms, seven times: no class starves that long that is not starved for good. Seven
	 * retries are not asked for, because to Soft-RoCE that means for ever. */
	nic->timeout = (uint8_t)from_env("KVIO_IB_TIMEOUT", 16, 1, 31);
	nic->retry_cnt = (uint8_t)from_env("KVIO_IB_RETRY_CNT", 6, 0, 7);
	nic->slice_nbytes = from_env("KVIO_IB_SLICE_BYTES", VERBS_SLICE_BYTES, 4096,
				     VERBS_SLICE_BYTES);
	nic->base.drain_ns = 1000000 * from_env("KVIO_IB_DRAIN_MS", 5000, 1, 600000);
	nic->uses_wr_api = verbs.qp_to_qp_ex && from_env("KVIO_IB_WR_API", 1, 0, 1);
	nic->busy_poll = params->flags & KVIO_NIC_BUSY_POLL;
	if (params->mtu < 256) {
		snprintf(why, WHY_ROOM, "mtu %u: RDMA has 256, 512, 1024, 2048 and 4096",
			 params->mtu);
		return -EINVAL;
	}
	return 0;
}

static int set_up(struct verbs_nic *nic, char *why)
{
	struct epoll_event event = { .events = EPOLLIN };

	/* Pages of these that no post reaches cost nothing. */
	nic->wrs = calloc(nic->max_pieces, sizeof(*nic->wrs));
	nic->sges = calloc((size_t)nic->max_pieces * nic->base.max_sge, sizeof(*nic->sges));
	if (!nic->wrs || !nic->sges)
		return -ENOMEM;
	nic->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	nic->kick_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	nic->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
	if (nic->epoll_fd < 0 || nic->kick_fd < 0 || nic->timer_fd < 0)
		goto failed;
	event.data.u32 = VERBS_TIMER;
	if (epoll_ctl(nic->epoll_fd, EPOLL_CTL_ADD, nic->timer_fd, &event) < 0)
		goto failed;
	for (uint32_t r = 0; r < nic->num_rails; r++) {
		event.data.u32 = 2 * r;
		if (epoll_ctl(nic->epoll_fd, EPOLL_CTL_ADD, nic->rails[r].channel->fd, &event) < 0)
			goto failed;
		event.data.u32 = 2 * r + 1;
		/* Another library's context: its asynchronous events are that library's. */
		if (nic->rails[r].owns_context &&
		    epoll_ctl(nic->epoll_fd, EPOLL_CTL_ADD, nic->rails[r].context->async_fd,
			      &event) < 0)
			goto failed;
	}
	return 0;
failed:
	snprintf(why, WHY_ROOM, "no descriptors to wait for the device with (%s)",
		 strerror(errno));
	return -errno;
}

/* Another library may close the device of its protection domain as soon as we are closed. A thread
 * that still sleeps on a channel wakes up by itself: verbs_close follows then. */
static void verbs_shut(struct kvio_nic *base)
{
	struct verbs_nic *nic = (struct verbs_nic *)base;

	for (uint32_t r = 0; r < nic->num_rails && !nic->sleeping; r++)
		verbs_rail_close(&nic->rails[r]);
	if (!nic->sleeping)
		nic->num_rails = 0;
}

static void verbs_close(struct kvio_nic *base)
{
	struct verbs_nic *nic = (struct verbs_nic *)base;

	for (uint32_t r = 0; r < nic->num_rails; r++)
		verbs_rail_close(&nic->rails[r]);
	if (nic->epoll_fd >= 0)
		close(nic->epoll_fd);
	if (nic->kick_fd >= 0)
		close(nic->kick_fd);
	if (nic->timer_fd >= 0)
		close(nic->timer_fd);
	pthread_cond_destroy(&nic->own_domain.moved);
	pthread_mutex_destroy(&nic->own_domain.lock);
	free(nic->slots);
	free(nic->wrs);
	free(nic->sges);
	free(nic);
}

static int verbs_open(struct kvio_nic **out, const struct kvio_nic_params *params)
{
	struct verbs_nic *nic = calloc(1, sizeof(*nic));
	char why[WHY_ROOM] = "";
	pthread_condattr_t attributes;
	int rc;

	if (!nic)
		return -ENOMEM;
	nic->epoll_fd = nic->kick_fd = nic->timer_fd = -1;
	nic->silent_ns = KVIO_NEVER;
	nic->base.domain = &nic->own_domain;
	pthread_mutex_init(&nic->own_domain.lock, NULL);
	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(&nic->own_domain.moved, &attributes);
	pthread_condattr_destroy(&attributes);
	rc = verbs_load(why, sizeof(why));
	if (rc == 0)
		rc = open_rails(nic, params, why);
	if (rc == 0)
		rc = set_limits(nic, params, why);
	if (rc == 0)
		rc = set_up(nic, why);
	if (rc < 0) {
		if (params->why)
			snprintf(params->why, params->why_room, "%s; Nic.open(\"soft\") works "
				 "anywhere", why[0] ? why : strerror(-rc));
		verbs_close(&nic->base);
		return rc;
	}
	*out = &nic->base;
	return 0;
}

/* ---- figures ---- */

static uint64_t verbs_clock(struct kvio_nic *nic)
{
	return kvio_monotonic_ns();
}

static void verbs_counters(struct kvio_nic *nic, struct kvio_counters *out)
{
	*out = ((struct verbs_nic *)nic)->counters;
}

static uint64_t bits_per_s(const struct ibv_port_attr *port)
{
	static const struct { uint8_t code; uint32_t mbits; } speeds[] = {
		{ 1, 2500 }, { 2, 5000 }, { 4, 10000 }, { 8, 10000 }, { 16, 14062 },
		{ 32, 25781 }, { 64, 53125 }, { 128, 106250 },
	};
	static const struct { uint8_t code, lanes; } widths[] = {
		{ 1, 1 }, { 2, 4 }, { 4, 8 }, { 8, 12 }, { 16, 2 },
	};
	uint64_t lane = 0, lanes = 0;

	for (size_t i = 0; i < sizeof(speeds) / sizeof(*speeds); i++)
		lane = speeds[i].code == port->active_speed ? speeds[i].mbits : lane;
	for (size_t i = 0; i < sizeof(widths) / sizeof(*widths); i++)
		lanes = widths[i].code == port->active_width ? widths[i].lanes : lanes;
	return lane * lanes * 1000000;
}

static int32_t numa_node(const char *device)
{
	char path[128];
	int node = -1;
	FILE *file;

	snprintf(path, sizeof(path), "/sys/class/infiniband/%s/device/numa_node", device);
	file = fopen(path, "re");
	if (!file)
		return -1;
	if (fscanf(file, "%d", &node) != 1)
		node = -1;
	fclose(file);
	return node;
}

static void verbs_info(struct kvio_nic *base, struct kvio_nic_info *out)
{
	struct verbs_nic *nic = (struct verbs_nic *)base;

	out->num_rails = nic->num_rails;
	out->max_sge = base->max_sge;
	out->max_sge_rd = nic->max_sge_rd;
	out->max_rd_atomic = (uint32_t)nic->rails[0].device.max_qp_init_rd_atom;
	out->max_msg_nbytes = nic->max_msg;
	out->async_events = nic->async_events;
	out->pd = (uint64_t)(uintptr_t)nic->rails[0].pd;
	out->context = (uint64_t)(uintptr_t)nic->rails[0].context;
	for (uint32_t r = 0; r < nic->num_rails; r++) {
		const struct verbs_rail *rail = &nic->rails[r];
		struct kvio_rail_info *to = &out->rails[r];

		snprintf(to->device, sizeof(to->device), "%s", rail->name);
		snprintf(to->netdev, sizeof(to->netdev), "%s", rail->netdev);
		snprintf(to->link_layer, sizeof(to->link_layer), "%s",
			 rail->port_attr.link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" :
			 "InfiniBand");
		snprintf(to->gid_type, sizeof(to->gid_type), "%s", rail->gid_type);
		memcpy(to->gid, rail->gid.raw, sizeof(to->gid));
		to->gid_index = rail->gid_index;
		to->numa_node = numa_node(rail->name);
		to->port = rail->port;
		to->mtu = verbs_mtu_bytes(rail->port_attr.active_mtu);
		to->lid = rail->port_attr.lid;
		to->uses_wr_api = nic->uses_wr_api;
		to->bits_per_s = bits_per_s(&rail->port_attr);
	}
}

const struct kvio_nic_ops kvio_verbs_ops = {
	.name = "verbs",
	.open = verbs_open,
	.close = verbs_close,
	.reg = verbs_reg,
	.dereg = verbs_dereg,
	.rkeys = verbs_rkeys,
	.qp_create = verbs_qp_create,
	.qp_connect = verbs_qp_connect,
	.qp_query = verbs_qp_query,
	.qp_fail = verbs_qp_fail,
	.qp_reset = verbs_qp_reset,
	.qp_destroy = verbs_qp_destroy,
	.post = verbs_post,
	.cancel = verbs_cancel,
	.drive = verbs_drive,
	.poll = verbs_poll,
	.clock = verbs_clock,
	.sleep = verbs_sleep,
	.event_fd = verbs_event_fd,
	.arm = verbs_arm,
	.counters = verbs_counters,
	.info = verbs_info,
	.shut = verbs_shut,
};

#endif
