"""What posting costs: from Python through kvio to a device's send queue, per work request.

The device is the stand-in for libibverbs, frozen: it takes work requests as a driver does (a lock,
a copy into its ring, a doorbell) and carries out none of them meanwhile. Beside it stands the usual
way from Python: an object for each work request and scatter-gather entry, and a call for each.
The objects are ctypes structures, or pyverbs' own where that can be imported; those are only made
and never posted, so their row is less than what such a loop costs.

Method: median over paired rounds (the order alternates), quartiles beside it. Wanted: <= 50 ns at
256 work requests and more, and >= 20 times cheaper than the loop.
"""
import ctypes
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS), str(TESTS / "transfer")]

import ibverbs_standin                                                      # noqa: E402

ibverbs_standin.choose()

from kvio.layout import READ, WR_DTYPE                                      # noqa: E402
from kvio.transfer import KV, Nic                                           # noqa: E402

BLOCK = 64


class Sge(ctypes.Structure):
    """struct ibv_sge."""
    _fields_ = [("addr", ctypes.c_uint64), ("length", ctypes.c_uint32), ("lkey", ctypes.c_uint32)]


class SendWr(ctypes.Structure):
    """struct ibv_send_wr, as far as RDMA needs it: 128 bytes."""


SendWr._fields_ = [("wr_id", ctypes.c_uint64), ("next", ctypes.POINTER(SendWr)),
                   ("sg_list", ctypes.POINTER(Sge)), ("num_sge", ctypes.c_int),
                   ("opcode", ctypes.c_int), ("send_flags", ctypes.c_uint),
                   ("imm_data", ctypes.c_uint32), ("remote_addr", ctypes.c_uint64),
                   ("rkey", ctypes.c_uint32), ("rest", ctypes.c_uint8 * 76)]
RDMA_READ = 4
assert ctypes.sizeof(SendWr) == 128


class Bench:
    """A reads `count` scattered blocks of B's memory. Another connection takes the loop's."""

    def __init__(self, count):
        if ibverbs_standin.why_not():
            pytest.skip(ibverbs_standin.why_not())
        self.standin = ibverbs_standin.StandIn(ibverbs_standin.build())
        self.standin.reset()
        rng = np.random.default_rng(1)
        self.source = rng.integers(0, 256, (count, BLOCK), np.uint8)
        self.target = np.zeros((count, BLOCK), np.uint8)
        self.a, self.b = (Nic.open(f"verbs:standin{i}", name="ab"[i], queue_depth=2 * count)
                          for i in range(2))
        local, remote = self.a.register(self.target), self.b.register(self.source)
        address = self.b.listen(uuid.uuid4().hex).address
        self.peer = self.a.connect(address, classes=[KV])
        self.order = rng.permutation(count)
        self.wrs = np.zeros(count, WR_DTYPE)
        self.wrs["opcode"], self.wrs["length"] = READ, BLOCK
        self.wrs["lkey"], self.wrs["rkey"] = local.key, remote.key
        self.wrs["local_addr"] = local.addr + np.arange(count, dtype=np.uint64) * np.uint64(BLOCK)
        self.wrs["remote_addr"] = remote.addr + self.order.astype(np.uint64) * np.uint64(BLOCK)
        self.posted = []
        self.loop_peer = self.a.connect(address, classes=[KV])
        library = self.standin.library
        library.standin_qp.restype = ctypes.c_void_p
        self.qp = ctypes.c_void_p(library.standin_qp(self.loop_peer.query()["kv"]["qpn"]))
        self.places = list(zip(self.wrs["local_addr"].tolist(), self.wrs["remote_addr"].tolist()))

    def post(self):
        """kvio: one call."""
        self.posted.append(self.peer.read(self.wrs))

    def post_objects(self):
        """An object for each work request and entry, one call each."""
        post_send, qp = self.standin.library.standin_post_send, self.qp
        bad = ctypes.POINTER(SendWr)()
        for i, (local, remote) in enumerate(self.places):
            sge = Sge(local, BLOCK, 1)
            wr = SendWr(wr_id=i, sg_list=ctypes.pointer(sge), num_sge=1, opcode=RDMA_READ,
                        remote_addr=remote, rkey=2)
            assert post_send(qp, ctypes.byref(wr), ctypes.byref(bad)) == 0

    def drain(self):
        """Between rounds: what was posted is carried out, the loop's is thrown away."""
        self.standin.library.standin_discard(self.qp)
        self.standin.set(frozen=0)
        while self.posted:
            self.posted.pop().wait()
        self.standin.set(frozen=1)

    def close(self):
        self.drain()
        assert (self.target == self.source[self.order]).all()
        self.standin.reset()
        self.a.close()
        self.b.close()


def say(benchmark, bench, seconds, text):
    count = len(bench.wrs)
    benchmark.extra_info["ns_per_work_request"] = ns = 1e9 * seconds / count
    benchmark.extra_info["report"] = f"{text}, {count} work requests: {ns:.1f} ns each"


@pytest.mark.parametrize("wr_api", [1, 0], ids=["wr_start", "post_send"])
@pytest.mark.parametrize("count", [256, 511, 2048])
def test_post_verbs(benchmark, count, wr_api, monkeypatch):
    """One Python call, `peer.read`, of `count` work requests: doorbell rung, none carried out."""
    monkeypatch.setenv("KVIO_IB_WR_API", str(wr_api))
    bench = Bench(count)

    def setup():
        bench.drain()
        before.append(bench.standin.count("post_calls"))
    before = []
    benchmark.pedantic(bench.post, setup=setup, rounds=300, warmup_rounds=5)
    assert bench.standin.count("post_calls") == before[-1] + 1
    assert bench.standin.count("work_requests") % count == 0
    if not benchmark.disabled:
        say(benchmark, bench, benchmark.stats.stats.median, "peer.read")
    bench.close()


@pytest.mark.parametrize("count", [256, 511, 2048])
def test_post_beside_objects(paired, benchmark, count):
    """The same against the loop of Python objects. Wanted: the loop takes >= 20 times as long."""
    bench = Bench(count)
    pair = paired(bench.post, bench.post_objects, rounds=60, setup=bench.drain,
                  names=("kvio, one call", "objects, a call each"))
    if not benchmark.disabled:
        say(benchmark, bench, pair.a.seconds, f"kvio, {pair.ratio[1]:.0f} x cheaper than objects")
    bench.close()


@pytest.mark.parametrize("count", [256, 2048])
def test_post_beside_pyverbs(paired, benchmark, count):
    """Against making pyverbs' objects, without posting them."""
    objects = pytest.importorskip("pyverbs.wr", reason="pyverbs is not installed for this Python")
    bench = Bench(count)

    def make():
        for i, (local, remote) in enumerate(bench.places):
            wr = objects.SendWR(wr_id=i, num_sge=1, sg=[objects.SGE(local, BLOCK, 1)],
                                opcode=RDMA_READ)
            wr.set_wr_rdma(2, remote)
    pair = paired(bench.post, make, rounds=60, setup=bench.drain,
                  names=("kvio, one call", "pyverbs, objects only"))
    if not benchmark.disabled:
        say(benchmark, bench, pair.a.seconds,
            f"kvio, {pair.ratio[1]:.0f} x cheaper than pyverbs' objects alone")
    bench.close()
