"""Rings on 3FS. A stand-in plays 3FS here (usrbio_standin.c): none of this ran on a real mount."""
import ctypes
import errno
import gc
import os
import time

import numpy as np
import pytest

import blocks
import standin as s
from blocks import LAYOUT, Blocks, chain, get, open_store, put, readable, segments
from kvio.errors import BackendUnavailable, TransferError, TransferTimeout
from kvio.layout import BlockLayout
from kvio.memory import BlockPool
from kvio.storage import BlockStore

STRIDE = LAYOUT.stride


@pytest.fixture(params=[False, True], ids=["private", "named"])
def store(tmp_path, standin, monkeypatch, request):
    monkeypatch.setattr(blocks, "NAMED", request.param)
    with open_store(tmp_path, "usrbio") as store:
        yield store


def stats(store):
    return store._default.stats()


# ---- what the daemon may do

def test_completions_in_any_order_and_one_at_a_time(store, standin):
    standin.fault(s.SHUFFLE)
    standin.fault(s.ONE)
    standin.fault(s.DELAY_US, 500, count=60)
    keys = chain(60)
    put(store, keys, scattered=True)
    for _ in range(3):
        _, status, target = get(store, keys, scattered=True)
        assert not status.any() and target.holds(keys)
    assert standin.count(s.IOS) >= 240 and stats(store)["stray_completions"] == 0


def test_short_results_are_continued(store, standin):
    keys = chain(40)
    standin.fault(s.SHORT, 4096, count=40, mask=s.WRITES)
    put(store, keys)
    standin.fault(s.SHORT, 5000, count=40, mask=s.READS)        # not even whole pages
    assert readable(store, keys).all()
    assert stats(store)["short_ios"] >= 70


@pytest.mark.parametrize("code", [errno.EREMOTEIO, errno.EACCES, errno.EIO])
def test_an_error_of_the_daemon_fails_its_block_alone(store, standin, code):
    keys = chain(20)
    put(store, keys)
    standin.fault(s.RESULT, -code, count=3, mask=s.READS)   # merged; in named pools EACCES once
    _, status, _ = get(store, keys)                             # more, and then staged
    failed = np.flatnonzero(status)
    assert 1 <= len(failed) <= 2 and set(status[failed]) == {-code}
    if code != errno.EIO:                                       # the copy may be good
        assert store.match(keys) == 20
        assert readable(store, keys).all()
    more = chain(4, seed=1)
    standin.fault(s.RESULT, -code, mask=s.WRITES)
    source = Blocks(4, keys=more)
    with pytest.raises(TransferError) as raised:
        store.write(more, source.pool, source.ids).wait()
    assert raised.value.errno == code and store.match(more) == 0


def test_a_pool_that_the_daemon_could_not_register_is_staged(tmp_path, standin, monkeypatch):
    monkeypatch.setattr(blocks, "NAMED", True)
    keys = chain(20)
    standin.fault(s.DENY)
    with open_store(tmp_path, "usrbio") as store:
        with pytest.warns(RuntimeWarning, match="registered with 3FS.*EACCES.*daemon"):
            put(store, keys)
            assert readable(store, keys).all()
        assert stats(store)["staged_bytes"] >= 40 * STRIDE
        assert "EACCES" in store.stats()["plain_buffers_reason"]


def test_a_full_ring_is_asked_again(store, standin):
    keys = chain(30)
    standin.fault(s.PREP, -errno.EAGAIN, count=100)
    put(store, keys, scattered=True)
    assert standin.count(s.REFUSED) == 100
    standin.fault(s.PREP, -errno.EAGAIN, count=100)
    assert readable(store, keys).all()


def test_a_ring_that_stays_full_with_nothing_in_flight_is_an_error(store, standin):
    keys = chain(2)
    put(store, keys)
    standin.fault(s.PREP, -errno.EAGAIN)
    _, status, _ = get(store, keys)
    assert set(status) == {-errno.EBUSY}
    standin.reset()
    assert readable(store, keys).all()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EBADF, errno.EINVAL])
