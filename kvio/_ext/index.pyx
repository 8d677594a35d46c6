# SPDX-License-Identifier: Apache-2.0
# cython: boundscheck=False, wraparound=False
"""The store's index: Python's door to include/kvio/index.h.

Keys are contiguous rows of 32 bytes (KEY_DTYPE), blocks of 72 (BLOCK_IO). Thread-safe; nobody
may write to the arrays while a call runs.
"""
import os

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING
from libc.errno cimport EINPROGRESS
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from core cimport *


cdef check(int64_t rc):
    if rc < 0:
        raise OSError(-rc, os.strerror(-rc))
    return rc


cdef class _Rows:
    """The memory of an array of rows, held."""
    cdef Py_buffer view
    cdef void *data
    cdef uint32_t count

    def __cinit__(self, array, size_t row_nbytes, int flags=0):
        PyObject_GetBuffer(array, &self.view, flags | PyBUF_C_CONTIGUOUS)
        if self.view.len % row_nbytes or self.view.len // row_nbytes > 0xFFFFFFFF:
            raise ValueError(f"{self.view.len} bytes are no rows of {row_nbytes}")
        self.data = self.view.buf
        self.count = <uint32_t>(self.view.len // row_nbytes)

    def __dealloc__(self):
        PyBuffer_Release(&self.view)


cdef _Rows keys_in(keys):
    return _Rows(keys, sizeof(kvio_key))


cdef _Rows blocks_in(blocks):
    return _Rows(blocks, sizeof(kvio_block_io))


cdef int64_t replace_places(void *index, uint32_t segment, uint32_t first, uint32_t count,
                            const kvio_block_io *blocks, uint32_t num_blocks) noexcept nogil:
    return kvio_index_replace(<kvio_index *>index, segment, first, count, blocks, num_blocks)


def is_root(const uint8_t[::1] key not None):
    """Is this the parent of a first block?"""
    if key.shape[0] != 16:
        raise ValueError("a key is 16 bytes")
    return kvio_is_root(&key[0])


def set_addresses(blocks, uint64_t base, uint64_t stride, const int64_t[::1] ids not None):
    """The rows are to lie in blocks `ids` of the pool at `base`."""
    cdef _Rows rows = _Rows(blocks, sizeof(kvio_block_io), PyBUF_WRITABLE)
    cdef kvio_block_io *block = <kvio_block_io *>rows.data
    if rows.count != ids.shape[0]:
        raise ValueError(f"{rows.count} blocks, but {ids.shape[0]} ids")
    for i in range(rows.count):
        block[i].addr = base + <uint64_t>ids[i] * stride


def foreign_keys(blocks, const uint8_t[::1] foreign not None):
    """Keys, one after the other, of the places that were found in the segments that `foreign` (a
    byte a segment) names."""
    cdef _Rows rows = blocks_in(blocks)
    cdef const kvio_block_io *block = <const kvio_block_io *>rows.data
    cdef bytearray out = bytearray(16 * rows.count)
    cdef uint8_t *at = <uint8_t *>PyByteArray_AS_STRING(out)
    cdef size_t used = 0
    for i in range(rows.count):
        if block[i].status == -EINPROGRESS and block[i].segment < foreign.shape[0] and \
                foreign[block[i].segment]:
            memcpy(at + used, block[i].key, 16)
            used += 16
    del out[used:]
    return out


cdef size_t hash_of(const uint8_t *key) noexcept:
    """Keys are hashes already."""
    cdef uint64_t word
    memcpy(&word, key, 8)
    return <size_t>word


def newest_keys(list parts not None, uint32_t most):
    """The first `most` different keys of bytearrays of keys, each once."""
    cdef uint32_t total = 0, used = 0, i
    cdef size_t mask = 1, at
    cdef const uint8_t *keys
    cdef bytearray part, out
    for part in parts:
        total += <uint32_t>(len(part) // 16)
    total = min(total, most)
    while mask < 2 * <size_t>total + 2:
        mask *= 2
    cdef bytearray table = bytearray(4 * mask)          # numbers in `out`, from 1; 0: free
    cdef uint32_t *slots = <uint32_t *>PyByteArray_AS_STRING(table)
    mask -= 1
    out = bytearray(16 * total)
    cdef uint8_t *kept = <uint8_t *>PyByteArray_AS_STRING(out)
    for part in parts:
        keys = <const uint8_t *>PyByteArray_AS_STRING(part)
        for i in range(<uint32_t>(len(part) // 16)):
            if used == total:
                break
            at = hash_of(keys + 16 * i) & mask
            while slots[at] and memcmp(kept + 16 * (slots[at] - 1), keys + 16 * i, 16):
                at = (at + 1) & mask
            if slots[at] == 0:
                memcpy(kept + 16 * used, keys + 16 * i, 16)
                used += 1
                slots[at] = used
    del out[16 * used:]
    return out


cdef class Index:
    def __cinit__(self):
        check(kvio_index_new(&self.ptr))

    def __dealloc__(self):
        kvio_index_free(self.ptr)

    def add_segment(self, uint32_t number, uint32_t slots, bint own):
        """Declare a segment before it holds blocks."""
        check(kvio_index_add_segment(self.ptr, number, slots, own))

    def insert(self, blocks):
        """Add places; returns how many keys were not stored before."""
        cdef _Rows rows = blocks_in(blocks)
        cdef int64_t rc
        with nogil:
            rc = kvio_index_insert(self.ptr, <const kvio_block_io *>rows.data, rows.count)
        return check(rc)

    def replace(self, uint32_t segment, uint32_t first, uint32_t count, blocks):
        """What the `count` slots from `first` on hold now, sorted by slot; returns how many places
        were added or removed."""
        cdef _Rows rows = blocks_in(blocks)
        cdef int64_t rc
        with nogil:
            rc = kvio_index_replace(self.ptr, segment, first, count,
                                    <const kvio_block_io *>rows.data, rows.count)
        return check(rc)

    def remove(self, uint32_t segment, uint32_t slot, uint64_t generation):
        """Forget one place; False if it was not known."""
        return bool(kvio_index_remove(self.ptr, segment, slot, generation))

    def drop_segment(self, uint32_t segment):
        """Forget all places of a segment, and ignore those that still come; returns how many."""
        cdef int64_t rc
        with nogil:
            rc = kvio_index_drop_segment(self.ptr, segment)
        return check(rc)

    def match(self, keys):
        """How many keys from the first on are stored without a gap."""
        cdef _Rows rows = keys_in(keys)
        cdef uint32_t count
        with nogil:
            count = kvio_index_match(self.ptr, <const kvio_key *>rows.data, rows.count)
        return count

    def find_into(self, keys, uint32_t now_s, out):
        """A place for each key into `out`, of as many blocks; returns how many were found."""
        cdef _Rows rows = keys_in(keys), found = _Rows(out, sizeof(kvio_block_io), PyBUF_WRITABLE)
        cdef uint32_t count
        if found.count != rows.count:
            raise ValueError(f"room for {found.count} places, but {rows.count} keys")
        with nogil:
            count = kvio_index_find(self.ptr, <const kvio_key *>rows.data, rows.count, now_s,
                                    <kvio_block_io *>found.data)
        return count

    def touch(self, keys, uint32_t now_s):
        """Mark blocks as used; returns how many own places were touched."""
        cdef _Rows rows = keys_in(keys)
        cdef uint32_t count
        with nogil:
            count = kvio_index_touch(self.ptr, <const kvio_key *>rows.data, rows.count, now_s)
        return count

    def pin(self, keys, int by):
        """Pin (+1) or unpin (-1); returns how many keys from the first on are stored."""
        cdef _Rows rows = keys_in(keys)
        cdef uint32_t count
        with nogil:
            count = kvio_index_pin(self.ptr, <const kvio_key *>rows.data, rows.count, by)
        return count

    def evict_into(self, out):
        """Give up as many own places as `out` has room for; returns how many."""
        cdef _Rows rows = _Rows(out, sizeof(kvio_block_io), PyBUF_WRITABLE)
        cdef int64_t rc
        with nogil:
            rc = kvio_index_evict(self.ptr, rows.count, <kvio_block_io *>rows.data)
        return check(rc)

    def segment_use(self, uint32_t segment):
        """(places, the youngest now_s of a find or touch)."""
        cdef uint64_t places
        cdef uint32_t used_s
        check(kvio_index_segment_use(self.ptr, segment, &places, &used_s))
        return places, used_s

    def stats(self):
        """Figures of struct kvio_index_stats."""
        cdef kvio_index_stats stats
        kvio_index_get_stats(self.ptr, &stats)
        return stats

    def __len__(self):
        cdef kvio_index_stats stats
        kvio_index_get_stats(self.ptr, &stats)
        return stats.blocks
