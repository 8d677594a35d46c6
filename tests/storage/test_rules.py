"""Rules of the store that no other file tests by name; docs/rules.md lists where each one is."""
import errno
import os
import re
import threading
import time
import uuid
import warnings
from pathlib import Path

import numpy as np
import pytest

import standin as standins
from blocks import LAYOUT, Blocks, chain, get, open_store, put, readable, segments
from kvio._ext import ring as _ring
from kvio.errors import BackendUnavailable, TransferError
from kvio.layout import BlockLayout
from kvio.memory import BlockPool
from kvio.storage import format as fmt
from kvio.storage.format import PAGE
from shared import until
from test_store_faults import READ, WRITE, end_faults, fault, on_disk, slot_range

SINGLE_ISSUER, DEFER_TASKRUN = 1 << 12, 1 << 13
MIB = 1 << 20


def page1(store, number=0):
    """Page 1 of a segment as it is on disk (it may be in the middle of a rewrite: again)."""
    while True:
        with open(segments(store.path)[number], "rb") as file:
            data = file.read(2 * PAGE)[PAGE:]
        if fmt.is_sealed(data):
            return np.frombuffer(data, fmt.PAGE1)[0]


def marks(page):
    """Header pages that page 1 names."""
    bits = [int.from_bytes(bytes(page[name]), "little") for name in ("changed", "changed_before")]
    return {i for i in range(8 * fmt.BITMAP_BYTES) if (bits[0] | bits[1]) >> i & 1}


def generations(store):
    """{slot: generation} of the first segment, from the file."""
    with open(segments(store.path)[0], "rb") as file:
        data = file.read(store.description.geometry.payload_offset)[2 * PAGE:]
    rows = np.frombuffer(data, fmt.HEADER)
    return {int(row["slot"]): int(row["generation"]) for row in rows if row["magic"] == b"KVBH"}


def test_a_writer_is_a_random_uuid_that_is_never_adopted(tmp_path):
    writers, before = set(), {}
    for seed in range(4):
        with open_store(tmp_path) as store:
            put(store, chain(3, seed))
        for name, data in before.items():           # nobody has continued an older file
            with open(name, "rb") as file:
                assert file.read() == data
        for name in set(segments(tmp_path)) - set(before):
            with open(name, "rb") as file:
                before[name] = file.read()
            writers.add(os.path.basename(name).split("-")[1])
    assert len(writers) == len(before) == 4
    assert all(uuid.UUID(writer).version == 4 for writer in writers)


def test_a_header_page_is_named_only_after_it_was_written(tmp_path, backend):
    with open_store(tmp_path, backend) as store:
        put(store, chain(1, 9))
        fault(store, WRITE, -errno.EIO, count=1000, from_offset=3 * PAGE,
              to_offset=4 * PAGE)
        source = Blocks(63, keys=chain(63))
        transfer = store.write(chain(63), source.pool, source.ids)      # pages 0 and 1
        with pytest.raises(TransferError):
            transfer.wait()
        beat = int(page1(store)["heartbeat"])
        until(lambda: int(page1(store)["heartbeat"]) >= beat + 2)       # two rewrites later
        assert marks(page1(store)) == {0}
        end_faults(store)
        put(store, chain(63))
        until(lambda: marks(page1(store)) == {0, 1})


def test_an_epoch_lasts_a_second_at_least(tmp_path):
    with open_store(tmp_path) as store:
        put(store, chain(1, 1000))
        first, began, seed = int(page1(store)["epoch"]), time.monotonic(), 0
        while time.monotonic() - began < 2.5:
            put(store, chain(1, seed := seed + 1))
            epoch = int(page1(store)["epoch"])
            assert epoch - first <= 1 + int(time.monotonic() - began)
            time.sleep(0.02)
        assert epoch > first


def test_an_idle_writer_beats_once_a_second(tmp_path):
    with open_store(tmp_path) as store:
        put(store, chain(1))
        time.sleep(0.1)
        before, began = int(page1(store)["heartbeat"]), time.monotonic()
        took = until(lambda: int(page1(store)["heartbeat"]) != before)
        print(f"{took:.2f} s until the next heartbeat")
        until(lambda: int(page1(store)["heartbeat"]) >= before + 3)
        assert time.monotonic() - began > 1.9          # two whole seconds lie between three


def test_generations_rise_in_a_segment(tmp_path, backend):
    seen = 0
    with open_store(tmp_path, backend) as store:
        for seed in range(5):                       # the same slots again and again
            put(store, chain(40, seed))
            now = generations(store)
            assert len(now) == 40 and len(set(now.values())) == 40
            assert min(now.values()) > seen
            seen = max(now.values())
            store.forget(chain(40, seed))


def test_only_a_slot_that_was_valid_is_invalidated(tmp_path, backend):
    with open_store(tmp_path, backend) as store:
        put(store, chain(32, 1))
        assert store._default.stats()["header_writes"] == 1             # the headers
        store.forget(chain(32, 1))
        assert on_disk(store) == list(range(32))                        # as they were
        put(store, chain(32, 2))
        assert store._default.stats()["header_writes"] == 3             # invalidate, headers


def test_writes_of_one_header_page_never_overtake_each_other(tmp_path, backend, request):
    """32 blocks a page, each in a transfer of its own: were two writes of the page in flight,
    one of them could land late and take the other's headers back."""
    if backend == "usrbio":
        standin = request.getfixturevalue("standin")
        standin.fault(standins.SHUFFLE, 1)
        standin.fault(standins.DELAY_US, 200)
    keys = np.concatenate([chain(1, seed) for seed in range(64)])
    with open_store(tmp_path, backend, queue_depth=32) as store:
        source = Blocks(64, keys=keys)
        flying = [store.write(keys[i:i + 1], source.pool, source.ids[i:i + 1]) for i in range(64)]
        for transfer in flying:
            transfer.wait()
        assert on_disk(store) == list(range(64))
        assert 2 <= store._default.stats()["header_writes"] <= 64       # they share writes


