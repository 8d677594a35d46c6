"""Storage in link time: bytes, times and figures of a storage NIC that is a soft NIC."""
import asyncio
import contextlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from flows import LAYOUT as MODEL_LAYOUT
from flows import assert_all_is_given_back, config, model_compute, run, sessions

from kvio.engine.clock import now_s, run_in_link_time
from kvio.engine.cluster import Cluster
from kvio.engine.link_storage import LinkStore
from kvio.engine.trace import GPU, Tracer
from kvio.engine.workload import run_sessions
from kvio.errors import InvalidArgument, OutOfBlocks
from kvio.layout import BlockLayout, block_keys
from kvio.memory import BlockPool
from kvio.transfer import Fabric

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import grid                                         # noqa: E402

LAYOUT = BlockLayout(2, 4, [8, 24])                 # 128 bytes a block
RATE = 128_000                                      # a block a millisecond
KEYS = block_keys(range(40 * 4), LAYOUT)


def block(i):
    return np.random.default_rng(i).integers(0, 256, 128, np.uint8)


def fill(i, target):
    target.reshape(-1)[:] = block(i)


def in_link_time(use, num_blocks=50):
    """`await use(store, pool)`; its result."""
    fabric = Fabric("virtual")
    store = LinkStore(LAYOUT, fabric, num_blocks)
    with BlockPool(LAYOUT, 40) as pool:
        try:
            return run_in_link_time(use(store, pool), fabric)
        finally:
            store.close()


def test_blocks_arrive_whole_and_take_their_bytes_over_the_rate():
    async def use(store, pool):
        store.prime(KEYS[:30], fill)
        ring = store.open_ring(read_bytes_per_s=RATE, write_bytes_per_s=RATE)
        ids = pool.alloc(30)
        reading = asyncio.ensure_future(ring.read(KEYS[:40], pool, np.concatenate([ids, ids[:10]])))
        await asyncio.sleep(0)
        assert ring.read_queue == (30 * 128, 30 * 4)
        await asyncio.sleep(0.020)                  # the first sixteen have arrived
        assert ring.read_queue.tokens == 14 * 4
        assert await reading == 30 and now_s() == pytest.approx(0.030, abs=1e-8)
        assert all((pool.full(b).reshape(-1) == block(i)).all() for i, b in enumerate(ids))
        stats = ring.stats()
        assert (stats["read_bytes"], stats["write_bytes"]) == (30 * 128, 0)
        assert stats["read_busy_ns"] == pytest.approx(30e6, abs=20)
        ring.close()
        pool.free(ids)
    in_link_time(use)


def test_what_is_written_is_found_once_it_is_over_and_reads_go_beside_it():
    async def use(store, pool):
        store.prime(KEYS[:10], fill)
        ring = store.open_ring(read_bytes_per_s=RATE, write_bytes_per_s=RATE)
        ids, more = pool.alloc(10), pool.alloc(10)
        for i, b in enumerate(ids):
            fill(10 + i, pool.full(b))
        writing = asyncio.ensure_future(ring.write(KEYS[10:20], pool, ids))
        assert await ring.read(KEYS[:10], pool, more) == 10
        assert now_s() == pytest.approx(0.010, abs=1e-8)        # a direction each
        await writing
        assert store.match(KEYS) == 20 and len(store) == 20
        await ring.write(KEYS[10:20], pool, ids)                # again: nothing is kept twice
        assert store.pool.num_free == 30
        assert await ring.read(KEYS[10:20], pool, more) == 10
        assert all((pool.full(b).reshape(-1) == block(10 + i)).all() for i, b in enumerate(more))
        ring.close()
        pool.free(np.concatenate([ids, more]))
    in_link_time(use)


def test_a_short_read_does_not_wait_for_a_long_write_before_it():
    """As with a `Ring`, which has a queue for each direction."""
    async def use(store, pool):
        store.prime(KEYS[:2], fill)
        ring = store.open_ring(read_bytes_per_s=RATE, write_bytes_per_s=RATE)
        ids, more = pool.alloc(10), pool.alloc(2)
        for i, b in enumerate(ids):
            fill(10 + i, pool.full(b))
        writing = asyncio.ensure_future(ring.write(KEYS[10:20], pool, ids))
        await asyncio.sleep(0)                      # it is posted
        assert ring.stats()["write_bytes"] == 0 and not writing.done()
        assert await ring.read(KEYS[:2], pool, more) == 2
        assert now_s() == pytest.approx(0.002, abs=1e-8) and not writing.done()
        await writing
        assert now_s() == pytest.approx(0.010, abs=1e-8)
        ring.close()
        pool.free(np.concatenate([ids, more]))
    in_link_time(use)


def test_windows_hold_every_byte_where_its_time_was():
    async def use(store, pool):
        store.prime(KEYS, fill)
        ring = store.open_ring(read_bytes_per_s=1280, write_bytes_per_s=1280)     # 10 blocks a s
        ids = pool.alloc(25)
        assert ring.busy_windows()[2].size == 0
        await ring.read(KEYS[:25], pool, ids)
        start, window_ns, nbytes = ring.busy_windows()
        ring.close()
        pool.free(ids)
        return start, window_ns, nbytes.tolist()
    assert in_link_time(use) == (0, 10**9, [pytest.approx(1280), pytest.approx(1280),
                                            pytest.approx(640)])


