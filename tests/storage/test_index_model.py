"""The index against a naive model of include/kvio/index.h, after every step of a random run."""
import errno

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvio.layout import KEY_DTYPE
from kvio.storage.format import BLOCK_IO
from kvio.storage.index import Index

ZERO, MARKED = bytes(16), b"root" + bytes(11) + b"\1"
SLOTS, OWN = 6, {0: True, 1: False, 2: True, 3: False}      # segment -> is it ours?
KEYS = [bytes([n]) * 16 for n in range(1, 10)]
# Two chains that share their beginning, a bare key, a chain under a mark; 9 is its own parent.
PARENT = {1: ZERO, 2: KEYS[0], 3: KEYS[1], 4: KEYS[1], 5: KEYS[3], 6: ZERO, 7: MARKED, 8: KEYS[6],
          9: KEYS[8]}


def blocks(*rows):
    """(segment, slot, generation, key number[, parent])"""
    out = np.zeros(len(rows), BLOCK_IO)
    for i, (segment, slot, generation, number, *parent) in enumerate(rows):
        out[i]["segment"], out[i]["slot"], out[i]["generation"] = segment, slot, generation
        out[i]["key"] = np.void(KEYS[number - 1])
        out[i]["parent"] = np.void(parent[0] if parent else PARENT[number])
        out[i]["tokens"], out[i]["crc"] = 64 + number, 1000 * generation + slot
    return out


def keys(*numbers):
    return np.frombuffer(b"".join(KEYS[n - 1] + PARENT[n] for n in numbers), KEY_DTYPE)


class Model:
    """Does what the header says, as slowly as can be."""

    def __init__(self):
        self.places = {}                # (segment, slot) -> (generation, key, parent)
        self.lru = []                   # own places, coldest first
        self.pins, self.used, self.dropped = {}, dict.fromkeys(OWN, 0), set()

    def stored(self, key):
        return any(held == key for _, held, _ in self.places.values())

    def of(self, key):
        return [place for place, (_, held, _) in self.places.items() if held == key]

    def is_orphan(self, place):
        parent = self.places[place][2]
        return not self.stored(parent) and parent not in (ZERO, MARKED)

    def is_leaf(self, place):
        return all(parent != self.places[place][1] for _, _, parent in self.places.values())

    def remove(self, place):
        _, key, _ = self.places.pop(place)
        if place in self.lru:
            self.lru.remove(place)
        if not self.stored(key):
            self.pins.pop(key, None)

    def add(self, rows):
        """How many keys were not stored."""
        fresh, new = [], 0
        for row in rows:
            new += self.add_one(row, fresh)[0]
        self.make_hot(fresh)
        return new

    def add_one(self, row, fresh):
        """(new keys, changes)"""
        place, generation = (int(row["segment"]), int(row["slot"])), int(row["generation"])
        if place[0] in self.dropped or self.places.get(place, (0,))[0] == generation:
            return 0, 0
        known, key = place in self.places, row["key"].tobytes()
        if known:
            self.remove(place)
            fresh[:] = [other for other in fresh if other != place]
        new = not self.stored(key)
        self.places[place] = generation, key, row["parent"].tobytes()
        if OWN[place[0]]:
            fresh.append(place)
        return new, 1 + known

    def make_hot(self, fresh):
        self.lru = [place for place in self.lru if place not in fresh] + fresh[::-1]

    def replace(self, segment, first, count, rows):
        changes, fresh = 0, []
        for slot in range(first, first + count):
            if slot in rows["slot"]:
                changes += self.add_one(rows[rows["slot"] == slot][0], fresh)[1]
            elif (segment, slot) in self.places:
                self.remove((segment, slot))
                changes += 1
        self.make_hot(fresh)
        return changes

    def touch(self, place, now_s):
        self.used[place[0]] = max(self.used[place[0]], now_s)
        if place in self.lru:
            self.lru.remove(place)
            self.lru.append(place)

    def pinned(self, place):
        return self.pins.get(self.places[place][1], 0) > 0

    def pinned_below(self, place):
        todo, seen = [self.places[place][1]], set()
        while todo:
            above = todo.pop()
            for below, (_, key, parent) in self.places.items():
                if parent == above and key not in seen:
                    if self.pinned(below):
                        return True
                    seen.add(key)
                    todo.append(key)
        return False

    def check_eviction(self, count, out):
        for i in range(count):
            free = [place for place in self.lru if not self.pinned(place)]
            orphans = [place for place in free if self.is_orphan(place)]
            leaves = [place for place in free if self.is_leaf(place)]
            inner = [place for place in free if not self.pinned_below(place)]
            if i == len(out):
                assert not orphans and not leaves and not inner
                return
            taken = int(out[i]["segment"]), int(out[i]["slot"])
            # Of a key that stands below several parents the index looks at one.
            coldest = free[:free.index(inner[0]) + 1] if inner else free
            assert taken in (orphans or leaves[:1] or coldest)
            assert out[i]["status"] == bool(orphans)
            assert (int(out[i]["generation"]), out[i]["key"].tobytes(),
                    out[i]["parent"].tobytes()) == self.places[taken]
            self.remove(taken)
        assert len(out) == count

    def stats(self):
        stored = {key for _, key, _ in self.places.values()}
        parents = {parent for _, _, parent in self.places.values()}
        return {"blocks": len(stored), "places": len(self.places), "own_places": len(self.lru),
                "orphans": sum(map(self.is_orphan, self.lru)), "ghosts": len(parents - stored),
                "pinned": sum(count > 0 for count in self.pins.values())}


