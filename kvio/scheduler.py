"""Which prefill engine, which decode engine, which read path: DualPath's decisions (§6).

Decisions only. There is no clock, no I/O and no randomness in here: queue lengths come in as
`EngineReport`s, decisions go out as plain data with their reason, so the reference engine and a
simulator run the very same code. All ties go to the lowest engine id.

Vocabulary of the paper: seq_e = `num_requests`, tok_e = `num_tokens`, read_q =
`read_queue_tokens`, alpha and beta as there, Z = `load_limit`.
"""
from collections import Counter, deque
from dataclasses import dataclass, field, replace

from kvio.errors import InvalidArgument

__all__ = ["DecodeChoice", "EngineReport", "PE", "DE", "PrefillChoice", "PrefillWork", "Request",
           "Route", "Scheduler", "assign_groups", "choose_decode", "choose_path",
           "choose_prefill", "pack_prefill"]

PE, DE = "pe", "de"                 # the side whose storage NIC reads the hit tokens
LOAD_FACTOR = 1.05                  # Z may exceed the mean load by 5 %


@dataclass(frozen=True)
class Request:
    """What the scheduler must know of a request; all in tokens.

    `num_tokens` is len in the paper: the prompt and the tokens that may be generated, which is
    what the request will hold in HBM. `num_cached_tokens` of the prompt are stored (hits).
    """

    request_id: int
    num_prompt_tokens: int
    num_cached_tokens: int
    max_new_tokens: int

    def __post_init__(self):
        if not 0 <= self.num_cached_tokens < self.num_prompt_tokens or self.max_new_tokens < 0:
            raise InvalidArgument(
                "a request needs 0 <= num_cached_tokens < num_prompt_tokens (one token at least "
                f"is computed) and max_new_tokens >= 0: {self}")

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.max_new_tokens


@dataclass(frozen=True)
class EngineReport:
    """What an engine says of itself at a fetch.

    `read_queue_tokens` is the reading queue of its *node*'s storage NIC, waiting reads included.
    `free_hbm_tokens` and `group_id` count only for decode engines: free HBM less what is promised
    already, and the group (all engines of a node are in one) whose leader fetches for it.
    """

    engine_id: int
    node_id: int
    num_requests: int = 0
    num_tokens: int = 0
    read_queue_tokens: int = 0
    free_hbm_tokens: int = 0
    group_id: int = 0

    def __post_init__(self):
        if min(self.num_requests, self.num_tokens, self.read_queue_tokens,
               self.free_hbm_tokens) < 0:
            raise InvalidArgument(f"negative figures in {self}")


@dataclass(frozen=True)
class PrefillChoice:
    """`engine_id` prefills `request_id`; `reason` names the class it was in."""

    request_id: int
    engine_id: int
    reason: str


@dataclass(frozen=True)
class DecodeChoice:
    """`engine_id` decodes `request_id`; its HBM is promised from now on."""

    request_id: int
    engine_id: int
    reason: str


@dataclass(frozen=True)
class Route:
    """The whole decision for a request. Committed: it is never changed silently."""

    request_id: int
    prefill_engine: int
    decode_engine: int
    path: str                       # PE or DE
    reason: str


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


def choose_path(pe_queue_tokens: int, de_queue_tokens: int) -> str:
    """The side with the shorter reading queue; PE when they are equal."""
    return PE if pe_queue_tokens <= de_queue_tokens else DE


@dataclass(frozen=True)
class PrefillWork:
    """A request (or what is left of it) that is ready to be prefilled."""

    request_id: int
    num_cached_tokens: int
    num_new_tokens: int             # bsz in the paper


def pack_prefill(ready, quota_s: float | None = None, attention_time=None) -> list:
    """The next prefill batch from `ready` (FIFO), as (request_id, num_new_tokens).

    Now the head request, whole. The compute quota belongs here: FIFO packing until
    `attention_time(cached, new)` reaches `quota_s`, the request that would exceed it cut by
    binary search. Until that is built, a quota is refused rather than ignored.
    """
    if quota_s is not None or attention_time is not None:
        raise InvalidArgument("compute-quota packing is not built yet: pass quota_s=None")
    return [(work.request_id, work.num_new_tokens) for work in list(ready)[:1]]


