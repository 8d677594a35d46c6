// SPDX-License-Identifier: Apache-2.0
/*
 * Memory that the 3FS daemon can reach: files of /dev/shm, made known by a symlink in the mount
 * and wrapped for the library (hf3fs_iovwrap, as 3FS's own Python binding does it). Not
 * hf3fs_iovcreate: a pool is made before anybody knows which store it will serve, may serve
 * several, and its file has to be allocated whole, since a full /dev/shm kills by SIGBUS.
 */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "ring_usrbio.h"

#define MAX_STAGE_BYTES (16u << 20)
#define MAX_STAGE_SLOTS 16u
#define MIN_STAGE_BYTES (64u << 10)

struct name {
	struct name *next;
	uint64_t region;
	char path[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct name *names;
static struct usrbio_iov *shared;	/* of named regions */

int kvio_store_set_mount(struct kvio_store *store, const char *mount)
{
	if (strlen(mount) >= sizeof(store->mount))
		return -ENAMETOOLONG;
	strcpy(store->mount, mount);
	return 0;
}

int kvio_usrbio_name_region(uint64_t region, const char *path)
{
	struct name **at = &names, *name = NULL;

	if (path) {
		name = malloc(sizeof(*name) + strlen(path) + 1);
		if (!name)
			return -ENOMEM;
		name->region = region;
		strcpy(name->path, path);
	}
	pthread_mutex_lock(&lock);
	while (*at && (*at)->region != region)
		at = &(*at)->next;
	if (*at) {
		struct name *old = *at;

		*at = old->next;
		free(old);
	}
	if (name) {
		name->next = names;
		names = name;
	}
	pthread_mutex_unlock(&lock);
	return 0;
}

/* ---- iovs ---- */

/* A random uuid, and its text of 36 letters as the daemon wants it. */
static int uuid_make(uint8_t id[16], char text[37])
{
	if (getrandom(id, 16, 0) != 16)
		return -EIO;
	id[6] = (id[6] & 0x0f) | 0x40;
	id[8] = (id[8] & 0x3f) | 0x80;
	for (int i = 0, at = 0; i < 16; i++) {
		if (i == 4 || i == 6 || i == 8 || i == 10)
			text[at++] = '-';
		at += snprintf(text + at, 3, "%02x", id[i]);
	}
	return 0;
}

/* The symlink first: the daemon maps the file when the link appears. */
static struct usrbio_iov *iov_new(const char *mount, const char *shm, void *addr,
				  uint64_t nbytes, uint64_t block_size, int *rc)
{
	struct usrbio_iov *iov = calloc(1, sizeof(*iov));
	uint8_t id[16];
	char text[37];
	int length;

	*rc = -ENOMEM;
	if (!iov)
		return NULL;
	*rc = uuid_make(id, text);
	if (*rc == 0) {
		length = snprintf(iov->link, sizeof(iov->link), "%s/3fs-virt/iovs/%s", mount,
				  text);
		if (block_size)
			snprintf(iov->link + length, sizeof(iov->link) - (size_t)length, ".b%llu",
				 (unsigned long long)block_size);
		*rc = symlink(shm, iov->link) < 0 ? -errno : 0;
	}
	if (*rc == 0) {
		*rc = usrbio_lib()->iovwrap(&iov->iov, addr, id, mount, nbytes, block_size, -1);
		if (*rc < 0)
			unlink(iov->link);
	}
	if (*rc < 0) {
		free(iov);
		return NULL;
	}
	iov->refs = 1;
	return iov;
}

struct usrbio_iov *usrbio_iov_of_region(const char *mount, const struct region *region,
					uint64_t block_size, int *rc)
{
	struct usrbio_iov *iov;
	struct name *name;

	*rc = 0;
	pthread_mutex_lock(&lock);
	for (iov = shared; iov; iov = iov->next)
		if (iov->region == region->id && !strcmp(iov->iov.mount_point, mount))
			break;
	for (name = names; !iov && name && name->region != region->id;)
		name = name->next;
	if (iov) {
		iov->refs++;
	} else if (name) {
		iov = iov_new(mount, name->path, (void *)(uintptr_t)region->addr, region->nbytes,
			      block_size, rc);
		if (iov) {
			iov->region = region->id;
			iov->next = shared;
			shared = iov;
		}
	}
	pthread_mutex_unlock(&lock);
	return iov;
}

/* A wrapped iov has nothing to destroy but its link, whose end deregisters it. */
void usrbio_iov_put(struct usrbio_iov *iov)
{
	struct usrbio_iov **at = &shared;
	bool last;

	pthread_mutex_lock(&lock);
	last = --iov->refs == 0;
	while (last && *at && *at != iov)
		at = &(*at)->next;
	if (last && *at)
		*at = iov->next;
	pthread_mutex_unlock(&lock);
	if (last) {
		unlink(iov->link);
		free(iov);
	}
}

/* True if `name` is this uuid, with or without dashes, and then an end or a dot. */
static bool names_uuid(const char *name, const char id[16])
{
	for (int i = 0; i < 32; i++) {
		int byte = (uint8_t)id[i / 2], digit = i % 2 ? byte & 15 : byte >> 4;

		while (*name == '-')
			name++;
		if (*name++ != "0123456789abcdef"[digit])
			return false;
	}
	return *name == 0 || *name == '.';
}

/*
 * The library names a ring's link with its flags in binary and looks for it in decimal when it
 * unlinks it (and with no attributes at all after a failed creation): what is left goes here.
 */
void usrbio_unlink_leftovers(const char *mount, const char id[16])
{
	static const char none[16];
	char folder[PATH_MAX];
	struct dirent *entry;
	DIR *dir;

	if (!memcmp(id, none, 16))
		return;
	snprintf(folder, sizeof(folder), "%s/3fs-virt/iovs", mount);
	dir = opendir(folder);
	if (!dir)
		return;
	while ((entry = readdir(dir)))
		if (names_uuid(entry->d_name, id))
			unlinkat(dirfd(dir), entry->d_name, 0);
	closedir(dir);
}

/* ---- staging ---- */

/*
 * A file in /dev/shm with all its pages, so that no access can meet a full file system. It gets
 * its name last, and a lock before that: a file of this prefix without one has lost its owner, and
 * the next named pool removes it (kvio/memory.py).
 */
static int shm_open_new(char path[64], uint64_t nbytes)
{
	uint8_t id[16];
	char text[37], self[32];
	int fd, rc = uuid_make(id, text);

	if (rc < 0)
		return rc;
	fd = open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
	if (fd < 0)
		return -errno;
	snprintf(path, 64, "/dev/shm/kvio-stage-%s", text);
	snprintf(self, sizeof(self), "/proc/self/fd/%d", fd);
	do
		rc = -posix_fallocate(fd, 0, (off_t)nbytes);
	while (rc == -EINTR);
	if (rc == 0 && flock(fd, LOCK_EX | LOCK_NB) < 0)
		rc = -errno;
	if (rc == 0 && linkat(AT_FDCWD, self, AT_FDCWD, path, AT_SYMLINK_FOLLOW) < 0)
		rc = -errno;
	if (rc < 0)
		close(fd);
	return rc < 0 ? rc : fd;
}

static int stage_map(struct usrbio_stage *stage, const char *mount, uint64_t nbytes)
{
	char path[64];
	void *memory;
	int rc = 0, fd = shm_open_new(path, nbytes);

	if (fd < 0)
		return fd;
	memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (memory == MAP_FAILED) {
		rc = -errno;
	} else {
		madvise(memory, nbytes, MADV_DONTFORK);
		stage->iov = iov_new(mount, path, memory, nbytes, 0, &rc);
		if (!stage->iov)
			munmap(memory, nbytes);
	}
	/* The daemon has it mapped: without a name nothing is left behind, whoever dies. */
	unlink(path);
	close(fd);
	stage->nbytes = nbytes;
	return rc;
}

/* Up to `count` slots; fewer and smaller ones where /dev/shm or a limit of file sizes is tight. */
int usrbio_stage_open(struct usrbio_stage *stage, const char *mount, uint32_t slot_nbytes,
		      uint32_t count)
{
	uint64_t nbytes;
	int rc;

	if (count > MAX_STAGE_SLOTS && slot_nbytes > KVIO_PAGE)
		count = MAX_STAGE_SLOTS;
	nbytes = (uint64_t)slot_nbytes * count;
	if (nbytes > MAX_STAGE_BYTES)
		nbytes = MAX_STAGE_BYTES;
	stage->free = malloc(count * sizeof(*stage->free));
	if (!stage->free)
		return -ENOMEM;
	rc = stage_map(stage, mount, nbytes);
	while ((rc == -ENOSPC || rc == -EFBIG || rc == -ENOMEM) && nbytes / 2 >= MIN_STAGE_BYTES) {
		nbytes = nbytes / 2 / KVIO_PAGE * KVIO_PAGE;
		rc = stage_map(stage, mount, nbytes);
	}
	if (rc < 0) {
		free(stage->free);
		stage->free = NULL;
		return rc;
	}
	while (count > 1 && nbytes / count < KVIO_PAGE)
		count /= 2;
	stage->slot_nbytes = (uint32_t)(nbytes / count / KVIO_PAGE * KVIO_PAGE);
	if (stage->slot_nbytes > slot_nbytes)
		stage->slot_nbytes = slot_nbytes;
	for (uint32_t i = 0; i < count; i++)
		stage->free[i] = (uint16_t)(count - 1 - i);
	stage->num_free = count;
	return 0;
}

void usrbio_stage_close(struct usrbio_stage *stage)
{
	uint8_t *memory = stage->iov ? stage->iov->iov.base : NULL;

	if (!stage->iov)
		return;
	usrbio_iov_put(stage->iov);
	munmap(memory, stage->nbytes);
	free(stage->free);
	*stage = (struct usrbio_stage){ 0 };
}
