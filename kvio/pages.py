"""Pages that pools are made of: anonymous, huge, of one NUMA node, or files that others can map."""
import contextlib
import errno
import mmap
import os
import threading
import uuid
import warnings
import weakref

import numpy as np

from kvio.errors import InvalidArgument, MappingFailed, checked_int
from kvio.layout import PAGE

__all__ = ["advise_huge", "anonymous", "bind_to_node", "fixed_memfd", "map_fixed", "map_sealed",
           "named_shm", "numa_nodes", "release_shm", "sealed_memfd", "shared_span"]

_HUGE = 2 << 20
_MAP_HUGETLB, _MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _MPOL_BIND = 0x40000, 14, 15, 2
_SHM, _SHM_PREFIX = "/dev/shm", "kvio-"
_F_ADD_SEALS, _F_GET_SEALS, _MFD_ALLOW_SEALING = 1033, 1034, 2
_FIXED = 0x1 | 0x2 | 0x4            # SEAL, SHRINK, GROW
_SEALS = _FIXED | 0x10              # FUTURE_WRITE


def anonymous(nbytes: int, hugepages: bool | None = None,
              numa_node: int | None = None) -> mmap.mmap:
    """Page-aligned memory of this process alone, not inherited by forked children: a child would
    otherwise write into pages that a NIC still knows by their old owner.

    hugepages: None takes transparent huge pages where the system gives them (a device that reads
    into 4 KiB pages costs two to five times the CPU), False wants none, True wants reserved ones
    (MAP_HUGETLB) and else transparent ones; what it does not get it warns of. numa_node: where the
    pages come from; InvalidArgument if there is no such node.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = _reserved_huge(nbytes, flags) if hugepages else None
    if memory is None:
        unit = _HUGE if hugepages or hugepages is None and nbytes >= _HUGE else PAGE
        memory = _mapped(-1, -(-nbytes // unit) * unit, flags)
        if unit == _HUGE:
            advise_huge(memory, hugepages)
        elif hugepages is False:
            memory.madvise(_MADV_NOHUGEPAGE)
    memory.madvise(mmap.MADV_DONTFORK)
    bind_to_node(memory, numa_node)
    return memory


def _reserved_huge(nbytes, flags):
    try:
        return mmap.mmap(-1, -(-nbytes // _HUGE) * _HUGE, flags | _MAP_HUGETLB)
    except OSError as failed:
        warnings.warn(f"no reserved huge pages ({failed.strerror}; see /proc/sys/vm/nr_hugepages): "
                      "asking for transparent ones", RuntimeWarning, stacklevel=4)
        return None


def advise_huge(memory, wanted, knob="enabled"):
    """Transparent huge pages; a warning if they were `wanted` and the system has none."""
    try:
        memory.madvise(_MADV_HUGEPAGE)
        with open(f"/sys/kernel/mm/transparent_hugepage/{knob}") as file:
            why = f"{file.name} says {file.read().strip()}"
        refused = "[never]" in why or "[deny]" in why
    except OSError as failed:
        why, refused = failed.strerror, True
    if wanted and refused:
        warnings.warn(f"no transparent huge pages either ({why}): using 4 KiB pages",
                      RuntimeWarning, stacklevel=4)


def numa_nodes() -> list[int]:
    """The NUMA nodes of this machine that have memory."""
    try:
        with open("/sys/devices/system/node/has_memory") as file:
            spans = file.read().strip().split(",")
    except OSError:                         # a kernel without NUMA
        return [0]
    pairs = [(span.split("-") * 2)[:2] for span in spans if span]
    return [node for first, last in pairs for node in range(int(first), int(last) + 1)]


def bind_to_node(memory: mmap.mmap, node: int | None) -> None:
    """Pages of `memory` that are touched from now on come from this NUMA node and no other."""
    if node is None:
        return
    node = checked_int("numa_node", node, 0)
    if node not in numa_nodes():
        raise InvalidArgument(f"there is no NUMA node {node} with memory: this machine has "
                              f"{numa_nodes()} (lscpu, numactl -H)")
    number = {"x86_64": 237, "aarch64": 235}.get(os.uname().machine)
    if number is None:
        raise InvalidArgument(f"numa_node is not known on {os.uname().machine}; start the process "
                              f"with numactl --membind={node} instead")
    import ctypes
    libc, mask = ctypes.CDLL(None, use_errno=True), (ctypes.c_ulong * 17)()
    mask[node // 64] = 1 << node % 64
    start = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    if libc.syscall(ctypes.c_long(number), ctypes.c_void_p(start), ctypes.c_size_t(len(memory)),
                    ctypes.c_long(_MPOL_BIND), mask, ctypes.c_ulong(1024), ctypes.c_long(0)):
        code = ctypes.get_errno()
        raise MappingFailed(code, f"cannot bind {len(memory)} bytes to NUMA node {node}: the "
                            "process's cpuset may exclude it, or a container refuses mbind")


def _mapped(fd, nbytes, flags):
    try:
        return mmap.mmap(fd, nbytes, flags)
    except (OSError, OverflowError, ValueError) as refused:
        raise MappingFailed(getattr(refused, "errno", None) or errno.ENOMEM, f"cannot map {nbytes} "
                            "bytes: make a smaller pool, or raise the limits (ulimit -v, cgroup "
                            "memory, vm.overcommit_memory)") from None


def sealed_memfd(nbytes: int) -> tuple[mmap.mmap, int]:
    """Shared memory that another process can map read-only through the returned fd, and nothing
    else: sealed against resizing and new writable mappings once we have mapped it."""
    import fcntl
    fd = os.memfd_create("kvio", os.MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    try:
        nbytes = -(-nbytes // PAGE) * PAGE
        os.ftruncate(fd, nbytes)
        memory = _mapped(fd, nbytes, mmap.MAP_SHARED)
        memory.madvise(mmap.MADV_DONTFORK)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
        _spans.add(memory, fd)
    except OSError:
        os.close(fd)
        raise
    return memory, fd


class _Spans:
    """The sealed memory of this process, by address, each with a read-only descriptor for others,
    for as long as it is mapped."""

    def __init__(self):
        self._by_start, self._lock = {}, threading.RLock()

    def add(self, memory, fd):
        start = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        with self._lock:
            self._by_start[start] = weakref.ref(memory), len(memory), fd
        weakref.finalize(memory, self._drop, start, fd).atexit = False

    def _drop(self, start, fd):
        with self._lock:
            if self._by_start.get(start, (None, 0, -1))[2] == fd:
                del self._by_start[start]
            os.close(fd)

    def find(self, addr, nbytes):
        with self._lock:
            for start, (memory, length, fd) in self._by_start.items():
                if start <= addr and addr + nbytes <= start + length:
                    alive = memory()
                    return None if alive is None or alive.closed else (fd, addr - start)
        return None


_spans = _Spans()


def shared_span(addr: int, nbytes: int) -> tuple[int, int] | None:
    """The read-only descriptor (which stays ours) and the offset in it of memory that other
    processes can map, or None: it is private."""
    return _spans.find(addr, nbytes)


def fixed_memfd(nbytes: int) -> tuple[mmap.mmap, int]:
    """Memory that other processes can map and write, but nobody can resize."""
    import fcntl
    fd = os.memfd_create("kvio-fixed", os.MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        memory = _mapped(fd, nbytes, mmap.MAP_SHARED)
        memory.madvise(mmap.MADV_DONTFORK)
        fcntl.fcntl(fd, _F_ADD_SEALS, _FIXED)
    except OSError:
        os.close(fd)
        raise
    return memory, fd


def map_fixed(fd: int, nbytes: int) -> mmap.mmap:
    """The memory of another process's `fixed_memfd`. MappingFailed if it is anything else."""
    _check_seals(fd, _FIXED)
    if os.fstat(fd).st_size < nbytes:
        raise MappingFailed(errno.EINVAL, f"this memfd has less than the {nbytes} bytes promised")
    memory = _mapped(fd, nbytes, mmap.MAP_SHARED)
    memory.madvise(mmap.MADV_DONTFORK)
    return memory


