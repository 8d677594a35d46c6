/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in's devices, its controls, and what fails on demand; see ibverbs_standin.h. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <net/if.h>
#include <stdarg.h>
#include <unistd.h>

#include "ibverbs_standin.h"

pthread_mutex_t bus = PTHREAD_MUTEX_INITIALIZER;
struct standin_device devices[MAX_DEVICES];
uint32_t num_devices;

static struct standin_context *contexts;
static uint32_t loopback;		/* the index of the network interface of all GIDs */
static struct { char call[32]; int error, after, times; } refusals[16];	/* the bus guards them */

void die(const char *format, ...)
{
	va_list arguments;

	fputs("ibverbs stand-in: ", stderr);
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fputc('\n', stderr);
	abort();
}

/* ---- settings and counters, by name ---- */

static const struct { const char *name; size_t at; uint64_t value; } settings[] = {
#define SETTING_ROW(name, value) { #name, offsetof(struct standin_device, is.name), value },
	SETTINGS(SETTING_ROW)
};
static const struct { const char *name; size_t at; } counters[] = {
#define COUNTER_ROW(name) { #name, offsetof(struct standin_device, count.name) },
	COUNTERS(COUNTER_ROW)
};

static uint64_t *field(struct standin_device *device, size_t at)
{
	return (uint64_t *)((char *)device + at);
}

/* device < 0: all. -ENOENT: there is no such setting. Nothing goes by the old one afterwards. */
EXPORT int standin_set(int device, const char *name, uint64_t value)
{
	for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++) {
		if (strcmp(settings[i].name, name))
			continue;
		for (int each = 0; each < MAX_DEVICES; each++) {
			if (device >= 0 && each != device)
				continue;
			pthread_mutex_lock(&bus);
			__atomic_store_n(field(&devices[each], settings[i].at), value,
					 __ATOMIC_SEQ_CST);
			pthread_mutex_unlock(&bus);
			if (devices[each].running)
				ring_doorbell(&devices[each]);
		}
		return 0;
	}
	return -ENOENT;
}

/* device < 0: of all together. UINT64_MAX: there is no such counter. */
EXPORT uint64_t standin_count(int device, const char *name)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < sizeof(counters) / sizeof(counters[0]); i++) {
		if (strcmp(counters[i].name, name))
			continue;
		for (int each = 0; each < MAX_DEVICES; each++)
			if (device < 0 || each == device)
				sum += __atomic_load_n(field(&devices[each], counters[i].at),
						       __ATOMIC_RELAXED);
		return sum;
	}
	return UINT64_MAX;
}

static void settings_from(const char *text)
{
	char name[32];
	unsigned long long value;
	int used;

	while (text && sscanf(text, "%31[a-z_]=%lli%n", name, (long long *)&value, &used) == 2) {
		if (standin_set(-1, name, value) < 0)
			die("KVIO_STANDIN: there is no setting %s", name);
		text += used;
		text += *text == ',';
	}
	if (text && *text)
		die("KVIO_STANDIN: not name=value: %s", text);
}

/* Settings as at the start, nothing injected, counters at 0; objects stay. */
EXPORT void standin_reset(void)
{
	for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++)
		standin_set(-1, settings[i].name, settings[i].value);
	settings_from(getenv("KVIO_STANDIN"));
	pthread_mutex_lock(&bus);
	memset(refusals, 0, sizeof(refusals));
	for (int each = 0; each < MAX_DEVICES; each++) {
		devices[each].fail_in = 0;
		for (size_t i = 0; i < sizeof(counters) / sizeof(counters[0]); i++)
			if (counters[i].at < offsetof(struct standin_device, count.contexts))
				__atomic_store_n(field(&devices[each], counters[i].at), 0,
						 __ATOMIC_RELAXED);
	}
	pthread_mutex_unlock(&bus);
}

__attribute__((constructor)) static void loaded(void)
{
	standin_reset();
	loopback = if_nametoindex("lo");
	num_devices = (uint32_t)devices[0].is.devices;
	if (num_devices > MAX_DEVICES)
		die("KVIO_STANDIN: at most %d devices", MAX_DEVICES);
	for (uint32_t i = 0; i < num_devices; i++) {
		struct ibv_device *base = &devices[i].base;

		devices[i].index = i;
		base->node_type = IBV_NODE_CA;
		base->transport_type = IBV_TRANSPORT_IB;
		snprintf(base->name, sizeof(base->name), "standin%u", i);
		snprintf(base->dev_name, sizeof(base->dev_name), "uverbs%u", i);
		snprintf(base->dev_path, sizeof(base->dev_path), "/nowhere/uverbs%u", i);
		snprintf(base->ibdev_path, sizeof(base->ibdev_path), "/nowhere/standin%u", i);
	}
}

