"""Programs that know nothing of kvio, at the other end of one of its queue pairs.

They share kvio's side of no handshake. A program, started as `PROGRAM... DEVICE TCLASS`, prints a
line "QPN PSN MTU GID ADDR RKEY NBYTES" (GID in hex), reads the same of kvio's end, says "ready",
and then does what it is told, a line each:

    read|write LOCAL REMOTE LENGTH      offsets into the two regions; prints the completion's status
    show OFFSET LENGTH                  prints its memory in hex
"""
import os
import shutil
import struct
import subprocess

import numpy as np

from kvio._ext import nic as _nic
from kvio.layout import WR_DTYPE
from kvio.transfer import Access

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ENDPOINT = struct.Struct("<IIIIHBB16s")     # struct kvio_endpoint
REGION = struct.Struct("<QQQQII")           # struct kvio_region_ad; rkeys follow
PSN, KEY = 77, 1 << 24


def plain_verbs() -> list:
    """The C program. suite.py has compiled it, outside of the guest."""
    return [os.environ["KVIO_LAB_PLAIN_VERBS"]]


def plain_pyverbs() -> list:
    """The Python program, under the Python that Debian's pyverbs belongs to."""
    return ["/usr/bin/python3", os.path.join(HERE, "plain_pyverbs.py")]


def why_no_pyverbs() -> str | None:
    done = subprocess.run(["/usr/bin/python3", "-c", "import pyverbs.qp"], capture_output=True,
                          text=True) if shutil.which("/usr/bin/python3") else None
    return None if done and done.returncode == 0 else "python3-pyverbs is not installed"


def raw_pair(near, far, near_class, far_class):
    """Two queue pairs of ours, connected by hand: the one on NIC `near`, and what to keep. `near`
    knows the regions that `far` has now."""
    table = _nic.Far(near._ext, 1)
    for key in list(far._ext.owners):
        table.add(far._ext.describe(key))
    ends = [_nic.QueuePair(near._ext, near_class.sl, near_class.tclass, far=table),
            _nic.QueuePair(far._ext, far_class.sl, far_class.tclass, far=_nic.Far(far._ext, 1))]
    ends[0].connect_endpoints(ends[1].endpoints())
    ends[1].connect_endpoints(ends[0].endpoints())
    return ends


class Stranger:
    """Such a program on `device`, connected to a queue pair of ours on `nic`. `mine`: our memory
    (uint8), which it may read and write."""

    def __init__(self, program, device, nic, traffic_class, mine, *, wrong_rkey=0):
        """wrong_rkey: is added to the one that the program told us."""
        tclass = traffic_class.tclass
        self.mine, self.region = mine, nic.register(mine)
        self.process = subprocess.Popen([*program, device, str(tclass)], text=True, bufsize=1,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        qpn, psn, mtu, gid, self.addr, rkey, nbytes = (
            word if at == 3 else int(word) for at, word in enumerate(self._answer().split()))
        self._far = _nic.Far(nic._ext, 1)
        self._far.add(REGION.pack(KEY, self.addr, nbytes, nbytes, Access.REMOTE_READ |
                                  Access.REMOTE_WRITE | Access.LOCAL_WRITE, 1)
                      + struct.pack("<I", rkey + wrong_rkey & 0xffffffff))
        self.qp = _nic.QueuePair(nic._ext, 0, tclass, far=self._far)
        own_qpn, own_psn, own_mtu, rd_atomic, *_, own_gid = ENDPOINT.unpack(self.qp.endpoints())
        ours = nic._ext.describe(self.region.key)
        key, addr, length, *_ = REGION.unpack_from(ours)
        assert (key, addr, length) == (self.region.key, mine.ctypes.data, mine.nbytes)
        self._tell(own_qpn, own_psn, own_mtu, own_gid.hex(), addr,
                   struct.unpack_from("<I", ours, REGION.size)[0], length)
        self.qp.connect_endpoints(ENDPOINT.pack(qpn, psn, mtu, min(rd_atomic, 4), 0, 0, tclass,
                                                bytes.fromhex(gid)))
        assert self._answer() == "ready"

    def _tell(self, *words):
        print(*words, file=self.process.stdin, flush=True)

    def _answer(self):
        line = self.process.stdout.readline().strip()
        assert line, f"the program ended with {self.process.wait(10)}"
        return line

    def ask(self, *words) -> int:
        """The status of its work request: 0, or an enum ibv_wc_status."""
        self._tell(*words)
        return int(self._answer())

    def show(self, offset: int, nbytes: int) -> np.ndarray:
        """Its memory, as it sees it itself."""
        self._tell("show", offset, nbytes)
        return np.frombuffer(bytes.fromhex(self._answer()), np.uint8)

    def post(self, opcode, local_at, remote_at, length, count=1):
        """Work requests of ours, `length` apart; the batch."""
        wrs = np.zeros(count, WR_DTYPE)
        step = np.arange(count, dtype=np.uint64) * np.uint64(length)
        wrs["opcode"], wrs["length"] = opcode, length
        wrs["lkey"], wrs["rkey"] = self.region.key, KEY
        wrs["local_addr"] = np.uint64(self.region.addr + local_at) + step
        wrs["remote_addr"] = np.uint64(self.addr + remote_at) + step
        return self.qp.post(wrs)

    def close(self):
        self.process.kill()
        self.process.communicate()
        if self.qp.query()["in_flight"]:
            self.qp.fail()
        self.qp.nic.drain(True, 10)
        self.qp.close()
        self._far.close()

    def __enter__(self):
        return self

    def __exit__(self, *wrong):
        self.close()