def test_what_cannot_be_prepared_fails_its_block_alone(store, standin, code):
    keys = chain(10)
    put(store, keys)
    standin.fault(s.PREP, -code, count=2, mask=s.READS)
    _, status, _ = get(store, keys)
    assert status.tolist() == [-code] + [0] * 9
    assert readable(store, keys).all()


def test_a_hole_is_damage_and_not_zeros(tmp_path, standin):
    keys = chain(10)
    with open_store(tmp_path, "usrbio", durability="durable", verify="never") as store:
        put(store, keys)
        start = store.description.geometry.payload_offset
        fd = os.open(segments(tmp_path)[0], os.O_RDWR)
        spans = [(ctypes.c_size_t * 1)(start + at * STRIDE) for at in (4, 5)]
        assert standin.library.hf3fs_punchhole(fd, 1, *spans, 0) == 0
        os.close(fd)
        standin.fault(s.HOLES)
        usable, status, _ = get(store, keys)
        assert usable == 4 and status[4] == -errno.EBADMSG and np.count_nonzero(status) == 1


def test_completions_of_nobody_are_counted_and_do_nothing(store, standin):
    keys = chain(10)
    standin.fault(s.STRAY, 7, count=1)
    standin.fault(s.DELAY_US, 20_000, count=1)
    put(store, keys)
    standin.fault(s.STRAY, 0x7fffffff, count=1)
    standin.fault(s.DELAY_US, 20_000, count=1)
    assert readable(store, keys).all() and stats(store)["stray_completions"] == 2


def test_a_wait_that_fails_is_tried_again(store, standin):
    keys = chain(10)
    standin.fault(s.WAIT, -errno.EINVAL, count=5)
    put(store, keys)
    assert readable(store, keys).all()


# ---- how it waits

def test_what_is_asked_while_others_are_in_flight_is_not_kept_waiting(store, standin):
    old, new = chain(4), chain(4, seed=1)
    put(store, old)
    standin.fault(s.DELAY_US, 1_500_000, count=1, mask=s.READS)
    target = Blocks(4)
    began = time.monotonic()
    slow = store.read(old, target.pool, target.ids)
    with pytest.raises(TransferTimeout):
        slow.wait(0.05)
    put(store, new)
    assert not slow.done and time.monotonic() - began < 1.4
    assert slow.wait() == 4 and target.holds(old)


def test_an_idle_ring_sleeps(store, standin):
    put(store, chain(4))
    time.sleep(0.05)
    before = standin.count(s.WAITS), time.process_time()
    time.sleep(0.4)
    assert standin.count(s.WAITS) == before[0] and time.process_time() - before[1] < 0.1


def test_one_submission_a_turn(store, standin):
    keys = chain(30)
    put(store, keys)
    standin.library.standin_reset()
    get(store, keys, scattered=True)
    assert standin.count(s.PREPS) == 30 and standin.count(s.SUBMITS) <= 15


def test_rings_never_wait_for_a_full_round(store, standin):
    before = set(standin.links())           # other tests have killed processes
    put(store, chain(1))
    depths = [link.split(".")[1:] for link in set(standin.links()) - before
              if ".r" in link or ".w" in link]
    assert sorted(depths) == [["r0", "t0", "f10"], ["w0", "t0"]]


def test_a_daemon_that_stalls_is_waited_for(store, standin):
    keys = chain(4)
    standin.fault(s.STALL, 1000)            # as if io_depth were 1000
    source = Blocks(4, keys=keys)
    transfer = store.write(keys, source.pool, source.ids)
    with pytest.raises(TransferTimeout):
        transfer.wait(0.2)
    standin.reset()
    transfer.wait()
    assert readable(store, keys).all()


