"""All engines that are known: reports are checked and taken in here, engines join and leave."""
from kvio.errors import InvalidArgument
from kvio.scheduler.data import DE, PE, EngineReport
from kvio.scheduler.loads import EngineLoad, Group, Node
from kvio.scheduler.queues import Ranking

__all__ = ["Fleet"]


class Fleet:
    """`engines` and `groups` by side and id, `nodes` by id; decode groups by their load and nodes
    by when they will have read all that waits (`by_load`, `by_finish_time`).

    `holders` counts the engines that hold a request, as far as they say so.
    """

    def __init__(self):
        self.engines, self.groups, self.nodes = {PE: {}, DE: {}}, {PE: {}, DE: {}}, {}
        self.by_load = Ranking("group_id", "load")
        self.by_finish_time = Ranking("node_id", "finish_time")
        self.most_tokens = None         # the longest request that any DE can hold; None: unknown
        self.last_route = 0             # the highest that any engine has told of
        self.num_late_reports = 0
        self.holders = {}               # request_id -> number of engines
        self._lost = {}                 # (side, engine_id) -> incarnation

    # -- reports

    def check(self, reports: dict) -> dict:
        """The reports of both sides without those that come late; InvalidArgument, and nothing
        is changed, if one contradicts another or what is known."""
        homes, checked = {}, {}
        for side in (PE, DE):
            seen, kept = set(), []
            for report in reports[side]:
                if not isinstance(report, EngineReport):
                    raise InvalidArgument(f"a fetch takes EngineReports, not {report!r}")
                if report.engine_id in seen:
                    raise InvalidArgument(f"{_name(side, report)} reports twice in one fetch")
                seen.add(report.engine_id)
                if self._check_one(side, report, homes):
                    kept.append(report)
            checked[side] = kept
        self.num_late_reports += sum(len(reports[side]) - len(checked[side]) for side in checked)
        return checked

    def _check_one(self, side, report, homes):
        """False if the report comes from an engine that has been lost since."""
        engine = self.engines[side].get(report.engine_id)
        if engine is not None and report.incarnation == engine.incarnation:
            if report.node_id != engine.node.state.node_id or \
                    report.group_id != engine.group.group_id:
                raise InvalidArgument(
                    f"{_name(side, report)} was of node {engine.node.node_id} and group "
                    f"{engine.group.group_id}, now it says node {report.node_id} and group "
                    f"{report.group_id}: engine ids must differ on each side, and an engine that "
                    "moves has to be lost first")
            return True
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

    def restarted(self, side: str, reports) -> list[int]:
        """Engines that report with a higher incarnation: the one that was known has gone."""
        engines = self.engines[side]
        return [report.engine_id for report in reports if report.engine_id in engines
                and engines[report.engine_id].incarnation != report.incarnation]

    def take(self, side: str, reports, newly_held: set) -> list[EngineLoad]:
        """Checked reports; the engines that made them. Requests that an engine says to hold for
        the first time are added to `newly_held`."""
        engines, node, group, taken = self.engines[side], None, None, []
        for report in reports:
            engine = engines.get(report.engine_id)
            if engine is None:
                engine = self._join(side, report)
            engine.node.observe(report)
            if not engine.observe(report):
                self.num_late_reports += 1
            else:
                if engine.hbm_tokens != report.hbm_tokens:
                    engine.hbm_tokens = report.hbm_tokens
                    self.measure(engine.group)
                if report.request_ids is not None:
                    newly_held |= self._hold(engine, report.request_ids)
                if report.last_route is not None and report.last_route > self.last_route:
                    self.last_route = report.last_route
            if engine.node is not node:
                node = engine.node
                self.by_finish_time.touch(node)
            if engine.group is not group:
                group = engine.group
                if side == DE:
                    self.by_load.touch(group)
            taken.append(engine)
        return taken

    def _join(self, side, report):
        node = self.nodes.get(report.node_id)
        if node is None:
            node = self.nodes[report.node_id] = Node(report.node_id, side, report.group_id)
        group = self.groups[side].get(report.group_id)
        if group is None:
            group = self.groups[side][report.group_id] = Group(side, report.group_id)
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
            self.by_load.remove(group)
        elif side == DE:
            self.by_load.touch(group)
        self.measure(group)
        for request_id in engine.request_ids or ():
            self._let_go(request_id)


def _name(side, report):
    return f"{'prefill' if side == PE else 'decode'} engine {report.engine_id}"
