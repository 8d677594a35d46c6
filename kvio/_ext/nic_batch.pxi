# SPDX-License-Identifier: Apache-2.0
# Batches: part of nic.pyx.

HINTS = {
    "LOC_LEN_ERR": "a message is longer than the NIC allows",
    "LOC_QP_OP_ERR": "the opcode must be READ or WRITE",
    "LOC_PROT_ERR": "the local address, length or lkey does not lie in a region registered with "
                    "this NIC, or the region lacks local write access; call peer.reset() before "
                    "going on",
    "WR_FLUSH_ERR": "an earlier work request of this queue pair failed; wait for the others, "
                    "then call peer.reset()",
    "REM_INV_REQ_ERR": "the peer's queue pair does not take this request: its settings are "
                       "others; call peer.reset(), or connect again",
    "REM_ACCESS_ERR": "the remote address, length or rkey does not lie in a region that the peer "
                      "has registered with that access; call peer.reset() before going on",
    "REM_OP_ERR": "the peer's device could not do it: see its log (dmesg there), then call "
                  "peer.reset()",
    "RETRY_EXC_ERR": "the peer does not answer: it was closed, its queue pair is in error, or "
                     "packets do not get there; look at the link, then call peer.reset()",
    "FATAL_ERR": "the device has failed: see dmesg, close the NIC and open it again",
    "CANCELED": "cancelled before it started",
}
HINTS["RESP_TIMEOUT_ERR"] = HINTS["RNR_RETRY_EXC_ERR"] = HINTS["RETRY_EXC_ERR"]
OTHER_HINT = "see the device's log (dmesg), then call peer.reset()"
PRIVATE = "memory is private to its process: others can read only that of a " \
    "BlockPool(shared=True); call peer.reset() before going on"
OF_DRIVER = "GENERAL_ERR", "FATAL_ERR"      # what the device said of it is known to the queue pair
PRIVATE_HINTS = {KVIO_WC_LOC_PRIVATE: f"the local {PRIVATE}",
                 KVIO_WC_REM_PRIVATE: f"the peer's {PRIVATE}"}


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

    def succeeded(self) -> bool:
        """Is every element's status 0?"""
        cdef uint32_t i
        for i in range(self._info.count):
            if self._info.status[i]:
                return False
        return True

    def stats(self) -> dict:
        """Also `ways`, by which the bytes were copied, where the NIC is a GPU's."""
        self._look()
        stats = dict(nbytes=self._info.nbytes, submitted_ns=self._info.submitted_ns,
                     completed_ns=self._info.completed_ns if self._info.drained else None)
        if self.qp.nic.provider == "cuda":
            stats["ways"] = [way for i, way in enumerate(COPY_WAYS) if self._info.ways >> i & 1]
        return stats

    @property
    def device(self) -> str:
        """cuda: the GPU, "cuda:0"."""
        return cuda_info(self.qp.nic)["device"]

    def block_stream(self, uint64_t stream):
        """cuda: what is put into this CUstream from now on starts after the batch; nobody waits
        here. EAGAIN: not all of it is posted; EIO: something of it has failed; EXDEV: the stream
        is of another device or context; EOPNOTSUPP: this provider has no streams."""
        cdef kvio_batch *batch = self.had()
        cdef int rc
        with nogil:
            rc = kvio_batch_block_stream(batch, stream)
        check(rc)

    def explain(self, uint32_t element) -> str:
        """Why an element failed: work completion status by name, from which GID to which, and what
        to try. Whose it was the transfer's own name says."""
        if element >= self._info.count:
            raise IndexError(element)
        code = self._info.codes[element]
        name = wc_name(code)
        hint = PRIVATE_HINTS.get(code) or HINTS.get(name, OTHER_HINT)
        if self.qp.gone and name in ("WR_FLUSH_ERR", "RETRY_EXC_ERR"):
            hint = self.qp.gone
        elif name in OF_DRIVER:
            hint = self.qp.why() or hint
        return f"{name}{self.qp.path}: {hint}"

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
