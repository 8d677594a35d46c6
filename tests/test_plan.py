"""Plans as data: their bytes equal the paper's traffic matrix, their order is sound."""
import asyncio
from math import nan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvio.errors import InvalidArgument
from kvio.layout import BlockLayout
from kvio.loader import (COMPUTE, NIC_READ, NIC_WRITE, RELEASE, STORAGE_READ, STORAGE_WRITE, Part,
                         persist_plan, read_plan, run_plan, traffic)

LAYOUT = BlockLayout(5, 4, [8, 16, 8, 24, 8])
WIDTH = 64                              # bytes of a token over all layers
blocks, misses, depths = st.integers(0, 6), st.integers(1, 9), st.integers(1, 3)


@given(blocks, misses, depths)
def test_the_pe_path_moves_what_the_paper_says(num_blocks, miss, depth):
    """PE CNIC read: 3 (hits), 5 (all); write: 4 (hits). DE CNIC read: 8 (all); write: 7, 9."""
    hit = 4 * num_blocks
    moved = traffic(read_plan(LAYOUT, "pe", hit, miss, depth).steps, LAYOUT)
    everything = (hit + miss) * WIDTH
    assert moved["pe", "snic_read"] == hit * WIDTH and moved["de", "snic_read"] == 0
    assert moved["pe", "tx"] == hit * WIDTH + everything
    assert moved["pe", "rx"] == hit * WIDTH
    assert moved["de", "tx"] == everything
    assert moved["de", "rx"] == everything + everything


@given(blocks, misses, depths)
def test_the_de_path_moves_what_the_paper_says(num_blocks, miss, depth):
    """DE CNIC read: 3 (hits), 6 (all); PE write: 5 (hits); miss KV back; DE write: 7."""
    hit = 4 * num_blocks
    moved = traffic(read_plan(LAYOUT, "de", hit, miss, depth).steps, LAYOUT)
    everything = (hit + miss) * WIDTH
    assert moved["de", "snic_read"] == hit * WIDTH and moved["pe", "snic_read"] == 0
    assert moved["pe", "tx"] == miss * WIDTH
    assert moved["pe", "rx"] == hit * WIDTH
    assert moved["de", "tx"] == hit * WIDTH + everything
    assert moved["de", "rx"] == miss * WIDTH + everything


@given(st.sampled_from(["pe", "de"]), blocks, misses, depths)
def test_order_and_buffers(path, num_blocks, miss, depth):
    plan = read_plan(LAYOUT, path, 4 * num_blocks, miss, depth)
    ancestors = []
    for step in plan.steps:
        assert all(before < step.index for before in step.after)
        ancestors.append({a for b in step.after for a in ancestors[b] | {b}})

    def steps(kind, target):
        return [s for s in plan.steps if s.kind == kind and s.target == target]

    computes, loads = steps(COMPUTE, "pe_hbm"), steps(NIC_READ, "pe_hbm")
    sends, inserts = steps(NIC_WRITE, "de_buffer"), steps(NIC_READ, "de_hbm")
    assert [s.layer for s in computes] == list(range(5)) == [s.layer for s in sends]
    for layer, compute in enumerate(computes):
        if num_blocks:
            assert loads[layer].index in ancestors[compute.index]       # its hits are there
            assert steps(STORAGE_READ, f"{path}_buffer")[0].index in ancestors[loads[0].index]
        assert compute.index in ancestors[sends[layer].index]
        if layer >= depth:              # its slot is free: computed and sent on
            first = loads[layer] if num_blocks else compute
            assert {computes[layer - depth].index, sends[layer - depth].index} \
                <= ancestors[first.index]
    for insert in inserts:
        assert {s.index for s in sends} <= ancestors[insert.index]
    for release in (s for s in plan.steps if s.kind == RELEASE):        # nothing uses it after
        users = {s.index for s in plan.steps if s.kind != RELEASE
                 and release.source in (s.source, s.target)}
        assert users <= ancestors[release.index]


@st.composite
def any_plans(draw):
    """Plans of every flow: who reads what, in how many chunks, pulled or pushed."""
    sides = draw(st.permutations(["pe", "h0", "h1"]))
    sides = draw(st.sampled_from([[], ["de"]])) + sides[:draw(st.integers(0, 3))]
    parts, at = [], 0
    for side in sides:
        count = 4 * draw(st.integers(1, 3))
        parts.append(Part(side, (at, at + count)))
        at += count
    chunks = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    return read_plan(LAYOUT, parts, at, sum(chunks), draw(depths), push=draw(st.booleans()),
                     chunks=chunks)


