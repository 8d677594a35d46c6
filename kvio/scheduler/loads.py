"""What the scheduler knows of nodes, engines and groups: what they reported, and what has been
decided since. The records change in place; nothing here decides anything."""
from collections import deque
from math import inf

from kvio.scheduler.paths import NodeState
from kvio.scheduler.queues import Queue

__all__ = ["EngineLoad", "Group", "Node", "Unseen"]


class Unseen:
    """What routes have added to an engine or a storage NIC that its reports do not count yet."""

    __slots__ = ("num_requests", "num_tokens", "_added")

    def __init__(self):
        self.num_requests = self.num_tokens = 0
        self._added = deque()           # (number of the route, tokens, request_id), ascending

    def add(self, number: int, num_tokens: int, request_id: int) -> None:
        self._added.append((number, num_tokens, request_id))
        self.num_requests += 1
        self.num_tokens += num_tokens

    def settle(self, last_route: int | None) -> None:
        """A report counts all up to route `last_route`; None: all."""
        added = self._added
        while added and (last_route is None or added[0][0] <= last_route):
            self.num_tokens -= added.popleft()[1]
            self.num_requests -= 1

    @property
    def request_ids(self):
        return (request_id for _, _, request_id in self._added)


class Node:
    """A node's storage NIC as it will be when all that was decided has been done: `state` is
    what policies see."""

    __slots__ = ("side", "group_id", "num_engines", "state", "last_route", "reads", "lent",
                 "claims")

    def __init__(self, node_id: int, side: str, group_id: int):
        self.side, self.group_id, self.num_engines = side, group_id, 0
        self.state = NodeState(node_id)
        self.last_route, self.reads, self.lent = -1, Unseen(), Unseen()
        self.claims = Unseen()                      # of a buffer that may be full

    @property
    def node_id(self) -> int:
        return self.state.node_id

    @property
    def read_queue_tokens(self) -> int:
        return self.state.read_queue_tokens

    @property
    def finish_time(self) -> float:
        """When the storage NIC has read all that waits: what helpers are ranked by.
        A dead one never has."""
        rate = self.state.snic_tokens_per_s
        return self.state.read_queue_tokens / rate if rate else inf

    def observe(self, report) -> None:
        """Of engines of one node, the report that counts the most routes is the newest."""
        last_route = report.last_route
        if last_route is not None:
            if last_route < self.last_route:
                return
            self.last_route = last_route
        self.reads.settle(last_route)
        self.lent.settle(last_route)
        self.claims.settle(last_route)
        state = self.state
        state.read_queue_tokens = report.read_queue_tokens + self.reads.num_tokens
        state.snic_tokens_per_s = report.snic_tokens_per_s
        state.lend_tokens = max(0, report.lend_tokens - self.lent.num_tokens)
        state.lend_tokens_per_s = report.lend_tokens_per_s
        state.cnic_tokens_per_s = report.cnic_tokens_per_s
        free = report.free_buffer_tokens
        state.free_buffer_tokens = None if free is None else max(
            0, free - self.claims.num_tokens)

    def add_read(self, number: int, num_tokens: int, request_id: int, lent: bool) -> None:
        """Route `number` reads here; `lent`: for a request of two other nodes."""
        self.reads.add(number, num_tokens, request_id)
        self.state.read_queue_tokens += num_tokens
        if lent:
            self.lent.add(number, num_tokens, request_id)
            self.state.lend_tokens = max(0, self.state.lend_tokens - num_tokens)

    def add_claim(self, number: int, num_tokens: int, request_id: int) -> None:
        """Route `number` takes, or waits for, so much of the DRAM buffer."""
        state = self.state
        if state.free_buffer_tokens is not None:
            self.claims.add(number, num_tokens, request_id)
            state.free_buffer_tokens = max(0, state.free_buffer_tokens - num_tokens)


class EngineLoad:
    """An engine's seq_e, tok_e and free HBM, requests counted that were assigned since it
    reported: those with a route (`unseen`), and those that have this engine but lack the other
    (`num_half_*`), of which the engine cannot know."""

    __slots__ = ("side", "engine_id", "node", "group", "place", "num_requests", "num_tokens",
                 "free_hbm_tokens", "hbm_tokens", "num_half_requests", "num_half_tokens", "unseen",
                 "last_route", "incarnation", "request_ids")

    def __init__(self, side: str, engine_id: int, node: Node, group, incarnation: int = 0):
        self.side, self.engine_id, self.node, self.group = side, engine_id, node, group
        self.place = incarnation, group.group_id, node.node_id      # what never changes
        self.num_requests = self.num_tokens = self.free_hbm_tokens = 0
        self.hbm_tokens = None
        self.num_half_requests = self.num_half_tokens = 0
        self.unseen, self.last_route = Unseen(), -1
        self.incarnation, self.request_ids = incarnation, None

    def observe(self, report) -> bool:
        """Take a report's figures. False: it counts fewer routes than an earlier one, so that it
        is older and is ignored."""
        last_route = report.last_route
        if last_route is not None:
            if last_route < self.last_route:
                return False
            self.last_route = last_route
        unseen, before = self.unseen, self.num_tokens
        if unseen.num_requests:
            unseen.settle(last_route)
        added = self.num_half_tokens + unseen.num_tokens
        self.num_requests = report.num_requests + self.num_half_requests + unseen.num_requests
        self.num_tokens = report.num_tokens + added
        self.free_hbm_tokens = report.free_hbm_tokens - added
        self.group.num_tokens += self.num_tokens - before
        return True

    def add(self, num_tokens: int) -> None:
        """A request is assigned; until it has its other engine, it is half."""
        self.num_half_requests += 1
        self.num_half_tokens += num_tokens
        self.num_requests += 1
        self.num_tokens += num_tokens
        self.free_hbm_tokens -= num_tokens
        self.group.num_tokens += num_tokens

    def take_back(self, num_tokens: int) -> None:
        """A half request is not assigned any more."""
        self.num_half_requests -= 1
        self.num_half_tokens -= num_tokens
        self.num_requests -= 1
        self.num_tokens -= num_tokens
        self.free_hbm_tokens += num_tokens
        self.group.num_tokens -= num_tokens

    def commit(self, number: int, num_tokens: int, request_id: int) -> None:
        """A half request has got its route."""
        self.num_half_requests -= 1
        self.num_half_tokens -= num_tokens
        self.unseen.add(number, num_tokens, request_id)


class Group:
    """Engines that fetch together. `num_tokens` is the sum of their tok_e; decode groups have a
    queue of requests, which count as their load; `most_tokens` is the longest request that one
    of them can hold (None: unknown)."""

    __slots__ = ("side", "group_id", "engines", "num_tokens", "most_tokens", "queue",
                 "last_assigned")

    def __init__(self, side: str, group_id: int):
        self.side, self.group_id, self.engines = side, group_id, {}
        self.num_tokens, self.most_tokens, self.queue = 0, None, Queue()
        self.last_assigned = 0                      # highest place of a request it was given

    @property
    def load(self) -> int:
        """What phase 1 compares: what waits in the group has to be served by it all the same."""
        return self.num_tokens + self.queue.num_tokens

    def measure(self) -> None:
        """Find `most_tokens` again: engines have come or gone, or have more or less HBM."""
        sizes = [engine.hbm_tokens for engine in self.engines.values()]
        self.most_tokens = None if None in sizes else max(sizes, default=0)
