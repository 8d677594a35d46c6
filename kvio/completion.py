"""`Transfer`: one batch in flight, whoever moves it.

A store's ring and a NIC's queue pair both hand out a *handle* from `_ext`; this module gives it
the one interface users see. A handle is anything with

    poll() -> bool          drive without blocking; True once every element has drained
    wait(timeout_s) -> bool drive or sleep without the GIL, at most timeout_s (None: for ever)
    cancel()                give up what has not started; returns once the hardware has drained
    fileno() -> int         an eventfd of this batch, readable once it has drained
    drive_fd() -> int       an fd that is readable when poll() would make progress, or -1 where
                            a C thread makes the progress
    status                  int32 array, one per element: 0, -EINPROGRESS or -errno
    succeeded() -> bool     all are 0; not needed where the transfer has a `finish`. An array made
                            of the status costs an `await` on cold caches as much as its waking
    stats() -> dict         nbytes, submitted_ns, completed_ns (CLOCK_MONOTONIC)
    block_stream(handle)    only of GPUs' NICs: work that is put into this CUstream from now on
                            starts after the batch. OSError: EAGAIN not all of it is posted, EIO
                            some of it has failed, EXDEV the stream is another device's
    abandon()               it was never submitted and will not be: from now on it has drained

A transfer is made before its handle is submitted; until then poll() says False.

Who owns what: a device may write the transfer's memory until it has drained, whether or not
anybody still looks at the `Transfer`. So each one is held in `_in_flight`, with the objects in
`keep`, until its draining has been *observed*; only then does `on_drain` run (a pool unpins its
blocks there) and the memory becomes anybody's.
"""
import asyncio
import collections
import errno
import numbers
import os
import select
import threading
import weakref

import numpy as np

from kvio import memory
from kvio.errors import (Busy, Closed, InvalidArgument, TransferError, TransferTimeout,
                         errno_name)
from kvio.spans import stream_handle

__all__ = ["Transfer", "in_flight", "reap"]

ONE_SHOT = select.EPOLLIN | select.EPOLLONESHOT
MOST_EVENTS = 64                # at once; the rest next time around

_in_flight: set = set()
_lock = threading.RLock()       # the garbage collector may run a transfer's end inside of us
_generation = 0                 # of this process: a forked child is the next one


