"""This store's own segments: made, their slots handed out and taken back."""
import errno
import mmap
import os
import threading
import uuid

import numpy as np

from kvio._ext import ring as _ring
from kvio.storage import format as fmt
from kvio.storage.format import PAGE, Description
from kvio.storage.scan import open_file

__all__ = ["Writer"]

_RESERVE_STEP = 64 << 20        # disk space is taken in steps, so that a small store stays small


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
        fd, direct = open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._files.direct_io)
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
