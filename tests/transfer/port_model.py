"""The soft network once more, as plainly as possible: packet by packet, in whole 1/256 ns.

It shares no code and no data structure with kvio/_ext/softfabric.c. A flow is a queue pair with
messages `(posted_ns, nbytes, source, sink, sl)`, sent one after another.
"""
from arbiter_model import Arbiter

TICKS = 256


class Port:
    def __init__(self, rate, arbitration):
        a = arbitration
        self.rate, self.sl2vl, self.free = rate, a.sl2vl, {"tx": 0, "rx": 0}
        self.busy, self.nbytes = {"tx": 0, "rx": 0}, {"tx": {}, "rx": {}}
        self.arbiter = {way: Arbiter(a.high_limit, a.vlarb_high, a.vlarb_low)
                        for way in ("tx", "rx")}

    def carry(self, way, start, nbytes, sl):
        took = -(-nbytes * TICKS * 10**9 // self.rate) if self.rate else 0
        self.free[way] = start + took
        self.busy[way] += took
        self.nbytes[way][sl] = self.nbytes[way].get(sl, 0) + nbytes
        return start + took


class Flow:
    def __init__(self, number, messages):
        self.number, self.messages, self.ready, self.sent, self.ends = number, messages, 0, 0, []

    @property
    def head(self):
        return self.messages[len(self.ends)] if len(self.ends) < len(self.messages) else None

    def offer(self, ports):
        """(earliest start, since when it waits, tie-break) of the next packet."""
        posted, _, source, sink, _ = self.head
        since = max(self.ready, posted * TICKS)
        return (max(since, ports[source].free["tx"], ports[sink].free["rx"]), since, self.number)


def simulate(ports, flows, mtu):
    """Runs all flows to their end; each flow's `ends` are the times its messages end, in ns.
    Every packet: (start in ticks, source, sink, sl, bytes)."""
    packets = []

    def lanes(some):
        """The head packet of each VL, of which the oldest goes first: `some` is sorted."""
        heads = {}
        for flow in some:
            _, nbytes, source, _, sl = flow.head
            heads.setdefault(ports[source].sl2vl[sl], (flow, min(mtu, nbytes - flow.sent)))
        return heads

    def sizes(heads):
        return {vl: size for vl, (_, size) in heads.items()}

    while True:
        offers = {flow: flow.offer(ports) for flow in flows if flow.head}
        if not offers:
            return packets
        now = min(start for start, _, _ in offers.values())
        able = sorted((flow for flow in offers if offers[flow][0] == now),
                      key=lambda flow: offers[flow][1:])
        incoming = {sink: lanes([flow for flow in able if flow.head[3] == sink])
                    for sink in {flow.head[3] for flow in able}}
        granted = {heads[ports[sink].arbiter["rx"].peek(sizes(heads))][0]
                   for sink, heads in incoming.items()}
        granted = [flow for flow in able if flow in granted]
        source = granted[0].head[2]
        outgoing = lanes([flow for flow in granted if flow.head[2] == source])
        flow, size = outgoing[ports[source].arbiter["tx"].send(sizes(outgoing))]
        _, _, _, sink, sl = flow.head
        vl = ports[sink].arbiter["rx"].send(sizes(incoming[sink]))
        assert incoming[sink][vl] == (flow, size)
        packets.append((now, source, sink, sl, size))
        send(ports, flow, now, size)


def send(ports, flow, now, size):
    _, nbytes, source, sink, sl = flow.head
    flow.ready = max(ports[source].carry("tx", now, size, sl),
                     ports[sink].carry("rx", now, size, sl))
    flow.sent += size
    if flow.sent == nbytes:
        flow.sent = 0
        flow.ends.append(-(-flow.ready // TICKS))