def test_a_write_that_was_told_complete_is_in_the_files(tmp_path, backend):
    """Visible: a second look at the directory, without the first store, finds all of it."""
    with open_store(tmp_path, backend) as store:
        for seed in range(10):
            put(store, chain(9, seed))
            with open_store(tmp_path, poll_s=0) as other:
                assert other.match(chain(9, seed)) == 9 and readable(other, chain(9, seed)).all()


def test_a_usable_prefix_ends_at_the_first_failure_whatever_it_is(tmp_path, backend):
    keys = chain(9)
    with open_store(tmp_path, backend) as store:
        put(store, keys[[0, 1, 2, 3, 4, 5, 7, 8]])                      # 6 is a miss
        fault(store, READ, -errno.EIO, count=9, **slot_range(store, 3, 3))
        usable, status, _ = get(store, keys)
        assert usable == 3
        assert status.tolist() == [0, 0, 0, -errno.EIO, 0, 0, -errno.ENOENT, 0, 0]


def test_rings_are_single_issuer_where_the_kernel_has_it(tmp_path, backend):
    if backend != "uring":
        pytest.skip("a flag of io_uring")
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    with open_store(tmp_path, backend) as store:
        put(store, chain(3))
        flags = store._default.stats()["setup_flags"]
    if release >= (6, 1):
        assert flags & SINGLE_ISSUER and flags & DEFER_TASKRUN


def test_threads_serve_where_io_uring_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_ring, "probe", lambda name: errno.EPERM)
    with pytest.warns(RuntimeWarning, match="falls back to threads.*EPERM.*io_uring_disabled"):
        store = open_store(tmp_path, "auto")
    with store:
        assert store.backend == "threads" and "EPERM" in store.stats()["backend_reason"]
        put(store, chain(3))
        assert readable(store, chain(3)).all()
    with pytest.raises(BackendUnavailable, match="backend='threads'"):
        open_store(tmp_path, "uring")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_store(tmp_path, "threads").close()                         # asked for: no warning


def test_memory_beyond_a_gigabyte_is_registered_in_slices(tmp_path, backend):
    if backend != "uring":
        pytest.skip("io_uring's limit for one buffer")
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 4 << 30:
        pytest.skip("too little free memory")
    layout = BlockLayout(1, 1, 5 * MIB)             # 1 GiB is no multiple of it
    with open_store(tmp_path, backend, layout, segment_bytes=64 * MIB) as store:
        pool = BlockPool(layout, 220, hugepages=None)                   # 1.07 GiB
        ids, keys = pool.alloc(220)[[203, 204, 205]], chain(3, layout=layout)
        for i, block_id in enumerate(ids):          # 204 lies across the first GiB
            pool.full(block_id)[:] = i + 1
        store.write(keys, pool, ids).wait()
        for block_id in ids:
            pool.full(block_id)[:] = 0
        assert store.read(keys, pool, ids).wait() == 3
        assert [int(pool.full(i).min()) for i in ids] == [1, 2, 3]
        stats = store._default.stats()
        assert stats["register_errno"] == 0 and stats["fixed_ios"] >= 6
        assert stats["registered_bytes"] == pool.region.nbytes


def test_touches_are_told_at_most_once_a_second(tmp_path):
    with open_store(tmp_path) as writer, open_store(tmp_path) as reader:
        put(writer, chain(5))
        until(lambda: reader.match(chain(5)) == 5)
        began = time.monotonic()
        while time.monotonic() - began < 2.2:
            assert readable(reader, chain(5)).all()
            time.sleep(0.005)
        written = reader.stats()["sharing"]["touches_written"]
        assert 1 <= written <= 2 + int(time.monotonic() - began)


def test_the_reading_queue_costs_no_lock(tmp_path):
    """It is asked for each request that is scheduled, whatever the store is doing meanwhile."""
    with open_store(tmp_path) as store:
        ring, took = store.open_ring(), []

        def ask():
            began = time.perf_counter()
            for _ in range(200):
                assert ring.read_queue == (0, 0)
            took.append((time.perf_counter() - began) / 200)

        with store._lock:
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join(30)
            assert took, "it waits for the store's lock"
        print(f"{1e6 * took[0]:.2f} us a look")


def test_a_header_page_that_is_damaged_loses_no_other(tmp_path, backend):
    """All headers of a page are rewritten together: from memory, not from what the disk says."""
    with open_store(tmp_path, backend) as store:
        put(store, chain(20))
        with open(segments(tmp_path)[0], "r+b") as file:
            file.seek(2 * PAGE)
            file.write(os.urandom(20 * 128))
        assert on_disk(store) == []
        put(store, chain(1, 7))                     # the same header page
        assert on_disk(store) == list(range(21))
        assert readable(store, chain(20)).all()


def test_the_document_of_rules_names_tests_that_exist():
    here = Path(__file__).resolve().parent
    document = (here.parent.parent / "docs" / "rules.md").read_text()
    named = re.findall(r"`(test_\w+)`", document.partition("## The transfer engine")[0])
    there = set(re.findall(r"^def (test_\w+)", "".join(
        path.read_text() for path in sorted(here.parent.rglob("test_*.py"))), re.M))
    assert len(named) > 90 and set(named) <= there, sorted(set(named) - there)
    mine = set(re.findall(r"^def (test_\w+)", Path(__file__).read_text(), re.M))
    assert mine - set(named) <= {"test_the_document_of_rules_names_tests_that_exist",
                                 "test_a_header_page_that_is_damaged_loses_no_other"}
