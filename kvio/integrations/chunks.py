"""Chunks that others keep in memory of their own, in and out of block stores.

An engine hands over keys and buffers, one buffer a chunk, and wants to know later what became of
each. `ChunkMover` does that: a store for each size of chunk, and one thread that sleeps in epoll
until a request comes or a transfer has drained. No request waits for another one's memory:

* buffers of whole 4 KiB pages go to the device as they are, adjacent ones in one transfer;
* all others are copied through a small pool, loads before stores.

What goes wrong with a chunk is told of that chunk; nothing is raised out of the thread.
"""
import contextlib
import os
import re
import select
import tempfile
import threading
import time
from collections import deque

import numpy as np

from kvio.errors import Closed, InvalidArgument, KvioError, StoreError, errno_name
from kvio.layout import PAGE, BlockLayout
from kvio.memory import BlockPool
from kvio.storage import BlockStore

__all__ = ["ChunkMover", "Request"]

MAX_SIZES = 16              # each is a store with two rings
_LOOK_AGAIN_S = 1.0         # for sizes that other processes have begun to store
_FOLDER = re.compile(r"chunks-([1-9][0-9]{0,11})\Z")


class Request:
    """A batch of chunks to load or to store; `finish(request)` is called once all are settled."""

    __slots__ = ("write", "keys", "memory", "ok", "problem", "_left", "_finish")

    def __init__(self, write, keys, memory, finish):
        """`keys`: 16 bytes each. `memory`: a uint8 array each, held until it is settled."""
        self.write, self.keys, self.memory, self._finish = write, keys, memory, finish
        self.ok, self.problem, self._left = [None] * len(keys), "", len(keys)

    def settle(self, place, ok, problem=""):
        """The last word on one chunk."""
        if self.ok[place] is not None:
            return
        self.ok[place], self.memory[place] = ok, None
        self.problem = self.problem or (problem and f"key {place}: {problem}")
        self._left -= 1
        if self._left == 0:
            self._finish(self)

    def fail(self, places, problem):
        """These chunks were neither loaded nor stored, unless they are settled."""
        for place in places:
            self.settle(place, False, problem)


class _Span:
    """Adjacent buffers as one array. It holds them all, and numpy holds it."""

    def __init__(self, addr, nbytes, buffers):
        self.buffers = buffers
        self.__array_interface__ = {"data": (addr, False), "shape": (nbytes,), "typestr": "|u1",
                                    "version": 3}


