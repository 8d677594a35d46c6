"""Plans as plain data: every move of a request's KV, with its dependencies.

A plan names *places*, not machines: `store`, `pe_hbm`, `de_hbm`, and a DRAM buffer for each side:
`pe_buffer`, `de_buffer`, and `h0_buffer`, `h1_buffer`... of nodes that only lend their storage
NIC. An engine binds them to pools and NICs and carries the steps out; a simulator adds times to
the very same steps; a test adds up their bytes. The labels are those of the arrows in the
data-path figures of DualPath (arXiv 2602.21548), so that any arrow there can be found here.

Whoever reads, a request goes through three stages. *Loading*: each part of the hit tokens goes
from the store into the buffer of the side that reads it. *Prefill*, in one chunk or more: layer by
layer, the parts go into PE HBM, the chunk is computed, and what the DE buffer lacks of the layer
is sent there. *Insertion*: the DE buffer goes into DE HBM, and decode begins.

PE read path: one part, read by the PE. DE read path: one part, read by the DE, so that only miss
KV is sent back. Split: the DE reads the first blocks, the PE the rest. Any node: helpers have
parts as well. Push: who holds a part writes it into PE HBM, instead of the PE reading it (its own
one by loop-back): the blocks of a layer lie one after the other there, so a write gathers many.
"""
import re
from collections import Counter
from dataclasses import dataclass

from kvio.errors import InvalidArgument, checked_int
from kvio.layout import BlockLayout

STORAGE_READ, STORAGE_WRITE = "storage_read", "storage_write"
NIC_READ, NIC_WRITE = "nic_read", "nic_write"
COMPUTE, RELEASE = "compute", "release"

STORE, PE_BUFFER, PE_HBM = "store", "pe_buffer", "pe_hbm"
DE_BUFFER, DE_HBM = "de_buffer", "de_hbm"


def side_of(place: str) -> str:
    """"pe" of "pe_buffer", "h0" of "h0_buffer"."""
    return place.split("_")[0]


@dataclass(frozen=True)
class Part:
    """Hit tokens [start, stop) of a request, whole blocks, that one storage NIC reads.

    `side` is "pe", "de", or "h0", "h1"... for nodes that lend theirs; `node_id` says which node
    that is to whoever made the route (a plan does not look at it).
    """

    side: str
    tokens: tuple[int, int]
    node_id: int | None = None

    def __post_init__(self):
        try:
            start, stop = self.tokens
            if re.fullmatch("pe|de|h[0-9]+", self.side) and 0 <= start < stop:
                return
        except (TypeError, ValueError):
            pass
        raise InvalidArgument("a part needs the side 'pe', 'de' or 'h0', 'h1'..., and tokens "
                              f"start < stop; got {self}")

    @property
    def num_tokens(self) -> int:
        return self.tokens[1] - self.tokens[0]

    @property
    def buffer(self) -> str:
        """The place that it is read into."""
        return f"{self.side}_buffer"


@dataclass(frozen=True)
class Step:
    """One move (or computation, or release) of a token range of one request.

    `side` is who does it: the node whose storage NIC reads, the NIC that posts, the engine that
    computes. `layer` is None where all layers move at once. `after` are indices of the steps that
    must have finished before.
    """

    index: int
    kind: str
    side: str
    source: str
    target: str
    layer: int | None
    tokens: tuple[int, int]         # [start, stop) of the request; start on a block border
    after: tuple[int, ...]
    labels: tuple[str, ...] = ()

    def nbytes(self, layout: BlockLayout) -> int:
        """Bytes that this step moves (0 for computing and releasing)."""
        if self.kind in (COMPUTE, RELEASE):
            return 0
        per_token = layout.layer_bytes_per_token
        width = sum(per_token) if self.layer is None else per_token[self.layer]
        return (self.tokens[1] - self.tokens[0]) * width


@dataclass(frozen=True)
class ReadPlan:
    """All steps from storage to a request that is ready to decode. Immutable once made.

    Steps are in a valid order. `depth` layers at most of the request lie in PE HBM at a time.
    `chunks` are the miss tokens of each chunk.
    """

    parts: tuple[Part, ...]
    num_hit_tokens: int
    num_miss_tokens: int
    depth: int
    push: bool
    chunks: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def path(self) -> str:
        return path_name(self.parts)

    @property
    def num_tokens(self) -> int:
        return self.num_hit_tokens + self.num_miss_tokens


def path_name(parts) -> str:
    """"none" (nothing is loaded), "pe", "de", "split" (both), or "any" (a helper has a part)."""
    sides = [part.side for part in parts]
    if any(side not in ("pe", "de") for side in sides):
        return "any"
    return {0: "none", 1: sides[0] if sides else "", 2: "split"}[len(sides)]


