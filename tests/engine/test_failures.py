"""Everything that can fail, at every step of every flow: the tokens are right all the same, and
nothing is left behind.

A case is (flow, fault, step, before or after it). What is checked in each: the tokens are those
of the definition, all memory is free and holds nothing but poison, no engine has met a wrong byte
of KV, and the counters say what has happened, neither more nor less.
"""
import asyncio
import contextlib
import gc

import numpy as np
import pytest

from failing import (FLOWS, LAYOUT, WRITE, Canaries, Steps, compute, config, in_flight,
                     in_link_time, leaks, new_pool, pause, prime, right_tokens, settled,
                     spoil)
from kvio._ext import nic as ext
from kvio.engine.cluster import Cluster
from kvio.errors import EngineLost, InvalidArgument, TransferError
from kvio.layout import block_keys
from kvio.loader.plan import DE_HBM, NIC_READ, STORAGE_READ
from kvio.memory import LayerPool
from kvio.scheduler import DE, PE, AttentionModel
from kvio.storage import BlockStore

PROMPT = tuple(range(100, 123))             # 5 full blocks and 3 tokens
NUM_NEW = 7                                 # two more blocks fill up, and the last token is bare
EXPECTED = right_tokens(PROMPT, NUM_NEW)


class Case:
    """One request in one cluster; a fault goes off once, at `step`."""

    num_sessions, canaries = 0, None

    def __init__(self, cluster, store, pool, num_stored=4):
        Case.num_sessions += 1
        self.cluster, self.store = cluster, store
        self.session = f"s{Case.num_sessions}"
        self.keys = prime(store, pool, cluster.config, self.session, PROMPT[:4 * num_stored])
        self.nodes, self.then, self.before = {}, None, cluster.counters()
        cluster._nodes = self._noted

    def _noted(self, route):
        nodes = Cluster._nodes(self.cluster, route)
        self.nodes = self.nodes or nodes        # of the first route
        return nodes

    async def run(self, fault=None, step=None, when="before"):
        """The request; fault(self, done) at that step."""
        def at(n, where, plan_step):
            if fault is not None and (n, where) == (step, when):
                fault(self)
            elif self.then is not None:
                self.then(plan_step)
        with Steps(at).watched() as steps:
            request = await self.cluster.generate(self.session, PROMPT, NUM_NEW)
        await settled(self.cluster)
        self.undo()
        return request, steps

    def keys_of(self, request):
        """Of all full blocks of the prompt and the tokens that have KV."""
        tokens = np.array([*PROMPT, *request.generated[:-1]], np.uint32)
        return block_keys(tokens, LAYOUT, self.cluster.config.namespace(self.session))

    def undo(self):
        for engine in self.cluster.engines:
            if engine.name in self.cluster.lost:
                continue
            for kind in (ext.STATUS, ext.DELAY):
                engine.nic._ext._fault(kind, 0, 0)
            engine.ring._ring._fault(0, 0)
            pause(engine, False)

    def counted(self):
        """What the counters have counted since this case began."""
        return {name: count - self.before[name]
                for name, count in self.cluster.counters().items()
                if count != self.before[name]}


@contextlib.asynccontextmanager
async def opened(store, fabric, flow, **changes):
    async with Cluster(config(flow, **changes), "dualpath", store, compute, fabric) as cluster:
        yield cluster


def run(tmp_path, main, watched=True):
    """`await main(store, pool, fabric)` with a store of its own."""
    with BlockStore.open(tmp_path, LAYOUT, segment_bytes=1 << 17) as store, new_pool() as pool, \
            Canaries() if watched else contextlib.nullcontext() as canaries:
        Case.canaries = canaries
        in_link_time(lambda fabric: main(store, pool, fabric))
    assert in_flight() == 0


def check(case, request, what):
    assert request.generated == EXPECTED, f"{what}: {request}"
    assert case.canaries.give_back() == [], what
    assert leaks(case.cluster) == [], what


