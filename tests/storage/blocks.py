"""Blocks whose content follows from their key, so that any wrong byte is seen."""
import os

import numpy as np

from kvio.layout import BlockLayout, block_keys
from kvio.memory import BlockPool
from kvio.storage import BlockStore

LAYOUT = BlockLayout(num_layers=3, block_tokens=4, bytes_per_token=700)     # 8,400 bytes
SEGMENT = 1 << 20
NAMED = False               # are pools made as files of /dev/shm?


def chain(num_blocks, seed=0, layout=LAYOUT):
    """Keys of a chain of its own."""
    ids = np.random.default_rng(seed).integers(0, 50_000, num_blocks * layout.block_tokens)
    return block_keys(ids, layout)


def payload(key, layout=LAYOUT):
    """What the block of this key holds."""
    seed = int.from_bytes(bytes(np.asarray(key["key"])), "little")
    return np.random.default_rng(seed).integers(0, 256, layout.full_block_nbytes, np.uint8)


class Blocks:
    """A pool with the blocks of `keys`, or with blocks to read into."""

    def __init__(self, num_blocks, layout=LAYOUT, keys=None, scattered=False):
        self.pool = BlockPool(layout, 2 * num_blocks + 1, poison=True, named=NAMED)
        self.ids = self.pool.alloc(num_blocks)
        if scattered:
            self.pool.free(self.ids)
            self.ids = self.pool.alloc(2 * num_blocks + 1)[1::2].copy()
        if keys is not None:
            for block_id, key in zip(self.ids, keys):
                self.flat(block_id)[:] = payload(key, layout)

    def flat(self, block_id):
        return self.pool.full(block_id).reshape(-1)

    def holds(self, keys, layout=LAYOUT):
        """True if the blocks are those of keys, to the byte."""
        return all((self.flat(block_id) == payload(key, layout)).all()
                   for block_id, key in zip(self.ids, keys))


def open_store(path, backend="threads", layout=LAYOUT, **options):
    return BlockStore.open(path, layout, backend=backend,
                           **{"segment_bytes": SEGMENT, **options})


def put(store, keys, layout=LAYOUT, **options):
    """Write the blocks of keys and wait."""
    source = Blocks(len(keys), layout, keys, **options)
    store.write(keys, source.pool, source.ids).wait()


def get(store, keys, layout=LAYOUT, **options):
    """Read; (usable prefix, status, the blocks)."""
    target = Blocks(len(keys), layout, **options)
    transfer = store.read(keys, target.pool, target.ids)
    return transfer.wait(), transfer.status, target


def readable(store, keys, layout=LAYOUT):
    """Per key whether it can be read; every block that can is checked to the byte."""
    _, status, target = get(store, keys, layout)
    for i in np.flatnonzero(status == 0):
        assert (target.flat(target.ids[i]) == payload(keys[i], layout)).all(), f"wrong bytes in {i}"
    return status == 0


def segments(path):
    """Segment files, sorted."""
    return sorted(os.path.join(path, name) for name in os.listdir(path)
                  if name.startswith("segment-"))


def edit(path, offset, change):
    """Replace the byte at offset by change(byte)."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([change(byte)]))
