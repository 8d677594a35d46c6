/* SPDX-License-Identifier: Apache-2.0 */
/* Devices of the provider cuda: one for each GPU that is in use, with its primary context and all
 * that would otherwise have to be allocated while blocks move. */
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "cuda_impl.h"

#define EVENTS_AT_ONCE 256u

static struct {
	pthread_mutex_t lock;
	struct cuda_dev *devices;
} list = { .lock = PTHREAD_MUTEX_INITIALIZER };

/* ---- the context ---- */

bool cuda_is_ours(const struct cuda_dev *dev)
{
	return dev->pid == (int)getpid();
}

/*
 * While somebody captures a stream into a graph, even another thread's questions about events are
 * refused and spoil the capture, unless that thread says that it knows what it does: the streams
 * and events here are ours, and no capture's.
 */
static __thread CUstreamCaptureMode others_mode;

bool cuda_enter(struct cuda_dev *dev)
{
	CUresult code;

	if (!cuda_is_ours(dev) || !dev->context)
		return false;
	code = cuda.ctx_push(dev->context);
	if (code != CUDA_OK) {		/* of no use, whatever the reason */
		cuda_died(dev, code, "cuCtxPushCurrent");
		return false;
	}
	others_mode = CUDA_CAPTURE_MODE_RELAXED;
	cuda.capture_mode(&others_mode);
	return true;
}

void cuda_leave(struct cuda_dev *dev)
{
	CUcontext ours;

	cuda.capture_mode(&others_mode);
	cuda.ctx_pop(&ours);
}

void cuda_died(struct cuda_dev *dev, int code, const char *call)
{
	if (dev->dead.code)
		return;
	dev->dead = (struct cuda_failure){ .code = code, .call = call };
	dev->died_ns = kvio_monotonic_ns();
}

int cuda_note(struct cuda_dev *dev, int code, const char *call)
{
	if (cuda_is_sticky(code))
		cuda_died(dev, code, call);
	return code;
}

int cuda_refuse(struct cuda_dev *dev, int code, const char *call, char *why, size_t room)
{
	struct cuda_failure failure = { .code = cuda_note(dev, code, call), .call = call };

	cuda_explain(dev->ordinal, &failure, why, room);
	return cuda_errno(code);
}

int cuda_check_alive(struct cuda_dev *dev, char *why, size_t room)
{
	if (!cuda_is_ours(dev))
		snprintf(why, room, "cuda:%d: CUDA does not outlive a fork: open the NIC in this "
			 "process, started by \"spawn\"", dev->ordinal);
	else if (dev->dead.code)
		snprintf(why, room, "cuda:%d: its context is of no use any more since %s: %s (%d); "
			 "only a new process can use this GPU again", dev->ordinal,
			 dev->dead.call, cuda_error_name(dev->dead.code), dev->dead.code);
	else
		return 0;
	return -EIO;
}

/* ---- events ---- */

static void grow_events(struct cuda_dev *dev)
{
	CUevent *larger = realloc(dev->events, (dev->room_events + EVENTS_AT_ONCE) *
				  sizeof(*larger));
	CUresult code;

	if (!larger)
		return;
	dev->events = larger;		/* with room for all, should all be given back */
	for (uint32_t i = 0; i < EVENTS_AT_ONCE; i++) {
		code = cuda.event_create(&dev->events[dev->num_events], CUDA_EVENT_DISABLE_TIMING);
		if (cuda_note(dev, code, "cuEventCreate") != CUDA_OK)
			return;
		dev->num_events++;
		dev->room_events++;
	}
}

CUevent cuda_event_take(struct cuda_dev *dev)
{
	if (dev->num_events == 0)
		grow_events(dev);
	return dev->num_events ? dev->events[--dev->num_events] : NULL;
}

void cuda_event_give(struct cuda_dev *dev, CUevent event)
{
	if (event)
		dev->events[dev->num_events++] = event;
}

/* ---- opening ---- */

