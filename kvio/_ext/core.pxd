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
    struct kvio_crc32c_impl:
        const char *name
        uint32_t (*crc)(uint32_t crc, const void *data, size_t nbytes) noexcept nogil
    const kvio_crc32c_impl *kvio_crc32c_impls()
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
    int64_t kvio_gather(kvio_wr *wrs, size_t count, kvio_sge *sges, uint32_t max_sge,
                        uint32_t max_length, size_t *num_sges)

cdef extern from "kvio/nic.h" nogil:
    enum:
        KVIO_NUM_SL
        KVIO_NUM_VL
        KVIO_MAX_VLARB
        KVIO_LOCAL_WRITE
        KVIO_REMOTE_WRITE
        KVIO_REMOTE_READ
        KVIO_MAX_RAILS
        KVIO_MAX_REGIONS
        KVIO_WC_LOC_PRIVATE
        KVIO_WC_REM_PRIVATE
        KVIO_NIC_BUSY_POLL
    struct kvio_nic:
        pass
    struct kvio_qp:
        pass
    struct kvio_batch:
        pass
    struct kvio_fabric:
        pass
    struct kvio_vlarb:
        uint8_t vl
        uint8_t weight
    struct kvio_fabric_params:
        bint virtual_clock
        uint8_t high_limit
        uint8_t sl2vl[16]
        uint32_t num_high
        uint32_t num_low
        kvio_vlarb vlarb_high[64]
        kvio_vlarb vlarb_low[64]
    struct kvio_nic_ops:
        const char *name
    const kvio_nic_ops kvio_soft_ops
    const kvio_nic_ops kvio_verbs_ops
    const kvio_nic_ops kvio_cuda_ops
    enum kvio_copy_way:
        KVIO_COPY_LOOP
        KVIO_COPY_BATCH
        KVIO_COPY_STRIDED
        KVIO_COPY_KERNEL
        KVIO_NUM_COPY_WAYS
        KVIO_COPY_AUTO
    enum kvio_copy_kind:
        KVIO_H2H
        KVIO_H2D
        KVIO_D2H
        KVIO_D2D
        KVIO_NUM_COPY_KINDS
    struct kvio_nic_params:
        const char *device
        const char *ptx
        kvio_fabric *fabric
        uint64_t bytes_per_s
        uint64_t pd
        int32_t gid_index
        uint32_t mtu
        uint32_t queue_depth
        uint32_t max_sge
        uint32_t flags
        uint32_t copy_way
        uint32_t max_sms
        char *why
        size_t why_room
    struct kvio_region_ad:
        uint64_t key, addr, nbytes, slice_nbytes
        uint32_t access, num_rkeys
    struct kvio_far:
        kvio_nic *nic
        uint32_t num_rails
        uint32_t qps
    struct kvio_rail_info:
        char device[64]
        char netdev[32]
        char link_layer[16]
        char gid_type[16]
        uint8_t gid[16]
        int32_t gid_index
        int32_t numa_node
        uint32_t port
        uint32_t mtu
        uint32_t lid
        uint32_t uses_wr_api
        uint64_t bits_per_s
    struct kvio_nic_info:
        uint32_t num_rails
        uint32_t max_sge
        uint32_t max_sge_rd
        uint32_t max_rd_atomic
        uint64_t max_msg_nbytes
        uint64_t async_events
        uint64_t pd
        uint64_t context
        kvio_rail_info rails[8]
    struct kvio_qp_params:
        uint8_t sl
        uint8_t tclass
        uint32_t depth
        kvio_far *far
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
        kvio_endpoint local[8]
        uint32_t num_rails
        uint32_t state
        uint32_t depth
        uint32_t max_sge
        uint32_t free
        uint32_t in_flight
        char why[192]
    enum kvio_post_flags:
        KVIO_POST_AFTER
    struct kvio_post:
        const kvio_wr *wrs
        const kvio_sge *sges
        uint64_t local_offset
        uint64_t remote_offset
        uint64_t wr_id
        uint64_t stream
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
        uint32_t ways
    int kvio_nic_open(kvio_nic **out, const kvio_nic_ops *ops, const kvio_nic_params *params)
    int kvio_nic_close(kvio_nic *nic)
    int kvio_nic_drain(kvio_nic *nic, int cancel, uint64_t timeout_ns)
    int kvio_nic_free(kvio_nic *nic)
    void kvio_nic_counters(kvio_nic *nic, kvio_counters *out)
    int kvio_nic_in_flight(kvio_nic *nic)
    int kvio_nic_event_fd(kvio_nic *nic)
    int kvio_nic_drive(kvio_nic *nic)
    int kvio_nic_reg(kvio_nic *nic, uint64_t addr, uint64_t nbytes, uint32_t access,
                     uint64_t *key)
    int kvio_nic_dereg(kvio_nic *nic, uint64_t key)
    int kvio_nic_names(kvio_nic *nic, uint64_t key)
    int64_t kvio_nic_describe(kvio_nic *nic, uint64_t key, void *out, size_t room)
    void kvio_nic_look(kvio_nic *nic, kvio_nic_info *out)
    int kvio_far_open(kvio_nic *nic, uint32_t num_rails, kvio_far **out)
    int kvio_far_add(kvio_far *far, const void *ad, size_t nbytes, const void *mapping)
    int kvio_far_remove(kvio_far *far, uint64_t key)
    int kvio_far_close(kvio_far *far)
    int kvio_qp_create(kvio_nic *nic, const kvio_qp_params *params, kvio_qp **out)
    int kvio_qp_connect(kvio_qp *qp, const kvio_endpoint *remote, uint32_t count)
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
    int kvio_batch_block_stream(kvio_batch *batch, uint64_t stream)
    const char *kvio_wc_name(uint32_t status)
    int kvio_wc_errno(uint32_t status)
    int kvio_fabric_open(kvio_fabric **out, const kvio_fabric_params *params)
    void kvio_fabric_put(kvio_fabric *fabric)
    int kvio_fabric_advance(kvio_fabric *fabric, uint64_t to_ns)
    uint64_t kvio_fabric_now(kvio_fabric *fabric)
    uint64_t kvio_fabric_next(kvio_fabric *fabric)
    int kvio_soft_fault(kvio_nic *nic, uint32_t fault, uint64_t nth, uint64_t value)
    struct kvio_soft_join:
        void *mine
        const void *theirs
        void *port
        uint64_t ring_nbytes
        uint64_t bytes_per_s
        int wake_fd
        int their_wake_fd
        int pid_fd
    const uint64_t KVIO_SOFT_RING_NBYTES
    const uint64_t KVIO_SOFT_PORT_NBYTES
    int kvio_soft_far_join(kvio_far *far, const kvio_soft_join *join)
    int kvio_soft_far_lost(kvio_far *far)
    int kvio_soft_share_port(kvio_nic *nic, void *page, size_t nbytes)
    void kvio_memcpy_loop(const kvio_wr *wrs, size_t count)

