"""Plans as plain data: every move of a request's KV, with its dependencies.

A plan names *places*, not machines: `store`, `pe_buffer`, `pe_hbm`, `de_buffer`, `de_hbm`. An
engine binds them to pools and NICs and carries the steps out; a simulator adds times to the very
same steps; a test adds up their bytes. The labels are those of the arrows in the data-path
figures of DualPath (arXiv 2602.21548), so that any arrow there can be found here.

PE read path: store -> PE buffer; per layer: PE buffer -> PE HBM (the PE's own NIC, loop-back),
compute, hit and miss KV -> DE buffer; then DE buffer -> DE HBM.
DE read path: store -> DE buffer; per layer: the PE reads the layer from the DE buffer by RDMA,
compute, only the miss KV -> DE buffer; then DE buffer -> DE HBM.
"""
from collections import Counter
from dataclasses import dataclass

from kvio.errors import InvalidArgument
from kvio.layout import BlockLayout

STORAGE_READ, STORAGE_WRITE = "storage_read", "storage_write"
NIC_READ, NIC_WRITE = "nic_read", "nic_write"
COMPUTE, RELEASE = "compute", "release"

STORE, PE_BUFFER, PE_HBM = "store", "pe_buffer", "pe_hbm"
DE_BUFFER, DE_HBM = "de_buffer", "de_hbm"


@dataclass(frozen=True)
class Step:
    """One move (or computation, or release) of a token range of one request.

    `side` is who does it: the node whose storage NIC reads, the NIC that posts, the engine that
    computes ("pe" or "de"). `layer` is None where all layers move at once. `after` are indices of
    the steps that must have finished before.
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

    `path` is "pe" (also Basic) or "de". Steps are in a valid order. `depth` layers at most of the
    request lie in PE HBM at a time.
    """

    path: str
    num_hit_tokens: int
    num_miss_tokens: int
    depth: int
    steps: tuple[Step, ...]

    @property
    def num_tokens(self) -> int:
        return self.num_hit_tokens + self.num_miss_tokens


class _Builder:
    def __init__(self):
        self.steps = []

    def add(self, kind, side, source, target, layer, tokens, after, labels=()):
        after = tuple(sorted({i for i in after if i is not None}))
        self.steps.append(Step(len(self.steps), kind, side, source, target, layer, tokens, after,
                               labels))
        return len(self.steps) - 1


def read_plan(layout: BlockLayout, path: str, num_hit_tokens: int, num_miss_tokens: int,
              depth: int = 2) -> ReadPlan:
    """The plan of one request on the read path "pe" or "de".

    `num_hit_tokens` are whole blocks; `num_miss_tokens` >= 1 are computed. `depth` >= 1 is how
    many layers of the request PE HBM holds: layer l + depth is fetched once layer l has been
    computed *and* sent on, so depth 2 overlaps moving with computing.
    """
    if path not in ("pe", "de"):
        raise InvalidArgument(f"path must be 'pe' or 'de', not {path!r}")
    if num_hit_tokens < 0 or num_hit_tokens % layout.block_tokens or num_miss_tokens < 1:
        raise InvalidArgument(f"hits come in whole blocks of {layout.block_tokens} tokens and one "
                              f"token at least is computed; got {num_hit_tokens} hit and "
                              f"{num_miss_tokens} miss tokens")
    if depth < 1:
        raise InvalidArgument(f"depth must be at least 1, not {depth}")
    build, last = _Builder(), layout.num_layers - 1
    hits, total = (0, num_hit_tokens), num_hit_tokens + num_miss_tokens
    buffer = PE_BUFFER if path == "pe" else DE_BUFFER
    stored = None
    if num_hit_tokens:
        stored = build.add(STORAGE_READ, path, STORE, buffer, None, hits, (),
                           (f"{path.upper()} 1", f"{path.upper()} 2"))
    computed, sent, loads = [], [], []
    for layer in range(layout.num_layers):
        slot_free = (computed[layer - depth], sent[layer - depth]) if layer >= depth else ()
        if num_hit_tokens:
            loads.append(_load(build, path, layer, hits, (stored, *loads[-1:], *slot_free)))
        computed.append(build.add(COMPUTE, "pe", PE_HBM, PE_HBM, layer, (hits[1], total),
                                  (*loads[-1:], *computed[-1:], *slot_free)))
        back = (0, total) if path == "pe" else (hits[1], total)
        sent.append(build.add(NIC_WRITE, "pe", PE_HBM, DE_BUFFER, layer, back,
                              (computed[-1], *sent[-1:]),
                              ("PE 5", "PE 6", "PE 7") if path == "pe" else ()))
    if path == "pe" and num_hit_tokens:
        build.add(RELEASE, "pe", PE_BUFFER, PE_BUFFER, None, hits, loads[last:])
    build.add(RELEASE, "pe", PE_HBM, PE_HBM, None, (0, total), (computed[last], sent[last]))
    labels = ("PE 8", "PE 9") if path == "pe" else ("DE 6", "DE 7")
    inserts = [build.add(NIC_READ, "de", DE_BUFFER, DE_HBM, layer, (0, total), sent[last:],
                         labels) for layer in range(layout.num_layers)]
    build.add(RELEASE, "de", DE_BUFFER, DE_BUFFER, None, (0, total), inserts)
    return ReadPlan(path, num_hit_tokens, num_miss_tokens, depth, tuple(build.steps))


def _load(build, path, layer, hits, after):
    if path == "pe":
        return build.add(NIC_READ, "pe", PE_BUFFER, PE_HBM, layer, hits, after, ("PE 3", "PE 4"))
    return build.add(NIC_READ, "pe", DE_BUFFER, PE_HBM, layer, hits, after,
                     ("DE 3", "DE 4", "DE 5"))


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
        build.add(RELEASE, "de", DE_BUFFER, DE_BUFFER, None, tokens, (written,))
    return tuple(build.steps)


def traffic(steps, layout: BlockLayout) -> Counter:
    """Bytes per port: ("pe" | "de", "tx" | "rx" | "snic_read" | "snic_write").

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
            total[step.source[:2], "tx"] += nbytes
            total[step.target[:2], "rx"] += nbytes
    return total