def test_a_read_that_is_given_up_keeps_its_blocks_until_they_are_still():
    async def use(store, pool):
        store.prime(KEYS, fill)
        ring = store.open_ring(read_bytes_per_s=RATE, write_bytes_per_s=RATE)
        ids = pool.alloc(40)
        reading = asyncio.ensure_future(ring.read(KEYS, pool, ids))
        await asyncio.sleep(0.005)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        pool.free(ids)
        with pytest.raises(OutOfBlocks):
            pool.alloc(40)
        assert ring.read_queue.tokens == 0
        await asyncio.sleep(0.050)
        pool.free(pool.alloc(40))
        ring.close()
    in_link_time(use)


def test_each_pool_gets_its_own_bytes_though_others_have_gone():
    async def use(store, _):
        store.prime(KEYS[:4], fill)
        ring = store.open_ring(read_bytes_per_s=RATE, write_bytes_per_s=RATE)
        for _ in range(30):                             # so that an id() comes back
            with BlockPool(LAYOUT, 4, poison=True) as pool:
                ids = pool.alloc(4)
                told = ids.copy()
                reading = asyncio.ensure_future(ring.read(KEYS[:4], pool, told))
                await asyncio.sleep(0)
                told[:] = 0                             # the caller's own again
                assert await reading == 4
                assert all((pool.full(b).reshape(-1) == block(i)).all()
                           for i, b in enumerate(ids))
                pool.free(ids)
        ring.close()
    in_link_time(use)


def test_what_it_cannot_do_is_said():
    async def use(store, pool):
        with pytest.raises(InvalidArgument, match="one rate"):
            store.open_ring(read_bytes_per_s=1, write_bytes_per_s=2)
        with pytest.raises(OutOfBlocks):
            store.prime(KEYS, fill)
    in_link_time(use, num_blocks=39)


def test_a_full_store_costs_reuse_and_no_request():
    """Nine blocks fit; everything is served, and what is not stored is counted."""
    fabric = Fabric("virtual")
    made = sessions(3, 2)

    async def main(store):
        async with Cluster(config(), "dualpath", store, model_compute, fabric) as cluster:
            served = await run_sessions(cluster, made, in_step=True)
            assert_all_is_given_back(cluster)
            assert cluster.counters()["persist_failures"] > 0
        return served
    with contextlib.closing(LinkStore(MODEL_LAYOUT, fabric, 9)) as store:
        served = run_in_link_time(main(store), fabric)
        assert len(store) == 9 and store.pool.num_free == 0
    alone = run("none", None, config(), made=made)
    assert [r.generated for rs in served.values() for r in rs] == \
        [r.generated for rs in alone.values() for r in rs]


def test_blocks_that_could_not_be_filled_are_free_again():
    def broken(i, block):
        raise ArithmeticError("no block")

    async def use(store, pool):
        with pytest.raises(ArithmeticError):
            store.prime(KEYS, broken)
        assert len(store) == 0 and store.pool.num_free == store.pool.num_blocks
    in_link_time(use)


# ---- the clock

async def _sleeps(seconds):
    await asyncio.sleep(seconds)
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("coroutine, fabric, word", [
    (lambda: 5, lambda: Fabric("virtual"), "runs a coroutine"),
    (lambda: _sleeps, lambda: Fabric("virtual"), "runs a coroutine"),
    (lambda: _sleeps(1), lambda: 5, "that of a Fabric"),
    (lambda: _sleeps(1), Fabric, "only a virtual clock")])
def test_what_cannot_run_in_link_time(coroutine, fabric, word):
    with pytest.raises(InvalidArgument, match=word):
        run_in_link_time(coroutine(), fabric())


def test_link_time_has_a_loop_of_its_own():
    async def nested():
        return run_in_link_time(_sleeps(1), Fabric("virtual"))
    for start in (asyncio.run, lambda main: run_in_link_time(main, Fabric("virtual"))):
        with pytest.raises(InvalidArgument, match="a loop runs"):
            start(nested())


def test_a_long_sleep_takes_no_time():
    assert run_in_link_time(_sleeps(1e6), Fabric("virtual")) == pytest.approx(1e6)


def test_tasks_that_are_left_are_cancelled():
    ended = []

    async def forgotten():
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append("task")

    async def numbers():
        try:
            yield 1
        finally:
            ended.append("generator")

    async def main():
        tasks.append(asyncio.ensure_future(forgotten()))
        generators.append(numbers())
        await anext(generators[0])
        await asyncio.sleep(1)
        return "done"
    tasks, generators = [], []
    assert run_in_link_time(main(), Fabric("virtual")) == "done"
    assert tasks[0].cancelled() and ended == ["task", "generator"]


# ---- traces

def test_a_trace_takes_odd_names_and_no_odd_rows(tmp_path):
    tracer, path = Tracer(), tmp_path / "trace.json"

    async def main():
        with tracer.span("\ud800", GPU, "\0\n", number=np.int64(5), other=object()):
            await asyncio.sleep(1)
        for node, row in ((5, GPU), ("pe0", "no row"), ("pe0", None), ("pe0", [])):
            with pytest.raises(InvalidArgument, match="one of the rows"), tracer.span(
                    node, row, "odd"):
                pass
    run_in_link_time(main(), Fabric("virtual"))
    tracer.write(path)
    span = json.loads(path.read_text())["traceEvents"][0]
    assert span["name"] == "\0\n" and span["args"]["number"] == "5" and span["dur"] == 1e6
    for bad in ("", "\0", None, [], tmp_path):
        with pytest.raises(InvalidArgument, match="cannot write the trace"):
            tracer.write(bad)


@pytest.mark.parametrize("number", range(8))
def test_the_grid_gives_the_same_figures_every_time(number):
    """And right bytes under every policy: `grid.run` refuses wrong ones."""
    config = grid.draw(number)
    for policy in grid.POLICIES:
        assert grid.run_once(config, policy, 0) == grid.run_once(config, policy, 0)
