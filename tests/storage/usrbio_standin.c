// SPDX-License-Identifier: Apache-2.0
/*
 * A stand-in for 3FS, which it is not: the C symbols of libhf3fs_api_shared.so, and a "daemon" of
 * two threads a ring that serves them with pread and pwrite on the files of any directory with a
 * folder 3fs-virt/iovs in it. It is built by the tests (standin.py), which inject faults through
 * standin_fault(). As in 3FS, memory is reached through a mapping of the daemon's own, made when
 * the iov is wrapped, by way of the symlink: a missing link, a wrong base or offset is seen.
 * Stricter than 3FS: what was not submitted is not started.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define WORKERS 2
#define MAX_FDS 65536
#define RING_SHM_BYTES 8192

struct hf3fs_iov {
	uint8_t *base; void *iovh; char id[16]; char mount_point[256];
	size_t size; size_t block_size; int numa;
};
struct hf3fs_ior {
	struct hf3fs_iov iov; void *iorh; char mount_point[256]; bool for_read;
	int io_depth, priority, timeout; uint64_t flags;
};
struct hf3fs_cqe { int32_t index, reserved; int64_t result; const void *userdata; };
_Static_assert(sizeof(struct hf3fs_iov) == 312 && sizeof(struct hf3fs_ior) == 600 &&
	       sizeof(struct hf3fs_cqe) == 24, "the sizes of 3FS");

struct job { char id[16]; size_t at; int fd; uint64_t off, len; const void *userdata; int index; };
struct ring {
	struct ring *next;
	pthread_mutex_t lock;
	pthread_cond_t work, done;
	pthread_t workers[WORKERS];
	bool for_read, stop;
	int entries, depth;
	uint64_t flags;
	struct job *queue;
	int queued, released;		/* prepared; of these, to be served */
	int in_flight;			/* prepared, being served or not reaped */
	struct hf3fs_cqe *cqes;
	int num_cqes, next_index;
};
struct iov {
	struct iov *next;
	char id[16], link[PATH_MAX], target[PATH_MAX];
	uint8_t *base;
	size_t size, block_size;
	long bytes;
	int users;
};
struct reg { int fd, dup_fd, flags; };

enum { RESULT, SHORT, DELAY_US, SHUFFLE, PREP, REG, STALL, ONE, DENY, CREATE, WAIT, HOLES, STRAY,
       KINDS };
enum { PREPS, SUBMITS, WAITS, IOS, RINGS, REGISTERED, IOVS, REFUSED, COUNTERS };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { long value; int count, mask; } faults[KINDS];
static long counters[COUNTERS];
static struct ring *rings;
static struct iov *iovs;
static struct reg *regs[MAX_FDS];
static unsigned dice = 1;

/* ---- control ---- */

static void count(int what, long more)
{
	pthread_mutex_lock(&lock);
	counters[what] += more;
	pthread_mutex_unlock(&lock);
}

/* Is this fault ordered? mask: 1 reads, 2 writes. */
static bool fault(int kind, int mask, long *value)
{
	bool hit;

	pthread_mutex_lock(&lock);
	hit = faults[kind].count && (faults[kind].mask & mask);
	if (hit && faults[kind].count > 0)
		faults[kind].count--;
	*value = hit ? faults[kind].value : 0;
	pthread_mutex_unlock(&lock);
	return hit;
}

static unsigned roll(unsigned sides)
{
	unsigned rolled;

	pthread_mutex_lock(&lock);
	rolled = (dice = dice * 1103515245 + 12345) / 65536 % sides;
	pthread_mutex_unlock(&lock);
	return rolled;
}

static void release(struct ring *ring)
{
	long forced, depth = fault(STALL, 3, &forced) ? forced : ring->depth;

	pthread_mutex_lock(&ring->lock);
	while (ring->queued - ring->released >= (depth ? depth : 1))
		ring->released += depth ? (int)depth : 1;
	pthread_cond_broadcast(&ring->work);
	pthread_mutex_unlock(&ring->lock);
}

EXPORT void standin_fault(int kind, long value, int how_often, int mask)
{
	pthread_mutex_lock(&lock);
	faults[kind].value = value;
	faults[kind].count = how_often;
	faults[kind].mask = mask;
	pthread_mutex_unlock(&lock);
}

