/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of the stand-in for libibverbs by itself: `ibverbs_standin_check NAME`, 0 if it passes. */
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <infiniband/verbs.h>

#define DEPTH 8
#define ROOM 65536
#define CHECK(x) do { \
	if (!(x)) { \
		fprintf(stderr, "%s:%d: %s\n", __func__, __LINE__, #x); \
		exit(1); \
	} \
} while (0)

int standin_set(int device, const char *name, uint64_t value);
uint64_t standin_count(int device, const char *name);
void standin_refuse(const char *call, int error, int after, int times);
void standin_fail(int device, uint64_t nth, int status);
int standin_drop_qp(uint32_t qpn);
void standin_event(int device, int type);

struct end {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	unsigned char *bytes;
	union ibv_gid gid;
};

static struct end a, b;

static void open_end(struct end *end, struct ibv_device *device, int wr_api, int cqe)
{
	struct ibv_qp_init_attr_ex init = {
		.cap = { .max_send_wr = DEPTH, .max_send_sge = 4 }, .qp_type = IBV_QPT_RC,
		.comp_mask = IBV_QP_INIT_ATTR_PD |
			     (wr_api ? IBV_QP_INIT_ATTR_SEND_OPS_FLAGS : 0),
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_RDMA_WRITE,
	};

	CHECK(end->context = ibv_open_device(device));
	CHECK(end->pd = ibv_alloc_pd(end->context));
	CHECK(end->channel = ibv_create_comp_channel(end->context));
	fcntl(end->channel->fd, F_SETFL, O_NONBLOCK);
	CHECK(end->cq = ibv_create_cq(end->context, cqe, NULL, end->channel, 0));
	init.pd = end->pd;
	init.send_cq = init.recv_cq = end->cq;
	CHECK(end->qp = ibv_create_qp_ex(end->context, &init));
	CHECK((ibv_qp_to_qp_ex(end->qp) != NULL) == wr_api);
	end->bytes = malloc(ROOM);
	for (int i = 0; i < ROOM; i++)
		end->bytes[i] = (unsigned char)(end == &a ? i * 7 : i * 13 + 5);
	CHECK(end->mr = ibv_reg_mr(end->pd, end->bytes, ROOM, IBV_ACCESS_LOCAL_WRITE |
				   IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ));
	CHECK(end->mr->lkey != end->mr->rkey);
	CHECK(ibv_query_gid(end->context, 1, 3, &end->gid) == 0);
}

static int to_init(struct end *end)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
	};

	return ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			     IBV_QP_ACCESS_FLAGS);
}

static void connect_end(struct end *end, const struct end *far, uint32_t rq_psn)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024,
		.dest_qp_num = far->qp->qp_num, .rq_psn = rq_psn, .max_dest_rd_atomic = 4,
		.ah_attr = { .is_global = 1, .port_num = 1, .sl = 2,
			     .grh = { .dgid = far->gid, .sgid_index = 3, .hop_limit = 64,
				      .traffic_class = 32 } },
	};
	int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
		   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;

	CHECK(to_init(end) == 0);
	CHECK(ibv_modify_qp(end->qp, &attr, mask & ~IBV_QP_MIN_RNR_TIMER) == EINVAL);
	CHECK(ibv_modify_qp(end->qp, &attr, mask) == 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7,
				     .sq_psn = 77, .max_rd_atomic = 4 };
	CHECK(ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			    IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) == 0);
}

static void open_both(int wr_api, int cqe)
{
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);

	CHECK(list && count >= 1 && !list[count]);
	open_end(&a, list[0], wr_api, cqe);
	open_end(&b, list[count - 1], wr_api, cqe);
	ibv_free_device_list(list);
	connect_end(&a, &b, 77);
	connect_end(&b, &a, 77);
}

static void close_end(struct end *end)
{
	CHECK(ibv_dealloc_pd(end->pd) == EBUSY && ibv_destroy_cq(end->cq) == EBUSY);
	CHECK(ibv_destroy_qp(end->qp) == 0);
	CHECK(ibv_destroy_comp_channel(end->channel) == EBUSY);
	CHECK(ibv_destroy_cq(end->cq) == 0 && ibv_destroy_comp_channel(end->channel) == 0);
	CHECK(ibv_dereg_mr(end->mr) == 0 && ibv_dealloc_pd(end->pd) == 0);
	CHECK(ibv_close_device(end->context) == 0);
	free(end->bytes);
}

static void close_both(void)
{
	static const char *const kinds[] = { "contexts", "pds", "mrs", "channels", "cqs", "qps" };

	close_end(&a);
	close_end(&b);
	for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
		CHECK(standin_count(-1, kinds[i]) == 0);
}

/* `count` WRITEs of 100 bytes each from a to b by a chain, the last one signalled; `bad` has
 * another rkey. */
