"""`paired`: two ways to do the same thing, timed in turn, so that a busy machine hits both.

A machine shared with others is slow for a second here and there, but slow for both of a pair.
So the figure to trust is the median of the ratios of neighbours, beside the quartiles that say
how far to trust it. CPU seconds stand beside the rate: a rate bought with a second core is another
thing. `--benchmark-only` prints the table at its end; the JSON file has all in `extra_info`.
"""
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import statistics                                                           # noqa: E402
import subprocess                                                           # noqa: E402
import time                                                                 # noqa: E402
from pathlib import Path                                                    # noqa: E402
from typing import NamedTuple                                               # noqa: E402

import pytest                                                               # noqa: E402

from copy_report import CopyReport, quartiles                               # noqa: E402


class Side(NamedTuple):
    """One of a pair: medians over the rounds. CPU is of the whole process, all threads."""
    name: str
    seconds: float
    cpu_seconds: float
    bytes_per_s: float

    @classmethod
    def of(cls, name, walls, cpus, nbytes):
        wall = statistics.median(walls)
        return cls(name, wall, statistics.median(cpus), nbytes / wall)


class Pair(NamedTuple):
    """`ratio` is seconds of b / seconds of a, as (lower quartile, median, upper quartile): over 1
    where a is the faster one."""
    a: Side
    b: Side
    ratio: tuple
    rounds: int


def timed(function):
    """Wall and CPU seconds of one call."""
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu


def pytest_addoption(parser):
    group = parser.getgroup("copies", "bench_copy.py")
    group.addoption("--copy-table", type=Path, default=os.environ.get("KVIO_COPY_TABLE"),
                    metavar="FILE", help="write the tables of bench_copy.py there, and its plot "
                    "beside it (.svg); or KVIO_COPY_TABLE")
    group.addoption("--copy-seconds", type=float, metavar="S", help="no further case of "
                    "bench_copy.py starts after so many seconds")


@pytest.fixture(scope="session")
def smoke(request):
    """Run once and small: only the bytes count."""
    return request.config.getoption("--benchmark-disable")


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """`built(source, *flags)`: the path of what the C compiler makes of a file beside this one."""
    def built(source, *flags):
        target = tmp_path_factory.mktemp("built") / Path(source).stem
        command = [os.environ.get("CC", "cc"), "-O3", "-Wall", "-Wextra", "-Werror",
                   Path(__file__).with_name(source), "-o", target, *flags]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip(f"no C compiler for {source}: install gcc")
        return target
    return built


@pytest.fixture
def paired(benchmark):
    """`paired(a, b, rounds=30, nbytes=0, names=("a", "b"), setup=None)` -> Pair.

    Each round calls both, a first in even rounds and b first in odd ones; `setup` runs before each
    of the two and is not timed. In smoke mode (--benchmark-disable) there is one round and no
    warm-up: check the bytes after it.
    """
    def paired(a, b, rounds=30, nbytes=0, names=("a", "b"), setup=None):
        taken = ([], [])                    # of a, of b: (wall, cpu) each round

        def one_round():
            for which in ((0, 1), (1, 0))[len(taken[0]) % 2]:
                if setup is not None:
                    setup()
                taken[which].append(timed((a, b)[which]))

        benchmark.pedantic(one_round, rounds=rounds, iterations=1, warmup_rounds=1)
        if len(taken[0]) > 1:               # the warm-up
            taken[0].pop(0), taken[1].pop(0)
        sides = [Side.of(name, *zip(*of), nbytes) for name, of in zip(names, taken)]
        ratio = quartiles([b_wall / a_wall for (a_wall, _), (b_wall, _) in zip(*taken)])
        pair = Pair(*sides, ratio, len(taken[0]))
        benchmark.extra_info.update(nbytes=nbytes, pair=pair._asdict() | {
            "a": pair.a._asdict(), "b": pair.b._asdict()})
        return pair
    return paired


def row(bench):
    """The line of one benchmark in the table, or None if it says nothing of bytes or pairs."""
    pair, nbytes = bench.extra_info.get("pair"), bench.extra_info.get("nbytes", 0)
    name = bench.name.removeprefix("test_")
    if pair:
        a, b, ratio = pair["a"], pair["b"], pair["ratio"]
        return [name, a["name"], b["name"], *(f"{1e3 * side['seconds']:.4g}" for side in (a, b)),
                *(f"{side['bytes_per_s'] / 1e9:.3g}" if nbytes else "" for side in (a, b)),
                *(f"{1e3 * side['cpu_seconds']:.4g}" for side in (a, b)),
                f"{ratio[1]:.3f} [{ratio[0]:.3f}, {ratio[2]:.3f}]"]
    if nbytes and not bench.has_error:
        median = bench.stats.median
        return [name, "", "", f"{1e3 * median:.4g}", "", f"{nbytes / median / 1e9:.3g}",
                "", "", "", ""]
    return None


COPIES = pytest.StashKey()
HEAD = ["benchmark", "a", "b", "a ms", "b ms", "a GB/s", "b GB/s", "a CPU ms", "b CPU ms",
        "b/a time [quartiles]"]


@pytest.fixture(scope="session")
def copy_report(request):
    """Where bench_copy.py puts what it found: shown and written when the session ends."""
    report = CopyReport(request.config.getoption("--copy-table"))
    request.config.stash[COPIES] = report
    yield report
    report.finish()


def show_copies(terminalreporter, config):
    report = config.stash.get(COPIES, None)
    if report is not None and report.rows and (report.path or config.getoption("--benchmark-only")):
        for line in ["", *report.lines()]:
            terminalreporter.write_line(line)


def pytest_terminal_summary(terminalreporter, config):
    show_copies(terminalreporter, config)
    session = getattr(config, "_benchmarksession", None)
    if session is None or session.disabled:
        return
    for bench in session.benchmarks:
        if "report" in bench.extra_info:
            terminalreporter.write_line(bench.extra_info["report"])
    rows = [line for line in map(row, session.benchmarks) if line]
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(HEAD, *rows)]
    terminalreporter.write_line("")
    terminalreporter.write_line("medians; GB = 1e9 bytes; b/a over 1: a is faster")
    for line in [HEAD, *rows]:
        terminalreporter.write_line("  ".join(map(str.ljust, line, widths)).rstrip())
