# SPDX-License-Identifier: Apache-2.0
# cython: boundscheck=False, wraparound=False
"""The store's rings: Python's door to include/kvio/ring.h.

`Batch` is the *handle* that kvio/completion.py describes. Errors of C come out as OSError; the
store turns them into those of kvio.errors.
"""
import errno
import os
from time import monotonic_ns

from cpython.buffer cimport (PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_ND, PyBUF_WRITABLE,
                             PyBuffer_Release, PyObject_GetBuffer)
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from core cimport *
from kvio._ext.index cimport Index, replace_places

BACKENDS = {"uring": KVIO_BACKEND_URING, "threads": KVIO_BACKEND_THREADS,
            "usrbio": KVIO_BACKEND_USRBIO}
NEWS_BEAT, NEWS_CLOSED, NEWS_FAILED = KVIO_NEWS_BEAT, KVIO_NEWS_CLOSED, KVIO_NEWS_FAILED
INVALIDATE, SUSPECT = KVIO_BLOCK_INVALIDATE, KVIO_BLOCK_SUSPECT
BLOCK_IO_NBYTES = sizeof(kvio_block_io)
cdef int64_t SLICE_NS = 200000000       # at most so long waits a signal that another thread got


cdef check(int64_t rc):
    if rc < 0:
        raise OSError(-rc, os.strerror(-rc))
    return rc


def probe(str backend not None):
    """0 if `backend` runs here, else the errno that says why not."""
    return -kvio_backend_probe(BACKENDS[backend])


def allocate(int fd, uint64_t offset, uint64_t nbytes):
    """fallocate(2): 0, or the errno."""
    cdef int rc
    with nogil:
        rc = kvio_allocate(fd, offset, nbytes)
    return -rc


def is_direct(int fd):
    """Is the file O_DIRECT, on a file system that means it? (tmpfs takes the flag and copies.)"""
    return bool(check(kvio_file_is_direct(fd)))


def encode_header(const uint8_t[::1] block not None, const uint8_t[::1] uuid not None,
                  uint64_t nbytes):
    """The 128 bytes of a block header. For the tests."""
    cdef uint8_t[128] out
    if block.shape[0] != sizeof(kvio_block_io) or uuid.shape[0] != 16:
        raise ValueError("a block is 72 bytes and a uuid 16")
    kvio_header_encode(out, <const kvio_block_io *>&block[0], &uuid[0], nbytes)
    return bytes(out[:128])


def encode_page1(const uint8_t[::1] uuid not None, uint32_t header_pages, uint64_t heartbeat,
                 uint64_t epoch, uint64_t others, const uint8_t[::1] changed not None,
                 const uint8_t[::1] changed_before not None):
    """The 4096 bytes of page 1. For the tests."""
    cdef kvio_page1 page
    cdef bytearray out = bytearray(KVIO_PAGE)
    cdef uint8_t[::1] view = out
    if uuid.shape[0] != 16 or changed.shape[0] != 1880 or changed_before.shape[0] != 1880:
        raise ValueError("a uuid is 16 bytes and a bitmap 1880")
    page.header_pages, page.heartbeat, page.epoch = header_pages, heartbeat, epoch
    page.others = others
    memcpy(page.uuid, &uuid[0], 16)
    memcpy(page.changed, &changed[0], 1880)
    memcpy(page.changed_before, &changed_before[0], 1880)
    kvio_page1_encode(&view[0], &page)
    return bytes(out)


def decode_page1(const uint8_t[::1] data not None, const uint8_t[::1] uuid not None,
                 uint32_t header_pages):
    """(heartbeat, epoch, others, changed, changed_before), or None. For the tests."""
    cdef kvio_page1 page
    if data.shape[0] != KVIO_PAGE or uuid.shape[0] != 16:
        raise ValueError("a page is 4096 bytes and a uuid 16")
    if kvio_page1_decode(&data[0], &uuid[0], header_pages, &page) < 0:
        return None
    return (page.heartbeat, page.epoch, page.others, page.changed[:1880],
            page.changed_before[:1880])


