"""kvio as one more contender of a `storage_bench.py` with the usual classes.

    python benchmarks/join_storage_bench.py PATH/storage_bench.py --op read --bs 1048576 \\
        --only fio_uring_fixed,kvio,kvio_always

The script at PATH brings Contender, register and main; its options follow its path. Reads come
from a store that another store object wrote and closed. Calls are of 128 MiB, two in flight, so
the memory is kvio's own and larger than the script's pool.
"""
import collections
import os
import shutil
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
if __name__ == "__main__":
    if len(sys.argv) < 2 or os.path.basename(sys.argv[1]) != "storage_bench.py":
        raise SystemExit(__doc__)
    # The contenders' processes import this file too, with other arguments.
    os.environ["KVIO_STORAGE_BENCH"] = os.path.dirname(os.path.abspath(sys.argv.pop(1)))
sys.path.insert(0, os.environ["KVIO_STORAGE_BENCH"])

import storage_bench                                                # noqa: E402
from contenders import layout_of, options                           # noqa: E402

from kvio import BlockPool, BlockStore, block_keys                  # noqa: E402


@storage_bench.register
class Kvio(storage_bench.Contender):
    name, ops, latency, verify_reads = "kvio", {"read", "write"}, "batch", "never"

    def setup(self):
        layout = layout_of(self.bs)
        self.batch = (128 << 20) // self.bs
        self.nslots = 2 * self.batch
        self.blocks = BlockPool(layout, self.nslots)
        self.rows = self.blocks.region.array.reshape(self.nslots, -1)
        self.rows[:] = 1
        self.ids = self.blocks.alloc(self.nslots)
        count = self.region // self.bs
        self.keys = block_keys(np.arange(count * 64), layout)
        self.dir = os.path.join(self.tmp, self.name)
        shutil.rmtree(self.dir, ignore_errors=True)
        if self.op == "read":
            with BlockStore.open(self.dir, layout, durability="durable") as store:
                self.fill(store, count)
        how = options(direct_io="auto" if self.flags else False, queue_depth=self.qd)
        if self.op == "read":
            how.update(verify=self.verify_reads, durability="durable")
        self.store = BlockStore.open(self.dir, layout, **how)
        self.ring = self.store.open_ring()
        self.ring.register(self.blocks).wait()
        if self.op == "write":                  # space is taken before anything is timed
            self.fill(self.store, count)

    def fill(self, store, count):
        with open(self.path, "rb") as file:
            for first in range(0, count, self.batch):
                some = min(self.batch, count - first)
                file.readinto(self.rows[:some].reshape(-1))
                store.write(self.keys[first:first + some], self.blocks, self.ids[:some]).wait()

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.dir, ignore_errors=True)

    def slot(self, i):
        return memoryview(self.rows[i])

    def run(self, ids):
        if self.op == "write":                  # a block that is stored is not written again
            self.store.forget(self.keys[ids])
        return super().run(ids)

    def _go(self, ids, lat, go):
        flying, now = collections.deque(), storage_bench.time.perf_counter_ns

        def finish():
            begin, count, transfer = flying.popleft()
            usable = transfer.wait()
            assert self.op == "write" or usable == count, (usable, count)
            lat.extend([now() - begin] * count)

        ids = np.asarray(ids)
        for number, at in enumerate(range(0, len(ids), self.batch)):
            if len(flying) == 2:
                finish()
            some, first = ids[at:at + self.batch], number % 2 * self.batch
            flying.append((now(), len(some), go(self.keys[some], self.blocks,
                                                self.ids[first:first + len(some)])))
        while flying:
            finish()

    def read_blocks(self, ids, lat):
        self._go(ids, lat, self.ring.read)

    def write_blocks(self, ids, lat):
        self._go(ids, lat, self.ring.write)

    def flush(self):
        self.store.sync()

    def written(self, i):
        with BlockPool(layout_of(self.bs), 1) as pool:
            assert self.store.read(self.keys[i:i + 1], pool, pool.alloc(1)).wait() == 1
            return pool.region.array[:8].tobytes()


@storage_bench.register
class KvioAlways(Kvio):
    name, ops, verify_reads = "kvio_always", {"read"}, "always"


if __name__ == "__main__":
    storage_bench.main()