class Transfer:
    """A batch of reads or writes that is in flight or has drained.

    `wait()` and `await` return once the batch has **drained** (no device can touch its memory any
    more). A store's read returns the length of the usable prefix; any other kind returns None if
    all elements succeeded and raises `TransferError` otherwise.

    It may be awaited any number of times. Cancelling an `await` (asyncio.wait_for) leaves the batch
    in flight; `cancel()` gives it up. For a task use asyncio.ensure_future: it is no coroutine.
    """

    __slots__ = ("_handle", "_keep", "_on_drain", "_finish", "_what", "_process", "__weakref__")

    def __init__(self, handle, what, *, keep=(), on_drain=None, finish=None):
        """`what` names the batch in errors; `finish(status)` computes the result."""
        self._handle, self._what, self._process = handle, what, _generation
        self._keep, self._on_drain = keep, [on_drain] if on_drain else []
        self._finish = finish       # no method of ours: that would be a cycle
        with _lock:
            _in_flight.add(self)

    def __repr__(self):
        if self._process != _generation:
            return f"<Transfer {self._what}, of a parent process>"
        status = self.status
        failed = int(np.count_nonzero((status != 0) & (status != -errno.EINPROGRESS)))
        state = "done" if self.done else "in flight"
        return f"<Transfer {self._what}: {len(status)} elements, {failed} failed, {state}>"

    @property
    def done(self) -> bool:
        """True once drained. Looks (and drives a soft NIC a little), never blocks."""
        self._check_process()
        if not self._handle.poll():
            return False
        self._drained()
        return True

    @property
    def status(self) -> np.ndarray:
        """int32 per element: 0, -EINPROGRESS, or -errno (ENOENT a miss, EBADMSG a failed check,
        ECANCELED). Final once `done`."""
        return np.asarray(self._handle.status)

    @property
    def stats(self) -> dict:
        """nbytes asked for, and when the batch was submitted and completed (monotonic ns); of a
        GPU's NIC also `ways`, by which the bytes were copied ("loop", "batch", ...)."""
        return self._handle.stats()

    def when_drained(self, callback) -> None:
        """Call `callback()` once the draining has been observed; now, if it has been."""
        with _lock:
            waiting = self._on_drain is not None
            if waiting:
                self._on_drain.append(callback)
        if not waiting:
            callback()

    def fileno(self) -> int:
        """An eventfd that is readable once the batch has drained. On a soft NIC somebody has to
        drive (`wait`, `await` or `poll` of any transfer of that fabric) for it to become so."""
        return self._handle.fileno()

    def wait(self, timeout: float | None = None):
        """Block until drained; the result, or the error. TransferTimeout after `timeout` s."""
        self._check_process()
        if timeout is not None:
            timeout = _seconds(timeout)
        if not self._handle.wait(timeout):
            raise TransferTimeout(f"{self._what}: not finished after {timeout} s; it goes on and "
                                  "keeps its memory: wait again, or cancel it")
        return self._result()

    def __await__(self):
        self._check_process()
        if not self._handle.poll():
            yield from _drained_in_loop(self._handle)
        return self._result()

    def block_stream(self, stream) -> None:
        """Work that is put into a GPU's stream from now on starts once this batch has drained; the
        host does not wait. For transfers of `Nic.open("cuda:0")` and streams of that GPU (see
        `spans.stream_handle`).

        Busy: part of the batch is not yet posted (the queue was full). TransferError: something
        of it has failed. InvalidArgument: another device's stream, or a transfer that no GPU's
        NIC carries out. In each case the stream does not wait.
        """
        self._check_process()
        number = stream_handle(stream)
        block = getattr(self._handle, "block_stream", None)
        try:
            if block is None:
                raise OSError(errno.EOPNOTSUPP, "no streams")
            block(number)
        except OSError as refused:
            raise self._not_blocking(refused, stream) from None

    def _not_blocking(self, refused, stream):
        what = f"{self._what}: the stream does not wait for it: "
        if refused.errno == errno.EOPNOTSUPP:
            return InvalidArgument(what + "only what a GPU's NIC (Nic.open(\"cuda:0\")) moves can "
                                   "be waited for by a stream; wait() or await it instead")
        if refused.errno == errno.EXDEV:
            return InvalidArgument(what + f"{stream!r} is not of the primary context of the "
                                   f"transfer's GPU ({self._handle.device}), or is being captured")
        if refused.errno == errno.EAGAIN:
            return Busy(what + "part of it is not yet posted, as the queue is full: wait() for it, "
                        "or open the NIC with a larger queue_depth")
        if refused.errno == errno.EIO and self._handle.poll():
            self._drained()
            bad = np.flatnonzero(self.status)
            if len(bad):
                return self._failed(self.status, bad)
        return TransferError(refused.errno, what + "some of it has failed; wait() says what")

    def cancel(self) -> None:
        """Give up the elements that have not started (ECANCELED); return once drained."""
        self._check_process()
        self._handle.cancel()
        self._handle.wait(None)
        self._drained()

    def _check_process(self):
        if self._process != _generation:
            raise Closed(f"{self._what}: it belongs to the process that forked this one, whose "
                         "devices are not ours; open store and NIC again in the child")

    def abandon(self) -> None:
        """For whoever made it: submitting has failed, so nothing is in flight."""
        self._handle.abandon()
        self._drained()

    def _result(self):
        self._drained()
        if self._finish is not None:
            return self._finish(self.status)
        return None if self._handle.succeeded() else self._failure(self.status)

    def _drained(self):
        with _lock:
            _in_flight.discard(self)
            on_drain, self._on_drain, self._keep = self._on_drain, None, ()
        for callback in on_drain or ():
            callback()

    def _failure(self, status):
        raise self._failed(status, status.nonzero()[0])

    def _failed(self, status, bad):
        first = int(bad[0])
        explain = getattr(self._handle, "explain", None)
        why = explain(first) if explain else errno_name(status[first])
        return TransferError(status[first], f"{self._what}: {len(bad)} of {len(status)} elements "
                             f"failed, first element {first}: {why}", status)


