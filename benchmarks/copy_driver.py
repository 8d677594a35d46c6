"""CUDA without kvio: events to measure with, copies to check with, and the calls to be measured
against. libcuda is the one that kvio opens; libcudart the machine's own, if one is found."""
import ctypes
import functools
import glob
import importlib
import os
import site
import sysconfig
import time
from ctypes import byref, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p

import numpy as np
from copy_case import address
from copy_host import loops

NON_BLOCKING = 1                        # CU_STREAM_NON_BLOCKING
BLOCKING_SYNC = 1                       # CU_EVENT_BLOCKING_SYNC: whoever waits sleeps
KIND = {"H2D": 1, "D2H": 2}             # enum cudaMemcpyKind
VERSIONS = {"cuDevicePrimaryCtxRelease": "_v2", "cuStreamDestroy": "_v2", "cuEventDestroy": "_v2",
            "cuMemcpyHtoDAsync": "_v2", "cuMemcpyDtoHAsync": "_v2"}
CUDART = ["nvidia/cu*/lib", "nvidia/cuda_runtime/lib", "torch/lib"]


class CudaError(Exception):
    """A call of the driver or the runtime that failed."""


class Driver:
    """Device 0 of libcuda: its primary context, current in this thread until `close`."""

    def __init__(self):
        self.path = os.environ.get("KVIO_CUDA_LIBRARY") or "libcuda.so.1"
        self._library = ctypes.CDLL(self.path)
        self("cuInit", c_uint(0))
        version, device, context = c_int(), c_int(), c_void_p()
        self("cuDriverGetVersion", byref(version))
        self("cuDeviceGet", byref(device), c_int(0))
        self("cuDevicePrimaryCtxRetain", byref(context), device)
        self("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(128)
        self("cuDeviceGetName", name, c_int(128), device)
        self._device, self.version, self._pinned = device, version.value, []
        self.is_fake = hasattr(self._library, "fake_cuda_reset")
        self.name = "a fake driver: no speed" if self.is_fake else \
            f"{name.value.decode()}, driver CUDA {self.version // 1000}.{self.version % 1000 // 10}"
        self.stream = self._made("cuStreamCreate", c_uint(NON_BLOCKING))
        self.begin, self.end = (self._made("cuEventCreate", c_uint(BLOCKING_SYNC))
                                for _ in range(2))

    def function(self, name):
        """The driver's function, of the version whose arguments this file knows."""
        try:
            return getattr(self._library, name + VERSIONS.get(name, ""))
        except AttributeError:
            raise CudaError(f"{self.path} has no {name}") from None

    def __call__(self, name, *arguments):
        rc = self.function(name)(*arguments)
        if rc:
            raise CudaError(f"{name}: CUresult {rc}")

    def _made(self, name, *arguments):
        made = c_void_p()
        self(name, byref(made), *arguments)
        return made

    def copy(self, direction, target, source, nbytes):
        """One copy in our stream; not waited for."""
        name = {"H2D": "cuMemcpyHtoDAsync", "D2H": "cuMemcpyDtoHAsync"}[direction]
        self(name, c_uint64(target), c_uint64(source), c_size_t(nbytes), self.stream)

    def copy_now(self, direction, target, source, nbytes):
        """One copy, which has happened when this returns."""
        self.copy(direction, target, source, nbytes)
        self.synchronize()

    def synchronize(self):
        self("cuStreamSynchronize", self.stream)

    def mark_begin(self):
        self("cuEventRecord", self.begin, self.stream)

    def mark_end(self):
        self("cuEventRecord", self.end, self.stream)

    def seconds(self):
        """Between the two marks, once the second has passed; sleeps until then."""
        self("cuEventSynchronize", self.end)
        elapsed = c_float()
        self("cuEventElapsedTime", byref(elapsed), self.begin, self.end)
        return elapsed.value / 1e3

    def fill(self, target, value, nbytes):
        """Memory of the device; not waited for."""
        self("cuMemsetD8Async", c_uint64(target), ctypes.c_ubyte(value), c_size_t(nbytes),
             self.stream)

    def pinned(self, nbytes):
        """Pinned memory of the host as an array, until `close`."""
        at = self._made("cuMemHostAlloc", c_size_t(nbytes), c_uint(0))
        self._pinned.append(at)
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(at.value))

    def close(self):
        """Everything given back, whatever fails: the context may be dead."""
        for name, *arguments in (("cuStreamSynchronize", self.stream),
                                 ("cuEventDestroy", self.begin), ("cuEventDestroy", self.end),
                                 ("cuStreamDestroy", self.stream),
                                 *(("cuMemFreeHost", at) for at in self._pinned),
                                 ("cuCtxSetCurrent", None),
                                 ("cuDevicePrimaryCtxRelease", self._device)):
            self.function(name)(*arguments)


