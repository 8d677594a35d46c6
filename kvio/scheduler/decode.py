"""Which decode engine: a group first, then an engine of it. Source: DualPath §6."""
from dataclasses import replace

from kvio.errors import InvalidArgument
from kvio.scheduler.data import DecodeChoice

__all__ = ["assign_groups", "choose_decode"]

LOAD_FACTOR = 1.05                  # Z may exceed the mean load by 5 %


def assign_groups(requests, group_loads: dict) -> list:
    """Decode phase 1: each request to the group with the least total tok_e, which then grows.

    `group_loads` maps a group id to its tokens. Returns group ids in the order of requests.
    """
    if not group_loads:
        raise InvalidArgument("there is no decode group")
    loads, chosen = dict(group_loads), []
    for request in requests:
        group = min(loads, key=lambda g: (loads[g], g))
        loads[group] += request.num_tokens
        chosen.append(group)
    return chosen


def choose_decode(waiting, engines):
    """Decode phase 2, inside a group: first in first out while the head fits somewhere.

    R = the head requests that fit the sum of free HBM; Z = 1.05 (sum of len over R + sum of
    tok_e) / number of engines. Among engines with enough free HBM a request goes to the one with
    tok_e + len <= Z and the fewest requests, else to the one with the least tok_e; if none has
    enough, the fetch ends. Returns (choices, engines as they would report now).
    """
    loads = {e.engine_id: e for e in sorted(engines, key=lambda e: e.engine_id)}
    limit = _load_limit(waiting, loads.values())
    choices = []
    for request in waiting:
        need = request.num_tokens
        fits = [e for e in loads.values() if e.free_hbm_tokens >= need]
        if not fits:
            break
        normal = [e for e in fits if e.num_tokens + need <= limit]
        if normal:
            best = min(normal, key=lambda e: (e.num_requests, e.engine_id))
        else:
            best = min(fits, key=lambda e: (e.num_tokens, e.engine_id))
        loads[best.engine_id] = replace(
            best, num_requests=best.num_requests + 1, num_tokens=best.num_tokens + need,
            free_hbm_tokens=best.free_hbm_tokens - need)
        choices.append(DecodeChoice(
            request.request_id, best.engine_id,
            f"fewest requests ({best.num_requests}) below Z = {limit:.0f} tokens" if normal else
            f"all that fit are above Z = {limit:.0f} tokens, least load ({best.num_tokens})"))
    return choices, list(loads.values())


def _load_limit(waiting, engines) -> float:
    """Z of the paper, in tokens."""
    engines = list(engines)
    if not engines:
        return 0.0
    room, expected = sum(e.free_hbm_tokens for e in engines), 0
    for request in waiting:
        if request.num_tokens > room:
            break
        room -= request.num_tokens
        expected += request.num_tokens
    return LOAD_FACTOR * (expected + sum(e.num_tokens for e in engines)) / len(engines)
