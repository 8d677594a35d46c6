"""Carries out the moves of a plan for one request, on the rings and NICs it is given."""
from dataclasses import dataclass, field

import numpy as np

from kvio.errors import BlocksMissing, Closed
from kvio.layout import READ, WRITE, BlockLayout, LayerDescriptors, Side
from kvio.loader.plan import DE_HBM, NIC_READ, STORAGE_READ, STORAGE_WRITE, Step, side_of

__all__ = ["Binding", "Mover", "Place"]


@dataclass(frozen=True)
class Place:
    """Where a request's blocks lie at one place: block i of the request is block `ids[i]` of the
    side (None: block i itself). `pool` pins them while they are moved, where there is one."""

    side: Side
    ids: np.ndarray | None = None
    pool: object = None


@dataclass
class Binding:
    """What the places of a plan mean for one request. `keys` are its block keys (KEY_DTYPE);
    `descriptors` is the mover's: what it has built for this request."""

    keys: np.ndarray
    places: dict = field(default_factory=dict)      # name -> Place
    descriptors: dict = field(default_factory=dict, repr=False)


class Mover:
    """Storage and NIC steps of one pair of engines.

    `rings` maps a side to the ring of its node's storage NIC; `peers` maps (initiator, other) to
    the NIC peer of that direction, ("pe", "pe") and ("de", "de") being loop-back. Every move posts
    one batch: one doorbell, one completion; where the far blocks lie one after the other, a work
    request gathers up to `max_sge` of them. All goes in `traffic_class` (None: the peer's own),
    what decode sends on its way to storage in `persist_class`.
    """

    def __init__(self, layout: BlockLayout, rings: dict, peers: dict, traffic_class=None, *,
                 persist_class=None, max_sge: int = 1):
        self.layout, self.rings, self.peers, self._max_sge = layout, rings, peers, max_sge
        self._options = {} if traffic_class is None else {"traffic_class": traffic_class}
        self._persist = self._options if persist_class is None else {
            "traffic_class": persist_class}

    async def perform(self, step: Step, binding: Binding) -> None:
        """Carry out a storage or NIC step; returns once it has drained."""
        if step.kind == STORAGE_READ:
            await self._read(step, binding)
        elif step.kind == STORAGE_WRITE:
            first, stop = self._blocks(step)
            place = binding.places[step.source]
            await self.rings[step.side].write(binding.keys[first:stop], place.pool,
                                              place.ids[first:stop])
        else:
            await self._post(step, binding)

    async def _read(self, step, binding):
        first, stop = self._blocks(step)
        place = binding.places[step.target]
        usable = await self.rings[step.side].read(binding.keys[first:stop], place.pool,
                                                  place.ids[first:stop])
        if usable < stop - first:
            raise BlocksMissing(f"{usable} of {stop - first} matched blocks could be read; the "
                                "others were removed or are damaged", first + usable)

    async def _post(self, step, binding):
        source, target = binding.places[step.source], binding.places[step.target]
        reads = step.kind == NIC_READ
        peer = self.peers[step.side, side_of(step.source if reads else step.target)]
        local, remote = (target, source) if reads else (source, target)
        descriptors = self._descriptors(step, binding, READ if reads else WRITE, local, remote)
        pinned = []

        def unpin():
            while pinned:
                pool, ids = pinned.pop()
                pool.unpin(ids)

        try:
            for place in (local, remote):
                if place.pool is not None:
                    place.pool.pin(self._ids(place, step))
                    pinned.append((place.pool, self._ids(place, step)))
        except BaseException:
            unpin()
            raise
        post = peer.read if reads else peer.write
        options = self._persist if step.source == DE_HBM else self._options
        await post(descriptors, on_drain=unpin, **options)

    def recover(self) -> None:
        """After a failed move: queue pairs in error work again, unless something is in flight on
        them (then whoever fails next tries again) or the other end is gone."""
        for peer in self.peers.values():
            try:
                peer.reset()
            except (Closed, OSError):
                pass

    def _descriptors(self, step, binding, opcode, local, remote):
        """Built for the first layer of a move, then pointed from layer to layer."""
        key = step.source, step.target, step.tokens
        built = binding.descriptors.get(key)
        if built is None:
            built = binding.descriptors[key] = LayerDescriptors(
                opcode, self.layout, local.side, self._ids(local, step), remote.side,
                self._ids(remote, step), step.tokens[1] - step.tokens[0], step.layer,
                max_sge=self._max_sge if remote.ids is None else 1)
        return built.layer(step.layer)

    def _blocks(self, step):
        tokens = self.layout.block_tokens
        return step.tokens[0] // tokens, -(-step.tokens[1] // tokens)

    def _ids(self, place, step):
        first, stop = self._blocks(step)
        if place.ids is None:
            return None if first == 0 else np.arange(first, stop, dtype=np.int64)
        return place.ids[first:stop]