def cudart_candidates():
    """Where a libcudart may be: KVIO_CUDART_LIBRARY alone if it is set."""
    if os.environ.get("KVIO_CUDART_LIBRARY"):
        return [os.environ["KVIO_CUDART_LIBRARY"]]
    folders = [*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("purelib")]
    found = [path for folder in dict.fromkeys(folders) for pattern in CUDART
             for path in sorted(glob.glob(f"{folder}/{pattern}/libcudart*.so*"), reverse=True)]
    return [*found, "libcudart.so.13", "libcudart.so.12", "/usr/local/cuda/lib64/libcudart.so"]


class Runtime:
    """libcudart: `function` is its cudaMemcpyAsync, `version` like 13000."""

    def __init__(self, path):
        library = ctypes.CDLL(path)
        version = c_int()
        for name, *arguments in (("cudaSetDevice", c_int(0)), ("cudaFree", None),
                                 ("cudaRuntimeGetVersion", byref(version))):
            rc = getattr(library, name)(*arguments)
            if rc:
                raise CudaError(f"{path}: {name}: cudaError_t {rc}")
        self.function, self.path, self.version = library.cudaMemcpyAsync, path, version.value

    @property
    def label(self):
        return f"cudaMemcpyAsync {self.version // 1000}.{self.version % 1000 // 10}"


def runtime(driver, note):
    """The newest libcudart that works with this driver, or None. Beside a fake driver only one that
    KVIO_CUDART_LIBRARY names: another would talk to another libcuda."""
    if driver.is_fake and not os.environ.get("KVIO_CUDART_LIBRARY"):
        note("cudaMemcpyAsync", "no libcudart works on a fake driver: its cuMemcpy*Async instead")
        return None
    why = "none found"
    for path in cudart_candidates():
        try:
            return Runtime(path)
        except (OSError, CudaError, AttributeError) as wrong:
            why = wrong
    note("cudaMemcpyAsync", f"no libcudart that works ({why}): the driver's cuMemcpy*Async instead")
    return None


# ---- ways; see copy_case

class Way:
    """Copies in the driver's stream. `pieces`: addresses, as in copy_loops.c."""

    def __init__(self, driver, direction, block, pieces):
        self.driver, self.direction, self.block, self.pieces = driver, direction, block, pieces
        self.calls = len(pieces)

    def finish(self):
        pass

    def note(self):
        return ""


class Contiguous(Way):
    """One copy of `nbytes`, the ceiling."""

    def __init__(self, driver, direction, nbytes, target, source, name):
        self.driver, self.direction, self.name, self.calls = driver, direction, name, 1
        self.copy = target, source, nbytes

    def submit(self):
        start = time.perf_counter_ns()
        self.driver.copy(self.direction, *self.copy)
        return time.perf_counter_ns() - start


class LoopInC(Way):
    """cudaMemcpyAsync a block, from a loop in C; without a libcudart what it calls itself."""

    def __init__(self, *args, runtime):
        super().__init__(*args)
        self.ns = c_uint64()
        driver_name = {"H2D": "cuMemcpyHtoDAsync", "D2H": "cuMemcpyDtoHAsync"}[self.direction]
        self.name = f"{runtime.label if runtime else driver_name}, C loop"
        function = runtime.function if runtime else self.driver.function(driver_name)
        kind = [c_int(KIND[self.direction])] if runtime else []
        self.call = functools.partial(
            loops().copy_loop_runtime if runtime else loops().copy_loop_driver,
            ctypes.cast(function, c_void_p), c_void_p(address(self.pieces)),
            c_uint(len(self.pieces)), c_size_t(self.block), *kind, self.driver.stream,
            byref(self.ns))

    def submit(self):
        rc = self.call()
        if rc:
            raise CudaError(f"{self.name}: error {rc}")
        return self.ns.value


