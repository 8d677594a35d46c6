"""What LMCache's `native_plugin` adapter expects of a connector, without LMCache."""
import asyncio
import gc
import os
import select
import threading
import time

import pytest

from connector import ODD, SIZE, Buffers, exists, get, names, pattern, put, result, shelf_of
from kvio.errors import InvalidArgument, LayoutMismatch, StoreError
from kvio.integrations import chunks
from kvio.integrations.lmcache import KvioConnector, chunk_key
from kvio.layout import BlockLayout
from kvio.storage import BlockStore

# ---- what goes in comes out ----

# Aligned and adjacent; aligned and apart; not aligned; no whole pages.
WAYS = {"direct": (SIZE, 0, 0), "apart": (SIZE, 0, 4096), "shifted": (SIZE, 64, 0),
        "odd": (ODD, 0, 0)}


@pytest.mark.parametrize("way", WAYS)
def test_chunks_come_back(tmp_path, backend, way):
    nbytes, shift, gap = WAYS[way]
    there, here = Buffers(20, nbytes, shift, gap).fill(), Buffers(20, nbytes, shift, gap)
    with KvioConnector(tmp_path / "kv", backend=backend, staging_blocks=1) as one:
        keys = names(20)
        assert exists(one, keys) == (True, "", [False] * 20)
        assert put(one, keys, there.views) == (True, "", [True] * 20)
        assert exists(one, keys[::-1]) == (True, "", [True] * 20)
        assert get(one, keys, here.views) == (True, "", [True] * 20)
        assert all(here.holds(i) for i in range(20))
        counts = one.stats()
        copied = 40 if way in ("shifted", "odd") else 0
        assert (counts["direct_chunks"], counts["staged_chunks"]) == (40 - copied, copied)
    with KvioConnector(tmp_path / "kv", backend=backend) as one:
        again = Buffers(20, nbytes)
        assert get(one, keys, again.views)[0]
        assert all(again.holds(i) for i in range(20))


def test_neighbours_of_a_buffer_are_left_alone(connector):
    """A chunk that ends within a page must not bring the rest of its slot along."""
    keys, here = names(3), Buffers(3, ODD, gap=200)
    put(connector, keys, Buffers(3, ODD).fill().views)
    here.memory[:] = b"\xee" * len(here.memory)
    assert get(connector, keys, here.views)[0]
    gaps = [here.memory[ODD + i * (ODD + 200):(i + 1) * (ODD + 200)] for i in range(3)]
    assert all(gap == b"\xee" * 200 for gap in gaps)


def test_what_lmcache_hands_over_is_a_ctypes_view(connector):
    import ctypes
    there, here = ((ctypes.c_ubyte * SIZE)() for _ in range(2))
    ctypes.memset(there, 7, SIZE)
    assert memoryview(there).format == "<B"
    assert put(connector, names(1), [memoryview(there)])[0]
    assert get(connector, names(1), [memoryview(here)]) == (True, "", [True])
    assert bytes(here) == b"\7" * SIZE


def test_a_partial_hit_is_told_key_by_key(connector):
    keys, here = names(9), Buffers(9)
    put(connector, keys[::2], Buffers(9).fill().views[::2])
    ok, error, flags = get(connector, keys, here.views)
    assert (ok, flags) == (False, [i % 2 == 0 for i in range(9)])
    assert error == "key 1: not stored"
    assert all(here.holds(i) for i in range(0, 9, 2))
    assert exists(connector, keys) == (True, "", [i % 2 == 0 for i in range(9)])


def test_empty_batches(connector):
    for number in (connector.submit_batch_get([], []), connector.submit_batch_set([], []),
                   connector.submit_batch_exists([]), connector.submit_batch_delete([])):
        assert result(connector, number) == (True, "", [])


def test_a_key_stored_again_stays_as_it_is(connector):
    put(connector, names(2), Buffers(2).fill().views)
    assert put(connector, names(2), Buffers(2).fill(tag=1).views)[0]
    here = Buffers(2)
    assert get(connector, names(2), here.views)[0] and here.holds(0) and here.holds(1)


