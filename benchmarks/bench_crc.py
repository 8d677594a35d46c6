"""CRC-32C beside a loop that only reads: in a core's cache, and over more memory than any cache.

A round of the cold row takes another part of the memory each time, so that nothing of it is in a
cache when its turn comes.
"""
import ctypes
import itertools
import mmap

import numpy as np
import pytest

from kvio._ext import block as _block

CACHED, COLD, PART = 256 << 10, 1 << 30, 64 << 20


@pytest.fixture(scope="module")
def floor(built):
    function = ctypes.CDLL(built("read_floor.c", "-shared", "-fPIC")).read_only
    function.restype, function.argtypes = ctypes.c_uint64, (ctypes.c_void_p, ctypes.c_size_t)
    return function


def words(nbytes):
    """Whole pages (the floor does not align its loads), written, so that none is the zero page."""
    data = np.frombuffer(mmap.mmap(-1, nbytes), np.uint64)
    np.multiply(np.arange(nbytes // 8, dtype=np.uint64), np.uint64(0x9E3779B97F4A7C15), out=data)
    return data.view(np.uint8)


@pytest.mark.parametrize("name", _block.crc32c_impls())
def test_crc_in_cache(paired, floor, name):
    data, times = words(CACHED), 64
    address = data.ctypes.data

    def crc():
        for _ in range(times):
            _block.crc32c_by(name, data)

    def read():
        for _ in range(times):
            floor(address, CACHED)
    paired(crc, read, rounds=200, nbytes=times * CACHED, names=(f"crc {name}", "read-only loop"))
    assert _block.crc32c_by(name, data) == _block.crc32c(data)


def test_crc_cold(paired, floor, smoke):
    """The two run on different parts: what one has read may still lie in a large cache."""
    data = words(COLD if not smoke else 2 * PART)
    parts = itertools.cycle(np.split(data, len(data) // PART))
    paired(lambda: _block.crc32c(next(parts)), lambda: floor(next(parts).ctypes.data, PART),
           rounds=100, nbytes=PART, names=(f"crc {_block.crc32c_impls()[0]}", "read-only loop"))


@pytest.mark.parametrize("nbytes", [124, 4096])
def test_crc_of_a_header(paired, nbytes):
    """Headers and pages are short: the widest implementation must not be slower there."""
    data, impls = words(8192)[:nbytes], _block.crc32c_impls()
    best, plain = impls[0], "sse4.2" if "sse4.2" in impls else "portable"

    def run(name):
        for _ in range(2000):
            _block.crc32c_by(name, data)
    paired(lambda: run(best), lambda: run(plain), nbytes=2000 * nbytes,
           names=(f"crc {best}", f"crc {plain}"))
