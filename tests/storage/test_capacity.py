"""Capacity: what goes, in which order, and what never does. One test a rule."""
import errno
import itertools
import os

import numpy as np
import pytest

from blocks import LAYOUT, Blocks, chain, get, open_store, payload, put, readable
from kvio.errors import TransferError
from kvio.layout import block_keys
from kvio.storage import requests

STRIDE = LAYOUT.stride


@pytest.fixture
def clock(monkeypatch):
    """A second passes with every look: who is used later is younger."""
    seconds = itertools.count(10)
    monkeypatch.setattr(requests, "now_s", lambda: next(seconds))


def small(path, blocks, backend="threads", **options):
    return open_store(path, backend, capacity_bytes=blocks * STRIDE + 5, **options)


def attempt(store, keys):
    """Write; status per block. What is refused is refused with ENOSPC alone."""
    source = Blocks(len(keys), keys=keys)
    transfer = store.write(keys, source.pool, source.ids)
    try:
        transfer.wait()
    except TransferError as failed:
        assert failed.errno == errno.ENOSPC and "full" in str(failed)
    assert set(transfer.status.tolist()) <= {0, -errno.ENOSPC}
    return transfer.status


def branch(keys, count, seed):
    """`count` further blocks after those of `keys`."""
    ids = np.random.default_rng(seed).integers(0, 50_000, count * LAYOUT.block_tokens)
    return block_keys(ids, LAYOUT, parent=keys["key"][-1].tobytes())


def stored(store, keys):
    return [key.tobytes() in store._index for key in keys["key"]]


def exact(store):
    """Every slot is free, in flight, valid, unbacked or retired, and the sums are right."""
    used = 0
    for segment in store._writer.segments:
        slots = segment.slots
        codes = np.bincount(slots._states & 7, minlength=6)
        assert codes.sum() == slots.count == slots.tail + slots.next
        assert codes[1:4].tolist() == [slots.num_free, slots.num_flying, slots.num_valid]
        used += slots.num_flying + slots.num_valid
    assert used == store._writer.slots_used
    return used


# ---- what goes

def test_a_leaf_goes_before_its_parent(tmp_path, clock):
    with small(tmp_path, 10) as store:
        keys = chain(10)
        put(store, keys)
        for number in range(1, 8):
            put(store, chain(1, seed=number))
            assert store.match(keys) == 10 - number     # at once
        assert store.stats()["evicted_blocks"] == 7


def test_the_least_recently_used_chain_goes_first(tmp_path, clock):
    with small(tmp_path, 12) as store:
        chains = [chain(4, seed) for seed in range(3)]
        for keys in chains:
            put(store, keys)
        put(store, chain(4, seed=9))
        assert [store.match(keys) for keys in chains] == [0, 4, 4]


@pytest.mark.parametrize("how", ["read", "write"])
def test_reading_or_writing_a_block_again_makes_it_young(tmp_path, clock, how):
    with small(tmp_path, 12) as store:
        chains = [chain(4, seed) for seed in range(3)]
        for keys in chains:
            put(store, keys)
        (put if how == "write" else get)(store, chains[0])
        put(store, chain(4, seed=9))
        assert [store.match(keys) for keys in chains] == [4, 0, 4]


def test_a_shared_prefix_outlives_its_branches(tmp_path, clock):
    with small(tmp_path, 12) as store:
        stem = chain(4)
        branches = [branch(stem, 4, seed) for seed in (1, 2)]
        for keys in (stem, *branches):
            put(store, keys)
        put(store, chain(4, seed=9))
        assert stored(store, branches[0]) == [False] * 4 and store.match(stem) == 4
        put(store, chain(4, seed=10))
        assert stored(store, branches[1]) == [False] * 4 and store.match(stem) == 4
        put(store, chain(3, seed=11))
        assert store.match(stem) == 1


def test_orphans_go_first(tmp_path, clock):
    with small(tmp_path, 12) as store:
        old, young = chain(4), chain(8, seed=1)
        put(store, old)
        put(store, young)
        get(store, young)
        store.forget(young[4:5])           # the last three are orphans, though just read
        put(store, chain(4, seed=2))
        assert store.match(old) == 4 and store.match(young) == 4
        assert stored(store, young) == [True] * 4 + [False] * 4
        assert store.stats()["evicted_orphans"] == store.stats()["evicted_blocks"] == 3