@pytest.mark.parametrize("shift", [0, 64])
def test_a_key_twice_in_one_batch(connector, shift):
    key, = names(1)
    there, here = Buffers(3, shift=shift), Buffers(3, shift=shift)
    for view in there.views:
        view[:] = pattern(0, SIZE)
    assert put(connector, [key] * 3, there.views) == (True, "", [True] * 3)
    assert get(connector, [key] * 3, here.views) == (True, "", [True] * 3)
    assert all(bytes(view) == pattern(0, SIZE) for view in here.views)


@pytest.mark.parametrize("shift", [0, 64])
def test_a_key_twice_in_batches_at_once(tmp_path, shift):
    """Those that wait for memory meet, and a write takes a key once."""
    with KvioConnector(tmp_path, chunk_bytes=SIZE, backend="threads") as one:
        ring, there = shelf_of(one).rings[True]._ring, Buffers(2, shift=shift).fill()
        ring._pause(True)
        numbers = [one.submit_batch_set(names(2), there.views) for _ in range(12)]
        time.sleep(0.1)
        ring._pause(False)
        for number in numbers:
            assert result(one, number) == (True, "", [True] * 2)
        here = Buffers(2)
        assert get(one, names(2), here.views)[0] and here.holds(0) and here.holds(1)


# ---- sizes ----

def test_each_size_has_a_store_of_its_own(tmp_path, connector):
    small, large = Buffers(4, ODD).fill(), Buffers(4, SIZE).fill(tag=1)
    mixed = [view for pair in zip(small.views, large.views) for view in pair]
    assert put(connector, names(8), mixed)[0]
    assert sorted(os.listdir(tmp_path / "kv")) == [f"chunks-{ODD}", f"chunks-{SIZE}"]
    a, b = Buffers(4, ODD), Buffers(4, SIZE)
    back = [view for pair in zip(a.views, b.views) for view in pair]
    assert get(connector, names(8), back) == (True, "", [True] * 8)
    assert all(a.holds(i) and b.holds(i, 1) for i in range(4))
    assert exists(connector, names(9))[2] == [True] * 8 + [False]


def test_a_chunk_is_not_loaded_into_a_buffer_of_another_size(connector):
    put(connector, names(1), Buffers(1).fill().views)
    for nbytes in (SIZE - 1, SIZE + 4096):
        buffer = Buffers(1, nbytes)
        assert get(connector, names(1), buffer.views) == (False, "key 0: not stored", [False])
        assert bytes(buffer.views[0]) == bytes(nbytes)


def test_sizes_that_were_not_asked_for_fail_and_others_go_on(tmp_path):
    with KvioConnector(tmp_path, chunk_bytes=SIZE) as one:
        views = Buffers(2).fill().views + Buffers(1, ODD).fill().views
        ok, error, flags = put(one, names(3), views)
        assert (ok, flags) == (False, [True, True, False])
        assert error == f"key 2: a chunk of {ODD} bytes; this store was opened for chunk_bytes " \
                        f"of {SIZE}"
        assert exists(one, names(3))[2] == [True, True, False]
        assert get(one, names(3), views)[2] == [True, True, False]
        assert os.listdir(tmp_path) == [f"chunks-{SIZE}"]


def test_there_is_an_end_to_sizes(connector, monkeypatch):
    monkeypatch.setattr(chunks, "MAX_SIZES", 2)
    for nbytes, good in ((4096, True), (8192, True), (100, False), (4096, True)):
        ok, error, flags = put(connector, names(1, tag="b"), Buffers(1, nbytes).fill().views)
        assert flags == [good] and ("chunk_bytes" in error) is not good


