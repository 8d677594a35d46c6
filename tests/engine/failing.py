"""What the tests of failures share: small clusters in link time, the tokens that are right, and
hooks at every step that a request takes."""
import asyncio
import contextlib
import glob
import itertools
from dataclasses import dataclass, field
from unittest import mock

import numpy as np

from kvio import completion
from kvio.engine import attempt, clock, cluster, decode, prefill
from kvio.engine.cluster import Cluster, ClusterConfig
from kvio.engine.compute import TimedCompute
from kvio.engine.prefill import Workspace
from kvio.layout import BlockLayout, block_keys
from kvio.memory import POISON, BlockAllocator, BlockPool, LayerPool
from kvio.scheduler import DE, PE, Part, ReadChoice
from kvio.storage import format as fmt
from kvio.storage.ring import Ring
from kvio.transfer import Fabric

READ, WRITE = 1, 2                              # what a ring's _fault is about
LAYOUT = BlockLayout(2, 4, 64)
VOCABULARY = 32000
device_bytes = None                             # of a region in device memory: its bytes


class Spread:
    """Hits over these sides, as even as it goes: "de", "pe", and "h0", "h1" for other nodes."""

    def __init__(self, *sides, push=False):
        self.sides, self.pushes = sides, push

    def choose(self, num_tokens, block_tokens, pe, de, others):
        nodes = {PE: pe, DE: de, **{f"h{i}": node for i, node in enumerate(others)}}
        sides = [side for side in self.sides if side in nodes][:num_tokens // block_tokens] \
            or [PE]
        borders = [num_tokens // block_tokens * i // len(sides) * block_tokens
                   for i in range(len(sides) + 1)]
        return ReadChoice(tuple(
            Part(side, (start, stop), nodes[side].node_id)
            for side, start, stop in zip(sides, borders, borders[1:])), "spread", self.pushes)


FLOWS = {
    "pe": Spread(PE), "de": Spread(DE), "split": Spread(DE, PE), "any": Spread(DE, "h0", PE, "h1"),
    "push": Spread(DE, PE, push=True), "push_any": Spread("h0", PE, push=True),
}


def compute():
    return TimedCompute(LAYOUT, 2e-6, 2e-5, VOCABULARY)


def right_tokens(prompt, num_new_tokens) -> list[int]:
    """What the stand-in generates if every byte of KV is right, from its definition alone."""
    stand_in, tokens = compute(), [int(token) for token in prompt]
    for _ in range(num_new_tokens):
        digest = 0
        for layer in range(LAYOUT.num_layers):
            digest ^= int(np.bitwise_xor.reduce(stand_in.records(np.array(tokens), 0, layer)))
        tokens.append(stand_in._token(tokens[-1], len(tokens), digest)[0])
    return tokens[len(prompt):]


def config(flow="pe", **changes):
    return ClusterConfig(LAYOUT, **{
        "num_prefill": 2, "num_decode": 2, "buffer_blocks": 96, "hbm_blocks": 64, "max_tokens": 64,
        "policy": FLOWS.get(flow, flow), **changes})


class Disk:
    """A disk in link time, for a run of a seed goes the same way again: the store does its work
    when it is asked to, and tells so up to 0.2 ms of link time later. A ring that is paused works
    when it goes on."""

    paused = set()                              # names of rings
    count = 0

    def __init__(self, ring, transfer):
        Disk.count += 1
        self.ring, self.transfer = ring, transfer
        self.delay = Disk.count * 7 % 11 * 2e-5
        if ring.name not in Disk.paused:
            transfer._handle.wait(None)

    def __await__(self):
        return self._done().__await__()

    async def _done(self):
        await asyncio.sleep(self.delay)
        while self.ring.name in Disk.paused and not self.ring._closed:
            await asyncio.sleep(2e-5)
        return await self.transfer

    @staticmethod
    @contextlib.contextmanager
    def in_use():
        """Rings are such disks meanwhile, and closing one takes no time."""
        read, write = Ring.read, Ring.write

        async def close(ring):
            if ring is not None:
                ring.close(cancel=True)
        Disk.paused.clear()
        Disk.count = 0
        with mock.patch.object(Ring, "read", lambda ring, *what: Disk(ring, read(ring, *what))), \
                mock.patch.object(Ring, "write",
                                  lambda ring, *what: Disk(ring, write(ring, *what))), \
                mock.patch.object(cluster, "_close_ring", close):
            yield


def pause(engine, paused: bool) -> None:
    """Its storage NIC starts nothing, or goes on (and has done what waited)."""
    (Disk.paused.add if paused else Disk.paused.discard)(engine.ring.name)
    with contextlib.suppress(ValueError):       # it has died meanwhile
        engine.ring._ring._pause(paused)
        for transfer in [] if paused else list(engine.ring._transfers):
            transfer._handle.wait(None)


def in_link_time(main, fabric=None):
    """`await main(fabric)` where waiting costs no time."""
    fabric = fabric or Fabric("virtual")
    with Disk.in_use():
        return clock.run_in_link_time(main(fabric), fabric)


def prime(store, pool, conf, session, prompt) -> np.ndarray:
    """Store the KV of a prompt's full blocks; their keys."""
    keys = block_keys(np.asarray(prompt, np.uint32), LAYOUT, conf.namespace(session))
    ids, stand_in, tokens = pool.alloc(len(keys)), compute(), np.asarray(prompt, np.uint32)
    for i, block_id in enumerate(ids):
        at = i * LAYOUT.block_tokens
        for layer in range(LAYOUT.num_layers):
            stand_in.write_records(pool.full(block_id)[layer], tokens[at:at + 4], at, layer)
    store.write(keys, pool, ids).wait()
    pool.free(ids)
    return keys


def spoil(store, key) -> bool:
    """Flip a payload bit of a stored block in its file; False if it is not there."""
    geometry = store.description.geometry
    for name in glob.glob(f"{store.path}/segment-*"):
        with open(name, "r+b") as file:
            head = file.read(geometry.payload_offset)
            at = head.find(key["key"].tobytes(), fmt.FIRST_HEADER_PAGE * fmt.PAGE)
            if at < 0:
                continue
            slot = (at - fmt.FIRST_HEADER_PAGE * fmt.PAGE) // fmt.HEADER_NBYTES
            file.seek(geometry.payload_offset + slot * geometry.slot_stride + 5)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 0x40]))
            return True
    return False


