"""No byte lands in memory that belongs to somebody else, however late it comes.

Links are slow, so that a transfer is under way for long, and whatever becomes free belongs to
somebody else at once, who watches its bytes (`Canaries`). In the middle of every step of every
flow the request goes away, or an engine, or a queue pair.
"""
import asyncio

import numpy as np
import pytest

from failing import (FLOWS, LAYOUT, Canaries, Steps, compute, config, in_flight, in_link_time,
                     leaks, new_pool, prime, right_tokens, settled)
from fault_mutants import does_not_drain
from kvio._ext import nic as ext
from kvio.engine.cluster import Cluster
from kvio.engine.link_storage import LinkStore
from kvio.layout import block_keys
from kvio.loader import run as running
from kvio.memory import BlockAllocator
from kvio.storage import BlockStore

PROMPT, NUM_NEW = tuple(range(100, 115)), 3     # 3 full blocks are stored, one more is not
EXPECTED = right_tokens(PROMPT, NUM_NEW)
RATE = 4 << 20                                  # a layer of the prompt takes 0.2 ms
KILLS = ("pe", "de", "h0")


def open_cluster(store, fabric, flow):
    shape = {} if "any" in flow else {"num_prefill": 1, "num_decode": 2}
    return Cluster(config(flow, cnic_bytes_per_s=RATE, **shape), "dualpath", store, compute,
                   fabric)


class Run:
    """Serves requests one after the other; each meets its end 50 us into a step of its own."""

    def __init__(self, store, pool, canaries):
        self.store, self.pool, self.canaries, self.count = store, pool, canaries, 0
        self.wrong, self.requests = [], []

    async def serve(self, cluster, end, after, delay_ns=0):
        """The request (or what ended it), how many steps it took, and what was wrong."""
        self.count += 1
        session, nodes = f"late{self.count}", {}
        prime(self.store, self.pool, cluster.config, session, PROMPT[:12])

        def noted(route):
            found = Cluster._nodes(cluster, route)
            nodes.update(found if not nodes else {})
            return found

        def meet():
            if end == "cancel":
                task.cancel()
            elif end in KILLS and not task.done():
                cluster.kill(nodes[end].name)
            elif end == "nic":
                for engine in cluster.engines:
                    engine.nic.fail()

        def at(n, when, step):
            if (n, when) == (after, "before"):
                delay(delay_ns)
                asyncio.get_running_loop().call_later(5e-5, meet)

        def delay(ns):
            for engine in cluster.engines:
                if engine.name not in cluster.lost:
                    engine.nic._ext._fault(ext.DELAY, 0, ns)

        cluster._nodes = noted
        with Steps(at).watched() as steps:
            task = asyncio.ensure_future(cluster.generate(session, PROMPT, NUM_NEW))
            request = (await asyncio.gather(task, return_exceptions=True))[0]
            delay(0)
            await asyncio.sleep(0.005)          # whatever is late has come by now
        await settled(cluster)
        return request, steps.count, [*self.canaries.give_back(), *leaks(cluster)]

    async def at_every_step(self, fabric, flow, end, delay_ns):
        async with open_cluster(self.store, fabric, flow) as cluster:
            _, count, found = await self.serve(cluster, None, None)
            assert found == []
            for step in () if end in KILLS else range(count):
                await self.judged(cluster, flow, end, step, delay_ns)
        for step in range(count) if end in KILLS else ():
            async with open_cluster(self.store, fabric, flow) as cluster:
                await self.judged(cluster, flow, end, step, delay_ns)

    async def judged(self, cluster, flow, end, step, delay_ns):
        request, _, found = await self.serve(cluster, end, step, delay_ns)
        self.wrong += [f"{end} in step {step} of {flow}: {each}" for each in found]
        self.requests.append(request)


def at_every_step(path, flow, end, delay_ns=0):
    """What was wrong, over all steps, and what became of the requests."""
    with BlockStore.open(path, LAYOUT, segment_bytes=1 << 17) as store, new_pool() as pool, \
            Canaries() as canaries:
        made = Run(store, pool, canaries)
        in_link_time(lambda fabric: made.at_every_step(fabric, flow, end, delay_ns))
    return made.wrong, made.requests


@pytest.mark.parametrize("flow, end, delay_ns", [
    (flow, end, delay_ns) for flow in FLOWS for end in ("cancel", "nic", *KILLS)
    for delay_ns in (0, 300_000)
    if end != "h0" or "h0" in FLOWS[flow].sides if end != "pe" or "any" in flow
    if end not in KILLS or not delay_ns])
def test_nothing_lands_in_memory_of_others(tmp_path, flow, end, delay_ns):
    wrong, requests = at_every_step(tmp_path, flow, end, delay_ns)
    assert wrong == [] and in_flight() == 0
    for request in requests:
        if isinstance(request, asyncio.CancelledError):
            assert end == "cancel"
        else:
            assert request.generated == EXPECTED, request
    assert end != "cancel" or any(isinstance(r, asyncio.CancelledError) for r in requests)


@pytest.mark.parametrize("victim", ["pe", "de"])
def test_an_engine_dies_while_storage_is_in_link_time(victim):
    """Reads and writes take their time there, and are in flight when it happens."""
    async def serve(fabric, after):
        store, conf = LinkStore(LAYOUT, fabric, 64), config(
            "split", snic_bytes_per_s=1 << 20, cnic_bytes_per_s=RATE, read_timeout_s=0.01)
        tokens, stand_in = np.asarray(PROMPT, np.uint32), compute()

        def put(i, block):
            for layer in range(LAYOUT.num_layers):
                stand_in.write_records(block[layer], tokens[4 * i:4 * i + 4], 4 * i, layer)
        store.prime(block_keys(tokens, LAYOUT, conf.namespace("a")), put)
        async with Cluster(conf, "dualpath", store, compute, fabric) as cluster:
            def at(n, when, step):
                engines = [e for e in (cluster.prefill if victim == "pe" else cluster.decode)
                           if e.num_requests]
                if (n, when) == (after, "before") and engines:
                    asyncio.get_running_loop().call_later(5e-5, cluster.kill, engines[0].name)
            with Steps(at).watched() as steps:
                request = await cluster.generate("a", PROMPT, NUM_NEW)
            await asyncio.sleep(0.05)
            assert request.generated == EXPECTED and leaks(cluster) == []
        store.close()
        return steps.count, cluster.counters()["reroutes"]

    count, _ = in_link_time(lambda fabric: serve(fabric, None))
    rerouted = [in_link_time(lambda fabric: serve(fabric, step))[1] for step in range(count)]
    assert rerouted[0] == 1 and set(rerouted) <= {0, 1}


# ---- and the tests would see it

def test_without_draining_late_bytes_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "_drain", does_not_drain)
    monkeypatch.setattr(BlockAllocator, "pin", lambda pool, ids: None)
    monkeypatch.setattr(BlockAllocator, "unpin", lambda pool, ids: None)
    wrong, _ = at_every_step(tmp_path, "split", "cancel")
    assert any("somebody else" in each for each in wrong)
    assert any("PE HBM" in each for each in wrong)


def test_pins_alone_keep_the_blocks_of_a_pool(tmp_path, monkeypatch):
    """A second line of defence: what is pinned by a transfer in flight is nobody's. PE HBM has no
    such pins: draining is all it has."""
    monkeypatch.setattr(running, "_drain", does_not_drain)
    wrong, _ = at_every_step(tmp_path, "split", "cancel")
    assert not any("somebody else" in each for each in wrong)
    assert any("PE HBM" in each for each in wrong)
