"""Memory of GPUs and streams of work there, by what their owners say of them.

kvio takes others' tensors as they are: `span_of` asks `__cuda_array_interface__` (CuPy, Numba,
PyTorch, JAX) or DLPack (`__dlpack_device__` and `__dlpack__`), which also has the types that the
former does not know, for an address and a length, nothing more. What is in flight on the owner's
streams it does not ask: `after=` of a transfer orders that. `DeviceView` says the same of pieces
of kvio's own pools, and `PinnedMemory` and `DeviceMemory` are memory that kvio allocates.
"""
import contextlib
import errno
import math
import operator
from typing import NamedTuple

import numpy as np

from kvio._ext import nic as _nic
from kvio.errors import (BackendUnavailable, InvalidArgument, MappingFailed, TransferError,
                         checked_int)

__all__ = ["DeviceMemory", "DeviceView", "PinnedMemory", "Span", "check_there", "ordinal_of",
           "span_of", "stream_handle", "typed"]

_NEWEST_DLPACK = (1, 0)


class Span(NamedTuple):
    """Memory of a GPU, and what keeps it. `ordinal` is its device's, or None: nobody has said."""
    addr: int
    nbytes: int
    writable: bool
    owner: tuple
    ordinal: int | None = None


def ordinal_of(span: Span) -> int:
    """The GPU that the memory belongs to; the driver is asked where its owner has not said."""
    if span.ordinal is not None:
        return span.ordinal
    with typed(f"the GPU memory at {span.addr:#x}"):
        return _nic.cuda_device_of(span.addr)


@contextlib.contextmanager
def typed(what):
    """The driver's errors with kvio's types, and what it was about."""
    try:
        yield
    except OSError as failed:
        text = f"{what}: {failed.strerror}"
        if failed.errno == errno.EINVAL:
            raise InvalidArgument(text) from None
        if failed.errno in (errno.ENOSYS, errno.ENODEV):
            raise BackendUnavailable(failed.errno, text) from None
        if failed.errno == errno.ENOMEM:
            raise MappingFailed(failed.errno, text) from None
        raise TransferError(failed.errno, text) from None


# ---- others' memory

def span_of(obj) -> Span | None:
    """Of what lies on a GPU; None for anything else. InvalidArgument: not one contiguous piece."""
    if isinstance(obj, (np.ndarray, bytes, bytearray, memoryview)):
        return None
    try:
        found = None if _is_jax(obj) else _of_interface(obj)
        if found is None and _is_dlpack_of_gpu(obj):
            found = _of_capsule(obj)
    except InvalidArgument:
        raise
    except Exception as wrong:              # another library's, about its own tensor
        raise InvalidArgument(f"this object does not say where its GPU memory is: {wrong!r}; "
                              "pass a contiguous tensor that still has its memory (of PyTorch: "
                              "tensor.detach(), for types that DLPack does not know with "
                              ".view(torch.uint8))") from None
    if found is not None and (found.nbytes == 0 or found.addr == 0):
        raise InvalidArgument("the GPU memory is empty")
    if found is not None and not 0 < found.addr < found.addr + found.nbytes <= 1 << 64:
        raise InvalidArgument(f"this object says that its GPU memory is {found.nbytes} bytes at "
                              f"{found.addr:#x}, which no memory is")
    return found


def _is_jax(obj):
    """JAX's arrays never change, so nobody may write them, whatever their capsule says. They are
    freed when they are donated, whoever has the address: only DLPack keeps them. And they come into
    being later: DLPack waits for that, if no stream is named."""
    return type(obj).__module__.partition(".")[0] in ("jax", "jaxlib")


def _is_dlpack_of_gpu(obj):
    return hasattr(obj, "__dlpack_device__") and \
        int(obj.__dlpack_device__()[0]) in (_nic.DL_CUDA, _nic.DL_MANAGED)