async def num_steps(store, pool, fabric, flow, **changes):
    """Of the undisturbed request, which is also right."""
    async with opened(store, fabric, flow, **changes) as cluster:
        case = Case(cluster, store, pool)
        request, steps = await case.run()
        check(case, request, "undisturbed")
        assert case.counted() == {} and request.num_hit_tokens == 16
        assert {part.side for part in request.parts} == set(FLOWS[flow].sides)
        return steps.count


# ---- engines die

@pytest.mark.parametrize("flow, victim", [
    (flow, victim) for flow in FLOWS for victim in ("pe", "de", "h0")
    if victim != "h0" or "h0" in FLOWS[flow].sides])
def test_an_engine_dies_at_every_step(tmp_path, flow, victim):
    seen = []

    def kill(case):
        serving, = case.cluster._routed
        needed = not serving.request.finished if victim == DE else serving._in_prefill
        seen.append("needed" if needed else "not needed")
        case.cluster.kill(case.nodes[victim].name)

    shape = {} if "any" in flow else {PE: {"num_decode": 1}, DE: {"num_prefill": 1}}[victim]

    async def main(store, pool, fabric):
        count = await num_steps(store, pool, fabric, flow, **shape)
        for step in range(count):
            for when in ("before", "after"):
                what = f"{victim} dies {when} step {step} of {flow}"
                async with opened(store, fabric, flow, **shape) as cluster:
                    case = Case(cluster, store, pool)
                    del seen[:]
                    request, _ = await case.run(kill, step, when)
                    check(case, request, what)
                    counted = case.counted()
                    counted.pop("persist_failures", 0)
                    assert seen and counted.pop("engines_lost") == 1, what
                    if seen == ["not needed"]:
                        assert counted == {}, what
                    elif victim == "h0":        # unless its part had been used up
                        assert counted in ({}, {"read_failovers": 1}), what
                    else:
                        assert counted == {"reroutes": 1}, what
                        assert case.nodes[victim].name in request.mended[0], what

    run(tmp_path, main)


# ---- transfers, blocks and storage fail: the engines stay

def every_step(tmp_path, flow, fault, judge, whens=("before",), **changes):
    """One cluster, a request a step, and `fault(case)` at that step; `judge(case, request, what)`
    looks at the counters."""
    async def main(store, pool, fabric):
        count = await num_steps(store, pool, fabric, flow, **changes)
        async with opened(store, fabric, flow, **changes) as cluster:
            for step in range(count):
                for when in whens:
                    case, what = Case(cluster, store, pool), f"{when} step {step} of {flow}"
                    request, _ = await case.run(fault, step, when)
                    check(case, request, what)
                    judge(case, request, what)

    run(tmp_path, main)


@pytest.mark.parametrize("flow, victim", [(flow, victim) for flow in FLOWS
                                          for victim in ("pe", "de", "h0")
                                          if victim != "h0" or "h0" in FLOWS[flow].sides])
def test_a_nic_goes_into_error_at_every_step(tmp_path, flow, victim):
    seen, retries = {}, []

    def fail(case):
        nic = case.nodes[victim].nic
        seen["errors"] = nic.stats()["errors"]
        nic._ext._fault(ext.STATUS, 1, 11)                      # REM_OP_ERR

    def judge(case, request, what):
        failed = case.nodes[victim].nic.stats()["errors"] > seen["errors"]
        counted = case.counted()
        assert bool(counted) == failed, what
        assert counted.get("retries", 0) == request.num_retries <= 1, what
        assert set(counted) <= {"retries", "persist_failures"}, what
        if request.num_retries:
            assert "REM_OP_ERR" in request.mended[0] or "FLUSH" in request.mended[0], what
        retries.append(request.num_retries)

    every_step(tmp_path, flow, fail, judge)
    assert any(retries) == (flow != "any" or victim != "h0")        # it only answers there