static int post_chain(int count, int bad, struct ibv_send_wr **stopped)
{
	static struct ibv_send_wr wrs[64];
	static struct ibv_sge sges[64];

	for (int i = 0; i < count; i++) {
		sges[i] = (struct ibv_sge){ (uintptr_t)a.bytes + 1000u * (unsigned)i, 100,
					    a.mr->lkey };
		wrs[i] = (struct ibv_send_wr){
			.wr_id = (uint64_t)i, .next = i + 1 < count ? &wrs[i + 1] : NULL,
			.sg_list = &sges[i], .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
			.send_flags = i + 1 == count ? IBV_SEND_SIGNALED : 0,
			.wr.rdma = { (uintptr_t)b.bytes + 500u * (unsigned)i,
				     b.mr->rkey + (i == bad) },
		};
	}
	return ibv_post_send(a.qp, wrs, stopped);
}

static void post_ex(uint64_t wr_id, int is_read, unsigned nbytes)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(a.qp);
	struct ibv_sge halves[2] = {
		{ (uintptr_t)a.bytes, nbytes / 2, a.mr->lkey },
		{ (uintptr_t)a.bytes + 40000, nbytes - nbytes / 2, a.mr->lkey },
	};

	ex->wr_id = wr_id;
	ex->wr_flags = IBV_SEND_SIGNALED;
	if (is_read)
		ibv_wr_rdma_read(ex, b.mr->rkey, (uintptr_t)b.bytes + 100);
	else
		ibv_wr_rdma_write(ex, b.mr->rkey, (uintptr_t)b.bytes + 100);
	ibv_wr_set_sge_list(ex, 2, halves);
}

static struct ibv_wc next_wc(void)
{
	struct ibv_wc wc;
	int got = 0;

	for (int i = 0; i < 5000 && got == 0; i++) {
		got = ibv_poll_cq(a.cq, 1, &wc);
		if (got == 0)
			usleep(1000);
	}
	CHECK(got == 1);
	return wc;
}

static void check_moves(void)
{
	struct ibv_send_wr *stopped;
	struct ibv_qp_ex *ex;

	open_both(1, 16);
	ex = ibv_qp_to_qp_ex(a.qp);
	CHECK(post_chain(5, -1, &stopped) == 0);
	CHECK(next_wc().wr_id == 4 && standin_count(-1, "cqes") == 1);
	for (int i = 0; i < 5; i++)
		CHECK(memcmp(a.bytes + 1000 * i, b.bytes + 500 * i, 100) == 0);
	ibv_wr_start(ex);
	post_ex(9, 1, 601);
	ibv_wr_abort(ex);
	ibv_wr_start(ex);
	post_ex(10, 1, 601);
	post_ex(11, 0, 601);
	CHECK(ibv_wr_complete(ex) == 0);
	CHECK(next_wc().wr_id == 10 && next_wc().wr_id == 11);
	CHECK(memcmp(a.bytes, b.bytes + 100, 300) == 0);
	CHECK(memcmp(a.bytes + 40000, b.bytes + 400, 301) == 0);
	CHECK(standin_count(0, "post_calls") == 2 && standin_count(0, "work_requests") == 7);
	CHECK(standin_count(0, "signalled") == 3 && standin_count(0, "sges") == 9);
	CHECK(standin_count(0, "nbytes") == 500 + 2 * 601);
	close_both();
}

/* What is behind a failure flushes, signalled or not, and the far end is in error as well. */
static void check_errors(void)
{
	struct ibv_send_wr *stopped;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };
	struct ibv_qp_init_attr init;
	struct ibv_wc wc;

	open_both(1, 16);
	CHECK(post_chain(5, 2, &stopped) == 0);
	for (uint64_t i = 2; i < 5; i++) {
		wc = next_wc();
		CHECK(wc.wr_id == i && wc.status == (i == 2 ? IBV_WC_REM_ACCESS_ERR :
						     IBV_WC_WR_FLUSH_ERR));
	}
	CHECK(ibv_query_qp(b.qp, &attr, IBV_QP_STATE, &init) == 0 && attr.qp_state == IBV_QPS_ERR);
	CHECK(memcmp(a.bytes + 1000, b.bytes + 500, 100) == 0);
	CHECK(memcmp(a.bytes + 3000, b.bytes + 1500, 100) != 0);
	for (struct end *end = &a; end; end = end == &a ? &b : NULL) {
		attr.qp_state = IBV_QPS_RESET;
		CHECK(ibv_modify_qp(end->qp, &attr, IBV_QP_STATE) == 0);
	}
	connect_end(&a, &b, 77);
	CHECK(post_chain(1, -1, &stopped) == 0);	/* nobody answers yet */
	CHECK(next_wc().status == IBV_WC_RETRY_EXC_ERR);
	attr.qp_state = IBV_QPS_RESET;
	CHECK(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE) == 0);
	CHECK(post_chain(1, -1, &stopped) == EINVAL);	/* not in this state */
	connect_end(&a, &b, 77);
	connect_end(&b, &a, 77);
	standin_fail(0, 2, IBV_WC_RESP_TIMEOUT_ERR);
	CHECK(post_chain(2, -1, &stopped) == 0 && next_wc().status == IBV_WC_RESP_TIMEOUT_ERR);
	close_both();
}

