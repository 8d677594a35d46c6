"""The LMCache connector when things go wrong, end, or are shared."""
import errno
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref

import numpy as np
import pytest

from connector import ODD, SIZE, Buffers, exists, get, names, pattern, put, result, shelf_of
from kvio.errors import Closed
from kvio.integrations import chunks
from kvio.integrations.lmcache import KvioConnector

pytestmark = pytest.mark.filterwarnings("ignore:.*did not store a chunk:RuntimeWarning")


# ---- faults ----

@pytest.mark.parametrize("nbytes", [SIZE, ODD])
def test_a_store_that_fails_is_never_visible(tmp_path, nbytes):
    with KvioConnector(tmp_path, chunk_bytes=nbytes, backend="threads") as one:
        payload = shelf_of(one, nbytes).store.description.geometry.payload_offset
        stride = shelf_of(one, nbytes).layout.stride
        shelf_of(one, nbytes).rings[True]._ring._fault(     # the second slot, merged and alone
            2, -errno.EIO, count=2, from_offset=payload + stride, to_offset=payload + 2 * stride)
        with pytest.warns(RuntimeWarning, match="EIO"):
            ok, error, flags = put(one, names(4), Buffers(4, nbytes).fill().views)
        assert (ok, flags.count(False)) == (False, 1) and "EIO" in error
        assert exists(one, names(4))[2] == flags
        here = Buffers(4, nbytes)
        assert get(one, names(4), here.views)[2] == flags
        assert all(here.holds(i) for i, good in enumerate(flags) if good)
        shelf_of(one, nbytes).rings[True]._ring._fault(0, 0)
        assert put(one, names(4), Buffers(4, nbytes).fill().views)[0]       # it goes on
        assert get(one, names(4), here.views)[0] and all(here.holds(i) for i in range(4))


@pytest.mark.parametrize("nbytes", [SIZE, ODD])
def test_a_load_that_fails_is_never_ok(tmp_path, nbytes):
    with KvioConnector(tmp_path, chunk_bytes=nbytes, backend="threads") as one:
        put(one, names(6), Buffers(6, nbytes).fill().views)
        segment, = (tmp_path / f"chunks-{nbytes}").glob("segment-*")
        payload = shelf_of(one, nbytes).store.description.geometry.payload_offset
        stride = shelf_of(one, nbytes).layout.stride
        with open(segment, "r+b") as file:                  # a bit of the third chunk flips
            file.seek(payload + 2 * stride + 17)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 4]))
        here = Buffers(6, nbytes)
        ok, error, flags = get(one, names(6), here.views)
        assert (ok, flags) == (False, [True, True, False, True, True, True])
        assert "key 2: not loaded: EBADMSG" in error
        assert all(here.holds(i) for i, good in enumerate(flags) if good)
        assert exists(one, names(6))[2] == flags            # it is a miss from now on


@pytest.mark.parametrize("nbytes", [SIZE, ODD])
def test_a_full_store_fails_single_keys(tmp_path, nbytes):
    with KvioConnector(tmp_path, capacity_bytes=5 * SIZE, backend="threads") as one:
        ok, error, flags = put(one, names(9), Buffers(9, nbytes).fill().views)
        stored = exists(one, names(9))[2]
        assert stored.count(True) == 5
        # What was stored first may have made room for the rest; what was refused is not half there.
        assert all(flag for flag, here in zip(flags, stored) if here)
        assert ok == all(flags) and (ok or "ENOSPC" in error)
        here = Buffers(9, nbytes)
        assert get(one, names(9), here.views)[2] == stored
        assert all(here.holds(i) for i, good in enumerate(stored) if good)


def test_no_memory_to_copy_through(tmp_path, monkeypatch):
    with KvioConnector(tmp_path, backend="threads") as one:
        with monkeypatch.context() as patch:
            def refuse(*args, **kwargs):
                raise MemoryError("no more")
            patch.setattr(chunks, "BlockPool", refuse)
            assert put(one, names(2), Buffers(2, ODD).fill().views)[:2] == (False, "key 0: no more")
            assert put(one, names(2), Buffers(2, SIZE).fill().views)[2] == [False, False]
        assert exists(one, names(2))[2] == [False, False]
        assert put(one, names(2), Buffers(2, ODD).fill().views)[0]


