"""Which link binds: the bottleneck-free range of P/D, by formula and by walking the flows.

P prefill and D decode nodes, each with g GPUs, a compute NIC of bandwidth B for each GPU, one
storage NIC of bandwidth s B, and DRAM of bandwidth M. Every storage NIC reads at its full rate,
hits only. The range of P/D in which no other link is slower is the *bottleneck-free* one. It says
nothing of decode's write-back, new KV, collectives, or limits of the storage behind the NICs.
"""
import math
from dataclasses import dataclass
from functools import cache
from itertools import combinations

from kvio.errors import InvalidArgument
from kvio.layout import BlockLayout
from kvio.loader.plan import read_plan, side_of, traffic

__all__ = ["LINKS", "ClusterShape", "Link", "best_read_rates", "bottleneck_free_range",
           "derived_bounds", "flow_coefficients", "formula_bounds", "utilisation"]

TIE = 1e-9                          # links within this of one another bind together
PATHS = "pe", "de"


@dataclass(frozen=True)
class Link:
    """A kind of link: all compute NICs of a node in one direction, or its DRAM. `port` is "tx"
    (the NIC reads memory), "rx" (it writes memory) or "dram"."""

    name: str
    side: str
    port: str


LINKS = (Link("PE CNIC read", "pe", "tx"), Link("PE CNIC write", "pe", "rx"),
         Link("PE DRAM", "pe", "dram"), Link("DE CNIC read", "de", "tx"),
         Link("DE CNIC write", "de", "rx"), Link("DE DRAM", "de", "dram"))


@dataclass(frozen=True)
class ClusterShape:
    """What a node has. `snic_ratio` is s: the storage NIC's bandwidth over one compute NIC's."""

    gpus_per_node: int = 8
    snic_ratio: float = 1.0
    dram_bytes_per_s: float = 500e9
    snic_bytes_per_s: float = 50e9

    def __post_init__(self):
        if isinstance(self.gpus_per_node, bool) or not isinstance(self.gpus_per_node, int) or \
                self.gpus_per_node < 1:
            raise InvalidArgument(f"gpus_per_node must be a whole number, at least 1, not "
                                  f"{self.gpus_per_node!r}")
        for name in ("snic_ratio", "dram_bytes_per_s", "snic_bytes_per_s"):
            positive(name, getattr(self, name))

    @property
    def cnic_bytes_per_s(self) -> float:
        """B: one compute NIC, each direction."""
        return self.snic_bytes_per_s / self.snic_ratio

    def headroom(self, link: Link) -> float:
        """A link's capacity over what the node's storage NIC reads."""
        if link.port == "dram":
            return self.dram_bytes_per_s / self.snic_bytes_per_s
        return self.gpus_per_node / self.snic_ratio


