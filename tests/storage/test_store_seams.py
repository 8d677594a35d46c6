"""Where the parts of the store meet each other and what others leave in its directory."""
import errno
import os
import signal
import threading
import time
import uuid
from types import SimpleNamespace

import pytest

from blocks import LAYOUT, Blocks, chain, open_store, put, readable, segments
from kvio.errors import Closed, StoreError, TransferError
from shared import until


@pytest.fixture
def alarm():
    """What would block for ever fails instead."""
    def late(*_):
        raise AssertionError("it blocks")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("prefix, suffix", [("segment-", "-0"), ("touch-", "")])
def test_what_is_no_file_is_ignored(tmp_path, alarm, make, prefix, suffix):
    with open_store(tmp_path, poll_s=0) as store:
        put(store, chain(2))
        make(tmp_path / f"{prefix}{uuid.uuid4().hex}{suffix}")
        store.refresh()
        with open_store(tmp_path, poll_s=0) as other:
            assert readable(other, chain(2)).all()
            if suffix:
                assert list(other.stats()["segments_ignored"].values()) == ["not a regular file"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_description_that_is_no_file_is_refused(tmp_path, alarm, make):
    make(tmp_path / "kvio.json")
    with pytest.raises(StoreError, match="not a regular file"):
        open_store(tmp_path)


def take_for_dead(store, writer):
    """`store` takes another store's writer for dead, as if that had been stopped for long, and
    deletes its segments."""
    watch = store._watch
    found = watch._writers[writer._writer.uuid]
    while found.segments:                       # its heartbeat may come in between
        found.dead = True
        watch._groups.clear()
        watch._note_gone()
        for number, _ in list(found.segments.values()):
            watch.reclaim(number)


def test_a_writer_that_returns_after_it_was_reclaimed_has_no_zeros_for_blocks(tmp_path, backend):
    """Neither itself nor who still has its file open, whatever it writes until it notices."""
    never = {"verify": "never", "durability": "durable", "poll_s": 0}
    with open_store(tmp_path, backend, **never) as zombie:
        put(zombie, chain(40)[:8])
        with open_store(tmp_path, backend, **never) as reader, \
                open_store(tmp_path, **never) as reclaimer:
            take_for_dead(reclaimer, zombie)
            put(zombie, chain(40)[8:])
            for store in (zombie, reader):
                assert readable(store, chain(40)[:8]).all()         # compares the bytes


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_waits_for_no_lock_and_no_transfer_of_its_parent(tmp_path):
    """Threads that hold them, and C threads that complete them, do not live in the child."""
    keys = chain(4)
    source = Blocks(4, keys=keys)
    with open_store(tmp_path) as store:
        ring = store.open_ring()
        ring._ring._pause(True)
        ring.write(keys, source.pool, source.ids)
        held, release = threading.Event(), threading.Event()

        def hold():
            with store._lock:
                held.set()
                release.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(10)
                refused = 0
                for use in (lambda: store.match(keys), lambda: store.contains(keys),
                            lambda: store.pin(keys), lambda: store.unpin(keys), store.stats,
                            store.open_ring, store.sync, lambda: store.forget(keys),
                            lambda: store.read(keys, source.pool, source.ids), store.refresh,
                            lambda: ring.write(keys, source.pool, source.ids)):
                    try:
                        use()
                    except Closed as wrong:
                        refused += "fork" in str(wrong)
                ring.close(drain=True)
                store.close(drain=True)
                code = 0 if refused == 11 else 2
            finally:
                os._exit(code)
        release.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        ring._ring._pause(False)
        ring.close(drain=True)
        assert readable(store, keys).all()


def test_a_write_that_was_interrupted_after_it_began_is_stored(tmp_path, backend):
    """By Ctrl-C, say, before anybody has noted it."""
    keys = chain(4)
    with open_store(tmp_path, backend) as store:
        source, ring = Blocks(4, keys=keys), store.open_ring()

        def interrupted(_):
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ring, "_transfers", SimpleNamespace(add=interrupted))
            with pytest.raises(KeyboardInterrupt):
                ring.write(keys, source.pool, source.ids)
        until(lambda: store.match(keys) == 4)
        assert store._writer.slots_used == 4
    with open_store(tmp_path, backend) as store:
        assert readable(store, keys).all()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, Closed("the pool is closed")])
