"""NICs: opening, registered memory, connections, figures."""
import enum
import errno
import os
import warnings

import numpy as np

from kvio import memory
from kvio._ext import nic as _nic
from kvio.errors import BackendUnavailable, Busy, Closed, InvalidArgument, TransferError
from kvio.transfer import cuda, remote, verbs
from kvio.transfer.classes import COLLECTIVE, KV, TrafficClass, class_list
from kvio.transfer.connection import MAX_AD_NBYTES
from kvio.transfer.fabric import Fabric
from kvio.transfer.peer import Listener, Peer


class Access(enum.IntFlag):
    """What may be done to a region; a NIC's own reads need no right."""

    LOCAL_WRITE = _nic.LOCAL_WRITE
    REMOTE_WRITE = _nic.REMOTE_WRITE
    REMOTE_READ = _nic.REMOTE_READ


class Region(memory.Region):
    """Registered memory: `addr`, `nbytes` and `key`, which is both lkey and rkey. `array` is None
    if it is a GPU's."""

    __slots__ = ("key", "access")

    def __repr__(self):
        return f"<Region {self.nbytes} bytes at {self.addr:#x}, {self.access!r}>"


class Nic:
    """A NIC. `Nic.open("soft")`; close it when nothing is in flight any more."""

    def __init__(self, ext, fabric, name, bytes_per_s, mtu, board=None):
        """Use `Nic.open`."""
        self._ext, self.fabric, self.name = ext, fabric, name
        self._network = board or fabric     # where plain names are listened at; None: by sockets
        self._pid = os.getpid()
        self.bytes_per_s, self.mtu = bytes_per_s, mtu
        self._peers: set[Peer] = set()
        self._listeners: list[Listener] = []
        self._classes: dict[str, TrafficClass] = {}
        self._port_fd = None            # soft: of the page in which others reserve its link
        self._going = set()             # keys of regions that are being taken back
        self._control = None            # its thread for other processes, once there are any

    @classmethod
    def open(cls, device: str = "soft", *, name: str | None = None,
             fabric: Fabric | str | None = None, bytes_per_s: int = 0, mtu: int = 4096,
             queue_depth: int = 2048, max_sge: int = 16, clock: str | None = None,
             gid_index: int | None = None, pd: int = 0, busy_poll: bool = False,
             copy: str | None = None, max_sms: int | None = None) -> "Nic":
        """Open "soft", a NIC in software, "verbs:HCA[:port][,HCA[:port]...]", an RDMA NIC (or
        several, striped), or "cuda:N", the copy engines of a GPU; "verbs" alone takes what
        KVIO_IB_HCA names, else the first active port, "cuda" alone "cuda:0".

        queue_depth: work requests per queue pair; a larger batch is fed in parts. max_sge bounds
        a work request's scatter-gather list. Soft: bytes_per_s is the link rate each way, 0 = as
        fast as memory; fabric: which network, or its name; clock: "virtual" or "monotonic" makes
        a network of its own. Verbs: gid_index (or KVIO_IB_GID_INDEX) instead of our choice; pd:
        the address of an ibv_pd of another library in this process to work in. Cuda: copy is how
        bytes are moved: "auto" (the default: by sizes, as measured when the GPU is first opened),
        "loop" (a call of the driver for each piece), "batch", "strided" or "kernel" (at most
        max_sms SMs; 8). Verbs and cuda: busy_poll: waiting spins. BackendUnavailable names what a
        provider lacks on this machine.
        """
        provider, _, instance = device.partition(":") if isinstance(device, str) else ("", "", "")
        if provider == "cuda":
            if fabric is not None or clock is not None or bytes_per_s or gid_index is not None \
                    or pd or mtu != 4096:
                raise InvalidArgument("fabric, clock, bytes_per_s, gid_index, pd and mtu belong to "
                                      "soft and RDMA NICs; a GPU's has none of them")
            return cuda.open_nic(cls, instance, name, queue_depth, max_sge, copy, max_sms,
                                 busy_poll)
        if copy is not None or max_sms is not None:
            raise InvalidArgument("copy and max_sms belong to 'cuda'")
        if provider == "verbs":
            if fabric is not None or clock is not None or bytes_per_s:
                raise InvalidArgument("fabric, clock and bytes_per_s belong to soft NICs; an RDMA "
                                      "NIC has its own")
            return verbs.open_nic(cls, instance, name, mtu, queue_depth, max_sge, gid_index, pd,
                                  busy_poll)
        if provider != "soft":
            raise InvalidArgument(f"device must be 'soft', 'verbs:...' or 'cuda:N', not "
                                  f"{device!r}")
        if gid_index is not None or pd or busy_poll:
            raise InvalidArgument("gid_index, pd and busy_poll belong to 'verbs' (busy_poll to "
                                  "'cuda' too)")
        if fabric is not None and clock is not None:
            raise InvalidArgument("give a fabric or a clock, not both: a fabric has its clock")
        if not isinstance(fabric, Fabric):
            fabric = Fabric(clock) if clock else Fabric.named(fabric or "default")
        try:
            ext = _nic.Nic("soft", fabric._ext, bytes_per_s=bytes_per_s, mtu=mtu,
                           queue_depth=queue_depth, max_sge=max_sge)
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
        return f"<Nic {self.name} ({self.provider}), {state}>"

    @property
    def provider(self) -> str:
        """"soft", "verbs" or "cuda"."""
        return self._ext.provider

    # ---- memory

    def register(self, memory_or_pool, access: Access | int | None = None) -> Region:
        """Let the NIC and its peers use memory: a numpy array, a buffer, something with
        `__array_interface__`, a pool or a `memory.Region`; for verbs and cuda also a GPU's, of
        which `__cuda_array_interface__` or DLPack gives the address (the CPU never touches it).
        Cuda pins host memory that is not yet pinned, for as long as it is registered.

        `access` is by default all that the memory allows: remote reads, and local and remote
        writes unless it is read-only. The registration keeps the memory alive and in place.
        """
        self._check_open()
        region = self._region_of(getattr(memory_or_pool, "region", memory_or_pool))
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
        if self.provider == "cuda" and region.array is None:
            cuda.check_device(self, region)
        try:
            region.key = self._ext.reg(region, region.addr, region.nbytes, int(access))
        except OSError as failed:
            if self.provider == "cuda" and len(self._ext.owners) < _nic.MAX_REGIONS:
                raise cuda.not_registered(self, region, failed.errno) from None
            why = f"{self.name}: a NIC has at most {_nic.MAX_REGIONS} regions, and so many are " \
                "there: register fewer and larger ones (a whole pool is one), or deregister some" \
                if len(self._ext.owners) >= _nic.MAX_REGIONS else \
                verbs.why_not_registered(self.name, region, failed.errno)
            raise TransferError(failed.errno, why) from None
        self._check_description(region)
        if self._control is not None:
            self._control.announce(region.key)
        return region

    def _check_description(self, region):
        """Peers can only be told of so much: refused here, and not where a peer connects."""
        if self.provider != "verbs" or not region.access & (Access.REMOTE_READ
                                                           | Access.REMOTE_WRITE):
            return
        nbytes = len(self._ext.describe(region.key))
        if nbytes > MAX_AD_NBYTES:
            self._ext.dereg(region.key)
            raise TransferError(
                errno.EMSGSIZE, f"{self.name}: a region of {region.nbytes} bytes, in its many "
                f"registrations, takes {nbytes} bytes to describe, and peers take {MAX_AD_NBYTES}: "
                "register it in parts, or with larger KVIO_IB_SLICE_BYTES")

    def _region_of(self, obj) -> Region:
        if not isinstance(obj, (memory.Region, np.ndarray)):
            obj = _by_interface(obj)
        is_region = isinstance(obj, memory.Region)
        if is_region and obj.array is not None:
            obj, is_region = obj.array if obj.writable else _read_only(obj.array), False
        if is_region:                           # of a GPU
            region = Region.__new__(Region)
            region.array, region.owner, region._ordinal = None, obj.owner, obj._ordinal
            region.addr, region.nbytes, region.writable = obj.addr, obj.nbytes, obj.writable
        else:
            region = Region(obj, writable=False)
            region.writable = region.owner.writable if region.array is None else \
                bool(region.array.flags.writeable)
        if region.array is None and self.provider == "soft":
            raise InvalidArgument("this is a GPU's memory, and a soft NIC copies with the CPU; "
                                  "register it with a verbs NIC or with that GPU's "
                                  "(Nic.open(\"cuda:0\")), or pass host memory")
        return region

    def deregister(self, region: Region) -> None:
        """Take the memory back. Busy while a transfer in flight names it. Peers of other
        processes let go of it first, if they answer within a second."""
        self._check_open()
        try:
            self._take_back(region.key)
        except OSError as failed:
            if failed.errno == errno.EBUSY:
                raise Busy(f"{self.name}: a transfer in flight uses {region}; wait for it or "
                           "cancel it, then deregister") from None
            raise InvalidArgument(f"{self.name}: {region} is not registered here") from None
        except (AttributeError, TypeError, OverflowError):
            raise InvalidArgument("deregister takes what register returned") from None

    def _take_back(self, key):
        self._ext.check_idle(key)               # or peers would forget what we want them to pull
        self._going.add(key)                    # who connects meanwhile does not hear of it
        try:
            if self._control is not None and key in self._ext.owners:
                self._control.retract(key)
            self._ext.dereg(key)
        except BaseException:
            self._going.discard(key)
            if self._control is not None:
                self._control.announce(key)     # it stays
            raise
        self._going.discard(key)

    def pinned(self, nbytes: int):
        """Cuda: pinned host memory, a writable buffer (`spans.PinnedMemory`): what a host pool may
        be made over. It is freed with its last reference. MappingFailed: there is not so much."""
        self._check_open()
        return cuda.memory_of(self, nbytes, True)

    def device_memory(self, nbytes: int):
        """Cuda: memory of the GPU (`spans.DeviceMemory`), for those who have no tensor of another
        library. It is freed with its last reference. MappingFailed: there is not so much."""
        self._check_open()
        return cuda.memory_of(self, nbytes, False)

    # ---- connections

    def listen(self, address: str, classes=None, *, secret: bytes | str | None = None
               ) -> "Listener":
        """Answer `connect(address)`. `classes`, if given, is the list a peer must ask for.

        address: a name, for NICs of this process; "host:port" (verbs; loopback if the host is
        left out), or "unix:PATH" (soft, other processes of this host and user). secret (or
        KVIO_SECRET_FILE): what a peer has to know; without one only loopback is served. A cuda
        NIC has only names, of its own GPU.
        """
        self._check_open()
        if self.provider == "verbs" and classes is not None:
            classes = verbs.by_operator(class_list(classes))
        if remote.is_remote(self, address):
            return remote.listen(self, address, classes, secret)
        with self._network._lock:
            if address in self._network._addresses:
                raise InvalidArgument(f"somebody listens at {address!r} already")
            listener = Listener(self, address, classes)
            self._network._addresses[address] = listener
            self._listeners.append(listener)
        return listener

    def connect(self, address: str, classes=(COLLECTIVE, KV), *,
                secret: bytes | str | None = None, timeout: float = 10.0) -> "Peer":
        """Queue pairs of each class to whoever listens at `address`, on both ends. Connecting to
        one's own address makes a loop-back: the NIC copies within the host. address, secret: see
        `listen`; timeout: seconds for the whole handshake."""
        self._check_open()
        classes = class_list(classes)
        if self.provider == "verbs":
            classes = verbs.by_operator(classes)
        if remote.is_remote(self, address):
            return remote.connect(self, address, classes, secret, timeout)
        with self._network._lock:
            listener = self._network._addresses.get(address)
        if listener is None:
            if self.provider == "cuda":
                raise cuda.nobody_listens(self, address)
            raise TransferError(errno.ECONNREFUSED, f"{self.name}: nobody listens at {address!r} "
                                "on this fabric; "
                                + remote.what_is_missing(address, '"unix:PATH"'))
        if listener.classes is not None and listener.classes != classes:
            raise InvalidArgument(f"{address!r} has the traffic classes {listener.classes}, not "
                                  f"{classes}: both ends need the same list")
        here, there = self._end(listener.nic, classes), listener.nic._end(self, classes)
        here._other, there._other = there, here
        here._join()
        if self.provider == "cuda":
            here.dishonoured, there.dishonoured = map(cuda.dishonoured, (here, there))
        for nic, peer in (self, here), (listener.nic, there):
            nic._peers.add(peer)
            nic._classes.update((c.name, c) for c in classes)
        there.listener = listener
        listener._accepted.append(there)
        return here

    def _end(self, other, classes):
        """Our end of a connection to another NIC of this process."""
        try:
            return Peer(self, other.name, classes)
        except OSError as failed:
            why = cuda.said(self) if self.provider == "cuda" else ""
            raise TransferError(failed.errno, f"{self.name} cannot connect to {other.name}: "
                                f"{why or failed.strerror}") from None

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
        with one sl are one to the port). `tx_busy_ns` and `rx_busy_ns` are link time. Cuda:
        `copies` says how often each way of copying was chosen (`segments`) and how many calls of
        the driver, or descriptors of kernels, that took (`copies`)."""
        raw = self._ext.counters()
        tx, rx = raw.pop("tx_bytes"), raw.pop("rx_bytes")
        by_vl = {}                              # only a soft NIC knows how SLs map to VLs
        for sl, vl in enumerate(self.fabric.arbitration.sl2vl if self.fabric else ()):
            lane = by_vl.setdefault(vl, {"tx_bytes": 0, "rx_bytes": 0})
            lane["tx_bytes"] += tx[sl]
            lane["rx_bytes"] += rx[sl]
        by_class = {c.name: {"tx_bytes": tx[c.sl], "rx_bytes": rx[c.sl]}
                    for c in self._classes.values()}
        found = {"provider": self.provider, "name": self.name, "bytes_per_s": self.bytes_per_s,
                 "mtu": self.mtu, "in_flight": self._ext.in_flight, **raw, "tx_bytes": sum(tx),
                 "rx_bytes": sum(rx), "by_vl": by_vl, "by_class": by_class}
        if self.provider == "cuda" and not self._ext.closed:
            found["copies"] = _nic.cuda_info(self._ext)["copies"]
        return found

    def info(self) -> dict:
        """What the device says of itself, plain data: `rails` (device, port, GID and its index and
        type, link, MTU, ...), limits (`max_sge` of a WRITE, `max_sge_rd` of a READ,
        `max_msg_nbytes`, ...), and the addresses of the library's `pd` and `context`, for other
        libraries in this process. Soft and cuda NICs have those three limits and no rails; a cuda
        one has `copy`: the GPU (`device`, `name`, `capability`, `num_sms`, `driver`), how it
        copies (`copy`; `ways`, each None or why it is not there; `kernel_sms`), and what each way
        costs between two kinds of memory, ns (`costs`; `measured`: or a rule of thumb)."""
        self._check_open()
        found = {"provider": self.provider, "name": self.name, **self._ext.info()}
        if self.provider == "cuda":
            found["copy"] = _nic.cuda_info(self._ext)
            del found["copy"]["copies"], found["copy"]["why"]
        return found

    # ---- the end

    def fail(self) -> None:
        """As if the process that owns this NIC had died: all its queue pairs go into error, at
        the other ends too where these are in this process, and what is in flight flushes."""
        for peer in list(self._peers):
            for end in (peer, peer._other):
                for qp in list(getattr(end, "_qps", {}).values()):
                    try:
                        qp.fail()
                    except (OSError, ValueError):
                        pass                    # gone meanwhile
        self._ext.drive()

    def close(self, *, cancel: bool = False) -> None:
        """Close peers, listeners and registrations. Busy while a transfer is in flight, this
        NIC's or a peer's on our memory; `cancel=True` gives up what has not started; the rest of
        our own has 2 s to end (on a virtual clock none), then it flushes."""
        if self._ext.closed:
            return
        try:
            if cancel:
                remote.give_up(self)
            if self._control is not None:
                remote.part(self)
            self._ext.close()
        except OSError:
            raise Busy(f"{self.name}: transfers of this NIC are in flight ({self._ext.in_flight}), "
                       "or a peer's on its memory; wait for them, cancel them, or "
                       "close(cancel=True)") from None
        for listener in list(self._listeners):
            listener.close()
        for peer in list(self._peers):
            peer._forget()
        self._control = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            self.close(cancel=True)
        except Busy:
            if kind is None:
                raise                           # else what ended the block says more

    def __del__(self):
        ext = getattr(self, "_ext", None)
        if ext is not None and not ext.closed:
            warnings.warn(f"{self.name} was not closed", ResourceWarning, source=self,
                          stacklevel=2)

    def _check_open(self):
        if self._ext.closed:
            raise Closed(f"NIC {self.name} is closed")
        if self.provider == "cuda":
            cuda.check_process(self)


def _by_interface(obj):
    """The array of what has `__array_interface__`; anything else as it is."""
    try:
        return np.asarray(obj) if hasattr(obj, "__array_interface__") else obj
    except Exception as wrong:              # another library's, about its own memory
        raise InvalidArgument("this object's __array_interface__ does not say where its memory "
                              f"is: {wrong!r}") from None


def _read_only(array):
    view = array.view()
    view.flags.writeable = False
    return view
