"""Reading and writing blocks of 256 KiB, beside a plain loop of preadv or pwritev in Python.

KVIO_BENCH_DIR says where the files lie (default: pytest's temporary directory). All I/O is
O_DIRECT where the file system has it. `always` checks the CRC of every byte; the loop checks
nothing.
"""
import os

import numpy as np
import pytest

from kvio import BlockLayout, BlockPool, BlockStore, block_keys
from kvio._ext import ring as _ring

LAYOUT = BlockLayout(num_layers=8, block_tokens=64, bytes_per_token=512)
COUNT = 128
NBYTES = COUNT * LAYOUT.full_block_nbytes
KEYS = block_keys(np.arange(COUNT * LAYOUT.block_tokens), LAYOUT)


@pytest.fixture
def folder(tmp_path):
    return os.path.join(os.environ.get("KVIO_BENCH_DIR", tmp_path), f"store-{os.getpid()}")


def filled_pool():
    pool = BlockPool(LAYOUT, COUNT)
    ids = pool.alloc(COUNT)
    for block_id in ids:
        pool.full(block_id)[:] = np.random.default_rng(block_id).integers(
            0, 256, pool.full(block_id).shape, np.uint8)
    return pool, ids


def same(one, other):
    return (one.region.array == other.region.array).all()


def direct(path, flags):
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError:
        return os.open(path, flags)


@pytest.mark.parametrize("verify", ["never", "always"])
@pytest.mark.parametrize("backend", ["uring", "threads"])
def test_read_256_kib_blocks(paired, folder, backend, verify):
    if _ring.probe(backend):
        pytest.skip(f"{backend} does not run here")
    source, ids = filled_pool()
    targets = [BlockPool(LAYOUT, COUNT) for _ in range(2)]
    for target in targets:
        assert (target.alloc(COUNT) == ids).all()
        target.region.array[:] = 0
    with BlockStore.open(folder, LAYOUT, backend=backend, verify=verify,
                         durability="durable") as store:
        store.write(KEYS, source, ids).wait()
        store._default.register(targets[0]).wait()
        [segment] = [name for name in os.listdir(folder) if name.startswith("segment")]
        fd = direct(os.path.join(folder, segment), os.O_RDONLY)
        start = store.description.geometry.payload_offset
        rows = [memoryview(row) for row in targets[1].region.array.reshape(COUNT, -1)]

        def loop():
            for slot, row in enumerate(rows):
                os.preadv(fd, [row], start + slot * LAYOUT.stride)

        paired(lambda: store.read(KEYS, targets[0], ids).wait(), loop, nbytes=NBYTES,
               names=(f"kvio {backend}", "preadv loop"))
        os.close(fd)
        assert same(source, targets[0]) and same(source, targets[1])


@pytest.mark.parametrize("backend", ["uring", "threads"])
def test_write_256_kib_blocks(paired, folder, backend):
    if _ring.probe(backend):
        pytest.skip(f"{backend} does not run here")
    source, ids = filled_pool()
    with BlockStore.open(folder, LAYOUT, backend=backend) as store:
        store.write(KEYS, source, ids).wait()       # space is reserved, memory registered
        fd = direct(os.path.join(folder, "plain"), os.O_RDWR | os.O_CREAT)
        rows = [memoryview(row) for row in source.region.array.reshape(COUNT, -1)]

        def loop():
            for slot, row in enumerate(rows):
                os.pwritev(fd, [row], slot * LAYOUT.stride)

        def write():
            store.write(KEYS, source, ids).wait()

        loop()
        paired(write, loop, nbytes=NBYTES, names=(f"kvio {backend}", "pwritev loop"),
               setup=lambda: store.forget(KEYS))
        os.close(fd)
        write()                             # the last set-up has dropped them
        target = BlockPool(LAYOUT, COUNT)
        assert store.read(KEYS, target, target.alloc(COUNT)).wait() == COUNT
        assert same(source, target)


def test_match_1000_keys(benchmark, folder):
    keys = block_keys(np.arange(1000), BlockLayout(1, 1, 1))
    pool = BlockPool(BlockLayout(1, 1, 1), 1000)
    with BlockStore.open(folder, pool.layout) as store:
        store.write(keys, pool, pool.alloc(1000)).wait()
        assert benchmark(store.match, keys) == 1000
