"""`KvioConnector`: LMCache's chunks in a kvio store, through its `native_plugin` L2 adapter.

    --l2-adapter '{"type": "native_plugin", "module_path": "kvio.integrations.lmcache",
                   "class_name": "KvioConnector",
                   "adapter_params": {"path": "/mnt/nvme/lmcache", "capacity_bytes": 1e12}}'

The interface is LMCache's (read in release 0.5.6); nothing of LMCache is imported. docs/lmcache.md
says how to set it up, and what the parameters mean.
"""
import atexit
import contextlib
import hashlib
import itertools
import numbers
import os
import sys
import threading
import warnings
import weakref

import numpy as np

from kvio.errors import Closed, InvalidArgument, checked_int
from kvio.integrations.chunks import ChunkMover, Request

__all__ = ["KvioConnector", "chunk_key"]

_open_connectors: "weakref.WeakSet[KvioConnector]" = weakref.WeakSet()


def chunk_key(name, namespace: str = "") -> bytes:
    """The store's key for a key of LMCache's: 16 bytes, the same in every process."""
    return _digest(_hasher(namespace), name)


def _hasher(namespace):
    if not isinstance(namespace, str) or "\0" in namespace:
        raise InvalidArgument(f"namespace must be a str without NUL, not {namespace!r}")
    return hashlib.blake2b(namespace.encode("utf-8", "surrogatepass") + b"\0", digest_size=16,
                           person=b"kvio-lmcache-1")


def _digest(hasher, name):
    if isinstance(name, str):
        name = name.encode("utf-8", "surrogatepass")
    elif not isinstance(name, bytes):
        raise InvalidArgument(f"a key must be a str or bytes, not {name!r}")
    hasher = hasher.copy()
    hasher.update(name)
    return hasher.digest()


