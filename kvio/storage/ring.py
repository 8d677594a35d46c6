"""Rings as users see them, and which back end moves the bytes."""
import errno
import os
import threading
import warnings
import weakref
from typing import NamedTuple

import numpy as np

from kvio._ext import ring as _ring
from kvio.completion import Transfer
from kvio.errors import BackendUnavailable, Busy, Closed, errno_name
from kvio.storage import usrbio
from kvio.storage.format import BLOCK_IO

__all__ = ["ReadQueue", "Ring", "choose_backend"]

_SETTLE_S = 0.1
_REMEDY = {
    errno.EPERM: "allow it: sysctl kernel.io_uring_disabled=0, and in a container a seccomp "
                 "profile that lets io_uring through",
    errno.EACCES: "allow it: sysctl kernel.io_uring_disabled=0",
    errno.ENOSYS: "it needs Linux 5.11, and a kvio built with liburing (apt install liburing-dev)",
    errno.ENOMEM: "raise the locked-memory limit (ulimit -l)",
}


_POLLING = {
    "sqpoll": "the kernel's submitting thread is refused, the ring's own thread submits (Linux "
              "before 5.11 wants CAP_SYS_NICE)",
    "iopoll": "the device or the file system cannot be polled (a driver needs poll queues: nvme "
              "poll_queues=), interrupts serve",
}


def choose_backend(wanted: str, path: str) -> tuple[str, str, str | None]:
    """(back end, why it and not another, the mount point of 3FS for `usrbio`)."""
    if wanted == "usrbio":
        return wanted, "asked for", usrbio.preflight(path)
    lost = ""
    if wanted == "auto" and usrbio.on_3fs(path):
        try:
            mount = usrbio.preflight(path)
            return "usrbio", f"{path} lies on 3FS, mounted at {mount}", mount
        except BackendUnavailable as missing:
            lost = f"{path} lies on 3FS, but USRBIO cannot be used: {missing}; "
            warnings.warn(f"the store falls back to the kernel's file system: {lost[:-2]}",
                          RuntimeWarning, stacklevel=4)
    backend, why = _choose_local(wanted)
    return backend, lost + why, None


def _choose_local(wanted):
    if wanted == "threads":
        return wanted, "asked for"
    code = _ring.probe("uring")
    if code == 0:
        return "uring", "asked for" if wanted == "uring" else "io_uring works here"
    why = f"io_uring is refused with {errno_name(code)}: {_REMEDY.get(code, 'see dmesg')}"
    if wanted == "uring":
        raise BackendUnavailable(code, f"{why}; or use backend='threads'")
    warnings.warn(f"the store falls back to threads: {why}", RuntimeWarning, stacklevel=5)
    return "threads", why


class ReadQueue(NamedTuple):
    """Reads that are outstanding at a ring, queued ones included."""

    nbytes: int
    tokens: int


class Ring:
    """One queue into the store with its own C thread, maybe paced to an emulated bandwidth.

    Made by `BlockStore.open_ring`. Thread-safe.
    """

    def __init__(self, store, name, ring):
        self.store, self.name, self._ring = store, name, ring
        self._transfers = weakref.WeakSet()
        self._closed, self._ending = False, threading.RLock()
        self._announced = set()

    def __repr__(self):
        return f"<Ring {self.name} of {self.store!r}>"

    def read(self, keys, pool, block_ids) -> Transfer:
        """`BlockStore.read` through this ring."""
        return self.store._requests.read(self, keys, pool, block_ids)

    def write(self, keys, pool, block_ids) -> Transfer:
        """`BlockStore.write` through this ring."""
        return self.store._requests.write(self, keys, pool, block_ids)

    def register(self, pool) -> Transfer:
        """Pin the pool's memory for this ring now, not on its first transfer. Worth it before
        anything is timed: the kernel takes about 3 s per GiB of memory that was never touched."""
        return self.store._requests.read(self, [], pool, [])

    @property
    def read_queue(self) -> ReadQueue:
        """Reads that are outstanding: what a scheduler looks at. Cheap."""
        return ReadQueue(*self._opened().read_queue)

    def stats(self) -> dict:
        """Counters since the ring was opened; they count blocks when these complete.

        `read_bytes`, `write_bytes`: payload. `read_busy_ns`, `write_busy_ns`: time the link was
        busy (virtual link time if paced, else time with at least one block in flight).
        """
        return dict(self._opened().stats(), name=self.name)

    def busy_windows(self, direction: str = "read") -> tuple[int, int, np.ndarray]:
        """(start of the first window, ns of a window, payload bytes completed per window).

        Windows are aligned to multiples of their length on CLOCK_MONOTONIC, so those of several
        rings line up; the ring's first and last windows may be partial.
        """
        ring = self._opened()
        first, data = ring.windows(direction == "write")
        return first * ring.window_ns, ring.window_ns, np.frombuffer(data, np.uint64)

    def settle(self) -> bool:
        """Wait until its thread is done with every batch that has drained; False if it is busy.
        What they wrote may be written by another ring from then on."""
        try:
            return self._ring.submit(False, np.empty(0, BLOCK_IO), 0, 0, 0).wait(_SETTLE_S)
        except ValueError:                  # closed: it has no thread any more
            return True

    def close(self, *, drain: bool = False, cancel: bool = False) -> None:
        """Stop the ring. Busy while transfers are in flight, unless `drain` waits for them or
        `cancel` gives up those that have not started."""
        if self.store._pid != os.getpid():      # thread and transfers are the parent's
            self._closed = True
            return
        with self.store._lock:
            waiting = list(self._transfers)
            if not (self._closed or drain or cancel) and self._ring.in_flight:
                raise Busy(f"ring {self.name} has batches in flight ({self._ring.in_flight}): wait "
                           "for them, or close(drain=True) or close(cancel=True)")
            self._closed = True
        if cancel:
            for transfer in waiting:
                transfer.cancel()
        # Whoever comes second (or after an interrupt) returns when nothing is in flight either.
        with self._ending:
            for transfer in waiting:
                transfer._handle.wait(None)
            self._ring.close()
            with self.store._lock:
                self.store._writer.release(self)
                self.store._rings.discard(self)

    def _announce(self):
        """Warn once of each wish that the machine has refused."""
        for name, code in self._ring.refused():
            if name not in self._announced:
                self._announced.add(name)
                warnings.warn(f"{name}: {errno_name(code)}; {_POLLING[name]}", RuntimeWarning,
                              stacklevel=5)

    def _opened(self):
        if self._closed:
            raise Closed(f"ring {self.name} is closed")
        return self._ring

    def __enter__(self):
        return self

    def __exit__(self, kind, *exc):
        self.close(drain=kind is None, cancel=kind is not None)
