"""Many at once: 64 threads and 8 processes with one store; readers beside a writer that evicts in
another process, and one that is killed. KVIO_SHARING_S makes the races longer."""
import os
import random
import threading
import time

import numpy as np
import pytest

import blocks
from blocks import LAYOUT, Blocks, chain, open_store, payload, put, readable
from kvio.errors import TransferError
from shared import Child, until
from test_capacity import small
from test_capacity_churn import Traffic

SECONDS = float(os.environ.get("KVIO_SHARING_S", "2"))
THREADS, PROCESSES, BLOCKS = 64, 8, 5


@pytest.fixture
def own_pools():
    """The children's pools have no names, so one of the two forms over 3FS says it all."""
    if blocks.NAMED:
        pytest.skip("as with private pools")


def in_threads(count, work):
    """Run work(number) in so many threads at once; the first failure is raised here."""
    failures, go = [], threading.Barrier(count)

    def one(number):
        try:
            go.wait(60)
            work(number)
        except BaseException as failed:
            failures.append(failed)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def write_and_read(store, ring, seed):
    keys = chain(BLOCKS, seed)
    source, target = Blocks(BLOCKS, keys=keys), Blocks(BLOCKS)
    ring.write(keys, source.pool, source.ids).wait()
    assert ring.read(keys, target.pool, target.ids).wait() == BLOCKS and target.holds(keys)


def crowd(path, backend, me, num_threads):
    """Runs in a child: its threads store chains of their own, then it reads everybody's."""
    import sys
    with open_store(path, backend, segment_bytes=400_000) as store:
        rings = [store, store.open_ring()]
        print("open", flush=True)
        sys.stdin.readline()
        in_threads(num_threads, lambda i: write_and_read(store, rings[i % 2], 1000 * me + i))
        print("stored", flush=True)
        total = int(sys.stdin.readline())
        seeds = [1000 * who + i for who in range(PROCESSES) for i in range(total)]
        until(lambda: all(store.match(chain(BLOCKS, seed)) == BLOCKS for seed in seeds), 60)
        for seed in seeds:
            assert readable(store, chain(BLOCKS, seed)).all()
        print("good", flush=True)
        sys.stdin.readline()


def test_64_threads_and_8_processes_at_once(tmp_path, backend, own_pools):
    """8 threads in each of 8 processes, and 64 in this one, on the same directory."""
    each = THREADS // PROCESSES
    children = [Child("test_store_many", "crowd", tmp_path, backend, me, each)
                for me in range(PROCESSES)]
    try:
        with open_store(tmp_path, backend, segment_bytes=2_000_000) as store:
            rings = [store, store.open_ring(), store.open_ring()]
            for child in children:
                assert child.hear() == ["open"]
            for child in children:
                child.say("go")
            in_threads(THREADS, lambda i: write_and_read(store, rings[i % 3], 50_000 + i))
            for child in children:
                assert child.hear() == ["stored"]
            for child in children:
                child.say(each)
            for child in children:
                assert child.hear() == ["good"]
            assert store.refresh() >= 0
            assert len(store) == 2 * THREADS * BLOCKS
            assert store.stats()["sharing"]["writers_live"] == PROCESSES
            for seed in (7007, 3, 50_063):
                assert readable(store, chain(BLOCKS, seed)).all()
            for child in children:
                child.end()
    finally:
        for child in children:
            if child.process.poll() is None:
                child.kill()


def churner(path, backend, durability, seed):
    """Runs in a child until it is killed: a writer that evicts, and says how far it is."""
    traffic = Traffic(seed, LAYOUT, mean=6)
    with small(path, 60, backend, durability=durability, segment_bytes=300_000) as store:
        for number in range(1_000_000):
            keys = traffic.next()[:30]
            source = Blocks(len(keys), keys=keys)
            try:
                store.write(keys, source.pool, source.ids).wait()
            except TransferError as failed:
                assert failed.errno == 28
            print(number, store.stats()["evicted_blocks"], flush=True)


def test_readers_race_a_writer_and_an_evictor_in_another_process(tmp_path, backend, own_pools):
    """What a thread of ours reads while another process evicts and writes the slots anew is right
    or a miss, with both ways to verify; then the writer is killed, and what it left is right."""
    child = Child("test_store_many", "churner", tmp_path, backend, "durable", 11)
    seen, hits, misses = [0, 0], [], []

    def listen():
        for line in child.process.stdout:
            if line.endswith("\n"):
                seen[:] = map(int, line.split())

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        until(lambda: seen[1] > 60, 60)
        chains, traffic, lock = [], Traffic(11, LAYOUT, mean=6), threading.Lock()
        stores = [open_store(tmp_path, backend, durability="durable", verify=verify)
                  for verify in ("always", "never")]

        def recent(rng):
            with lock:
                while len(chains) <= seen[0]:
                    chains.append(traffic.next()[:30])
                return rng.choice(chains[-12:])

        def work(number):
            rng, end = random.Random(number), time.monotonic() + SECONDS
            while time.monotonic() < end:
                good = readable(stores[number % 2], recent(rng))        # to the byte
                hits.append(int(good.sum()))
                misses.append(int((~good).sum()))

        in_threads(4, work)
        child.signal(9)
        child.process.wait()
        print(f"{sum(hits)} blocks read, {sum(misses)} missed, {seen[1]} evicted meanwhile")
        assert sum(hits) and sum(misses)
        for store in stores:
            store.refresh()
            for keys in chains[-20:]:
                readable(store, keys)
            put(store, chain(4, 99))
            store.close()
    finally:
        child.signal(9)
        listener.join()
        child.kill()


def test_event_loops_in_threads_and_plain_threads_on_one_ring(tmp_path, backend):
    """Four event loops and four threads, in flight at once through the same two rings."""
    import asyncio
    with open_store(tmp_path, backend) as store:
        rings = [store, store.open_ring()]

        async def turn(seed):
            keys = chain(BLOCKS, seed)
            source, target = Blocks(BLOCKS, keys=keys), Blocks(BLOCKS)
            await rings[seed % 2].write(keys, source.pool, source.ids)
            assert await rings[seed // 2 % 2].read(keys, target.pool, target.ids) == BLOCKS
            return all((target.flat(i) == payload(key)).all()
                       for i, key in zip(target.ids, keys))

        async def loop(number):
            good = await asyncio.gather(*(turn(100 * number + i) for i in range(8)))
            assert all(good)

        def work(number):
            if number % 2:
                asyncio.run(loop(number))
            else:
                for i in range(8):
                    write_and_read(store, rings[i % 2], 100 * number + i)

        in_threads(8, work)
        assert len(store) == 8 * 8 * BLOCKS
        assert not np.any([ring.read_queue for ring in (store._default, rings[1])])
