/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVIO_RING_USRBIO_H
#define KVIO_RING_USRBIO_H
/*
 * The interface of libhf3fs_api_shared.so in kvio's own words, and what the four files of the
 * back end share: ring_usrbio_lib.c (library, registered files), ring_usrbio_mem.c (memory that
 * the 3FS daemon can reach), ring_usrbio_open.c (a ring from beginning to end), ring_usrbio.c (its
 * operations).
 */
#include <limits.h>

#include "kvio/usrbio.h"
#include "ring_internal.h"

#define HF3FS_FORBID_READ_HOLES 2u
#define HF3FS_IOC_FSYNC _IOR('h', 11, uint32_t)

struct hf3fs_iov {
	uint8_t *base;
	void *iovh;
	char id[16];
	char mount_point[256];
	size_t size;
	size_t block_size;
	int numa;
};

struct hf3fs_ior {
	struct hf3fs_iov iov;
	void *iorh;
	char mount_point[256];
	bool for_read;
	int io_depth;
	int priority;
	int timeout;
	uint64_t flags;
};

struct hf3fs_cqe {
	int32_t index;
	int32_t reserved;		/* not filled in */
	int64_t result;
	const void *userdata;
};

_Static_assert(offsetof(struct hf3fs_iov, iovh) == 8, "as the library has it");
_Static_assert(offsetof(struct hf3fs_iov, id) == 16, "as the library has it");
_Static_assert(offsetof(struct hf3fs_iov, mount_point) == 32, "as the library has it");
_Static_assert(offsetof(struct hf3fs_iov, size) == 288, "as the library has it");
_Static_assert(offsetof(struct hf3fs_iov, block_size) == 296, "as the library has it");
_Static_assert(offsetof(struct hf3fs_iov, numa) == 304, "as the library has it");
_Static_assert(sizeof(struct hf3fs_iov) == 312, "as the library has it");
_Static_assert(offsetof(struct hf3fs_ior, iorh) == 312, "as the library has it");
_Static_assert(offsetof(struct hf3fs_ior, mount_point) == 320, "as the library has it");
_Static_assert(offsetof(struct hf3fs_ior, for_read) == 576, "as the library has it");
_Static_assert(offsetof(struct hf3fs_ior, io_depth) == 580, "as the library has it");
_Static_assert(offsetof(struct hf3fs_ior, priority) == 584, "as the library has it");
_Static_assert(offsetof(struct hf3fs_ior, timeout) == 588, "as the library has it");
_Static_assert(offsetof(struct hf3fs_ior, flags) == 592, "as the library has it");
_Static_assert(sizeof(struct hf3fs_ior) == 600, "as the library has it");
_Static_assert(offsetof(struct hf3fs_cqe, result) == 8, "as the library has it");
_Static_assert(offsetof(struct hf3fs_cqe, userdata) == 16, "as the library has it");
_Static_assert(sizeof(struct hf3fs_cqe) == 24, "as the library has it");

struct usrbio_lib {
	int (*extract_mount_point)(char *mount_point, int size, const char *path);
	int (*iovwrap)(struct hf3fs_iov *iov, void *base, const uint8_t id[16],
		       const char *mount_point, size_t size, size_t block_size, int numa);
	int (*iorcreate2)(struct hf3fs_ior *ior, const char *mount_point, int entries,
			  bool for_read, int io_depth, int priority, int numa);
	int (*iorcreate3)(struct hf3fs_ior *ior, const char *mount_point, int entries,
			  bool for_read, int io_depth, int priority, int timeout, int numa);
	int (*iorcreate4)(struct hf3fs_ior *ior, const char *mount_point, int entries,
			  bool for_read, int io_depth, int timeout, int numa, uint64_t flags);
	void (*iordestroy)(struct hf3fs_ior *ior);
	int (*reg_fd)(int fd, uint64_t flags);	/* <= 0: done, > 0: errno */
	void (*dereg_fd)(int fd);
	int (*prep_io)(const struct hf3fs_ior *ior, const struct hf3fs_iov *iov, bool read,
		       void *ptr, int fd, size_t off, uint64_t len, const void *userdata);
	int (*submit_ios)(const struct hf3fs_ior *ior);
	int (*wait_for_ios)(const struct hf3fs_ior *ior, struct hf3fs_cqe *cqes, int cqec,
			    int min_results, const struct timespec *abs_timeout);
};

/* The library, or NULL if it is not open in this process. */
const struct usrbio_lib *usrbio_lib(void);
/* Registers an open file unless it is; usrbio_fd_forget() (ring_internal.h) before its close. */
int usrbio_fd_use(int fd);
/* The length of a file becomes that of its last write; 0, or -errno of the ioctl. */
int usrbio_length_sync(int fd);

/* Memory that the daemon has mapped: a symlink in the mount, and the library's view of it. */
struct usrbio_iov {
	struct usrbio_iov *next;
	uint64_t region;		/* 0: of one ring alone */
	uint32_t refs;
	atomic_bool denied;		/* the daemon could not register it with its NIC */
	struct hf3fs_iov iov;
	char link[PATH_MAX];
};
/* That of a named region, shared by the rings of a store; NULL and *rc 0: it has no name. */
struct usrbio_iov *usrbio_iov_of_region(const char *mount, const struct region *region,
					uint64_t block_size, int *rc);
void usrbio_iov_put(struct usrbio_iov *iov);
/* Symlinks of a ring that the library has left behind. */
void usrbio_unlink_leftovers(const char *mount, const char id[16]);

/* Slots of a ring's own memory in /dev/shm, through which all other memory is copied. */
struct usrbio_stage {
	struct usrbio_iov *iov;		/* NULL: not open */
	uint64_t nbytes;
	uint32_t slot_nbytes, num_free;
	uint16_t *free;
};
int usrbio_stage_open(struct usrbio_stage *stage, const char *mount, uint32_t slot_nbytes,
		      uint32_t count);
void usrbio_stage_close(struct usrbio_stage *stage);
static inline uint8_t *usrbio_stage_at(const struct usrbio_stage *stage, int slot)
{
	return stage->iov->iov.base + (size_t)slot * stage->slot_nbytes;
}

struct flight {
	struct io *io;			/* NULL: free */
	struct usrbio_stage *stage;	/* NULL: straight into the pool */
	struct usrbio_iov *iov;
	int slot;
};

struct usrbio {
	const struct usrbio_lib *lib;
	struct hf3fs_ior ior[DIRECTIONS];
	bool has_ior[DIRECTIONS], prepared[DIRECTIONS];
	uint32_t flying[DIRECTIONS];
	struct flight *flights;		/* as many as the queue is deep */
	uint16_t *free_flights;
	uint32_t num_free;
	uint32_t refusals;
	struct io *later, **later_tail;	/* the ring or the staging memory was full */
	struct io *failed;		/* with their result, to be completed in wait */
	struct usrbio_stage pages, payload;
	struct usrbio_iov *iovs[MAX_SLICES];
	uint8_t dirty[MAX_SEGMENTS / 8];	/* files whose length is not synced */
	/* Shared with the helper, which syncs, and with those who wake the ring. */
	pthread_mutex_t lock;
	pthread_cond_t news, work;
	atomic_bool woken;
	bool stop, has_helper;
	pthread_t helper;
	struct io *jobs, **jobs_tail, *synced;
};

/* ring_usrbio.c */
void usrbio_start(struct kvio_ring *ring, struct io *io);
void usrbio_wait(struct kvio_ring *ring, int64_t timeout_ns);
void usrbio_wake(struct kvio_ring *ring);

#endif