def _check_seals(fd, wanted):
    import fcntl
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError:
        raise MappingFailed(errno.EINVAL, "this descriptor is not a memfd: between processes only "
                            "sealed memory is shared, as BlockPool(shared=True) has it") from None
    if seals & wanted != wanted:
        raise MappingFailed(errno.EPERM, f"this memfd is not sealed (it has {seals:#x}, {wanted:#x}"
                            " is wanted): use BlockPool(shared=True)")


def map_sealed(fd: int, offset: int, nbytes: int) -> np.ndarray:
    """Another process's memory, read-only: `nbytes` from `offset` of a memfd that its owner can
    neither truncate nor let others write. MappingFailed if it is anything else: touching it could
    then kill us (SIGBUS)."""
    _check_seals(fd, _SEALS)
    size = os.fstat(fd).st_size
    if offset < 0 or nbytes <= 0 or offset + nbytes > size:
        raise MappingFailed(errno.EINVAL, f"this memfd has {size} bytes, and {nbytes} from "
                            f"{offset} were promised")
    skip = offset % mmap.PAGESIZE
    try:
        memory = mmap.mmap(fd, nbytes + skip, mmap.MAP_SHARED, mmap.PROT_READ,
                           offset=offset - skip)
    except (OSError, ValueError, OverflowError) as refused:
        raise MappingFailed(getattr(refused, "errno", None) or errno.ENOMEM,
                            f"cannot map {nbytes} bytes of another process") from None
    memory.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(memory, np.uint8)[skip:]


