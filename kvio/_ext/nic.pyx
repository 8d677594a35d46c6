# SPDX-License-Identifier: Apache-2.0
# cython: boundscheck=False, wraparound=False
"""Fabrics, NICs, queue pairs and batches: Python's door to include/kvio/nic.h.

Errors are OSError with the errno, or ValueError; kvio.transfer gives them their types.
"""
import os

cimport cython
from cpython.buffer cimport (PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_WRITABLE, PyBuffer_Release,
                             PyObject_GetBuffer)
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EBUSY
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from core cimport *

LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ = KVIO_LOCAL_WRITE, KVIO_REMOTE_WRITE, KVIO_REMOTE_READ
NUM_VL = KVIO_NUM_VL
STATES = ("reset", "ready", "error")
DROP, DELAY, STATUS = 1, 2, 3               # enum kvio_soft_fault

cdef char *INT32_FORMAT = b"i"
cdef uint64_t SLICE_NS = 50_000_000         # sleep no longer without looking for signals
cdef uint64_t FOR_EVER = 1 << 62

HINTS = {
    "LOC_LEN_ERR": "a message is longer than the NIC allows",
    "LOC_QP_OP_ERR": "the opcode must be READ or WRITE",
    "LOC_PROT_ERR": "the local address, length or lkey does not lie in a region registered with "
                    "this NIC, or the region lacks local write access; call peer.reset() before "
                    "going on",
    "WR_FLUSH_ERR": "an earlier work request of this queue pair failed; wait for the others, "
                    "then call peer.reset()",
    "REM_ACCESS_ERR": "the remote address, length or rkey does not lie in a region that the peer "
                      "has registered with that access; call peer.reset() before going on",
    "RETRY_EXC_ERR": "the peer does not answer: it was closed or its queue pair is in error",
    "CANCELED": "cancelled before it started",
}


cdef int check(int rc) except -1:
    if rc < 0:
        raise OSError(-rc, os.strerror(-rc))
    return rc


cdef uint64_t nanoseconds(timeout) except? 1:
    """Seconds (None: for ever) as ns."""
    if timeout is None:
        return FOR_EVER
    return <uint64_t>min(max(float(timeout), 0.0) * 1e9, 4e18)


def wc_name(uint32_t status) -> str:
    """The name of a work completion status."""
    return kvio_wc_name(status).decode()


@cython.no_gc
cdef class Fabric:
    """The network that soft NICs are plugged into, and its clock."""
    cdef kvio_fabric *_fabric
    cdef readonly bint is_virtual

    def __cinit__(self, bint is_virtual=False):
        check(kvio_fabric_open(&self._fabric, is_virtual))
        self.is_virtual = is_virtual

    def __dealloc__(self):
        kvio_fabric_put(self._fabric)

    @property
    def now_ns(self) -> int:
        return kvio_fabric_now(self._fabric)

    def advance_to(self, uint64_t to_ns):
        """Move a virtual clock. Nothing happens until somebody drives."""
        check(kvio_fabric_advance(self._fabric, to_ns))


