"""Copies in and out of a GPU's memory through the public interface alone, on the fake libcuda, or
on a GPU if KVIO_REQUIRE names cuda: there also in the streams of PyTorch and CuPy, if installed.
"""
import asyncio
import mmap

import numpy as np
import pytest

import kvio
from kvio.errors import BackendUnavailable
from kvio.layout import READ, WRITE, LayerDescriptors
from nics import requests
from require import skip_or_fail

WAYS = ["loop", "batch", "strided", "kernel"]
LAYOUT = kvio.BlockLayout(3, 64, 1152)              # Layer Blocks of 72 KiB, as DeepSeek's in FP16
NUM_BLOCKS = 40
NBYTES = 1 << 20
LONG = 200_000_000                                  # cycles: some 100 ms of a GPU


@pytest.fixture
def open_nic():
    """`open_nic(**options)`: a NIC of the first GPU, closed at the end."""
    opened = []

    def open_nic(**options):
        try:
            opened.append(kvio.Nic.open("cuda:0", name=f"real{len(opened)}", **options))
        except BackendUnavailable as missing:
            skip_or_fail("cuda", str(missing))
        return opened[-1]
    yield open_nic
    for nic in opened:
        nic.close(cancel=True)


def connected(nic):
    """A loop-back of the NIC."""
    nic.listen(nic.name)
    return nic.connect(nic.name, classes=[kvio.KV])


def random_bytes(nbytes, seed):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def of_library(name):
    """The module, if it is there and sees the GPU that the NICs are of."""
    module = pytest.importorskip(name, reason=f"{name} is not installed")
    if not module.cuda.is_available():
        pytest.skip(f"{name} sees no GPU")
    return module


def test_what_the_device_is(open_nic):
    """Measured once; every way is there from CUDA 12.8 on."""
    about = open_nic().info()["copy"]
    print(about)
    assert about["device"] == "cuda:0" and about["name"] and about["measured"]
    assert about["capability"].startswith("sm_") and about["num_sms"] >= 1
    missing = {way: why for way, why in about["ways"].items() if why is not None}
    if tuple(map(int, about["driver"].split("."))) >= (12, 8):
        assert missing == {}
    for kind in "H2D", "D2H":
        for way, cost in about["costs"][kind].items():
            assert cost["byte_ns"] >= 0 and cost["fixed_ns"] >= 0, (kind, way)


@pytest.mark.parametrize("way", [*WAYS, "auto"])
@pytest.mark.parametrize("order", ["scattered", "regular"])
def test_layers_there_and_back(open_nic, way, order):
    """Each layer of pinned Full Blocks into a pool on the device, and out into another pool."""
    nic = open_nic(copy=way)
    nbytes = NUM_BLOCKS * LAYOUT.stride
    hosts = [kvio.BlockPool(LAYOUT, NUM_BLOCKS, memory=nic.pinned(nbytes)) for _ in range(2)]
    hbm = kvio.LayerPool(LAYOUT, NUM_BLOCKS, memory=nic.device_memory(
        LAYOUT.full_block_nbytes * NUM_BLOCKS))
    source, target = (host.region.array.reshape(NUM_BLOCKS, -1) for host in hosts)
    source[:], target[:] = random_bytes(source.size, 1).reshape(source.shape), 0xA5
    peer = connected(nic)
    near, far, back = nic.register(hbm), nic.register(hosts[0]), nic.register(hosts[1])
    rng = np.random.default_rng(2)
    ids_h, ids_d = (pool.alloc(NUM_BLOCKS) for pool in (hosts[0], hbm))
    hosts[1].alloc(NUM_BLOCKS)
    if order == "scattered":
        ids_h, ids_d = rng.permutation(ids_h), rng.permutation(ids_d)
    num_tokens, used = NUM_BLOCKS * LAYOUT.block_tokens, set()
    for layer in range(LAYOUT.num_layers):
        for opcode, host, key in (READ, hosts[0], far), (WRITE, hosts[1], back):
            blocks = LayerDescriptors(opcode, LAYOUT, hbm.side(near.key), ids_d,
                                      host.side(key.key), ids_h, num_tokens, layer)
            transfer = (peer.read if opcode == READ else peer.write)(blocks)
            transfer.wait(30)
            used.update(transfer.stats["ways"])
    full = LAYOUT.full_block_nbytes
    assert (target[:, :full] == source[:, :full]).all()
    assert (target[:, full:] == 0xA5).all()             # what lies between two blocks
    if way in ("loop", "batch", "kernel") or (way, order) == ("strided", "regular"):
        assert used == {way}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shift, length", [(0, 4096), (1, 4096), (8, 16 * 257), (3, 1), (0, 40000)])
