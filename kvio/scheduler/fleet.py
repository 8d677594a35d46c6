"""All engines that are known: reports are checked and taken in here, engines join and leave."""
from kvio.errors import InvalidArgument
from kvio.scheduler.data import DE, PE, EngineReport
from kvio.scheduler.loads import EngineLoad, Group, Node
from kvio.scheduler.queues import Ranking

__all__ = ["Fleet"]


class Fleet:
    """`engines` and `groups` by side and id, `nodes` by id; decode groups by their load, and nodes
    that lend by when they will have read all that waits (`by_load`, `by_finish_time`).

    `holders` counts the engines that hold a request, as far as they say so.
    """

    def __init__(self):
        self.engines, self.groups, self.nodes = {PE: {}, DE: {}}, {PE: {}, DE: {}}, {}
        self.by_load = Ranking("group_id", "load")
        self.by_finish_time = Ranking("node_id", "finish_time")
        self.most_tokens = None         # the longest request that any DE can hold; None: unknown
        self.last_route = 0             # the highest that any engine has told of
        self.num_late_reports = 0
        self.new_group = False          # a decode group has joined
        self.holders = {}               # request_id -> number of engines
        self._lost = {}                 # (side, engine_id) -> incarnation

    # -- reports

    def check(self, reports: dict):
        """By side, (report, engine or None for a new one) without reports that come late; and the
        engines, as (side, engine_id), that have started anew since they last reported: what was
        known of these has to be forgotten first. InvalidArgument, and nothing is changed, if a
        report contradicts another or what is known."""
        homes, checked, restarted = {}, {}, []
        for side in (PE, DE):
            engines, seen, kept = self.engines[side], set(), []
            for report in reports[side]:
                if type(report) is not EngineReport:
                    raise InvalidArgument(f"a fetch takes EngineReports, not {report!r}")
                engine = engines.get(report.engine_id)
                # Nearly always it is an engine that is known, where it was.
                if engine is None or engine.place != (report.incarnation, report.group_id,
                                                      report.node_id):
                    if not self._check_new(side, report, engine, homes):
                        continue                    # it is late
                    if engine is not None:
                        restarted.append((side, report.engine_id))
                        engine = None
                seen.add(report.engine_id)
                kept.append((report, engine))
            if len(seen) < len(kept):
                raise InvalidArgument(f"a {side} engine reports twice in one fetch: "
                                      f"{[report.engine_id for report, _ in kept]}")
            checked[side] = kept
        self.num_late_reports += sum(len(reports[side]) - len(checked[side]) for side in checked)
        return checked, restarted

    def _check_new(self, side, report, engine, homes):
        """False if the report comes from an engine that has been lost since."""
        if engine is not None and report.incarnation == engine.incarnation:
            raise _moved(side, report, engine)
        known = self._lost.get((side, report.engine_id), -1) if engine is None else \
            engine.incarnation
        if report.incarnation <= known:
            return False
        node = self.nodes.get(report.node_id)
        home = (node.side, node.group_id) if node else homes.setdefault(
            report.node_id, (side, report.group_id))
        if home != (side, report.group_id):
            raise InvalidArgument(
                f"{_name(side, report)} says that node {report.node_id} is in the {side} group "
                f"{report.group_id}, but it is in the {home[0]} group {home[1]}: all engines of a "
                "node are in one group")
        return True

    def take(self, side: str, checked, newly_held: set) -> list[EngineLoad]:
        """Take in what `check` gave; the engines that have reported. Requests that an engine says
        to hold for the first time are added to `newly_held`."""
        taken, node, group, last_route = [], None, None, None
        for report, engine in checked:
            if engine is None:
                engine = self._join(side, report)
            if engine.node is not node or report.last_route != last_route:
                node, last_route = engine.node, report.last_route
                node.observe(report)                # engines of a node say the same of it
                self.rank(node)
                if last_route is not None and last_route > self.last_route:
                    self.last_route = last_route
            if not engine.observe(report):
                self.num_late_reports += 1
            elif report.hbm_tokens != engine.hbm_tokens or report.request_ids is not None:
                self._take_rare(engine, report, newly_held)
            if engine.group is not group:
                group = engine.group
                if side == DE:
                    self.by_load.touch(group)
            taken.append(engine)
        return taken

    def rank(self, node: Node) -> None:
        """A node's figures have changed. Only those that lend something are ranked."""
        if node.state.lend_tokens > 0:
            self.by_finish_time.touch(node)
        else:
            self.by_finish_time.remove(node)

    def _take_rare(self, engine, report, newly_held):
        if engine.hbm_tokens != report.hbm_tokens:
            engine.hbm_tokens = report.hbm_tokens
            self.measure(engine.group)
        if report.request_ids is not None:
            newly_held |= self._hold(engine, report.request_ids)

    def _join(self, side, report):
        node = self.nodes.get(report.node_id)
        if node is None:
            node = self.nodes[report.node_id] = Node(report.node_id, side, report.group_id)
        group = self.groups[side].get(report.group_id)
        if group is None:
            group = self.groups[side][report.group_id] = Group(side, report.group_id)
            self.new_group |= side == DE
        engine = EngineLoad(side, report.engine_id, node, group, report.incarnation)
        engine.hbm_tokens = report.hbm_tokens
        self.engines[side][report.engine_id] = group.engines[report.engine_id] = engine
        node.num_engines += 1
        self.measure(group)
        return engine

    def measure(self, group: Group) -> None:
        """Engines have come to a group or left it, or have more or less HBM than before."""
        if group.side == DE:
            group.measure()
            sizes = [group.most_tokens for group in self.groups[DE].values()]
            self.most_tokens = None if None in sizes or not sizes else max(sizes)

    # -- who holds what

    def _hold(self, engine, reported):
        """The requests that an engine holds are these, and the routes that it cannot count yet."""
        before = engine.request_ids or set()
        engine.request_ids = set(reported).union(engine.unseen.request_ids)
        new = engine.request_ids - before
        for request_id in new:
            self.holders[request_id] = self.holders.get(request_id, 0) + 1
        for request_id in before - engine.request_ids:
            self._let_go(request_id)
        return new

    def hold(self, engine: EngineLoad, request_id: int) -> None:
        """A route gives a request to an engine (of which it matters if it says what it holds)."""
        if engine.request_ids is not None and request_id not in engine.request_ids:
            engine.request_ids.add(request_id)
            self.holders[request_id] = self.holders.get(request_id, 0) + 1

    def _let_go(self, request_id):
        self.holders[request_id] -= 1
        if not self.holders[request_id]:
            del self.holders[request_id]

    # -- engines that have gone

    def remove(self, engine: EngineLoad) -> None:
        """Forget an engine, its node with the last engine of it, its group likewise."""
        side, group, node = engine.side, engine.group, engine.node
        self._lost[side, engine.engine_id] = engine.incarnation
        del self.engines[side][engine.engine_id], group.engines[engine.engine_id]
        group.num_tokens -= engine.num_tokens
        node.num_engines -= 1
        if not node.num_engines:
            del self.nodes[node.node_id]
            self.by_finish_time.remove(node)
        if not group.engines:
            del self.groups[side][group.group_id]
        if side == DE and group.engines:
            self.by_load.touch(group)
        elif side == DE:
            self.by_load.remove(group)
        self.measure(group)
        for request_id in engine.request_ids or ():
            self._let_go(request_id)


def _moved(side, report, engine):
    return InvalidArgument(
        f"{_name(side, report)} was of node {engine.node.node_id} and group "
        f"{engine.group.group_id}, now it says node {report.node_id} and group "
        f"{report.group_id}: engine ids must differ on each side, and an engine that moves has to "
        "be lost first")


def _name(side, report):
    return f"{'prefill' if side == PE else 'decode'} engine {report.engine_id}"
