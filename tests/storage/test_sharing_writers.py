"""Writers that close, die, are stopped and come back, fork, and hear what others read."""
import os
import signal
import threading
import time
import warnings

import numpy as np
import pytest

from blocks import chain, get, open_store, put, readable, segments
from kvio.errors import Closed, InvalidArgument
from kvio.storage import format as fmt
from kvio.storage.format import PAGE
from shared import Child, Foreign, until

DEAD_S = 2.5                    # a heartbeat a second


def sharing(store):
    return store.stats()["sharing"]


def states(store):
    figures = sharing(store)
    return tuple(figures[f"writers_{state}"] for state in ("live", "dead", "closed"))


def serve(path, backend="threads", **options):
    child = Child("shared", "serve", path, backend, list(options.items()))
    assert child.hear()[0] == "open"
    return child


def page1(path):
    with open(path, "rb") as file:
        file.seek(PAGE)
        return np.frombuffer(file.read(PAGE), fmt.PAGE1)[0]


# ---- closed ----

def test_a_clean_close_is_marked_in_every_segment_and_seen_at_once(tmp_path, backend):
    with open_store(tmp_path, segment_bytes=100_000) as store:
        with serve(tmp_path, backend) as child:
            child.ask("write", 1, 20)               # 7 slots a segment: 3 of them
            until(lambda: store.match(chain(20, 1)) == 20)
            assert states(store) == (1, 0, 0) and store._watch.dead_segments() == []
        assert len(segments(tmp_path)) == 3
        for path in segments(tmp_path):
            assert page1(path)["heartbeat"] == fmt.HEARTBEAT_CLOSED
        until(lambda: states(store) == (0, 0, 1), 2)
        assert readable(store, chain(20, 1)).all()
        dead = store._watch.dead_segments()
        assert sorted(path for _, path, _ in dead) == segments(tmp_path)
        assert all(0 < nbytes <= os.stat(path).st_size for _, path, nbytes in dead)
        reads = sharing(store)["page1_reads"]
        time.sleep(0.2)
        assert sharing(store)["page1_reads"] == reads       # nobody looks at it any more


def test_closed_writers_are_known_as_such_when_a_store_is_opened(tmp_path):
    with open_store(tmp_path) as store:
        put(store, chain(3))
    with open_store(tmp_path) as store:
        assert states(store) == (0, 0, 1) and store.match(chain(3)) == 3


def test_the_segment_made_last_is_empty_and_goes_at_close(tmp_path):
    """The closed mark of the others stays."""
    with open_store(tmp_path, segment_bytes=100_000) as store:
        put(store, chain(10))
        store.forget(chain(10)[7:])
    [path] = segments(tmp_path)
    assert page1(path)["heartbeat"] == fmt.HEARTBEAT_CLOSED


# ---- dead ----

def test_a_writer_that_dies_is_seen_as_dead_after_t(tmp_path, backend):
    with open_store(tmp_path, dead_after_s=DEAD_S) as store:
        child = serve(tmp_path, backend)
        child.ask("write", 1, 5)
        until(lambda: store.match(chain(5, 1)) == 5)
        child.kill()
        took = until(lambda: states(store) == (0, 1, 0))
        assert DEAD_S - 1.1 < took < DEAD_S + 5
        assert readable(store, chain(5, 1)).all()           # its blocks stay
        [(number, path, nbytes)] = store._watch.dead_segments()
        assert path == segments(tmp_path)[0] and nbytes > 0
        assert store._watch.reclaim(number)
        assert segments(tmp_path) == [] and store.match(chain(5, 1)) == 0
        assert not store._watch.reclaim(number)
        figures = sharing(store)
        assert (figures["writers_died"], figures["reclaimed_segments"]) == (1, 1)
        assert states(store) == (0, 0, 0)


def test_a_live_writer_is_not_reclaimed(tmp_path):
    with open_store(tmp_path, poll_s=0, dead_after_s=0.05) as store:
        foreign = Foreign(tmp_path, store.description)
        foreign.put(0, chain(1)[0])
        foreign.publish()
        store.refresh()
        number = foreign_number(store)
        assert not store._watch.reclaim(number)             # seen just now
        time.sleep(0.1)
        store.refresh()
        assert states(store) == (0, 1, 0)
        foreign.publish()                                   # it comes back at the last moment
        assert not store._watch.reclaim(number)
        assert os.path.exists(foreign.path) and states(store) == (1, 0, 0)
        time.sleep(0.1)
        store.refresh()
        assert store._watch.reclaim(number) and not os.path.exists(foreign.path)


def foreign_number(store):
    [(writer, n)] = store._watch._names.values()
    return writer.segments[n][0]


def test_an_observer_that_was_stopped_takes_nobody_for_dead(tmp_path):
    """It has not looked, so it has not seen that nothing changed."""
    with open_store(tmp_path, dead_after_s=DEAD_S) as writer:
        put(writer, chain(2))
        with serve(tmp_path, dead_after_s=DEAD_S) as child:
            until(lambda: child.ask("match", 0, 2) == ["2"])
            child.signal(signal.SIGSTOP)
            time.sleep(DEAD_S + 1)
            child.signal(signal.SIGCONT)
            time.sleep(0.3)
            assert child.ask("sharing", "writers_died") == ["0"]


