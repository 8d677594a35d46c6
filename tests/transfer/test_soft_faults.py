"""The soft NIC in virtual time: lost packets, delays, errors, cancelling, waiting."""
import asyncio
import errno
import select
import signal
import threading

import numpy as np
import pytest

from kvio import completion
from kvio._ext import nic as ext
from kvio.errors import Busy, InvalidArgument, TransferError, TransferTimeout
from kvio.layout import READ, WRITE
from kvio.transfer import COLLECTIVE, KV, Fabric, Nic
from nics import Pair, finish, requests

GB = 10**9


# ---- counters count copies

@pytest.mark.parametrize("drop", [1, 3, 8])
def test_a_dropped_packet_makes_bytes_and_counters_differ(virtual, drop):
    pair = Pair(virtual)
    before = pair.mine.copy()
    pair.b._ext._fault(ext.DROP, drop)
    transfer = pair.peer.read(pair.read(4096, 0, 8 * 4096))
    assert transfer.wait() is None                  # nobody notices ...
    assert pair.b.stats()["tx_bytes"] == 8 * 4096
    assert pair.a.stats()["rx_bytes"] == 7 * 4096   # ... except the counter
    assert pair.a.stats()["rx_packets"] == 7
    hole = slice(drop * 4096, (drop + 1) * 4096)
    assert (pair.mine[hole] == before[hole]).all()
    pair.mine[hole] = pair.theirs[(drop - 1) * 4096:drop * 4096]
    assert (pair.mine[4096:9 * 4096] == pair.theirs[:8 * 4096]).all()


def test_delayed_completions(virtual):
    pair = Pair(virtual, bytes_per_s=GB)
    pair.a._ext._fault(ext.DELAY, 0, 1000)
    transfer = pair.peer.read(pair.read(0, 0, 4096))
    virtual.fabric.advance(5095)
    assert not transfer.done and (pair.mine[:4096] == pair.theirs[:4096]).all()
    virtual.fabric.advance(1)
    assert transfer.done


def test_an_injected_status(virtual):
    pair = Pair(virtual)
    pair.a._ext._fault(ext.STATUS, 2, 12)
    transfer = pair.peer.read(pair.read([0, 0, 0], 0, 64))
    with pytest.raises(TransferError, match="RETRY_EXC_ERR"):
        transfer.wait()
    assert transfer.status.tolist() == [0, -errno.ETIMEDOUT, -errno.ECONNABORTED]


@pytest.mark.parametrize("end", ["a", "b"])
def test_a_nic_that_fails_flushes_what_is_in_flight_at_both_ends(virtual, end):
    """As if its process had died: nothing more is copied, nobody waits for ever."""
    pair = Pair(virtual, bytes_per_s=GB)
    before, remote = pair.mine.copy(), pair.theirs.copy()
    reading = pair.peer.read(pair.read(0, 0, 8 * 4096))
    writing = pair.back.write(requests(WRITE, pair.remote, pair.local, 0, 1 << 19, 8 * 4096))
    virtual.fabric.advance(3 * 4096)
    getattr(pair, end).fail()
    for transfer in reading, writing:
        assert transfer.done
        with pytest.raises(TransferError, match="WR_FLUSH_ERR"):
            transfer.wait()
    pair.mine[:4 * 4096] = before[:4 * 4096]        # three packets, and one under way
    pair.mine[1 << 19:(1 << 19) + 4 * 4096] = before[1 << 19:(1 << 19) + 4 * 4096]
    virtual.fabric.advance(GB)
    assert pair.a.poll() == 0 and (pair.mine == before).all() and (pair.theirs == remote).all()
    pair.peer.reset()                               # it was no death: both ends work again
    finish(virtual, pair.peer.read(pair.read(0, 0, 4096)))
    assert (pair.mine[:4096] == pair.theirs[:4096]).all()


# ---- in flight: waiting, cancelling, closing

def test_wait_gives_up_and_the_transfer_goes_on(virtual):
    pair, before = Pair(virtual, bytes_per_s=GB), completion.in_flight()
    transfer = pair.peer.read(pair.read(0, 0, 4096))
    with pytest.raises(TransferTimeout):
        transfer.wait(0)
    with pytest.raises(TransferTimeout):
        transfer.wait(0.001)
    assert completion.in_flight() == before + 1
    threading.Timer(0.01, virtual.fabric.advance, [4096]).start()
    assert transfer.wait(30) is None


