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


# ---- what may touch what, and when

def access_of(cluster, engine):
    return {each.access for each in engine.nic._ext.owners.values()}


@pytest.mark.parametrize("policy, pushed", [(None, False), ("any_node", False), ("push", True)])
def test_pe_hbm_is_open_to_others_writes_only_where_a_policy_pushes(tmp_path, policy, pushed):
    local, read, write = Access.LOCAL_WRITE, Access.REMOTE_READ, Access.REMOTE_WRITE

    def look(cluster, served):
        for engine in cluster.prefill:
            assert access_of(cluster, engine) == {read, local | write if pushed else local}
    run("dualpath", tmp_path, config(policy=policy), look=look, made=sessions(1, 1))


def test_a_policy_that_pushes_and_does_not_say_so_is_refused_by_the_nic(tmp_path):
    policy = Spread(DE, push=True)
    policy.__class__ = type("Secretly", (Spread,), {
        "choose": lambda self, *args: ReadChoice(Spread(DE).choose(*args).parts, "", True)})
    policy.pushes = False
    with pytest.raises(TransferError, match="REM_ACCESS"):
        run("dualpath", tmp_path, config(policy=policy), made=sessions(1, 2))


def marked(monkeypatch, mark=0x77):
    """PE HBM that was given back is filled with a mark; who gets it next finds it untouched."""
    from kvio.engine.prefill import Workspace
    clear, take, seen = Workspace.clear, Workspace.take, []

    def marking(self):
        clear(self)
        self.region.array[:] = mark

    def checking(self, num_blocks):
        if self.num_taken == 0 and self.most_taken:
            seen.append(bool((self.region.array == mark).all()))
        return take(self, num_blocks)
    monkeypatch.setattr(Workspace, "clear", marking)
    monkeypatch.setattr(Workspace, "take", checking)
    return seen


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


