"""Which decode engine: a group first, then an engine of it. Source: DualPath §6."""
from kvio.scheduler.reason import Reason

__all__ = ["LOAD_FACTOR", "choose_decode", "choose_group"]

LOAD_FACTOR = 1.05                  # Z may exceed the mean load by 5 %

_NORMAL = "fewest requests ({}) below Z = {:.0f} tokens"
_HIGH = "all that fit are above Z = {:.0f} tokens, least load ({})"


def choose_group(request, groups):
    """Decode phase 1: the group with the least total tok_e, which `groups` yield first.

    Beyond the paper: of the groups whose engines could ever hold the request; a longer one would
    stand at the head of the group's queue for ever. None if there is no such group.
    """
    num_tokens = request.num_tokens
    for group in groups:
        if group.most_tokens is None or num_tokens <= group.most_tokens:
            return group
    return None


def choose_decode(waiting, engines) -> list:
    """Decode phase 2, inside a group: first in first out while the head fits somewhere.

    R = the head requests that fit the sum of free HBM; Z = 1.05 (sum of len over R + sum of
    tok_e) / number of engines. Among engines (`EngineLoad`s) with enough free HBM a request goes
    to the one with tok_e + len <= Z and the fewest requests, else to the one with the least
    tok_e; if none has enough, the fetch ends. The engines' figures grow with each assignment.
    Returns [(request, engine, Reason), ...].
    """
    engines, chosen = list(engines), []
    most = max((engine.free_hbm_tokens for engine in engines), default=0)
    for request in waiting:
        need, normal, high = request.num_tokens, None, None
        if not chosen:
            if need > most:
                break                               # often, when there is a queue
            limit = _load_limit(waiting, engines)
            engines.sort(key=_fewest_requests)
        for engine in engines:
            if engine.free_hbm_tokens >= need:
                if engine.num_tokens + need <= limit:
                    normal = engine
                    break
                if high is None or (engine.num_tokens, engine.engine_id) < (high.num_tokens,
                                                                            high.engine_id):
                    high = engine
        best = normal or high
        if best is None:
            break
        chosen.append((request, best, Reason(_HIGH, limit, best.num_tokens) if normal is None else
                       Reason(_NORMAL, best.num_requests, limit)))
        best.add(need)
        _move_up(engines, best)
    return chosen


def _move_up(engines, engine):
    """Sort again, now that one engine has a request more."""
    at, last, key = engines.index(engine), len(engines) - 1, _fewest_requests(engine)
    while at < last and _fewest_requests(engines[at + 1]) < key:
        engines[at] = engines[at + 1]
        at += 1
    engines[at] = engine


def _fewest_requests(engine):
    return engine.num_requests, engine.engine_id


def _load_limit(waiting, engines) -> float:
    """Z of the paper, in tokens."""
    room = sum(max(0, engine.free_hbm_tokens) for engine in engines)
    load = sum(engine.num_tokens for engine in engines)
    for request in waiting:
        if request.num_tokens > room:
            break
        room -= request.num_tokens
        load += request.num_tokens
    return LOAD_FACTOR * load / len(engines) if engines else 0.0