def test_an_observer_that_was_stopped_while_it_looked_takes_nobody_for_dead(tmp_path, monkeypatch):
    """Between reading page 1 and the judgement; the writer has beaten all the while."""
    with open_store(tmp_path) as writer, \
            open_store(tmp_path, dead_after_s=DEAD_S, poll_s=0) as store:
        put(writer, chain(2))
        until(lambda: store.refresh() is not None and store.match(chain(2)) == 2)
        poll = store._watch._poll
        monkeypatch.setattr(store._watch, "_poll", lambda which: (
            poll(which), which == "live" and time.sleep(DEAD_S + 0.5)))
        store.refresh()
        monkeypatch.undo()
        store.refresh()
        assert sharing(store)["writers_died"] == 0 and states(store) == (1, 0, 0)


def test_a_stopped_writer_that_nobody_reclaimed_goes_on(tmp_path):
    with open_store(tmp_path, dead_after_s=DEAD_S) as store:
        with serve(tmp_path) as child:
            child.ask("write", 1, 5)
            until(lambda: store.match(chain(5, 1)) == 5)
            child.signal(signal.SIGSTOP)
            until(lambda: states(store) == (0, 1, 0))
            child.signal(signal.SIGCONT)
            until(lambda: states(store) == (1, 0, 0))
            assert sharing(store)["writers_returned"] == 1
            child.ask("write", 2, 5)
            until(lambda: store.match(chain(5, 2)) == 5)
            assert child.ask("sharing", "zombie_segments") == ["0"]


def test_a_zombie_touches_only_its_own_file_and_goes_on_in_a_new_one(tmp_path, backend):
    with open_store(tmp_path, dead_after_s=DEAD_S) as store:
        with serve(tmp_path, backend) as child:
            child.ask("write", 1, 5)
            until(lambda: store.match(chain(5, 1)) == 5)
            child.signal(signal.SIGSTOP)
            until(lambda: states(store) == (0, 1, 0))
            [(number, path, _)] = store._watch.dead_segments()
            assert store._watch.reclaim(number)
            put(store, chain(3, 7))
            before = [open(name, "rb").read() for name in segments(tmp_path)]
            child.signal(signal.SIGCONT)
            until(lambda: child.ask("sharing", "zombie_segments") == ["1"])
            assert child.ask("match", 1, 5) == ["0"]        # nobody else would find them
            assert not os.path.exists(path)
            after = [open(name, "rb").read() for name in segments(tmp_path)]
            assert [a[2 * PAGE:] == b[2 * PAGE:] for a, b in zip(after, before)] == [True]
            child.ask("write", 1, 5)
            assert child.ask("read", 1, 5) == ["5"]
            until(lambda: store.match(chain(5, 1)) == 5)
            assert readable(store, chain(5, 1)).all() and states(store) == (1, 0, 0)


