"""The seeded fault driver with HBM in device memory, in real time, on the fake libcuda: what is
drawn for soft NICs there befalls the driver and its copies here."""
import asyncio
import gc
import tempfile

import failing
import pytest
from failing import LAYOUT, in_flight, pause
from fault_driver import Plan, Run, report
from on_device import DEVICE, bytes_of, opened

from kvio.storage import BlockStore

COPIES = ("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyAsync", "cuMemcpy2DAsync_v2",
          "cuMemcpyBatchAsync_v2")
NUM_SEEDS, PER_TEST = 60, 20


@pytest.fixture(scope="module")
def fake():
    with opened() as fake:
        failing.device_bytes = lambda region: bytes_of(fake, region)
        yield fake
        failing.device_bytes = None


class DeviceRun(Run):
    """The plan of the same seed, but for what only soft NICs can do."""

    def __init__(self, fake, plan):
        plan.changes = {"device": DEVICE, **plan.changes}
        del plan.changes["cnic_bytes_per_s"]
        super().__init__(plan, real=True)
        self.fake = fake

    def _nic_status(self, fault, loop):
        """One copy of some kind fails, whosever it is."""
        name = COPIES[fault.where % len(COPIES)]
        self.told.append(f"{name} fails, at {fault.at}")
        self.fake.fail(name, "NOT_PERMITTED")

    def _delay(self, fault, loop):
        self._cost(int(2e6 * fault.size))
        loop.call_later(0.004, self._cost, 0)

    def _cost(self, run_ns):
        for name in COPIES:
            self.fake.cost(name, run_ns=run_ns)

    def end_faults(self):
        self.fake.reset()
        for engine in self.cluster.engines:
            if engine.name not in self.cluster.lost:
                pause(engine, False)
                engine.ring._ring._fault(0, 0)


def run_seed(fake, seed):
    run = DeviceRun(fake, Plan.drawn(seed))
    blocks = run.plan.capacity_blocks
    with tempfile.TemporaryDirectory(prefix="kvio-faults-") as path, \
            BlockStore.open(path, LAYOUT, segment_bytes=1 << 17, capacity_bytes=None
                            if blocks is None else blocks * LAYOUT.stride) as run.store:
        asyncio.run(run.main(None))
    return run


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, PER_TEST))
def test_random_faults_with_hbm_on_a_device(fake, first):
    gc.collect()
    fake.reset()
    before, finished = fake.objects(), 0
    for seed in range(first, first + PER_TEST):
        run = run_seed(fake, seed)
        assert not run.problems, report(run)
        finished += run.num_finished
        assert in_flight() == 0 and fake.violations() == [], report(run)
    del run
    gc.collect()
    assert fake.objects() == before and finished > 2 * PER_TEST


def test_a_late_write_into_device_memory_is_seen(fake):
    """The control: bytes that come into HBM that somebody else has by then."""
    class Late(DeviceRun):
        def end_faults(self):
            super().end_faults()
            pool = self.cluster.decode[0].hbm
            bytes_of(fake, pool.region)[::LAYOUT.layer_bytes_per_token[0]] ^= 1

    plan = next(plan for plan in map(Plan.drawn, range(100)) if plan.watched and not plan.faults)
    run = Late(fake, plan)
    with tempfile.TemporaryDirectory() as path, BlockStore.open(path, LAYOUT) as run.store:
        asyncio.run(run.main(None))
    assert any("somebody else's" in problem for problem in run.problems)
