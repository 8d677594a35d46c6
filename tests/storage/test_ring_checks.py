"""verify="never": what proves a block, what that costs, and that a slot written anew is seen."""
import errno
import time

import numpy as np
import pytest

from blocks import Blocks, chain, get, open_store, put, readable
from test_store_faults import READ, WRITE, end_faults, fault, headers, slot_range

NEVER = {"verify": "never", "durability": "durable"}


def places(store, keys):
    """Where the store's index says that the blocks lie, as a ring takes it."""
    found = store._index.find(keys)
    found["status"] = -errno.EINPROGRESS
    return found


def read_places(store, found, found_ns=0):
    """A read of places that were looked up before; status per block."""
    target = Blocks(len(found))
    found["addr"] = target.pool.region.addr + target.ids.astype(np.uint64) * np.uint64(
        target.pool.block_stride)
    batch = store._default_ring()._ring.submit(False, found, 0, target.pool.region.addr,
                                               target.pool.region.nbytes, None, found_ns)
    batch.wait(None)
    return np.asarray(batch.status).tolist()


@pytest.fixture
def two(tmp_path, backend):
    """A writer with 64 blocks (two header pages), and another store that has found them."""
    with open_store(tmp_path, backend, **NEVER) as writer:
        put(writer, chain(64))
        with open_store(tmp_path, backend, **NEVER) as reader:
            yield writer, reader