# ---- hooks

@dataclass
class Steps:
    """Calls `at(n, when, step)` before and after every step n of every plan that is run, and
    before and after every decode step (`step` None)."""

    at: object = lambda n, when, step: None
    count: int = 0
    names: list = field(default_factory=list)

    def begin(self, step, name):
        n, self.count = self.count, self.count + 1
        self.names.append(name)
        self.at(n, "before", step)
        return n

    @contextlib.contextmanager
    def watched(self):
        """All of this while the block runs."""
        modules = [module for module in (attempt, decode, prefill) if hasattr(module, "run_plan")]
        real = [module.run_plan for module in modules]
        for module, run_plan in zip(modules, real):
            module.run_plan = self._wrapped(run_plan)
        decode_step = TimedCompute.decode_step
        TimedCompute.decode_step = self._decode_step(decode_step)
        try:
            yield self
        finally:
            for module, run_plan in zip(modules, real):
                module.run_plan = run_plan
            TimedCompute.decode_step = decode_step

    def _wrapped(self, run_plan):
        async def watched_plan(steps, perform):
            async def watched(step):
                n = self.begin(step, f"{step.kind} {step.source}->{step.target} {step.layer}")
                result = await perform(step)
                self.at(n, "after", step)
                return result
            await run_plan(steps, watched)
        return watched_plan

    def _decode_step(self, decode_step):
        async def watched(compute, sequences):
            n = self.begin(None, "decode")
            made = await decode_step(compute, sequences)
            self.at(n, "after", None)
            return made
        return watched


# ---- somebody else

