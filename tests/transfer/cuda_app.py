"""An application that uses CUDA, here the fake one: what a test needs beside kvio."""
import ctypes

import numpy as np

from nics import pattern

NON_BLOCKING, NO_TIMING = 1, 2          # flags of streams and of events


class App:
    """An application with the primary context of one device, and streams and memory in it."""

    def __init__(self, fake, device=0):
        self.fake, self.device, self.frees = fake, device, []
        fake.do("cuInit", 0)
        self.context = fake.new("cuDevicePrimaryCtxRetain", device)
        fake.do("cuCtxPushCurrent_v2", self.context)

    def close(self):
        self.fake.hold(held=False)
        for name, handle in reversed(self.frees):
            self.fake.call(name, handle)
        self.fake.do("cuCtxPopCurrent_v2", 0)
        self.fake.do("cuDevicePrimaryCtxRelease_v2", self.device)

    def made(self, free, handle):
        self.frees.append((free, handle))
        return handle

    def stream(self, flags=NON_BLOCKING):
        return self.made("cuStreamDestroy_v2", self.fake.new("cuStreamCreate", flags))

    def event(self, flags=NO_TIMING):
        return self.made("cuEventDestroy_v2", self.fake.new("cuEventCreate", flags))

    def device_memory(self, nbytes, seed=None):
        """(address, its bytes)."""
        addr = self.made("cuMemFree_v2", self.fake.new("cuMemAlloc_v2", nbytes))
        data = self.fake.bytes_at(addr, nbytes)
        if seed is not None:
            data[:] = pattern(nbytes, seed)
        return addr, data

    def pinned(self, nbytes, seed=None):
        addr = self.made("cuMemFreeHost", self.fake.new("cuMemHostAlloc", nbytes, 0))
        data = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(addr))
        if seed is not None:
            data[:] = pattern(nbytes, seed)
        return addr, data
