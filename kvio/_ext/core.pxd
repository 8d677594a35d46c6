# The C API of include/kvio, word for word. No logic here.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

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

cdef extern from "kvio/nic.h" nogil:
    enum:
        KVIO_NUM_SL
        KVIO_NUM_VL
        KVIO_LOCAL_WRITE
        KVIO_REMOTE_WRITE
        KVIO_REMOTE_READ
    struct kvio_nic:
        pass
    struct kvio_qp:
        pass
    struct kvio_batch:
        pass
    struct kvio_fabric:
        pass
    struct kvio_nic_ops:
        const char *name
    const kvio_nic_ops kvio_soft_ops
    struct kvio_nic_params:
        const char *device
        kvio_fabric *fabric
        uint64_t bytes_per_s
        uint32_t mtu
        uint32_t queue_depth
        uint32_t max_sge
    struct kvio_qp_params:
        uint8_t sl
        uint8_t tclass
        uint32_t depth
    struct kvio_endpoint:
        uint32_t qpn
        uint32_t psn
        uint32_t mtu
        uint32_t rd_atomic
        uint16_t lid
        uint8_t sl
        uint8_t tclass
        uint8_t gid[16]
    struct kvio_qp_info:
        kvio_endpoint local
        uint32_t state
        uint32_t depth
        uint32_t max_sge
        uint32_t free
        uint32_t in_flight
    struct kvio_post:
        const kvio_wr *wrs
        const kvio_sge *sges
        uint64_t local_offset
        uint64_t remote_offset
        uint64_t wr_id
        uint64_t event
        uint32_t count
        uint32_t num_sges
        uint32_t flags
        uint32_t opcode
    struct kvio_counters:
        uint64_t doorbells
        uint64_t work_requests
        uint64_t signalled
        uint64_t completions
        uint64_t errors
        uint64_t tx_packets
        uint64_t rx_packets
        uint64_t tx_busy_ns
        uint64_t rx_busy_ns
        uint64_t tx_bytes[16]
        uint64_t rx_bytes[16]
    struct kvio_batch_info:
        uint32_t count
        uint32_t drained
        uint64_t nbytes
        uint64_t submitted_ns
        uint64_t completed_ns
        const int32_t *status
        const uint8_t *codes
    int kvio_nic_open(kvio_nic **out, const kvio_nic_ops *ops, const kvio_nic_params *params)
    int kvio_nic_close(kvio_nic *nic)
    int kvio_nic_drain(kvio_nic *nic, int cancel, uint64_t timeout_ns)
    void kvio_nic_free(kvio_nic *nic)
    void kvio_nic_counters(kvio_nic *nic, kvio_counters *out)
    int kvio_nic_in_flight(kvio_nic *nic)
    int kvio_nic_event_fd(kvio_nic *nic)
    int kvio_nic_drive(kvio_nic *nic)
    int kvio_nic_reg(kvio_nic *nic, uint64_t addr, uint64_t nbytes, uint32_t access,
                     uint64_t *key)
    int kvio_nic_dereg(kvio_nic *nic, uint64_t key)
    int kvio_qp_create(kvio_nic *nic, const kvio_qp_params *params, kvio_qp **out)
    int kvio_qp_connect(kvio_qp *qp, const kvio_endpoint *remote)
    int kvio_qp_query(kvio_qp *qp, kvio_qp_info *out)
    int kvio_qp_fail(kvio_qp *qp)
    int kvio_qp_reset(kvio_qp *qp)
    int kvio_qp_destroy(kvio_qp *qp)
    int kvio_batch_post(kvio_qp *qp, const kvio_post *post, kvio_batch **out)
    int kvio_batch_poll(kvio_batch *batch)
    int kvio_batch_wait(kvio_batch *batch, uint64_t timeout_ns)
    int kvio_batch_cancel(kvio_batch *batch)
    int kvio_batch_event_fd(kvio_batch *batch)
    void kvio_batch_put(kvio_batch *batch)
    void kvio_batch_look(kvio_batch *batch, kvio_batch_info *out)
    const char *kvio_wc_name(uint32_t status)
    int kvio_wc_errno(uint32_t status)
    int kvio_fabric_open(kvio_fabric **out, int virtual_clock)
    void kvio_fabric_put(kvio_fabric *fabric)
    int kvio_fabric_advance(kvio_fabric *fabric, uint64_t to_ns)
    uint64_t kvio_fabric_now(kvio_fabric *fabric)
    int kvio_soft_fault(kvio_nic *nic, uint32_t fault, uint64_t nth, uint64_t value)
    void kvio_memcpy_loop(const kvio_wr *wrs, size_t count)