class _Builder:
    def __init__(self):
        self.steps = []

    def add(self, kind, side, source, target, layer, tokens, after, labels=()):
        after = tuple(sorted({i for i in after if i is not None}))
        self.steps.append(Step(len(self.steps), kind, side, source, target, layer, tokens, after,
                               labels))
        return len(self.steps) - 1

    def release(self, place, tokens, after):
        return self.add(RELEASE, side_of(place), place, place, None, tokens, after)


def read_plan(layout: BlockLayout, parts, num_hit_tokens: int, num_miss_tokens: int,
              depth: int = 2, *, push: bool = False, chunks=None) -> ReadPlan:
    """The plan of one request.

    `parts` say who reads which hit tokens: "pe" or "de" for all of them, or `Part`s that follow
    one another from token 0 on, at most one a side, the DE's first. `num_hit_tokens` are whole
    blocks; `num_miss_tokens` >= 1 are computed, in `chunks` (miss tokens of each; one by default).
    `depth` >= 1 is how many layers of the request PE HBM holds: layer l + depth is fetched once
    layer l has been computed *and* sent on, so depth 2 overlaps moving with computing.
    """
    parts = checked_parts(layout, parts, num_hit_tokens)
    chunks = _checked_chunks(num_miss_tokens, chunks)
    stages, start = [load_steps(parts)], num_hit_tokens
    for count in chunks:
        stages.append(chunk_steps(layout, parts, num_hit_tokens, (start, start + count), depth,
                                  push=push, last=start + count == sum((num_hit_tokens, *chunks))))
        start += count
    stages.append(insert_steps(layout, start, path_name(parts)))
    return ReadPlan(parts, num_hit_tokens, num_miss_tokens, depth, push, chunks, _chained(stages))


def _checked_chunks(num_miss_tokens, chunks):
    checked_int("num_miss_tokens", num_miss_tokens, 1)
    try:
        chunks = (num_miss_tokens,) if chunks is None else tuple(chunks)
        if sum(chunks) == num_miss_tokens and min(chunks) >= 1:
            return chunks
    except (TypeError, ValueError):
        pass
    raise InvalidArgument(f"one token at least is computed, and each in one chunk; got "
                          f"{num_miss_tokens} miss tokens in chunks {chunks!r}")


def checked_parts(layout: BlockLayout, parts, num_hit_tokens: int) -> tuple[Part, ...]:
    """Parts that cover the hit tokens exactly; InvalidArgument that says what they lack."""
    tokens = layout.block_tokens
    if checked_int("num_hit_tokens", num_hit_tokens, 0) % tokens:
        raise InvalidArgument(f"hits come in whole blocks of {tokens} tokens, not {num_hit_tokens}")
    if isinstance(parts, str):
        if parts not in ("pe", "de"):
            raise InvalidArgument(f"path must be 'pe' or 'de', or Parts that say who reads which "
                                  f"tokens, not {parts!r}")
        parts = [Part(parts, (0, num_hit_tokens))] if num_hit_tokens else []
    try:
        parts = tuple(parts)
    except TypeError:
        parts = (parts,)
    if not all(isinstance(part, Part) for part in parts):
        raise InvalidArgument(f"parts are 'pe', 'de' or a sequence of Parts, not {parts}")
    borders = [0, *(part.tokens[1] for part in parts)]
    sides = [part.side for part in parts]
    if [part.tokens[0] for part in parts] != borders[:-1] or borders[-1] != num_hit_tokens or \
            any(border % tokens for border in borders) or len(set(sides)) < len(sides) or \
            "de" in sides[1:]:
        raise InvalidArgument(
            f"parts follow one another over the {num_hit_tokens} hit tokens in whole blocks of "
            f"{tokens}, one a side, the DE's first; got {parts}")
    return parts


def _chained(stages) -> tuple[Step, ...]:
    """Stages one after the other: what waits for nothing waits for the whole stage before."""
    steps, before = [], ()
    for stage in stages:
        first = len(steps)
        for step in stage:
            after = tuple(first + i for i in step.after) or before
            steps.append(Step(first + step.index, step.kind, step.side, step.source, step.target,
                              step.layer, step.tokens, after, step.labels))
        if stage:
            before = tuple(range(first, len(steps)))
    return tuple(steps)


def load_steps(parts) -> tuple[Step, ...]:
    """The stage that loads: all parts at once, each by its own storage NIC. Indices from 0."""
    build = _Builder()
    for part in parts:
        build.add(STORAGE_READ, part.side, STORE, part.buffer, None, part.tokens, (),
                  (f"{part.side.upper()} 1", f"{part.side.upper()} 2")
                  if part.side in ("pe", "de") else ())
    return tuple(build.steps)