def test_whole_chains_go_in_batches(tmp_path, clock):
    """Else every write of a large store would evict, and leave single slots."""
    with small(tmp_path, 100) as store:
        for seed in range(10):
            put(store, chain(10, seed))
        put(store, chain(1, seed=99))
        assert store.stats()["evicted_blocks"] == 100 // 16
        put(store, chain(1, seed=98))
        assert store.stats()["evicted_blocks"] == 100 // 16


# ---- what does not

def test_pinned_blocks_never_go(tmp_path, clock):
    with small(tmp_path, 10) as store:
        keys = chain(6)
        put(store, keys)
        assert store.pin(keys) == 6 and store.stats()["pinned_blocks"] == 6
        status = attempt(store, chain(8, seed=1))
        assert status.tolist() == [0] * 4 + [-errno.ENOSPC] * 4
        assert store.match(keys) == 6 and readable(store, keys).all()
        store.unpin(keys)
        assert not attempt(store, chain(9, seed=2)).any() and store.match(keys) == 1


def test_everything_pinned_is_enospc_for_what_is_new(tmp_path):
    with small(tmp_path, 10) as store:
        keys = chain(10)
        put(store, keys)
        with store.pinned(keys) as count:
            assert count == 10
            assert (attempt(store, chain(3, seed=1)) == -errno.ENOSPC).all()
            put(store, keys)                    # stored already: no room needed
            assert store.stats()["refused_blocks"] == 3
        assert store.stats()["pinned_blocks"] == 0
        put(store, chain(3, seed=1))


def test_a_pinned_block_keeps_its_ancestors(tmp_path, clock):
    with small(tmp_path, 10) as store:
        keys = chain(6)
        put(store, keys)
        assert store.pin(keys[5:]) == 1
        assert attempt(store, chain(9, seed=1)).tolist() == [0] * 4 + [-errno.ENOSPC] * 5
        assert store.match(keys) == 6 and readable(store, keys).all()
        assert exact(store) == 10


def test_pins_count_and_only_the_stored_prefix_is_pinned(tmp_path, clock):
    with small(tmp_path, 10) as store:
        keys = chain(6)
        put(store, keys[:3])
        put(store, keys[4:])
        assert store.pin(keys) == 3 and store.pin(keys[:2]) == 2
        assert store.stats()["pinned_blocks"] == 3
        store.unpin(keys)                       # keys[3:] are not pinned: ignored
        assert store.stats()["pinned_blocks"] == 2
        store.unpin(chain(6, seed=5))
        store.unpin(keys)
        store.unpin(keys)
        assert store.stats()["pinned_blocks"] == 0 and not store._capacity._pins


def test_a_pinned_block_that_was_lost_is_pinned_again_when_it_returns(tmp_path):
    with small(tmp_path, 10) as store:
        keys = chain(4)
        put(store, keys)
        store.pin(keys)
        store.forget(keys[3:])
        put(store, keys)
        attempt(store, chain(10, seed=1))
        assert store.match(keys) == 4
        store.unpin(keys)
        put(store, chain(10, seed=2))
        assert store.match(keys) == 0


def test_pins_end_though_the_block_raises_or_the_store_closes(tmp_path):
    with small(tmp_path, 10) as store:
        put(store, chain(4))
        with pytest.raises(KeyError):
            with store.pinned(chain(4)):
                raise KeyError
        assert store.stats()["pinned_blocks"] == 0
        with store.pinned(chain(4)):
            store.close()


def test_ancestors_do_not_go_for_their_descendants(tmp_path, clock):
    with small(tmp_path, 10) as store:
        keys = chain(20)
        put(store, keys[:6])                                # in one call with its prefix
        assert attempt(store, keys).tolist() == [0] * 10 + [-errno.ENOSPC] * 10
        assert store.match(keys) == 10 and readable(store, keys[:10]).all()
    with small(tmp_path / "more", 10) as store:             # and piece by piece
        for first in range(0, 20, 3):
            if attempt(store, keys[first:first + 3]).any():
                break
        assert first == 9 and store.match(keys) == 10


def test_what_is_being_written_does_not_go(tmp_path, backend):
    with small(tmp_path, 10, backend) as store:
        keys, ring = chain(6), store.open_ring()
        source = Blocks(6, keys=keys)
        ring._ring._pause(True)
        transfer = ring.write(keys, source.pool, source.ids)
        assert attempt(store, chain(8, seed=1)).tolist() == [0] * 4 + [-errno.ENOSPC] * 4
        assert exact(store) == 10
        ring._ring._pause(False)
        transfer.wait()
        assert readable(store, keys).all() and exact(store) == 10


