"""`BlockStore`: Full Blocks on disk, found by key, moved by rings that belong to C threads.

    with BlockStore.open("/mnt/kv", layout) as store:
        hits = store.match(keys)
        usable = store.read(keys[:hits], pool, ids).wait()
        store.write(keys[hits:], pool, more_ids).wait()

A failed, torn or partial block is a miss or a status, never data. The bytes on disk and their
rules are docs/format.md.
"""
import atexit
import contextlib
import errno
import itertools
import os
import threading
import warnings
import weakref

import numpy as np

from kvio._ext import ring as _ring
from kvio.completion import Transfer
from kvio.errors import (BackendUnavailable, Busy, Closed, InvalidArgument, LayoutMismatch,
                         StoreError, TransferError, checked_int, errno_name)
from kvio.layout import BlockLayout
from kvio.memory import BlockPool
from kvio.storage import format as fmt
from kvio.storage.format import BLOCK_IO, as_keys, key_list
from kvio.storage.index import Index
from kvio.storage.options import INT64_MAX, check_options
from kvio.storage.ring import Ring, choose_backend
from kvio.storage.segment import Scan, Writer, scan_folder

__all__ = ["BlockStore", "Ring"]

SEGMENT_BYTES = 1 << 30
QUEUE_DEPTH = 32
IO_BYTES = 1 << 20          # larger blocks are split, neighbours merge up to this
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_LOST = (errno.EBADMSG, errno.ENOENT, errno.EIO)    # this copy of a block is of no use any more
_region_numbers = itertools.count(1)
_open_stores: "weakref.WeakSet[BlockStore]" = weakref.WeakSet()