def test_a_signal_gets_through_a_wait(virtual):
    pair, before = Pair(virtual, bytes_per_s=GB), completion.in_flight()
    transfer = pair.peer.read(pair.read(0, 0, 4096))

    def interrupt(number, frame):
        raise KeyboardInterrupt
    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(KeyboardInterrupt):
            transfer.wait()                         # for ever: the clock stands still
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert completion.in_flight() == before + 1     # it goes on and keeps its memory
    assert finish(virtual, transfer) == [4096]


def test_cancel_gives_up_what_has_not_started(virtual):
    pair = Pair(virtual, bytes_per_s=GB)
    before = pair.mine.copy()
    at = 8192 * np.arange(10)
    transfer = pair.peer.read(pair.read(at, at, 8192))
    other = pair.peer.read(pair.read(1 << 19, 0, 4096))
    virtual.fabric.advance(3 * 8192 + 100)          # the fourth is on the wire
    pair.a.poll()
    transfer._handle.cancel()                       # cancel() up to where it waits ...
    with pytest.raises(TransferTimeout):
        transfer.wait(0)                            # ... for the wire
    virtual.fabric.advance(8192)
    transfer.cancel()
    assert transfer.status.tolist() == [0] * 4 + [-errno.ECANCELED] * 6
    with pytest.raises(TransferError, match="CANCELED"):
        transfer.wait()
    end = 4 * 8192
    assert (pair.mine[:end] == pair.theirs[:end]).all()
    assert (pair.mine[end:10 * 8192] == before[end:10 * 8192]).all()
    assert finish(virtual, other) == [end + 4096]   # the others move up
    assert pair.a.stats()["errors"] == 6 and pair.peer.query()["kv"]["state"] == "ready"


def test_cancelling_a_batch_behind_another_does_not_wait_for_it(virtual):
    pair = Pair(virtual, bytes_per_s=GB)
    before = pair.mine.copy()
    first = pair.peer.read(pair.read(0, 0, 65536))
    second = pair.peer.read(pair.read([65536, 70000], 0, 4096))
    third = pair.peer.read(pair.read(80000, 0, 4096))
    second.cancel()
    assert second.status.tolist() == [-errno.ECANCELED] * 2 and not first.done
    assert finish(virtual, first, third) == [65536, 65536 + 4096]
    assert (pair.mine[65536:80000] == before[65536:80000]).all()


def test_cancelling_a_batch_larger_than_the_queue(virtual):
    pair = Pair(virtual, bytes_per_s=GB, queue_depth=4)
    at = 4096 * np.arange(50)
    transfers = [pair.peer.read(pair.read(at, at, 4096)) for _ in range(3)]
    transfers[1].cancel()
    assert (transfers[1].status == -errno.ECANCELED).all()
    transfers[0]._handle.cancel()
    virtual.fabric.advance(10**6)
    transfers[0].cancel()
    assert (transfers[0].status[5:] == -errno.ECANCELED).all()
    assert finish(virtual, transfers[2])
    assert not transfers[2].status.any()


def test_memory_may_be_reused_after_a_cancel(virtual):
    pair = Pair(virtual, bytes_per_s=GB)
    pair.a._ext._fault(ext.DELAY, 0, 50_000)
    transfer = pair.peer.read(pair.read(4096 * np.arange(9), 0, 4096))
    virtual.fabric.advance(5000)
    pair.a.poll()
    transfer._handle.cancel()
    assert not transfer.done                        # nobody may touch the memory yet
    virtual.fabric.advance(10**6)
    transfer.cancel()
    pair.mine[:] = 0xA5
    virtual.fabric.advance(10**9)
    pair.a.poll()
    assert (pair.mine == 0xA5).all()


def test_nothing_can_be_taken_away_in_flight(virtual):
    pair = Pair(virtual, bytes_per_s=GB)
    transfer = pair.peer.read(pair.read(0, 0, 4096))
    for take in (lambda: pair.a.deregister(pair.local), lambda: pair.b.deregister(pair.remote),
                 pair.a.close, pair.b.close, pair.peer.close):
        with pytest.raises(Busy):
            take()
    assert finish(virtual, transfer) == [4096]
    assert (pair.mine[:4096] == pair.theirs[:4096]).all()
    assert set(pair.peer.query()) == {"collective", "kv"}       # Busy had closed nothing
    pair.a.deregister(pair.local)
    pair.b.deregister(pair.remote)
    pair.peer.close()


