"""The storage types of KV-Cache, and rounding to them."""
import numpy as np

from kvio.errors import InvalidArgument

# bfloat16 is the upper half of a float32, and numpy has no type for it
STORAGE = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2")}


def storage_dtype(name):
    if name not in STORAGE:
        raise InvalidArgument(f"kv_dtype {name!r}; known: {', '.join(STORAGE)}")
    return STORAGE[name]


def to_storage(x, name):
    """float32 -> a new contiguous array of the storage dtype, to nearest, ties to even."""
    if name != "bfloat16":
        return x.astype(STORAGE[name], order="C")
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype("<u2")     # rounding would wrap a NaN


def from_storage(x, name, out):
    """Storage dtype -> `out`, float32 of the same shape; exact."""
    if name != "bfloat16":
        out[...] = x
        return
    wide = x.astype(np.uint32)
    wide <<= 16
    out[...] = wide.view(np.float32)
