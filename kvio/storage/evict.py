"""Capacity: what has to go so that new blocks can be written, and what may not."""
import errno
import time

import numpy as np

from kvio.layout import KEY_DTYPE
from kvio.storage.format import key_list
from kvio.storage.writer import FULL

__all__ = ["Capacity", "now_s"]


def now_s() -> int:
    """The index's clock."""
    return int(time.monotonic()) or 1


class Capacity:
    """Finds slots for new blocks, makes room where there is none. The caller holds the store's
    lock.

    `capacity_bytes` counts payload slots: those that hold a block of this writer or are being
    written, and those of valid blocks that dead writers left. Not counted: headers (128 bytes a
    slot and 8 KiB a segment), what is reserved ahead of use (at most 64 MiB a segment that is
    being filled, and no more than the capacity) and blocks of other writers that live.

    What goes, in this order: segments of dead writers, whole, the least recently used first; own
    orphans; own leaves, the least recently used first; inner blocks if all leaves are pinned.
    Never: pinned blocks, blocks that are being written, and the stored blocks of the write that
    needs the room, with their parents (older ancestors are as warm as their last use). A block
    that is being read may go: its slot's next write invalidates the header and changes the
    payload, so that the read ends with the right bytes or with a miss.
    """

    def __init__(self, index, writer, watch, capacity_bytes: int | None):
        """watch: `gone` are numbers of segments whose writers have closed or died,
        `reclaim(number)` unlinks one and says whether it did; None if nobody is watched."""
        self._index, self._writer, self._watch = index, writer, watch
        self._stride = writer.description.geometry.slot_stride
        self.max_blocks = None if capacity_bytes is None else capacity_bytes // self._stride
        writer.max_slots = self.max_blocks
        self._capacity_bytes = capacity_bytes
        self._dead = ((), 0)                    # segments of dead writers, valid blocks in them
        self._pins: dict[bytes, int] = {}
        self._counts = {"evicted_blocks": 0, "evicted_orphans": 0, "reclaimed_segments": 0,
                        "reclaimed_blocks": 0}

    # ---- room

    def place(self, ring, keys, count: int) -> tuple[np.ndarray, int]:
        """`Writer.place` for those `count` of `keys` that are not stored: makes room for as many
        as it can. The errno says why there are fewer."""
        failure = errno.ENOSPC
        if count == 0:
            return np.empty((0, 3), np.int64), 0
        if self.max_blocks is not None:
            self._make_room(self.used_blocks() + count - self.max_blocks, keys)
        self._make_runs(ring, count, keys)
        fits = self._left(count)
        places, refused = self._writer.place(ring, fits)
        if len(places) < fits and refused in FULL:      # the disk: make room once, then give up
            self._make_room(fits - len(places), keys)
            self._make_runs(ring, fits - len(places), keys)
            more, refused = self._writer.place(ring, fits - len(places))
            places = np.concatenate([places, more])
        if len(places) < fits:
            failure = refused
        return places, failure if len(places) < count else 0

    def _dead_segments(self):
        return self._watch.gone if self._watch else ()

    def _left(self, count):
        """How many of `count` blocks the budget has room for."""
        if self.max_blocks is None:
            return count
        return max(0, min(count, self.max_blocks - self.used_blocks()))

    def used_blocks(self) -> int:
        """What counts against the capacity."""
        dead = self._dead_segments()
        if dead != self._dead[0]:
            self._dead = dead, sum(self._index.segment_use(number)[0] for number in dead)
        return self._writer.slots_used + self._dead[1]

    def _make_room(self, count, keys):
        """For `count` more blocks of this write, whose stored keys stay."""
        if count <= 0:
            return
        count = self._reclaim(count, keys)
        if count > 0:
            self._evict(count, keys)

    def _make_runs(self, ring, count, keys):
        """Evict until `count` adjacent slots are free, or an eighth of all is. Were every last
        free slot used before more is evicted, nothing but single slots would be left soon."""
        span = self._writer.span
        most = min(span // 4, max(span // 8, 2 * count))        # a small store: a quarter
        while span - self._writer.slots_used < most and not self._writer.fits(ring, count):
            if not self._evict(count, keys):
                break

    def _reclaim(self, count, keys):
        """Unlink segments of dead writers; returns how many blocks still need room."""
        dead = self._dead_segments()
        if not dead:
            return count
        held = self._index.find(_with_parents(keys, self._pins))
        held = set(held["segment"][held["status"] != -errno.ENOENT].tolist())
        uses = {number: self._index.segment_use(number) for number in dead if number not in held}
        # Those without any valid block cost nothing; then the least recently used.
        for number in sorted(uses, key=lambda number: (uses[number][0] > 0, uses[number][1])):
            if count <= 0:
                break
            if self._reclaimed(number):
                count -= uses[number][0]
                self._counts["reclaimed_segments"] += 1
                self._counts["reclaimed_blocks"] += uses[number][0]
        self._dead = ((), 0)
        self._writer.space_freed()
        return count

    def _reclaimed(self, number):
        try:
            return self._watch.reclaim(number)
        except OSError:             # a directory that cannot be changed, say: others may still fit
            return False

    def _evict(self, count, keys):
        """At least `count` if so many may go, in batches that are worth the call; how many."""
        most = self.max_blocks or self._writer.slots_used
        count = max(count, most // 4096, min(64, most // 16))
        stay = _with_parents(keys)
        self._index.pin(stay, 1)
        try:
            gone = self._index.evict(count)
        finally:
            self._index.pin(stay, -1)
        self._writer.give_back(gone)
        self._counts["evicted_blocks"] += len(gone)
        self._counts["evicted_orphans"] += int(gone["status"].sum())
        return len(gone)

    # ---- pins

    def pin(self, keys: np.ndarray) -> int:
        """Pin the stored prefix; returns its length."""
        count = self._index.match(keys)
        self._index.pin(keys[:count], 1)
        for key in key_list(keys[:count]):
            self._pins[key] = self._pins.get(key, 0) + 1
        return count

    def unpin(self, keys: np.ndarray) -> None:
        """Take one pin from each key that has any."""
        pinned = np.array([key in self._pins for key in key_list(keys)], bool)
        self._index.pin(keys[pinned], -1)
        for key in key_list(keys[pinned]):
            self._pins[key] -= 1
            if self._pins[key] == 0:
                del self._pins[key]

    def stored(self, blocks) -> None:
        """Blocks have entered the index: what is pinned and was lost is pinned again."""
        if self._pins:
            for block in blocks:
                count = self._pins.get(bytes(block["key"]), 0)
                if count:
                    key = np.zeros(1, KEY_DTYPE)
                    key["key"] = np.frombuffer(bytes(block["key"]), np.uint8)
                    self._index.pin(key, count)

    def stats(self) -> dict:
        """For `BlockStore.stats`."""
        return {**self._counts, "pinned_blocks": self._index.stats()["pinned"],
                "capacity_bytes": self._capacity_bytes,
                "used_bytes": self.used_blocks() * self._stride}


def _with_parents(keys, more=()):
    """Keys, their parents, and `more`, as an array of keys."""
    out = np.zeros(2 * len(keys) + len(more), KEY_DTYPE)
    out["key"][:len(keys)] = keys["key"]
    out["key"][len(keys):2 * len(keys)] = keys["parent"]
    if more:
        out["key"][2 * len(keys):] = np.frombuffer(b"".join(more), np.uint8).reshape(-1, 16)
    return out
