# SPDX-License-Identifier: Apache-2.0
# What only the provider cuda has, and memory that is lent by DLPack: part of nic.pyx.

COPY_WAYS = ("loop", "batch", "strided", "kernel")      # enum kvio_copy_way
COPY_AUTO = KVIO_COPY_AUTO
COPY_KINDS = ("H2H", "H2D", "D2H", "D2D")               # enum kvio_copy_kind

# What to try, by the name of a CUresult. LOST: after these the process has no GPU any more.
KERNEL_FAILED = "a kernel of this process, maybe another library's, has failed: " \
    "compute-sanitizer finds it"
LOST = {
    "ILLEGAL_ADDRESS": "a kernel of this process, maybe another library's, has touched memory that "
                       "it must not: compute-sanitizer finds it",
    "ECC_UNCORRECTABLE": "the GPU's memory is damaged: see nvidia-smi -q -d ECC",
    "NVLINK_UNCORRECTABLE": "NVLink has failed: see nvidia-smi nvlink -e",
    "UNKNOWN": "the driver does not know either: see dmesg for Xid errors",
    **dict.fromkeys(("MISALIGNED_ADDRESS", "LAUNCH_FAILED", "LAUNCH_TIMEOUT", "ASSERT",
                     "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION", "INVALID_ADDRESS_SPACE",
                     "INVALID_PC"), KERNEL_FAILED),
}
DRIVER_HINTS = {
    "OUT_OF_MEMORY": "free some memory, or take less (fewer blocks, fewer NICs)",
    "NOT_SUPPORTED": "this driver or GPU cannot do it: install a newer driver, or open the NIC "
                     "with copy=\"loop\"",
    "NOT_FOUND": "this driver is too old for it: install a newer one, or open the NIC with "
                 "copy=\"loop\"",
    "INVALID_VALUE": "memory that the NIC was given has been freed, or is not what it was",
}
ONLY_NEW = "only a new process can use this GPU again"


def with_driver_hint(text: str) -> str:
    """What the driver has said ("cuda:0: CALL: CUDA_ERROR_... (700): ..."), and what to try."""
    for name, hint in (LOST | DRIVER_HINTS).items():
        if f"CUDA_ERROR_{name} " in text and hint not in text:
            text += f"; {hint}"
            return text if name not in LOST or ONLY_NEW in text else f"{text}; {ONLY_NEW}"
    return text


cdef int check_driver(int rc, const char *why) except -1:
    if rc < 0:
        text = why.decode(errors="replace")
        raise OSError(-rc, with_driver_hint(text) if text else os.strerror(-rc))
    return rc


def cuda_info(Nic nic not None) -> dict:
    """What is known of a GPU and of copying there. `ways`: None, or why there is no such way;
    `costs`: of those that are there, ns, fixed and for each copy, row and byte; `why`: what the
    driver said of the last registration, post or stream that failed. EOPNOTSUPP: no GPU's NIC."""
    cdef kvio_cuda_info c
    nic._check_open()
    check(kvio_cuda_look(nic._nic, &c))
    costs = {kind: {way: dict(fixed_ns=c.costs[k][w].fixed_ns, copy_ns=c.costs[k][w].copy_ns,
                              row_ns=c.costs[k][w].row_ns, byte_ns=c.costs[k][w].byte_ns)
                    for w, way in enumerate(COPY_WAYS) if c.costs[k][w].there}
             for k, kind in enumerate(COPY_KINDS)}
    version, capability = c.driver_version, c.capability
    return dict(
        device=f"cuda:{c.device}", name=c.name.decode(errors="replace"),
        driver=f"{version // 1000}.{version % 1000 // 10}", capability=f"sm_{capability}",
        num_sms=c.num_sms, copy="auto" if c.copy_way == COPY_AUTO else COPY_WAYS[c.copy_way],
        ways={way: c.missing[w].decode(errors="replace") or None
              for w, way in enumerate(COPY_WAYS)},
        kernel_sms=c.kernel_sms, measured=bool(c.measured), costs=costs,
        copies={way: dict(segments=c.segments[w], copies=c.copies[w])
                for w, way in enumerate(COPY_WAYS)}, why=c.why.decode(errors="replace"))


