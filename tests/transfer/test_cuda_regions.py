"""What is pinned, and until when, on the fake libcuda: whole pages, each once, whoever registers
them, and copies that never cross from one registration into the next; and what drivers of several
versions are asked for."""
import ctypes
import mmap

import numpy as np
import pytest

from kvio._ext import nic as _nic
from kvio.errors import KvioError
from kvio.layout import READ, WRITE
from kvio.transfer import KV, Access, Nic
from nics import pattern, requests
from tensors import Tensor
from test_cuda_bad_input import python

PAGE = 4096


class Host:
    """Anonymous pages, and `nbytes` of them from `at` on as a buffer."""

    def __init__(self, pages, fill=None):
        self.memory = mmap.mmap(-1, pages * PAGE)
        self.bytes = np.frombuffer(self.memory, np.uint8)
        if fill is not None:
            self.bytes[:] = pattern(pages * PAGE, fill)
        self.addr = self.bytes.ctypes.data

    def part(self, at, nbytes):
        return self.bytes[at:at + nbytes]


def pinned_pages(fake):
    """What the log leaves registered: (first page, number of pages), ascending."""
    left = {}
    for name, _, addr, nbytes in fake.log():
        if name == "cuMemHostRegister_v2":
            left[addr] = nbytes
        elif name == "cuMemHostUnregister":
            del left[addr]
    return sorted(left.items())


# ---- pages

def test_pages_are_registered_whole_and_once(fake_cuda, gpu):
    host, nic = Host(8), gpu.nic()
    whole = nic.register(host.part(0, 8 * PAGE))
    again = nic.register(host.part(0, 8 * PAGE))
    inside = nic.register(host.part(PAGE + 5, 100))
    assert pinned_pages(fake_cuda) == [(host.addr, 8 * PAGE)]
    nic.deregister(whole)
    nic.deregister(again)
    assert fake_cuda.objects()["registered"] == 1
    nic.deregister(inside)
    assert fake_cuda.objects()["registered"] == 0
    a, b = nic.register(host.part(10, 20)), nic.register(host.part(2000, 20))   # one page
    assert pinned_pages(fake_cuda) == [(host.addr, PAGE)]
    nic.deregister(a)
    assert fake_cuda.objects()["registered"] == 1
    nic.deregister(b)


