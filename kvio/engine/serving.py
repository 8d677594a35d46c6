"""One request between its route and its last token: what it holds, and when it lets go."""
import asyncio

import numpy as np

from kvio.engine.decode import DecodeEngine, Sequence, drained
from kvio.engine.prefill import Prefill, PrefillEngine
from kvio.errors import BlocksMissing, TransferError
from kvio.loader import (COMPUTE, RELEASE, STORAGE_READ, Binding, Mover, persist_plan, read_plan,
                         run_plan)
from kvio.loader.plan import DE_BUFFER, DE_HBM, PE_BUFFER
from kvio.scheduler import PE

__all__ = ["Serving"]


class Serving:
    """Made when a route is committed: from then on the engines count the request as theirs.

    `run()` loads, prefills, decodes and persists. Whatever happens, everything held is given
    back, and only after the moves that touch it have drained.
    """

    def __init__(self, request, pe: PrefillEngine, de: DecodeEngine, mover: Mover, on_room):
        self.request, self.pe, self.de, self.mover = request, pe, de, mover
        self.layout, self._on_room = pe.layout, on_room
        self._blocks = self.layout.num_blocks(request.num_prompt_tokens + request.num_new_tokens)
        self._tokens = self._blocks * self.layout.block_tokens
        self._reader = pe if request.path == PE else de
        self._waiting_tokens = request.num_hit_tokens
        self._reader.waiting_read_tokens += self._waiting_tokens
        for engine in (pe, de):
            engine.num_requests += 1
            engine.num_tokens += self._tokens
        de.promised_blocks += self._blocks
        self._in_prefill = self._in_decode = True
        self._de_ids = self._hbm_ids = None
        self._writing = []

    async def run(self) -> None:
        """All tokens generated and all new full blocks stored."""
        request, failed = self.request, False
        try:
            while True:
                try:
                    await self._load_and_prefill()
                    break
                except BlocksMissing as missing:    # plan again, explicitly, with fewer hits
                    request.num_hit_tokens = (missing.num_usable_blocks
                                              * self.layout.block_tokens)
                    request.num_replans += 1
            sequence = Sequence(request, self.de.hbm, self._hbm_ids, request.num_prompt_tokens)
            await self.de.decode(sequence, self.mover if self._persists else None)
            await asyncio.gather(*self._writing)
        except TransferError:
            failed = True
            raise
        finally:
            await drained(self._writing)
            if failed:
                self.mover.recover()                # the next request finds working queue pairs
            self._free_hbm()
            self.leave_all()

    @property
    def _persists(self):
        return self.de.ring is not None

    async def _load_and_prefill(self):
        request, layout = self.request, self.layout
        hits = request.num_hit_tokens
        plan = read_plan(layout, request.path, hits, request.num_prompt_tokens - hits,
                         self.pe.depth)
        binding = Binding(request.keys)
        stay = Prefill(self.pe, request, binding)
        try:
            # PE before DE, for everybody: nobody waits for what a later one holds.
            if request.path == PE and hits:
                stay.buffer_ids = await self.pe.buffer.acquire(layout.num_full_blocks(hits))
                binding.places[PE_BUFFER] = self.pe.buffer_place(stay.buffer_ids)
            self._de_ids = await self.de.buffer.acquire(
                layout.num_blocks(request.num_prompt_tokens))
            binding.places[DE_BUFFER] = self.de.buffer_place(self._de_ids)
            await run_plan(plan.steps, lambda step: self._perform(step, stay, binding))
        finally:
            stay.close()
            self._free_de_buffer()

    async def _perform(self, step, stay, binding):
        await stay.before(step)
        if step.kind == COMPUTE:
            await stay.compute(step)
        elif step.kind == RELEASE:
            self._release(step, stay, binding)
        else:
            if step.kind == STORAGE_READ:
                self._leave_read_queue()            # from now on the ring counts it
            elif step.target == DE_HBM and self._hbm_ids is None:
                self._hbm_ids = self.de.hbm.alloc(self._blocks)     # promised, so it is there
                binding.places[DE_HBM] = self.de.hbm_place(self._hbm_ids)
            await self.mover.perform(step, binding)
            stay.after(step)

    def _release(self, step, stay, binding):
        if step.source == DE_BUFFER:
            self._persist_prompt(binding)
        else:
            stay.release(step)
            if step.source != PE_BUFFER:
                self._leave_prefill()

    def _persist_prompt(self, binding):
        """The prompt's new full blocks go from the DE buffer to the store; the others are free."""
        first = self.layout.num_full_blocks(self.request.num_hit_tokens)
        stop = len(self.request.keys) if self._persists else first
        ids, self._de_ids = self._de_ids, None
        self._writing = [asyncio.ensure_future(self._persist(block, ids, binding))
                         for block in range(first, stop)]
        rest = np.delete(ids, np.arange(first, stop))
        if len(rest):
            self.de.buffer.release(rest)

    async def _persist(self, block, ids, binding):
        try:
            steps = persist_plan(self.layout, block, from_hbm=False)
            await run_plan(steps, lambda step: self.mover.perform(step, binding))
            self.de.num_persisted_blocks += 1
        except TransferError:
            self.de.num_persist_failures += 1       # it costs reuse, not the request
            self.mover.recover()
        finally:
            self.de.buffer.release(ids[block:block + 1])

    def _free_de_buffer(self):
        if self._de_ids is not None:
            self.de.buffer.release(self._de_ids)
            self._de_ids = None

    def _free_hbm(self):
        if self._hbm_ids is not None:
            self.de.hbm.free(self._hbm_ids)
            self._hbm_ids = None

    def _leave_read_queue(self):
        self._reader.waiting_read_tokens -= self._waiting_tokens
        self._waiting_tokens = 0

    def _leave_prefill(self):
        if self._in_prefill:
            self._in_prefill = False
            self.pe.num_requests -= 1
            self.pe.num_tokens -= self._tokens
            self._on_room()

    def leave_all(self) -> None:
        """The engines no longer count the request; idempotent."""
        self._leave_read_queue()
        self._leave_prefill()
        if self._in_decode:
            self._in_decode = False
            self.de.num_requests -= 1
            self.de.num_tokens -= self._tokens
            self.de.promised_blocks -= self._blocks
            self._on_room()
