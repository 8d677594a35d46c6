"""3FS: is a path on it, and can its USRBIO be used here? Each thing that is missing has its own
message. The rings are `_ext/ring_usrbio.c`."""
import contextlib
import errno
import os
import re
import resource

from kvio._ext import ring as _ring
from kvio.errors import BackendUnavailable

__all__ = ["mount_points", "on_3fs", "preflight"]

FSTYPE = "fuse.hf3fs"
SHM = "/dev/shm"
SHM_NEEDED = 1 << 20        # for the rings; staging takes what it gets, up to 16 MiB a ring
FILES_NEEDED = 64           # a registered file takes two descriptors

_LOAD_REMEDY = {
    errno.ENOENT: "install it, or name it: KVIO_HF3FS_LIB=<file>, HF3FS_LIB_DIR=<folder>, or "
                  "LD_LIBRARY_PATH before Python starts",
    errno.ENOSYS: "use the library of the 3FS release that the cluster runs",
    errno.EMFILE: "lower the hard limit before Python starts (ulimit -Hn 1048576, docker run "
                  "--ulimit nofile=1048576, LimitNOFILE=1048576); kvio does not, since nobody "
                  "could raise it again",
    errno.ECHILD: "open the store in a process that was spawned, not forked",
}


def mount_points() -> list[str]:
    """Mounts of 3FS. statfs(2) cannot tell: the kernel answers FUSE for all of its kind."""
    found = []
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8",
                                            errors="surrogateescape") as table:
        for line in table:
            fields = line.split()
            if FSTYPE in fields[fields.index("-") + 1:][:1]:
                path = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
                found.append(path.removesuffix("/3fs-virt"))
    return found


def _existing(path):
    """The path, or the nearest folder above it that exists."""
    try:
        path = os.path.realpath(path)
    except ValueError:          # a zero byte in it: whoever opens it says so
        return "/"
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def on_3fs(path: str) -> bool:
    """True if the path lies on a mount of 3FS, or below a folder that stands in for one."""
    path = _existing(path)
    if any(os.path.commonpath([path, mount]) == mount for mount in mount_points()):
        return True
    if os.environ.get("HF3FS_USRBIO_DONT_CHECKFS_FOR_MP") != "yes":
        return False
    while path != "/" and not os.path.isdir(os.path.join(path, "3fs-virt")):
        path = os.path.dirname(path)
    return path != "/"


def preflight(path: str) -> str:
    """The mount point for a store at `path`; BackendUnavailable that says what is missing."""
    code, why = _ring.usrbio_load()
    if code:
        where = "" if on_3fs(path) else f" (and {path} does not lie on 3FS)"
        raise BackendUnavailable(code, f"the 3FS library cannot be used: {why}{where}; "
                                 f"{_LOAD_REMEDY.get(code, 'see above')}")
    mount = _ring.usrbio_mount(_existing(path))
    if mount is None:
        raise BackendUnavailable(errno.ENODEV, f"{path} does not lie on a mount of 3FS (there "
                                 f"{_these(mount_points())}): give a directory on one, or use "
                                 "backend='auto'")
    iovs = os.path.join(mount, "3fs-virt", "iovs")
    if not os.path.isdir(iovs):
        raise BackendUnavailable(errno.ENOENT, f"there is no {iovs}: is {mount} really mounted, "
                                 "and is 3fs-virt bind-mounted into this container?")
    if not os.access(iovs, os.W_OK | os.X_OK):
        raise BackendUnavailable(errno.EACCES, f"{iovs} cannot be written by user {os.geteuid()}: "
                                 "memory is registered there")
    _check_shm()
    _check_files()
    return mount


def _these(mounts):
    return f"are: {', '.join(mounts)}" if mounts else "is none in /proc/self/mountinfo"


def _check_shm():
    try:
        shm = os.statvfs(SHM)
        free = shm.f_bavail * shm.f_frsize
    except OSError as failed:
        raise BackendUnavailable(failed.errno, f"{SHM} cannot be used: mount a tmpfs there") \
            from None
    if free < SHM_NEEDED:
        raise BackendUnavailable(errno.ENOSPC, f"{SHM} has {free} bytes free, rings of 3FS need "
                                 f"{SHM_NEEDED}, and pools lie there too: mount -o remount,size=4G "
                                 f"{SHM}, or docker run --shm-size=4g")


def _check_files():
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    if soft != resource.RLIM_INFINITY and soft - used < FILES_NEEDED:
        raise BackendUnavailable(errno.EMFILE, f"{used} of {soft} open files are in use, and each "
                                 "file of a store on 3FS takes two: ulimit -n 65536")
