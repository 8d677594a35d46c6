"""The fake libcuda (fake_cuda.h; nothing of NVIDIA's but the header it is compiled against): built
once, and its controls.

kvio opens one libcuda in a process and keeps it, so a session of tests has either this one or the
machine's own: the latter where KVIO_REQUIRE names cuda.
"""
import contextlib
import ctypes
import functools
import os
from pathlib import Path

import cbuild
import numpy as np
from require import PARTS, cuda_include, required

HERE = Path(__file__).parent
SOURCES = [HERE / f"fake_cuda{part}.c"
           for part in ("", "_context", "_memory", "_segment", "_stream", "_event", "_copy",
                        "_kernel")]
OTHERS = [HERE / "fake_cuda.h", HERE.parents[1] / "kvio" / "_ext" / "copy_kernel.cu"]
FOLDER = HERE.parents[1] / "build" / "standin"
VARIABLE = "KVIO_CUDA_LIBRARY"
KINDS = "contexts", "streams", "events", "allocations", "pinned", "registered", "modules"
ALL_STREAMS = 2**64 - 1

# CUresult: what tests answer calls with.
ERRORS = {"INVALID_VALUE": 1, "OUT_OF_MEMORY": 2, "NOT_INITIALIZED": 3, "NO_DEVICE": 100,
          "INVALID_DEVICE": 101, "INVALID_CONTEXT": 201, "ECC_UNCORRECTABLE": 214,
          "INVALID_HANDLE": 400, "NOT_FOUND": 500, "NOT_READY": 600, "ILLEGAL_ADDRESS": 700,
          "LAUNCH_TIMEOUT": 702, "HOST_MEMORY_ALREADY_REGISTERED": 712,
          "HOST_MEMORY_NOT_REGISTERED": 713, "MISALIGNED_ADDRESS": 716, "LAUNCH_FAILED": 719,
          "NOT_PERMITTED": 800, "NOT_SUPPORTED": 801, "UNKNOWN": 999}


def why_not():
    """Why it cannot be built or used here, or None."""
    if required("cuda"):
        return "this session uses the machine's own libcuda"
    return PARTS["compiler"]() or PARTS["cuda-headers"]()


@functools.cache
def build():
    """The path of the fake; built anew if a source is newer."""
    kind = "".join(flag.partition("=")[2][:1] for flag in cbuild.sanitizer())
    path = FOLDER / f"libcuda_fake{kind}.so"
    newest = max(file.stat().st_mtime for file in [*SOURCES, *OTHERS])
    if not path.exists() or path.stat().st_mtime < newest:
        FOLDER.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(f".{os.getpid()}")
        cbuild.shared_library(made, SOURCES, "-Wshadow", "-O2", f"-isystem{cuda_include(13)}")
        os.replace(made, path)          # another session may be at it as well
    return str(path)


def choose():
    """Make it the libcuda of this process, if it can be, before kvio opens one."""
    if why_not() is None:
        os.environ[VARIABLE] = build()