@pytest.mark.parametrize("flow", FLOWS)
def test_a_completion_is_late_at_every_step(tmp_path, flow):
    """All NICs tell 1 ms late of what they do in this step, and in what goes on beside it."""
    def delay(case):
        for engine in case.cluster.engines:
            engine.nic._ext._fault(ext.DELAY, 0, 1_000_000)

    def judge(case, request, what):
        assert case.counted() == {}, what

    every_step(tmp_path, flow, delay, judge)


@pytest.mark.parametrize("flow", FLOWS)
def test_writes_fail_from_any_step_on(tmp_path, flow):
    lost = []

    def fail(case):
        case.nodes[DE].ring._ring._fault(WRITE, -5, count=1 << 20)

    def judge(case, request, what):
        counted = case.counted()
        assert set(counted) <= {"persist_failures"}, what
        lost.append(counted.get("persist_failures", 0))
        stored = case.store.match(case.keys_of(request))
        assert stored <= 7 - (lost[-1] > 0) and (lost[-1] > 0 or stored == 7), what

    every_step(tmp_path, flow, fail, judge)
    assert lost[0] == 3                         # of 7 blocks 4 were stored before


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("flow", FLOWS)
def test_a_block_fails_its_checksum_at_every_step(tmp_path, flow, block):
    hits = []

    def flip(case):
        assert spoil(case.store, case.keys[block])

    def judge(case, request, what):
        hits.append(request.num_hit_tokens)
        replans = hits[-1] < 16
        assert case.counted() == ({"replans": 1} if replans else {}), what
        assert hits[-1] in (4 * block, 16), what

    every_step(tmp_path, flow, flip, judge)
    assert hits[0] == 4 * block and hits[-1] == 16      # read before it was spoilt


@pytest.mark.parametrize("flow, victim", [(flow, side) for flow in FLOWS
                                          for side in FLOWS[flow].sides])
def test_a_storage_nic_stalls_at_every_step(tmp_path, flow, victim):
    """It goes on once the request is past loading; what it reads then is nobody's any more."""
    failovers = []

    def stall(case):
        pause(case.nodes[victim], True)
        case.then = lambda step: step is not None and step.kind == STORAGE_READ or \
            pause(case.nodes[victim], False)

    def judge(case, request, what):
        counted = case.counted()
        failovers.append(counted.pop("read_failovers", 0))
        counted.pop("persist_failures", 0)      # of a write that it was to do
        assert counted == {}, what
        assert failovers[-1] == request.num_read_failovers <= 1, what
        if failovers[-1]:
            sides = {part.side for part in request.parts}
            assert victim not in sides and request.num_hit_tokens == 16, what
            assert f"storage NIC of {case.nodes[victim].name}" in request.mended[0], what

    every_step(tmp_path, flow, stall, judge, read_timeout_s=0.02)
    assert failovers[0] == 1 and failovers[-1] == 0


@pytest.mark.parametrize("quota_s", [None, 2e-6])
@pytest.mark.parametrize("flow", FLOWS)
def test_a_request_is_cancelled_at_every_step(tmp_path, flow, quota_s):
    """It leaves nothing behind, also where it is computed in chunks that have not begun."""
    changes = {} if quota_s is None else {"quota_s": quota_s,
                                          "attention_time": AttentionModel(1e-8, 1e-7)}

    async def main(store, pool, fabric):
        count = await num_steps(store, pool, fabric, flow, **changes)
        ended = []
        async with opened(store, fabric, flow, **changes) as cluster:
            for step in range(count):
                for when in ("before", "after"):
                    case = Case(cluster, store, pool)
                    task = asyncio.ensure_future(case.run(lambda case: task.cancel(), step, when))
                    await asyncio.wait([task])
                    await settled(cluster)
                    what = f"cancelled {when} step {step} of {flow}"
                    ended.append(task.cancelled())
                    assert case.canaries.give_back() == leaks(cluster) == [], what
                    assert task.cancelled() or task.result()[0].generated == EXPECTED, what
                    assert case.counted() == {}, what
        assert ended[0] and all(ended[:2 * count - 4])      # but for the last write, maybe

    run(tmp_path, main)


