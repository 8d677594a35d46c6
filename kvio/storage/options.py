"""The options of a store, checked before anything is made."""
import numbers

from kvio.errors import InvalidArgument, checked_int
from kvio.layout import BlockLayout

__all__ = ["INT64_MAX", "check_options"]

INT64_MAX = 2**63 - 1


def check_options(layout, backend, verify, durability, capacity_bytes, segment_bytes,
                  queue_depth, direct_io, dead_after_s, poll_s, **switches) -> None:
    """InvalidArgument that names the option; see `BlockStore.open`."""
    if not isinstance(layout, BlockLayout):
        raise InvalidArgument(f"layout must be a BlockLayout, not {type(layout).__name__}")
    for name, value, allowed in (("backend", backend, ("auto", "uring", "threads", "usrbio")),
                                 ("verify", verify, ("always", "never")),
                                 ("durability", durability, ("visible", "durable"))):
        if value not in allowed:
            raise InvalidArgument(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
    if verify == "never" and durability != "durable":
        raise InvalidArgument("verify='never' needs durability='durable': without fdatasync a "
                              "power cut can leave a header whose payload never arrived")
    if capacity_bytes is not None:
        checked_int("capacity_bytes", capacity_bytes, 1, INT64_MAX)
    checked_int("segment_bytes", segment_bytes, 1, INT64_MAX)
    if queue_depth is not None:
        checked_int("queue_depth", queue_depth, 1, 4096)
    if direct_io is not True and direct_io is not False and direct_io != "auto":
        raise InvalidArgument(f"direct_io must be 'auto', True or False, not {direct_io!r}")
    for name, value in switches.items():
        if value is not True and value is not False:
            raise InvalidArgument(f"{name} must be True or False, not {value!r}")
    for name, value, least in (("dead_after_s", dead_after_s, 1e-3), ("poll_s", poll_s, 0)):
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or \
                not least <= value <= 1e9:
            raise InvalidArgument(f"{name} must be a number of seconds, at least {least}, not "
                                  f"{value!r}")
