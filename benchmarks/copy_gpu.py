"""kvio's ways to copy Layer Blocks between pinned host memory and a GPU, and the ground that all
ways share: memory, what has to be in it afterwards, and how a transfer is timed."""
import time

import copy_driver
import numpy as np
from copy_case import HOST_STRIDE, Sample, address, fresh
from copy_host import pieces_of
from copy_report import AGAIN, SWEEP

from kvio.errors import BackendUnavailable
from kvio.layout import READ, WR_DTYPE
from kvio.transfer import KV, Nic

CLEAR = 0xA5
MAX_SMS = 8                             # of Nic.open
PATIENCE = 60                           # seconds
CEILING = "ceiling: one pinned copy"
WAYS = ["loop", "batch", "strided", "kernel"]


class Gpu:
    """Device 0: pinned host memory and device memory for cases of up to `nbytes`, a NIC for each
    way, and the driver without kvio. `close` gives all of it back.

    The first NIC that chooses by itself measures the device, once; from then on the kernel takes no
    more SMs than were found worth while. With first="loop" nothing is measured.
    """

    def __init__(self, nbytes, note, first="auto"):
        self.nbytes, self.note = nbytes, note
        self._nics = {}
        nic = Nic.open("cuda:0", name=f"copy-{first}", queue_depth=8192, copy=first)
        try:
            self.driver = copy_driver.Driver()
            self.runtime = copy_driver.runtime(self.driver, note)
            self.pinned = nic.pinned(HOST_STRIDE * nbytes)
            self.memory = nic.device_memory(nbytes)
            self.host = np.frombuffer(self.pinned, np.uint8)
            self.seen = self.driver.pinned(nbytes)      # for what is on the device
            self._join(first, nic)
            missing = nic.info()["copy"]["ways"]
            self.ways = [way for way in WAYS if missing[way] is None]
            for way in WAYS:
                if missing[way] is not None:
                    note(f"kvio {way}", missing[way])
        except BaseException:
            nic.close(cancel=True)
            raise

    def _join(self, name, nic):
        near, far = nic.register(self.memory), nic.register(self.pinned)
        nic.listen(nic.name)
        self._nics[name] = nic, nic.connect(nic.name, classes=[KV]), {"device": near, "host": far}
        return self._nics[name]

    def nic(self, way, max_sms=None):
        """(nic, peer, regions) of a way; opened when it is first asked for."""
        name = way if max_sms is None else f"{way}-{max_sms}"
        if name not in self._nics:
            options = {} if max_sms is None else {"max_sms": max_sms}
            self._join(name, Nic.open("cuda:0", name=f"copy-{name}", queue_depth=8192, copy=way,
                                      **options))
        return self._nics[name]

    def close(self):
        self.driver.synchronize()
        for nic, _, _ in self._nics.values():
            nic.close()
        self._nics.clear()
        del self.host, self.seen, self.memory, self.pinned
        self.driver.close()

    def run(self, way):
        """One transfer, timed by events around it. The host sleeps while it waits."""
        cpu = time.process_time()
        self.driver.mark_begin()
        submit_ns = way.submit()
        self.driver.mark_end()
        way.finish()
        seconds = self.driver.seconds()
        return Sample(submit_ns, seconds, time.process_time() - cpu)


