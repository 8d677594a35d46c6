"""The soft NIC in virtual time: exact to the byte and the nanosecond."""
import asyncio
import errno
import select
import signal
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import port_model
from kvio import completion
from kvio._ext import nic as ext
from kvio.errors import Busy, InvalidArgument, TransferError, TransferTimeout
from kvio.layout import READ, WRITE
from kvio.transfer import COLLECTIVE, KV, Fabric, Nic, TrafficClass
from nics import Pair, pattern, requests

GB = 10**9


def finish(virtual, *transfers):
    """Advance to the end of all of them; the times they completed at."""
    virtual.fabric.advance(10**9)
    for transfer in transfers:
        transfer.wait()
    return [transfer.stats["completed_ns"] for transfer in transfers]


# ---- time

@pytest.mark.parametrize("rate, nbytes, ns", [
    (GB, 4096, 4096), (GB, 1, 1), (GB, 10_000, 10_000), (4 * GB, 1 << 20, 1 << 18),
    (50 * GB, 1 << 20, 20972), (3 * GB, 1000, 334), (0, 1 << 20, 0),
])
def test_a_message_takes_its_bytes_over_the_rate(virtual, rate, nbytes, ns):
    pair = Pair(virtual, bytes_per_s=rate)
    virtual.fabric.advance(7)
    transfer = pair.peer.read(pair.read(0, 0, nbytes))
    if ns:
        virtual.fabric.advance(ns - 1)
        assert not transfer.done and transfer.status.tolist() == [-errno.EINPROGRESS]
        virtual.fabric.advance(1)
    assert transfer.done
    assert transfer.stats == {"nbytes": nbytes, "submitted_ns": 7, "completed_ns": 7 + ns}
    assert pair.b.stats()["tx_busy_ns"] == pair.a.stats()["rx_busy_ns"]
    assert ns - 1 <= pair.a.stats()["rx_busy_ns"] <= ns
    assert (pair.mine[:nbytes] == pair.theirs[:nbytes]).all()


def test_packets_are_copied_when_their_time_has_come(virtual):
    pair = Pair(virtual, bytes_per_s=GB)
    before = pair.mine.copy()
    pair.peer.read(pair.read(0, 0, 65536))
    for packets in range(1, 17):                    # packet k starts at k * 4096 ns
        pair.a.poll()
        cut = packets * 4096
        assert (pair.mine[:cut] == pair.theirs[:cut]).all()
        assert (pair.mine[cut:] == before[cut:]).all()
        assert pair.a.stats()["rx_packets"] == packets
        virtual.fabric.advance(4096)


def test_the_slower_of_two_ports_sets_the_pace(virtual):
    pair = Pair(virtual, bytes_per_s=GB)
    slow = virtual("slow", bytes_per_s=GB // 4)
    far = slow.register(pair.theirs)
    slow.listen("slow")
    peer = pair.a.connect("slow")
    first = peer.read(requests(READ, pair.local, far, 0, 0, 40960))
    second = pair.peer.read(pair.read(65536, 65536, 40960))
    ends = finish(virtual, first, second)
    assert 4 * 40960 <= ends[0] <= 4 * 40960 + 10 * 4096    # its port is the bottleneck ...
    assert ends[1] < 2 * 40960                              # ... and does not block ours
    assert slow.stats()["tx_busy_ns"] == 4 * 40960 and pair.a.stats()["rx_busy_ns"] == 2 * 40960


def test_incast_shares_the_receiving_port(virtual):
    sink = virtual("sink", bytes_per_s=GB)
    target = np.zeros(1 << 20, np.uint8)
    local, transfers, sources = sink.register(target), [], []
    for i in range(4):
        nic = virtual(f"source{i}", bytes_per_s=GB)
        memory = pattern(1 << 18, i)
        region = nic.register(memory)
        nic.listen(nic.name)
        sources.append(nic)
        transfers.append(sink.connect(nic.name).read(
            requests(READ, local, region, i << 18, 0, 1 << 18)))
    ends = finish(virtual, *transfers)
    assert ends == [(1 << 20) - 4096 * (3 - i) for i in range(4)]   # packet by packet in turn
    assert sink.stats()["rx_busy_ns"] == 1 << 20
    assert all(nic.stats()["tx_bytes"] == 1 << 18 for nic in sources)
    assert (target.reshape(4, -1) == [pattern(1 << 18, i) for i in range(4)]).all()


def test_two_classes_share_a_port_in_turn(virtual):
    pair = Pair(virtual, bytes_per_s=GB)
    kv = pair.peer.read(pair.read(0, 0, 40 * 4096), KV)
    collective = pair.peer.read(pair.read(1 << 19, 0, 10 * 4096), COLLECTIVE)
    ends = finish(virtual, kv, collective)
    assert ends == [50 * 4096, 20 * 4096]
    stats = pair.a.stats()
    assert stats["by_class"] == {"kv": {"tx_bytes": 0, "rx_bytes": 40 * 4096},
                                 "collective": {"tx_bytes": 0, "rx_bytes": 10 * 4096}}
    assert stats["by_vl"][2]["rx_bytes"] == 40 * 4096 and stats["by_vl"][0]["rx_bytes"] == 40960


def test_reads_leave_from_the_responder_and_writes_from_the_initiator(virtual):
    pair = Pair(virtual, bytes_per_s=GB)
    read = pair.peer.read(pair.read(0, 0, 8192), KV)
    write = pair.peer.write(pair.write(65536, 65536, 4096), COLLECTIVE)
    assert finish(virtual, read, write) == [8192, 4096]     # full duplex: both at once
    a, b = pair.a.stats(), pair.b.stats()
    assert (a["tx_bytes"], a["rx_bytes"], b["tx_bytes"], b["rx_bytes"]) == (4096, 8192, 8192, 4096)
    assert (a["tx_busy_ns"], a["rx_busy_ns"]) == (4096, 8192)
    assert (a["doorbells"], b["doorbells"]) == (2, 0)


def test_read_data_carry_the_sl_of_the_responder(virtual):
    pair = Pair(virtual)
    ours, theirs = ext.QueuePair(pair.a._ext, 1, 0), ext.QueuePair(pair.b._ext, 7, 0)
    ours.connect(theirs)
    theirs.connect(ours)
    for wrs in pair.read(0, 0, 100), pair.write(0, 0, 10):
        assert ours.post(wrs).wait(1)
    tx, rx = (pair.b._ext.counters()[way] for way in ("tx_bytes", "rx_bytes"))
    assert (tx[7], sum(tx), rx[1], sum(rx)) == (100, 100, 10, 10)
    assert pair.b.stats()["by_vl"][3]["tx_bytes"] == 100


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_loop_back_counts_on_both_sides_of_the_port(virtual, opcode):
    nic = virtual("self", bytes_per_s=GB)
    memory = pattern(1 << 16)
    region = nic.register(memory)
    nic.listen("self")
    peer = nic.connect("self")
    transfer = peer.post(requests(opcode, region, region, 0, 32768, 20000))
    assert finish(virtual, transfer) == [20000]
    stats = nic.stats()
    assert stats["tx_bytes"] == stats["rx_bytes"] == 20000
    assert stats["tx_packets"] == stats["rx_packets"] == 5
    assert stats["tx_busy_ns"] == stats["rx_busy_ns"] == 20000
    assert (memory[:20000] == memory[32768:52768]).all()


def test_late_driving_loses_no_bandwidth_even_when_the_queue_is_refilled(virtual):
    pair = Pair(virtual, bytes_per_s=GB, queue_depth=4)
    transfer = pair.peer.read(pair.read(4096 * np.arange(100), 4096 * np.arange(100), 4096))
    virtual.fabric.advance(100 * 4096)              # nobody looked in between
    assert transfer.done and transfer.stats["completed_ns"] == 100 * 4096
    assert pair.a.stats()["rx_busy_ns"] == 100 * 4096
    assert pair.a.stats()["doorbells"] == 100 // 2


def test_small_mtu_and_zero_length(virtual):
    pair = Pair(virtual, bytes_per_s=GB, mtu=256)
    lengths = [0, 1, 256, 257]
    transfer = pair.peer.read(pair.read([0, 0, 256, 1024], [0, 0, 256, 1024], lengths))
    assert finish(virtual, transfer) == [514]
    assert pair.a.stats()["rx_packets"] == 1 + 1 + 1 + 2


CLASSES = [COLLECTIVE, KV, TrafficClass("low", 4, 0), TrafficClass("other", 3, 0)]
message = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 3), st.booleans(),
                    st.lists(st.one_of(st.integers(0, 9000), st.just(4096)), min_size=1,
                             max_size=5),
                    st.integers(0, 8000))