class Pair:
    """The index and its model, side by side."""

    def __init__(self):
        self.index, self.model, self.generation = Index(), Model(), 0
        for number, own in OWN.items():
            self.index.add_segment(number, SLOTS, own)

    def rows(self, segment, items):
        """Blocks of (slot, key number, form): now and then one that is known already, or one
        whose parent is another than in its copies."""
        out = []
        for slot, number, form in items:
            known = self.model.places.get((segment, slot))
            if known and form == 0:
                out.append((segment, slot, known[0], KEYS.index(known[1]) + 1, known[2]))
                continue
            self.generation += 1
            other = (MARKED if form == 1 else PARENT[number],)
            out.append((segment, slot, self.generation, number, *other))
        return blocks(*out)

    def insert(self, segment, items):
        rows = self.rows(segment, items)
        assert self.index.insert(rows) == self.model.add(rows)

    def replace(self, segment, items):
        items = sorted({slot: (slot, number, form) for slot, number, form in items}.values())
        first = min((slot for slot, *_ in items), default=1)
        count = max((slot for slot, *_ in items), default=4) - first + 1
        rows = self.rows(segment, items)
        changes = self.model.replace(segment, first, count, rows)
        assert self.index.replace(segment, first, count, rows) == changes

    def remove(self, segment, slot, stale):
        known = self.model.places.get((segment, slot))
        generation = (known[0] if known else 1) + stale
        gone = self.index.remove(segment, slot, generation)
        assert gone == (known is not None and not stale)
        if gone:
            self.model.remove((segment, slot))

    def drop(self, segment):
        count = sum(place[0] == segment for place in self.model.places)
        assert self.index.drop_segment(segment) == count
        for place in [place for place in self.model.places if place[0] == segment]:
            self.model.remove(place)
        self.model.dropped.add(segment)

    def declare(self, segment):
        if segment in self.model.dropped:
            self.index.add_segment(segment, SLOTS, OWN[segment])
            self.model.dropped.discard(segment)
            self.model.used[segment] = 0

    def find(self, numbers, now_s):
        out = self.index.find(keys(*numbers), now_s)
        for row, number in zip(out, numbers):
            places = self.model.of(KEYS[number - 1])
            assert row["key"].tobytes() == KEYS[number - 1]
            assert row["status"] == (-errno.EINPROGRESS if places else -errno.ENOENT)
            if places:
                place = int(row["segment"]), int(row["slot"])
                assert place in ([p for p in places if OWN[p[0]]] or places)
                generation = self.model.places[place][0]
                assert (row["generation"], row["crc"], row["tokens"]) == (
                    generation, 1000 * generation + place[1], 64 + number)
        for row in out[::-1] if now_s else ():
            if row["status"] == -errno.EINPROGRESS:
                self.model.touch((int(row["segment"]), int(row["slot"])), now_s)

    def touch(self, numbers, now_s):
        own = 0
        before = list(self.model.lru)
        for number in reversed(numbers):
            for place in self.model.of(KEYS[number - 1]):
                own += OWN[place[0]]
                self.model.touch(place, now_s)
        assert self.index.touch(keys(*numbers), now_s) == own
        twice = {key for key in (self.model.places[place][1] for place in before)
                 if sum(OWN[place[0]] for place in self.model.of(key)) > 1}
        if twice:               # in which order the copies of one key are touched is not said
            self.model.lru = before
            self.settle(numbers)

    def settle(self, numbers):
        """Touch through `find`, which names the place, until both agree."""
        for number in reversed(numbers):
            for place in self.model.of(KEYS[number - 1]):
                if OWN[place[0]]:
                    generation, key, parent = self.model.places[place]
                    self.model.remove(place), self.index.remove(*place, generation)
                    row = blocks((*place, generation, number, parent))
                    self.model.add(row), self.index.insert(row)

    def pin(self, numbers, by):
        prefix, gap = 0, False
        for number in numbers:
            key = KEYS[number - 1]
            gap = gap or not self.model.stored(key)
            prefix += not gap
            if self.model.stored(key):
                self.model.pins[key] = max(0, self.model.pins.get(key, 0) + by)
        assert self.index.pin(keys(*numbers), by) == prefix

    def evict(self, count):
        self.model.check_eviction(count, self.index.evict(count))

    def match(self, numbers):
        stored = [self.model.stored(KEYS[n - 1]) for n in numbers]
        assert self.index.match(keys(*numbers)) == (stored + [False]).index(False)

    def agree(self):
        stats = self.index.stats()
        assert stats.pop("memory_bytes") > 0
        assert stats == self.model.stats() and len(self.index) == stats["blocks"]
        for number in OWN:
            count = sum(place[0] == number for place in self.model.places)
            assert self.index.segment_use(number) == (count, self.model.used[number])


