"""A disk without space is a normal event: what can go goes, and then single blocks fail.

Each test runs on a small file system of its own.
"""
import errno
import os
import subprocess

import numpy as np
import pytest

from blocks import LAYOUT, Blocks, chain, get, open_store, put, readable
from kvio._ext import ring as _ring
from kvio.storage import writer
from test_capacity import attempt, exact, left_behind

MOUNTS = {"tmpfs": ["-t", "tmpfs", "-o", "size=3m", "tmpfs"], "ext4": ["-o", "loop"]}


@pytest.fixture(params=MOUNTS)
def disk(request, tmp_path):
    """A file system of about 3 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    path, arguments = tmp_path / "disk", MOUNTS[request.param]
    path.mkdir()
    if request.param == "ext4":
        image = tmp_path / "image"
        image.write_bytes(b"")
        os.truncate(image, 4 << 20)
        made = subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", image],
                              capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"mkfs.ext4: {made.stderr.strip()}")
        arguments = [*arguments, image]
    made = subprocess.run(["mount", *arguments, path], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"mount: {made.stderr.strip()}")
    yield path / "store"
    subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture(params=["fallocate", "sparse"])
def reserving(request, monkeypatch):
    """Whether the file system can reserve space; where it cannot, ENOSPC comes when writing."""
    if request.param == "sparse":
        monkeypatch.setattr(writer._ring, "allocate", lambda *_: errno.EOPNOTSUPP)
    return request.param == "fallocate"


def test_a_full_disk_evicts_and_goes_on(disk, backend, reserving):
    failed, written = 0, 0
    with open_store(disk, backend, segment_bytes=600_000) as store:
        for seed in range(150):
            keys = chain(12, seed)
            bad = np.count_nonzero(attempt(store, keys))
            failed, written = failed + bad, written + 12
            # Where nothing is reserved the write that meets the end fails its blocks alone, and
            # the next one makes room. How often that is depends on how fast they come.
            assert bad == 0 or not reserving
            assert readable(store, keys).sum() == 12 - bad
            exact(store)
        assert written * LAYOUT.stride > 6 * (3 << 20) and failed <= written // 30
        assert store.stats()["evicted_blocks"] > 1000
        held = np.concatenate([chain(12, seed) for seed in range(150)])
        whole = readable(store, held).sum()
    with open_store(disk, backend) as store:
        assert readable(store, held).sum() >= whole
        assert store.stats()["headers_damaged"] == 0


def test_a_full_disk_with_all_pinned_fails_new_blocks_alone(disk, backend):
    with open_store(disk, backend, segment_bytes=600_000) as store:
        chains = []
        while not store.stats()["refused_blocks"]:
            chains.append(chain(12, len(chains)))
            store.pin(chains[-1]) if not attempt(store, chains[-1]).any() else None
        for keys in chains[:-1]:
            assert readable(store, keys).all()
        stayed = len(store) - 12
        store.unpin(chains[0])
        attempt(store, chain(12, seed=99))
        assert store.match(chains[0]) < 12 and len(store) >= stayed


def test_a_full_disk_takes_what_dead_writers_left_first(disk):
    chains = left_behind(disk, 6, blocks=30)
    with open_store(disk, segment_bytes=1 << 20) as store:
        get(store, chains[5])
        own = []
        while store.stats()["reclaimed_segments"] < 5:
            own.append(chain(10, len(own)))
            assert not attempt(store, own[-1]).any() and len(own) < 100
        assert store.match(chains[5]) == 30 and not store.stats()["evicted_blocks"]
        for keys in own:
            assert readable(store, keys).all()


def test_a_full_disk_is_asked_again_after_a_while(disk, monkeypatch):
    now, asked = [100.0], []
    monkeypatch.setattr(writer.time, "monotonic", lambda: now[0])
    allocate = _ring.allocate
    monkeypatch.setattr(writer._ring, "allocate",
                        lambda *a: (asked.append(a), allocate(*a))[1])
    with open_store(disk, segment_bytes=600_000) as store:
        while not store.stats()["evicted_blocks"]:
            put(store, chain(12, len(asked) + len(store)))
        asked.clear()
        for seed in range(5):
            put(store, chain(6, 1000 + seed))
        assert not asked                        # within the same second
        waits = []
        for seed in range(12):
            began = now[0]
            while not asked:
                now[0] += 0.5
                put(store, chain(6, int(now[0] * 10)))
            waits.append(now[0] - began)
            asked.clear()
        assert waits[0] <= 1.5 and 59 <= waits[-1] <= 62
        assert all(after >= before - 1 for before, after in zip(waits, waits[1:]))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_to_reserve(tmp_path, backend, monkeypatch, code):
    """The seam of quotas, which no test can mount."""
    room, allocate = [40 * LAYOUT.stride], _ring.allocate

    def quota(fd, offset, nbytes):
        if nbytes > room[0]:
            return code
        room[0] -= nbytes
        return allocate(fd, offset, nbytes)

    monkeypatch.setattr(writer._ring, "allocate", quota)
    with open_store(tmp_path, backend) as store:
        for seed in range(30):
            assert not attempt(store, chain(8, seed)).any()
            assert exact(store) <= 40 and readable(store, chain(8, seed)).all()
        assert store.stats()["evicted_blocks"] > 150


def test_not_even_one_segment_fits(tmp_path, backend, monkeypatch):
    monkeypatch.setattr(writer._ring, "allocate", lambda *_: errno.ENOSPC)
    with open_store(tmp_path, backend) as store:
        assert (attempt(store, chain(4)) == -errno.ENOSPC).all() and len(store) == 0
        assert not [name for name in os.listdir(tmp_path) if name.startswith("segment")]


def test_what_a_killed_writer_holds_is_bounded(tmp_path):
    """Space is reserved ahead in steps, and never beyond the capacity."""
    with open_store(tmp_path, segment_bytes=1 << 30, capacity_bytes=1 << 20) as store:
        put(store, chain(4))
        held = os.stat(store._writer.segments[0].path).st_blocks * 512
        assert held <= store.description.geometry.payload_offset + (1 << 20)
    with open_store(tmp_path / "free", segment_bytes=1 << 30) as store:
        put(store, chain(4))
        held = os.stat(store._writer.segments[0].path).st_blocks * 512
        assert held <= store.description.geometry.payload_offset + (64 << 20) + 4096


def test_a_slot_whose_device_fails_is_not_used_again(tmp_path, backend):
    with open_store(tmp_path, backend, capacity_bytes=20 * LAYOUT.stride) as store:
        keys = chain(10)
        put(store, keys)
        start = store.description.geometry.payload_offset + 3 * LAYOUT.stride
        store._default_ring()._ring._fault(1, -errno.EIO, count=100, from_offset=start,
                                           to_offset=start + LAYOUT.stride)
        source = Blocks(10)
        store.read(keys, source.pool, source.ids).wait()
        store._default_ring()._ring._fault(0, 0)
        assert store.match(keys) == 3 and exact(store) == 9
        for seed in range(1, 12):
            put(store, chain(10, seed))
        slots = store._index.find(np.concatenate([chain(10, seed) for seed in range(12)]))
        assert 3 not in slots["slot"][slots["status"] != -errno.ENOENT].tolist()
        assert store.stats()["lost_blocks"] == 1
