"""The four ways of a GPU's NIC, on the fake libcuda: the same bytes by each, what each asks of the
driver, what happens where one cannot be taken, and which one is chosen by what it costs."""
import contextlib
import gc
import os
import subprocess
import sys
import uuid

import numpy as np
import pytest

from kvio._ext import nic as _nic
from kvio.errors import BackendUnavailable, TransferError
from kvio.layout import READ, WRITE
from kvio.transfer import KV, Nic, cuda
from nics import pattern, requests

WAYS = ["loop", "batch", "strided", "kernel"]
CALLS = {"loop": ["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyAsync"],
         "batch": ["cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"],
         "strided": ["cuMemcpy2DAsync_v2", "cuMemcpy3DAsync_v2"], "kernel": ["cuLaunchKernel"]}
NBYTES = 1 << 20


class Machine:
    """A NIC that is connected with itself, and two memories; `copy` checks every byte of both."""

    def __init__(self, fake, kind="H2D", nbytes=NBYTES, **options):
        self.fake, self.nic = fake, Nic.open("cuda:0", **options)
        self.memories, self.arrays = [], []
        for place in (kind[2], kind[0]):            # the target, the source
            make = self.nic.pinned if place == "H" else self.nic.device_memory
            memory = make(nbytes)
            self.memories.append(memory)
            self.arrays.append(np.frombuffer(memory, np.uint8) if place == "H"
                               else fake.bytes_at(memory.addr, nbytes))
            self.arrays[-1][:] = pattern(nbytes, len(self.arrays))
        self.target, self.source = map(self.nic.register, self.memories)
        name = uuid.uuid4().hex
        self.nic.listen(name)
        self.peer = self.nic.connect(name, classes=[KV])

    def close(self):
        if vars(self):
            self.nic.close(cancel=True)
            vars(self).clear()
            gc.collect()

    def post(self, pieces, opcode=READ):
        """A transfer of pieces (target offset, source offset, nbytes)."""
        to, at, nbytes = np.asarray(pieces, np.int64).reshape(-1, 3).T
        if opcode == READ:
            return self.peer.read(requests(READ, self.target, self.source, to, at, nbytes))
        return self.peer.write(requests(WRITE, self.source, self.target, at, to, nbytes))

    def copy(self, pieces, opcode=READ):
        """The same, checked; the ways it took."""
        target, source = self.arrays
        expected = target.copy()
        for to, at, nbytes in pieces:
            expected[to:to + nbytes] = source[at:at + nbytes]
        transfer = self.post(pieces, opcode)
        transfer.wait()
        assert np.array_equal(target, expected)
        return transfer.stats["ways"]

    @property
    def copies(self):
        """{way: (segments, calls or descriptors)} of those that were taken."""
        return {way: (each["segments"], each["copies"])
                for way, each in self.nic.stats()["copies"].items() if any(each.values())}


@pytest.fixture
def machine(fake_cuda):
    """`machine(kind="H2D", copy=...)`: a Machine."""
    made = []

    def make(*arguments, **options):
        made.append(Machine(fake_cuda, *arguments, **options))
        return made[-1]
    yield make
    fake_cuda.hold(held=False)
    while made:
        made.pop().close()


def rows(count, width=512, to=1024, at=4096):
    return [(i * to, i * at, width) for i in range(count)]