def writes_and_reads(step):
    """((place, layer) pairs written, (place, layer) pairs read, tokens read) of a step."""
    layers = range(LAYOUT.num_layers) if step.layer is None else [step.layer]
    if step.kind == RELEASE:
        return (), (), step.tokens
    if step.kind == COMPUTE:                        # attends to all before, writes its own
        return [("pe_hbm", step.layer)], [("pe_hbm", step.layer)], (0, step.tokens[0])
    reads = () if step.source == "store" else [(step.source, layer) for layer in layers]
    writes = () if step.target == "store" else [(step.target, layer) for layer in layers]
    return writes, reads, step.tokens


@given(any_plans())
def test_every_flow_finds_what_it_reads_and_ends_with_all_in_de_hbm(plan):
    """Token by token: what a step reads was written by steps that it waits for, and its layer's
    slot of PE HBM was not given to another layer or released in between."""
    ancestors, written = [], []
    for step in plan.steps:
        before = {a for b in step.after for a in ancestors[b] | {b}}
        ancestors.append(before)
        writes, reads, span = writes_and_reads(step)
        released = max((b for b in before if plan.steps[b].kind == RELEASE
                        and plan.steps[b].source == "pe_hbm"), default=-1)
        for place, layer in reads:
            there = {token for index, where, tokens in written if where == (place, layer)
                     and index in before and (place != "pe_hbm" or index > released)
                     for token in range(*tokens)}
            assert set(range(*span)) <= there, (step, place, layer)
        written += [(step.index, where, step.tokens) for where in writes]
    for layer in range(LAYOUT.num_layers):
        there = {token for _, where, tokens in written if where == ("de_hbm", layer)
                 for token in range(*tokens)}
        assert there == set(range(plan.num_tokens))
    for release in (s for s in plan.steps if s.kind == RELEASE and s.source != "pe_hbm"):
        users = {s.index for s in plan.steps if s.kind != RELEASE
                 and release.source in (s.source, s.target)}
        assert users <= ancestors[release.index]    # nobody uses it after


@given(any_plans())
def test_every_flow_moves_what_it_should(plan):
    """The paper's terms, generalised: hits once into PE HBM, what the DE lacks back once, all of
    it into DE HBM; a later chunk also brings back what earlier ones computed."""
    moved, total = traffic(plan.steps, LAYOUT), plan.num_tokens
    of = {part.side: part.num_tokens for part in plan.parts}
    again = sum(sum(plan.chunks[:i]) for i in range(1, len(plan.chunks)))
    starts = [plan.num_hit_tokens + sum(plan.chunks[:i]) for i in range(len(plan.chunks))]
    sent = total - of.get("de", 0) + sum(start % 4 for start in starts[1:])
    reloads = plan.num_hit_tokens * (len(plan.chunks) - 1)
    for side, count in of.items():
        assert moved[side, "snic_read"] == count * WIDTH
        if side.startswith("h"):
            assert moved[side, "tx"] == count * len(plan.chunks) * WIDTH
            assert moved[side, "rx"] == 0
    assert moved["pe", "rx"] == (plan.num_hit_tokens + reloads + again) * WIDTH
    assert moved["pe", "tx"] == (of.get("pe", 0) * len(plan.chunks) + sent) * WIDTH
    assert moved["de", "rx"] == (sent + total) * WIDTH
    assert moved["de", "tx"] == (of.get("de", 0) * len(plan.chunks) + again + total) * WIDTH


@given(any_plans())
def test_pushed_parts_are_written_by_those_who_hold_them(plan):
    for step in plan.steps:
        if step.target == "pe_hbm" and step.kind in (NIC_READ, NIC_WRITE):
            assert step.kind == (NIC_WRITE if plan.push else NIC_READ)
            assert step.side == (step.source.split("_")[0] if plan.push else "pe")
    assert plan.path == ("any" if {"h0", "h1"} & {p.side for p in plan.parts} else
                         {0: "none", 1: plan.parts[0].side if plan.parts else "", 2: "split"}[
                             len(plan.parts)])
    assert not [s for s in plan.steps if s.kind == STORAGE_WRITE]


def test_labels_are_those_of_the_figures():
    seen = {label for s in read_plan(LAYOUT, "pe", 4, 1).steps for label in s.labels}
    assert seen == {f"PE {i}" for i in range(1, 10)}
    seen = {label for s in read_plan(LAYOUT, "de", 4, 1).steps for label in s.labels}
    assert seen == {f"DE {i}" for i in range(1, 8)}


