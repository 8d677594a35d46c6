"""The block store beside fio, its floor in C and other stores, on disk, page cache and tmpfs.

    python benchmarks/bench_storage.py [ROW ...] [--rounds 15] [--dir DIR] [--json FILE] [--list]

DIR should lie on the disk that is to be measured. Each contender is a process; they run in turn,
and a figure is the median over rounds of the ratio of two runs of the same round, with quartiles.
The row's reference runs twice a round: its ratio to itself is the null, and where the null's
quartiles lie more than 0.1 apart, a comparison of speed is inconclusive. CPU is that of the whole
process. kvio reads, in random order, what another store object wrote and closed; everybody reads
the same file (LMCache's fs_native excepted), and what was read is checked.
"""
import argparse
import contextlib
import ctypes
import itertools
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent))

from contenders import Setting, content, keys_of, layout_of         # noqa: E402
from rounds import Claim, judge, load, play, summary, table         # noqa: E402

from kvio import BlockPool, BlockStore                              # noqa: E402
from kvio._ext import block as _block                               # noqa: E402

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DISK = ("Fio", "Kvio", "KvioAlways", "Liburing", "LiburingHuge", "NixlNap", "LmcacheRaw",
        "LmcacheFs")
DISK_CLAIMS = (
    Claim("rate", "Kvio", "Fio", at_least=0.95), Claim("cpu", "Kvio", "Liburing", at_most=1.1),
    Claim("cpu", "Kvio", "LiburingHuge"),
    Claim("cpu", "Kvio", "NixlNap", at_most=0.25), Claim("rate", "KvioAlways", "Fio"),
    Claim("cpu+", "KvioAlways", "Kvio", at_most=0.15), Claim("cpu", "LiburingHuge", "NixlNap"),
    Claim("rate", "Liburing", "Fio"), Claim("rate", "LiburingHuge", "Fio"),
    Claim("rate", "Kvio", "LiburingHuge"), Claim("rate", "LmcacheRaw", "Fio"),
    Claim("rate", "LmcacheFs", "Fio"))
MEMORY = ("LmcacheFs", "Kvio", "Pread4", "KvioAlways")
MEMORY_CLAIMS = (
    Claim("rate", "Kvio", "LmcacheFs", at_least=1), Claim("rate", "Kvio", "Pread4"),
    Claim("cpu", "Kvio", "LmcacheFs"), Claim("rate", "KvioAlways", "LmcacheFs"))
WRITES = ("Fio", "Kvio", "Liburing", "LiburingHuge")


class Row(NamedTuple):
    op: str
    media: str                  # disk (O_DIRECT), cache (of the same disk), tmpfs
    nbytes: int
    names: tuple
    claims: tuple
    region: int = GIB           # bytes of data
    depth: int = 16


def write_claims(least):
    return (Claim("rate", "Kvio", "Fio", at_least=least), Claim("rate", "Liburing", "Fio"),
            Claim("rate", "Kvio", "LiburingHuge"), Claim("cpu", "Kvio", "Liburing"),
            Claim("cpu", "Kvio", "LiburingHuge"))


def size(nbytes):
    return f"{nbytes // MIB}m" if nbytes >= MIB else f"{nbytes // KIB}k"


ROWS = {f"disk-{size(n)}": Row("read", "disk", n, DISK, DISK_CLAIMS, depth=8 if n > 4 * MIB else 16)
        for n in (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)}
