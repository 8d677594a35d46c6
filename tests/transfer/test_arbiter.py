"""The two-table arbiter of the soft ports: against a second model, and its numbers."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import port_model
from kvio.errors import InvalidArgument
from kvio.layout import READ, WRITE
from kvio.transfer import Arbitration, COLLECTIVE, Fabric, KV, Nic, TrafficClass
from nics import Pair, pattern, requests

GB = 10**9
PACKET = 4096
CLASSES = [COLLECTIVE, KV, TrafficClass("same lane", 4, 0), TrafficClass("other", 3, 0)]
LANES = [TrafficClass(f"vl{vl}", vl, 0) for vl in range(4)]
PAPER = Arbitration()


@st.composite
def arbitrations(draw, limits=st.integers(0, 255)):
    """Any tables over up to five VLs; what neither of them serves is served by the low one."""
    vls = st.integers(0, 4)
    entry = st.tuples(vls, st.one_of(st.sampled_from([0, 1, 64, 192]), st.integers(0, 255)))
    high, low = draw(st.lists(entry, max_size=6)), draw(st.lists(entry, max_size=6))
    sl2vl = draw(st.lists(vls, min_size=16, max_size=16))
    served = {vl for vl, weight in high + low if weight}
    low += [(vl, 1) for vl in sorted(set(sl2vl) - served)]
    limit = draw(st.one_of(st.sampled_from([0, 1, 255]), limits))
    return Arbitration(limit, tuple(high), tuple(low), tuple(sl2vl))


message = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 3), st.booleans(),
                    st.lists(st.one_of(st.integers(0, 9000), st.just(4096), st.just(0)),
                             min_size=1, max_size=8),
                    st.integers(0, 8000))


@settings(max_examples=150, deadline=None)
@given(rules=st.one_of(st.just(PAPER), arbitrations()),
       rates=st.lists(st.sampled_from([0, GB, 2 * GB, 3 * GB, 7 * GB, 50 * GB]), min_size=3,
                      max_size=3),
       mtu=st.sampled_from([64, 256, 1000, 4096]), batches=st.lists(message, max_size=14),
       drives=st.lists(st.booleans(), min_size=14, max_size=14))
def test_any_mix_agrees_with_the_model(rules, rates, mtu, batches, drives):
    """Random batches between three NICs (incast and loop-back with them), by random tables, driven
    at random times: the packets that have left at any time, completion times, busy times and bytes
    equal those of port_model.py, however late the fabric was driven."""
    fabric = Fabric("virtual", arbitration=rules)
    nics = [Nic.open("soft", fabric=fabric, bytes_per_s=r, mtu=mtu, name=str(i))
            for i, r in enumerate(rates)]
    memory = [pattern(1 << 17, i) for i in range(3)]
    regions = [nic.register(m) for nic, m in zip(nics, memory)]
    for nic in nics:
        nic.listen(nic.name)
    peers = {(i, j): nics[i].connect(str(j), classes=CLASSES)
             for i in range(3) for j in range(3)}
    flows, posted, seen = {}, [], []
    for (i, j, c, reads, lengths, gap), drive in zip(batches, drives):
        if gap and drive:                           # an odd time, never that of a post
            fabric.advance(1)
            nics[0].poll()
            seen.append((fabric.now_ns, [moved(nic) for nic in nics]))
            fabric.advance(2 * gap - 1)
        else:
            fabric.advance(2 * gap)
        peer, now = peers[i, j], fabric.now_ns
        qp = peer._qps[CLASSES[c].name].query()["qpn"]
        flow = flows.setdefault(qp, port_model.Flow(qp, []))
        ends = (j, i) if reads else (i, j)
        flow.messages += [(now, n, *ends, CLASSES[c].sl) for n in lengths]
        wrs = requests(READ if reads else WRITE, regions[i], regions[j], 0, 65536, lengths)
        posted.append((peer.post(wrs, None, CLASSES[c]), flow, len(flow.messages)))
    fabric.advance(10**9)
    for transfer, _, _ in posted:
        transfer.wait()
    ports = [port_model.Port(rate, rules) for rate in rates]
    packets = port_model.simulate(ports, list(flows.values()), mtu)
    assert [t.stats["completed_ns"] for t, _, _ in posted] == \
        [flow.ends[last - 1] for _, flow, last in posted]
    for now, counted in seen + [(10**12, [moved(nic) for nic in nics])]:
        assert counted == [modelled(packets, now * port_model.TICKS, i) for i in range(3)]
    for nic, port in zip(nics, ports):
        for way in "tx", "rx":
            assert nic.stats()[f"{way}_busy_ns"] == port.busy[way] // port_model.TICKS
        nic.close()


def moved(nic):
    raw = nic._ext.counters()
    return [raw["tx_packets"], raw["rx_packets"], raw["tx_bytes"], raw["rx_bytes"]]


def modelled(packets, until, nic):
    """The same of the model: what had started by then."""
    out = [0, 0, [0] * 16, [0] * 16]
    for start, source, sink, sl, nbytes in packets:
        for way, end in enumerate((source, sink)):
            if end == nic and start <= until:
                out[way] += 1
                out[2 + way][sl] += nbytes
    return out


# ---- the numbers

class Saturated:
    """Two NICs; more than enough of each lane's packets, from one to the other, at 1 byte/ns."""

    def __init__(self, rules, lanes, packet=PACKET, most=64 << 20):
        self.fabric = Fabric("virtual", arbitration=rules)
        self.pair = Pair(lambda **o: Nic.open("soft", fabric=self.fabric, mtu=packet, **o),
                         bytes_per_s=GB)
        self.lanes = lanes
        peer = self.pair.a.connect("b", classes=lanes)
        wrs = self.pair.read(0, 0, np.full(most >> 20, 1 << 20))
        for lane in lanes:
            peer.read(wrs, lane)

    def run(self, ns):
        """Bytes by lane after so long; a packet that starts at the very end has not."""
        self.fabric.advance(ns - 1)
        self.pair.a.poll()
        raw = self.pair.a._ext.counters()["rx_bytes"]
        self.fabric.advance(1)
        return [raw[lane.sl] for lane in self.lanes]

    def order(self, packets):
        """Who sends, packet by packet."""
        before, order = np.array(self.run(1)), []
        order.append(self.lanes[int(before.argmax())].sl)
        for _ in range(packets - 1):
            now = np.array(self.run(PACKET))
            order.append(self.lanes[int((now - before).argmax())].sl)
            before = now
        return order

    def close(self):
        self.fabric.advance(10**10)
        self.pair.a.close(cancel=True)
        self.pair.b.close()


