/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Regions: memory of the GPU, which has to be there and ours, and memory of the host, which has to
 * be pinned.
 *
 * The driver registers whole pages, refuses pages that are registered already, and takes no copy
 * that crosses from one registration into the next. So a device keeps a list of what is pinned, in
 * pieces that do not overlap, each with the number of regions that lie in it; pieces are registered
 * with the first of them and unregistered with the last.
 */
#include <stdio.h>
#include <unistd.h>

#include "cuda_impl.h"

#define REGISTER_FLAGS (CUDA_HOST_REGISTER_PORTABLE | CUDA_HOST_REGISTER_DEVICEMAP)

/* What a registration has to say if it fails. */
struct reason {
	struct cuda_dev *dev;
	char *why;
	size_t room;
};

static uint64_t page_size(void)
{
	return (uint64_t)sysconf(_SC_PAGESIZE);
}

/* ---- asking about addresses ---- */

/* enum CUDA_MEMORY_*, 0: plain memory of the host, or none at all. */
static unsigned int memory_type(uint64_t addr, struct cuda_failure *failure)
{
	unsigned int type = 0;

	failure->call = "cuPointerGetAttribute";
	failure->code = cuda.pointer_attribute(&type, CUDA_POINTER_MEMORY_TYPE, addr);
	return failure->code == CUDA_OK ? type : 0;
}

int cuda_ordinal_of(uint64_t addr, struct cuda_failure *failure)
{
	int ordinal = -1;

	if (memory_type(addr, failure) != CUDA_MEMORY_DEVICE)
		return -EINVAL;
	failure->code = cuda.pointer_attribute(&ordinal, CUDA_POINTER_DEVICE_ORDINAL, addr);
	return failure->code == CUDA_OK ? ordinal : -EINVAL;
}

static bool is_pinned(uint64_t addr)
{
	struct cuda_failure unused;

	return memory_type(addr, &unused) == CUDA_MEMORY_HOST;
}

/* ---- memory of the GPU ---- */

static int refuse_other(const struct reason *reason, int ordinal)
{
	snprintf(reason->why, reason->room, "the memory is on cuda:%d, this NIC is cuda:%d",
		 ordinal, reason->dev->ordinal);
	return -EXDEV;
}

/* Every byte has to be allocated here. A range over several allocations is one of memory that was
 * mapped in pieces (VMM): copies cross from one to the next. */
static int check_device(const struct reason *reason, const struct kvio_region *region,
			uint64_t *span)
{
	uint64_t at = region->addr, end = region->addr + region->nbytes;
	struct cuda_dev *dev = reason->dev;
	struct cuda_failure failure;

	while (at < end) {
		CUdeviceptr base = 0;
		size_t nbytes = 0;
		int ordinal = cuda_ordinal_of(at, &failure);

		cuda_note(dev, failure.code, failure.call);
		if (ordinal >= 0 && ordinal != dev->ordinal)
			return refuse_other(reason, ordinal);
		if (ordinal < 0 || cuda.address_range(&base, &nbytes, at) != CUDA_OK ||
		    at - base >= nbytes) {
			snprintf(reason->why, reason->room, "cuda:%d: this GPU memory is not "
				 "allocated (freed?): byte %llu of %llu", dev->ordinal,
				 (unsigned long long)(at - region->addr),
				 (unsigned long long)region->nbytes);
			return -EFAULT;
		}
		if (at == region->addr)
			*span = base;
		at = base + nbytes;
	}
	return 0;
}

static int reg_device(const struct reason *reason, const struct kvio_region *region,
		      struct cuda_region *out)
{
	struct cuda_dev *dev = reason->dev;
	struct cuda_failure failure;
	CUcontext context = NULL;
	int ordinal = cuda_ordinal_of(region->addr, &failure);

	if (ordinal >= 0 && ordinal != dev->ordinal)
		return refuse_other(reason, ordinal);
	/* Stream-ordered and mapped memory belongs to no context; an old driver says so by an
	 * error. */
	if (cuda.pointer_attribute(&context, CUDA_POINTER_CONTEXT, region->addr) != CUDA_OK)
		context = NULL;
	if (context && context != dev->context) {
		snprintf(reason->why, reason->room, "cuda:%d: the memory belongs to another "
			 "context than the device's primary one, which is the only one that kvio "
			 "uses", dev->ordinal);
		return -EXDEV;
	}
	out->is_device = true;
	return check_device(reason, region, &out->span);	/* asks this context alone */
}

/* ---- pinned memory of the host ---- */

