"""What a collective feels of KV traffic, by the paper's tables and in virtual time: 1 byte a ns."""
import numpy as np
import pytest

from kvio.layout import READ, WRITE
from kvio.transfer import COLLECTIVE, KV, TrafficClass
from nics import pattern, requests

GB = 10**9
MIB = 1 << 20
ONE_CLASS = TrafficClass("collective", KV.sl, KV.tclass)     # the same lane as KV


class Cluster:
    """Senders and receivers with a megabyte each; every sender writes to every receiver."""

    def __init__(self, virtual, senders=1, receivers=1, collective=COLLECTIVE):
        self.fabric, self.collective = virtual.fabric, collective
        self.sources = [virtual(f"source{i}", bytes_per_s=GB) for i in range(senders)]
        self.sinks = [virtual(f"sink{i}", bytes_per_s=GB) for i in range(receivers)]
        self.memory = {nic: pattern(MIB, at) for at, nic in enumerate(self.sources + self.sinks)}
        self.regions = {nic: nic.register(memory) for nic, memory in self.memory.items()}
        for nic in self.sinks:
            nic.listen(nic.name)
        self.peers = {(s, d): self.sources[s].connect(self.sinks[d].name, [collective, KV])
                      for s in range(senders) for d in range(receivers)}

    def post(self, nbytes, traffic_class, source=0, sink=0, step=MIB):
        far = self.regions[self.sinks[sink]]
        wrs = requests(WRITE, self.regions[self.sources[source]], far, 0, 0,
                       np.full(nbytes // step, step))
        return self.peers[source, sink].write(wrs, traffic_class)

    def finish(self, transfer, tick=4096):
        """Advance packet by packet until it is done: the time."""
        while not transfer.done:
            self.fabric.advance(tick)
        return transfer.stats["completed_ns"]


def bytes_by_sl(nic, way="rx"):
    return nic._ext.counters()[f"{way}_bytes"]


@pytest.mark.parametrize("begun", [1, 4095, 4096, 10_000, 1_000_000])
def test_one_batch_under_saturating_kv(virtual, begun):
    """16 MiB: late by the rest of a packet and four or five of the low table; KV gets every byte
    that is left."""
    cluster = Cluster(virtual)
    kv = cluster.post(64 * MIB, KV)
    virtual.fabric.advance(begun)
    cluster.sources[0].poll()
    before = bytes_by_sl(cluster.sinks[0])[KV.sl]
    collective = cluster.post(16 * MIB, COLLECTIVE)
    end = cluster.finish(collective, 8192)
    slowed = (end - begun) / (16 * MIB) - 1
    assert 0.0009 < slowed < 0.0014                         # 0.12 %; wanted: within 0.5 %
    assert not kv.done
    sink, source = cluster.sinks[0], cluster.sources[0]
    # The packets that had started by `now`, in bytes, are the time to the end of the last one.
    now, moved = virtual.fabric.now_ns, bytes_by_sl(sink)
    assert moved == bytes_by_sl(source, "tx")
    assert sum(moved) == moved[COLLECTIVE.sl] + moved[KV.sl] == now // 4096 * 4096 + 4096
    assert moved[COLLECTIVE.sl] == 16 * MIB
    # Before the end of the collective, KV had what it left.
    after_the_end = now // 4096 * 4096 + 4096 - end
    assert moved[KV.sl] - after_the_end == end - 16 * MIB
    assert before == begun // 4096 * 4096 + 4096


def test_idle_is_the_measure(virtual):
    cluster = Cluster(virtual)
    assert cluster.finish(cluster.post(16 * MIB, COLLECTIVE)) == 16 * MIB


def test_in_one_class_there_is_no_isolation(virtual):
    """The same test with both in one lane: so it can fail."""
    cluster = Cluster(virtual, collective=ONE_CLASS)
    cluster.post(64 * MIB, KV)
    collective = cluster.post(16 * MIB, ONE_CLASS)
    assert cluster.finish(collective) / (16 * MIB) - 1 > 0.95   # twice the time, not 0.1 % more


def test_synchronous_steps_lose_a_packet_a_step(virtual):
    """64 steps of 256 KiB, each posted when the one before has ended: KV has begun a packet."""
    cluster = Cluster(virtual)
    cluster.post(64 * MIB, KV)
    virtual.fabric.advance(4096)
    cluster.sources[0].poll()
    began = virtual.fabric.now_ns
    for _ in range(64):
        end = cluster.finish(cluster.post(256 << 10, COLLECTIVE, step=256 << 10))
    slowed = (end - began) / (16 * MIB) - 1
    assert 0.0156 < slowed < 0.0170                         # 4096 / 262,144 and the low table
    assert bytes_by_sl(cluster.sinks[0])[COLLECTIVE.sl] == 16 * MIB


def test_incast_is_arbitrated_by_the_receiving_port(virtual):
    """Four senders of KV and one of a collective to one receiver: only its port can tell them
    apart."""
    cluster = Cluster(virtual, senders=5)
    for i in range(1, 5):
        cluster.post(16 * MIB, KV, source=i)
    virtual.fabric.advance(5000)
    cluster.sources[0].poll()
    end = cluster.finish(cluster.post(16 * MIB, COLLECTIVE, source=0))
    assert 0.0009 < (end - 5000) / (16 * MIB) - 1 < 0.0014
    assert virtual.fabric.now_ns - 4096 <= cluster.sinks[0].stats()["rx_busy_ns"] \
        <= virtual.fabric.now_ns + 4096
    shares = [bytes_by_sl(nic, "tx")[KV.sl] for nic in cluster.sources[1:]]
    assert sum(shares) == bytes_by_sl(cluster.sinks[0])[KV.sl]
    assert max(shares) - min(shares) <= 4096                # of one lane: first come, first served


def test_a_sending_port_is_arbitrated_too(virtual):
    """One sender, three receivers, KV to two of them: the links to them are idle, it is not."""
    cluster = Cluster(virtual, receivers=3)
    for i in 1, 2:
        cluster.post(16 * MIB, KV, sink=i)
    virtual.fabric.advance(5000)
    cluster.sources[0].poll()
    end = cluster.finish(cluster.post(16 * MIB, COLLECTIVE))
    assert 0.0009 < (end - 5000) / (16 * MIB) - 1 < 0.0014
    moved = bytes_by_sl(cluster.sources[0], "tx")
    assert sum(moved) == virtual.fabric.now_ns // 4096 * 4096 + 4096


def test_kv_that_has_the_port_to_itself_has_the_link(virtual):
    """A collective to one receiver does not slow KV between two others."""
    cluster = Cluster(virtual, senders=2, receivers=2)
    collective = cluster.post(16 * MIB, COLLECTIVE, source=0, sink=0)
    kv = cluster.post(16 * MIB, KV, source=1, sink=1)
    assert cluster.finish(collective) == cluster.finish(kv) == 16 * MIB


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_the_lane_is_the_senders_for_both_opcodes(virtual, opcode):
    """Reads leave the responder's port in the class of its queue pair."""
    cluster = Cluster(virtual)
    peer, near, far = cluster.peers[0, 0], cluster.sources[0], cluster.sinks[0]
    regions = cluster.regions[near], cluster.regions[far]
    lengths = np.full(64, 1 << 20)
    peer.post(requests(opcode, *regions, 0, 0, lengths), None, KV)
    virtual.fabric.advance(100)
    near.poll()
    collective = peer.post(requests(opcode, *regions, 0, 0, lengths[:16]), None, COLLECTIVE)
    assert cluster.finish(collective) - 100 < 1.0014 * 16 * MIB
    sender = near if opcode == WRITE else far
    assert bytes_by_sl(sender, "tx")[COLLECTIVE.sl] == 16 * MIB