def test_buffers_that_cannot_be_used(connector):
    keys, good = names(6), Buffers(2).fill()
    views = [good.views[0], memoryview(bytes(SIZE)), memoryview(b""), memoryview(good.memory)[::2],
             "no buffer", good.views[1]]
    ok, error, flags = put(connector, keys, views)
    assert flags == [True, True, False, False, False, True] and not ok and "key 2" in error
    ok, error, flags = get(connector, keys, views)
    assert flags == [True, False, False, False, False, True]
    assert error == "key 1: its buffer is read-only"
    assert get(connector, keys[:2], [good.views[0]] * 2)[2] == [True, False]    # one over the other
    assert get(connector, [keys[0], 17], good.views) == (
        False, "key 1: a key must be a str or bytes, not 17", [True, False])


# ---- keys ----

def test_keys_are_stable():
    """Written down: another process, another release and another machine must find them."""
    assert chunk_key("m@00000000@0@00").hex() == "fba8318e9b7e75146d248a403fd92c57"
    assert chunk_key("m@00000000@0@00", "ns").hex() == "48379531041f80936fc469f3f5034f2c"
    assert chunk_key(b"m@00000000@0@00") == chunk_key("m@00000000@0@00")
    assert chunk_key("\udcff")                  # a file name's stray byte, say
    assert chunk_key("b", "a") != chunk_key("a\0b") != chunk_key("a", "b")


def test_namespaces_are_kept_apart(tmp_path):
    with KvioConnector(tmp_path, namespace="v1") as one, \
            KvioConnector(tmp_path, namespace="v2") as two:
        put(one, names(1), Buffers(1).fill().views)
        put(two, names(1), Buffers(1).fill(tag=1).views)
        here = Buffers(1)
        assert get(one, names(1), here.views)[0] and here.holds(0)
        assert get(two, names(1), here.views)[0] and here.holds(0, tag=1)


# ---- events ----

def test_the_eventfd_is_readable_exactly_while_there_is_something(connector):
    epoll = select.epoll()
    epoll.register(connector.event_fd(), select.EPOLLIN | select.EPOLLET)
    assert connector.drain_completions() == [] and not epoll.poll(0)
    numbers = {connector.submit_batch_exists(names(1)) for _ in range(3)}
    assert epoll.poll(5)
    assert {done[0] for done in connector.drain_completions()} == numbers
    level = select.epoll()
    level.register(connector.event_fd(), select.EPOLLIN)
    assert not level.poll(0) and connector.drain_completions() == []
    number = connector.submit_batch_set(names(1), Buffers(1).fill().views)
    assert epoll.poll(5) and level.poll(5) and level.poll(0)
    assert [done[0] for done in connector.drain_completions()] == [number]
    assert not level.poll(0)
    epoll.close()
    level.close()


def test_asyncio_drives_it(connector):
    async def main():
        loop, waiting = asyncio.get_running_loop(), {}

        def ready():
            for number, *rest in connector.drain_completions():
                waiting.pop(number).set_result(rest)

        def ask(number):
            waiting[number] = loop.create_future()
            return waiting[number]

        loop.add_reader(connector.event_fd(), ready)
        there, here = Buffers(6).fill(), Buffers(6)
        await ask(connector.submit_batch_set(names(6), there.views))
        found, loaded = await asyncio.gather(
            ask(connector.submit_batch_exists(names(7))),
            ask(connector.submit_batch_get(names(6), here.views)))
        loop.remove_reader(connector.event_fd())
        assert found[2] == [True] * 6 + [False] and loaded[0]
        assert all(here.holds(i) for i in range(6))

    asyncio.run(asyncio.wait_for(main(), 20))


def test_nothing_polls(connector):
    """Nobody's CPU is used while nothing happens."""
    put(connector, names(1), Buffers(1, ODD).fill().views)
    start = time.clock_gettime(time.pthread_getcpuclockid(connector._mover._thread.ident))
    time.sleep(0.5)
    used = time.clock_gettime(time.pthread_getcpuclockid(connector._mover._thread.ident)) - start
    assert used < 0.01


