"""Which prefill engine: classes by load and reading queue. Source: DualPath §6."""
from dataclasses import replace

from kvio.scheduler.data import PrefillChoice

__all__ = ["choose_prefill"]


def choose_prefill(waiting, engines, alpha: int, beta: int):
    """Give waiting requests, first in first out, to prefill engines.

    An engine is *overloaded* with tok_e > beta, has a *short queue* with read_q <= alpha, else a
    *long queue*. Each request goes to the short-queue engine with the least tok_e, else to the
    long-queue engine with the least, else the fetch ends. tok_e grows with each assignment.
    Returns (choices, engines as they would report now). Source: DualPath §6.
    """
    loads = {e.engine_id: e for e in sorted(engines, key=lambda e: e.engine_id)}
    choices = []
    for request in waiting:
        usable = [e for e in loads.values() if e.num_tokens <= beta]
        short = [e for e in usable if e.read_queue_tokens <= alpha]
        if not usable:
            break
        best = min(short or usable, key=lambda e: (e.num_tokens, e.engine_id))
        loads[best.engine_id] = replace(best, num_requests=best.num_requests + 1,
                                        num_tokens=best.num_tokens + request.num_tokens)
        choices.append(PrefillChoice(
            request.request_id, best.engine_id,
            f"{'short' if short else 'long'} reading queue ({best.read_queue_tokens} tokens), "
            f"least load of {len(short or usable)} ({best.num_tokens} tokens)"))
    return choices, list(loads.values())
