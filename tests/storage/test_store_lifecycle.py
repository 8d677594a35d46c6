"""Transfers and stores from beginning to end: waiting, cancelling, closing, threads and forks."""
import asyncio
import errno
import os
import signal
import threading
import time

import pytest

from blocks import LAYOUT, Blocks, chain, open_store, put, readable
from kvio.errors import Busy, Closed, TransferError, TransferTimeout


def test_await(tmp_path, backend):
    keys = chain(30)

    async def several(store):
        blocks = [Blocks(10, keys=keys[i:i + 10]) for i in (0, 10, 20)]
        writes = [store.write(keys[10 * i:10 * i + 10], b.pool, b.ids)
                  for i, b in enumerate(blocks)]
        for write in writes:
            assert await write is None
        targets = [Blocks(10) for _ in range(3)]
        reads = [store.read(keys[10 * i:10 * i + 10], b.pool, b.ids)
                 for i, b in enumerate(targets)]
        assert [await read for read in reads] == [10] * 3
        assert all(t.holds(keys[10 * i:10 * i + 10]) for i, t in enumerate(targets))

    with open_store(tmp_path, backend) as store:
        asyncio.run(several(store))


def test_a_transfer_ends_though_its_submitter_has_exited(tmp_path, backend):
    keys = chain(20)
    source, transfers = Blocks(20, keys=keys), []
    with open_store(tmp_path, backend) as store:
        ring = store.open_ring()
        ring._ring._pause(True)
        thread = threading.Thread(target=lambda: transfers.append(
            ring.write(keys, source.pool, source.ids)))
        thread.start()
        thread.join()
        assert not transfers[0].done
        ring._ring._pause(False)
        transfers[0].wait()
        assert readable(store, keys).all()


def test_a_write_nobody_waits_for_is_found(tmp_path, backend):
    keys, source = chain(8), None
    source = Blocks(8, keys=keys)
    with open_store(tmp_path, backend) as store:
        store.write(keys, source.pool, source.ids)      # the transfer is dropped
        deadline = time.monotonic() + 30
        while store.match(keys) < 8 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert store.match(keys) == 8


def test_a_timeout_gives_up_waiting_and_nothing_else(tmp_path, backend):
    keys = chain(4)
    source = Blocks(4, keys=keys)
    with open_store(tmp_path, backend) as store:
        ring = store.open_ring()
        ring._ring._pause(True)
        transfer = ring.write(keys, source.pool, source.ids)
        with pytest.raises(TransferTimeout):
            transfer.wait(0.01)
        assert (transfer.status == -errno.EINPROGRESS).all()
        assert source.pool._pins[source.ids].all()
        ring._ring._pause(False)
        transfer.wait()
        assert not source.pool._pins.any()


def test_a_signal_interrupts_waiting_and_nothing_else(tmp_path, backend):
    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    keys = chain(4)
    source = Blocks(4, keys=keys)
    with open_store(tmp_path, backend) as store:
        ring = store.open_ring()
        ring._ring._pause(True)
        transfer = ring.write(keys, source.pool, source.ids)
        before = signal.signal(signal.SIGALRM, stop)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Stop):
                transfer.wait()
        finally:
            signal.signal(signal.SIGALRM, before)
        ring._ring._pause(False)
        transfer.wait()
        assert readable(store, keys).all()


def test_cancel_takes_back_what_has_not_started(tmp_path, backend):
    keys = chain(12)
    source = Blocks(12, keys=keys)
    with open_store(tmp_path, backend) as store:
        ring = store.open_ring()
        ring._ring._pause(True)
        kept = ring.write(keys[:4], source.pool, source.ids[:4])
        gone = ring.write(keys[4:], source.pool, source.ids[4:])
        gone.cancel()
        assert gone.done and (gone.status == -errno.ECANCELED).all()
        with pytest.raises(TransferError) as failed:
            gone.wait()
        assert failed.value.errno == errno.ECANCELED
        ring._ring._pause(False)
        kept.wait()
        assert store.match(keys) == 4 and ring.stats()["cancelled_blocks"] == 8
        put(store, keys)                    # the slots are free again
        assert readable(store, keys).all()
        assert store.stats()["own_bytes"] == 12 * LAYOUT.stride