def scan_headers(const uint8_t[::1] headers not None, const uint8_t[::1] uuid not None,
                 uint64_t nbytes, out):
    """Decode headers from slot 0 on into `out` (an array of BLOCK_IO with room for all).

    Returns (how many are valid, how many are damaged).
    """
    cdef Py_buffer view
    cdef uint32_t count = headers.shape[0] // KVIO_HEADER_BYTES, damaged = 0
    cdef int64_t found
    if uuid.shape[0] != 16:
        raise ValueError("a uuid is 16 bytes")
    PyObject_GetBuffer(out, &view, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS)
    try:
        if <uint64_t>view.len < <uint64_t>count * sizeof(kvio_block_io):
            raise ValueError("out is too small")
        if count == 0:
            return 0, 0
        with nogil:
            found = kvio_headers_scan(&headers[0], count, &uuid[0], nbytes,
                                      <kvio_block_io *>view.buf, &damaged)
    finally:
        PyBuffer_Release(&view)
    return found, damaged


def usrbio_load():
    """Open the library of 3FS, once; (0, "") or (errno, what is missing and where it was)."""
    cdef char why[2048]
    cdef int rc
    with nogil:
        rc = kvio_usrbio_load(why, sizeof(why))
    return -rc, (<bytes>why).decode("utf-8", "replace")


def usrbio_mount(path):
    """The mount point of 3FS that an existing path lies on, or None."""
    cdef char[KVIO_USRBIO_MOUNT_BYTES] out
    cdef int rc = kvio_usrbio_mount(os.fsencode(path), out, sizeof(out))
    return None if rc < 0 else os.fsdecode(<bytes>out)


def usrbio_name_region(uint64_t region, path):
    """The memory of `region` is all of the file `path` in /dev/shm; None: it is gone."""
    cdef bytes name = b"" if path is None else os.fsencode(path)
    cdef const char *text = NULL
    if path is not None:
        text = name
    check(kvio_usrbio_name_region(region, text))


