"""Moves that end when no byte of them can land any more, whatever has become of them."""
import asyncio

from kvio.errors import Busy, Closed, TransferError
from kvio.loader import NIC_WRITE
from kvio.loader.plan import side_of

__all__ = ["drained", "move"]

FENCE_S = 0.0005            # between two looks at a queue pair that has failed


async def move(mover, step, binding) -> None:
    """Carry out a step; returns, or raises, once its memory may be given to others.

    A read that has failed is over: its queue pair drops late answers. Packets of a WRITE may still
    be under way, but not past a queue pair that was reset on both ends, or has gone.
    """
    try:
        await mover.perform(step, binding)
    except TransferError:
        if step.kind == NIC_WRITE:
            peer = mover.peers.get((step.side, side_of(step.target)))
            await drained([asyncio.ensure_future(_reset(peer))])
        raise


async def _reset(peer):
    while peer is not None:
        try:
            return peer.reset()
        except Busy:                                # what others have on it has still to flush
            await asyncio.sleep(FENCE_S)
        except (Closed, OSError):
            return


async def drained(tasks):
    """Tasks that have begun to move a block end before its memory is given to anyone else."""
    for task in tasks:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
