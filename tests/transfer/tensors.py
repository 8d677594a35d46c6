"""Tensors of other libraries, as far as they tell where their memory is; and the fake GPU's own
streams and memory, as an application has them."""
import contextlib
import ctypes

from kvio.transfer import KV
from nics import pattern

CUDA, CUDA_HOST = 2, 3                      # DLDeviceType
READ_ONLY = 1


class Tensor:
    """Of CuPy's kind: `__cuda_array_interface__` alone, and it keeps `owner`."""

    def __init__(self, addr, nbytes, owner=None, **more):
        self.owner = owner
        self.__cuda_array_interface__ = {"data": (addr, False), "shape": (nbytes,), "version": 3,
                                         "typestr": "|u1", "strides": None} | more


class DlHead(ctypes.Structure):
    """DLTensor."""
    _fields_ = [("data", ctypes.c_uint64), ("device", ctypes.c_int32 * 2),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


class DlPlain(ctypes.Structure):
    """DLManagedTensor."""
    _fields_ = [("tensor", DlHead), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class DlVersioned(ctypes.Structure):
    """DLManagedTensorVersioned."""
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32),
                ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
                ("flags", ctypes.c_uint64), ("tensor", DlHead)]


class DlTensor:
    """By DLPack alone, of 16-bit elements (bfloat16). `versioned`: the version it knows; `raises`:
    what `__dlpack__` raises; `device`: as `__dlpack_device__` has it."""

    def __init__(self, addr, shape, strides=None, *, versioned=None, flags=0, bits=16, offset=0,
                 device=(CUDA, 0), raises=None):
        self.versioned, self.flags, self.raises = versioned, flags, raises
        self.device, self.asked = device, []
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(shape))(*strides) if strides else None
        self._head = DlHead(addr - offset, device, len(shape), 4, bits, 1, self._shape,
                            self._strides, offset)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if self.raises is not None:
            raise self.raises
        if self.versioned is None and "max_version" in options:
            raise TypeError("max_version is an unexpected keyword argument")
        self.asked.append(options)
        if self.versioned is None:
            self._managed, name = DlPlain(self._head), b"dltensor"
        else:
            self._managed, name = DlVersioned(*self.versioned, None, None, self.flags,
                                              self._head), b"dltensor_versioned"
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p,
                                                       ctypes.c_void_p)
        return new(ctypes.addressof(self._managed), name, None)


class Consumer:
    """Takes a capsule as a library does that imports it: it gives it another name, and calls the
    deleter when it is done."""

    def __init__(self, capsule, versioned):
        kind, name = (DlVersioned, b"dltensor_versioned") if versioned else (DlPlain, b"dltensor")
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        self.managed = kind.from_address(pointer(capsule, name))
        self._name = b"used_" + name
        rename = ctypes.pythonapi.PyCapsule_SetName
        rename.argtypes = ctypes.py_object, ctypes.c_char_p
        rename(capsule, self._name)

    def done(self):
        ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(self.managed.deleter)(
            ctypes.addressof(self.managed))


@contextlib.contextmanager
def own_context(fake, device=0):
    """Inside, a context of the application's own, and not the primary one, is current."""
    context = fake.new("cuCtxCreate_v2", 0, device)
    try:
        yield
    finally:
        fake.do("cuCtxDestroy_v2", context)


class Gpu:
    """An application that uses the GPU beside kvio: its memory and streams, in the primary context
    of a device."""

    def __init__(self, fake, open_nic, device=0):
        self.fake, self.device, self._frees = fake, device, []
        self._open_nic = open_nic
        fake.do("cuInit", 0)
        self.context = fake.new("cuDevicePrimaryCtxRetain", device)

    def nic(self, **options):
        return self._open_nic(f"cuda:{self.device}", **options)

    def loop_back(self, *memories, classes=(KV,), **options):
        """(nic, peer, a region for each memory): a NIC connected to itself."""
        nic = self.nic(**options)
        nic.listen(f"me{id(nic)}")
        return nic, nic.connect(f"me{id(nic)}", classes), *map(nic.register, memories)

    def memory(self, nbytes, seed=None):
        """(address, its bytes)."""
        addr = self._new("cuMemFree_v2", "cuMemAlloc_v2", nbytes)
        data = self.fake.bytes_at(addr, nbytes)
        if seed is not None:
            data[:] = pattern(nbytes, seed)
        return addr, data

    def tensor(self, nbytes, seed=None, **more):
        addr, data = self.memory(nbytes, seed)
        return Tensor(addr, nbytes, **more), data

    def free(self, addr):
        self._frees.remove(("cuMemFree_v2", addr))
        self.inside("cuMemFree_v2", addr)

    def stream(self, flags=1):
        return self._new("cuStreamDestroy_v2", "cuStreamCreate", flags)

    def copy(self, target, source, nbytes, stream):
        """Put a copy into a stream, as the application does."""
        self.inside("cuMemcpyAsync", target, source, nbytes, stream)

    def inside(self, name, *arguments):
        """Call the driver with the device's primary context current."""
        self.fake.do("cuCtxPushCurrent_v2", self.context)
        try:
            self.fake.do(name, *arguments)
        finally:
            self.fake.do("cuCtxPopCurrent_v2", 0)

    def _new(self, free, name, *arguments):
        self.fake.do("cuCtxPushCurrent_v2", self.context)
        try:
            handle = self.fake.new(name, *arguments)
        finally:
            self.fake.do("cuCtxPopCurrent_v2", 0)
        self._frees.append((free, handle))
        return handle

    def close(self):
        self.fake.hold(held=False)
        self.fake.do("cuCtxPushCurrent_v2", self.context)
        for name, handle in reversed(self._frees):
            self.fake.call(name, handle)
        self.fake.do("cuCtxPopCurrent_v2", 0)
        self.fake.do("cuDevicePrimaryCtxRelease_v2", self.device)

