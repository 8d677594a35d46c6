"""What overlapped: a run as a Chrome trace (chrome://tracing, ui.perfetto.dev).

A node is a process there, and has a row each for its storage NIC, its compute NIC and its GPU.
Spans of a row that overlap are put into as many rows as it takes. Times are those of the engines'
clock, from the first span on. The arguments of a move say which request, layer and tokens it is
of, those of a computation its layer, or how many sequences take the step.
"""
import json
import os
from contextlib import contextmanager

from kvio.engine.clock import now_s
from kvio.errors import InvalidArgument
from kvio.loader import STORAGE_READ, STORAGE_WRITE

__all__ = ["Tracer"]

STORAGE, NIC, GPU = "storage NIC", "compute NIC", "GPU"
ROWS = STORAGE, NIC, GPU


class Tracer:
    """Collects spans of one run. `cluster.Cluster(..., tracer=Tracer())`, then `write`."""

    def __init__(self):
        self._spans = []                # (node, row, begin_s, end_s, name, arguments)

    def __len__(self):
        return len(self._spans)

    @contextmanager
    def span(self, node: str, row: str, name: str, **arguments):
        """What happens inside is one span, also when it fails (`failed` names the error then)."""
        if row not in ROWS or not isinstance(node, str):
            raise InvalidArgument(f"a span is of a node's name and one of the rows "
                                  f"{', '.join(ROWS)}, not {node!r} and {row!r}")
        begin = now_s()
        try:
            yield
        except BaseException as failure:
            arguments["failed"] = type(failure).__name__
            raise
        finally:
            self._spans.append((node, row, begin, now_s(), name, arguments))

    def mover(self, mover, names: dict, request_id: int) -> "_TracedMover":
        """The mover, its steps noted; `names` maps sides to nodes."""
        return _TracedMover(self, mover, names, request_id)

    def compute(self, compute, name: str) -> "_TracedCompute":
        """The arithmetic of a node, its layers and decode steps noted."""
        return _TracedCompute(self, compute, name)

    def events(self) -> list:
        """The trace's events as plain data; times in microseconds."""
        spans = sorted(self._spans, key=lambda span: (span[2], span[3]))
        first = spans[0][2] if spans else 0.0
        nodes = sorted({span[0] for span in spans}, key=lambda n: (not n.startswith("pe"), n))
        pids, free, events = {node: pid for pid, node in enumerate(nodes, 1)}, {}, []
        for node, row, begin, end, name, arguments in spans:
            lanes = free.setdefault((node, row), [])
            lane = next((i for i, until in enumerate(lanes) if until <= begin), len(lanes))
            lanes[lane:lane + 1] = [end]
            events.append({"ph": "X", "pid": pids[node], "tid": _row(row, lane), "name": name,
                           "cat": row, "ts": (begin - first) * 1e6, "dur": (end - begin) * 1e6,
                           "args": arguments})
        for node, pid in pids.items():
            events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": node}})
        for (node, row), lanes in free.items():
            for lane in range(len(lanes)):
                title = row if lane == 0 else f"{row} ({lane + 1})"
                events += [{"ph": "M", "pid": pids[node], "tid": _row(row, lane), "name": key,
                            "args": {field: value}}
                           for key, field, value in (
                               ("thread_name", "name", title),
                               ("thread_sort_index", "sort_index", _row(row, lane)))]
        return events

    def write(self, path: str) -> None:
        """All spans into a JSON file; InvalidArgument if it cannot be written. What JSON does not
        know among names and arguments is written as its text."""
        try:
            text = json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"}, default=str)
            with open(os.fspath(path), "w", encoding="utf-8") as file:
                file.write(text)
        except (OSError, TypeError, ValueError) as wrong:
            raise InvalidArgument(f"cannot write the trace to {path}: {wrong}") from None


def _row(row, lane):
    return ROWS.index(row) * 1000 + lane + 1


class _TracedMover:
    def __init__(self, tracer, mover, names, request_id):
        self._tracer, self._mover, self._names = tracer, mover, names
        self._request_id = request_id

    def __getattr__(self, name):
        return getattr(self._mover, name)

    async def perform(self, step, binding):
        stored = step.kind in (STORAGE_READ, STORAGE_WRITE)
        name = "read" if step.kind == STORAGE_READ else "store" if stored else \
            f"{step.source} → {step.target}"
        arguments = {"request": self._request_id, "tokens": list(step.tokens)}
        if step.layer is not None:
            arguments["layer"] = step.layer
        if step.labels:
            arguments["arrows"] = ", ".join(step.labels)
        with self._tracer.span(self._names[step.side], STORAGE if stored else NIC, name,
                               **arguments):
            return await self._mover.perform(step, binding)


class _TracedCompute:
    def __init__(self, tracer, compute, name):
        self._tracer, self._compute, self._name = tracer, compute, name

    def __getattr__(self, name):
        return getattr(self._compute, name)

    async def prefill_layer(self, state, layer, slot, ready_s):
        with self._tracer.span(self._name, GPU, "prefill", layer=layer):
            return await self._compute.prefill_layer(state, layer, slot, ready_s)

    async def decode_step(self, sequences):
        with self._tracer.span(self._name, GPU, "decode", sequences=len(sequences)):
            return await self._compute.decode_step(sequences)
