"""What a provider adds to the handshake between two processes.

The handshake (remote.py) is the same for all providers. It asks the carrier of its NIC for what
the other end needs, and gives the other end's answer back. Descriptors of open files can only
travel over a Unix socket, so only "soft" uses them.
"""
import os

from kvio._ext import nic as _nic
from kvio.errors import InvalidArgument


class Carrier:
    """The carrier of verbs: everything stands in the endpoints and the regions' descriptions."""

    needs_fds = False           # True: the connection has to be a Unix socket

    def __init__(self, nic):
        self.nic = nic

    def offer(self) -> tuple[dict, list]:
        """Sent to the other end before `attach`: plain JSON data, and descriptors of open files
        (which stay ours)."""
        return {}, []

    def attach(self, num_rails: int, offer: dict, fds: list) -> _nic.Far:
        """The other end's offer is here (we own its fds, and close them if we raise): the table
        for its regions, in which queue pairs can then be created."""
        self._refuse(*fds)
        return _nic.Far(self.nic._ext, num_rails)

    def describe(self, region) -> tuple[bytes, int | None]:
        """What a peer has to know of one of our regions, and the descriptor that goes with it."""
        return self.nic._ext.describe(region.key), None

    def add(self, far, ad: bytes, fd: int | None) -> None:
        """A region of the other end: into the table. OSError (EINVAL) or ValueError: malformed."""
        self._refuse(*(() if fd is None else (fd,)))
        far.add(ad)

    def _refuse(self, *fds):
        """Nobody needs them; a peer at a Unix socket may send some all the same."""
        for fd in fds:
            os.close(fd)
        if fds:
            raise InvalidArgument("the other end has sent descriptors, which nothing is made of")

    def remove(self, far, key: int) -> None:
        """The other end has taken it back. OSError EBUSY: a transfer in flight names it."""
        far.remove(key)

    def lost(self, far) -> None:
        """The control connection is over: nothing comes from the other end any more, and what is
        in flight fails."""

    def detach(self, far) -> None:
        """The connection is over, its queue pairs are closed."""
        far.close()
