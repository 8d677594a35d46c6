"""`kvio bench transfer`, very small: what it prints, and that it checks what it moves. Nothing
here looks at how fast anything was."""
import contextlib
import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from kvio import bench_transfer
from kvio._ext import nic as ext
from kvio.bench_transfer import transfer_bench
from kvio.errors import InvalidArgument, TransferError
from kvio.transfer import KV, TrafficClass


def bench(*arguments):
    return subprocess.run([sys.executable, "-m", "kvio", "bench", "transfer", *arguments],
                          capture_output=True, text=True, timeout=120)


def test_json_has_a_cell_for_each_size_batch_and_class():
    done = bench("--json", "--sizes", "512,1K", "--batches", "1,8", "--seconds", "0",
                 "--class", "mine:5:160", "--class", "kv:2:32")
    assert done.returncode == 0 and done.stderr == ""
    report = json.loads(done.stdout)
    cells = report["cells"]
    assert report["nic"] == "soft" and report["note"].startswith("quartiles: of ")
    assert report["load"] >= 0 and report["cpus"] >= 1
    assert [(c["nbytes"], c["batch"], c["traffic_class"]) for c in cells] == [
        (n, b, c) for n in (512, 1024) for b in (1, 8) for c in ("mine", "kv")]
    for cell in cells:
        assert cell["doorbells_per_wr"] == 1 / cell["batch"]
        assert cell["num_samples"] >= 5 and cell["num_batches"] >= cell["num_samples"]
        for key in ("gb_per_s", "ceiling_gb_per_s", "share_of_ceiling", "cpu_s_per_gib"):
            assert math.isfinite(cell[key]) and cell[key] >= 0, key
        for key, middle in ("gb_per_s_quartiles", "gb_per_s"), ("share_quartiles",
                                                                "share_of_ceiling"):
            assert cell[key][0] <= cell[middle] <= cell[key][1]


def test_the_table_has_a_line_for_each_cell():
    done = bench("--sizes", "4K", "--batches", "4", "--seconds", "0")
    assert done.returncode == 0 and "Traceback" not in done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[3] for line in lines if line[:3] == ["4", "KiB", "4"]] == ["collective", "kv"]
    assert "0.2500" in done.stdout
    assert "\nquartiles: of 5 to 5 samples a line" in done.stdout


def test_quartiles_are_explained_where_they_lie_far_apart():
    cell = bench_transfer.Cell(4096, 1, "kv", 10.0, (9.5, 10.5), 20.0, 0.5, (0.4, 0.6), 0.1,
                               1.0, 7, 70)
    note = bench_transfer.spread_note([cell, replace(cell, num_samples=90)])
    assert note == "quartiles: of 7 to 90 samples a line, each of about 2 ms or one batch"
    note = bench_transfer.spread_note([cell, replace(cell, gb_per_s_quartiles=(8.0, 10.5))])
    assert "1 of 2 lines are spread over more than 20%" in note and "an idle machine" in note


def test_a_lost_packet_is_an_error_and_not_a_fast_benchmark():
    with contextlib.ExitStack() as stack:
        pair = bench_transfer._Pair("soft", [KV], stack)
        pair.b._ext._fault(ext.DROP, 3)         # the responder sends what is read
        with pytest.raises(TransferError, match="1 of 4 blocks"):
            bench_transfer.measure(pair, 4096, 4, KV, 0)
        assert bench_transfer.measure(pair, 4096, 4, KV, 0).batch == 4


def test_a_provider_that_is_not_here_is_one_line():
    done = bench("--nic", "verbs:no-such-hca", "--seconds", "0")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize("arguments", [
    ["--sizes", "4X"], ["--sizes", ""], ["--batches", "0"], ["--sizes", "1M", "--batches", "4K"],
    ["--class", "x:1"], ["--class", "x:16:0"], ["--seconds", "-1"], ["--seconds", "nan"],
    ["--nic", "carrier-pigeon"], ["--class", "x:1:0", "--class", "x:2:0"]])
def test_nonsense_is_refused(arguments):
    done = bench(*arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stderr.strip()


def test_classes_of_ones_own_go_through_the_library_too():
    cell, = transfer_bench(sizes=[64], batches=[2], classes=[TrafficClass("x", 15, 255)],
                           seconds=0)
    assert cell.traffic_class == "x"
    with pytest.raises(InvalidArgument):
        transfer_bench(sizes=[])