/* ---- faults to inject ---- */

/* `after` calls of this name from now, `times` of them fail. */
EXPORT void standin_refuse(const char *call, int error, int after, int times)
{
	pthread_mutex_lock(&bus);
	for (size_t i = 0; i < sizeof(refusals) / sizeof(refusals[0]); i++) {
		if (refusals[i].times)
			continue;
		snprintf(refusals[i].call, sizeof(refusals[i].call), "%s", call);
		refusals[i].error = error;
		refusals[i].after = after;
		__atomic_store_n(&refusals[i].times, times, __ATOMIC_RELEASE);
		break;
	}
	pthread_mutex_unlock(&bus);
}

int refused(const char *call)
{
	bool any = false;
	int error = 0;

	for (size_t i = 0; i < sizeof(refusals) / sizeof(refusals[0]); i++)
		any = any || __atomic_load_n(&refusals[i].times, __ATOMIC_ACQUIRE);
	if (!any)
		return 0;
	pthread_mutex_lock(&bus);
	for (size_t i = 0; i < sizeof(refusals) / sizeof(refusals[0]) && !error; i++) {
		if (!refusals[i].times || strcmp(refusals[i].call, call))
			continue;
		if (refusals[i].after-- > 0)
			continue;
		refusals[i].times--;
		error = refusals[i].error;
	}
	pthread_mutex_unlock(&bus);
	return error;
}

/* The nth work request that is carried out from now on ends with this status. */
EXPORT void standin_fail(int device, uint64_t nth, int status)
{
	pthread_mutex_lock(&bus);
	devices[device].fail_in = nth;
	devices[device].fail_status = (enum ibv_wc_status)status;
	pthread_mutex_unlock(&bus);
}

/* As if its process had died: packets to it are lost. */
EXPORT int standin_drop_qp(uint32_t qpn)
{
	int rc = -ENOENT;

	pthread_mutex_lock(&bus);
	if (qpn < MAX_OBJECTS && qps[qpn]) {
		qps[qpn]->dropped = true;
		rc = 0;
	}
	pthread_mutex_unlock(&bus);
	return rc;
}

/* The state that the device has a queue pair in. */
EXPORT int standin_qp_state(uint32_t qpn)
{
	int rc = -ENOENT;

	pthread_mutex_lock(&bus);
	if (qpn < MAX_OBJECTS && qps[qpn])
		rc = (int)state_of(qps[qpn]);
	pthread_mutex_unlock(&bus);
	return rc;
}

/* The bus is held. */
void async_event(struct standin_device *device, struct ibv_async_event event)
{
	for (struct standin_context *each = contexts; each; each = each->next) {
		bool mine = event.event_type == IBV_EVENT_PORT_ERR ||
			    event.event_type == IBV_EVENT_PORT_ACTIVE ||
			    event.event_type == IBV_EVENT_DEVICE_FATAL ||
			    event.element.qp->context == &each->v.context;

		if (device_of(&each->v.context) == device && mine &&
		    write(each->async_write, &event, sizeof(event)) != (ssize_t)sizeof(event) &&
		    errno != EAGAIN)
			die("nobody reads asynchronous events");
	}
}

/* An event of the port or of the whole device; a port that goes down is down. */
EXPORT void standin_event(int device, int type)
{
	if (type == IBV_EVENT_PORT_ERR || type == IBV_EVENT_PORT_ACTIVE)
		standin_set(device, "port_state", type == IBV_EVENT_PORT_ERR ? IBV_PORT_DOWN :
						  IBV_PORT_ACTIVE);
	pthread_mutex_lock(&bus);
	async_event(&devices[device], (struct ibv_async_event){
		.element.port_num = 1, .event_type = (enum ibv_event_type)type });
	pthread_mutex_unlock(&bus);
}

/* ---- devices and contexts ---- */

