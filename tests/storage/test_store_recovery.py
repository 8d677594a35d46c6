"""Headers are the truth, and damage is a miss: flips, truncation, foreign and garbage files."""
import errno
import os
import shutil
import subprocess

import numpy as np
import pytest

from blocks import (LAYOUT, Blocks, chain, edit, get, open_store, payload, put, readable,
                    segments)
from kvio.errors import StoreError, TransferError
from kvio.storage import format as fmt

STRIDE = LAYOUT.stride
DURABLE = {"durability": "durable", "verify": "never"}


@pytest.fixture
def filled(tmp_path):
    """A closed store of one segment with 10 blocks: (path, segment file, keys, first payload)."""
    keys = chain(10)
    with open_store(tmp_path, durability="durable", segment_bytes=400_000) as store:
        put(store, keys)
        start = store.description.geometry.payload_offset
    [segment] = segments(tmp_path)
    return tmp_path, segment, keys, start


def flips(nbytes):
    return [(at, 1 << bit) for at in range(nbytes) for bit in range(8)]


def test_a_flipped_bit_anywhere_in_a_header_is_a_miss(filled):
    path, segment, keys, _ = filled
    for at, mask in flips(128):
        edit(segment, 8192 + 3 * 128 + at, lambda byte: byte ^ mask)
        with open_store(path) as store:
            assert store.match(keys) == 3, (at, mask)
            assert store.stats()["headers_damaged"] == 1
            if mask == 1:
                assert readable(store, keys).tolist() == [True] * 3 + [False] + [True] * 6
        edit(segment, 8192 + 3 * 128 + at, lambda byte: byte ^ mask)
    with open_store(path) as store:
        assert readable(store, keys).all()


def test_a_flipped_bit_in_page_0_hides_the_segment(filled):
    path, segment, keys, _ = filled
    for at, mask in flips(128)[::3] + [(4000, 1), (4092, 1), (4095, 128)]:
        edit(segment, at, lambda byte: byte ^ mask)
        with open_store(path) as store:
            assert store.match(keys) == 0 and len(store) == 0, (at, mask)
            assert list(store.stats()["segments_ignored"]) == [os.path.basename(segment)]
        edit(segment, at, lambda byte: byte ^ mask)


def test_page_1_decides_nothing(filled):
    path, segment, keys, _ = filled
    for at in range(4096, 8192, 97):
        edit(segment, at, lambda byte: byte ^ 255)
    with open_store(path) as store:
        assert readable(store, keys).all()


def test_a_flipped_payload_bit_is_never_returned(filled, backend):
    path, segment, keys, start = filled
    rng = np.random.default_rng(5)
    places = [0, LAYOUT.full_block_nbytes - 1, *rng.integers(0, LAYOUT.full_block_nbytes, 30)]
    for at in map(int, places):
        mask = 1 << int(rng.integers(8))
        edit(segment, start + 4 * STRIDE + at, lambda byte: byte ^ mask)
        with open_store(path, backend) as store:
            usable, status, _ = get(store, keys)
            assert usable == 4
            assert status.tolist() == [0] * 4 + [-errno.EBADMSG] + [0] * 5
            assert store.match(keys) == 4           # the bad copy is forgotten,
            put(store, keys)                        # so that a good one can be stored
            assert readable(store, keys).all()
            os.unlink(segments(path)[0] if segments(path)[0] != segment else segments(path)[1])
        edit(segment, start + 4 * STRIDE + at, lambda byte: byte ^ mask)


def test_bytes_after_the_payload_mean_nothing(filled, backend):
    path, segment, keys, start = filled
    edit(segment, start + 4 * STRIDE + LAYOUT.full_block_nbytes, lambda byte: byte ^ 255)
    with open_store(path, backend) as store:
        assert readable(store, keys).all()


def test_positive_control_without_verification_a_flip_is_returned(filled, backend):
    path, segment, keys, start = filled
    edit(segment, start + 4 * STRIDE + 1000, lambda byte: byte ^ 1)
    with open_store(path, backend, **DURABLE) as store:
        usable, _, target = get(store, keys)
        assert usable == 10
        wrong = np.flatnonzero(target.flat(target.ids[4]) != payload(keys[4]))
        assert wrong.tolist() == [1000]


