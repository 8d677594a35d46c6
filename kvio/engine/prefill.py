"""The prefill engine: layerwise, so that only a few layers of a batch lie in its HBM.

Its HBM (host memory, or a GPU's: `hbm`) is registered with the engine's own NIC; all KV goes in and
out through that NIC.
"""
import asyncio

from kvio.engine.batches import Batches
from kvio.engine.clock import now_s
from kvio.engine.hbm import HostHbm, Slot
from kvio.engine.moves import drained
from kvio.engine.node import Node
from kvio.errors import InvalidArgument
from kvio.layout import BlockLayout, Side
from kvio.loader import COMPUTE, RELEASE, Binding, chunk_steps, run_plan
from kvio.loader.mover import Place
from kvio.loader.plan import DE_BUFFER, PE_HBM
from kvio.memory import Region
from kvio.transfer import Access

__all__ = ["Prefill", "PrefillEngine", "Workspace"]


class Workspace:
    """The HBM of one batch: `depth` slots, each one layer of `max_tokens` tokens, which the chunks
    of the batch take from the beginning on and give back together. It lies in `memory`."""

    def __init__(self, layout: BlockLayout, max_tokens: int, depth: int, nic, access: Access,
                 memory):
        self.layout, self.depth, self._memory = layout, depth, memory
        self.num_blocks = layout.num_blocks(max_tokens)
        self.slot_nbytes = self.num_blocks * layout.block_tokens * max(layout.layer_bytes_per_token)
        self.region = Region(self._memory.allocate(depth * self.slot_nbytes))
        self.key = nic.register(self.region, access).key
        self.num_taken = self.most_taken = 0

    def take(self, num_blocks: int) -> int | None:
        """The first of that many blocks, one after the other; None if there are too few."""
        first = self.num_taken
        if first + num_blocks > self.num_blocks:
            return None
        self.num_taken += num_blocks
        self.most_taken = max(self.most_taken, self.num_taken)
        return first

    def clear(self) -> None:
        """The batch is over: nothing touches its blocks any more."""
        self.num_taken = 0

    def place(self, first: int) -> Place:
        """Blocks from `first` on, one after the other; the slot depends on the layer alone."""
        layout = self.layout
        offsets = tuple(self._start(layer, first) for layer in range(layout.num_layers))
        return Place(Side(self.region.addr, layout.layer_block_nbytes(0), offsets, self.key))

    def slot(self, layer: int, first: int, num_tokens: int) -> Slot:
        """A layer of the tokens whose blocks begin with `first`."""
        return Slot(self._memory, self.region, self._start(layer, first), num_tokens,
                    self.layout.layer_bytes_per_token[layer])

    def _start(self, layer, first):
        return layer % self.depth * self.slot_nbytes + first * self.layout.layer_block_nbytes(layer)


class PrefillEngine(Node):
    """One GPU's worth of prefill: `batches` says who computes when.

    PE HBM is `num_workspaces` batches of `batch_tokens` each (hits and earlier chunks included;
    None: `max_tokens`, the longest request), `depth` layers of them. `quota_s`, `attention_time`:
    as in `Batches`. `pushed`: others write into this HBM. `memory`: where it is, see `hbm`.
    """

    def __init__(self, engine_id, node_id, name, layout, ring, nic, *, compute, buffer_blocks,
                 max_tokens, depth=2, num_workspaces=2, batch_tokens=None, quota_s=None,
                 attention_time=None, pushed=False, memory=None):
        super().__init__(node_id, name, layout, ring, nic, buffer_blocks, Access.REMOTE_READ)
        self.engine_id, self.compute, self.depth = engine_id, compute, depth
        batch_tokens = max_tokens if batch_tokens is None else batch_tokens
        own_time = getattr(compute, "attention_time", None)
        attention_time = attention_time or own_time
        if batch_tokens < max_tokens:
            raise InvalidArgument(f"batch_tokens {batch_tokens} would not hold a request of "
                                  f"max_tokens {max_tokens}: raise it")
        if quota_s is not None and attention_time is None:
            raise InvalidArgument("a compute quota needs attention_time(cached, new), in seconds: "
                                  "fit one from measurements")
        access = Access.LOCAL_WRITE | (Access.REMOTE_WRITE if pushed else Access(0))
        self.memory = HostHbm() if memory is None else memory
        self.workspaces = [Workspace(layout, batch_tokens, depth, nic, access, self.memory)
                           for _ in range(num_workspaces)]
        self.batches = Batches(layout, self.workspaces, quota_s, attention_time, own_time)
        self.num_requests = self.num_tokens = 0     # assigned and not yet prefilled

    @property
    def batch_attention_s(self) -> list:
        """The attention time of each batch so far, in order: the compute's, where it knows."""
        return [record.attention_s for record in self.batches.records]


