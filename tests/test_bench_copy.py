"""bench_copy.py and its report: what the figures are made of, that every way's bytes are looked at,
and that the cases for a GPU run on the fake driver, where they say nothing about speed."""
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import copy_case                                                            # noqa: E402
import copy_host                                                            # noqa: E402
from copy_case import Case, Sample                                          # noqa: E402
from copy_report import Claim, CopyReport, rows_of                          # noqa: E402


class Named(NamedTuple):
    """A way, as far as the report looks at it."""
    name: str
    calls: int

    def note(self):
        return "a note"


# ---- figures

def samples(*seconds, submit_ns=1000):
    return [Sample(submit_ns, each, 0.002) for each in seconds]


def test_a_row_is_made_of_ratios_within_each_round():
    case = Case("H2D", 1 << 20, 4)
    ways = [Named("top", 1), Named("half", 4)]
    taken = {"top": samples(1e-3, 2e-3, 3e-3), "half": samples(2e-3, 4e-3, 6e-3, submit_ns=8000)}
    top, half = rows_of("a card", case, ways, taken, "top")
    assert half.of_ceiling == (0.5, 0.5, 0.5) and top.of_ceiling == (1, 1, 1)
    assert half.submit_us == (2, 2, 2) and top.submit_us == (1, 1, 1)   # a block; one call
    assert half.gb_per_s[1] == pytest.approx(4 * 2**20 / 4e-3 / 1e9)
    assert (half.rounds, half.cpu_ms, half.note) == (3, 2, "a note")


@pytest.mark.parametrize("wanted, measured, verdict", [
    ((">=", 0.9), 0.9, "met"), ((">=", 0.9), 0.899, "MISSED"), (("<=", 0.5), 0.5, "met"),
    (("<=", 0.5), 0.51, "MISSED"), (None, 7, "")])
def test_the_median_decides(wanted, measured, verdict):
    claim = Claim("x", wanted, (0, measured, 9), "µs", 5)
    assert claim.verdict == verdict
    assert claim._replace(counts=False).verdict == "fake driver: no speed"


def test_the_report_is_a_table_for_each_machine_and_a_plot(tmp_path):
    report = CopyReport(tmp_path / "copy.md")
    for machine in "card A", "card B":
        for block in 4096, 8192:
            for name, seconds in ("ceiling: one", 1e-3), ("kvio auto", 2e-3):
                report.add(rows_of(machine, Case("D2H", block, 8), [Named(name, 8)],
                                   {name: samples(seconds)}, name))
    report.claim(Claim("a figure", (">=", 0.9), (0.7, 0.8, 0.95), "", 3))
    assert "a figure" in report.path.read_text()        # before the session is over
    report.note("torch", "not installed")
    report.note("torch", "said twice")
    report.finish()
    text = report.path.read_text()
    assert text.count("Copies on card") == 2 and text.count("| 4 KiB × 8") == 4
    assert "| a figure | ≥ 0.9  | 0.800 [0.700, 0.950] | MISSED |" in text
    assert "torch: not installed" in text and "said twice" not in text
    assert all(len(line) == len(lines[0]) for lines in [[
        line for line in text.split("\n") if line.startswith("|") and "figure" in line]]
        for line in lines)
    assert (tmp_path / "copy.svg").read_text().count("kvio auto") == 2      # legends


def test_a_plot_has_the_largest_count_of_each_size_and_no_sweep():
    report, case = CopyReport(), Case("H2D", 4096, 16)
    for each, name in ((case, "kvio auto"), (case.within(4096), "kvio auto"),
                       (case, "kvio kernel, at most 2 SMs"), (case, "one (again)"),
                       (Case("H2D", 4096, 64, "regular"), "w")):
        report.rows += rows_of("m", each, [Named(name, 1)], {name: samples(1e-3)}, name)
    (key, rows), = report._curves().items()
    assert key == ("m", "H2D", "kvio auto") and [row.count for row in rows] == [16]


# ---- cases

def test_a_case_is_cut_to_the_bytes_there_are():
    case = Case("H2D", 4096, 4096)
    assert case.within(1 << 20).count == 256 and case.within(1).count == 1
    assert case.within(1 << 30) == case
    assert str(case) == "H2D-4K-x4096-scattered".replace("-x", "x")


def test_scattered_blocks_are_permutations_and_fresh_bytes_differ():
    for order in Case("H2D", 4096, 100).orders():
        assert sorted(order) == list(range(100)) != list(order)
    assert all((order == range(100)).all()
               for order in Case("H2D", 4096, 100, "regular").orders())
    assert len(copy_case.fresh(13, 1)) == 13
    assert (copy_case.fresh(4096, 1) != copy_case.fresh(4096, 2)).any()


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("pattern", ["scattered", "regular"])
def test_every_way_of_the_host_moves_the_bytes(pattern):
    memory = copy_host.Memory(Case("H2H", 4096, 32, pattern), seed=1)
    assert (memory.wanted != 0).any()
    for way in copy_host.ways(memory, lambda name, why: None):
        memory.target[:] = 0
        sample = copy_host.run(way)
        assert (memory.target == memory.wanted).all(), way.name
        assert 0 < sample.submit_ns <= 1e9 * sample.seconds + 1, way.name
        way.close()


# ---- the benchmark itself

def bench(tmp_path, chosen, *, options=(), **environment):
    """One run, small; (what it printed, its tables)."""
    path = tmp_path / "copy.md"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "benchmarks/bench_copy.py",
         "--benchmark-disable", "--copy-table", path, "-k", chosen, *options], cwd=ROOT,
        env={**os.environ, "KVIO_REQUIRE": "", "PYTHONPATH": str(ROOT), **environment},
        capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, path.read_text(encoding="utf-8") if path.exists() else ""


@pytest.mark.needs("compiler")
def test_without_a_gpu_the_host_s_ways_are_measured(tmp_path):
    said, tables = bench(tmp_path, "host and 4K", KVIO_CUDA_LIBRARY="/nowhere/libcuda.so")
    for way in "ceiling: memcpy, C loop", "kvio soft NIC", "numpy, target[ids] = source[ids]":
        assert way in tables and way in said
    assert "must be reached" not in tables


def test_without_a_gpu_the_others_are_skipped_with_a_reason(tmp_path):
    said, _ = bench(tmp_path, "gpu", KVIO_CUDA_LIBRARY="/nowhere/libcuda.so")
    assert "/nowhere/libcuda.so" in said and "passed" not in said


def test_no_case_starts_after_its_time(tmp_path):
    said, tables = bench(tmp_path, "host and 4K", options=["--copy-seconds", "0"])
    assert "--copy-seconds 0 are over" in said and tables == ""