def test_without_verification_the_header_is_read_again(filled, backend):
    path, segment, keys, _ = filled
    with open(segment, "r+b") as file:          # as if its writer had not closed: it may go on
        page1 = np.frombuffer(file.read(8192)[4096:], fmt.PAGE1)[0].copy()
        page1["heartbeat"] = 7
        file.seek(4096)
        file.write(fmt.seal(page1))
    with open_store(path, backend, **DURABLE) as store:     # the index knows all ten
        def header(slot):
            return slice(8192 + 128 * slot, 8192 + 128 * (slot + 1))

        with open(segment, "r+b") as file:
            data = bytearray(file.read(16384))
            damaged = bytearray(data)
            damaged[header(2)] = bytes(128)                 # gone
            record = np.frombuffer(bytes(data[header(5)]), fmt.HEADER)[0].copy()
            record["generation"] += 1                       # the slot was written again
            damaged[header(5)] = fmt.seal(record)
            record = np.frombuffer(bytes(data[header(6)]), fmt.HEADER)[0].copy()
            record["key"] = np.void(b"another block's!")
            damaged[header(6)] = fmt.seal(record)
            damaged[8192 + 128 * 8 + 30] ^= 4               # damaged
            file.seek(0)
            file.write(damaged)
        _, status, target = get(store, keys)
        miss, bad = -errno.ENOENT, -errno.EBADMSG
        assert status.tolist() == [0, 0, miss, 0, 0, miss, miss, 0, bad, 0]
        assert store.match(keys) == 2