/* Slots come free when a completion behind them is polled. By a chain what fits is posted; by the
 * other interface nothing. */
static void check_full(void)
{
	struct ibv_send_wr *stopped = NULL;
	struct ibv_qp_ex *ex;

	open_both(1, 16);
	ex = ibv_qp_to_qp_ex(a.qp);
	CHECK(post_chain(DEPTH, -1, &stopped) == 0);
	while (standin_count(-1, "cqes") == 0)
		usleep(1000);
	CHECK(post_chain(1, -1, &stopped) == ENOMEM && stopped->wr_id == 0);
	CHECK(next_wc().wr_id == DEPTH - 1);
	CHECK(post_chain(DEPTH + 3, -1, &stopped) == ENOMEM && stopped->wr_id == DEPTH);
	ibv_wr_start(ex);
	post_ex(1, 1, 64);
	CHECK(ibv_wr_complete(ex) == ENOMEM);
	CHECK(standin_count(0, "post_calls") == 2);
	standin_set(-1, "frozen", 1);
	close_both();
}

static void check_events(void)
{
	struct ibv_send_wr *stopped;
	struct pollfd waiting;
	struct ibv_async_event event;
	struct ibv_cq *cq;
	void *context;

	open_both(0, 16);
	waiting = (struct pollfd){ .fd = a.channel->fd, .events = POLLIN };
	CHECK(ibv_req_notify_cq(a.cq, 0) == 0);
	standin_set(0, "frozen", 1);
	CHECK(post_chain(3, -1, &stopped) == 0);
	CHECK(poll(&waiting, 1, 30) == 0 && standin_count(-1, "nbytes") == 0);
	standin_set(0, "delay_ns", 1);
	standin_set(0, "frozen", 0);
	CHECK(poll(&waiting, 1, 5000) == 1);
	CHECK(ibv_get_cq_event(a.channel, &cq, &context) == 0 && cq == a.cq);
	CHECK(ibv_get_cq_event(a.channel, &cq, &context) < 0 && errno == EAGAIN);
	ibv_ack_cq_events(cq, 1);
	CHECK(next_wc().wr_id == 2);
	standin_event(0, IBV_EVENT_PORT_ERR);
	CHECK(ibv_get_async_event(a.context, &event) == 0);
	CHECK(event.event_type == IBV_EVENT_PORT_ERR);
	ibv_ack_async_event(&event);
	CHECK(post_chain(1, -1, &stopped) == 0 && next_wc().status == IBV_WC_RETRY_EXC_ERR);
	standin_set(-1, "port_state", IBV_PORT_ACTIVE);
	close_both();
}

static void check_refusals(void)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS };

	open_both(1, 16);
	CHECK(!ibv_reg_mr(a.pd, (void *)4096, 4096, 0) && errno == EFAULT);
	CHECK(!ibv_reg_mr(a.pd, a.bytes, 16, IBV_ACCESS_REMOTE_WRITE) && errno == EINVAL);
	standin_refuse("reg_mr", ENOSPC, 1, 1);
	ibv_dereg_mr(ibv_reg_mr(a.pd, a.bytes, 16, 0));
	CHECK(!ibv_reg_mr(a.pd, a.bytes, 16, 0) && errno == ENOSPC);
	ibv_dereg_mr(ibv_reg_mr(a.pd, a.bytes, 16, 0));
	CHECK(!ibv_reg_dmabuf_mr(a.pd, 0, 4096, 4096, -1, 0) && errno == EINVAL);
	CHECK(!ibv_create_cq(a.context, 0, NULL, NULL, 0) && errno == EINVAL);
	CHECK(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE) == EINVAL);
	CHECK(standin_set(-1, "no_such_setting", 1) == -ENOENT);
	CHECK(standin_count(-1, "no_such_counter") == UINT64_MAX);
	close_both();
}

static void check_overrun(void)
{
	struct ibv_send_wr *stopped;

	open_both(1, 2);
	post_chain(DEPTH, 0, &stopped);
	usleep(500000);			/* the stand-in ends the process */
	exit(0);
}

int main(int argc, char **argv)
{
	static const struct { const char *name; void (*check)(void); } checks[] = {
		{ "moves", check_moves }, { "errors", check_errors }, { "full", check_full },
		{ "events", check_events }, { "refusals", check_refusals },
		{ "overrun", check_overrun },
	};

	for (size_t i = 0; argc == 2 && i < sizeof(checks) / sizeof(checks[0]); i++) {
		if (strcmp(checks[i].name, argv[1]) == 0) {
			checks[i].check();
			return 0;
		}
	}
	return 2;
}