@cython.no_gc_clear
cdef class Nic:
    """A soft NIC. `max_sge` bounds a work request's scatter-gather list."""
    cdef kvio_nic *_nic
    cdef readonly Fabric fabric
    cdef readonly dict owners           # key -> what keeps the region's memory alive
    cdef readonly bint closed
    cdef int calls                      # inside C without the GIL, on its queue pairs
    cdef int draining                   # of which on all of them at once

    def __cinit__(self, Fabric fabric not None, uint64_t bytes_per_s, uint32_t mtu,
                  uint32_t queue_depth, uint32_t max_sge):
        cdef kvio_nic_params params
        memset(&params, 0, sizeof(params))
        params.fabric = fabric._fabric
        params.bytes_per_s, params.mtu = bytes_per_s, mtu
        params.queue_depth, params.max_sge = queue_depth, max_sge
        check(kvio_nic_open(&self._nic, &kvio_soft_ops, &params))
        self.fabric, self.owners, self.closed = fabric, {}, False

    def __dealloc__(self):
        kvio_nic_free(self._nic)

    cdef int _check_open(self) except -1:
        if self.closed:
            raise ValueError("the NIC is closed")
        return 0

    def reg(self, owner, uint64_t addr, uint64_t nbytes, uint32_t access) -> int:
        """Register memory that lives at least as long as `owner`; its key."""
        cdef uint64_t key = 0
        self._check_open()
        check(kvio_nic_reg(self._nic, addr, nbytes, access, &key))
        self.owners[key] = owner
        return key

    def dereg(self, uint64_t key):
        """EBUSY while a batch in flight names it, ENOENT if it is unknown."""
        self._check_open()
        check(kvio_nic_dereg(self._nic, key))
        del self.owners[key]

    @property
    def in_flight(self) -> int:
        """Batches that have not drained."""
        return kvio_nic_in_flight(self._nic)

    def drive(self):
        """Complete what can be completed now, on every NIC of the fabric."""
        self._check_open()
        with nogil:
            kvio_nic_drive(self._nic)

    def drain(self, bint cancel, timeout=None) -> int:
        """Drive or sleep until nothing is in flight; how many batches are left."""
        cdef uint64_t left = nanoseconds(timeout), nap
        cdef int batches
        self._check_open()
        while True:
            nap = min(left, SLICE_NS)
            self.calls += 1
            self.draining += 1
            with nogil:
                batches = kvio_nic_drain(self._nic, cancel, nap)
            self.draining -= 1
            self.calls -= 1
            PyErr_CheckSignals()
            left -= nap
            if batches == 0 or left == 0:
                return batches

    def drive_fd(self) -> int:
        """A timerfd of the fabric: readable when `drive` would complete something."""
        self._check_open()
        return check(kvio_nic_event_fd(self._nic))

    def counters(self) -> dict:
        """The C counters by name; byte counters are lists by sl."""
        cdef kvio_counters c
        kvio_nic_counters(self._nic, &c)
        return dict(doorbells=c.doorbells, work_requests=c.work_requests,
                    signalled_completions=c.signalled, completions=c.completions,
                    errors=c.errors, tx_packets=c.tx_packets, rx_packets=c.rx_packets,
                    tx_busy_ns=c.tx_busy_ns, rx_busy_ns=c.rx_busy_ns,
                    tx_bytes=[c.tx_bytes[sl] for sl in range(KVIO_NUM_SL)],
                    rx_bytes=[c.rx_bytes[sl] for sl in range(KVIO_NUM_SL)])

    def _fault(self, uint32_t fault, uint64_t nth=0, uint64_t value=0):
        """Inject DROP (the nth packet from now), DELAY (value ns) or STATUS; nth 0: none."""
        check(kvio_soft_fault(self._nic, fault, nth, value))

    def close(self):
        """EBUSY while something is in flight or a region is in use."""
        if self.closed:
            return
        with nogil:
            kvio_nic_drive(self._nic)
        if self.calls:
            check(-EBUSY)
        check(kvio_nic_close(self._nic))
        self.closed = True
        self.owners.clear()


