"""Where the parts of the store meet each other and what others leave in its directory."""
import os
import signal
import threading
import uuid

import pytest

from blocks import Blocks, chain, open_store, put, readable
from kvio.errors import Closed, StoreError


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
