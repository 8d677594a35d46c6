/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include "nic_impl.h"
static int verbs_open(struct kvio_nic **out, const struct kvio_nic_params *params)
{
	if (params->why)
		snprintf(params->why, params->why_room, "provider 'verbs' is not here yet; use Nic.open(\"soft\")");
	return -ENOSYS;
}
const struct kvio_nic_ops kvio_verbs_ops = { .name = "verbs", .open = verbs_open };
