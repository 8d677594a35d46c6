"""Connections: one queue pair per traffic class to another NIC."""
import errno

import numpy as np

from kvio._ext import nic as _nic
from kvio.completion import Transfer
from kvio.errors import Busy, Closed, InvalidArgument, TransferError
from kvio.layout import READ, SGE_DTYPE, WR_DTYPE, WRITE
from kvio.spans import stream_handle
from kvio.transfer import cuda
from kvio.transfer.classes import KV, TrafficClass, class_list

_MASK = 2**64 - 1


class Listener:
    """An address at which a NIC answers. `accept` gives the other ends of connections."""

    def __init__(self, nic, address, classes):
        self.nic, self.address = nic, address
        self.classes = None if classes is None else class_list(classes)
        self._accepted: list[Peer] = []

    def __repr__(self):
        return f"<{type(self).__name__} of NIC {self.nic.name} at {self.address!r}>"

    def accept(self) -> "Peer | None":
        """Our end of the next connection; None if there is none. Not needed for peers to read
        and write our memory."""
        return self._accepted.pop(0) if self._accepted else None

    def close(self) -> None:
        """Answer no more; connections stay."""
        network = self.nic._network
        with network._lock:
            if network._addresses.get(self.address) is self:
                del network._addresses[self.address]
        if self in self.nic._listeners:
            self.nic._listeners.remove(self)


def queue_pairs(nic, remote_name, classes, far=None, made=None) -> dict:
    """A queue pair for each class, unconnected, by the names of the classes. `far`: the regions
    of the other process; `made`: filled, so that it has those that were made if one fails."""
    made = {} if made is None else made
    for c in classes:
        made[c.name] = qp = _nic.QueuePair(nic._ext, c.sl, c.tclass, far=far)
        qp.label = f"NIC {nic.name}, peer {remote_name}, class {c.name}"
    return made


def _other_opcode(opcode, descriptors, others):
    """What to say of work requests `others`, which are not of this opcode."""
    names = {READ: "READ", WRITE: "WRITE"}
    wrs = getattr(descriptors, "wrs", descriptors)
    first, wanted = int(wrs["opcode"][others[0]]), names[opcode]
    found = names.get(first, f"of opcode {first}")
    return (f"peer.{wanted.lower()} takes {wanted} descriptors, and "
            f"{'these are' if len(others) == len(wrs) else f'element {others[0]} is'} {found}; "
            f"nothing was posted: build them with kvio.{wanted}"
            + (f", or call peer.{found.lower()}" if first in names else ""))


class Peer:
    """The connection to another NIC: one queue pair per traffic class."""

    def __init__(self, nic, remote_name, classes, qps=None):
        """Use `Nic.connect` or `Listener.accept`."""
        self.nic, self.remote_name, self.classes = nic, remote_name, classes
        self.listener, self._other = None, None     # the listener: of the passive end
        self.dishonoured = ()                       # classes that a device does not set as asked
        self._qps = queue_pairs(nic, remote_name, classes) if qps is None else dict(qps)
        self._whats = {(op, name): f"{word} {qp.label}" for name, qp in self._qps.items()
                       for op, word in ((READ, "read,"), (WRITE, "write,"), (0, "post,"))}

    def __repr__(self):
        return f"<Peer {self.nic.name} -> {self.remote_name}, {'/'.join(self._qps) or 'closed'}>"

    def read(self, descriptors, traffic_class: TrafficClass = KV, *, keep=(), on_drain=None,
             after=None) -> Transfer:
        """Read remote blocks into local ones: one doorbell, one completion.

        descriptors: an array of WR_DTYPE, or an object with `.wrs` and maybe `.sges`,
        `.local_offset`, `.remote_offset` (added to the addresses). `keep`: what must live as
        long as the transfer; registered memory does anyway. `on_drain()` is called once no device
        touches the memory any more, also if posting fails. A NIC sees addresses, not blocks:
        who may free a pool's blocks meanwhile pins them, and unpins them in `on_drain`.
        Cuda: nothing is copied before what is in the stream `after` now has run; see
        `spans.stream_handle` for what a stream is.
        """
        return self._post(READ, descriptors, None, traffic_class, keep, on_drain, after)

    def write(self, descriptors, traffic_class: TrafficClass = KV, *, keep=(), on_drain=None,
              after=None) -> Transfer:
        """Write local blocks to remote ones; otherwise like `read`."""
        return self._post(WRITE, descriptors, None, traffic_class, keep, on_drain, after)

    def post(self, wrs, sges=None, traffic_class: TrafficClass = KV, *, keep=(), on_drain=None,
             after=None) -> Transfer:
        """Work requests with their own opcodes, and their scatter-gather entries (SGE_DTYPE)."""
        return self._post(0, wrs, sges, traffic_class, keep, on_drain, after)

    def _post(self, opcode, descriptors, sges, traffic_class, keep, on_drain, after):
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
                                 int(getattr(descriptors, "remote_offset", 0)) & _MASK, handle,
                                 None if after is None else self._stream(after))
        except BaseException as wrong:
            if handle.submitted:            # interrupted, but under way: it ends by itself
                raise
            transfer.abandon()
            if not isinstance(wrong, (OSError, ValueError, TypeError, BufferError, AttributeError,
                                      KeyError)):
                raise
            raise self._explain(wrong, opcode, traffic_class, descriptors) from None
        return transfer

    def _stream(self, after):
        if self.nic.provider != "cuda":
            raise InvalidArgument(f"after= orders transfers behind a GPU's stream, and "
                                  f"{self.nic.name} is a {self.nic.provider} NIC, which knows "
                                  "none: synchronise the stream first, then post")
        return stream_handle(after)

    def _explain(self, wrong, opcode, traffic_class, descriptors):
        if isinstance(wrong, InvalidArgument):
            return wrong
        self.nic._check_open()
        if not self._qps:
            return Closed(f"the peer {self.remote_name} of {self.nic.name} is closed")
        if getattr(traffic_class, "name", None) not in self._qps:
            return InvalidArgument(f"this peer has the traffic classes {', '.join(self._qps)}, "
                                   f"not {traffic_class!r}")
        if isinstance(wrong, OSError) and wrong.errno != errno.EINVAL:
            if self.nic.provider == "cuda":
                return cuda.not_posted(self, wrong.errno)
            return TransferError(wrong.errno, f"cannot post to {self.remote_name}")
        if not isinstance(wrong, OSError):
            return InvalidArgument(f"descriptors must be a contiguous array of WR_DTYPE: {wrong}")
        others = np.flatnonzero(getattr(descriptors, "wrs", descriptors)["opcode"] != opcode)
        if opcode and len(others):
            return InvalidArgument(_other_opcode(opcode, descriptors, others))
        return InvalidArgument(
            "malformed work requests, nothing was posted: sge_first and num_sge must stay within "
            f"sges and max_sge ({self.nic._ext.info()['max_sge']}), and a length is the sum of its "
            "entries")

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

    def _disown(self):
        """In a forked child: the queue pairs, which are the parent's, and must not be freed."""
        qps, self._qps = self._qps, {}
        return qps

    def _check_open(self):
        self.nic._check_open()
        if not self._qps:
            raise Closed(f"the peer {self.remote_name} of {self.nic.name} is closed")
