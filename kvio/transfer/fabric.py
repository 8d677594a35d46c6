"""The network between the soft NICs of a process."""
import os
import threading
import weakref

from kvio._ext import nic as _nic
from kvio.errors import InvalidArgument
from kvio.transfer.arbitration import Arbitration


class Fabric:
    """The network between soft NICs, with its clock: "monotonic", or "virtual", which stands
    still until `advance`, and the `arbitration` of all its ports (None: the paper's tables). NICs
    opened without a fabric share the one named "default"."""

    _named_lock = threading.Lock()
    _named = weakref.WeakValueDictionary()

    def __init__(self, clock: str = "monotonic", *, arbitration: Arbitration | None = None):
        if clock not in ("monotonic", "virtual"):
            raise InvalidArgument(f"clock must be 'monotonic' or 'virtual', not {clock!r}")
        arbitration = Arbitration() if arbitration is None else arbitration
        if not isinstance(arbitration, Arbitration):
            raise InvalidArgument(f"arbitration must be an Arbitration, not {arbitration!r}")
        self.arbitration = arbitration
        self._ext = _nic.Fabric(clock == "virtual", arbitration)
        self._addresses = {}            # str -> Listener
        self._lock = threading.Lock()

    @classmethod
    def named(cls, name: str = "default") -> "Fabric":
        """The fabric of that name in this process, made when it is first asked for; it lives as
        long as its NICs. A forked child has its own."""
        with cls._named_lock:
            fabric = cls._named.get(name)
            if fabric is None:
                fabric = cls._named[name] = cls()
            return fabric

    @property
    def now_ns(self) -> int:
        """The fabric's clock."""
        return self._ext.now_ns

    @property
    def next_ns(self) -> int | None:
        """No completion becomes visible before this time on the fabric's clock; None: nothing is
        under way. Where packets wait for one another it may be too early: advance, drive, ask
        again."""
        return self._ext.next_ns

    def advance(self, ns: int) -> int:
        """Move a virtual clock on; what is due then happens when somebody drives."""
        try:
            self._ext.advance_to(self._ext.now_ns + ns)
        except (OSError, OverflowError):
            raise InvalidArgument(f"cannot advance this clock by {ns} ns: only a virtual clock "
                                  "moves by hand, and only forwards") from None
        return self._ext.now_ns


def _forget_named():
    Fabric._named, Fabric._named_lock = weakref.WeakValueDictionary(), threading.Lock()


os.register_at_fork(after_in_child=_forget_named)