def positive(name: str, value) -> float:
    """`value` if it is a number above 0 of a size that can be computed with; InvalidArgument
    otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise InvalidArgument(f"{name} must be a number above 0, not {value!r:.60}")
    if not 1e-30 <= value <= 1e30:
        raise InvalidArgument(f"{name} must lie between 1e-30 and 1e30, not {value!r:.60}")
    return value


def formula_bounds(shape: ClusterShape) -> dict:
    """Link name -> (least, most) P/D as the paper states them; 0 and inf where there is no limit,
    (inf, 0) where no P/D will do.

    PE CNIC read: 2 B s/g <= B, so s <= g/2 (the paper prints s <= g; its own sum gives g/2).
    PE CNIC write: P/D >= s/(g - s). DE CNIC read: P/D <= (g - 2s)/s. DE CNIC write: P/D <=
    (g - s)/(2s). PE DRAM: 2 s B <= M. DE DRAM: P/D <= (M/(B s) - 3)/2.
    """
    g, s = shape.gpus_per_node, shape.snic_ratio
    dram = shape.dram_bytes_per_s / shape.snic_bytes_per_s
    return {"PE CNIC read": _always(s <= g / 2),
            "PE CNIC write": _at_least(s, g - s),
            "PE DRAM": _always(2 <= dram),
            "DE CNIC read": _at_most(g - 2 * s, s),
            "DE CNIC write": _at_most(g - s, 2 * s),
            "DE DRAM": _at_most(dram - 3, 2)}


def _always(holds):
    return (0.0, math.inf) if holds else (math.inf, 0.0)


def _at_least(numerator, denominator):
    return (numerator / denominator, math.inf) if denominator > 0 else (math.inf, 0.0)


def _at_most(numerator, denominator):
    return (0.0, numerator / denominator) if numerator > 0 else (math.inf, 0.0)


@cache
def flow_coefficients() -> dict:
    """(path, side, port) -> bytes at that port for each hit byte that the path reads.

    From the plans that the engines carry out: what one more hit block adds to the traffic matrix.
    DRAM counts each time bytes go into or out of a buffer.
    """
    layout, found = BlockLayout(3, 4, 8), {}
    for path in PATHS:
        fewer, more = (_ports(read_plan(layout, path, blocks * 4, 1).steps, layout)
                       for blocks in (5, 6))
        for link in LINKS:
            port = link.side, link.port
            found[path, *port] = (more[port] - fewer[port]) / layout.full_block_nbytes
    return found


def _ports(steps, layout):
    total = traffic(steps, layout)
    for step in steps:
        for place in {step.source, step.target}:
            if place.endswith("_buffer"):
                total[side_of(place), "dram"] += step.nbytes(layout)
    return total


def derived_bounds(shape: ClusterShape) -> dict:
    """The same as `formula_bounds`, from `flow_coefficients` instead of the paper's algebra.

    Of x = P/D, a PE link carries k_pe + k_de/x times what a storage NIC reads, a DE link
    k_de + k_pe x.
    """
    flows, bounds = flow_coefficients(), {}
    for link in LINKS:
        k_pe, k_de = (flows[path, link.side, link.port] for path in PATHS)
        room = shape.headroom(link)
        if link.side == "pe":
            bounds[link.name] = _at_least(k_de, room - k_pe) if k_de else _always(k_pe <= room)
        else:
            bounds[link.name] = _at_most(room - k_de, k_pe) if k_pe else _always(k_de <= room)
    return bounds


def bottleneck_free_range(shape: ClusterShape, bounds: dict | None = None) -> dict:
    """{"least", "most", "binds_below", "binds_above"}: P/D, and the names of the links that bind
    outside. "least" and "most" are None where no P/D is free of a bottleneck; then "binds_below"
    and "binds_above" name the links that contradict each other (or one that never suffices)."""
    bounds = formula_bounds(shape) if bounds is None else bounds
    least = max(low for low, _ in bounds.values())
    most = min(high for _, high in bounds.values())
    free = least <= most * (1 + TIE)
    return {"least": least if free else None, "most": most if free else None,
            "binds_below": [name for name, (low, _) in bounds.items()
                            if low > 0 and low >= least * (1 - TIE)],
            "binds_above": [name for name, (_, high) in bounds.items()
                            if high < math.inf and high <= most * (1 + TIE)]}


def _node_loads(rates, num_prefill, num_decode):
    """Link -> bytes/s a node when each PE's storage NIC reads rates[0], each DE's rates[1]."""
    flows = flow_coefficients()
    total = {"pe": rates[0] * num_prefill, "de": rates[1] * num_decode}
    nodes = {"pe": num_prefill, "de": num_decode}
    return {link: sum(flows[path, link.side, link.port] * total[path] for path in PATHS)
            / nodes[link.side] for link in LINKS}


def utilisation(shape: ClusterShape, num_prefill: int, num_decode: int) -> dict:
    """Link name -> load over capacity when every storage NIC reads at its full rate; above 1 the
    link is the bottleneck and the storage NICs cannot."""
    _counted(num_prefill, num_decode)
    full = shape.snic_bytes_per_s
    loads = _node_loads((full, full), num_prefill, num_decode)
    return {link.name: load / (shape.headroom(link) * full) for link, load in loads.items()}


def _counted(*counts):
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in counts):
        raise InvalidArgument(f"P and D must be whole numbers, at least 1, not {counts}")


def best_read_rates(shape: ClusterShape, num_prefill: int, num_decode: int,
                    paths=PATHS) -> dict:
    """The most that storage can be read at: {"pe_bytes_per_s", "de_bytes_per_s" (a node),
    "total_bytes_per_s", "binds"}. `paths=("pe",)` is Basic.

    A linear program of two variables, so one of the crossings of its limits is the best.
    """
    _counted(num_prefill, num_decode)
    full = shape.snic_bytes_per_s
    ones = (_node_loads(unit, num_prefill, num_decode) for unit in ((1.0, 0.0), (0.0, 1.0)))
    by_pe, by_de = ones
    limits = [(by_pe[link], by_de[link], shape.headroom(link) * full, link.name) for link in LINKS]
    limits += [(1.0, 0.0, full if "pe" in paths else 0.0, "PE SNIC"),
               (0.0, 1.0, full if "de" in paths else 0.0, "DE SNIC"),
               (-1.0, 0.0, 0.0, None), (0.0, -1.0, 0.0, None)]
    best = max((point for pair in combinations(limits, 2) if (point := _crossing(*pair))
                and all(a * point[0] + b * point[1] <= most + TIE * full
                        for a, b, most, _ in limits)),
               key=lambda point: (num_prefill * point[0] + num_decode * point[1], point))
    return {"pe_bytes_per_s": best[0], "de_bytes_per_s": best[1],
            "total_bytes_per_s": num_prefill * best[0] + num_decode * best[1],
            "binds": [name for a, b, most, name in limits
                      if name and most and a * best[0] + b * best[1] >= most * (1 - TIE)]}


def _crossing(one, other):
    determinant = one[0] * other[1] - one[1] * other[0]
    if not determinant:
        return None
    return (max(0.0, (one[2] * other[1] - one[1] * other[2]) / determinant),
            max(0.0, (one[0] * other[2] - one[2] * other[0]) / determinant))