def test_odd_places_and_lengths(open_nic, way, shift, length):
    """Also what the kernel cannot carry: then the loop does."""
    nic = open_nic(copy=way)
    peer, device, host = connected(nic), nic.device_memory(NBYTES), nic.pinned(NBYTES)
    mine, data = np.frombuffer(host, np.uint8), random_bytes(NBYTES, 3)
    mine[:] = data
    device.fill(0, 0, NBYTES)
    near, far = nic.register(device), nic.register(host)
    step = length + 96
    at = np.arange(min(20, (NBYTES - shift) // step)) * step + shift
    peer.read(requests(READ, near, far, at, at[::-1], length)).wait(30)
    wanted = np.zeros(NBYTES, np.uint8)
    for to, of in zip(at, at[::-1]):
        wanted[to:to + length] = data[of:of + length]
    assert (np.asarray(device.read(0, NBYTES)) == wanted).all()


def test_pageable_memory_is_pinned_while_it_is_registered(open_nic):
    """Pages of its own: a synchronous copy may not begin in pinned memory and end outside of it."""
    nic = open_nic()
    peer, device = connected(nic), nic.device_memory(NBYTES)
    mine = np.frombuffer(mmap.mmap(-1, NBYTES), np.uint8)
    mine[:] = random_bytes(NBYTES, 4)
    near, far = nic.register(device), nic.register(mine)
    peer.read(requests(READ, near, far, 0, 0, NBYTES)).wait(30)
    assert (np.asarray(device.read(0, NBYTES)) == mine).all()
    nic.deregister(far)
    mine[:] = 0


def test_many_transfers_are_awaited(open_nic):
    """More than the queue holds, of tasks that await them all at once."""
    nic = open_nic(queue_depth=64)
    peer, device, host = connected(nic), nic.device_memory(NBYTES), nic.pinned(NBYTES)
    mine, data = np.frombuffer(host, np.uint8), random_bytes(NBYTES, 5)
    mine[:] = data
    near, far = nic.register(device), nic.register(host)
    places = np.random.default_rng(6).permutation(256).reshape(16, 16) * 4096

    async def copy(at):
        await peer.read(requests(READ, near, far, at, at, 4096))

    async def all_of_them():
        await asyncio.gather(*(copy(at) for at in places))
    asyncio.run(asyncio.wait_for(all_of_them(), 30))
    assert (np.asarray(device.read(0, NBYTES)) == data).all()


# ---- other libraries' streams, on a GPU only

@pytest.mark.parametrize("way", [*WAYS, "auto"])
def test_torch_streams_wait_and_are_waited_for(open_nic, way):
    """The data are made on the GPU after a long pause, copied out, in again, and used: nobody on
    the host waits before the end."""
    torch = of_library("torch")
    stream = torch.cuda.Stream()
    tensor, again = (torch.zeros(NBYTES, dtype=torch.uint8, device="cuda:0") for _ in range(2))
    nic = open_nic(copy=way)
    peer, host = connected(nic), nic.pinned(NBYTES)
    near, far, there = nic.register(tensor), nic.register(host), nic.register(again)
    at = np.arange(64) * (NBYTES // 64)
    for pause, modulus in (1, 3), (LONG, 251):  # a kernel's first launch may wait for the GPU
        tensor.zero_(), again.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(pause)
            tensor.copy_(torch.arange(NBYTES, device="cuda:0") % modulus)
            out = peer.write(requests(WRITE, near, far, at, at, NBYTES // 64), after=stream)
            out.block_stream(stream)
            back = peer.read(requests(READ, there, far, at, at, NBYTES // 64), after=stream)
            assert pause < LONG or not back.done        # the GPU is still asleep
            back.block_stream(stream)
            total = again.sum(dtype=torch.int64)
        stream.synchronize()
        wanted = np.arange(NBYTES) % modulus
        assert int(total) == wanted.sum()
        assert (np.frombuffer(host, np.uint8) == wanted).all()
        out.wait(30), back.wait(30)


def test_cupy_streams_wait_and_are_waited_for(open_nic):
    cupy = of_library("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    tensor = cupy.zeros(NBYTES, cupy.uint8)
    cupy.cuda.Device(0).synchronize()
    nic = open_nic()
    peer, host = connected(nic), nic.pinned(NBYTES)
    near, far = nic.register(tensor), nic.register(host)
    mine, data = np.frombuffer(host, np.uint8), random_bytes(NBYTES, 8)
    mine[:] = data
    peer.read(requests(READ, near, far, 0, 0, NBYTES), after=stream).block_stream(stream)
    with stream:
        seen = tensor + cupy.uint8(1)
    assert (seen.get(stream=stream) == data + np.uint8(1)).all()
