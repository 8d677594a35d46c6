"""One request between its route and its last token: how its engines count it, and its tries."""
import asyncio

from kvio.engine.attempt import Attempt
from kvio.engine.decode import Sequence
from kvio.engine.moves import drained
from kvio.engine.rerouting import Recovery, TryAgain, recovered
from kvio.errors import BlocksMissing, Closed, EngineLost, ReadStalled, TransferError
from kvio.loader import Mover
from kvio.scheduler import DE, PE

__all__ = ["Serving"]


class Serving:
    """Made when a route is committed: from then on the engines count the request as theirs.

    `run()` loads, prefills, decodes and persists. Whatever happens, everything held is given
    back, and only after the moves that touch it have drained. `nodes` maps the sides that take
    part to their engines. Failures are mended along the route (`rerouting`); only the death of
    the PE (while it prefills) or of the DE ends it, with EngineLost.
    """

    def __init__(self, request, route, nodes: dict, mover: Mover, on_room,
                 recovery: Recovery = Recovery()):
        self.request, self.pe, self.de = request, nodes[PE], nodes[DE]
        self.nodes, self.mover, self._on_room = nodes, mover, on_room
        self._push, self._recovery = route.push, recovery
        layout = self.pe.layout
        self._try_again = TryAgain(nodes, layout.block_tokens, recovery.max_attempts)
        self._blocks = layout.num_blocks(request.num_prompt_tokens + request.num_new_tokens)
        self._tokens = self._blocks * layout.block_tokens
        for engine in (self.pe, self.de):
            engine.num_requests += 1
            engine.num_tokens += self._tokens
        self.de.promised_blocks += self._blocks
        self._in_prefill = self._in_decode = True
        self._work, self._left, self._lost = None, False, None
        self._is_loading, self._dead = False, {}    # engine -> why it is dead
        self._attempt = self._try(route.parts)

    def _try(self, parts):
        return Attempt(self.request, parts, self._push, self.nodes, self.mover)

    async def run(self) -> None:
        """All tokens generated and all new full blocks stored. EngineLost; TransferError or
        Closed after so many tries, with the failures of all of them as causes."""
        self._work = asyncio.ensure_future(self._serve())
        try:
            await asyncio.wait([self._work])
        finally:
            if not self._work.done():
                self._left = True
                self._work.cancel()
                await drained([self._work])
            failure, self._work = outcome(self._work), None
            self._give_back()                       # it may have been cancelled before it began
            self._try_again.forget()
        if failure is None:
            return
        try:
            if self._lost is None:
                raise failure
            is_cause = failure is not self._lost and not isinstance(failure,
                                                                    asyncio.CancelledError)
            raise self._lost from (failure if is_cause else None)
        finally:
            failure = self._lost = None             # their tracebacks would keep the HBM alive

    def lose(self, engine, why: str) -> None:
        """`engine` has died. If the request needs it: what is in flight drains, then `run` ends
        with EngineLost, or goes on without it where it only lent its storage NIC. A prefill that
        is through needs neither, unless what follows fails and all is done again."""
        self._dead[engine] = why
        if engine is self.de or (engine is self.pe and self._in_prefill):
            self._lost = self._lost or self._lost_with(engine)
        elif not (self._is_loading and self._in_prefill and self._dead_sides()):
            return                                  # the next try looks
        if self._work is not None:
            self._work.cancel()

    def _lost_with(self, engine):
        return EngineLost(f"request {self.request.request_id}: {self._dead[engine]}", engine.name)

    def _dead_sides(self):
        """Of the nodes that were to read, and lend their storage NICs."""
        return [part.side for part in self._attempt.parts
                if self.nodes[part.side] in self._dead and part.side not in (PE, DE)]

    async def _serve(self):
        try:
            await self._load_and_prefill()
            request = self.request
            if self._attempt.hbm_ids is not None:
                await self._decode(Sequence(request, self.de.memory, self.de.hbm,
                                            self._attempt.hbm_ids, request.num_prompt_tokens))
            await asyncio.gather(*self._attempt.writing)
        finally:
            await drained(self._attempt.writing)
            self._give_back()

    def _give_back(self):
        self._attempt.free_hbm()
        self.leave_all()

    def _check(self):
        """Draining is not interrupted; what came meanwhile is seen here."""
        if self._lost is not None:
            raise self._lost
        if self._left:
            raise asyncio.CancelledError

    async def _load_and_prefill(self):
        while True:
            self._check()
            self._enter_prefill()
            self._mend_dead_sides()
            self._is_loading = True
            try:
                return await self._attempt.run(self._leave_prefill)
            except asyncio.CancelledError:
                self._check()
                if not self._dead_sides():
                    raise
                await self._clear()
            except (BlocksMissing, ReadStalled, Closed, TransferError) as failure:
                await self._after(failure)
            finally:
                self._is_loading = False
            if self.request.finished:               # its blocks are not stored: that costs reuse
                return

    def _mend_dead_sides(self):
        """Engines that lent their storage NICs have died: others read what they were to read."""
        for side in self._dead_sides():
            self._plan(self._try_again.without(self._attempt.parts, side,
                                               self._dead[self.nodes[side]]))

    async def _clear(self):
        """A try that has failed late may have filled HBM (and made a token, which stays)."""
        await drained(self._attempt.writing)
        self._attempt.free_hbm()

    async def _after(self, failure):
        await self._clear()
        if not isinstance(failure, (BlocksMissing, ReadStalled)):
            await recovered(self.mover)             # also for whoever comes next
        if self.request.finished:
            return
        following = self._try_again.after(self._attempt.parts, failure)
        if following is None:
            raise self._try_again.error(failure)
        self._plan(following)

    def _plan(self, following):
        self.request.note(following.figure, following.why)
        self.request.parts = following.parts
        self.request.num_hit_tokens = following.num_hit_tokens
        self._attempt.leave_read_queues()           # it may never have begun
        self._attempt = self._try(following.parts)

    async def _decode(self, sequence):
        """Its KV is in HBM: a step that fails in a transfer is done again from there."""
        mover = self.mover if self.de.ring is not None else None
        while True:
            try:
                return await self.de.decode(sequence, mover)
            except TransferError as failure:
                self._check()
                await recovered(self.mover)
                following = self._try_again.after(self._attempt.parts, failure)
                if following is None:
                    raise self._try_again.error(failure)
                self.request.note(following.figure, following.why)

    def _enter_prefill(self):
        """Again, if what came after the prefill has failed."""
        if self.pe in self._dead:
            self._lost = self._lost_with(self.pe)
            raise self._lost
        if not self._in_prefill:
            self._in_prefill = True
            self.pe.num_requests += 1
            self.pe.num_tokens += self._tokens

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


def outcome(task) -> BaseException | None:
    """What a task that has ended was ended by."""
    return asyncio.CancelledError() if task.cancelled() else task.exception()