class LoopInPython(Way):
    """The same call for each block from Python."""

    def __init__(self, *args):
        super().__init__(*args)
        self.prepare(list(zip(self.pieces["target"].tolist(), self.pieces["source"].tolist())))

    def submit(self):
        start = time.perf_counter_ns()
        self.copy_all()
        return time.perf_counter_ns() - start


class CudaBindings(LoopInPython):
    name = "cuda.bindings, Python loop"

    def prepare(self, places):
        cudart = importlib.import_module("cuda.bindings.runtime")
        self.places, self.call = places, cudart.cudaMemcpyAsync
        self.success = cudart.cudaError_t.cudaSuccess
        self.kind = cudart.cudaMemcpyKind(KIND[self.direction])
        self.stream = cudart.cudaStream_t(self.driver.stream.value)

    def copy_all(self):
        call, nbytes, kind, stream, success = \
            self.call, self.block, self.kind, self.stream, self.success
        for target, source in self.places:
            error, = call(target, source, nbytes, kind, stream)
            if error != success:
                raise CudaError(f"cuda.bindings: cudaMemcpyAsync: {error}")


class Cupy(LoopInPython):
    name = "cupy.cuda.runtime, Python loop"

    def prepare(self, places):
        self.places = places
        self.call = importlib.import_module("cupy").cuda.runtime.memcpyAsync

    def copy_all(self):
        call, nbytes, kind, stream = \
            self.call, self.block, KIND[self.direction], self.driver.stream.value
        for target, source in self.places:
            call(target, source, nbytes, kind, stream)


class Torch(LoopInPython):
    """copy_(non_blocking=True) of views that are made before: what most code does."""

    name = "torch copy_, Python loop"

    def prepare(self, places):
        torch = importlib.import_module("torch")
        sides = {"host": lambda at: torch.frombuffer(
            (ctypes.c_uint8 * self.block).from_address(at), dtype=torch.uint8),
            "device": lambda at: torch.as_tensor(OnDevice(at, self.block), device="cuda:0")}
        to, of = ("device", "host") if self.direction == "H2D" else ("host", "device")
        self.pairs = [(sides[to](target), sides[of](source)) for target, source in places]
        self.torch = torch
        self.stream = torch.cuda.ExternalStream(self.driver.stream.value)

    def copy_all(self):
        with self.torch.cuda.stream(self.stream):
            for target, source in self.pairs:
                target.copy_(source, non_blocking=True)


class Ctypes(LoopInPython):
    """Where none of the others is there: the driver's call by ctypes."""

    name = "ctypes, Python loop"

    def prepare(self, places):
        self.places = [(c_uint64(target), c_uint64(source)) for target, source in places]
        self.call = self.driver.function({"H2D": "cuMemcpyHtoDAsync",
                                          "D2H": "cuMemcpyDtoHAsync"}[self.direction])

    def copy_all(self):
        call, nbytes, stream = self.call, c_size_t(self.block), self.driver.stream
        for target, source in self.places:
            if call(target, source, nbytes, stream):
                raise CudaError("ctypes: the driver's copy failed")


class OnDevice:
    """Bytes of the device at an address, for those who take __cuda_array_interface__."""

    def __init__(self, addr, nbytes):
        self.__cuda_array_interface__ = {"data": (addr, False), "shape": (nbytes,),
                                         "typestr": "|u1", "strides": None, "version": 3}


def python_loops(driver, note, *args):
    """Those that work here, each tried once; what fails is told, not hidden."""
    made = []
    for kind in () if driver.is_fake else (CudaBindings, Cupy, Torch):
        try:
            way = kind(driver, *args)
            way.submit()
            driver.synchronize()
            made.append(way)
        except ImportError as missing:
            note(kind.name, f"not here: {missing}")
        except Exception as wrong:          # another library's: without it the rest still counts
            note(kind.name, f"failed: {type(wrong).__name__}: {wrong}")
    return made or [Ctypes(driver, *args)]
