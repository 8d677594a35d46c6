"""Three stores in one directory against a dictionary: any sequence of calls gives what it says.

`stored` is what must be found by everybody who has looked: key -> the set of writers that hold it.
A key that a writer has forgotten may still be found by others (its header is valid until the slot
is used again), so the model has a lower bound, and every byte that is read is checked.
"""
import collections
import os
import shutil
import tempfile

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from blocks import LAYOUT, Blocks, chain, open_store, payload, segments
from kvio.errors import TransferError
from shared import until

CHAINS = [chain(9, seed) for seed in range(3)]
CHAINS.append(np.concatenate([CHAINS[0][:4], chain(9, 7)[4:]]))     # shares a prefix
ALL = np.concatenate(CHAINS[:3] + [CHAINS[3][4:]])
WHO, WHICH = st.integers(0, 2), st.integers(0, 3)


def names(keys):
    return [key.tobytes() for key in keys["key"]]


class SharingMachine(RuleBasedStateMachine):
    @initialize(backend=st.sampled_from(["threads", "auto"]))
    def open(self, backend):
        self.folder = tempfile.mkdtemp()
        self.options = {"backend": backend, "segment_bytes": 100_000, "poll_s": 0,
                        "dead_after_s": 3600, "capacity_bytes": 25 * LAYOUT.stride}
        self.stored = collections.defaultdict(set)
        self.written = set()
        self.stores = [open_store(self.folder, **self.options) for _ in range(3)]

    def teardown(self):
        for store in getattr(self, "stores", ()):
            store.close(drain=True)
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    def must(self, writers=None):
        return {name for name, by in self.stored.items() if by}

    @rule(who=WHO, which=WHICH, first=st.integers(0, 8), count=st.integers(1, 9))
    def write(self, who, which, first, count):
        store, keys = self.stores[who], CHAINS[which][first:first + count]
        source = Blocks(len(keys), keys=keys)
        transfer = store.write(keys, source.pool, source.ids)
        try:
            transfer.wait()
        except TransferError:
            pass                                    # its capacity; `status` says which
        places = store._index.find(keys)
        for name, status, place in zip(names(keys), transfer.status, places):
            if status == 0:
                assert place["status"] != -2, "what was written is found by its writer"
                self.written.add(name)
                if store._writer.owns(int(place["segment"])):
                    self.stored[name].add(store._writer.uuid)

    @rule(who=WHO, which=WHICH, first=st.integers(0, 8), count=st.integers(1, 3))
    def forget(self, who, which, first, count):
        keys, uuid = CHAINS[which][first:first + count], self.stores[who]._writer.uuid
        self.stores[who].forget(keys)
        for name in names(keys):
            self.stored[name].discard(uuid)

    @rule(who=WHO)
    def look(self, who):
        self.stores[who].refresh()

    @rule(who=WHO, which=WHICH)
    def read(self, who, which):
        self.check_bytes(self.stores[who], CHAINS[which])

    @rule(who=WHO)
    def close_and_open(self, who):
        self.stores[who].close()
        self.stores[who] = open_store(self.folder, **self.options)
        self.agree(self.stores[who])

    @rule(who=WHO, data=st.data())
    def delete_a_segment(self, who, data):
        """Of anybody: a reclaimer's or an administrator's doing."""
        files = segments(self.folder)
        if files:
            path = data.draw(st.sampled_from(files))
            os.unlink(path)
            # What else this writer holds, and where, is not in the model: start it from disk.
            self.stored.clear()
            self.everybody_looks()
            for store in self.stores:
                for name, place in zip(names(ALL), store._index.find(ALL)):
                    if place["status"] != -2 and store._writer.owns(int(place["segment"])):
                        self.stored[name].add(store._writer.uuid)

    def everybody_looks(self):
        for store in self.stores:
            store.refresh()

    @rule()
    def all_agree(self):
        """Page 1 is written soon after a block: until then others need not find it."""
        for store in self.stores:
            until(lambda: self.agree_once(store), 10)
            self.agree(store)

    def agree_once(self, store):
        store.refresh()
        found = store._index.find(ALL)["status"] != -2
        return self.must() <= {name for name, hit in zip(names(ALL), found) if hit}

    def agree(self, store):
        if not self.agree_once(store):              # the others' page 1 may be on its way
            until(lambda: self.agree_once(store), 10)
        self.check_bytes(store, ALL, self.must())

    def check_bytes(self, store, keys, must=()):
        target = Blocks(len(keys))
        transfer = store.read(keys, target.pool, target.ids)
        transfer.wait()
        for i in np.flatnonzero(transfer.status == 0):
            assert (target.flat(target.ids[i]) == payload(keys[i])).all(), "wrong bytes"
            assert names(keys[i:i + 1])[0] in self.written
        good = {name for name, status in zip(names(keys), transfer.status) if status == 0}
        assert set(must) <= good


TestSharingModel = SharingMachine.TestCase
TestSharingModel.settings = settings(
    max_examples=int(os.environ.get("KVIO_EXAMPLES", "20")), stateful_step_count=25,
    deadline=None, suppress_health_check=list(HealthCheck))