EXPORT struct ibv_device **ibv_get_device_list(int *count)
{
	struct ibv_device **list;
	int error = refused("get_device_list");

	if (error) {
		errno = error;
		return NULL;
	}
	list = calloc(num_devices + 1, sizeof(*list));
	for (uint32_t i = 0; i < num_devices && list; i++)
		list[i] = &devices[i].base;
	if (count)
		*count = (int)num_devices;
	return list;
}

EXPORT void ibv_free_device_list(struct ibv_device **list)
{
	free(list);
}

EXPORT const char *ibv_get_device_name(struct ibv_device *device)
{
	return device->name;
}

EXPORT __be64 ibv_get_device_guid(struct ibv_device *device)
{
	return 0x0200000000000000u | ((struct standin_device *)device)->index;
}

static int query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *out,
		      size_t nbytes)
{
	struct standin_device *device = device_of(context);
	struct ibv_port_attr attr = {
		.state = (enum ibv_port_state)SETTING(device, port_state),
		.max_mtu = IBV_MTU_4096,
		.active_mtu = (enum ibv_mtu)SETTING(device, active_mtu), .gid_tbl_len = NUM_GIDS,
		.max_msg_sz = (uint32_t)SETTING(device, max_msg_sz), .pkey_tbl_len = 1,
		.active_width = 2, .active_speed = 32, .phys_state = 5,
		.link_layer = (uint8_t)SETTING(device, link_layer),
	};

	if (port != 1)
		return EINVAL;
	if (attr.link_layer == IBV_LINK_LAYER_INFINIBAND) {
		attr.lid = (uint16_t)(device->index + 1);
		attr.sm_lid = 1;
	}
	memcpy(out, &attr, nbytes < sizeof(attr) ? nbytes : sizeof(attr));
	return 0;
}

EXPORT struct ibv_context *ibv_open_device(struct ibv_device *base)
{
	struct standin_device *device = (struct standin_device *)base;
	struct standin_context *made;
	int error = refused("open_device"), fds[2];

	if (error || !(made = calloc(1, sizeof(*made)))) {
		errno = error ? error : ENOMEM;
		return NULL;
	}
	if (pipe2(fds, O_CLOEXEC) < 0) {
		free(made);
		return NULL;
	}
	fcntl(fds[1], F_SETFL, O_NONBLOCK);
	made->async_write = fds[1];
	made->v.query_port = query_port;
	made->v.sz = sizeof(made->v);
	made->v.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
	made->v.context.device = base;
	made->v.context.async_fd = fds[0];
	made->v.context.cmd_fd = -1;
	made->v.context.num_comp_vectors = 1;
	made->v.context.ops.post_send = post_send;
	made->v.context.ops.poll_cq = poll_cq;
	made->v.context.ops.req_notify_cq = req_notify_cq;
	made->v.create_qp_ex = create_qp_ex;
	pthread_mutex_lock(&bus);
	made->next = contexts;
	contexts = made;
	start_engine(device);
	pthread_mutex_unlock(&bus);
	COUNT(device, contexts, 1);
	return &made->v.context;
}

EXPORT int ibv_close_device(struct ibv_context *context)
{
	struct standin_context **link = &contexts, *gone;

	pthread_mutex_lock(&bus);
	while (*link && &(*link)->v.context != context)
		link = &(*link)->next;
	gone = *link;
	if (!gone)
		die("ibv_close_device of what is not open");
	*link = gone->next;
	pthread_mutex_unlock(&bus);
	COUNT(device_of(context), contexts, -1);
	close(gone->async_write);
	close(context->async_fd);
	free(gone);
	return 0;
}

EXPORT int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *out)
{
	struct standin_device *device = device_of(context);

	*out = (struct ibv_device_attr){
		.fw_ver = "0", .max_mr_size = SETTING(device, max_mr_size),
		.page_size_cap = 4096, .max_qp = MAX_OBJECTS - 1,
		.max_qp_wr = (int)SETTING(device, max_qp_wr),
		.max_sge = (int)SETTING(device, max_sge),
		.max_sge_rd = (int)SETTING(device, max_sge_rd), .max_cq = 1 << 16,
		.max_cqe = (int)SETTING(device, max_cqe), .max_mr = MAX_OBJECTS - 1,
		.max_pd = 1 << 16, .max_qp_rd_atom = (int)SETTING(device, max_rd_atomic),
		.max_qp_init_rd_atom = (int)SETTING(device, max_rd_atomic), .max_pkeys = 1,
		.phys_port_cnt = 1,
	};
	return refused("query_device");
}

