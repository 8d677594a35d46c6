"""The fake libcuda by itself, as an application uses it: what CUDA documents it does, in order and
byte for byte, and it sees what a GPU would answer with corrupt memory."""
import ctypes
import os
import threading

import numpy as np
import pytest

from nics import pattern

OK, INVALID, NO_MEMORY, NO_CONTEXT, BAD_HANDLE, NOT_FOUND, NOT_READY = 0, 1, 2, 201, 400, 500, 600
ALREADY, NOT_REGISTERED, NOT_PERMITTED, NOT_SUPPORTED = 712, 713, 800, 801
READ_ONLY = 8                           # CU_MEMHOSTREGISTER_READ_ONLY
CONTEXT, KIND, ORDINAL, START, NBYTES = 1, 2, 9, 11, 12
HOST, DEVICE, UNIFIED = 1, 2, 4


@pytest.fixture
def other(fake_cuda, app):
    """A further context of the same device, which is current."""
    context = fake_cuda.new("cuCtxCreate_v2", 0, 0)
    yield context
    fake_cuda.do("cuCtxDestroy_v2", context)


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


def test_the_cpu_cannot_reach_a_device(app):
    addr, _ = app.device_memory(64)
    child = os.fork()
    if not child:
        import faulthandler
        faulthandler.disable()                  # pytest's, which would tell of the crash
        ctypes.string_at(addr, 1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == 11


# -- order

def test_streams_run_for_themselves_and_events_order_them(app, fake_cuda):
    (host, data), (addr, bytes_) = app.pinned(64, 2), app.device_memory(64)
    first, second, event = app.stream(), app.stream(), app.event()
    assert fake_cuda.call("cuEventQuery", event) == OK              # never recorded
    fake_cuda.do("cuStreamWaitEvent", second, event, 0)             # so nobody waits
    with fake_cuda.held(first):
        fake_cuda.do("cuMemsetD8Async", addr, 9, 64, first)
        fake_cuda.do("cuEventRecord", event, first)
        fake_cuda.do("cuMemsetD8Async", addr + 32, 1, 1, second)
        fake_cuda.do("cuStreamSynchronize", second)
        assert bytes_[32] == 1 and bytes_[0] == 0                   # it did not wait
        fake_cuda.do("cuStreamWaitEvent", second, event, 0)
        fake_cuda.do("cuMemcpyHtoDAsync_v2", addr, host, 32, second)
        assert fake_cuda.call("cuEventQuery", event) == NOT_READY
        assert fake_cuda.queued(second) == 2
    fake_cuda.do("cuStreamSynchronize", second)
    assert (bytes_[:32] == data[:32]).all() and (bytes_[32:] == 9).all()
    assert fake_cuda.call("cuEventQuery", event) == OK


def test_a_wait_is_for_the_record_there_was_when_it_was_made(app, fake_cuda):
    first, second, third, event = app.stream(), app.stream(), app.stream(), app.event()
    fake_cuda.hold(first)
    fake_cuda.hold(second)
    fake_cuda.do("cuEventRecord", event, first)
    fake_cuda.do("cuStreamWaitEvent", third, event, 0)
    fake_cuda.do("cuEventRecord", event, second)        # another moment: third does not care
    fake_cuda.hold(first, False)
    fake_cuda.do("cuStreamSynchronize", third)
    assert fake_cuda.call("cuEventQuery", event) == NOT_READY
    fake_cuda.do("cuStreamWaitEvent", third, event, 0)
    fake_cuda.do("cuEventDestroy_v2", event)            # a wait outlives its event
    assert fake_cuda.queued(third) == 1
    fake_cuda.hold(second, False)
    fake_cuda.do("cuStreamSynchronize", third)


@pytest.mark.parametrize("null", [0, 1])
def test_the_default_stream_waits_for_blocking_streams_and_they_for_it(app, fake_cuda, null):
    addr, bytes_ = app.device_memory(8)
    blocking, free = app.stream(0), app.stream()
    with fake_cuda.held(blocking):
        fake_cuda.do("cuMemsetD8Async", addr, 1, 8, blocking)
        fake_cuda.do("cuMemsetD8Async", addr, 2, 4, null)
        fake_cuda.do("cuMemsetD8Async", addr, 3, 2, blocking)
        fake_cuda.do("cuStreamSynchronize", free)
        assert fake_cuda.call("cuStreamQuery", null) == NOT_READY
    fake_cuda.do("cuCtxSynchronize")
    assert bytes_.tolist() == [3, 3, 2, 2, 1, 1, 1, 1]


def test_a_destroyed_stream_finishes_what_it_was_given(app, fake_cuda):
    addr, bytes_ = app.device_memory(8)
    stream, event = fake_cuda.new("cuStreamCreate", 1), app.event()
    fake_cuda.hold(stream)
    fake_cuda.do("cuMemsetD8Async", addr, 1, 8, stream)
    fake_cuda.do("cuEventRecord", event, stream)
    fake_cuda.do("cuStreamDestroy_v2", stream)
    assert fake_cuda.call("cuStreamQuery", stream) == BAD_HANDLE
    fake_cuda.hold(stream, False)
    fake_cuda.do("cuEventSynchronize", event)
    assert (bytes_ == 1).all()


def test_host_functions_run_in_order_on_a_thread_of_the_driver(app, fake_cuda):
    stream, seen = app.stream(), []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def function(argument):
        seen.append((argument, threading.get_ident()))
        if argument == 3:
            seen.append(fake_cuda.call("cuStreamQuery", stream))
    for argument in (1, 2, 3):
        fake_cuda.do("cuLaunchHostFunc", stream, function, argument)
    fake_cuda.do("cuStreamSynchronize", stream)
    assert [each[0] for each in seen[:3]] == [1, 2, 3] and seen[0][1] != threading.get_ident()
    assert seen[3] == NOT_PERMITTED                     # no CUDA in there
    assert "cuStreamQuery" in fake_cuda.forgive()[0]


def test_time_passes_between_events_that_take_it(app, fake_cuda):
    stream, elapsed = app.stream(), ctypes.c_float()
    start, end, untimed = app.event(0), app.event(0), app.event()
    addr, _ = app.device_memory(1000)
    fake_cuda.cost("cuMemsetD8Async", run_ns=1_000_000, byte_ps=1_000_000)      # 1 ms + 1 us a byte
    for event in start, end, untimed:
        if event == end:
            fake_cuda.do("cuMemsetD8Async", addr, 1, 1000, stream)
        fake_cuda.do("cuEventRecord", event, stream)
    fake_cuda.do("cuEventSynchronize", untimed)
    for name in ("cuEventElapsedTime", "cuEventElapsedTime_v2"):
        fake_cuda.do(name, ctypes.byref(elapsed), start, end)
        assert elapsed.value >= 2
    assert fake_cuda.call("cuEventElapsedTime", ctypes.byref(elapsed), start, untimed) == BAD_HANDLE


def test_a_stream_has_a_priority_and_a_context(app, fake_cuda):
    least, greatest, found = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    fake_cuda.do("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
    assert (least.value, greatest.value) == (0, -5)
    for asked, given in ((-5, -5), (-9, -5), (0, 0), (3, 0)):
        stream = fake_cuda.new("cuStreamCreateWithPriority", 1, ctypes.c_int(asked))
        fake_cuda.do("cuStreamGetPriority", stream, ctypes.byref(found))
        assert found.value == given
        context = ctypes.c_uint64()
        fake_cuda.do("cuStreamGetCtx", stream, ctypes.byref(context))
        assert context.value == app.context
        fake_cuda.do("cuStreamDestroy_v2", stream)


# -- copies of more than one piece

class Copy2D(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for end in ("src", "dst") for name in (
        f"{end}_x", f"{end}_y", f"{end}_type", f"{end}_host", f"{end}_device", f"{end}_array",
        f"{end}_pitch")] + [("width", ctypes.c_uint64), ("height", ctypes.c_uint64)]


class Copy3D(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for end in ("src", "dst") for name in (
        f"{end}_x", f"{end}_y", f"{end}_z", f"{end}_lod", f"{end}_type", f"{end}_host",
        f"{end}_device", f"{end}_array", f"{end}_reserved", f"{end}_pitch", f"{end}_height")] + [
        ("width", ctypes.c_uint64), ("height", ctypes.c_uint64), ("depth", ctypes.c_uint64)]


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize("unified", [True, False])
def test_two_dimensions_are_those_of_numpy(app, fake_cuda, up, unified):
    (host, a), (addr, b) = app.pinned(20 * 50, 3), app.device_memory(15 * 64, 4)
    a, b, stream = a.reshape(20, 50), b.reshape(15, 64), app.stream()
    source, target = (a, b) if up else (b, a)
    wanted = target.copy()
    wanted[2:10, 7:38] = source[4:12, 5:36]
    sides = [(HOST, dict(host=host)), (DEVICE, dict(device=addr))]
    if unified:
        sides = [(UNIFIED, dict(device=host)), (UNIFIED, dict(device=addr))]
    if not up:
        sides.reverse()
    copy = Copy2D(src_x=5, src_y=4, dst_x=7, dst_y=2, width=31, height=8,
                  src_pitch=source.shape[1], dst_pitch=target.shape[1])
    for end, (kind, places) in zip(("src", "dst"), sides):
        setattr(copy, f"{end}_type", kind)
        for name, value in places.items():
            setattr(copy, f"{end}_{name}", value)
    fake_cuda.do("cuMemcpy2DAsync_v2", ctypes.byref(copy), stream)
    fake_cuda.do("cuStreamSynchronize", stream)
    assert (target == wanted).all()
    copy.height = 17                                    # leaves one of them
    assert fake_cuda.call("cuMemcpy2DAsync_v2", ctypes.byref(copy), stream) == INVALID
    copy.height, copy.src_pitch = 2, 35                 # rows that overlap, from src_x on
    assert fake_cuda.call("cuMemcpy2DAsync_v2", ctypes.byref(copy), stream) == INVALID
    copy.src_pitch = 1 << 31                            # above CU_DEVICE_ATTRIBUTE_MAX_PITCH
    assert fake_cuda.call("cuMemcpy2DAsync_v2", ctypes.byref(copy), stream) == INVALID


def test_three_dimensions_are_those_of_numpy(app, fake_cuda):
    (host, a), (addr, b) = app.pinned(6 * 9 * 40, 5), app.device_memory(4 * 12 * 33, 6)
    a, b, stream = a.reshape(6, 9, 40), b.reshape(4, 12, 33), app.stream()
    copy = Copy3D(src_x=3, src_y=2, src_z=1, src_type=HOST, src_host=host, src_pitch=40,
                  src_height=9, dst_x=10, dst_y=5, dst_z=1, dst_type=DEVICE, dst_device=addr,
                  dst_pitch=33, dst_height=12, width=20, height=6, depth=3)
    wanted = b.copy()
    wanted[1:4, 5:11, 10:30] = a[1:4, 2:8, 3:23]
    fake_cuda.do("cuMemcpy3DAsync_v2", ctypes.byref(copy), stream)
    fake_cuda.do("cuStreamSynchronize", stream)
    assert (b == wanted).all()
    copy.dst_height = 10                                # slices that overlap, from dst_y on
    assert fake_cuda.call("cuMemcpy3DAsync_v2", ctypes.byref(copy), stream) == INVALID


class Attributes(ctypes.Structure):
    _fields_ = [("order", ctypes.c_uint32), ("source", ctypes.c_int32 * 2),
                ("target", ctypes.c_int32 * 2), ("flags", ctypes.c_uint32)]


def batch(fake, pieces, stream, old=False, order=1, failed=None):
    """One batched call of (target, source, nbytes)."""
    columns = [(ctypes.c_uint64 * len(pieces))(*column) for column in zip(*pieces)]
    return fake.call("cuMemcpyBatchAsync" if old else "cuMemcpyBatchAsync_v2", *columns,
                     len(pieces), ctypes.byref(Attributes(order)),
                     ctypes.byref(ctypes.c_uint64(0)), 1,
                     *([failed and ctypes.byref(failed)] if old else []), stream)


@pytest.mark.parametrize("old", [True, False])
def test_a_batch_has_all_its_pieces_and_no_order(app, fake_cuda, old):
    (host, data), (addr, bytes_) = app.pinned(4096, 7), app.device_memory(4096)
    stream, failed = app.stream(), ctypes.c_uint64(77)
    pieces = [(addr + at, host + (at + 256) % 4096, 64) for at in range(0, 4096, 64)]
    assert batch(fake_cuda, pieces, stream, old) == OK
    fake_cuda.do("cuStreamSynchronize", stream)
    assert (bytes_ == np.roll(data, -256)).all()
    orders = set()
    for _ in range(16):                     # pieces that overlap: the last one of them stays
        assert batch(fake_cuda, [(addr, host + at, 1) for at in range(8)], stream, old) == OK
        fake_cuda.do("cuStreamSynchronize", stream)
        orders.add(int(bytes_[0]))
    assert len(orders) > 2
    assert batch(fake_cuda, pieces, 0, old) == INVALID          # not in the default stream
    assert batch(fake_cuda, pieces, stream, old, order=0) == INVALID
    assert batch(fake_cuda, [*pieces, (addr + 4090, host, 7), pieces[0]], stream, old,
                 failed=failed) == INVALID
    assert failed.value == (64 if old else 77)
    assert fake_cuda.queued(stream) == 0                        # nor was a part of it posted


# -- memory

def test_memory_has_an_owner_and_an_end(app, fake_cuda):
    fake_cuda.set(offset=256, total=10000, pinned_limit=8192)
    addr, _ = app.device_memory(6000)
    assert addr % 4096 == 256
    out, stream = ctypes.c_uint64(), app.stream()
    assert fake_cuda.call("cuMemAlloc_v2", ctypes.byref(out), 4001) == NO_MEMORY
    host, _ = app.pinned(5000)
    assert fake_cuda.call("cuMemHostAlloc", ctypes.byref(out), 4000, 0) == NO_MEMORY
    for at, nbytes in ((addr - 1, 2), (addr + 5999, 2), (addr + 6000, 1)):
        assert fake_cuda.call("cuMemcpyHtoDAsync_v2", at, host, nbytes, stream) == INVALID
    assert fake_cuda.call("cuMemcpyHtoDAsync_v2", addr, host, 5001, stream) == INVALID
    assert fake_cuda.call("cuMemFree_v2", addr + 1) == INVALID
    fake_cuda.do("cuMemFree_v2", addr)
    assert fake_cuda.call("cuMemcpyHtoDAsync_v2", addr, host, 1, stream) == INVALID
    assert fake_cuda.call("cuMemcpyAsync", host, addr, 1, stream) == INVALID
    assert fake_cuda.call("cuMemFree_v2", addr) == INVALID


def attributes(fake, addr):
    """What the driver knows of an address, or the error."""
    value, found = ctypes.c_uint64(), []
    for attribute in (KIND, CONTEXT, ORDINAL, START, NBYTES):
        value.value = 0
        code = fake.call("cuPointerGetAttribute", ctypes.byref(value), attribute, addr)
        found.append(value.value if code == OK else -code)
    return tuple(found)


def test_what_an_address_is(app, fake_cuda):
    (addr, _), (host, _), plain = app.device_memory(100), app.pinned(100), np.zeros(100, np.uint8)
    assert attributes(fake_cuda, addr + 99) == (DEVICE, app.context, 0, addr, 100)
    assert attributes(fake_cuda, host + 5) == (HOST, app.context, 0, host, 100)
    assert attributes(fake_cuda, plain.ctypes.data) == (-INVALID,) * 5
    assert attributes(fake_cuda, addr + 100) == (-INVALID,) * 5
    base, nbytes = ctypes.c_uint64(), ctypes.c_uint64()
    place = ctypes.byref(base), ctypes.byref(nbytes)
    for start in (addr, host):
        fake_cuda.do("cuMemGetAddressRange_v2", *place, start + 7)
        assert (base.value, nbytes.value) == (start, 100)
    fake_cuda.set(host_ranges=0)
    assert fake_cuda.call("cuMemGetAddressRange_v2", *place, host) == INVALID


@pytest.mark.parametrize("shift", [0, 1 << 48])
def test_memory_is_registered_by_pages_and_mapped(app, fake_cuda, shift):
    fake_cuda.set(host_shift=shift)
    room = np.zeros(5 * 4096, np.uint8)
    base = -(-room.ctypes.data // 4096) * 4096
    fake_cuda.do("cuMemHostRegister_v2", base + 100, 8192, 0)       # three pages
    for at, nbytes in ((base + 100, 8192), (base, 10), (base + 8192 + 200, 10), (base, 16384)):
        assert fake_cuda.call("cuMemHostRegister_v2", at, nbytes, 0) == ALREADY
    assert fake_cuda.new("cuMemHostGetDevicePointer_v2", base + 105, 0) == base + 105 + shift
    assert attributes(fake_cuda, base + 100)[0] == HOST
    addr, bytes_ = app.device_memory(8192, 8)
    stream = app.stream()
    for start in {base, base + shift}:
        room[:] = 0
        fake_cuda.do("cuMemcpyAsync", start + 100, addr, 8192, stream)
        fake_cuda.do("cuStreamSynchronize", stream)
        skip = base + 100 - room.ctypes.data
        assert (room[skip:skip + 8192] == bytes_).all()
    assert fake_cuda.call("cuMemHostUnregister", base + 101) == NOT_REGISTERED
    fake_cuda.do("cuMemHostUnregister", base + 100)
    assert fake_cuda.call("cuMemHostUnregister", base + 100) == NOT_REGISTERED


def test_read_only_and_absent_pages(app, fake_cuda, tmp_path):
    (tmp_path / "file").write_bytes(pattern(8192, 9).tobytes())
    mapped = np.memmap(tmp_path / "file", mode="r")
    at, (addr, bytes_), stream = mapped.ctypes.data, app.device_memory(8192), app.stream()
    assert fake_cuda.call("cuMemHostRegister_v2", at, 8192, 0) == INVALID
    fake_cuda.do("cuMemHostRegister_v2", at, 8192, READ_ONLY)
    fake_cuda.do("cuMemcpyHtoDAsync_v2", addr, at, 8192, stream)
    fake_cuda.do("cuStreamSynchronize", stream)
    assert (bytes_ == mapped).all()
    assert fake_cuda.call("cuMemcpyDtoHAsync_v2", at, addr, 8192, stream) == INVALID
    fake_cuda.do("cuMemHostUnregister", at)
    fake_cuda.set(read_only_register=0)
    assert fake_cuda.call("cuMemHostRegister_v2", at, 8192, READ_ONLY) == NOT_SUPPORTED
    gone = addr + 8192 // 4096 * 4096                   # the page behind, which nobody has
    assert fake_cuda.call("cuMemHostRegister_v2", gone, 4096, 0) == INVALID


# -- contexts, versions

def test_calls_want_a_context_and_handles_of_it(app, other, fake_cuda):
    fake_cuda.do("cuCtxPopCurrent_v2", 0)
    (addr, _), stream, event = app.device_memory(64), app.stream(), app.event()
    host, _ = app.pinned(64)
    fake_cuda.do("cuCtxPushCurrent_v2", other)
    mine = fake_cuda.new("cuStreamCreate", 1)
    assert fake_cuda.call("cuMemcpyHtoDAsync_v2", addr, host, 64, stream) == BAD_HANDLE
    assert fake_cuda.call("cuMemcpyHtoDAsync_v2", addr, host, 64, mine) == INVALID
    assert fake_cuda.call("cuEventRecord", event, mine) == BAD_HANDLE
    assert fake_cuda.call("cuStreamWaitEvent", mine, event, 0) == OK    # events cross contexts
    for name, more in (("cuStreamGetCtx", []), ("cuStreamGetCtx_v2", [ctypes.c_uint64()])):
        found = ctypes.c_uint64()
        fake_cuda.do(name, stream, *map(ctypes.byref, [found, *more]))
        assert found.value == app.context
    base = ctypes.c_uint64()
    assert fake_cuda.call("cuMemGetAddressRange_v2", ctypes.byref(base), 0, addr) == NO_CONTEXT
    fake_cuda.do("cuStreamDestroy_v2", mine)
    assert fake_cuda.call("cuStreamSynchronize", 12345) == BAD_HANDLE
    found = []
    thread = threading.Thread(target=lambda: found.append(fake_cuda.call("cuCtxSynchronize")))
    thread.start()
    thread.join()
    assert found == [NO_CONTEXT]                        # what is current is a thread's own


def test_a_primary_context_lives_as_long_as_its_references(fake_cuda):
    fake_cuda.do("cuInit", 0)
    flags, active = ctypes.c_uint(), ctypes.c_int()
    state = "cuDevicePrimaryCtxGetState", 1, ctypes.byref(flags), ctypes.byref(active)
    context = fake_cuda.new("cuDevicePrimaryCtxRetain", 1)
    assert fake_cuda.new("cuDevicePrimaryCtxRetain", 1) == context
    fake_cuda.do("cuDevicePrimaryCtxRelease_v2", 1)
    fake_cuda.do(*state)
    assert active.value == 1
    fake_cuda.do("cuDevicePrimaryCtxRelease_v2", 1)
    fake_cuda.do(*state)
    assert active.value == 0 and fake_cuda.call("cuCtxPushCurrent_v2", context) == NO_CONTEXT
    assert fake_cuda.call("cuDevicePrimaryCtxRelease_v2", 1) == NO_CONTEXT
    assert fake_cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(active), 2) == 101


def found_by_name(fake, name, version):
    """(address or 0, status, result)."""
    out, status = ctypes.c_uint64(99), ctypes.c_int(9)
    code = fake.call("cuGetProcAddress_v2", name.encode(), ctypes.byref(out), version, 1,
                     ctypes.byref(status))
    return out.value, status.value, code


@pytest.mark.parametrize("driver, version, batch, v2", [
    (12040, 12040, None, False), (12080, 12080, "cuMemcpyBatchAsync", True),
    (13000, 12080, "cuMemcpyBatchAsync", True), (13000, 13000, "cuMemcpyBatchAsync_v2", True)])
def test_functions_by_name_and_version(fake_cuda, driver, version, batch, v2):
    fake_cuda.set(driver=driver)
    address = {name: ctypes.cast(getattr(fake_cuda.cu, name), ctypes.c_void_p).value for name in (
        "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", "cuMemAlloc_v2", "cuStreamGetCtx",
        "cuStreamGetCtx_v2")}
    assert found_by_name(fake_cuda, "cuMemcpyBatchAsync", version) == (
        (address[batch], 0, OK) if batch else (0, 1, OK))
    assert found_by_name(fake_cuda, "cuMemAlloc", version) == (address["cuMemAlloc_v2"], 0, OK)
    assert found_by_name(fake_cuda, "cuMemAlloc", 2000) == (0, 2, OK)       # its old version
    assert found_by_name(fake_cuda, "cuStreamGetCtx", version)[0] == \
        address["cuStreamGetCtx_v2" if v2 else "cuStreamGetCtx"]
    assert found_by_name(fake_cuda, "cuStreamGetCtx", 9020)[0] == address["cuStreamGetCtx"]
    assert found_by_name(fake_cuda, "cuNothing", version) == (0, 1, OK)
    assert found_by_name(fake_cuda, "cuMemAlloc", driver + 10)[2] == INVALID
    out = ctypes.c_uint64()
    assert fake_cuda.call("cuGetProcAddress", b"cuNothing", ctypes.byref(out), version,
                          1) == NOT_FOUND
    fake_cuda.do("cuGetProcAddress", b"cuMemAlloc", ctypes.byref(out), version, 1)
    assert out.value == address["cuMemAlloc_v2"]
