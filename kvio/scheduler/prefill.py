"""Which prefill engine: classes by load and reading queue. Source: DualPath §6."""
from heapq import heapify, heappop, heapreplace

from kvio.scheduler.reason import Reason

__all__ = ["choose_prefill"]

_SHORT = "short reading queue ({} tokens), least load of {} ({} tokens)"
_LONG = "long reading queue ({} tokens), least load of {} ({} tokens)"


def choose_prefill(waiting, engines, alpha: int, beta: int) -> list:
    """Give waiting requests, first in first out, to prefill engines (`EngineLoad`s).

    An engine is *overloaded* with tok_e > beta, has a *short queue* with read_q <= alpha, else a
    *long queue*. Each request goes to the short-queue engine with the least tok_e, else to the
    long-queue engine with the least, else the fetch ends. tok_e grows with each assignment, so
    the engines' figures are changed. Returns [(request, engine, Reason), ...]; O(log
    number of engines) a request.
    """
    short, long = [], []
    for engine in engines:
        if engine.num_tokens <= beta:
            heap = short if engine.node.read_queue_tokens <= alpha else long
            heap.append((engine.num_tokens, engine.engine_id, engine))
    heapify(short)
    heapify(long)
    chosen = []
    for request in waiting:
        heap = short or long
        if not heap:
            break
        num_tokens, engine_id, engine = heap[0]
        chosen.append((request, engine, Reason(
            _SHORT if heap is short else _LONG, engine.node.read_queue_tokens, len(heap),
            num_tokens)))
        engine.add(request.num_tokens)
        if engine.num_tokens <= beta:
            heapreplace(heap, (engine.num_tokens, engine_id, engine))
        else:
            heappop(heap)
    return chosen