def test_a_thread_that_dies_leaves_nobody_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    one = KvioConnector(tmp_path, backend="threads")
    with monkeypatch.context() as patch:
        patch.setattr(one._mover, "_begin", lambda request: 1 / 0)
        number = one.submit_batch_set(names(2), Buffers(2).fill().views)
        one._mover._thread.join(10)
    assert not one._mover._thread.is_alive()
    with pytest.raises(Closed):
        one.submit_batch_set(names(2), Buffers(2).fill().views)
    one.close()
    assert [(done[0], done[3]) for done in one.drain_completions()] == [(number, [False, False])]


# ---- deleting ----

def test_delete_gives_the_space_back(tmp_path):
    with KvioConnector(tmp_path, capacity_bytes=4 * SIZE, backend="threads") as one:
        put(one, names(4), Buffers(4).fill().views)
        number = one.submit_batch_delete(names(2) + names(1, "never"))
        assert result(one, number) == (True, "", [True] * 3)
        assert exists(one, names(4))[2] == [False, False, True, True]
        assert put(one, names(2, "new"), Buffers(2).fill(tag=1).views)[0]
        here = Buffers(2)
        assert get(one, names(2, "new"), here.views)[0] and here.holds(1, tag=1)


def test_delete_leaves_what_another_process_has_stored(tmp_path):
    with KvioConnector(tmp_path) as one:
        put(one, names(2), Buffers(2).fill().views)
    with KvioConnector(tmp_path) as one:
        put(one, names(3), Buffers(3).fill().views)
        assert result(one, one.submit_batch_delete(names(3)))[2] == [False, False, True]
        assert exists(one, names(3))[2] == [True, True, False]


# ---- ends ----

@pytest.mark.parametrize("nbytes", [SIZE, ODD])
def test_close_finishes_what_was_submitted(tmp_path, nbytes):
    one = KvioConnector(tmp_path, staging_blocks=2)
    numbers = [one.submit_batch_set(names(10, f"{i}-"), Buffers(10, nbytes).fill(i).views)
               for i in range(5)]
    one.close()
    assert {done[0]: done[1] for done in one.drain_completions()} == dict.fromkeys(numbers, True)
    assert one.drain_completions() == []
    one.close()
    with KvioConnector(tmp_path) as one:
        here = Buffers(10, nbytes)
        assert get(one, names(10, "3-"), here.views)[0] and here.holds(9, 3)


def test_close_that_cancels_settles_everything(tmp_path):
    one = KvioConnector(tmp_path, staging_blocks=2, chunk_bytes=[SIZE, ODD], backend="threads")
    for nbytes in (SIZE, ODD):
        shelf_of(one, nbytes).rings[True]._ring._pause(True)
    sizes = [SIZE, ODD, SIZE, ODD]
    numbers = [one.submit_batch_set(names(10, f"{i}-"), Buffers(10, sizes[i]).fill().views)
               for i in range(4)]
    one.close(cancel=True)
    done = one.drain_completions()
    assert sorted(number for number, *_ in done) == numbers
    stored = {number: flags for number, _, _, flags in done}
    with KvioConnector(tmp_path) as one:
        for i, number in enumerate(numbers):
            assert exists(one, names(10, f"{i}-"))[2] == stored[number]


@pytest.mark.parametrize("nbytes", [SIZE, ODD])
def test_buffers_are_held_until_the_device_is_done(tmp_path, nbytes):
    with KvioConnector(tmp_path, chunk_bytes=nbytes, backend="threads") as one:
        ring = shelf_of(one, nbytes).rings[True]._ring
        ring._pause(True)
        array = np.frombuffer(pattern(0, nbytes + 4096), np.uint8).copy()
        start = -array.ctypes.data % 4096 if nbytes == SIZE else 1
        expected, gone = array[start:start + nbytes].tobytes(), weakref.ref(array)
        number = one.submit_batch_set(names(1), [memoryview(array[start:start + nbytes])])
        del array
        time.sleep(0.1)
        gc.collect()
        assert gone() is not None
        ring._pause(False)
        assert result(one, number)[0]
        gc.collect()
        assert gone() is None                       # and no longer
        here = Buffers(1, nbytes)
        assert get(one, names(1), here.views)[0] and bytes(here.views[0]) == expected


