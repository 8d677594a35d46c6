"""CRC-32C: every implementation that a CPU can run gives what the tables give."""
import ctypes
import mmap
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvio._ext import block as _block

ROOT = Path(__file__).resolve().parent.parent
IMPLS = _block.crc32c_impls()
RANDOM = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
GROUP = 32768                   # what the widest implementation reads at a time
CFLAGS = {                      # how /proc/cpuinfo calls what each one needs
    "avx512": {"avx512f", "avx512vl", "avx512dq", "vpclmulqdq"}, "pclmul": {"pclmulqdq"},
    "sse4.2": {"sse4_2"}, "pmull": {"pmull", "crc32"}, "crc": {"crc32"}}


def portable(data, crc=0):
    return _block.crc32c_by("portable", data, crc)


def by_definition(data, crc=0):
    """Bit by bit, with no table."""
    crc = ~crc & 0xffffffff
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82f63b78 if crc & 1 else 0)
    return ~crc & 0xffffffff


def test_the_cpu_is_used():
    flags = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.lower().startswith(("flags", "features")):
            flags |= set(line.split(":")[1].split())
    known = [name for name in CFLAGS if CFLAGS[name] <= flags]
    assert [name for name in IMPLS if name != "portable"] == [n for n in known if n in IMPLS]
    assert len(IMPLS) == len(known) + 1 and IMPLS[-1] == "portable"


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="no abacus"):
        _block.crc32c_by("abacus", b"")


@pytest.mark.parametrize("name", IMPLS)
@pytest.mark.parametrize("data, crc", [
    (b"123456789", 0xE3069283), (b"", 0), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),                 # RFC 3720, B.4
])
def test_vectors(name, data, crc):
    assert _block.crc32c_by(name, data) == crc == _block.crc32c(data) == by_definition(data)


@pytest.mark.parametrize("name", IMPLS)
def test_every_short_length(name):
    for nbytes in range(1025):
        data = RANDOM[nbytes:2 * nbytes]
        assert _block.crc32c_by(name, data, nbytes) == portable(data, nbytes), nbytes


@pytest.mark.parametrize("name", IMPLS)
def test_every_alignment(name):
    for at in range(64):
        for nbytes in (0, 1, 15, 63, 64, 255, 256, 257, 1000, 4096, 4159, 9999, GROUP + 63,
                       2 * GROUP):
            data = RANDOM[at:at + nbytes]
            assert _block.crc32c_by(name, data, at) == portable(data, at), (at, nbytes)


@pytest.mark.parametrize("name", IMPLS)
def test_around_the_seams_of_long_inputs(name):
    random = np.random.default_rng(2)
    seams = [n * GROUP + more for n in (1, 2, 3, 8) for more in (-65, -64, -1, 0, 1, 63, 64, 255,
                                                                 256, 320)]
    for nbytes in [*seams, *random.integers(1025, len(RANDOM), 20).tolist()]:
        at = int(random.integers(0, len(RANDOM) - nbytes + 1))
        data, crc = RANDOM[at:at + nbytes], int(random.integers(0, 1 << 32))
        assert _block.crc32c_by(name, data, crc) == portable(data, crc), (at, nbytes)


@pytest.mark.parametrize("name", IMPLS)
def test_each_bit_counts(name):
    """Nothing is skipped, in no stage of any implementation."""
    data = bytearray(RANDOM[:2 * GROUP + 1111])
    crc = _block.crc32c_by(name, data)
    for at in range(0, len(data), 61):
        data[at] ^= 1 << at % 8
        assert _block.crc32c_by(name, data) != crc
        data[at] ^= 1 << at % 8


@pytest.mark.parametrize("name", IMPLS)
def test_nothing_outside_the_buffer_is_read(name):
    """The buffer ends where the mapping does, and begins where it begins: a read beyond either is
    a segmentation fault."""
    page = mmap.PAGESIZE
    with mmap.mmap(-1, 4 * page + 2 * GROUP) as memory:
        libc = ctypes.CDLL(None, use_errno=True)
        whole = np.frombuffer(memory, np.uint8)
        whole[:] = RANDOM[:len(whole)]
        start = whole.ctypes.data
        for guard in (0, len(whole) - page):
            assert libc.mprotect(ctypes.c_void_p(start + guard), page, 0) == 0
        inside = whole[page:-page]
        for nbytes in [*range(0, 600), 4095, 4096, GROUP, GROUP + 255, GROUP + 4500, 2 * GROUP]:
            for data in (inside[:nbytes], inside[len(inside) - nbytes:]):
                assert _block.crc32c_by(name, data) == portable(data)
        assert libc.mprotect(ctypes.c_void_p(start), len(whole), 3) == 0
        del whole, inside, data


@given(st.binary(max_size=2000), st.integers(0, 2000), st.integers(0, 2**32 - 1))
def test_it_continues(data, cut, crc):
    whole = portable(data, crc)
    for name in IMPLS:
        first = _block.crc32c_by(name, data[:cut], crc)
        assert _block.crc32c_by(name, data[cut:], first) == whole


def build(compiler, target, *flags):
    sources = [ROOT / "tests/crc32c_check.c", *sorted((ROOT / "kvio/_ext").glob("crc32c*.c"))]
    subprocess.run([compiler, "-O2", "-Wall", "-Wextra", "-Wshadow", "-Werror", *flags,
                    f"-I{ROOT}/include", f"-I{ROOT}/kvio/_ext", *map(str, sources), "-o", target],
                   check=True)


@pytest.mark.needs("aarch64")
def test_arm_in_an_emulator(tmp_path):
    build("aarch64-linux-gnu-gcc", tmp_path / "check", "-static")
    done = subprocess.run(["qemu-aarch64", tmp_path / "check"], stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["pmull", "crc", "portable"])


@pytest.mark.skipif(os.uname().machine != "x86_64" or not shutil.which("qemu-x86_64"),
                    reason="needs an x86-64 CPU and qemu-x86_64 (Debian: qemu-user)")
@pytest.mark.parametrize("cpu, names", [
    ("qemu64", ["portable"]), ("Nehalem", ["sse4.2", "portable"]),
    ("Westmere", ["pclmul", "sse4.2", "portable"])])
def test_older_cpus_in_an_emulator(tmp_path, cpu, names):
    """No CPU is asked for instructions that it does not have."""
    build(os.environ.get("CC", "cc"), tmp_path / "check", "-static")
    done = subprocess.run(["qemu-x86_64", "-cpu", cpu, tmp_path / "check"],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout.split()) == (0, names)
