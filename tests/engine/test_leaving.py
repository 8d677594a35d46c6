"""Requests that leave at awkward moments: what they held goes to others, and nothing else."""
import asyncio

import numpy as np
import pytest

from kvio.engine.cluster import Cluster, ClusterConfig
from kvio.engine.compute import TimedCompute
from kvio.layout import BlockLayout, block_keys
from kvio.storage import BlockStore

LAYOUT = BlockLayout(3, 16, 64)
PROMPT = np.arange(31, dtype=np.uint32)         # with its next token: two blocks


class GatedCompute(TimedCompute):
    """Decode steps that compute for `slow` do not end (or, `late`, do not begin to write) before
    the test says so."""

    slow, late = None, False

    def __post_init__(self):
        super().__post_init__()
        self.began, self.gate = asyncio.Event(), asyncio.Event()

    async def _wait(self, sequences):
        if any(s.request.session == self.slow for s in sequences):
            self.began.set()
            await self.gate.wait()

    async def decode_step(self, sequences):
        if self.late:
            await self._wait(sequences)
        made = await super().decode_step(sequences)
        await self._wait(sequences)
        return made


def cluster(store=None, compute=None, **sizes):
    sizes = {"buffer_blocks": 16, "hbm_blocks": 3, "max_tokens": 480, **sizes}
    return Cluster(ClusterConfig(LAYOUT, **sizes), "none" if store is None else "basic", store,
                   compute or (lambda: GatedCompute(LAYOUT, 0, 0)))


def start(cluster, session, prompt=PROMPT, num_new_tokens=10):
    return asyncio.ensure_future(cluster.generate(session, prompt, num_new_tokens))


async def soon(condition):
    """Until the condition holds; the test's time-out is the limit."""
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("late", [False, True])
def test_a_sequence_that_is_cancelled_in_a_step_stores_nothing_and_writes_nothing(tmp_path, late):
    """Its HBM is just enough for one request: who comes next gets the very same blocks."""
    async def main(store):
        async with cluster(store) as served:
            decode = served.decode[0]
            decode.compute.slow, decode.compute.late = "leaves", late
            leaves = start(served, "leaves")
            await decode.compute.began.wait()
            follows = start(served, "follows", PROMPT + 1000)
            tokens = served.decode[0]._batch[0][0].tokens
            leaves.cancel()
            for _ in range(200):                # as far as it gets
                await asyncio.sleep(0.001)
            decode.compute.gate.set()
            await follows
            with pytest.raises(asyncio.CancelledError):
                await leaves
            await asyncio.sleep(0.05)
            keys = block_keys(tokens[:32], LAYOUT, b"model/leaves")
            assert store.match(keys) < 2        # the second block was filled by that step
            assert decode.compute.num_kv_errors == 0
            assert decode.hbm.num_free == 3

    with BlockStore.open(tmp_path, LAYOUT) as store:
        asyncio.run(main(store))
