"""What the fake libcuda sees and does when something is wrong: violations, faults, dead contexts;
and its kernel, which ends a context as a GPU's does."""
import ctypes
import struct

import numpy as np
import pytest

from cuda_app import App
from nics import pattern

OK, INVALID, NO_CONTEXT, BAD_HANDLE, NOT_FOUND, NOT_READY = 0, 1, 201, 400, 500, 600
ILLEGAL, MISALIGNED = 700, 716


# -- violations: each is seen

def test_freeing_what_a_queued_copy_uses(app, fake_cuda):
    stream, room = app.stream(), np.zeros(8192, np.uint8)
    addr, host = fake_cuda.new("cuMemAlloc_v2", 64), fake_cuda.new("cuMemHostAlloc", 64, 0)
    page = -(-room.ctypes.data // 4096) * 4096
    fake_cuda.do("cuMemHostRegister_v2", page, 64, 0)
    with fake_cuda.held(stream):
        fake_cuda.do("cuMemcpyHtoDAsync_v2", addr, host, 64, stream)
        fake_cuda.do("cuMemcpyHtoDAsync_v2", addr, page, 64, stream)
        fake_cuda.do("cuMemFree_v2", addr)
        fake_cuda.do("cuMemFreeHost", host)
        fake_cuda.do("cuMemHostUnregister", page)
        assert [text.split()[0] for text in fake_cuda.forgive()] == ["device", "pinned",
                                                                     "registered"]
    fake_cuda.do("cuStreamSynchronize", stream)


def test_pageable_memory_that_nobody_waits_for(app, fake_cuda):
    (addr, bytes_), plain, stream = app.device_memory(64), pattern(64, 1), app.stream()
    event = app.event()
    fake_cuda.do("cuMemcpyHtoDAsync_v2", addr, plain.ctypes.data, 64, stream)
    fake_cuda.do("cuStreamSynchronize", stream)         # as it should be
    assert (bytes_ == plain).all() and fake_cuda.violations() == []
    fake_cuda.do("cuMemcpyDtoHAsync_v2", plain.ctypes.data, addr, 64, stream)
    fake_cuda.do("cuEventRecord", event, stream)
    fake_cuda.do("cuStreamSynchronize", stream)
    assert "pageable" in fake_cuda.forgive()[0]


def test_waiting_for_a_stream_that_the_test_holds_ends(app, fake_cuda):
    (addr, bytes_), stream = app.device_memory(64), app.stream()
    fake_cuda.set(patience=1)
    with fake_cuda.held(stream):
        fake_cuda.do("cuMemsetD8Async", addr, 1, 64, stream)
        assert fake_cuda.call("cuStreamSynchronize", stream) == 702     # LAUNCH_TIMEOUT
    assert "holds" in fake_cuda.forgive()[0]
    fake_cuda.do("cuStreamSynchronize", stream)
    assert (bytes_ == 1).all()


def test_a_context_that_goes_with_things_in_it(fake_cuda):
    fake_cuda.do("cuInit", 0)
    context = fake_cuda.new("cuCtxCreate_v2", 0, 0)
    fake_cuda.new("cuMemAlloc_v2", 64)
    stream = fake_cuda.new("cuStreamCreate", 0)
    fake_cuda.new("cuStreamCreate", 0)
    fake_cuda.do("cuCtxDestroy_v2", context)
    assert [("2 streams" in text, "memory" in text) for text in fake_cuda.forgive()] == [
        (True, False), (False, True)]
    assert fake_cuda.call("cuStreamQuery", stream) == NO_CONTEXT


# -- faults

def test_a_call_fails_when_it_is_told_to(app, fake_cuda):
    stream = app.stream()
    fake_cuda.fail("cuStreamSynchronize", "UNKNOWN", after=2, times=2)
    assert [fake_cuda.call("cuStreamSynchronize", stream) for _ in range(5)] == [0, 0, 999, 999, 0]
    assert fake_cuda.calls("cuStreamSynchronize") == 5
    assert [(name, on) for name, on, _, _ in fake_cuda.log()][-5:] == [
        ("cuStreamSynchronize", stream)] * 5


def test_a_sticky_error_ends_the_context_and_not_the_others(app, fake_cuda):
    (addr, bytes_), stream, event = app.device_memory(64), app.stream(), app.event()
    ran = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ran.append)
    with fake_cuda.held(stream):
        fake_cuda.do("cuMemsetD8Async", addr, 1, 64, stream)
        fake_cuda.do("cuEventRecord", event, stream)
        fake_cuda.do("cuLaunchHostFunc", stream, function, 0)
        fake_cuda.fail("", "ECC_UNCORRECTABLE")
        assert fake_cuda.call("cuEventQuery", event) == NOT_READY
    for name in ("cuStreamSynchronize", "cuStreamQuery"):
        assert fake_cuda.call(name, stream) == 214
    assert fake_cuda.call("cuEventQuery", event) == 214
    out = ctypes.c_uint64()
    assert fake_cuda.call("cuMemAlloc_v2", ctypes.byref(out), 64) == 214
    assert ran == [] and not bytes_.any()
    second = App(fake_cuda, 1)
    fake_cuda.do("cuMemsetD8Async", second.device_memory(8)[0], 1, 8, second.stream())
    fake_cuda.do("cuCtxSynchronize")
    second.close()
    assert fake_cuda.call("cuMemFree_v2", addr) == 214      # all goes with the context
    app.close()
    again = App(fake_cuda)
    again.stream()
    fake_cuda.do("cuCtxSynchronize")
    again.close()
    app.close = lambda: None


