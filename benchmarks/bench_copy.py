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

import copy_gpu
import copy_host
import pytest
from copy_case import KIB, Case, take_turns
from copy_report import Claim, quartiles, rows_of

from require import skip_or_fail

BEGAN = time.monotonic()
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
    limit = request.config.getoption("--copy-seconds")
    if limit is not None and time.monotonic() - BEGAN > limit:
        pytest.skip(f"--copy-seconds {limit:g} are over")


def keep(benchmark, report, rows):
    """For the tables, and for the JSON file of pytest-benchmark."""
    report.add(rows)
    benchmark.extra_info["copies"] = [row._asdict() for row in rows]


# ---- on a GPU

GPU_NBYTES = 256 << 20
MUST_LARGE, MUST_SMALL = (72 * KIB, 511), (4 * KIB, 4096)
MOST_SMS = [1, 2, 4, 8, 16]


def opened(report, nbytes, **options):
    reason = copy_gpu.why_not()
    if reason:
        skip_or_fail("cuda", reason)
    return copy_gpu.Gpu(nbytes, report.note, **options)


@pytest.fixture(scope="session")
def gpu(copy_report, smoke):
    made = opened(copy_report, SMALL_NBYTES if smoke else GPU_NBYTES)
    yield made
    made.close()


def measured(benchmark, gpu, report, case, ways, ground, seconds):
    """Rounds, the rows of them, and a look at what each way has moved."""
    samples = take_turns(benchmark, ways, gpu.run, seconds=seconds)
    for way in ways:
        ground.check(way)
    keep(benchmark, report, rows_of(gpu.driver.name, case, ways, samples, copy_gpu.CEILING))
    return samples


def claim(report, gpu, what, wanted, figures, unit="", note=""):
    report.claim(Claim(what, wanted, quartiles(figures), unit, len(figures),
                       not gpu.driver.is_fake, note))


def per_block(samples, case):
    return [sample.submit_ns / 1e3 / case.count for sample in samples]


@pytest.fixture(scope="class")
def bare(copy_report, smoke):
    size, count = MUST_LARGE
    made = opened(copy_report, SMALL_NBYTES if smoke else size * count, first="loop")
    yield made
    made.close()


class TestGpuKernelSms:
    """The kernel on 1, 2, 4, 8, 16 SMs: 8 are to reach 0.9 of the link. Before `gpu` is opened,
    whose first NIC measures how many SMs are worth while; from then on it takes no more."""

    @pytest.mark.parametrize("direction", ["H2D", "D2H"])
    def test_gpu_kernel_sms(self, benchmark, bare, copy_report, direction):
        if "kernel" not in bare.ways:
            pytest.skip("the copy kernel cannot be taken here")
        case = Case(direction, *MUST_LARGE).within(bare.nbytes)
        ground = copy_gpu.Ground(bare, case, seed=3)
        kernels = {sms: copy_gpu.Kvio(bare, ground, "kernel", sms) for sms in MOST_SMS}
        samples = measured(benchmark, bare, copy_report, case,
                           [copy_gpu.ceiling(bare, ground), *kernels.values()], ground, seconds=2)
        for sms, way in kernels.items():
            claim(copy_report, bare, f"{case.size} × {case.count} {direction}: kernel, at most "
                  f"{sms} SMs, of the ceiling",
                  (">=", 0.9) if sms == 8 and direction == "H2D" else None,
                  [there.seconds / here.seconds
                   for here, there in zip(samples[way.name], samples[copy_gpu.CEILING])],
                  note=way.note())


@pytest.mark.parametrize("direction", ["H2D", "D2H"])
def test_gpu_must_reach_large(benchmark, gpu, copy_report, direction):
    """72 KiB x 511: kvio's choice reaches 0.9 of one pinned copy, at 0.5 µs a block to submit."""
    case = Case(direction, *MUST_LARGE).within(gpu.nbytes)
    ground = copy_gpu.Ground(gpu, case, seed=1)
    ways = copy_gpu.ways(gpu, ground)
    samples = measured(benchmark, gpu, copy_report, case, ways, ground, seconds=3)
    auto, top, loop = samples["kvio auto"], samples[copy_gpu.CEILING], ways[2]
    what = f"{case.size} × {case.count} {direction}"
    wanted = (lambda *limit: limit) if direction == "H2D" else (lambda *limit: None)
    claim(copy_report, gpu, f"{what}: kvio auto of the ceiling", wanted(">=", 0.9),
          [there.seconds / here.seconds for here, there in zip(auto, top)], note=ways[-1].note())
    claim(copy_report, gpu, f"{what}: kvio auto, submission of a block", wanted("<=", 0.5),
          per_block(auto, case), "µs")
    claim(copy_report, gpu, f"{what}: {loop.name}, a call", None, per_block(samples[loop.name],
          case), "µs", note="the paper: 5 to 7 µs")


@pytest.mark.parametrize("direction", ["H2D", "D2H"])
def test_gpu_must_reach_small(benchmark, gpu, copy_report, direction):
    """4 KiB x 4096: kvio's choice is 10 times as fast as a loop of cudaMemcpyAsync in C."""
    case = Case(direction, *MUST_SMALL).within(gpu.nbytes)
    ground = copy_gpu.Ground(gpu, case, seed=2)
    ways = copy_gpu.ways(gpu, ground)
    samples = measured(benchmark, gpu, copy_report, case, ways, ground, seconds=3)
    loop = ways[2].name
    claim(copy_report, gpu, f"{case.size} × {case.count} {direction}: {loop}, time over kvio auto",
          (">=", 10) if direction == "H2D" else None,
          [there.seconds / here.seconds for here, there in zip(samples["kvio auto"],
                                                               samples[loop])],
          note=ways[-1].note())


@pytest.mark.parametrize("case", grid(["H2D", "D2H"], GPU_NBYTES)
                         + grid(["H2D", "D2H"], GPU_NBYTES, ["regular"], [256]), ids=str)
def test_gpu(benchmark, gpu, copy_report, in_time, case):
    """The whole grid. Regular blocks are rectangles for `strided`."""
    case = case.within(gpu.nbytes)
    ground = copy_gpu.Ground(gpu, case, seed=case.block + case.count)
    measured(benchmark, gpu, copy_report, case, copy_gpu.ways(gpu, ground), ground, seconds=1)


# ---- without a GPU

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
        copy_host.run(way)
        assert (memory.target == memory.wanted).all(), way.name
        way.close()
