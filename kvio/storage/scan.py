"""Segment files as they are found: which are usable, and which blocks they hold."""
import errno
import mmap
import os
from dataclasses import dataclass, field

import numpy as np

from kvio._ext import ring as _ring
from kvio.storage import format as fmt
from kvio.storage.format import BLOCK_IO, PAGE, Description

__all__ = ["Scan", "open_file", "scan_folder"]


def open_file(path: str, flags: int, direct: bool = True) -> tuple[int, bool]:
    """(fd, whether it is O_DIRECT on a file system that means it)."""
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
    """What opening a store has found."""

    segments: int = 0
    blocks: int = 0
    headers_damaged: int = 0
    headers_beyond_end: int = 0
    ignored: dict[str, str] = field(default_factory=dict)
    direct_io: bool | None = None


def _read(fd: int, nbytes: int, offset: int) -> mmap.mmap | bytes:
    """Up to nbytes into page-aligned memory (O_DIRECT); short at the end of the file."""
    memory, done = mmap.mmap(-1, nbytes), 0
    while done < nbytes:
        got = os.preadv(fd, [memoryview(memory)[done:]], offset + done)
        done += got // PAGE * PAGE if done + got < nbytes else got
        if got < PAGE:
            break
    return memory if done == nbytes else memory[:done]


def _scan_headers(fd, description, segment, scan):
    """The valid blocks of a segment. Damaged headers are read once more: somebody may have been
    in the middle of writing their page."""
    geometry = description.geometry
    out = np.zeros(geometry.slots, BLOCK_IO)
    for attempt in range(2):
        pages = _read(fd, geometry.header_pages * PAGE, fmt.FIRST_HEADER_PAGE * PAGE)
        headers = np.frombuffer(pages, np.uint8)[:geometry.slots * fmt.HEADER_NBYTES]
        found, damaged = _ring.scan_headers(headers, segment, geometry.block_nbytes, out)
        if not damaged:
            break
    scan.headers_damaged += damaged
    blocks = out[:found]
    end = os.fstat(fd).st_size
    whole = (geometry.payload_offset
             + (blocks["slot"].astype(np.int64) + 1) * geometry.slot_stride) <= end
    scan.headers_beyond_end += int(found - np.count_nonzero(whole))
    return blocks[whole]


def _scan_file(folder, name, description, files, scan):
    fd, direct = open_file(os.path.join(folder, name), os.O_RDONLY, files.direct_io)
    try:
        segment = fmt.check_page0(bytes(_read(fd, PAGE, 0)), description, name)
        if isinstance(segment, str):
            scan.ignored[name] = segment
            return None
        blocks = _scan_headers(fd, description, segment, scan)
        number = files.add_segment(fd, False, segment)
        fd = -1
    finally:
        if fd >= 0:
            os.close(fd)
    blocks["segment"] = number
    scan.direct_io = direct if scan.direct_io is None else scan.direct_io and direct
    scan.segments += 1
    scan.blocks += len(blocks)
    return blocks


def scan_folder(folder: str, description: Description, files, scan: Scan):
    """Blocks of each usable segment of a store. A file that is not usable is noted and ignored."""
    for name in sorted(os.listdir(folder)):
        if fmt.parse_segment_name(name) is None:
            continue
        try:
            blocks = _scan_file(folder, name, description, files, scan)
        except OSError as failed:
            if failed.errno in (errno.EMFILE, errno.ENFILE):
                raise
            scan.ignored[name] = os.strerror(failed.errno)
            continue
        if blocks is not None:
            yield blocks