def test_after_the_end(tmp_path):
    one = KvioConnector(tmp_path)
    one.close()
    for call in (lambda: one.submit_batch_exists(names(1)), lambda: one.submit_batch_get([], []),
                 lambda: one.submit_batch_set(names(1), Buffers(1).views), one.stats):
        with pytest.raises(Closed):
            call()
    assert one.drain_completions() == []


def test_descriptors_and_threads_do_not_pile_up(tmp_path):
    def count():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def use():
        with KvioConnector(tmp_path) as one:
            put(one, names(3), Buffers(3, ODD).fill().views)
            get(one, names(3), Buffers(3, ODD).views)
    use()
    gc.collect()
    before = count()
    for _ in range(5):
        use()
    gc.collect()
    assert count() == before


def test_one_that_was_forgotten_says_so(tmp_path):
    one = KvioConnector(tmp_path)
    put(one, names(1), Buffers(1).fill().views)
    thread = one._mover._thread
    with pytest.warns(ResourceWarning, match="never closed"):
        del one
        gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_process_that_just_ends(tmp_path):
    code = ("import sys, mmap\nfrom kvio.integrations.lmcache import KvioConnector\n"
            "one = KvioConnector(sys.argv[1])\nmemory = mmap.mmap(-1, 64 << 20)\n"
            "views = [memoryview(memory)[i << 20:(i + 1) << 20] for i in range(64)]\n"
            "one.submit_batch_set([str(i) for i in range(64)], views)\n")
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True,
                         text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_forked_child_is_refused(connector):
    put(connector, names(1), Buffers(1).fill().views)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)     # fork with threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            connector.submit_batch_exists(names(1))
        except Closed:
            connector.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert exists(connector, names(1))[2] == [True]


# ---- two at once ----

OTHER = """
import sys
sys.path.insert(0, sys.argv[2])
from connector import *
from kvio.integrations.lmcache import KvioConnector
with KvioConnector(sys.argv[1]) as one:
    here = Buffers(30)
    assert get(one, names(30, "mine"), here.views)[0] and all(here.holds(i) for i in range(30))
    for turn in range(10):
        assert put(one, names(30, f"{turn}-"), Buffers(30).fill(turn).views)[0]
        assert put(one, names(30, "same"), Buffers(30).fill().views)[0]
        assert put(one, names(4, "odd"), Buffers(4, 777).fill().views)[0]
"""


def test_two_processes_share_the_directory(tmp_path, connector):
    assert put(connector, names(30, "mine"), Buffers(30).fill().views)[0]
    other = subprocess.Popen([sys.executable, "-c", OTHER, str(tmp_path / "kv"),
                              os.path.dirname(__file__)], stderr=subprocess.PIPE, text=True)
    for turn in range(10):
        assert put(connector, names(30, f"other{turn}-"), Buffers(30).fill(turn).views)[0]
        assert put(connector, names(30, "same"), Buffers(30).fill().views)[0]
    assert other.communicate(timeout=60)[1] == "" and other.returncode == 0
    with KvioConnector(tmp_path / "kv") as third:
        for tag, fill in [("mine", 0), ("same", 0), ("7-", 7), ("other3-", 3)]:
            here = Buffers(30)
            assert get(third, names(30, tag), here.views)[0]
            assert all(here.holds(i, fill) for i in range(30))
    # What the other one has stored, in a size of its own too, is found without opening anew.
    end = time.monotonic() + 10
    while not all(exists(connector, names(4, "odd") + names(30, "7-"))[2]):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert get(connector, names(4, "odd"), Buffers(4, 777).views)[0]
    here = Buffers(30)
    assert get(connector, names(30, "7-"), here.views)[0]
    assert all(here.holds(i, 7) for i in range(30))
