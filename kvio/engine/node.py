"""A node of the embedded cluster: one storage NIC, one DRAM buffer, one engine with its NIC."""
import asyncio

import numpy as np

from kvio.layout import BlockLayout
from kvio.loader.admission import Budget
from kvio.loader.mover import Place
from kvio.memory import BlockPool
from kvio.transfer import Access

__all__ = ["Buffer", "Node"]


class Buffer:
    """A DRAM buffer of Full Blocks that requests wait for: a `Budget` and the blocks themselves.

    Blocks that a transfer still touches are free only when it has drained, and `regrant` is called.
    """

    def __init__(self, pool: BlockPool):
        self.pool, self._budget = pool, Budget.of(pool.num_blocks)
        self.num_most_held = 0                      # ever

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks."""
        return len(self._budget.waiting)

    async def acquire(self, num_blocks: int) -> np.ndarray:
        """Block ids; InvalidArgument if the buffer could never hold that many."""
        turn = asyncio.get_running_loop().create_future()
        turn.num_blocks = num_blocks
        self._let_in(self._budget.ask(turn, num_blocks))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(turn.result())         # granted and cancelled in the same instant
            else:
                self._let_in(self._budget.withdraw(turn))
            raise

    def release(self, ids: np.ndarray) -> None:
        """Give blocks back and let the next requests have theirs."""
        self.pool.free(ids)
        self.regrant()

    def regrant(self) -> None:
        """What a device still used when it was released may have become free since."""
        self._let_in(self._budget.give_back(max(0, self.pool.num_free - self._budget.free)))

    def _let_in(self, answer):
        self._budget, owners = answer
        for turn in owners:
            if turn.cancelled():                    # and its task has not heard of it yet
                self._let_in(self._budget.give_back(turn.num_blocks))
            else:
                turn.set_result(self.pool.alloc(turn.num_blocks))
        self.num_most_held = max(self.num_most_held, self._budget.capacity - self._budget.free)


class Node:
    """What both kinds of engines have: `ring` (the storage NIC), `nic` (the compute NIC), and a
    `buffer` registered with both, `access` being what its NIC and others may do there.
    `waiting_read_tokens` are reads that wait for a buffer. `node_id` is the node's place in the
    order in which buffers are taken."""

    def __init__(self, node_id: int, name: str, layout: BlockLayout, ring, nic,
                 buffer_blocks: int, access: Access):
        self.node_id, self.name, self.layout, self.ring, self.nic = node_id, name, layout, ring, nic
        self.buffer = Buffer(BlockPool(layout, buffer_blocks, poison=True))
        self.buffer_key = nic.register(self.buffer.pool, access).key
        self.waiting_read_tokens = 0
        self.wanted_blocks = 0          # of the buffer, by requests that wait for them

    @property
    def read_queue_tokens(self) -> int:
        """Tokens that the storage NIC has still to read, queued or waiting for memory."""
        return self.ring.read_queue.tokens + self.waiting_read_tokens

    def buffer_place(self, ids: np.ndarray) -> Place:
        """The node's buffer as a place of a plan."""
        return Place(self.buffer.pool.side(self.buffer_key), ids, self.buffer.pool)

    @property
    def free_buffer_tokens(self) -> int:
        """What the buffer has for further requests: free, and no request waits for it."""
        free = self.buffer.pool.num_free - self.wanted_blocks
        return max(0, free) * self.layout.block_tokens