class KvioConnector:
    """Loads and stores chunks; each call returns a number at once, `drain_completions` tells what
    became of it. Thread-safe. Close it."""

    def __init__(self, path, *, chunk_bytes=None, capacity_bytes: int | None = None,
                 durability: str = "visible", verify: str = "always", backend: str = "auto",
                 queue_depth: int = 32, segment_bytes: int = 1 << 30, staging_blocks: int = 16,
                 namespace: str = ""):
        """path: a directory, made if missing. Chunks of `n` bytes lie in the store `chunks-n`
            below it, which the `kvio` command can look at.
        chunk_bytes: the sizes of chunk that are taken, an int or a list; others fail, each with
            an error that says so. None: any, up to 16 different sizes.
        staging_blocks: chunks, of each size, that buffers which are no whole 4 KiB pages are
            copied through. Made when the first such buffer comes.
        namespace: keeps apart what LMCache's keys do not tell apart.
        The others are those of `BlockStore.open`, for each size of chunk.
        """
        try:
            folder = os.path.abspath(os.fsdecode(path))
        except TypeError:
            raise InvalidArgument(f"path must be a str or os.PathLike, not {path!r}") from None
        checked_int("staging_blocks", staging_blocks, 1, 1 << 20)
        self._hasher, self._pid = _hasher(namespace), os.getpid()
        options = dict(capacity_bytes=_whole(capacity_bytes), segment_bytes=_whole(segment_bytes),
                       durability=durability, verify=verify, backend=backend,
                       queue_depth=queue_depth)
        self._numbers, self._lock, self._completed = itertools.count(1), threading.Lock(), []
        self._warned = set()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._mover = ChunkMover(folder, sizes=_sizes(chunk_bytes), options=options,
                                     staging_blocks=staging_blocks)
        except BaseException:
            os.close(self._fd)
            raise
        self._closed = False
        _open_connectors.add(self)

    def __repr__(self):
        return f"<KvioConnector {self._mover.folder}{': closed' if self._closed else ''}>"

    def event_fd(self) -> int:
        """An eventfd that is readable while `drain_completions` has something to tell. Only that
        call takes it back: poll it, do not read it."""
        return self._fd

    def submit_batch_get(self, keys, memoryviews) -> int:
        """Load chunks into writable buffers, which must stay in place until this completes. Per
        key: was it loaded? What is in the buffer of one that was not is undefined."""
        return self._submit(False, keys, memoryviews)

    def submit_batch_set(self, keys, memoryviews) -> int:
        """Store chunks. Per key: is it stored? One that is stored already stays as it is."""
        return self._submit(True, keys, memoryviews)

    def submit_batch_exists(self, keys) -> int:
        """Per key: is it stored? Advisory: a load has the last word."""
        return self._at_once(self._mover.contains, keys)

    def submit_batch_delete(self, keys) -> int:
        """Drop chunks that this process has stored; their space is used again. Per key: is it not
        to be found any more? False for a chunk that another process has stored. This is eviction,
        not erasure: the bytes stay on disk until the space is used, and until then other
        processes may go on finding them."""
        return self._at_once(self._mover.forget, keys)

    def drain_completions(self) -> list:
        """What has completed since the last call: (number, ok, error, a bool per key). `ok`: a
        load or store of all keys, a look-up in any case. Never raises, never blocks."""
        with self._lock:
            completed, self._completed = self._completed, []
            if not self._closed:
                try:
                    os.eventfd_read(self._fd)
                except OSError:                     # nothing was there
                    pass
        return completed

    def stats(self) -> dict:
        """How many chunks went straight to the device and how many were copied; the figures of
        each store by its size of chunk."""
        self._check_open()
        return self._mover.stats()

    def close(self, *, cancel: bool = False) -> None:
        """Finish all that was submitted (with `cancel`, fail what has not started) and close the
        stores. No buffer is touched any more when this returns; what completed can be drained."""
        if self._pid != os.getpid():                # the thread and the rings are our parent's
            self._closed = True
            return
        self._mover.stop(cancel)
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)
        _open_connectors.discard(self)

    # ---- inside ----

    def _submit(self, write, keys, memoryviews):
        self._check_open()
        keys, views = list(keys), list(memoryviews)
        if len(keys) != len(views):
            raise InvalidArgument(f"{len(keys)} keys, but {len(views)} buffers")
        number = next(self._numbers)
        names, memory, problems = [], [], {}
        for place, (key, view) in enumerate(zip(keys, views)):
            name = array = None
            try:
                name = _digest(self._hasher, key)
                array = np.frombuffer(view, np.uint8)
                if array.nbytes == 0:
                    problems[place] = "its buffer is empty"
                elif not (write or array.flags.writeable):
                    problems[place] = "its buffer is read-only"
            except (ValueError, TypeError, BufferError) as wrong:
                problems[place] = str(wrong)
            names.append(name)
            memory.append(array)

        def finish(done):
            if write and done.problem and not self._mover.cancelled:
                self._warn(done.problem)
            self._complete(number, all(done.ok), done.problem, done.ok)

        request = Request(write, names, memory, finish)
        for place, problem in problems.items():
            request.settle(place, False, problem)
        if not keys:
            self._complete(number, True, "", [])
        elif len(problems) < len(keys):
            self._mover.submit(request)
        return number

    def _at_once(self, ask, keys):
        """What needs no I/O is answered in the call."""
        self._check_open()
        keys, number = list(keys), next(self._numbers)
        try:
            flags = ask([_digest(self._hasher, key) for key in keys]).tolist()
        except Exception as failed:                 # the engine goes on without us
            self._complete(number, False, f"{type(failed).__name__}: {failed}", [False] * len(keys))
        else:
            self._complete(number, True, "", flags)
        return number

    def _complete(self, number, ok, problem, flags):
        with self._lock:
            self._completed.append((number, ok, problem, flags))
            if not self._closed:
                os.eventfd_write(self._fd, 1)

    def _warn(self, problem):
        """LMCache does not show why a chunk was not stored; once for each reason is enough."""
        problem = problem.partition(": ")[2]
        if problem not in self._warned and len(self._warned) < 20:
            self._warned.add(problem)
            with contextlib.suppress(Warning):      # where warnings are errors
                warnings.warn(f"{self!r} did not store a chunk: {problem}", RuntimeWarning)

    def _check_open(self):
        if self._pid != os.getpid():
            raise Closed("this connector was opened before a fork: open another one in the child")
        if self._closed:
            raise Closed(f"{self!r} cannot be used any more")

    def __enter__(self):
        return self

    def __exit__(self, kind, *exc):
        self.close(cancel=kind is not None)

    def __del__(self):
        if not getattr(self, "_closed", True) and self._pid == os.getpid() and \
                not sys.is_finalizing():
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self)
            self.close(cancel=True)


def _whole(value):
    """JSON writes 1e12 as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _sizes(chunk_bytes):
    if chunk_bytes is None:
        return None
    given = [chunk_bytes] if isinstance(chunk_bytes, numbers.Number) else chunk_bytes
    if not isinstance(given, (list, tuple)) or not given:
        raise InvalidArgument(f"chunk_bytes must be an int, a list of ints or None, "
                              f"not {chunk_bytes!r}")
    return {checked_int("chunk_bytes", _whole(each), 1, 1 << 30) for each in given}


@atexit.register
def _close_all():
    """Before the stores close themselves, and while the threads still run."""
    for connector in list(_open_connectors):
        if connector._pid == os.getpid():
            connector.close(cancel=True)
