# SPDX-License-Identifier: Apache-2.0
# cython: boundscheck=False, wraparound=False
"""Keys, checksums and layer descriptors: Python's door to include/kvio/block.h."""
from cpython.buffer cimport (PyBUF_C_CONTIGUOUS, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release,
                             PyObject_GetBuffer)
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from core cimport (kvio_blake2b16, kvio_block_keys, kvio_crc32c, kvio_crc32c_impl,
                   kvio_crc32c_impls, kvio_describe, kvio_gather, kvio_key, kvio_sge, kvio_side,
                   kvio_wr)

MAX_LENGTH = 1 << 30        # a merged work request stays below every provider's max_msg_sz


def block_keys_into(const uint32_t[::1] ids not None, uint32_t block_tokens,
                    const uint8_t[::1] root not None, uint8_t[::1] out not None):
    """Fill `out` (32 bytes a row) with the chained keys of the full blocks of `ids`."""
    cdef size_t count = ids.shape[0]
    cdef const uint32_t *first = &ids[0] if count else NULL
    if block_tokens == 0 or root.shape[0] != 16:
        raise ValueError("block_tokens must be positive and root 16 bytes")
    if <size_t>out.shape[0] != count // block_tokens * sizeof(kvio_key):
        raise ValueError("out has the wrong length")
    if count < block_tokens:
        return
    with nogil:
        kvio_block_keys(first, count, block_tokens, &root[0], <kvio_key *>&out[0])


def blake2b16(const uint8_t[::1] data not None, const uint8_t[::1] salt not None,
              const uint8_t[::1] person not None):
    """BLAKE2b-128 of data; salt and person are 16 bytes. For the tests."""
    cdef uint8_t[16] out
    if salt.shape[0] != 16 or person.shape[0] != 16:
        raise ValueError("salt and person must be 16 bytes")
    kvio_blake2b16(&data[0] if data.shape[0] else NULL, data.shape[0], &salt[0], &person[0], out)
    return bytes(out[:16])


def crc32c(const uint8_t[::1] data not None, uint32_t crc=0):
    """CRC-32C of the bytes, continuing from `crc`."""
    cdef size_t nbytes = data.shape[0]
    cdef const uint8_t *first = &data[0] if nbytes else NULL
    with nogil:
        crc = kvio_crc32c(crc, first, nbytes)
    return crc


def crc32c_impls():
    """Names of the implementations that this machine can run; the first one is in use."""
    cdef const kvio_crc32c_impl *impl = kvio_crc32c_impls()
    names = []
    while impl.name:
        names.append(impl.name.decode())
        impl += 1
    return names


def crc32c_by(str name not None, const uint8_t[::1] data not None, uint32_t crc=0):
    """`crc32c` by that implementation. For tests and benchmarks."""
    cdef const kvio_crc32c_impl *impl = kvio_crc32c_impls()
    cdef size_t nbytes = data.shape[0]
    cdef const uint8_t *first = &data[0] if nbytes else NULL
    while impl.name and impl.name.decode() != name:
        impl += 1
    if not impl.name:
        raise ValueError(f"this machine has no {name}: {crc32c_impls()}")
    with nogil:
        crc = impl.crc(crc, first, nbytes)
    return crc


cdef bint _take_ids(kvio_side *side, ids, size_t count) except -1:
    """Point the side at its block ids; False if they are not `count`. The caller's arguments keep
    the array alive, so its buffer can be released at once."""
    cdef Py_buffer view
    if ids is None:
        return True
    PyObject_GetBuffer(ids, &view, PyBUF_SIMPLE)
    side.block_ids = <const int64_t *>view.buf
    PyBuffer_Release(&view)
    return <size_t>view.len == 8 * count


def describe_into(wrs, uint32_t opcode, uint64_t local_base, uint64_t local_stride,
                  uint64_t lkey, local_ids, uint64_t remote_base, uint64_t remote_stride,
                  uint64_t rkey, remote_ids, uint32_t nbytes, uint32_t tail_nbytes) -> int:
    """Fill `wrs`, a contiguous array with room for one request a block; how many it took.

    Bases already include the layer's offset. `*_ids` is a contiguous int64 array or None for
    0, 1, 2, ...
    """
    cdef kvio_side local = kvio_side(local_base, local_stride, 0, lkey, NULL)
    cdef kvio_side remote = kvio_side(remote_base, remote_stride, 0, rkey, NULL)
    cdef Py_buffer view
    cdef int64_t made = -1
    PyObject_GetBuffer(wrs, &view, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS)
    cdef size_t count = view.len // sizeof(kvio_wr)
    try:
        if _take_ids(&local, local_ids, count) and _take_ids(&remote, remote_ids, count):
            made = kvio_describe(<kvio_wr *>view.buf, opcode, &local, &remote, count, nbytes,
                                 tail_nbytes, MAX_LENGTH)
    finally:
        PyBuffer_Release(&view)
    if made <= 0:
        raise ValueError("one id per block and 0 < tail_nbytes <= nbytes are needed")
    return made


