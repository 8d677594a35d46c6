"""The kernel that copies: what is shipped is of this source, and NVRTC compiles it everywhere.

That it moves the right bytes is shown where the fake driver runs it (test_cuda_ways.py).
"""
import hashlib
import re
import struct
from pathlib import Path

import pytest

import nvrtc
from require import skip_or_fail

SOURCE = Path(__file__).resolve().parents[2] / "kvio" / "_ext" / "copy_kernel.cu"
PTX = SOURCE.with_suffix(".ptx")
MAX_REGISTERS = 64                      # 1024 threads of them are all of an SM's 65,536


def test_the_shipped_ptx_is_of_this_source():
    text = PTX.read_text()
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()
    assert text.startswith(f"// copy_kernel.cu {digest}, "), "run .ci/ptx and commit what it makes"
    # PTX ISA 8.1 is what CUDA 12.1 brought: any later one would shut out its drivers.
    assert re.search(r"^\.version 8\.1$", text, re.M)
    assert re.search(r"^\.target sm_80$", text, re.M)
    assert re.search(r"^\.visible \.entry kvio_copy\(", text, re.M)
    assert "\0" not in text and text.isascii()      # it goes to the driver as a C string


def test_the_shipped_ptx_keeps_nothing_in_local_or_shared_memory():
    assert not re.search(r"\.(local|shared)\b", PTX.read_text())


@pytest.fixture(scope="module")
def compiler():
    return nvrtc.Nvrtc()


@pytest.mark.needs("nvrtc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_it_compiles_without_a_word_and_spills_nothing(compiler, arch):
    if arch == "sm_100" and compiler.version < (12, 8):
        skip_or_fail("nvrtc", f"sm_100 came with NVRTC 12.8, this is {compiler.version}")
    cubin, log = compiler.compile(SOURCE.read_text(), arch, "--ptxas-options=-v")
    said = [line for line in log.splitlines() if line.strip()]
    assert [line for line in said if not line.startswith("ptxas info")
            and "bytes stack frame" not in line] == []
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    assert 32 < registers <= MAX_REGISTERS          # eight loads of 16 bytes are 32 of them
    assert cubin[:4] == b"\x7fELF" and struct.unpack_from("<H", cubin, 18)[0] == 190   # EM_CUDA
    assert b".text.kvio_copy" in cubin


@pytest.mark.needs("nvrtc")
def test_what_does_not_compile_says_where(compiler):
    with pytest.raises(RuntimeError, match=r"copy_kernel\.cu\(\d+\): error"):
        compiler.compile(SOURCE.read_text() + "nonsense", "sm_90")
    with pytest.raises(RuntimeError, match="gpu-architecture"):
        compiler.compile(SOURCE.read_text(), "sm_1")