def test_persisting_a_decoded_block_crosses_the_de_nic_once_each_way():
    moved = traffic(persist_plan(LAYOUT, 3, from_hbm=True), LAYOUT)
    full = LAYOUT.full_block_nbytes
    assert moved["de", "tx"] == moved["de", "rx"] == moved["de", "snic_write"] == full
    moved = traffic(persist_plan(LAYOUT, 3, from_hbm=False), LAYOUT)
    assert dict(moved) == {("de", "snic_write"): full}


@pytest.mark.parametrize("arguments", [
    ("both", 4, 1, 2), ("pe", 3, 1, 2), ("pe", -4, 1, 2), ("pe", 4, 0, 2), ("pe", 4, 1, 0),
    ([Part("pe", (0, 4))], 8, 1), ([Part("pe", (4, 8))], 8, 1), ([Part("pe", (0, 6))], 6, 1),
    ([Part("pe", (0, 4)), Part("pe", (4, 8))], 8, 1), ([Part("pe", (0, 4))], 0, 1),
    ([Part("pe", (0, 4)), Part("de", (4, 8))], 8, 1)])
def test_impossible_plans_are_refused(arguments):
    with pytest.raises(InvalidArgument):
        read_plan(LAYOUT, *arguments)


@pytest.mark.parametrize("wrong", [
    lambda: Part("fe", (0, 4)), lambda: Part("pe", (4, 4)), lambda: Part("h", (0, 4)),
    lambda: Part("pe", (-4, 4)), lambda: read_plan(LAYOUT, "pe", 4, 3, chunks=(1, 1)),
    lambda: read_plan(LAYOUT, "pe", 4, 3, chunks=(3, 0)), lambda: read_plan(LAYOUT, "pe", 4, 1, 0),
    lambda: Part(7, (0, 4)), lambda: Part("pe", None), lambda: Part("pe", (0, "4")),
    lambda: Part("pe", (0, 4, 8)), lambda: Part("pe", (0, nan)), lambda: Part("pe", (nan, 4)),
    lambda: read_plan(LAYOUT, None, 4, 1), lambda: read_plan(LAYOUT, [4], 4, 1),
    lambda: read_plan(LAYOUT, "pe", 4.0, 1), lambda: read_plan(LAYOUT, "pe", "4", 1),
    lambda: read_plan(LAYOUT, "pe", 4, 1.5), lambda: read_plan(LAYOUT, "pe", 4, None),
    lambda: read_plan(LAYOUT, "pe", 4, 1, 1.5), lambda: read_plan(LAYOUT, "pe", 4, 2, chunks=2),
    lambda: read_plan(LAYOUT, "pe", 4, 2, chunks=()),
    lambda: read_plan(LAYOUT, "pe", 4, 2, chunks=["2"])])
def test_impossible_parts_and_chunks_are_refused(wrong):
    with pytest.raises(InvalidArgument):
        wrong()


@given(st.sampled_from(["pe", "de"]), blocks, misses, depths, st.integers(0, 2**32))
def test_run_plan_keeps_the_order_whatever_takes_long(path, num_blocks, miss, depth, seed):
    random = Random(seed)
    plan = read_plan(LAYOUT, path, 4 * num_blocks, miss, depth)
    finished = []

    async def perform(step):
        assert set(step.after) <= set(finished)
        for _ in range(random.randrange(4)):
            await asyncio.sleep(0)
        finished.append(step.index)

    asyncio.run(run_plan(plan.steps, perform))
    assert sorted(finished) == list(range(len(plan.steps)))


@given(st.integers(0, 200), st.integers(0, 2**32))
def test_after_a_failure_nothing_starts_and_nothing_is_left_running(bad, seed):
    random = Random(seed)
    plan = read_plan(LAYOUT, "pe", 8, 3)
    bad %= len(plan.steps)
    running, started = set(), set()

    async def perform(step):
        started.add(step.index)
        running.add(step.index)
        for _ in range(random.randrange(4)):
            await asyncio.sleep(0)
        running.discard(step.index)
        if step.index == bad:
            raise ValueError(step.index)

    async def main():
        with pytest.raises(ValueError, match=str(bad)):
            await run_plan(plan.steps, perform)
        assert not running
        assert all(set(plan.steps[i].after) <= started - {bad} for i in started)

    asyncio.run(main())


def test_a_cancelled_plan_waits_for_what_is_in_flight():
    async def main():
        started, finish = asyncio.Event(), asyncio.Event()
        done = []

        async def perform(step):
            started.set()
            await finish.wait()
            done.append(step.index)

        plan = read_plan(LAYOUT, "pe", 8, 3)
        task = asyncio.ensure_future(run_plan(plan.steps, perform))
        await started.wait()
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done() and not done
        finish.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done == [0]                              # and no further step began

    asyncio.run(main())