#undef ibv_query_port
EXPORT int ibv_query_port(struct ibv_context *context, uint8_t port,
			  struct _compat_ibv_port_attr *out)
{
	/* The compatible structure ends before port_cap_flags2. */
	return query_port(context, port, (struct ibv_port_attr *)out,
			  offsetof(struct ibv_port_attr, port_cap_flags2));
}

/* ---- GIDs: link-local and 10.0.0.x, each as RoCE v1 and v2; an InfiniBand port has one ---- */

void gid_of(const struct standin_device *device, uint32_t index, struct ibv_gid_entry *out)
{
	bool is_ib = SETTING(device, link_layer) == IBV_LINK_LAYER_INFINIBAND;

	memset(out, 0, sizeof(*out));
	out->gid_index = index;
	out->port_num = 1;
	out->gid_type = is_ib ? IBV_GID_TYPE_IB : index % 2 ? IBV_GID_TYPE_ROCE_V2 :
			IBV_GID_TYPE_ROCE_V1;
	out->ndev_ifindex = is_ib ? 0 : loopback;
	if (is_ib || index < 2) {
		out->gid.raw[0] = 0xfe;
		out->gid.raw[1] = 0x80;
		out->gid.raw[8] = 2;
	} else {
		out->gid.raw[10] = out->gid.raw[11] = 0xff;
		out->gid.raw[12] = 10;
	}
	out->gid.raw[15] = (uint8_t)(device->index + 1);
}

static bool has_gid(struct ibv_context *context, uint32_t port, uint32_t index)
{
	bool is_ib = SETTING(device_of(context), link_layer) == IBV_LINK_LAYER_INFINIBAND;

	return port == 1 && index < (is_ib ? 1 : NUM_GIDS);
}

EXPORT int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index,
			     struct ibv_gid_entry *out, uint32_t flags, size_t nbytes)
{
	if (nbytes != sizeof(*out) || flags)
		return EINVAL;
	if (!has_gid(context, port, index))
		return ENODATA;
	gid_of(device_of(context), index, out);
	return 0;
}

EXPORT ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *out,
				    size_t room, uint32_t flags, size_t nbytes)
{
	size_t count = 0;

	if (nbytes != sizeof(*out) || flags)
		return -EINVAL;
	for (uint32_t i = 0; i < NUM_GIDS && count < room; i++)
		if (has_gid(context, 1, i))
			gid_of(device_of(context), i, &out[count++]);
	return (ssize_t)count;
}

EXPORT int ibv_query_gid(struct ibv_context *context, uint8_t port, int index,
			 union ibv_gid *out)
{
	struct ibv_gid_entry entry;

	if (port != 1 || index < 0 || index >= NUM_GIDS)
		return -1;
	memset(out, 0, sizeof(*out));
	if (has_gid(context, port, (uint32_t)index)) {
		gid_of(device_of(context), (uint32_t)index, &entry);
		*out = entry.gid;
	}
	return 0;
}

/* ---- asynchronous events ---- */

static bool is_alive(const struct ibv_qp *qp)
{
	for (uint32_t i = 0; i < MAX_OBJECTS; i++)
		if (qps[i] && &qps[i]->ex.qp_base == qp)
			return true;
	return false;
}

static bool is_of_qp(const struct ibv_async_event *event)
{
	return event->event_type == IBV_EVENT_QP_FATAL ||
	       event->event_type == IBV_EVENT_QP_REQ_ERR ||
	       event->event_type == IBV_EVENT_QP_ACCESS_ERR;
}

EXPORT int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *out)
{
	bool stale;

	do {
		if (read(context->async_fd, out, sizeof(*out)) != (ssize_t)sizeof(*out))
			return -1;
		pthread_mutex_lock(&bus);
		stale = is_of_qp(out) && !is_alive(out->element.qp);
		if (is_of_qp(out) && !stale)
			qp_of(out->element.qp)->unacked++;
		pthread_mutex_unlock(&bus);
	} while (stale);
	return 0;
}

EXPORT void ibv_ack_async_event(struct ibv_async_event *event)
{
	if (!is_of_qp(event))
		return;
	pthread_mutex_lock(&bus);
	qp_of(event->element.qp)->unacked--;
	pthread_mutex_unlock(&bus);
}

EXPORT int ibv_fork_init(void)
{
	return 0;
}
