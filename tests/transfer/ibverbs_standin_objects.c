/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in's objects: protection domains, memory, completion queues, queue pairs. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ibverbs_standin.h"

struct standin_pd { struct ibv_pd base; uint32_t users; };

struct standin_mr *mrs[MAX_OBJECTS];
struct standin_qp *qps[MAX_OBJECTS];
struct standin_cq *cqs;

static void *failed(int error)
{
	errno = error;
	return NULL;
}

EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	struct standin_pd *pd;
	int error = refused("alloc_pd");

	if (error || !(pd = calloc(1, sizeof(*pd))))
		return failed(error ? error : ENOMEM);
	pd->base.context = context;
	COUNT(device_of(context), pds, 1);
	return &pd->base;
}

EXPORT int ibv_dealloc_pd(struct ibv_pd *base)
{
	if (((struct standin_pd *)base)->users)
		return EBUSY;
	COUNT(device_of(base->context), pds, -1);
	free(base);
	return 0;
}

/* By memory or queue pairs; the bus is held. */
void use_pd(struct ibv_pd *pd, int more)
{
	((struct standin_pd *)pd)->users += (uint32_t)more;
}

/* ---- memory ---- */

/* Is [addr, addr + length) mapped, and writable if that is asked for? As pinning it would find. */
static int pin(uint64_t addr, uint64_t length, bool write)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	uint64_t at = addr, start, end;
	char line[512], rights[5];

	if (!maps)
		return errno;
	while (at < addr + length && fgets(line, sizeof(line), maps)) {
		if (sscanf(line, "%lx-%lx %4s", &start, &end, rights) != 3 || end <= at)
			continue;
		if (start > at || rights[0] != 'r' || (write && rights[1] != 'w'))
			break;
		at = end;
	}
	fclose(maps);
	return at < addr + length ? EFAULT : 0;
}

/* Keys are never repeated until 16 million registrations, and an lkey is not an rkey. */
static struct standin_mr *new_mr(struct ibv_pd *pd, uint64_t iova, size_t length, int access)
{
	static uint32_t next;
	struct standin_mr *mr = calloc(1, sizeof(*mr));
	uint32_t index = 0;

	if (!mr)
		return NULL;
	pthread_mutex_lock(&bus);
	for (uint32_t i = 0; i < MAX_OBJECTS && !index; i++) {
		uint32_t each = ++next % MAX_OBJECTS;

		index = mrs[each] ? 0 : each;
	}
	if (index) {
		uint32_t tag = (next / MAX_OBJECTS) % 64 << 2;

		mr->base = (struct ibv_mr){
			.context = pd->context, .pd = pd, .addr = (void *)(uintptr_t)iova,
			.length = length, .handle = index, .lkey = index << 8 | tag | 1,
			.rkey = index << 8 | tag | 2,
		};
		mr->iova = iova;
		mr->access = (uint32_t)access;
		use_pd(pd, 1);
	}
	pthread_mutex_unlock(&bus);
	if (!index) {
		free(mr);
		return failed(ENOMEM);
	}
	COUNT(device_of(pd->context), mrs, 1);
	return mr;
}

/* From now on the device uses it. */
static struct ibv_mr *publish(struct standin_mr *mr)
{
	pthread_mutex_lock(&bus);
	mrs[mr->base.handle] = mr;
	pthread_mutex_unlock(&bus);
	return &mr->base;
}

static int bad_mr(struct ibv_pd *pd, uint64_t addr, size_t length, int access)
{
	if (length == 0 || addr + length < addr ||
	    length > SETTING(device_of(pd->context), max_mr_size))
		return EINVAL;
	return access & IBV_ACCESS_REMOTE_WRITE && !(access & IBV_ACCESS_LOCAL_WRITE) ? EINVAL : 0;
}

EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length,
				       uint64_t iova, unsigned int access)
{
	struct standin_device *device = device_of(pd->context);
	int error = refused("reg_mr"), unpinned;
	struct standin_mr *mr;

	if (!error)
		error = bad_mr(pd, (uintptr_t)addr, length, (int)access);
	unpinned = error ? 0 : pin((uintptr_t)addr, length, access & IBV_ACCESS_LOCAL_WRITE);
	if (unpinned && !SETTING(device, peermem))
		error = unpinned;
	if (error || !(mr = new_mr(pd, iova, length, (int)access)))
		return error ? failed(error) : NULL;
	mr->bytes = unpinned ? NULL : addr;
	COUNT(device, reg_mrs, 1);
	return publish(mr);
}

#undef ibv_reg_mr
EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	return ibv_reg_mr_iova2(pd, addr, length, (uintptr_t)addr, (unsigned int)access);
}

EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length,
					uint64_t iova, int fd, int access)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), start = offset & ~(page - 1);
	struct standin_device *device = device_of(pd->context);
	int error = refused("reg_dmabuf_mr");
	struct standin_mr *mr;
	void *mapping;

	if (!error && !SETTING(device, dmabuf))
		error = EOPNOTSUPP;
	if (!error)
		error = bad_mr(pd, iova, length, access);
	if (!error && ((offset ^ iova) & (page - 1) || access & ~0x1f ||
		       lseek(fd, 0, SEEK_END) < (off_t)(offset + length)))
		error = EINVAL;
	if (error)
		return failed(error);
	mapping = mmap(NULL, offset + length - start, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
		       (off_t)start);
	if (mapping == MAP_FAILED)
		return NULL;
	mr = new_mr(pd, iova, length, access);
	if (!mr) {
		munmap(mapping, offset + length - start);
		return NULL;
	}
	mr->mapping = mapping;
	mr->mapping_nbytes = offset + length - start;
	mr->bytes = (uint8_t *)mapping + (offset - start);
	COUNT(device, reg_dmabufs, 1);
	return publish(mr);
}

