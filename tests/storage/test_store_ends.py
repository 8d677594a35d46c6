"""What is in flight while a store is synced, closed, or given the wrong memory."""
import os
import threading

import numpy as np
import pytest

from blocks import LAYOUT, Blocks, chain, open_store, put
from kvio.errors import InvalidArgument
from kvio.layout import BlockLayout
from kvio.memory import LayerPool
from kvio.storage import segment


def test_a_sync_covers_what_was_being_written_during_the_one_before(tmp_path, backend, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(segment.os, "fsync", lambda fd: (synced.append(fd), fsync(fd)))
    with open_store(tmp_path, backend) as store:
        keys, ring = chain(2), store.open_ring()
        source = Blocks(2, keys=keys)
        ring._ring._pause(True)
        transfer = ring.write(keys, source.pool, source.ids)
        store.sync()
        ring._ring._pause(False)
        transfer.wait()
        synced.clear()
        store.sync()
        assert synced
        synced.clear()
        store.sync()
        assert not synced                       # nothing was written since


def test_only_pools_of_full_blocks_are_read_into(tmp_path):
    """A Full Block read into a cache kept layer by layer lands on its neighbours' blocks."""
    layout = BlockLayout(num_layers=4, block_tokens=16, bytes_per_token=256)
    with open_store(tmp_path, layout=layout) as store:
        keys = chain(1, layout=layout)
        put(store, keys, layout)
        pool = LayerPool(layout, 8, poison=True)
        ids = pool.alloc(8)
        for move in (store.read, store.write):
            for wrong in (pool, None, "pool", np.zeros(9, np.uint8)):
                with pytest.raises(InvalidArgument, match="BlockPool"):
                    move(keys, wrong, ids[1:2])
        assert (pool.layer(0) == 0xA5).all()
