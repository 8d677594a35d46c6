# For the modules that use an index from C: from kvio._ext.index cimport Index
from core cimport kvio_index


cdef class Index:
    cdef kvio_index *ptr                # never NULL