@settings(max_examples=150, deadline=None)
@given(rates=st.lists(st.sampled_from([0, GB, 2 * GB, 3 * GB, 7 * GB, 50 * GB]), min_size=3,
                      max_size=3),
       mtu=st.sampled_from([256, 1000, 4096]), batches=st.lists(message, max_size=12),
       drives=st.lists(st.booleans(), min_size=12, max_size=12))
def test_any_mix_agrees_with_the_model(rates, mtu, batches, drives):
    """Random batches between three NICs, driven at random times: completion times, busy times and
    bytes equal those of port_model.py, however late the fabric was driven."""
    fabric = Fabric("virtual")
    nics = [Nic.open("soft", fabric=fabric, bytes_per_s=r, mtu=mtu, name=str(i))
            for i, r in enumerate(rates)]
    memory = [pattern(1 << 16, i) for i in range(3)]
    regions = [nic.register(m) for nic, m in zip(nics, memory)]
    for nic in nics:
        nic.listen(nic.name)
    peers = {(i, j): nics[i].connect(str(j), classes=CLASSES)
             for i in range(3) for j in range(3)}
    flows, posted = {}, []
    for (i, j, c, reads, lengths, gap), drive in zip(batches, drives):
        if gap and drive:                           # an odd time, never that of a post
            fabric.advance(1)
            nics[0].poll()
            fabric.advance(2 * gap - 1)
        else:
            fabric.advance(2 * gap)
        peer, now = peers[i, j], fabric.now_ns
        qp = peer._qps[CLASSES[c].name].query()["qpn"]
        flow = flows.setdefault(qp, port_model.Flow(qp, []))
        ends = (j, i) if reads else (i, j)
        flow.messages += [(now, n, *ends, CLASSES[c].sl) for n in lengths]
        wrs = requests(READ if reads else WRITE, regions[i], regions[j], 0, 32768, lengths)
        posted.append((peer.post(wrs, None, CLASSES[c]), flow, len(flow.messages)))
    fabric.advance(10**9)
    for transfer, _, _ in posted:
        transfer.wait()
    ports = [port_model.Port(rate) for rate in rates]
    port_model.simulate(ports, list(flows.values()), mtu)
    assert [t.stats["completed_ns"] for t, _, _ in posted] == \
        [flow.ends[last - 1] for _, flow, last in posted]
    for nic, port in zip(nics, ports):
        stats, raw = nic.stats(), nic._ext.counters()
        for way in "tx", "rx":
            assert stats[f"{way}_busy_ns"] == port.busy[way] // port_model.TICKS
            assert {sl: n for sl, n in enumerate(raw[f"{way}_bytes"]) if n} == \
                {sl: n for sl, n in port.nbytes[way].items() if n}
    for nic in nics:
        nic.close()


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
