# SPDX-License-Identifier: Apache-2.0
# The network of soft NICs: part of nic.pyx.

cdef uint32_t fill_table(kvio_vlarb *table, entries) except? 0:
    if len(entries) > KVIO_MAX_VLARB:
        raise ValueError("an arbitration table has at most 64 entries")
    for i, (vl, weight) in enumerate(entries):
        table[i] = kvio_vlarb(vl, weight)
    return len(entries)


@cython.no_gc
cdef class Fabric:
    """The network that soft NICs are plugged into, its clock and its arbitration: an object with
    high_limit, vlarb_high, vlarb_low and sl2vl. EINVAL: see kvio_fabric_open."""
    cdef kvio_fabric *_fabric
    cdef readonly bint is_virtual

    def __cinit__(self, bint is_virtual, arbitration):
        cdef kvio_fabric_params params
        memset(&params, 0, sizeof(params))
        params.virtual_clock, params.high_limit = is_virtual, arbitration.high_limit
        params.num_high = fill_table(params.vlarb_high, arbitration.vlarb_high)
        params.num_low = fill_table(params.vlarb_low, arbitration.vlarb_low)
        if len(arbitration.sl2vl) != KVIO_NUM_SL:
            raise ValueError("sl2vl has one VL for each of the 16 SLs")
        for sl in range(KVIO_NUM_SL):
            params.sl2vl[sl] = arbitration.sl2vl[sl]
        check(kvio_fabric_open(&self._fabric, &params))
        self.is_virtual = is_virtual

    def __dealloc__(self):
        kvio_fabric_put(self._fabric)

    @property
    def now_ns(self) -> int:
        return kvio_fabric_now(self._fabric)

    @property
    def next_ns(self):
        """No completion becomes visible before; None: nothing is under way."""
        cdef uint64_t next_ns = kvio_fabric_next(self._fabric)
        return None if next_ns == <uint64_t>-1 else next_ns

    def advance_to(self, uint64_t to_ns):
        """Move a virtual clock. Nothing happens until somebody drives."""
        check(kvio_fabric_advance(self._fabric, to_ns))
