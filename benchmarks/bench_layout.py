"""Keys of 1,000 blocks, and the work requests of a layer of 511: what each costs from Python.

Wanted: 1,000 keys of 64 tokens <= 0.6 ms; 511 descriptors <= 5 us to build, <= 1 us to point at
another layer. hashlib in a Python loop is the peer of the keys, numpy that of the descriptors.
"""
import hashlib

import numpy as np

from kvio.layout import READ, BlockLayout, LayerDescriptors, Side, block_keys, root_key

LAYOUT = BlockLayout.preset("deepseek-v3.2")
TOKENS = np.random.default_rng(1).integers(0, 129280, 64000).astype(np.uint32)
IDS = np.random.default_rng(2).permutation(2000)[:511].astype(np.int64)
POOL = Side(1 << 40, LAYOUT.stride, LAYOUT.layer_offsets[:-1], 7)
WORK = Side(1 << 41, LAYOUT.layer_block_nbytes(0), (0,) * LAYOUT.num_layers, 9)


def by_hashlib():
    parent, keys = root_key(LAYOUT, b"model"), []
    for start in range(0, len(TOKENS), 64):
        parent = hashlib.blake2b(TOKENS[start:start + 64].tobytes(), digest_size=16, salt=parent,
                                 person=b"kvio-block-1").digest()
        keys.append(parent)
    return keys


def test_keys_1000_blocks(paired):
    paired(lambda: block_keys(TOKENS, LAYOUT, b"model"), by_hashlib, rounds=100,
           names=("kvio", "hashlib loop"))
    assert [k["key"].tobytes() for k in block_keys(TOKENS, LAYOUT, b"model")] == by_hashlib()


def descriptors():
    return LayerDescriptors(READ, LAYOUT, WORK, None, POOL, IDS, 511 * 64)


def by_numpy():
    wrs = np.zeros(511, descriptors().wrs.dtype)
    wrs["wr_id"], wrs["opcode"], wrs["lkey"], wrs["rkey"] = np.arange(511), READ, 9, 7
    wrs["length"] = LAYOUT.layer_block_nbytes(0)
    wrs["local_addr"] = WORK.base + np.arange(511) * WORK.block_stride
    wrs["remote_addr"] = POOL.base + IDS * POOL.block_stride
    return wrs


def test_build_511_descriptors(benchmark):
    benchmark.pedantic(descriptors, rounds=200, iterations=100, warmup_rounds=5)
    assert (descriptors().wrs == by_numpy()).all()


def test_move_511_descriptors(benchmark):
    """Two moves a call: divide by two."""
    made = descriptors()

    def there_and_back():
        made.layer(30)
        made.layer(0)

    benchmark.pedantic(there_and_back, rounds=200, iterations=100, warmup_rounds=5)
    if not benchmark.disabled:
        benchmark.extra_info["us_per_move"] = 5e5 * benchmark.stats.stats.median
    made.layer(30)
    assert (made.wrs == by_numpy()).all() and made.local_offset == 0
    assert made.remote_offset == LAYOUT.layer_offsets[30]
