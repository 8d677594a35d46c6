"""The host's ways to copy Layer Blocks: a loop of memcpy in C, numpy, torch where there is one, and
kvio's soft NIC. What a machine without a GPU can say about batching."""
import ctypes
import functools
import importlib.util
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from copy_case import HOST_STRIDE, Sample, address, fresh
from copy_report import AGAIN

import cbuild
from kvio.layout import READ, WR_DTYPE
from kvio.transfer import KV, Fabric, Nic

PIECE = np.dtype([("target", "<u8"), ("source", "<u8")])        # struct piece of copy_loops.c


@functools.cache
def loops():
    """copy_loops.c, compiled for this process."""
    with tempfile.TemporaryDirectory() as folder:
        path = cbuild.shared_library(f"{folder}/copy_loops.so",
                                     [Path(__file__).with_name("copy_loops.c")], "-O3")
        return ctypes.CDLL(path)


def pieces_of(targets, sources):
    """The two addresses of each copy, as the loops in C take them."""
    pieces = np.empty(len(targets), PIECE)
    pieces["target"], pieces["source"] = targets, sources
    return pieces


class Memory:
    """`case.count` blocks in `source`, of which block order_s[i] is to become order_t[i] of
    `target`. In `source` another layer's block lies between two of ours."""

    def __init__(self, case, seed):
        self.case, shape = case, (case.count, HOST_STRIDE, case.block)
        self.source = fresh(HOST_STRIDE * case.nbytes, seed).reshape(shape)
        self.target = np.zeros((case.count, case.block), np.uint8)
        self.order_s, self.order_t = case.orders()
        self.wanted = np.empty_like(self.target)
        self.wanted[self.order_t] = self.source[self.order_s, 0]

    def pieces(self):
        ids_s, ids_t = self.order_s.astype(np.uint64), self.order_t.astype(np.uint64)
        return pieces_of(address(self.target) + ids_t * np.uint64(self.case.block),
                         address(self.source) + ids_s * np.uint64(HOST_STRIDE * self.case.block))


class Way:
    """A copy that is over when `submit` returns, unless it has more to do in `finish`."""

    finish = None

    def __init__(self, memory):
        self.memory, self.calls = memory, memory.case.count

    def submit(self):
        start = time.perf_counter_ns()
        self.copy()
        return time.perf_counter_ns() - start

    def note(self):
        return ""

    def close(self):
        pass


class MemcpyLoop(Way):
    name = "ceiling: memcpy, C loop"

    def __init__(self, memory):
        super().__init__(memory)
        self.pieces, self.ns = memory.pieces(), ctypes.c_uint64()
        self.call = functools.partial(
            loops().copy_loop_memcpy, ctypes.c_void_p(address(self.pieces)), len(self.pieces),
            ctypes.c_size_t(memory.case.block), ctypes.byref(self.ns))

    def submit(self):
        self.call()
        return self.ns.value            # by the loop's own clock, without Python's call


class MemcpyLoopAgain(MemcpyLoop):
    """The same once more: what it shows beside itself is what the machine's noise makes."""

    name = f"memcpy, C loop{AGAIN}"


class NumpyIndexed(Way):
    name = "numpy, target[ids] = source[ids]"

    def copy(self):
        self.memory.target[self.memory.order_t] = self.memory.source[self.memory.order_s, 0]


class NumpyLoop(Way):
    name = "numpy, a copy each from Python"

    def __init__(self, memory):
        super().__init__(memory)
        self.ids = list(zip(memory.order_t.tolist(), memory.order_s.tolist()))

    def copy(self):
        target, source = self.memory.target, self.memory.source
        for to, of in self.ids:
            target[to] = source[of, 0]


class TorchIndexed(Way):
    name = "torch, index_copy_(index_select)"

    def __init__(self, memory):
        super().__init__(memory)
        import torch
        self.torch = torch
        self.target = torch.from_numpy(memory.target.view(np.int64))
        self.source = torch.from_numpy(memory.source.view(np.int64)[:, 0])
        self.to, self.of = (torch.from_numpy(ids.astype(np.int64))
                            for ids in (memory.order_t, memory.order_s))

    def copy(self):
        self.target.index_copy_(0, self.to, self.source.index_select(0, self.of))

    def note(self):
        return f"{self.torch.get_num_threads()} threads"


class SoftNic(Way):
    name = "kvio soft NIC, rate 0"

    def __init__(self, memory):
        super().__init__(memory)
        self.nic = Nic.open("soft", fabric=Fabric(), queue_depth=8192)
        local, remote = self.nic.register(memory.target), self.nic.register(memory.source)
        self.nic.listen("copy")
        self.peer = self.nic.connect("copy", classes=[KV])
        pieces = memory.pieces()
        self.wrs = np.zeros(len(pieces), WR_DTYPE)
        self.wrs["opcode"], self.wrs["length"] = READ, memory.case.block
        self.wrs["lkey"], self.wrs["rkey"] = local.key, remote.key
        self.wrs["local_addr"], self.wrs["remote_addr"] = pieces["target"], pieces["source"]

    def copy(self):
        self.transfer = self.peer.read(self.wrs)

    def finish(self):
        self.transfer.wait()

    def close(self):
        self.nic.close()


def ways(memory, note):
    """All that there are on this machine; `note(name, why)` hears what is not."""
    kinds = [MemcpyLoop, MemcpyLoopAgain, NumpyIndexed, NumpyLoop, SoftNic]
    if importlib.util.find_spec("torch"):
        kinds.append(TorchIndexed)
    else:
        note(TorchIndexed.name, "torch is not installed")
    return [kind(memory) for kind in kinds]


def run(way):
    """One transfer, by the host's clock: until its bytes have moved."""
    cpu, wall = time.process_time(), time.perf_counter()
    submit_ns = way.submit()
    seconds = submit_ns / 1e9
    if way.finish is not None:
        way.finish()
        seconds = time.perf_counter() - wall
    return Sample(submit_ns, seconds, time.process_time() - cpu)


def machine():
    """The CPU's name, as the kernel says it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return f"an unnamed CPU ({sys.platform})"
