"""A node of the embedded cluster: one storage NIC, one DRAM buffer, one engine with its NIC."""
import asyncio
from collections import deque

import numpy as np

from kvio.errors import InvalidArgument, OutOfBlocks
from kvio.layout import BlockLayout
from kvio.loader.mover import Place
from kvio.memory import BlockPool
from kvio.transfer import Access

__all__ = ["Buffer", "Node"]


class Buffer:
    """A DRAM buffer of Full Blocks that requests wait for, first come first served.

    All blocks of a request are taken at once, so two requests never hold half of what each needs.
    """

    def __init__(self, pool: BlockPool):
        self.pool, self._waiting = pool, deque()

    async def acquire(self, num_blocks: int) -> np.ndarray:
        """Block ids; InvalidArgument if the buffer could never hold that many."""
        if num_blocks > self.pool.num_blocks:
            raise InvalidArgument(f"a request needs {num_blocks} blocks of a buffer that has "
                                  f"{self.pool.num_blocks}: enlarge the buffer")
        if not self._waiting:
            try:
                return self.pool.alloc(num_blocks)
            except OutOfBlocks:
                pass
        turn = asyncio.get_running_loop().create_future()
        entry = num_blocks, turn
        self._waiting.append(entry)
        try:
            return await turn
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif turn.done() and not turn.cancelled():
                self.release(turn.result())         # granted and cancelled in the same instant
            raise
        finally:
            self._grant()

    def release(self, ids: np.ndarray) -> None:
        """Give blocks back and let the next requests have theirs."""
        self.pool.free(ids)
        self._grant()

    def regrant(self) -> None:
        """Blocks that were released while a device still used them have become free."""
        self._grant()

    def _grant(self):
        while self._waiting:
            num_blocks, turn = self._waiting[0]
            if turn.cancelled():                    # and its task has not heard of it yet
                self._waiting.popleft()
                continue
            try:
                ids = self.pool.alloc(num_blocks)
            except OutOfBlocks:
                return
            self._waiting.popleft()
            turn.set_result(ids)


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
    def lend_tokens(self) -> int:
        """What the buffer has for other nodes' requests: free, and no request waits for it."""
        free = self.buffer.pool.num_free - self.wanted_blocks
        return max(0, free) * self.layout.block_tokens
