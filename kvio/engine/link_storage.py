"""Storage in link time: each storage NIC is a soft NIC, and the storage behind it has no limit.

For runs by `run_in_link_time`, whose figures must not depend on a disk or on the machine: blocks
lie in memory, and go from and to a node's buffer over that node's own paced soft NIC, on the
fabric and in the time of everything else. What the engines use of a `BlockStore` is the same.
"""
import errno
import functools
import weakref

import numpy as np

from kvio.engine.clock import now_s
from kvio.errors import InvalidArgument, OutOfBlocks, TransferError
from kvio.layout import READ, WRITE, BlockLayout, LayerDescriptors, Side
from kvio.memory import BlockPool
from kvio.storage.ring import ReadQueue
from kvio.transfer import KV, Access, Fabric, Nic

__all__ = ["LinkRing", "LinkStore"]

_PIECE = 16                     # blocks a batch: so fine do queue and windows follow the link
_WINDOW_NS = 10**9
_NAME = "storage"


class LinkStore:
    """`num_blocks` Full Blocks in memory, by their keys, on `fabric`."""

    backend = "link time"

    def __init__(self, layout: BlockLayout, fabric: Fabric, num_blocks: int):
        self.layout, self.fabric = layout, fabric
        self.pool, self._slots = BlockPool(layout, num_blocks), {}
        self._nic = Nic.open("soft", name=_NAME, fabric=fabric)
        self._nic.listen(_NAME)
        region = self._nic.register(
            self.pool, Access.REMOTE_READ | Access.REMOTE_WRITE | Access.LOCAL_WRITE)
        self.side = _whole(self.pool.side(region.key))

    def __len__(self):
        return len(self._slots)

    def match(self, keys) -> int:
        """How many of the keys are here, from the first on, without a gap."""
        for count, key in enumerate(keys["key"]):
            if key.tobytes() not in self._slots:
                return count
        return len(keys)

    def slots(self, keys) -> np.ndarray:
        """Where the first `match(keys)` blocks lie: int64."""
        return np.array([self._slots[key.tobytes()] for key in keys["key"][:self.match(keys)]],
                        np.int64)

    def put(self, keys, slots) -> None:
        """These blocks are here now; a slot whose block was here already is free."""
        for key, slot in zip(keys["key"], slots, strict=True):
            if self._slots.setdefault(key.tobytes(), int(slot)) != slot:
                self.pool.free(np.array([slot], np.int64))

    def prime(self, keys, fill) -> None:
        """Have blocks here in no time; `fill(i, block)` writes block i, uint8 [layers, ...]."""
        slots = self.pool.alloc(len(keys))
        try:
            for i, slot in enumerate(slots):
                fill(i, self.pool.full(slot))
        except BaseException:
            self.pool.free(slots)
            raise
        self.put(keys, slots)

    def open_ring(self, *, read_bytes_per_s: int = 0, write_bytes_per_s: int = 0,
                  name: str = "ring") -> "LinkRing":
        """A storage NIC. A soft NIC has one rate, so both must be the same."""
        if read_bytes_per_s != write_bytes_per_s:
            raise InvalidArgument("in link time a storage NIC reads and writes at one rate, not "
                                  f"{read_bytes_per_s} and {write_bytes_per_s} bytes/s")
        return LinkRing(self, name, read_bytes_per_s)

    def close(self) -> None:
        self._nic.close()
        self.pool.close()


