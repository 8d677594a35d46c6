"""One request between its route and its last token: how its engines count it, and its tries."""
import asyncio

from kvio.engine.attempt import Attempt
from kvio.engine.decode import Sequence, drained
from kvio.errors import BlocksMissing, TransferError
from kvio.loader import Mover
from kvio.scheduler import DE, PE, Part

__all__ = ["Serving"]


class Serving:
    """Made when a route is committed: from then on the engines count the request as theirs.

    `run()` loads, prefills, decodes and persists. Whatever happens, everything held is given
    back, and only after the moves that touch it have drained. `nodes` maps the sides that take
    part to their engines.
    """

    def __init__(self, request, route, nodes: dict, mover: Mover, on_room):
        self.request, self.pe, self.de = request, nodes[PE], nodes[DE]
        self.nodes, self.mover, self._on_room = nodes, mover, on_room
        self._push = route.push
        layout = self.pe.layout
        self._blocks = layout.num_blocks(request.num_prompt_tokens + request.num_new_tokens)
        self._tokens = self._blocks * layout.block_tokens
        for engine in (self.pe, self.de):
            engine.num_requests += 1
            engine.num_tokens += self._tokens
        self.de.promised_blocks += self._blocks
        self._in_prefill = self._in_decode = True
        self._attempt = self._try(route.parts)

    def _try(self, parts):
        return Attempt(self.request, parts, self._push, self.nodes, self.mover)

    async def run(self) -> None:
        """All tokens generated and all new full blocks stored."""
        request, failed = self.request, False
        try:
            await self._load_and_prefill()
            sequence = Sequence(request, self.de.hbm, self._attempt.hbm_ids,
                                request.num_prompt_tokens)
            await self.de.decode(sequence, self.mover if self.de.ring is not None else None)
            await asyncio.gather(*self._attempt.writing)
        except TransferError:
            failed = True
            raise
        finally:
            await drained(self._attempt.writing)
            if failed:
                self.mover.recover()                # the next request finds working queue pairs
            self._attempt.free_hbm()
            self.leave_all()

    async def _load_and_prefill(self):
        while True:
            try:
                return await self._attempt.run(self._leave_prefill)
            except BlocksMissing as missing:        # plan again, explicitly, with fewer hits
                usable = missing.num_usable_blocks * self.pe.layout.block_tokens
                self.request.num_hit_tokens = usable
                self.request.num_replans += 1
                self._attempt = self._try(parts_until(self._attempt.parts, usable))

    def _leave_prefill(self):
        if self._in_prefill:
            self._in_prefill = False
            self.pe.num_requests -= 1
            self.pe.num_tokens -= self._tokens
            self._on_room()

    def leave_all(self) -> None:
        """The engines no longer count the request; idempotent."""
        self._attempt.leave_read_queues()
        self._leave_prefill()
        if self._in_decode:
            self._in_decode = False
            self.de.num_requests -= 1
            self.de.num_tokens -= self._tokens
            self.de.promised_blocks -= self._blocks
            self._on_room()


def parts_until(parts, num_tokens: int) -> tuple[Part, ...]:
    """The parts of the first `num_tokens` hit tokens."""
    return tuple(Part(part.side, (part.tokens[0], min(part.tokens[1], num_tokens)), part.node_id)
                 for part in parts if part.tokens[0] < num_tokens)