@pytest.fixture
def saturated():
    opened = []

    def start(*args, **options):
        opened.append(Saturated(*args, **options))
        return opened[-1]
    yield start
    for each in opened:
        each.close()


def test_each_high_limit_lets_one_packet_of_the_low_table_through(saturated):
    rules = Arbitration(vlarb_high=((0, 192),), vlarb_low=((2, 64),), sl2vl=(0, 0, 2, 0) * 4)
    order = saturated(rules, [COLLECTIVE, KV]).order(2 * 241)
    assert order == ([0] * 240 + [2]) * 2
    assert 240 * 4096 == 983_040
    ran = saturated(rules, [COLLECTIVE, KV]).run(20 * 987_136)
    assert ran == [20 * 983_040, 20 * 4096] and ran[1] / sum(ran) == 4096 / 987_136
    assert round(100 * 4096 / 987_136, 3) == 0.415


def test_kv_beside_one_collective_lane(saturated):
    """In the low table VL 0 has 192 units, three packets, before VL 2 has its one."""
    ran = saturated(PAPER, [COLLECTIVE, KV]).run(10 * 4 * 987_136)
    assert ran == [10 * (4 * 987_136 - 4096), 10 * 4096]
    assert round(100 * ran[1] / sum(ran), 3) == 0.104


def test_kv_beside_three_collective_lanes(saturated):
    ran = saturated(PAPER, [LANES[0], LANES[1], KV, LANES[3]]).run(4 * 10 * 987_136)
    assert ran[2] == 4 * 4096 and sum(ran) == 40 * 987_136
    assert round(100 * ran[2] / sum(ran), 4) == 0.0415
    assert max(ran[0], ran[1], ran[3]) - min(ran[0], ran[1], ran[3]) <= 3 * 4 * 4096


@pytest.mark.parametrize("lane", LANES, ids=lambda lane: lane.name)
@pytest.mark.parametrize("limit", [0, 240, 255])
def test_alone_every_lane_gets_everything(saturated, lane, limit):
    assert saturated(Arbitration(limit), [lane]).run(1000 * PACKET) == [1000 * PACKET]


def test_high_limit_0_is_one_packet(saturated):
    order = saturated(Arbitration(0), [COLLECTIVE, KV]).order(32)
    assert order == [0, 0, 0, 0, 0, 0, 0, 2] * 4            # high, low, high, low, ...
    ran = saturated(Arbitration(0), [COLLECTIVE, KV]).run(8000 * PACKET)
    assert ran[1] / sum(ran) == 0.125


def test_high_limit_255_may_starve_the_low_table(saturated):
    assert saturated(Arbitration(255), [COLLECTIVE, KV]).run(8000 * PACKET) == [8000 * PACKET, 0]


def test_an_entry_may_overshoot_by_less_than_a_packet_and_is_forgiven(saturated):
    """Weights of 65 and 1 units, packets of 64: two and one packets a turn, every turn."""
    rules = Arbitration(255, ((0, 65), (2, 1)), (), (0, 0, 2, 0) * 4)
    assert saturated(rules, [COLLECTIVE, KV]).order(12) == [0, 0, 2] * 4


def test_a_lane_may_stand_in_a_table_more_than_once(saturated):
    rules = Arbitration(255, ((0, 64), (2, 64), (0, 128), (1, 0)), (), (0, 0, 2, 0) * 4)
    assert saturated(rules, [COLLECTIVE, KV]).order(12) == [0, 2, 0, 0] * 3
    rules = Arbitration(255, ((2, 64), (0, 0), (0, 128)), (), (0, 0, 2, 0) * 4)
    assert saturated(rules, [COLLECTIVE, KV]).order(12) == [2, 0, 0] * 4


