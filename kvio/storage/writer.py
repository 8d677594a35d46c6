"""This store's own segments: made, their slots handed out and taken back."""
import errno
import os
import threading
import time
import uuid

import numpy as np

from kvio._ext import ring as _ring
from kvio.storage import format as fmt
from kvio.storage.format import PAGE, Description
from kvio.storage.scan import open_file, write_pages
from kvio.storage.slots import RETIRED, UNBACKED, Slots

__all__ = ["FULL", "Writer"]

FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)    # what a disk without space says
_RESERVE_STEP = 64 << 20        # disk space is taken in steps, so that a small store stays small
_RETRY_S, _MAX_RETRY_S = 1, 60  # a disk that was full is asked again after so long


class _Segment:
    """A segment this store writes."""

    def __init__(self, number, path, fd, slots):
        self.number, self.path, self.fd = number, path, fd
        self.slots = Slots(slots)
        self.reserved = 0               # the file's space is ours up to here
        self.sparse = False             # the file system reserves nothing
        self.dirty = False              # since the last fdatasync
        self.ring = None                # who may write it now


class Writer:
    """Slots of this store's own segments. A writer is a random uuid, never adopted.

    A segment belongs to one ring at a time, so that its header pages have one master. Slots are
    handed out in as few runs as possible: the shortest free run with room for all; new slots
    while all segments together span less than `max_slots`; then the longest runs there are, of
    this ring, then of rings that do not write theirs. A store whose rings all stand in each
    other's way spans more rather than fail.
    """

    def __init__(self, folder: str, description: Description, files, index, *,
                 durable: bool):
        self.folder, self.description, self._files = folder, description, files
        self._index, self.durable = index, durable
        self.max_slots: int | None = None   # what all segments together should span
        self.uuid = uuid.uuid4().bytes
        self.direct_io = None
        self.segments: list[_Segment] = []
        self._by_number: dict[int, _Segment] = {}
        self.slots_used = 0             # handed out or valid
        self.span = 0                   # used at least once
        self._next_number = 0           # of a file: never used twice, also if segments are lost
        self._full_until, self._retry_s, self._full_errno = 0.0, 0, errno.ENOSPC
        self._lock = threading.RLock()

    def place(self, ring, count: int) -> tuple[np.ndarray, int]:
        """Up to `count` slots for `ring`: an array of (segment, slot, flags), adjacent where
        possible, and the errno that kept it from being longer."""
        out, done, failure = np.empty((count, 3), np.int64), 0, 0
        with self._lock:
            while done < count:
                try:
                    segment, start, got = self._next_run(ring, count - done)
                except OSError as failed:
                    failure = failed.errno
                    break
                rows = out[done:done + got]
                rows[:, 0], rows[:, 1] = segment.number, np.arange(start, start + got)
                rows[:, 2] = segment.slots.flags(start, got) * _ring.INVALIDATE
                done += got
                segment.ring, segment.dirty = ring, True
                self.slots_used += got
        return out[:done], failure

    def fits(self, ring, count: int) -> bool:
        """Will `place` find `count` adjacent slots, or slots that were never used?"""
        with self._lock:
            grows = self.max_slots is None or self.span < self.max_slots
            return grows and not self._disk_is_full() or \
                self._shortest_fit(ring, count) is not None

    # ---- where the next run of slots comes from

    def _next_run(self, ring, count):
        """(segment, first slot, how many), or OSError."""
        segment, refused = self._shortest_fit(ring, count), None
        if segment is None:
            try:
                limit = count if self.max_slots is None else self.max_slots - self.span
                if limit > 0:
                    return self._grow(ring, min(count, limit))
            except OSError as failed:
                refused = failed
            segment = self._longest(ring) or self._unshelved(ring) or self._moved(ring)
        if segment is None:
            if refused:
                raise refused
            return self._grow(ring, count)
        return segment, *segment.slots.take(count)

    def _writable(self, ring):
        """Segments that the ring may write; the newest first."""
        return [segment for segment in reversed(self.segments)
                if segment.ring is ring or segment.ring is None]

    def _shortest_fit(self, ring, count):
        best, best_length, looks = None, 1 << 62, 16
        for segment in self.segments:
            looks -= best is not None           # of many segments some will do
            if looks < 0:
                break
            if segment.slots.lengths >> min(count, 63) and \
                    (segment.ring is ring or segment.ring is None):
                length = segment.slots.fit(count)
                if 0 < length < best_length:
                    best, best_length = segment, length
                    if length == count:
                        break
        return best

    def _longest(self, ring):
        best = max(self._writable(ring), key=lambda segment: segment.slots.lengths, default=None)
        return best if best and best.slots.num_free else None

    def _unshelved(self, ring):
        """Slots that once had no space behind them, if that may be there now."""
        if not self._disk_is_full():
            for segment in self._writable(ring):
                if segment.slots.unbacked:
                    segment.slots.unshelve()
                    return segment
        return None

    def _moved(self, ring):
        """A segment of a ring that is not writing it: with the most free slots."""
        idle = [segment for segment in self.segments
                if segment.slots.num_free and not segment.slots.num_flying]
        best = max(idle, key=lambda segment: segment.slots.num_free, default=None)
        # Its thread may still be in the code that told us of the last write's end.
        return best if best and best.ring.settle() else None

    def _grow(self, ring, count):
        """Slots that were never used, in a new segment if need be."""
        full, segments = self._disk_is_full(), self._writable(ring)
        for least in (count, 1):
            for segment in segments:
                room = self._backed(segment) if full else segment.slots.tail
                if room >= least:
                    return self._extend(segment, min(count, room))
        if full:
            raise OSError(self._full_errno, os.strerror(self._full_errno))
        try:
            segment = self._create()
        except OSError as failed:
            self._note(failed.errno)
            raise
        return self._extend(segment, min(count, segment.slots.count))

    def _extend(self, segment, count):
        count = self._reserve(segment, count)
        self.span += count
        return segment, *segment.slots.extend(count)

    # ---- the disk

    def _backed(self, segment):
        """Slots never used for which the disk's space is there."""
        if segment.sparse:
            return 0
        geometry = self.description.geometry
        until = (segment.reserved - geometry.payload_offset) // geometry.slot_stride
        return max(0, until - segment.slots.next)

    def _reserve(self, segment, count):
        """Disk space for `count` more slots, or for as many as there is space."""
        geometry, first, code = self.description.geometry, segment.slots.next, 0
        most = geometry.segment_nbytes
        if self.max_slots is not None:         # no more than may ever be used
            left = max(count, self.max_slots - self.span)
            most = min(most, geometry.payload_offset + (first + left) * geometry.slot_stride)
        while count > 0:
            need = geometry.payload_offset + (first + count) * geometry.slot_stride
            if need <= segment.reserved:
                return count
            for until in (min(segment.reserved + _RESERVE_STEP, most), need):
                if until < need:
                    continue
                code = _ring.allocate(segment.fd, segment.reserved, until - segment.reserved)
                if code in (errno.EOPNOTSUPP, errno.ENOSYS):
                    until, code = geometry.segment_nbytes, 0    # refused: ENOSPC comes at write
                    segment.sparse = True
                if code == 0:
                    segment.reserved = until
                    return count
            self._note(code)
            if count == 1:
                raise OSError(code, os.strerror(code))
            count //= 2
        return 0

    def _note(self, code):
        """The disk has no space: it is not asked again for a while, longer each time."""
        now = time.monotonic()
        if code in FULL and now >= self._full_until:
            again = now < self._full_until + self._retry_s
            self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S) if again else _RETRY_S
            self._full_until, self._full_errno = now + self._retry_s, code

    def _disk_is_full(self):
        return time.monotonic() < self._full_until

    def space_freed(self) -> None:
        """Files have gone: the disk has space again."""
        self._full_until = 0.0

    def _create(self):
        geometry, number = self.description.geometry, self._next_number
        self._next_number += 1          # also if this fails: others may have seen the file
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
                write_pages(fd, page, at)
            if self.durable:
                os.fsync(fd)
                fmt.sync_folder(self.folder)
            added = self._files.add_segment(fd, True, segment_uuid)
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        self._index.add_segment(added, geometry.slots, True)
        segment = _Segment(added, path, fd, geometry.slots)
        segment.reserved = geometry.payload_offset
        self.direct_io = direct
        self.segments.append(segment)
        self._by_number[added] = segment
        return segment

    def owns(self, number: int) -> bool:
        """True for a segment of this writer."""
        return number in self._by_number

    # ---- what becomes of slots that were handed out; `blocks` are rows of BLOCK_IO

    def _each(self, blocks):
        """(segment, rows) of each segment, own segments only."""
        for number in np.unique(blocks["segment"]).tolist():
            if number in self._by_number:
                yield self._by_number[number], np.flatnonzero(blocks["segment"] == number)

    def stored(self, blocks) -> None:
        """They have become valid."""
        with self._lock:
            for segment, rows in self._each(blocks):
                segment.slots.stored(blocks["slot"][rows])
                segment.dirty = True        # a sync may have come while it was written

    def give_back(self, blocks) -> None:
        """Slots of valid blocks are free again. Their headers stay valid on disk until the next
        write of the slot, which invalidates them first."""
        with self._lock:
            for segment, rows in self._each(blocks):
                segment.slots.free(blocks["slot"][rows], True)
                self.slots_used -= len(rows)

    def retire(self, blocks) -> None:
        """The device fails there: these slots are not used again."""
        with self._lock:
            for segment, rows in self._each(blocks):
                segment.slots.shelve(blocks["slot"][rows], RETIRED)
                self.slots_used -= len(rows)

    def failed(self, blocks, status) -> None:
        """Writes have failed. Where a header was or may have been valid, the slot's next write
        invalidates it; where the disk was full, the slot is left alone for a while."""
        suspect = blocks["flags"] & ~np.uint32(fmt.BLOCK_DURABLE) != 0
        full = ~suspect & np.isin(-np.asarray(status), FULL)
        with self._lock:
            for segment, rows in self._each(blocks):
                unbacked = rows[full[rows]]
                if len(unbacked):
                    segment.slots.shelve(blocks["slot"][unbacked], UNBACKED)
                    self._note(errno.ENOSPC)
                rows = rows[~full[rows]]
                segment.slots.free(blocks["slot"][rows], suspect[rows])
                self.slots_used -= len(rows) + len(unbacked)

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
                self._files.sync_segment(segment.number)
            if dirty:
                fmt.sync_folder(self.folder)
        except OSError:
            for segment in dirty:
                segment.dirty = True
            raise

    def path(self, number: int) -> str | None:
        """Of a segment of this writer."""
        with self._lock:
            segment = self._by_number.get(number)
            return segment and segment.path

    def lose(self, number: int) -> bool:
        """The file of this segment is gone: it is not written any more. False if that is known."""
        with self._lock:
            segment = self._by_number.pop(number, None)
            if segment is not None:
                self.segments.remove(segment)
                self.slots_used -= segment.slots.num_flying + segment.slots.num_valid
                self.span -= segment.slots.next
            return segment is not None

    def finish(self) -> None:
        """All I/O has ended: give back the space that was reserved and not used."""
        geometry = self.description.geometry
        for segment in self.segments:
            try:
                if segment.slots.num_valid == segment.slots.num_flying == 0:
                    os.unlink(segment.path)
                else:
                    os.truncate(segment.path, geometry.payload_offset
                                + segment.slots.next * geometry.slot_stride)
            except OSError:             # the directory is gone: nothing is left to give back
                pass
