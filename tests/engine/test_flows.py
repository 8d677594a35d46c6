"""Every flow gives the same tokens and moves the bytes of its plans: one side, split over both,
over other nodes' storage NICs, pulled and pushed, in chunks, and in no time at all."""
import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from flows import (ATTENTION, LAYOUT, POLICIES, TIMED, assert_all_is_given_back, config,
                   figures_of, model_compute, run, sessions, timed_compute)
from on_device import DEVICE, opened

from kvio.engine.cluster import Cluster
from kvio.engine.compute import TimedCompute
from kvio.engine.oracle import MemoryRing, MemoryStore
from kvio.engine.request import Session, Turn, predicted_hit_tokens
from kvio.engine.workload import run_sessions
from kvio.errors import InvalidArgument
from kvio.layout import BlockLayout
from kvio.loader import persist_plan, read_plan, traffic
from kvio.scheduler import PE, AttentionModel, LoadOrRecompute
from kvio.storage import BlockStore
from kvio.transfer import TrafficClass


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


@pytest.fixture(scope="module", params=[None, DEVICE], ids=["host", "device"])
def hbm(request):
    """Where HBM is: soft NICs and host memory, or copy engines and a GPU's."""
    if request.param is None:
        yield None
    else:
        with opened(controls=False):
            yield DEVICE


@pytest.mark.parametrize("quota_s", [None, 2e-5])
@pytest.mark.parametrize("name", POLICIES)
def test_every_flow_gives_the_same_tokens_and_moves_the_bytes_of_its_plans(
        tmp_path, expected, hbm, name, quota_s):
    """Counted where bytes are copied, at every port of every node, against the traffic matrix
    of the plans summed over requests."""
    conf = config(policy=POLICIES[name], quota_s=quota_s, device=hbm,
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


# ---- mode oracle, and decode's persistence

@pytest.mark.parametrize("name", [None, *POLICIES])
def test_the_oracle_has_the_same_tokens_and_hits_and_moves_nothing(expected, name):
    def look(cluster, served):
        for engine in cluster.engines:
            stats = engine.nic.stats()
            assert stats["tx_bytes"] == stats["rx_bytes"] == stats["doorbells"] == 0
            assert engine.ring.stats()["read_busy_ns"] == 0
        assert cluster.decode[0].num_persist_failures == 0
        assert_all_is_given_back(cluster)
    served = run("oracle", None, config(policy=None if name is None else POLICIES[name],
                                        quota_s=2e-5, attention_time=ATTENTION), look=look)
    assert figures_of(served) == expected


def test_the_oracle_resumes_from_what_is_in_memory(tmp_path):
    async def main(store):
        async with Cluster(config(), "oracle", store, model_compute) as cluster:
            return await run_sessions(cluster, sessions())
    store = MemoryStore(LAYOUT)
    first, again = asyncio.run(main(store)), asyncio.run(main(store))
    assert len(store) and all(rs[0].num_hit_tokens > 0 for rs in again.values())
    assert {n: [r.generated for r in rs] for n, rs in first.items()} == \
        {n: [r.generated for r in rs] for n, rs in again.items()}
    with BlockStore.open(tmp_path, LAYOUT) as disk, pytest.raises(InvalidArgument, match="oracle"):
        Cluster(config(), "oracle", disk, model_compute)
    with pytest.raises(InvalidArgument, match="oracle"):
        Cluster(config(), "basic", store, model_compute)


def test_decode_persists_in_a_class_of_its_own(tmp_path):
    low, seen = TrafficClass("persist", 6, 8), {}

    def look(cluster, served):
        blocks = sum(LAYOUT.num_full_blocks(r.num_prompt_tokens + len(r.generated) - 1)
                     - len(r.keys) for rs in served.values() for r in rs)
        seen["persist"] = sum(e.nic.stats()["by_class"]["persist"]["tx_bytes"]
                              for e in cluster.engines)
        assert seen["persist"] == blocks * LAYOUT.full_block_nbytes > 0
    served = run("dualpath", tmp_path, config(persist_class=low), look=look)
    assert all(r.finished for rs in served.values() for r in rs)


def test_decode_that_cannot_store_leaves_the_buffer_to_prompts(monkeypatch):
    """The store takes nothing: decode's blocks hold a quarter of the DE's buffer, the rest stay
    in HBM, and prompts are served on; once it takes them, all are stored."""
    layout, write = BlockLayout(2, 4, 8), MemoryRing.write

    async def main():
        gate = asyncio.Event()

        async def gated(ring, *args):
            await gate.wait()
            return write(ring, *args)
        monkeypatch.setattr(MemoryRing, "write", gated)
        conf = config(layout, num_prefill=1, num_decode=1, buffer_blocks=8, hbm_blocks=64)
        async with Cluster(conf, "oracle", None, lambda: TimedCompute(layout, 0, 0)) as cluster:
            pool, engine = cluster.decode[0].buffer.pool, cluster.decode[0]
            first = asyncio.ensure_future(cluster.generate("a", range(3), 80))
            while not engine._batch:
                await asyncio.sleep(0)
            request = engine._batch[0][0].request
            while not request.finished:
                await asyncio.sleep(0)
            held = pool.num_blocks - pool.num_free
            second = asyncio.ensure_future(cluster.generate("b", range(3), 1))
            done, _ = await asyncio.wait([second], timeout=20)
            gate.set()
            await first
            return held, bool(done), cluster.decode[0].num_persisted_blocks
    held, served, stored = asyncio.run(main())
    assert held == 2 and served and stored == (3 + 80 - 1) // 4


def test_hits_are_computed_again_where_loading_would_take_longer(tmp_path, expected):
    """The rule in front of the policies: nothing is worth loading where computing costs nothing,
    and everything is where a token takes a quarter of an hour. The same tokens."""
    def paths(recompute, snic_bytes_per_s):
        served = run("dualpath", tmp_path / str(snic_bytes_per_s), conf=replace(
            config(), recompute=recompute, snic_bytes_per_s=snic_bytes_per_s))
        assert {name: [r[:2] for r in rs] for name, rs in figures_of(served).items()} == \
            {name: [r[:2] for r in rs] for name, rs in expected.items()}
        return Counter(r.path for requests in served.values() for r in requests
                       if LAYOUT.num_full_blocks(r.num_prompt_tokens - 1))
    fast = LoadOrRecompute(AttentionModel(0.0), 0.0, LAYOUT.block_tokens)
    slow = LoadOrRecompute(AttentionModel(0.0), 1e3, LAYOUT.block_tokens)
    assert set(paths(fast, 1 << 40)) == {"none"}
    assert set(paths(slow, 1 << 41)) & {"pe", "de"}