cdef class Store:
    """The open files of a store, and the thread that keeps page 1 of its own segments."""
    cdef kvio_store *_store
    cdef public bint direct_io              # whether segments are opened with O_DIRECT

    def __cinit__(self, uint64_t block_nbytes, uint64_t slot_stride, uint64_t payload_offset,
                  uint32_t slots, uint32_t header_pages, bint verify, bint durable):
        cdef kvio_store_params params
        params.block_nbytes, params.slot_stride = block_nbytes, slot_stride
        params.payload_offset = payload_offset
        params.slots, params.header_pages = slots, header_pages
        params.verify, params.durable = verify, durable
        self.direct_io = True
        check(kvio_store_new(&self._store, &params))

    def __dealloc__(self):
        with nogil:
            kvio_store_free(self._store)        # every Ring holds its Store: none is left

    def add_segment(self, int fd, bint own, const uint8_t[::1] uuid not None):
        """Hand over an open file; returns its number."""
        cdef kvio_segment_params params
        params.fd, params.own = fd, own
        memcpy(params.uuid, &uuid[0], 16)
        return check(kvio_store_add_segment(self._store, &params))

    def set_final(self, uint32_t number):
        """Nobody writes this segment any more, and the index is up to date with it: reads that
        look their blocks up from now on trust the index. Never taken back."""
        check(kvio_segment_final(self._store, number))

    def set_mount(self, mount):
        """The mount point of 3FS, before the first ring of the back end usrbio."""
        check(kvio_store_set_mount(self._store, os.fsencode(mount)))

    @property
    def page1_writes(self):
        return kvio_store_page1_writes(self._store)

    def sync_segment(self, uint32_t segment):
        """fsync; a retired segment has nothing to lose."""
        cdef int rc
        with nogil:
            rc = kvio_store_sync_segment(self._store, segment)
        check(rc)

    def retire(self, uint32_t segment):
        """Its file is gone: from now on reads of it miss and writes to it fail."""
        check(kvio_store_retire(self._store, segment))

    def sweep(self):
        """Close files of retired segments that nobody uses; how many are left."""
        cdef int left
        with nogil:
            left = kvio_store_sweep(self._store)
        return left

    def unlinked(self):
        """Numbers of own segments whose file has no name any more (the first 64)."""
        cdef uint32_t out[64]
        cdef int count
        with nogil:
            count = kvio_store_unlinked(self._store, out, 64)
        return [out[i] for i in range(count)]

    def poll(self, Index index not None, const uint32_t[::1] segments not None,
             writers):
        """Look at foreign writers and tell the index what has changed. `writers` is an array of
        kvio_watched (first and count of its `segments`, newest first; news and error are filled
        in). Returns how many have news."""
        cdef Py_buffer view
        cdef int64_t rc
        if segments.shape[0] == 0:
            return 0
        PyObject_GetBuffer(writers, &view, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS)
        cdef kvio_watched *first = <kvio_watched *>view.buf
        cdef uint32_t count = <uint32_t>(view.len // sizeof(kvio_watched))
        try:
            for i in range(count):
                if <uint64_t>first[i].first + first[i].count > <uint64_t>segments.shape[0]:
                    raise ValueError("a writer has segments that were not passed")
            with nogil:
                rc = kvio_store_poll(self._store, replace_places, index.ptr, &segments[0],
                                     first, count)
        finally:
            PyBuffer_Release(&view)
        return check(rc)

    def doze(self, bytes folder not None, int64_t mtime_ns, double poll_s, double until_s):
        """Look every poll_s whether Watch.look is due: the directory or an own file's name has
        changed, or until_s (time.monotonic) has come. How often it looked."""
        cdef const char *name = folder
        cdef int64_t looks
        with nogil:
            looks = kvio_store_doze(self._store, name, mtime_ns, <int64_t>(poll_s * 1e9),
                                    <int64_t>(until_s * 1e9))
        return looks

    def rouse(self):
        """End `doze`, for good."""
        kvio_store_rouse(self._store)

    def watch_stats(self):
        """Counters of `poll`."""
        cdef kvio_watch_stats stats
        with nogil:
            kvio_store_watch_stats(self._store, &stats)
        return stats

    def stop(self):
        """Stop the keeper after a last page 1. Close the rings first."""
        with nogil:
            kvio_store_stop(self._store)


cdef class Ring:
    """One queue of the device and the C thread that owns it."""
    cdef kvio_ring *_ring
    cdef Store _store
    cdef readonly uint64_t window_ns

    def __cinit__(self, Store store not None, str backend not None, uint32_t queue_depth,
                  uint32_t io_bytes, uint64_t read_bytes_per_s, uint64_t write_bytes_per_s,
                  uint64_t window_ns=1000000000, bint iopoll=False, bint sqpoll=False):
        cdef kvio_ring_params params
        cdef int rc
        params.backend, params.queue_depth = BACKENDS[backend], queue_depth
        params.io_bytes, params.window_ns = io_bytes, window_ns
        params.flags = (KVIO_RING_IOPOLL if iopoll else 0) | (KVIO_RING_SQPOLL if sqpoll else 0)
        params.read_bytes_per_s = read_bytes_per_s
        params.write_bytes_per_s = write_bytes_per_s
        self._store, self.window_ns = store, window_ns
        with nogil:
            rc = kvio_ring_open(&self._ring, store._store, &params)
        check(rc)

    def __dealloc__(self):
        with nogil:
            kvio_ring_close(self._ring)

    cdef kvio_ring *opened(self) except NULL:
        if self._ring is NULL:
            raise ValueError("the ring is closed")
        return self._ring

    def submit(self, bint write, blocks, uint64_t region, uint64_t region_addr,
               uint64_t region_nbytes, Batch batch=None, int64_t found_ns=0):
        """Submit an array of BLOCK_IO (copied); returns its Batch. A `Batch()` made before can be
        given, so that who holds the memory holds the batch before the device has it. `found_ns`:
        time.monotonic_ns() before the places were looked up; see `Store.set_final`."""
        cdef kvio_ring_batch_params params
        cdef kvio_ring *ring = self.opened()
        cdef Py_buffer view
        cdef int rc
        if batch is None:
            batch = Batch()
        if batch._batch is not NULL:
            raise ValueError("the batch was submitted already")
        PyObject_GetBuffer(blocks, &view, PyBUF_C_CONTIGUOUS)
        params.write, params.count = write, <uint32_t>(view.len // sizeof(kvio_block_io))
        params.region, params.region_addr = region, region_addr
        params.region_nbytes = region_nbytes
        params.found_ns = found_ns
        params.blocks = <const kvio_block_io *>view.buf
        # With the GIL: close() must not free the ring under us. The ring's thread never needs it.
        rc = kvio_ring_batch_submit(&batch._batch, ring, &params)
        PyBuffer_Release(&view)
        check(rc)
        batch._ring, batch.num_blocks = self, params.count
        return batch

    @property
    def read_queue(self):
        """(bytes, tokens) of reads that are outstanding."""
        cdef uint64_t nbytes, tokens
        kvio_ring_read_queue(self.opened(), &nbytes, &tokens)
        return nbytes, tokens

    @property
    def in_flight(self):
        """Batches that have not drained; none once the ring is closed."""
        return 0 if self._ring is NULL else kvio_ring_in_flight(self._ring)

    @property
    def register_errno(self):
        """Why some region uses plain buffers; 0 if none does, or the ring is closed."""
        cdef kvio_ring_stats stats
        if self._ring is NULL:
            return 0
        kvio_ring_get_stats(self._ring, &stats)
        return stats.register_errno

    def refused(self):
        """[(name, errno)] of the polling that was asked for and is not had."""
        cdef kvio_ring_stats stats
        if self._ring is NULL:
            return []
        kvio_ring_get_stats(self._ring, &stats)
        return [(name, code) for name, code in
                (("iopoll", stats.poll_errno), ("sqpoll", stats.sqpoll_errno)) if code]

    def stats(self):
        cdef kvio_ring_stats stats
        kvio_ring_get_stats(self.opened(), &stats)
        return stats

    def windows(self, bint write):
        """(number of the first window, bytearray of one u64 a window)."""
        cdef uint64_t first
        cdef kvio_ring *ring = self.opened()
        cdef int64_t count = kvio_ring_windows(ring, write, NULL, 0, &first)
        cdef bytearray out = bytearray(8 * count)
        cdef uint8_t[::1] view = out
        if count:
            kvio_ring_windows(ring, write, <uint64_t *>&view[0], count, &first)
        return first, out

    def wake(self):
        """Let the ring's thread look at what has happened."""
        if self._ring is not NULL:
            kvio_ring_wake(self._ring)

    def forget(self, uint64_t region):
        """The memory of this region is gone."""
        if self._ring is not NULL:
            check(kvio_ring_forget(self._ring, region))

    def close(self):
        """Cancel what has not started, drain the rest, stop the thread."""
        cdef kvio_ring *ring = self._ring
        self._ring = NULL
        with nogil:
            kvio_ring_close(ring)

    def _fault(self, uint32_t op_mask, int32_t result, uint32_t count=1, uint32_t skip=0,
               uint64_t from_offset=0, uint64_t to_offset=0xFFFFFFFFFFFFFFFF):
        """For tests: `count` operations after `skip` get `result` (-errno, or > 0: short)."""
        cdef kvio_fault fault
        fault.op_mask, fault.result, fault.count, fault.skip = op_mask, result, count, skip
        fault.from_offset, fault.to_offset = from_offset, to_offset
        check(kvio_ring_fault(self.opened(), &fault))

    def _pause(self, bint paused):
        """For tests: start nothing while paused."""
        kvio_ring_pause(self.opened(), paused)


cdef class _Array:
    """Memory of a batch as a read-only buffer; holds the batch."""
    cdef object _owner
    cdef const void *_data
    cdef Py_ssize_t _shape, _stride
    cdef bint _ints

    def __getbuffer__(self, Py_buffer *view, int flags):
        if flags & PyBUF_WRITABLE:
            raise BufferError("read-only")
        view.buf, view.obj, view.readonly = <void *>self._data, self, 1
        view.len, view.itemsize = self._shape * self._stride, self._stride
        view.format = NULL
        if flags & PyBUF_FORMAT:
            view.format = "i" if self._ints else "B"
        view.ndim, view.shape = 1, &self._shape
        view.strides = &self._stride
        view.suboffsets, view.internal = NULL, NULL

    def __releasebuffer__(self, Py_buffer *view):
        pass


cdef class Batch:
    """A batch in flight or drained; its ring completes it whether or not anybody looks. Before it
    is submitted it is pending, not drained: whoever looks must not take its memory for free."""
    cdef kvio_ring_batch *_batch
    cdef bint _pending
    cdef Ring _ring
    cdef readonly uint32_t num_blocks

    def __cinit__(self):
        self._pending = True

    def __dealloc__(self):
        kvio_ring_batch_put(self._batch)

    @property
    def submitted(self):
        """Has a ring had it?"""
        return self._batch is not NULL

    def abandon(self):
        """It was not and will not be submitted."""
        self._pending = False

    cdef kvio_ring_batch *had(self) except NULL:
        if self._batch is NULL:
            raise ValueError("the batch was not submitted")
        return self._batch

    def poll(self):
        """True once drained."""
        if self._batch is NULL:
            return not self._pending
        return bool(kvio_ring_batch_done(self._batch))

    def wait(self, timeout_s=None):
        """Sleep without the GIL until drained (True) or for timeout_s (False). Signal handlers
        run meanwhile."""
        cdef int64_t left = SLICE_NS
        cdef int64_t end = 0 if timeout_s is None else monotonic_ns() + max(0, int(timeout_s * 1e9))
        cdef bint done = self.poll()
        while left and not done and self._batch is not NULL:
            if end:
                left = max(0, end - <int64_t>monotonic_ns())
            with nogil:
                done = kvio_ring_batch_wait(self._batch, min(left, SLICE_NS))
            PyErr_CheckSignals()
        return bool(done)

    def cancel(self):
        """What has not started gets -ECANCELED; returns once the rest has drained."""
        if self._batch is NULL or self.poll():
            return
        if self._ring._ring is not NULL:
            kvio_ring_batch_cancel(self._batch, self._ring._ring)
        self.wait(None)

    def fileno(self):
        """An eventfd, readable once drained."""
        return check(kvio_ring_batch_fd(self.had()))

    def drive_fd(self):
        """-1: the ring's thread makes the progress."""
        return -1

    @property
    def status(self):
        """int32 per block, read-only: 0, -EINPROGRESS or -errno."""
        cdef _Array array = _Array.__new__(_Array)
        array._owner, array._data = self, kvio_ring_batch_status(self.had())
        array._shape, array._stride, array._ints = self.num_blocks, 4, True
        return array

    @property
    def blocks(self):
        """The blocks as bytes, with what a write has filled in. Read it when drained."""
        cdef _Array array = _Array.__new__(_Array)
        array._owner, array._data = self, kvio_ring_batch_blocks(self.had())
        array._shape = self.num_blocks * sizeof(kvio_block_io)
        array._stride, array._ints = 1, False
        return array

    def stats(self):
        """nbytes asked for, submitted_ns and completed_ns (CLOCK_MONOTONIC; 0: not yet)."""
        cdef uint64_t nbytes
        cdef int64_t submitted, completed
        kvio_ring_batch_times(self.had(), &nbytes, &submitted, &completed)
        return {"nbytes": nbytes, "submitted_ns": submitted, "completed_ns": completed}
