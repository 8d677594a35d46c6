"""Which bytes cross the cable, and what stands in their IP headers."""
import numpy as np
import pytest

from kvio.layout import READ, WRITE
from kvio.transfer import COLLECTIVE, KV, TrafficClass
from lab.guest import peers
from lab.guest.wire import A, ACK, B, READ_REQUEST, READ_RESPONSE, Capture
from lab.guest.wire import WRITE as WRITES
from nics import pattern, requests

OTHER = TrafficClass("other", 5, 0x48)


def by_kind(packets):
    """{(source, kind): (set of ToS bytes, RDMA payload bytes)}"""
    found = {}
    for packet in packets:
        tos, nbytes = found.setdefault((packet.source, packet.kind), (set(), []))
        tos.add(packet.tos)
        nbytes.append(packet.nbytes)
    return {key: (tos, sum(nbytes)) for key, (tos, nbytes) in found.items()}


@pytest.mark.parametrize("c", [COLLECTIVE, KV, OTHER], ids=lambda c: c.name)
def test_every_packet_carries_the_dscp_of_its_class(nics, c):
    a, b = nics
    mine, theirs = pattern(1 << 18, 1), pattern(1 << 18, 2)
    local, remote = a.register(mine), b.register(theirs)
    b.listen("capture")
    peer = a.connect("capture", classes=[COLLECTIVE, KV, OTHER])
    at = 20000 * np.arange(8)
    with Capture() as capture:
        peer.read(requests(READ, local, remote, at, at, 10000), c).wait()
        reads = by_kind(capture.packets())
        peer.write(requests(WRITE, local, remote, at, at + 10000, 8004), c).wait()
        writes = by_kind(capture.packets())
    assert all((mine[i:i + 10000] == theirs[i:i + 10000]).all() for i in at)
    assert reads[A, READ_REQUEST] == ({c.tclass}, 0)
    assert reads[B, READ_RESPONSE] == ({c.tclass}, 80000)
    assert writes[A, WRITES] == ({c.tclass}, 8 * 8004)
    assert writes[B, ACK][0] == {c.tclass}


def test_a_batch_of_two_classes_at_once(pair):
    """Each queue pair keeps to its own class, both under way together, in both directions."""
    at = 4096 * np.arange(16)
    with Capture() as capture:
        transfers = []
        for peer, near, far, start in ((pair.peer, pair.local, pair.remote, 0),
                                       (pair.back, pair.remote, pair.local, 1 << 19)):
            wrs = requests(READ, near, far, at + start, at + start, 4096)
            transfers.append(peer.read(wrs, KV))
            wrs = requests(WRITE, near, far, at + start + 65536, at + start + 65536, 4096)
            transfers.append(peer.write(wrs, COLLECTIVE))
        for transfer in transfers:
            transfer.wait()
        seen = by_kind(capture.packets())
    for source in A, B:
        assert seen[source, READ_REQUEST][0] == seen[source, READ_RESPONSE][0] == {KV.tclass}
        assert seen[source, WRITES] == ({COLLECTIVE.tclass}, 65536)
        assert seen[source, READ_RESPONSE][1] == 65536


def test_read_responses_carry_the_class_of_the_responder(nics):
    """Why the handshake sets a class at both ends: a NIC answers with its own queue pair's."""
    a, b = nics
    mine, theirs = np.zeros(8192, np.uint8), pattern(8192)
    local, remote = a.register(mine), b.register(theirs)
    ends = peers.raw_pair(a, b, KV, COLLECTIVE)
    with Capture() as capture:
        assert ends[0].post(requests(READ, local, remote, 0, 0, 8192)).wait(10)
        seen = by_kind(capture.packets())
    assert (mine == theirs).all()
    assert seen[A, READ_REQUEST][0] == {KV.tclass}
    assert seen[B, READ_RESPONSE] == ({COLLECTIVE.tclass}, 8192)


def test_a_loop_back_does_not_leave_the_device(nics):
    a, _ = nics
    mine = pattern(8192)
    region = a.register(mine)
    a.listen("loop")
    peer = a.connect("loop", classes=[KV])
    with Capture() as capture:
        peer.read(requests(READ, region, region, 0, 4096, 4096)).wait()
        assert capture.packets() == []
    assert (mine[:4096] == mine[4096:]).all()