@pytest.mark.parametrize("wait_for_invalidate", [False, True])
def test_a_block_that_is_read_while_it_goes_is_right_or_a_miss(tmp_path, backend,
                                                               wait_for_invalidate):
    with small(tmp_path, 10, backend) as store:
        keys, ring = chain(10), store.open_ring()
        put(store, keys)
        target = Blocks(10)
        ring._ring._pause(True)
        read = ring.read(keys, target.pool, target.ids)
        if wait_for_invalidate:                             # all slots hold other blocks now
            put(store, chain(10, seed=1))
        ring._ring._pause(False)
        read.wait()
        if not wait_for_invalidate:
            put(store, chain(10, seed=1))
        for i, status in enumerate(read.status):
            assert status in (0, -errno.EBADMSG, -errno.ENOENT)
            assert status or (target.flat(target.ids[i]) == payload(keys[i])).all()
        assert (read.status != 0).all() == wait_for_invalidate
        figures = store.stats()
        assert figures["lost_blocks"] == 0                  # none of the new ones is blamed
        assert figures["missed_blocks"] == (10 if wait_for_invalidate else 0)
        assert readable(store, chain(10, seed=1)).all() and exact(store) == 10


# ---- the budget

def test_the_budget_is_exact(tmp_path, clock):
    rng = np.random.default_rng(3)
    with small(tmp_path, 50, segment_bytes=200_000) as store:
        for seed in range(40):
            put(store, chain(int(rng.integers(1, 20)), seed))
            used = exact(store)
            assert store.stats()["used_bytes"] == used * STRIDE and used == len(store) <= 50
            assert store._writer.span <= 50
        assert store.stats()["capacity_bytes"] == 50 * STRIDE + 5
        assert used >= 50 - 50 // 4


def test_a_write_larger_than_the_capacity_stores_what_fits(tmp_path):
    with small(tmp_path, 10) as store:
        put(store, chain(4, seed=1))
        keys = chain(25)
        assert attempt(store, keys).tolist() == [0] * 10 + [-errno.ENOSPC] * 15
        assert store.match(keys) == 10 and readable(store, keys[:10]).all()
        assert store.stats()["refused_blocks"] == 15


def test_no_room_for_a_single_block(tmp_path):
    with open_store(tmp_path, capacity_bytes=STRIDE - 1) as store:
        assert (attempt(store, chain(3)) == -errno.ENOSPC).all() and len(store) == 0


def test_the_budget_is_exact_under_failures(tmp_path, backend):
    rng = np.random.default_rng(5)
    with small(tmp_path, 40, backend, segment_bytes=200_000) as store:
        ring = store._default_ring()._ring
        for seed in range(60):
            keys = chain(int(rng.integers(1, 12)), seed)
            code = [errno.EIO, errno.ENOSPC, errno.EINTR][seed % 3]
            ring._fault(2, -code, count=int(rng.integers(1, 4)), skip=int(rng.integers(0, 6)))
            source = Blocks(len(keys), keys=keys)
            transfer = store.write(keys, source.pool, source.ids)
            if seed % 5 == 0:
                transfer.cancel()
            try:
                transfer.wait()
            except TransferError:
                pass
            ring._fault(0, 0)
            assert len(store) * STRIDE == store.stats()["used_bytes"] == exact(store) * STRIDE
            assert exact(store) <= 40
            readable(store, keys)
        store._writer.space_freed()                 # the disk has space again: slots return
        store.forget(np.concatenate([chain(12, seed) for seed in range(60)]))
        assert not attempt(store, chain(40, seed=99)).any() and exact(store) == 40


# ---- several rings

def test_a_ring_takes_over_segments_of_a_ring_that_rests(tmp_path, backend):
    with small(tmp_path, 40, backend, segment_bytes=200_000) as store:
        rings = [store.open_ring() for _ in range(3)]
        for seed in range(30):
            keys = chain(8, seed)
            source = Blocks(8, keys=keys)
            rings[seed % 3].write(keys, source.pool, source.ids).wait()
            assert readable(store, keys).all() and exact(store) <= 40
        assert store._writer.span <= 40 and len(store._writer.segments) <= 5
        with open_store(tmp_path, backend) as second:
            assert second.stats()["headers_damaged"] == 0
            for seed in range(30):
                readable(second, chain(8, seed))