class LinkRing:
    """What the engines use of a `Ring`: one storage NIC. Batches pass it one after the other."""

    def __init__(self, store: LinkStore, name: str, bytes_per_s: int):
        self.store, self.name, self._queued = store, name, {READ: 0, WRITE: 0}
        self._nic = Nic.open("soft", name=f"snic:{name}", fabric=store.fabric,
                             bytes_per_s=bytes_per_s)
        # Two queue pairs: in one, a read would wait until all writes before it have been sent.
        self._peers = {opcode: self._nic.connect(_NAME, classes=[KV]) for opcode in (READ, WRITE)}
        self._sides, self._flat = weakref.WeakKeyDictionary(), _one_layer(store.layout)
        self._nbytes = {READ: 0, WRITE: 0}
        self._spans = {READ: [], WRITE: []}     # (begin, end, bytes) of batches, in seconds

    async def read(self, keys, pool, block_ids) -> int:
        """Blocks into the pool; how many of the first ones were here."""
        slots = self.store.slots(keys)
        await self._move(READ, pool, block_ids[:len(slots)], slots)
        return len(slots)

    async def write(self, keys, pool, block_ids) -> None:
        """Blocks out of the pool; they are here once it is over. TransferError (ENOSPC) when the
        store is full. The slots of a write that fails stay taken: a late packet may still come."""
        try:
            slots = self.store.pool.alloc(len(keys))
        except OutOfBlocks as full:
            raise TransferError(errno.ENOSPC, f"the store in link time is full: {full}") from None
        await self._move(WRITE, pool, block_ids, slots)
        self.store.put(keys, slots)

    async def _move(self, opcode, pool, ids, slots):
        ids = np.array(ids, np.int64)               # the caller's may change
        begin, posted, left = now_s(), [], len(slots)
        self._queued[opcode] += left
        for first in range(0, len(slots), _PIECE):
            piece = slice(first, first + _PIECE)
            work = LayerDescriptors(
                opcode, self._flat, self._side(pool), np.ascontiguousarray(ids[piece]),
                self.store.side, np.ascontiguousarray(slots[piece]),
                len(slots[piece]) * self._flat.block_tokens)
            pool.pin(ids[piece])
            posted.append((len(slots[piece]), self._peers[opcode].post(
                work, on_drain=functools.partial(pool.unpin, ids[piece]))))
        try:
            for count, transfer in posted:
                await transfer
                self._note(opcode, begin, count)
                left -= count
        finally:
            self._queued[opcode] -= left            # given up: nobody waits for it

    def _note(self, opcode, begin, count):
        nbytes, spans = count * self._flat.full_block_nbytes, self._spans[opcode]
        self._nbytes[opcode] += nbytes
        spans.append((max(begin, spans[-1][1] if spans else 0.0), now_s(), nbytes))
        self._queued[opcode] -= count

    def _side(self, pool):
        """The pool is registered with this NIC when it is first used."""
        if pool not in self._sides:
            region = self._nic.register(pool, Access.LOCAL_WRITE)
            self._sides[pool] = _whole(pool.side(region.key))
        return self._sides[pool]

    @property
    def read_queue(self) -> ReadQueue:
        """Reads that are outstanding."""
        layout, queued = self.store.layout, self._queued[READ]
        return ReadQueue(queued * layout.full_block_nbytes, queued * layout.block_tokens)

    def stats(self) -> dict:
        """As `Ring.stats`, in link time."""
        return {"read_bytes": self._nbytes[READ], "write_bytes": self._nbytes[WRITE],
                "read_busy_ns": self._busy_ns(READ), "write_busy_ns": self._busy_ns(WRITE),
                "name": self.name}

    def _busy_ns(self, opcode):
        return round(1e9 * sum(end - begin for begin, end, _ in self._spans[opcode]))

    def busy_windows(self, direction: str = "read"):
        """As `Ring.busy_windows`; a batch's bytes are spread over the time that it took."""
        spans = self._spans[WRITE if direction == "write" else READ]
        last = int(spans[-1][1] * 1e9) // _WINDOW_NS if spans else -1
        table = np.zeros(last + 1)
        for begin, end, nbytes in spans:
            edges = np.clip(np.arange(last + 2) * (_WINDOW_NS / 1e9), begin, end)
            table += nbytes * np.diff(edges) / max(end - begin, 1e-12)
        return 0, _WINDOW_NS, table

    def close(self, *, cancel: bool = False) -> None:
        """`cancel`: what is in flight fails."""
        if cancel:
            self._nic.fail()
        self._nic.close(cancel=cancel)


def _one_layer(layout):
    """A Full Block as if it were one Layer Block."""
    return BlockLayout(1, layout.block_tokens, sum(layout.layer_bytes_per_token))


def _whole(side):
    return Side(side.base, side.block_stride, (0,), side.key)
