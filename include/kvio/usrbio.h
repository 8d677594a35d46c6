/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVIO_USRBIO_H
#define KVIO_USRBIO_H
/*
 * The back end KVIO_BACKEND_USRBIO: a store on 3FS through USRBIO, that is through the library
 * libhf3fs_api_shared.so, which is opened at run time and never linked.
 *
 * Every int result is >= 0, or -errno.
 */
#include <stddef.h>
#include <stdint.h>

struct kvio_store;

#define KVIO_USRBIO_LIBRARY "libhf3fs_api_shared.so"
#define KVIO_USRBIO_MOUNT_BYTES 256		/* with the closing zero */
/* The library keeps a pointer for every number of a file that the hard limit allows, from the
 * moment it is opened. Beyond this many it is not opened. */
#define KVIO_USRBIO_MAX_NOFILE (1u << 22)

/*
 * Opens the library, once per process: KVIO_HF3FS_LIB names the file, else HF3FS_LIB_DIR the
 * folder, else the loader searches. `why` gets what is missing and where it was looked for.
 * -ENOENT: not found; -ENOSYS: a symbol is missing; -EMFILE: the hard limit of open files is too
 * large; -ECHILD: it was opened before a fork.
 */
int kvio_usrbio_load(char *why, size_t room);
/* The mount point of an existing path, as the library sees it; -ENODEV: not on 3FS. */
int kvio_usrbio_mount(const char *path, char *out, size_t room);
/* Where the rings of this store are: before the first one is opened. */
int kvio_store_set_mount(struct kvio_store *store, const char *mount);
/* The memory of this region is the whole file `path` in /dev/shm; NULL: it is gone. */
int kvio_usrbio_name_region(uint64_t region, const char *path);

#endif
