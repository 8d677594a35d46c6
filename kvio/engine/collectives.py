"""Synthetic collectives beside KV: what the engines of an expert-parallel group exchange.

In each decode step an engine writes `nbytes` to every other engine of its group, `num_per_step`
times, each time waiting until all have arrived, as dispatch and combine of a layer do. The bytes
are real and checked; the group has connections of its own, as a collective library has. Unlike a
real one it has no barrier: no engine waits for another's step, only for its own bytes.
"""
import asyncio
from dataclasses import dataclass

import numpy as np

from kvio.engine.moves import drained
from kvio.errors import Busy, Closed, InvalidArgument, TransferError
from kvio.layout import WR_DTYPE, WRITE
from kvio.transfer import COLLECTIVE, Access, TrafficClass

__all__ = ["CollectiveSetting", "Collectives"]


@dataclass(frozen=True)
class CollectiveSetting:
    """Sizes of the exchanges, and the class that they travel in."""

    nbytes: int = 64 << 10          # to each other engine of the group
    num_per_step: int = 16
    traffic_class: TrafficClass = COLLECTIVE

    def __post_init__(self):
        if self.nbytes < 1 or self.num_per_step < 1:
            raise InvalidArgument("a collective has at least one byte, and a step one collective; "
                                  f"got nbytes={self.nbytes}, num_per_step={self.num_per_step}")


class _Member:
    """One engine's memory: what it sends, and a slot for what each of the others sends."""

    def __init__(self, index, engine, num_members, setting):
        self.engine, self.index = engine, index
        draw = np.random.default_rng(index)
        self.sent = draw.integers(0, 256, setting.nbytes, np.uint8)
        self.received = np.zeros((num_members, setting.nbytes), np.uint8)
        self.source = engine.nic.register(self.sent, Access(0))
        self.target = engine.nic.register(self.received,
                                          Access.LOCAL_WRITE | Access.REMOTE_WRITE)
        self.peers, self.writes = [], []
        self.latencies_s = []


class Collectives:
    """The exchanges of one group of engines, at least two, whose NICs listen at their names."""

    def __init__(self, setting: CollectiveSetting, engines):
        if len(engines) < 2:
            raise InvalidArgument("collectives need a group of two engines at least; raise "
                                  "num_decode")
        self.setting = setting
        self._members = [_Member(i, engine, len(engines), setting)
                         for i, engine in enumerate(engines)]
        self._exchanged = [False] * len(engines)
        for member in self._members:
            for other in self._members:
                if other is not member:
                    self._connect(member, other)

    def _connect(self, member, other):
        write = np.zeros(1, WR_DTYPE)
        write["opcode"], write["length"] = WRITE, self.setting.nbytes
        write["local_addr"], write["lkey"] = member.source.addr, member.source.key
        write["remote_addr"] = other.target.addr + member.index * self.setting.nbytes
        write["rkey"] = other.target.key
        member.writes.append(write)
        member.peers.append(member.engine.nic.connect(other.engine.name,
                                                      classes=[self.setting.traffic_class]))

    def lose(self, index: int) -> None:
        """Engine `index` has died: the others go on without it."""
        name = self._members[index].engine.name
        for member in self._members:
            kept = [i for i, peer in enumerate(member.peers) if peer.remote_name != name]
            member.peers = [member.peers[i] for i in kept]
            member.writes = [member.writes[i] for i in kept]

    def of(self, index: int):
        """What engine `index` of the group awaits in each of its steps."""
        member = self._members[index]

        async def step():
            for _ in range(self.setting.num_per_step):
                await self._exchange(member)
        return step

    async def _exchange(self, member):
        """One collective of one member: posted at once to all others, done when all have it."""
        if not member.peers:
            return                              # it is the last of its group
        work = asyncio.ensure_future(self._write(member))
        try:
            await asyncio.wait([work])
        finally:
            await drained([work])               # the NIC is closed after us, and has to be idle
        member.latencies_s.append(work.result())
        self._exchanged[member.index] = True

    async def _write(self, member):
        transfers = [peer.write(write, self.setting.traffic_class)
                     for peer, write in zip(member.peers, member.writes, strict=True)]
        ended = await asyncio.gather(*(_end(transfer) for transfer in transfers),
                                     return_exceptions=True)
        failures = [each for each in ended if isinstance(each, BaseException)]
        if failures:
            self._recover(member)
            raise failures[0]
        begin = min(transfer.stats["submitted_ns"] for transfer in transfers)
        return (max(ended) - begin) / 1e9

    def _recover(self, member):
        for peer in member.peers:
            try:
                peer.reset()
            except (Busy, Closed, TransferError):
                pass                            # the next exchange fails, and says why

    def take_latencies_s(self) -> list[float]:
        """Seconds of link time, from the doorbell to the last completion, of every exchange since
        this was last asked."""
        taken = [s for member in self._members for s in member.latencies_s]
        for member in self._members:
            member.latencies_s.clear()
        return taken

    def num_errors(self) -> int:
        """Slots that do not hold what their sender sends, of senders that have exchanged."""
        return sum(not np.array_equal(member.received[other.index], other.sent)
                   for member in self._members for other in self._members
                   if other is not member and self._exchanged[other.index])


async def _end(transfer):
    """When it had completed, ns."""
    await transfer
    return transfer.stats["completed_ns"]