def _of_interface(obj):
    """None: there is no such interface, or DLPack has to say what it cannot (PyTorch raises for
    types without a typestr, such as bfloat16)."""
    try:
        interface = getattr(obj, "__cuda_array_interface__", None)
    except Exception:
        if not hasattr(obj, "__dlpack_device__"):
            raise
        interface = None
    if interface is None:
        return None
    addr, read_only = interface["data"]
    itemsize, strides = int(interface["typestr"][2:]), interface.get("strides")
    shape = tuple(map(int, interface["shape"]))
    if interface.get("mask") is not None:
        raise InvalidArgument("GPU memory with a mask is not taken; pass the data alone")
    _check_contiguous(shape, strides and tuple(map(int, strides)), itemsize)
    ordinal = int(obj.__dlpack_device__()[1]) if _is_dlpack_of_gpu(obj) else None
    return Span(int(addr), math.prod(shape) * itemsize, not read_only, (obj, interface), ordinal)


def _of_capsule(obj):
    capsule = _capsule(obj)
    tensor = _nic.dlpack_look(capsule)
    if tensor["device_type"] not in (_nic.DL_CUDA, _nic.DL_MANAGED):
        raise InvalidArgument("DLPack says of one tensor that it is a GPU's and that it is not")
    shape, strides, bits = tensor["shape"], tensor["strides"], tensor["bits"]
    _check_contiguous(shape, strides, 1)
    if bits % 8 and (bits > 8 or tensor["padded"]):
        bits = -(-bits // 8) * 8            # else several to a byte, as fp4 has it
    nbytes = -(-math.prod(shape) * bits // 8)
    writable = not tensor["read_only"] and not _is_jax(obj)
    return Span(tensor["addr"], nbytes, writable, (obj, capsule), tensor["device_id"])


def _capsule(obj):
    """-1 asks the exporter to order nothing: an address is all that is taken, and `after=` orders
    what follows. (JAX would take -1 for the address of a stream.)"""
    no_stream = {} if _is_jax(obj) else {"stream": -1}
    for options in (no_stream | {"max_version": _NEWEST_DLPACK}, no_stream):
        try:
            return obj.__dlpack__(**options)
        except TypeError:                   # an exporter from before these arguments
            continue
    return obj.__dlpack__()


def _check_contiguous(shape, strides, itemsize):
    if itemsize < 0 or any(length < 0 for length in shape):
        raise InvalidArgument(f"GPU memory of shape {shape} and {itemsize} bytes an element is no "
                              "memory")
    if strides is None or 0 in shape:
        return
    expected, nbytes = [], itemsize
    for length in reversed(shape):
        expected.append(nbytes)
        nbytes *= length
    if len(strides) != len(shape) or any(
            length > 1 and stride != wanted
            for length, stride, wanted in zip(shape, strides, reversed(expected))):
        raise InvalidArgument(f"GPU memory of shape {shape} and strides {strides} is not one "
                              "contiguous piece; pass a contiguous tensor")


# ---- our own

class _Lender:
    """`__cuda_array_interface__` and DLPack of uint8 memory: `addr`, `shape`, `strides` (bytes),
    `ordinal`. Consumers hold the object; what is in flight there is ordered by transfers."""

    __slots__ = ()

    @property
    def device(self) -> str:
        """ "cuda:0"."""
        return f"cuda:{self.ordinal}"

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.shape, "typestr": "|u1", "data": (self.addr, False), "version": 3,
                "strides": None if _is_packed(self.shape, self.strides) else self.strides}

    def __dlpack_device__(self):
        return _nic.DL_CUDA, self.ordinal

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if dl_device is not None and tuple(map(int, dl_device)) != self.__dlpack_device__():
            raise BufferError(f"this memory stays on cuda:{self.ordinal}")
        if copy:
            raise BufferError("this memory is lent, not copied")
        return _nic.dlpack_lend(self, self.addr, self.shape, self.strides, self.ordinal,
                                bool(max_version and max_version[0] >= 1))


class _OwnMemory(_nic.CudaMemory):
    """What kvio allocates: `addr`, `nbytes`, `ordinal`; freed with its last reference."""

    @property
    def device(self) -> str:
        """The GPU that it belongs to, or was pinned for: "cuda:0"."""
        return f"cuda:{self.ordinal}"

    def __repr__(self):
        return f"<{type(self).__name__} {self.nbytes} bytes at {self.addr:#x}, {self.device}>"

    def _span(self, offset, nbytes):
        room = self.nbytes - checked_int("offset", offset, 0, self.nbytes)
        nbytes = room if nbytes is None else checked_int("nbytes", nbytes, 0, room)
        return slice(offset, offset + nbytes)


class PinnedMemory(_OwnMemory):
    """Pinned memory of the host: a writable buffer. `addr`, `nbytes`, and `device`, the GPU that it
    was pinned for; freed with its last reference."""

    def read(self, offset: int = 0, nbytes: int | None = None) -> np.ndarray:
        """A copy of these bytes: uint8 `[nbytes]`."""
        return np.frombuffer(self, np.uint8)[self._span(offset, nbytes)].copy()

    def write(self, offset: int, buffer) -> None:
        """Copy a contiguous buffer to `offset`."""
        data = _bytes_of(buffer)
        np.frombuffer(self, np.uint8)[self._span(offset, len(data))] = data

    def fill(self, value: int, offset: int = 0, nbytes: int | None = None) -> None:
        """Set these bytes to `value`."""
        value = checked_int("value", value, 0, 255)
        np.frombuffer(self, np.uint8)[self._span(offset, nbytes)] = value


class DeviceMemory(_Lender, _OwnMemory):
    """Memory of a GPU: `addr`, `nbytes`, `device`; others take it by `__cuda_array_interface__` or
    DLPack. Freed with its last reference.

    `read`, `write` and `fill` are synchronous, for set-up, tests, and engines that compute on the
    CPU; they wait for no transfer.
    """

    @property
    def shape(self):
        return (self.nbytes,)

    strides = (1,)

    def view(self) -> "DeviceView":
        """All of it, to be indexed and given other shapes."""
        return DeviceView(self.addr, self.shape, self.strides, self.ordinal, self)

    def read(self, offset: int = 0, nbytes: int | None = None) -> np.ndarray:
        """A copy of these bytes: uint8 `[nbytes]`."""
        return self.view()[self._span(offset, nbytes)].read()

    def write(self, offset: int, buffer) -> None:
        """Copy a contiguous buffer to `offset`."""
        data = _bytes_of(buffer)
        self.view()[self._span(offset, len(data))].write(data)

    def fill(self, value: int, offset: int = 0, nbytes: int | None = None) -> None:
        """Set these bytes to `value`."""
        self.view()[self._span(offset, nbytes)].fill(value)


class DeviceView(_Lender):
    """A piece of device memory, uint8 `shape`, `strides` in bytes (None: packed), that keeps
    `owner`. Others take it by `__cuda_array_interface__` or DLPack; indices (ints and slices
    without a step) make smaller ones."""

    __slots__ = ("addr", "shape", "strides", "ordinal", "owner")

    def __init__(self, addr, shape, strides, ordinal, owner):
        self.addr, self.shape, self.ordinal, self.owner = addr, shape, ordinal, owner
        self.strides = _packed(shape) if strides is None else strides

    def __repr__(self):
        return f"<DeviceView of shape {self.shape} at {self.addr:#x}, {self.device}>"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape)

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        addr, shape, strides = self.addr, [], []
        if len(index) > len(self.shape):
            raise InvalidArgument(f"{len(index)} indices into {len(self.shape)} dimensions")
        for at, length, stride in zip(index, self.shape, self.strides):
            if isinstance(at, slice):
                first, stop = _bounds(at, length)
                shape.append(max(stop - first, 0))
                strides.append(stride)
            else:
                first = checked_int("an index", at, -length, length - 1) % length
            addr += first * stride
        rest = len(index)
        return DeviceView(addr, (*shape, *self.shape[rest:]), (*strides, *self.strides[rest:]),
                          self.ordinal, self.owner)

    def reshape(self, *shape) -> "DeviceView":
        """The same bytes, which are packed, in another shape; one length may be -1."""
        lengths = tuple(checked_int("a length", n, -1) for n in shape)
        if lengths.count(-1) == 1:
            rest = -math.prod(lengths)
            lengths = tuple(self.nbytes // rest if n == -1 and rest else n for n in lengths)
        if -1 in lengths or math.prod(lengths) != self.nbytes or \
                not _is_packed(self.shape, self.strides):
            raise InvalidArgument(f"{self} cannot have the shape {shape}")
        return DeviceView(self.addr, lengths, None, self.ordinal, self.owner)

    def read(self) -> np.ndarray:
        """A copy in host memory. Synchronous, for set-up, tests, and engines that compute on the
        CPU; it waits for no transfer."""
        out = np.empty(self.shape, np.uint8)
        with typed("reading device memory"):
            for addr, offset, nbytes in self._pieces():
                _nic.cuda_copy(self.ordinal, out.ctypes.data + offset, addr, nbytes)
        return out

    def write(self, data) -> None:
        """Copy as many bytes from a contiguous buffer; otherwise like `read`."""
        data = _bytes_of(data)
        if len(data) != self.nbytes:
            raise InvalidArgument(f"{len(data)} bytes do not fill {self}")
        with typed("writing device memory"):
            for addr, offset, nbytes in self._pieces():
                _nic.cuda_copy(self.ordinal, addr, data.ctypes.data + offset, nbytes)

    def fill(self, value: int) -> None:
        """Set all bytes to `value`; otherwise like `read`."""
        value = checked_int("value", value, 0, 255)
        with typed("filling device memory"):
            for addr, _, nbytes in self._pieces():
                _nic.cuda_fill(self.ordinal, addr, value, nbytes)

    def _pieces(self):
        """(addr, offset in C order, nbytes) of the contiguous pieces. What is no GPU's memory any
        more would be taken for the host's, and that crashes."""
        if not self.nbytes:
            return
        check_there(self.ordinal, self.addr,
                    1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides)))
        dims = len(self.shape)
        while dims and self.strides[dims - 1:] == _packed(self.shape[dims - 1:]):
            dims -= 1                           # the last dimensions, which are packed
        nbytes = math.prod(self.shape[dims:])
        for number, index in enumerate(np.ndindex(*self.shape[:dims])):
            yield (self.addr + sum(map(operator.mul, index, self.strides)), number * nbytes,
                   nbytes)


