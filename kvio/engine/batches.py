"""Which requests are prefilled together, and whose turn it is on the engine's one stream.

Requests are ready once all their parts lie in the buffers. They form batches first in, first out:
as many as `pack_prefill` lets into a compute quota and as the PE HBM of a batch holds, the last
one possibly cut into a *chunk*; what is left of it stays at the head. Within a batch a layer of
all members is computed before the next layer; batches compute in the order in which they were
formed. While one computes, the next one's first layers are fetched, and until its own computing
begins it takes further requests in: so its HBM fills as late as it can without the stream waiting.

This is bookkeeping: who moves and computes asks here for leave (`Batches.turn`) and says what is
over (`computed`, `finish`).
"""
import asyncio
from collections import deque
from dataclasses import dataclass, field

from kvio.engine.clock import now_s
from kvio.errors import InvalidArgument
from kvio.scheduler import PrefillWork, pack_prefill

__all__ = ["Batch", "BatchRecord", "Batches", "Chunk"]

_LOOK_AHEAD = 64            # ready requests that are looked at at once


@dataclass(frozen=True)
class BatchRecord:
    """What a batch was: when it computed (now_s), and its attention time (None where nobody says
    one). Chunks that failed are not counted."""

    begin_s: float
    end_s: float
    num_chunks: int
    num_cached_tokens: int
    num_new_tokens: int
    attention_s: float | None


class Chunk:
    """Tokens [start, stop) of a job, computed in one batch. Its HBM begins with block
    `first_block` of the batch's workspace. `sent[layer]` is done once the layer's KV lies in the
    DE buffer, for the chunk that follows."""

    def __init__(self, job, batch, tokens, first_block, num_layers, attention_s):
        self.job, self.batch, self.tokens, self.first_block = job, batch, tokens, first_block
        self.attention_s = attention_s
        self.previous = job.chunks[-1] if job.chunks else None
        self.last = tokens[1] == job.num_tokens
        self.why = None                         # why it was given up
        self.made_s = now_s()
        loop = asyncio.get_running_loop()
        self.sent = [loop.create_future() for _ in range(num_layers)]
        self._turn = None

    @property
    def gone(self) -> bool:
        """It was given up: it computes no more."""
        return self.why is not None

    @property
    def work(self) -> PrefillWork:
        """As `pack_prefill` knows it."""
        return PrefillWork(self.job.request_id, self.tokens[0], self.tokens[1] - self.tokens[0])


@dataclass(eq=False)
class Batch:
    """Chunks that compute together, in the HBM of `workspace`."""

    workspace: object
    chunks: list = field(default_factory=list)
    open: bool = True                   # it takes further chunks: its computing has not begun
    num_finished: int = 0               # chunks that touch HBM no more
    begin_s: float = 0.0
    layer: int = 0                      # whose turn is next: chunk `at` in this layer
    at: int = 0

    def next(self, num_layers: int):
        """(chunk, layer) that computes next; None: all is computed."""
        while self.layer < num_layers:
            while self.at < len(self.chunks):
                if not self.chunks[self.at].gone:
                    return self.chunks[self.at], self.layer
                self.at += 1
            self.layer, self.at = self.layer + 1, 0
        return None


