"""kvio store fsck: finds damage in every field, drops it, and harms nothing else."""
import errno
import json
import os
import shutil
import time

import numpy as np
import pytest

from blocks import LAYOUT, Blocks, chain, edit, open_store, put, readable, segments
from kvio._ext.block import crc32c
from kvio.errors import FormatError, KvioError, StoreError
from kvio.storage import format as fmt
from kvio.storage import inspect
from kvio.storage.fsck import fsck

STRIDE = LAYOUT.stride
KEYS, OTHERS = chain(10), chain(4, seed=1)
NOW = {"repair": True, "dead_after_s": 0}           # nobody lives here, so do not watch


@pytest.fixture
def filled(tmp_path):
    """A store of two closed writers: (path, the first one's segment file, where slot 0 starts)."""
    with open_store(tmp_path, segment_bytes=400_000) as store:
        put(store, KEYS)
        start = store.description.geometry.payload_offset
    [segment] = segments(tmp_path)
    with open_store(tmp_path) as store:
        put(store, OTHERS)
    return str(tmp_path), segment, start


def right(path, missing=()):
    """Every block but the `missing` first writer's can be read, and is right to the byte."""
    with open_store(path) as store:
        expected = [i not in missing for i in range(len(KEYS))]
        return readable(store, KEYS).tolist() == expected and readable(store, OTHERS).all()


def found(report):
    return sorted((finding.kind, finding.slot) for finding in report.findings)


