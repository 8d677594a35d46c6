"""What flows may touch and hold: least access, late bytes, depth and budgets, what nodes lend, and
the quota of a batch."""
import asyncio
import random
import statistics
from collections import Counter
from dataclasses import replace

import pytest
from flows import (ATTENTION, LAYOUT, POLICIES, TIMED, Spread, assert_all_is_given_back, config,
                   model_compute, run, sessions, timed_compute)

from kvio import completion
from kvio._ext import nic as ext
from kvio.engine import prefill
from kvio.engine.clock import run_in_link_time
from kvio.engine.cluster import Cluster
from kvio.engine.compute import TimedCompute
from kvio.engine.prefill import Workspace
from kvio.engine.request import Session
from kvio.engine.workload import run_sessions
from kvio.errors import InvalidArgument, TransferError
from kvio.scheduler import DE, PE
from kvio.scheduler.quota import AttentionModel
from kvio.storage import BlockStore
from kvio.transfer import Access, Fabric


def access_of(cluster, engine):
    return {each.access for each in engine.nic._ext.owners.values()}


@pytest.mark.parametrize("policy, pushed", [(None, False), ("any_node", False), ("push", True)])
def test_pe_hbm_is_open_to_others_writes_only_where_a_policy_pushes(tmp_path, policy, pushed):
    local, read, write = Access.LOCAL_WRITE, Access.REMOTE_READ, Access.REMOTE_WRITE

    def look(cluster, served):
        for engine in cluster.prefill:
            assert access_of(cluster, engine) == {read, local | write if pushed else local}
    run("dualpath", tmp_path, config(policy=policy), look=look, made=sessions(1, 1))


def test_a_policy_that_pushes_and_does_not_say_so_is_told(tmp_path):
    """Before anything moves: the NIC would refuse it, after some tries."""
    class Secretly:
        def choose(self, *args):
            return replace(Spread(DE).choose(*args), push=True)

    with pytest.raises(InvalidArgument, match="pushes = True"):
        run("dualpath", tmp_path, config(policy=Secretly()), made=sessions(1, 2))


class Failing:
    """A policy of which every third answer is an error, or none."""

    def __init__(self, answer):
        self.answer, self.num_asked = answer, 0

    def choose(self, *args):
        self.num_asked += 1
        return self.answer() if self.num_asked % 3 == 1 else Spread(DE, PE).choose(*args)


@pytest.mark.parametrize("answer", [lambda: 1 / 0, lambda: None])
def test_a_policy_that_fails_costs_its_request_and_no_other(tmp_path, answer):
    made = sessions(9, 2)

    async def main(store):
        async with Cluster(config(policy=Failing(answer)), "dualpath", store,
                           model_compute) as cluster:
            await asyncio.gather(*(cluster.generate(s.name, s.turns[0].append, 2) for s in made))
            ended = await asyncio.gather(*(cluster.generate(s.name, s.turns[0].append, 2)
                                           for s in made), return_exceptions=True)
            assert not cluster._waiting
            assert_all_is_given_back(cluster)
        return ended
    with BlockStore.open(tmp_path, LAYOUT, segment_bytes=1 << 20) as store:
        ended = asyncio.run(main(store))
    failed = [error for error in ended if isinstance(error, Exception)]
    assert len(failed) == 3 and all(isinstance(error, InvalidArgument) for error in failed)
    assert all("policy" in str(error) for error in failed)


def marked(monkeypatch, mark=0x77):
    """PE HBM that was given back is filled with a mark; who gets it next finds it untouched."""
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


@pytest.mark.parametrize("quota_s", [None, 2e-6])
def test_cancelled_in_any_turn_of_the_loop_everything_is_given_back(quota_s):
    """Without devices, and with computing that takes no time, four requests' way is the same every
    time. The last ones are cancelled in each turn of the loop that there is, those in which
    a task of theirs was made and has not begun as well."""
    conf = config(TIMED, num_prefill=1, num_decode=1, quota_s=quota_s, attention_time=ATTENTION)

    async def main():
        async with Cluster(conf, "oracle", None, lambda: TimedCompute(TIMED, 0, 0)) as cluster:
            await cluster.generate("a", range(40), 2)
            for moment in range(1000):
                tasks = [asyncio.ensure_future(cluster.generate("a", range(50 + i), 2))
                         for i in range(4)]
                for _ in range(moment):
                    await asyncio.sleep(0)
                if all(task.done() for task in tasks):
                    return moment
                for task in tasks[2:]:
                    task.cancel()
                await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
                assert_all_is_given_back(cluster)
    assert 20 < asyncio.run(main()) < 1000


@pytest.mark.parametrize("nth", [1, 2, 4, 9])
@pytest.mark.parametrize("name", ["push_de", "push_any", "any"])
def test_what_a_failed_nic_wrote_to_is_nobodys_until_its_queue_pairs_are_reset(
        tmp_path, monkeypatch, name, nth):
    """Packets of a write that has failed may come late, but not past a queue pair that was reset:
    only then do PE HBM and the buffers go to others."""
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
    """Of 64 blocks of 16 tokens: free is what is neither taken nor wanted."""
    async def main():
        async with Cluster(config(TIMED), "oracle", None, timed_compute) as cluster:
            def lent():
                made = [r for reports in cluster._reports() for r in reports]
                # Room for the longest request of its own, 512 tokens, is not lent.
                assert [r.lend_tokens for r in made] == [max(0, r.free_buffer_tokens - 512)
                                                         for r in made]
                return [r.free_buffer_tokens for r in made]
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


