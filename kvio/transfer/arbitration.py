"""The arbitration of a soft fabric's ports: InfiniBand's two tables of virtual lanes."""
from dataclasses import dataclass

from kvio._ext import nic as _nic
from kvio.errors import InvalidArgument


@dataclass(frozen=True)
class Arbitration:
    """Two tables of (VL, weight), by which every port of a fabric chooses the next packet.

    weight: units of 64 bytes that may leave in an entry's turn, 0 to 255, 0 skips it. A VL (0 to
    14) may stand in both tables, and more than once. high_limit: units of 4096 bytes of the high
    table without an opportunity for the low one; 0 is one packet, 255 no bound. sl2vl: the VL of
    each of the 16 service levels; it needs a weight in one of the tables.

    By default the tables of two classes, COLLECTIVE on VL 0 and KV on VL 2, which stands in the
    low table alone; they have room for two more lanes of the first kind.
    """

    high_limit: int = 240
    vlarb_high: tuple = ((0, 192), (1, 192), (2, 0), (3, 192))
    vlarb_low: tuple = ((0, 192), (1, 192), (2, 64), (3, 192))
    sl2vl: tuple = tuple(sl % 4 for sl in range(16))

    def __post_init__(self):
        if not _is_byte(self.high_limit):
            raise InvalidArgument("high_limit must be an int in 0..255 (0: one packet, 255: no "
                                  f"bound), not {self.high_limit!r}")
        served = set()
        for name in "vlarb_high", "vlarb_low":
            table = _table(name, getattr(self, name))
            object.__setattr__(self, name, table)
            served |= {vl for vl, weight in table if weight}
        sl2vl = _tuple(self.sl2vl)
        if len(sl2vl) != 16 or not all(map(_is_vl, sl2vl)):
            raise InvalidArgument(f"sl2vl must be 16 VLs in 0..14, one for each SL, not "
                                  f"{self.sl2vl!r}")
        for sl, vl in enumerate(sl2vl):
            if vl not in served:
                raise InvalidArgument(f"SL {sl} maps to VL {vl}, which has no weight in either "
                                      "table: its packets would never leave")
        object.__setattr__(self, "sl2vl", sl2vl)


def _table(name, entries):
    table = tuple(map(_tuple, _tuple(entries)))
    if len(table) > _nic.MAX_VLARB:
        raise InvalidArgument(f"{name} has {len(table)} entries; at most {_nic.MAX_VLARB}")
    for entry in table:
        if len(entry) == 2 and entry[0] == 15 and _is_byte(entry[0]):
            raise InvalidArgument(f"{name}: VL 15 carries management and is not arbitrated")
        if len(entry) != 2 or not _is_vl(entry[0]) or not _is_byte(entry[1]):
            raise InvalidArgument(f"{name} must be (VL, weight) pairs, VL in 0..14 and weight in "
                                  f"0..255, not {entry!r}")
    return table


def _tuple(values):
    try:
        return tuple(values)
    except TypeError:
        return (values,)            # refused by whoever looks at its length


def _is_byte(value):
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 255


def _is_vl(value):
    return _is_byte(value) and value < _nic.NUM_VL