@pytest.mark.parametrize("name", ["split", "any", "push_any"])
@pytest.mark.parametrize("delay_s", [0.0005, 0.002, 0.004, 0.007, 0.012, 0.02])
def test_cancelled_in_any_flow_at_any_moment_no_late_byte_lands_in_what_is_given_back(
        tmp_path, monkeypatch, name, delay_s):
    """Slow links, and completions that come late on top: much is in flight at any moment."""
    seen = marked(monkeypatch)
    conf = config(TIMED, policy=POLICIES[name], quota_s=3e-5, cnic_bytes_per_s=4_000_000)

    async def main(store):
        async with Cluster(conf, "dualpath", store, timed_compute) as cluster:
            made = sessions(4, 2)
            await run_sessions(cluster, [Session(s.name, s.turns[:1]) for s in made])
            for engine in cluster.engines:
                engine.nic._ext._fault(ext.DELAY, 1, 200_000)
            task = asyncio.ensure_future(run_sessions(cluster, made))
            await asyncio.sleep(delay_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert_all_is_given_back(cluster)
            await run_sessions(cluster, made)
            assert_all_is_given_back(cluster)
            assert sum(e.compute.num_kv_errors for e in cluster.engines) == 0

    with BlockStore.open(tmp_path, TIMED) as store:
        asyncio.run(main(store))
    assert completion.in_flight() == 0 and seen and all(seen)


@pytest.mark.parametrize("nth", [1, 2, 4, 9])
@pytest.mark.parametrize("name", ["push_de", "push_any", "any"])
def test_what_a_failed_nic_wrote_to_is_nobodys_until_its_queue_pairs_are_reset(
        tmp_path, monkeypatch, name, nth):
    """Packets of a write that has failed may come late, but not past a queue pair that was reset:
    only then do PE HBM and the buffers go to others."""
    from kvio.engine.prefill import Workspace
    conf, states = config(TIMED, num_decode=1, policy=POLICIES[name], max_attempts=1), []

    async def main(store):
        async with Cluster(conf, "dualpath", store, timed_compute) as cluster:
            made, begun = sessions(3, 2), []

            def checked(given_back):
                def check(self, *args):
                    if begun:
                        states.extend(qp["state"] for peer in cluster._peers.values()
                                      for qp in peer.query().values())
                    return given_back(self, *args)
                return check
            await run_sessions(cluster, [Session(s.name, s.turns[:1]) for s in made])
            monkeypatch.setattr(Workspace, "clear", checked(Workspace.clear))
            begun.append(True)
            nic, failed = cluster.decode[0].nic._ext, 0
            nic._fault(ext.STATUS, nth, 11)                     # REM_OP_ERR
            for session in made:
                try:
                    await run_sessions(cluster, [session])
                except TransferError as failure:
                    assert "REM_OP_ERR" in str(failure) or "FLUSH" in str(failure)
                    failed += 1
            assert_all_is_given_back(cluster)
            nic._fault(ext.STATUS)                              # had none come so far
            await run_sessions(cluster, made)
            return failed
    with BlockStore.open(tmp_path, TIMED) as store:
        failed = asyncio.run(main(store))
    assert 0 < failed < 3 and set(states) == {"ready"}


# ---- limits

@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", ["split", "push_any"])
def test_depth_and_budgets_are_hard_limits(tmp_path, monkeypatch, name, depth):
    """Layers of a request in PE HBM, blocks of a batch, blocks of a buffer: never more, and as
    many as that somewhere."""
    from kvio.engine import prefill
    step, held, most = prefill._Stay._step, {}, []
    compute = prefill._Stay._compute

    async def stepping(self, each):
        layers = held.setdefault(self, Counter())
        if each.target == "pe_hbm":
            layers[each.layer] = 1
            most.append(len(+layers))
        await step(self, each)
        if each.source == "pe_hbm":
            layers[each.layer] = 0
    async def computing(self, layer):
        held.setdefault(self, Counter())[layer] = 1
        most.append(len(+held[self]))
        await compute(self, layer)
    monkeypatch.setattr(prefill._Stay, "_step", stepping)
    monkeypatch.setattr(prefill._Stay, "_compute", computing)
    made = sessions(6)
    longest = max(sum(len(t.append) + t.num_new_tokens for t in s.turns) for s in made)
    blocks = TIMED.num_blocks(longest)
    conf = config(TIMED, depth=depth, policy=POLICIES[name], buffer_blocks=2 * blocks,
                  hbm_blocks=blocks, max_tokens=longest, batch_tokens=longest + 20, quota_s=1e-3)

    def look(cluster, served):
        spaces = [space for engine in cluster.prefill for space in engine.workspaces]
        assert all(space.num_blocks == TIMED.num_blocks(longest + 20) for space in spaces)
        assert 0 < max(space.most_taken for space in spaces) <= spaces[0].num_blocks
        assert max(record.num_chunks for e in cluster.prefill for record in e.batches.records) > 1
        assert_all_is_given_back(cluster)
    run("dualpath", tmp_path, conf, timed_compute, made, look, in_step=False)
    assert max(most) == depth


def test_nodes_lend_what_their_own_requests_do_not_need():
    async def main():
        async with Cluster(config(TIMED), "oracle", None, timed_compute) as cluster:
            def lent():
                return [r.lend_tokens for reports in cluster._reports() for r in reports]
            before = lent()
            node = cluster.decode[0]
            ids = await node.buffer.acquire(10)
            node.wanted_blocks += 5
            during = lent()
            node.buffer.release(ids)
            node.wanted_blocks += 60
            after = lent()
            node.wanted_blocks = 0
            return before, during, after
    before, during, after = asyncio.run(main())
    assert before == [64 * 16] * 4 and during == [1024, 1024, 49 * 16, 1024]
    assert after == [1024, 1024, 0, 1024]


def test_reports_say_what_a_storage_nic_reads_in_tokens():
    async def main(rate):
        async with Cluster(config(TIMED, snic_bytes_per_s=rate), "oracle", None,
                           timed_compute) as cluster:
            return {r.snic_tokens_per_s for reports in cluster._reports() for r in reports}
    assert asyncio.run(main(192_000)) == {1000.0}       # 3 layers of 64 bytes a token
    assert asyncio.run(main(0)) == {1.0}


# ---- the quota

def test_batches_keep_to_the_quota_and_say_their_attention_time(tmp_path):
    conf = config(TIMED, quota_s=2e-5)

    def look(cluster, served):
        times = [s for engine in cluster.prefill for s in engine.batch_attention_s]
        records = [r for engine in cluster.prefill for r in engine.batches.records]
        requests = [r for rs in served.values() for r in rs]
        assert times and max(times) <= 2e-5 and times == [r.attention_s for r in records]
        assert sum(r.num_new_tokens for r in records) == \
            sum(r.num_prompt_tokens - r.num_hit_tokens for r in requests)
        assert sum(r.num_chunks for r in records) > len(requests)
        assert all(r.begin_s < r.end_s for r in records)
        for engine in cluster.prefill:
            ends = [(r.begin_s, r.end_s) for r in engine.batches.records]
            assert all(a[1] <= b[0] + 1e-9 for a, b in zip(ends, ends[1:]))
    run("dualpath", tmp_path, conf, timed_compute, look=look, in_step=False)


def test_the_timed_stand_in_takes_the_attention_time_in_shares_of_its_layers(tmp_path):
    """Both the batch's prediction and the engine's sleep come from one model."""
    busy = {}

    def look(cluster, served):
        busy["s"] = sum(e.compute.busy_s for e in cluster.prefill)
        busy["attention_s"] = sum(s for e in cluster.prefill for s in e.batch_attention_s)
        busy["new"] = sum(r.num_prompt_tokens - r.num_hit_tokens
                          for rs in served.values() for r in rs)
    run("dualpath", tmp_path, config(TIMED, quota_s=1e-4), timed_compute, look=look)
    assert busy["s"] == pytest.approx(busy["attention_s"] + 2e-6 * busy["new"])


@pytest.mark.parametrize("changes, message", [
    ({"quota_s": 1.0}, "attention_time"), ({"batch_tokens": 100}, "batch_tokens"),
    ({"quota_s": -1.0, "attention_time": ATTENTION}, "quota")])
def test_limits_that_cannot_be_are_refused(tmp_path, changes, message):
    with pytest.raises(InvalidArgument, match=message):
        run("dualpath", tmp_path, config(**changes), made=sessions(1, 1))


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
