"""Many who submit at once, in threads and on event loops, and those who look elsewhere."""
import asyncio
import errno
import select
import threading

import numpy as np

from blocks import Blocks, chain, get, open_store, put, readable
from kvio.layout import BlockLayout
from test_store_faults import READ, SYNC, WRITE, fault, slot_range


def test_asyncio_and_threads_at_once(tmp_path, backend):
    failures = []
    with open_store(tmp_path, backend) as store:
        rings = [store, store.open_ring()]

        def check(usable, target, keys):
            assert usable == len(keys) and target.holds(keys)

        async def task(seed):
            for step in range(5):
                keys = chain(6, seed=1000 + 10 * seed + step)
                source, target = Blocks(6, keys=keys), Blocks(6)
                await rings[seed % 2].write(keys, source.pool, source.ids)
                check(await rings[step % 2].read(keys, target.pool, target.ids), target, keys)

        async def tasks():
            await asyncio.gather(*(task(seed) for seed in range(4)))

        def loop():
            try:
                asyncio.run(tasks())
            except BaseException as failed:
                failures.append(failed)
                raise

        def work(seed):
            try:
                for step in range(5):
                    keys = chain(6, seed=2000 + 10 * seed + step)
                    source, target = Blocks(6, keys=keys), Blocks(6)
                    rings[step % 2].write(keys, source.pool, source.ids).wait()
                    transfer = rings[seed % 2].read(keys, target.pool, target.ids)
                    check(transfer.wait(), target, keys)
            except BaseException as failed:
                failures.append(failed)
                raise

        threads = [threading.Thread(target=loop)] + [
            threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures and len(store) == (4 + 4) * 5 * 6


def test_a_transfer_ends_though_its_submitter_sleeps(tmp_path, backend):
    """Nobody calls into kvio: the ring's thread alone finishes it, and the eventfd says so."""
    woken, transfers, submitted = threading.Event(), [], threading.Event()
    with open_store(tmp_path, backend) as store:
        put(store, chain(30))
        target = Blocks(30)

        def submit():
            transfers.append(store.read(chain(30), target.pool, target.ids))
            submitted.set()
            woken.wait()

        thread = threading.Thread(target=submit)
        thread.start()
        submitted.wait()
        assert select.select([transfers[0].fileno()], [], [], 30)[0]
        assert thread.is_alive() and target.holds(chain(30))
        woken.set()
        thread.join()
        assert transfers[0].wait() == 30


def test_a_storm_of_interrupts(tmp_path, backend):
    with open_store(tmp_path, backend, durability="durable") as store:
        fault(store, READ | WRITE | SYNC, -errno.EINTR, count=20_000)
        put(store, chain(40), scattered=True)
        fault(store, READ, -errno.EINTR, count=20_000)
        assert readable(store, chain(40)).all()
        assert store._default.stats()["retries"] >= 40_000


def test_several_faults_of_one_merged_run(tmp_path, backend):
    """Short at first, then interrupted, and one block of it cannot be read at all."""
    with open_store(tmp_path, backend) as store:
        put(store, chain(20))
        fault(store, READ, 8192, count=3)
        fault(store, READ, -errno.EAGAIN, count=3)
        fault(store, READ, -errno.EIO, count=99, **slot_range(store, 11, 11))
        usable, status, target = get(store, chain(20))
        assert usable == 11 and status.tolist() == [0] * 11 + [-errno.EIO] + [0] * 8
        for i in np.flatnonzero(status == 0):
            assert readable(store, chain(20)[i:i + 1]).all()


def test_more_workers_come_with_the_work(tmp_path):
    """threads: as many as operations may be in flight, not all from the start."""
    layout = BlockLayout(num_layers=1, block_tokens=1, bytes_per_token=256 << 10)
    with open_store(tmp_path, "threads", layout, segment_bytes=32 << 20, queue_depth=12) as store:
        keys = chain(48, layout=layout)
        before = threads_now()
        store._default_ring()
        assert threads_now() - before <= 2              # the ring's thread, and a worker
        put(store, keys, layout, scattered=True)
        assert get(store, keys, layout, scattered=True)[0] == 48
        assert 3 < threads_now() - before <= 2 + 12     # and the keeper of page 1


def threads_now():
    with open("/proc/self/status") as file:
        return int(file.read().split("Threads:")[1].split()[0])
