"""What is in flight while a store is synced, closed, or given the wrong memory."""
import errno
import os
import signal
import threading
import time

import numpy as np
import pytest

from blocks import Blocks, chain, open_store, put, readable, segments
from kvio.errors import Closed, FormatError, InvalidArgument, StoreError
from kvio.layout import BlockLayout
from kvio.memory import LayerPool
from kvio.storage import writer
from kvio.storage.format import BLOCK_IO


def test_a_sync_covers_what_was_being_written_during_the_one_before(tmp_path, backend, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(writer.os, "fsync", lambda fd: (synced.append(fd), fsync(fd)))
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


class Paused:
    """Four blocks being written through a ring that stands still."""

    def __init__(self, path, backend):
        self.keys = chain(4)
        self.source = Blocks(4, keys=self.keys)
        self.store = open_store(path, backend)
        self.ring = self.store.open_ring()
        self.ring._ring._pause(True)
        self.transfer = self.ring.write(self.keys, self.source.pool, self.source.ids)


def test_a_store_waits_for_a_ring_that_another_thread_closes(tmp_path, backend):
    """Closing its files first would fail the writes, or lose what they say is stored."""
    held = Paused(tmp_path, backend)
    closers = [threading.Thread(target=lambda it=it: it.close(drain=True))
               for it in (held.ring, held.store)]
    for closer in closers:
        closer.start()
        closer.join(0.1)
        assert closer.is_alive()
    held.ring._ring._pause(False)
    for closer in closers:
        closer.join()
    held.transfer.wait()
    with open_store(tmp_path, backend) as again:
        assert again.match(held.keys) == 4


@pytest.mark.parametrize("what", ["ring", "store"])
def test_a_close_that_was_interrupted_can_be_called_again(tmp_path, backend, what):
    class Interrupt(Exception):
        pass

    def interrupt(*_):
        raise Interrupt
    held, before = Paused(tmp_path, backend), signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupt):
            getattr(held, what).close(drain=True)
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(Closed):
        getattr(held, what).write(held.keys, held.source.pool, held.source.ids)
    held.store.close(cancel=True)
    assert held.transfer.done and (held.transfer.status == -errno.ECANCELED).all()
    assert held.source.pool.close() is None and not segments(tmp_path)


def test_a_ring_is_not_freed_under_a_submission(tmp_path):
    """Copying this batch takes a while, of which the sanitizers see every byte."""
    blocks = np.zeros(200_000, BLOCK_IO)        # nothing to do
    with open_store(tmp_path) as store:
        for round_ in range(40):
            ring, outcome = store.open_ring(), []

            def submit(ring=ring, outcome=outcome):
                try:
                    outcome.append(ring._ring.submit(False, blocks, 0, 0, 0).poll())
                except ValueError:
                    outcome.append(True)        # closed
            thread = threading.Thread(target=submit)
            thread.start()
            time.sleep(0.001 * (round_ % 8))
            ring.close(drain=True)
            thread.join()
            assert outcome == [True]


@pytest.mark.parametrize("wrong", [
    {"capacity_bytes": "1"}, {"capacity_bytes": 1e9}, {"queue_depth": 1.5}, {"queue_depth": "1"},
    {"segment_bytes": float("nan")}, {"segment_bytes": 2**70}, {"segment_bytes": None}])
def test_options_of_a_wrong_type_are_refused(tmp_path, wrong):
    with pytest.raises(InvalidArgument, match=list(wrong)[0]):
        open_store(tmp_path, **wrong)


def test_arguments_of_a_wrong_type_are_refused(tmp_path):
    with open_store(tmp_path) as store:
        for wrong in ({"read_bytes_per_s": 2**64}, {"write_bytes_per_s": 0.5}, {"window_ns": "1"}):
            with pytest.raises(InvalidArgument, match=list(wrong)[0]):
                store.open_ring(**wrong)
        with pytest.raises(InvalidArgument):
            store.match([[1], [2, 3]])
        with pytest.raises(InvalidArgument):
            store.read(chain(2), Blocks(2).pool, [[1], [2, 3]])
    for wrong in (5, None):
        with pytest.raises(InvalidArgument):
            open_store(wrong)
    with pytest.raises(StoreError):
        open_store(str(tmp_path) + chr(0))


@pytest.mark.parametrize("text", ["[" * 100_000, (
    '{"format": "kvio-store", "version": 1, "layout": {"num_layers": 1000000000000000, '
    '"block_tokens": 1, "bytes_per_token": 1}}')])
def test_a_description_that_is_too_much_for_python_is_damaged(tmp_path, text):
    (tmp_path / "kvio.json").write_text(text)
    with pytest.raises(FormatError):
        open_store(tmp_path)


def test_slots_of_a_write_that_is_under_way_are_nobody_elses(tmp_path, backend, monkeypatch):
    """A warning that is an error, or Ctrl-C, comes out of a write after it was submitted."""
    def warn(ring):
        raise RuntimeWarning("no locked memory")
    first, second = chain(4, 1), chain(4, 2)
    with open_store(tmp_path, backend) as store:
        source = Blocks(4, keys=first)
        ring = store.open_ring()
        ring._ring._pause(True)
        with monkeypatch.context() as patch, pytest.raises(RuntimeWarning):
            patch.setattr(store._requests._regions, "announce", warn)
            ring.write(first, source.pool, source.ids)
        other = Blocks(4, keys=second)
        transfer = ring.write(second, other.pool, other.ids)
        ring._ring._pause(False)
        transfer.wait()
        deadline = time.monotonic() + 30        # 3FS may finish the second one first
        while store.match(first) < 4 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert readable(store, first).all() and readable(store, second).all()
