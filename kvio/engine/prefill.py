"""The prefill engine: layerwise, so that only a few layers of a request lie in its HBM.

"HBM" is host memory here, registered with the engine's own NIC as GPU memory would be; all KV
goes in and out through that NIC.
"""
import asyncio

import numpy as np

from kvio.engine.clock import now_s
from kvio.engine.node import Node
from kvio.layout import BlockLayout, Side
from kvio.loader import COMPUTE, RELEASE
from kvio.loader.mover import Place
from kvio.loader.plan import PE_HBM
from kvio.memory import POISON, Region
from kvio.pages import anonymous
from kvio.transfer import Access

__all__ = ["PrefillEngine", "Workspace"]


class Workspace:
    """The HBM of one prefill: `depth` slots, each one layer of a request of `max_tokens`."""

    def __init__(self, layout: BlockLayout, max_tokens: int, depth: int, nic):
        self.layout, self.depth = layout, depth
        per_token = max(layout.layer_bytes_per_token)
        self.slot_nbytes = layout.num_blocks(max_tokens) * layout.block_tokens * per_token
        self.max_tokens = max_tokens
        self.region = Region(anonymous(depth * self.slot_nbytes))
        self.key = nic.register(self.region, Access.LOCAL_WRITE).key

    def place(self) -> Place:
        """Blocks one after the other; the slot depends on the layer alone."""
        layout = self.layout
        offsets = tuple(layer % self.depth * self.slot_nbytes
                        for layer in range(layout.num_layers))
        return Place(Side(self.region.addr, layout.layer_block_nbytes(0), offsets, self.key))

    def slot(self, layer: int, num_tokens: int) -> np.ndarray:
        """A view: uint8 [num_tokens, bytes_per_token]."""
        start = layer % self.depth * self.slot_nbytes
        width = self.layout.layer_bytes_per_token[layer]
        return self.region.array[start:start + num_tokens * width].reshape(num_tokens, width)

    def poison(self, layer: int, num_tokens: int) -> None:
        """Make stale KV unusable before new bytes come in."""
        self.slot(layer, num_tokens)[:] = POISON


class PrefillEngine(Node):
    """One GPU's worth of prefill. Requests compute one after the other, in the order in which
    their data are there; the next one's first layers are fetched meanwhile."""

    def __init__(self, engine_id, node_id, name, layout, ring, nic, *, compute, buffer_blocks,
                 max_tokens, depth=2, num_workspaces=2):
        super().__init__(node_id, name, layout, ring, nic, buffer_blocks, Access.REMOTE_READ)
        self.engine_id, self.compute, self.depth = engine_id, compute, depth
        self._workspaces = asyncio.Queue()
        for _ in range(num_workspaces):
            self._workspaces.put_nowait(Workspace(layout, max_tokens, depth, nic))
        self._gpu = asyncio.Lock()
        self.num_requests = self.num_tokens = 0     # assigned and not yet prefilled


class Prefill:
    """One request's stay in a prefill engine. `close()` gives back whatever it still holds."""

    def __init__(self, engine: PrefillEngine, request, binding):
        self.engine, self.request, self.binding = engine, request, binding
        self.state = self.workspace = None
        self._has_gpu, self._entering = False, asyncio.Lock()
        self._ready = {}                            # layer -> when its last input was there

    async def before(self, step) -> None:
        """HBM is taken when the first step needs it, not while storage is being read."""
        if PE_HBM not in (step.source, step.target) or step.kind == RELEASE:
            return
        async with self._entering:
            if self.workspace is None:
                self.workspace = await self.engine._workspaces.get()
                self.binding.places[PE_HBM] = self.workspace.place()
        first_use = step.target == PE_HBM and (step.kind != COMPUTE or not
                                               self.request.num_hit_tokens)
        if first_use:
            self.workspace.poison(step.layer, self.request.num_prompt_tokens)

    def after(self, step) -> None:
        """Remember when the inputs of a layer were there."""
        if step.target == PE_HBM and step.kind != COMPUTE:
            self._ready[step.layer] = max(self._ready.get(step.layer, 0.0), now_s())

    async def compute(self, step) -> None:
        """One layer; after the last one the first token is there."""
        request, layer, compute = self.request, step.layer, self.engine.compute
        if layer == 0:
            await self.engine._gpu.acquire()
            self._has_gpu = True
            self.state = compute.begin_prefill(request.prompt, request.num_hit_tokens)
            self._computed_s = self._ready.get(0, now_s())
        slot = self.workspace.slot(layer, request.num_prompt_tokens)
        ready = max(self._computed_s, self._ready.get(layer, 0.0))
        self._computed_s = await compute.prefill_layer(self.state, layer, slot, ready)
        if layer == self.engine.layout.num_layers - 1:
            token, margin = await compute.first_token(self.state)
            request.add_token(token, margin)
            self._release_gpu()

    def release(self, step) -> None:
        """A RELEASE step of PE HBM: the plan is done with it."""
        self._release_workspace()

    def _release_gpu(self):
        if self._has_gpu:
            self._has_gpu = False
            self.engine._gpu.release()

    def _release_workspace(self):
        if self.workspace is not None:
            self.engine._workspaces.put_nowait(self.workspace)
            self.workspace = None

    def close(self) -> None:
        self._release_gpu()
        self._release_workspace()
