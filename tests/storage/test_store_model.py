"""The store against a dictionary with a budget: any sequence of calls gives what it says."""
import collections
import contextlib
import errno
import os
import shutil
import tempfile

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from blocks import LAYOUT, Blocks, chain, edit, get, open_store, payload, segments
from kvio.errors import TransferError

CHAINS = [chain(12, seed) for seed in range(3)]
CHAINS.append(np.concatenate([CHAINS[0][:5], chain(12, 7)[5:]]))    # shares a prefix
PARENT = {key["key"].tobytes(): key["parent"].tobytes() for keys in CHAINS for key in keys}
CAPACITY = 22


class StoreMachine(RuleBasedStateMachine):
    """`model` is the set of keys that must be found; damage takes keys out of it."""

    @initialize(backend=st.sampled_from(["threads", "auto"]), durable=st.booleans())
    def open(self, backend, durable):
        self.folder = tempfile.mkdtemp()
        self.options = {"backend": backend, "durability": "durable" if durable else "visible",
                        "capacity_bytes": CAPACITY * LAYOUT.stride, "segment_bytes": 160_000}
        self.store = open_store(self.folder, **self.options)
        self.model, self.own, self.pinned = set(), set(), collections.Counter()

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close(drain=True)
            shutil.rmtree(self.folder)

    def names(self, keys):
        return [key.tobytes() for key in keys["key"]]

    @rule(which=st.sampled_from(range(4)), first=st.integers(0, 11), count=st.integers(1, 12),
          scattered=st.booleans())
    def write(self, which, first, count, scattered):
        keys = CHAINS[which][first:first + count]
        source = Blocks(len(keys), keys=keys, scattered=scattered)
        transfer = self.store.write(keys, source.pool, source.ids)
        names, before = self.names(keys), set(self.model)
        with contextlib.suppress(TransferError):
            transfer.wait()
        stored = {name for name, status in zip(names, transfer.status) if status == 0}
        gone = {name for name in before if name not in self.store._index}
        parents = {PARENT[name] for name in names}
        # Of earlier openers whole segments may go, unless something that is needed lies there.
        reclaimed = gone - self.own
        assert not reclaimed & {*names, *parents, *self.pinned}
        gone_own = gone & self.own
        assert gone_own <= self.own - set(names) - self.kept(self.pinned)
        leafless = {PARENT[name] for name in (before & self.own) - gone} & gone_own
        assert not any(self.reachable(name, before - reclaimed) for name in leafless)   # orphans
        self.own = (self.own | stored - before) - gone
        self.model = (before | stored) - gone
        assert len(self.own) <= CAPACITY
        if set(transfer.status.tolist()) - {0}:         # then nothing else could have gone
            assert set(transfer.status.tolist()) <= {0, -errno.ENOSPC}
            assert self.store.stats()["used_bytes"] >= CAPACITY * LAYOUT.stride
            assert self.own <= self.kept(self.pinned) | self.kept({*names, *parents})

    def reachable(self, name, stored):
        while name in stored:
            name = PARENT[name]
        return name.startswith(b"root")

    def kept(self, names):
        """With all ancestors that are stored without a gap."""
        out, names = set(), set(names)
        while names := {name for name in names - out if name in self.model}:
            out |= names
            names = {PARENT[name] for name in names}
        return out

    @rule(which=st.sampled_from(range(4)), count=st.integers(1, 12), by=st.sampled_from([1, -1]))
    def pin(self, which, count, by):
        keys = CHAINS[which][:count]
        if by > 0:
            assert self.store.pin(keys) == self.store.match(keys)
            self.pinned.update(self.names(keys)[:self.store.match(keys)])
        else:
            self.store.unpin(keys)
            self.pinned.subtract(name for name in self.names(keys) if name in self.pinned)
        self.pinned = +self.pinned

    @rule(which=st.sampled_from(range(4)), first=st.integers(0, 11), count=st.integers(1, 12),
          seed=st.integers(0, 9))
    def read(self, which, first, count, seed):
        keys = CHAINS[which][first:first + count]
        if seed:
            keys = keys[np.random.default_rng(seed).permutation(len(keys))]
        usable, status, target = get(self.store, keys, scattered=seed % 2 == 1)
        expected = [name in self.model for name in self.names(keys)]
        assert (status == 0).tolist() == expected
        assert usable == (expected.index(False) if False in expected else len(keys))
        for i in np.flatnonzero(status == 0):
            assert (target.flat(target.ids[i]) == payload(keys[i])).all()

    @rule(which=st.sampled_from(range(4)), first=st.integers(0, 11), count=st.integers(1, 3))
    def forget(self, which, first, count):
        keys = CHAINS[which][first:first + count]
        self.store.forget(keys)
        self.model -= set(self.names(keys)) & self.own
        self.own -= set(self.names(keys))

    @rule()
    def reopen(self):
        before = self.model
        self.store.close()
        self.found_again()
        assert before <= self.model

    def found_again(self):
        """What was forgotten and not overwritten is found again: it was never invalid."""
        self.store = open_store(self.folder, **self.options)
        self.model, self.own = {name for keys in CHAINS for name in self.names(keys)
                                if name in self.store._index}, set()
        self.pinned.clear()

    @rule()
    def sync(self):
        self.store.sync()

    @rule(which=st.integers(0, 5), whole=st.booleans())
    def damage_an_old_segment(self, which, whole):
        """Lose the segment of an earlier writer, by a flipped bit or whole."""
        self.store.close()
        files = segments(self.folder)
        if files:
            path = files[which % len(files)]
            edit(path, 20, lambda byte: byte ^ 1)
            os.unlink(path) if whole else None
        self.found_again()

    @invariant()
    def match_agrees(self):
        if hasattr(self, "store"):
            for keys in CHAINS:
                found = [name in self.model for name in self.names(keys)]
                assert self.store.match(keys) == (found + [False]).index(False)


TestStoreModel = StoreMachine.TestCase
TestStoreModel.settings = settings(
    max_examples=int(os.environ.get("KVIO_EXAMPLES", "20")), stateful_step_count=20,
    deadline=None, suppress_health_check=list(HealthCheck))
