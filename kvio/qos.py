"""Fabric set-up for traffic classes: what an InfiniBand subnet manager, a RoCE NIC, or Linux has
to be told so that a class is more than a number in a packet.

`opensm`, `mlnx` and `tc` take a list of `Share` and give a `Setup`: its lines with a meaning for
each, and what this fabric will not honour. Nothing is run here. docs/classes.md says which rules
the numbers follow.
"""
import re
from dataclasses import dataclass

from kvio.errors import InvalidArgument
from kvio.transfer.arbitration import Arbitration
from kvio.transfer.classes import COLLECTIVE, KV, TrafficClass, class_list

__all__ = ["DEFAULT_SHARES", "Setup", "Share", "arbitration", "mlnx", "opensm", "tc"]

HIGH_LIMIT = 240                # in 4 KiB: this much leaves high before the low table gets a packet
FULL, LEAST = 192, 64           # weights, in 64 bytes: multiples of a 4 KiB packet's 64
BACKGROUND = 10                 # a share this many times smaller than the largest yields to it
MAX_LANES, MAX_PRIOS, MAX_LOSSLESS, MAX_BANDS = 8, 8, 4, 16
QUANTUM = 4500                  # bytes: a packet of 4 KiB and its headers
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@dataclass(frozen=True)
class Share:
    """A traffic class and its part of a saturated link: shares are weighed against each other."""

    traffic_class: TrafficClass
    share: int

    def __post_init__(self):
        if not isinstance(self.traffic_class, TrafficClass) or not isinstance(self.share, int) \
                or not 1 <= self.share <= 100:
            raise InvalidArgument(f"a share is a TrafficClass and 1 to 100, not {self!r}")
        name = self.traffic_class.name
        if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]{1,40}", name):
            raise InvalidArgument("the name of a class goes into comments: letters, digits and "
                                  f"_.+- only, not {name!r}")

    @property
    def name(self) -> str:
        return self.traffic_class.name

    @property
    def dscp(self) -> int:
        return self.traffic_class.tclass >> 2


DEFAULT_SHARES = (Share(COLLECTIVE, 99), Share(KV, 1))


@dataclass(frozen=True)
class Setup:
    """`lines` are (text, meaning); `note` is what holds of this kind of fabric whatever the classes
    are, `warnings` what it will not do for these."""

    kind: str
    shares: tuple[Share, ...]
    lines: tuple[tuple[str, str], ...]
    note: str
    warnings: tuple[str, ...]

    def text(self) -> str:
        """The lines with their meanings as comments; can be used as it stands."""
        classes = [f"# {s.name}: sl {s.traffic_class.sl}, tclass {s.traffic_class.tclass} "
                   f"(DSCP {s.dscp}), share {s.share}" for s in self.shares]
        body = [part for text, why in self.lines for part in (f"# {why}", text)]
        warnings = [f"# WARNING: {each}" for each in self.warnings]
        return "\n".join([*classes, f"# {self.note}", *warnings, *body])

    def to_dict(self) -> dict:
        """Plain data."""
        return {"kind": self.kind, "note": self.note, "warnings": list(self.warnings),
                "classes": [{"name": s.name, "sl": s.traffic_class.sl, "share": s.share,
                             "tclass": s.traffic_class.tclass, "dscp": s.dscp}
                            for s in self.shares],
                "lines": [{"text": text, "meaning": why} for text, why in self.lines]}


def _checked(shares) -> tuple:
    shares = tuple(shares)
    class_list(share.traffic_class for share in shares)
    return shares


def _grouped(shares, key):
    """{key: shares with it}, in the order in which they were given."""
    groups = {}
    for share in shares:
        groups.setdefault(key(share), []).append(share)
    return groups


def _names(shares):
    return " and ".join(share.name for share in shares)


def _total(shares):
    return sum(share.share for share in shares)


def _places(wanted, free):
    """A place for each key: the one it wants if nobody before it has it, else the lowest free."""
    free, places = set(free), {}
    for key, place in wanted.items():
        if place in free:
            free.remove(place)
            places[key] = place
    for key in wanted:
        if key not in places:
            places[key] = min(free)
            free.remove(places[key])
    return places


# ---- InfiniBand

