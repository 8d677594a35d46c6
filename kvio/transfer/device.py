"""Where a GPU's memory is, by what its owner says of it: an address and a length, nothing more.

Two ways are known: `__cuda_array_interface__` (CuPy, Numba, PyTorch) and DLPack
(`__dlpack_device__` and `__dlpack__`), which also has the types that the former does not know.
"""
import ctypes
from typing import NamedTuple

from kvio.errors import InvalidArgument

_CUDA, _CUDA_MANAGED = 2, 13            # DLDeviceType
_DLTENSOR = b"dltensor"


class Span(NamedTuple):
    """Memory of a GPU, and what keeps it."""
    addr: int
    nbytes: int
    writable: bool
    owner: tuple


class _DLTensor(ctypes.Structure):
    """The head of a DLManagedTensor."""
    _fields_ = [("data", ctypes.c_uint64), ("device_type", ctypes.c_int32),
                ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8),
                ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


def span_of(obj) -> Span | None:
    """Of what lies on a GPU; None for anything else. InvalidArgument: not one contiguous piece."""
    try:
        interface = getattr(obj, "__cuda_array_interface__", None)
        if interface is not None:
            found = _of_interface(obj, interface)
        elif hasattr(obj, "__dlpack_device__") and \
                int(obj.__dlpack_device__()[0]) in (_CUDA, _CUDA_MANAGED):
            found = _of_capsule(obj, obj.__dlpack__())
        else:
            return None
    except (KeyError, TypeError, ValueError, RuntimeError, BufferError) as wrong:
        if isinstance(wrong, InvalidArgument):
            raise
        raise InvalidArgument(f"this object does not say where its GPU memory is: {wrong!r}") \
            from None
    if found.nbytes == 0 or found.addr == 0:
        raise InvalidArgument("the GPU memory is empty")
    return found


def _span(addr, shape, strides, itemsize, writable, owner):
    """strides in bytes, or None."""
    expected, nbytes = [], itemsize
    for length in reversed(shape):
        expected.append(nbytes)
        nbytes *= length
    if strides is not None and any(length > 1 and stride != wanted for length, stride, wanted
                                   in zip(shape, strides, reversed(expected))) and nbytes:
        raise InvalidArgument(f"GPU memory of shape {shape} and strides {strides} is not one "
                              "contiguous piece; pass a contiguous tensor")
    return Span(addr, nbytes, writable, owner)


def _of_interface(obj, interface):
    addr, read_only = interface["data"]
    itemsize = int(interface["typestr"][2:])
    strides = interface.get("strides")
    return _span(int(addr), tuple(map(int, interface["shape"])),
                 None if strides is None else tuple(map(int, strides)), itemsize,
                 not read_only, (obj, interface))


def _of_capsule(obj, capsule):
    """Nobody consumes the capsule: with its last reference it gives the memory back."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = _DLTensor.from_address(pointer(capsule, _DLTENSOR))
    itemsize = (tensor.bits * tensor.lanes + 7) // 8
    shape = tuple(tensor.shape[:tensor.ndim])
    strides = tuple(itemsize * s for s in tensor.strides[:tensor.ndim]) if tensor.strides else None
    return _span(tensor.data + tensor.byte_offset, shape, strides, itemsize, True, (obj, capsule))
