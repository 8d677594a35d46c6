/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libibverbs, opened at run time and never closed: its providers keep state of their own. What is
 * inline in its header goes through pointers of the context and needs no symbol.
 */
#include <stdio.h>

#include "verbs.h"

#ifdef KVIO_HAVE_VERBS
#include "symbols.h"

struct verbs_lib verbs;

static int resolve(void *handle, char *why, size_t room)
{
	const struct kvio_symbol symbols[] = {
#define SYMBOL(name) { "ibv_" #name, &verbs.name, false }
		SYMBOL(get_device_list), SYMBOL(free_device_list), SYMBOL(get_device_name),
		SYMBOL(open_device), SYMBOL(close_device), SYMBOL(query_device),
		SYMBOL(query_port), SYMBOL(query_gid), SYMBOL(alloc_pd), SYMBOL(dealloc_pd),
		SYMBOL(reg_mr), SYMBOL(dereg_mr), SYMBOL(create_comp_channel),
		SYMBOL(destroy_comp_channel), SYMBOL(create_cq), SYMBOL(destroy_cq),
		SYMBOL(get_cq_event), SYMBOL(ack_cq_events), SYMBOL(get_async_event),
		SYMBOL(ack_async_event), SYMBOL(create_qp), SYMBOL(modify_qp), SYMBOL(query_qp),
		SYMBOL(destroy_qp),
#undef SYMBOL
		{ "_ibv_query_gid_table", &verbs.query_gid_table, true },
		{ "ibv_reg_dmabuf_mr", &verbs.reg_dmabuf_mr, true },
		{ "ibv_qp_to_qp_ex", &verbs.qp_to_qp_ex, true },
	};

	const char *missing = kvio_resolve(handle, symbols, sizeof(symbols) / sizeof(*symbols));

	if (!missing)
		return 0;
	snprintf(why, room, "libibverbs is too old: it has no %s", missing);
	return -ENOSYS;
}

static int load(char *why, size_t room)
{
	const char *name = getenv("KVIO_IBVERBS_LIBRARY"), *error;
	void *handle;
	int rc;

	name = name && *name ? name : VERBS_LIBRARY;
	handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
	if (!handle) {
		error = dlerror();
		snprintf(why, room, "the RDMA library cannot be opened (%s): install libibverbs1 "
			 "and ibverbs-providers", error ? error : name);
		return -ENOSYS;
	}
	rc = resolve(handle, why, room);
	if (rc < 0)
		dlclose(handle);
	return rc;
}

int verbs_load(char *why, size_t room)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	static bool loaded;
	int rc = 0;

	pthread_mutex_lock(&lock);
	if (!loaded)
		rc = load(why, room);
	loaded = loaded || rc == 0;
	pthread_mutex_unlock(&lock);
	return rc;
}

/* What ibv_query_port does in the header, by our table. */
int verbs_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *out)
{
	struct verbs_context *extended = verbs_get_ctx_op(context, query_port);
	int rc;

	memset(out, 0, sizeof(*out));
	rc = extended ? extended->query_port(context, port, out, sizeof(*out)) :
			verbs.query_port(context, port, out);
	return rc > 0 ? -rc : rc < 0 ? -EIO : 0;
}

#else

static int verbs_open(struct kvio_nic **out, const struct kvio_nic_params *params)
{
	if (params->why)
		snprintf(params->why, params->why_room, "this kvio was built without "
			 "<infiniband/verbs.h>: install libibverbs-dev and build it again; "
			 "Nic.open(\"soft\") works anywhere");
	return -ENOSYS;
}

const struct kvio_nic_ops kvio_verbs_ops = { .name = "verbs", .open = verbs_open };

#endif