@dataclass
class Scheduler:
    """The queues around the decisions: submit requests, fetch routes.

    policy "shorter_queue" is DualPath's, "pe" is Basic (only the prefill side reads). Decode
    engines form the groups that their reports name; prefill engines take from one queue.
    """

    alpha: int
    beta: int
    policy: str = "shorter_queue"
    _prefill_queue: deque = field(default_factory=deque)
    _decode_queue: deque = field(default_factory=deque)     # without a group yet
    _group_queues: dict = field(default_factory=dict)       # group_id -> deque
    _group_tokens: Counter = field(default_factory=Counter)         # tokens in these
    _half: dict = field(default_factory=dict)       # request_id -> {"request", PE: .., DE: ..}

    def __post_init__(self):
        if self.policy not in ("shorter_queue", "pe"):
            raise InvalidArgument(f"policy must be 'shorter_queue' or 'pe', not {self.policy!r}")

    def submit(self, request: Request) -> None:
        """Queue a request; its id must be new."""
        if request.request_id in self._half:
            raise InvalidArgument(f"request {request.request_id} is queued already")
        self._half[request.request_id] = {"request": request}
        self._prefill_queue.append(request)
        self._decode_queue.append(request)

    @property
    def num_waiting(self) -> int:
        """Requests without a route."""
        return len(self._half)

    def cancel(self, request_id: int) -> bool:
        """Forget a request that has no route yet; False if there is none."""
        entry = self._half.pop(request_id, None)
        if entry is None:
            return False
        request = entry["request"]
        for queue in (self._prefill_queue, self._decode_queue):
            if request in queue:
                queue.remove(request)
        for group, queue in self._group_queues.items():
            if request in queue:
                queue.remove(request)
                self._group_tokens[group] -= request.num_tokens
        return True

    def fetch(self, prefill_reports, decode_reports) -> list[Route]:
        """Routes for the requests that can start now, in the order in which they came.

        Reports must count what earlier fetches have assigned. A request that has got one engine
        keeps it and waits for the other; `pending_load` is what the reports then lack.
        """
        chosen, prefill = choose_prefill(self._prefill_queue, prefill_reports, self.alpha,
                                         self.beta)
        for choice in chosen:
            self._prefill_queue.popleft()
            self._half[choice.request_id][PE] = choice
        return self._routes(prefill, self._fetch_decode(decode_reports))

    def _fetch_decode(self, reports):
        """Both phases; the engines as they would report now."""
        groups = {}
        for report in reports:
            groups.setdefault(report.group_id, []).append(report)
        if groups:
            # What waits in a group is no engine's yet, but the group has to serve it all the same.
            loads = {group: self._group_tokens[group] + sum(e.num_tokens for e in engines)
                     for group, engines in groups.items()}
            for request, group in zip(self._decode_queue,
                                      assign_groups(self._decode_queue, loads), strict=True):
                self._group_queues.setdefault(group, deque()).append(request)
                self._group_tokens[group] += request.num_tokens
            self._decode_queue.clear()
        after = []
        for group, engines in sorted(groups.items()):
            queue = self._group_queues.get(group, deque())
            chosen, engines = choose_decode(queue, engines)
            for choice in chosen:
                self._group_tokens[group] -= queue.popleft().num_tokens
                self._half[choice.request_id][DE] = choice
            after += engines
        return after

    def pending_load(self) -> dict:
        """Requests and tokens per (side, engine_id) of requests that wait for their other half."""
        load = {}
        for entry in self._half.values():
            for side in (PE, DE):
                if side in entry:
                    key = side, entry[side].engine_id
                    count, tokens = load.get(key, (0, 0))
                    load[key] = count + 1, tokens + entry["request"].num_tokens
        return load

    def _routes(self, prefill, decode):
        queues = {e.node_id: e.read_queue_tokens for e in (*prefill, *decode)}
        nodes = {(PE, e.engine_id): e.node_id for e in prefill}
        nodes.update({(DE, e.engine_id): e.node_id for e in decode})
        routes = []
        for request_id, entry in list(self._half.items()):
            if PE not in entry or DE not in entry:
                continue
            pe_node = nodes[PE, entry[PE].engine_id]
            de_node = nodes[DE, entry[DE].engine_id]
            pe_queue, de_queue = queues[pe_node], queues[de_node]
            path = PE if self.policy == "pe" else choose_path(pe_queue, de_queue)
            # The next request of this fetch must see what this one has added.
            queues[pe_node if path == PE else de_node] += entry["request"].num_cached_tokens
            why = "Basic reads at the prefill side" if self.policy == "pe" else \
                f"reading queues of {pe_queue} (PE) and {de_queue} (DE) tokens"
            routes.append(Route(request_id, entry[PE].engine_id, entry[DE].engine_id, path,
                                f"{why}; PE: {entry[PE].reason}; DE: {entry[DE].reason}"))
            del self._half[request_id]
        return routes