class Ground:
    """The memory of one case: what lies in the source, and what then has to lie in the target.

    Host side: block order_h[i] of every second one; between them is another layer's. Device side:
    block order_d[i]. All of the target is looked at, the bytes between blocks too.
    """

    def __init__(self, gpu, case, seed):
        self.gpu, self.case = gpu, case
        self.order_h, self.order_d = case.orders()
        self.host = gpu.host[:HOST_STRIDE * case.nbytes]
        self.at = {"host": address(gpu.host), "device": gpu.memory.addr}
        blocks = self.host.reshape(case.count, HOST_STRIDE, case.block)
        if case.direction == "H2D":
            self.host[:] = fresh(len(self.host), seed)
            self.wanted = np.empty((case.count, case.block), np.uint8)
            self.wanted[self.order_d] = blocks[self.order_h, 0]
            self.whole = self.host[:case.nbytes].copy()
        else:
            source = fresh(case.nbytes, seed)
            gpu.driver.copy_now("H2D", self.at["device"], address(source), case.nbytes)
            self.wanted = np.full_like(blocks, CLEAR)
            self.wanted[self.order_h, 0] = source.reshape(case.count, case.block)[self.order_d]
            self.whole = np.full_like(self.host, CLEAR)
            self.whole[:case.nbytes] = source

    def pieces(self):
        """Addresses (target, source) of each copy."""
        block = np.uint64(self.case.block)
        host = self.at["host"] + self.order_h.astype(np.uint64) * np.uint64(HOST_STRIDE) * block
        device = self.at["device"] + self.order_d.astype(np.uint64) * block
        return pieces_of(device, host) if self.case.direction == "H2D" else pieces_of(host, device)

    def check(self, way):
        """Clear the target, let the way copy once, look at every byte of the target."""
        driver, nbytes = self.gpu.driver, self.case.nbytes
        seen = self.gpu.seen[:nbytes]
        if self.case.direction == "H2D":
            driver.fill(self.at["device"], CLEAR, nbytes)
        else:
            self.host[:] = CLEAR
        self.gpu.run(way)
        if self.case.direction == "H2D":
            driver.copy_now("D2H", address(seen), self.at["device"], nbytes)
        else:
            seen = self.host
        wanted = self.whole if isinstance(way, copy_driver.Contiguous) else self.wanted
        same = np.array_equal(seen.view(np.uint64), wanted.reshape(-1).view(np.uint64))
        assert same, f"{self.case}: {way.name}: the bytes are not those of the source"


class Kvio:
    """One `peer.read`, by one way or by kvio's choice."""

    def __init__(self, gpu, ground, way, max_sms=None):
        self.nic, self.peer, regions = gpu.nic(way, max_sms)
        self.stream, self.calls, pieces = gpu.driver.stream.value, ground.case.count, \
            ground.pieces()
        to, of = ("device", "host") if ground.case.direction == "H2D" else ("host", "device")
        self.wrs = np.zeros(self.calls, WR_DTYPE)
        self.wrs["opcode"], self.wrs["length"] = READ, ground.case.block
        self.wrs["lkey"], self.wrs["rkey"] = regions[to].key, regions[of].key
        self.wrs["local_addr"], self.wrs["remote_addr"] = pieces["target"], pieces["source"]
        self.name = f"kvio {way}" if max_sms is None else f"kvio {way}, at most {max_sms}{SWEEP}"
        self.way, self.max_sms, self.carried = way, max_sms or MAX_SMS, ()

    def submit(self):
        start = time.perf_counter_ns()
        self.transfer = self.peer.read(self.wrs, after=self.stream)
        took = time.perf_counter_ns() - start
        self.transfer.block_stream(self.stream)
        return took

    def finish(self):
        self.transfer.wait(PATIENCE)
        self.carried = self.transfer.stats["ways"]

    def note(self):
        """What carried it, where that is not plain, and on how many SMs."""
        note = "" if list(self.carried) == [self.way] else "by " + ", ".join(self.carried)
        if "kernel" in self.carried:
            worth_while = self.nic.info()["copy"]["kernel_sms"] or self.max_sms
            note += f" on {min(worth_while, self.max_sms)} SMs"
        return note.strip()


def ceiling(gpu, ground, name=CEILING):
    to, of = ("device", "host") if ground.case.direction == "H2D" else ("host", "device")
    return copy_driver.Contiguous(gpu.driver, ground.case.direction, ground.case.nbytes,
                                  ground.at[to], ground.at[of], name)


def ways(gpu, ground):
    """The ceiling (twice: what it shows beside itself is noise), a call a block from C and from
    Python, and kvio's, forced and chosen."""
    case = ground.case
    args = case.direction, case.block, ground.pieces()
    return [ceiling(gpu, ground), ceiling(gpu, ground, f"one pinned copy{AGAIN}"),
            copy_driver.LoopInC(gpu.driver, *args, runtime=gpu.runtime),
            *copy_driver.python_loops(gpu.driver, gpu.note, *args),
            *(Kvio(gpu, ground, way) for way in gpu.ways), Kvio(gpu, ground, "auto")]


def why_not():
    """Why there is no GPU to measure on, or None: whatever else fails is a failure."""
    try:
        Nic.open("cuda:0", copy="loop").close()         # measures nothing
    except BackendUnavailable as missing:
        return str(missing)
    return None
