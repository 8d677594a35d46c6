"""What every back end of the store promises."""
import errno
import os
import time

import numpy as np
import pytest

import blocks
from blocks import LAYOUT, Blocks, chain, get, open_store, payload, put, readable, segments
from kvio.errors import FormatError, InvalidArgument, LayoutMismatch, StoreError
from kvio.layout import BlockLayout
from kvio.memory import BlockPool
from kvio.storage import BlockStore

MODES = [{}, {"durability": "durable"}, {"durability": "durable", "verify": "never"}]


@pytest.fixture(params=MODES, ids=["visible", "durable", "durable-never"])
def mode(request):
    return request.param


def test_what_is_written_is_read(tmp_path, backend, mode):
    keys = chain(40)
    with open_store(tmp_path, backend, **mode) as store:
        assert store.match(keys) == 0
        put(store, keys)
        assert store.match(keys) == 40 and len(store) == 40
        usable, status, target = get(store, keys)
        assert usable == 40 and not status.any() and target.holds(keys)
        usable, _, target = get(store, keys[::-1].copy(), scattered=True)
        assert usable == 40 and target.holds(keys[::-1])


def test_what_is_written_is_there_after_reopening(tmp_path, backend, mode):
    keys = chain(200)                       # several segments of 1 MiB
    with open_store(tmp_path, backend, **mode) as store:
        put(store, keys[:150], scattered=True)
    for other in ("threads", backend):
        with open_store(tmp_path, other, **mode) as store:
            assert store.match(keys) == 150
            assert readable(store, keys).tolist() == [True] * 150 + [False] * 50
    with open_store(tmp_path, backend, **mode) as store:
        put(store, keys)
        assert store.stats()["stored_blocks"] == 50
        assert readable(store, keys).all()
    assert len(segments(tmp_path)) >= 2


@pytest.mark.parametrize("num_layers, nbytes", [(1, 1), (1, 4096), (7, 4097), (4, 1 << 20)])
def test_blocks_of_any_size(tmp_path, backend, num_layers, nbytes):
    layout = BlockLayout(num_layers, 1, nbytes)         # the last is split: 4 MiB
    keys = chain(5, layout=layout)
    with open_store(tmp_path, backend, layout, segment_bytes=16 << 20) as store:
        put(store, keys, layout)
        assert readable(store, keys, layout).all()
        stats = store._default.stats()
        assert stats["read_bytes"] == stats["write_bytes"] == 5 * num_layers * nbytes


def test_neighbours_are_merged(tmp_path, backend):
    keys = chain(64)
    with open_store(tmp_path, backend, segment_bytes=4 << 20) as store:
        put(store, keys)
        before = store._default.stats()["ios"]
        get(store, keys)
        together = store._default.stats()["ios"] - before
        get(store, keys, scattered=True)
        apart = store._default.stats()["ios"] - before - together
    assert together == 1 and apart == 64    # 64 slots of 12 KiB: below 1 MiB


def test_a_prefix_ends_at_the_first_miss(tmp_path, backend):
    keys = chain(10)
    with open_store(tmp_path, backend) as store:
        put(store, keys[:4])
        put(store, keys[6:])                # written though its parent is not stored
        assert store.match(keys) == 4
        usable, status, _ = get(store, keys)
        assert usable == 4
        assert status.tolist() == [0] * 4 + [-errno.ENOENT] * 2 + [0] * 4
        put(store, keys[4:6])               # the ancestors return
        assert store.match(keys) == 10 and readable(store, keys).all()


def test_stored_keys_succeed_at_once(tmp_path, backend):
    keys = chain(6)
    with open_store(tmp_path, backend) as store:
        put(store, keys[:3])
        put(store, keys)
        put(store, keys)
        stats = store.stats()
        assert (stats["stored_blocks"], stats["already_stored_blocks"]) == (6, 9)
        assert store._default.stats()["write_blocks"] == 6


def test_two_writes_of_a_key_in_flight_leave_one_copy(tmp_path, backend):
    keys = chain(5)
    source = Blocks(5, keys=keys)
    with open_store(tmp_path, backend) as store:
        ring = store.open_ring()
        ring._ring._pause(True)
        twice = [ring.write(keys, source.pool, source.ids) for _ in range(2)]
        ring._ring._pause(False)
        for transfer in twice:
            transfer.wait()
        assert len(store) == 5 and store.stats()["own_bytes"] == 5 * LAYOUT.stride
        put(store, chain(10, seed=1))
        assert readable(store, keys).all() and readable(store, chain(10, seed=1)).all()


