"""Soft NICs across processes of one host: what they add to the handshake.

A process writes only its own memory. It hands out read-only descriptors of memfds that it can
neither truncate nor open for writing again, and the other end maps those; see docs/transfer.md,
"Soft across processes".
"""
import errno
import mmap
import os
import struct

import numpy as np

from kvio import pages
from kvio._ext import nic as _nic
from kvio.errors import BackendUnavailable, InvalidArgument
from kvio.transfer.carrier import Carrier

_AD = struct.Struct("<QQQQII")          # struct kvio_region_ad
_AT = struct.Struct("<Q")               # behind it: where in the memfd the region begins
_PRIVATE = 2**64 - 1


class SharedCarrier(Carrier):
    """The carrier of soft NICs. A region that is not made of sealed shared memory is told of, but
    comes without a descriptor: the other end knows it and refuses to read it."""

    needs_fds = True

    def __init__(self, nic):
        super().__init__(nic)
        if nic.fabric._ext.is_virtual:
            raise InvalidArgument("a NIC with a virtual clock has no other processes: its clock is "
                                  "not theirs; open it without clock=")
        self._ring = self._ring_fd = self._wake_fd = None

    def offer(self) -> tuple[dict, list]:
        """Our ring, the eventfd that wakes us, a pidfd of ours, and the page of our port."""
        memory, ring = pages.sealed_memfd(_nic.RING_NBYTES)
        self._ring = np.frombuffer(memory, np.uint8)
        self._ring_fd = _Fd(ring)
        self._wake_fd = _Fd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        fds = [ring, self._wake_fd.number, _own_pidfd()]
        if self.nic.bytes_per_s:
            fds.append(_port_of(self.nic))
        return {"bytes_per_s": self.nic.bytes_per_s}, fds

    def attach(self, num_rails: int, offer: dict, fds: list) -> _nic.Far:
        try:
            return self._attach(offer, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _attach(self, offer, fds):
        rate = offer.get("bytes_per_s")
        if rate is None or len(fds) != 3 + bool(rate):
            raise InvalidArgument("the other end's offer of shared memory is malformed")
        theirs = pages.map_sealed(fds[0], 0, _nic.RING_NBYTES)
        for fd, kind in (fds[1], "anon_inode:[eventfd]"), (fds[2], "pidfd"):
            if kind not in os.readlink(f"/proc/self/fd/{fd}"):
                raise InvalidArgument(f"the other end has sent something else than {kind}")
        if os.get_blocking(fds[1]):             # waking it must never stop us
            raise InvalidArgument("the other end's eventfd would block")
        port = np.frombuffer(pages.map_fixed(fds[3], mmap.PAGESIZE), np.uint8) if rate else None
        far = _nic.Far(self.nic._ext, 0)
        try:
            far.join(self._ring, theirs, port, rate, self._wake_fd.number, fds[1], fds[2])
        except BaseException:
            far.close()
            raise
        return far

    def describe(self, region) -> tuple[bytes, int | None]:
        try:
            ad = self.nic._ext.describe(region.key)
        except OSError as refused:
            if refused.errno != errno.EACCES:
                raise
            # Nobody may read or write it, but we may send from it: by others' pulling.
            ad = _AD.pack(region.key, region.addr, region.nbytes, region.nbytes,
                          int(region.access), 0)
        fd, offset = pages.shared_span(region.addr, region.nbytes) or (None, _PRIVATE)
        return ad + _AT.pack(offset), fd

    def add(self, far, ad: bytes, fd: int | None) -> None:
        try:
            if len(ad) != _AD.size + _AT.size:
                raise ValueError("the description of a region has another length")
            nbytes, (offset,) = _AD.unpack_from(ad)[2], _AT.unpack_from(ad, _AD.size)
            if (fd is None) != (offset == _PRIVATE):
                raise ValueError("a region with an offset but no descriptor, or without one")
            if fd is None:
                return far.add(ad[:_AD.size])
            memory = pages.map_sealed(fd, offset, nbytes)
        finally:
            if fd is not None:
                os.close(fd)
        far.add(ad[:_AD.size], memory.__array_interface__["data"][0], memory)

    def lost(self, far) -> None:
        far.lost()

    def detach(self, far) -> None:
        super().detach(far)
        self._ring = self._ring_fd = self._wake_fd = None


class _Fd:
    """A descriptor that is closed with its last holder."""

    def __init__(self, number):
        self.number = number

    def __del__(self):
        os.close(self.number)


# ---- of the process, of the NIC

_pidfd = None


def _own_pidfd():
    """A pidfd of this process: whoever has it sees when we die."""
    global _pidfd
    if _pidfd is None or _pidfd[0] != os.getpid():
        try:
            _pidfd = os.getpid(), _Fd(os.pidfd_open(os.getpid()))
        except OSError as failed:
            raise BackendUnavailable(failed.errno, "soft NICs across processes need pidfd_open "
                                     "(Linux 5.3; a container may refuse it)") from None
    return _pidfd[1].number


def _port_of(nic):
    """The descriptor of the page in which all who pull from this NIC reserve its link."""
    if nic._port_fd is None:
        memory, fd = pages.fixed_memfd(mmap.PAGESIZE)
        nic._port_fd = _Fd(fd)
        nic._ext.share_port(np.frombuffer(memory, np.uint8))
    return nic._port_fd.number
