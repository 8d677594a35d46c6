"""One try at a request's way from storage into DE HBM: what it holds meanwhile, and its stages."""
import asyncio

import numpy as np

from kvio.engine.moves import move
from kvio.engine.prefill import Prefill
from kvio.loader import (RELEASE, Binding, Mover, buffer_order, insert_steps, load_steps,
                         run_plan)
from kvio.loader.plan import DE_BUFFER, DE_HBM, side_of
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
        self.nodes, self.mover = nodes, mover
        self.pe, self.de = nodes[PE], nodes[DE]
        self.layout = self.pe.layout
        self.hbm_ids, self.writing = None, []
        self._held = {}                             # place -> block ids of that side's buffer
        self._queued = {part.side: part.num_tokens for part in parts}
        for side, num_tokens in self._queued.items():
            nodes[side].waiting_read_tokens += num_tokens
        claims = buffer_order(self.layout, parts, request.num_prompt_tokens,
                              lambda side: nodes[side].node_id)
        self._wanted = {claim.side: claim for claim in claims}      # not held yet
        for claim in claims:
            nodes[claim.side].wanted_blocks += claim.num_blocks

    async def run(self, on_prefilled) -> None:
        """`on_prefilled()` is called when the PE is done with the request."""
        request = self.request
        binding = Binding(request.keys)
        prefill = Prefill(self.pe, request, self.parts, self.push, binding, self._move,
                          self._release_buffer)
        try:
            await self._take_buffers(binding)
            await run_plan(load_steps(self.parts), lambda step: self._load(step, binding))
            await prefill.run()
            on_prefilled()
            self._take_hbm(binding)
            await run_plan(insert_steps(self.layout, request.num_prompt_tokens),
                           lambda step: self._insert(step, binding))
        finally:
            self.leave_read_queues()
            for place in list(self._held):
                self._release_buffer(place)

    async def _take_buffers(self, binding):
        """All buffers before the first read, in the order that is everybody's."""
        for claim in list(self._wanted.values()):
            node = self.nodes[claim.side]
            self._held[claim.place] = ids = await node.buffer.acquire(claim.num_blocks)
            self._want_no_more(claim.side)
            # Block i of the request is block ids[i] of the place; before its first there is none.
            binding.places[claim.place] = node.buffer_place(np.concatenate(
                [np.full(claim.first, -1, np.int64), ids]))

    def _want_no_more(self, side):
        claim = self._wanted.pop(side, None)
        if claim is not None:
            self.nodes[side].wanted_blocks -= claim.num_blocks

    async def _load(self, step, binding):
        self._leave_read_queue(step.side)           # from now on the ring counts it
        await self._move(step, binding)

    async def _move(self, step, binding):
        await move(self.mover, step, binding)

    def _take_hbm(self, binding):
        blocks = self.layout.num_blocks(self.request.num_prompt_tokens
                                        + self.request.num_new_tokens)
        self.hbm_ids = self.de.hbm.alloc(blocks)    # promised, so it is there
        binding.places[DE_HBM] = self.de.hbm_place(self.hbm_ids)

    async def _insert(self, step, binding):
        if step.kind == RELEASE:
            self._persist_prompt(binding)
        else:
            await self._move(step, binding)

    def _persist_prompt(self, binding):
        """The prompt's new full blocks go from the DE buffer to the store; the others are free."""
        first = self.layout.num_full_blocks(self.request.num_hit_tokens)
        stop = len(self.request.keys) if self.de.ring is not None else first
        ids = self._held.pop(DE_BUFFER)
        self.writing = [asyncio.ensure_future(self.de.persist_block(
            self.mover, block, ids, binding, from_hbm=False)) for block in range(first, stop)]
        rest = np.delete(ids, np.arange(first, stop))
        if len(rest):
            self.de.buffer.release(rest)

    def _release_buffer(self, place):
        self.nodes[side_of(place)].buffer.release(self._held.pop(place))

    def _leave_read_queue(self, side):
        self.nodes[side].waiting_read_tokens -= self._queued.pop(side, 0)

    def leave_read_queues(self) -> None:
        """Nobody waits for these reads, nor for the buffers, any more; idempotent."""
        for side in list(self._queued):
            self._leave_read_queue(side)
        for side in list(self._wanted):
            self._want_no_more(side)

    def free_hbm(self) -> None:
        """Give the DE's HBM back; idempotent."""
        if self.hbm_ids is not None:
            self.de.hbm.free(self.hbm_ids)
            self.hbm_ids = None
