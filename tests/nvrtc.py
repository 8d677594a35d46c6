"""NVRTC, the run-time compiler of CUDA C, by ctypes: for the tests and for .ci/ptx.

It comes with PyPI's nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12; KVIO_NVRTC_LIBRARY
names another one. It needs no GPU and no driver.
"""
import ctypes
import glob
import importlib.util
import os

PLACES = ["cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12"]    # below nvidia/


def library():
    """Its path, or None."""
    named = os.environ.get("KVIO_NVRTC_LIBRARY")
    if named:
        return named
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        for place in PLACES:
            for path in glob.glob(os.path.join(root, place)):
                return path
    return None


def why_not():
    """Why there is no NVRTC here, or None."""
    path = library()
    if not path:
        return "no libnvrtc: pip install nvidia-cuda-nvrtc, or set KVIO_NVRTC_LIBRARY"
    try:
        ctypes.CDLL(path)
    except OSError as error:
        return str(error)
    return None


class Nvrtc:
    """One opened library. `version` is (major, minor)."""

    def __init__(self, path=None):
        self.lib = ctypes.CDLL(path or library())
        self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = major.value, minor.value

    def _check(self, name, *arguments):
        code = getattr(self.lib, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {self.lib.nvrtcGetErrorString(code).decode()}")

    def _text(self, program, kind):
        nbytes = ctypes.c_size_t()
        self._check(f"nvrtcGet{kind}Size", program, ctypes.byref(nbytes))
        text = ctypes.create_string_buffer(nbytes.value)
        self._check(f"nvrtcGet{kind}", program, text)
        return text.raw

    def compile(self, source, arch, *options):
        """(code, log) of CUDA C: PTX for "compute_80", a cubin for "sm_80"; both bytes, the log
        text. RuntimeError has the log of what does not compile."""
        program = ctypes.c_void_p()
        self._check("nvrtcCreateProgram", ctypes.byref(program), source.encode(),
                    b"copy_kernel.cu", 0, None, None)
        try:
            words = [f"--gpu-architecture={arch}", *options]
            array = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
            code = self.lib.nvrtcCompileProgram(program, len(words), array)
            log = self._text(program, "ProgramLog").rstrip(b"\0").decode()
            if code:
                raise RuntimeError(f"{arch}: {log}")
            return self._text(program, "PTX" if arch.startswith("compute") else "CUBIN"), log
        finally:
            self.lib.nvrtcDestroyProgram(ctypes.byref(program))
