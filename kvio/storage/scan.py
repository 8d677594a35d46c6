"""Segment files as they are found: which are usable."""
import errno
import mmap
import os
import stat
from dataclasses import dataclass, field

from kvio._ext import ring as _ring
from kvio.storage import format as fmt
from kvio.storage.format import PAGE, Description

__all__ = ["Scan", "check_regular", "open_file", "open_segment", "read_pages", "write_pages"]


def check_regular(path: str) -> None:
    """OSError if something else has this name: to open a FIFO would block, maybe for ever."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:               # whoever opens it says so, or makes it
        return
    if not stat.S_ISREG(mode):
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, "not a regular file", path)


def open_file(path: str, flags: int, direct: bool = True) -> tuple[int, bool]:
    """(fd, whether it is O_DIRECT on a file system that means it). Regular files only."""
    check_regular(path)
    if direct:
        try:
            fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o644)
            return fd, _ring.is_direct(fd)
        except OSError as failed:
            if failed.errno != errno.EINVAL:    # EINVAL: this file system has no O_DIRECT
                raise
    return os.open(path, flags | os.O_CLOEXEC, 0o644), False


@dataclass
class Scan:
    """What was found that is not usable, and how files are open."""

    ignored: dict[str, str] = field(default_factory=dict)
    direct_io: bool | None = None


def read_pages(fd: int, nbytes: int, offset: int) -> mmap.mmap | bytes:
    """Up to nbytes into page-aligned memory (O_DIRECT); short at the end of the file."""
    memory, done = mmap.mmap(-1, nbytes), 0
    while done < nbytes:
        got = os.preadv(fd, [memoryview(memory)[done:]], offset + done)
        done += got // PAGE * PAGE if done + got < nbytes else got
        if got < PAGE:
            break
    return memory if done == nbytes else memory[:done]


def write_pages(fd: int, data: bytes, offset: int = 0) -> None:
    """Whole pages from page-aligned memory (O_DIRECT), in one write. OSError."""
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    if os.pwrite(fd, memory, offset) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def open_segment(folder: str, name: str, description: Description,
                 direct_io: bool = True) -> tuple[int, bool, bytes | str]:
    """(fd, whether it is O_DIRECT, the segment's uuid), or (-1, False, why the file is ignored)."""
    fd, direct = open_file(os.path.join(folder, name), os.O_RDONLY, direct_io)
    try:
        segment = fmt.check_page0(bytes(read_pages(fd, PAGE, 0)), description, name)
    except BaseException:
        os.close(fd)
        raise
    if isinstance(segment, str):
        os.close(fd)
        return -1, False, segment
    return fd, direct, segment
