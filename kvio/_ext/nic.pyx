# SPDX-License-Identifier: Apache-2.0
# cython: boundscheck=False, wraparound=False
"""Fabrics, NICs, queue pairs and batches: Python's door to include/kvio/nic.h.

Errors are OSError with the errno, or ValueError; kvio.transfer gives them their types.
"""
import os
import socket

cimport cython
from cpython.buffer cimport (PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_WRITABLE,
                             PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals, PyErr_WarnEx
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.errno cimport EBUSY, ENOSPC
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from core cimport *

LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ = KVIO_LOCAL_WRITE, KVIO_REMOTE_WRITE, KVIO_REMOTE_READ
NUM_VL, MAX_VLARB = KVIO_NUM_VL, KVIO_MAX_VLARB
STATES = ("reset", "ready", "error")
RING_NBYTES, PORT_NBYTES = KVIO_SOFT_RING_NBYTES, KVIO_SOFT_PORT_NBYTES
MAX_RAILS, MAX_REGIONS, BUSY_POLL = KVIO_MAX_RAILS, KVIO_MAX_REGIONS, KVIO_NIC_BUSY_POLL
ENDPOINT_NBYTES, AD_NBYTES = sizeof(kvio_endpoint), sizeof(kvio_region_ad)
DROP, DELAY, STATUS = 1, 2, 3               # enum kvio_soft_fault

cdef char *INT32_FORMAT = b"i"
cdef char *DEAF = (b"an RDMA device neither completes what it was given (batches: %d) nor lets go "
                   b"of it; all memory registered with it is kept until this process ends")
cdef uint64_t SLICE_NS = 50_000_000         # sleep no longer without looking for signals
cdef uint64_t FOR_EVER = 1 << 62


cdef int check(int rc) except -1:
    if rc < 0:
        raise OSError(-rc, os.strerror(-rc))
    return rc


cdef uint64_t nanoseconds(timeout) except? 1:
    """Seconds (None: for ever) as ns."""
    if timeout is None:
        return FOR_EVER
    return <uint64_t>min(max(float(timeout), 0.0) * 1e9, 4e18)


def gid_text(gid: bytes) -> str:
    """A GID as the IPv6 address that it is."""
    return socket.inet_ntop(socket.AF_INET6, gid)


def wc_name(uint32_t status) -> str:
    """The name of a work completion status."""
    return kvio_wc_name(status).decode()


include "nic_fabric.pxi"


@cython.no_gc_clear
cdef class Nic:
    """A NIC of the provider "soft", on a fabric, "verbs", on a device, or "cuda", on a GPU
    (`device` is its ordinal). `max_sge` bounds a work request's scatter-gather list. OSError's text
    says what is missing."""
    cdef kvio_nic *_nic
    cdef readonly str provider
    cdef readonly Fabric fabric         # None: not soft
    cdef readonly dict owners           # key -> what keeps the region's memory alive
    cdef readonly bint closed
    cdef object _port                   # soft: the page that other processes map
    cdef int calls                      # inside C without the GIL, on its queue pairs
    cdef int draining                   # of which on all of them at once

    def __cinit__(self, str provider, Fabric fabric=None, str device="", *,
                  uint64_t bytes_per_s=0, uint32_t mtu=4096, uint32_t queue_depth=2048,
                  uint32_t max_sge=16, int32_t gid_index=-1, uint64_t pd=0, uint32_t flags=0,
                  uint32_t copy_way=KVIO_COPY_AUTO, uint32_t max_sms=8, bytes ptx=None):
        cdef kvio_nic_params params
        cdef const kvio_nic_ops *ops
        cdef char why[512]
        cdef bytes name = device.encode()
        cdef int rc
        if provider == "soft":
            ops = &kvio_soft_ops
        elif provider == "verbs":
            ops = &kvio_verbs_ops
        elif provider == "cuda":
            ops = &kvio_cuda_ops
        else:
            raise ValueError(f"there is no provider {provider!r}")
        if (provider == "soft") != (fabric is not None):
            raise ValueError("a NIC has a fabric if it is 'soft', and no other has")
        memset(&params, 0, sizeof(params))
        params.device, params.pd, params.gid_index, params.flags = name, pd, gid_index, flags
        if fabric is not None:
            params.fabric = fabric._fabric
        params.bytes_per_s, params.mtu = bytes_per_s, mtu
        params.queue_depth, params.max_sge = queue_depth, max_sge
        params.copy_way, params.max_sms = copy_way, max_sms
        if ptx is not None:
            params.ptx = ptx
        why[0], params.why, params.why_room = 0, why, sizeof(why)
        with nogil:
            rc = kvio_nic_open(&self._nic, ops, &params)
        if rc < 0:
            raise OSError(-rc, why.decode(errors="replace") or os.strerror(-rc))
        self.provider, self.fabric, self.owners, self.closed = provider, fabric, {}, False

    def __dealloc__(self):
        cdef int left = kvio_nic_free(self._nic)
        if left:                            # the device does not let go: so nobody else gets it
            Py_INCREF(self.owners)
            PyErr_WarnEx(RuntimeWarning, DEAF % left, 1)

    cdef int _check_open(self) except -1:
        if self.closed:
            raise ValueError("the NIC is closed")
        return 0

    def reg(self, owner, uint64_t addr, uint64_t nbytes, uint32_t access) -> int:
        """Register memory that lives at least as long as `owner`; its key."""
        cdef uint64_t key = 0
        cdef int rc
        self._check_open()
        self.calls += 1
        with nogil:                     # a GPU's driver may wait for what Python has to run
            rc = kvio_nic_reg(self._nic, addr, nbytes, access, &key)
        self.calls -= 1
        check(rc)
        self.owners[key] = owner
        return key

    def dereg(self, uint64_t key):
        """EBUSY while a batch in flight names it, ENOENT if it is unknown."""
        cdef int rc
        self._check_open()
        self.calls += 1
        with nogil:
            rc = kvio_nic_dereg(self._nic, key)
        self.calls -= 1
        check(rc)
        del self.owners[key]

    def check_idle(self, uint64_t key):
        """EBUSY while a batch of this NIC names the region."""
        self._check_open()
        check(-EBUSY if kvio_nic_names(self._nic, key) else 0)

    def describe(self, uint64_t key) -> bytes:
        """What another process has to know of a region: see Far.add. ENOENT, EACCES."""
        cdef bytes out
        cdef int64_t length = 4096, room
        self._check_open()
        while True:
            room = length
            out = PyBytes_FromStringAndSize(NULL, room)
            length = kvio_nic_describe(self._nic, key, PyBytes_AS_STRING(out), room)
            if length != -ENOSPC:
                check(<int>min(length, 0))
                return out[:length]
            length = 4 * room

    def info(self) -> dict:
        """What the provider says of its device; `rails` is a list. Others than verbs: limits
        and no rails."""
        cdef kvio_nic_info c
        self._check_open()
        kvio_nic_look(self._nic, &c)
        limits = dict(max_sge=c.max_sge, max_sge_rd=c.max_sge_rd, max_msg_nbytes=c.max_msg_nbytes)
        if self.provider != "verbs":
            return limits | dict(rails=[])
        rails = [dict(device=r.device.decode(), netdev=r.netdev.decode(),
                      link_layer=r.link_layer.decode(), gid_type=r.gid_type.decode(),
                      gid=bytes(r.gid[:16]), gid_index=r.gid_index, numa_node=r.numa_node,
                      port=r.port, mtu=r.mtu, lid=r.lid, uses_wr_api=bool(r.uses_wr_api),
                      bits_per_s=r.bits_per_s) for r in c.rails[:c.num_rails]]
        return limits | dict(max_rd_atomic=c.max_rd_atomic, async_events=c.async_events, pd=c.pd,
                             context=c.context, rails=rails)

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

    def share_port(self, page):
        """Soft: reserve the sending port in this page (a uint8 array, held as long as the NIC),
        which other processes map too. EEXIST."""
        cdef uint8_t[::1] view = page
        self._check_open()
        check(kvio_soft_share_port(self._nic, &view[0], view.shape[0]))
        self._port = page

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
        cdef int rc
        if self.closed:
            return
        with nogil:
            kvio_nic_drive(self._nic)
        if self.calls:
            check(-EBUSY)
        self.closed = True              # nobody begins anything meanwhile
        with nogil:
            rc = kvio_nic_close(self._nic)
        self.closed = rc == 0
        check(rc)
        self.owners.clear()


@cython.no_gc_clear
cdef class Far:
    """The regions of the process at the other end of a connection, as we know them. num_rails: of
    its queue pairs; 0 where rkeys are not used (soft)."""
    cdef kvio_far *_far
    cdef readonly Nic nic
    cdef readonly dict owners           # key -> what keeps its mapping alive
    cdef object _rings                  # soft: what keeps those alive

    def __cinit__(self, Nic nic not None, uint32_t num_rails):
        nic._check_open()
        check(kvio_far_open(nic._nic, num_rails, &self._far))
        self.nic, self.owners = nic, {}

    def __dealloc__(self):
        if self._far is not NULL:
            kvio_far_close(self._far)   # busy: a queue pair holds us, so it cannot be

    cdef int _check_open(self) except -1:
        if self._far is NULL:
            raise ValueError("the connection is closed")
        return 0

    def add(self, const uint8_t[::1] ad not None, uint64_t mapping=0, owner=None):
        """What the other end's Nic.describe gave. mapping: the address where its bytes are mapped
        here. EINVAL: malformed; EEXIST."""
        cdef kvio_region_ad head
        self._check_open()
        if ad.shape[0] < <Py_ssize_t>sizeof(head):
            raise ValueError("the description of a region is cut short")
        memcpy(&head, &ad[0], sizeof(head))
        check(kvio_far_add(self._far, &ad[0], ad.shape[0], <const void *><uintptr_t>mapping))
        self.owners[head.key] = owner

    def remove(self, uint64_t key):
        """The other end has taken a region back. EBUSY in flight, ENOENT."""
        self._check_open()
        check(kvio_far_remove(self._far, key))
        del self.owners[key]

    def join(self, mine, theirs, port, uint64_t bytes_per_s, int wake_fd, int their_wake_fd,
             int pid_fd):
        """Soft: to another process, see kvio_soft_join. mine, theirs and port (or None) are uint8
        arrays, held until `close`. EINVAL, EISCONN."""
        cdef uint8_t[::1] ours = mine, its_port
        cdef const uint8_t[::1] its = theirs
        cdef kvio_soft_join join
        self._check_open()
        memset(&join, 0, sizeof(join))
        if port is not None:
            its_port = port
            if its_port.shape[0] < <Py_ssize_t>KVIO_SOFT_PORT_NBYTES:
                raise ValueError("the page of a port is too small")
            join.port = &its_port[0]
        join.mine, join.theirs = &ours[0], &its[0]
        join.ring_nbytes, join.bytes_per_s = min(ours.shape[0], its.shape[0]), bytes_per_s
        join.wake_fd, join.their_wake_fd, join.pid_fd = wake_fd, their_wake_fd, pid_fd
        check(kvio_soft_far_join(self._far, &join))
        self._rings = mine, theirs, port

    def lost(self):
        """Soft: nothing comes from the other end any more; what is in flight fails."""
        self._check_open()
        with nogil:
            kvio_soft_far_lost(self._far)

    def close(self):
        """EBUSY while a queue pair refers to it."""
        if self._far is not NULL:
            check(kvio_far_close(self._far))
            self._far = NULL
            self.owners.clear()
            self._rings = None


@cython.no_gc_clear
cdef class QueuePair:
    """One connection in one traffic class. `label` names it in errors; `gone` says why nothing
    gets there any more, and what to do."""
    cdef kvio_qp *_qp
    cdef int calls                      # as Nic.calls
    cdef readonly Nic nic
    cdef readonly Nic remote_nic        # held: its memory is read and written through this
    cdef readonly Far far               # or another process's
    cdef readonly uint8_t sl, tclass    # as asked for
    cdef public str label, gone
    cdef readonly str path              # for errors: from which GIDs to which

    def __cinit__(self, Nic nic not None, uint8_t sl, uint8_t tclass, uint32_t depth=0,
                  Far far=None):
        cdef kvio_qp_params params = kvio_qp_params(sl, tclass, depth, NULL)
        nic._check_open()
        if far is not None:
            far._check_open()
            params.far = far._far
        check(kvio_qp_create(nic._nic, &params, &self._qp))
        self.label, self.gone, self.path = "", "", ""
        self.nic, self.far, self.sl, self.tclass = nic, far, sl, tclass

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
        check(kvio_qp_connect(self._qp, info.local, info.num_rails))
        self.remote_nic = other.nic

    def endpoints(self) -> bytes:
        """This end, a kvio_endpoint a rail: what the other end has to know to connect."""
        cdef kvio_qp_info info
        self._check_open()
        check(kvio_qp_query(self._qp, &info))
        return PyBytes_FromStringAndSize(<char *>info.local, info.num_rails * sizeof(kvio_endpoint))

    def connect_endpoints(self, const uint8_t[::1] other not None):
        """To the other end, of which `endpoints` came over the wire. EINVAL: malformed."""
        cdef kvio_endpoint ends[KVIO_MAX_RAILS]
        self._check_open()
        if other.shape[0] == 0 or other.shape[0] % sizeof(kvio_endpoint) or \
                other.shape[0] > <Py_ssize_t>sizeof(ends):
            raise ValueError("malformed endpoints")
        memcpy(ends, &other[0], other.shape[0])
        check(kvio_qp_connect(self._qp, ends, <uint32_t>(other.shape[0] // sizeof(kvio_endpoint))))
        near = [e["gid"] for e in self.query()["rails"]]
        pairs = [f"{gid_text(gid)} to {gid_text(bytes(ends[i].gid[:16]))}"
                 for i, gid in enumerate(near) if any(gid)]
        self.path = f" (GID {', '.join(pairs)})" if pairs else ""

    def query(self) -> dict:
        """Read back from the device. `ignored`: which of sl and tclass it does not have as asked
        (Soft-RoCE knows no sl, an InfiniBand path without GRH no tclass)."""
        cdef kvio_qp_info info
        self._check_open()
        check(kvio_qp_query(self._qp, &info))
        local = info.local[0]
        asked, rails = dict(sl=self.sl, tclass=self.tclass), [
            dict(qpn=e.qpn, psn=e.psn, mtu=e.mtu, rd_atomic=e.rd_atomic, lid=e.lid, sl=e.sl,
                 tclass=e.tclass, gid=bytes(e.gid[:16])) for e in info.local[:info.num_rails]]
        ignored = [name for name in asked if any(rail[name] != asked[name] for rail in rails)]
        return dict(ignored=ignored, qpn=local.qpn, mtu=local.mtu, sl=local.sl, tclass=local.tclass,
                    rails=rails, state=STATES[info.state], depth=info.depth, max_sge=info.max_sge,
                    free=info.free, in_flight=info.in_flight)

    def why(self) -> str:
        """What the device said when it failed, and what to try; "": nothing."""
        cdef kvio_qp_info info
        if self._qp is NULL or self.nic.closed or kvio_qp_query(self._qp, &info) < 0:
            return ""
        return with_driver_hint(info.why.decode(errors="replace"))

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
             uint64_t remote_offset=0, Batch batch=None, stream=None):
        """Post a batch; the descriptors are copied. EINVAL: malformed, nothing was posted. A
        `Batch()` made before can be given, so that who holds the memory holds the batch before
        the device has it. cuda: not before what is in the CUstream `stream` now; EXDEV: it is of
        another device or context, nothing was posted."""
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
        if stream is not None:
            post.stream, post.flags = stream, KVIO_POST_AFTER
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


include "nic_batch.pxi"
include "nic_cuda.pxi"