def test_truncated_files(filled, backend):
    path, segment, keys, start = filled
    whole = os.path.getsize(segment)
    for size in (start + 7 * STRIDE, start + 6 * STRIDE + 1, start + 1, start, 8192 + 300, 8192,
                 8191, 4096, 100, 0):
        shutil.copy(segment, path / "copy")
        os.truncate(segment, size)
        with open_store(path, backend) as store:
            left = max(0, (size - start) // STRIDE)
            assert store.match(keys) == left
            assert readable(store, keys).tolist() == [True] * left + [False] * (10 - left)
        shutil.move(path / "copy", segment)
    assert os.path.getsize(segment) == whole


def test_garbage_and_foreign_files_are_ignored(filled, backend, tmp_path_factory):
    path, segment, keys, _ = filled
    other_keys = chain(5, seed=1)
    other = tmp_path_factory.mktemp("other")
    with open_store(other, segment_bytes=400_000) as store:
        put(store, other_keys)
    [foreign] = segments(other)
    shutil.copy(foreign, path)
    rng = np.random.default_rng(0)
    named = [fmt.segment_name(rng.bytes(16), n) for n in range(6)]
    (path / named[0]).write_bytes(rng.bytes(100_000))
    (path / named[1]).write_bytes(b"")
    (path / named[2]).write_bytes(bytes(100_000))
    (path / named[3]).mkdir()
    shutil.copy(segment, path / named[4])                   # renamed copy of our own
    os.symlink("nowhere", path / named[5])
    (path / "README").write_text("not a segment")
    (path / "segment-x-1").write_text("nor this")
    with open_store(path, backend) as store:
        assert readable(store, keys).all() and store.match(other_keys) == 0
        ignored = store.stats()["segments_ignored"]
        assert set(ignored) == {*named, os.path.basename(foreign)}
        assert "another store" in ignored[os.path.basename(foreign)]
        put(store, other_keys)
        assert readable(store, other_keys).all()


def test_two_segments_that_were_swapped_are_ignored(tmp_path):
    keys = chain(40)
    with open_store(tmp_path, segment_bytes=200_000) as store:
        put(store, keys)
    one, two = segments(tmp_path)[:2]
    os.rename(one, tmp_path / "x")
    os.rename(two, one)
    os.rename(tmp_path / "x", two)
    with open_store(tmp_path) as store:
        assert len(store.stats()["segments_ignored"]) == 2
        assert 0 < len(store) < 40 and store.match(keys) == 0
        readable(store, keys)


def test_headers_in_the_wrong_place_or_from_the_future(filled):
    path, segment, keys, _ = filled
    with open(segment, "r+b") as file:
        data = bytearray(file.read(16384))
        data[8192 + 128 * 2:8192 + 128 * 3], data[8192 + 128 * 4:8192 + 128 * 5] = \
            data[8192 + 128 * 4:8192 + 128 * 5], data[8192 + 128 * 2:8192 + 128 * 3]
        for slot, field, value in ((6, "version", 2), (7, "nbytes", 1), (8, "generation", 0),
                                   (9, "segment", np.void(bytes(16)))):
            where = slice(8192 + 128 * slot, 8192 + 128 * (slot + 1))
            record = np.frombuffer(bytes(data[where]), fmt.HEADER)[0].copy()
            record[field] = value
            data[where] = fmt.seal(record)
        file.seek(0)
        file.write(data)
    with open_store(path) as store:
        assert np.flatnonzero(readable(store, keys)).tolist() == [0, 1, 3, 5]
        assert store.stats()["headers_damaged"] == 6


def test_any_valid_copy_serves(filled, backend):
    path, segment, keys, start = filled
    os.rename(segment, path / "away")
    with open_store(path, backend) as store:
        put(store, keys)
    os.rename(path / "away", segment)
    for slot, name in enumerate(segments(path)):            # a bad block in each
        edit(name, start + slot * STRIDE, lambda byte: byte ^ 1)
    with open_store(path, backend) as store:
        assert len(store) == 10
        first = readable(store, keys)
        assert np.count_nonzero(~first) == 1                # that copy is forgotten
        assert readable(store, keys).all()                  # and the other one found


def test_a_directory_that_vanishes(tmp_path, backend):
    keys = chain(6)
    store = open_store(tmp_path / "store", backend, segment_bytes=100_000)
    put(store, keys[:3])
    shutil.rmtree(tmp_path / "store")
    readable(store, keys[:3])           # the file is still open, or known to be lost
    source = Blocks(60, keys=chain(60, seed=1))
    transfer = store.write(chain(60, seed=1), source.pool, source.ids)
    with pytest.raises(TransferError):              # the next segment cannot be made
        transfer.wait()
    assert -errno.ENOENT in transfer.status.tolist()
    store.close()


@pytest.fixture
def read_only(filled):
    """The filled store where nothing can be written; root needs a read-only mount for that."""
    path, keys = filled[0], filled[2]
    if os.geteuid() == 0:
        for options in (["--bind"], ["-o", "remount,ro,bind"]):
            made = subprocess.run(["mount", *options, path, path], capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"mount {options}: {made.stderr.strip()}")
        yield path, keys
        subprocess.run(["umount", "-l", path], check=True)
    else:
        os.chmod(path, 0o555)
        yield path, keys
        os.chmod(path, 0o755)


def test_a_read_only_directory_can_be_read(read_only, backend):
    path, keys = read_only
    with open_store(path, backend) as store:
        assert readable(store, keys).all()
        source = Blocks(1, keys=chain(1, seed=3))
        transfer = store.write(chain(1, seed=3), source.pool, source.ids)
        with pytest.raises(TransferError):
            transfer.wait()
        assert transfer.status[0] in (-errno.EROFS, -errno.EACCES)
    with pytest.raises(StoreError, match="cannot open a store"):
        open_store(path / "new", backend)


def test_without_verification_only_durable_blocks_go_unchecked(tmp_path, backend):
    """A power cut can leave a header without its payload unless the block was written durably;
    who opens the store later must not take the one for the other."""
    visible, durable = chain(3, seed=1), chain(3, seed=2)
    with open_store(tmp_path, backend=backend) as store:
        put(store, visible)
    with open_store(tmp_path, backend=backend, **DURABLE) as store:
        put(store, durable)
    geometry = fmt.read_description(str(tmp_path)).geometry
    for path in segments(tmp_path):
        for slot in range(3):
            edit(path, geometry.payload_offset + slot * STRIDE + 100, lambda byte: byte ^ 1)
    with open_store(tmp_path, backend=backend, **DURABLE) as store:
        assert store.match(visible) == store.match(durable) == 3
        assert get(store, visible)[0] == 0              # checked, hence a miss
        assert get(store, durable)[0] == 3              # unchecked, as was asked for
