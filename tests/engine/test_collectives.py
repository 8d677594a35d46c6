"""Collectives beside KV, in link time: exact, and the same on any machine."""
import asyncio
from dataclasses import replace

import pytest

from kvio import completion
from kvio._ext import nic as ext
from kvio.engine.clock import now_s, run_in_link_time
from kvio.engine.cluster import Cluster, ClusterConfig
from kvio.engine.collectives import CollectiveSetting
from kvio.engine.compute import TimedCompute
from kvio.engine.demo_collectives import CollectivesSetting, collectives_part
from kvio.engine.report import render
from kvio.errors import InvalidArgument, TransferError
from kvio.layout import BlockLayout
from kvio.transfer import COLLECTIVE, KV, Access, Fabric, TrafficClass

LAYOUT = BlockLayout(3, 16, 64)
RATE = 10**9
DEFAULT, TINY = CollectivesSetting(), CollectivesSetting(num_agents=4, num_turns=1)


def config(**changes):
    return ClusterConfig(LAYOUT, **{
        "num_decode": 2, "cnic_bytes_per_s": RATE, "buffer_blocks": 64, "hbm_blocks": 96,
        "max_tokens": 512, "collectives": CollectiveSetting(8192, 4), **changes})


def run(use, conf=None):
    """`await use(cluster)` on a cluster whose links have a virtual clock; its result."""
    fabric = Fabric("virtual")

    async def main():
        async with Cluster(conf or config(), "none", None, lambda: TimedCompute(
                LAYOUT, 2e-6, 1e-4), fabric) as cluster:
            return await use(cluster)
    return run_in_link_time(main(), fabric)


def test_sleeping_takes_link_time():
    fabric = Fabric("virtual")
    fabric.advance(10**9)

    async def main():
        begin, order = now_s(), []

        async def one(name, delay):
            await asyncio.sleep(delay)
            order.append((name, round(now_s() - begin, 6)))
        await asyncio.gather(one("b", 0.002), one("a", 0.001))
        return order
    assert run_in_link_time(main(), fabric) == [("a", 0.001), ("b", 0.002)]
    with pytest.raises(InvalidArgument, match="virtual"):
        run_in_link_time(main(), Fabric())


def test_threads_still_wake_a_loop_in_link_time():
    async def main():
        return await asyncio.get_running_loop().run_in_executor(None, lambda: 7)
    assert run_in_link_time(main(), Fabric("virtual")) == 7


def test_engines_register_their_memory_with_the_least_access():
    """Nobody else reads or writes HBM, and nobody writes into a PE buffer."""
    local, read, write = Access.LOCAL_WRITE, Access.REMOTE_READ, Access.REMOTE_WRITE

    async def use(cluster):
        # PE buffer, HBM; DE buffer, HBM, and a collective's two sides.
        for engines, wanted in ((cluster.prefill, {read, local}),
                                (cluster.decode, {read | write | local, local, Access(0),
                                                  write | local})):
            for engine in engines:
                assert {each.access for each in engine.nic._ext.owners.values()} == wanted
    run(use)


@pytest.mark.parametrize("num_decode", [2, 3])
def test_alone_an_exchange_takes_its_bytes_over_the_rate(num_decode):
    async def use(cluster):
        await cluster.collectives.of(0)()
        return cluster.collectives.take_latencies_s(), cluster.collectives.take_latencies_s()
    took, again = run(use, config(num_decode=num_decode))
    assert took == [pytest.approx(8192 * (num_decode - 1) / RATE, abs=2e-9)] * 4 and again == []


