"""Measuring what copies cost, by a clock that only the driver's calls move: to the nanosecond."""
import ctypes
import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cbuild
from cuda_plan import (BATCH, D2D, D2H, H2D, H2H, KERNEL, LOOP, STRIDED, Cost, Plan, Shape)

ROOT = Path(__file__).resolve().parents[2]
THERE = {H2H: {LOOP, BATCH}, H2D: {LOOP, BATCH, STRIDED, KERNEL},
         D2H: {LOOP, BATCH, STRIDED, KERNEL}, D2D: {LOOP, BATCH, KERNEL}}
ORDINALS = itertools.count(1000)        # what is found on one is kept, of the first 16

pytestmark = pytest.mark.needs("compiler")


class Model(ctypes.Structure):
    _fields_ = [("call_ns", ctypes.c_double), ("piece_ns", ctypes.c_double),
                ("byte_ns", ctypes.c_double), ("sms_of_link", ctypes.c_uint32),
                ("error", ctypes.c_int32)]


class Clock:
    """`measure({(kind, way): Model})`: what kvio finds on such a machine."""

    def __init__(self, folder):
        sources = [ROOT / "kvio" / "_ext" / f"cuda_{part}.c"
                   for part in ("plan", "choose", "ways", "measure")]
        self.lib = ctypes.CDLL(cbuild.shared_library(
            folder / "libcuda_clock.so", [Path(__file__).with_name("cuda_clock.c"), *sources],
            f"-I{ROOT}/include", f"-I{ROOT}/kvio/_ext", "-D_GNU_SOURCE",
            "-Dclock_gettime=virtual_clock"))
        self.models = ((Model * 4) * 4).in_dll(self.lib, "models")
        self.sync_ns = ctypes.c_double.in_dll(self.lib, "sync_ns")
        self.now_ns = ctypes.c_double.in_dll(self.lib, "now_ns")

    def measure(self, models, max_sms=8, sync_ns=0, ordinal=None):
        """(costs[kind][way], kernel_sms, how long it took in ns)."""
        for kind, way in itertools.product(range(4), range(4)):
            self.models[kind][way] = models.get((kind, way), Model())
        self.sync_ns.value = sync_ns
        costs, sms = ((Cost * 4) * 4)(), ctypes.c_uint32()
        self.lib.measure(next(ORDINALS) if ordinal is None else ordinal, max_sms, costs,
                         ctypes.byref(sms))
        return costs, sms.value, self.now_ns.value


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    return Clock(tmp_path_factory.mktemp("clock"))


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return Plan(tmp_path_factory.mktemp("plan"))


def close(found, expected, within=3.0):
    """The clock counts whole nanoseconds, a few of which are a difference's."""
    return math.isclose(found, expected, rel_tol=1e-3, abs_tol=within)


@given(st.fixed_dictionaries({
    (kind, way): st.builds(Model, st.integers(0, 20_000), st.integers(0, 3000),
                           st.sampled_from([0.02, 0.1, 1]))
    for kind, ways in THERE.items() for way in ways}), st.integers(0, 20_000))
@settings(max_examples=40)
def test_the_figures_are_those_of_the_machine(clock, models, sync_ns):
    costs, _, _ = clock.measure(models, sync_ns=sync_ns)
    for kind, way in itertools.product(range(4), range(4)):
        cost, model = costs[kind][way], models.get((kind, way))
        assert bool(cost.there) == (way in THERE[kind])
        if not cost.there:
            continue
        piece, byte = model.piece_ns, model.byte_ns
        if way == LOOP:                 # a call a piece, no other time than the wait for it
            assert close(cost.fixed_ns, sync_ns) and close(cost.copy_ns, model.call_ns + piece)
        elif way == STRIDED:
            assert close(cost.fixed_ns, sync_ns, 9) and close(cost.copy_ns, model.call_ns)
            assert close(cost.row_ns, piece)
        elif way == BATCH:
            assert close(cost.fixed_ns, sync_ns + model.call_ns) and close(cost.copy_ns, piece)
        if way != KERNEL:
            assert close(cost.byte_ns, byte, 1e-5)