def test_reports_say_in_tokens_what_a_storage_nic_reads_and_a_node_lends():
    async def main(rate):
        async with Cluster(config(TIMED, snic_bytes_per_s=rate, cnic_bytes_per_s=8 * rate),
                           "oracle", None, timed_compute) as cluster:
            return [{(r.snic_tokens_per_s, r.cnic_tokens_per_s, r.lend_tokens_per_s)
                     for r in reports} for reports in cluster._reports()]
    # 3 layers of 64 bytes a token; with 2 PEs and 2 DEs their own flows take twice what a storage
    # NIC reads at a PE, thrice at a DE.
    assert asyncio.run(main(192_000)) == [{(1000.0, 8000.0, 6000.0)}, {(1000.0, 8000.0, 5000.0)}]
    assert asyncio.run(main(0)) == [{(1.0, float("inf"), float("inf"))}] * 2


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
    ({"quota_s": -1.0, "attention_time": ATTENTION}, "quota"),
    ({"num_prefill": 0}, "num_prefill must be an int, at least 1"), ({"num_decode": 0}, "num_dec"),
    ({"depth": 0}, "depth"), ({"depth": 1.5}, "depth"), ({"max_tokens": 0}, "max_tokens"),
    ({"buffer_blocks": -1}, "buffer_blocks"), ({"hbm_blocks": "many"}, "hbm_blocks"),
    ({"batch_tokens": "all"}, "batch_tokens"), ({"attention_time": 3}, "attention_time"),
    ({"snic_bytes_per_s": -1}, "snic_bytes_per_s"), ({"cnic_bytes_per_s": -1}, "bytes_per_s")])
def test_limits_that_cannot_be_are_refused(tmp_path, changes, message):
    with pytest.raises(InvalidArgument, match=message):
        run("dualpath", tmp_path, config(**changes), made=sessions(1, 1))




def test_what_a_batch_took_is_the_computes_word_and_not_the_predictions(tmp_path):
    """A prediction that is half of the truth lets twice as much in, and the records show it."""
    half = AttentionModel(ATTENTION.per_pair_s / 2, ATTENTION.per_token_s / 2)

    def look(cluster, served):
        times = [s for engine in cluster.prefill for s in engine.batch_attention_s]
        assert 1e-4 < max(times) <= 2e-4
    run("dualpath", tmp_path, config(TIMED, quota_s=1e-4, attention_time=half), timed_compute,
        sessions(6), look)


@pytest.mark.parametrize("quota_s", [None, 4e-4])
def test_the_quota_evens_out_what_engines_compute_at_a_time(quota_s):
    """Contexts differ by two orders of magnitude, as agents' do. The k-th batches of two engines
    compute at the same time: without a quota one waits for the other, by as much as the contexts
    differ. In link time, so the figures are exact."""
    draw, fabric = random.Random(3), Fabric("virtual")
    prompts = [[i] * min(int(40 * draw.paretovariate(0.9)), 3000) for i in range(40)]
    conf = config(TIMED, num_decode=1, buffer_blocks=6000, hbm_blocks=6000, max_tokens=4000,
                  batch_tokens=16000, quota_s=quota_s)

    async def main():
        async with Cluster(conf, "none", None, timed_compute, fabric) as cluster:
            await asyncio.gather(*(cluster.generate(f"a{i}", prompt, 1)
                                   for i, prompt in enumerate(prompts)))
            return [engine.batch_attention_s for engine in cluster.prefill]
    first, second = run_in_link_time(main(), fabric)
    rounds = list(zip(first, second))[:-1]          # the last ones are what was left
    uneven = statistics.fmean(2 * max(both) / sum(both) for both in rounds)
    assert len(rounds) > 5 and (uneven > 1.2 if quota_s is None else uneven < 1.06)


def test_a_prediction_that_is_none_fails_its_requests_and_no_others():
    """Of contexts of 100 tokens and more it says nothing."""
    def predicted(cached, new):
        return float("nan") if cached + new >= 100 else 1e-6 * new

    async def main():
        async with Cluster(config(TIMED, num_prefill=1, quota_s=2e-5, attention_time=predicted),
                           "none", None, timed_compute) as cluster:
            asked = [cluster.generate(f"a{i}", [i] * length, 2)
                     for i, length in enumerate((30, 120, 40, 100, 50))]
            served = await asyncio.gather(*asked, return_exceptions=True)
            assert_all_is_given_back(cluster)
            return served
    served = asyncio.run(main())
    for i, request in enumerate(served):
        if i % 2:
            assert isinstance(request, InvalidArgument) and "attention_time" in str(request)
        else:
            assert request.finished
