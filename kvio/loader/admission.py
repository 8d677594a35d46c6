"""Who may enter: blocks of buffers, handed out so that nobody waits for ever.

Three rules. A request takes all that it needs of a buffer at once, or waits. A buffer serves first
come, first served: who waits is never overtaken, so large requests do not starve. Everybody takes
buffers in one order, that of the nodes (`buffer_order`), and PE HBM after all buffers; what a
request waits for therefore lies behind all that it holds, and a circle of requests that wait for
each other would have to go up for ever.

All of it is values: asking returns a new budget and who was let in, so the engine's buffers
(`engine.node.Buffer`) and an exhaustive search over every interleaving run the same code.
"""
from typing import Hashable, NamedTuple

from kvio.errors import InvalidArgument
from kvio.layout import BlockLayout
from kvio.loader.plan import DE_BUFFER

__all__ = ["Budget", "Claim", "buffer_order"]


class Budget(NamedTuple):
    """A buffer's blocks: `capacity` in all, `free` of them free, `waiting` (owner, blocks) in the
    order in which they came. Blocks are free only once no device touches them any more."""

    capacity: int
    free: int
    waiting: tuple = ()

    @classmethod
    def of(cls, capacity: int) -> "Budget":
        """All free, nobody waiting."""
        return cls(capacity, capacity)

    def ask(self, owner: Hashable, num_blocks: int) -> tuple["Budget", tuple]:
        """(budget, owners let in, in order): `owner` is among them, or waits. InvalidArgument if
        the buffer could never hold that many."""
        if not 1 <= num_blocks <= self.capacity:
            raise InvalidArgument(f"a request needs {num_blocks} blocks of a buffer that has "
                                  f"{self.capacity}: enlarge the buffer")
        return self._let_in(self.free, (*self.waiting, (owner, num_blocks)))

    def give_back(self, num_blocks: int) -> tuple["Budget", tuple]:
        """Blocks are free again; (budget, owners let in)."""
        if not 0 <= num_blocks <= self.capacity - self.free:
            raise InvalidArgument(f"{num_blocks} blocks given back, but only "
                                  f"{self.capacity - self.free} were out")
        return self._let_in(self.free + num_blocks, self.waiting)

    def withdraw(self, owner: Hashable) -> tuple["Budget", tuple]:
        """`owner` no longer waits, which may let in those behind it."""
        return self._let_in(self.free, tuple(each for each in self.waiting if each[0] != owner))

    def _let_in(self, free, waiting):
        count = 0
        for _, num_blocks in waiting:
            if num_blocks > free:
                break                               # those behind it wait as well
            free -= num_blocks
            count += 1
        return Budget(self.capacity, free, waiting[count:]), tuple(
            owner for owner, _ in waiting[:count])


class Claim(NamedTuple):
    """What a request takes of one buffer: blocks [first, stop) of the request."""

    side: str
    place: str
    first: int
    stop: int

    @property
    def num_blocks(self) -> int:
        return self.stop - self.first


def buffer_order(layout: BlockLayout, parts, num_prompt_tokens: int, node_of) -> list[Claim]:
    """What a request takes before anything of it is read, in the order in which it takes it.

    Each part needs the blocks of its hits in the buffer of its side; the DE's buffer holds the
    whole prompt, also blocks that others read. `node_of(side)` is the node's place in the order
    that is common to all requests (no two sides of a request are one node).
    """
    claims = [Claim(part.side, part.buffer, part.tokens[0] // layout.block_tokens,
                    part.tokens[1] // layout.block_tokens)
              for part in parts if part.buffer != DE_BUFFER]
    claims.append(Claim("de", DE_BUFFER, 0, layout.num_blocks(num_prompt_tokens)))
    claims.sort(key=lambda claim: node_of(claim.side))
    return claims