cdef extern from "kvio/gpu.h" nogil:
    struct kvio_copy_cost:
        double fixed_ns, copy_ns, row_ns, byte_ns
        uint32_t there
    struct kvio_cuda_info:
        char name[128]
        int32_t device
        int32_t driver_version
        int32_t capability
        int32_t num_sms
        uint32_t copy_way
        uint32_t kernel_sms
        uint32_t measured
        char missing[4][96]
        kvio_copy_cost costs[4][4]
        uint64_t copies[4]
        uint64_t segments[4]
        char why[192]
    int kvio_cuda_look(kvio_nic *nic, kvio_cuda_info *out)
    enum kvio_cuda_memory:
        KVIO_CUDA_PINNED
        KVIO_CUDA_DEVICE
    int kvio_cuda_alloc(int device, uint64_t nbytes, uint32_t memory, uint64_t *addr,
                        char *why, size_t room)
    void kvio_cuda_free(int device, uint64_t addr, uint32_t memory)
    int kvio_cuda_copy(int device, uint64_t target, uint64_t source, uint64_t nbytes,
                       char *why, size_t room)
    int kvio_cuda_fill(int device, uint64_t target, uint8_t value, uint64_t nbytes,
                       char *why, size_t room)
    int kvio_cuda_device_of(uint64_t addr, char *why, size_t room)

