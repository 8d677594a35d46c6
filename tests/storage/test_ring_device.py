"""What a ring makes of the device behind the path: queue depth, O_DIRECT, copies, polling."""
import errno
import os
import tempfile
import warnings

import pytest

from blocks import chain, get, open_store, put, readable
from kvio.errors import InvalidArgument, StoreError
from kvio.layout import BlockLayout
from kvio.storage import device

LARGE = BlockLayout(num_layers=4, block_tokens=16, bytes_per_token=16 << 10)     # 1 MiB
IOPOLL, SQPOLL = 1, 2           # IORING_SETUP_*


local = pytest.mark.parametrize("backend", ["uring", "threads"], indirect=True)    # no 3FS there


@pytest.fixture
def tmpfs():
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield folder


def fake_device(tmp_path, monkeypatch, rotational, nr_requests, partition=False):
    """/sys/dev/block as it would be for the device that tmp_path lies on."""
    number = os.stat(tmp_path).st_dev
    disk = tmp_path / "sys" / "devices" / "disk0"
    (disk / "queue").mkdir(parents=True)
    (disk / "queue" / "rotational").write_text(f"{rotational}\n")
    (disk / "queue" / "nr_requests").write_text(f"{nr_requests}\n")
    target = disk
    if partition:
        target = disk / "disk0p1"
        target.mkdir()
        (target / "partition").write_text("1\n")
    links = tmp_path / "sys" / "block"
    links.mkdir()
    (links / f"{os.major(number)}:{os.minor(number)}").symlink_to(target)
    monkeypatch.setattr(device, "SYS_BLOCK", str(links))


@pytest.mark.parametrize("rotational,nr_requests,depth", [
    (0, 1023, 128), (0, 256, 64), (0, 64, 16), (0, 4, 8), (1, 256, 32), (1, 64, 8)])
@pytest.mark.parametrize("partition", [False, True])
def test_the_queue_depth_follows_the_device(tmp_path, monkeypatch, rotational, nr_requests, depth,
                                            partition):
    fake_device(tmp_path, monkeypatch, rotational, nr_requests, partition)
    chosen, why = device.choose_queue_depth(str(tmp_path), None)
    assert chosen == depth and f"disk0: nr_requests {nr_requests}" in why
    with open_store(tmp_path / "store") as store:
        assert store.stats()["queue_depth"] == depth and store.stats()["queue_depth_reason"] == why
    with open_store(tmp_path / "store", queue_depth=5) as store:
        assert (store.queue_depth, store.stats()["queue_depth_reason"]) == (5, "asked for")


def test_no_device_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "SYS_BLOCK", str(tmp_path / "nothing"))
    chosen, why = device.choose_queue_depth(str(tmp_path), None)
    assert chosen == 32 and "no block device" in why


@local
def test_tmpfs_counts_as_buffered(tmpfs, backend):
    """Newer kernels accept O_DIRECT there, and copy."""
    with open_store(tmpfs, backend) as store:
        put(store, chain(5))
        assert readable(store, chain(5)).all()
        assert store.stats()["direct_io"] is False and store.stats()["direct_io_reason"]
    with pytest.raises(StoreError, match="direct_io=True"):
        open_store(tmpfs, backend, direct_io=True)


def test_direct_io_is_a_choice(tmp_path, backend):
    for choice in (False, "auto", True):
        try:
            store = open_store(tmp_path, backend, direct_io=choice)
        except StoreError:
            assert choice is True and not direct
            continue
        with store:
            put(store, chain(5, seed=["auto", True, False].index(choice)))
            direct = store.stats()["direct_io"] if choice else False
            assert choice == "auto" or direct is choice
            assert readable(store, chain(5, seed=2)).all()      # what False has written
            modes = {os.readlink(f"/proc/self/fd/{fd}"): _flags(fd) & os.O_DIRECT
                     for fd in _open_fds() if "segment-" in os.readlink(f"/proc/self/fd/{fd}")}
            assert modes and all(bool(mode) is direct for mode in modes.values())
    for wrong in (1, None, "yes"):
        with pytest.raises(InvalidArgument, match="direct_io"):
            open_store(tmp_path, backend, direct_io=wrong)


def _open_fds():
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]


def _flags(fd):
    with open(f"/proc/self/fdinfo/{fd}") as file:
        return int(file.read().split("flags:")[1].split()[0], 8)