def test_closing_in_flight_is_refused_drained_or_cancelled(tmp_path, backend):
    keys = chain(12)
    source = Blocks(12, keys=keys)
    store = open_store(tmp_path, backend)
    ring = store.open_ring()
    ring._ring._pause(True)
    transfer = ring.write(keys[:4], source.pool, source.ids[:4])
    for close in (store.close, ring.close):
        with pytest.raises(Busy):
            close()
    ring._ring._pause(False)
    store.close(drain=True)
    store.close()
    assert transfer.done and not transfer.status.any()

    store = open_store(tmp_path, backend)
    assert store.match(keys) == 4
    ring = store.open_ring()
    ring._ring._pause(True)
    transfer = ring.write(keys[4:], source.pool, source.ids[4:])
    store.close(cancel=True)
    assert (transfer.status == -errno.ECANCELED).all()
    with open_store(tmp_path, backend) as store:
        assert store.match(keys) == 4


def test_leaving_a_with_block_drains_or_cancels(tmp_path, backend):
    keys = chain(8)
    source = Blocks(8, keys=keys)
    with open_store(tmp_path, backend) as store:
        store.write(keys[:4], source.pool, source.ids[:4])
    with pytest.raises(KeyboardInterrupt):
        with open_store(tmp_path, backend) as store:
            assert store.match(keys) == 4
            ring = store.open_ring()
            ring._ring._pause(True)
            ring.write(keys[4:], source.pool, source.ids[4:])
            raise KeyboardInterrupt
    with open_store(tmp_path, backend) as store:
        assert store.match(keys) == 4


def test_closed_means_closed(tmp_path, backend):
    keys = chain(2)
    source = Blocks(2, keys=keys)
    store = open_store(tmp_path, backend)
    ring = store.open_ring()
    ring.close()
    ring.close()
    for use in (lambda: ring.read(keys, source.pool, source.ids), lambda: ring.read_queue,
                lambda: ring.write(keys, source.pool, source.ids), ring.stats):
        with pytest.raises(Closed):
            use()
    put(store, keys)
    store.close()
    for use in (lambda: store.match(keys), lambda: store.read(keys, source.pool, source.ids),
                lambda: store.write(keys, source.pool, source.ids), store.open_ring, store.sync):
        with pytest.raises(Closed):
            use()
    assert not source.pool._pins.any()


def test_many_threads(tmp_path, backend):
    failures = []
    with open_store(tmp_path, backend) as store:
        rings = [store, store.open_ring(), store.open_ring()]

        def work(seed):
            try:
                for step in range(6):
                    keys = chain(7, seed=100 * (seed % 4) + step)       # pairs of threads collide
                    source, target = Blocks(7, keys=keys), Blocks(7)
                    rings[seed % 3].write(keys, source.pool, source.ids).wait()
                    ring = rings[(seed + step) % 3]
                    assert ring.read(keys, target.pool, target.ids).wait() == 7
                    assert target.holds(keys)
            except BaseException as failed:
                failures.append(failed)
                raise

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures and len(store) == 4 * 6 * 7


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_not_a_writer(tmp_path, backend):
    keys = chain(4)
    source = Blocks(4, keys=keys)
    with open_store(tmp_path, backend) as store:
        put(store, keys[:2])
        child = os.fork()
        if child == 0:
            code = 1
            try:
                refused = 0
                for use in (lambda: store.match(keys), store.open_ring, store.sync,
                            lambda: store.read(keys, source.pool, source.ids),
                            lambda: store.write(keys, source.pool, source.ids)):
                    try:
                        use()
                    except Closed as wrong:
                        refused += "fork" in str(wrong)
                store.close()               # lets go, touches no file and no thread
                del store
                code = 0 if refused == 5 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        put(store, keys)
        assert readable(store, keys).all()
