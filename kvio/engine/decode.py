"""The decode engine: continuous batching over KV blocks in its HBM, persisted as they fill up.

Its HBM (host memory, or a GPU's: `hbm`) is registered with the engine's own NIC; it is kept layer
by layer.
"""
import asyncio
from dataclasses import dataclass, field

import numpy as np

from kvio.engine.hbm import HostHbm
from kvio.engine.moves import drained, move
from kvio.engine.node import Node
from kvio.engine.request import chained_keys
from kvio.errors import Closed, TransferError
from kvio.loader import Binding, persist_plan, run_plan
from kvio.loader.mover import Mover, Place
from kvio.loader.plan import DE_BUFFER, DE_HBM
from kvio.memory import LayerPool
from kvio.transfer import Access

__all__ = ["DecodeEngine", "Sequence"]


@dataclass(eq=False)
class Sequence:
    """A request in decode: `num_tokens` have KV in the blocks `ids` of the HBM `pool`, which lies
    in `memory`."""

    request: object
    memory: object
    pool: LayerPool
    ids: np.ndarray
    num_tokens: int
    state: object = None
    done: asyncio.Future = None
    persisting: list = field(default_factory=list)

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and generated tokens, uint32."""
        return np.concatenate([self.request.prompt,
                               np.asarray(self.request.generated, np.uint32)])

    def kv_bytes(self, layer: int) -> np.ndarray:
        """The KV of a layer, to be read: uint8 [num_tokens, bytes_per_token]."""
        held = self.ids[:self.pool.layout.num_blocks(self.num_tokens)]
        blocks = self.memory.blocks(self.pool, layer, held)
        return blocks.reshape(-1, blocks.shape[-1])[:self.num_tokens]

    @property
    def next_place(self) -> tuple[int, int]:
        """(block id, offset in the block) of the token whose KV comes next."""
        block, offset = divmod(self.num_tokens, self.pool.layout.block_tokens)
        return int(self.ids[block]), offset


class DecodeEngine(Node):
    """One GPU's worth of decode: all its sequences advance by a token a step. `memory`: where its
    HBM is, see `hbm`."""

    def __init__(self, engine_id, node_id, name, layout, ring, nic, *, compute, buffer_blocks,
                 hbm_blocks, memory=None):
        super().__init__(node_id, name, layout, ring, nic, buffer_blocks,
                         Access.REMOTE_READ | Access.REMOTE_WRITE | Access.LOCAL_WRITE)
        self.engine_id, self.compute = engine_id, compute
        self.memory = HostHbm() if memory is None else memory
        self.hbm = LayerPool(layout, hbm_blocks, poison=True, memory=self.memory.allocate(
            layout.num_layers * hbm_blocks * layout.layer_block_nbytes(0)))
        self.hbm_key = nic.register(self.hbm.region, Access.LOCAL_WRITE).key
        self.num_requests = self.num_tokens = 0     # assigned and not yet decoded
        self.promised_blocks = 0                    # HBM of assigned requests, held or to come
        self.num_persisted_blocks = self.num_persist_failures = 0
        # Blocks on their way to the store hold a part of the buffer at most: prompts come first.
        self._persist_room = asyncio.Semaphore(max(1, buffer_blocks // 4))
        self.exchange = None                        # async, awaited at the end of each step
        self._batch, self._joining = [], []
        self._computing, self._computed = None, ()  # the step that runs, and its sequences
        self._work, self._task, self._dead = asyncio.Event(), None, False

    @property
    def free_hbm_tokens(self) -> int:
        """HBM that no assigned request will need."""
        return (self.hbm.num_blocks - self.promised_blocks) * self.layout.block_tokens

    @property
    def num_hbm_tokens(self) -> int:
        """All HBM there is for KV."""
        return self.hbm.num_blocks * self.layout.block_tokens

    def hbm_place(self, ids: np.ndarray) -> Place:
        return Place(self.hbm.side(self.hbm_key), ids, self.hbm)

    def start(self) -> None:
        """Run the decode loop as a task of the running event loop."""
        self._task = asyncio.ensure_future(self._loop())

    def die(self) -> None:
        """End the loop now; sequences still in it are cancelled. `stop` is called later."""
        self._dead = True
        self._task.cancel()

    async def stop(self) -> None:
        """End the loop; sequences still in it are cancelled."""
        task, self._task = self._task, None         # its traceback would keep the HBM alive
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def decode(self, sequence: Sequence, mover: Mover | None) -> None:
        """Generate the rest of a request's tokens, then wait until its full blocks are stored.
        `mover` None: nothing is persisted."""
        sequence.done = asyncio.get_running_loop().create_future()
        try:
            if not sequence.request.finished:
                await self.compute.begin_decode(sequence)
                if self._task is None or self._dead:
                    raise Closed(f"decode engine {self.name} has stopped")
                self._joining.append((sequence, mover))
                self._work.set()
                await sequence.done
            await asyncio.gather(*sequence.persisting)
        finally:
            sequence.done.cancel()                  # the loop drops it at its next step
            if sequence in self._computed:          # this one still writes its KV
                await drained([self._computing])
            await drained(sequence.persisting)

    async def _loop(self):
        try:
            while True:
                if not self._batch and not self._joining:
                    self._work.clear()
                    await self._work.wait()
                self._batch += self._joining
                self._joining.clear()
                self._batch = [entry for entry in self._batch if not entry[0].done.done()]
                if self._batch:
                    await self._step_or_fail()
        finally:                                    # the engine stops: nobody waits for ever
            for sequence, _ in self._batch + self._joining:
                sequence.done.cancel()

    async def _step_or_fail(self):
        """A step that fails, fails its batch; later requests are served."""
        try:
            await self._step()
        except Exception as failure:
            for sequence, _ in self._batch:
                if not sequence.done.done():
                    sequence.done.set_exception(failure)

    async def _step(self):
        batch = list(self._batch)
        made = await self._compute_step([sequence for sequence, _ in batch])
        if self.exchange is not None:
            await self.exchange()
        for (sequence, mover), (token, margin) in zip(batch, made, strict=True):
            if sequence.done.done():
                continue                            # it has left: its blocks are not its own
            sequence.num_tokens += 1
            if mover and sequence.num_tokens % self.layout.block_tokens == 0:
                block = sequence.num_tokens // self.layout.block_tokens - 1
                sequence.persisting.append(asyncio.ensure_future(
                    self._persist(sequence, mover, block)))
            sequence.request.add_token(token, margin)
            if sequence.request.finished:
                sequence.done.set_result(None)

    async def _compute_step(self, sequences):
        """Until it has ended nobody gets the memory of these sequences, whoever is cancelled."""
        self._computing = asyncio.ensure_future(self.compute.decode_step(sequences))
        self._computed = sequences
        try:
            await asyncio.wait([self._computing])
            return self._computing.result()
        finally:
            await drained([self._computing])
            self._computing, self._computed = None, ()

    async def _persist(self, sequence, mover, block):
        """A block has filled up: HBM -> DRAM -> store."""
        async with self._persist_room:
            await self._persist_now(sequence, mover, block)

    async def _persist_now(self, sequence, mover, block):
        ids = np.full(block + 1, -1, np.int64)
        ids[block:] = await self.buffer.acquire(1)
        tokens = sequence.tokens[:(block + 1) * self.layout.block_tokens]
        binding = Binding(chained_keys(sequence.request, tokens, self.layout), {
            DE_BUFFER: self.buffer_place(ids), DE_HBM: self.hbm_place(sequence.ids)})
        await self.persist_block(mover, block, ids, binding, from_hbm=True)

    async def persist_block(self, mover: Mover, block: int, ids: np.ndarray, binding: Binding,
                            from_hbm: bool) -> None:
        """Block `block` of a request, for which the buffer's block ids[block] is held, goes to the
        store; then that is free, whatever has become of it."""
        try:
            steps = [s for s in persist_plan(self.layout, block, from_hbm)
                     if s.source != s.target]       # the buffer is released below, in any case
            await run_plan(steps, lambda step: move(mover, step, binding))
            self.num_persisted_blocks += 1
        except (Closed, TransferError):
            self.num_persist_failures += 1          # it costs reuse, not the request
            mover.recover()
        finally:
            self.buffer.release(ids[block:block + 1])
