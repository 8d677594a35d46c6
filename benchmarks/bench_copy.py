"""Layer Blocks in and out of GPU memory: kvio beside cudaMemcpyAsync, a call each; and where there
is no GPU, the host's own ways beside a loop of memcpy.

    pytest benchmarks/bench_copy.py --benchmark-only --copy-table FILE    tables; a plot beside them
    pytest benchmarks/bench_copy.py --benchmark-only -k gpu --copy-seconds 90   within some time

All ways of a case take their turn in each round, in a random order, and are held against the
ceiling of the same round: one contiguous pinned copy of as many bytes (on the host: the loop).
Submission is the time of the submitting call over the blocks; GB/s on a GPU is by events on a
stream of ours that the transfer waits for and that waits for it. Data are random, other ones in
each case, and each way's own are looked at afterwards at the far end, by a path that is not kvio's.

KVIO_CUDA_LIBRARY may name the fake driver of tests/transfer: then all of this runs, small, and says
nothing about speed.
"""
import itertools
import time

import copy_host
import pytest
from copy_case import KIB, Case, take_turns
from copy_report import rows_of

SMALL_NBYTES = 1 << 20              # of a case in smoke mode, or on the fake driver
HOST_NBYTES = 64 << 20
SIZES = [4 * KIB, 16 * KIB, 72 * KIB, 256 * KIB, 1024 * KIB]
COUNTS = [4096, 256, 16, 1]


def grid(directions, most_nbytes, patterns=("scattered",), counts=COUNTS):
    """Cases, each once though `most_nbytes` bound the blocks; the largest counts first."""
    cases = [Case(direction, block, count, pattern).within(most_nbytes)
             for pattern, count, direction, block
             in itertools.product(patterns, counts, directions, SIZES)]
    return list(dict.fromkeys(cases))


@pytest.fixture
def in_time(request):
    """Skip what would start after --copy-seconds."""
    limit, stash = request.config.getoption("--copy-seconds"), request.config.stash
    began = stash.setdefault(BEGAN, time.monotonic())
    if limit is not None and time.monotonic() - began > limit:
        pytest.skip(f"--copy-seconds {limit:g} are over")


BEGAN = pytest.StashKey()


def keep(benchmark, report, rows):
    """For the tables, and for the JSON file of pytest-benchmark."""
    report.rows += rows
    benchmark.extra_info["copies"] = [row._asdict() for row in rows]


@pytest.mark.parametrize("case", grid(["H2H"], HOST_NBYTES), ids=str)
def test_host(benchmark, copy_report, in_time, smoke, case):
    """Without a GPU: what a call each costs, and what the soft NIC loses to a loop of memcpy."""
    case = case.within(SMALL_NBYTES) if smoke else case
    memory = copy_host.Memory(case, seed=case.block + case.count)
    ways = copy_host.ways(memory, copy_report.note)
    samples = take_turns(benchmark, ways, copy_host.run, seconds=1.5)
    keep(benchmark, copy_report, rows_of(copy_host.machine(), case, ways, samples,
                                         copy_host.MemcpyLoop.name))
    for way in ways:
        memory.target[:] = 0
        way.submit()
        way.finish()
        assert (memory.target == memory.wanted).all(), way.name
        way.close()
