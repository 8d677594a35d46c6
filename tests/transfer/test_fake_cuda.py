"""The fake libcuda by itself, as an application uses it: what CUDA documents it does, in order and
byte for byte, and it sees what a GPU would answer with corrupt memory."""
import ctypes

import numpy as np
import pytest

from nics import pattern

OK, INVALID, NO_MEMORY, NOT_INITIALISED, NO_CONTEXT = 0, 1, 2, 3, 201
BAD_HANDLE, NOT_READY, ILLEGAL, DESTROYED = 400, 600, 700, 709
ALREADY, UNKNOWN_HOST = 712, 713
NON_BLOCKING, NO_TIMING = 1, 2


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

    def _made(self, free, handle):
        self.frees.append((free, handle))
        return handle

    def stream(self, flags=NON_BLOCKING):
        return self._made("cuStreamDestroy_v2", self.fake.new("cuStreamCreate", flags))

    def event(self, flags=NO_TIMING):
        return self._made("cuEventDestroy_v2", self.fake.new("cuEventCreate", flags))

    def device_memory(self, nbytes, seed=None):
        """(address, its bytes)."""
        addr = self._made("cuMemFree_v2", self.fake.new("cuMemAlloc_v2", nbytes))
        data = self.fake.bytes_at(addr, nbytes)
        if seed is not None:
            data[:] = pattern(nbytes, seed)
        return addr, data

    def pinned(self, nbytes, seed=None):
        addr = self._made("cuMemFreeHost", self.fake.new("cuMemHostAlloc", nbytes, 0))
        data = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(addr))
        if seed is not None:
            data[:] = pattern(nbytes, seed)
        return addr, data


@pytest.fixture
def app(fake_cuda):
    app = App(fake_cuda)
    yield app
    app.close()


def test_bytes_move_both_ways_and_not_by_the_cpu(app, fake_cuda):
    (host, data), (back, found), (addr, bytes_) = app.pinned(9000, 1), app.pinned(9000), \
        app.device_memory(9000)
    stream = app.stream()
    with fake_cuda.held(stream):
        fake_cuda.do("cuMemcpyHtoDAsync_v2", addr + 100, host, 8000, stream)
        fake_cuda.do("cuMemcpyDtoHAsync_v2", back, addr + 100, 8000, stream)
        fake_cuda.do("cuMemsetD8Async", addr + 100, 7, 10, stream)
        assert fake_cuda.call("cuStreamQuery", stream) == NOT_READY
        assert fake_cuda.queued(stream) == 3 and not bytes_.any()
    fake_cuda.do("cuStreamSynchronize", stream)
    assert fake_cuda.call("cuStreamQuery", stream) == OK
    assert (found[:8000] == data[:8000]).all() and not found[8000:].any()
    assert (bytes_[100:110] == 7).all() and (bytes_[110:8100] == data[10:8000]).all()
    assert not bytes_[:100].any() and not bytes_[8100:].any()
