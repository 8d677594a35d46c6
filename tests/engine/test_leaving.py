"""Requests that leave at awkward moments: what they held goes to others, and nothing else."""
import asyncio

import numpy as np
import pytest

from kvio import completion
from kvio.engine.cluster import Cluster, ClusterConfig
from kvio.engine.compute import TimedCompute
from kvio.engine.node import Buffer
from kvio.errors import Closed, InvalidArgument
from kvio.layout import BlockLayout, block_keys
from kvio.memory import BlockPool
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
            keys = block_keys(tokens[:32], LAYOUT, served.config.namespace("leaves"))
            assert store.match(keys) < 2        # the second block was filled by that step
            assert decode.compute.num_kv_errors == 0
            assert decode.hbm.num_free == 3

    with BlockStore.open(tmp_path, LAYOUT) as store:
        asyncio.run(main(store))


def test_a_request_that_is_cancelled_in_line_does_not_trip_whoever_makes_room():
    """Its future is cancelled at once, its task hears of it later; the scheduler knows neither."""
    async def main():
        async with cluster() as served:
            served.decode[0].compute.slow = "first"
            first = start(served, "first")
            await served.decode[0].compute.began.wait()
            second, third = start(served, "second"), start(served, "third")
            await soon(lambda: served.scheduler.num_waiting == 2)
            hbm, free = served.decode[0].hbm, served.decode[0].hbm.free
            hbm.free = lambda ids: (free(ids), second.cancel())     # then `first` makes room
            served.decode[0].compute.gate.set()
            await asyncio.gather(first, third)
            assert second.cancelled() and served.decode[0].promised_blocks == 0
            assert served.decode[0].num_requests == served.prefill[0].num_requests == 0

    asyncio.run(asyncio.wait_for(main(), 20))


def test_blocks_are_not_granted_to_a_request_that_is_cancelled_in_line():
    async def main():
        buffer = Buffer(BlockPool(LAYOUT, 2))
        held = await buffer.acquire(2)
        stays, leaves = (asyncio.ensure_future(buffer.acquire(1)) for _ in range(2))
        await asyncio.sleep(0)
        leaves.cancel()
        buffer.release(held)
        assert len(await stays) == 1
        with pytest.raises(asyncio.CancelledError):
            await leaves
        assert buffer.pool.num_free == 1

    asyncio.run(main())


def test_a_request_that_no_decode_engine_could_hold_is_refused_at_once():
    """It would wait at the head of the line for ever, and everybody behind it."""
    async def main():
        async with cluster(buffer_blocks=64) as served:
            with pytest.raises(InvalidArgument, match="hbm_blocks"):
                await served.generate("large", np.arange(100), 10)
            await served.generate("small", PROMPT, 10)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_leaving_the_cluster_ends_what_is_being_served(tmp_path):
    async def main(store):
        async with cluster(store) as served:
            served.decode[0].compute.slow = "decoding"
            tasks = [start(served, "decoding"), start(served, "waiting")]
            await served.decode[0].compute.began.wait()
            asyncio.get_running_loop().call_later(0.02, served.decode[0].compute.gate.set)
        assert all(task.cancelled() for task in tasks)
        with pytest.raises(Closed):
            await served.generate("late", PROMPT, 1)

    with BlockStore.open(tmp_path, LAYOUT) as store:
        asyncio.run(asyncio.wait_for(main(store), 20))
    assert completion.in_flight() == 0


def test_a_decode_step_that_fails_fails_its_requests_and_no_later_one():
    async def main():
        async with cluster() as served:
            compute, step = served.decode[0].compute, served.decode[0].compute.decode_step

            async def failing(sequences):
                compute.decode_step = step
                raise ArithmeticError("once")
            compute.decode_step = failing
            with pytest.raises(ArithmeticError):
                await served.generate("first", PROMPT, 10)
            await served.generate("second", PROMPT, 10)

    asyncio.run(asyncio.wait_for(main(), 20))