EXPORT int ibv_dereg_mr(struct ibv_mr *base)
{
	struct standin_mr *mr = (struct standin_mr *)base;

	pthread_mutex_lock(&bus);
	if (mrs[base->handle] != mr)
		die("ibv_dereg_mr of what is not registered");
	mrs[base->handle] = NULL;
	use_pd(base->pd, -1);
	pthread_mutex_unlock(&bus);
	COUNT(device_of(base->context), mrs, -1);
	if (mr->mapping)
		munmap(mr->mapping, mr->mapping_nbytes);
	free(mr);
	return 0;
}

/* ---- completion channels and queues ---- */

EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
	struct standin_channel *channel;
	int error = refused("create_comp_channel"), fds[2];

	if (error || !(channel = calloc(1, sizeof(*channel))))
		return failed(error ? error : ENOMEM);
	if (pipe2(fds, O_CLOEXEC) < 0) {
		free(channel);
		return NULL;
	}
	channel->base.context = context;
	channel->base.fd = fds[0];
	channel->write_fd = fds[1];
	COUNT(device_of(context), channels, 1);
	return &channel->base;
}

EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *base)
{
	if (base->refcnt)
		return EBUSY;
	COUNT(device_of(base->context), channels, -1);
	close(base->fd);
	close(((struct standin_channel *)base)->write_fd);
	free(base);
	return 0;
}

EXPORT int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **out,
			    void **out_context)
{
	struct standin_cq *cq, *each;

	do {
		if (read(channel->fd, &cq, sizeof(cq)) != (ssize_t)sizeof(cq))
			return -1;
		pthread_mutex_lock(&bus);
		for (each = cqs; each && each != cq; each = each->next)
			;
		if (each)
			cq->unacked++;
		pthread_mutex_unlock(&bus);
	} while (!each);
	*out = &cq->base;
	*out_context = cq->base.cq_context;
	return 0;
}

EXPORT void ibv_ack_cq_events(struct ibv_cq *base, unsigned int count)
{
	struct standin_cq *cq = (struct standin_cq *)base;

	pthread_mutex_lock(&bus);
	if (count > cq->unacked)
		die("%u events acknowledged, %u were read", count, cq->unacked);
	cq->unacked -= count;
	pthread_mutex_unlock(&bus);
}

EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
				    struct ibv_comp_channel *channel, int vector)
{
	struct standin_cq *cq;
	int error = refused("create_cq");

	if (!error && (cqe <= 0 || (uint64_t)cqe > SETTING(device_of(context), max_cqe) ||
		       vector != 0 || (channel && channel->context != context)))
		error = EINVAL;
	if (error || !(cq = calloc(1, sizeof(*cq))))
		return failed(error ? error : ENOMEM);
	cq->ring = calloc((size_t)cqe, sizeof(*cq->ring));
	cq->base.context = context;
	cq->base.channel = channel;
	cq->base.cq_context = cq_context;
	cq->base.cqe = cqe;
	pthread_mutex_init(&cq->lock, NULL);
	pthread_mutex_lock(&bus);
	if (channel)
		channel->refcnt++;
	cq->next = cqs;
	cqs = cq;
	pthread_mutex_unlock(&bus);
	COUNT(device_of(context), cqs, 1);
	return &cq->base;
}

EXPORT int ibv_resize_cq(struct ibv_cq *base, int cqe)
{
	struct standin_cq *cq = (struct standin_cq *)base;
	int error = refused("resize_cq");
	struct standin_wc *ring;

	if (error || cqe <= 0 || (uint64_t)cqe > SETTING(device_of(base->context), max_cqe))
		return error ? error : EINVAL;
	pthread_mutex_lock(&cq->lock);
	ring = calloc((size_t)cqe, sizeof(*ring));
	if (!ring || cq->tail - cq->head > (uint64_t)cqe) {
		error = ring ? EINVAL : ENOMEM;
		free(ring);
	} else {
		for (uint64_t i = cq->head; i < cq->tail; i++)
			ring[i % (uint64_t)cqe] = cq->ring[i % (uint64_t)base->cqe];
		free(cq->ring);
		cq->ring = ring;
		base->cqe = cqe;
	}
	pthread_mutex_unlock(&cq->lock);
	return error;
}

EXPORT int ibv_destroy_cq(struct ibv_cq *base)
{
	struct standin_cq *cq = (struct standin_cq *)base, **link = &cqs;

	pthread_mutex_lock(&bus);
	if (cq->users) {
		pthread_mutex_unlock(&bus);
		return EBUSY;
	}
	if (cq->unacked)
		die("ibv_destroy_cq would wait for ever: %u events are unacknowledged",
		    cq->unacked);
	while (*link != cq)
		link = &(*link)->next;
	*link = cq->next;
	if (base->channel)
		base->channel->refcnt--;
	pthread_mutex_unlock(&bus);
	COUNT(device_of(base->context), cqs, -1);
	free(cq->ring);
	free(cq);
	return 0;
}
