"""Helpers of the transfer tests: work requests written by hand, and two connected NICs."""
import os

import numpy as np

from kvio.layout import READ, WR_DTYPE, WRITE
from kvio.pages import sealed_memfd
from kvio.transfer import COLLECTIVE, KV, Nic, control

# Under sanitizers, and on busy machines, everything takes longer: .ci/sanitize sets it.
PATIENCE = float(os.environ.get("KVIO_PATIENCE", "1"))
control.HANDSHAKE_S *= PATIENCE
Nic.connect.__kwdefaults__["timeout"] *= PATIENCE


def requests(opcode, local, remote, local_at, remote_at, length):
    """Work requests: offsets into the two regions (arrays or ints), and lengths."""
    local_at, remote_at, length = np.broadcast_arrays(local_at, remote_at, length)
    wrs = np.zeros(local_at.size, WR_DTYPE)
    wrs["opcode"], wrs["length"] = opcode, length.ravel()
    wrs["local_addr"] = local.addr + local_at.ravel().astype(np.uint64)
    wrs["remote_addr"] = remote.addr + remote_at.ravel().astype(np.uint64)
    wrs["lkey"], wrs["rkey"] = local.key, remote.key
    return wrs


def pattern(nbytes, seed=1):
    """Random bytes, in memory that other processes can map."""
    memory, fd = sealed_memfd(nbytes)
    os.close(fd)
    made = np.frombuffer(memory, np.uint8)[:nbytes]
    made[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return made


def finish(virtual, *transfers):
    """Advance to the end of all of them; the times they completed at."""
    virtual.fabric.advance(10**9)
    for transfer in transfers:
        transfer.wait()
    return [transfer.stats["completed_ns"] for transfer in transfers]


class Pair:
    """Two NICs, one megabyte each, and a connection from `a` to `b`. `mine` are the bytes of
    `memory`, which is `a`'s: that array itself, unless `open_nic.on_device` puts it elsewhere."""

    def __init__(self, open_nic, nbytes=1 << 20, address="b", classes=(COLLECTIVE, KV), **options):
        options.setdefault("bytes_per_s", 0)
        self.a, self.b = open_nic(name="a", **options), open_nic(name="b", **options)
        self.mine, self.theirs = pattern(nbytes, 1), pattern(nbytes, 2)
        self.memory, on_device = self.mine, getattr(open_nic, "on_device", None)
        if on_device:
            self.memory, self.mine = on_device(self.a, self.mine)
        self.local, self.remote = self.a.register(self.memory), self.b.register(self.theirs)
        self.listener = self.b.listen(address)
        self.peer = self.a.connect(self.listener.address, classes)
        self.back = self.listener.accept()

    def read(self, local_at, remote_at, length):
        return requests(READ, self.local, self.remote, local_at, remote_at, length)

    def write(self, local_at, remote_at, length):
        return requests(WRITE, self.local, self.remote, local_at, remote_at, length)
