"""The soft NIC in virtual time: exact to the byte and the nanosecond."""
import errno
import uuid

import numpy as np
import pytest

from kvio._ext import nic as ext
from kvio.errors import Busy, TransferError
from kvio.layout import READ, WRITE
from kvio.transfer import COLLECTIVE, KV
from nics import Pair, finish, pattern, requests

GB = 10**9


def test_what_it_says_of_itself_is_true(virtual):
    assert virtual("few", max_sge=7).info() == {
        "provider": "soft", "name": "few", "max_sge": 7, "max_sge_rd": 7,
        "max_msg_nbytes": 2**32 - 1, "rails": []}


def test_a_nic_has_a_bound_of_regions_and_says_so(virtual):
    """Peers remember no more of them than that."""
    nic, memory = virtual(), pattern(64)
    regions = [nic.register(memory) for _ in range(65536)]
    for _ in range(2):
        with pytest.raises(TransferError, match="at most 65536 regions") as failure:
            nic.register(memory)
        assert failure.value.errno == errno.ENOSPC
        for index in 40000, 7:
            nic.deregister(regions[index])
        for index in 7, 40000:                  # in the first place that is free
            regions[index] = nic.register(memory)
            assert regions[index].key & 0xffffff == index


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


def test_a_collective_goes_first_and_both_are_counted_by_class(virtual):
    pair = Pair(virtual, bytes_per_s=GB)
    kv = pair.peer.read(pair.read(0, 0, 40 * 4096), KV)
    pair.a.poll()                                   # its first packet is on the wire
    collective = pair.peer.read(pair.read(1 << 19, 0, 10 * 4096), COLLECTIVE)
    ends = finish(virtual, kv, collective)
    assert ends == [50 * 4096, 11 * 4096]
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


def test_an_error_that_leaves_a_nics_block_is_not_hidden_by_busy(virtual):
    """Busy is what close says: another NIC still reads this one's memory."""
    for error in KeyError("why"), None:
        nic, other = virtual("left"), virtual("other", bytes_per_s=1000)
        with pytest.raises(type(error) if error else Busy), nic:
            there, here = nic.register(pattern(4096)), other.register(bytearray(4096))
            listener = nic.listen(uuid.uuid4().hex)
            peer = other.connect(listener.address)
            peer.read(requests(READ, here, there, 0, 0, 4096))
            if error:
                raise error
        with pytest.raises(Busy):
            nic.close()
