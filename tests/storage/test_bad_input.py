"""What is wrong with what a caller gives is said in one typed error, by name; nothing changes."""
import errno
import os

import numpy as np
import pytest

from blocks import LAYOUT, Blocks, chain, get, open_store, put, readable, segments
from kvio.errors import InvalidArgument, KvioError, OutOfBlocks, StoreError
from kvio.memory import BlockPool


@pytest.mark.parametrize("where, code", [
    ("file", errno.ENOTDIR), ("file/below", errno.ENOTDIR), ("no/parent", errno.ENOENT),
    ("loose", errno.ENOTDIR)])
def test_a_path_that_is_no_directory(tmp_path, backend, where, code):
    (tmp_path / "file").write_text("somebody's")
    os.symlink(tmp_path / "nothing", tmp_path / "loose")
    with pytest.raises(StoreError, match="give a directory") as failed:
        open_store(tmp_path / where, backend)
    assert failed.value.errno == code and where.split("/")[0] in str(failed.value)
    assert (tmp_path / "file").read_text() == "somebody's"
    assert sorted(name for name in os.listdir(tmp_path) if name != "3fs-virt") == ["file", "loose"]


KEYS = [
    ([b"short"], "16 bytes, not 5"), ([b"x" * 16, b"y" * 17], "16 bytes, not 17"),
    (b"x" * 16, "rows of block_keys"), (["x" * 16], "rows of block_keys"),
    (np.zeros((2, 15), np.uint8), "rows of block_keys"), (None, "rows of block_keys"),
    (np.zeros((2, 16), np.int8), "rows of block_keys"), (7, "rows of block_keys"),
    ([[1], [2, 3]], "keys"), (chain(4).reshape(2, 2), "rows of block_keys")]


@pytest.mark.parametrize("keys, message", KEYS, ids=range(len(KEYS)))
def test_keys_of_the_wrong_size_or_kind(tmp_path, keys, message):
    pool = BlockPool(LAYOUT, 2)
    ids = pool.alloc(2)
    with open_store(tmp_path) as store:
        for use in (store.match, store.contains, store.forget, store.pin, store.unpin,
                    lambda keys: store.read(keys, pool, ids),
                    lambda keys: store.write(keys, pool, ids)):
            with pytest.raises(InvalidArgument, match=message):
                use(keys)
        assert len(store) == 0 and not pool._pins.any()


@pytest.mark.parametrize("nothing", [[], (), chain(0), np.zeros((0, 16), np.uint8)],
                         ids=["list", "tuple", "rows", "bytes"])
def test_nothing_is_no_error(tmp_path, nothing):
    pool = BlockPool(LAYOUT, 1)
    with open_store(tmp_path) as store:
        assert store.match(nothing) == store.pin(nothing) == 0
        assert store.contains(nothing).tolist() == [] and store.forget(nothing) is None
        assert store.read(nothing, pool, []).wait() == 0
        store.write(nothing, pool, []).wait()
        assert store.stats()["hit_rate"] is None and segments(tmp_path) == []


def test_duplicate_keys_overlapping_blocks_and_too_many(tmp_path, backend):
    keys, source = chain(3), Blocks(3)
    pool, ids = source.pool, source.ids
    with open_store(tmp_path, backend) as store:
        for move, keys_, ids_, message in (
                (store.write, keys[[0, 1, 0]], ids, "a key occurs twice"),
                (store.read, keys, ids[[0, 1, 1]], "a block id occurs twice"),
                (store.read, keys, ids[:2], "3 keys, but 2 block ids"),
                (store.read, keys, [0, 1, pool.num_blocks], "must lie between 0 and 6"),
                (store.write, keys, [0, 1, -1], "must lie between 0 and 6"),
                (store.read, keys, [0.0, 1.0, 2.0], "must be ints"),
                (store.write, keys, [0, 1, 6], "not allocated")):
            with pytest.raises(InvalidArgument, match=message):
                move(keys_, pool, ids_)
        with pytest.raises(OutOfBlocks, match="9 blocks asked for, 4 of 7 free"):
            pool.alloc(9)
        assert len(store) == 0 and not pool._pins.any()
        put(store, keys)
        assert get(store, keys[[0, 1, 0]])[0] == 3          # a key may be read twice
        source.flat(ids[0])[:] = source.flat(ids[1])        # and one block written under two keys
        store.write(chain(2, 7), pool, ids[[0, 0]]).wait()
        assert store.match(chain(2, 7)) == 2


def test_strange_files_among_segments_are_left_alone(tmp_path, backend):
    with open_store(tmp_path, backend) as store:
        put(store, chain(5))
    uuid = os.path.basename(segments(tmp_path)[0]).split("-")[1]
    made = {"notes.txt": b"mine", "segment-": b"", f"segment-{uuid}-00": b"x" * 9000,
            f"segment-{uuid}-7": b"\0" * 9000, f"segment-{uuid.upper()}-1": b"KVIOSEG1",
            f"touch-{'0' * 32}": b"short", "kvio.json.tmp": b"{"}
    for name, data in made.items():
        (tmp_path / name).write_bytes(data)
    os.mkdir(tmp_path / f"segment-{uuid}-8")
    for name in (f"segment-{uuid}-9", f"touch-{'1' * 32}"):
        os.mkfifo(tmp_path / name)                          # opening one must not wait for ever
    with open_store(tmp_path, backend) as store:
        assert readable(store, chain(5)).all() and len(store) == 5
        assert set(store.stats()["segments_ignored"]) == {f"segment-{uuid}-{n}" for n in (7, 8, 9)}
        assert store.stats()["segments_ignored"][f"segment-{uuid}-9"] == "not a regular file"
        put(store, chain(5, 1))
        store.refresh()
    for name, data in made.items():
        assert (tmp_path / name).read_bytes() == data


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_description_that_is_no_file(tmp_path, make):
    make(tmp_path / "kvio.json")
    with pytest.raises(StoreError, match="cannot read.*kvio.json"):
        open_store(tmp_path)


def test_every_error_of_a_store_is_one_of_kvios(tmp_path):
    """And still the built-in one that it is: callers may catch either."""
    with pytest.raises(KvioError) as failed:
        open_store(tmp_path / "no" / "where")
    assert isinstance(failed.value, OSError)
    with pytest.raises(KvioError) as failed, open_store(tmp_path) as store:
        store.match(7)
    assert isinstance(failed.value, ValueError)