def test_each_step_ends_with_its_exchanges_and_their_bytes_are_counted_in_their_class():
    mine = TrafficClass("mine", 5, 160)
    bulk = TrafficClass("bulk", 6, 64)

    async def use(cluster):
        request = await cluster.generate("agent", range(50), 6)
        took = cluster.collectives.take_latencies_s()
        gaps = [b - a for a, b in zip(request.token_times[1:], request.token_times[2:])]
        stats = [engine.nic.stats() for engine in cluster.decode]
        return took, gaps, stats, cluster.collectives.num_errors()
    took, gaps, stats, errors = run(use, config(
        kv_class=bulk, collectives=CollectiveSetting(8192, 4, mine)))
    assert len(took) == 5 * 4 and errors == 0           # the first token comes from prefill
    assert gaps == [pytest.approx(1e-4 + 4 * 8192 / RATE, abs=2e-8)] * len(gaps)
    assert sum(s["by_class"]["mine"]["tx_bytes"] for s in stats) == 20 * 8192
    assert sum(s["by_class"]["bulk"]["rx_bytes"] for s in stats) == 2 * 50 * 3 * 64
    assert all(set(s["by_class"]) <= {"mine", "bulk"} for s in stats)


def test_a_lost_packet_of_a_collective_is_seen():
    async def use(cluster):
        cluster.decode[0].nic._ext._fault(ext.DROP, 1)
        await cluster.collectives.of(0)()
        lost = cluster.collectives.num_errors()
        await cluster.collectives.of(0)()
        return lost, cluster.collectives.num_errors()
    lost, later = run(use, config(collectives=CollectiveSetting(8192, 1)))
    assert (lost, later) == (1, 0)


def test_a_failing_exchange_fails_the_step_by_name_and_the_next_one_works():
    async def use(cluster):
        await cluster.collectives.of(0)()
        await cluster.collectives.of(1)()
        task = asyncio.ensure_future(cluster.generate("agent", range(50), 4))
        while not any(engine.num_requests for engine in cluster.decode):
            await asyncio.sleep(0)
        engine, = (engine for engine in cluster.decode if engine.num_requests)
        engine.nic._ext._fault(ext.STATUS, 3 * 4 + 1, 11)   # behind its KV: REM_OP_ERR
        with pytest.raises(TransferError, match="class collective.*REM_OP_ERR"):
            await task
        request = await cluster.generate("agent", range(50), 4)
        return request.finished, [e.buffer.pool.num_free for e in cluster.engines]
    finished, free = run(use, config(max_attempts=1))
    assert finished and free == [64] * 3 and completion.in_flight() == 0


def test_a_failing_exchange_is_done_again():
    async def use(cluster):
        await cluster.collectives.of(0)()
        await cluster.collectives.of(1)()
        expected = await cluster.generate("agent", range(50), 4)
        task = asyncio.ensure_future(cluster.generate("agent", range(50), 4))
        while not any(engine.num_requests for engine in cluster.decode):
            await asyncio.sleep(0)
        engine, = (engine for engine in cluster.decode if engine.num_requests)
        engine.nic._ext._fault(ext.STATUS, 3 * 4 + 1, 11)
        request = await task
        return request, expected, cluster.counters()
    request, expected, counters = run(use)
    assert request.generated == expected.generated and request.num_retries == 1
    assert "class collective" in request.mended[0] and counters["retries"] == 1


def test_a_group_goes_on_without_an_engine_that_has_died():
    async def use(cluster):
        task = asyncio.ensure_future(cluster.generate("agent", range(50), 40))
        while not any(engine.num_requests for engine in cluster.decode):
            await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        engine, = (engine for engine in cluster.decode if not engine.num_requests)
        cluster.kill(engine.name)
        return await task
    request = run(use)
    assert request.finished and request.num_reroutes == 0


@pytest.mark.parametrize("delay", [0.0001, 0.00021, 0.0003, 0.0005, 0.001])
def test_cancelling_during_an_exchange_leaves_nothing_in_flight(delay):
    async def use(cluster):
        task = asyncio.ensure_future(cluster.generate("agent", range(50), 40))
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return (await cluster.generate("agent", range(50), 3)).finished
    assert run(use, config(collectives=CollectiveSetting(1 << 16, 4)))
    assert completion.in_flight() == 0


def test_a_cluster_that_is_left_during_an_exchange_closes():
    async def use(cluster):
        asyncio.ensure_future(cluster.generate("agent", range(50), 40))
        while not cluster.decode[0].nic._ext.in_flight and \
                not cluster.decode[1].nic._ext.in_flight:
            await asyncio.sleep(1e-5)
    run(use, config(collectives=CollectiveSetting(1 << 20, 1)))
    assert completion.in_flight() == 0


