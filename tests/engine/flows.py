"""What the tests of flows share: policies that spread parts as asked, and runs of a cluster."""
import asyncio

import numpy as np

from kvio import completion
from kvio.engine.cluster import Cluster, ClusterConfig
from kvio.engine.compute import ModelCompute, TimedCompute
from kvio.engine.model import LlamaModel
from kvio.engine.request import Session, Turn
from kvio.engine.workload import run_sessions
from kvio.layout import BlockLayout
from kvio.memory import POISON
from kvio.scheduler import DE, PE, Part, ReadChoice
from kvio.scheduler.quota import AttentionModel
from kvio.storage import BlockStore

MODEL = LlamaModel.random(3, num_layers=3, exact=True)
LAYOUT = BlockLayout.from_config(MODEL.config(), "float16", block_tokens=16)
TIMED = BlockLayout(3, 16, 64)
ATTENTION = AttentionModel(1e-8, 1e-7)


class Spread:
    """Every request's hits over the first `count` of DE, PE and the other nodes, a block or more
    each, as even as it goes; `push` as asked."""

    def __init__(self, *sides, push=False):
        self.sides, self.pushes = sides, push

    def choose(self, num_tokens, block_tokens, pe, de, others):
        nodes = {PE: pe, DE: de, **{f"h{i}": node for i, node in enumerate(others)}}
        sides = [side for side in self.sides if side in nodes][:num_tokens // block_tokens]
        borders = [num_tokens // block_tokens * i // len(sides) * block_tokens
                   for i in range(len(sides) + 1)]
        return ReadChoice(tuple(
            Part(side, (start, stop), nodes[side].node_id)
            for side, start, stop in zip(sides, borders, borders[1:])), "spread", self.pushes)


POLICIES = {
    "pe": "pe", "shorter_queue": "shorter_queue", "round_robin": "round_robin",
    "split": Spread(DE, PE), "any": Spread(DE, PE, "h0", "h1"), "helpers": Spread("h1", "h0"),
    "push": Spread(DE, PE, push=True), "push_de": Spread(DE, push=True),
    "push_any": Spread(DE, "h0", PE, "h1", push=True),
}


def sessions(num=3, turns=3, vocabulary=128, append=40, new=9):
    draw = np.random.default_rng(5)
    return [Session(f"agent{i}", tuple(Turn(tuple(draw.integers(0, vocabulary, append + 7 * t)),
                                            new) for t in range(turns))) for i in range(num)]


def config(layout=LAYOUT, **changes):
    return ClusterConfig(layout, **{"num_prefill": 2, "num_decode": 2, "buffer_blocks": 64,
                                    "hbm_blocks": 96, "max_tokens": 512, **changes})


def model_compute():
    return ModelCompute(MODEL, LAYOUT)


def timed_compute():
    return TimedCompute(TIMED, 2e-6, 1e-5, attention_time=ATTENTION)


def run(mode, path, conf, compute=model_compute, made=None, look=None, in_step=True):
    """{name: requests} of one mode; `look(cluster, served)` while the cluster is open."""
    async def main(store):
        async with Cluster(conf, mode, store, compute) as cluster:
            served = await run_sessions(cluster, made or sessions(), in_step=in_step)
            assert sum(getattr(e.compute, "num_kv_errors", 0) for e in cluster.engines) == 0
            if look is not None:
                look(cluster, served)
        return served

    if path is None:
        served = asyncio.run(main(None))
    else:
        with BlockStore.open(path, conf.layout, segment_bytes=1 << 20) as store:
            served = asyncio.run(main(store))
    assert completion.in_flight() == 0
    return served


def figures_of(served):
    """Tokens, margins and hits of every request: what no flow may change."""
    return {name: [(r.generated, r.margins, r.num_hit_tokens) for r in requests]
            for name, requests in served.items()}


def assert_all_is_given_back(cluster):
    for engine in cluster.engines:
        pool = engine.buffer.pool
        assert pool.num_free == pool.num_blocks and (pool.region.array == POISON).all()
        assert engine.wanted_blocks == engine.waiting_read_tokens == 0
        assert engine.num_requests == engine.num_tokens == 0
    for engine in cluster.prefill:
        assert all(space.num_taken == 0 for space in engine.workspaces)
        assert engine.batches.num_ready == 0 and len(engine.batches._free) == 2
    for engine in cluster.decode:
        assert engine.hbm.num_free == engine.hbm.num_blocks