def test_a_zombie_warns_and_frees_the_file(tmp_path, backend):
    with open_store(tmp_path, backend, poll_s=0, capacity_bytes=12 * 12_288) as store:
        put(store, chain(10))
        [path] = segments(tmp_path)
        os.unlink(path)
        with pytest.warns(RuntimeWarning, match="was deleted while"):
            store.refresh()
        assert store.match(chain(10)) == 0 and not readable(store, chain(10)).any()
        until(lambda: store.refresh() == 0 and not any(
            "segment-" in os.readlink(f"/proc/self/fd/{fd}") for fd in
            os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")))
        put(store, chain(12))                               # its capacity is free again
        assert readable(store, chain(12)).all()
        store.sync()
        assert [os.path.basename(name)[-2:] for name in segments(tmp_path)] == ["-1"]


# ---- fork ----

@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_neither_looks_nor_writes(tmp_path):
    with open_store(tmp_path, poll_s=0.001) as store:
        put(store, chain(2))
        until(lambda: sharing(store)["polls"] > 3)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                refused = 0
                for use in (store.refresh, store.stats, lambda: len(store)):
                    try:
                        use()
                    except Closed:
                        refused += 1
                threads = [thread.name for thread in threading.enumerate()]
                time.sleep(0.05)
                store.close()
                code = 0 if refused == 3 and "kvio-watch" not in threads else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        beat = page1(segments(tmp_path)[0])["heartbeat"]
        assert beat != fmt.HEARTBEAT_CLOSED                           # the child has not closed it
        until(lambda: page1(segments(tmp_path)[0])["heartbeat"] != beat)
        assert readable(store, chain(2)).all()


# ---- touches ----

def test_what_others_read_is_told_to_the_owner(tmp_path):
    with open_store(tmp_path, poll_s=0) as owner, open_store(tmp_path, poll_s=0) as reader:
        put(owner, chain(6))
        put(reader, chain(2, 5))
        until(lambda: reader.refresh() is not None and reader.match(chain(6)) == 6)
        get(reader, chain(2, 5))                            # its own: nobody's business
        publish(reader)
        assert not [name for name in os.listdir(tmp_path) if name.startswith("touch-")]
        get(reader, chain(6)[:4])
        publish(reader)
        [name] = [name for name in os.listdir(tmp_path) if name.startswith("touch-")]
        assert fmt.parse_touch_name(name) == reader._writer.uuid
        owner.refresh()
        assert sharing(owner)["touched_blocks"] == 4
        assert owner._watch.merge_touches() == 0            # once is enough
        get(reader, chain(6)[4:])
        publish(reader)
        assert owner._watch.merge_touches() == 6            # those of the last seconds
    assert not [name for name in os.listdir(tmp_path) if name.startswith("touch-")]


def publish(store):
    store._watch._touches.publish(time.monotonic())


def test_touches_keep_a_block_that_others_use_from_being_evicted(tmp_path):
    with open_store(tmp_path, poll_s=0) as owner, open_store(tmp_path, poll_s=0) as reader:
        for seed in range(4):
            put(owner, chain(5, seed))
        until(lambda: reader.refresh() is not None and reader.match(chain(5, 3)) == 5)
        time.sleep(1.1)                                     # the index counts whole seconds
        get(reader, chain(5, 0))                            # the oldest, but for this
        publish(reader)
        owner._watch._touches.names(os.listdir(tmp_path))
        assert owner._watch.merge_touches() == 5
        owner._index.evict(15)
        assert [owner.match(chain(5, seed)) for seed in range(4)] == [5, 0, 0, 0]


def test_touches_that_are_damaged_foreign_or_stale_are_ignored(tmp_path):
    with open_store(tmp_path, poll_s=0) as owner:
        put(owner, chain(3))
        keys = b"".join(fmt.key_list(chain(3)))
        store, reader = owner.description.store, os.urandom(16)
        path = tmp_path / fmt.touch_name(reader)
        good = fmt.encode_touches(store, reader, 7, keys)
        bad_keys = bytearray(good)
        bad_keys[PAGE + 5] ^= 1
        for data in (b"", good[:100], bytes(bad_keys), good[:PAGE + 20],
                     fmt.encode_touches(os.urandom(16), reader, 8, keys),
                     fmt.encode_touches(store, os.urandom(16), 8, keys)):
            path.write_bytes(data)
            owner.refresh()
            owner._watch._touches.names(os.listdir(tmp_path))
            assert owner._watch.merge_touches() == 0
        path.write_bytes(good)
        assert owner._watch.merge_touches() == 3
    with open_store(tmp_path, poll_s=0) as later:           # told to somebody else, long ago
        put(later, chain(3, 9))
        path.write_bytes(fmt.encode_touches(store, reader, 9, keys))
        assert later._watch.merge_touches() == 0            # none of them is its own


def test_the_newest_touches_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(fmt, "MAX_TOUCHES", 4)
    with open_store(tmp_path, poll_s=0) as store:
        touches = store._watch._touches
        keys = chain(10)["key"]
        now = time.monotonic()
        touches.note(bytearray(keys[:3].tobytes()), now - 10)       # too old
        touches.note(bytearray(keys[3:6].tobytes()), now - 1)
        touches.note(bytearray(keys[6:9].tobytes()), now)
        touches.publish(now)
        data = (tmp_path / fmt.touch_name(store._writer.uuid)).read_bytes()
        assert len(data) == 2 * PAGE
        expected = keys[[6, 7, 8, 3]].tobytes()
        assert data[PAGE:PAGE + 64] == expected and fmt.check_touches(
            data, store.description.store, fmt.touch_name(store._writer.uuid))[1] == 4


# ---- options and figures ----

@pytest.mark.parametrize("options", [{"dead_after_s": 0}, {"dead_after_s": "30"}, {"poll_s": -1},
                                     {"poll_s": float("nan")}, {"dead_after_s": float("inf")},
                                     {"poll_s": True}, {"iopoll": 1}, {"sqpoll": "yes"},
                                     {"create": None}, {"direct_io": 1}])
def test_bad_options(tmp_path, options):
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        open_store(tmp_path, **options)


def test_figures(tmp_path):
    with open_store(tmp_path) as store:
        for n in range(3):
            foreign = Foreign(tmp_path, store.description)
            foreign.put(0, chain(1, n)[0])
            foreign.publish()
        until(lambda: sharing(store)["writers_seen"] == 3 and len(store) == 3)
        figures = sharing(store)
        assert figures["polls"] > 0 and figures["blocks_seen"] >= 3
        assert figures["foreign_segments"] == 3 == store.stats()["segments"]
        assert states(store) == (3, 0, 0)
        with pytest.raises(Closed):
            store.close()
            store.refresh()


def test_warnings_made_errors_do_not_end_the_watch(tmp_path):
    with open_store(tmp_path, poll_s=0.005) as store:
        put(store, chain(1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            os.unlink(segments(tmp_path)[0])
            until(lambda: sharing(store)["zombie_segments"] == 1)
            polls = sharing(store)["polls"]
            until(lambda: sharing(store)["polls"] > polls + 3)
