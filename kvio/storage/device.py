"""What lies behind a path: how deep a queue its device likes, whether O_DIRECT means anything."""
import errno
import os

from kvio._ext import ring as _ring
from kvio.errors import StoreError

__all__ = ["choose_direct_io", "choose_queue_depth"]

_LEAST, _MOST, _MOST_ROTATING, _OTHERWISE = 8, 128, 32, 32
SYS_BLOCK = "/sys/dev/block"


def choose_queue_depth(path: str, wanted: int | None) -> tuple[int, str]:
    """(device operations in flight, why so many).

    A quarter of what the block layer queues for the device, an eighth where it rotates (or a
    virtual disk says so): enough to keep it busy, and others still get in.
    """
    if wanted is not None:
        return wanted, "asked for"
    device = os.stat(path).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    folder = os.path.realpath(os.path.join(SYS_BLOCK, name))
    if os.path.exists(os.path.join(folder, "partition")):
        folder = os.path.dirname(folder)
    queue = {}
    try:
        for key in ("rotational", "nr_requests"):
            with open(os.path.join(folder, "queue", key)) as file:
                queue[key] = int(file.read())
    except (OSError, ValueError):
        return _OTHERWISE, f"no block device is known behind {path}"
    most = _MOST_ROTATING if queue["rotational"] else _MOST
    share = queue["nr_requests"] // (8 if queue["rotational"] else 4)
    return max(_LEAST, min(most, share)), (
        f"{os.path.basename(folder)}: nr_requests {queue['nr_requests']}, "
        f"{'rotational' if queue['rotational'] else 'not rotational'}")


def choose_direct_io(path: str, wanted) -> tuple[bool, str]:
    """(whether files are opened with O_DIRECT, why). `path`: a file there. StoreError if it is
    `wanted` and cannot be had."""
    if wanted is False:
        return False, "asked for"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as failed:
        if failed.errno != errno.EINVAL:
            raise
        direct, why = False, "the file system refuses O_DIRECT"
    else:
        direct = _ring.is_direct(fd)
        os.close(fd)
        why = "the file system has O_DIRECT" if direct else "the files are memory (tmpfs)"
    if wanted is True and not direct:
        raise StoreError(errno.EOPNOTSUPP, f"direct_io=True, but {why} at {path}: use "
                         "direct_io='auto', or another directory")
    return direct, why