def _seconds(timeout):
    """None for longer than anybody lives."""
    if not isinstance(timeout, numbers.Real) or timeout != timeout:
        raise InvalidArgument(f"a timeout is a number of seconds or None, not {timeout!r}")
    return float(timeout) if timeout < 2e9 else None


def in_flight() -> int:
    """How many transfers have not been seen to drain yet."""
    with _lock:
        return len(_in_flight)


def reap() -> int:
    """Look at transfers nobody waits for and let go of those that have drained; returns how many.

    Pools call it before they say that they are out of blocks or busy.
    """
    with _lock:
        waiting = list(_in_flight)
    return sum(1 for transfer in waiting if transfer.done)


memory.last_resorts.append(reap)


def _forget_parents():
    """A forked child has none of its parent's devices: it must not drive them, nor free them."""
    global _in_flight, _lock, _of_parents, _generation
    _of_parents, _in_flight, _lock = (_of_parents, _in_flight), set(), threading.RLock()
    _generation += 1


_of_parents = None
os.register_at_fork(after_in_child=_forget_parents)


class _Waker:
    """Wakes those in one event loop who await transfers.

    A loop watches one descriptor for all of them and for as long as it lives: an epoll of our own.
    In that are the eventfd of each handle and the drive fd of each fabric of soft NICs and of each
    verbs NIC. Adding and removing a reader costs a loop some 10 us each, an epoll one system call.

    All are *one-shot*. What became readable says so once and is silent until somebody arms it
    again, so nobody has to take it out: without anybody waiting it cannot keep the loop awake, and
    closing takes it away. The number of a descriptor that was closed may come back as another one:
    so `arm` relies on what the kernel knows of it, not on what we have put in.
    """

    def __init__(self, loop):
        self.epoll = select.epoll()
        # fd -> {future: handle} of those who wait, in turn. The inner ones stay: there are no more
        # of them than numbers of descriptors.
        self.waiting = collections.defaultdict(dict)
        loop.add_reader(self.epoll.fileno(), self._readable)

    def arm(self, fd):
        try:
            self.epoll.modify(fd, ONE_SHOT)
        except FileNotFoundError:
            self.epoll.register(fd, ONE_SHOT)

    def _readable(self):
        for fd, _ in self.epoll.poll(0, MOST_EVENTS):
            for woken, handle in list(self.waiting[fd].items()):
                if not handle.poll():           # this drove the fabric, for the others too: whose
                    self.arm(fd)                # batch has drained hears of it by its eventfd
                    break
                if not woken.done():
                    woken.set_result(None)


# loop -> a weak reference to its waker, which the loop keeps, by its reader. Nothing here keeps a
# loop: what a waker knows refers to it.
_wakers: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[_Waker]]"
_wakers = weakref.WeakKeyDictionary()


def _waker_of(loop):
    known = _wakers.get(loop)
    waker = known() if known else None
    if waker is None:
        waker = _Waker(loop)
        _wakers[loop] = weakref.ref(waker)
    return waker


def _drained_in_loop(handle):
    """Until the handle's batch has drained, without blocking the running loop."""
    loop = asyncio.get_running_loop()
    waker = _waker_of(loop)
    fds = [fd for fd in (handle.fileno(), handle.drive_fd()) if fd >= 0]
    woken = loop.create_future()
    places = [waker.waiting[fd] for fd in fds]
    for place in places:
        place[woken] = handle
    try:
        for fd in fds:
            waker.arm(fd)
        yield from woken
    finally:
        for place in places:
            del place[woken]