def test_a_ring_that_cannot_get_free_slots_spans_more_rather_than_fail(tmp_path, backend):
    with small(tmp_path, 20, backend) as store:
        busy, other = store.open_ring(), store.open_ring()
        for seed in range(2):
            keys = chain(9, seed)
            source = Blocks(9, keys=keys)
            busy.write(keys, source.pool, source.ids).wait()
        busy._ring._pause(True)
        more = chain(2, seed=2)
        source = Blocks(2, keys=more)
        transfer = busy.write(more, source.pool, source.ids)
        keys = chain(4, seed=3)
        blocks = Blocks(4, keys=keys)
        other.write(keys, blocks.pool, blocks.ids).wait()
        busy._ring._pause(False)
        transfer.wait()
        assert readable(store, keys).all() and exact(store) <= 20


# ---- dead writers

def left_behind(path, count, blocks=10):
    """Chains of writers that have closed, one segment each."""
    chains = []
    for seed in range(count):
        keys = chain(blocks, 100 + seed)
        with open_store(path) as store:
            put(store, keys)
        chains.append(keys)
    return chains


def test_dead_writers_segments_go_first_the_least_recently_used_first(tmp_path, clock):
    chains = left_behind(tmp_path, 3)
    with small(tmp_path, 40) as store:
        own = chain(10)
        put(store, own)
        assert store.stats()["used_bytes"] == 40 * STRIDE
        for keys in (chains[1], chains[2], chains[0]):
            get(store, keys)
        for gone, seed in ((1, 1), (2, 2), (0, 3)):
            put(store, chain(10, seed))
            assert store.match(chains[gone]) == 0 and store.match(own) == 10
        assert store.stats()["reclaimed_segments"] == 3
        assert store.stats()["reclaimed_blocks"] == 30 and not store.stats()["evicted_blocks"]
        put(store, chain(10, seed=4))
        assert store.match(own) == 0 and store.stats()["evicted_blocks"] == 10
        assert store.stats()["used_bytes"] == 40 * STRIDE


def test_what_dead_writers_left_counts_and_what_the_living_have_does_not(tmp_path):
    left_behind(tmp_path, 2)
    with small(tmp_path, 25) as store:
        watch, store._capacity._watch = store._watch, None
        assert store.stats()["used_bytes"] == 0
        put(store, chain(20))                       # nobody is known to be dead
        assert store.match(chain(20)) == 20
        store._capacity._watch = watch
        assert store.stats()["used_bytes"] == 40 * STRIDE
        put(store, chain(1, seed=1))                # over budget: both go, nothing of our own
        assert store.stats()["reclaimed_segments"] == 2 and len(store) == 21


def test_dead_segments_with_pinned_blocks_or_own_ancestors_stay(tmp_path, clock):
    chains = left_behind(tmp_path, 3)
    with small(tmp_path, 30) as store:
        with store.pinned(chains[0][:2]):
            more = branch(chains[1], 10, seed=7)
            put(store, more)
            assert [store.match(keys) for keys in chains] == [10, 10, 0]
            assert (attempt(store, branch(chains[1], 30, seed=8)) == 0).sum() == 10
            assert [store.match(keys) for keys in chains] == [10, 10, 0]


def test_a_dead_segment_that_cannot_be_deleted_fails_no_write(tmp_path):
    left_behind(tmp_path, 2)
    with small(tmp_path, 25) as store:
        watch = store._watch
        watch.reclaim = lambda number: os.unlink("/nonexistent/segment")
        assert attempt(store, chain(10)).tolist() == [0] * 5 + [-errno.ENOSPC] * 5
        watch.reclaim = lambda number: False        # it has come back to life
        assert (attempt(store, chain(3, seed=1)) == 0).all()
        assert store.stats()["reclaimed_segments"] == 0


# ---- figures

def test_hit_rates(tmp_path):
    with small(tmp_path, 10) as store:
        assert store.stats()["match_rate"] is None and store.stats()["hit_rate"] is None
        keys = chain(4)
        put(store, keys)
        store.match(chain(8))
        store.match(keys)
        get(store, keys)
        get(store, chain(4, seed=1))
        figures = store.stats()
        assert figures["match_rate"] == (4 + 4) / (8 + 4)
        assert figures["hit_rate"] == 0.5
