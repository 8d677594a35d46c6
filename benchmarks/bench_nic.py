"""What the transfer engine costs: posting per work request, and the soft NIC at rate 0 against a
plain C loop of memcpy over the same descriptors.

The ratio is the loop's time over the NIC's, so 1.0 means that the NIC is free: it bounds-checks
and completes every work request and counts every packet. Method: median over paired rounds (the
order alternates), quartiles beside it; the bytes are checked after the rounds.
"""
import numpy as np
import pytest

from kvio._ext import nic as ext
from kvio.layout import READ, WR_DTYPE
from kvio.transfer import KV, Fabric, Nic


class Bench:
    """A reads `count` scattered blocks of B's memory."""

    def __init__(self, block, count, depth=2048):
        rng = np.random.default_rng(1)
        self.source = rng.integers(0, 256, (count, block), np.uint8)
        self.target = np.zeros((count, block), np.uint8)
        fabric = Fabric()
        self.a, self.b = (Nic.open("soft", fabric=fabric, name=n, queue_depth=depth) for n in "ab")
        local, remote = self.a.register(self.target), self.b.register(self.source)
        self.b.listen("b")
        self.peer = self.a.connect("b", classes=[KV])
        self.order = rng.permutation(count)
        self.wrs = np.zeros(count, WR_DTYPE)
        self.wrs["opcode"], self.wrs["length"] = READ, block
        self.wrs["lkey"], self.wrs["rkey"] = local.key, remote.key
        self.wrs["local_addr"] = local.addr + np.arange(count, dtype=np.uint64) * np.uint64(block)
        self.wrs["remote_addr"] = remote.addr + self.order.astype(np.uint64) * np.uint64(block)

    def close(self):
        assert (self.target == self.source[self.order]).all()
        self.a.close()
        self.b.close()


@pytest.mark.parametrize("count", [256, 511, 2048])
def test_post(benchmark, count):
    """One Python call: `peer.read` of `count` work requests, without their execution."""
    bench = Bench(64, count, depth=2 * count)
    posted = []

    def drain():
        while posted:
            posted.pop().wait()
        return (), {}
    benchmark.pedantic(lambda: posted.append(bench.peer.read(bench.wrs)), setup=drain,
                       rounds=200, warmup_rounds=5)
    drain()
    bench.close()
    if not benchmark.disabled:
        benchmark.extra_info["ns_per_work_request"] = 1e9 * benchmark.stats.stats.median / count


@pytest.mark.parametrize("block, count", [(48 << 10, 256), (4 << 10, 256)], ids=["48K", "4K"])
def test_read_at_rate_0(paired, block, count):
    """End to end, post to completion, against the memcpy loop. Wanted: >= 0.85 for 48K."""
    bench = Bench(block, count)
    paired(lambda: bench.peer.read(bench.wrs).wait(), lambda: ext.memcpy_loop(bench.wrs),
           rounds=60, nbytes=block * count, names=("soft NIC", "memcpy loop"))
    bench.target[:] = 0
    bench.peer.read(bench.wrs).wait()
    bench.close()
