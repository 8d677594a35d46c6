"""Years of use in seconds: ten times the capacity written, chains of random lengths that share
prefixes. Runs stay long and whatever is found is right, also with threads and after kill -9."""
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from blocks import LAYOUT, Blocks, chain, get, open_store, payload, readable
from kvio.errors import TransferError
from kvio.layout import BlockLayout, block_keys
from test_capacity import exact, small

SEED = int(os.environ.get("KVIO_SEED", "0")) or int.from_bytes(os.urandom(3), "little")
ROUNDS = int(os.environ.get("KVIO_CRASH_ROUNDS", "8"))
TINY = BlockLayout(num_layers=1, block_tokens=4, bytes_per_token=16)


class Traffic:
    """Conversations: new ones, and turns that continue one from some point on."""

    def __init__(self, seed, layout, mean=12, shared=0.5):
        self.rng, self.layout, self.mean, self.shared = random.Random(seed), layout, mean, shared
        self.texts = []

    def next(self):
        rng, tokens = self.rng, self.layout.block_tokens
        count = 1 + min(int(rng.expovariate(1 / self.mean)), 4 * self.mean)
        text = []
        if self.texts and rng.random() < self.shared:
            text = rng.choice(self.texts[-20:])
            text = text[:tokens * rng.randrange(1, len(text) // tokens + 1)]
        text = [*text, *(rng.randrange(50_000) for _ in range(count * tokens))]
        self.texts = [*self.texts[-50:], text]
        return block_keys(np.array(text, np.uint32), self.layout)


def runs_of(places):
    """How many runs of adjacent slots."""
    breaks = (np.diff(places["slot"].astype(np.int64)) != 1) | (np.diff(places["segment"]) != 0)
    return 1 + int(np.count_nonzero(breaks))


@pytest.mark.parametrize("capacity, slots, shared", [(400, 150, 0.5), (1500, 400, 0.5),
                                                     (1500, 4000, 0.8), (1500, 400, 0.0)])
def test_churn_does_not_fragment(tmp_path, capacity, slots, shared):
    traffic, written, first, last = Traffic(capacity, TINY, shared=shared), 0, [], []
    with open_store(tmp_path, layout=TINY, capacity_bytes=capacity * 4096,
                    segment_bytes=slots * 4224) as store:
        while written < 10 * capacity:
            keys = traffic.next()
            hits = store.match(keys)
            source = Blocks(len(keys) - hits, TINY, keys[hits:])
            store.write(keys[hits:], source.pool, source.ids).wait()
            assert store.match(keys) == len(keys)
            places = store._index.find(keys[hits:])
            if len(places) and not store.stats()["evicted_blocks"]:
                first.append((len(places), runs_of(places)))
            elif len(places) and written > 9 * capacity:
                last.append((len(places), runs_of(places)))
            written += len(places)
            if written % 10 == 0:
                assert store.stats()["used_bytes"] == exact(store) * 4096 <= capacity * 4096
                assert readable(store, keys, TINY).all()
        first, last = (np.array(rows).sum(0) for rows in (first, last))
        first, last = first[0] / first[1], last[0] / last[1]
        print(f"blocks a run: {first:.1f} at first, {last:.1f} after ten times the capacity; "
              f"{exact(store) / capacity:.0%} of it in use")
        assert last >= first / 2
        assert exact(store) >= 0.75 * capacity and store._writer.span <= capacity


@pytest.mark.parametrize("durability", ["visible", "durable"])
def test_readers_and_evicting_writers_at_once(tmp_path, backend, durability):
    """No wrong byte in what any thread reads, while slots are rewritten under the readers."""
    seconds = float(os.environ.get("KVIO_SECONDS", "2"))
    failures, reads, until = [], [0, 0], time.monotonic() + seconds
    verify = "never" if durability == "durable" else "always"
    with small(tmp_path, 150, backend, segment_bytes=400_000, durability=durability,
               verify=verify) as store:
        recent, rings = [chain(1)], [store.open_ring() for _ in range(3)]

        def write(number):
            traffic = Traffic(SEED + number, LAYOUT, mean=6)
            while time.monotonic() < until:
                keys = traffic.next()[:40]
                source = Blocks(len(keys), keys=keys)
                try:
                    rings[number].write(keys, source.pool, source.ids).wait()
                except TransferError as failed:
                    assert failed.errno == 28
                recent[:] = [*recent[-12:], keys]

        def read(number):
            rng = random.Random(number)
            while time.monotonic() < until:
                keys = rng.choice(recent)
                with store.pinned(keys[:rng.randrange(3)]):
                    _, status, target = get(store, keys)
                for i, code in enumerate(status):
                    reads[int(code == 0)] += 1
                    if code == 0:
                        assert (target.flat(target.ids[i]) == payload(keys[i])).all(), SEED

        def guarded(work, number):
            try:
                work(number)
            except BaseException as failed:
                failures.append(failed)
                raise

        threads = [threading.Thread(target=guarded, args=args) for args in
                   [(write, 0), (write, 1), (write, 2), (read, 3), (read, 4), (read, 5)]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures and reads[1] > 100
        assert exact(store) <= 150 and store.stats()["evicted_blocks"] > 0
        assert store.stats()["pinned_blocks"] == 0 and store.stats()["lost_blocks"] == 0


def evictor(path, backend, durability, seed):
    """Runs in the child until it is killed."""
    traffic = Traffic(seed, LAYOUT, mean=6)
    with small(path, 60, backend, durability=durability, segment_bytes=300_000) as store:
        ring = store.open_ring()
        for number in range(1_000_000):
            keys = traffic.next()[:30]
            source = Blocks(len(keys), keys=keys)
            (ring if number % 3 else store).write(keys, source.pool, source.ids)
            if store.stats()["evicted_blocks"]:
                print(number, flush=True)


@pytest.mark.parametrize("durability", ["visible", "durable"])
def test_kill_9_while_evicting(tmp_path, backend, durability):
    """Slots are invalidated and rewritten when the process dies: what is found is right."""
    print(f"KVIO_SEED={SEED}")
    rng = random.Random(f"{SEED} {backend} {durability}")
    for number in range(max(1, ROUNDS // 3)):
        seed, path = rng.randrange(1 << 30), tmp_path / str(number)
        code = (f"import sys; sys.path[:0] = {sys.path!r}; import test_capacity_churn as t; "
                f"t.evictor({str(path)!r}, {backend!r}, {durability!r}, {seed})")
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        first = child.stdout.readline()
        time.sleep(rng.uniform(0, 0.15))
        child.send_signal(signal.SIGKILL)
        lines = [first, *child.stdout.read().split("\n")]
        assert child.wait() == -signal.SIGKILL, "the writer must not end by itself"
        last = max(int(line) for line in lines if line.strip())
        traffic, found = Traffic(seed, LAYOUT, mean=6), 0
        with open_store(path, backend, durability=durability) as store:
            for _ in range(last + 20):
                keys = traffic.next()[:30]
                usable = store.match(keys)
                found += usable
                assert readable(store, keys)[:usable].all(), (SEED, seed)
            figures = store.stats()
            assert found and figures["headers_damaged"] == 0
            assert figures["lost_blocks"] == 0, "a valid header without its payload"
            assert figures["blocks"] <= 60 * 2              # two rings at worst
