"""Whatever happens, in whatever order: the scheduler decides as the plain rules say, each request
is assigned once, HBM is never promised twice, and in the end nobody is left waiting."""
import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from plain_scheduler import PlainScheduler

from kvio.scheduler import DE, PE, EngineReport, Request, Scheduler

HBM = 1000


class Cluster(RuleBasedStateMachine):
    """Engines that hold what was delivered to them, and two schedulers that have to agree."""

    @initialize(alpha=st.sampled_from([0, 100, 1000]), beta=st.sampled_from([0, 300, 3000]),
                told=st.booleans())
    def start(self, alpha, beta, told):
        self.made, self.plain = Scheduler(alpha, beta), PlainScheduler(alpha, beta)
        self.told = told                    # reports say which routes they count
        self.engines, self.ids = {}, {PE: 0, DE: 0}     # (side, id) -> {request_id: tokens}
        self.places = {}                    # (side, id) -> (node, group, hbm)
        self.delivered = 0
        self.underway, self.routed, self.tokens = [], set(), {}     # tokens of all requests
        for _ in range(2):
            self.join(PE, 0, HBM)
            self.join(DE, 0, HBM)

    @rule(side=st.sampled_from([PE, DE]), group=st.integers(0, 2),
          hbm=st.sampled_from([HBM // 2, HBM, 2 * HBM]))
    def join(self, side, group, hbm):
        if len([key for key in self.engines if key[0] == side]) < 5:
            engine_id = self.ids[side] = self.ids[side] + 1
            self.engines[side, engine_id] = {}
            # An engine a node: their numbers are those of side and engine.
            self.places[side, engine_id] = 2 * engine_id + (side == DE), group, hbm

    @rule(prompt=st.integers(1, 900), hits=st.floats(0, 1), new=st.integers(0, 100))
    def submit(self, prompt, hits, new):
        request = Request(len(self.tokens), prompt, int(hits * (prompt - 1)), new)
        self.tokens[request.request_id] = request.num_tokens
        try:
            self.made.submit(request)
        except ValueError:                  # too long for all: the plain one would find out later
            return
        self.plain.submit(request)

    @rule(data=st.data())
    def cancel(self, data):
        ids = [entry.request.request_id for entry in self.plain.waiting] + [10**6]
        request_id = data.draw(st.sampled_from(ids))
        assert self.made.cancel(request_id) == (request_id != 10**6)
        self.plain.cancel(request_id)

    def report(self, key, read_queue):
        node, group, hbm = self.places[key]
        held = sum(self.engines[key].values())
        return EngineReport(key[1], node, len(self.engines[key]), held, read_queue,
                            hbm - held if key[0] == DE else 0, group,
                            self.delivered if self.told else None,
                            hbm_tokens=hbm if key[0] == DE else None)

    @rule(groups=st.sets(st.tuples(st.sampled_from([PE, DE]), st.integers(0, 2)), min_size=1),
          reads=st.lists(st.sampled_from([0, 50, 101, 5000]), min_size=10, max_size=10))
    def fetch(self, groups, reads):
        if not self.told:
            self.deliver()
        reports = {side: [self.report(key, reads[i]) for i, key in enumerate(self.engines)
                          if key[0] == side and (side, self.places[key][1]) in groups]
                   for side in (PE, DE)}
        routes = self.made.fetch(reports[PE], reports[DE])
        expected = self.plain.fetch(reports[PE], reports[DE])
        assert [(r.request_id, r.prefill_engine, r.decode_engine, r.path)
                for r in routes] == expected
        assert [r.request_id for r in self.made.rejections()] == self.plain.rejected
        self.plain.rejected = []
        for route in routes:
            assert route.request_id not in self.routed, "assigned twice"
            self.routed.add(route.request_id)
        self.underway += routes
        self.check()

    @rule()
    def deliver(self):
        for route in self.underway:
            self.delivered = route.number
            for key in ((PE, route.prefill_engine), (DE, route.decode_engine)):
                if key in self.engines:
                    self.engines[key][route.request_id] = self.tokens[route.request_id]
        self.underway = []

    @rule(data=st.data())
    def finish(self, data):
        """An engine is done with one of its requests."""
        held = [(key, request_id) for key, requests in self.engines.items()
                for request_id in requests]
        if held:
            key, request_id = data.draw(st.sampled_from(held))
            del self.engines[key][request_id]

    @precondition(lambda self: len(self.engines) > 2)
    @rule(data=st.data(), whole_group=st.booleans())
    def lose(self, data, whole_group):
        key = data.draw(st.sampled_from(sorted(self.engines)))
        side, group = key[0], self.places[key][1]
        gone = [k for k in sorted(self.engines) if k == key or whole_group and k[0] == side
                and self.places[k][1] == group]
        if whole_group:
            self.made.lose_group(side, group)
        for k in gone:
            if not whole_group:
                self.made.lose(*k)
            if k in self.plain.engines:
                self.plain.lose(*k)
            del self.engines[k]
        self.check()

    def check(self):
        """HBM is promised once: to what a DE holds, what is on its way, and halves."""
        assert self.made.num_waiting == len(self.plain.waiting)
        for key, held in self.engines.items():
            if key[0] == DE and key in self.plain.engines:
                promised = sum(held.values()) + sum(
                    self.tokens[r.request_id] for r in self.underway
                    if r.decode_engine == key[1]) + sum(
                    self.plain.halves(self.plain.engines[key]))
                assert promised <= self.places[key][2]

    def teardown(self):
        """Engines finish what they have: then everybody who waits gets a route."""
        if not hasattr(self, "made"):
            return
        self.join(PE, 0, HBM)
        self.join(DE, 0, HBM)
        groups = {(side, group) for side in (PE, DE) for group in range(3)}
        for _ in range(2 * self.made.num_waiting + 2):
            self.deliver()
            for requests in self.engines.values():
                requests.clear()
            self.fetch(groups, [0] * 10)
        assert self.made.num_waiting == 0


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=100, stateful_step_count=40, deadline=None,
                                suppress_health_check=[HealthCheck.too_slow])