def named_shm(nbytes: int) -> tuple[mmap.mmap, str, int]:
    """Memory that is a file in /dev/shm, which the daemon of 3FS can map: (memory, path, fd).

    All its pages are taken at once: where /dev/shm fills up later, nobody is killed by SIGBUS. The
    fd holds a lock for as long as somebody uses the file: what the dead have left goes first.
    """
    import fcntl
    nbytes = -(-nbytes // PAGE) * PAGE
    _unlink_orphans()
    path = os.path.join(_SHM, f"{_SHM_PREFIX}pool-{uuid.uuid4().hex}")
    try:
        fd = os.open(_SHM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as failed:
        raise MappingFailed(failed.errno, f"cannot make a file in {_SHM}: mount a tmpfs there that "
                            "you may write") from failed
    try:
        _take_pages(fd, nbytes)
        memory = _mapped(fd, nbytes, mmap.MAP_SHARED)
        memory.madvise(mmap.MADV_DONTFORK)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)      # before anybody can see it
        # With src_dir_fd it is linkat, which follows; a plain link does not.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
    except BaseException:
        os.close(fd)
        raise
    return memory, path, fd


def _take_pages(fd, nbytes):
    shm = os.fstatvfs(fd)
    free = shm.f_bavail * shm.f_frsize
    try:
        if free < nbytes and shm.f_blocks:
            raise OSError(errno.ENOSPC, "checked before")
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as failed:
        raise MappingFailed(failed.errno, f"a named pool of {nbytes} bytes does not fit into "
                            f"{_SHM} ({free} bytes free): make it smaller, or mount -o "
                            f"remount,size=... {_SHM}, or docker run --shm-size=...") from None


def release_shm(path: str, fd: int, owner: int) -> None:
    """Give up a file of `named_shm`. In a forked child it keeps its name."""
    if owner == os.getpid():
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    os.close(fd)


def _unlink_orphans():
    """Files whose lock is gone belong to processes that were killed."""
    import fcntl
    for name in os.listdir(_SHM) if os.path.isdir(_SHM) else ():
        if not name.startswith(_SHM_PREFIX):
            continue
        path = os.path.join(_SHM, name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:                 # another user's, or gone
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
        else:
            release_shm(path, fd, os.getpid())