numbers = st.lists(st.integers(1, 9), max_size=5)
items = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(1, 9), st.integers(0, 9)),
                 max_size=6)
segment = st.integers(0, 3)
operation = st.one_of(
    st.tuples(st.just("insert"), segment, items), st.tuples(st.just("insert"), segment, items),
    st.tuples(st.just("replace"), segment, items), st.tuples(st.just("evict"), st.integers(0, 5)),
    st.tuples(st.just("remove"), segment, st.integers(0, SLOTS - 1), st.booleans()),
    st.tuples(st.just("find"), numbers, st.integers(0, 9)), st.tuples(st.just("match"), numbers),
    st.tuples(st.just("touch"), numbers, st.integers(1, 9)),
    st.tuples(st.just("pin"), numbers, st.sampled_from([1, 1, -1, -2])),
    st.tuples(st.just("drop"), segment), st.tuples(st.just("declare"), segment))


def run(operations):
    pair = Pair()
    for name, *arguments in operations:
        getattr(pair, name)(*arguments)
        pair.agree()
    pair.pin(range(1, 10), -100)
    pair.evict(100)
    pair.agree()
    assert not pair.model.lru


@settings(deadline=None, max_examples=300)
@given(st.lists(operation, max_size=40))
def test_any_sequence(operations):
    run(operations)


def test_long_sequences():
    rng = np.random.default_rng(5)

    def some(most, low=1, high=9):
        return rng.integers(low, high + 1, rng.integers(0, most + 1)).tolist()

    def some_items():
        return [(int(rng.integers(SLOTS)), int(rng.integers(1, 10)), int(rng.integers(10)))
                for _ in range(rng.integers(0, 6))]

    make = [lambda: ("insert", int(rng.integers(4)), some_items())] * 4 + [
        lambda: ("replace", int(rng.integers(4)), some_items()),
        lambda: ("evict", int(rng.integers(5))), lambda: ("evict", int(rng.integers(3))),
        lambda: ("remove", int(rng.integers(4)), int(rng.integers(SLOTS)), bool(rng.random() < .1)),
        lambda: ("find", some(5), int(rng.integers(9))), lambda: ("match", some(5)),
        lambda: ("touch", some(5), int(rng.integers(1, 9))),
        lambda: ("pin", some(4), int(rng.choice([1, -1]))),
        lambda: ("drop", int(rng.integers(4))) if rng.random() < .2 else ("declare", 0),
        lambda: ("declare", int(rng.integers(4)))]
    for _ in range(60):
        run([make[rng.integers(len(make))]() for _ in range(120)])