def test_slots_of_a_write_that_never_began_are_free_again(tmp_path, monkeypatch, error):
    keys = chain(4)
    with open_store(tmp_path) as store:
        put(store, keys[:1])
        source = Blocks(3, keys=keys[1:])

        def fails(_):
            raise error

        monkeypatch.setattr(source.pool, "pin", fails)
        with pytest.raises(type(error) if isinstance(error, Exception) else error):
            store.write(keys[1:], source.pool, source.ids)
        assert store._writer.slots_used == 1
        put(store, keys)
        assert readable(store, keys).all()


def test_a_pool_that_is_closed_is_closed(tmp_path):
    with open_store(tmp_path) as store:
        source = Blocks(1, keys=chain(1))
        source.pool.close()
        for use in (store.read, store.write):
            with pytest.raises(Closed, match="pool is closed"):
                use(chain(1), source.pool, source.ids)


def test_a_durable_write_is_not_satisfied_by_a_visible_copy(tmp_path, backend):
    keys = chain(3)
    with open_store(tmp_path, backend) as visible:
        put(visible, keys)
        with open_store(tmp_path, backend, durability="durable") as durable:
            put(durable, keys)
            assert durable.stats()["stored_blocks"] == 3
            put(durable, keys)
            assert durable.stats()["already_stored_blocks"] == 3
            assert readable(durable, keys).all()
        put(visible, keys)
        assert visible.stats()["already_stored_blocks"] == 3


def test_a_pin_counts_once_though_the_block_is_stored_a_second_time(tmp_path):
    """Another writer was faster with the same block, which was pinned before ours was there."""
    key = chain(1)
    with open_store(tmp_path, poll_s=0, capacity_bytes=4 * LAYOUT.stride) as store, \
            open_store(tmp_path, poll_s=0) as other:
        ring = store.open_ring()
        ring._ring._pause(True)
        source = Blocks(1, keys=key)
        transfer = ring.write(key, source.pool, source.ids)
        put(other, key)
        until(lambda: store.refresh() or store.match(key))
        assert store.pin(key) == 1
        ring._ring._pause(False)
        transfer.wait()
        assert store.stats()["pinned_blocks"] == 1
        store.unpin(key)
        assert store.stats()["pinned_blocks"] == 0


def test_the_number_of_a_segment_is_never_used_twice(tmp_path, monkeypatch):
    """Others may have the first one open by its name, and would look for no second one."""
    def full(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open_store(tmp_path, durability="durable") as store:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(TransferError):
            put(store, chain(1))
        monkeypatch.undo()
        put(store, chain(1))
        assert [os.path.basename(name)[-2:] for name in segments(tmp_path)] == ["-1"]


def test_a_touch_file_that_was_deleted_is_made_anew(tmp_path):
    with open_store(tmp_path, poll_s=0) as writer, open_store(tmp_path, poll_s=0) as reader:
        put(writer, chain(2))
        until(lambda: reader.refresh() or reader.match(chain(2)) == 2)
        for _ in range(2):
            assert readable(reader, chain(2)).all()
            reader._watch._touches.publish(time.monotonic())
            [name] = [name for name in os.listdir(tmp_path) if name.startswith("touch-")]
            os.unlink(tmp_path / name)


def test_a_ring_that_is_about_to_close_may_still_be_at_work(tmp_path):
    with open_store(tmp_path) as store:
        ring = store.open_ring()
        assert ring.settle()
        ring._ring.close()                      # what `close` does first
        assert not ring.settle()


@pytest.mark.parametrize("create", [True, False])
def test_a_path_that_is_a_file_is_no_directory(tmp_path, create):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="give a directory") as refused:
        open_store(tmp_path / "file", create=create)
    assert refused.value.errno == errno.ENOTDIR