cdef extern from "kvio/ring.h" nogil:
    enum:
        KVIO_PAGE
        KVIO_HEADER_BYTES
    enum kvio_block_flags:
        KVIO_BLOCK_INVALIDATE
        KVIO_BLOCK_SUSPECT
        KVIO_BLOCK_DURABLE
    struct kvio_block_io:
        uint64_t addr
        uint64_t generation
        uint32_t segment
        uint32_t slot
        uint32_t crc
        uint32_t tokens
        uint32_t flags
        int32_t status
        uint8_t key[16]
        uint8_t parent[16]
    void kvio_header_encode(uint8_t *out, const kvio_block_io *block, const uint8_t *uuid,
                            uint64_t nbytes)
    int kvio_header_decode(const uint8_t *header, const uint8_t *uuid, uint32_t slot,
                           uint64_t nbytes, kvio_block_io *out)
    int64_t kvio_headers_scan(const uint8_t *headers, uint32_t count, const uint8_t *uuid,
                              uint64_t nbytes, kvio_block_io *out, uint32_t *damaged)
    struct kvio_page1:
        uint8_t uuid[16]
        uint32_t header_pages
        uint64_t heartbeat
        uint64_t epoch
        uint64_t others
        uint8_t changed[1880]
        uint8_t changed_before[1880]
    void kvio_page1_encode(uint8_t *out, const kvio_page1 *page)
    int kvio_page1_decode(const uint8_t *bytes, const uint8_t *uuid, uint32_t header_pages,
                          kvio_page1 *out)
    struct kvio_store:
        pass
    struct kvio_store_params:
        uint64_t block_nbytes
        uint64_t slot_stride
        uint64_t payload_offset
        uint32_t slots
        uint32_t header_pages
        uint32_t verify
        uint32_t durable
    struct kvio_segment_params:
        int fd
        uint32_t own
        uint8_t uuid[16]
    int kvio_store_new(kvio_store **out, const kvio_store_params *params)
    int kvio_store_add_segment(kvio_store *store, const kvio_segment_params *params)
    int kvio_segment_final(kvio_store *store, uint32_t index)
    int kvio_file_is_direct(int fd)
    int kvio_allocate(int fd, uint64_t offset, uint64_t nbytes)
    int kvio_store_sync_segment(kvio_store *store, uint32_t segment)
    int kvio_store_retire(kvio_store *store, uint32_t segment)
    int kvio_store_sweep(kvio_store *store)
    void kvio_store_stop(kvio_store *store)
    uint64_t kvio_store_page1_writes(const kvio_store *store)
    void kvio_store_free(kvio_store *store)
    ctypedef int64_t (*kvio_replace_fn)(void *index, uint32_t segment, uint32_t first,
                                        uint32_t count, const kvio_block_io *blocks,
                                        uint32_t num_blocks) noexcept nogil
    enum kvio_news:
        KVIO_NEWS_BEAT
        KVIO_NEWS_CLOSED
        KVIO_NEWS_FAILED
    struct kvio_watched:
        uint32_t first, count
        uint32_t news
        int32_t error
    struct kvio_watch_stats:
        uint64_t page1_reads, page1_damaged
        uint64_t header_pages_read
        uint64_t full_reads
        uint64_t headers_damaged, headers_beyond_end
        uint64_t blocks_seen
        uint64_t places_changed
    int64_t kvio_store_poll(kvio_store *store, kvio_replace_fn replace, void *index,
                            const uint32_t *segments, kvio_watched *writers, uint32_t count)
    int kvio_store_unlinked(kvio_store *store, uint32_t *out, uint32_t count)
    int64_t kvio_store_doze(kvio_store *store, const char *folder, int64_t mtime_ns,
                            int64_t poll_ns, int64_t until_ns)
    void kvio_store_rouse(kvio_store *store)
    void kvio_store_watch_stats(kvio_store *store, kvio_watch_stats *out)
    struct kvio_ring:
        pass
    enum kvio_backend:
        KVIO_BACKEND_URING
        KVIO_BACKEND_THREADS
        KVIO_BACKEND_USRBIO
    enum kvio_ring_flags:
        KVIO_RING_IOPOLL
        KVIO_RING_SQPOLL
    struct kvio_ring_params:
        uint32_t backend
        uint32_t queue_depth
        uint32_t io_bytes
        uint32_t flags
        uint64_t read_bytes_per_s
        uint64_t write_bytes_per_s
        uint64_t window_ns
    struct kvio_ring_stats:
        uint64_t read_bytes, write_bytes
        uint64_t read_blocks, write_blocks
        uint64_t read_busy_ns, write_busy_ns
        uint64_t batches_submitted, batches_completed
        uint64_t failed_blocks, checks_failed, cancelled_blocks
        uint64_t ios, short_ios, retries
        uint64_t header_writes, syncs
        uint64_t fixed_ios, registered_bytes
        uint64_t register_errno
        uint64_t setup_flags
        uint64_t check_reads, memory_checks, async_ios
        uint64_t poll_ios, poll_setup_flags
        uint64_t poll_errno, sqpoll_errno
        uint64_t waits
        uint64_t staged_ios, staged_bytes, staging_bytes
        uint64_t stray_completions, length_syncs
    struct kvio_fault:
        uint32_t op_mask
        uint32_t skip
        uint32_t count
        int32_t result
        uint64_t from_offset
        uint64_t to_offset
    int kvio_backend_probe(uint32_t backend)
    int kvio_ring_open(kvio_ring **out, kvio_store *store, const kvio_ring_params *params)
    void kvio_ring_close(kvio_ring *ring)
    void kvio_ring_read_queue(const kvio_ring *ring, uint64_t *nbytes, uint64_t *tokens)
    uint64_t kvio_ring_in_flight(const kvio_ring *ring)
    void kvio_ring_get_stats(kvio_ring *ring, kvio_ring_stats *out)
    int64_t kvio_ring_windows(kvio_ring *ring, int write, uint64_t *out, int64_t count,
                              uint64_t *first)
    void kvio_ring_wake(kvio_ring *ring)
    int kvio_ring_forget(kvio_ring *ring, uint64_t region)
    int kvio_ring_fault(kvio_ring *ring, const kvio_fault *fault)
    void kvio_ring_pause(kvio_ring *ring, int paused)
    struct kvio_ring_batch:
        pass
    struct kvio_ring_batch_params:
        uint32_t write
        uint32_t count
        uint64_t region
        uint64_t region_addr
        uint64_t region_nbytes
        int64_t found_ns
        const kvio_block_io *blocks
    int kvio_ring_batch_submit(kvio_ring_batch **out, kvio_ring *ring,
                             const kvio_ring_batch_params *params)
    int kvio_ring_batch_done(kvio_ring_batch *batch)
    int kvio_ring_batch_wait(kvio_ring_batch *batch, int64_t timeout_ns)
    int kvio_ring_batch_fd(kvio_ring_batch *batch)
    void kvio_ring_batch_cancel(kvio_ring_batch *batch, kvio_ring *ring)
    const int32_t *kvio_ring_batch_status(const kvio_ring_batch *batch)
    const kvio_block_io *kvio_ring_batch_blocks(const kvio_ring_batch *batch)
    void kvio_ring_batch_times(kvio_ring_batch *batch, uint64_t *nbytes, int64_t *submitted_ns,
                             int64_t *completed_ns)
    void kvio_ring_batch_put(kvio_ring_batch *batch)