def chunk_steps(layout: BlockLayout, parts, num_hit_tokens: int, computed: tuple[int, int],
                depth: int = 2, *, push: bool = False, last: bool = True) -> tuple[Step, ...]:
    """The stage that computes tokens [start, stop) = `computed` layer by layer. Indices from 0.

    The first chunk starts at `num_hit_tokens`. Later ones find what chunks before them computed
    in the DE buffer. With the `last` one the buffers of the parts are done with.
    """
    checked_int("depth", depth, 1)
    build, (start, stop) = _Builder(), computed
    first = start == num_hit_tokens
    at_de = next((part.tokens[1] for part in parts if part.side == "de"), 0)
    back = (at_de if first else start // layout.block_tokens * layout.block_tokens, stop)
    labels = ("PE 5", "PE 6", "PE 7") if first and at_de < num_hit_tokens else ()
    inputs = _inputs(parts, num_hit_tokens, start, push)
    computes, sent, loads = [], [], []
    for layer in range(layout.num_layers):
        slot_free = (computes[layer - depth], sent[layer - depth]) if layer >= depth else ()
        before = (*(loads[-1] if loads else ()), *slot_free)
        loads.append([build.add(kind, side, source, PE_HBM, layer, tokens, before, arrows)
                      for kind, side, source, tokens, arrows in inputs])
        computes.append(build.add(COMPUTE, "pe", PE_HBM, PE_HBM, layer, computed,
                                  (*loads[-1], *computes[-1:], *slot_free)))
        sent.append(build.add(NIC_WRITE, "pe", PE_HBM, DE_BUFFER, layer, back,
                              (computes[-1], *sent[-1:]), labels))
    if last:
        for part in parts:
            if part.side != "de":
                build.release(part.buffer, part.tokens, loads[-1])
    build.release(PE_HBM, (0, stop), (computes[-1], sent[-1]))
    return tuple(build.steps)


def _inputs(parts, num_hit_tokens, start, push):
    """What a layer of PE HBM is filled from: (kind, side, source, tokens, labels) each."""
    found = []
    for part in parts:
        arrows = {"pe": ("PE 3", "PE 4"), "de": ("DE 3", "DE 4", "DE 5")}.get(part.side, ())
        found.append((NIC_WRITE if push else NIC_READ, part.side if push else "pe",
                      part.buffer, part.tokens, arrows))
    if start > num_hit_tokens:              # what the chunks before have computed
        found.append((NIC_WRITE if push else NIC_READ, "de" if push else "pe", DE_BUFFER,
                      (num_hit_tokens, start), ()))
    return found


def insert_steps(layout: BlockLayout, num_tokens: int, path: str = "de") -> tuple[Step, ...]:
    """The stage that makes a request ready to decode: DE buffer -> DE HBM. Indices from 0."""
    build, whole = _Builder(), (0, num_tokens)
    labels = ("DE 6", "DE 7") if path == "de" else ("PE 8", "PE 9")
    inserts = [build.add(NIC_READ, "de", DE_BUFFER, DE_HBM, layer, whole, (), labels)
               for layer in range(layout.num_layers)]
    build.release(DE_BUFFER, whole, inserts)
    return tuple(build.steps)


def persist_plan(layout: BlockLayout, block: int, from_hbm: bool) -> tuple[Step, ...]:
    """Steps that make block `block` of a request durable from the decode side.

    A block that fills up during decode goes DE HBM -> DE buffer (loop-back), then to the store;
    one that is whole after prefill lies in the DE buffer already (`from_hbm=False`).
    """
    build = _Builder()
    tokens = (block * layout.block_tokens, (block + 1) * layout.block_tokens)
    copied = [build.add(NIC_WRITE, "de", DE_HBM, DE_BUFFER, layer, tokens, ())
              for layer in range(layout.num_layers)] if from_hbm else []
    written = build.add(STORAGE_WRITE, "de", DE_BUFFER, STORE, None, tokens, copied)
    if from_hbm:
        build.release(DE_BUFFER, tokens, (written,))
    return tuple(build.steps)


def traffic(steps, layout: BlockLayout) -> Counter:
    """Bytes per port: (side, "tx" | "rx" | "snic_read" | "snic_write").

    tx is what a compute NIC reads out of its node's memory, rx what it writes into it (the
    paper's "CNIC read" and "CNIC write"); loop-back counts as both.
    """
    total = Counter()
    for step in steps:
        nbytes = step.nbytes(layout)
        if step.kind == STORAGE_READ:
            total[step.side, "snic_read"] += nbytes
        elif step.kind == STORAGE_WRITE:
            total[step.side, "snic_write"] += nbytes
        elif step.kind in (NIC_READ, NIC_WRITE):
            total[side_of(step.source), "tx"] += nbytes
            total[side_of(step.target), "rx"] += nbytes
    return total
