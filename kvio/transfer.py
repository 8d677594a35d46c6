"""The transfer engine: registered memory to registered memory, one doorbell for a whole batch.

    nic = Nic.open("soft")
    region = nic.register(pool)
    listener = nic.listen("de0")                        # on the other side
    peer = nic.connect("de0", classes=[COLLECTIVE, KV])
    peer.read(descriptors.layer(l), traffic_class=KV).wait()

A queue pair belongs to one traffic class, so a peer has one per class. Descriptors are numpy
arrays of `WR_DTYPE`; posting copies them. `wait`, `await`, `poll` and `done` of any transfer
drive the whole soft fabric: there is no thread of its own.
"""
import enum
import errno
import os
import threading
import warnings
import weakref
from dataclasses import dataclass

import numpy as np

from kvio import memory
from kvio._ext import nic as _nic
from kvio.completion import Transfer
from kvio.errors import (BackendUnavailable, Busy, Closed, InvalidArgument, TransferError)
from kvio.layout import READ, SGE_DTYPE, WR_DTYPE, WRITE

__all__ = ["Access", "COLLECTIVE", "Fabric", "KV", "Listener", "Nic", "Peer", "Region",
           "TrafficClass"]


class Access(enum.IntFlag):
    """What may be done to a region; a NIC's own reads need no right."""

    LOCAL_WRITE = _nic.LOCAL_WRITE
    REMOTE_WRITE = _nic.REMOTE_WRITE
    REMOTE_READ = _nic.REMOTE_READ


@dataclass(frozen=True)
class TrafficClass:
    """A named class of traffic: its service level (0..15) and its GRH traffic class / IP ToS
    byte (DSCP = tclass >> 2). The fabric maps them to lanes; a soft NIC uses sl mod 4."""

    name: str
    sl: int
    tclass: int

    def __post_init__(self):
        for value, most in (self.sl, 15), (self.tclass, 255):
            if not isinstance(value, int) or not 0 <= value <= most:
                raise InvalidArgument(f"traffic class {self.name!r}: sl must lie in 0..15 and "
                                      f"tclass in 0..255, not {self.sl!r} and {self.tclass!r}")


_MASK = 2**64 - 1

COLLECTIVE = TrafficClass("collective", 0, 184)
KV = TrafficClass("kv", 2, 32)          # not SL 3: expert-parallel kernels use that by default


class Region(memory.Region):
    """Registered memory: `addr`, `nbytes` and `key`, which is both lkey and rkey."""

    __slots__ = ("key", "access")

    def __repr__(self):
        return f"<Region {self.nbytes} bytes at {self.addr:#x}, {self.access!r}>"


class Fabric:
    """The network between soft NICs, with its clock: "monotonic", or "virtual", which stands
    still until `advance`. NICs opened without a fabric share the one named "default"."""

    _named_lock = threading.Lock()
    _named = weakref.WeakValueDictionary()

    def __init__(self, clock: str = "monotonic"):
        if clock not in ("monotonic", "virtual"):
            raise InvalidArgument(f"clock must be 'monotonic' or 'virtual', not {clock!r}")
        self._ext = _nic.Fabric(clock == "virtual")
        self._addresses: dict[str, Listener] = {}
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