static int look_at_device(struct cuda_dev *dev, char *why, size_t room)
{
	struct kvio_cuda_info *info = &dev->info;
	int major = 0, minor = 0, as_is = 0, count = 0;
	CUresult code;

	if ((code = cuda.device_count(&count)) != CUDA_OK)
		return cuda_refuse(dev, code, "cuDeviceGetCount", why, room);
	if (dev->ordinal < 0 || dev->ordinal >= count) {
		snprintf(why, room, "there is no cuda:%d: this process sees %d GPU%s%s",
			 dev->ordinal, count, count == 1 ? "" : "s",
			 count ? ", counted from 0" : "");
		return -ENODEV;
	}
	if ((code = cuda.device_get(&dev->device, dev->ordinal)) != CUDA_OK)
		return cuda_refuse(dev, code, "cuDeviceGet", why, room);
	if ((code = cuda.device_name(info->name, sizeof(info->name), dev->device)) != CUDA_OK)
		return cuda_refuse(dev, code, "cuDeviceGetName", why, room);
	if ((code = cuda.device_attribute(&major, CUDA_ATTR_MAJOR, dev->device)) != CUDA_OK ||
	    (code = cuda.device_attribute(&minor, CUDA_ATTR_MINOR, dev->device)) != CUDA_OK ||
	    (code = cuda.device_attribute(&info->num_sms, CUDA_ATTR_SM_COUNT, dev->device)) !=
	    CUDA_OK ||
	    (code = cuda.device_attribute(&as_is, CUDA_ATTR_HOST_POINTER_OF_REGISTERED,
					  dev->device)) != CUDA_OK)
		return cuda_refuse(dev, code, "cuDeviceGetAttribute", why, room);
	info->device = dev->ordinal;
	info->capability = 10 * major + minor;
	dev->maps_host_as_is = as_is != 0;
	cuda.driver_version(&info->driver_version);
	return 0;
}

static int make_scratch(struct cuda_dev *dev, char *why, size_t room)
{
	dev->copies = malloc(CUDA_MAX_COPIES * sizeof(*dev->copies));
	dev->rects = malloc(CUDA_MAX_COPIES * sizeof(*dev->rects));
	dev->targets = malloc(CUDA_MAX_COPIES * sizeof(*dev->targets));
	dev->sources = malloc(CUDA_MAX_COPIES * sizeof(*dev->sources));
	dev->sizes = malloc(CUDA_MAX_COPIES * sizeof(*dev->sizes));
	dev->waker = cuda_waker_new();
	dev->kick_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (dev->copies && dev->rects && dev->targets && dev->sources && dev->sizes &&
	    dev->waker && dev->kick_fd >= 0)
		return 0;
	snprintf(why, room, "cuda:%d: out of memory or of file descriptors", dev->ordinal);
	return -ENOMEM;
}

/* What the driver has for us. The context is current. */
static int make_objects(struct cuda_dev *dev, char *why, size_t room)
{
	CUresult code = cuda.stream_priorities(&dev->least_urgent, &dev->most_urgent);

	if (code != CUDA_OK)
		return cuda_refuse(dev, code, "cuCtxGetStreamPriorityRange", why, room);
	code = cuda.stream_create(&dev->own, CUDA_STREAM_NON_BLOCKING, dev->least_urgent);
	if (code != CUDA_OK) {
		dev->own = NULL;
		return cuda_refuse(dev, code, "cuStreamCreateWithPriority", why, room);
	}
	grow_events(dev);
	if (dev->num_events == EVENTS_AT_ONCE)
		return 0;
	snprintf(why, room, "cuda:%d: cuEventCreate: the driver has no memory for %u events",
		 dev->ordinal, EVENTS_AT_ONCE);
	return -ENOMEM;
}

/* The context goes with its last user in this process, which may be another library. */
static void give_back_objects(struct cuda_dev *dev)
{
	if (cuda_enter(dev)) {
		cuda_ways_close(dev);
		while (dev->num_events)
			cuda.event_destroy(dev->events[--dev->num_events]);
		if (dev->own)
			cuda.stream_destroy(dev->own);
		cuda_leave(dev);
	}
	if (dev->context)
		cuda.primary_release(dev->device);
	dev->context = NULL;
	dev->own = NULL;
}

