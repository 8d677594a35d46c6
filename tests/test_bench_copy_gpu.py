"""bench_copy.py's cases for a GPU, on the fake driver: all ways move the bytes and are looked at,
the events stand around the copies, nothing is left behind. Nothing here is about speed."""
import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "transfer")]

import cbuild                                                               # noqa: E402
import fake_cuda                                                            # noqa: E402

fake_cuda.choose()

import copy_driver                                                          # noqa: E402
import copy_gpu                                                             # noqa: E402
from copy_case import Case                                                  # noqa: E402

from require import skip_or_fail                                            # noqa: E402

NBYTES = 1 << 20
RUN_NS = 20_000_000             # the fake is told to take this long for a copy
COPIES = ["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyAsync", "cuMemcpy2DAsync_v2",
          "cuMemcpy3DAsync_v2", "cuMemcpyBatchAsync_v2", "cuLaunchKernel"]
CASES = [Case(direction, 4096, 24, pattern) for direction in ("H2D", "D2H")
         for pattern in ("scattered", "regular")]


@pytest.fixture(scope="module")
def fake_path():
    if fake_cuda.why_not():
        skip_or_fail("cuda-headers", fake_cuda.why_not())
    return fake_cuda.build()


@pytest.fixture(scope="module")
def cudart_path(tmp_path_factory):
    return cbuild.shared_library(tmp_path_factory.mktemp("cudart") / "libcudart.so.13",
                                 [ROOT / "tests" / "fake_cudart.c"], "-ldl")


@pytest.fixture
def fake(fake_path):
    fake = fake_cuda.FakeCuda(fake_path)
    fake.reset()
    yield fake
    assert fake.violations() == []
    fake.reset()


@pytest.fixture
def notes():
    return {}


@pytest.fixture
def gpu(fake, notes):
    before = fake.objects()
    gpu = copy_gpu.Gpu(NBYTES, notes.setdefault)
    yield gpu
    gpu.close()
    del gpu
    assert fake.objects() == before and fake.depth() == 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way_moves_the_bytes(gpu, case):
    ground = copy_gpu.Ground(gpu, case, seed=1)
    ways = copy_gpu.ways(gpu, ground)
    for way in ways:
        ground.check(way)
    names = [way.name for way in ways]
    assert {f"kvio {way}" for way in [*copy_gpu.WAYS, "auto"]} <= set(names)
    assert gpu.driver.name == "a fake driver: no speed"


@pytest.mark.parametrize("way", copy_gpu.WAYS)
def test_a_forced_way_carries_the_blocks(gpu, way):
    """Blocks at equal strides, so that `strided` is not left to `loop`."""
    ground = copy_gpu.Ground(gpu, CASES[1], seed=1)
    forced = copy_gpu.Kvio(gpu, ground, way)
    ground.check(forced)
    assert list(forced.carried) == [way]


def test_the_sweep_takes_as_many_sms_as_it_says(fake, notes):
    gpu = copy_gpu.Gpu(NBYTES, notes.setdefault, first="loop")
    ground = copy_gpu.Ground(gpu, CASES[0], seed=1)
    for sms in 1, 2, 4, 8, 16:
        kernel = copy_gpu.Kvio(gpu, ground, "kernel", sms)
        ground.check(kernel)
        assert fake.grid()[0] == sms and kernel.note() == f"on {sms} SMs"
    gpu.close()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("wrong", ["a byte of a block", "two blocks", "a byte between blocks",
                                   "nothing at all"])
def test_wrong_bytes_are_found(gpu, case, wrong):
    """What the check would say if a way were wrong."""
    ground = copy_gpu.Ground(gpu, case, seed=1)
    way = copy_gpu.Kvio(gpu, ground, "loop")
    ground.check(way)
    side = "local_addr", "remote_addr"
    if wrong == "a byte of a block":
        way.wrs["length"][7] -= 1
    elif wrong == "two blocks":
        way.wrs[side[1]][[3, 9]] = way.wrs[side[1]][[9, 3]]
    elif wrong == "nothing at all":
        way.wrs["length"] = 0
    elif case.direction == "H2D":           # on the device the blocks leave no room between them
        way.wrs[side[0]][5] += 1 if ground.order_d[5] < case.count - 1 else -1
    else:
        way.wrs[side[0]][5] += 1
    with pytest.raises(AssertionError, match="kvio loop: the bytes are not those of the source"):
        ground.check(way)