@cython.no_gc_clear
cdef class QueuePair:
    """One connection in one traffic class. `label` names it in errors."""
    cdef kvio_qp *_qp
    cdef int calls                      # as Nic.calls
    cdef readonly Nic nic
    cdef readonly Nic remote_nic        # held: its memory is read and written through this
    cdef public str label

    def __cinit__(self, Nic nic not None, uint8_t sl, uint8_t tclass, uint32_t depth=0):
        cdef kvio_qp_params params = kvio_qp_params(sl, tclass, depth)
        nic._check_open()
        check(kvio_qp_create(nic._nic, &params, &self._qp))
        self.nic, self.label = nic, ""

    def __dealloc__(self):
        # A NIC that was closed has destroyed it already. Busy: the NIC will.
        if self._qp is not NULL and not self.nic.closed:
            kvio_qp_destroy(self._qp)

    cdef int _check_open(self) except -1:
        if self._qp is NULL or self.nic.closed:
            raise ValueError("the queue pair is closed")
        return 0

    cdef void _enter(self) noexcept:
        """A call that gives up the GIL; close() refuses to free what it uses."""
        self.calls += 1
        self.nic.calls += 1

    cdef void _leave(self) noexcept:
        self.calls -= 1
        self.nic.calls -= 1

    def connect(self, QueuePair other not None):
        """This end only; the other end connects to us."""
        cdef kvio_qp_info info
        self._check_open()
        other._check_open()
        if self.nic.fabric is not other.nic.fabric:
            raise ValueError("the two NICs are on different fabrics")
        check(kvio_qp_query(other._qp, &info))
        check(kvio_qp_connect(self._qp, &info.local))
        self.remote_nic = other.nic

    def query(self) -> dict:
        """Read back from the device."""
        cdef kvio_qp_info info
        self._check_open()
        check(kvio_qp_query(self._qp, &info))
        return dict(qpn=info.local.qpn, mtu=info.local.mtu, sl=info.local.sl,
                    tclass=info.local.tclass, state=STATES[info.state], depth=info.depth,
                    max_sge=info.max_sge, free=info.free, in_flight=info.in_flight)

    def fail(self):
        """Into the error state: what is queued flushes."""
        self._check_open()
        self._enter()
        with nogil:
            kvio_qp_fail(self._qp)
        self._leave()

    def reset(self):
        """Out of the error state, unconnected. EBUSY while something is in flight."""
        self._check_open()
        check(kvio_qp_reset(self._qp))

    def close(self):
        if self._qp is NULL:
            return
        if self.calls or self.nic.draining:
            check(-EBUSY)
        if not self.nic.closed:
            check(kvio_qp_destroy(self._qp))
        self._qp = NULL

    def post(self, wrs, sges=None, uint32_t opcode=0, uint64_t local_offset=0,
             uint64_t remote_offset=0, Batch batch=None):
        """Post a batch; the descriptors are copied. EINVAL: malformed, nothing was posted. A
        `Batch()` made before can be given, so that who holds the memory holds the batch before
        the device has it."""
        cdef Py_buffer wr_view, sge_view
        cdef kvio_post post
        cdef int rc
        self._check_open()
        if batch is None:
            batch = Batch()
        if batch.qp is not None:
            raise ValueError("the batch was posted already")
        memset(&post, 0, sizeof(post))
        post.local_offset, post.remote_offset = local_offset, remote_offset
        post.opcode = opcode
        PyObject_GetBuffer(wrs, &wr_view, PyBUF_C_CONTIGUOUS)
        try:
            if wr_view.itemsize != sizeof(kvio_wr) or wr_view.len > 0xffffffff:
                raise ValueError("work requests have 64 bytes each")
            post.wrs, post.count = <kvio_wr *>wr_view.buf, wr_view.len // sizeof(kvio_wr)
            if sges is not None:
                PyObject_GetBuffer(sges, &sge_view, PyBUF_C_CONTIGUOUS)
                post.sges = <kvio_sge *>sge_view.buf
                post.num_sges = sge_view.len // sizeof(kvio_sge)
            batch.qp = self
            self._enter()
            with nogil:
                rc = kvio_batch_post(self._qp, &post, &batch._batch)
            self._leave()
            if rc == 0:
                batch._look()
                batch._pending = False
            if sges is not None:
                PyBuffer_Release(&sge_view)
        finally:
            PyBuffer_Release(&wr_view)
        check(rc)
        return batch


