"""Pools in memory of a GPU, on the fake libcuda: whose tensors they are made of, what moves their
blocks, what others see of them, and who keeps what alive."""
import errno
import gc
import weakref

import numpy as np
import pytest

from kvio import completion
from kvio.errors import (Busy, Closed, InvalidArgument, KvioError, MappingFailed, OutOfBlocks,
                         TransferError)
from kvio.layout import READ, WRITE, BlockLayout, LayerDescriptors
from kvio.memory import POISON, BlockPool, LayerPool, Region
from kvio.spans import DeviceView
from kvio.storage import BlockStore
from kvio.transfer import KV, Access, Nic
from nics import pattern, requests
from tensors import CUDA, READ_ONLY, Consumer, DlTensor, Tensor

LAYOUT = BlockLayout(3, 4, 24)              # Layer Blocks of 96 bytes
NUM = 20
STRIDED = BlockLayout(2, 4, [64, 32])


def nbytes_of(kind, layout=LAYOUT, num=NUM):
    return num * (layout.stride if kind is BlockPool else layout.full_block_nbytes)


def place(pool, layer, block):
    """Where a Layer Block lies, from the pool's start: written down here once more."""
    layout = pool.layout
    if isinstance(pool, BlockPool):
        return block * layout.stride + layout.layer_offsets[layer]
    return (layer * pool.num_blocks + block) * layout.layer_block_nbytes(0)