static void dev_free(struct cuda_dev *dev)
{
	const int fds[] = { dev->epoll_fd, dev->timer_fd, dev->kick_fd };

	for (size_t i = 0; i < sizeof(fds) / sizeof(fds[0]); i++)
		if (fds[i] >= 0)
			close(fds[i]);
	if (dev->waker)
		cuda_waker_put(dev->waker);
	while (dev->pins) {
		struct cuda_pin *pin = dev->pins;

		dev->pins = pin->next;
		free(pin);
	}
	free(dev->events);
	free(dev->copies);
	free(dev->rects);
	free(dev->targets);
	free(dev->sources);
	free(dev->sizes);
	pthread_cond_destroy(&dev->domain.moved);
	pthread_mutex_destroy(&dev->domain.lock);
	free(dev);
}

static struct cuda_dev *dev_new(int ordinal)
{
	struct cuda_dev *dev = calloc(1, sizeof(*dev));
	pthread_condattr_t attributes;

	if (!dev)
		return NULL;
	dev->ordinal = ordinal;
	dev->pid = (int)getpid();
	dev->kick_fd = dev->epoll_fd = dev->timer_fd = -1;
	pthread_mutex_init(&dev->domain.lock, NULL);
	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(&dev->domain.moved, &attributes);
	pthread_condattr_destroy(&attributes);
	return dev;
}

static int dev_open(int ordinal, struct cuda_dev **out, char *why, size_t room)
{
	struct cuda_dev *dev = dev_new(ordinal);
	CUresult code;
	int rc;

	if (!dev)
		return -ENOMEM;
	rc = look_at_device(dev, why, room);
	if (rc == 0)
		rc = make_scratch(dev, why, room);
	if (rc == 0 && (code = cuda.primary_retain(&dev->context, dev->device)) != CUDA_OK) {
		dev->context = NULL;
		rc = cuda_refuse(dev, code, "cuDevicePrimaryCtxRetain", why, room);
	}
	if (rc == 0 && !cuda_enter(dev)) {
		rc = cuda_check_alive(dev, why, room);
	} else if (rc == 0) {
		rc = make_objects(dev, why, room);
		cuda_leave(dev);
	}
	if (rc < 0) {
		give_back_objects(dev);
		dev_free(dev);
		return rc;
	}
	*out = dev;
	return 0;
}

/* ---- the list ---- */

static struct cuda_dev *find_locked(int ordinal)
{
	for (struct cuda_dev *dev = list.devices; dev; dev = dev->next)
		if (dev->ordinal == ordinal && cuda_is_ours(dev))
			return dev;
	return NULL;
}

int cuda_dev_get(int ordinal, struct cuda_dev **out, char *why, size_t room)
{
	struct cuda_dev *dev;
	int rc = cuda_load(why, room);

	if (rc < 0)
		return rc;
	pthread_mutex_lock(&list.lock);
	dev = find_locked(ordinal);
	if (!dev && (rc = dev_open(ordinal, &dev, why, room)) == 0) {
		dev->next = list.devices;
		list.devices = dev;
	}
	if (rc == 0) {
		dev->refs++;
		dev->users++;
		*out = dev;
	}
	pthread_mutex_unlock(&list.lock);
	return rc;
}

struct cuda_dev *cuda_dev_find(int ordinal)
{
	struct cuda_dev *dev;

	pthread_mutex_lock(&list.lock);
	dev = find_locked(ordinal);
	pthread_mutex_unlock(&list.lock);
	return dev;
}

void cuda_dev_leave(struct cuda_dev *dev)
{
	struct cuda_dev **link = &list.devices;

	if (!cuda_is_ours(dev))
		return;
	pthread_mutex_lock(&list.lock);
	if (--dev->users == 0) {
		while (*link != dev)
			link = &(*link)->next;
		*link = dev->next;
		give_back_objects(dev);
	}
	pthread_mutex_unlock(&list.lock);
}

void cuda_dev_put(struct cuda_dev *dev)
{
	bool last;

	if (!cuda_is_ours(dev))
		return;
	pthread_mutex_lock(&list.lock);
	last = --dev->refs == 0;
	pthread_mutex_unlock(&list.lock);
	if (last)
		dev_free(dev);
}
