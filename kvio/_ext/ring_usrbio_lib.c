// SPDX-License-Identifier: Apache-2.0
/*
 * libhf3fs_api_shared.so: found, opened once and never closed (its state is the process's), and
 * which files are registered with it.
 */
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "ring_usrbio.h"
#include "symbols.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct usrbio_lib library;
static atomic_int loaded_by;		/* the process that has opened it, or 0 */
static uint8_t *registered;		/* per number of a file */
static size_t num_registered;

const struct usrbio_lib *usrbio_lib(void)
{
	return atomic_load(&loaded_by) == getpid() ? &library : NULL;
}

static int resolve(void *handle, char *why, size_t room)
{
	const struct kvio_symbol symbols[] = {
		{ "hf3fs_extract_mount_point", &library.extract_mount_point, false },
		{ "hf3fs_iovwrap", &library.iovwrap, false },
		{ "hf3fs_iorcreate2", &library.iorcreate2, true },
		{ "hf3fs_iorcreate3", &library.iorcreate3, true },
		{ "hf3fs_iorcreate4", &library.iorcreate4, true },
		{ "hf3fs_iordestroy", &library.iordestroy, false },
		{ "hf3fs_reg_fd", &library.reg_fd, false },
		{ "hf3fs_dereg_fd", &library.dereg_fd, false },
		{ "hf3fs_prep_io", &library.prep_io, false },
		{ "hf3fs_submit_ios", &library.submit_ios, false },
		{ "hf3fs_wait_for_ios", &library.wait_for_ios, false },
	};

	const char *missing = kvio_resolve(handle, symbols, sizeof(symbols) / sizeof(*symbols));

	if (missing) {
		snprintf(why, room, "it has no symbol %s", missing);
		return -ENOSYS;
	}
	if (!library.iorcreate2 && !library.iorcreate3 && !library.iorcreate4) {
		snprintf(why, room, "it has none of hf3fs_iorcreate2, 3 and 4");
		return -ENOSYS;
	}
	return 0;
}

/* Tries one file; a failure is added to `why`. */
static void *try_open(const char *path, char *why, size_t room)
{
	void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	size_t used = strlen(why);
	const char *error = handle ? NULL : dlerror();

	if (!handle)
		snprintf(why + used, room - used, "%s%s", used ? "; " : "", error ? error : path);
	return handle;
}

static int load(char *why, size_t room)
{
	const char *file = getenv("KVIO_HF3FS_LIB"), *folder = getenv("HF3FS_LIB_DIR");
	struct rlimit limit;
	char path[PATH_MAX];
	void *handle = NULL;
	int rc;

	if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_max > KVIO_USRBIO_MAX_NOFILE) {
		snprintf(why, room, "the hard limit of open files is %llu, for each of which the "
			 "library would keep a pointer: at most %u are accepted",
			 (unsigned long long)limit.rlim_max, KVIO_USRBIO_MAX_NOFILE);
		return -EMFILE;
	}
	if (file && *file) {
		handle = try_open(file, why, room);
	} else {
		if (folder && *folder) {
			snprintf(path, sizeof(path), "%s/" KVIO_USRBIO_LIBRARY, folder);
			handle = try_open(path, why, room);
		}
		if (!handle)
			handle = try_open(KVIO_USRBIO_LIBRARY, why, room);
	}
	if (!handle)
		return -ENOENT;
	rc = resolve(handle, why, room);
	if (rc < 0)
		dlclose(handle);
	return rc;
}

int kvio_usrbio_load(char *why, size_t room)
{
	int by = atomic_load(&loaded_by), rc = 0;

	*why = 0;
	if (by == getpid())
		return 0;
	if (by) {
		snprintf(why, room, "process %d had opened it before it forked this one", by);
		return -ECHILD;
	}
	pthread_mutex_lock(&lock);
	if (!atomic_load(&loaded_by)) {
		rc = load(why, room);
		if (rc == 0)
			atomic_store(&loaded_by, getpid());
	}
	pthread_mutex_unlock(&lock);
	return rc;
}

int kvio_usrbio_mount(const char *path, char *out, size_t room)
{
	const struct usrbio_lib *lib = usrbio_lib();
	int rc;

	/* The library throws where a path does not exist. */
	if (!lib || access(path, F_OK) < 0)
		return lib ? -errno : -ENOENT;
	rc = lib->extract_mount_point(out, (int)room, path);
	if (rc < 0)
		return -ENODEV;
	return (size_t)rc > room ? -ENAMETOOLONG : 0;
}

/* ---- files ---- */

static int fd_register(int fd)
{
	int rc;

	if ((size_t)fd >= num_registered) {
		size_t room = 2 * (size_t)fd + 64;
		uint8_t *more = realloc(registered, room);

		if (!more)
			return -ENOMEM;
		memset(more + num_registered, 0, room - num_registered);
		registered = more;
		num_registered = room;
	}
	rc = library.reg_fd(fd, 0);
	if (rc == EINVAL) {
		/* Somebody closed a file without deregistering it, and its number is ours now. */
		library.dereg_fd(fd);
		rc = library.reg_fd(fd, 0);
	}
	if (rc > 0)
		return -rc;
	registered[fd] = 1;
	return 0;
}

int usrbio_fd_use(int fd)
{
	int rc = 0;

	pthread_mutex_lock(&lock);
	if ((size_t)fd >= num_registered || !registered[fd])
		rc = fd_register(fd);
	pthread_mutex_unlock(&lock);
	return rc;
}

void usrbio_fd_forget(int fd)
{
	if (fd < 0 || !usrbio_lib())
		return;
	pthread_mutex_lock(&lock);
	if ((size_t)fd < num_registered && registered[fd]) {
		library.dereg_fd(fd);
		registered[fd] = 0;
	}
	pthread_mutex_unlock(&lock);
}

int usrbio_length_sync(int fd)
{
	uint32_t unused = 0;

	return ioctl(fd, HF3FS_IOC_FSYNC, &unused) < 0 ? -errno : 0;
}