def test_a_durable_store_syncs_and_a_visible_one_when_it_closes(tmp_path, standin):
    with open_store(tmp_path, "usrbio", durability="durable") as store:
        put(store, chain(3))
        assert stats(store)["syncs"] == 2
    with open_store(tmp_path, "usrbio") as store:
        put(store, chain(3, seed=1))
        ring = store._default._ring
        assert ring.stats()["length_syncs"] == 0 and ring.stats()["syncs"] == 0
    [_, segment] = sorted(segments(tmp_path), key=os.path.getmtime)
    geometry = store.description.geometry
    assert os.path.getsize(segment) == geometry.payload_offset + 3 * STRIDE


# ---- memory

def test_a_named_pool_is_moved_without_a_copy(tmp_path, standin, monkeypatch):
    monkeypatch.setattr(blocks, "NAMED", True)
    keys = chain(20)
    source, target = Blocks(20, keys=keys), Blocks(20)
    with open_store(tmp_path, "usrbio") as store:
        rings = [store._default_ring(), store.open_ring()]
        rings[0].write(keys, source.pool, source.ids).wait()
        assert rings[1].read(keys, target.pool, target.ids).wait() == 20 and target.holds(keys)
        rings[0].read(keys, target.pool, target.ids).wait()
        assert standin.iov_bytes(source.pool.shm_path) == 20 * STRIDE       # the daemon's word
        assert standin.iov_bytes(target.pool.shm_path) == 40 * STRIDE
        links = [os.readlink(os.path.join(standin.iovs, link)) for link in standin.links()]
        assert links.count(target.pool.shm_path) == 1                       # for both rings
        for ring in rings:
            found = ring.stats()
            assert found["staged_ios"] == 0 and found["fixed_ios"] > 0 and found["registered_bytes"]
        assert store.stats()["plain_buffers_reason"] is None
        path = target.pool.shm_path
        del target
        gc.collect()
        deadline = time.monotonic() + 30
        while any(os.readlink(os.path.join(standin.iovs, link)) == path
                  for link in standin.links()) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert standin.links() and path not in [
            os.readlink(os.path.join(standin.iovs, link)) for link in standin.links()]


def test_any_other_pool_is_staged_and_that_is_said_once(tmp_path, standin, recwarn):
    import warnings
    keys = chain(20)
    with open_store(tmp_path, "usrbio") as store, warnings.catch_warnings():
        warnings.simplefilter("always")
        put(store, keys)
        assert readable(store, keys).all()
        said = [str(w.message) for w in recwarn if "named=True" in str(w.message)]
        assert len(said) == 1
        found = stats(store)
        assert found["staged_bytes"] == 40 * STRIDE and found["staging_bytes"] == 16 << 20
        assert found["fixed_ios"] == 0 and "named=True" in store.stats()["plain_buffers_reason"]


def test_a_large_pool_is_registered_in_blocks_that_nothing_crosses(tmp_path, standin):
    layout = BlockLayout(3, 1, 1 << 20)                 # 3 MiB: 341 of them are below 1 GiB
    if os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize < 2 << 30:
        pytest.skip("a pool of more than 1 GiB wants 2 GiB free in /dev/shm")
    with BlockPool(layout, 345, named=True) as pool, \
            BlockStore.open(tmp_path, layout, backend="usrbio", segment_bytes=64 << 20) as store:
        ids = pool.alloc(345)
        keys = chain(4, layout=layout)
        for block_id, key in zip(ids[339:343], keys):
            pool.full(block_id).reshape(-1)[:] = blocks.payload(key, layout)
        store.write(keys, pool, ids[339:343]).wait()
        assert [link for link in standin.links() if link.endswith(f".b{341 * (3 << 20)}")]
        assert store.read(keys, pool, ids[338:342]).wait() == 4
        for block_id, key in zip(ids[338:342], keys):
            assert (pool.full(block_id).reshape(-1) == blocks.payload(key, layout)).all()
        assert stats(store)["staged_ios"] == 0


# ---- files