@cython.no_gc
cdef class Batch:
    """The handle of a transfer: see kvio.completion for the protocol. Until it has been posted it
    is pending, not drained: whoever looks must not take its memory for free."""
    cdef kvio_batch *_batch
    cdef kvio_batch_info _info
    cdef bint _pending
    cdef readonly QueuePair qp
    cdef Py_ssize_t _shape[1]
    cdef Py_ssize_t _strides[1]

    def __cinit__(self):
        self._pending = True

    def __dealloc__(self):
        if self._batch is not NULL:
            kvio_batch_put(self._batch)

    @property
    def submitted(self) -> bool:
        """Has a queue pair had it?"""
        return self._batch is not NULL

    def abandon(self):
        """It was not and will not be posted."""
        self._pending = False

    cdef kvio_batch *had(self) except NULL:
        if self._batch is NULL:
            raise ValueError("the batch was not posted")
        return self._batch

    cdef bint _look(self) noexcept:
        cdef kvio_batch_info info
        kvio_batch_look(self._batch, &info)
        self._info = info
        return info.drained

    def poll(self) -> bool:
        """Drive without blocking; True once every element has drained."""
        if self._batch is NULL or self._pending:
            return not self._pending
        if self._info.drained:
            return True
        if self.qp.nic.closed:
            return self._look()
        with nogil:
            kvio_batch_poll(self._batch)
        return self._look()

    def wait(self, timeout=None) -> bool:
        """Drive or sleep without the GIL, at most `timeout` seconds."""
        cdef uint64_t left = nanoseconds(timeout), nap
        cdef int done
        if self.poll() or self._pending:
            return not self._pending
        while left:
            nap = min(left, SLICE_NS)
            with nogil:
                done = kvio_batch_wait(self._batch, nap)
            if done:
                return self._look()
            PyErr_CheckSignals()
            left -= nap
        return False

    def cancel(self):
        """Give up what has not started; wait() for the rest."""
        if self._pending or self.poll():
            return
        self.qp._enter()
        with nogil:
            kvio_batch_cancel(self._batch)
        self.qp._leave()

    def fileno(self) -> int:
        """An eventfd, readable once drained."""
        return check(kvio_batch_event_fd(self.had()))

    def drive_fd(self) -> int:
        """The fabric's timerfd."""
        return self.qp.nic.drive_fd()

    @property
    def status(self):
        """int32 per element: 0, -EINPROGRESS or -errno. A view that follows the batch."""
        return memoryview(self)

    def stats(self) -> dict:
        self._look()
        return dict(nbytes=self._info.nbytes, submitted_ns=self._info.submitted_ns,
                    completed_ns=self._info.completed_ns if self._info.drained else None)

    def explain(self, uint32_t element) -> str:
        """Why an element failed: work completion status by name, where, and what to try."""
        if element >= self._info.count:
            raise IndexError(element)
        name = wc_name(self._info.codes[element])
        hint = HINTS.get(name)
        return f"{name} ({self.qp.label})" + (f": {hint}" if hint else "")

    def __getbuffer__(self, Py_buffer *view, int flags):
        if flags & PyBUF_WRITABLE:
            raise BufferError("the status is read-only")
        self._shape[0], self._strides[0] = self._info.count, sizeof(int32_t)
        view.buf, view.obj = <void *>self._info.status, self
        view.len, view.itemsize = self._info.count * sizeof(int32_t), sizeof(int32_t)
        view.readonly, view.ndim = 1, 1
        view.format = INT32_FORMAT if flags & PyBUF_FORMAT else NULL
        view.shape, view.strides = self._shape, self._strides
        view.suboffsets, view.internal = NULL, NULL


def memcpy_loop(wrs):
    """One memcpy per work request, remote to local, in C, nothing checked: benchmarks' floor."""
    cdef Py_buffer view
    PyObject_GetBuffer(wrs, &view, PyBUF_C_CONTIGUOUS)
    cdef size_t count = view.len // sizeof(kvio_wr)
    with nogil:
        kvio_memcpy_loop(<const kvio_wr *>view.buf, count)
    PyBuffer_Release(&view)
