"""One try at a request's way from storage into DE HBM: what it holds meanwhile, and its stages."""
import asyncio

import numpy as np

from kvio.engine.decode import DecodeEngine
from kvio.engine.prefill import Prefill
from kvio.errors import TransferError
from kvio.loader import (COMPUTE, RELEASE, STORAGE_READ, Binding, Mover, buffer_order, persist_plan,
                         read_plan, run_plan)
from kvio.loader.plan import DE_BUFFER, DE_HBM
from kvio.scheduler import DE, PE

__all__ = ["Attempt"]


class Attempt:
    """`await run(...)`: the request's KV lies in the DE HBM blocks `hbm_ids` and its first token is
    there. Whatever happens, everything else is given back, and only after the moves that touch it
    have drained; `writing` are the prompt's blocks that are still on their way to the store.

    `nodes` maps each side that takes part to its engine.
    """

    def __init__(self, request, parts, push, nodes: dict, mover: Mover):
        self.request, self.parts, self.push = request, parts, push
        self.nodes, self.mover, self._on_prefilled = nodes, mover, None
        self.pe, self.de = nodes[PE], nodes[DE]
        self.layout = self.pe.layout
        self.hbm_ids, self.writing = None, []
        self._held = {}                             # place -> block ids of that side's buffer
        self._queued = {part.side: part.num_tokens for part in parts}
        for side, num_tokens in self._queued.items():
            nodes[side].waiting_read_tokens += num_tokens

    async def run(self, on_prefilled) -> None:
        """`on_prefilled()` is called when the PE is done with the request."""
        self._on_prefilled = on_prefilled
        request, layout = self.request, self.layout
        hits = request.num_hit_tokens
        plan = read_plan(layout, self.parts, hits, request.num_prompt_tokens - hits,
                         self.pe.depth, push=self.push)
        binding = Binding(request.keys)
        stay = Prefill(self.pe, request, binding)
        try:
            await self._take_buffers(binding)
            await run_plan(plan.steps, lambda step: self._perform(step, stay, binding))
        finally:
            self._on_prefilled = None               # no cycle that keeps HBM alive
            stay.close()
            self.leave_read_queues()
            for place in list(self._held):
                self._release_buffer(place)

    async def _take_buffers(self, binding):
        """All buffers before the first read, in the order that is everybody's."""
        claims = buffer_order(self.layout, self.parts, self.request.num_prompt_tokens,
                              lambda side: self.nodes[side].node_id)
        for claim in claims:
            node = self.nodes[claim.side]
            self._held[claim.place] = ids = await node.buffer.acquire(claim.num_blocks)
            # Block i of the request is block ids[i] of the place; before its first there is none.
            binding.places[claim.place] = node.buffer_place(np.concatenate(
                [np.full(claim.first, -1, np.int64), ids]))

    async def _perform(self, step, stay, binding):
        await stay.before(step)
        if step.kind == COMPUTE:
            await stay.compute(step)
        elif step.kind == RELEASE:
            self._release(step, stay, binding)
        else:
            if step.kind == STORAGE_READ:
                self._leave_read_queue(step.side)   # from now on the ring counts it
            elif step.target == DE_HBM and self.hbm_ids is None:
                blocks = self.layout.num_blocks(self.request.num_prompt_tokens
                                                + self.request.num_new_tokens)
                self.hbm_ids = self.de.hbm.alloc(blocks)        # promised, so it is there
                binding.places[DE_HBM] = self.de.hbm_place(self.hbm_ids)
            await self.mover.perform(step, binding)
            stay.after(step)

    def _release(self, step, stay, binding):
        if step.source == DE_BUFFER:
            self._persist_prompt(binding)
        elif step.source in self._held:
            self._release_buffer(step.source)
        else:
            stay.release(step)
            self._on_prefilled()

    def _persist_prompt(self, binding):
        """The prompt's new full blocks go from the DE buffer to the store; the others are free."""
        first = self.layout.num_full_blocks(self.request.num_hit_tokens)
        stop = len(self.request.keys) if self.de.ring is not None else first
        ids = self._held.pop(DE_BUFFER)
        self.writing = [asyncio.ensure_future(persist_prompt_block(
            self.de, self.mover, block, ids, binding)) for block in range(first, stop)]
        rest = np.delete(ids, np.arange(first, stop))
        if len(rest):
            self.de.buffer.release(rest)

    def _release_buffer(self, place):
        self.nodes[place.split("_")[0]].buffer.release(self._held.pop(place))

    def _leave_read_queue(self, side):
        self.nodes[side].waiting_read_tokens -= self._queued.pop(side, 0)

    def leave_read_queues(self) -> None:
        """Nobody waits for these reads any more; idempotent."""
        for side in list(self._queued):
            self._leave_read_queue(side)

    def free_hbm(self) -> None:
        """Give the DE's HBM back; idempotent."""
        if self.hbm_ids is not None:
            self.de.hbm.free(self.hbm_ids)
            self.hbm_ids = None


async def persist_prompt_block(engine: DecodeEngine, mover: Mover, block: int, ids, binding):
    """Block `block` of a prompt, which lies in the DE buffer, to the store; then it is free."""
    try:
        steps = persist_plan(engine.layout, block, from_hbm=False)
        await run_plan(steps, lambda step: mover.perform(step, binding))
        engine.num_persisted_blocks += 1
    except TransferError:
        engine.num_persist_failures += 1            # it costs reuse, not the request
        mover.recover()
    finally:
        engine.buffer.release(ids[block:block + 1])
