"""Traffic classes: names for a service level and a traffic class byte."""
from dataclasses import dataclass

from kvio.errors import InvalidArgument


MAX_CLASSES, MAX_NAME = 64, 200         # of one connection; characters


@dataclass(frozen=True)
class TrafficClass:
    """A named class of traffic: its service level (0..15) and its GRH traffic class / IP ToS
    byte (DSCP = tclass >> 2). The fabric maps them to lanes; see Arbitration.sl2vl."""

    name: str
    sl: int
    tclass: int

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name.isprintable() or \
                not 0 < len(self.name) <= MAX_NAME:
            raise InvalidArgument(f"the name of a traffic class has 1 to {MAX_NAME} printable "
                                  f"characters, not {self.name!r:.300}")
        for value, most in (self.sl, 15), (self.tclass, 255):
            if not isinstance(value, int) or not 0 <= value <= most:
                raise InvalidArgument(f"traffic class {self.name!r}: sl must lie in 0..15 and "
                                      f"tclass in 0..255, not {self.sl!r} and {self.tclass!r}")


COLLECTIVE = TrafficClass("collective", 0, 184)
KV = TrafficClass("kv", 2, 32)          # not SL 3: expert-parallel kernels use that by default


def class_list(classes) -> tuple:
    """A checked tuple: not empty, not too many, all TrafficClass, distinct names."""
    try:
        classes = tuple(classes)
        names = {c.name for c in classes}
    except (TypeError, AttributeError):
        raise InvalidArgument(f"classes must be a list of TrafficClass, not {classes!r}") from None
    if not classes or len(names) != len(classes):
        raise InvalidArgument("classes must be a non-empty list of TrafficClass with distinct "
                              f"names, not {classes!r}")
    if len(classes) > MAX_CLASSES:
        raise InvalidArgument(f"{len(classes)} traffic classes; a connection has at most "
                              f"{MAX_CLASSES}")
    return classes
