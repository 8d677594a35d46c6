"""The queues around the decisions: requests come in, engines report, routes go out."""
from dataclasses import replace
from operator import attrgetter

from kvio.errors import InvalidArgument, KvioError, RequestTooLong, checked_int
from kvio.scheduler.data import DE, PE, Rejection, Request, Route
from kvio.scheduler.decode import choose_decode, choose_group
from kvio.scheduler.fleet import Fleet
from kvio.scheduler.paths import ReadChoice, checked_choice, is_own
from kvio.scheduler.paths import policy as policy_of
from kvio.scheduler.prefill import choose_prefill
from kvio.scheduler.queues import Queue, Waiting
from kvio.scheduler.reason import Reason

__all__ = ["Scheduler"]

NOTHING = ReadChoice((), "nothing to read")
BETA_S = 5                          # beta is what a PE processes in this time
_place = attrgetter("place")


class Scheduler:
    """Submit requests, fetch routes.

    `policy` is a name or an object of `kvio.scheduler.paths`: "shorter_queue" is DualPath's, "pe"
    is Basic. `block_tokens` is the block size that parts are cut at. `recompute` is a rule in
    front of the policy, None to load all hits: `LoadOrRecompute`, or whatever has its method
    `for_request`. It is told how long the PE is busy with earlier requests, at the pace that
    beta, which is what a PE processes in 5 s, says.

    Engines form groups, all PE or all DE; the leader of a group fetches for all of it, about
    every 50 ms. A fetch may carry the reports of any subset of groups: engines that do not report
    now are taken as they last reported plus what was assigned since, and get nothing new. The
    routes that a fetch completes are returned by it; the caller tells both engines of a route,
    and the helpers that have a part.

    Why nobody waits for ever: a request waits in the prefill queue and in the queue of one decode
    group, both in order of submission. Who has one engine of the two is ahead of all that still
    wait for such an engine (in its group): when an engine is lost, later requests without a route
    give theirs back. So the earliest request without a route waits only for requests that have
    one. When those are done, no PE is overloaded and each DE is empty, one of which can hold the
    request: the next fetches of the two groups give it its engines. So nobody waits for more than
    the requests before it, whatever comes after it. That supposes that engines finish what they
    were given and that their leaders go on fetching; who does not is lost by `lose`, which is for
    the caller to say: there is no clock in here.
    """

    def __init__(self, alpha: int, beta: int, policy: object = "shorter_queue",
                 block_tokens: int = 1, recompute=None):
        self.alpha, self.beta = checked_int("alpha", alpha, 0), checked_int("beta", beta, 0)
        self.block_tokens = checked_int("block_tokens", block_tokens, 1)
        self.policy, self.recompute = policy_of(policy), recompute
        self._is_own_policy = is_own(self.policy)
        if recompute is not None and (not hasattr(recompute, "for_request")
                                      or isinstance(recompute, type)):
            raise InvalidArgument("recompute must be None or an object (no class) with a method "
                                  f"for_request, not {recompute!r}")
        if getattr(recompute, "block_tokens", self.block_tokens) % self.block_tokens:
            raise InvalidArgument(f"recompute cuts hits at every {recompute.block_tokens} tokens, "
                                  f"which is inside a block of {self.block_tokens}: give both the "
                                  "same block_tokens")
        self.num_routes = 0                         # the number of the latest route
        self._fleet, self._waiting = Fleet(), {}    # request_id -> Waiting
        self._num_submitted = 0
        self._prefill_queue = Queue()
        self._decode_queue = Queue()                # without a group yet
        self._complete = {}                         # request_id -> Waiting with both engines
        self._routes, self._rejected = [], []       # that nobody has been told of

    # -- requests

    def submit(self, request: Request) -> None:
        """Queue a request. InvalidArgument if its id is not new: it waits here, or an engine says
        to hold it; RequestTooLong if no decode engine could ever hold it."""
        if not isinstance(request, Request):
            raise InvalidArgument(f"submit takes a Request, not {request!r}")
        request_id, most = request.request_id, self._fleet.most_tokens
        if request_id in self._waiting:
            raise InvalidArgument(f"request {request_id} is queued already")
        if request_id in self._fleet.holders:
            raise _held(request_id)
        if most is not None and request.num_tokens > most:
            raise _too_long(request, most)
        self._num_submitted += 1
        self._waiting[request_id] = entry = Waiting(request, self._num_submitted)
        self._prefill_queue.append(entry)
        self._decode_queue.append(entry)

    @property
    def num_waiting(self) -> int:
        """Requests without a route."""
        return len(self._waiting)

    @property
    def num_late_reports(self) -> int:
        """Reports that were ignored: of engines that had been lost, or older than another."""
        return self._fleet.num_late_reports

    def cancel(self, request_id: int) -> bool:
        """Forget a request that has no route yet; False if there is none. O(1)."""
        entry = self._waiting.pop(request_id, None)
        if entry is None:
            return False
        self._complete.pop(request_id, None)
        if entry.prefill is None:
            self._prefill_queue.leave(entry)
        else:
            entry.prefill.take_back(entry.num_tokens)
        if entry.decode is not None:
            entry.decode.take_back(entry.num_tokens)
        elif entry.group is not None:
            entry.group.queue.leave(entry)
        else:
            self._decode_queue.leave(entry)
        if entry.group is not None:
            self._fleet.by_load.touch(entry.group)
        return True

    def rejections(self) -> list[Rejection]:
        """Requests that were refused after they had been queued, since the last call."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def _reject(self, entry, error):
        self.cancel(entry.request.request_id)
        self._rejected.append(Rejection(entry.request.request_id, error))

    # -- engines

    def observe(self, prefill_reports, decode_reports) -> None:
        """Take reports and assign nothing.

        So a scheduler that has started anew learns how things are: it observes the reports of all
        engines, with `request_ids`, before requests are submitted again. Those that an engine
        holds are then refused, so that none is assigned twice. Routes are numbered on from the
        highest `last_route`.
        """
        self._observe(prefill_reports, decode_reports)

    def _observe(self, prefill_reports, decode_reports):
        """The engines that report, PE and DE."""
        try:
            reports = {PE: list(prefill_reports), DE: list(decode_reports)}
        except TypeError as wrong:
            raise InvalidArgument(f"a fetch takes two lists of EngineReports: {wrong}") from None
        fleet, held = self._fleet, set()
        reports, restarted = fleet.check(reports)
        for side, engine_id in restarted:
            self.lose(side, engine_id)
        prefill = fleet.take(PE, reports[PE], held)
        decode = fleet.take(DE, reports[DE], held)
        if fleet.new_group:
            self._share()
        for request_id in held.intersection(self._waiting) if held else ():
            self._reject(self._waiting[request_id], _held(request_id))
        return prefill, decode

    def lose(self, side: str, engine_id: int) -> list[int]:
        """Engine `engine_id` of `side` (PE or DE) has gone; returns the ids of the requests that
        had it, or an engine because others were behind, and wait for one again at their places.

        Requests with a route are the caller's: submit them again, under new ids or once no
        engine holds them. An engine that is not known is none to lose. Reports of this one that
        are still on their way are ignored; if it comes back, then with a higher `incarnation`.
        """
        engine = self._engines(side).get(checked_int("engine_id", engine_id, 0))
        if engine is None:
            return []
        lost = [entry for entry in self._waiting.values()
                if (entry.prefill if side == PE else entry.decode) is engine]
        group = engine.group
        if lost:
            first = min(lost, key=_place).place
            lost = self._take_prefill_back(first) if side == PE else \
                self._take_decode_back(group, first)
        self._fleet.remove(engine)
        if side == DE:
            self._leave_group(group)
        return [entry.request.request_id for entry in lost]

    def lose_group(self, side: str, group_id: int) -> list[int]:
        """`lose` for all engines of a group. What waits in its queue goes to other groups, in
        order of submission."""
        groups = self._fleet.groups[side] if self._engines(side) is not None else {}
        group = groups.get(checked_int("group_id", group_id, 0))
        return [] if group is None else sorted(
            {request_id for engine_id in list(group.engines)
             for request_id in self.lose(side, engine_id)})

    def _engines(self, side):
        if side not in (PE, DE):
            raise InvalidArgument(f"a side is {PE!r} or {DE!r}, not {side!r}")
        return self._fleet.engines[side]

    def _take_prefill_back(self, first):
        """All halves from place `first` on wait for a PE again."""
        back = [entry for entry in self._waiting.values()
                if entry.prefill is not None and entry.place >= first]
        for entry in back:
            entry.prefill.take_back(entry.num_tokens)
            entry.prefill = None
            self._complete.pop(entry.request.request_id, None)
        self._prefill_queue.put_back(back)
        return back

    def _take_decode_back(self, group, first):
        """All halves of a decode group from place `first` on wait in its queue again."""
        back = [entry for entry in self._waiting.values()
                if entry.group is group and entry.decode is not None and entry.place >= first]
        for entry in back:
            entry.decode.take_back(entry.num_tokens)
            entry.decode = None
            self._complete.pop(entry.request.request_id, None)
        group.queue.put_back(back)
        return back

    def _leave_group(self, group):
        """What a decode group, which has lost an engine, cannot serve goes back to the global
        queue."""
        leaving = [entry for entry in group.queue
                   if not group.engines or (group.most_tokens is not None
                                            and entry.num_tokens > group.most_tokens)]
        if leaving:
            staying = set(group.queue).difference(leaving)
            group.queue.drain()
            group.queue.put_back(staying)
            for entry in leaving:
                entry.group = None
            self._decode_queue.put_back(leaving)

    def _share(self):
        """A decode group has joined: those that have more than their share of the load give the
        last requests of their queues back, so that it is not idle while others wait. Beyond the
        paper, where groups are there from the beginning."""
        self._fleet.new_group = False
        groups = self._fleet.groups[DE].values()
        share = sum(group.load for group in groups) / len(groups)
        leaving = []
        for group in groups:
            while group.queue and group.load > share:
                leaving.append(group.queue.pop())
                leaving[-1].group = None
            self._fleet.by_load.touch(group)
        self._decode_queue.put_back(leaving)

    # -- decisions

    def fetch(self, prefill_reports, decode_reports) -> list[Route]:
        """Routes for the requests that can start now, in the order in which they came.

        A request that has got one engine keeps it and waits for the other; the scheduler counts
        it as that engine's load. Requests that turn out to be too long for all decode engines,
        and those that the policy refuses, are taken out: see `rejections`. Should the policy fail
        with anything but a `KvioError`, that comes out here (the first such error; the rejections
        have each as their cause), and the routes come with the next fetch.
        """
        prefill, decode = self._observe(prefill_reports, decode_reports)
        queue, complete = self._prefill_queue, self._complete
        for entry, engine, reason in choose_prefill(queue, prefill, self.alpha, self.beta):
            queue.popleft()
            entry.prefill, entry.prefill_reason = engine, reason
            if entry.decode is not None:
                complete[entry.request.request_id] = entry
        self._enter_groups()
        groups = {}
        for engine in decode:
            if engine.group.queue:
                groups.setdefault(engine.group, []).append(engine)
        for group, engines in groups.items():       # they do not see each other
            self._fetch_decode(group, engines)
        if complete:
            self._commit_all()
        routes, self._routes = self._routes, []
        return routes

    def _enter_groups(self):
        """Decode phase 1."""
        fleet = self._fleet
        if not fleet.groups[DE] or not self._decode_queue:
            return
        for entry in self._decode_queue.drain():
            group = entry.group = choose_group(entry, fleet.by_load)
            if group is None:
                self._decode_queue.append(entry)    # where `cancel` will look for it
                self._reject(entry, _too_long(entry.request, fleet.most_tokens))
                continue
            if entry.place < group.last_assigned:   # it comes from a group that was lost
                self._take_decode_back(group, entry.place)
                group.last_assigned = entry.place
            group.queue.insert(entry)
            fleet.by_load.touch(group)

    def _fetch_decode(self, group, engines):
        """Decode phase 2."""
        queue = group.queue
        for entry, engine, reason in choose_decode(queue, engines):
            queue.popleft()
            entry.decode, entry.decode_reason = engine, reason
            group.last_assigned = entry.place
            if entry.prefill is not None:
                self._complete[entry.request.request_id] = entry
        self._fleet.by_load.touch(group)

    def _commit_all(self):
        failure = None
        for entry in sorted(self._complete.values(), key=_place):
            try:
                self._routes.append(self._commit(entry))
            except KvioError as wrong:
                self._reject(entry, wrong)
            except Exception as wrong:              # of a policy: the other requests go on
                error = InvalidArgument(
                    f"request {entry.request.request_id}: the policy failed with {wrong!r}")
                error.__cause__ = wrong
                self._reject(entry, error)
                failure = failure or wrong
        if failure is not None:
            raise failure

    def _commit(self, entry):
        """The read path is decided, and with it the route."""
        request, pe, de = entry.request, entry.prefill, entry.decode
        request_id, num_tokens, nodes = request.request_id, entry.num_tokens, self._fleet.nodes
        choice = self._read_choice(request, pe, de)
        for part in choice.parts:
            if part.node_id not in nodes:
                raise InvalidArgument(f"the policy let node {part.node_id} read, which is not "
                                      f"known: {choice}")
        self.num_routes = number = max(self.num_routes, self._fleet.last_route) + 1
        for part in choice.parts:                   # the next request must see it
            node = nodes[part.node_id]
            node.add_read(number, part.num_tokens, request_id, node not in (pe.node, de.node))
            self._fleet.rank(node)
            if node is not de.node:
                node.add_claim(number, part.num_tokens, request_id)
        de.node.add_claim(number, request.num_prompt_tokens, request_id)    # all of it goes there
        for engine in (pe, de):
            engine.commit(number, num_tokens, request_id)
            self._fleet.hold(engine, request_id)
        del self._waiting[request_id], self._complete[request_id]
        return Route(request_id, pe.engine_id, de.engine_id, choice.parts,
                     Reason("{}; PE: {}; DE: {}", choice.reason, entry.prefill_reason,
                            entry.decode_reason), choice.push, number)

    def _read_choice(self, request, pe, de):
        """The policy's, of the hits that are worth loading."""
        hits, rule = request.num_cached_tokens, None
        if hits and self.recompute is not None:
            busy_s = BETA_S * (pe.num_tokens - request.num_tokens) / max(1, self.beta)
            rule = self.recompute.for_request(request, self.policy, pe.node.state, de.node.state,
                                              self._others(pe, de), busy_s)
            hits = checked_int("num_tokens to load", rule.num_tokens, 0, hits)
        choice = self.policy.choose(hits, self.block_tokens, pe.node.state, de.node.state,
                                    self._others(pe, de)) if hits else NOTHING
        if hits and not self._is_own_policy:
            checked_choice(choice, hits, self.block_tokens, pe.node.state, de.node.state)
        return choice if rule is None else replace(
            choice, reason=Reason("{}; {}", rule.reason, choice.reason))

    def _others(self, pe, de):
        """The nodes that are neither's and lend something, those first whose storage NIC comes
        free first."""
        return (node.state for node in self._fleet.by_finish_time
                if node is not pe.node and node is not de.node)


def _held(request_id):
    return InvalidArgument(f"request {request_id} is held by an engine already: give it a new id, "
                           "or wait until the engine has let it go and reported so")


def _too_long(request, most_tokens):
    return RequestTooLong(
        f"request {request.request_id} needs {request.num_tokens} tokens of HBM (prompt and "
        f"max_new_tokens), the largest decode engine has {most_tokens}: shorten it, or add an "
        "engine with more HBM")
