"""The index at size: memory a block, `match` of scattered chains, insertion, opening a store.

Big with --benchmark-only (some 10 million blocks, 0.9 GB and a minute); small in the tests.
"""
import gc
import os
import time
import uuid

import numpy as np
import pytest

from kvio._ext import ring as _ring
from kvio.layout import KEY_DTYPE, BlockLayout
from kvio.storage import BlockStore
from kvio.storage import format as fmt
from kvio.storage.describe import describe
from kvio.storage.format import BLOCK_IO

CHAIN = 1000
LAYOUT = BlockLayout(num_layers=1, block_tokens=64, bytes_per_token=1024)   # slots of 64 KiB
SEGMENT_BYTES = 1 << 30
rng = np.random.default_rng(11)


def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def random_keys(count):
    return np.frombuffer(rng.bytes(16 * count), "V16")


def fill(index, num_blocks, num_samples):
    """Chains of CHAIN blocks, written level after level, so that the blocks of one lie as far from
    each other as they can. Returns (seconds of insertion, and of CPU, the keys of some chains)."""
    chains, slots, seconds, cpu = num_blocks // CHAIN, 16_384, 0.0, 0.0
    for number in range(-(-num_blocks // slots)):
        index.add_segment(number, slots, True)
    sample = rng.choice(chains, min(num_samples, chains), replace=False)
    saved = np.empty((len(sample), CHAIN), KEY_DTYPE)
    parents, blocks = np.zeros(chains, "V16"), np.zeros(chains, BLOCK_IO)
    blocks["generation"] = 1
    for level in range(CHAIN):
        blocks["key"], blocks["parent"] = random_keys(chains), parents
        at = level * chains + np.arange(chains)
        blocks["segment"], blocks["slot"] = at // slots, at % slots
        for name in ("key", "parent"):
            of_level = np.ascontiguousarray(blocks[name][sample])
            saved[name][:, level] = of_level.view(np.uint8).reshape(-1, 16)
        started, cpu_started = time.perf_counter(), time.process_time()
        index.insert(blocks)
        seconds += time.perf_counter() - started
        cpu += time.process_time() - cpu_started
        parents = np.ascontiguousarray(blocks["key"])
    return seconds, cpu, saved


@pytest.fixture(scope="module")
def big(request, tmp_path_factory):
    """(a store whose index holds blocks that nobody wrote, keys of chains, figures)"""
    small = request.config.getoption("benchmark_disable")
    num_blocks = 20_000 if small else 10_000_000
    folder = tmp_path_factory.mktemp("index")
    with BlockStore.open(folder, LAYOUT, backend="threads", segment_bytes=1 << 20) as store:
        gc.collect()
        before = rss()
        seconds, cpu, saved = fill(store._index, num_blocks, num_samples=2000)
        figures = {"blocks": num_blocks, "inserts_per_s": num_blocks / seconds,
                   "inserts_per_cpu_s": num_blocks / cpu,
                   "rss_bytes_per_block": (rss() - before - saved.nbytes) / num_blocks,
                   "memory_bytes_per_block": store._index.stats()["memory_bytes"] / num_blocks}
        yield store, saved, figures


def each(saved):
    """The next chain at each call: none is in a cache when its turn comes."""
    while True:
        yield from saved


def test_index_memory_and_insertion(benchmark, big):
    store, _, figures = big
    benchmark.extra_info.update(figures)
    print(figures)
    assert len(store._index) == figures["blocks"]
    if figures["blocks"] >= 1_000_000:
        assert figures["rss_bytes_per_block"] <= 100
        assert figures["memory_bytes_per_block"] <= 100
    keys = np.zeros(1, KEY_DTYPE)
    assert benchmark(store._index.match, keys) == 0


def test_index_match_of_1000_scattered_keys(benchmark, big):
    """Target: 100 us at 10 million blocks, all of Python included."""
    store, saved, figures = big
    benchmark.extra_info.update(figures)
    chains = each(saved)
    hits = benchmark.pedantic(store.match, setup=lambda: ((next(chains),), {}), rounds=len(saved))
    assert hits == CHAIN


def test_index_find_of_1000_scattered_keys(benchmark, big):
    store, saved, _ = big
    chains = each(saved)
    found = benchmark.pedantic(store._index.find, setup=lambda: ((next(chains), 1), {}),
                               rounds=len(saved))
    assert (found["tokens"] == 0).all() and len(found) == CHAIN


def fabricate(folder, num_blocks):
    """A store of blocks whose payloads are holes: segment files with headers alone."""
    about = describe(str(folder), LAYOUT, SEGMENT_BYTES, create=True)
    geometry, writer, block = about.geometry, uuid.uuid4().bytes, np.zeros((), BLOCK_IO)
    view = block.reshape(1).view(np.uint8)
    for number, first in enumerate(range(0, num_blocks, geometry.slots)):
        segment, count = uuid.uuid4().bytes, min(geometry.slots, num_blocks - first)
        keys, headers, parent = random_keys(count), [], np.void(bytes(16))
        for slot in range(count):
            block["slot"], block["generation"], block["key"] = slot, slot + 1, keys[slot]
            block["parent"] = parent if slot % 50 else np.void(bytes(16))
            parent = keys[slot]
            headers.append(_ring.encode_header(view, segment, geometry.block_nbytes))
        with open(folder / fmt.segment_name(writer, number), "wb") as file:
            file.write(fmt.encode_page0(about, writer, number, segment))
            file.write(fmt.encode_page1(segment, geometry.header_pages))
            file.write(b"".join(headers))
            file.truncate(geometry.segment_nbytes)


def test_index_opening_a_store(benchmark, request, tmp_path):
    """Target: 2 s for a million blocks, here in segments of 1 GiB."""
    num_blocks = 20_000 if request.config.getoption("benchmark_disable") else 1_000_000
    fabricate(tmp_path, num_blocks)

    def opened():
        with BlockStore.open(tmp_path, LAYOUT, create=False) as store:
            return len(store)

    benchmark.extra_info.update(blocks=num_blocks)
    assert benchmark.pedantic(opened, rounds=3) == num_blocks
