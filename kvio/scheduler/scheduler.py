"""The queues around the decisions: requests come in, routes go out."""
from collections import Counter, deque
from dataclasses import dataclass, field

from kvio.errors import InvalidArgument
from kvio.scheduler.data import DE, PE, Request, Route
from kvio.scheduler.decode import assign_groups, choose_decode
from kvio.scheduler.paths import NodeState, ReadChoice, policy
from kvio.scheduler.prefill import choose_prefill

__all__ = ["Scheduler"]


@dataclass
class Scheduler:
    """The queues around the decisions: submit requests, fetch routes.

    `policy` is a name or an object of `kvio.scheduler.paths`: "shorter_queue" is DualPath's, "pe"
    is Basic. `block_tokens` is the block size that parts are cut at. Decode engines form the
    groups that their reports name; prefill engines take from one queue.
    """

    alpha: int
    beta: int
    policy: object = "shorter_queue"
    block_tokens: int = 1
    _num_routes: int = 0
    _prefill_queue: deque = field(default_factory=deque)
    _decode_queue: deque = field(default_factory=deque)     # without a group yet
    _group_queues: dict = field(default_factory=dict)       # group_id -> deque
    _group_tokens: Counter = field(default_factory=Counter)         # tokens in these
    _half: dict = field(default_factory=dict)       # request_id -> {"request", PE: .., DE: ..}

    def __post_init__(self):
        self.policy = policy(self.policy)

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
        nodes = {e.node_id: NodeState(e.node_id, e.read_queue_tokens, e.snic_tokens_per_s,
                                      e.lend_tokens, e.lend_tokens_per_s)
                 for e in (*prefill, *decode)}
        where = {(PE, e.engine_id): nodes[e.node_id] for e in prefill}
        where.update({(DE, e.engine_id): nodes[e.node_id] for e in decode})
        routes = []
        for request_id, entry in list(self._half.items()):
            if PE not in entry or DE not in entry:
                continue
            pe, de = where[PE, entry[PE].engine_id], where[DE, entry[DE].engine_id]
            others = [node for node in nodes.values() if node is not pe and node is not de]
            hits = entry["request"].num_cached_tokens
            choice = self.policy.choose(hits, self.block_tokens, pe, de, others) if hits else \
                ReadChoice((), "nothing to read")
            for part in choice.parts:               # the next request must see it
                nodes[part.node_id].read_queue_tokens += part.num_tokens
            self._num_routes += 1
            routes.append(Route(
                request_id, entry[PE].engine_id, entry[DE].engine_id, choice.parts,
                f"{choice.reason}; PE: {entry[PE].reason}; DE: {entry[DE].reason}",
                choice.push, self._num_routes))
            del self._half[request_id]
        return routes
