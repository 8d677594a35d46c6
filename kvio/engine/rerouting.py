"""What becomes of a request whose read stalls, whose block is bad or whose transfer fails.

Nothing is repaired silently. A failed try gives everything back first (what a device may still
write stays held until it has drained), then the request is planned again: with fewer hits, with
another storage NIC, or just once more. Each time is counted at the request and said in words.
Engines that die are the cluster's affair: it routes anew.
"""
import asyncio
import errno
import numbers
from dataclasses import dataclass

from kvio.errors import BlocksMissing, Closed, InvalidArgument, ReadStalled, TransferError
from kvio.scheduler import DE, PE, Part

__all__ = ["NextTry", "PatientRing", "Recovery", "TryAgain", "parts_until", "recovered"]

_STALLED = object()
RECOVER_S = 0.001, 0.05         # between two looks at whether queue pairs are idle: first, most


@dataclass(frozen=True)
class Recovery:
    """How much an engine puts up with.

    max_attempts: how often one stage of a request is tried when transfers fail, the first try
    included. read_timeout_s: a storage NIC that has something to do and has completed nothing for
    so long has stalled; None: it is waited for, however long.
    """

    max_attempts: int = 3
    read_timeout_s: float | None = None

    def __post_init__(self):
        if isinstance(self.max_attempts, bool) or not isinstance(self.max_attempts, int) or \
                self.max_attempts < 1:
            raise InvalidArgument("max_attempts counts the first try: an int, 1 or more, not "
                                  f"{self.max_attempts!r}")
        if self.read_timeout_s is not None and not (
                isinstance(self.read_timeout_s, numbers.Real) and self.read_timeout_s > 0):
            raise InvalidArgument("read_timeout_s is more than 0 seconds, or None to wait for "
                                  f"ever, not {self.read_timeout_s!r}")


# ---- stalled storage

class PatientRing:
    """A node's ring, which is given up when it has stalled: a read ends with ReadStalled, a write
    with TransferError (ETIMEDOUT).

    A long queue is no stall: patience begins anew whenever the ring has completed something; for
    a read only until it has completed as much as was outstanding before it, and the read with it
    if it serves in order. What is given up goes on, and keeps its memory until it has drained;
    then `on_drain()` is called.
    """

    def __init__(self, name: str, ring, timeout_s: float, strays: set, on_drain):
        self.name, self.ring, self.timeout_s = name, ring, timeout_s
        self._strays, self._on_drain = strays, on_drain

    async def read(self, keys, pool, block_ids) -> int:
        """As `Ring.read`, awaited: the usable blocks; ReadStalled."""
        result = await self._patiently(self.ring.read(keys, pool, block_ids), "read_bytes")
        if result is _STALLED:
            raise ReadStalled(self._why("read", block_ids), self.name)
        return result

    async def write(self, keys, pool, block_ids) -> None:
        """As `Ring.write`, awaited."""
        result = await self._patiently(self.ring.write(keys, pool, block_ids), "write_bytes")
        if result is _STALLED:
            raise TransferError(errno.ETIMEDOUT, self._why("write", block_ids))

    def _why(self, what, block_ids):
        return (f"the storage NIC of {self.name} has a {what} of {len(block_ids)} blocks to do and "
                f"has completed nothing for {self.timeout_s} s: its device or network hangs; the "
                f"{what} keeps its memory until it ends")

    async def _patiently(self, transfer, figure):
        task, due = asyncio.ensure_future(_result(transfer)), None
        before = self.ring.stats()[figure]
        try:
            while True:
                done, _ = await asyncio.wait([task], timeout=self.timeout_s)
                if done:
                    return task.result()
                completed = self.ring.stats()[figure]
                if completed == before or (due is not None and completed >= due):
                    return _STALLED
                if due is None and figure == "read_bytes":
                    due = completed + self.ring.read_queue.nbytes
                before = completed
        finally:
            if not task.done():
                self._leave(task)

    def _leave(self, task):
        """Somebody sees it drain: only then are its blocks free, and others get them."""
        self._strays.add(task)

        def ended(task):
            self._strays.discard(task)
            if not task.cancelled():
                task.exception()                    # retrieved: nobody wants its blocks
            self._on_drain()
        task.add_done_callback(ended)


async def _result(transfer):
    return await transfer


# ---- failed transfers

