# For the modules that use an index from C: from kvio._ext.index cimport Index
from libc.stdint cimport int64_t, uint32_t

from core cimport kvio_block_io, kvio_index


cdef class Index:
    cdef kvio_index *ptr                # never NULL


# kvio_index_replace() for who links no index: a kvio_replace_fn of kvio/ring.h.
cdef int64_t replace_places(void *index, uint32_t segment, uint32_t first, uint32_t count,
                            const kvio_block_io *blocks, uint32_t num_blocks) noexcept nogil