class Canaries:
    """Somebody else gets every block, and every PE HBM, the moment it becomes free, and watches
    its bytes: what a late transfer writes there is seen, whoever would have got it. Each has a
    pattern of its own, or a transfer from one into another would not be seen."""

    def __init__(self):
        self._held = []                         # (pool, ids, pattern)
        self._watched = {}                      # id of a workspace -> (it, pattern)
        self._patterns = itertools.cycle(range(1, 251))
        self.dead = []

    def __enter__(self):
        self._real = BlockAllocator._release, Workspace.clear, Workspace.take
        release, clear, take = self._real

        def released(pool, ids):
            release(pool, ids)
            if len(ids) and hasattr(pool, "_rows"):
                pool._free[ids] = False
                self._held.append((pool, ids.copy(), next(self._patterns)))
                fill(*self._held[-1])

        def cleared(workspace):
            clear(workspace)
            pattern = next(self._patterns)
            bytes_of(workspace.region)[:] = pattern
            self._watched[id(workspace)] = workspace, pattern

        def taken(workspace, num_blocks):
            self._look_at(workspace)
            return take(workspace, num_blocks)

        BlockAllocator._release, Workspace.clear, Workspace.take = released, cleared, taken
        return self

    def __exit__(self, *exc):
        BlockAllocator._release, Workspace.clear, Workspace.take = self._real

    def _look_at(self, workspace):
        _, pattern = self._watched.pop(id(workspace), (None, None))
        if pattern is not None and (bytes_of(workspace.region) != pattern).any():
            self.dead.append(f"bytes have come into PE HBM {workspace.region} that was given back")

    def give_back(self) -> list[str]:
        """What was written into memory that belonged to somebody else; it is free again."""
        for workspace, _ in list(self._watched.values()):
            self._look_at(workspace)
        held, self._held = self._held, []
        for pool, ids, pattern in held:
            if (rows(pool, ids) != pattern).any():
                self.dead.append(f"bytes have come into blocks {ids} of {pool} that were somebody "
                                 "else's")
            fill(pool, ids, POISON)
            pool._free[ids] = True
        dead, self.dead = self.dead, []
        return dead


def bytes_of(region):
    """All of a region, uint8; what a GPU has is seen by who sets `device_bytes`."""
    return region.array if region.array is not None else device_bytes(region)


def all_rows(pool):
    """A pool's blocks, [num_blocks, ...]."""
    if isinstance(pool, LayerPool):
        shape = pool.layout.num_layers, pool.num_blocks, pool.block_stride
        return bytes_of(pool.region)[:np.prod(shape)].reshape(shape).swapaxes(0, 1)
    shape = pool.num_blocks, pool.block_stride
    return bytes_of(pool.region)[:np.prod(shape)].reshape(shape)


def rows(pool, ids):
    return all_rows(pool)[ids]


def fill(pool, ids, value):
    all_rows(pool)[ids] = value


# ---- what has to hold afterwards

async def settled(cluster) -> None:
    """Until what was given up has drained."""
    await asyncio.gather(*cluster._ending)
    for _ in range(10_000):
        if not cluster._strays and not in_flight():
            return
        await asyncio.sleep(1e-4)
    raise AssertionError("something is in flight for ever")


def leaks(cluster) -> list[str]:
    """What is not as it was before anything was served."""
    found = []
    for engine in cluster.engines:
        pools = [engine.buffer.pool] + ([engine.hbm] if engine in cluster.decode else [])
        for pool in pools:
            if pool.num_free != pool.num_blocks or pool._pins.any():
                found.append(f"{engine.name}: {pool}, {pool._pins.sum()} pins")
            elif (all_rows(pool) != POISON).any():
                found.append(f"{engine.name}: bytes have come into free blocks of {pool}")
        figures = {name: getattr(engine, name) for name in (
            "num_requests", "num_tokens", "waiting_read_tokens", "wanted_blocks",
            "promised_blocks") if hasattr(engine, name)}
        if any(figures.values()):
            found.append(f"{engine.name}: {figures}")
        if engine.compute.num_kv_errors:
            found.append(f"{engine.name}: {engine.compute.num_kv_errors} wrong KV records")
        if engine in cluster.prefill and any(w.num_taken for w in engine.workspaces):
            found.append(f"{engine.name}: PE HBM is still held")
    if cluster.scheduler.num_waiting or cluster._waiting or cluster._routed:
        found.append("requests wait in the scheduler")
    return found


def in_flight() -> int:
    completion.reap()
    return completion.in_flight()


def new_pool() -> BlockPool:
    return BlockPool(LAYOUT, 32)