@local
def test_large_copies_are_shared_by_the_kernels_workers(tmpfs, backend):
    with open_store(tmpfs, backend, LARGE, segment_bytes=16 << 20) as store:
        keys = chain(6, layout=LARGE)
        put(store, keys, LARGE)
        before = store._default.stats()
        usable, _, target = get(store, keys[:1], LARGE)
        stats = store._default.stats()
        assert usable == 1 and target.holds(keys[:1], LARGE)
        # One block alone is split among the CPUs, down to 256 KiB; many are work enough.
        pieces = min(len(os.sched_getaffinity(0)), 4)
        assert pieces <= stats["ios"] - before["ios"] <= 4
        usable, _, target = get(store, keys, LARGE, scattered=True)
        assert usable == 6 and target.holds(keys, LARGE)
        if backend == "uring":
            # The last piece of the one that was alone is copied by the ring's own thread.
            stats = store._default.stats()
            assert stats["async_ios"] == stats["ios"] - before["ios"] - (pieces > 1)
    with open_store(tmpfs + "/small", backend) as store:        # 12 KiB: not worth a worker
        put(store, chain(9))
        get(store, chain(9), scattered=True)
        assert store._default.stats()["async_ios"] == 0


def test_direct_files_need_no_workers(tmp_path, backend):
    with open_store(tmp_path, backend, LARGE, segment_bytes=16 << 20) as store:
        put(store, chain(6, layout=LARGE), LARGE)
        assert get(store, chain(6, layout=LARGE), LARGE)[0] == 6
        if store.stats()["direct_io"]:
            assert store._default.stats()["async_ios"] == 0


def test_a_large_block_travels_in_pieces(tmp_path, backend):
    layout = BlockLayout(num_layers=4, block_tokens=64, bytes_per_token=16 << 10)   # 4 MiB
    with open_store(tmp_path, backend, layout, segment_bytes=64 << 20, queue_depth=8) as store:
        keys = chain(12, layout=layout)
        put(store, keys, layout)
        before = store._default.stats()["ios"]
        assert get(store, keys[:1], layout)[0] == 1
        assert store._default.stats()["ios"] - before >= 4      # 1 MiB each: in parallel
        stats = store._default.stats()
        usable, _, target = get(store, keys, layout)            # a full queue: larger pieces
        assert usable == 12 and target.holds(keys, layout)
        more = {name: count - stats[name] for name, count in store._default.stats().items()
                if name in ("ios", "short_ios")}                # short: staged in several steps
        assert more["ios"] - more["short_ios"] <= 48


# ---- polling: what is refused is announced once and done without

def uring_only(backend):
    if backend != "uring":
        pytest.skip("threads poll nothing")


def test_iopoll(tmp_path, backend):
    uring_only(backend)
    keys = chain(40)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with open_store(tmp_path, backend, iopoll=True) as store:
            for seed in range(3):
                put(store, chain(40, seed))
                assert readable(store, chain(40, seed)).all()
            stats = store._default.stats()
            put(store, chain(1, seed=9))
    assert stats["poll_setup_flags"] & IOPOLL and not stats["setup_flags"] & IOPOLL
    said = [str(w.message) for w in seen if "iopoll" in str(w.message)]
    if stats["poll_errno"]:
        assert stats["poll_errno"] == errno.EOPNOTSUPP and len(said) == 1
        assert "NOTSUP" in said[0] and "interrupts" in said[0]
    else:
        assert stats["poll_ios"] >= 6 and not said
        assert stats["poll_ios"] < stats["ios"]         # header pages stay where they were
    with open_store(tmp_path, backend) as store:
        assert readable(store, keys).all()


def test_iopoll_leaves_buffered_files_alone(tmpfs, backend):
    uring_only(backend)
    with open_store(tmpfs, backend, iopoll=True) as store:
        put(store, chain(40))
        assert readable(store, chain(40)).all()
        stats = store._default.stats()
        assert stats["poll_setup_flags"] & IOPOLL
        assert stats["poll_ios"] == 0 and stats["poll_errno"] == 0


def test_sqpoll(tmp_path, backend):
    uring_only(backend)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with open_store(tmp_path, backend, sqpoll=True, iopoll=True) as store:
            put(store, chain(60), scattered=True)
            assert readable(store, chain(60)).all()
            stats = store._default.stats()
    said = [str(w.message) for w in seen if "sqpoll" in str(w.message)]
    if stats["sqpoll_errno"]:
        assert len(said) == 1 and not stats["setup_flags"] & SQPOLL
    else:
        assert not said and stats["setup_flags"] & SQPOLL


def test_nothing_polls_unless_asked(tmp_path, backend):
    with open_store(tmp_path, backend) as store:
        put(store, chain(3))
        stats = store._default.stats()
        assert not stats["setup_flags"] & (IOPOLL | SQPOLL) and not stats["poll_setup_flags"]
