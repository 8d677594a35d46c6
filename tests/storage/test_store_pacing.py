"""Emulated SNIC bandwidth: arithmetic on virtual link time, so no test looks at a stop-watch."""
import numpy as np
import pytest

from blocks import LAYOUT, Blocks, chain, open_store, put

NBYTES = LAYOUT.full_block_nbytes
SECOND = 1_000_000_000


def link_ns(blocks, rate):
    return blocks * NBYTES * SECOND // rate


@pytest.fixture
def store(tmp_path, backend):
    with open_store(tmp_path, backend) as store:
        put(store, chain(60))
        yield store


def test_busy_time_is_bytes_over_rate(store):
    rate = 50_000_000
    ring = store.open_ring(read_bytes_per_s=rate)
    target = Blocks(60)
    transfer = ring.read(chain(60), target.pool, target.ids)
    assert transfer.wait() == 60 and target.holds(chain(60))
    stats = ring.stats()
    assert stats["read_bytes"] == 60 * NBYTES
    # One division a run, rounded down.
    assert link_ns(60, rate) - 60 <= stats["read_busy_ns"] <= link_ns(60, rate)
    # Reported no earlier than the link has carried it.
    times = transfer.stats
    assert times["completed_ns"] - times["submitted_ns"] >= stats["read_busy_ns"]


def test_directions_are_paced_apart(store):
    ring = store.open_ring(read_bytes_per_s=40_000_000, write_bytes_per_s=80_000_000)
    source, target = Blocks(20, keys=chain(20, seed=1)), Blocks(20)
    write = ring.write(chain(20, seed=1), source.pool, source.ids)
    read = ring.read(chain(20), target.pool, target.ids)
    assert read.wait() == 20
    write.wait()
    stats = ring.stats()
    assert abs(stats["read_busy_ns"] - link_ns(20, 40_000_000)) <= 20
    assert abs(stats["write_busy_ns"] - link_ns(20, 80_000_000)) <= 20


def test_batches_follow_each_other_on_the_link(store):
    """First in, first out: each ends one transmission time after the one before."""
    rate, each = 30_000_000, 15
    ring = store.open_ring(read_bytes_per_s=rate)
    targets = [Blocks(each) for _ in range(4)]
    ring._ring._pause(True)
    keys = chain(60)
    transfers = [ring.read(keys[each * i:each * i + each], t.pool, t.ids)
                 for i, t in enumerate(targets)]
    assert ring.read_queue[0] == 60 * NBYTES
    ring._ring._pause(False)
    for transfer in transfers:
        assert transfer.wait() == each
    ends = [t.stats["completed_ns"] for t in transfers]
    first = transfers[0].stats["submitted_ns"]
    for i, end in enumerate(ends):          # however late we woke, never early
        assert end - first >= link_ns(each * (i + 1), rate) - 4 * each
    # Late wake-ups lose no bandwidth: the link was busy for exactly its bytes.
    assert abs(ring.stats()["read_busy_ns"] - link_ns(60, rate)) <= 60


def test_a_paced_write_is_stored_in_order_and_whole(store):
    ring = store.open_ring(write_bytes_per_s=100_000_000)
    keys = chain(40, seed=2)
    source = Blocks(40, keys=keys)
    transfer = ring.write(keys, source.pool, source.ids)
    transfer.wait()
    target = Blocks(40)
    assert store.read(keys, target.pool, target.ids).wait() == 40 and target.holds(keys)
    assert transfer.stats["completed_ns"] - transfer.stats["submitted_ns"] >= \
        link_ns(40, 100_000_000) - 40


def test_what_waits_for_the_link_can_be_cancelled(store):
    ring = store.open_ring(read_bytes_per_s=1)      # a block would take hours
    target = Blocks(10)
    first = ring.read(chain(2), target.pool, target.ids[:2])    # takes the link at once
    second = ring.read(chain(10)[2:], target.pool, target.ids[2:])
    second.cancel()
    assert second.wait() == 0 and not first.done
    assert ring.read_queue == (2 * NBYTES, 2 * LAYOUT.block_tokens)
    assert ring.stats()["cancelled_blocks"] == 8
    ring.close(cancel=True)                         # nor does closing wait for hours
    assert first.wait() == 2


def test_misses_take_no_time_on_the_link(store):
    ring = store.open_ring(read_bytes_per_s=1)
    target = Blocks(5)
    assert ring.read(chain(5, seed=8), target.pool, target.ids).wait() == 0
    assert ring.stats()["read_busy_ns"] == 0


def test_windows_hold_every_byte(store):
    ring = store.open_ring(read_bytes_per_s=20_000_000, window_ns=5_000_000)
    target = Blocks(60)
    ring.read(chain(60), target.pool, target.ids).wait()
    start, length, nbytes = ring.busy_windows("read")
    assert start % length == 0 and length == 5_000_000 and nbytes.dtype == np.uint64
    assert nbytes.sum() == 60 * NBYTES
    # A window carries what the link can in its time, and at most one merged run more.
    assert nbytes.max() <= 20_000_000 * length // SECOND + 60 * NBYTES
    assert len(ring.busy_windows("write")[2]) == 0
    assert ring.busy_windows("write")[1] == length


def test_windows_of_two_rings_line_up(store):
    rings = [store.open_ring(window_ns=1_000_000) for _ in range(2)]
    for ring in rings:
        target = Blocks(5)
        ring.read(chain(5), target.pool, target.ids).wait()
    starts = [ring.busy_windows()[0] for ring in rings]
    assert all(start % 1_000_000 == 0 for start in starts) and starts[0] <= starts[1]


def test_an_unpaced_ring_counts_the_time_in_flight(store):
    ring = store.open_ring()
    target = Blocks(30)
    transfer = ring.read(chain(30), target.pool, target.ids)
    transfer.wait()
    times = transfer.stats
    assert 0 < ring.stats()["read_busy_ns"] <= times["completed_ns"] - times["submitted_ns"]