@pytest.mark.parametrize("flow, victim, counted", [
    ("split", "pe", {"retries": 1, "reroutes": 1, "engines_lost": 1}),
    ("any", "h0", {"retries": 1, "read_failovers": 1, "engines_lost": 1})])
def test_who_had_done_its_part_dies_and_then_all_is_to_be_done_again(tmp_path, flow, victim,
                                                                     counted):
    """Its prefill was through; the insertion into HBM fails, and the next try needs it."""
    async def main(store, pool, fabric):
        async with opened(store, fabric, flow) as cluster:
            case, seen = Case(cluster, store, pool), []

            def at(n, when, step):
                if step is not None and step.target == DE_HBM and not seen:
                    seen.append(n)
                    cluster.kill(case.nodes[victim].name)
                    case.nodes[DE].nic._ext._fault(ext.STATUS, 1, 11)
            with Steps(at).watched():
                request = await cluster.generate(case.session, PROMPT, NUM_NEW)
            await settled(cluster)
            check(case, request, flow)
            assert case.counted() == counted

    run(tmp_path, main)


# ---- failures that stay

def test_a_transfer_that_fails_again_and_again_fails_the_request_by_name(tmp_path):
    async def main(store, pool, fabric):
        async with opened(store, fabric, "pe", max_attempts=3) as cluster:
            case = Case(cluster, store, pool)

            def fail(n, when, step):
                if when == "before" and step is not None and step.kind == NIC_READ:
                    case.nodes[PE].nic._ext._fault(ext.STATUS, 1, 11)
            with Steps(fail).watched(), pytest.raises(TransferError) as failure:
                await cluster.generate(case.session, PROMPT, NUM_NEW)
            case.undo()
            assert "3 tries have failed" in str(failure.value)
            causes, each = [], failure.value
            while each.__cause__ is not None:
                each = each.__cause__
                causes.append(each)
            assert len(causes) == 3 and all("REM_OP_ERR" in str(cause) for cause in causes)
            assert cluster.counters()["retries"] == 2
            assert case.canaries.give_back() == leaks(cluster) == []
            request, _ = await case.run()               # and the next one is served
            check(case, request, "after")

    run(tmp_path, main)


def test_without_engines_of_a_side_requests_fail_by_name(tmp_path):
    async def main(store, pool, fabric):
        for side in (PE, DE):
            async with opened(store, fabric, "split") as cluster:
                case = Case(cluster, store, pool)
                waiting = asyncio.ensure_future(case.run(
                    lambda case: [cluster.kill(f"{side}{i}") for i in (0, 1)], 2))
                with pytest.raises(EngineLost, match=f"{side}0, {side}1") as failure:
                    await waiting
                assert failure.value.engine == f"{side}1"
                with pytest.raises(EngineLost, match="num_"):
                    await cluster.generate("later", PROMPT, 1)
                await settled(cluster)
                assert case.canaries.give_back() == leaks(cluster) == []
                assert cluster.counters()["engines_lost"] == 2

    run(tmp_path, main)


def test_a_request_in_line_for_an_engine_that_dies_is_served_by_another(tmp_path):
    """HBM of one request only: the second has its PE, and waits for a DE."""
    async def main(store, pool, fabric):
        async with opened(store, fabric, "split", hbm_blocks=8, num_decode=2) as cluster:
            cases = [Case(cluster, store, pool) for _ in range(3)]
            tasks = [asyncio.ensure_future(cluster.generate(case.session, PROMPT, NUM_NEW))
                     for case in cases]
            while cluster.scheduler.num_waiting != 1:
                await asyncio.sleep(1e-5)
            cluster.kill("de0")
            for task in tasks:
                assert (await task).generated == EXPECTED
            await settled(cluster)
            assert leaks(cluster) == []

    run(tmp_path, main, watched=False)              # all HBM is needed


