"""The soft network once more, as plainly as possible: packet by packet, in whole 1/256 ns.

It shares no code and no data structure with kvio/_ext/softfabric.c. A flow is a queue pair with
messages `(posted_ns, nbytes, source, sink, sl)`, sent one after another.
"""
TICKS = 256


class Port:
    def __init__(self, rate):
        self.rate, self.free = rate, {"tx": 0, "rx": 0}
        self.busy, self.last_vl = {"tx": 0, "rx": 0}, {"tx": 0, "rx": 0}
        self.nbytes = {"tx": {}, "rx": {}}

    def turn(self, way, vls):
        """Round robin: of the lanes that wait, the next after the one that sent last."""
        return min(vls, key=lambda vl: (vl - self.last_vl[way] - 1) % 4)

    def carry(self, way, start, nbytes, sl):
        took = -(-nbytes * TICKS * 10**9 // self.rate) if self.rate else 0
        self.free[way], self.last_vl[way] = start + took, sl % 4
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
    """Runs all flows to their end; each flow's `ends` are the times its messages end, in ns."""
    while True:
        offers = {flow: flow.offer(ports) for flow in flows if flow.head}
        if not offers:
            return
        now = min(start for start, _, _ in offers.values())
        able = [flow for flow in offers if offers[flow][0] == now]
        by_age = sorted(able, key=lambda flow: offers[flow][1:])
        granted = []
        for sink in {flow.head[3] for flow in able}:
            to_sink = [flow for flow in by_age if flow.head[3] == sink]
            vl = ports[sink].turn("rx", {flow.head[4] % 4 for flow in to_sink})
            granted.append(next(flow for flow in to_sink if flow.head[4] % 4 == vl))
        granted.sort(key=by_age.index)
        source = granted[0].head[2]
        mine = [flow for flow in granted if flow.head[2] == source]
        vl = ports[source].turn("tx", {flow.head[4] % 4 for flow in mine})
        send(ports, next(flow for flow in mine if flow.head[4] % 4 == vl), now, mtu)


def send(ports, flow, now, mtu):
    _, nbytes, source, sink, sl = flow.head
    packet = min(mtu, nbytes - flow.sent)
    flow.ready = max(ports[source].carry("tx", now, packet, sl),
                     ports[sink].carry("rx", now, packet, sl))
    flow.sent += packet
    if flow.sent == nbytes:
        flow.sent = 0
        flow.ends.append(-(-flow.ready // TICKS))
