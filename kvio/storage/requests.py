"""Reads and writes of a store, from their arguments to what follows their end."""
import errno
import time

import numpy as np

from kvio._ext import ring as _ring
from kvio._ext.index import set_addresses
from kvio.completion import Transfer
from kvio.errors import Closed, InvalidArgument, LayoutMismatch, TransferError, errno_name
from kvio.memory import BlockPool, has_twins
from kvio.storage import format as fmt
from kvio.storage.evict import now_s
from kvio.storage.format import BLOCK_IO, as_keys, key_list
from kvio.storage.index import keys_of
from kvio.storage.regions import Regions
from kvio.storage.writer import FULL

__all__ = ["Requests"]

_LOST = (errno.EBADMSG, errno.ENOENT, errno.EIO)    # this copy of a block is of no use any more


class Requests:
    """Between the index, the writer's slots and the rings. `lock` is the store's."""

    def __init__(self, path, layout, lock, index, writer, capacity, rings, backend):
        self._path, self._layout, self._lock = path, layout, lock
        self._index, self._writer, self._capacity = index, writer, capacity
        self._regions = Regions(rings, backend)
        self.watch = None               # told what is read, for the owners
        self._writing = []              # [(batch, blocks, which)] that the index does not know
        self.counts = {"matched_blocks": 0, "asked_blocks": 0, "hit_blocks": 0,
                       "missed_blocks": 0, "lost_blocks": 0, "stored_blocks": 0,
                       "already_stored_blocks": 0, "refused_blocks": 0}

    @property
    def staging_reason(self):
        """Why payload is copied once more, or None."""
        return self._regions.staging_reason

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
            blocks = self._index.find(keys, now_s())
        self.watch.note_reads(blocks)
        return self._submit(ring, False, blocks, pool, ids, self._read_drained, _usable_prefix,
                            _ring.Batch(), found_ns)

    def write(self, ring, keys, pool, block_ids):
        keys, ids = self._arguments(ring, keys, pool, block_ids)
        if len(set(key_list(keys))) != len(keys):
            raise InvalidArgument("a key occurs twice in one write")
        with self._lock:
            ring.store._check_open()
            ring._opened()
            self.harvest()
            blocks = self._index.find(keys, now_s())
            missing = np.flatnonzero(~self._is_stored(blocks))
            self.counts["already_stored_blocks"] += len(keys) - len(missing)
            places, failure = self._capacity.place(ring, keys, len(missing))
            self.counts["refused_blocks"] += len(missing) - len(places)
            to_do = missing[:len(places)]
            for column, name in enumerate(("segment", "slot", "flags")):
                blocks[name][to_do] = places[:, column]
            blocks["tokens"] = self._layout.block_tokens
            blocks["status"] = 0                        # stored already
            blocks["status"][to_do] = -errno.EINPROGRESS
            blocks["status"][missing[len(places):]] = -failure
            batch = _ring.Batch()
            self._writing.append((batch, blocks, to_do))
        try:
            return self._submit(ring, True, blocks, pool, ids, lambda *_: None, self._written,
                                batch)
        except BaseException:
            if not batch.submitted:             # else it is under way, whatever has happened here
                batch.abandon()
                with self._lock:
                    self.harvest()              # the slots are free again
            raise

    def _is_stored(self, blocks):
        """Which of these rows need not be written? What somebody has stored visibly may be gone
        after a power loss: that is not what a durable store promises."""
        stored = blocks["status"] != -errno.ENOENT
        return stored & (blocks["flags"] & fmt.BLOCK_DURABLE != 0) if self._writer.durable \
            else stored

    def _arguments(self, ring, keys, pool, block_ids):
        ring.store._check_open()
        if not isinstance(pool, BlockPool):         # others keep no Full Blocks to write over
            raise InvalidArgument("a store moves blocks of a BlockPool, not of a "
                                  f"{type(pool).__name__} object")
        if pool.device is not None:
            raise InvalidArgument(f"storage is read into host memory and written from it, and this "
                                  f"pool lies on {pool.device}: move its blocks to or from a host "
                                  f"pool by Nic.open(\"{pool.device}\")")
        if pool.layout != self._layout:
            raise LayoutMismatch(f"the pool holds blocks of {pool.layout}, the store those of "
                                 f"{self._layout}")
        keys, ids = as_keys(keys), pool.check_ids(block_ids)
        if len(keys) != len(ids):
            raise InvalidArgument(f"{len(keys)} keys, but {len(ids)} block ids")
        return keys, ids

    def _submit(self, ring, write, blocks, pool, ids, drained, finish, batch, found_ns=0):
        ids = ids.copy()            # the caller's may change: what is unpinned is what was pinned
        set_addresses(blocks, pool.region.addr, pool.block_stride, ids)
        pinned = []

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
            if isinstance(failed, (Closed, InvalidArgument)) or \
                    not isinstance(failed, (OSError, ValueError)):
                raise
            raise InvalidArgument(f"the ring refused the batch: {failed}") from failed
        with self._lock:
            ring._transfers.add(transfer)
        self._regions.announce(ring)
        return transfer

    def stats(self):
        """For `BlockStore.stats`. Rates are None until something was asked for."""
        counts = self.counts
        read = counts["hit_blocks"] + counts["missed_blocks"] + counts["lost_blocks"]
        return {**counts,
                "match_rate": counts["matched_blocks"] / counts["asked_blocks"]
                if counts["asked_blocks"] else None,
                "hit_rate": counts["hit_blocks"] / read if read else None}

    # ---- what follows a transfer ----

    def harvest(self):
        """Blocks whose writes have completed enter the index, whoever waits for them or not.
        The caller holds the lock."""
        # The collector may run us inside of us, and a signal may end us anywhere.
        writing, self._writing = self._writing, []
        try:
            while writing:
                entry = writing.pop(0)
                if entry[0].poll():
                    self._adopt_batch(*entry)
                else:
                    self._writing.append(entry)
        finally:
            self._writing += writing

    def _adopt_batch(self, batch, blocks, to_do):
        if not batch.submitted:                 # no ring has had it
            self._writer.failed(blocks[to_do], np.zeros(len(to_do)))
            return
        blocks = np.frombuffer(batch.blocks, BLOCK_IO)[to_do]
        status = np.asarray(batch.status)[to_do]
        self._writer.failed(blocks[status != 0], status[status != 0])
        self._adopt(blocks[status == 0])

    def _adopt(self, blocks):
        self._writer.stored(blocks)
        self.counts["stored_blocks"] += len(blocks)
        # We stored the same key twice meanwhile: one is enough. A copy of another writer is no
        # reason to give ours up, since it may be doing just that on account of ours.
        found = self._index.find(keys_of(blocks))
        twins = self._is_own(found)
        self._index.insert(blocks[~twins])
        self._capacity.stored(blocks[found["status"] == -errno.ENOENT])
        self._writer.give_back(blocks[twins])

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
        for i in np.flatnonzero(lost):
            if not self._remove(blocks[i]):
                self.counts["missed_blocks"] += 1       # evicted while it was being read
                continue
            self.counts["lost_blocks"] += 1
            if status[i] == -errno.EIO:
                self._writer.retire(blocks[i:i + 1])
            else:
                self._writer.give_back(blocks[i:i + 1])

    def _written(self, status):
        bad = np.flatnonzero(status)
        if len(bad) == 0:
            return
        first = int(bad[0])
        code = -int(status[first])
        remedy = ("the disk or the store's capacity_bytes is full: free space, raise it, or go on "
                  "without storing") if code in FULL else "see transfer.status"
        raise TransferError(code, f"write to {self._path}: {len(bad)} of {len(status)} blocks were "
                            f"not stored, first block {first}: {errno_name(code)}; {remedy}. "
                            "All other blocks are intact", status)

    def forget(self, keys):
        """Drop those of these blocks that this store has written."""
        with self._lock:
            self.harvest()
            places = self._index.find(as_keys(keys))
            for place in places[places["status"] != -errno.ENOENT]:
                if self._writer.owns(int(place["segment"])) and self._remove(place):
                    self._writer.give_back(place.reshape(1))

    def _is_own(self, places):
        owns = self._writer.owns
        return np.array([status != -errno.ENOENT and owns(number) for status, number in
                         zip(places["status"].tolist(), places["segment"].tolist())], bool)

    def _remove(self, place):
        return self._index.remove(*(int(place[name]) for name in ("segment", "slot", "generation")))


def _usable_prefix(status) -> int:
    return int(np.argmax(status != 0)) if status.any() else len(status)
