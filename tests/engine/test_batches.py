"""Batches of a prefill engine: who is in them, whose turn it is, and that nobody waits for ever.

The bookkeeping alone first, under any order in which inputs come and chunks fail; then engines:
whatever the chunks are, the bits are those of prefill in one piece."""
import asyncio
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvio import completion
from kvio.engine import batches as batches_module
from kvio.engine.batches import Batches
from kvio.engine.cluster import Cluster, ClusterConfig
from kvio.engine.compute import ModelCompute, TimedCompute
from kvio.engine.model import LlamaModel
from kvio.engine.request import Session, Turn
from kvio.engine.workload import run_sessions
from kvio.errors import InvalidArgument
from kvio.layout import BlockLayout
from kvio.scheduler import DE, PE, Part, ReadChoice
from kvio.scheduler.quota import AttentionModel
from kvio.storage import BlockStore

LAYOUT = BlockLayout(3, 4, 8)
LINEAR = AttentionModel(0.0, 1.0)               # a second a new token: quotas count tokens


class Space:
    """HBM of `num_blocks`, as a Workspace counts it."""

    def __init__(self, num_blocks):
        self.num_blocks, self.taken, self.in_use = num_blocks, 0, False

    def take(self, num_blocks):
        if self.taken + num_blocks > self.num_blocks:
            return None
        self.in_use, first, self.taken = True, self.taken, self.taken + num_blocks
        return first

    def clear(self):
        self.in_use, self.taken = False, 0


class Job:
    """A request of so many tokens; what comes of its chunks is the test's business."""

    def __init__(self, request_id, cached, total, began):
        self.request_id, self.num_cached_tokens, self.num_tokens = request_id, cached, total
        self.chunks, self._began = [], began

    def begin(self, chunk):
        self.chunks.append(chunk)
        self._began(chunk)


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


def form(jobs, quota_s=None, num_blocks=100, num_spaces=2):
    """The chunks that are formed at once, [(request_id, (start, stop), batch number)]."""
    async def main():
        made, numbers = [], {}

        def began(chunk):
            number = numbers.setdefault(id(chunk.batch), len(numbers))
            made.append((chunk.job.request_id, chunk.tokens, number))
        batches = Batches(LAYOUT, [Space(num_blocks) for _ in range(num_spaces)], quota_s,
                          LINEAR if quota_s else None)
        for request_id, cached, total in jobs:
            batches.join(Job(request_id, cached, total, began))
        return made
    return asyncio.run(main())


def test_without_a_quota_a_batch_is_one_whole_request():
    assert form([(1, 4, 9), (2, 0, 7), (3, 0, 1)]) == [(1, (4, 9), 0), (2, (0, 7), 1)]


def test_a_quota_takes_requests_first_in_first_out_and_cuts_the_one_that_would_exceed_it():
    """What is left of it stays at the head of the next batch."""
    assert form([(1, 4, 7), (2, 8, 20), (3, 0, 2)], quota_s=10.0) == [
        (1, (4, 7), 0), (2, (8, 15), 0), (2, (15, 20), 1), (3, (0, 2), 1)]


def test_a_batch_that_has_not_begun_takes_later_requests_in_and_one_that_has_does_not():
    async def main():
        made = []
        batches = Batches(LAYOUT, [Space(100), Space(100)], 10.0, LINEAR)
        jobs = [Job(i, 0, 3, made.append) for i in range(4)]
        batches.join(jobs[0])
        batches.join(jobs[1])                       # still open
        turn = asyncio.ensure_future(batches.turn(made[0], 0))
        await turn
        batches.join(jobs[2])                       # it computes
        batches.join(jobs[3])
        return [made.index(c) for c in made if c.batch is made[0].batch], [
            c.job.request_id for c in made if c.batch is made[2].batch]
    assert asyncio.run(main()) == ([0, 1], [2, 3])


