"""What the device may do: short results, EINTR, EAGAIN, errors of one block, a full disk.

Faults are injected in the C layer, below everything they test.
"""
import errno
import os
import resource
import subprocess
import sys

import numpy as np
import pytest

import blocks
from blocks import LAYOUT, Blocks, chain, get, open_store, put, readable, segments
from kvio._ext import ring as _ring
from kvio.errors import TransferError

READ, WRITE, SYNC, REGISTER = 1, 2, 4, 8
STRIDE = LAYOUT.stride


@pytest.fixture
def store(tmp_path, backend):
    with open_store(tmp_path, backend) as store:
        yield store


@pytest.fixture
def durable(tmp_path, backend):
    with open_store(tmp_path, backend, durability="durable") as store:
        yield store


def fault(store, mask, result, **more):
    store._default_ring()._ring._fault(mask, result, **more)


def end_faults(store):
    fault(store, 0, 0)


def slot_range(store, first, last):
    start = store.description.geometry.payload_offset
    return {"from_offset": start + first * STRIDE, "to_offset": start + (last + 1) * STRIDE}


def headers(store):
    return {"from_offset": 8192, "to_offset": store.description.geometry.payload_offset}


def on_disk(store, segment=0):
    """Slots with a valid header in the file itself."""
    with open(segments(store.path)[segment], "rb") as file:
        page0 = file.read(4096)
        file.seek(8192)
        data = np.frombuffer(file.read(store.description.geometry.payload_offset - 8192), np.uint8)
    out = np.zeros(len(data) // 128, _block_io())
    count, _ = _ring.scan_headers(data, page0[48:64], LAYOUT.full_block_nbytes, out)
    return sorted(out[:count]["slot"].tolist())


def _block_io():
    from kvio.storage.format import BLOCK_IO
    return BLOCK_IO


@pytest.mark.parametrize("short", [4096, 8192])
def test_short_results_are_continued(store, short):
    keys = chain(40)
    fault(store, READ | WRITE, short, count=30)
    put(store, keys)
    fault(store, READ, short, count=30)
    assert readable(store, keys).all()
    assert store._default.stats()["short_ios"] >= 30


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_interrupted_operations_are_tried_again(durable, code):
    keys = chain(40)
    fault(durable, READ | WRITE | SYNC, -code, count=200)
    put(durable, keys)
    fault(durable, READ, -code, count=200)
    assert readable(durable, keys).all()
    assert durable._default.stats()["retries"] >= 300


def test_a_read_error_fails_its_block_alone(store):
    keys = chain(20)
    put(store, keys)
    fault(store, READ, -errno.EIO, count=100, **slot_range(store, 7, 7))
    usable, status, target = get(store, keys)       # one merged read of all
    assert usable == 7
    assert status.tolist() == [0] * 7 + [-errno.EIO] + [0] * 12
    for i in set(range(20)) - {7}:
        assert readable(store, keys[i:i + 1]).all()
    assert store.match(keys) == 7                   # this copy is of no use any more
    put(store, keys)
    assert readable(store, keys).all()              # stored anew, elsewhere


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_write_error_fails_its_block_alone(store, code):
    keys = chain(20)
    source = Blocks(20, keys=keys)
    fault(store, WRITE, -code, count=2, **slot_range(store, 5, 5))   # merged, then alone
    transfer = store.write(keys, source.pool, source.ids)
    with pytest.raises(TransferError) as failed:
        transfer.wait()
    assert failed.value.errno == code and "1 of 20 blocks" in str(failed.value)
    assert transfer.status.tolist() == [0] * 5 + [-code] + [0] * 14
    assert on_disk(store) == sorted(set(range(20)) - {5})
    assert readable(store, keys).tolist() == [i != 5 for i in range(20)]
    put(store, keys)
    assert readable(store, keys).all()
    assert store.stats()["own_bytes"] == 20 * STRIDE


def test_no_header_before_its_payload(store):
    keys = chain(4)
    source = Blocks(4, keys=keys)
    fault(store, WRITE, -errno.EIO, count=100, **slot_range(store, 0, 99))
    with pytest.raises(TransferError):
        store.write(keys, source.pool, source.ids).wait()
    assert store._default.stats()["header_writes"] == 0 and on_disk(store) == []


def test_no_header_before_its_payload_is_durable(durable):
    keys = chain(4)
    source = Blocks(4, keys=keys)
    fault(durable, SYNC, -errno.EIO)
    with pytest.raises(TransferError):
        durable.write(keys, source.pool, source.ids).wait()
    assert durable._default.stats()["header_writes"] == 0 and on_disk(durable) == []
    assert durable.match(keys) == 0
    put(durable, keys)
    assert readable(durable, keys).all()


def test_a_header_that_failed_is_invalidated_before_its_slot_is_used_again(durable):
    keys, others = chain(4), chain(4, seed=1)
    source = Blocks(4, keys=keys)
    fault(durable, SYNC, -errno.EIO, skip=1)        # the fdatasync after the headers
    with pytest.raises(TransferError):
        durable.write(keys, source.pool, source.ids).wait()
    assert durable.match(keys) == 0
    assert on_disk(durable) == [0, 1, 2, 3]         # written all the same: suspect
    before = durable._default.stats()["header_writes"]
    # The payload now fails: had the old headers not been taken back first, they would stand
    # before the payload of another block.
    fault(durable, WRITE, -errno.EIO, count=100, **slot_range(durable, 0, 3))
    source = Blocks(4, keys=others)
    with pytest.raises(TransferError):
        durable.write(others, source.pool, source.ids).wait()
    assert on_disk(durable) == []
    assert durable._default.stats()["header_writes"] > before
    end_faults(durable)
    put(durable, others)
    assert readable(durable, others).all()


def test_no_payload_before_the_slot_is_invalid(store):
    keys, others = chain(4), chain(4, seed=1)
    put(store, keys)
    store.forget(keys)
    source = Blocks(4, keys=others)
    fault(store, WRITE, -errno.EIO, count=100, **headers(store))
    with pytest.raises(TransferError):
        store.write(others, source.pool, source.ids).wait()
    end_faults(store)
    with open_store(store.path, store.backend) as second:       # the old blocks are whole
        assert readable(second, keys).all()


def test_slots_are_reused_after_invalidation(store):
    for seed in range(12):                          # 12 times the slots of one segment's share
        keys = chain(60, seed)
        put(store, keys)
        assert readable(store, keys).all()
        store.forget(keys)
    assert store.stats()["own_segments"] == 1
    put(store, chain(10, seed=99))
    assert readable(store, chain(10, seed=99)).all()


def test_a_header_page_error_fails_its_blocks_alone(store):
    keys = chain(70)
    source = Blocks(70, keys=keys)
    fault(store, WRITE, -errno.EIO, from_offset=8192, to_offset=8192 + 4096)
    transfer = store.write(keys, source.pool, source.ids)
    with pytest.raises(TransferError):
        transfer.wait()
    bad = np.flatnonzero(transfer.status)
    assert len(bad) and bad.max() < 32 and (transfer.status[bad] == -errno.EIO).all()
    assert readable(store, keys).tolist() == (transfer.status == 0).tolist()
    put(store, keys)
    assert readable(store, keys).all()
    with open_store(store.path, store.backend) as second:
        assert readable(second, keys).all()


def test_a_file_that_shrinks_while_open(store):
    keys = chain(20)
    put(store, keys)
    start = store.description.geometry.payload_offset
    os.truncate(segments(store.path)[0], start + 9 * STRIDE + 100)
    usable, status, _ = get(store, keys)
    assert usable == 9 and status.tolist() == [0] * 9 + [-errno.EBADMSG] * 11
    assert store.match(keys) == 9
    put(store, keys)
    assert readable(store, keys).all()


def test_plain_buffers_where_memory_cannot_be_registered(tmp_path, backend):
    if backend == "threads" or backend == "usrbio" and not blocks.NAMED:
        pytest.skip("nothing is registered")
    keys = chain(10)
    remedy = "ulimit -l" if backend == "uring" else "log of the 3FS daemon"
    with open_store(tmp_path, backend) as store:
        fault(store, REGISTER, -errno.ENOMEM)
        source = Blocks(10, keys=keys)
        with pytest.warns(RuntimeWarning, match=f"could not be registered.*{remedy}"):
            for _ in range(2):
                store.write(keys, source.pool, source.ids).wait()
            get(store, keys)
        assert "ENOMEM" in store.stats()["plain_buffers_reason"]
        assert readable(store, keys).all()


# ---- a full disk

def full(store, path):
    """Write chains until blocks are refused; (keys that are stored, statuses refused)."""
    stored, refused = [], set()
    for seed in range(40):
        keys = chain(16, seed)
        source = Blocks(16, keys=keys)
        transfer = store.write(keys, source.pool, source.ids)
        try:
            transfer.wait()
        except TransferError as failed:
            assert "full" in str(failed) and failed.errno in (errno.ENOSPC, errno.EFBIG)
            refused |= set(transfer.status.tolist()) - {0}
        stored += [keys[i:i + 1] for i in np.flatnonzero(transfer.status == 0)]
        if refused:
            break
    return np.concatenate(stored), refused


def test_capacity(tmp_path, backend):
    with open_store(tmp_path, backend, capacity_bytes=100 * STRIDE) as store:
        keys, refused = full(store, tmp_path)
        assert not refused and store.stats()["evicted_blocks"] > 500
        assert 75 <= readable(store, keys).sum() == len(store) <= 100
        with store.pinned(keys[-16:]):
            assert full(store, tmp_path)[1] == set()
        assert store.match(keys[-16:]) == 16
    with open_store(tmp_path, backend) as store:
        assert readable(store, keys[-16:]).all()


@pytest.fixture
def small_disk(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root; test_a_file_size_limit covers the path")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path],
                          capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"mount: {made.stderr.strip()}; test_a_file_size_limit covers the path")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_full_disk(small_disk, backend):
    with open_store(small_disk, backend, segment_bytes=600_000) as store:
        keys, refused = full(store, small_disk)
        assert not refused and store.stats()["evicted_blocks"] > 300
        assert 75 <= readable(store, keys).sum() == len(store)
        store.pin(keys[-16:])
        assert full(store, small_disk)[1] == set() and readable(store, keys[-16:]).all()
    with open_store(small_disk, backend) as store:
        assert readable(store, keys[-16:]).all()


LIMITED = """
import resource, sys
sys.path[:0] = {path!r}
import test_store_faults as tests
resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, 700_000))
with tests.open_store({folder!r}, {backend!r}, segment_bytes={nbytes}) as store:
    keys, refused = tests.full(store, {folder!r}) if {nbytes} > 700_000 else (None, 0)
    if keys is None:
        tests.put(store, tests.chain(40))
        assert tests.readable(store, tests.chain(40)).all()
    print(refused, 0 if keys is None else len(keys))
"""


@pytest.mark.parametrize("nbytes", [500_000, 1_000_000])
def test_a_file_size_limit(tmp_path, backend, nbytes):
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    text = LIMITED.format(path=sys.path, folder=str(tmp_path), backend=backend, nbytes=nbytes)
    if nbytes > 700_000:        # not one segment can be made: every block is refused
        text = text.replace("tests.full", "only_refused").replace("with tests", ONLY_REFUSED, 1)
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == ("0 0" if nbytes < 700_000 else "{-27} 0")


ONLY_REFUSED = """
def only_refused(store, folder):
    keys = tests.chain(4)
    source = tests.Blocks(4, keys=keys)
    transfer = store.write(keys, source.pool, source.ids)
    try:
        transfer.wait()
    except tests.TransferError:
        pass
    return [], set(transfer.status.tolist())
with tests"""