def test_two_nics_pin_the_same_pool_once(fake_cuda, gpu):
    host, first, second = Host(4), gpu.nic(), gpu.nic()
    first.register(host.bytes)
    region = second.register(host.bytes)
    assert fake_cuda.calls("cuMemHostRegister_v2") == 1
    first.close()
    assert fake_cuda.objects()["registered"] == 1
    second.deregister(region)
    assert fake_cuda.objects()["registered"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_any_regions_in_any_order(fake_cuda, gpu, seed):
    """The pages that are pinned are those that a region lies in, at every time."""
    rng, host, nic, held = np.random.default_rng(seed), Host(32), gpu.nic(), []
    for _ in range(120):
        if held and rng.random() < 0.45:
            region, *_ = held.pop(rng.integers(len(held)))
            nic.deregister(region)
        else:
            at = int(rng.integers(0, 32 * PAGE - 1))
            nbytes = int(min(rng.integers(1, 9 * PAGE), 32 * PAGE - at))
            held.append((nic.register(host.part(at, nbytes)), at, nbytes))
        wanted = {page for _, at, nbytes in held
                  for page in range(at // PAGE, (at + nbytes - 1) // PAGE + 1)}
        pinned = [(addr - host.addr) // PAGE + i for addr, nbytes in pinned_pages(fake_cuda)
                  for i in range(nbytes // PAGE)]
        assert wanted <= set(pinned) and len(pinned) == len(set(pinned))
        if not held:
            assert not pinned
    for region, *_ in held:
        nic.deregister(region)
    assert fake_cuda.objects()["registered"] == 0


@pytest.mark.parametrize("copy", ["loop", "batch", "strided", "kernel"])
def test_no_copy_crosses_from_one_registration_into_the_next(fake_cuda, gpu, copy):
    """Neither one piece, nor pieces that touch, or lie a stride apart, in two of them."""
    host, result = Host(16, 3), Host(16)
    tensor, hbm = gpu.tensor(16 * PAGE)
    nic, peer, near = gpu.loop_back(tensor, copy=copy, classes=[KV])
    for memory in host, result:
        parts = [nic.register(memory.part(0, 4 * PAGE)), nic.register(memory.part(6 * PAGE, PAGE))]
        whole = nic.register(memory.part(0, 16 * PAGE))
        parts.append(nic.register(memory.part(8 * PAGE, 8 * PAGE)))
        if memory is host:
            peer.read(requests(READ, near, whole, 0, 0, 16 * PAGE)).wait()
            assert (hbm == host.bytes).all()
            hbm[:] = 0
            at = 2048 * np.arange(32)           # touching
            peer.read(requests(READ, near, whole, at, at, 2048)).wait()
            assert (hbm == host.bytes).all()
        at = 1024 * np.arange(64)               # rows
        peer.write(requests(WRITE, near, whole, at, at, 512)).wait()
    rows = result.bytes.reshape(-1, 2, 512)
    assert (rows[:, 0] == host.bytes.reshape(-1, 2, 512)[:, 0]).all() and not rows[:, 1].any()
    # Two regions that touch, each pinned for itself.
    other, touching = Host(4, 4), []
    for at in 0, 2:
        touching.append(nic.register(other.part(at * PAGE, 2 * PAGE)))
    wrs = np.concatenate([requests(READ, near, touching[i], i * 2 * PAGE, 0, 2 * PAGE)
                          for i in range(2)])
    peer.read(wrs).wait()
    assert (hbm[:4 * PAGE] == other.bytes).all()


def test_what_is_read_at_once_may_lie_across_the_end_of_a_registration(fake_cuda, gpu):
    """An array on the heap shares its first or last page with whatever else is registered."""
    host, nic = Host(8), gpu.nic()
    device = nic.device_memory(8 * PAGE)
    nic.register(host.part(2 * PAGE + 100, 3 * PAGE))           # pins pages 2 to 5
    expected = pattern(8 * PAGE, 5)
    for start, stop in (0, 8 * PAGE), (PAGE, 3 * PAGE), (5 * PAGE + 7, 7 * PAGE), (10, 20):
        host.bytes[:] = expected
        device.write(start, host.part(start, stop - start))
        host.bytes[:] = 0
        _nic.cuda_copy(0, host.addr + start, device.addr + start, stop - start)
        assert (host.bytes[start:stop] == expected[start:stop]).all()


@pytest.mark.parametrize("ranges, taken", [
    (0, [(0, 8)]), (0, [(2, 3)]), (0, [(0, 2), (5, 3)]), (1, [(0, 8)]), (1, [(2, 3)]),
    (1, [(0, 2), (5, 3)]), (1, [(3, 1), (4, 1), (6, 1)])], ids=str)
def test_what_others_have_pinned_stays_theirs(fake_cuda, gpu, ranges, taken):
    fake_cuda.set(host_ranges=ranges)
    host = Host(8, 6)
    tensor, hbm = gpu.tensor(8 * PAGE)
    for page, count in taken:
        gpu.inside("cuMemHostRegister_v2", host.addr + page * PAGE, count * PAGE, 0)
    nic, peer, near, far = gpu.loop_back(tensor, host.bytes, copy="loop")
    peer.read(requests(READ, near, far, 0, 0, 8 * PAGE)).wait()
    assert (hbm == host.bytes).all()
    nic.deregister(far)
    assert fake_cuda.objects()["registered"] == len(taken)
    for page, _ in taken:
        gpu.inside("cuMemHostUnregister", host.addr + page * PAGE)


def test_our_own_pinned_memory_is_not_pinned_again(fake_cuda, gpu):
    nic = gpu.nic()
    memory, calls = nic.pinned(3 * PAGE), fake_cuda.calls("cuPointerGetAttribute")
    region = nic.register(memory)
    assert fake_cuda.calls("cuMemHostRegister_v2") == 0
    assert fake_cuda.calls("cuPointerGetAttribute") - calls < 4     # and not asked page by page
    nic.deregister(region)


def test_memory_that_cannot_all_be_pinned_is_not_pinned_at_all(fake_cuda, gpu):
    host, nic = Host(16), gpu.nic()
    first = nic.register(host.part(4 * PAGE, PAGE))
    fake_cuda.fail("cuMemHostRegister_v2", "OUT_OF_MEMORY", after=1)
    with pytest.raises(KvioError, match="cuMemHostRegister of 45056 bytes.*OUT_OF_MEMORY"):
        nic.register(host.bytes)
    assert fake_cuda.objects()["registered"] == 1
    nic.deregister(first)
    nic.deregister(nic.register(host.bytes))
    assert fake_cuda.objects()["registered"] == 0


def test_memory_that_is_mapped_for_reading(fake_cuda, gpu, tmp_path):
    (tmp_path / "file").write_bytes(pattern(4 * PAGE, 9).tobytes())
    with open(tmp_path / "file", "rb") as file:
        memory = mmap.mmap(file.fileno(), 4 * PAGE, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
    host = np.frombuffer(memory, np.uint8)
    tensor, hbm = gpu.tensor(4 * PAGE)
    nic, peer, near = gpu.loop_back(tensor, copy="loop")
    far = nic.register(host, Access.REMOTE_READ)
    peer.read(requests(READ, near, far, 0, 0, 4 * PAGE)).wait()
    assert (hbm == host).all()
    nic.deregister(far)
    fake_cuda.set(read_only_register=0)
    with pytest.raises(KvioError, match="cuMemHostRegister"):
        nic.register(host, Access.REMOTE_READ)
    assert fake_cuda.objects()["registered"] == 0


def test_drivers_that_say_otherwise_that_pages_are_read_only(fake_cuda, gpu):
    nic, host = gpu.nic(), Host(2)
    for error in 1, 304, 800, 801:              # 304: OPERATING_SYSTEM
        fake_cuda.fail("cuMemHostRegister_v2", error)
        region = nic.register(host.bytes, Access.REMOTE_READ)
        nic.deregister(region)


def test_the_last_page_of_the_address_space_is_no_memory(fake_cuda):
    nic = _nic.Nic("cuda", None, "0", copy_way=0)
    for addr, nbytes in ((2**64 - PAGE, PAGE - 1), (2**64 - 5, 4),
                         (2**64 - 3 * PAGE, 3 * PAGE - 1)):
        with pytest.raises(OSError, match="Bad address"):
            nic.reg(None, addr, nbytes, _nic.LOCAL_WRITE)
    nic.close()


# ---- the GPU's memory

def test_memory_that_is_mapped_in_pieces_is_one_region(fake_cuda, gpu):
    """As PyTorch's expandable segments are: one range of addresses over several allocations, which
    belong to no context. What is not mapped is refused, wherever it lies."""
    word = ctypes.c_uint64
    addr, host = fake_cuda.cu.fake_cuda_reserve(word(8 * PAGE)), Host(6, 7)
    pieces = [(0, 2), (2, 1), (3, 3)]
    for page, count in pieces:
        fake_cuda.cu.fake_cuda_segment(word(addr + page * PAGE), word(count * PAGE), None)
    nic, peer, near, far = gpu.loop_back(Tensor(addr, 6 * PAGE), host.bytes)
    at = PAGE * np.arange(6)
    peer.read(requests(READ, near, far, at, at, PAGE - 8)).wait()
    for page, count in pieces:
        data = fake_cuda.bytes_at(addr + page * PAGE, count * PAGE).reshape(count, PAGE)
        expected = host.bytes.reshape(6, PAGE)[page:page + count]
        assert (data[:, :-8] == expected[:, :-8]).all() and not data[:, -8:].any()
    for start, pages in (0, 7), (5, 2), (7, 1):
        with pytest.raises(KvioError, match="not allocated|freed"):
            nic.register(Tensor(addr + start * PAGE, pages * PAGE))
    nic.deregister(near)
    for page, _ in pieces:
        fake_cuda.cu.fake_cuda_release(word(addr + page * PAGE))


# ---- versions

@pytest.mark.parametrize("driver, batched", [
    (11030, "none"), (12000, "none"), (12040, "none"), (12080, "cuMemcpyBatchAsync"),
    (12090, "cuMemcpyBatchAsync"), (13000, "cuMemcpyBatchAsync_v2"),
    (13050, "cuMemcpyBatchAsync_v2")])
def test_each_driver_is_asked_for_what_it_has(fake_cuda, driver, batched):
    """The batched call has another signature in CUDA 13: the wrong one would take a stream for an
    address."""
    out = python(f"""
        fake.set(driver={driver})
        from kvio.layout import READ, WR_DTYPE
        nic = kvio.Nic.open("cuda:0", copy="loop" if "{batched}" == "none" else "batch")
        memory, host = nic.device_memory(8192), np.arange(8192, dtype=np.uint8)
        near, far = nic.register(memory), nic.register(host)
        nic.listen("me")
        wrs = np.zeros(2, WR_DTYPE)
        wrs["opcode"], wrs["length"], wrs["lkey"], wrs["rkey"] = READ, 1000, near.key, far.key
        wrs["local_addr"] = near.addr + np.array([0, 4096], np.uint64)
        wrs["remote_addr"] = far.addr + np.array([0, 4096], np.uint64)
        nic.connect("me", classes=[kvio.KV]).read(wrs).wait()
        assert bytes(memory.read(4096, 1000)) == host[4096:5096].tobytes()
        print([name for name in ("cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2")
               if fake.calls(name)] or ["none"])
        print(fake.calls("cuGetProcAddress"), fake.calls("cuGetProcAddress_v2"))
        nic.close()
    """)
    called, asked = out.splitlines()
    assert called == f"['{batched}']"
    assert (asked.split()[0] != "0") == (driver < 12000)


def test_a_second_nic_costs_no_second_measurement(fake_cuda, gpu):
    first = gpu.nic()
    assert first.info()["copy"]["measured"]
    allocated = fake_cuda.calls("cuMemAlloc_v2")
    second = Nic.open("cuda:0")
    assert second.info()["copy"]["measured"]
    second.close()
    assert fake_cuda.calls("cuMemAlloc_v2") == allocated