def test_what_does_not_fit_the_hbm_of_a_batch_begins_the_next_one_whole():
    assert form([(1, 0, 9), (2, 0, 9), (3, 0, 4)], quota_s=50.0, num_blocks=5) == [
        (1, (0, 9), 0), (2, (0, 9), 1), (3, (0, 4), 1)]


def test_a_request_behind_another_is_never_before_it():
    """FIFO: a small one does not slip into the hole that a large one leaves."""
    assert form([(1, 0, 9), (2, 0, 13), (3, 0, 4)], quota_s=50.0, num_blocks=4) == [
        (1, (0, 9), 0), (2, (0, 13), 1)]


def test_what_no_batch_could_hold_is_refused_instead_of_waiting_for_ever():
    with pytest.raises(InvalidArgument, match="request 1 needs 3 blocks of PE HBM, a batch has 2"):
        form([(1, 0, 9)], num_blocks=2)


lengths = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 17)), min_size=1, max_size=7)


@settings(max_examples=300, deadline=None)
@given(lengths, st.one_of(st.none(), st.integers(1, 30)), st.integers(0, 2**32))
def test_turns_come_in_order_hbm_is_kept_to_and_all_are_served(works, quota, seed):
    """Inputs come in any order, some chunks fail or are given up, jobs join and leave."""
    random, num_blocks = Random(seed), 10
    order, over, tasks, live = [], {}, [], set()

    async def stay(batches, chunk, spaces):
        space, span = chunk.batch.workspace, range(
            chunk.first_block, chunk.first_block + LAYOUT.num_blocks(chunk.tokens[1]))
        assert space.taken <= num_blocks and not any(
            other is space and set(span) & set(used) for other, used in live)
        entry = space, span
        live.add(entry)
        try:
            for layer in range(LAYOUT.num_layers):
                for _ in range(random.randrange(4)):
                    await asyncio.sleep(0)
                if chunk.previous is not None:
                    await chunk.previous.sent[layer]
                if random.random() < 0.03:
                    raise ValueError
                await batches.turn(chunk, layer)
                order.append((chunk, layer))
                await asyncio.sleep(0)
                batches.computed(chunk)
                chunk.sent[layer].set_result(None)
        except BaseException as failed:
            batches.give_up(chunk, failed)
            batches.leave(chunk.job)
            over[chunk.job.request_id] = False
        else:
            if chunk.last:
                over.setdefault(chunk.job.request_id, True)
        finally:
            for _ in range(random.randrange(3)):
                await asyncio.sleep(0)
            live.discard(entry)                     # what it has posted has drained
            batches.finish(chunk)

    async def main():
        spaces = [Space(num_blocks) for _ in range(2)]
        batches = Batches(LAYOUT, spaces, quota, LINEAR if quota else None)

        def began(chunk):
            tasks.append(asyncio.ensure_future(stay(batches, chunk, spaces)))
        for request_id, (cached, new) in enumerate(works):
            batches.join(Job(request_id, 4 * cached, 4 * cached + new, began))
            for _ in range(random.randrange(12)):
                await asyncio.sleep(0)
        while len(over) < len(works) or not all(task.done() for task in tasks):
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        await settled()
        assert not any(space.in_use for space in spaces) and batches.num_ready == 0
        return batches

    batches = asyncio.run(asyncio.wait_for(main(), 20))
    numbers = {}
    for chunk, _ in order:
        numbers.setdefault(id(chunk.batch), len(numbers))
    keys = [(numbers[id(chunk.batch)], layer, chunk.job.request_id) for chunk, layer in order]
    assert keys == sorted(keys)                     # batches, in them layers, in them first come
    for record in batches.records:
        assert quota is None or record.attention_s <= max(quota, 1)


# ---- in engines

MODEL = LlamaModel.random(3, num_layers=3, exact=True)
REAL = BlockLayout.from_config(MODEL.config(), "float16", block_tokens=16)
TIMED = BlockLayout(3, 16, 64)