def cuda_device_of(uint64_t addr) -> int:
    """The ordinal of the GPU whose memory this is. EINVAL: nobody's; ENOSYS, ENODEV: no CUDA."""
    cdef char why[512]
    cdef int rc
    why[0] = 0
    with nogil:
        rc = kvio_cuda_device_of(addr, why, sizeof(why))
    return check_driver(rc, why)


def cuda_copy(int ordinal, uint64_t target, uint64_t source, uint64_t nbytes):
    """Copy between addresses, host's or GPU's, that the caller knows to be good; synchronous."""
    cdef char why[512]
    cdef int rc
    why[0] = 0
    with nogil:
        rc = kvio_cuda_copy(ordinal, target, source, nbytes, why, sizeof(why))
    check_driver(rc, why)


def cuda_fill(int ordinal, uint64_t target, uint8_t value, uint64_t nbytes):
    """Fill memory at an address that the caller knows to be good; synchronous."""
    cdef char why[512]
    cdef int rc
    why[0] = 0
    with nogil:
        rc = kvio_cuda_fill(ordinal, target, value, nbytes, why, sizeof(why))
    check_driver(rc, why)


cdef class CudaMemory:
    """Pinned memory of the host (a writable buffer) or memory of the GPU `ordinal`; it is freed
    with its last reference. ENOSYS, ENODEV, ENOMEM, EIO, each with the driver's words."""
    cdef readonly uint64_t addr, nbytes
    cdef readonly int ordinal
    cdef readonly bint is_pinned
    cdef object __weakref__

    def __cinit__(self, int ordinal, uint64_t nbytes, bint is_pinned):
        cdef char why[512]
        cdef int rc
        why[0] = 0
        with nogil:
            rc = kvio_cuda_alloc(ordinal, nbytes,
                                 KVIO_CUDA_PINNED if is_pinned else KVIO_CUDA_DEVICE, &self.addr,
                                 why, sizeof(why))
        if rc < 0:
            self.addr = 0
        check_driver(rc, why)
        self.ordinal, self.nbytes, self.is_pinned = ordinal, nbytes, is_pinned

    def __dealloc__(self):
        if self.addr:
            with nogil:                         # the driver may wait for the GPU
                kvio_cuda_free(self.ordinal, self.addr,
                               KVIO_CUDA_PINNED if self.is_pinned else KVIO_CUDA_DEVICE)

    def __getbuffer__(self, Py_buffer *view, int flags):
        if not self.is_pinned:
            raise BufferError("this is memory of a GPU: the CPU has no address for it")
        PyBuffer_FillInfo(view, self, <void *><uintptr_t>self.addr, self.nbytes, 0, flags)


# ---- DLPack: memory that others lend us, and that we lend. Names and layout are its own.

cdef enum:
    MOST_DIMS = 8
    READ_ONLY = 1               # DLPACK_FLAG_BITMASK_READ_ONLY
    PADDED = 4                  # DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED
    UINT = 1                    # kDLUInt

DL_CUDA, DL_MANAGED = 2, 13     # kDLCUDA, kDLCUDAManaged

cdef struct dl_tensor:
    uint64_t data
    int32_t device_type, device_id
    int32_t ndim
    uint8_t code, bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides            # in elements; NULL: C-contiguous
    uint64_t byte_offset

cdef struct dl_managed:
    dl_tensor tensor
    void *context
    void (*deleter)(dl_managed *) noexcept with gil

cdef struct dl_versioned:
    uint32_t major, minor
    void *context
    void (*deleter)(dl_versioned *) noexcept with gil
    uint64_t flags
    dl_tensor tensor

