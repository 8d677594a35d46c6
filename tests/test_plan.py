"""Plans as data: their bytes equal the paper's traffic matrix, their order is sound."""
import asyncio
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvio.errors import InvalidArgument
from kvio.layout import BlockLayout
from kvio.loader import (COMPUTE, NIC_READ, NIC_WRITE, RELEASE, STORAGE_READ, persist_plan,
                         read_plan, run_plan, traffic)

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
    ("both", 4, 1, 2), ("pe", 3, 1, 2), ("pe", -4, 1, 2), ("pe", 4, 0, 2), ("pe", 4, 1, 0)])
def test_impossible_plans_are_refused(arguments):
    with pytest.raises(InvalidArgument):
        read_plan(LAYOUT, *arguments)


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