static int refuse_pin(const struct reason *reason, int code, uint64_t nbytes)
{
	struct cuda_dev *dev = reason->dev;
	const char *hint = "";

	if (code == CUDA_INVALID_VALUE)
		hint = ": it is not memory of this process (freed?), or cannot be pinned";
	else if (code == CUDA_OUT_OF_MEMORY)
		hint = ": see `ulimit -l`, and how much memory is pinned already";
	cuda_note(dev, code, "cuMemHostRegister");
	snprintf(reason->why, reason->room, "cuda:%d: cuMemHostRegister of %llu bytes: %s (%d)%s",
		 dev->ordinal, (unsigned long long)nbytes, cuda_error_name(code), code, hint);
	return code == CUDA_INVALID_VALUE ? -EFAULT : cuda_errno(code);
}

static struct cuda_pin *pin_new(struct cuda_pin **link, uint64_t addr, uint64_t end)
{
	struct cuda_pin *pin = calloc(1, sizeof(*pin));

	if (!pin)
		return NULL;
	*pin = (struct cuda_pin){ .next = *link, .addr = addr, .end = end };
	*link = pin;
	return pin;
}

static int register_pages(struct cuda_pin *pin, bool for_writing)
{
	void *addr = (void *)(uintptr_t)pin->addr;
	CUresult code = cuda.host_register(addr, pin->end - pin->addr, REGISTER_FLAGS);

	/* Pages that the process itself may only read need a flag, and a driver that knows it. */
	if (!for_writing && (code == CUDA_NOT_SUPPORTED || code == CUDA_INVALID_VALUE ||
			     code == CUDA_NOT_PERMITTED || code == CUDA_OPERATING_SYSTEM)) {
		CUresult again = cuda.host_register(addr, pin->end - pin->addr, REGISTER_FLAGS |
						    CUDA_HOST_REGISTER_READ_ONLY);

		pin->read_only = again == CUDA_OK;
		code = again == CUDA_OK ? again : code;
	}
	pin->is_ours = code == CUDA_OK;
	return code;
}

/* The end of the pages from addr on that somebody else has pinned, or has not. */
static uint64_t end_of_run(uint64_t addr, uint64_t end, bool pinned)
{
	uint64_t page = page_size();
	CUdeviceptr base;
	size_t nbytes;

	if (pinned && cuda.address_range(&base, &nbytes, addr) == CUDA_OK &&
	    addr - base < nbytes) {	/* a pool of many GB need not be asked page by page */
		base = (base + nbytes + page - 1) & ~(page - 1);
		return base < end ? base : end;
	}
	for (addr += page; addr < end; addr += page)
		if (is_pinned(addr) != pinned)
			return addr;
	return end;
}

/*
 * Pins what no region has: pages of [addr, end), up to the next pin of ours. Others may have pinned
 * all of it, or parts: those stay theirs. *link: where the new pin goes. 0 or -errno.
 */
static int pin_gap(const struct reason *reason, struct cuda_pin **link, uint64_t addr,
		   uint64_t end, bool for_writing)
{
	bool theirs = is_pinned(addr);
	struct cuda_pin *pin;
	int code = CUDA_OK;

	pin = pin_new(link, addr, theirs ? end_of_run(addr, end, true) : end);
	if (!pin)
		return -ENOMEM;
	if (theirs)
		return 0;
	code = register_pages(pin, for_writing);
	if (code == CUDA_HOST_ALREADY_REGISTERED) {
		pin->end = end_of_run(addr, end, false);
		if (pin->end == end)
			return 0;	/* the driver says that all of it is somebody else's */
		code = register_pages(pin, for_writing);
	}
	if (code == CUDA_OK)
		return 0;
	*link = pin->next;
	free(pin);
	return refuse_pin(reason, code, end - addr);
}

/* Not there without memory for it: then its pages are asked about one by one. */
void cuda_pin_add(struct cuda_dev *dev, uint64_t addr, uint64_t nbytes)
{
	uint64_t page = page_size();
	struct cuda_pin **link = &dev->pins, *pin;

	while (*link && (*link)->end <= addr)
		link = &(*link)->next;
	pin = pin_new(link, addr & ~(page - 1), (addr + nbytes + page - 1) & ~(page - 1));
	if (pin)
		pin->regions = 1;
}

static void unpin(struct cuda_dev *dev, struct cuda_pin *first, uint64_t end)
{
	struct cuda_pin **link = &dev->pins, *pin;

	while (*link != first)
		link = &(*link)->next;
	while ((pin = *link) != NULL && pin->addr < end) {
		if (--pin->regions) {
			link = &pin->next;
			continue;
		}
		if (pin->is_ours)	/* memory that is gone already is no concern of ours */
			cuda_note(dev, cuda.host_unregister((void *)(uintptr_t)pin->addr),
				  "cuMemHostUnregister");
		*link = pin->next;
		free(pin);
	}
}

