"""Failures with HBM in device memory, on the fake libcuda: engines that die, NICs and calls of the
driver that fail, at many steps of a request. The tokens are right, and nothing is left behind."""
import asyncio
import json
import os
import subprocess
import sys

import pytest
from failing import LAYOUT, Steps, compute, config, new_pool, prime, right_tokens
from on_device import DEVICE, device, fake, left_behind     # noqa: F401

from kvio.engine.cluster import Cluster
from kvio.errors import EngineLost
from kvio.scheduler import DE, PE
from kvio.storage import BlockStore

PROMPT = tuple(range(100, 123))             # 5 full blocks and 3 tokens
NUM_NEW = 7
EXPECTED = right_tokens(PROMPT, NUM_NEW)
FLOWS = "split", "push"
EVERY = 5                                   # a step of so many; which ones depends on the flow


class Served:
    """One request in a cluster of its own; `fault(self)` at one step."""

    count = 0

    def __init__(self, fake, store, pool, flow, **changes):
        self.fake, self.store, self.pool = fake, store, pool
        self.conf, self.nodes, self.cluster = config(flow, device=DEVICE, **changes), {}, None

    def run(self, fault=None, step=None, when="before"):
        """(the request, how many steps there were, what is left behind)."""
        return asyncio.run(self._run(fault, step, when))

    async def _run(self, fault, step, when):
        Served.count += 1
        session = f"s{Served.count}"
        prime(self.store, self.pool, self.conf, session, PROMPT[:16])

        def at(n, where, _):
            if fault is not None and (n, where) == (step, when):
                fault(self)

        async with Cluster(self.conf, "dualpath", self.store, compute) as self.cluster:
            self.cluster._nodes = self._noted
            with Steps(at).watched() as steps:
                request = await asyncio.wait_for(
                    self.cluster.generate(session, PROMPT, NUM_NEW), 30)
            await asyncio.gather(*self.cluster._ending)
            return request, steps.count, left_behind(self.fake, self.cluster)

    def _noted(self, route):
        nodes = Cluster._nodes(self.cluster, route)
        self.nodes = self.nodes or nodes
        return nodes


@pytest.fixture
def served(fake, tmp_path):
    with BlockStore.open(tmp_path, LAYOUT, segment_bytes=1 << 17) as store, new_pool() as pool:
        yield lambda flow, **changes: Served(fake, store, pool, flow, **changes)


def steps_of(served, flow):
    """Some of them, the last one too, of a request that nothing disturbs and that is right."""
    request, count, left = served(flow).run()
    assert request.generated == EXPECTED and request.num_hit_tokens == 16 and left == []
    assert count > 4 * EVERY
    return [*range(len(flow) % EVERY, count, EVERY), count - 1]


@pytest.mark.parametrize("victim", [PE, DE])
@pytest.mark.parametrize("flow", FLOWS)
def test_an_engine_dies(served, flow, victim):
    reroutes = 0
    for step in steps_of(served, flow):
        case = served(flow)
        request, _, left = case.run(lambda case: case.cluster.kill(case.nodes[victim].name), step,
                                    ("before", "after")[step % 2])
        assert request.generated == EXPECTED and left == [], f"step {step}"
        assert case.cluster.counters()["engines_lost"] == 1
        reroutes += case.cluster.counters()["reroutes"]
    assert reroutes > 0


def test_the_last_engine_of_a_side_dies(served):
    case = served("split", num_decode=1)
    with pytest.raises(EngineLost, match="de0"):
        case.run(lambda case: case.cluster.kill("de0"), 6)


@pytest.mark.parametrize("victim", [PE, DE])
@pytest.mark.parametrize("flow", FLOWS)
def test_a_nic_fails(served, flow, victim):
    """All its queue pairs go into error, and flush what is in flight once that has drained."""
    retries = 0
    for step in steps_of(served, flow):
        case = served(flow)
        request, _, left = case.run(lambda case: case.nodes[victim].nic.fail(), step,
                                    ("before", "after")[step % 2])
        assert request.generated == EXPECTED and left == [], f"step {step}"
        retries += case.cluster.counters()["retries"]
    assert retries > 0


COPIES = ("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyAsync", "cuMemcpy2DAsync_v2",
          "cuMemcpy3DAsync_v2", "cuMemcpyBatchAsync_v2", "cuLaunchKernel")


@pytest.mark.parametrize("exported", [COPIES, ["cuMemsetD8Async"]], ids=["copy", "fill"])
@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.filterwarnings("ignore:freed blocks could not be filled")
def test_a_call_of_the_driver_fails_once(served, fake, flow, exported):
    """A KV transfer, the arithmetic's own copy, or a fill: that costs a try, not the tokens."""
    def fail(case):
        for name in exported:
            fake.fail(name, "NOT_PERMITTED")

    retries = 0
    for step in steps_of(served, flow):
        case = served(flow, max_attempts=len(exported) + 1)
        request, _, left = case.run(fail, step)
        fake.reset()                            # also what no call has met
        assert request.generated == EXPECTED, f"step {step}"
        assert left == [] or exported != COPIES, f"step {step}"
        retries += case.cluster.counters()["retries"]
    assert retries > 0


# ---- the end of a context

RUN = """
import asyncio, gc, json, os, sys
from flows import TIMED, config, timed_compute
import fake_cuda
from kvio.engine.cluster import Cluster
from kvio.errors import KvioError
fake = fake_cuda.FakeCuda(os.environ["KVIO_CUDA_LIBRARY"])
seen = []

async def main():
    async with Cluster(config(TIMED, device="cuda:0"), "none", None, timed_compute) as cluster:
        assert (await cluster.generate("a", range(40), 3)).finished
        fake.fail("", "ILLEGAL_ADDRESS", sticky=True)
        for session in "b", "c":
            try:
                await asyncio.wait_for(cluster.generate(session, range(40), 3), 60)
            except KvioError as failure:
                seen.append([type(failure).__name__, str(failure)])
    async with Cluster(config(TIMED), "none", None, timed_compute) as cluster:
        seen.append((await cluster.generate("d", range(40), 3)).finished)
asyncio.run(main())
print(json.dumps(seen))
"""


def test_a_context_that_has_ended_is_a_typed_error_and_the_process_goes_on(device):
    """In a process of its own, which gets no second context."""
    here = os.path.dirname(__file__)
    path = os.pathsep.join([os.path.dirname(os.path.dirname(here)), os.path.dirname(here), here,
                            os.path.join(os.path.dirname(here), "transfer")])
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", RUN], text=True, timeout=120,
                          capture_output=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    (first, why), (second, _), finished = json.loads(done.stdout)
    assert first == second == "TransferError" and finished
    assert "ILLEGAL_ADDRESS" in why and DEVICE in why