class Batches:
    """The batches of one prefill engine. `workspaces` are HBM, one for each batch that is being
    computed or fetched. `quota_s` None: one whole request a batch. `attention_time` predicts for
    the quota, `taken_time` says for the records what it took; both (cached, new) -> seconds.

    A job has `request_id`, `num_cached_tokens` (with KV, or about to be computed), `num_tokens`,
    its `chunks` so far, `begin(chunk)`, which is called once for each, and `fail(error)`.
    """

    def __init__(self, layout, workspaces, quota_s=None, attention_time=None, taken_time=None):
        self.layout, self._free = layout, list(workspaces)
        self.quota_s, self.attention_time = quota_s, attention_time
        self._taken_time = taken_time or attention_time
        self._num_blocks = min(workspace.num_blocks for workspace in workspaces)
        self.records = []                       # a BatchRecord for each that has computed
        self._ready, self._order = deque(), deque()
        self._computing = None                  # the chunk that has the stream

    @property
    def num_ready(self) -> int:
        """Jobs that wait for a batch, what is left of cut ones included."""
        return len(self._ready)

    def join(self, job) -> None:
        """All that the job needs lies in the buffers. InvalidArgument if no batch could hold it."""
        num_blocks = self.layout.num_blocks(job.num_tokens)
        if num_blocks > self._num_blocks:
            raise InvalidArgument(f"request {job.request_id} needs {num_blocks} blocks of PE HBM, "
                                  f"a batch has {self._num_blocks}: raise batch_tokens")
        self._ready.append(job)
        self._fill()

    def leave(self, job) -> None:
        """No further chunks of the job; idempotent."""
        if job in self._ready:
            self._ready.remove(job)
            self._fill()

    async def turn(self, chunk: Chunk, layer: int) -> None:
        """The inputs of the chunk's layer are there: wait until the stream comes to it. Fails once
        the chunk is given up."""
        if chunk.gone:
            raise chunk.why
        chunk._turn = layer, asyncio.get_running_loop().create_future()
        self._grant()
        await chunk._turn[1]

    def computed(self, chunk: Chunk) -> None:
        """The layer that the chunk had its turn for is computed (or has failed)."""
        self._computing, chunk._turn = None, None
        chunk.batch.at += 1
        self._grant()

    def give_up(self, chunk: Chunk, why: BaseException) -> None:
        """The chunk has failed: it takes no turns any more, and the chunk after it fails as well;
        idempotent."""
        if chunk.gone:
            return
        chunk.why = why
        for future in chunk.sent:
            _fail(future, why)
        if chunk._turn is not None and self._computing is not chunk:
            _fail(chunk._turn[1], why)
        self._grant()

    def finish(self, chunk: Chunk) -> None:
        """Nothing touches the chunk's HBM any more."""
        chunk.batch.num_finished += 1
        self._release(chunk.batch)

    # ---- forming batches

    def _fill(self):
        """Ready jobs into the batch that is open, and into new ones while there is HBM."""
        while self._ready:
            batch = self._order[-1] if self._order and self._order[-1].open else None
            try:
                if batch is not None and self._add(batch):
                    continue
                if not self._free:
                    return
                self._order.append(Batch(self._free.pop()))
                self._add(self._order[-1])
            except Exception as failed:             # of attention_time, which is not ours
                self._ready.popleft().fail(failed)

    def _add(self, batch):
        """Chunks of the first ready jobs, as many as go; False if none does."""
        members = [chunk for chunk in batch.chunks if not chunk.gone]
        if members and (self.quota_s is None or not members[-1].last):
            return False                            # it was cut: the quota is used up
        works = [chunk.work for chunk in members]
        for job, _ in zip(self._ready, range(1 if self.quota_s is None else _LOOK_AHEAD)):
            works.append(PrefillWork(job.request_id, job.num_cached_tokens,
                                     job.num_tokens - job.num_cached_tokens))
        try:
            taken = self._pack(works)[len(members):]
        except Exception:                           # because of which one? if of the first, of it
            taken = self._pack(works[:len(members) + 1])[len(members):]
        before = len(batch.chunks)
        for _, num_new in taken:
            job = self._ready[0]
            start = job.num_cached_tokens
            taken_s = None if self._taken_time is None else self._taken_time(start, num_new)
            first = batch.workspace.take(self.layout.num_blocks(start + num_new))
            if first is None:
                break                               # it begins the next batch
            chunk = Chunk(job, batch, (start, start + num_new), first, self.layout.num_layers,
                          taken_s)
            batch.chunks.append(chunk)
            job.num_cached_tokens = start + num_new
            if chunk.last:
                self._ready.popleft()
            job.begin(chunk)
        return len(batch.chunks) > before

    def _pack(self, works):
        return pack_prefill(works, self.quota_s,
                            None if self.quota_s is None else self.attention_time)

    # ---- the stream

    def _grant(self):
        """Let the next layer be computed, if its inputs are there and the stream is free."""
        while self._computing is None and self._order:
            batch = self._order[0]
            turn = batch.next(self.layout.num_layers)
            if turn is None:
                self._order.popleft()
                self._note(batch)
                self._close(batch)
                continue
            chunk, layer = turn
            if chunk._turn is None or chunk._turn[0] != layer or chunk._turn[1].done():
                return
            self._computing = chunk
            chunk._turn[1].set_result(None)
            if batch.open:
                batch.begin_s = now_s()
                self._close(batch)

    def _close(self, batch):
        batch.open = False
        self._release(batch)
        self._fill()

    def _release(self, batch):
        if batch.workspace is None or batch.open:
            return
        if batch.num_finished == len(batch.chunks):
            batch.workspace.clear()
            self._free.append(batch.workspace)
            batch.workspace = None
            batch.chunks.clear()                    # no cycle that keeps HBM alive
            self._fill()

    def _note(self, batch):
        chunks = [chunk for chunk in batch.chunks if not chunk.gone]
        works = [chunk.work for chunk in chunks]
        if works:
            self.records.append(BatchRecord(
                batch.begin_s, now_s(), len(works), sum(w.num_cached_tokens for w in works),
                sum(w.num_new_tokens for w in works),
                None if self._taken_time is None else sum(c.attention_s for c in chunks)))


def _fail(future, why):
    if future.done():
        return
    if isinstance(why, asyncio.CancelledError):
        future.cancel()
    else:
        future.set_exception(why)
        future.exception()                          # nobody may ever ask for it