def test_blocks_of_our_own_segments_are_compared_with_memory(tmp_path, backend):
    with open_store(tmp_path, backend, **NEVER) as store:
        put(store, chain(40))
        before = store._default.stats()["ios"]
        assert readable(store, chain(40)).all()
        stats = store._default.stats()
        assert stats["memory_checks"] == 40 and stats["check_reads"] == 0
        assert stats["ios"] - before == -(-40 * store.layout.stride // (1 << 20))


@pytest.mark.parametrize("what", ["written", "payload failed", "invalidation failed"])
def test_an_own_slot_that_is_written_anew_is_seen(tmp_path, backend, what):
    with open_store(tmp_path, backend, **NEVER) as store:
        put(store, chain(20))
        old = places(store, chain(20))
        assert read_places(store, old) == [0] * 20
        store.forget(chain(20))
        assert read_places(store, old) == [0] * 20      # forgotten, but nobody has written there
        if what == "payload failed":
            fault(store, WRITE, -errno.EIO, count=99, **slot_range(store, 0, 19))
        elif what == "invalidation failed":
            fault(store, WRITE, -errno.EIO, count=99, **headers(store))
        source = Blocks(20, keys=chain(20, seed=1))
        store.write(chain(20, seed=1), source.pool, source.ids)._handle.wait(None)
        assert read_places(store, old) == [-errno.ENOENT] * 20
        end_faults(store)
        assert readable(store, chain(20, seed=1)).all() == (what == "written")


def test_a_batch_reads_each_header_page_once(two):
    _, reader = two
    usable, _, target = get(reader, chain(64), scattered=True)      # 64 runs of one block
    assert usable == 64 and target.holds(chain(64))
    stats = reader._default.stats()
    assert stats["check_reads"] == 2 and stats["memory_checks"] == 0 and stats["ios"] == 66


def test_a_segment_that_is_final_needs_no_check(two):
    _, reader = two
    old, before = places(reader, chain(64)), time.monotonic_ns()
    reader._files.set_final(int(old["segment"][0]))
    assert readable(reader, chain(64)).all()
    assert reader._default.stats()["check_reads"] == 0
    # Places that were looked up before it became final may be out of date: they are checked.
    assert read_places(reader, old, before) == [0] * 64
    assert read_places(reader, old) == [0] * 64
    assert reader._default.stats()["check_reads"] == 4
    with pytest.raises(OSError):
        reader._files.set_final(99)


@pytest.mark.parametrize("what", ["other blocks", "invalidated"])
def test_a_foreign_slot_rewritten_between_payload_and_check_is_caught(two, what):
    """The check is held up by interrupts until the other writer is done with the slots."""
    writer, reader = two
    fault(reader, READ, -errno.EINTR, count=2**31 - 1, **headers(reader))
    target = Blocks(64)
    transfer = reader.read(chain(64), target.pool, target.ids)
    deadline = time.monotonic() + 20
    while not reader._default._ring.stats()["retries"]:     # the payload has come
        assert time.monotonic() < deadline
    writer.forget(chain(64)[:40])
    if what == "invalidated":
        fault(writer, WRITE, -errno.EIO, count=99, **slot_range(writer, 0, 63))
    source = Blocks(40, keys=chain(40, seed=1))
    writer.write(chain(40, seed=1), source.pool, source.ids)._handle.wait(None)
    assert not transfer.done
    end_faults(reader)
    assert transfer.wait() == 0
    assert transfer.status.tolist() == [-errno.ENOENT] * 40 + [0] * 24
    assert reader.match(chain(64)) == 0


def test_a_header_page_that_cannot_be_read_fails_its_blocks_alone(two):
    _, reader = two
    fault(reader, READ, -errno.EIO, count=999, from_offset=8192, to_offset=8192 + 4096)
    _, status, target = get(reader, chain(64))
    slots = {-errno.EIO: 32, 0: 32}
    assert {code: status.tolist().count(code) for code in slots} == slots
    end_faults(reader)


def test_a_header_in_the_middle_of_a_write_is_read_once_more(two):
    """The first look ends in the middle of the page, as a torn one does; the second is whole."""
    _, reader = two
    fault(reader, READ, 4096, count=1, **headers(reader))
    assert readable(reader, chain(64)).all()


# ---- gates

@pytest.mark.parametrize("durability", ["visible", "durable"])
def test_a_batch_writes_each_header_page_once(tmp_path, backend, durability):
    """And costs one fdatasync a step: payload, headers."""
    with open_store(tmp_path, backend, durability=durability) as store:
        put(store, chain(64), scattered=True)
        stats = store._default.stats()
        assert stats["header_writes"] == 2
        assert stats["syncs"] == (2 if durability == "durable" else 0)
        store.forget(chain(64))
        put(store, chain(64, seed=1))                   # invalidate, payload, headers
        assert store._default.stats()["header_writes"] == 6
        assert store._default.stats()["syncs"] == (5 if durability == "durable" else 0)
        assert readable(store, chain(64, seed=1)).all()


def test_gates_open_for_long_batches(tmp_path, backend):
    """A crash in the middle of a batch must not lose all of it."""
    with open_store(tmp_path, backend, segment_bytes=64 << 20) as store:
        put(store, chain(7, seed=1))                    # so that 512 runs end within a page
        before, keys = store._default.stats()["header_writes"], chain(1300)
        put(store, keys, scattered=True)                # 1300 runs
        pages = 1 + (7 + 1299) // 32
        assert store._default.stats()["header_writes"] - before > pages
        assert readable(store, keys).all()


def test_gates_open_when_the_rest_of_a_batch_fails_or_is_cancelled(tmp_path, backend):
    with open_store(tmp_path, backend, queue_depth=1) as store:
        keys = chain(64)
        source = Blocks(64, keys=keys, scattered=True)
        fault(store, WRITE, -errno.EIO, count=1, **slot_range(store, 63, 63))
        transfer = store.write(keys, source.pool, source.ids)
        transfer._handle.wait(None)
        assert transfer.status.tolist() == [0] * 63 + [-errno.EIO]
    for seed in range(1, 6):                            # cancelled anywhere in the middle
        with open_store(tmp_path, backend, queue_depth=1) as store:
            keys = chain(64, seed)
            source = Blocks(64, keys=keys, scattered=True)
            transfer = store.write(keys, source.pool, source.ids)
            time.sleep(0.001 * seed)
            transfer.cancel()
            assert set(transfer.status.tolist()) <= {0, -errno.ECANCELED}
            assert readable(store, keys).tolist() == (transfer.status == 0).tolist()
