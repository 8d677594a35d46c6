# The C API of include/kvio, word for word. No logic here.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "kvio/block.h" nogil:
    struct kvio_key:
        uint8_t key[16]
        uint8_t parent[16]
    void kvio_blake2b16(const void *data, size_t nbytes, const uint8_t *salt,
                        const uint8_t *person, uint8_t *out)
    int64_t kvio_block_keys(const uint32_t *ids, size_t count, uint32_t block_tokens,
                            const uint8_t *root, kvio_key *out)
    uint32_t kvio_crc32c(uint32_t crc, const void *data, size_t nbytes)
    uint32_t kvio_crc32c_portable(uint32_t crc, const void *data, size_t nbytes)
    enum kvio_opcode:
        KVIO_OP_READ
        KVIO_OP_WRITE
    struct kvio_sge:
        uint64_t addr
        uint64_t lkey
        uint32_t length
        uint32_t reserved
    struct kvio_wr:
        uint64_t wr_id
        uint64_t local_addr
        uint64_t remote_addr
        uint64_t lkey
        uint64_t rkey
        uint32_t length
        uint32_t opcode
        uint32_t sge_first
        uint32_t num_sge
        uint64_t reserved
    struct kvio_side:
        uint64_t base
        uint64_t block_stride
        uint64_t layer_offset
        uint64_t key
        const int64_t *block_ids
    int64_t kvio_describe(kvio_wr *out, uint32_t opcode, const kvio_side *local,
                          const kvio_side *remote, size_t count, uint32_t nbytes,
                          uint32_t tail_nbytes, uint32_t max_length)
    void kvio_reoffset(kvio_wr *wrs, size_t count, int64_t local_delta, int64_t remote_delta)