def test_bare_keys_are_roots(tmp_path, backend):
    names = [bytes([i]) * 16 for i in range(4)]
    source = Blocks(4)
    for i in source.ids:
        source.flat(i)[:] = i + 1
    with open_store(tmp_path, backend) as store:
        store.write(names, source.pool, source.ids).wait()
        array = np.frombuffer(b"".join(names), np.uint8).reshape(4, 16)
        assert store.match(array) == store.match(names) == store.match(tuple(names)) == 4
        _, status, target = get(store, array)
        assert not status.any()
        for mine, theirs in zip(target.ids, source.ids):
            assert (target.flat(mine) == source.flat(theirs)).all()


def test_nothing_asked_is_nothing_done(tmp_path, backend):
    with open_store(tmp_path, backend) as store:
        assert store.match(chain(0)) == 0
        assert get(store, chain(0))[0] == 0
        put(store, chain(0))
        assert get(store, [])[0] == 0


def test_wrong_arguments_change_nothing(tmp_path, backend):
    keys, source = chain(4), Blocks(4)
    pool, ids = source.pool, source.ids
    readonly = BlockPool(LAYOUT, 4)
    readonly.region.writable = False
    with open_store(tmp_path, backend) as store:
        for wrong in (lambda: store.read(keys, pool, ids[:3]),
                      lambda: store.read(keys, pool, [0, 1, 1, 2]),
                      lambda: store.read(keys, pool, [-1, 1, 2, 3]),
                      lambda: store.read(keys, pool, [0, 1, 2, 99]),
                      lambda: store.read(keys, pool, np.zeros((2, 2), int)),
                      lambda: store.read(keys, pool, [0.5, 1, 2, 3]),
                      lambda: store.read(keys, pool, [5, 6, 7, 8]),         # not allocated
                      lambda: store.read(keys, readonly, readonly.alloc(4)),
                      lambda: store.read([b"short"] * 4, pool, ids),
                      lambda: store.read(np.zeros((4, 15), np.uint8), pool, ids),
                      lambda: store.read(np.zeros((4, 16), np.int8), pool, ids),
                      lambda: store.write(keys[[0, 1, 1, 2]], pool, ids),
                      lambda: store.write(["key"] * 4, pool, ids),
                      lambda: store.open_ring(read_bytes_per_s=-1)):
            with pytest.raises(InvalidArgument):
                wrong()
        other = BlockPool(BlockLayout(1, 1, 1), 4)
        with pytest.raises(LayoutMismatch):
            store.read(keys, other, other.alloc(4))
        assert len(store) == 0 and not pool._pins.any()
        assert store.stats()["own_bytes"] == 0


def test_wrong_options(tmp_path, backend):
    for wrong in ({"backend": "aio"}, {"verify": "sometimes"}, {"durability": "maybe"},
                  {"verify": "never"}, {"capacity_bytes": 0}, {"segment_bytes": 0},
                  {"queue_depth": 0}):
        with pytest.raises(InvalidArgument):
            open_store(tmp_path / "new", **{"backend": backend, **wrong})
    with pytest.raises(InvalidArgument):
        BlockStore.open(tmp_path, "layout")
    with pytest.raises(StoreError) as failed:
        open_store(tmp_path, backend, create=False)
    assert failed.value.errno == errno.ENOENT
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        open_store(tmp_path / "file", backend)


def test_another_layout_is_refused_with_both_named(tmp_path, backend):
    other = BlockLayout(2, 4, 700)
    open_store(tmp_path, backend).close()
    with pytest.raises(LayoutMismatch) as failed:
        open_store(tmp_path, backend, other)
    assert "num_layers=3" in str(failed.value) and "num_layers=2" in str(failed.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "kvio-store", "version": 1}',
                                  "\udcff"])
