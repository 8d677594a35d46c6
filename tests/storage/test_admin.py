"""kvio store info, ls and gc, as functions and as commands."""
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from blocks import LAYOUT, chain, edit, open_store, put, readable, segments
from kvio.errors import InvalidArgument, StoreError
from kvio.layout import KEY_DTYPE
from kvio.storage import admin, inspect
from kvio.storage import format as fmt

ROOT = b"root" + bytes(12)


def kvio(*arguments):
    return subprocess.run([sys.executable, "-m", "kvio", "store", *map(str, arguments)],
                          capture_output=True, text=True, timeout=120)


def fill(path, *chains, **options):
    """A closed writer with these chains; its segment files."""
    before = segments(path) if os.path.isdir(path) else []
    with open_store(path, **options) as store:
        for keys in chains:
            put(store, keys)
    return [name for name in segments(path) if name not in before]


# ---- info ----

def test_info(tmp_path):
    fill(tmp_path, chain(40), segment_bytes=200_000)
    fill(tmp_path, chain(3, seed=1), durability="durable")
    (tmp_path / "README").write_text("x")
    (tmp_path / fmt.segment_name(bytes(16), 0)).write_bytes(bytes(5000))
    found = admin.info(str(tmp_path), watch_s=0)
    geometry = fmt.read_description(str(tmp_path)).geometry
    assert found["segment"] == geometry.to_dict() and found["layout"] == LAYOUT.to_dict()
    totals = found["totals"]
    assert (totals["writers"], totals["blocks"], totals["durable_blocks"]) == (2, 43, 3)
    assert totals["used_bytes"] == 43 * LAYOUT.stride <= totals["disk_bytes"]
    assert totals["segments"] == len(segments(tmp_path)) - 1
    assert found["ignored"] == {fmt.segment_name(bytes(16), 0): "not a segment file"}
    assert found["other_files"] == ["README"]
    for writer in found["writers"]:
        assert [one["number"] for one in writer["segments"]] == list(range(len(writer["segments"])))
        assert all(one["page1"] == "ok" and 0 <= one["age_s"] < 60 for one in writer["segments"])


def test_info_tells_who_lives_by_watching(tmp_path):
    [old] = fill(tmp_path, chain(3))
    with open_store(tmp_path) as store:
        put(store, chain(3, seed=1))
        states = {one["writer"]: one["state"] for one in admin.info(str(tmp_path))["writers"]}
    [live] = [name for name in segments(tmp_path) if name != old]
    name = os.path.basename(live).split("-")[1]
    assert states.pop(name) == "alive"
    assert list(states.values())[0] in ("silent", "closed")


def mark_closed(path):
    with open(path, "r+b") as file:
        page = np.frombuffer(file.read(8192)[4096:], fmt.PAGE1)[0]
        file.seek(4096)
        file.write(fmt.encode_page1(bytes(page["segment"]), int(page["header_pages"]),
                                    fmt.HEARTBEAT_CLOSED))


def test_who_has_closed_need_not_be_watched(tmp_path):
    mark_closed(*fill(tmp_path, chain(3)))
    began = time.monotonic()
    [writer] = admin.info(str(tmp_path), watch_s=60)["writers"]
    assert writer["state"] == "closed" and time.monotonic() - began < 20