ROWS |= {f"{media}-{size(n)}": Row("read", media, n, MEMORY, MEMORY_CLAIMS, GIB // 2)
         for media in ("cache", "tmpfs") for n in (MIB, 4 * MIB)}
ROWS |= {f"write-{size(n)}": Row("write", "disk", n, WRITES, write_claims(0.95), GIB // 2)
         for n in (MIB, 4 * MIB)}
ROWS |= {f"durable-{size(n)}": Row("durable", "disk", n, WRITES, write_claims(0.9), GIB // 2)
         for n in (64 * KIB, MIB, 4 * MIB)}
ROWS["latency-4m"] = Row("latency", "disk", 4 * MIB, ("Pread", "KvioOne"),
                         (Claim("time", "KvioOne", "Pread", at_most=1.1),), depth=1)
SMOKE = ("disk-64k", "tmpfs-1m", "durable-1m", "latency-4m")


def compile_floors(folder):
    """What cannot be compiled is missing, and its contenders say so."""
    folder, here = Path(folder), Path(__file__).parent
    for name, flags in (("storage_floor", ["-luring", "-pthread"]), ("read_floor", [])):
        with contextlib.suppress(FileNotFoundError):
            subprocess.run([os.environ.get("CC", "cc"), "-O3", "-shared", "-fPIC",
                            here / f"{name}.c", "-o", folder / name, *flags], capture_output=True)


def make_data(folder, row, built):
    """A store with all blocks, written durably and closed; its Setting."""
    layout, count = layout_of(row.nbytes), row.region // row.nbytes
    setting = Setting(row.op, row.nbytes, row.depth, row.media, count, folder, "", 0,
                      built)
    if setting.writes:
        return setting
    batch = max(1, 64 * MIB // row.nbytes)
    pool, keys = BlockPool(layout, batch), keys_of(setting)
    with BlockStore.open(os.path.join(folder, "store"), layout, durability="durable",
                         segment_bytes=row.region + row.region // 4) as store:
        ids = pool.alloc(batch)
        for first in range(0, count, batch):
            some = min(batch, count - first)
            pool.region.array[:some * row.nbytes] = content(row.nbytes, first, some).reshape(-1)
            store.write(keys[first:first + some], pool, ids[:some]).wait()
        start = store.description.geometry.payload_offset
    [segment] = Path(folder, "store").glob("segment-*")
    with open(segment, "rb") as file:
        if row.media != "disk":                 # now it is in memory
            while file.read(16 * MIB):
                pass
        for number in (0, count - 1):           # block i lies in slot i: the others rely on it
            file.seek(start + number * row.nbytes)
            assert file.read(row.nbytes) == content(row.nbytes, number, 1).tobytes()
    return setting._replace(segment=str(segment), start=start)


@contextlib.contextmanager
def scratch(top, media):
    folder = tempfile.mkdtemp(prefix="kvio-bench-", dir="/dev/shm" if media == "tmpfs" else top)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_row(row, top, *, rounds=15, nbytes=512 * MIB):
    """(results, runs, {contender: why it did not run})."""
    with scratch(top, row.media) as folder, tempfile.TemporaryDirectory() as built:
        compile_floors(built)
        setting = make_data(folder, row, built)
        runs, again, skipped = play(row.names, setting, rounds=rounds, nbytes=nbytes)
    return judge(row.claims, runs, again), runs, skipped


def run_crc(rounds=15, cold=GIB, part=64 * MIB):
    """CRC-32C in cache, and of memory that no cache holds, beside a loop that only reads."""
    with tempfile.TemporaryDirectory() as built:
        compile_floors(built)
        floor = ctypes.CDLL(os.path.join(built, "read_floor")).read_only
    floor.restype, floor.argtypes = ctypes.c_uint64, (ctypes.c_void_p, ctypes.c_size_t)
    data = np.frombuffer(mmap.mmap(-1, cold), np.uint8)
    data.view(np.uint64)[:] = np.arange(cold // 8, dtype=np.uint64)
    parts = itertools.cycle(np.split(data, cold // part))
    cached, times = data[:256 * KIB], 400

    def timed(function, nbytes):
        cpu, begin = time.process_time(), time.perf_counter()
        function()
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "cpu": time.process_time() - cpu, "nbytes": nbytes}

    def read():
        address = next(parts).ctypes.data
        return timed(lambda: floor(address, part), part)

    runs, again = {"read": [], "crc": [], "crc in cache": []}, []
    for _ in range(rounds + 1):
        runs["read"].append(read())
        some = next(parts)
        runs["crc"].append(timed(lambda some=some: _block.crc32c(some), part))
        again.append(read())
        runs["crc in cache"].append(timed(
            lambda: [_block.crc32c(cached) for _ in range(times)], times * cached.nbytes))
    runs, again = {name: of[1:] for name, of in runs.items()}, again[1:]
    claims = [Claim("cpu rate", "crc in cache", "read", at_least=40),
              Claim("rate", "crc", "read", at_least=0.9)]
    return judge(claims, runs, again), runs, {}


def reported(name, results, runs, skipped):
    parts = [f"\n## {name}, load {load():.1f}",
             table(["contender", "GB/s", "CPU s/GB"], summary(runs)),
             *(f"{who} skipped: {why}" for who, why in skipped.items())]
    if results:
        head = ["claim", "wanted", f"median of {results[0].rounds} [quartiles]", "null", ""]
        parts.append(table(head, [result.cells() for result in results]))
    return "\n".join(parts)


def record(name, results, runs, skipped):
    return {"row": name, "load": load(), "skipped": skipped, "runs": runs, "claims": [
        {**result.claim._asdict(), "measured": result.measured, "null": result.null,
         "verdict": result.verdict} for result in results]}


def pytest_generate_tests(metafunc):
    """No decorators: the script runs where pytest is not installed."""
    if "name" in metafunc.fixturenames:
        smoke = metafunc.config.getoption("--benchmark-disable")
        metafunc.parametrize("name", SMOKE if smoke else ROWS)


def test_storage(benchmark, smoke, tmp_path_factory, name):
    """A small form, with what is installed here; the figures come from the script."""
    row = ROWS[name]
    row = row._replace(region=max(16 * MIB, 4 * row.nbytes) if smoke else 256 * MIB)
    top = os.environ.get("KVIO_BENCH_DIR", tmp_path_factory.mktemp("storage"))
    done = benchmark.pedantic(run_row, (row, str(top)), rounds=1, iterations=1, kwargs={
        "rounds": 1 if smoke else 5, "nbytes": (8 if smoke else 64) * MIB})
    assert {"Kvio", "KvioOne"} & set(done[1]), done[2]
    benchmark.extra_info["report"] = reported(name, *done)


def test_verdicts():
    """A noisy null makes a comparison of speed inconclusive; CPU and quiet ones are judged."""
    def runs(*seconds):
        return [{"seconds": s, "cpu": s, "nbytes": 1} for s in seconds]
    claims = [Claim("rate", "K", "F", at_least=0.95), Claim("cpu", "K", "F", at_most=1.1),
              Claim("time", "F", "K", at_most=1), Claim("rate", "K", "absent", at_least=1)]
    both = {"F": runs(1, 1, 1), "K": runs(1.2, 1.2, 1.2)}
    assert [r.verdict for r in judge(claims, both, runs(1, 1, 1))] == ["MISSED", "MISSED", "met"]
    assert [r.verdict for r in judge(claims, both, runs(1, 1.3, 2))] == [
        "inconclusive, MISSED", "MISSED", "inconclusive, met"]
    assert abs(judge(claims, both, runs(1, 1, 1))[0].measured[1] - 1 / 1.2) < 1e-9


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rows", nargs="*", help="beginnings of names; none: all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mb", type=int, default=512, help="MiB a run")
    parser.add_argument("--region", type=int, help="MiB of data")
    parser.add_argument("--dir", default=os.environ.get("KVIO_BENCH_DIR", "."))
    parser.add_argument("--only", help="contenders, with commas; the first is the reference")
    parser.add_argument("--json", help="append one line a row to this file")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    chosen = [name for name in [*ROWS, "crc"] if not args.rows or name.startswith(
        tuple(args.rows))]
    if args.list:
        print("\n".join(chosen))
        return
    for name in chosen:
        if name == "crc":
            done = run_crc(args.rounds)
        else:
            row = ROWS[name]
            if args.region:
                row = row._replace(region=args.region * MIB)
            if args.only:
                row = row._replace(names=tuple(args.only.split(",")))
            done = run_row(row, args.dir, rounds=args.rounds, nbytes=args.mb * MIB)
        print(reported(name, *done), flush=True)
        if args.json:
            with open(args.json, "a") as file:
                file.write(json.dumps(record(name, *done)) + "\n")


if __name__ == "__main__":
    main()
