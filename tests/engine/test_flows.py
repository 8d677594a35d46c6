"""Every flow gives the same tokens and moves the bytes of its plans: one side, split over both,
over other nodes' storage NICs, pulled and pushed, in chunks, and in no time at all."""
import asyncio
from collections import Counter

import numpy as np
import pytest

from kvio import completion
from kvio._ext import nic as ext
from kvio.engine.cluster import Cluster, ClusterConfig
from kvio.engine.compute import ModelCompute, TimedCompute
from kvio.engine.model import LlamaModel
from kvio.engine.oracle import MemoryStore
from kvio.engine.request import Session, Turn, predicted_hit_tokens
from kvio.engine.workload import run_sessions
from kvio.errors import InvalidArgument, TransferError
from kvio.layout import BlockLayout
from kvio.loader import persist_plan, read_plan, traffic
from kvio.memory import POISON
from kvio.scheduler import DE, PE, Part, ReadChoice
from kvio.scheduler.quota import AttentionModel
from kvio.storage import BlockStore
from kvio.transfer import Access, TrafficClass

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


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Of Basic, unchunked, whose tokens are those without any reuse."""
    none = run("none", None, config())
    basic = run("basic", tmp_path_factory.mktemp("basic"), config())
    assert {n: [r.generated for r in rs] for n, rs in none.items()} == \
        {n: [r.generated for r in rs] for n, rs in basic.items()}
    assert {n: [r.num_hit_tokens for r in rs] for n, rs in basic.items()} == \
        {s.name: predicted_hit_tokens(s, LAYOUT) for s in sessions()}
    return figures_of(basic)


def chunks_of(request, records):
    """The chunks that a request was computed in (miss tokens of each)."""
    return tuple(stop - start for start, stop in records[request.request_id])


def watch(cluster):
    """{request_id: its chunks} as the prefill engines form them."""
    records = {}
    for engine in cluster.prefill:
        add = engine.batches._add

        def noted(batch, add=add):
            before = len(batch.chunks)
            grew = add(batch)
            for chunk in batch.chunks[before:]:
                records.setdefault(chunk.job.request_id, []).append(chunk.tokens)
            return grew
        engine.batches._add = noted
    return records


@pytest.mark.parametrize("quota_s", [None, 2e-5])
@pytest.mark.parametrize("name", POLICIES)
def test_every_flow_gives_the_same_tokens_and_moves_the_bytes_of_its_plans(
        tmp_path, expected, name, quota_s):
    """Counted where packets are copied, at every port of every node, against the traffic matrix
    of the plans summed over requests."""
    conf = config(policy=POLICIES[name], quota_s=quota_s,
                  attention_time=ATTENTION if quota_s else None)

    async def main(store):
        async with Cluster(conf, "dualpath", store, model_compute) as cluster:
            routes, chunks, planned = {}, watch(cluster), Counter()
            nodes = cluster._nodes

            def noted(route):
                routes[route.request_id] = route, nodes(route)
                return routes[route.request_id][1]
            cluster._nodes = noted
            served = await run_sessions(cluster, sessions(), in_step=True)
            for request in (r for requests in served.values() for r in requests):
                route, sides = routes[request.request_id]
                moved = traffic(read_plan(
                    LAYOUT, request.parts, request.num_hit_tokens,
                    request.num_prompt_tokens - request.num_hit_tokens, push=route.push,
                    chunks=chunks_of(request, chunks)).steps, LAYOUT)
                stored = LAYOUT.num_full_blocks(request.num_prompt_tokens
                                                + len(request.generated) - 1)
                for block in range(request.num_hit_tokens // 16, stored):
                    moved += traffic(persist_plan(LAYOUT, block, block >= len(request.keys)),
                                     LAYOUT)
                for (side, port), nbytes in moved.items():
                    planned[sides[side].name, port] += nbytes
            return served, chunks, planned, counted(cluster)

    with BlockStore.open(tmp_path, LAYOUT, segment_bytes=1 << 20) as store:
        served, chunks, planned, seen = asyncio.run(main(store))
    assert figures_of(served) == expected
    assert +seen == +planned
    used = {part.side for rs in served.values() for r in rs for part in r.parts}
    assert used >= set(getattr(POLICIES[name], "sides", [PE]))
    assert any(len(each) > 1 for each in chunks.values()) == (quota_s is not None)


def counted(cluster):
    seen = Counter()
    for engine in cluster.engines:
        nic, ring = engine.nic.stats(), engine.ring.stats()
        seen.update({(engine.name, "tx"): nic["tx_bytes"], (engine.name, "rx"): nic["rx_bytes"],
                     (engine.name, "snic_read"): ring["read_bytes"],
                     (engine.name, "snic_write"): ring["write_bytes"]})
    return seen


@pytest.mark.parametrize("num", [3, 20])
def test_pushed_parts_are_gathered_and_pulled_ones_are_not(tmp_path, num):
    """A layer of n scattered blocks is ceil(n / max_sge) work requests of its owner, or n of the
    PE: in PE HBM the blocks lie one after the other."""
    def work_requests(policy):
        made = [Session("a", (Turn(tuple(range(16 * num)), 1), Turn((1,), 1)))]
        counts = {}

        def look(cluster, served):
            counts.update({e.name: e.nic.stats()["work_requests"] for e in cluster.engines})
        run("dualpath", tmp_path / policy, config(TIMED, num_prefill=1, num_decode=1,
                                                  policy=POLICIES[policy]),
            timed_compute, made, look)
        return counts
    pulled, pushed = work_requests("shorter_queue"), work_requests("push_de")
    assert sum(pulled.values()) > sum(pushed.values())
    layers, gathered = TIMED.num_layers, -(-num // 16)
    assert pushed["de0"] - pulled["de0"] == layers * gathered