def test_a_damaged_description_is_an_error(tmp_path, text):
    open_store(tmp_path).close()
    (tmp_path / "kvio.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(FormatError):
        open_store(tmp_path)


def test_a_newer_version_is_an_error(tmp_path):
    open_store(tmp_path).close()
    text = (tmp_path / "kvio.json").read_text()
    (tmp_path / "kvio.json").write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(FormatError, match="version 2"):
        open_store(tmp_path)
    for change in (('"slots": ', '"slots": 1'), ('"store": "', '"store": "zz')):
        (tmp_path / "kvio.json").write_text(text.replace(*change))
        with pytest.raises(FormatError):
            open_store(tmp_path)


def test_rings_share_the_store(tmp_path, backend):
    keys = [chain(10, seed=i) for i in range(4)]
    with open_store(tmp_path, backend) as store:
        rings = [store.open_ring(name=f"node{i}") for i in range(4)]
        sources = [Blocks(10, keys=k) for k in keys]
        for transfer in [r.write(k, s.pool, s.ids) for r, k, s in zip(rings, keys, sources)]:
            transfer.wait()
        assert store.stats()["own_segments"] == 4       # one master for every header page
        for ring, k in zip(rings, keys[1:] + keys[:1]):
            target = Blocks(10)
            assert ring.read(k, target.pool, target.ids).wait() == 10 and target.holds(k)
            assert ring.stats()["read_bytes"] == 10 * LAYOUT.full_block_nbytes
            assert ring.read_queue == (0, 0)
        rings[0].close()
        put(store, chain(3, seed=9))        # the default ring takes over its segment
        assert store.stats()["own_segments"] == 4


def test_the_caller_s_ids_may_be_used_again_at_once(tmp_path, backend):
    """What is unpinned is what was pinned, and bytes go where they were to go."""
    keys = chain(4)
    with open_store(tmp_path, backend=backend) as store, BlockPool(LAYOUT, 12) as pool, \
            store.open_ring(name="slow") as ring:
        put(store, keys)
        mine, others, ids = pool.alloc(4), pool.alloc(4), np.empty(4, np.int64)
        ring._ring._pause(True)
        ids[:] = mine
        reading = ring.read(keys, pool, ids)
        ids[:] = others
        pool.free(mine)
        assert pool.num_free == 4                       # in flight: nobody gets them
        ring._ring._pause(False)
        assert reading.wait() == 4
        assert pool.num_free == 8
        pool.free(others)
        assert pool.num_free == 12 and not pool._pins.any()


def test_the_reading_queue_is_what_is_outstanding(tmp_path, backend):
    keys = chain(6)
    with open_store(tmp_path, backend) as store:
        put(store, keys[:5])
        ring = store.open_ring()
        ring._ring._pause(True)
        target = Blocks(6)
        transfer = ring.read(keys, target.pool, target.ids)
        assert ring.read_queue == (5 * LAYOUT.full_block_nbytes, 5 * LAYOUT.block_tokens)
        ring._ring._pause(False)
        assert transfer.wait() == 5
        assert ring.read_queue == (0, 0)


def test_memory_of_a_dead_pool_is_never_read_again(tmp_path, backend):
    keys = chain(3)
    with open_store(tmp_path, backend) as store:
        put(store, keys)
        for _ in range(50):                 # registrations come and go with their pools
            assert readable(store, keys).all()
        ring = store._default._ring
        assert ring.stats()["registered_bytes"] <= 3 * 7 * LAYOUT.stride
        assert (ring.stats()["fixed_ios"] > 0) == (backend == "uring" or blocks.NAMED)


def test_page_1_follows_the_header_pages(tmp_path, backend):
    from kvio.storage import format as fmt
    keys = chain(70)
    with open_store(tmp_path, backend, segment_bytes=4 << 20) as store:
        put(store, keys)
        deadline = time.monotonic() + 30
        while True:
            page = np.fromfile(segments(tmp_path)[0], np.uint8, 8192)[4096:].tobytes()
            assert fmt.is_sealed(page)
            record = np.frombuffer(page, fmt.PAGE1)[0]
            changed = int.from_bytes(bytes(record["changed"]), "little") \
                | int.from_bytes(bytes(record["changed_before"]), "little")
            if changed == 0b111 or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        assert changed == 0b111
        assert record["header_pages"] == store.description.geometry.header_pages


def test_closing_gives_back_reserved_space(tmp_path, backend):
    with open_store(tmp_path, backend, segment_bytes=64 << 20) as store:
        put(store, chain(3))
        geometry = store.description.geometry
    [segment] = segments(tmp_path)
    assert os.path.getsize(segment) == geometry.payload_offset + 3 * LAYOUT.stride
    with open_store(tmp_path, backend) as store:
        get(store, chain(3))
    assert segments(tmp_path) == [segment]      # a reader leaves nothing behind


def test_sync(tmp_path, backend):
    with open_store(tmp_path, backend) as store:
        store.sync()
        put(store, chain(3))
        store.sync()
        assert not any(segment.dirty for segment in store._writer.segments)


def test_payloads_differ():
    one, two = chain(2)
    assert (payload(one) != payload(two)).any()