def tensors(gpu, nbytes):
    """The same memory as each kind of tensor tells of it; its bytes."""
    addr, data = gpu.memory(nbytes, 3)
    return data, {
        "interface": Tensor(addr, nbytes),
        "interface, floats": Tensor(addr, nbytes, shape=(nbytes // 4,), typestr="<f4"),
        "DLPack": DlTensor(addr, (nbytes // 8, 4)),
        "DLPack 1.0": DlTensor(addr, (nbytes // 2,), versioned=(1, 0), offset=64),
    }


# ---- what a pool is

@pytest.mark.parametrize("kind", [BlockPool, LayerPool])
@pytest.mark.parametrize("tensor", ["interface", "interface, floats", "DLPack", "DLPack 1.0"])
def test_a_pool_takes_anybodys_tensor(gpu, kind, tensor):
    nbytes = nbytes_of(kind)
    data, made = tensors(gpu, nbytes)
    pool, host = kind(LAYOUT, NUM, memory=made[tensor]), kind(LAYOUT, NUM)
    assert pool.device == pool.region.device == "cuda:0" and host.device is None
    assert pool.region.array is None and pool.region.nbytes == nbytes and pool.region.writable
    ours, theirs = pool.side(7), host.side(7)
    assert (ours.block_stride, ours.layer_offsets, ours.key) == (
        theirs.block_stride, theirs.layer_offsets, theirs.key)
    assert ours.base == pool.region.addr
    if kind is LayerPool:
        view = pool.layer(1)
        assert view.shape == host.layer(1).shape
        assert (view.read() == data[NUM * 96:2 * NUM * 96].reshape(NUM, 4, 24)).all()
        strided = pool.records(5, 2)
        assert strided.shape == host.records(5, 2).shape == (3, 24)
        expected = [data[place(pool, layer, 5) + 48:][:24] for layer in range(3)]
        assert (strided.read() == np.stack(expected)).all()
    else:
        assert pool.full(3).shape == host.full(3).shape == (3, 4, 24)
        assert (pool.full(3).read() == data[3 * 4096:][:288].reshape(3, 4, 24)).all()
        assert (pool.layer(3, 2).read() == data[place(pool, 2, 3):][:96].reshape(4, 24)).all()


def test_views_say_where_they_are_and_keep_the_memory(gpu):
    nic = gpu.nic()
    pool = LayerPool(LAYOUT, NUM, memory=nic.device_memory(nbytes_of(LayerPool)))
    view, records = pool.layer(2), pool.records(5, 2)
    addr = pool.region.addr
    assert view.__cuda_array_interface__ == {
        "shape": (NUM, 4, 24), "typestr": "|u1", "data": (addr + 2 * NUM * 96, False),
        "strides": None, "version": 3}
    assert records.__cuda_array_interface__["data"] == (addr + place(pool, 0, 5) + 48, False)
    assert records.__cuda_array_interface__["strides"] == (NUM * 96, 1)
    assert view.__dlpack_device__() == (CUDA, 0) and view.device == "cuda:0"
    kept = weakref.ref(pool.region.owner.owner[0])
    del pool, records
    gc.collect()
    assert kept() is not None
    view.write(pattern(view.nbytes, 5))
    assert (view[4, 1:3, 7:9].read() == pattern(view.nbytes, 5).reshape(view.shape)
            [4, 1:3, 7:9]).all()
    del view
    gc.collect()
    assert kept() is None


def test_views_are_indexed_like_arrays(gpu):
    addr, data = gpu.memory(2 * 3 * 4 * 5, 1)
    view, array = DeviceView(addr, (2, 3, 4, 5), None, 0, None), data.reshape(2, 3, 4, 5)
    for index in [(), (1,), (1, 2), (-1, -3), (slice(None), 1), (slice(1, 2), slice(None), 3),
                  (0, slice(1, 3), slice(-3, -1), 4), (slice(5, 9),), (1, 2, 3, 4)]:
        assert (view[index].read() == array[index]).all(), index
        assert view[index].shape == array[index].shape
    changed = array.copy()
    changed[:, 1, :, 2:4] = 9
    view[:, 1, :, 2:4].write(np.full(16, 9, np.uint8))
    assert (array == changed).all()
    assert view.reshape(6, -1).shape == (6, 20) and view.reshape(120)[7].shape == ()
    for wrong in [(2,), (0, 3), (0, 0, 0, 0, 0), ("a",), (slice(None, None, 2),), (1.0,), (-3,)]:
        with pytest.raises(InvalidArgument):
            view[wrong]
    for shape in [(7, 7), (5, -1, 7)]:
        with pytest.raises(InvalidArgument):
            view.reshape(*shape)
    with pytest.raises(InvalidArgument):
        view[:, 1].reshape(-1)
    with pytest.raises(InvalidArgument, match="do not fill"):
        view.write(bytes(3))


def test_unequal_layers(gpu):
    pool = BlockPool(STRIDED, 4, memory=gpu.tensor(4 * 4096)[0])
    assert pool.full(1).shape == (384,) and pool.layer(1, 1).shape == (4, 32)
    with pytest.raises(InvalidArgument):
        LayerPool(STRIDED, 4, memory=gpu.tensor(4096)[0])


# ---- moving blocks

@pytest.mark.parametrize("kind", [BlockPool, LayerPool])
@pytest.mark.parametrize("host", ["pinned", "registered"])
@pytest.mark.parametrize("copy", ["auto", "loop"])
def test_blocks_go_in_and_out(gpu, kind, host, copy):
    nic = gpu.nic(copy=copy)
    tensor, data = gpu.tensor(nbytes_of(kind))
    pool = kind(LAYOUT, NUM, memory=tensor)
    room = NUM * LAYOUT.stride
    source, back = (BlockPool(LAYOUT, NUM, memory=nic.pinned(room) if host == "pinned" else None)
                    for _ in range(2))
    near, far, there = map(nic.register, (pool, source, back))
    nic.listen("me")
    peer = nic.connect("me", classes=[KV])
    source._rows[:] = pattern(room, 4).reshape(NUM, -1)
    rng = np.random.default_rng(6)
    ids, others = (rng.permutation(NUM)[:13].astype(np.int64) for _ in range(2))
    reads = LayerDescriptors(READ, LAYOUT, pool.side(near.key), ids, source.side(far.key), others,
                             13 * 4)
    before, transfers = data.copy(), [peer.read(reads.layer(layer)) for layer in (1, 2, 0)]
    for transfer in transfers:
        transfer.wait()
    for layer in range(3):
        for mine, theirs in zip(ids, others):
            at = place(pool, layer, mine)
            before[at:at + 96] = source.layer(theirs, layer).reshape(-1)
    assert (data == before).all()
    assert transfers[0].stats["ways"] and set(transfers[0].stats["ways"]) <= set(
        nic.info()["copy"]["ways"])
    writes = LayerDescriptors(WRITE, LAYOUT, pool.side(near.key), ids, back.side(there.key),
                              others, 13 * 4)
    for layer in range(3):
        peer.write(writes.layer(layer)).wait()
    for block in range(NUM):
        expected = source.full(block) if block in others else 0
        assert (back.full(block) == expected).all()
    counted = nic.stats()["copies"]
    assert sum(way["segments"] for way in counted.values()) >= 6
    assert sum(way["copies"] for way in counted.values()) >= 1
    assert nic.stats()["by_class"]["kv"]["rx_bytes"] == 2 * 3 * 13 * 96      # in and out


def test_between_two_memories_of_the_gpu_and_two_of_the_host(gpu):
    (one, first), (two, second) = gpu.tensor(8192, 1), gpu.tensor(8192, 2)
    hosts = [pattern(8192, 3), pattern(8192, 4)]
    nic, peer, *regions = gpu.loop_back(one, two, *hosts)
    peer.read(requests(READ, regions[0], regions[1], 100, 7, 8000)).wait()
    assert (first[100:8100] == second[7:8007]).all()
    assert (first[:100] == pattern(8192, 1)[:100]).all()
    peer.write(requests(WRITE, regions[2], regions[3], 0, 1, 8191)).wait()
    assert (hosts[1][1:] == hosts[0][:-1]).all()


# ---- freed blocks

@pytest.mark.parametrize("kind", [BlockPool, LayerPool])
def test_freed_blocks_are_poisoned_and_no_others(gpu, kind):
    tensor, data = gpu.tensor(nbytes_of(kind) + 100, 9)
    pool = kind(LAYOUT, NUM, memory=tensor, poison=True)
    assert (data[:-100] == POISON).all() and (data[-100:] != POISON).any()
    ids = pool.alloc(NUM)
    data[:] = pattern(len(data), 9)
    expected, gone = data.copy(), ids[[3, 17, 4, 5, 0]]
    pool.free(gone)
    for block in gone:
        if kind is BlockPool:
            expected[block * 4096:][:4096] = POISON
        else:
            for layer in range(3):
                expected[place(pool, layer, block):][:96] = POISON
    assert (data == expected).all()


def test_a_block_that_is_freed_in_flight_waits_for_the_gpu(gpu, fake_cuda):
    tensor, data = gpu.tensor(nbytes_of(LayerPool), 1)
    pool = LayerPool(LAYOUT, NUM, memory=tensor, poison=True)
    ids = pool.alloc(NUM)
    host = pattern(NUM * 96, 2)
    nic, peer, near, far = gpu.loop_back(pool, host)
    pool.free(ids[2:3])
    pool.pin(ids[:2])
    with fake_cuda.held():
        transfer = peer.read(requests(READ, near, far, 0, 0, 192),
                             on_drain=lambda: pool.unpin(ids[:2]))
        pool.free(ids[:2])
        assert pool.num_free == 1 and pool.epoch[:3].tolist() == [0, 0, 1]
        pool.alloc(1)
        with pytest.raises(OutOfBlocks):
            pool.alloc(1)
        with pytest.raises(Busy):
            pool.close()
        with pytest.raises(InvalidArgument, match="freed"):
            pool.pin(ids[:1])
        assert not transfer.done
    transfer.wait()
    assert pool.num_free == 2 and pool.epoch[:2].tolist() == [1, 1]
    assert (data[:192] == POISON).all()         # after the copy, not before it
    pool.close()
    with pytest.raises(Closed):
        pool.alloc(1)


def test_a_gpu_that_cannot_poison_keeps_no_block(gpu, fake_cuda):
    pool = LayerPool(LAYOUT, NUM, memory=gpu.tensor(nbytes_of(LayerPool))[0], poison=True)
    ids = pool.alloc(4)
    fake_cuda.fail("cuMemsetD8Async", "INVALID_VALUE")
    with pytest.warns(RuntimeWarning, match="could not be filled.*cuda:0.*cuMemsetD8Async"):
        pool.free(ids)
    assert pool.num_free == NUM
    fake_cuda.fail("cuMemsetD8Async", "INVALID_VALUE")
    with pytest.raises(KvioError, match="cuMemsetD8Async"):
        LayerPool(LAYOUT, NUM, memory=gpu.tensor(nbytes_of(LayerPool))[0], poison=True)


# ---- who keeps what

@pytest.mark.parametrize("lent", [Tensor, DlTensor])
def test_a_tensor_that_is_dropped_in_flight_stays_until_it_is_taken_back(gpu, fake_cuda, lent):
    addr, data = gpu.memory(4096)
    tensor = lent(addr, 4096) if lent is Tensor else lent(addr, (2048,))
    host, alive = pattern(4096, 2), weakref.ref(tensor)
    nic, peer, near, far = gpu.loop_back(tensor, host)
    del tensor
    with fake_cuda.held():
        transfer = peer.read(requests(READ, near, far, 0, 0, 4096))
        gc.collect()
        assert alive() is not None and completion.in_flight() == 1
        with pytest.raises(Busy, match="in flight"):
            nic.deregister(near)
        with pytest.raises(Busy):
            nic.close()
        with pytest.raises(Busy):
            peer.close()
    transfer.wait()
    assert (data == pattern(4096, 2)).all() and alive() is not None
    nic.deregister(near)
    del near, transfer
    gc.collect()
    assert alive() is None


def test_a_transfer_that_nobody_holds_keeps_pool_and_memory(gpu, fake_cuda):
    nic = gpu.nic()
    pool = LayerPool(LAYOUT, NUM, memory=nic.device_memory(nbytes_of(LayerPool)))
    data = fake_cuda.bytes_at(pool.region.addr, pool.region.nbytes)
    near, far = nic.register(pool), nic.register(pattern(4096, 2))
    nic.listen("me")
    peer = nic.connect("me", classes=[KV])
    kept = weakref.ref(pool)
    with fake_cuda.held():
        peer.read(requests(READ, near, far, 0, 0, 4096), keep=(pool,))
        del pool
        gc.collect()
        assert kept() is not None
    while completion.in_flight():
        completion.reap()
    assert (data[:4096] == pattern(4096, 2)).all()
    gc.collect()
    assert kept() is None                       # its memory is the registration's now


def test_memory_of_ones_own_is_freed_with_its_last_user(fake_cuda, gpu):
    nic, before = gpu.nic(), fake_cuda.objects()
    pool = BlockPool(LAYOUT, 2, memory=nic.device_memory(8192))
    host = BlockPool(LAYOUT, 2, memory=nic.pinned(8192))
    region = nic.register(pool)
    assert fake_cuda.objects()["allocations"] == before["allocations"] + 1
    assert fake_cuda.objects()["pinned"] == before["pinned"] + 1
    host.full(1)[:] = 7
    del host
    del pool
    gc.collect()
    assert fake_cuda.objects()["pinned"] == before["pinned"]
    assert fake_cuda.objects()["allocations"] == before["allocations"] + 1
    nic.deregister(region)
    del region
    gc.collect()
    assert fake_cuda.objects() == before


def test_memory_outlives_its_nic(fake_cuda, gpu):
    nic = gpu.nic()
    device, pinned = nic.device_memory(100), nic.pinned(100)
    nic.close()
    device.write(10, b"abc")
    assert device.read(9, 5).tobytes() == b"\0abc\0"
    np.frombuffer(pinned, np.uint8)[:] = 3
    assert device.device == pinned.device == "cuda:0"


def test_reading_writing_and_filling(gpu, fake_cuda):
    nic = gpu.nic()
    for memory in nic.device_memory(1000), nic.pinned(1000):
        memory.fill(0)
        memory.write(3, pattern(500, 1))
        memory.fill(9, 400, 50)
        expected = np.zeros(1000, np.uint8)
        expected[3:503] = pattern(500, 1)
        expected[400:450] = 9
        assert (memory.read() == expected).all() and (memory.read(1, 7) == expected[1:8]).all()
        assert memory.nbytes == 1000 and not memory.read(1000, 0).size
        for wrong in (lambda: memory.read(1, 1000), lambda: memory.read(-1, 2),
                      lambda: memory.write(999, b"ab"), lambda: memory.write(0, 7),
                      lambda: memory.fill(256), lambda: memory.fill(1, 1001, 0),
                      lambda: memory.fill(1, 0, 1001)):
            with pytest.raises(InvalidArgument):
                wrong()
    device = nic.device_memory(64)
    with pytest.raises((BufferError, TypeError)):
        memoryview(device)
    assert not hasattr(nic.pinned(8), "__cuda_array_interface__")
    with pytest.raises(MappingFailed, match="cuda:0.*OUT_OF_MEMORY.*free some"):
        nic.device_memory(1 << 60)
    with pytest.raises(MappingFailed, match="pinned.*OUT_OF_MEMORY"):
        nic.pinned(1 << 60)
    for wrong in 0, -1, 1.5, None, True:
        with pytest.raises(InvalidArgument):
            nic.pinned(wrong)


# ---- what is lent by DLPack

@pytest.mark.parametrize("versioned", [False, True])
def test_others_take_our_memory_by_dlpack(gpu, versioned):
    memory = gpu.nic().device_memory(4096)
    view = DeviceView(memory.addr + 64, (3, 5), (100, 1), 0, memory)
    options = {"max_version": (1, 1)} if versioned else {}
    capsule = view.__dlpack__(stream=2, copy=False, dl_device=(CUDA, 0), **options)
    addr, kept = view.addr, weakref.ref(memory)
    taken = Consumer(capsule, versioned)
    del view, memory, capsule
    gc.collect()
    tensor = taken.managed.tensor
    assert tensor.data + tensor.byte_offset == addr and tuple(tensor.device) == (CUDA, 0)
    assert (tensor.code, tensor.bits, tensor.lanes) == (1, 8, 1)
    assert tensor.shape[:tensor.ndim] == [3, 5] and tensor.strides[:2] == [100, 1]
    if versioned:
        assert taken.managed.major == 1 and taken.managed.flags == 0
    assert kept() is not None
    taken.done()
    gc.collect()
    assert kept() is None


def test_a_capsule_that_nobody_takes_gives_the_memory_back(gpu):
    memory = gpu.nic().device_memory(64)
    kept = weakref.ref(memory)
    capsules = [memory.__dlpack__(), memory.__dlpack__(max_version=(1, 0))]
    del memory
    gc.collect()
    assert kept() is not None
    capsules.clear()
    gc.collect()
    assert kept() is None


def test_what_dlpack_may_not_ask(gpu):
    memory = gpu.nic().device_memory(64)
    for wrong in dict(copy=True), dict(dl_device=(1, 0)), dict(dl_device=(CUDA, 1)):
        with pytest.raises(BufferError):
            memory.__dlpack__(**wrong)
    assert Region(memory).addr == memory.addr


# ---- what device pools are not for

def test_a_store_does_not_read_into_a_gpu(gpu, tmp_path):
    pool = BlockPool(LAYOUT, 2, memory=gpu.tensor(8192)[0])
    ids = pool.alloc(2)
    with BlockStore.open(tmp_path / "kv", LAYOUT) as store:
        for use in store.read, store.write:
            with pytest.raises(InvalidArgument, match="host memory.*lies on cuda:0.*Nic.open"):
                use([b"a" * 16, b"b" * 16], pool, ids).wait()
    assert pool.num_free == 0
    pool.free(ids)
    assert pool.num_free == 2


def test_soft_nics_do_not_copy_it(gpu):
    pool = LayerPool(LAYOUT, 2, memory=gpu.tensor(8192)[0])
    with Nic.open("soft", clock="virtual") as nic:
        for memory in pool, pool.region, gpu.tensor(64)[0]:
            with pytest.raises(InvalidArgument, match="GPU's memory.*verbs.*cuda:0"):
                nic.register(memory)


@pytest.mark.parametrize("options", [dict(shared=True), dict(named=True), dict(hugepages=True),
                                     dict(numa_node=0)])
def test_pages_of_the_host_are_no_business_of_a_gpus(gpu, options):
    with pytest.raises(InvalidArgument, match="do not apply"):
        BlockPool(LAYOUT, 2, memory=gpu.tensor(8192)[0], **options)


@pytest.mark.parametrize("kind", [BlockPool, LayerPool])
def test_memory_that_no_pool_can_be_made_of(gpu, kind):
    addr, _ = gpu.memory(nbytes_of(kind) + 512)
    nbytes = nbytes_of(kind)
    kind(LAYOUT, NUM, memory=Tensor(addr + 256, nbytes))
    with pytest.raises(InvalidArgument, match="cuda:0 must start at a multiple of 256"):
        kind(LAYOUT, NUM, memory=Tensor(addr + 64, nbytes))
    with pytest.raises(InvalidArgument, match="blocks need"):
        kind(LAYOUT, NUM, memory=Tensor(addr, nbytes - 1))
    with pytest.raises(InvalidArgument, match="read-only.*nic.device_memory"):
        kind(LAYOUT, NUM, memory=Tensor(addr, nbytes, data=(addr, True)))
    with pytest.raises(InvalidArgument, match="read-only"):
        kind(LAYOUT, NUM, memory=DlTensor(addr, (nbytes // 2,), versioned=(1, 0),
                                          flags=READ_ONLY))


def test_a_pools_rights_are_the_tensors(gpu):
    addr, data = gpu.memory(64, 1)
    nic, peer, near, far = gpu.loop_back(Region(Tensor(addr, 64, data=(addr, True)),
                                                writable=False), bytearray(64))
    assert near.access == Access.REMOTE_READ and near.device == "cuda:0"
    with pytest.raises(TransferError) as failed:
        peer.read(requests(READ, near, far, 0, 0, 64)).wait()
    assert failed.value.errno == errno.EFAULT and (data == pattern(64, 1)).all()