class Nic:
    """A NIC. `Nic.open("soft")`; close it when nothing is in flight any more."""

    def __init__(self, ext, fabric, name, bytes_per_s, mtu):
        """Use `Nic.open`."""
        self._ext, self.fabric, self.name = ext, fabric, name
        self.bytes_per_s, self.mtu = bytes_per_s, mtu
        self._peers: set[Peer] = set()
        self._listeners: list[Listener] = []
        self._classes: dict[str, TrafficClass] = {}

    @classmethod
    def open(cls, device: str = "soft", *, name: str | None = None,
             fabric: Fabric | str | None = None, bytes_per_s: int = 0, mtu: int = 4096,
             queue_depth: int = 2048, max_sge: int = 16, clock: str | None = None) -> "Nic":
        """Open "soft", a NIC in software.

        bytes_per_s: link rate each way, 0 = as fast as memory. queue_depth: work requests per
        queue pair; a larger batch is fed in parts. fabric: which network, or its name; clock:
        "virtual" or "monotonic" makes a network of its own. BackendUnavailable names what a
        provider lacks on this machine.
        """
        provider, _, instance = device.partition(":") if isinstance(device, str) else ("", "", "")
        if provider in ("verbs", "cuda"):
            raise BackendUnavailable(errno.ENOSYS, f"provider {provider!r} is not part of this "
                                     "version of kvio; use Nic.open(\"soft\")")
        if provider != "soft":
            raise InvalidArgument(f"device must be 'soft', not {device!r}")
        if fabric is not None and clock is not None:
            raise InvalidArgument("give a fabric or a clock, not both: a fabric has its clock")
        if not isinstance(fabric, Fabric):
            fabric = Fabric(clock) if clock else Fabric.named(fabric or "default")
        try:
            ext = _nic.Nic(fabric._ext, bytes_per_s, mtu, queue_depth, max_sge)
        except (OverflowError, TypeError, OSError) as wrong:
            if isinstance(wrong, OSError) and wrong.errno != errno.EINVAL:
                raise BackendUnavailable(wrong.errno, "cannot open a soft NIC") from None
            raise InvalidArgument(
                f"soft NIC: bytes_per_s={bytes_per_s!r} (0 to 2**50), mtu={mtu!r} (64 to 2**20), "
                f"queue_depth={queue_depth!r} (1 to 2**20), max_sge={max_sge!r} (1 to 64)"
            ) from None
        return cls(ext, fabric, name or instance or f"soft{id(ext) & 0xffff:04x}", bytes_per_s,
                   mtu)

    def __repr__(self):
        state = "closed" if self._ext.closed else f"{self._ext.in_flight} transfers in flight"
        return f"<Nic {self.name} (soft), {state}>"

    # ---- memory

    def register(self, memory_or_pool, access: Access | int | None = None) -> Region:
        """Let the NIC and its peers use memory: a numpy array, a buffer, something with
        `__array_interface__`, a `BlockPool` or a `memory.Region`.

        `access` is by default all that the memory allows: remote reads, and local and remote
        writes unless it is read-only. The registration keeps the memory alive and in place.
        """
        self._check_open()
        obj = getattr(memory_or_pool, "region", memory_or_pool)
        if isinstance(obj, memory.Region):
            obj = obj.array if obj.writable else _read_only(obj.array)
        elif not isinstance(obj, np.ndarray) and hasattr(obj, "__array_interface__"):
            obj = np.asarray(obj)
        region = Region(obj, writable=False)
        region.writable = bool(region.array.flags.writeable)
        writes = Access.LOCAL_WRITE | Access.REMOTE_WRITE
        if access is None:
            access = Access.REMOTE_READ | (writes if region.writable else Access(0))
        elif not isinstance(access, int) or not 0 <= int(access) <= sum(Access):
            raise InvalidArgument(f"access must be made of kvio.transfer.Access, not {access!r}")
        region.access = Access(access)
        if region.access & writes and not region.writable:
            raise InvalidArgument("the memory is read-only: register it without write access, or "
                                  "pass a writable buffer")
        if region.access & Access.REMOTE_WRITE and not region.access & Access.LOCAL_WRITE:
            raise InvalidArgument("REMOTE_WRITE needs LOCAL_WRITE as well (a rule of verbs)")
        region.key = self._ext.reg(region, region.addr, region.nbytes, int(access))
        return region

    def deregister(self, region: Region) -> None:
        """Take the memory back. Busy while a transfer in flight names it."""
        self._check_open()
        try:
            self._ext.dereg(region.key)
        except OSError as failed:
            if failed.errno == errno.EBUSY:
                raise Busy(f"{self.name}: a transfer in flight uses {region}; wait for it or "
                           "cancel it, then deregister") from None
            raise InvalidArgument(f"{self.name}: {region} is not registered here") from None
        except AttributeError:
            raise InvalidArgument("deregister takes what register returned") from None

    # ---- connections

    def listen(self, address: str, classes=None) -> "Listener":
        """Answer `connect(address)`. `classes`, if given, is the list a peer must ask for."""
        self._check_open()
        with self.fabric._lock:
            if address in self.fabric._addresses:
                raise InvalidArgument(f"somebody listens at {address!r} already")
            listener = Listener(self, address, classes)
            self.fabric._addresses[address] = listener
            self._listeners.append(listener)
        return listener

    def connect(self, address: str, classes=(COLLECTIVE, KV)) -> "Peer":
        """Queue pairs of each class to whoever listens at `address`, on both ends. Connecting to
        one's own address makes a loop-back: the NIC copies within the host."""
        self._check_open()
        classes = _class_list(classes)
        with self.fabric._lock:
            listener = self.fabric._addresses.get(address)
        if listener is None:
            raise TransferError(errno.ECONNREFUSED, f"{self.name}: nobody listens at {address!r} "
                                "on this fabric; call listen first")
        if listener.classes is not None and listener.classes != classes:
            raise InvalidArgument(f"{address!r} has the traffic classes {listener.classes}, not "
                                  f"{classes}: both ends need the same list")
        here, there = Peer(self, listener.nic, classes), Peer(listener.nic, self, classes)
        here._other, there._other = there, here
        here._join()
        for nic, peer in (self, here), (listener.nic, there):
            nic._peers.add(peer)
            nic._classes.update((c.name, c) for c in classes)
        there.listener = listener
        listener._accepted.append(there)
        return here

    # ---- progress and figures

    def poll(self) -> int:
        """Complete what can be completed now, on the whole fabric, without blocking; how many
        transfers of this NIC are still in flight."""
        self._check_open()
        self._ext.drive()
        return self._ext.in_flight

    def stats(self) -> dict:
        """Plain data. Bytes and packets are counted where packets are copied: `tx_bytes` left
        through this port, `rx_bytes` came in. `by_vl` and `by_class` split them (two classes
        with one sl are one to the port). `tx_busy_ns` and `rx_busy_ns` are link time."""
        raw = self._ext.counters()
        tx, rx = raw.pop("tx_bytes"), raw.pop("rx_bytes")
        by_vl = {vl: {"tx_bytes": sum(tx[vl::_nic.NUM_VL]), "rx_bytes": sum(rx[vl::_nic.NUM_VL])}
                 for vl in range(_nic.NUM_VL)}
        by_class = {c.name: {"tx_bytes": tx[c.sl], "rx_bytes": rx[c.sl]}
                    for c in self._classes.values()}
        return {"provider": "soft", "name": self.name, "bytes_per_s": self.bytes_per_s,
                "mtu": self.mtu, "in_flight": self._ext.in_flight, **raw, "tx_bytes": sum(tx),
                "rx_bytes": sum(rx), "by_vl": by_vl, "by_class": by_class}

    # ---- the end

    def close(self, *, cancel: bool = False) -> None:
        """Close peers, listeners and registrations. Busy while a transfer is in flight, this
        NIC's or a peer's on our memory; `cancel=True` gives up what has not started and waits
        for the rest of our own."""
        if self._ext.closed:
            return
        if cancel:
            self._ext.drain(True)
        try:
            self._ext.close()
        except OSError:
            raise Busy(f"{self.name}: transfers of this NIC are in flight ({self._ext.in_flight}), "
                       "or a peer's on its memory; wait for them, cancel them, or "
                       "close(cancel=True)") from None
        for listener in list(self._listeners):
            listener.close()
        for peer in list(self._peers):
            peer._forget()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close(cancel=True)

    def __del__(self):
        ext = getattr(self, "_ext", None)
        if ext is not None and not ext.closed:
            warnings.warn(f"{self.name} was not closed", ResourceWarning, source=self,
                          stacklevel=2)

    def _check_open(self):
        if self._ext.closed:
            raise Closed(f"NIC {self.name} is closed")