def spread(offset, nbytes):
    """(byte, bit) of flips: all bits of a field's first byte, one in its middle, one at its end."""
    return [(offset, 1 << bit) for bit in range(8)] + [
        (at, 16) for at in sorted({offset + nbytes // 2, offset + nbytes - 1} - {offset})]


def fields(struct, base):
    """Every field and every gap of a struct as (name, offset in the file, bytes)."""
    at = 0
    for name in struct.names:
        dtype, offset = struct.fields[name][:2]
        if offset > at:
            yield f"zeros{at}", base + at, offset - at
        yield name, base + offset, dtype.itemsize
        at = offset + dtype.itemsize
    assert at == struct.itemsize


def each(struct, base):
    return [pytest.param(at, nbytes, id=name) for name, at, nbytes in fields(struct, base)]


def through_flips(filled, at, nbytes, expected, missing):
    """Flip bits of a field, one at a time: found, never wrong bytes, and gone after a repair."""
    path, segment, _ = filled
    with open(segment, "rb") as file:
        whole = file.read()
    for byte, mask in spread(at, nbytes):
        edit(segment, byte, lambda value: value ^ mask)
        assert right(path, missing), (byte, mask)
        assert found(fsck(path)) == expected, (byte, mask)
        repaired = fsck(path, remove_unusable=True, **NOW)
        assert found(repaired) == expected
        assert all(finding.repair for finding in repaired.findings)
        assert fsck(path).clean and right(path, missing), (byte, mask)
        with open(segment, "wb") as file:
            file.write(whole)
    assert fsck(path).clean and right(path)


@pytest.mark.parametrize("at, nbytes", each(fmt.HEADER, 8192 + 3 * 128))
def test_a_flip_in_a_header(filled, at, nbytes):
    through_flips(filled, at, nbytes, [("header", 3)], {3})


@pytest.mark.parametrize("at, nbytes", each(fmt.PAGE0, 0))
def test_a_flip_in_page_0(filled, at, nbytes):
    through_flips(filled, at, nbytes, [("unusable", None)], set(range(10)))


@pytest.mark.parametrize("at, nbytes", each(fmt.PAGE1, 4096))
def test_a_flip_in_page_1(filled, at, nbytes):
    through_flips(filled, at, nbytes, [("page 1", None)], set())


def test_a_flip_in_a_payload(filled):
    start = filled[2]
    for slot, at in ((0, 0), (4, 5000), (9, LAYOUT.full_block_nbytes - 1)):
        through_flips(filled, start + slot * STRIDE + at, 1, [("payload", slot)], {slot})


def test_a_flip_after_a_payload_is_harmless(filled):
    path, segment, start = filled
    edit(segment, start + LAYOUT.full_block_nbytes, lambda byte: byte ^ 1)
    assert fsck(path).clean and right(path)


def test_every_flip_in_kvio_json_is_found_or_harmless(filled):
    """The last kind: the store's uuid reads otherwise, so no segment fits. Nothing is removed."""
    path, _, _ = filled
    file = os.path.join(path, "kvio.json")
    good = fmt.read_description(path)
    with open(file, "rb") as source:
        data = source.read()
    otherwise = []
    for at in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            try:
                read = fmt.Description.from_json(flipped.decode(), file)
            except (FormatError, UnicodeDecodeError):
                continue
            if read != good:
                assert (read.layout, read.geometry) == (good.layout, good.geometry)
                otherwise.append(bytes(flipped))
    assert otherwise
    for flipped in otherwise[::25]:
        with open(file, "wb") as target:
            target.write(flipped)
        report = fsck(path, remove_unusable=True, **NOW)
        assert found(report) == [("unusable", None)] * 2
        assert all("kvio.json" in finding.repair for finding in report.findings)
        with open_store(path) as store:
            assert len(store) == 0
    with open(file, "wb") as target:
        target.write(data)
    assert right(path)
    with open(file, "wb") as target:
        target.write(data[:-20])
    with pytest.raises(FormatError):
        fsck(path)
    os.unlink(file)
    with pytest.raises(StoreError, match="no store"):
        fsck(path)


@pytest.mark.parametrize("seed", range(12))
def test_truncation_at_random_points(filled, seed):
    path, segment, start = filled
    size = int(np.random.default_rng(seed).integers(0, (8192, os.path.getsize(segment))[seed % 2]))
    os.truncate(segment, size)
    left = max(0, (size - start) // STRIDE)
    missing = set(range(left, 10))
    assert right(path, missing)
    kinds = {kind for kind, _ in found(fsck(path))}
    assert kinds and kinds <= {"unusable", "page 1", "header", "beyond end"}
    fsck(path, remove_unusable=True, **NOW)
    assert fsck(path).clean and right(path, missing)


def test_swapped_and_duplicated_segments(tmp_path):
    keys = chain(40)
    with open_store(tmp_path, segment_bytes=200_000) as store:
        put(store, keys)
    first, second, *others = segments(tmp_path)
    assert others
    shutil.copy(first, tmp_path / fmt.segment_name(b"\1" * 16, 0))
    os.rename(first, tmp_path / "x")
    os.rename(second, first)
    os.rename(tmp_path / "x", second)
    report = fsck(str(tmp_path))
    assert found(report) == [("unusable", None)] * 3
    assert all("file name" in finding.detail for finding in report.findings)
    left = fsck(str(tmp_path), **NOW)
    assert all("--remove-unusable" in finding.repair for finding in left.findings)
    assert len(segments(tmp_path)) == 3 + len(others)
    fsck(str(tmp_path), remove_unusable=True, **NOW)
    assert fsck(str(tmp_path)).clean and len(segments(tmp_path)) == len(others)


def sealed(path, number, **values):
    """Change fields of a header and seal it again."""
    with open(path, "r+b") as file:
        file.seek(8192 + 128 * number)
        record = np.frombuffer(file.read(128), fmt.HEADER)[0].copy()
        for name, value in values.items():
            record[name] = value
        file.seek(8192 + 128 * number)
        file.write(fmt.seal(record))


def test_headers_from_the_future_or_from_elsewhere(filled):
    path, segment, _ = filled
    sealed(segment, 0, flags=0xFFFFFFFE)                # unknown flags are ignored
    for slot, field, value in ((2, "version", 2), (3, "generation", 0), (4, "nbytes", 1),
                               (5, "slot", 6), (6, "segment", np.void(bytes(16)))):
        sealed(segment, slot, **{field: value})
    report = fsck(path)
    assert found(report) == [("header", slot) for slot in range(2, 7)]
    assert [finding.detail for finding in report.findings] == [
        "has version 2", "has generation 0", "has another payload length", "belongs in slot 6",
        "belongs to another segment"]
    assert right(path, {2, 3, 4, 5, 6})
    fsck(path, **NOW)
    assert fsck(path).clean and right(path, {2, 3, 4, 5, 6})


def test_a_segment_from_the_future(filled):
    path, segment, _ = filled
    with open(segment, "r+b") as file:
        page = np.frombuffer(file.read(4096), fmt.PAGE0)[0].copy()
        page["version"] = 2
        file.seek(0)
        file.write(fmt.seal(page))
    [finding] = fsck(path, **NOW).findings
    assert finding.kind == "unusable" and "version 2" in finding.detail and os.path.exists(segment)


def test_a_generation_that_stands_twice(filled):
    path, segment, _ = filled
    sealed(segment, 7, generation=3)                    # slot 2 has it
    [finding] = fsck(path).findings
    assert (finding.kind, finding.slot) == ("generation", 7)
    fsck(path, **NOW)
    assert fsck(path).clean and right(path, {7})


def test_a_live_writers_file_is_not_touched(tmp_path):
    path = str(tmp_path)
    with open_store(path) as store:
        put(store, KEYS)
        [segment] = segments(path)
        edit(segment, 8192 + 3 * 128 + 30, lambda byte: byte ^ 1)
        with open(segment, "rb") as file:
            before = file.read()[8192:]
        report = fsck(path, repair=True, dead_after_s=20)       # known long before
        assert found(report) == [("header", 3)] and report.watched_s < 10
        assert "alive" in report.findings[0].repair
        with open(segment, "rb") as file:
            assert file.read()[8192:] == before
    fsck(path, **NOW)
    assert fsck(path).clean


def test_a_writer_is_dead_only_after_it_was_watched(filled):
    path, segment, _ = filled
    edit(segment, 8192, lambda byte: byte ^ 1)
    with open(segment, "r+b") as file:                  # it did not say that it has closed
        page = np.frombuffer(file.read(8192)[4096:], fmt.PAGE1)[0]
        file.seek(4096)
        file.write(fmt.encode_page1(bytes(page["segment"]), int(page["header_pages"]), 7))
    began = time.monotonic()
    assert fsck(path, repair=True, dead_after_s=0.7).findings[0].repair.startswith("dropped")
    assert time.monotonic() - began >= 0.7
    assert fsck(path).clean


def test_who_has_closed_is_known_at_once(filled):
    path, segment, _ = filled
    edit(segment, 8192 + 128, lambda byte: byte ^ 1)    # its page 1 carries the mark
    began = time.monotonic()
    assert fsck(path, repair=True, dead_after_s=60).findings[0].repair.startswith("dropped")
    assert time.monotonic() - began < 30 and fsck(path).clean


def test_a_repaired_page_1_does_not_say_that_its_writer_has_closed(filled):
    """It may be stopped and go on; and what is closed others may reclaim at once."""
    path, segment, _ = filled
    edit(segment, 4096 + 300, lambda byte: byte ^ 1)
    assert [finding.repair for finding in fsck(path, **NOW).findings] == ["rewritten"]
    assert fsck(path).clean
    with open(segment, "rb") as file:
        page = np.frombuffer(file.read(8192)[4096:], fmt.PAGE1)[0]
    assert fmt.is_sealed(page.tobytes()) and page["heartbeat"] != fmt.HEARTBEAT_CLOSED


def test_a_page_keeps_its_other_headers_and_newer_ones(filled, monkeypatch):
    """A header that is no longer what was judged stays as it is."""
    path, segment, _ = filled
    edit(segment, 8192 + 2 * 128 + 30, lambda byte: byte ^ 1)
    edit(segment, 8192 + 5 * 128 + 30, lambda byte: byte ^ 1)

    class Meanwhile(inspect.Look):
        def states(self, *arguments):
            edit(segment, 8192 + 5 * 128 + 30, lambda byte: byte ^ 1)       # it is whole again
            return super().states(*arguments) | {
                fmt.parse_segment_name(os.path.basename(segment))[0]: inspect.DEAD}
    monkeypatch.setattr(inspect, "Look", Meanwhile)
    report = fsck(path, **NOW)
    assert [finding.repair for finding in report.findings] == [
        "dropped: header zeroed", "left: the header has changed meanwhile"]
    assert fsck(path).clean and right(path, {2})


def test_a_store_that_is_being_written_is_clean(tmp_path):
    """Slots are given to other blocks while fsck reads: that is no damage."""
    path = str(tmp_path)
    chains = [chain(6, seed) for seed in range(12)]
    with open_store(path, segment_bytes=200_000) as store:
        sources = [Blocks(6, keys=keys) for keys in chains]
        until = time.monotonic() + 1.5
        turns, checks, pending = 0, 0, None
        while time.monotonic() < until:
            number = turns % len(chains)
            if turns >= 3:
                store.forget(chains[(turns - 3) % len(chains)])
            pending = store.write(chains[number], sources[number].pool, sources[number].ids)
            if turns % 4 == 0:
                report = fsck(path)
                assert report.clean, report.findings
                checks += 1
            pending.wait()
            turns += 1
    assert checks > 10 and turns > 40


@pytest.mark.parametrize("when", [1, 2])
def test_a_slot_that_is_given_away_meanwhile_is_no_damage(filled, monkeypatch, when):
    """Its writer invalidates the header while its payload is read the first, the second time."""
    path, segment, start = filled
    at, real, reads = start + 4 * STRIDE, os.preadv, 0
    edit(segment, at + 9, lambda byte: byte ^ 1)

    def racing(fd, buffers, offset):
        nonlocal reads
        if offset <= at < offset + sum(map(len, buffers)) and \
                os.readlink(f"/proc/self/fd/{fd}") == segment:
            reads += 1
            if reads == when:
                with open(segment, "r+b") as file:
                    file.seek(8192 + 4 * 128)
                    file.write(bytes(128))
        return real(fd, buffers, offset)
    monkeypatch.setattr(os, "preadv", racing)
    assert fsck(path).clean and reads == when
    monkeypatch.setattr(os, "preadv", real)
    assert fsck(path).clean and right(path, {4})


def test_a_read_error_is_named_and_left(filled, monkeypatch):
    path, segment, start = filled
    real = os.preadv

    def broken(fd, buffers, offset):
        reaches = offset + sum(len(buffer) for buffer in buffers)
        if offset <= start + 4 * STRIDE < reaches and os.readlink(f"/proc/self/fd/{fd}") == segment:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)
    monkeypatch.setattr(os, "preadv", broken)
    report = fsck(path, **NOW)
    assert found(report) == [("unreadable", 4)] and "left" in report.findings[0].repair
    monkeypatch.setattr(os, "preadv", real)
    assert fsck(path).clean and right(path)


def test_leftovers_and_strange_files(filled):
    path, segment, _ = filled
    draft = f"kvio.json.{'ab' * 16}"
    for name in (draft, "README", "segment-x-1"):
        with open(os.path.join(path, name), "w") as file:
            file.write("x")
    os.mkfifo(os.path.join(path, fmt.segment_name(b"\2" * 16, 0)))
    os.symlink("nowhere", os.path.join(path, fmt.segment_name(b"\3" * 16, 0)))
    os.mkdir(os.path.join(path, fmt.segment_name(b"\4" * 16, 0)))
    report = fsck(path)
    assert found(report) == [("leftover", None)] + [("unusable", None)] * 3
    assert report.other_files == ["README", "segment-x-1"]
    fsck(path, **NOW)
    assert not os.path.exists(os.path.join(path, draft))
    assert os.path.exists(os.path.join(path, "README"))


def test_information_is_no_fault(tmp_path):
    keys = chain(6)
    with open_store(tmp_path) as store:
        put(store, keys[2:])
    [one] = segments(tmp_path)
    os.rename(one, tmp_path / "away")
    with open_store(tmp_path) as store:
        put(store, keys[4:])
    os.rename(tmp_path / "away", one)
    report = fsck(str(tmp_path))
    assert report.clean and (report.orphans, report.further_copies) == (4, 2)


def test_the_report_is_plain_data_and_progress_is_told(filled):
    path, segment, _ = filled
    edit(segment, 8192, lambda byte: byte ^ 1)
    told = []
    report = fsck(path, progress=lambda *figures: told.append(figures))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["clean"] is False and data["findings"][0]["slot"] == 0
    assert told[-1] == (13 * STRIDE, 13 * STRIDE)
    with pytest.raises(KvioError):
        fsck(path, dead_after_s=-1)


def test_large_blocks_and_long_runs(tmp_path, monkeypatch):
    """Runs longer than a chunk, chunks smaller than a slot."""
    from kvio.storage import fsck as module
    with open_store(tmp_path) as store:
        put(store, KEYS)
    [segment] = segments(tmp_path)
    start = fmt.read_description(str(tmp_path)).geometry.payload_offset
    edit(segment, start + 7 * STRIDE + 10, lambda byte: byte ^ 1)
    for chunk in (1, STRIDE, 3 * STRIDE, 100 * STRIDE):
        monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
        report = fsck(str(tmp_path))
        assert found(report) == [("payload", 7)] and report.blocks == 10
    assert crc32c(b"123456789") == 0xE3069283