# -- the kernel

PTX = (".version 8.1\n.target sm_80\n.address_size 64\n.visible .entry kvio_copy(\n)\n"
       "{ ret; }\n")


@pytest.mark.parametrize("change, driver, code", [
    (("", ""), 13000, OK), (("8.1", "8.8"), 12080, 222), (("8.1", "8.7"), 12080, OK),
    (("sm_80", "sm_100"), 13000, 209), ((".version", "version"), 13000, 200),
    ((".address_size 64", ""), 13000, 218)])
def test_what_is_loaded_is_ptx_that_the_driver_knows(app, fake_cuda, change, driver, code):
    fake_cuda.set(driver=driver)
    module = ctypes.c_uint64()
    text = PTX.replace(*change) if change[0] else PTX
    assert fake_cuda.call("cuModuleLoadData", ctypes.byref(module), text.encode()) == code
    if code == OK:
        function = ctypes.c_uint64()
        assert fake_cuda.call("cuModuleGetFunction", ctypes.byref(function), module.value,
                              b"other") == NOT_FOUND
        fake_cuda.do("cuModuleUnload", module.value)
        assert fake_cuda.call("cuModuleUnload", module.value) == BAD_HANDLE


class Kernel:
    """The kernel of a module, launched as `launch(pieces, ...)`."""

    def __init__(self, app, text=PTX):
        self.app, self.fake = app, app.fake
        self.module = app.made("cuModuleUnload", self.fake.new("cuModuleLoadData", text.encode()))
        self.function = self.fake.new("cuModuleGetFunction", self.module, b"kvio_copy")

    def launch(self, stream, pieces, blocks=2, threads=64, at=None):
        addr, data = self.app.pinned(max(24 * len(pieces), 24))
        packed = b"".join(struct.pack("<3Q", *piece) for piece in pieces)
        data[:len(packed)] = np.frombuffer(packed, np.uint8)
        where, count = ctypes.c_uint64(at or addr), ctypes.c_uint32(len(pieces))
        arguments = (ctypes.c_void_p * 2)(*map(ctypes.addressof, (where, count)))
        return self.fake.call("cuLaunchKernel", self.function, blocks, 1, 1, threads, 1, 1, 0,
                              stream, arguments, 0)


@pytest.mark.parametrize("blocks, threads", [(1, 32), (3, 64), (8, 1024)])
def test_the_kernel_moves_its_pieces_by_device_addresses(app, fake_cuda, blocks, threads):
    fake_cuda.set(host_shift=1 << 48)
    kernel, stream, room = Kernel(app), app.stream(), pattern(5 * 4096, 11)
    page = -(-room.ctypes.data // 4096) * 4096
    skip = page - room.ctypes.data
    fake_cuda.do("cuMemHostRegister_v2", page, 4 * 4096, 0)
    addr, bytes_ = app.device_memory(4 * 4096)
    sizes, pieces, at = [16, 32, 4096, 4112, 528, 16, 6000 // 16 * 16], [], 0
    wanted = bytes_.copy()
    for size in sizes:
        pieces.append((addr + 16384 - at - size, page + (1 << 48) + at, size))
        wanted[16384 - at - size:16384 - at] = room[skip + at:skip + at + size]
        at += size
    assert kernel.launch(stream, pieces, blocks, threads) == OK
    fake_cuda.do("cuStreamSynchronize", stream)
    assert (bytes_ == wanted).all() and fake_cuda.grid() == (blocks, threads)
    back = [(source, target, size) for target, source, size in pieces]
    room[:] = 0
    assert kernel.launch(stream, back, blocks, threads) == OK
    fake_cuda.do("cuStreamSynchronize", stream)
    assert (room[skip:skip + at] == pattern(5 * 4096, 11)[skip:skip + at]).all()
    assert kernel.launch(stream, []) == OK
    fake_cuda.do("cuStreamSynchronize", stream)
    fake_cuda.do("cuMemHostUnregister", page)


@pytest.mark.parametrize("target, nbytes, code", [
    (-16, 32, ILLEGAL), (4096 - 16, 32, ILLEGAL), (8, 16, MISALIGNED), (0, 24, MISALIGNED)])
def test_a_kernel_that_leaves_its_memory_ends_the_context(app, fake_cuda, target, nbytes, code):
    kernel, stream = Kernel(app), app.stream()
    (addr, bytes_), (host, _) = app.device_memory(4096), app.pinned(4096, 1)
    assert kernel.launch(stream, [(addr + target, host, nbytes)]) == OK
    assert fake_cuda.call("cuStreamSynchronize", stream) == code
    assert fake_cuda.call("cuCtxSynchronize") == code and not bytes_.any()


def test_a_kernel_reads_pageable_memory_and_the_context_ends(app, fake_cuda):
    kernel, stream, plain = Kernel(app), app.stream(), pattern(4096, 1)
    addr, _ = app.device_memory(4096)
    assert kernel.launch(stream, [(addr, -(-plain.ctypes.data // 16) * 16, 64)]) == OK
    assert fake_cuda.call("cuStreamSynchronize", stream) == ILLEGAL


def test_launches_that_are_wrong_are_refused(app, fake_cuda):
    kernel, stream = Kernel(app), app.stream()
    assert kernel.launch(stream, [], threads=1025) == INVALID
    assert kernel.launch(stream, [], blocks=0) == INVALID
    assert kernel.launch(12345, []) == BAD_HANDLE