class Listener:
    """An address at which a NIC answers. `accept` gives the other ends of connections."""

    def __init__(self, nic, address, classes):
        self.nic, self.address = nic, address
        self.classes = None if classes is None else _class_list(classes)
        self._accepted: list[Peer] = []

    def accept(self) -> "Peer | None":
        """Our end of the next connection; None if there is none. Not needed for peers to read
        and write our memory."""
        return self._accepted.pop(0) if self._accepted else None

    def close(self) -> None:
        """Answer no more; connections stay."""
        with self.nic.fabric._lock:
            if self.nic.fabric._addresses.get(self.address) is self:
                del self.nic.fabric._addresses[self.address]
        if self in self.nic._listeners:
            self.nic._listeners.remove(self)


class Peer:
    """The connection to another NIC: one queue pair per traffic class."""

    def __init__(self, nic, remote, classes):
        """Use `Nic.connect` or `Listener.accept`."""
        self.nic, self.remote_name, self.classes = nic, remote.name, classes
        self.listener, self._other = None, None     # the listener: of the passive end
        self._qps = {}
        for c in classes:
            qp = _nic.QueuePair(nic._ext, c.sl, c.tclass)
            qp.label = f"NIC {nic.name}, peer {remote.name}, class {c.name}"
            self._qps[c.name] = qp
        self._whats = {(op, name): f"{word} {qp.label}" for name, qp in self._qps.items()
                       for op, word in ((READ, "read,"), (WRITE, "write,"), (0, "post,"))}

    def __repr__(self):
        return f"<Peer {self.nic.name} -> {self.remote_name}, {'/'.join(self._qps) or 'closed'}>"

    def read(self, descriptors, traffic_class: TrafficClass = KV, *, keep=(),
             on_drain=None) -> Transfer:
        """Read remote blocks into local ones: one doorbell, one completion.

        descriptors: an array of WR_DTYPE, or an object with `.wrs` and maybe `.sges`,
        `.local_offset`, `.remote_offset` (added to the addresses). `keep`: what must live as
        long as the transfer; registered memory does anyway. `on_drain()` is called once no device
        touches the memory any more, also if posting fails. A NIC sees addresses, not blocks:
        who may free a pool's blocks meanwhile pins them, and unpins them in `on_drain`.
        """
        return self._post(READ, descriptors, None, traffic_class, keep, on_drain)

    def write(self, descriptors, traffic_class: TrafficClass = KV, *, keep=(),
              on_drain=None) -> Transfer:
        """Write local blocks to remote ones; otherwise like `read`."""
        return self._post(WRITE, descriptors, None, traffic_class, keep, on_drain)

    def post(self, wrs, sges=None, traffic_class: TrafficClass = KV, *, keep=(),
             on_drain=None) -> Transfer:
        """Work requests with their own opcodes, and their scatter-gather entries (SGE_DTYPE)."""
        return self._post(0, wrs, sges, traffic_class, keep, on_drain)

    def _post(self, opcode, descriptors, sges, traffic_class, keep, on_drain):
        name = getattr(traffic_class, "name", None)
        handle = _nic.Batch()               # held before the device has it, whatever interrupts us
        transfer = Transfer(handle, self._whats.get((opcode, name), "post"), keep=keep,
                            on_drain=on_drain)
        try:
            wrs = getattr(descriptors, "wrs", descriptors)
            sges = getattr(descriptors, "sges", sges)
            if wrs.dtype is not WR_DTYPE and wrs.dtype != WR_DTYPE or wrs.ndim != 1:
                raise InvalidArgument(f"descriptors must be one-dimensional, of WR_DTYPE, not "
                                      f"{wrs.dtype} of shape {wrs.shape}")
            if sges is not None and (sges.dtype != SGE_DTYPE or sges.ndim != 1):
                raise InvalidArgument("sges must be a one-dimensional array of SGE_DTYPE")
            self._qps[name].post(wrs, sges, opcode,
                                 int(getattr(descriptors, "local_offset", 0)) & _MASK,
                                 int(getattr(descriptors, "remote_offset", 0)) & _MASK, handle)
        except BaseException as wrong:
            if handle.submitted:            # interrupted, but under way: it ends by itself
                raise
            transfer.abandon()
            if not isinstance(wrong, (OSError, ValueError, TypeError, BufferError, AttributeError,
                                      KeyError)):
                raise
            raise self._explain(wrong, opcode, traffic_class) from None
        return transfer

    def _explain(self, wrong, opcode, traffic_class):
        if isinstance(wrong, InvalidArgument):
            return wrong
        self.nic._check_open()
        if not self._qps:
            return Closed(f"the peer {self.remote_name} of {self.nic.name} is closed")
        if getattr(traffic_class, "name", None) not in self._qps:
            return InvalidArgument(f"this peer has the traffic classes {', '.join(self._qps)}, "
                                   f"not {traffic_class!r}")
        if isinstance(wrong, OSError) and wrong.errno != errno.EINVAL:
            return TransferError(wrong.errno, f"cannot post to {self.remote_name}")
        if not isinstance(wrong, OSError):
            return InvalidArgument(f"descriptors must be a contiguous array of WR_DTYPE: {wrong}")
        only = {READ: "READ", WRITE: "WRITE"}.get(opcode, "valid")
        return InvalidArgument(
            f"malformed work requests, nothing was posted: opcodes must be {only}, sge_first and "
            "num_sge stay within sges and max_sge, and a length is the sum of its entries")

    def query(self) -> dict:
        """What the queue pairs are set to, read back, by class: sl, tclass, state, depth, ..."""
        self._check_open()
        return {name: qp.query() for name, qp in self._qps.items()}

    def reset(self) -> None:
        """Bring queue pairs that are in error back to work, on both ends. Busy while something
        is in flight."""
        self._check_open()
        other = self._other
        if other is None or not other._qps:
            raise Closed(f"{self.remote_name} has closed this connection; connect again")
        failed = [name for name, qp in self._qps.items()
                  if "ready" != qp.query()["state"] or "ready" != other._qps[name].query()["state"]]
        for end in self, other:
            end._check_idle("reset", failed)
        for name in failed:
            self._qps[name].reset()
            other._qps[name].reset()
            self._join(name)

    def _check_idle(self, what, names=None):
        self.nic._ext.drive()
        for name, qp in self._qps.items():
            if (names is None or name in names) and qp.query()["in_flight"]:
                raise Busy(f"{qp.label}: transfers are in flight; wait for them or cancel them, "
                           f"then {what}")

    def _join(self, only=None):
        for name, qp in self._qps.items():
            if only in (None, name):
                qp.connect(self._other._qps[name])
                self._other._qps[name].connect(qp)

    def close(self) -> None:
        """Give the queue pairs back. Busy while one of our transfers is in flight; the other
        end's transfers fail (RETRY_EXC_ERR)."""
        if not self.nic._ext.closed:
            self._check_idle("close")
        for name in list(self._qps):
            self._qps[name].close()
            del self._qps[name]
        other, self._other = self._other, None
        self.nic._peers.discard(self)
        if other is not None:
            other._other = None
            if other.listener is not None:
                other._lost()

    def _lost(self):
        """The far end is gone. What we have in flight fails by itself; then close."""
        if self in self.listener._accepted:
            self.listener._accepted.remove(self)
        try:
            self.close()
        except Busy:
            pass                    # whoever uses this end closes it, or the NIC does

    def _forget(self):
        """The NIC is closed, and the queue pairs with it."""
        self._qps.clear()
        other, self._other = self._other, None
        self.nic._peers.discard(self)
        if other is not None:
            other._other = None

    def _check_open(self):
        self.nic._check_open()
        if not self._qps:
            raise Closed(f"the peer {self.remote_name} of {self.nic.name} is closed")


def _class_list(classes) -> tuple:
    try:
        classes = tuple(classes)
        names = {c.name for c in classes}
    except (TypeError, AttributeError):
        raise InvalidArgument(f"classes must be a list of TrafficClass, not {classes!r}") from None
    if not classes or len(names) != len(classes):
        raise InvalidArgument("classes must be a non-empty list of TrafficClass with distinct "
                              f"names, not {classes!r}")
    return classes


def _read_only(array):
    view = array.view()
    view.flags.writeable = False
    return view
