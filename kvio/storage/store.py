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
from kvio.errors import (BackendUnavailable, Busy, Closed, InvalidArgument, StoreError, checked_int,
                         errno_name)
from kvio.layout import BlockLayout
from kvio.storage.describe import describe
from kvio.storage.device import choose_direct_io, choose_queue_depth
from kvio.storage.evict import Capacity
from kvio.storage.format import JSON_NAME, as_keys
from kvio.storage.index import Index
from kvio.storage.options import INT64_MAX, check_options
from kvio.storage.requests import Requests
from kvio.storage.ring import Ring, choose_backend
from kvio.storage.scan import Scan
from kvio.storage.watch import Watch
from kvio.storage.writer import Writer

__all__ = ["BlockStore", "Ring"]

SEGMENT_BYTES = 1 << 30
DEAD_AFTER_S = 30.0
POLL_S = 0.03
IO_BYTES = 1 << 20          # larger blocks are split, neighbours merge up to this
_open_stores: "weakref.WeakSet[BlockStore]" = weakref.WeakSet()


class BlockStore:
    """A directory of Full Blocks; see the module. Open it with `BlockStore.open`. Thread-safe.

    `keys` are rows of `block_keys` (`[n]` of key and parent), or bare keys (uint8 `[n, 16]` or a
    sequence of 16-byte strings), which are roots. `block_ids` are ints `[n]` of the pool, taken by
    `alloc`. InvalidArgument where they are something else, Closed after `close` and after a fork.
    """

    def __init__(self, path, layout, description, *, backend, backend_reason, verify, durability,
                 capacity_bytes, queue_depth, direct_io, iopoll, sqpoll, dead_after_s, poll_s):
        """Use `BlockStore.open`."""
        geometry = description.geometry
        self.path, self.layout, self.description = path, layout, description
        self.backend, self.backend_reason = backend, backend_reason
        self.verify, self.durability = verify, durability
        self.queue_depth, self.queue_depth_reason = queue_depth
        self._direct_io_reason, self._polls = direct_io[1], (bool(iopoll), bool(sqpoll))
        self._pid, self._lock = os.getpid(), threading.RLock()
        self._files = _ring.Store(
            geometry.block_nbytes, geometry.slot_stride, geometry.payload_offset, geometry.slots,
            geometry.header_pages, verify == "always", durability == "durable")
        self._files.direct_io = direct_io[0]
        self._index, self.scan = Index(), Scan()
        self._writer = Writer(path, description, self._files, self._index,
                              durable=durability == "durable")
        self._rings, self._default = set(), None      # rings that are open
        self._watch = Watch(path, description, self._files, self._index, self._writer,
                            self._rings, self.scan, dead_after_s=dead_after_s, poll_s=poll_s)
        self._capacity = Capacity(self._index, self._writer, self._watch, capacity_bytes)
        self._ring_numbers = itertools.count()
        self._closed = self._ended = False      # refuses calls; has given everything back
        self._requests = Requests(path, layout, self._lock, self._index, self._writer,
                                  self._capacity, self._rings, backend)
        self._requests.watch = self._watch
        self._harvest = self._requests.harvest

    @classmethod
    def open(cls, path, layout: BlockLayout, *, backend: str = "auto", verify: str = "always",
             durability: str = "visible", capacity_bytes: int | None = None,
             segment_bytes: int = SEGMENT_BYTES, queue_depth: int | None = None,
             direct_io: bool | str = "auto", iopoll: bool = False, sqpoll: bool = False,
             dead_after_s: float = DEAD_AFTER_S, poll_s: float = POLL_S,
             create: bool = True) -> "BlockStore":
        """Open the store in directory `path` of blocks of `layout`.

        backend: "uring", "threads", "usrbio" (for a path on 3FS), or "auto" (the best that path
            and machine allow; a fall-back warns and is named in `backend_reason`).
        verify: "always" checks the CRC of every payload that is read. "never" looks at the header
            again instead, and is allowed in a durable store only; blocks that an earlier opener
            wrote without durability are still checked.
        durability: "visible" survives the death of the process once `write` has completed,
            "durable" a power loss as well. `sync` makes visible blocks durable.
        capacity_bytes: the payload that this store object keeps (whole blocks of
            `layout.stride` bytes; what dead writers left counts as well). Beyond it the least
            recently used blocks are evicted. None (default): when the disk is full.
        segment_bytes: size of a segment file (default: 1 GiB); fixed when the store is created.
        queue_depth: device operations in flight per ring, 1 to 4096; None (default) chooses by the
            block device (`stats()["queue_depth_reason"]`).
        direct_io: "auto" (default) bypasses the page cache (O_DIRECT) where the file system can,
            True insists (StoreError), False goes through the page cache.
        iopoll, sqpoll: io_uring's IORING_SETUP_IOPOLL and _SQPOLL, off by default; both spend CPU
            on polling. What the machine refuses is done without, with a warning and in the ring's
            `stats()`. Their gain was not measured.
        dead_after_s: seconds; a writer whose heartbeat (one a second) does not change for so long
            (default: 30) is taken for dead; its blocks stay readable and may be reclaimed. Give
            the same value to all who share a directory.
        poll_s: seconds between two looks for what other processes have stored (default: 0.03);
            0: only when `refresh` is called.
        create: make the directory (not its parents) and `kvio.json` if missing (default).

        LayoutMismatch, FormatError, StoreError, BackendUnavailable or InvalidArgument.
        """
        check_options(layout, backend, verify, durability, capacity_bytes, segment_bytes,
                      queue_depth, direct_io, dead_after_s, poll_s)
        try:
            path = os.path.abspath(os.fsdecode(path))
        except TypeError:
            raise InvalidArgument(f"path must be a str or os.PathLike, not {path!r}") from None
        backend, reason, mount = choose_backend(backend, path)
        description = describe(path, layout, segment_bytes, create)
        store = cls(path, layout, description, backend=backend, backend_reason=reason,
                    verify=verify, durability=durability, capacity_bytes=capacity_bytes,
                    queue_depth=choose_queue_depth(path, queue_depth),
                    direct_io=choose_direct_io(os.path.join(path, JSON_NAME), direct_io),
                    iopoll=iopoll, sqpoll=sqpoll, dead_after_s=dead_after_s, poll_s=poll_s)
        if mount:
            store._files.set_mount(mount)
        store._load()
        _open_stores.add(store)
        return store

    def _load(self):
        try:
            self._watch.load()
            self._watch.start()
        except OSError as failed:
            self._files.stop()
            raise StoreError(failed.errno, f"cannot read the segments of {self.path}: raise the "
                             "limit of open files (ulimit -n)") from failed
        except RuntimeError as failed:          # of Python: can't start new thread
            self._files.stop()
            raise StoreError(errno.EAGAIN, f"cannot watch {self.path}: raise the limit of "
                             "processes (ulimit -u), or open with poll_s=0") from failed

    def __repr__(self):
        gone = self._closed or self._pid != os.getpid()
        state = "closed" if gone else f"{len(self._index)} blocks, {self.backend}"
        return f"<BlockStore {self.path}: {state}>"

    def __len__(self):
        self._check_fork()
        with self._lock:
            self._harvest()
            return len(self._index)

    # ---- finding, reading, writing ----

    def match(self, keys) -> int:
        """Length of the stored prefix of a chain, in blocks: keys[:n] are stored. Advisory: `read`
        has the last word."""
        keys = as_keys(keys)
        with self._opened():
            self._harvest()
            count = self._index.match(keys)
            self._requests.counts["asked_blocks"] += len(keys)
            self._requests.counts["matched_blocks"] += count
        return count

    def contains(self, keys) -> np.ndarray:
        """bool `[n]`, per key: is it stored, whatever its ancestors? Advisory, as `match` is."""
        keys = as_keys(keys)
        with self._opened():
            self._harvest()
            return self._index.find(keys)["status"] != -errno.ENOENT

    def forget(self, keys) -> None:
        """Drop blocks that this store object has written; what others have written stays. Their
        slots are used again; until then their bytes are on disk, and other processes may go on
        finding them: it is eviction, not erasure."""
        self._check_open()
        self._requests.forget(keys)

    def read(self, keys, pool, block_ids) -> Transfer:
        """Read block keys[i] into pool block block_ids[i]; `wait` and `await` give the length of
        the usable prefix, in blocks. The pool's blocks are pinned until the transfer has drained.

        `status`, int32 `[n]`: 0, -EINPROGRESS, -ENOENT (a miss), -EBADMSG (a failed check), -EIO,
        -ECANCELED. What a failed block's memory holds is undefined. LayoutMismatch for a pool of
        another layout, InvalidArgument for a block id that occurs twice.
        """
        return self._requests.read(self._default_ring(), keys, pool, block_ids)

    def write(self, keys, pool, block_ids) -> Transfer:
        """Store pool block block_ids[i] under keys[i]; visible to `match` and `read` once the
        transfer has completed. InvalidArgument for a key that occurs twice.

        Blocks that are stored already succeed at once. Where capacity or disk are full, others
        are evicted; what finds no room even so fails with ENOSPC, block by block, and `wait`
        raises TransferError. A block is written even if its parent is not stored.
        """
        return self._requests.write(self._default_ring(), keys, pool, block_ids)

    def refresh(self) -> int:
        """Look now for what other processes have stored, evicted or closed, without waiting for
        the next look; returns how many blocks appeared or went. Blocks for the time of I/O."""
        self._check_open()
        return self._watch.look()

    def pin(self, keys) -> int:
        """Keep the stored prefix of a chain from being evicted by this store object, until
        `unpin`; returns its length in blocks. Pins count. Other processes do not know of them: a
        block of another writer may go all the same."""
        keys = as_keys(keys)
        with self._opened():
            self._harvest()
            return self._capacity.pin(keys)

    def unpin(self, keys) -> None:
        """Take back one `pin` of each of these keys: those it has counted, `keys[:count]`. Keys
        that are not pinned are ignored."""
        keys = as_keys(keys)
        with self._opened():
            self._capacity.unpin(keys)

    @contextlib.contextmanager
    def pinned(self, keys):
        """`with store.pinned(keys) as count:` keys[:count] are stored and stay so meanwhile."""
        keys = as_keys(keys)
        count = self.pin(keys)
        try:
            yield count
        finally:
            if not self._closed:
                self.unpin(keys[:count])

    def sync(self) -> None:
        """Make every write that has completed survive a power loss. Blocks; StoreError."""
        with self._opened():
            self._harvest()                 # what has completed is dirty, whoever has seen it
        try:
            self._writer.sync()
        except OSError as failed:
            raise StoreError(failed.errno, f"cannot sync {self.path}: what was written since the "
                             "last sync may be lost in a power cut") from failed

    def open_ring(self, *, read_bytes_per_s: int = 0, write_bytes_per_s: int = 0,
                  name: str | None = None, window_ns: int = 1_000_000_000) -> Ring:
        """A further ring, each direction paced to an emulated bandwidth in bytes a second (0:
        unpaced); `window_ns` is the unit of its `busy_windows`. It lives until it or the store is
        closed. BackendUnavailable where the machine has no room for another."""
        checked_int("read_bytes_per_s", read_bytes_per_s, 0, INT64_MAX)
        checked_int("write_bytes_per_s", write_bytes_per_s, 0, INT64_MAX)
        checked_int("window_ns", window_ns, 1, INT64_MAX)
        with self._opened():
            try:
                ring = _ring.Ring(self._files, self.backend, self.queue_depth, IO_BYTES,
                                  int(read_bytes_per_s), int(write_bytes_per_s), int(window_ns),
                                  *self._polls)
            except OSError as failed:
                remedy = "is /dev/shm full, or the 3FS daemon gone?" if self.backend == "usrbio" \
                    else "close some, or raise ulimit -n and -l"
                raise BackendUnavailable(failed.errno, "cannot open another ring "
                                         f"({self.backend}): {remedy}") from failed
            ring = Ring(self, name or f"ring{next(self._ring_numbers)}", ring)
            self._rings.add(ring)
        ring._announce()
        return ring

    def _default_ring(self):
        if self._default is None:
            with self._opened():
                if self._default is None:
                    self._default = self.open_ring(name="default")
        return self._default

    # ---- the rest ----

    def stats(self) -> dict:
        """Figures of this store object, plain data: what was chosen and why (`*_reason`), blocks,
        bytes, what was ignored or damaged, hits and evictions (in blocks), `sharing`, `rings`."""
        self._check_open()
        sharing = self._watch.stats()
        with self._opened():
            self._harvest()
            rings = {ring.name: ring.stats() for ring in self._rings if not ring._closed}
            direct = [d for d in (self.scan.direct_io, self._writer.direct_io) if d is not None]
            codes = {ring["register_errno"] for ring in rings.values()} - {0}
            return {
                "backend": self.backend, "backend_reason": self.backend_reason,
                "direct_io": all(direct) if direct else None,
                "direct_io_reason": self._direct_io_reason,
                "queue_depth": self.queue_depth, "queue_depth_reason": self.queue_depth_reason,
                "plain_buffers_reason": ", ".join(errno_name(code) for code in codes)
                or self._requests.staging_reason,
                "blocks": len(self._index),
                "segments": sharing["foreign_segments"] + len(self._writer.segments),
                "own_segments": len(self._writer.segments),
                "own_bytes": self._writer.slots_used * self.layout.stride,
                "segments_ignored": dict(self.scan.ignored),
                "headers_damaged": sharing["headers_damaged"],
                "headers_beyond_end": sharing["headers_beyond_end"],
                "page1_writes": self._files.page1_writes, **self._requests.stats(),
                **self._capacity.stats(), "sharing": sharing, "rings": rings}

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
        self._watch.stop()
        with self._lock:
            if not self._ended:
                self._harvest()
                self._files.stop()
                self._writer.finish()
                self._ended = True
        _open_stores.discard(self)

    @contextlib.contextmanager
    def _opened(self):
        """The lock, of a store that is open. In a forked child it may be held for ever, by a
        thread of the parent: so whether this is one is asked first."""
        self._check_fork()
        with self._lock:
            self._check_open()
            yield

    def _check_open(self):
        self._check_fork()
        if self._closed:
            raise Closed(f"the store at {self.path} is closed")

    def _check_fork(self):
        if self._pid != os.getpid():
            raise Closed("this store was opened before a fork: a forked child is not a writer and "
                         "has no rings; open the store again in the child")

    def __enter__(self):
        return self

    def __exit__(self, kind, *exc):
        self.close(drain=kind is None, cancel=kind is not None)

    def __del__(self):
        if not getattr(self, "_ended", True) and self._pid == os.getpid():
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self)
            self.close(cancel=True)


@atexit.register
def _close_all():
    """Rings must not touch memory that the interpreter is about to give back."""
    for store in list(_open_stores):
        if store._pid == os.getpid():
            store.close(cancel=True)