class BlockStore:
    """A directory of Full Blocks; see the module. Open it with `BlockStore.open`. Thread-safe."""

    def __init__(self, path, layout, description, *, backend, backend_reason, verify, durability,
                 capacity_bytes, queue_depth):
        """Use `BlockStore.open`."""
        geometry = description.geometry
        self.path, self.layout, self.description = path, layout, description
        self.backend, self.backend_reason = backend, backend_reason
        self.verify, self.durability, self.queue_depth = verify, durability, queue_depth
        self._pid, self._lock = os.getpid(), threading.RLock()
        self._files = _ring.Store(
            geometry.block_nbytes, geometry.slot_stride, geometry.payload_offset, geometry.slots,
            geometry.header_pages, verify == "always", durability == "durable")
        self._index, self.scan = Index(), Scan()
        self._writer = Writer(path, description, self._files, durable=durability == "durable",
                              capacity_bytes=capacity_bytes)
        self._rings, self._default = set(), None      # rings that are open
        self._ring_numbers = itertools.count()
        self._regions = {}              # id(pool) -> (weak reference, region number)
        self._writing = []              # [(batch, slots)] whose blocks the index does not know
        self._announced = False
        self._closed = self._ended = False      # refuses calls; has given everything back
        self._counts = {"matched_blocks": 0, "asked_blocks": 0, "hit_blocks": 0,
                        "missed_blocks": 0, "lost_blocks": 0, "stored_blocks": 0,
                        "already_stored_blocks": 0, "refused_blocks": 0}

    @classmethod
    def open(cls, path, layout: BlockLayout, *, backend: str = "auto", verify: str = "always",
             durability: str = "visible", capacity_bytes: int | None = None,
             segment_bytes: int = SEGMENT_BYTES, queue_depth: int = QUEUE_DEPTH,
             create: bool = True) -> "BlockStore":
        """Open the store in directory `path`, making it (not its parents) if `create`.

        backend: "uring", "threads", or "auto" (the first that this machine allows; a fall-back
            warns and is named in `backend_reason`).
        verify: "always" checks the CRC of every payload that is read. "never" reads the header
            again instead, and is allowed in a durable store only; blocks that an earlier opener
            wrote without durability are still checked.
        durability: "visible" survives the death of the process once `write` has completed,
            "durable" a power loss as well. `sync` makes visible blocks durable.
        capacity_bytes: what this store object may write before blocks fail with ENOSPC.
        segment_bytes: size of a segment file; fixed when the store is created.

        LayoutMismatch, FormatError, StoreError, BackendUnavailable or InvalidArgument.
        """
        check_options(layout, backend, verify, durability, capacity_bytes, segment_bytes,
                       queue_depth)
        try:
            path = os.path.abspath(os.fsdecode(path))
        except TypeError:
            raise InvalidArgument(f"path must be a str or os.PathLike, not {path!r}") from None
        backend, reason = choose_backend(backend)
        description = _describe(path, layout, segment_bytes, create)
        store = cls(path, layout, description, backend=backend, backend_reason=reason,
                    verify=verify, durability=durability, capacity_bytes=capacity_bytes,
                    queue_depth=queue_depth)
        store._load()
        _open_stores.add(store)
        return store

    def _load(self):
        try:
            for blocks in scan_folder(self.path, self.description, self._files, self.scan):
                self._index.insert(blocks)
        except OSError as failed:
            self._files.stop()
            raise StoreError(failed.errno, f"cannot read the segments of {self.path}: raise the "
                             "limit of open files (ulimit -n)") from failed

    def __repr__(self):
        state = "closed" if self._closed else f"{len(self._index)} blocks, {self.backend}"
        return f"<BlockStore {self.path}: {state}>"

    def __len__(self):
        with self._lock:
            self._harvest()
            return len(self._index)

    # ---- finding, reading, writing ----

    def match(self, keys) -> int:
        """Length of the stored prefix of a chain, in blocks. Advisory: `read` has the last word."""
        keys = as_keys(keys)
        with self._lock:
            self._check_open()
            self._harvest()
            count = self._index.match(keys)
            self._counts["asked_blocks"] += len(keys)
            self._counts["matched_blocks"] += count
        return count

    def read(self, keys, pool, block_ids) -> Transfer:
        """Read blocks into pool blocks; `wait` gives the length of the usable prefix.

        Status per block: 0, ENOENT (a miss), EBADMSG (a failed check), EIO, ECANCELED. What a
        failed block's memory holds is undefined.
        """
        return self._read(self._default_ring(), keys, pool, block_ids)

    def write(self, keys, pool, block_ids) -> Transfer:
        """Store blocks; they are visible to `match` and `read` once the transfer has completed.

        Blocks that are stored already succeed at once. ENOSPC fails single blocks; `wait` then
        raises TransferError. A block is written even if its parent is not stored.
        """
        return self._write(self._default_ring(), keys, pool, block_ids)

    def sync(self) -> None:
        """Make every write that has completed survive a power loss. Blocks; StoreError."""
        with self._lock:
            self._check_open()
            self._harvest()                 # what has completed is dirty, whoever has seen it
        try:
            self._writer.sync()
        except OSError as failed:
            raise StoreError(failed.errno, f"cannot sync {self.path}: what was written since the "
                             "last sync may be lost in a power cut") from failed

    def open_ring(self, *, read_bytes_per_s: int = 0, write_bytes_per_s: int = 0,
                  name: str | None = None, window_ns: int = 1_000_000_000) -> Ring:
        """A further ring, each direction paced to an emulated bandwidth (0: unpaced). It lives
        until it or the store is closed."""
        checked_int("read_bytes_per_s", read_bytes_per_s, 0, INT64_MAX)
        checked_int("write_bytes_per_s", write_bytes_per_s, 0, INT64_MAX)
        checked_int("window_ns", window_ns, 1, INT64_MAX)
        with self._lock:
            self._check_open()
            try:
                ring = _ring.Ring(self._files, self.backend, self.queue_depth, IO_BYTES,
                                  int(read_bytes_per_s), int(write_bytes_per_s), int(window_ns))
            except OSError as failed:
                raise BackendUnavailable(failed.errno, f"cannot open another ring ({self.backend})"
                                         ": close some, or raise ulimit -n and -l") from failed
            ring = Ring(self, name or f"ring{next(self._ring_numbers)}", ring)
            self._rings.add(ring)
        return ring

    def _default_ring(self):
        if self._default is None:
            with self._lock:
                if self._default is None:
                    self._default = self.open_ring(name="default")
        return self._default

    def _read(self, ring, keys, pool, block_ids):
        keys, ids = self._arguments(keys, pool, block_ids)
        if not pool.region.writable:
            raise InvalidArgument("the pool's memory is read-only: nothing can be read into it")
        if len(np.unique(ids)) != len(ids):
            raise InvalidArgument("a block id occurs twice: two blocks cannot be read into one")
        with self._lock:
            self._check_open()
            self._harvest()
            rows = self._index.find(keys)
            blocks = self._index.places(rows)
        blocks["status"] = np.where(rows < 0, -errno.ENOENT, -errno.EINPROGRESS)
        blocks["flags"] &= fmt.BLOCK_DURABLE
        return self._submit(ring, False, blocks, pool, ids, self._read_drained, _usable_prefix)

    def _write(self, ring, keys, pool, block_ids):
        keys, ids = self._arguments(keys, pool, block_ids)
        if len(set(key_list(keys))) != len(keys):
            raise InvalidArgument("a key occurs twice in one write")
        blocks = np.zeros(len(keys), BLOCK_IO)
        blocks["key"] = np.ascontiguousarray(keys["key"]).view("V16").ravel()
        blocks["parent"] = np.ascontiguousarray(keys["parent"]).view("V16").ravel()
        blocks["tokens"] = self.layout.block_tokens
        with self._lock:
            self._check_open()
            ring._opened()
            self._harvest()
            missing = np.flatnonzero(self._index.find(keys) < 0)
            self._counts["already_stored_blocks"] += len(keys) - len(missing)
            places, failure = self._writer.place(ring, len(missing))
            self._counts["refused_blocks"] += len(missing) - len(places)
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

    def _arguments(self, keys, pool, block_ids):
        self._check_open()
        if not isinstance(pool, BlockPool):         # others keep no Full Blocks to write over
            raise InvalidArgument("a store moves blocks of a BlockPool, not of a "
                                  f"{type(pool).__name__} object")
        if pool.layout != self.layout:
            raise LayoutMismatch(f"the pool holds blocks of {pool.layout}, the store those of "
                                 f"{self.layout}")
        keys, ids = as_keys(keys), pool.check_ids(block_ids)
        if len(keys) != len(ids):
            raise InvalidArgument(f"{len(keys)} keys, but {len(ids)} block ids")
        return keys, ids

    def _submit(self, ring, write, blocks, pool, ids, drained, finish):
        blocks["addr"] = np.uint64(pool.region.addr) + ids.astype(np.uint64) * np.uint64(
            pool.block_stride)
        batch, pinned = _ring.Batch(), []

        def on_drain():
            if pinned:
                pool.unpin(pinned.pop())
            if batch.submitted:
                with self._lock:
                    self._harvest()
                    drained(batch, blocks)

        # Held and pinned before the device has it, whatever interrupts us.
        what = f"{'write' if write else 'read'} of {len(ids)} blocks, ring {ring.name}"
        transfer = Transfer(batch, what, keep=(pool, ring, self), on_drain=on_drain,
                            finish=finish)
        try:
            pool.pin(ids)
            pinned.append(ids)
            ring._opened().submit(write, blocks, self._region(pool), pool.region.addr,
                                  pool.region.nbytes, batch)
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
        self._announce(ring)
        return transfer

    # ---- what follows a transfer ----

    def _harvest(self):
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
        self._counts["stored_blocks"] += len(blocks)
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
            self._counts["hit_blocks"] += len(status)
            return
        asked = blocks["status"] == -errno.EINPROGRESS
        lost = asked & np.isin(-status, _LOST)
        self._counts["hit_blocks"] += int(np.count_nonzero(status == 0))
        self._counts["missed_blocks"] += int(np.count_nonzero(~asked))
        self._counts["lost_blocks"] += int(np.count_nonzero(lost))
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
        raise TransferError(code, f"write to {self.path}: {len(bad)} of {len(status)} blocks were "
                            f"not stored, first block {first}: {errno_name(code)}; {remedy}. "
                            "All other blocks are intact", status)

    def _forget(self, keys):
        """Drop blocks that this store has written; their slots are used again, invalidated
        first. What an evictor will do."""
        with self._lock:
            self._harvest()
            rows = self._index.find(as_keys(keys))
            for place in self._index.places(rows[rows >= 0]):
                if self._writer.owns(int(place["segment"])) and self._index.remove(place):
                    self._give_back(place, was_valid=True, suspect=False)

    # ---- memory ----

    def _region(self, pool):
        """A number for the pool's memory that no other memory ever gets: a registration must not
        outlive its pages."""
        with self._lock:
            known = self._regions.get(id(pool))
            if known is not None and known[0]() is pool:
                return known[1]
            return self._new_region(pool)

    def _new_region(self, pool):
        number, store = next(_region_numbers), weakref.ref(self)

        def gone(_, key=id(pool)):
            owner = store()
            if owner is not None:
                if owner._regions.get(key, (None, 0))[1] == number:
                    del owner._regions[key]
                for ring in list(owner._rings):
                    ring._ring.forget(number)

        self._regions[id(pool)] = weakref.ref(pool, gone), number
        return number

    def _announce(self, ring):
        code = 0 if self._announced else ring._ring.register_errno
        if code:
            self._announced = True
            warnings.warn(f"pool memory could not be registered with io_uring "
                          f"({errno_name(code)}): plain buffers serve, at more CPU per byte; "
                          "raise the locked-memory limit (ulimit -l)", RuntimeWarning,
                          stacklevel=5)

    # ---- the rest ----

    def stats(self) -> dict:
        """Figures of this store object: its blocks, what opening found, fall-backs, all rings."""
        with self._lock:
            self._check_open()
            self._harvest()
            rings = {ring.name: ring.stats() for ring in self._rings if not ring._closed}
            direct = [d for d in (self.scan.direct_io, self._writer.direct_io) if d is not None]
            codes = {ring["register_errno"] for ring in rings.values()} - {0}
            return {
                "backend": self.backend, "backend_reason": self.backend_reason,
                "direct_io": all(direct) if direct else None,
                "plain_buffers_reason": ", ".join(errno_name(code) for code in codes) or None,
                "blocks": len(self._index), "segments": self.scan.segments
                + len(self._writer.segments), "own_segments": len(self._writer.segments),
                "own_bytes": self._writer.slots_used * self.layout.stride,
                "segments_ignored": dict(self.scan.ignored),
                "headers_damaged": self.scan.headers_damaged,
                "headers_beyond_end": self.scan.headers_beyond_end,
                "page1_writes": self._files.page1_writes, **self._counts, "rings": rings}

    def close(self, *, drain: bool = False, cancel: bool = False) -> None:
        """Close the store. Busy while transfers are in flight (nothing is closed then), unless
        `drain` waits for them or `cancel` gives up those that have not started. Leaving a `with`
        block drains; leaving it by an exception cancels."""
        if self._pid != os.getpid():
            self._closed = True
            return
        with self._lock:
            if self._ended:
                return
            busy = sum(ring._ring.in_flight for ring in self._rings)
            if busy and not self._closed and not (drain or cancel):
                raise Busy(f"the store at {self.path} has batches in flight ({busy}): wait for "
                           "them, or close(drain=True) or close(cancel=True)")
            self._closed = True
            rings = list(self._rings)
        for ring in rings:
            ring.close(drain=True, cancel=cancel)
        with self._lock:
            if not self._ended:
                self._harvest()
                self._files.stop()
                self._writer.finish()
                self._ended = True
        _open_stores.discard(self)

    def _check_open(self):
        if self._pid != os.getpid():
            raise Closed("this store was opened before a fork: a forked child is not a writer and "
                         "has no rings; open the store again in the child")
        if self._closed:
            raise Closed(f"the store at {self.path} is closed")

    def __enter__(self):
        return self

    def __exit__(self, kind, *exc):
        self.close(drain=kind is None, cancel=kind is not None)

    def __del__(self):
        if not getattr(self, "_ended", True) and self._pid == os.getpid():
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self)
            self.close(cancel=True)