def test_the_figures_of_the_kernel_predict_its_samples(clock, plan):
    """It counts in pieces of 16 KiB, so the time of a large copy's goes into the time a byte."""
    costs, sms, _ = clock.measure({(H2D, KERNEL): Model(4000, 20, 0.02, 1)}, sync_ns=5000)
    assert sms == 1
    for count, nbytes in ((1, 4096), (256, 4096), (32, 1 << 18)):
        descriptors = count * max(1, nbytes // 16384)
        took = 9000 + 20 * descriptors + count * nbytes * 0.02
        shape = Shape(H2D, count, 0, count, count * nbytes, True)
        assert math.isclose(plan.predict_ns(costs[H2D][KERNEL], KERNEL, shape), took, rel_tol=1e-3)


@pytest.mark.parametrize("to_device, to_host, max_sms, expected", [
    (1, 1, 8, 1), (2, 1, 8, 2), (2, 4, 8, 4), (8, 8, 8, 8), (16, 16, 8, 8), (3, 3, 8, 4),
    (6, 1, 6, 6), (5, 5, 6, 6), (3, 3, 3, 3), (1, 1, 1, 1), (100, 1, 132, 128)])
def test_the_kernel_takes_the_fewest_sms_that_fill_the_link(clock, to_device, to_host, max_sms,
                                                            expected):
    models = {(H2D, KERNEL): Model(0, 0, 0.02 * to_device, to_device),
              (D2H, KERNEL): Model(0, 0, 0.02 * to_host, to_host)}
    assert clock.measure(models, max_sms)[1] == expected


# Figures of the order that is known of a GPU on PCIe 5: 50 GB/s, 2 us a copy of the loop, 10 us
# from a call until somebody has waited for it; memory of its own 1 TB/s, the host's 10 GB/s.
GPU = {(kind, way): Model(call, piece, byte, 4 if way == KERNEL else 0)
       for kind, byte in ((H2D, 0.02), (D2H, 0.02), (D2D, 0.001), (H2H, 0.1))
       for way, call, piece in ((LOOP, 2000, 0), (BATCH, 5000, 500), (STRIDED, 3000, 50),
                                (KERNEL, 5000, 20))
       if way in THERE[kind]}


def test_it_takes_some_tens_of_milliseconds(clock):
    *_, took_ns = clock.measure(GPU, sync_ns=10_000)
    assert 5e6 < took_ns < 60e6


def test_what_delays_one_run_of_three_is_not_seen(clock):
    quiet = clock.measure(GPU, sync_ns=10_000)
    delay = ctypes.c_double.in_dll(clock.lib, "hiccup_ns")
    delay.value = 50_000
    try:
        noisy = clock.measure(GPU, sync_ns=10_000)
    finally:
        delay.value = 0
    assert noisy[2] > quiet[2] + 1e6 and noisy[1] == quiet[1]
    for kind, way in itertools.product(range(4), range(4)):
        for name in ("fixed_ns", "copy_ns", "row_ns", "byte_ns"):
            found, expected = (getattr(costs[kind][way], name) for costs in (noisy[0], quiet[0]))
            assert close(found, expected, 0.01 if name == "byte_ns" else 9)


def test_a_slow_machine_is_measured_once_each(clock):
    """A hundred times slower: one run of each sample is long enough."""
    slow = {at: Model(100 * each.call_ns, 100 * each.piece_ns, 100 * each.byte_ns,
                      each.sms_of_link) for at, each in GPU.items()}
    _, _, took_ns = clock.measure(slow, sync_ns=1_000_000)
    _, _, fast_ns = clock.measure(GPU, sync_ns=10_000)
    assert took_ns < 40 * fast_ns


def test_a_call_that_is_refused_is_no_way(clock):
    for way in (BATCH, STRIDED, KERNEL):
        refusing = {**GPU, (H2D, way): Model(error=801)}
        costs, _, _ = clock.measure(refusing)
        assert not costs[H2D][way].there and costs[H2D][LOOP].there
        assert costs[D2H][way].there


def test_what_was_found_is_kept_for_the_device(clock):
    first, sms, took_ns = clock.measure(GPU, ordinal=3)
    again, same, no_time = clock.measure({}, ordinal=3)
    assert bytes(first) == bytes(again) and sms == same and took_ns > 0 == no_time
    assert clock.measure(GPU, ordinal=4)[2] == took_ns
    assert clock.measure(GPU, max_sms=2, ordinal=3)[2] > 0          # with another limit