/* Ends all faults, also for those who are stalled. */
EXPORT void standin_reset(void)
{
	pthread_mutex_lock(&lock);
	memset(faults, 0, sizeof(faults));
	counters[PREPS] = counters[SUBMITS] = counters[WAITS] = counters[IOS] = 0;
	counters[REFUSED] = 0;
	for (struct ring *ring = rings; ring; ring = ring->next) {
		pthread_mutex_unlock(&lock);
		release(ring);
		pthread_mutex_lock(&lock);
	}
	pthread_mutex_unlock(&lock);
}

EXPORT long standin_count(int what)
{
	long found;

	pthread_mutex_lock(&lock);
	found = counters[what];
	pthread_mutex_unlock(&lock);
	return found;
}

/* Bytes moved through the iov whose link leads to `target`; -1: there is none. */
EXPORT long standin_iov_bytes(const char *target)
{
	long found = -1;

	pthread_mutex_lock(&lock);
	for (struct iov *iov = iovs; iov; iov = iov->next)
		if (!strcmp(iov->target, target))
			found = (found < 0 ? 0 : found) + iov->bytes;
	pthread_mutex_unlock(&lock);
	return found;
}

/* ---- mounts ---- */

/* The folder above `path` (which is cut) that has 3fs-virt in it. */
static bool mount_above(char *path)
{
	char probe[PATH_MAX + 16];
	struct stat st;

	while (*path) {
		snprintf(probe, sizeof(probe), "%s/3fs-virt", path);
		if (stat(probe, &st) == 0 && S_ISDIR(st.st_mode))
			return true;
		*strrchr(path, '/') = 0;
	}
	return false;
}

EXPORT bool hf3fs_is_hf3fs(int fd)
{
	char name[64], path[PATH_MAX];
	ssize_t length;

	snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
	length = readlink(name, path, sizeof(path) - 1);
	if (length <= 0 || path[0] != '/')
		return false;
	path[length] = 0;
	return mount_above(path);
}

EXPORT int hf3fs_extract_mount_point(char *mount_point, int size, const char *path)
{
	const char *unchecked = getenv("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP");
	char real[PATH_MAX];

	if (!realpath(path, real))
		abort();			/* 3FS throws */
	if (!unchecked || strcmp(unchecked, "yes") || !mount_above(real))
		return -1;
	if ((int)strlen(real) < size)
		strcpy(mount_point, real);
	return (int)strlen(real) + 1;
}

/* ---- iovs ---- */

static void id_text(const char id[16], char text[37])
{
	for (int i = 0, at = 0; i < 16; i++) {
		if (i == 4 || i == 6 || i == 8 || i == 10)
			text[at++] = '-';
		at += snprintf(text + at, 3, "%02x", (uint8_t)id[i]);
	}
}

/* The daemon forgets iovs whose link is gone. With the lock. */
static void forget_unlinked(void)
{
	struct stat st;

	for (struct iov **at = &iovs; *at;) {
		struct iov *iov = *at;

		if (iov->users || lstat(iov->link, &st) == 0) {
			at = &iov->next;
			continue;
		}
		*at = iov->next;
		munmap(iov->base, iov->size);
		free(iov);
		counters[IOVS]--;
	}
}

static void daemon_maps(const struct hf3fs_iov *iov)
{
	struct iov *mine = calloc(1, sizeof(*mine));
	char text[37];
	ssize_t length;
	struct stat st;
	int fd = -1;

	memcpy(mine->id, iov->id, 16);
	id_text(iov->id, text);
	snprintf(mine->link, sizeof(mine->link), iov->block_size ? "%s/3fs-virt/iovs/%s.b%zu"
		 : "%s/3fs-virt/iovs/%s", iov->mount_point, text, iov->block_size);
	length = readlink(mine->link, mine->target, sizeof(mine->target) - 1);
	if (length > 0 && !strncmp(mine->target, "/dev/shm/", 9))
		fd = open(mine->target, O_RDWR | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st) < 0 || (size_t)st.st_size < iov->size) {
		free(mine);		/* its I/O will be refused */
		return;
	}
	mine->size = (size_t)st.st_size;
	mine->block_size = iov->block_size;
	mine->base = mmap(NULL, mine->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	pthread_mutex_lock(&lock);
	forget_unlinked();
	mine->next = iovs;
	iovs = mine;
	counters[IOVS]++;
	pthread_mutex_unlock(&lock);
}

EXPORT int hf3fs_iovwrap(struct hf3fs_iov *iov, void *base, const uint8_t id[16],
			 const char *mount_point, size_t size, size_t block_size, int numa)
{
	if (!iov || strlen(mount_point) >= sizeof(iov->mount_point))
		return -EINVAL;
	iov->iovh = NULL;
	iov->base = base;
	memcpy(iov->id, id, 16);
	strcpy(iov->mount_point, mount_point);
	iov->size = size;
	iov->block_size = block_size;
	iov->numa = numa;
	daemon_maps(iov);
	return 0;
}