def gather_into(wrs, sges, uint32_t max_sge):
    """Join neighbours that touch on the remote side (see kvio_gather), in place: how many work
    requests are left, how many entries there are."""
    cdef Py_buffer wr_view, sge_view
    cdef int64_t left = -1
    cdef size_t used = 0
    PyObject_GetBuffer(wrs, &wr_view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
    try:
        PyObject_GetBuffer(sges, &sge_view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
        if wr_view.itemsize == sizeof(kvio_wr) and sge_view.itemsize == sizeof(kvio_sge) and \
                sge_view.len // <Py_ssize_t>sizeof(kvio_sge) >= \
                wr_view.len // <Py_ssize_t>sizeof(kvio_wr):
            left = kvio_gather(<kvio_wr *>wr_view.buf, wr_view.len // sizeof(kvio_wr),
                               <kvio_sge *>sge_view.buf, max_sge, MAX_LENGTH, &used)
        PyBuffer_Release(&sge_view)
    finally:
        PyBuffer_Release(&wr_view)
    if left < 0:
        raise ValueError("work requests without lists, and an entry for each, are needed")
    return left, used


def struct_fields():
    """{struct: {field: (offset, nbytes)}} as the C compiler sees them, for the tests."""
    cdef kvio_wr wr
    cdef kvio_sge sge
    cdef char *w = <char *>&wr
    cdef char *s = <char *>&sge
    return {
        "kvio_wr": {
            "wr_id": (<char *>&wr.wr_id - w, sizeof(wr.wr_id)),
            "local_addr": (<char *>&wr.local_addr - w, sizeof(wr.local_addr)),
            "remote_addr": (<char *>&wr.remote_addr - w, sizeof(wr.remote_addr)),
            "lkey": (<char *>&wr.lkey - w, sizeof(wr.lkey)),
            "rkey": (<char *>&wr.rkey - w, sizeof(wr.rkey)),
            "length": (<char *>&wr.length - w, sizeof(wr.length)),
            "opcode": (<char *>&wr.opcode - w, sizeof(wr.opcode)),
            "sge_first": (<char *>&wr.sge_first - w, sizeof(wr.sge_first)),
            "num_sge": (<char *>&wr.num_sge - w, sizeof(wr.num_sge)),
            "reserved": (<char *>&wr.reserved - w, sizeof(wr.reserved)),
        },
        "kvio_sge": {
            "addr": (<char *>&sge.addr - s, sizeof(sge.addr)),
            "lkey": (<char *>&sge.lkey - s, sizeof(sge.lkey)),
            "length": (<char *>&sge.length - s, sizeof(sge.length)),
            "reserved": (<char *>&sge.reserved - s, sizeof(sge.reserved)),
        },
    }


cdef class BlockStates:
    """The states of a pool's blocks, for what every transfer does. The caller's lock guards it.

    free, leaving: a byte a block; pins: how many transfers touch it."""
    cdef uint8_t[::1] _free, _leaving
    cdef int32_t[::1] _pins

    def __cinit__(self, uint8_t[::1] free not None, uint8_t[::1] leaving not None,
                  int32_t[::1] pins not None):
        if free.shape[0] != leaving.shape[0] or free.shape[0] != pins.shape[0]:
            raise ValueError("one state a block")
        self._free, self._leaving, self._pins = free, leaving, pins

    cdef check(self, const int64_t[:] ids):
        cdef Py_ssize_t i
        for i in range(ids.shape[0]):
            if ids[i] < 0 or ids[i] >= self._pins.shape[0]:
                raise IndexError(f"there is no block {ids[i]}")

    def pin(self, const int64_t[:] ids not None):
        """Pin them (one that is named twice, twice); False, and nothing is done, if some are free
        or leaving."""
        cdef Py_ssize_t i
        self.check(ids)
        for i in range(ids.shape[0]):
            if self._free[ids[i]] or self._leaving[ids[i]]:
                return False
        for i in range(ids.shape[0]):
            self._pins[ids[i]] += 1
        return True

    def unpin(self, const int64_t[:] ids not None):
        """Take one pin from each; are some of them leaving?"""
        cdef Py_ssize_t i
        cdef bint leaving = False
        self.check(ids)
        for i in range(ids.shape[0]):
            self._pins[ids[i]] -= 1
            leaving = leaving or self._leaving[ids[i]]
        return leaving