def _by_sl(shares):
    groups = _grouped(shares, lambda share: share.traffic_class.sl)
    if len(groups) > MAX_LANES:
        raise InvalidArgument(f"{len(groups)} service levels need as many lanes; InfiniBand "
                              f"hardware has {MAX_LANES} at most: let classes share an sl")
    num_lanes = 4 if len(groups) <= 4 else MAX_LANES
    return groups, num_lanes, _places({sl: sl % num_lanes for sl in groups}, range(num_lanes))


def arbitration(shares=DEFAULT_SHARES) -> Arbitration:
    """The same for soft NICs: `Fabric(arbitration=arbitration(shares))` does what `opensm` of
    these shares says."""
    groups, num_lanes, lanes = _by_sl(_checked(shares))
    high, low = _weights({lanes[sl]: _total(group) for sl, group in groups.items()}, num_lanes)
    return Arbitration(HIGH_LIMIT, tuple(high.items()), tuple(low.items()),
                       tuple(lanes.get(sl, sl % num_lanes) for sl in range(16)))


def opensm(shares=DEFAULT_SHARES) -> Setup:
    """Lines of opensm.conf. One lane for each service level; InvalidArgument beyond 8."""
    shares = _checked(shares)
    groups, num_lanes, lanes = _by_sl(shares)
    rules = arbitration(shares)
    high, low = dict(rules.vlarb_high), dict(rules.vlarb_low)
    floors = _floors(high, low, set(lanes.values()))
    used = ", ".join(f"{_names(group)} on {lanes[sl]}" for sl, group in groups.items())
    told = "; ".join(f"{_names(group)} {floors[lanes[sl]]:.3g} %" for sl, group in groups.items())
    lines = [
        ("qos TRUE", "the subnet manager sets lanes up at all (or opensm -Q)"),
        (f"qos_max_vls {num_lanes}", f"lanes 0 to {num_lanes - 1}; needs VLCap of that many"),
        (f"qos_high_limit {HIGH_LIMIT}", f"{HIGH_LIMIT * 4096:,} bytes of the high table may pass "
         "before the low table gets one packet"),
        (f"qos_vlarb_high {_table(high)}", "lane:weight in 64 bytes; weight 0: not in this table"),
        (f"qos_vlarb_low {_table(low)}", "what is sent when the high table has nothing or has "
         f"used up its limit. All classes saturated (4 KiB packets), each gets at least: {told}; "
         "alone, each gets everything"),
        ("qos_sl2vl " + _list(rules.sl2vl), f"lane of service levels 0 to 15: {used}"),
    ]
    return Setup("opensm", shares, tuple(lines),
                 "InfiniBand goes by sl alone: tclass changes nothing here. Libraries that make "
                 "collectives have their own knob (NCCL_IB_SL, NVSHMEM_IB_SL)",
                 tuple(_opensm_warnings(groups, lanes, num_lanes)))


def _opensm_warnings(groups, lanes, num_lanes):
    for sl, group in groups.items():
        if len(group) > 1:
            yield (f"{_names(group)} have service level {sl} in common: the fabric cannot tell "
                   "them apart; they are one lane with the sum of their shares")
    if num_lanes > 4:
        yield (f"{len(groups)} lanes: check that every port has VLCap VL0-7 (smpquery portinfo); "
               "where one has fewer, opensm lowers the number for all and classes share lanes")
    for sl, group in groups.items():
        taken = [other for other in range(16) if other not in groups
                 and other % num_lanes == lanes[sl]]
        if lanes[sl] != sl % num_lanes:
            yield (f"{_names(group)}: lane {sl % num_lanes} of service level {sl} is taken; lane "
                   f"{lanes[sl]} is also that of service levels {', '.join(map(str, taken))}")


def _weights(totals, num_lanes):
    """Both tables from the shares of the lanes in use: {lane: weight}. Lanes that no class uses
    carry everybody else's traffic, and are not held back."""
    largest = max(totals.values())
    background = {lane: share for lane, share in totals.items() if share * BACKGROUND < largest}
    high, low = {}, {}
    for lane in range(num_lanes):
        if lane in background:
            high[lane] = 0
            low[lane] = _weight(background[lane], min(background.values()), LEAST)
        else:
            high[lane] = low[lane] = _weight(totals.get(lane, largest), largest, FULL)
    return high, low