@pytest.mark.parametrize("direction", ["H2D", "D2H"])
def test_the_events_stand_around_the_copies(gpu, fake, direction):
    """A copy that is told to take 20 ms takes no less by the events, whoever's stream it is in."""
    ground = copy_gpu.Ground(gpu, Case(direction, 4096, 4), seed=1)
    ways = copy_gpu.ways(gpu, ground)
    for way in ways:
        gpu.run(way)
    for name in COPIES:
        fake.cost(name, run_ns=RUN_NS)
    for way in ways:
        sample = gpu.run(way)
        assert sample.seconds >= RUN_NS / 1e9, way.name


def test_the_loop_is_libcudart_s_where_there_is_one(fake, notes, monkeypatch, cudart_path):
    monkeypatch.setenv("KVIO_CUDART_LIBRARY", cudart_path)
    gpu = copy_gpu.Gpu(NBYTES, notes.setdefault)
    count = ctypes.CDLL(cudart_path).fake_cudart_copies
    count.restype = ctypes.c_uint64
    for case in CASES:
        ground = copy_gpu.Ground(gpu, case, seed=2)
        loop, = (way for way in copy_gpu.ways(gpu, ground) if way.name.endswith("C loop"))
        assert loop.name == "cudaMemcpyAsync 13.0, C loop"
        before = count()
        ground.check(loop)
        assert count() == before + case.count
    assert "cudaMemcpyAsync" not in notes
    gpu.close()


def test_without_libcudart_the_row_says_so(gpu, notes):
    ground = copy_gpu.Ground(gpu, CASES[0], seed=1)
    names = [way.name for way in copy_gpu.ways(gpu, ground)]
    assert "cuMemcpyHtoDAsync, C loop" in names and "ctypes, Python loop" in names
    assert "instead" in notes["cudaMemcpyAsync"]


def test_a_libcudart_that_does_not_work_is_told(gpu, monkeypatch, tmp_path, notes):
    (tmp_path / "libcudart.so.13").write_bytes(b"no library")
    monkeypatch.setenv("KVIO_CUDART_LIBRARY", str(tmp_path / "libcudart.so.13"))
    assert copy_driver.runtime(gpu.driver, notes.setdefault) is None


def test_an_error_of_the_loop_is_an_error(gpu, fake):
    ground = copy_gpu.Ground(gpu, CASES[0], seed=1)
    args = "H2D", 4096, ground.pieces()
    loop = copy_driver.LoopInC(gpu.driver, *args, runtime=None)
    fake.fail("cuMemcpyHtoDAsync_v2", "INVALID_VALUE", after=5)
    with pytest.raises(copy_driver.CudaError, match="error 1"):
        loop.submit()
    gpu.driver.synchronize()


@pytest.fixture(scope="module")
def whole(fake_path, cudart_path, tmp_path_factory):
    """The benchmark itself, small; (what it printed, its tables)."""
    path = tmp_path_factory.mktemp("copy") / "copy.md"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "benchmarks/bench_copy.py",
         "--benchmark-disable", "--copy-table", path, "-k", "gpu and (must or sms or 16K)"],
        cwd=ROOT, env={**os.environ, "KVIO_REQUIRE": "", "PYTHONPATH": str(ROOT),
                       "KVIO_CUDA_LIBRARY": fake_path, "KVIO_CUDART_LIBRARY": cudart_path},
        capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, path.read_text(encoding="utf-8"), path


def test_the_benchmark_runs_and_says_that_it_has_no_speed(whole):
    said, tables, path = whole
    assert "failed" not in said and "skipped" not in said
    assert tables.startswith("Copies on a fake driver: no speed.")
    for way in (copy_gpu.CEILING, "cudaMemcpyAsync 13.0, C loop", "ctypes, Python loop",
                *(f"kvio {way}" for way in [*copy_gpu.WAYS, "auto"])):
        assert f"| {way} " in tables, way
    assert path.with_suffix(".svg").exists()


def test_what_must_be_reached_is_its_own_table_without_a_verdict(whole):
    _, tables, _ = whole
    must = tables.partition("What must be reached:")[2]
    for figure in ("kvio auto of the ceiling | ≥ 0.9 ", "submission of a block   | ≤ 0.5 µs",
                   "time over kvio auto", "at most 8 SMs, of the ceiling"):
        assert " ".join(figure.split()) in " ".join(must.split()), figure
    assert must.count("fake driver: no speed") >= 10
    assert "MISSED" not in must and "| met" not in must