def test_info_of_what_is_no_store(tmp_path):
    with pytest.raises(StoreError, match="no store"):
        admin.info(str(tmp_path))
    done = kvio("info", tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr and "no store" in done.stderr


# ---- ls ----

def test_ls_lists_every_block(tmp_path):
    keys = chain(40)
    fill(tmp_path, keys, segment_bytes=200_000)
    fill(tmp_path, chain(2, seed=1), durability="durable")
    lines = [json.loads(line) for line in kvio("ls", "--json", tmp_path).stdout.splitlines()]
    assert len(lines) == 42 and sum(line["durable"] for line in lines) == 2
    assert {line["key"] for line in lines} > {key["key"].tobytes().hex() for key in keys}
    first = next(line for line in lines if line["key"] == keys[0]["key"].tobytes().hex())
    assert (first["parent"], first["tokens"], first["n"], first["slot"], first["generation"]) == (
        keys[0]["parent"].tobytes().hex(), 4, 0, 0, 1)
    text = kvio("ls", tmp_path).stdout.splitlines()
    assert len(text) == 43 and text[0].startswith("# key parent")
    assert sum(line.endswith(" durable") for line in text) == 2


def rows(*pairs):
    out = np.zeros(len(pairs), KEY_DTYPE)
    for row, (key, parent) in zip(out, pairs):
        row["key"] = list(key.ljust(16, b"."))
        row["parent"] = list(parent.ljust(16, b".")) if len(parent) < 16 else list(parent)
    return out


def test_chains(tmp_path):
    """a-b-c with d beside c; a chain of others (no parent); an orphan with its child; a ring."""
    fill(tmp_path, rows((b"a", ROOT), (b"b", b"a"), (b"c", b"b"), (b"d", b"b")),
         rows((b"x", bytes(16))), rows((b"o", b"gone"), (b"p", b"o")),
         rows((b"r", b"s"), (b"s", b"r"), (b"t", b"t")))
    fill(tmp_path, rows((b"e", ROOT)))
    assert admin.chains(str(tmp_path)) == {
        "blocks": 11, "further_copies": 0, "trees": 3, "chains": 4, "longest_chain": 3,
        "mean_chain": 2.0, "largest_tree": 4, "orphans": 5}
    assert json.loads(kvio("ls", "--chains", "--json", tmp_path).stdout)["orphans"] == 5
    assert "longest chain" in kvio("ls", "--chains", tmp_path).stdout


def test_sums_against_a_walk():
    """Random forests against walking up from every block."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        names = rng.permutation(60)
        parent = {int(name): int(names[rng.integers(max(1, i))]) if rng.random() < 0.8 else None
                  for i, name in enumerate(names)}
        stored = [name for name in parent if rng.random() < 0.8]
        depth = {}
        for name in stored:
            at, steps = name, 1
            while parent[at] is not None and parent[at] in stored and steps < 100:
                at, steps = parent[at], steps + 1
            depth[name] = steps if parent[at] is None else 0
        keys = np.array([b"%016d" % name for name in stored + stored[:5]], "S16").view("V16")
        parents = np.array([ROOT if parent[name] is None else b"%016d" % parent[name]
                            for name in stored + stored[:5]], "S16").view("V16")
        found = admin.sum_chains(keys, parents)
        assert found["blocks"] == len(stored) and found["further_copies"] == len(stored[:5])
        assert found["longest_chain"] == max(depth.values(), default=0)
        assert found["orphans"] == sum(steps == 0 for steps in depth.values())
        assert found["trees"] == sum(parent[name] is None for name in stored)


def test_a_million_blocks_in_seconds():
    rng = np.random.default_rng(1)
    keys = rng.bytes(16 << 20)
    keys = np.frombuffer(keys, "V16")[:1_000_000]
    parents = keys.copy()
    parents[1:] = keys[:-1]
    parents[::1000] = np.void(ROOT)
    began = time.process_time()
    found = admin.sum_chains(keys, parents)
    assert time.process_time() - began < 15
    assert (found["trees"], found["longest_chain"], found["orphans"]) == (1000, 1000, 0)


# ---- gc ----

def aged(path, seconds):
    os.utime(path, (time.time() - seconds,) * 2)


def test_gc_removes_the_oldest_segments_of_dead_writers(tmp_path):
    chains = [chain(10, seed) for seed in range(4)]
    files = [fill(tmp_path, keys)[0] for keys in chains]
    for file, age in zip(files, (10, 4000, 20, 3000)):
        aged(file, age)
    each = os.stat(files[0]).st_blocks * 512
    with open_store(tmp_path) as live:
        put(live, chain(10, 9))
        total = sum(os.stat(name).st_blocks * 512 for name in segments(tmp_path))
        options = {"max_bytes": total - 2 * each + 100, "dead_after_s": 3}
        would = admin.gc(str(tmp_path), dry_run=True, **options)
        assert len(segments(tmp_path)) == 5
        report = admin.gc(str(tmp_path), **options)
        assert [one["file"] for one in report["removed"]] == [
            os.path.basename(files[1]), os.path.basename(files[3])]
        assert would["removed"] == report["removed"] and report["reached"]
        assert report["after_bytes"] == total - 2 * each
        everything = admin.gc(str(tmp_path), max_bytes=0, dead_after_s=3)
        assert not everything["reached"] and len(segments(tmp_path)) == 1
        assert readable(live, chain(10, 9)).all()


def test_gc_removes_leftovers_and_empty_segments(tmp_path):
    [kept] = fill(tmp_path, chain(3))
    draft, touch = tmp_path / f"kvio.json.{'ab' * 16}", tmp_path / f"touch-{'cd' * 16}"
    draft.write_text("{")
    touch.write_bytes(b"x")
    (tmp_path / "README").write_text("mine")
    description = fmt.read_description(str(tmp_path))
    empty = tmp_path / fmt.segment_name(b"\1" * 16, 0)
    pages = description.geometry.header_pages
    empty.write_bytes(fmt.encode_page0(description, b"\1" * 16, 0, b"\2" * 16)
                      + fmt.encode_page1(b"\2" * 16, pages))
    report = admin.gc(str(tmp_path), dead_after_s=0.3)
    assert {one["file"] for one in report["removed"]} == {draft.name, touch.name, empty.name}
    assert sorted(os.listdir(tmp_path)) == sorted(["README", "kvio.json", os.path.basename(kept)])
    with open_store(tmp_path) as store:
        assert readable(store, chain(3)).all()


def test_gc_leaves_what_changes_while_it_watches(tmp_path, monkeypatch):
    fill(tmp_path, chain(1))
    touch = tmp_path / f"touch-{'cd' * 16}"
    touch.write_bytes(b"x")

    class Meanwhile(inspect.Look):
        def states(self, *arguments):
            touch.write_bytes(b"xy")
            return super().states(*arguments)
    monkeypatch.setattr(inspect, "Look", Meanwhile)
    assert admin.gc(str(tmp_path), dead_after_s=0)["removed"] == [] and touch.exists()
    with pytest.raises(InvalidArgument):
        admin.gc(str(tmp_path), max_bytes=-1)


# ---- commands ----

def test_fsck_tells_by_its_exit_status(tmp_path):
    [segment] = fill(tmp_path, chain(5))
    assert kvio("fsck", tmp_path).returncode == 0
    edit(segment, 8192 + 30, lambda byte: byte ^ 1)
    done = kvio("fsck", tmp_path)
    assert done.returncode == 1 and "slot 0: fails its CRC" in done.stdout
    done = kvio("fsck", tmp_path, "--json", "--repair", "--dead-after", "0")
    assert done.returncode == 1
    assert json.loads(done.stdout)["findings"][0]["repair"] == "dropped: header zeroed"
    done = kvio("fsck", tmp_path)
    assert done.returncode == 0 and "4 blocks" in done.stdout and "nothing wrong" in done.stdout
    assert kvio("fsck", tmp_path / "nowhere").returncode == 2


@pytest.mark.parametrize("arguments", [("gc", "--max-bytes", "x"), ("gc", "--dead-after", "-1"),
                                       ("info", "--watch", "soon"), ("gc", "--max-bytes", "-1")])
def test_nonsense_is_refused_by_name(tmp_path, arguments):
    done = kvio(*arguments[:1], tmp_path, *arguments[1:])
    assert done.returncode == 2 and "not a number of" in done.stderr


def test_commands_print_what_the_functions_found(tmp_path):
    [segment] = fill(tmp_path, chain(5))
    data = json.loads(kvio("info", tmp_path, "--json", "--watch", "0").stdout)
    assert data["totals"]["blocks"] == 5
    assert "5 blocks" in kvio("info", tmp_path, "--watch", "0").stdout
    done = kvio("gc", tmp_path, "--max-bytes", "0", "--dead-after", "0", "--dry-run")
    assert done.returncode == 0 and f"would remove {os.path.basename(segment)}" in done.stdout
    assert json.loads(kvio("gc", tmp_path, "--max-bytes", "0.5K", "--dead-after", "0",
                           "--json").stdout)["max_bytes"] == 512
    assert segments(tmp_path) == []