async def recovered(mover) -> None:
    """Until the queue pairs that were in error work again. What is in flight on them flushes
    soon, and what others post fails at once: they come here as well. Gone ends stay gone."""
    pause, most = RECOVER_S
    while not _reset(mover):
        await asyncio.sleep(pause)
        pause = min(2 * pause, most)


def _reset(mover):
    idle = True
    for peer in mover.peers.values():
        try:
            peer.reset()
        except Closed:
            pass                                    # the other end is gone
        except OSError:
            idle = False                            # Busy
    return idle


# ---- planning again

@dataclass(frozen=True)
class NextTry:
    """`parts` that are read in the next try (hits behind them are computed), `figure` that counts
    it (of `kvio.engine.request.MENDED`), and why."""

    parts: tuple[Part, ...]
    figure: str
    why: str

    @property
    def num_hit_tokens(self) -> int:
        return self.parts[-1].tokens[1] if self.parts else 0


class TryAgain:
    """Decides what the next try of a request reads. One of these lives as long as a route.

    `nodes` maps sides to engines (of which `.name` and `.node_id` are used). Bad: a storage NIC
    that has stalled or is gone; it gets no further part of this request. What no good storage NIC
    is left for is computed.
    """

    def __init__(self, nodes: dict, block_tokens: int, max_attempts: int):
        self._nodes, self._block_tokens, self._max = nodes, block_tokens, max_attempts
        self._bad, self._failures = set(), []

    def after(self, parts, failure: BaseException) -> NextTry | None:
        """None: it has been tried often enough (or nothing can be done): `error` says so."""
        if isinstance(failure, BlocksMissing):
            usable = failure.num_usable_blocks * self._block_tokens
            return NextTry(parts_until(parts, usable), "num_replans", str(failure))
        if isinstance(failure, ReadStalled):
            side = next(part.side for part in parts if self._nodes[part.side].name == failure.nic)
            return self.without(parts, side, str(failure))
        if isinstance(failure, (Closed, TransferError)):
            self._failures.append(failure)
            if len(self._failures) < self._max:
                return NextTry(tuple(parts), "num_retries", str(failure))
        return None

    def without(self, parts, side, why: str) -> NextTry:
        """Another storage NIC reads what `side` was to read."""
        self._bad.add(side)
        parts = parts_without(parts, side, self._others(parts))
        return NextTry(parts, "num_read_failovers", why)

    def error(self, failure: BaseException) -> BaseException:
        """What the request fails with: the failures of all tries are its causes, one by one."""
        if len(self._failures) < 2:
            return failure
        for earlier, later in zip(self._failures, self._failures[1:]):
            later.__cause__ = earlier
        text = f"{len(self._failures)} tries have failed, the last one: "
        error = TransferError(failure.errno, text + failure.strerror, failure.status) \
            if isinstance(failure, TransferError) else Closed(text + str(failure))
        error.__cause__ = failure
        return error

    def forget(self) -> None:
        """The request is over. Failures have tracebacks, which would keep HBM alive."""
        self._failures = []

    def _others(self, parts):
        """Sides that have no part and may have one, as (side, node_id)."""
        taken = {part.side for part in parts} | self._bad
        return [(side, self._nodes[side].node_id) for side in (DE, PE) if side not in taken]


def parts_until(parts, num_tokens: int) -> tuple[Part, ...]:
    """The parts of the first `num_tokens` hit tokens."""
    return tuple(Part(part.side, (part.tokens[0], min(part.tokens[1], num_tokens)), part.node_id)
                 for part in parts if part.tokens[0] < num_tokens)


def parts_without(parts, side, others) -> tuple[Part, ...]:
    """`parts`, but what `side` was to read is read by the first of `others` (side, node_id) that
    may (the DE's part is always the first), else by the neighbour before, else by the one behind.
    Without any of these nobody reads it: it is computed."""
    i = next(i for i, part in enumerate(parts) if part.side == side)
    lost, before, behind = parts[i], parts[:i], parts[i + 1:]
    for name, node_id in others:
        if name != DE or not before:
            return (*before, Part(name, lost.tokens, node_id), *behind)
    if before:
        last = before[-1]
        return (*before[:-1], Part(last.side, (last.tokens[0], lost.tokens[1]), last.node_id),
                *behind)
    if behind:
        following = behind[0]
        return (Part(following.side, (lost.tokens[0], following.tokens[1]), following.node_id),
                *behind[1:])
    return ()