def _usable_prefix(status) -> int:
    bad = np.flatnonzero(status)
    return int(bad[0]) if len(bad) else len(status)


def _describe(path, layout, segment_bytes, create):
    """kvio.json of the store at `path`, made if there is none."""
    geometry = fmt.Geometry.choose(layout, segment_bytes)
    try:
        if create and not os.path.isdir(path):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)                      # not its parents: a mount may be missing
        if not os.path.isdir(path):
            raise FileNotFoundError(errno.ENOENT, "no such directory")      # create=False
    except (OSError, ValueError) as failed:             # ValueError: a zero byte in it
        raise StoreError(getattr(failed, "errno", errno.EINVAL),
                         f"cannot open a store at {path!r}: give a directory" +
                         ("" if create else " that exists, or create=True")) from failed
    description = fmt.read_description(path)
    if description is None:
        if not create:
            raise StoreError(errno.ENOENT, f"there is no store at {path} (no {fmt.JSON_NAME}); "
                             "create=True makes one")
        description = fmt.create_description(path, layout, geometry)
    fmt.check_layout(description, layout, path)
    return description


@atexit.register
def _close_all():
    """Rings must not touch memory that the interpreter is about to give back."""
    for store in list(_open_stores):
        if store._pid == os.getpid():
            store.close(cancel=True)