def test_close_with_cancel(virtual):
    pair = Pair(virtual, bytes_per_s=GB)
    transfers = [pair.peer.read(pair.read(65536 * np.arange(4), 0, 65536), c)
                 for c in (KV, COLLECTIVE, KV)]
    virtual.fabric.advance(10)
    pair.a.poll()
    assert pair.a._ext.drain(True, 0) == 1          # one is on the wire, two had not begun
    virtual.fabric.advance(10**6)
    pair.a.close(cancel=True)
    for transfer in transfers:
        assert transfer.done
        assert transfer.status.tolist()[1:] == [-errno.ECANCELED] * 3


def test_a_peer_that_closes_fails_what_was_aimed_at_it(virtual):
    pair = Pair(virtual, bytes_per_s=GB)
    transfer = pair.peer.read(pair.read([0, 4096], 0, 4096))
    virtual.fabric.advance(100)
    pair.a.poll()
    pair.back.close()                               # our own end has nothing in flight
    virtual.fabric.advance(10**6)
    with pytest.raises(TransferError, match="RETRY_EXC_ERR"):
        transfer.wait()


def test_an_error_takes_the_responder_down_too_and_reset_brings_both_back(virtual):
    pair = Pair(virtual)
    bad = pair.read(0, 0, 64)
    bad["rkey"] = 1
    with pytest.raises(TransferError):
        pair.peer.read(bad).wait()
    assert pair.back.query()["kv"]["state"] == "error"
    with pytest.raises(TransferError, match="WR_FLUSH_ERR"):
        pair.back.read(requests(READ, pair.remote, pair.local, 0, 0, 64)).wait()
    pair.back.reset()
    pair.back.read(requests(READ, pair.remote, pair.local, 0, 0, 64)).wait()
    pair.peer.read(pair.read(0, 0, 64)).wait()


# ---- event loops

def test_an_event_loop_wakes_once_per_completion():
    """Real time: ten transfers one after another, 2 ms each; the loop's reader runs about once
    for each, not for each of the 2,560 packets."""
    fabric = Fabric()
    pair = Pair(lambda **options: Nic.open("soft", fabric=fabric, **options),
                bytes_per_s=GB // 2, mtu=4096)
    wakes = []

    async def main():
        loop = asyncio.get_running_loop()
        fd = pair.a._ext.drive_fd()
        for _ in range(10):
            transfer = pair.peer.read(pair.read(0, 0, 1 << 20))
            while not transfer.done:
                readable = asyncio.Event()
                loop.add_reader(fd, readable.set)
                await readable.wait()
                wakes.append(1)
                loop.remove_reader(fd)
    asyncio.run(main())
    assert len(wakes) <= 40
    pair.a.close()
    pair.b.close()


def test_the_drive_fd_follows_a_virtual_clock(virtual):
    pair = Pair(virtual, bytes_per_s=GB)
    fd = pair.a._ext.drive_fd()

    def readable():
        return bool(select.select([fd], [], [], 0)[0])
    assert not readable()
    transfer = pair.peer.read(pair.read([0, 4096], 0, 4096))
    assert not readable()
    virtual.fabric.advance(8191)
    assert not readable()
    virtual.fabric.advance(1)
    assert select.select([fd], [], [], 30)[0]
    assert not select.select([transfer], [], [], 0)[0]
    assert transfer.done and not readable()
    assert select.select([transfer], [], [], 0)[0]


def test_await_in_real_time_with_two_loops_and_a_thread():
    fabric = Fabric()
    pair = Pair(lambda **options: Nic.open("soft", fabric=fabric, **options),
                bytes_per_s=GB)

    def run(base):
        async def one(i):
            at = (base + i) * 8192
            await pair.peer.read(pair.read(at, at, 8192), (KV, COLLECTIVE)[i % 2])

        async def main():
            await asyncio.gather(*(one(i) for i in range(32)))
        asyncio.run(main())
    threads = [threading.Thread(target=run, args=(32 * t,)) for t in range(2)]
    for thread in threads:
        thread.start()
    for i in range(64, 96):
        pair.peer.read(pair.read(i * 8192, i * 8192, 8192)).wait()
    for thread in threads:
        thread.join()
    assert (pair.mine[:96 * 8192] == pair.theirs[:96 * 8192]).all()
    pair.a.close()
    pair.b.close()


def test_clocks(virtual):
    with pytest.raises(InvalidArgument):
        Fabric().advance(1)
    with pytest.raises(InvalidArgument):
        virtual.fabric.advance(-1)
    assert Fabric.named("x") is Fabric.named("x")
    one, two = Nic.open("soft", fabric="left"), Nic.open("soft", fabric="right")
    one.listen("here")
    with pytest.raises(TransferError, match="nobody listens"):
        two.connect("here")
    one.close()
    two.close()