class Prefill:
    """One request's stay in a prefill engine, a job of its `batches`: `await run()` once its parts
    lie in the buffers. `move(step, binding)` carries out a NIC step, `release(place)` gives a
    buffer back. Afterwards all its tokens' KV is in the DE buffer and the first token is there;
    whatever happens, nothing of it touches PE HBM any more."""

    def __init__(self, engine: PrefillEngine, request, parts, push, binding, move, release):
        self.engine, self.request, self.binding = engine, request, binding
        self.parts, self.push, self._move, self._release = parts, push, move, release
        self.request_id, self.num_tokens = request.request_id, request.num_prompt_tokens
        self.num_cached_tokens = request.num_hit_tokens
        self.chunks, self._tasks, self._ended = [], [], None

    async def run(self) -> None:
        """Until the last chunk is computed and sent; the first error of any chunk."""
        batches = self.engine.batches
        self._ended = asyncio.get_running_loop().create_future()
        try:
            batches.join(self)
            await self._ended
        finally:
            batches.leave(self)
            for chunk, task in zip(self.chunks, self._tasks, strict=True):
                if not task.done():
                    batches.give_up(chunk, asyncio.CancelledError())
                    task.cancel()
            await drained(self._tasks)
            self.chunks.clear()                     # no cycle that keeps HBM alive
            self._tasks.clear()

    def begin(self, chunk) -> None:
        """Called by `batches`: the chunk has its HBM."""
        self.chunks.append(chunk)
        task = asyncio.ensure_future(_Stay(self, chunk).run())
        self._tasks.append(task)
        task.add_done_callback(lambda task: self._over(task, chunk))

    def fail(self, error) -> None:
        """Called by `batches`: it cannot be put into a batch."""
        if not self._ended.done():
            self._ended.set_exception(error)

    def _over(self, task, chunk):
        """Here, because a task that is cancelled before it begins does not even end."""
        failure = asyncio.CancelledError() if task.cancelled() else task.exception()
        if failure is not None:
            self.engine.batches.give_up(chunk, failure)
        self.engine.batches.finish(chunk)
        if self._ended.done():
            return
        if task.cancelled():
            self._ended.cancel()
        elif failure is not None:
            self._ended.set_exception(failure)
        elif chunk.last:
            self._ended.set_result(None)


class _Stay:
    """A chunk in PE HBM."""

    def __init__(self, job: Prefill, chunk):
        self.job, self.chunk, self.engine = job, chunk, job.engine
        self.workspace = chunk.batch.workspace
        self.binding = Binding(job.binding.keys, {
            **job.binding.places, PE_HBM: self.workspace.place(chunk.first_block)})
        self._state, self._computed_s = None, chunk.made_s
        self._ready, self._clean = {}, set()        # layer -> when its last input was there
        self._cleaning = asyncio.Lock()

    async def run(self):
        job = self.job
        steps = chunk_steps(self.engine.layout, job.parts, job.request.num_hit_tokens,
                            self.chunk.tokens, self.engine.depth, push=job.push,
                            last=self.chunk.last)
        await run_plan(steps, self._perform)

    async def _perform(self, step):
        try:
            if step.kind == COMPUTE:
                await self._compute(step.layer)
            elif step.kind == RELEASE:
                if step.source != PE_HBM:
                    self.job._release(step.source)
            else:
                await self._step(step)
        except BaseException as failed:
            self.engine.batches.give_up(self.chunk, failed)     # those in its way need not wait
            raise

    async def _step(self, step):
        computed_before = step.source == DE_BUFFER and \
            step.tokens[0] >= self.job.request.num_hit_tokens
        if computed_before:
            await self.chunk.previous.sent[step.layer]
        if step.target == PE_HBM:
            await self._clear(step.layer)
        await self.job._move(step, self.binding)
        if step.target == PE_HBM:
            self._ready[step.layer] = max(self._ready.get(step.layer, 0.0), now_s())
        elif not self.chunk.gone:
            self.chunk.sent[step.layer].set_result(None)

    async def _clear(self, layer):
        """Stale KV is made unusable before the first new bytes of a layer come in, whoever of
        several brings them."""
        async with self._cleaning:
            if layer not in self._clean:
                await self._slot(layer).poison()
                self._clean.add(layer)

    def _slot(self, layer):
        return self.workspace.slot(layer, self.chunk.first_block, self.chunk.tokens[1])

    async def _compute(self, layer):
        """One layer; after the last one of the last chunk the first token is there."""
        request, compute, (start, stop) = self.job.request, self.engine.compute, self.chunk.tokens
        await self.engine.batches.turn(self.chunk, layer)
        try:
            await self._clear(layer)                # a layer without inputs
            if layer == 0:
                self._state = compute.begin_prefill(request.prompt[:stop], start)
            ready = max(self._computed_s, self._ready.get(layer, 0.0))
            self._computed_s = await compute.prefill_layer(self._state, layer, self._slot(layer),
                                                           ready)
            if layer == self.engine.layout.num_layers - 1 and self.chunk.last \
                    and not request.generated:      # after another try it is there already
                request.add_token(*await compute.first_token(self._state))
        finally:
            self.engine.batches.computed(self.chunk)