class _Shelf:
    """The chunks of one size: their store, a ring for each direction, memory to copy through."""

    def __init__(self, folder, nbytes, staging_blocks, create, options):
        self.nbytes, self.layout = nbytes, BlockLayout(1, 1, nbytes)
        self.staging_blocks, self._pool = staging_blocks, None
        self.store = BlockStore.open(os.path.join(folder, f"chunks-{nbytes}"), self.layout,
                                     create=create, **options)
        try:
            # Apart, so that a load does not wait in line behind a gigabyte of stores.
            self.rings = {False: self.store.open_ring(name="loads"),
                          True: self.store.open_ring(name="stores")}
        except BaseException:
            self.store.close(cancel=True)
            raise
        self.waiting = {False: deque(), True: deque()}      # (request, places) to be copied
        self.storing = 0                                    # blocks of the pool

    @property
    def pool(self):
        """Made when the first chunk needs it: buffers of whole pages never do."""
        if self._pool is None:
            self._pool = BlockPool(self.layout, self.staging_blocks)
        return self._pool

    def room(self, write):
        """Blocks for one transfer now. Stores leave half of the pool to loads, and no transfer
        takes more than a quarter, so that copying and moving overlap."""
        free = self.pool.num_free
        if write:
            free = min(free, max(1, self.staging_blocks // 2) - self.storing)
        return min(free, max(1, self.staging_blocks // 4))

    def fail_waiting(self, problem):
        """Nothing can be copied: all that waits for it fails."""
        for queue in self.waiting.values():
            while queue:
                request, unit = queue.popleft()
                request.fail(unit, problem)


class _Job:
    """A transfer, and for each of its blocks the request and the chunks that it settles."""

    __slots__ = ("shelf", "write", "units", "pool", "ids", "staged", "transfer")

    def __init__(self, shelf, write, units, pool, staged):
        self.shelf, self.write, self.units, self.pool = shelf, write, units, pool
        self.staged, self.transfer = staged, None
        self.ids = pool.alloc(len(units))


class ChunkMover:
    """Loads and stores chunks of the sizes `sizes` (None: of any size, up to 16 of them), each
    size in a store of its own below `folder`. `options` are those of `BlockStore.open`."""

    def __init__(self, folder, *, sizes, staging_blocks, options):
        self.folder, self._sizes = folder, sizes
        self._staging_blocks, self._options = staging_blocks, options
        self._lock, self._inbox, self._jobs = threading.Lock(), deque(), {}
        self._shelves = {}                          # replaced, never changed: others read it
        self._stopping = self._looking = self.cancelled = False
        self._looked, self.counts = 0.0, {"direct_chunks": 0, "staged_chunks": 0}
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_shelves)
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError as failed:
                raise StoreError(failed.errno, f"cannot make the directory {folder}") from failed
            for nbytes in sizes or ():
                self._shelf(nbytes, create=True)
            if sizes is None:
                self._try_options()
            self._look()
            self._epoll = select.epoll()
            undo.callback(self._epoll.close)
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._bell)
            self._epoll.register(self._bell, select.EPOLLIN)
            self._thread = threading.Thread(target=self._run, name="kvio-chunks", daemon=True)
            self._thread.start()
            undo.pop_all()

    # ---- called from any thread ----

    def submit(self, request: Request) -> None:
        """Hand over a request. Never blocks on I/O."""
        with self._lock:
            if self._stopping:
                raise Closed("the chunk stores are closed")
            self._inbox.append(request)
            self._ring_bell()

    def contains(self, keys) -> np.ndarray:
        """bool per key: is it stored, in whatever size."""
        found = np.zeros(len(keys), bool)
        for shelf in self._shelves.values():
            found |= shelf.store.contains(keys)
        if not found.all() and self._sizes is None:
            with self._lock:                        # another process may have begun a new size
                if not self._stopping and time.monotonic() - self._looked > _LOOK_AGAIN_S:
                    self._looking = True
                    self._ring_bell()
        return found

    def forget(self, keys) -> np.ndarray:
        """Drop what this process has stored; bool per key: is it gone?"""
        for shelf in self._shelves.values():
            shelf.store.forget(keys)
        return ~self.contains(keys)

    def stats(self) -> dict:
        """Counts of chunks by their way, and the figures of each store by its size of chunk."""
        return {**self.counts, "stores": {nbytes: shelf.store.stats()
                                          for nbytes, shelf in self._shelves.items()}}

    def stop(self, cancel: bool = False) -> None:
        """End the thread once everything that was submitted is settled; with `cancel` what has
        not started fails instead. No buffer is touched any more when this returns."""
        with self._lock:
            self._stopping, self.cancelled = True, self.cancelled or cancel
            self._ring_bell()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _try_options(self):
        """Wrong options, or a directory that cannot be written, are told now and not when the
        first chunk comes."""
        try:
            trial = tempfile.TemporaryDirectory(prefix="trial-", dir=self.folder)
        except OSError as failed:
            raise StoreError(failed.errno, f"cannot write in {self.folder}") from failed
        with trial as folder:
            BlockStore.open(folder, BlockLayout(1, 1, PAGE), **self._options).close()

    def _ring_bell(self):
        """Wake the thread. The caller holds the lock."""
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)

    # ---- the thread ----

    def _run(self):
        problem = "closed before it started"
        try:
            while not self._step():
                pass
        except BaseException as failed:             # nobody may wait for ever for a dead thread
            problem = f"the thread of the chunk stores has ended: {failed!r}"
            raise
        finally:
            with self._lock:
                self._stopping = True
                os.close(self._bell)
                self._bell = -1
            for job in self._jobs.values():
                job.transfer.cancel()
                self._finish(job)
            self._fail_waiting(problem)
            self._close_shelves()
            self._epoll.close()

    def _fail_waiting(self, problem):
        for shelf in self._shelves.values():
            shelf.fail_waiting(problem)
        while self._inbox:
            request = self._inbox.popleft()
            request.fail(range(len(request.keys)), problem)

    def _step(self) -> bool:
        """Sleep until something has happened, and see to it; True at the end."""
        for fd, _ in self._epoll.poll():
            if fd == self._bell:
                os.eventfd_read(fd)
            else:
                self._drained(fd)
        with self._lock:
            looking, self._looking = self._looking, False
            stopping, cancelled = self._stopping, self.cancelled
        if looking and not stopping:
            self._look()
        while self._inbox and not cancelled:
            self._begin(self._inbox[0])
            self._inbox.popleft()
        if cancelled:
            self._fail_waiting("closed before it started")
            for job in self._jobs.values():
                job.transfer.cancel()
        for shelf in self._shelves.values():
            try:
                self._copy_and_post(shelf)
            except (KvioError, MemoryError) as failed:      # no memory to copy through
                shelf.fail_waiting(str(failed))
        # What waits for memory waits for a job; what came after `stopping` was read is next.
        return stopping and not self._jobs and not self._inbox

    def _close_shelves(self):
        for shelf in self._shelves.values():
            shelf.store.close(drain=True)

    def _look(self):
        """Open the stores of sizes that are there already."""
        self._looked = time.monotonic()
        try:
            names = os.listdir(self.folder)
        except OSError:
            return
        for name in names:
            found = _FOLDER.match(name)
            if found and (self._sizes is None or int(found[1]) in self._sizes):
                with contextlib.suppress(KvioError):
                    self._shelf(int(found[1]), create=False)

    def _shelf(self, nbytes, create):
        """The shelf for chunks of this size; None if there is none and none is to be made."""
        if nbytes in self._shelves:
            return self._shelves[nbytes]
        if self._sizes is not None and nbytes not in self._sizes:
            sizes = ", ".join(map(str, sorted(self._sizes)))
            raise InvalidArgument(f"a chunk of {nbytes} bytes; this store was opened for "
                                  f"chunk_bytes of {sizes}")
        if not create and not os.path.isdir(os.path.join(self.folder, f"chunks-{nbytes}")):
            return None
        if len(self._shelves) >= MAX_SIZES:
            raise InvalidArgument(f"a chunk of {nbytes} bytes; there are {MAX_SIZES} sizes already,"
                                  " each in a store of its own: name those you need in "
                                  "chunk_bytes, and remove folders of others")
        shelf = _Shelf(self.folder, nbytes, self._staging_blocks, create, self._options)
        self._shelves = {**self._shelves, nbytes: shelf}
        return shelf

    def _begin(self, request):
        """Post what can go as it is, and queue what has to be copied."""
        by_size = {}
        places = [place for place, ok in enumerate(request.ok) if ok is None]
        addresses = {place: request.memory[place].__array_interface__["data"][0]
                     for place in places}
        end = 0
        for place in sorted(places, key=addresses.get):
            nbytes = request.memory[place].nbytes
            if addresses[place] < end and not request.write:
                request.settle(place, False, "its buffer overlaps that of another chunk")
                continue
            end = addresses[place] + nbytes
            by_size.setdefault(nbytes, []).append(place)
        for nbytes, places in by_size.items():
            try:
                shelf = self._shelf(nbytes, create=request.write)
                why = "not stored"
            except Exception as failed:
                shelf, why = None, str(failed)
            if shelf is None:
                request.fail(places, why)
            else:
                self._sort(shelf, request, places, addresses)

    def _sort(self, shelf, request, places, addresses):
        """Runs of adjacent buffers are posted, others queue for the pool. `places`: by address."""
        twins, run = {}, []
        for place in places:                # a key that is stored twice goes its way once
            key = request.keys[place] if request.write else place
            twins.setdefault(key, []).append(place)
        for unit in twins.values():
            memory, addr = request.memory[unit[0]], addresses[unit[0]]
            if addr % PAGE or shelf.nbytes % PAGE or not memory.flags.writeable:
                shelf.waiting[request.write].append((request, unit))
                continue
            if run and addresses[run[-1][0]] + shelf.nbytes != addr:
                self._post_run(shelf, request, run, addresses)
                run = []
            run.append(unit)
        if run:
            self._post_run(shelf, request, run, addresses)

    def _post_run(self, shelf, request, run, addresses):
        nbytes = len(run) * shelf.nbytes
        span = _Span(addresses[run[0][0]], nbytes, [request.memory[unit[0]] for unit in run])
        try:
            pool = BlockPool(shelf.layout, len(run), memory=np.asarray(span))
        except (KvioError, MemoryError) as failed:
            for unit in run:
                request.fail(unit, str(failed))
            return
        self.counts["direct_chunks"] += len(run)
        self._post(_Job(shelf, request.write, [(request, unit) for unit in run], pool, False))

    def _copy_and_post(self, shelf):
        for write in (False, True):                 # somebody waits for a load
            queue = shelf.waiting[write]
            while queue:
                units, keys, room = [], set(), shelf.room(write)
                while queue and len(units) < room:
                    request, unit = queue[0]
                    key = request.keys[unit[0]]
                    if write and key in keys:       # of another request: a write takes a key once
                        break
                    keys.add(key)
                    units.append(queue.popleft())
                if not units:
                    break
                self._post_copies(_Job(shelf, write, units, shelf.pool, True))

    def _post_copies(self, job):
        self.counts["staged_chunks"] += len(job.units)
        if job.write:
            job.shelf.storing += len(job.units)
            for (request, unit), block in zip(job.units, job.ids):
                np.copyto(job.pool.full(int(block)).reshape(-1), request.memory[unit[0]])
        self._post(job)

    def _post(self, job):
        keys = [request.keys[unit[0]] for request, unit in job.units]
        ring = job.shelf.rings[job.write]
        try:
            job.transfer = (ring.write if job.write else ring.read)(keys, job.pool, job.ids)
        except Exception as failed:                 # refused: nothing is in flight
            self._settle(job, [str(failed)] * len(keys))
            return
        try:
            fd = job.transfer.fileno()
            self._epoll.register(fd, select.EPOLLIN)
            self._jobs[fd] = job
        except OSError:                             # out of descriptors: this one we wait for
            job.transfer._handle.wait(None)
            self._finish(job)

    def _drained(self, fd):
        job = self._jobs[fd]
        if job.transfer.done:
            del self._jobs[fd]
            self._epoll.unregister(fd)
            self._finish(job)

    def _finish(self, job):
        assert job.transfer.done
        problems = [_why(code, job.write) for code in job.transfer.status.tolist()]
        if job.staged and not job.write:
            for (request, unit), block, problem in zip(job.units, job.ids, problems):
                if not problem:
                    np.copyto(request.memory[unit[0]], job.pool.full(int(block)).reshape(-1))
        self._settle(job, problems)

    def _settle(self, job, problems):
        if job.staged:
            job.pool.free(job.ids)
            job.shelf.storing -= len(job.ids) if job.write else 0
        job.transfer = job.pool = None              # a span's memory is given up before it is told
        for (request, unit), problem in zip(job.units, problems):
            for place in unit:
                request.settle(place, not problem, problem)


def _why(code, write) -> str:
    """What a block's status says to somebody who knows keys only; "" for success."""
    if code == 0:
        return ""
    name = errno_name(code)
    if write:
        return name
    return "not stored" if name.startswith("ENOENT") else f"not loaded: {name}"