def test_what_cannot_be_is_refused():
    for bad in {"nbytes": 0}, {"num_per_step": 0}:
        with pytest.raises(InvalidArgument, match="at least one"):
            CollectiveSetting(**bad)
    with pytest.raises(InvalidArgument, match="two engines"):
        run(lambda cluster: None, config(num_decode=1))
    with pytest.raises(InvalidArgument, match="paces soft NICs"):
        config(nic="verbs:rxe0")


@pytest.fixture(scope="module")
def part():
    return collectives_part(DEFAULT)


def test_two_runs_in_link_time_give_the_same_figures():
    assert collectives_part(TINY) == collectives_part(TINY)


def test_the_part_moves_the_same_bytes_and_tokens_in_one_class_and_in_two(part):
    assert part["tokens_equal"]
    for mode, f in part["modes"].items():
        assert f["kv_errors"] == f["collective_errors"] == 0
        assert f["collective"]["num"] % DEFAULT.num_per_step == 0
        assert f["collective"]["alone_p50_s"] == pytest.approx(
            DEFAULT.nbytes / DEFAULT.cnic_bytes_per_s)
        assert f["link_busy_share"] > 0.6, mode         # KV really is in the way


def test_a_class_of_their_own_keeps_collectives_fast_and_one_class_does_not(part):
    """Under the paper's tables: near the idle link with a class of their own, far off without."""
    one, two = (part["modes"][mode]["collective"] for mode in ("one_class", "two_classes"))
    assert two["p50_s"] < 1.1 * two["alone_p50_s"] and two["p99_s"] < 1.5 * two["alone_p50_s"]
    assert one["p50_s"] > 1.5 * one["alone_p50_s"] and one["p99_s"] > 3 * one["alone_p50_s"]
    assert part["p50_s_ratio"] > 1.5 and part["p99_s_ratio"] > 2.5 and part["tpot_ratio"] > 1.2


def test_the_report_shows_both_and_the_ratio(part):
    summary = {name: value for name, value in part.items() if name != "modes"}
    text = render({"collectives": {**part["modes"], "summary": summary}, "tokens_equal": True,
                   "ok": True})
    assert "one class  two classes" in text and "EMULATED, in link time" in text
    one, two = part["modes"]["one_class"], part["modes"]["two_classes"]
    assert f"p50: {two['collective']['p50_s'] * 1e6:.0f} us instead of " \
        f"{one['collective']['p50_s'] * 1e6:.0f} us, {part['p50_s_ratio']:.2f} times faster" in text
    assert f"TPOT: {two['tpot_s'] * 1e3:.2f} ms instead of {one['tpot_s'] * 1e3:.2f} ms" in text
    assert "JCT, as KV yields: " in text and "    all bytes checked" in text
    assert text.endswith("Result: the same tokens with one class and with two.")


def test_the_report_says_what_is_wrong_slower_or_equal(part):
    summary = {name: value for name, value in part.items() if name != "modes"}
    two = {**part["modes"]["two_classes"], "kv_errors": 2}
    one = {**two, "kv_errors": 1, "tpot_s": two["tpot_s"] / 2}
    text = render({"collectives": {"one_class": one, "two_classes": two, "summary": summary},
                   "tokens_equal": False, "ok": False})
    for words in ("us, as before", "TPOT: ", "2.00 times slower", "3 RECORDS OR SLOTS WRONG",
                  "TOKENS DIFFER with one class and with two; CHECK FAILED"):
        assert words in text


def test_a_class_is_worth_nothing_when_both_share_a_lane():
    """The control: two names with one service level are one class to the links."""
    same = collectives_part(replace(TINY, collective=TrafficClass("mine", KV.sl, 184)))
    assert same["p50_s_ratio"] == same["tpot_ratio"] == 1.0
    assert COLLECTIVE.sl % 4 != KV.sl % 4