def sessions(num=3, turns=2):
    draw = np.random.default_rng(11)
    return [Session(f"agent{i}", tuple(Turn(tuple(draw.integers(0, 128, 30 + 9 * i)), 6)
                                       for _ in range(turns))) for i in range(num)]


def config(layout, **changes):
    return ClusterConfig(layout, **{"num_decode": 2, "buffer_blocks": 64, "hbm_blocks": 96,
                                    "max_tokens": 256, **changes})


def serve(path, conf, compute, mode="dualpath", use=None, in_step=True):
    """{name: [(tokens, margins, hits)]} and what `use(cluster, served)` says."""
    async def main(store):
        async with Cluster(conf, mode, store, compute) as cluster:
            served = await run_sessions(cluster, sessions(), in_step=in_step)
            assert sum(getattr(e.compute, "num_kv_errors", 0) for e in cluster.engines) == 0
            said = use(cluster, served) if use else None
        return {name: [(r.generated, r.margins, r.num_hit_tokens) for r in requests]
                for name, requests in served.items()}, said

    with BlockStore.open(path, conf.layout, segment_bytes=1 << 20) as store:
        result = asyncio.run(main(store))
    assert completion.in_flight() == 0
    return result


COMPUTES = {"model": (REAL, lambda: ModelCompute(MODEL, REAL)),
            "timed": (TIMED, lambda: TimedCompute(TIMED, 1e-6, 1e-6))}


@pytest.fixture(scope="module")
def unchunked(tmp_path_factory):
    return {name: serve(tmp_path_factory.mktemp(name), config(layout), compute)[0]
            for name, (layout, compute) in COMPUTES.items()}


class AnyParts:
    """Parts of any sizes on any nodes, pulled or pushed, drawn anew for each request."""

    pushes = True

    def __init__(self, random):
        self._random = random

    def choose(self, num_tokens, block_tokens, pe, de, others):
        helpers = list(others)
        draw, nodes = self._random, {PE: pe, "h0": helpers[0], "h1": helpers[1]}
        num_blocks = num_tokens // block_tokens
        sides = draw.sample(sorted(nodes), draw.randint(0, 3))
        sides = ([DE] if not sides or draw.random() < 0.5 else []) + sides
        sides = sides[:num_blocks]
        borders = [0, *sorted(draw.sample(range(1, num_blocks), len(sides) - 1)), num_blocks]
        return ReadChoice(tuple(
            Part(side, (start * block_tokens, stop * block_tokens), {DE: de, **nodes}[side].node_id)
            for side, start, stop in zip(sides, borders, borders[1:])), "", draw.random() < 0.5)


@pytest.mark.parametrize("policy", ["pe", "split", "any"])
@pytest.mark.parametrize("compute", COMPUTES)
@settings(max_examples=8, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), depth=st.integers(1, 4))
def test_any_chunking_gives_the_bits_of_prefill_in_one_piece(
        tmp_path_factory, monkeypatch, unchunked, compute, policy, seed, depth):
    """A packer that cuts wherever it likes: one token, in the middle of a block, at its end."""
    random, cuts = Random(seed), []

    def cut_anywhere(ready, *_):
        batch = []
        for work in ready:
            if batch and random.random() < 0.3:
                break
            new = random.choice([1, work.num_new_tokens, random.randint(1, work.num_new_tokens)]) \
                if cuts else 1                      # something is cut, whatever is drawn
            batch.append((work.request_id, new))
            if new < work.num_new_tokens:
                cuts.append(new)
                break
        return batch
    monkeypatch.setattr(batches_module, "pack_prefill", cut_anywhere)
    layout, make = COMPUTES[compute]
    conf = config(layout, policy=AnyParts(random) if policy == "any" else policy, depth=depth,
                  num_prefill=2)
    served, _ = serve(tmp_path_factory.mktemp("chunked"), conf, make)
    assert served == unchunked[compute] and cuts