def _weight(share, unit, weight):
    """`weight` for a share of `unit`, in proportion, as a multiple of LEAST up to FULL."""
    steps = round(weight * share / unit / LEAST)
    return LEAST * min(max(1, steps), FULL // LEAST)


def _table(weights):
    return ",".join(f"{lane}:{weight}" for lane, weight in weights.items())


def _floors(high, low, lanes):
    """Percent of the link that each lane gets while these lanes are saturated."""
    in_high = sum(high[lane] for lane in lanes)
    in_low = sum(low[lane] for lane in lanes)
    for_low = 1 / (HIGH_LIMIT + 1)
    return {lane: 100 * ((1 - for_low) * high[lane] / in_high + for_low * low[lane] / in_low)
            for lane in lanes}


# ---- RoCE

def _warn_dscp(groups):
    for dscp, group in groups.items():
        if len(group) > 1:
            yield (f"{_names(group)} have DSCP {dscp} in common: the fabric cannot tell them "
                   "apart; they are one queue with the sum of their shares")
        if dscp == 0:
            yield (f"{_names(group)}: DSCP 0 is that of all traffic that nobody has marked; it "
                   "shares their queue")
        for share in group:
            if share.traffic_class.tclass & 3:
                yield (f"{share.name}: the low two bits of tclass {share.traffic_class.tclass} "
                       "are ECN's and do not tell classes apart")


def mlnx(device: str, shares=DEFAULT_SHARES) -> Setup:
    """Commands of mlnx_qos for one port of a ConnectX NIC. The switches need the same."""
    shares, device = _checked(shares), _device(device)
    groups = _grouped(shares, lambda share: share.dscp)
    marked = {dscp: dscp >> 3 for dscp in groups if dscp}
    if len(marked) > MAX_PRIOS - 1:
        raise InvalidArgument(f"{len(marked)} DSCPs need as many priorities; a port has "
                              f"{MAX_PRIOS}, and other traffic needs one: let classes share")
    prios = _places(marked, range(1, MAX_PRIOS))
    if 0 in groups:
        prios[0] = 0
    tcs = {0: 0, **{prios[dscp]: i for i, dscp in enumerate(marked, 1)}}
    percent = _percent({tcs[prios[dscp]]: _total(group) for dscp, group in groups.items()})
    order = sorted(groups, key=lambda dscp: -_total(groups[dscp]))
    lossless = {prios[dscp] for dscp in order[:MAX_LOSSLESS]}
    command, eight = f"mlnx_qos -i {device}", range(MAX_PRIOS)
    used = ", ".join(f"{_names(group)} {percent[tcs[prios[dscp]]]} %"
                     for dscp, group in groups.items())
    lines = [(f"{command} --trust dscp", "the DSCP of a packet decides, not its VLAN tag")]
    lines += [(f"{command} --dscp2prio set,{dscp},{prios[dscp]}",
               f"{_names(group)}: DSCP {dscp} is priority {prios[dscp]}")
              for dscp, group in groups.items()]
    lines += [
        (f"{command} --prio_tc {_list(tcs.get(prio, 0) for prio in eight)}",
         "each class has a queue of its own; queue 0 is everybody else's"),
        (f"{command} --tsa {_list('ets' for _ in eight)} "
         f"--tcbw {_list(percent.get(queue, 0) for queue in eight)}",
         f"least parts of a saturated link: {used}; what one leaves goes to the others"),
        (f"{command} --pfc {_list(int(prio in lossless) for prio in eight)}",
         f"lossless: priorities {', '.join(map(str, sorted(lossless)))}"),
    ]
    warnings = list(_warn_dscp(groups))
    if len(groups) > MAX_LOSSLESS:
        lossy = _names(share for dscp in order[MAX_LOSSLESS:] for share in groups[dscp])
        warnings.append(f"a port has buffers for {MAX_LOSSLESS} lossless priorities: {lossy} may "
                        "lose packets when a switch is full")
    return Setup("mlnx", shares, tuple(lines),
                 "RoCE goes by DSCP (tclass >> 2): sl only sets the priority bits of a VLAN tag. "
                 "Switches need the same trust, queues and PFC. Libraries that make collectives "
                 "have their own knob (NCCL_IB_TC, NVSHMEM_IB_TRAFFIC_CLASS)", tuple(warnings))


def _percent(totals):
    """Whole percents of 100 in proportion, 1 at least for each queue, queue 0 among them."""
    totals = {0: 0, **totals}
    parts = {queue: max(1, int(100 * share / sum(totals.values())))
             for queue, share in totals.items()}
    while sum(parts.values()) != 100:           # what rounding left over, from or to the largest
        largest = max(parts, key=parts.get)
        parts[largest] += 100 - sum(parts.values())
    return parts


def _list(values):
    return ",".join(map(str, values))


# ---- Linux

def tc(device: str, shares=DEFAULT_SHARES, rate: str | None = None,
       scheduler: str = "prio") -> Setup:
    """Commands of Linux tc for one network device: what Soft-RoCE sends through it.

    rate: the device is slowed down to it, "24mbit" say. scheduler: "prio", where the larger share
    always goes first, or "ets", which divides a saturated link by the shares.
    """
    shares, device = _checked(shares), _device(device)
    groups = _grouped(shares, lambda share: share.dscp)
    if len(groups) >= MAX_BANDS:
        raise InvalidArgument(f"{len(groups)} DSCPs need as many bands, and other traffic needs "
                              f"one; Linux has {MAX_BANDS}: let classes share a DSCP")
    if scheduler not in ("prio", "ets"):
        raise InvalidArgument(f"the scheduler is prio or ets, not {scheduler!r}")
    bands = dict(enumerate(sorted(groups, key=lambda dscp: -_total(groups[dscp])), 1))
    last, lines, parent = len(bands) + 1, [], "root"
    if rate is not None:
        lines.append(_paced(device, rate))
        parent = "parent 1:1"
    quanta, what = "", "strict priority: band 10:1 goes first, whatever the shares are"
    if scheduler == "ets":
        least = min(map(_total, groups.values()))
        quanta = " quanta " + " ".join(str(QUANTUM * _total(groups[dscp]) // least)
                                       for dscp in bands.values()) + f" {QUANTUM}"
        what = "bytes of each band a round, in proportion to the shares"
    lines.append((f"tc qdisc replace dev {device} {parent} handle 10: {scheduler} bands {last}"
                  f"{quanta} priomap {' '.join([str(last - 1)] * 16)}",
                  f"{what}; what no filter names goes to the last band"))
    for band, dscp in bands.items():
        tos, name = dscp << 2, _names(groups[dscp])
        add = f"tc filter add dev {device} parent 10:"
        lines += [
            (f"{add} protocol ip prio {2 * band - 1} u32 match ip dsfield {tos:#04x} 0xfc "
             f"flowid 10:{band}", f"{name}: DSCP {dscp} to band 10:{band}, IPv4"),
            (f"{add} protocol ipv6 prio {2 * band} u32 match u16 {tos << 4:#06x} 0x0fc0 at 0 "
             f"flowid 10:{band}", f"{name}: the same for IPv6"),
        ]
    return Setup("tc", shares, tuple(lines),
                 "Soft-RoCE goes by DSCP (tclass >> 2) and ignores sl. Only what leaves through "
                 f"{device} is scheduled: not traffic of a device with itself, nor that of an RDMA "
                 f"NIC, which does not pass Linux. To undo: tc qdisc del dev {device} root",
                 tuple(_tc_warnings(groups, scheduler)))


def _tc_warnings(groups, scheduler):
    yield from _warn_dscp(groups)
    totals = list(map(_total, groups.values()))
    if scheduler == "prio" and len(set(totals)) < len(totals):
        yield ("prio cannot weigh: of equal shares the class that was named first goes first and "
               "may starve the other; ets can (--scheduler ets)")


def _paced(device, rate):
    number = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([kmgt]?)bit", rate)
    bits = float(number[1]) * UNITS[number[2]] if number else 0
    if not 8000 <= bits <= 1e13:
        raise InvalidArgument(f"a rate is a number with kbit, mbit or gbit, 8kbit at least, not "
                              f"{rate!r}")
    burst = max(10, int(bits / 8 / 500 / 1024))
    limit = max(4, int(bits / 8 / 10 / 2**20))
    return (f"tc qdisc replace dev {device} root handle 1: tbf rate {rate} burst {burst}k "
            f"limit {limit}m", f"a link of {rate}: bursts of 2 ms, 10 KiB at least")


def _device(name):
    """The name goes into commands that root will run."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,14}", name):
        raise InvalidArgument("a network device is needed (--device), letters, digits and _.- of "
                              f"at most 15 characters, not {name!r}")
    return name