def mixed(count, unit=16, seed=5):
    """Pieces of any length in any order, no two of them in one place; some are empty."""
    chance = np.random.default_rng(seed)
    places = [chance.permutation(count) for _ in range(2)]
    room = NBYTES // count // unit * unit
    lengths = chance.integers(0, room // unit, count, endpoint=True) * unit
    lengths[::7] = 0
    return [(int(to) * room, int(at) * room, int(n)) for to, at, n in zip(*places, lengths)]


SEGMENTS = {
    "mixed": mixed(100), "unaligned": mixed(100, unit=1), "rows": rows(64),
    "box": [(z * 8192 + y * 1024, z * 32768 + y * 4096, 1024) for z in range(9) for y in range(5)],
    "touching": [(i * 16, 4096 + i * 16, 16) for i in range(2000)],
    "one": [(16, 32, NBYTES - 32)], "bytes": [(i * 3, i * 5 + 1, 1) for i in range(999)],
    "empty": [(0, 0, 0)],
}


# -- the same bytes by every way

@pytest.mark.parametrize("opcode", [READ, WRITE])
@pytest.mark.parametrize("kind", ["H2H", "H2D", "D2H", "D2D"])
@pytest.mark.parametrize("way", WAYS)
def test_a_forced_way_moves_the_same_bytes(machine, way, kind, opcode):
    m = machine(kind, copy=way)
    for name, pieces in SEGMENTS.items():
        can = not (way == "kernel" and (kind == "H2H" or name in ("unaligned", "bytes"))
                   or way == "strided" and kind in ("H2H", "D2D"))
        calls = {each: m.fake.calls(*CALLS[each]) for each in WAYS}
        assert m.copy(pieces, opcode) == ([way if can else "loop"] if name != "empty" else [])
        called = {each for each in WAYS if m.fake.calls(*CALLS[each]) > calls[each]}
        assert called == ({way if can else "loop"} if name != "empty" else set()) or (
            way == "strided" and called <= {"loop", "strided"})     # single rows are plain copies


def test_what_each_way_asks_of_the_driver(machine):
    """Calls a segment of 64 rows: 64, one, one, one launch; and 45 rows of a box, one as well."""
    for way, calls, box in (("loop", 64, 45), ("batch", 1, 1), ("strided", 1, 1),
                            ("kernel", 64, 45)):
        m = machine(copy=way)
        m.copy(SEGMENTS["rows"])
        assert m.copies == {way: (1, calls)}
        m.copy(SEGMENTS["box"])
        assert m.copies == {way: (2, calls + box)}
        m.copy(SEGMENTS["touching"])                # all of it is one piece
        assert m.copies == {way: (3, calls + box + (1 if way != "kernel" else 2))}
    assert m.fake.calls("cuMemcpy3DAsync_v2") == 1
    assert m.fake.calls("cuMemcpyBatchAsync_v2") == 3 and m.fake.calls("cuMemcpyBatchAsync") == 0
    assert m.fake.calls("cuLaunchKernel") == 3 + 1      # and over nothing, when the device opened


@pytest.mark.parametrize("way", WAYS)
def test_twenty_thousand_pieces_are_more_than_one_segment(machine, way):
    m = machine("H2D", copy=way, queue_depth=32768)
    chance = np.random.default_rng(7)
    places = [chance.permutation(20_000) for _ in range(2)]
    pieces = np.stack([places[0] * 48, places[1] * 48, np.full(20_000, 32)], axis=1)
    assert m.copy(pieces.tolist()) in ([way], ["loop", way])
    segments, copies = m.copies[way]
    assert segments == 2 and copies == {"batch": 2}.get(way, copies)
    if way in ("loop", "kernel"):
        assert copies == 20_000
    if way == "kernel":
        assert m.fake.calls("cuLaunchKernel") - 1 == 5      # 4096 descriptors each


def test_the_kernel_takes_no_more_sms_than_it_may(machine):
    for sms, pieces in ((1, 64), (8, 64), (8, 3)):
        m = machine("D2H", copy="kernel", max_sms=sms)
        m.copy(rows(pieces))
        assert m.fake.grid() == (min(sms, pieces), 1024)


def test_a_large_piece_is_shared_by_the_warps(machine):
    m = machine("H2D", copy="kernel")
    m.copy([(0, 0, NBYTES)])
    assert m.copies == {"kernel": (1, NBYTES // 16384)}


# -- chunks of descriptors

def scattered(count, seed=3):
    chance = np.random.default_rng(seed)
    places = np.stack([chance.permutation(count) for _ in range(2)]) * 32
    return np.stack([*places, np.full(count, 16)], axis=1)


def test_what_has_no_chunk_goes_by_copy_engines(machine):
    """32 launches can be in flight. 30 are, of 4096 pieces each; the next segment needs four."""
    m = machine("H2D", copy="kernel", queue_depth=1 << 18, nbytes=8 << 20)
    first, second = scattered(30 * 4096), scattered(4 * 4096, 4) + [30 * 4096 * 32, 0, 0]
    target, source = m.arrays
    expected = target.copy()
    for to, at, nbytes in np.concatenate([first, second]).tolist():
        expected[to:to + nbytes] = source[at:at + nbytes]
    with m.fake.held():
        one, two, three = m.post(first), m.post(second), m.post(rows(3))
    for to, at, nbytes in rows(3):
        expected[to:to + nbytes] = source[at:at + nbytes]
    ways = []
    for transfer in (one, two, three):
        transfer.wait()
        ways.append(transfer.stats["ways"])
    assert ways == [["kernel"], ["batch", "kernel"], ["batch"]]
    assert np.array_equal(target, expected)
    assert m.copies == {"kernel": (9, 32 * 4096), "batch": (2, 2)}
    assert m.copy(second.tolist()) == ["kernel"]            # they have come back


def test_the_rest_begins_inside_a_large_piece(machine):
    """What one launch does not hold of one piece goes on where the launch ended."""
    m = machine("H2D", copy="kernel", queue_depth=1 << 18, nbytes=100 << 20)
    with m.fake.held():
        busy = m.post(scattered(31 * 4096))
        large = m.post([(64, 0, 80 << 20)])                 # 5120 descriptors
    busy.wait(), large.wait()
    assert large.stats["ways"] == ["batch", "kernel"]
    assert np.array_equal(m.arrays[0][64:64 + (80 << 20)], m.arrays[1][:80 << 20])


# -- calls that fail

@contextlib.contextmanager
def refused(match):
    with pytest.raises(TransferError, match=match):
        yield


@pytest.mark.parametrize("way, exported, name, error", [
    ("loop", "cuMemcpyHtoDAsync_v2", "cuMemcpyHtoDAsync", "INVALID_VALUE"),
    ("batch", "cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync", "OUT_OF_MEMORY"),
    ("strided", "cuMemcpy2DAsync_v2", "cuMemcpy2DAsync", "INVALID_VALUE"),
    ("kernel", "cuLaunchKernel", "cuLaunchKernel", "OUT_OF_MEMORY")])
def test_a_call_that_fails_in_the_middle_names_itself(machine, way, exported, name, error):
    m = machine("H2D", copy=way)
    pieces = rows(5) + rows(3, 256, 8192, 16384) + [(900_000, 1, 16)]   # two rectangles, one row
    pieces = [(to, at + 15 if n == 16 else at, n) for to, at, n in pieces]
    # More often than there are chunks: a launch that failed keeps none.
    for after in range(40 if way == "kernel" else 2):
        m.fake.fail(exported, error, after=after if way in ("loop", "strided") else 0)
        with refused(f"{name}.*CUDA_ERROR_{error}"):
            m.post(pieces).wait()
        m.peer.reset()
    assert m.copy(pieces) == [way]


def test_a_driver_with_no_more_than_the_name_of_the_batched_call(machine):
    m = machine("D2H", copy="batch")
    m.fake.fail("cuMemcpyBatchAsync_v2", "NOT_SUPPORTED", times=99)
    assert m.copy(mixed(50)) == ["loop"]
    assert m.nic.info()["copy"]["ways"]["batch"] == (
        "cuMemcpyBatchAsync: CUDA_ERROR_NOT_SUPPORTED (801)")
    assert m.copy(mixed(50)) == ["loop"]
    assert m.fake.calls("cuMemcpyBatchAsync_v2") == 1       # it is not asked again


def test_a_box_that_the_driver_does_not_take_goes_slice_by_slice(machine):
    m = machine("H2D", copy="strided")
    m.fake.fail("cuMemcpy3DAsync_v2", "INVALID_VALUE")
    assert m.copy(SEGMENTS["box"]) == ["strided"]
    assert m.fake.calls("cuMemcpy2DAsync_v2") == 9
    m.fake.fail("cuMemcpy3DAsync_v2", "OUT_OF_MEMORY")
    with refused("cuMemcpy3DAsync.*OUT_OF_MEMORY"):
        m.post(SEGMENTS["box"]).wait()


def test_no_pitch_is_longer_than_the_device_allows(machine, fake_cuda):
    fake_cuda.set(max_pitch=4095)
    m = machine("H2D", copy="strided")
    assert m.copy(rows(16)) == ["strided"] and m.copies == {"strided": (1, 16)}
    assert m.fake.calls("cuMemcpy2DAsync_v2") == 0


# -- ways that are not there

def ptx(text=None, **changes):
    """The PTX with words replaced, or another text, in place of what is shipped."""
    shipped = (cuda._kernel() or b"").decode()
    for old, new in changes.items():
        shipped = shipped.replace(old, new)
    return (text if text is not None else shipped).encode()


@pytest.mark.parametrize("settings, fault, kernel, why", [
    ({}, None, None, "no PTX was given"),
    ({"capability": 75}, None, ptx(), "needs sm_80 and CUDA 12.1: this is sm_75, CUDA 13.0"),
    ({"host_shift": 1 << 32}, None, ptx(), "other addresses for registered host memory"),
    ({}, None, ptx("nonsense"), r"cuModuleLoadData: CUDA_ERROR_INVALID_IMAGE \(200\)"),
    ({}, None, ptx(kvio_copy="other"), r"cuModuleGetFunction: CUDA_ERROR_NOT_FOUND \(500\)"),
    ({}, ("cuModuleLoadData", 222), ptx(),
     r"cuModuleLoadData: CUDA_ERROR_UNSUPPORTED_PTX_VERSION \(222\)"),
    ({}, ("cuMemHostAlloc", "OUT_OF_MEMORY"), ptx(), r"cuMemHostAlloc: .*OUT_OF_MEMORY \(2\)"),
    ({}, ("cuLaunchKernel", "NOT_SUPPORTED"), ptx(), r"cuLaunchKernel: .*NOT_SUPPORTED \(801\)"),
], ids=str)
def test_why_there_is_no_kernel(machine, fake_cuda, monkeypatch, settings, fault, kernel, why):
    monkeypatch.setattr(cuda, "_kernel", lambda: kernel)
    fake_cuda.set(**settings)
    if fault:
        fake_cuda.fail(*fault)
    with pytest.raises(BackendUnavailable, match=rf'copy="kernel" cannot be had: .*{why}'):
        Nic.open("cuda:0", copy="kernel")
    if fault:
        fake_cuda.fail(*fault)
    m = machine("D2H", copy="loop")                 # the others are
    found = m.nic.info()["copy"]
    assert found["ways"].keys() == set(WAYS) and found["ways"]["kernel"]
    assert [found["ways"][way] for way in WAYS[:3]] == [None] * 3
    assert m.copy(mixed(50)) == ["loop"]


def test_a_kernel_that_came_later_is_measured(machine, new_gpu, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "_kernel", lambda: None)
        without = machine(max_sms=3)
        assert "kernel" not in without.nic.info()["copy"]["costs"]["H2D"]
    found = machine(max_sms=3).nic.info()["copy"]
    assert found["measured"] and found["costs"]["H2D"]["kernel"]["fixed_ns"] > 0
    assert 1 <= found["kernel_sms"] <= 3


CHILD = """
import sys
import fake_cuda
fake = fake_cuda.FakeCuda(fake_cuda.build())
fake.set(driver=int(sys.argv[1]))
import test_cuda_ways as tests
from kvio.transfer import Nic
for way in tests.WAYS:
    try:
        m = tests.Machine(fake, "H2D", copy=way)
    except tests.BackendUnavailable as error:
        print(way, "-", str(error).split("had: ")[1].split(";")[0])
        continue
    print(way, *m.copy(tests.SEGMENTS["mixed"]), *m.copy(tests.SEGMENTS["rows"]))
    m.close()
m = tests.Machine(fake, "D2H")
assert m.nic.info()["copy"]["measured"]
m.copy(tests.SEGMENTS["mixed"])
m.close()
print(fake.calls("cuMemcpyBatchAsync") > 0, fake.calls("cuMemcpyBatchAsync_v2") > 0)
assert fake.violations() == []
"""
BATCH_12 = "batch - cuMemcpyBatchAsync needs a driver of CUDA 12.8: this is CUDA"


@pytest.mark.parametrize("driver, batch, kernel, called", [
    (12000, f"{BATCH_12} 12.0", "kernel - the kernel needs sm_80 and CUDA 12.1: this is sm_90, "
     "CUDA 12.0", "False False"),
    (12040, f"{BATCH_12} 12.4", "kernel kernel kernel", "False False"),
    (12080, "batch batch batch", "kernel kernel kernel", "True False"),
    (13000, "batch batch batch", "kernel kernel kernel", "False True")])
def test_drivers_old_and_new(fake_cuda, driver, batch, kernel, called):
    """A process has one libcuda, whose functions are asked for once; so each has its own."""
    here = os.path.dirname(__file__)
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, str(driver)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(
            [here, os.path.dirname(here), os.path.dirname(os.path.dirname(here)),
             os.environ.get("PYTHONPATH", "")])})
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["loop loop loop", batch, "strided strided strided", kernel,
                                       called]


# -- the choice

# What kvio has measured is kept for a device of one capability: each test has another GPU. With one
# SM there is nothing to be sought.
CAPABILITIES = iter(range(100, 1000))


@pytest.fixture
def new_gpu(fake_cuda):
    fake_cuda.set(capability=next(CAPABILITIES))
    return fake_cuda


SMALL = [(i * 256, int(at) * 512, 64) for i, at in
         enumerate(np.random.default_rng(1).permutation(64))]
LOOP, BATCH = "cuMemcpyHtoDAsync_v2", "cuMemcpyBatchAsync_v2"
ROWS, LAUNCH = "cuMemcpy2DAsync_v2", "cuLaunchKernel"


# Real time passes here, on a machine that may be busy: what is to be chosen is cheaper by far.
@pytest.mark.parametrize("call_us, pieces, expected", [
    ({LOOP: 0}, SMALL[:1], "loop"),
    ({LOOP: 2000, BATCH: 0}, SMALL, "batch"),               # 128 ms, or one call
    ({LOOP: 2000, LAUNCH: 0}, SMALL, "kernel"),
    ({LOOP: 20, LAUNCH: 0}, [(1, 0, 64)], "loop"),          # unaligned
    ({LOOP: 2000, ROWS: 0}, rows(64), "strided"),
    ({LOOP: 2000, BATCH: 0, ROWS: 0}, SMALL, "batch"),      # no rectangles
])
def test_the_cheapest_way_is_taken(machine, new_gpu, call_us, pieces, expected):
    for exported in (LOOP, BATCH, ROWS, LAUNCH):
        new_gpu.cost(exported, call_ns=1000 * call_us.get(exported, 40_000))
    m = machine("H2D", max_sms=1)
    found = m.nic.info()["copy"]
    assert found["measured"] and found["copy"] == "auto" and found["kernel_sms"] == 1
    assert m.copy(pieces) == [expected], found["costs"]["H2D"]
    assert m.copies.keys() == {expected}


def test_a_device_is_measured_once(machine, new_gpu):
    first = machine().nic.info()["copy"]
    calls = new_gpu.calls("cuStreamSynchronize")
    assert first["measured"] and calls >= 50
    assert machine(max_sms=3).nic.info()["copy"] == first
    assert new_gpu.calls("cuStreamSynchronize") == calls


def test_a_device_opened_again_is_not_measured_again(new_gpu):
    calls, found = [], []
    for sms in (2, 2, 3):
        with Nic.open("cuda:0", max_sms=sms) as nic:
            found.append(nic.info()["copy"])
        calls.append(new_gpu.calls("cuMemcpyDtoHAsync_v2"))
    assert found[0] == found[1] and found[0]["measured"] and found[2]["measured"]
    assert calls[0] == calls[1] < calls[2]          # with another limit it is


@pytest.mark.parametrize("exported", ["cuMemAlloc_v2", "cuMemHostAlloc"])
def test_without_memory_a_rule_decides(machine, new_gpu, exported):
    # The first allocation of the host's is for descriptors, and that one is there.
    new_gpu.fail(exported, "OUT_OF_MEMORY", after=exported == "cuMemHostAlloc")
    m = machine("H2D")
    assert not m.nic.info()["copy"]["measured"]
    assert m.copy(SMALL[:4]) == ["loop"] and m.copy(SMALL[:5]) == ["batch"]
    assert m.copy(rows(20)) == ["strided"] and m.copy(mixed(100)) == ["batch"]
    m.close()
    with Nic.open("cuda:0") as nic:                         # that is not kept
        assert nic.info()["copy"]["measured"]


def test_a_way_that_fails_while_it_is_measured_is_not_taken(machine, new_gpu):
    new_gpu.fail(BATCH, "NOT_SUPPORTED", times=9999)
    new_gpu.fail(ROWS, "INVALID_VALUE", times=9999)
    m = machine("H2D")
    found = m.nic.info()["copy"]
    assert found["measured"] and found["costs"]["H2D"].keys() == {"loop", "kernel"}
    assert "cuMemcpyBatchAsync: CUDA_ERROR_NOT_SUPPORTED (801)" in found["ways"]["batch"]
    assert "cuMemcpy2DAsync: CUDA_ERROR_INVALID_VALUE (1)" in found["ways"]["strided"]
    assert m.copy(rows(64))[0] in ("loop", "kernel")


def test_a_device_that_dies_while_it_is_measured_does_not_open(new_gpu):
    new_gpu.fail("cuMemcpyDtoHAsync_v2", "ILLEGAL_ADDRESS", after=5, sticky=True)
    with pytest.raises(BackendUnavailable, match="cuMemcpyDtoHAsync.*ILLEGAL_ADDRESS"):
        Nic.open("cuda:0")


def test_costs_are_of_the_ways_that_are_there(machine, new_gpu):
    costs = machine().nic.info()["copy"]["costs"]
    assert costs["H2H"].keys() == {"loop", "batch"}
    assert costs["D2D"].keys() == {"loop", "batch", "kernel"}
    assert costs["H2D"].keys() == costs["D2H"].keys() == set(_nic.COPY_WAYS)
