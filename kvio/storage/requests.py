"""Reads and writes of a store, from their arguments to what follows their end."""
import errno
import time

import numpy as np

from kvio._ext import ring as _ring
from kvio.completion import Transfer
from kvio.errors import Closed, InvalidArgument, LayoutMismatch, TransferError, errno_name
from kvio.memory import BlockPool, has_twins
from kvio.storage import format as fmt
from kvio.storage.format import BLOCK_IO, as_keys, key_list
from kvio.storage.regions import Regions

__all__ = ["Requests"]

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_LOST = (errno.EBADMSG, errno.ENOENT, errno.EIO)    # this copy of a block is of no use any more


class Requests:
    """Between the index, the writer's slots and the rings. `lock` is the store's."""

    def __init__(self, path, layout, lock, index, writer, rings):
        self._path, self._layout, self._lock = path, layout, lock
        self._index, self._writer, self._regions = index, writer, Regions(rings)
        self._writing = []              # [(batch, slots)] whose blocks the index does not know
        self.counts = {"matched_blocks": 0, "asked_blocks": 0, "hit_blocks": 0,
                       "missed_blocks": 0, "lost_blocks": 0, "stored_blocks": 0,
                       "already_stored_blocks": 0, "refused_blocks": 0}

    def read(self, ring, keys, pool, block_ids):
        keys, ids = self._arguments(ring, keys, pool, block_ids)
        if not pool.region.writable:
            raise InvalidArgument("the pool's memory is read-only: nothing can be read into it")
        if has_twins(ids):
            raise InvalidArgument("a block id occurs twice: two blocks cannot be read into one")
        with self._lock:
            ring.store._check_open()
            self.harvest()
            found_ns = time.monotonic_ns()
            rows = self._index.find(keys)
            blocks = self._index.places(rows)
        blocks["status"] = np.where(rows < 0, -errno.ENOENT, -errno.EINPROGRESS)
        blocks["flags"] &= fmt.BLOCK_DURABLE
        return self._submit(ring, False, blocks, pool, ids, self._read_drained, _usable_prefix,
                            found_ns)

    def write(self, ring, keys, pool, block_ids):
        keys, ids = self._arguments(ring, keys, pool, block_ids)
        if len(set(key_list(keys))) != len(keys):
            raise InvalidArgument("a key occurs twice in one write")
        blocks = np.zeros(len(keys), BLOCK_IO)
        blocks["key"] = np.ascontiguousarray(keys["key"]).view("V16").ravel()
        blocks["parent"] = np.ascontiguousarray(keys["parent"]).view("V16").ravel()
        blocks["tokens"] = self._layout.block_tokens
        with self._lock:
            ring.store._check_open()
            ring._opened()
            self.harvest()
            missing = np.flatnonzero(self._index.find(keys) < 0)
            self.counts["already_stored_blocks"] += len(keys) - len(missing)
            places, failure = self._writer.place(ring, len(missing))
            self.counts["refused_blocks"] += len(missing) - len(places)
        to_do = missing[:len(places)]
        for column, name in enumerate(("segment", "slot", "flags")):
            blocks[name][to_do] = places[:, column]
        blocks["status"][to_do] = -errno.EINPROGRESS
        blocks["status"][missing[len(places):]] = -failure
        try:
            return self._submit(ring, True, blocks, pool, ids, lambda *_: None, self._written)
        except (Closed, InvalidArgument):       # refused; after anything else it may be under way
            for number, slot, flags in places:
                self._writer.give_back(int(number), int(slot), was_valid=False,
                                       suspect=bool(flags))
            raise

    def _arguments(self, ring, keys, pool, block_ids):
        ring.store._check_open()
        if not isinstance(pool, BlockPool):         # others keep no Full Blocks to write over
            raise InvalidArgument("a store moves blocks of a BlockPool, not of a "
                                  f"{type(pool).__name__} object")
        if pool.layout != self._layout:
            raise LayoutMismatch(f"the pool holds blocks of {pool.layout}, the store those of "
                                 f"{self._layout}")
        keys, ids = as_keys(keys), pool.check_ids(block_ids)
        if len(keys) != len(ids):
            raise InvalidArgument(f"{len(keys)} keys, but {len(ids)} block ids")
        return keys, ids

    def _submit(self, ring, write, blocks, pool, ids, drained, finish, found_ns=0):
        blocks["addr"] = np.uint64(pool.region.addr) + ids.astype(np.uint64) * np.uint64(
            pool.block_stride)
        batch, pinned = _ring.Batch(), []

        def on_drain():
            if pinned:
                pool.unpin(pinned.pop())
            if batch.submitted:
                with self._lock:
                    self.harvest()
                    drained(batch, blocks)

        # Held and pinned before the device has it, whatever interrupts us.
        what = f"{'write' if write else 'read'} of {len(ids)} blocks, ring {ring.name}"
        transfer = Transfer(batch, what, keep=(pool, ring), on_drain=on_drain,
                            finish=finish)
        try:
            pool.pin(ids)
            pinned.append(ids)
            with self._lock:
                region = self._regions.number(pool)
            ring._opened().submit(write, blocks, region, pool.region.addr,
                                  pool.region.nbytes, batch, found_ns)
        except BaseException as failed:
            if batch.submitted:                     # interrupted, but under way
                raise
            transfer.abandon()
            ring._opened()                          # Closed meanwhile?
            if isinstance(failed, InvalidArgument) or \
                    not isinstance(failed, (OSError, ValueError)):
                raise
            raise InvalidArgument(f"the ring refused the batch: {failed}") from failed
        with self._lock:
            ring._transfers.add(transfer)
            if write:
                self._writing.append((batch, np.flatnonzero(
                    blocks["status"] == -errno.EINPROGRESS)))
        self._regions.announce(ring)
        return transfer

    # ---- what follows a transfer ----

    def harvest(self):
        """Blocks whose writes have completed enter the index, whoever waits for them or not.
        The caller holds the lock."""
        # The collector may run us inside of us, and a signal may end us anywhere.
        writing, self._writing = self._writing, []
        try:
            while writing:
                batch, to_do = writing.pop(0)
                if batch.poll():
                    self._adopt_batch(batch, to_do)
                else:
                    self._writing.append((batch, to_do))
        finally:
            self._writing += writing

    def _adopt_batch(self, batch, to_do):
        blocks = np.frombuffer(batch.blocks, BLOCK_IO)[to_do]
        stored = np.asarray(batch.status)[to_do] == 0
        self._adopt(blocks[stored])
        for block in blocks[~stored]:
            suspect = bool(block["flags"] & ~np.uint32(fmt.BLOCK_DURABLE))
            self._give_back(block, was_valid=False, suspect=suspect)

    def _adopt(self, blocks):
        for number in np.unique(blocks["segment"]):
            self._writer.stored(int(number), int(np.count_nonzero(blocks["segment"] == number)))
        self.counts["stored_blocks"] += len(blocks)
        twins = self._index.find(blocks) >= 0       # somebody else stored the same key meanwhile
        self._index.insert(blocks[~twins])
        for block in blocks[twins]:
            self._give_back(block, was_valid=True, suspect=False)

    def _give_back(self, block, *, was_valid, suspect):
        self._writer.give_back(int(block["segment"]), int(block["slot"]), was_valid=was_valid,
                               suspect=suspect)

    def _read_drained(self, batch, blocks):
        """Copies that turned out to be bad leave the index, so that a write stores them anew.
        The caller holds the lock."""
        status = np.asarray(batch.status)
        if not status.any():
            self.counts["hit_blocks"] += len(status)
            return
        asked = blocks["status"] == -errno.EINPROGRESS
        lost = asked & np.isin(-status, _LOST)
        self.counts["hit_blocks"] += int(np.count_nonzero(status == 0))
        self.counts["missed_blocks"] += int(np.count_nonzero(~asked))
        self.counts["lost_blocks"] += int(np.count_nonzero(lost))
        for i in np.flatnonzero(lost):
            known = self._index.remove(blocks[i])
            # A slot whose device fails (EIO) is not used again.
            if known and self._writer.owns(int(blocks[i]["segment"])) and \
                    status[i] != -errno.EIO:
                self._give_back(blocks[i], was_valid=True, suspect=True)

    def _written(self, status):
        bad = np.flatnonzero(status)
        if len(bad) == 0:
            return
        first = int(bad[0])
        code = -int(status[first])
        remedy = ("the disk or the store's capacity_bytes is full: free space, raise it, or go on "
                  "without storing") if code in _FULL else "see transfer.status"
        raise TransferError(code, f"write to {self._path}: {len(bad)} of {len(status)} blocks were "
                            f"not stored, first block {first}: {errno_name(code)}; {remedy}. "
                            "All other blocks are intact", status)

    def forget(self, keys):
        """Drop blocks that this store has written; their slots are used again, invalidated
        first. What an evictor will do."""
        with self._lock:
            self.harvest()
            rows = self._index.find(as_keys(keys))
            for place in self._index.places(rows[rows >= 0]):
                if self._writer.owns(int(place["segment"])) and self._index.remove(place):
                    self._give_back(place, was_valid=True, suspect=False)


def _usable_prefix(status) -> int:
    return int(np.argmax(status != 0)) if status.any() else len(status)