cdef extern from "kvio/index.h" nogil:
    struct kvio_index:
        pass
    struct kvio_index_stats:
        uint64_t blocks
        uint64_t places
        uint64_t own_places
        uint64_t orphans
        uint64_t ghosts
        uint64_t pinned
        uint64_t memory_bytes
    int kvio_index_new(kvio_index **out)
    void kvio_index_free(kvio_index *index)
    bint kvio_is_root(const uint8_t *key)
    int kvio_index_add_segment(kvio_index *index, uint32_t segment, uint32_t slots, bint own)
    int64_t kvio_index_insert(kvio_index *index, const kvio_block_io *blocks, uint32_t count)
    int64_t kvio_index_replace(kvio_index *index, uint32_t segment, uint32_t first,
                               uint32_t count, const kvio_block_io *blocks,
                               uint32_t num_blocks)
    int kvio_index_remove(kvio_index *index, uint32_t segment, uint32_t slot,
                          uint64_t generation)
    int64_t kvio_index_drop_segment(kvio_index *index, uint32_t segment)
    uint32_t kvio_index_match(kvio_index *index, const kvio_key *keys, uint32_t count)
    uint32_t kvio_index_find(kvio_index *index, const kvio_key *keys, uint32_t count,
                             uint32_t now_s, kvio_block_io *out)
    uint32_t kvio_index_touch(kvio_index *index, const kvio_key *keys, uint32_t count,
                              uint32_t now_s)
    uint32_t kvio_index_pin(kvio_index *index, const kvio_key *keys, uint32_t count, int by)
    int64_t kvio_index_evict(kvio_index *index, uint32_t count, kvio_block_io *out)
    int kvio_index_segment_use(kvio_index *index, uint32_t segment, uint64_t *places,
                               uint32_t *used_s)
    void kvio_index_get_stats(kvio_index *index, kvio_index_stats *out)

cdef extern from "kvio/usrbio.h" nogil:
    enum:
        KVIO_USRBIO_MOUNT_BYTES
    int kvio_usrbio_load(char *why, size_t room)
    int kvio_usrbio_mount(const char *path, char *out, size_t room)
    int kvio_store_set_mount(kvio_store *store, const char *mount)
    int kvio_usrbio_name_region(uint64_t region, const char *path)