def test_submitting_does_not_wait(tmp_path):
    """The adapter submits under the lock that it needs to drain."""
    with KvioConnector(tmp_path, staging_blocks=2, backend="threads", chunk_bytes=ODD) as one:
        rings = one._mover._shelves[ODD].rings
        for ring in rings.values():
            ring._ring._pause(True)
        there, here = Buffers(40, ODD).fill(), Buffers(40, ODD)
        stored = one.submit_batch_set(names(40), there.views)
        loaded = one.submit_batch_get(names(40, "zz"), here.views)
        found = one.submit_batch_exists(names(40))
        assert result(one, found)[2] == [False] * 40       # overtakes: it needs no device
        for ring in rings.values():
            ring._ring._pause(False)
        assert result(one, loaded)[2] == [False] * 40
        assert result(one, stored) == (True, "", [True] * 40)


def test_many_threads(connector):
    """Each its own keys, all through one eventfd."""
    outcomes, problems, ready = {}, [], threading.Condition()

    def drain():
        poll = select.poll()
        poll.register(connector.event_fd(), select.POLLIN)
        while not stop.is_set():
            if poll.poll(50):
                with ready:
                    outcomes.update((number, rest) for number, *rest
                                    in connector.drain_completions())
                    ready.notify_all()

    def ask(number):
        with ready:
            assert ready.wait_for(lambda: number in outcomes, 30)
            return outcomes.pop(number)

    def work(me):
        try:
            for turn in range(6):
                keys, nbytes = names(7, f"{me}-{turn}-"), (SIZE, ODD)[turn % 2]
                there, here = Buffers(7, nbytes).fill(me), Buffers(7, nbytes)
                assert ask(connector.submit_batch_set(keys, there.views))[0]
                assert all(ask(connector.submit_batch_exists(keys))[2])
                assert ask(connector.submit_batch_get(keys, here.views))[0]
                assert all(here.holds(i, me) for i in range(7))
        except BaseException as failed:
            problems.append(failed)

    stop, threads = threading.Event(), [threading.Thread(target=work, args=(i,)) for i in range(8)]
    drainer = threading.Thread(target=drain)
    for thread in [drainer, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    drainer.join()
    assert not problems and not outcomes


# ---- set-up ----

@pytest.mark.parametrize("wrong, error", [
    ({"path": 3}, InvalidArgument), ({"chunk_bytes": 0}, InvalidArgument),
    ({"chunk_bytes": "1"}, InvalidArgument), ({"chunk_bytes": []}, InvalidArgument),
    ({"chunk_bytes": True}, InvalidArgument), ({"staging_blocks": 0}, InvalidArgument),
    ({"namespace": b"x"}, InvalidArgument), ({"namespace": "a\0b"}, InvalidArgument),
    ({"chunk_bytes": 4096, "durability": "often"}, InvalidArgument),
    ({"durability": "often"}, InvalidArgument), ({"capacity_bytes": 0.5}, InvalidArgument),
    ({"path": "/proc/nowhere"}, StoreError), ({"path": __file__}, StoreError)])
def test_wrong_parameters_are_refused_at_once(tmp_path, wrong, error):
    threads = threading.active_count()
    with pytest.raises(error):
        KvioConnector(**{"path": tmp_path, **wrong})
    gc.collect()
    assert threading.active_count() == threads


def test_lengths_must_agree(connector):
    with pytest.raises(InvalidArgument, match="2 keys, but 1 buffers"):
        connector.submit_batch_get(names(2), Buffers(1).views)


def test_json_writes_large_numbers_as_floats(tmp_path):
    with KvioConnector(str(tmp_path), capacity_bytes=1e12, chunk_bytes=[8192.0]) as one:
        assert put(one, names(1), Buffers(1).fill().views)[0]


def test_a_store_of_something_else_is_named(tmp_path):
    os.mkdir(tmp_path / f"chunks-{SIZE}")
    BlockStore.open(tmp_path / f"chunks-{SIZE}", BlockLayout(2, 4, 1024)).close()
    with pytest.raises(LayoutMismatch):
        KvioConnector(tmp_path, chunk_bytes=SIZE)
    with KvioConnector(tmp_path) as one:
        ok, error, flags = put(one, names(1), Buffers(1).fill().views)
        assert flags == [False] and "holds blocks of" in error
