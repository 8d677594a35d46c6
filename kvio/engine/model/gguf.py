"""Reads GGUF v2 and v3 files: metadata, and tensors as float32.

Every length in the file is checked before it is used, so a truncated or foreign file ends in one
InvalidArgument that names the file, and never in a wild read or a huge allocation.
"""
import math
import mmap
import os
import struct

import numpy as np

from kvio.errors import InvalidArgument

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?",
            10: "<Q", 11: "<q", 12: "<d"}
_MAX_DIMS = 4           # the format's own limit
_MIN_INFO_NBYTES = 24   # the shortest tensor description: it bounds the announced count


def _f32(raw):
    return raw.view("<f4").astype(np.float32)       # a copy: the file is unmapped later


def _f16(raw):
    return raw.view("<f2").astype(np.float32)


def _q8_0(raw):
    """Blocks of 32 values: float16 scale, 32 signed bytes."""
    block = raw.view(np.dtype([("scale", "<f2"), ("q", "i1", (32,))]))
    return block["q"] * block["scale"].astype(np.float32)[:, None]


def _nibbles(q, scale):
    """uint8[n, 16] times scale: the 16 low nibbles come first, then the 16 high ones."""
    out = np.empty((q.shape[0], 32), np.float32)
    np.multiply(q & 15, scale, out=out[:, :16])
    np.multiply(q >> 4, scale, out=out[:, 16:])
    return out


def _q4_0(raw):
    """Blocks of 32 values: float16 scale, 16 bytes of two nibbles, each biased by 8."""
    block = raw.view(np.dtype([("scale", "<f2"), ("q", "u1", (16,))]))
    scale = block["scale"].astype(np.float32)[:, None]
    out = _nibbles(block["q"], scale)
    out -= 8 * scale            # exact: a nibble times a float16 scale has at most 15 bits
    return out


def _q4_1(raw):
    """Blocks of 32 values: float16 scale, float16 minimum, 16 bytes of two nibbles."""
    block = raw.view(np.dtype([("scale", "<f2"), ("low", "<f2"), ("q", "u1", (16,))]))
    out = _nibbles(block["q"], block["scale"].astype(np.float32)[:, None])
    out += block["low"].astype(np.float32)[:, None]
    return out


# ggml type id -> (values per block, bytes per block, decoder)
_TENSOR_TYPES = {0: (1, 4, _f32), 1: (1, 2, _f16), 2: (32, 18, _q4_0), 3: (32, 20, _q4_1),
                 8: (32, 34, _q8_0)}


class Gguf:
    """An open GGUF file. `meta` is its metadata, `names()` and `tensor(name)` give the tensors.

    Use it as a context manager. Raises OSError where the file cannot be opened, and
    InvalidArgument where it is not a whole GGUF file.
    """

    def __init__(self, path):
        self.path = os.fspath(path)
        with open(self.path, "rb") as file:
            self._nbytes = os.fstat(file.fileno()).st_size
            if file.read(4) != MAGIC:
                raise self._bad("it does not start with the GGUF magic")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = len(MAGIC)
        try:
            self._parse()
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def close(self):
        """Unmap the file; tensors already returned stay valid, since they are copies."""
        self._map.close()

    def require(self, key, kind=object):
        """The metadata value of `key`; InvalidArgument where it is missing or not a `kind`."""
        if key not in self.meta:
            raise self._bad(f"metadata key {key!r} is missing")
        if not isinstance(self.meta[key], kind):
            raise self._bad(f"metadata key {key!r} is {self.meta[key]!r:.40}, not {kind}")
        return self.meta[key]

    def names(self):
        return list(self._info)

    def tensor(self, name, shape=None):
        """The tensor as a new float32 array in row-major order ([out, in] for a matrix).

        Raises InvalidArgument where the tensor is missing, is not of `shape` (if given), has a
        type this reader does not know, or lies outside the file.
        """
        if name not in self._info:
            raise self._bad(f"tensor {name!r} is missing")
        dims, kind, offset = self._info[name]
        if shape is not None and tuple(dims[::-1]) != tuple(shape):
            raise self._bad(f"tensor {name!r} has shape {tuple(dims[::-1])}, expected {shape}")
        if kind not in _TENSOR_TYPES:
            raise self._bad(f"tensor {name!r} has type {kind}; known: {sorted(_TENSOR_TYPES)}")
        per_block, block_nbytes, decode = _TENSOR_TYPES[kind]
        count = math.prod(dims)
        if not count or not dims or dims[0] % per_block:
            raise self._bad(f"tensor {name!r}: rows {dims} are not whole, non-empty blocks of "
                            f"{per_block} values")
        start, nbytes = self._data + offset, count // per_block * block_nbytes
        if start + nbytes > self._nbytes:
            raise self._bad(f"tensor {name!r} ends at byte {start + nbytes}, "
                            f"the file at {self._nbytes} (truncated?)")
        raw = np.frombuffer(self._map, np.uint8, nbytes, start)
        return decode(raw).reshape(dims[::-1])

    def _bad(self, what):
        return InvalidArgument(f"{self.path}: not a usable GGUF file: {what}")

    def _parse(self):
        version = self._scalar("<I")
        if version not in (2, 3):
            raise self._bad(f"version {version}; versions 2 and 3 are known")
        num_tensors, num_values = self._scalar("<Q"), self._scalar("<Q")
        self.meta = {}
        for _ in range(num_values):
            key = self._string()
            self.meta[key] = self._value(self._scalar("<I"))
        if num_tensors * _MIN_INFO_NBYTES > self._nbytes - self._at:
            raise self._bad(f"{num_tensors} tensors do not fit in the file")
        self._info = {}
        for _ in range(num_tensors):
            name = self._string()
            num_dims = self._scalar("<I")
            if num_dims > _MAX_DIMS:
                raise self._bad(f"tensor {name!r} has {num_dims} dimensions")
            dims = [self._scalar("<Q") for _ in range(num_dims)]
            self._info[name] = dims, self._scalar("<I"), self._scalar("<Q")
        align = self.meta.get("general.alignment", 32)
        if not isinstance(align, int) or align <= 0:
            raise self._bad(f"alignment {align!r}")
        self._data = -(-self._at // align) * align

    def _take(self, nbytes):
        """The offset of the next `nbytes` bytes, which are then behind us."""
        at = self._at
        if nbytes > self._nbytes - at:
            raise self._bad(f"{nbytes} bytes are announced at byte {at}, "
                            f"the file ends at {self._nbytes} (truncated?)")
        self._at = at + nbytes
        return at

    def _scalar(self, form):
        return struct.unpack_from(form, self._map, self._take(struct.calcsize(form)))[0]

    def _string(self):
        nbytes = self._scalar("<Q")
        at = self._take(nbytes)
        try:
            return self._map[at:at + nbytes].decode("utf-8")
        except UnicodeDecodeError:
            raise self._bad(f"the text at byte {at} is not UTF-8") from None

    def _value(self, kind, nested=False):
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and not nested:
            return self._array(self._scalar("<I"), self._scalar("<Q"))
        if kind not in _SCALARS:
            raise self._bad(f"metadata of type {kind} at byte {self._at}")
        return self._scalar(_SCALARS[kind])

    def _array(self, kind, count):
        if kind not in _SCALARS:
            return [self._value(kind, nested=True) for _ in range(count)]
        dtype = np.dtype(_SCALARS[kind].replace("b", "i1").replace("B", "u1"))
        at = self._take(count * dtype.itemsize)
        return np.frombuffer(self._map, dtype, count, at).tolist()