def test_the_stand_in_has_the_signs_of_3fs(tmp_path, standin):
    library = standin.library
    (tmp_path / "file").write_bytes(bytes(4096))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    got = library.hf3fs_reg_fd(fd, ctypes.c_uint64(0))
    assert got < 0 and os.fstat(-got).st_ino == os.fstat(fd).st_ino         # minus a dup
    assert library.hf3fs_reg_fd(fd, ctypes.c_uint64(0)) == errno.EINVAL
    library.hf3fs_dereg_fd(fd)
    assert library.hf3fs_reg_fd(9999, ctypes.c_uint64(0)) == errno.EBADF
    os.close(fd)
    assert library.hf3fs_extract_mount_point(None, 0, b"/") == -1


def test_a_number_that_somebody_left_registered_is_taken_over(tmp_path, standin):
    held = [os.open(tmp_path, os.O_RDONLY) for _ in range(40)]
    for fd in held:
        assert standin.library.hf3fs_reg_fd(fd, ctypes.c_uint64(0)) <= 0
    for fd in held:
        os.close(fd)
    before = standin.count(s.REGISTERED)
    with open_store(tmp_path / "store", "usrbio") as store:
        put(store, chain(4))
        assert store._writer.segments[0].fd in held
        assert standin.count(s.REGISTERED) == before
        assert readable(store, chain(4)).all()
    fillers = [os.open(tmp_path, os.O_RDONLY) for _ in range(80)]
    for fd in fillers:                      # dereg asks whether the number is one of 3FS
        if fd in held:
            standin.library.hf3fs_dereg_fd(fd)
    for fd in fillers:
        os.close(fd)


def test_a_file_that_cannot_be_registered_fails_its_blocks(store, standin):
    keys = chain(4)
    standin.fault(s.REG, errno.EMFILE)
    source = Blocks(4, keys=keys)
    with pytest.raises(TransferError) as failed:
        store.write(keys, source.pool, source.ids).wait()
    assert failed.value.errno == errno.EMFILE
    standin.reset()
    put(store, keys)
    assert readable(store, keys).all()


# ---- nothing is left behind

class Left:
    """What is open and registered now."""

    def __init__(self, standin):
        gc.collect()
        self.now = (sorted(os.listdir("/proc/self/fd")), mine(), standin.links(),
                    [standin.count(what) for what in (s.RINGS, s.REGISTERED)])

    def __eq__(self, other):
        return self.now == other.now

    def __repr__(self):
        return repr(self.now)


def mine():
    """Names in /dev/shm of files that this process has open or mapped."""
    with open("/proc/self/maps") as maps:
        return sorted({line.split()[-1] for line in maps if "/dev/shm/kvio" in line})


def test_closing_leaves_nothing(tmp_path, standin, monkeypatch):
    with open_store(tmp_path, "usrbio"):
        pass                                # the library is open from here on
    before = Left(standin)
    for named in (False, True):
        monkeypatch.setattr(blocks, "NAMED", named)
        store = open_store(tmp_path, "usrbio", durability="durable")
        rings = [store.open_ring() for _ in range(3)]
        keys = chain(30, seed=named)
        source = Blocks(30, keys=keys)
        for ring in rings:
            ring.write(keys, source.pool, source.ids).wait()
        assert readable(store, keys).all()
        assert standin.count(s.RINGS) == 8 and standin.count(s.REGISTERED)
        rings[0].close()
        assert standin.count(s.RINGS) == 6
        source.pool.close()
        del source
        store.close()
        del store, rings, ring
        assert Left(standin) == before


@pytest.mark.parametrize("which", [s.READS, s.WRITES])
def test_an_open_that_fails_leaves_nothing(tmp_path, standin, which):
    keys = chain(3)
    with open_store(tmp_path, "usrbio", poll_s=0) as store:     # the watch opens files by itself
        before = Left(standin)
        standin.fault(s.CREATE, -errno.ENOMEM, mask=which)
        for _ in range(3):
            with pytest.raises(BackendUnavailable, match="usrbio.*daemon"):
                store.open_ring()
        assert Left(standin) == before
        standin.reset()
        put(store, keys)
        assert readable(store, keys).all()
