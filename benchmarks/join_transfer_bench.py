"""kvio's soft NIC as two more contenders of a `transfer_bench.py` with the usual classes.

    python benchmarks/join_transfer_bench.py PATH/transfer_bench.py --n 16,256 \\
        --only c_memcpy_loop,nixl_ucx_shm_2proc_prepped,kvio_soft_2proc,kvio_soft

The script at PATH brings T, register and main; its options follow its path. The descriptors are
built once for a batch, as an engine keeps those of a request; posting, completion and the Python
calls are timed.
"""
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
if __name__ == "__main__":
    if len(sys.argv) < 2 or os.path.basename(sys.argv[1]) != "transfer_bench.py":
        raise SystemExit(__doc__)
    # The contenders' processes import this file too, with other arguments.
    os.environ["KVIO_TRANSFER_BENCH"] = os.path.dirname(os.path.abspath(sys.argv.pop(1)))
sys.path.insert(0, os.environ["KVIO_TRANSFER_BENCH"])

import transfer_bench                                               # noqa: E402

from kvio import KV, BlockLayout, BlockPool, Nic                    # noqa: E402
from kvio.layout import READ, WR_DTYPE                              # noqa: E402

REGION = transfer_bench.REGION


def descriptors(source, target, local_addr, local_key, remote_addr, remote_key, nbytes):
    wrs = np.zeros(len(source), WR_DTYPE)
    wrs["opcode"], wrs["length"], wrs["lkey"], wrs["rkey"] = READ, nbytes, local_key, remote_key
    wrs["local_addr"] = np.array(target, np.uint64) + np.uint64(local_addr)
    wrs["remote_addr"] = np.array(source, np.uint64) + np.uint64(remote_addr)
    return wrs


@transfer_bench.register
class KvioSoft(transfer_bench.T):
    """Both ends in one process."""

    name = "kvio_soft"

    def setup(self):
        self.nic = Nic.open("soft", queue_depth=8192, name="a")
        self.local, far = self.nic.register(self.nd), self.nic.register(self.ns)
        self.there = far.addr, far.key
        self.nic.listen("a")
        self.peer, self.batches = self.nic.connect("a", classes=[KV]), {}

    def plan(self, key, source, target, nbytes):
        self.batches[key] = descriptors(source, target, self.local.addr, self.local.key,
                                        *self.there, nbytes)

    def batch(self, key, source, target, nbytes):
        self.peer.read(self.batches[key]).wait()


@transfer_bench.register
class KvioShared(KvioSoft):
    """The source belongs to another process: shared, sealed, read-only here."""

    name, remote = "kvio_soft_2proc", True

    def target(self, connection):
        address = "unix:" + os.path.join(tempfile.mkdtemp(), "nic")
        with BlockPool(BlockLayout(1, 1, REGION), 1, shared=True) as pool, \
                Nic.open("soft", name="b") as nic:
            pool.full(pool.alloc(1)[0]).reshape(-1)[:] = self.ns
            region = nic.register(pool)
            nic.listen(address)
            connection.send((address, region.addr, region.key))
            connection.recv()

    def setup(self):
        address, *self.there = self.conn.recv()
        self.nic = Nic.open("soft", queue_depth=8192, name="a")
        self.local = self.nic.register(self.nd)
        self.peer, self.batches = self.nic.connect(address, classes=[KV]), {}


if __name__ == "__main__":
    transfer_bench.main()
