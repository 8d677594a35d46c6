"""Segment files: reading what is there, and handing out slots of what this store writes."""
import errno
import mmap
import os
import threading
import uuid
from dataclasses import dataclass, field

import numpy as np

from kvio._ext import ring as _ring
from kvio.storage import format as fmt
from kvio.storage.format import BLOCK_IO, PAGE, Description

__all__ = ["Scan", "Writer", "scan_folder"]

_RESERVE_STEP = 64 << 20        # disk space is taken in steps, so that a small store stays small


def open_file(path: str, flags: int) -> tuple[int, bool]:
    """(fd, whether it is O_DIRECT)."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o644), True
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
    fd, direct = open_file(os.path.join(folder, name), os.O_RDONLY)
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


class _Segment:
    """A segment this store writes."""

    def __init__(self, number, path, fd, slots):
        self.number, self.path, self.fd, self.slots = number, path, fd, slots
        self.next_slot = 0              # first slot never handed out
        self.free = []                  # (slot, flags) handed back
        self.reserved = 0               # the file's space is ours up to here
        self.live = 0                   # valid blocks
        self.dirty = False              # since the last fdatasync
        self.ring = None                # who may write it now

    @property
    def room(self):
        return self.slots - self.next_slot + len(self.free)


class Writer:
    """Slots of this store's own segments. A writer is a random uuid, never adopted.

    A segment belongs to one ring at a time, so that its header pages have one master.
    """

    def __init__(self, folder: str, description: Description, files, *, durable: bool,
                 capacity_bytes: int | None):
        self.folder, self.description, self._files = folder, description, files
        self._durable, self._capacity = durable, capacity_bytes
        self.uuid = uuid.uuid4().bytes
        self.direct_io = None
        self.segments: list[_Segment] = []
        self._by_number: dict[int, _Segment] = {}
        self.slots_used = 0
        self._lock = threading.RLock()

    def place(self, ring, count: int) -> tuple[np.ndarray, int]:
        """Up to `count` slots for `ring`: an array of (segment, slot, flags), adjacent where
        possible, and the errno that kept it from being longer."""
        chosen, failure = [], 0
        stride = self.description.geometry.slot_stride
        with self._lock:
            if self._capacity is not None:
                fits = max(0, self._capacity // stride - self.slots_used)
                if fits < count:
                    count, failure = fits, errno.ENOSPC
            while len(chosen) < count:
                try:
                    segment = self._segment_for(ring)
                    chosen += self._take(segment, count - len(chosen))
                except OSError as failed:
                    failure = failed.errno
                    break
            self.slots_used += len(chosen)
        out = np.array(chosen, np.int64).reshape(-1, 3)
        return out, failure

    def _segment_for(self, ring):
        for wanted in (ring, None):
            for segment in self.segments:
                if segment.ring is wanted and segment.room:
                    segment.ring = ring
                    return segment
        segment = self._create()
        segment.ring = ring
        return segment

    def _take(self, segment, count):
        reused = min(count, len(segment.free))
        taken = [(segment.number, *segment.free.pop()) for _ in range(reused)]
        taken.sort(key=lambda place: place[1])
        new = min(count - len(taken), segment.slots - segment.next_slot)
        if new > 0:
            try:
                new = self._reserve(segment, new)
            except OSError:
                if not taken:
                    raise
                new = 0
        taken += [(segment.number, slot, 0)
                  for slot in range(segment.next_slot, segment.next_slot + new)]
        segment.next_slot += new
        segment.dirty = True
        return taken

    def _reserve(self, segment, count):
        """Disk space for `count` more slots, or for as many as there is space."""
        geometry = self.description.geometry
        while count > 0:
            need = geometry.payload_offset + (segment.next_slot + count) * geometry.slot_stride
            if need <= segment.reserved:
                return count
            for until in (min(segment.reserved + _RESERVE_STEP, geometry.segment_nbytes), need):
                if until < need:
                    continue
                code = _ring.allocate(segment.fd, segment.reserved, until - segment.reserved)
                if code in (errno.EOPNOTSUPP, errno.ENOSYS):
                    until, code = geometry.segment_nbytes, 0    # refused: ENOSPC comes at write
                if code == 0:
                    segment.reserved = until
                    return count
            if count == 1:
                raise OSError(code, os.strerror(code))
            count //= 2
        return 0

    def _create(self):
        geometry, number = self.description.geometry, len(self.segments)
        segment_uuid = uuid.uuid4().bytes
        path = os.path.join(self.folder, fmt.segment_name(self.uuid, number))
        fd, direct = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.ftruncate(fd, geometry.segment_nbytes)
            code = _ring.allocate(fd, 0, geometry.payload_offset)
            if code not in (0, errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(code, os.strerror(code))
            # Page 1 first: whoever sees a valid page 0 sees a whole segment.
            for at, page in ((PAGE, fmt.encode_page1(segment_uuid, geometry.header_pages)),
                             (0, fmt.encode_page0(self.description, self.uuid, number,
                                                  segment_uuid))):
                memory = mmap.mmap(-1, PAGE)
                memory[:] = page
                if os.pwrite(fd, memory, at) != PAGE:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self._durable:
                os.fsync(fd)
                fmt.sync_folder(self.folder)
            index = self._files.add_segment(fd, True, segment_uuid)
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        segment = _Segment(index, path, fd, geometry.slots)
        segment.reserved = geometry.payload_offset
        self.direct_io = direct
        self.segments.append(segment)
        self._by_number[index] = segment
        return segment

    def owns(self, number: int) -> bool:
        """True for a segment of this writer."""
        return number in self._by_number

    def stored(self, number: int, count: int = 1) -> None:
        """Blocks of this segment have become valid."""
        with self._lock:
            self._by_number[number].live += count
            self._by_number[number].dirty = True    # a sync may have come while it was written

    def give_back(self, number: int, slot: int, *, was_valid: bool, suspect: bool) -> None:
        """A slot is free again. `suspect`: its header may be valid on disk, so the next write
        invalidates it first."""
        with self._lock:
            segment = self._by_number[number]
            segment.free.append((slot, _ring.INVALIDATE if suspect or was_valid else 0))
            segment.live -= was_valid
            self.slots_used -= 1

    def release(self, ring) -> None:
        """`ring` has closed: others may write its segments."""
        with self._lock:
            for segment in self.segments:
                if segment.ring is ring:
                    segment.ring = None

    def sync(self) -> None:
        """Everything written so far survives a power loss."""
        with self._lock:
            dirty = [segment for segment in self.segments if segment.dirty]
            for segment in dirty:
                segment.dirty = False
        try:
            for segment in dirty:
                os.fsync(segment.fd)
            if dirty:
                fmt.sync_folder(self.folder)
        except OSError:
            for segment in dirty:
                segment.dirty = True
            raise

    def finish(self) -> None:
        """All I/O has ended: give back the space that was reserved and not used."""
        geometry = self.description.geometry
        for segment in self.segments:
            try:
                if segment.live == 0:
                    os.unlink(segment.path)
                else:
                    os.truncate(segment.path, geometry.payload_offset
                                + segment.next_slot * geometry.slot_stride)
            except OSError:             # the directory is gone: nothing is left to give back
                pass
