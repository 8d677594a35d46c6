"""The soft NIC under random work: right bytes for any mix, and many threads at once."""
import asyncio
import errno
import gc
import random
import threading
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvio import completion
from kvio._ext import nic as ext
from kvio.errors import Busy, TransferError
from kvio.layout import READ, SGE_DTYPE, WR_DTYPE, WRITE
from kvio.transfer import COLLECTIVE, KV, Fabric, Nic
from nics import Pair, requests

parts = st.lists(st.tuples(st.integers(0, 60000), st.integers(0, 3000)), min_size=1, max_size=4)
work = st.lists(st.tuples(st.booleans(), st.integers(0, 50000), parts), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(work=work, rate=st.sampled_from([0, 10**9]), mtu=st.sampled_from([64, 1500, 4096]),
       depth=st.integers(1, 5))
def test_any_batch_moves_what_numpy_says(work, rate, mtu, depth):
    """Mixed opcodes, scatter-gather lists that cross packets, queues of any depth."""
    fabric = Fabric("virtual")
    pair = Pair(lambda **o: Nic.open("soft", fabric=fabric, mtu=mtu, queue_depth=depth, **o),
                nbytes=65536, bytes_per_s=rate)
    mine, theirs = pair.mine.copy(), pair.theirs.copy()
    wrs, sges = np.zeros(len(work), WR_DTYPE), []
    for wr, (reads, far, pieces) in zip(wrs, work):
        wr["opcode"], wr["rkey"] = READ if reads else WRITE, pair.remote.key
        wr["remote_addr"], wr["length"] = pair.remote.addr + far, sum(n for _, n in pieces)
        if len(pieces) == 1:
            wr["local_addr"], wr["lkey"] = pair.local.addr + pieces[0][0], pair.local.key
        else:
            wr["sge_first"], wr["num_sge"] = len(sges), len(pieces)
            sges += [(pair.local.addr + at, pair.local.key, n, 0) for at, n in pieces]
        for at, n in pieces:
            if reads:
                mine[at:at + n] = theirs[far:far + n]
            else:
                theirs[far:far + n] = mine[at:at + n]
            far += n
    transfer = pair.peer.post(wrs, np.array(sges, SGE_DTYPE))
    while not transfer.done:
        fabric.advance(1000)
    assert transfer.wait() is None
    assert (pair.mine == mine).all() and (pair.theirs == theirs).all()
    total = int(wrs["length"].sum())
    a, b = pair.a.stats(), pair.b.stats()
    assert a["rx_bytes"] + b["rx_bytes"] == a["tx_bytes"] + b["tx_bytes"] == total
    pair.a.close()
    pair.b.close()


def test_many_threads_post_wait_await_cancel_and_register_at_once():
    """Each owns a stripe of memory; whatever was not cancelled must have its bytes."""
    fabric = Fabric()
    pair = Pair(lambda **o: Nic.open("soft", fabric=fabric, queue_depth=16, **o),
                bytes_per_s=2 * 10**9)
    stripe, before, problems = 1 << 17, completion.in_flight(), []

    def verify(transfer, at):
        for i, status in enumerate(transfer.status):
            here = slice(at + 2048 * i, at + 2048 * (i + 1))
            if status == 0:
                assert (pair.mine[here] == pair.theirs[here]).all()
            else:
                assert status == -errno.ECANCELED

    def work(number):
        rng, at = random.Random(number), number * stripe
        for _ in range(60):
            count = rng.randint(1, 64)
            pair.mine[at:at + stripe] = 0
            spots = at + 2048 * np.arange(count)
            transfer = pair.peer.read(pair.read(spots, spots, 2048), rng.choice([KV, COLLECTIVE]))
            match rng.randint(0, 4):
                case 0: transfer.cancel()
                case 1: asyncio.run(waits(transfer))
                case 2:
                    with Nic.open("soft", fabric=fabric) as other:
                        region = other.register(bytearray(2048))
                        other.connect("b").read(requests(READ, region, pair.remote, 0, at, 2048))
                        with pytest.raises(Busy):
                            other.close()
                            raise Busy("it was as fast as that")
                case 3:
                    while not transfer.done:
                        pair.a.poll()
                case 4: transfer.wait()
            while not transfer.done:
                pass
            verify(transfer, at)

    async def waits(transfer):
        await transfer

    def guarded(number):
        try:
            work(number)
        except BaseException as problem:            # noqa: BLE001 - told to the main thread
            problems.append(problem)
    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    completion.reap()                               # those of the NICs that were closed
    assert completion.in_flight() == before and pair.a.stats()["in_flight"] == 0
    pair.a.close()
    pair.b.close()


def test_a_forgotten_nic_with_work_in_flight_is_freed_without_waiting():
    """Its virtual clock stands still: a destructor that waited for link time would hang."""
    fabric = Fabric("virtual")
    pair = Pair(lambda **o: Nic.open("soft", fabric=fabric, **o), bytes_per_s=10**9)
    qp = pair.peer._qps["kv"]
    for _ in range(3):
        qp.post(pair.read(4096 * np.arange(8), 0, 4096))    # the handle is dropped at once
    pair.a.poll()
    assert pair.a.stats()["in_flight"] == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del pair, qp
        gc.collect()


def test_a_handle_may_be_dropped_in_flight():
    fabric = Fabric("virtual")
    pair = Pair(lambda **o: Nic.open("soft", fabric=fabric, **o), bytes_per_s=10**9)
    pair.peer._qps["kv"].post(pair.read(0, 0, 4096))
    fabric.advance(4096)
    pair.a.poll()
    assert (pair.mine[:4096] == pair.theirs[:4096]).all() and pair.a.stats()["in_flight"] == 0
    pair.a.close()
    pair.b.close()


def test_failing_a_queue_pair_flushes_at_once():
    fabric = Fabric("virtual")
    pair = Pair(lambda **o: Nic.open("soft", fabric=fabric, **o), bytes_per_s=10**9)
    pair.a._ext._fault(ext.DELAY, 0, 10**6)
    transfer = pair.peer.read(pair.read(4096 * np.arange(3), 0, 4096))
    fabric.advance(5000)
    pair.a.poll()
    pair.mine[4096:] = 0
    pair.peer._qps["kv"].fail()
    with pytest.raises(TransferError, match="WR_FLUSH_ERR"):
        transfer.wait(0)
    assert transfer.status.tolist() == [0, 0, -errno.ECONNABORTED]      # two had been sent
    fabric.advance(10**9)
    pair.a.poll()
    assert not pair.mine[4096:].any()               # and nothing comes late
    pair.peer.reset()
    transfer = pair.peer.read(requests(READ, pair.local, pair.remote, 0, 0, 64))
    fabric.advance(10**9)
    transfer.wait()
    pair.a.close()
    pair.b.close()
