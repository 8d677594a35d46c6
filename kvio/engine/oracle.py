"""Mode "oracle": the same plans, blocks and tokens, and everything but computing takes no time.

No disk, no H2D or D2H, no transfer between prefill and decode: the bound that no real machine
reaches (DualPath, figure 7). Bytes are copied all the same, by the CPU and at once, so that hits
and tokens are those of any other mode.
"""
import ctypes

import numpy as np

from kvio.errors import BlocksMissing
from kvio.loader import Binding, Step
from kvio.loader.plan import STORAGE_READ, STORAGE_WRITE
from kvio.storage.ring import ReadQueue

__all__ = ["CopyMover", "MemoryRing", "MemoryStore"]


class _Done:
    """What `write` of a store returns: it is over already."""

    def __init__(self, result=None):
        self._result = result

    def wait(self, timeout=None):
        return self._result

    def __await__(self):
        return self._result
        yield


class MemoryStore:
    """Full Blocks in memory, by their keys. What the engines use of a `BlockStore`."""

    backend = "memory"

    def __init__(self, layout):
        self.layout, self._blocks = layout, {}

    def __repr__(self):
        return f"<MemoryStore of {len(self._blocks)} blocks>"

    def __len__(self):
        return len(self._blocks)

    def match(self, keys) -> int:
        """How many of the keys are here, from the first on, without a gap."""
        for count, key in enumerate(keys["key"]):
            if key.tobytes() not in self._blocks:
                return count
        return len(keys)

    def read(self, keys, pool, block_ids) -> _Done:
        """Copy blocks into the pool; the result is how many of them were here."""
        usable = self.match(keys)
        for key, block_id in zip(keys["key"][:usable], block_ids):
            pool.full(block_id).reshape(-1)[:] = self._blocks[key.tobytes()]
        return _Done(usable)

    def write(self, keys, pool, block_ids) -> _Done:
        """Copy blocks out of the pool."""
        for key, block_id in zip(keys["key"], block_ids, strict=True):
            self._blocks.setdefault(key.tobytes(), pool.full(block_id).reshape(-1).copy())
        return _Done()

    def open_ring(self, *, name="memory", **_) -> "MemoryRing":
        """A storage NIC of no time: its rates do not matter."""
        return MemoryRing(self, name)


class MemoryRing:
    """What the engines use of a `Ring`; counts bytes, and is never busy."""

    read_queue = ReadQueue(0, 0)

    def __init__(self, store, name):
        self.store, self.name = store, name
        self._bytes = {"read_bytes": 0, "write_bytes": 0}

    def read(self, keys, pool, block_ids) -> _Done:
        done = self.store.read(keys, pool, block_ids)
        self._bytes["read_bytes"] += done.wait() * self.store.layout.full_block_nbytes
        return done

    def write(self, keys, pool, block_ids) -> _Done:
        self._bytes["write_bytes"] += len(keys) * self.store.layout.full_block_nbytes
        return self.store.write(keys, pool, block_ids)

    def stats(self) -> dict:
        return {**self._bytes, "read_busy_ns": 0, "write_busy_ns": 0, "name": self.name}

    def busy_windows(self, direction: str = "read"):
        return 0, 10**9, np.empty(0, np.uint64)

    def close(self, *, cancel: bool = False) -> None:
        """Nothing to give back."""


class CopyMover:
    """Carries out a plan's moves by copying, between one turn of the event loop and the next: no
    NIC, no ring thread. The interface of `kvio.loader.Mover`."""

    def __init__(self, layout, rings: dict):
        self.layout, self.rings, self.peers = layout, rings, {}

    async def perform(self, step: Step, binding: Binding) -> None:
        """Carry out a storage or NIC step."""
        if step.kind in (STORAGE_READ, STORAGE_WRITE):
            await self._store(step, binding)
        else:
            self._copy(step, binding)

    async def _store(self, step, binding):
        reads = step.kind == STORAGE_READ
        first, stop = self._blocks(step)
        place = binding.places[step.target if reads else step.source]
        ring = self.rings[step.side]
        usable = await (ring.read if reads else ring.write)(
            binding.keys[first:stop], place.pool, place.ids[first:stop])
        if reads and usable < stop - first:
            raise BlocksMissing(f"{usable} of {stop - first} matched blocks are in memory",
                                first + usable)

    def _copy(self, step, binding):
        source, target = binding.places[step.source], binding.places[step.target]
        first, stop = self._blocks(step)
        width = self.layout.layer_bytes_per_token[step.layer]
        tail = (step.tokens[1] - (stop - 1) * self.layout.block_tokens) * width
        whole = self.layout.layer_block_nbytes(step.layer)
        taken, given = (self._rows(place, step.layer, first, stop) for place in (source, target))
        given[1][given[0][:-1]] = taken[1][taken[0][:-1]]
        given[1][given[0][-1], :min(tail, whole)] = taken[1][taken[0][-1], :min(tail, whole)]

    def _rows(self, place, layer, first, stop):
        """(ids, a view of all blocks up to the highest of them in a layer)."""
        ids = np.arange(first, stop) if place.ids is None else place.ids[first:stop]
        side, whole = place.side, self.layout.layer_block_nbytes(layer)
        count = int(ids.max()) + 1
        span = (count - 1) * side.block_stride + whole
        memory = _memory(side.base + side.layer_offsets[layer], span)
        return ids, np.ndarray((count, whole), np.uint8, memory, strides=(side.block_stride, 1))

    def _blocks(self, step):
        tokens = self.layout.block_tokens
        return step.tokens[0] // tokens, -(-step.tokens[1] // tokens)

    def recover(self) -> None:
        """Nothing ever fails."""


def _memory(addr, nbytes):
    """The bytes at an address, writable: those of a pool or workspace that the caller holds."""
    return (ctypes.c_char * nbytes).from_address(addr)