def test_an_empty_message_costs_a_unit():
    """Four empty messages and a packet on VL 0; on VL 2 one turn's empty ones and a packet, which
    is then in its second turn. If empty ones were free, VL 0 would send its packet first."""
    for weight in 1, 2:
        rules = Arbitration(255, ((0, weight), (2, weight)), (), (0, 0, 2, 0) * 4)
        fabric = Fabric("virtual", arbitration=rules)
        pair = Pair(lambda **o: Nic.open("soft", fabric=fabric, **o), bytes_per_s=GB)
        nothing = np.zeros(4, int)
        first = pair.peer.read(pair.read(0, 0, np.append(nothing, PACKET)), COLLECTIVE)
        second = pair.peer.read(pair.read(0, 0, np.append(nothing[:weight], PACKET)), KV)
        fabric.advance(10**6)
        first.wait()
        second.wait()
        assert (second.stats["completed_ns"], first.stats["completed_ns"]) == (4096, 8192)
        pair.a.close()
        pair.b.close()


@settings(max_examples=60, deadline=None)
@given(rules=arbitrations(st.integers(0, 4)), packet=st.sampled_from([256, 1500, 4096]))
def test_nobody_starves_and_the_port_never_idles(rules, packet):
    lanes = [TrafficClass(f"sl{sl}", sl, 0) for sl in
             {vl: sl for sl, vl in enumerate(rules.sl2vl)}.values()]
    if rules.high_limit == 255:                             # may starve the low table, not others
        high = {vl for vl, weight in rules.vlarb_high if weight}
        lanes = [lane for lane in lanes if rules.sl2vl[lane.sl] in high] or lanes
    limit = rules.high_limit if rules.high_limit != 255 else 0
    spent = limit * 4096 + 2 * packet                       # of high for each packet of low
    low = sum(64 * weight // packet + 1 for _, weight in rules.vlarb_low)
    high = sum(64 * weight + packet for _, weight in rules.vlarb_high)
    nbytes = 2 * (low + 1) * spent + 2 * high
    busy = Saturated(rules, lanes, packet, nbytes + (1 << 20))
    ran = busy.run(nbytes)
    assert nbytes <= sum(ran) < nbytes + packet             # which counts from its start
    assert min(ran) > 0
    busy.close()


# ---- what is refused

def test_the_defaults_are_the_papers_tables():
    assert PAPER.high_limit == 240
    assert PAPER.vlarb_high == ((0, 192), (1, 192), (2, 0), (3, 192))
    assert PAPER.vlarb_low == ((0, 192), (1, 192), (2, 64), (3, 192))
    assert PAPER.sl2vl == (0, 1, 2, 3) * 4
    assert Fabric().arbitration == PAPER


@pytest.mark.parametrize("options, says", [
    (dict(high_limit=256), "high_limit"), (dict(high_limit=-1), "high_limit"),
    (dict(high_limit=1.5), "high_limit"), (dict(high_limit=True), "high_limit"),
    (dict(vlarb_high=((15, 1),)), "VL 15"), (dict(vlarb_low=((16, 1),)), "vlarb_low"),
    (dict(vlarb_low=((0, 256),)), "weight"), (dict(vlarb_low=((0, -1),)), "weight"),
    (dict(vlarb_low=((0,),)), "pairs"), (dict(vlarb_high=7), "pairs"),
    (dict(vlarb_high=((0, 1),) * 65), "at most 64"), (dict(vlarb_high=None), "pairs"),
    (dict(sl2vl=(0,) * 15), "16 VLs"), (dict(sl2vl=(15,) + (0,) * 15), "0..14"),
    (dict(sl2vl=3), "16 VLs"), (dict(sl2vl=(4,) * 16), "never leave"),
    (dict(vlarb_high=(), vlarb_low=((0, 1), (1, 1), (2, 0), (3, 1))), "SL 2 maps to VL 2"),
    (dict(vlarb_high=(), vlarb_low=()), "never leave"),
])
def test_tables_that_make_no_sense_are_refused(options, says):
    with pytest.raises(InvalidArgument, match=says):
        Arbitration(**options)


def test_a_fabric_takes_an_arbitration():
    for wrong in "paper", ((0, 192),), 240:
        with pytest.raises(InvalidArgument, match="Arbitration"):
            Fabric(arbitration=wrong)


def test_a_service_level_leaves_on_its_lane():
    rules = Arbitration(sl2vl=(14,) * 16, vlarb_low=[[14, 1]], vlarb_high=[])
    fabric = Fabric("virtual", arbitration=rules)
    pair = Pair(lambda **o: Nic.open("soft", fabric=fabric, **o))
    pair.peer.read(pair.read(0, 0, 5000)).wait()
    assert pair.a.stats()["by_vl"] == {14: {"tx_bytes": 0, "rx_bytes": 5000}}
    pair.a.close()
    pair.b.close()