cdef struct lent:               # what we lend: either kind, its shape, and who keeps the memory
    dl_managed plain
    dl_versioned versioned
    int64_t shape[MOST_DIMS]
    int64_t strides[MOST_DIMS]
    PyObject *owner


def dlpack_look(capsule) -> dict:
    """Where the tensor of a DLPack capsule is. Nobody consumes the capsule: with its last reference
    it gives the memory back. ValueError: no such capsule, or one of a version unknown to us."""
    cdef dl_tensor *tensor
    cdef dl_versioned *versioned
    cdef uint64_t flags = 0
    if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        versioned = <dl_versioned *>PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        if versioned.major != 1:
            raise ValueError(f"DLPack {versioned.major}.{versioned.minor} is not known here")
        flags, tensor = versioned.flags, &versioned.tensor
    elif PyCapsule_IsValid(capsule, b"dltensor"):
        tensor = &(<dl_managed *>PyCapsule_GetPointer(capsule, b"dltensor")).tensor
    else:
        raise ValueError("__dlpack__ gave no capsule of DLPack, or one that somebody has consumed")
    dims = range(tensor.ndim)
    return dict(addr=tensor.data + tensor.byte_offset, device_type=tensor.device_type,
                device_id=tensor.device_id, bits=tensor.bits * tensor.lanes,
                shape=tuple([tensor.shape[i] for i in dims]),
                strides=tuple([tensor.strides[i] for i in dims]) if tensor.strides else None,
                read_only=bool(flags & READ_ONLY), padded=bool(flags & PADDED))


cdef void give_back(lent *memory) noexcept:
    Py_DECREF(<object>memory.owner)
    free(memory)


cdef void delete_plain(dl_managed *managed) noexcept with gil:
    give_back(<lent *>managed.context)


cdef void delete_versioned(dl_versioned *managed) noexcept with gil:
    give_back(<lent *>managed.context)


cdef void drop_capsule(object capsule) noexcept:
    """Nobody has consumed it: then it would have another name."""
    if PyCapsule_IsValid(capsule, b"dltensor"):
        give_back(<lent *>(<dl_managed *>PyCapsule_GetPointer(capsule, b"dltensor")).context)
    elif PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        give_back(<lent *>(<dl_versioned *>
                           PyCapsule_GetPointer(capsule, b"dltensor_versioned")).context)


def dlpack_lend(owner, uint64_t addr, shape, strides, int ordinal, bint is_versioned):
    """A DLPack capsule of uint8 memory of the GPU `ordinal`, `strides` in bytes; it holds `owner`
    for as long as somebody uses it."""
    cdef lent *memory
    cdef dl_tensor tensor
    cdef int i
    if len(shape) > MOST_DIMS:
        raise BufferError(f"kvio lends memory of at most {MOST_DIMS} dimensions, not {len(shape)}")
    memory = <lent *>calloc(1, sizeof(lent))
    if memory is NULL:
        raise MemoryError()
    for i in range(len(shape)):
        memory.shape[i], memory.strides[i] = shape[i], strides[i]
    memset(&tensor, 0, sizeof(tensor))
    tensor.data, tensor.device_type, tensor.device_id = addr, DL_CUDA, ordinal
    tensor.code, tensor.bits, tensor.lanes = UINT, 8, 1
    tensor.ndim, tensor.shape, tensor.strides = len(shape), memory.shape, memory.strides
    memory.plain.tensor = memory.versioned.tensor = tensor
    memory.plain.context = memory.versioned.context = memory
    memory.plain.deleter, memory.versioned.deleter = delete_plain, delete_versioned
    memory.versioned.major, memory.versioned.minor = 1, 0
    memory.owner = <PyObject *>owner
    Py_INCREF(owner)
    try:
        if is_versioned:
            return PyCapsule_New(&memory.versioned, b"dltensor_versioned", drop_capsule)
        return PyCapsule_New(&memory.plain, b"dltensor", drop_capsule)
    except BaseException:
        give_back(memory)
        raise
