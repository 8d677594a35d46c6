/* SPDX-License-Identifier: Apache-2.0 */
/* The other end of a connection, on plain libibverbs. What it says and hears: see peers.py. */
#include <err.h>
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NBYTES (1 << 20)
#define NEED(what) do { if (!(what)) err(1, "%s", #what); } while (0)
#define OK(call) do { if ((call) != 0) err(1, "%s", #call); } while (0)

static struct far { uint32_t qpn, psn, mtu, rkey; uint64_t addr, nbytes; union ibv_gid gid; } far;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static struct ibv_gid_entry gid;
static unsigned char *memory;

static void set_up(const char *name)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_gid_entry entry[32];
	struct ibv_context *context;
	struct ibv_pd *pd;

	while (devices && *devices && strcmp(ibv_get_device_name(*devices), name))
		devices++;
	NEED(devices && *devices);
	NEED(context = ibv_open_device(*devices));
	for (int i = 0, n = ibv_query_gid_table(context, entry, 32, 0); i < n; i++)
		if (entry[i].gid_type == IBV_GID_TYPE_ROCE_V2 && entry[i].gid.raw[10] == 0xff)
			gid = entry[i];			/* of an IPv4 address */
	NEED(pd = ibv_alloc_pd(context));
	NEED(cq = ibv_create_cq(context, 16, NULL, NULL, 0));
	NEED(qp = ibv_create_qp(pd, &(struct ibv_qp_init_attr){ .send_cq = cq, .recv_cq = cq,
		.qp_type = IBV_QPT_RC, .cap = { 16, 1, 1, 1, 0 } }));
	NEED(memory = aligned_alloc(4096, NBYTES));
	for (int i = 0; i < NBYTES; i++)
		memory[i] = (unsigned char)(i * 7 + i / 251);
	NEED(mr = ibv_reg_mr(pd, memory, NBYTES, IBV_ACCESS_LOCAL_WRITE |
			     IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ));
}

static void join(uint8_t tclass)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = 7 };

	OK(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			 IBV_QP_ACCESS_FLAGS));
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024,
		.dest_qp_num = far.qpn, .rq_psn = far.psn, .max_dest_rd_atomic = 4,
		.min_rnr_timer = 12, .ah_attr = { .is_global = 1, .port_num = 1, .grh = {
			.dgid = far.gid, .sgid_index = (uint8_t)gid.gid_index, .hop_limit = 64,
			.traffic_class = tclass } } };
	OK(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
			 IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 17, .retry_cnt = 7,
				  .rnr_retry = 7, .max_rd_atomic = 4, .sq_psn = 77 };
	OK(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			 IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

int main(int argc, char **argv)
{
	char word[16], hex[33];
	uint64_t x, y, z;

	set_up(argc == 3 ? argv[1] : "usage: DEVICE TCLASS");
	printf("%u 77 1024 ", qp->qp_num);
	for (int i = 0; i < 16; i++)
		printf("%02x", gid.gid.raw[i]);
	printf(" %" PRIu64 " %u %d\n", (uint64_t)mr->addr, mr->rkey, NBYTES);
	fflush(stdout);
	NEED(scanf("%u %u %u %32s %" SCNu64 " %u %" SCNu64, &far.qpn, &far.psn, &far.mtu, hex,
		   &far.addr, &far.rkey, &far.nbytes) == 7);
	for (int i = 0; i < 16; i++)
		sscanf(hex + 2 * i, "%2hhx", &far.gid.raw[i]);
	join((uint8_t)atoi(argv[2]));
	puts("ready");
	while (fflush(stdout) == 0 && scanf("%15s %" SCNu64 " %" SCNu64, word, &x, &y) == 3) {
		if (!strcmp(word, "show")) {
			while (y--)
				printf("%02x", memory[x++]);
			puts("");
			continue;
		}
		NEED(scanf("%" SCNu64, &z) == 1);
		struct ibv_sge sge = { (uint64_t)(memory + x), (uint32_t)z, mr->lkey };
		struct ibv_send_wr *bad, wr = { .sg_list = &sge, .num_sge = 1,
			.opcode = *word == 'r' ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE,
			.send_flags = IBV_SEND_SIGNALED, .wr.rdma = { far.addr + y, far.rkey } };
		struct ibv_wc wc;
		OK(ibv_post_send(qp, &wr, &bad));
		while (ibv_poll_cq(cq, 1, &wc) == 0);
		printf("%d\n", wc.status);
	}
	return 0;
}