/* A file in /dev/shm, and its link with these attributes. */
static int publish(struct hf3fs_iov *iov, const char *mount_point, size_t size,
		   const char *attributes, char shm[128])
{
	char text[37], link[PATH_MAX];
	int fd, rc;

	if (strlen(mount_point) >= sizeof(iov->mount_point) || getrandom(iov->id, 16, 0) != 16)
		return -EINVAL;
	id_text(iov->id, text);
	snprintf(shm, 128, "/dev/shm/hf3fs-iov-%s", text);
	snprintf(link, sizeof(link), "%s/3fs-virt/iovs/%s%s", mount_point, text, attributes);
	fd = open(shm, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
	if (fd < 0 || ftruncate(fd, (off_t)size) < 0)
		return -EIO;
	iov->base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	rc = symlink(shm, link) < 0 ? -errno : 0;
	if (rc < 0) {
		unlink(shm);
		munmap(iov->base, size);
		return rc;
	}
	strcpy(iov->mount_point, mount_point);
	iov->size = size;
	iov->iovh = iov->base;
	return 0;
}

static void unpublish(struct hf3fs_iov *iov, const char *attributes)
{
	char text[37], link[PATH_MAX];

	if (!iov->iovh)
		return;
	id_text(iov->id, text);
	snprintf(link, sizeof(link), "%s/3fs-virt/iovs/%s%s", iov->mount_point, text, attributes);
	unlink(link);
	snprintf(link, sizeof(link), "/dev/shm/hf3fs-iov-%s", text);
	unlink(link);
	munmap(iov->base, iov->size);
	iov->iovh = NULL;
}

EXPORT int hf3fs_iovcreate(struct hf3fs_iov *iov, const char *mount_point, size_t size,
			   size_t block_size, int numa)
{
	char attributes[32] = "", shm[128];
	int rc;

	if (block_size)
		snprintf(attributes, sizeof(attributes), ".b%zu", block_size);
	rc = publish(iov, mount_point, size, attributes, shm);
	iov->block_size = block_size;
	iov->numa = numa;
	if (rc == 0)
		daemon_maps(iov);
	return rc;
}

EXPORT void hf3fs_iovdestroy(struct hf3fs_iov *iov)
{
	char attributes[32] = "";

	if (iov->block_size)
		snprintf(attributes, sizeof(attributes), ".b%zu", iov->block_size);
	unpublish(iov, attributes);
}

EXPORT void hf3fs_iovunlink(struct hf3fs_iov *iov)
{
	char text[37], shm[128];

	id_text(iov->id, text);
	snprintf(shm, sizeof(shm), "/dev/shm/hf3fs-iov-%s", text);
	unlink(shm);
}

EXPORT int hf3fs_iovopen(struct hf3fs_iov *iov, const uint8_t id[16], const char *mount_point,
			 size_t size, size_t block_size, int numa)
{
	return -ENOSYS;		/* nobody uses it */
}

/* ---- files: success is <= 0, an error is > 0 ---- */

EXPORT int hf3fs_reg_fd(int fd, uint64_t flags)
{
	struct reg *reg;
	long injected;

	if (fault(REG, 3, &injected))
		return (int)injected;
	if (fd < 0 || fd >= MAX_FDS || !hf3fs_is_hf3fs(fd))
		return EBADF;
	pthread_mutex_lock(&lock);
	if (regs[fd]) {
		pthread_mutex_unlock(&lock);
		return EINVAL;
	}
	reg = malloc(sizeof(*reg));
	*reg = (struct reg){ fd, dup(fd), fcntl(fd, F_GETFL) };
	regs[fd] = regs[reg->dup_fd] = reg;
	counters[REGISTERED]++;
	pthread_mutex_unlock(&lock);
	return -reg->dup_fd;
}

EXPORT void hf3fs_dereg_fd(int fd)
{
	struct reg *reg;

	if (fd < 0 || fd >= MAX_FDS || !hf3fs_is_hf3fs(fd))
		return;
	pthread_mutex_lock(&lock);
	reg = regs[fd];
	if (reg) {
		regs[reg->fd] = regs[reg->dup_fd] = NULL;
		close(reg->dup_fd);
		free(reg);
		counters[REGISTERED]--;
	}
	pthread_mutex_unlock(&lock);
}

#include "usrbio_standin_rings.h"
