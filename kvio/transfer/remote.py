"""Peers in other processes and on other hosts: listening and connecting.

See docs/transfer.md, "Handshake". frames.py: what travels; bodies.py: what it may say;
handshake.py: who are you, what do we agree on; connection.py and control.py: the connection and the
thread that serves it; links.py: the queue pairs; addresses.py: where.
"""
import collections
import errno
import os
import stat
import threading
import time
import warnings

from kvio.errors import Closed, InvalidArgument, KvioError, TransferError
from kvio.transfer import addresses, cuda, handshake
from kvio.transfer.connection import Connection
from kvio.transfer.control import Control, keep_alive
from kvio.transfer.frames import INITIATOR
from kvio.transfer.links import RemotePeer
from kvio.transfer.peer import Listener

GIVE_UP_S = 2.0             # for what is in flight to drain by itself when a NIC is closed
FLUSH_S = 10.0              # and once its queue pairs are in error


def is_remote(nic, address) -> bool:
    """Does this address lie outside of the fabric in this process?"""
    if nic._network is not None and not isinstance(address, str):
        raise InvalidArgument(f"an address is a str, not {address!r}")
    return nic._network is None or ":" in address


def what_is_missing(address: str, form: str) -> str:
    """What to do where nobody listens at a plain name; other processes have addresses of `form`."""
    if "/" in address:
        return f"it looks like a path: for a socket write \"unix:{address}\", at both ends"
    return f"call listen first, or give {form} for another process"


class RemoteListener(Listener):
    """An address at which a NIC answers other processes. `refused`: the typed errors of the last
    connections that were not made."""

    def __init__(self, nic, address, classes):
        super().__init__(nic, address, classes)
        self.refused = collections.deque(maxlen=64)
        self._acceptor, self._path, self._name = None, None, None

    def note(self, wrong) -> None:
        self.refused.append(wrong)

    def accept(self):
        """Our end of the next connection; None if there is none."""
        try:
            peer = self._accepted.pop(0)
        except IndexError:
            return None
        _warn(peer)
        return peer

    def close(self) -> None:
        """Answer no more; connections stay."""
        acceptor, self._acceptor = self._acceptor, None
        if acceptor is not None:
            try:
                acceptor.control.ask(lambda waiter: (acceptor.close(), waiter.finish()), GIVE_UP_S)
            except Closed:
                acceptor.sock.close()
            if self._name is not None:
                addresses.NAMES.drop(self._name)
            if self._path is not None:
                _unlink(*self._path)
        if self in self.nic._listeners:
            self.nic._listeners.remove(self)


def _unlink(path, inode):
    """Our socket's name, unless somebody else's has taken its place."""
    try:
        info = os.lstat(path)
        if stat.S_ISSOCK(info.st_mode) and info.st_ino == inode:
            os.unlink(path)
    except OSError:
        pass


def _warn(peer):
    for text in peer.dishonoured:
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def _control_of(nic) -> Control:
    with _making:
        if nic._control is None or nic._control.ended:      # by a close that said Busy
            nic._control = Control(nic)
        return nic._control


def _forget_lock():
    global _making
    _making = threading.Lock()


_forget_lock()
os.register_at_fork(after_in_child=_forget_lock)


def _check_kind(nic, address):
    if nic.provider == "cuda":
        cuda.check_address(nic, address)
    is_unix = isinstance(address, str) and address.startswith("unix:")
    if nic.provider == "soft" and not is_unix:
        raise InvalidArgument(f"a soft NIC reaches other processes of this host by unix:PATH, not "
                              f"by {address!r}")


def listen(nic, address, classes, secret):
    """`Nic.listen` for such an address."""
    _check_kind(nic, address)
    secret = handshake.load_secret(secret)
    is_name = isinstance(address, str) and ":" not in address
    listener = RemoteListener(nic, address, classes)
    if is_name and addresses.NAMES.look(address):
        raise InvalidArgument(f"somebody listens at {address!r} already")
    sock = addresses.listen(":0" if is_name else address, secret)
    try:
        if is_name:
            addresses.NAMES.put(address, addresses.spell(sock))
            listener._name = address
        elif address.startswith("unix:"):
            listener._path = address[5:], os.lstat(address[5:]).st_ino
        else:
            listener.address = addresses.spell(sock)
        nic._listeners.append(listener)
        listener._acceptor = _control_of(nic).listen(sock, listener, secret)
    except BaseException:
        sock.close()
        raise
    return listener


def connect(nic, address, classes, secret, timeout):
    """`Nic.connect` to such an address."""
    _check_kind(nic, address)
    secret = handshake.load_secret(secret)
    deadline = time.monotonic() + _seconds(timeout)
    where = address
    if isinstance(address, str) and ":" not in address:
        where = addresses.NAMES.look(address)
        if where is None:
            raise TransferError(errno.ECONNREFUSED, f"{nic.name}: nobody listens at {address!r} "
                                f"in this process; {what_is_missing(address, 'host:port')}")
    sock = addresses.connect(where, secret, max(deadline - time.monotonic(), 0.001))
    control, made = _control_of(nic), []

    def begin(waiter):
        try:
            keep_alive(sock)
            made.append(Connection(control, sock, INITIATOR, nic, secret, deadline,
                                   classes=classes, waiter=waiter))
        except BaseException:
            sock.close()
            raise
        control.add(made[0])
    try:
        peer = control.ask(begin, deadline - time.monotonic() + GIVE_UP_S)
    except KvioError as wrong:
        raise _named(wrong, nic, address) from None
    except BaseException:                       # Ctrl-C: nobody wants it any more
        control.submit(lambda: [each.part("interrupted") for each in made])
        raise
    if peer is None:
        raise TransferError(errno.ETIMEDOUT, f"{nic.name}: {address!r} has not answered for "
                            f"{timeout} s")
    _warn(peer.result)
    return peer.result


def _named(wrong, nic, address):
    """The same error, and who could not connect to whom."""
    where = f"{nic.name} cannot connect to {address!r}: "
    if isinstance(wrong, TransferError):
        return TransferError(wrong.errno, where + wrong.strerror)
    return type(wrong)(where + str(wrong))


def _seconds(timeout):
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9:
        raise InvalidArgument(f"timeout must be seconds, more than 0, not {timeout!r}")
    return timeout


def give_up(nic) -> None:
    """`Nic.close(cancel=True)`: what has not ended by itself soon flushes. On a clock that stands
    it never would."""
    stands = nic.fabric is not None and nic.fabric._ext.is_virtual
    if not nic._ext.drain(True, 0 if stands else GIVE_UP_S):
        return
    for peer in list(nic._peers):
        for qp in list(peer._qps.values()):
            try:
                qp.fail()
            except (OSError, ValueError):
                pass                            # gone meanwhile
    nic._ext.drain(True, FLUSH_S)


def part(nic) -> None:
    """`Nic.close`: say goodbye to all other processes. A NIC that is busy keeps its
    connections."""
    ext = nic._ext
    ext.drive()
    if ext.in_flight:
        return
    nic._control.stop()
    for peer in list(nic._peers):
        if isinstance(peer, RemotePeer):
            peer.close()