def test_both_storage_nics_stall_and_all_is_computed(tmp_path):
    async def main(store, pool, fabric):
        async with opened(store, fabric, "pe", read_timeout_s=0.01) as cluster:
            case = Case(cluster, store, pool)

            def stall(n, when, step):
                for engine in cluster.engines:
                    pause(engine, step is not None and step.kind == STORAGE_READ)
            with Steps(stall).watched():
                request = await cluster.generate(case.session, PROMPT, NUM_NEW)
            await settled(cluster)
            check(case, request, "all stall")
            assert request.num_hit_tokens == 0 and request.parts == ()
            assert case.counted() == {"read_failovers": 2}
            assert [each.split(":")[0] for each in request.mended] == ["read_failovers"] * 2

    run(tmp_path, main)


def test_a_stalled_write_costs_reuse_and_no_request_waits_for_it(tmp_path):
    async def main(store, pool, fabric):
        async with opened(store, fabric, "pe", read_timeout_s=0.01) as cluster:
            case = Case(cluster, store, pool)

            def stall(n, when, step):
                pause(case.nodes[DE], True)
            with Steps(stall).watched():
                request = await cluster.generate(case.session, PROMPT, NUM_NEW)
            assert request.generated == EXPECTED and case.counted() == {"persist_failures": 3}
            pool_of = case.nodes[DE].buffer.pool
            assert pool_of._leaving.sum() == 3          # nobody gets these yet
            pause(case.nodes[DE], False)
            await settled(cluster)
            check(case, request, "later")

    run(tmp_path, main)


def test_bad_input():
    for wrong in ({"max_attempts": 0}, {"max_attempts": 1.5}, {"max_attempts": True},
                  {"read_timeout_s": 0}, {"read_timeout_s": -1.0},
                  {"read_timeout_s": float("nan")}, {"read_timeout_s": "soon"}):
        with pytest.raises(InvalidArgument):
            config(**wrong)


def test_a_name_that_no_engine_has(tmp_path):
    async def main(store, pool, fabric):
        async with opened(store, fabric, "pe") as cluster:
            with pytest.raises(InvalidArgument, match="pe0, pe1, de0, de1"):
                cluster.kill("pe7")
            cluster.kill("pe1")
            cluster.kill("pe1")                         # once is enough
            assert cluster.counters()["engines_lost"] == 1

    run(tmp_path, main)


@pytest.mark.parametrize("mode", ["none", "oracle"])
def test_engines_die_in_the_other_modes(mode):
    async def main(fabric):
        async with Cluster(config(policy=None), mode, None, compute, fabric) as cluster:
            def kill(n, when, step):
                if (n, when) == (5, "before"):
                    name, = (e.name for e in cluster.decode if e.num_requests)
                    cluster.kill(name)
            with Steps(kill).watched():
                request = await cluster.generate("a", PROMPT, NUM_NEW)
            assert request.generated == EXPECTED and request.num_reroutes == 1
            assert leaks(cluster) == []

    in_link_time(main)


@pytest.mark.parametrize("fault", ["none", "kill", "block", "cancel"])
def test_failures_leave_no_memory_to_the_garbage_collector(tmp_path, fault):
    """Errors have tracebacks, and those have frames: none of them may keep a cluster alive."""
    async def main(store, pool, fabric):
        conf = config("split", num_prefill=1)
        async with Cluster(conf, "dualpath", store, compute, fabric) as cluster:
            keys = prime(store, pool, conf, "a", PROMPT[:16])

            if fault == "block":
                spoil(store, keys[2])
            task = asyncio.ensure_future(cluster.generate("a", PROMPT, NUM_NEW))
            await asyncio.sleep(1e-5)               # it is being prefilled
            if fault == "kill":
                cluster.kill(next(e.name for e in cluster.decode if e.num_requests))
            elif fault == "cancel":
                task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() == (fault == "cancel")
            mended = [] if task.cancelled() else task.result().mended
            assert len(mended) == (fault in ("kill", "block"))
            await settled(cluster)

    gc.collect()
    gc.disable()
    try:
        run(tmp_path, main, watched=False)
        clusters = [o for o in gc.get_objects() if isinstance(o, (Cluster, LayerPool))]
        assert clusters == []
    finally:
        gc.enable()
