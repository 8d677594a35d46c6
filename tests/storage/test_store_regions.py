"""Blocks go straight into memory that the caller brings: `BlockPool(memory=...)`."""
import ctypes
import gc
import importlib.util
import mmap
import weakref

import numpy as np
import pytest

import blocks
from blocks import LAYOUT, chain, open_store, payload, put
from kvio.errors import Busy, InvalidArgument, OutOfBlocks
from kvio.memory import BlockPool

COUNT, PAGE = 6, 4096
NBYTES = COUNT * LAYOUT.stride


def on_a_page(nbytes):
    """A numpy array that starts on a page, in one that does not."""
    array = np.zeros(nbytes + PAGE, np.uint8)
    return array[-array.ctypes.data % PAGE:][:nbytes]


class TensorLike:
    """What torch gives of a tensor on the CPU: DLPack, and no buffer protocol."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def pinned(nbytes):
    """Locked in memory, as what a GPU copies from is."""
    memory = mmap.mmap(-1, nbytes)
    libc = ctypes.CDLL(None, use_errno=True)
    at = np.frombuffer(memory, np.uint8).ctypes.data
    if libc.mlock(ctypes.c_void_p(at), ctypes.c_size_t(nbytes)):
        pytest.skip(f"mlock: errno {ctypes.get_errno()}; ulimit -l")
    return memory


def of_torch(nbytes):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    import torch
    tensor = torch.zeros(nbytes + PAGE, dtype=torch.uint8)
    return tensor[-tensor.data_ptr() % PAGE:][:nbytes].view(torch.bfloat16).view(torch.uint8)


KINDS = {"numpy": on_a_page, "numpy of float16": lambda n: on_a_page(n).view(np.float16),
         "mmap": lambda n: mmap.mmap(-1, n), "pinned": pinned,
         "like a tensor": lambda n: TensorLike(on_a_page(n)), "torch": of_torch}


def bytes_of(memory):
    memory = memory.array if isinstance(memory, TensorLike) else memory
    return (memory.numpy() if hasattr(memory, "numpy") else np.frombuffer(memory, np.uint8)
            ).view(np.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_land_in_memory_of_the_caller(tmp_path, backend, kind):
    keys, memory = chain(COUNT), KINDS[kind](NBYTES)
    with open_store(tmp_path, backend) as store:
        put(store, keys)
        pool = BlockPool(LAYOUT, COUNT, memory=memory)
        assert store.read(keys, pool, pool.alloc(COUNT)).wait() == COUNT
        seen = bytes_of(memory)                         # not through the pool
        for i, key in enumerate(keys):
            at = i * LAYOUT.stride
            assert (seen[at:at + LAYOUT.full_block_nbytes] == payload(key)).all()
        if backend == "uring":                          # as it is: no copy on the way
            assert store._default.stats()["fixed_ios"] > 0
        bytes_of(memory)[:LAYOUT.full_block_nbytes] = payload(chain(1, 5)[0])
        store.write(chain(1, 5), pool, [0]).wait()      # and from there
        pool.full(0)[:] = 0
        assert store.read(chain(1, 5), pool, [0]).wait() == 1
        assert (pool.full(0).reshape(-1) == payload(chain(1, 5)[0])).all()


def test_memory_is_held_while_it_may_be_written(tmp_path, backend):
    """The caller lets go of everything; the read goes on into memory that is still there."""
    keys, memory = chain(COUNT), on_a_page(NBYTES)
    alive = weakref.ref(memory)
    with open_store(tmp_path, backend) as store:
        put(store, keys)
        pool = BlockPool(LAYOUT, COUNT, memory=memory)
        ids, ring = pool.alloc(COUNT), store.open_ring()
        ring._ring._pause(True)
        transfer = ring.read(keys, pool, ids)
        pool.free(ids)
        with pytest.raises(Busy):
            pool.close()
        with pytest.raises(OutOfBlocks):                # freed, and nobody else's yet
            pool.alloc(1)
        del pool, memory
        gc.collect()
        seen = alive()
        ring._ring._pause(False)
        assert transfer.wait() == COUNT
        assert (seen[:LAYOUT.full_block_nbytes] == payload(keys[0])).all()
        del seen, transfer
        gc.collect()
        assert alive() is None                          # and not for longer


def test_destinations_that_do_not_fit_are_refused_by_name(tmp_path, backend):
    keys = chain(COUNT)
    with open_store(tmp_path, backend) as store:
        put(store, keys)
        pool = BlockPool(LAYOUT, 4, named=blocks.NAMED)
        ids = pool.alloc(4)
        with pytest.raises(OutOfBlocks, match="6 blocks asked for"):    # more than the pool has
            BlockPool(LAYOUT, 4).alloc(COUNT)
        for keys_, ids_, message in (
                (keys, range(COUNT), "between 0 and 3"),
                (keys, ids, "6 keys, but 4 block ids"),
                (keys[:4], [0, 1, 1, 2], "occurs twice"),               # overlapping
                (keys[:1], [[0]], "one dimension"),
                (keys[:2], [0, -1], "between 0 and 3")):
            with pytest.raises(InvalidArgument, match=message):
                store.read(keys_, pool, list(ids_))
        assert store.read([], pool, []).wait() == 0                     # nothing is no error
        assert store.read(keys[:4], pool, ids).wait() == 4
        for memory, message in ((bytearray(100), "the memory has 100"),
                                (on_a_page(NBYTES + 64)[64:], "4 KiB page"),
                                (bytes(NBYTES), "read-only"),
                                (TensorLike(on_a_page(2 * NBYTES)[::2]), "contiguous"), (7, "buf")):
            with pytest.raises(InvalidArgument, match=message):
                BlockPool(LAYOUT, COUNT, memory=memory)