class FakeCuda:
    """Its controls; `cu` is the library itself, for calls as an application makes them."""

    def __init__(self, path):
        self.cu = library = ctypes.CDLL(path)
        for name in ("calls", "objects", "violations", "queued", "log", "grid", "reserve",
                     "exports"):
            getattr(library, f"fake_cuda_{name}").restype = ctypes.c_uint64
        for name in ("violation", "name"):
            getattr(library, f"fake_cuda_{name}").restype = ctypes.c_char_p
        library.fake_cuda_alias.restype = ctypes.c_void_p

    def reset(self):
        """Settings as at the start, no faults or costs, counters at 0, streams let go."""
        self.cu.fake_cuda_reset()

    def call(self, exported, *arguments):
        """A function of the driver, as an application calls it. Its CUresult."""
        words = [ctypes.c_uint64(each) if isinstance(each, int) else each for each in arguments]
        return getattr(self.cu, exported)(*words)

    def do(self, exported, *arguments):
        """The same, which has to succeed."""
        code = self.call(exported, *arguments)
        assert code == 0, f"{exported}: CUDA error {code}"

    def new(self, exported, *arguments):
        """What a function gives by its first argument: a handle, or an address."""
        value = ctypes.c_uint64()
        self.do(exported, ctypes.byref(value), *arguments)
        return value.value

    def set(self, **settings):
        """See SETTINGS in fake_cuda.h."""
        for name, value in settings.items():
            assert self.cu.fake_cuda_set(name.encode(), ctypes.c_uint64(value)) == 0, \
                f"no setting {name}"

    def calls(self, *exported):
        """How often these functions were called since the reset, all together."""
        counts = [self.cu.fake_cuda_calls(name.encode()) for name in exported]
        assert 2**64 - 1 not in counts, f"one of {exported} is no function"
        return sum(counts)

    def log(self):
        """Every call since the reset: (function, stream, a, b); what a and b are is in its
        ENTER."""
        count = self.cu.fake_cuda_log(None, ctypes.c_uint64(0), ctypes.c_uint64(0))
        assert count <= 65536, "too many calls for the log"
        rows = np.zeros((count, 4), np.uint64)
        self.cu.fake_cuda_log(ctypes.c_void_p(rows.ctypes.data), ctypes.c_uint64(0),
                              ctypes.c_uint64(count))
        names = {fn: self.cu.fake_cuda_name(ctypes.c_uint64(fn)).decode()
                 for fn in set(rows[:, 0].tolist())}
        return [(names[fn], stream, a, b) for fn, stream, a, b in rows.tolist()]

    def objects(self):
        """How many of each kind there are now; contexts by their references."""
        return {kind: self.cu.fake_cuda_objects(kind.encode()) for kind in KINDS}

    def violations(self):
        """What a GPU would have answered with corrupt memory, since the reset."""
        return [self.cu.fake_cuda_violation(ctypes.c_uint64(index)).decode()
                for index in range(self.cu.fake_cuda_violations())]

    def forgive(self):
        """The violations there were, which the test meant; there are none any more."""
        found = self.violations()
        self.cu.fake_cuda_forgive()
        return found

    def fail(self, exported, error, after=0, times=1, sticky=False):
        """`after` calls of the function from now, `times` of them answer this error. Sticky: every
        call of that context then does. With "" for a name: the work that runs, always sticky."""
        code = ERRORS.get(error, error)
        assert self.cu.fake_cuda_fail(exported.encode(), code, ctypes.c_uint64(after),
                                      ctypes.c_uint64(times), sticky) == 0, f"no {exported}"

    def cost(self, exported, call_ns=0, run_ns=0, piece_ns=0, byte_ps=0):
        """A call takes call_ns; its work run_ns, piece_ns a piece and byte_ps a byte."""
        values = map(ctypes.c_uint64, (call_ns, run_ns, piece_ns, byte_ps))
        assert self.cu.fake_cuda_cost(exported.encode(), *values) == 0, f"no {exported}"

    @contextlib.contextmanager
    def held(self, stream=ALL_STREAMS):
        """Nothing that is given to the stream runs before the end of this."""
        self.hold(stream)
        try:
            yield
        finally:
            self.hold(stream, False)

    def hold(self, stream=ALL_STREAMS, held=True):
        assert self.cu.fake_cuda_hold(ctypes.c_void_p(stream), held) == 0, "no such stream"

    def queued(self, stream):
        """Work given to a stream that has not been done."""
        return self.cu.fake_cuda_queued(ctypes.c_void_p(stream))

    def grid(self):
        """(blocks, threads of a block) of the most recent launch."""
        grid = self.cu.fake_cuda_grid()
        return grid & 0xffffffff, grid >> 32

    def exports(self):
        """dma-bufs given out since the reset: all, and those mapped by PCIe."""
        return self.cu.fake_cuda_exports(0), self.cu.fake_cuda_exports(1)

    def depth(self):
        """How many contexts this thread has pushed."""
        return self.cu.fake_cuda_depth()

    def bytes_at(self, addr, nbytes):
        """Memory of a device as an array of uint8 that shares its bytes."""
        at = self.cu.fake_cuda_alias(ctypes.c_uint64(addr), ctypes.c_uint64(nbytes))
        assert at, f"{addr:#x}: no {nbytes} bytes of a device"
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(at))
