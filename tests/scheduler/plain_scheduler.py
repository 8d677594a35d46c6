"""The scheduler's rules once more, in their plainest form: every figure is computed from scratch
whenever it is needed. Slow, and right as far as one can see by reading it."""
from dataclasses import dataclass

from kvio.scheduler import DE, PE


@dataclass(eq=False)
class Entry:
    request: object
    place: int
    pe: object = None               # an Engine
    de: object = None
    group: int | None = None        # decode group whose queue it is in

    @property
    def need(self):
        return self.request.num_tokens


@dataclass(eq=False)
class Engine:
    side: str
    report: object                  # the newest one
    routes: list                    # (number, tokens) of all routes that it was given
    last: int = 0                   # the highest number that the report counts


class PlainScheduler:
    """As `kvio.scheduler.Scheduler` with policy "shorter_queue". Reports are always in order."""

    def __init__(self, alpha, beta):
        self.alpha, self.beta = alpha, beta
        self.engines, self.waiting, self.number, self.places = {}, [], 0, 0
        self.reads = {}             # node -> (tokens reported, [(number, tokens)] of routes)
        self.rejected = []

    # -- figures

    def unseen(self, engine):
        return [tokens for number, tokens in engine.routes if number > engine.last]

    def halves(self, engine):
        return [e.need for e in self.waiting if engine in (e.pe, e.de)]

    def seq(self, engine):
        return engine.report.num_requests + len(self.unseen(engine)) + len(self.halves(engine))

    def tok(self, engine):
        return engine.report.num_tokens + sum(self.unseen(engine)) + sum(self.halves(engine))

    def free(self, engine):
        return engine.report.free_hbm_tokens - sum(self.unseen(engine)) - sum(self.halves(engine))

    def read_queue(self, node):
        tokens, last, routes = self.reads[node]
        return tokens + sum(t for n, t in routes if n > last)

    def of(self, side, group=None):
        return [e for (s, _), e in sorted(self.engines.items(), key=lambda kv: kv[0][1])
                if s == side and group in (None, e.report.group_id)]

    def decode_groups(self):
        return sorted({e.report.group_id for e in self.of(DE)})

    def group_load(self, group):
        return sum(map(self.tok, self.of(DE, group))) + sum(
            e.need for e in self.waiting if e.group == group and e.de is None)

    def most(self, group):
        return max(e.report.hbm_tokens for e in self.of(DE, group))

    # -- what happens

    def submit(self, request):
        self.places += 1
        self.waiting.append(Entry(request, self.places))

    def cancel(self, request_id):
        self.waiting = [e for e in self.waiting if e.request.request_id != request_id]

    def lose(self, side, engine_id):
        engine = self.engines[side, engine_id]
        had = [e for e in self.waiting if (e.pe if side == PE else e.de) is engine]
        for e in self.waiting:
            if had and e.place >= had[0].place:
                if side == PE:
                    e.pe = None
                elif e.group == engine.report.group_id:
                    e.de = None
        del self.engines[side, engine_id]
        group = engine.report.group_id
        for e in self.waiting:
            if side == DE and e.group == group and e.de is None and (
                    group not in self.decode_groups() or e.need > self.most(group)):
                e.group = None

    def fetch(self, prefill, decode):
        reporting = {(PE, r.engine_id) for r in prefill} | {(DE, r.engine_id) for r in decode}
        before = self.decode_groups()
        for side, reports in ((PE, prefill), (DE, decode)):
            for r in reports:
                engine = self.engines.setdefault((side, r.engine_id), Engine(side, r, []))
                engine.report = r
                engine.last = self.number if r.last_route is None else r.last_route
                self.reads[r.node_id] = (r.read_queue_tokens, engine.last,
                                         self.reads.get(r.node_id, (0, 0, []))[2])
        if before != self.decode_groups():
            self.share()
        self.choose_prefill([e for e in self.of(PE) if (PE, e.report.engine_id) in reporting])
        self.enter_groups()
        for group in self.decode_groups():
            self.choose_decode(group, [e for e in self.of(DE, group)
                                       if (DE, e.report.engine_id) in reporting])
        return [self.route(e) for e in list(self.waiting) if e.pe and e.de]

    def share(self):
        groups = self.decode_groups()
        share = sum(map(self.group_load, groups)) / len(groups)
        for group in groups:
            queue = [e for e in self.waiting if e.group == group and e.de is None]
            while queue and self.group_load(group) > share:
                queue.pop().group = None

    def choose_prefill(self, engines):
        for entry in [e for e in self.waiting if e.pe is None]:
            usable = [e for e in engines if self.tok(e) <= self.beta]
            short = [e for e in usable if self.read_queue(e.report.node_id) <= self.alpha]
            if not usable:
                return
            entry.pe = min(short or usable, key=lambda e: (self.tok(e), e.report.engine_id))

    def enter_groups(self):
        groups = self.decode_groups()
        for entry in [e for e in self.waiting if e.group is None] if groups else ():
            can = [g for g in groups if entry.need <= self.most(g)]
            if not can:
                self.rejected.append(entry.request.request_id)
                self.waiting.remove(entry)
                continue
            entry.group = min(can, key=lambda g: (self.group_load(g), g))
            for later in self.waiting:
                if later.group == entry.group and later.place > entry.place:
                    later.de = None

    def choose_decode(self, group, engines):
        queue = [e for e in self.waiting if e.group == group and e.de is None]
        room, expected = sum(max(0, self.free(e)) for e in engines), 0
        for entry in queue:
            if expected + entry.need > room:
                break
            expected += entry.need
        if engines:
            z = 1.05 * (sum(map(self.tok, engines)) + expected) / len(engines)
        for entry in queue:
            fits = [e for e in engines if self.free(e) >= entry.need]
            normal = [e for e in fits if self.tok(e) + entry.need <= z]
            if not fits:
                return
            entry.de = min(normal, key=lambda e: (self.seq(e), e.report.engine_id)) if normal \
                else min(fits, key=lambda e: (self.tok(e), e.report.engine_id))

    def route(self, entry):
        self.number += 1
        self.waiting.remove(entry)
        for engine in (entry.pe, entry.de):
            engine.routes.append((self.number, entry.need))
        pe, de = entry.pe.report.node_id, entry.de.report.node_id
        path = "none"
        if entry.request.num_cached_tokens:
            path = PE if self.read_queue(pe) <= self.read_queue(de) else DE
            self.reads[pe if path == PE else de][2].append(
                (self.number, entry.request.num_cached_tokens))
        return (entry.request.request_id, entry.pe.report.engine_id, entry.de.report.engine_id,
                path)