def _bounds(piece, length):
    """Of a slice."""
    try:
        first, stop, step = piece.indices(length)
    except (TypeError, ValueError):
        step = None
    if step != 1:
        raise InvalidArgument("a view of device memory takes slices of ints without a step, not "
                              f"{piece!r}")
    return first, stop


def check_there(ordinal: int, addr: int, nbytes: int) -> None:
    """InvalidArgument unless the driver knows both ends of this memory as the GPU's."""
    with typed(f"{nbytes} bytes of GPU memory at {addr:#x} (freed?)"):
        for end in addr, addr + nbytes - 1:
            found = _nic.cuda_device_of(end)
            if found != ordinal:
                raise InvalidArgument(f"the GPU memory at {addr:#x} lies on cuda:{found}, not on "
                                      f"cuda:{ordinal} as its owner says")


def _packed(shape):
    strides, nbytes = [], 1
    for length in reversed(shape):
        strides.append(nbytes)
        nbytes *= length
    return tuple(reversed(strides))


def _is_packed(shape, strides):
    return all(length == 1 or stride == wanted
               for length, stride, wanted in zip(shape, strides, _packed(shape)))


def _bytes_of(buffer):
    try:
        return np.frombuffer(buffer, np.uint8)
    except (ValueError, TypeError, BufferError) as wrong:
        raise InvalidArgument(f"a contiguous buffer of the host is needed: {wrong}") from None


# ---- streams

def stream_handle(stream) -> int:
    """The CUstream of what another library calls a stream: `__cuda_stream__` (cuda.core's
    protocol), `.cuda_stream` (PyTorch), `.ptr` (CuPy), or an int. InvalidArgument for the rest."""
    try:
        handle = _handle_of(stream)
        if not isinstance(handle, bool) and 0 <= operator.index(handle) < 1 << 64:
            return operator.index(handle)
    except Exception:                       # another library's object, and no stream
        pass
    raise InvalidArgument("a stream is an object with __cuda_stream__, .cuda_stream (PyTorch) or "
                          ".ptr (a stream of CuPy), or the int of a CUstream (0: the default "
                          f"stream), not {stream!r}; of an event pass the stream")


def _handle_of(stream):
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, handle = protocol() if callable(protocol) else protocol
        if version != 0:
            raise ValueError
        return int(handle)
    if hasattr(stream, "cuda_stream"):
        return stream.cuda_stream
    if hasattr(stream, "ptr") and hasattr(stream, "wait_event"):    # an event has a ptr too
        return stream.ptr
    return stream