void cuda_pin_remove(struct cuda_dev *dev, uint64_t addr)
{
	for (struct cuda_pin *pin = dev->pins; pin && pin->addr <= addr; pin = pin->next) {
		if (addr >= pin->end)
			continue;
		unpin(dev, pin, pin->end);
		return;
	}
}

/* Every page of [addr, end) in a pin with one region more; *first is the first of them. */
static int pin_pages(const struct reason *reason, uint64_t addr, uint64_t end, bool for_writing,
		     struct cuda_pin **first)
{
	struct cuda_pin **link = &reason->dev->pins;
	uint64_t at = addr;
	int rc = 0;

	*first = NULL;
	while (*link && (*link)->end <= addr)
		link = &(*link)->next;
	while (at < end && rc == 0) {
		struct cuda_pin *pin = *link;

		if (!pin || pin->addr > at)
			rc = pin_gap(reason, link, at, pin && pin->addr < end ? pin->addr : end,
				     for_writing);
		pin = *link;
		if (rc == 0 && for_writing && pin->read_only) {
			snprintf(reason->why, reason->room, "cuda:%d: another region has this host "
				 "memory registered for reading only", reason->dev->ordinal);
			rc = -EACCES;
		}
		if (rc < 0)
			break;
		pin->regions++;
		*first = *first ? *first : pin;
		at = pin->end;
		link = &pin->next;
	}
	if (rc < 0 && *first)
		unpin(reason->dev, *first, at);
	return rc;
}

static int reg_host(const struct reason *reason, const struct kvio_region *region,
		    struct cuda_region *out)
{
	uint64_t page = page_size();
	uint64_t addr = region->addr & ~(page - 1);
	uint64_t end = (region->addr + region->nbytes + page - 1) & ~(page - 1);
	bool for_writing = region->access & KVIO_LOCAL_WRITE;
	int rc = -EFAULT;

	if (end > addr)		/* else it is the address space that ends there */
		rc = pin_pages(reason, addr, end, for_writing, &out->pin);
	if (rc < 0)
		return rc;
	out->span = out->pin->addr;
	out->in_parts = out->pin->end < region->addr + region->nbytes;
	return 0;
}

/* ---- the provider's two operations, and what a post asks ---- */

int cuda_reg(struct kvio_nic *base, struct kvio_region *region)
{
	struct cuda_nic *nic = (struct cuda_nic *)base;
	struct reason reason = { nic->dev, nic->why, sizeof(nic->why) };
	struct cuda_failure failure;
	struct cuda_region *mine;
	int rc = cuda_check_alive(nic->dev, nic->why, sizeof(nic->why));

	if (rc < 0)
		return rc;
	mine = calloc(1, sizeof(*mine));
	if (!mine)
		return -ENOMEM;
	nic->why[0] = 0;
	if (!cuda_enter(nic->dev)) {
		rc = cuda_check_alive(nic->dev, nic->why, sizeof(nic->why));
		free(mine);
		return rc < 0 ? rc : -EIO;
	}
	if (memory_type(region->addr, &failure) == CUDA_MEMORY_DEVICE)
		rc = reg_device(&reason, region, mine);
	else if (cuda_is_sticky(failure.code))
		rc = cuda_refuse(nic->dev, failure.code, failure.call, nic->why, sizeof(nic->why));
	else
		rc = reg_host(&reason, region, mine);
	cuda_leave(nic->dev);
	if (rc < 0)
		free(mine);
	else
		region->provider = mine;
	return rc;
}

int cuda_dereg(struct kvio_nic *base, struct kvio_region *region)
{
	struct cuda_dev *dev = ((struct cuda_nic *)base)->dev;
	struct cuda_region *mine = region->provider;

	if (mine->pin && cuda_enter(dev)) {
		unpin(dev, mine->pin, region->addr + region->nbytes);
		cuda_leave(dev);
	}
	free(mine);
	region->provider = NULL;
	return 0;
}

uint64_t cuda_span(const struct kvio_region *region, uint64_t addr, uint64_t *nbytes)
{
	const struct cuda_region *mine = region->provider;
	const struct cuda_pin *pin = mine->pin;

	if (!mine->in_parts)
		return mine->span;
	while (pin->end <= addr)
		pin = pin->next;
	if (pin->end - addr < *nbytes)
		*nbytes = pin->end - addr;
	return pin->addr;
}
