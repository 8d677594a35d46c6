"""What moves blocks in bench_storage.py: kvio, its floor in C, and fio. Others are in peers.py.

Each contender lives in a process of its own, so that its CPU time is that of the process: all its
threads, and the kernel's workers for it (fio: see there). `data` is what make_data made: a closed
kvio store, whose segment file the others read at the same places. A contender that lacks something
raises Missing.
"""
import collections
import ctypes
import inspect
import json
import mmap
import os
import resource
import shutil
import subprocess
import time
from typing import NamedTuple

import numpy as np

from kvio import BlockLayout, BlockPool, BlockStore, block_keys

PAGE = 4096
CALL = 128 << 20            # bytes of one call of kvio's
CONTENDERS = {}


class Missing(Exception):
    """Why a contender cannot run here."""


class Setting(NamedTuple):
    """What a row asks of its contenders."""
    op: str                 # read, write (visible), durable, latency
    nbytes: int             # of a block
    depth: int              # blocks in flight
    media: str              # disk (O_DIRECT), cache (of the disk), tmpfs
    num_blocks: int         # in the data
    folder: str             # of the data
    segment: str            # the store's segment file
    start: int              # where block 0 lies in it
    built: str              # folder of what was compiled
    sync_nbytes: int = 64 << 20

    @property
    def direct(self):
        return self.media == "disk"

    @property
    def writes(self):
        return self.op in ("write", "durable")

    @property
    def flags(self):
        return (os.O_RDWR if self.writes else os.O_RDONLY) | (os.O_DIRECT if self.direct else 0)


def layout_of(nbytes):
    return BlockLayout(num_layers=8, block_tokens=64, bytes_per_token=nbytes // 512)


def content(nbytes, first, count):
    """Blocks first, first+1, ...: noise that depends on the size alone, and in each page's first
    word the number of that page."""
    noise = np.random.default_rng(nbytes).integers(0, 1 << 63, nbytes // 8, np.uint64)
    blocks = np.repeat(noise[None], count, 0)
    pages = np.arange(first * nbytes // PAGE, (first + count) * nbytes // PAGE, dtype=np.uint64)
    blocks[:, ::PAGE // 8] = pages.reshape(count, -1)
    return blocks.view(np.uint8)


def keys_of(setting, series=0):
    return block_keys(np.arange(setting.num_blocks * 64), layout_of(setting.nbytes),
                      f"series {series}".encode())


def options(**wanted):
    """Those options of BlockStore.open that this kvio has."""
    known = inspect.signature(BlockStore.open).parameters
    return {name: value for name, value in wanted.items() if name in known}


def pages(count, nbytes, huge=True):
    """Memory in huge pages where the kernel has them (as that of kvio's pools) that has been
    touched: one row a block."""
    memory = mmap.mmap(-1, -(-count * nbytes >> 21) << 21, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    rows = np.frombuffer(memory, np.uint8)[:count * nbytes].reshape(count, nbytes)
    rows[:] = 1
    return rows


class Contender:
    def __init__(self, setting: Setting):
        self.setting = setting
        self.setup()

    def setup(self):
        pass

    def prepare(self, ids):
        """Before each run, not timed."""

    def move(self, ids):
        """Read or write these blocks. Whoever knows better returns (seconds, CPU seconds)."""

    def held(self):
        """After a read: pairs of (block's memory, its id) for what the memory still holds."""
        return []

    def close(self):
        pass

    @staticmethod
    def cpu():
        times = resource.getrusage(resource.RUSAGE_SELF)
        return times.ru_utime + times.ru_stime

    def run(self, ids, whole):
        """One timed run: {seconds, cpu, nbytes}. Reads are checked: a word of each page, or all
        bytes if `whole`."""
        self.prepare(ids)
        cpu, begin = self.cpu(), time.perf_counter()
        seconds, cpu = self.move(ids) or (time.perf_counter() - begin, self.cpu() - cpu)
        self.check(whole)
        return {"seconds": seconds, "cpu": cpu, "nbytes": len(ids) * self.setting.nbytes}

    def check(self, whole):
        nbytes = self.setting.nbytes
        for memory, number in self.held():
            wanted = content(nbytes, number, 1)[0] if whole else None
            first = number * nbytes // PAGE
            words = memory.view(np.uint64)[::PAGE // 8]
            if (words != np.arange(first, first + len(words), dtype=np.uint64)).any() or \
                    whole and (memory != wanted).any():
                raise AssertionError(f"block {number} has wrong bytes")


def contender(cls):
    CONTENDERS[cls.__name__] = cls
    return cls


# ---- kvio

@contender
class Kvio(Contender):
    """Calls of 128 MiB (what a long context brings), two of them in flight."""
    verify = "never"

    def setup(self):
        setting = self.setting
        self.batch = min(setting.num_blocks // 2, CALL // setting.nbytes)
        self.pool = BlockPool(layout_of(setting.nbytes), 2 * self.batch)
        self.slots = self.pool.alloc(2 * self.batch).reshape(2, -1)
        folder = os.path.join(setting.folder, "store")
        how = options(verify=self.verify, durability="durable", queue_depth=setting.depth,
                      direct_io="auto" if setting.direct else False)
        if setting.media == "cache" and "direct_io" not in how:
            raise Missing("this kvio has no direct_io=False")
        if setting.op == "latency":
            del how["queue_depth"]              # of 1 MiB each: the block is split
        self.series = 0
        if setting.writes:
            folder = os.path.join(setting.folder, "written")
            shutil.rmtree(folder, ignore_errors=True)
            if setting.op == "write":
                how["durability"], how["verify"] = "visible", "always"
            how["capacity_bytes"] = setting.num_blocks * setting.nbytes
            self.pool.region.array[:] = content(setting.nbytes, 0, 2 * self.batch).reshape(-1)
        self.store = BlockStore.open(folder, layout_of(setting.nbytes), **how)
        self.ring = self.store.open_ring(name="bench")
        self.ring.register(self.pool).wait()
        self.keys = keys_of(setting)
        if setting.writes:                      # all space is taken and written once
            self.move(np.arange(setting.num_blocks))

    def prepare(self, ids):
        if not self.setting.writes:
            return
        self.store.forget(self.keys[ids])
        self.series += 1
        self.keys[ids] = keys_of(self.setting, self.series)[ids]

    def move(self, ids):
        self.last, flying = collections.deque(maxlen=2), collections.deque()
        go = self.ring.write if self.setting.writes else self.ring.read
        for number, at in enumerate(range(0, len(ids), self.batch)):
            if len(flying) == 2:
                self.finish(*flying.popleft())
            some = ids[at:at + self.batch]
            slots = self.slots[number % 2][:len(some)]
            flying.append((go(self.keys[some], self.pool, slots), len(some)))
            self.last.append((slots, some))
        while flying:
            self.finish(*flying.popleft())

    def finish(self, transfer, count):
        usable = transfer.wait()
        assert self.setting.writes or usable == count, f"{usable} of {count} blocks read"

    def held(self):
        if self.setting.writes:                 # read back: was it stored?
            last = self.last
            count = sum(len(ids) for _, ids in last)
            pool = BlockPool(layout_of(self.setting.nbytes), count)
            ids = np.concatenate([ids for _, ids in last])
            assert self.store.read(self.keys[ids], pool, pool.alloc(count)).wait() == count
            rows = pool.region.array.reshape(count, -1)
            slots = np.concatenate([slots for slots, _ in last])
            return list(zip(rows, slots.tolist()))
        rows = self.pool.region.array.reshape(2 * self.batch, -1)
        return [(rows[slot], int(number)) for slots, ids in self.last
                for slot, number in zip(slots, ids)]

    def close(self):
        self.store.close()
        if self.setting.writes:
            shutil.rmtree(self.store.path, ignore_errors=True)


@contender
class KvioAlways(Kvio):
    verify = "always"


@contender
class KvioOne(Kvio):
    """One block at a time."""

    def move(self, ids):
        slots = self.slots[0][:1]
        for number in ids:
            assert self.ring.read(self.keys[number:number + 1], self.pool, slots).wait() == 1
        self.last = [(slots, ids[-1:])]


# ---- floors

class Floor(Contender):
    """Code from storage_floor.c."""
    huge = True

    def setup(self):
        path = os.path.join(self.setting.built, "storage_floor")
        if not os.path.exists(path):
            raise Missing("storage_floor.c was not built: needs a C compiler and liburing-dev")
        self.library = ctypes.CDLL(path)
        self.rows = pages(self.num_slots(), self.setting.nbytes, self.huge)
        self.open()

    def num_slots(self):
        return max(4, self.setting.depth)

    def target(self):
        """What to write to: a file of its own, as long as the segment, all of it written."""
        path = os.path.join(self.setting.folder, type(self).__name__ + ".target")
        with open(path, "wb") as file:
            for at in range(self.setting.num_blocks):
                file.write(self.rows[at % len(self.rows)])
            os.fsync(file.fileno())
        return path

    def open(self):
        self.path = self.target() if self.setting.writes else self.setting.segment
        self.floor = ctypes.c_void_p()
        self.ok(self.library.floor_open(
            ctypes.byref(self.floor), os.fsencode(self.path), self.setting.flags,
            ctypes.c_void_p(self.rows.ctypes.data), self.setting.nbytes, self.setting.depth))

    @staticmethod
    def ok(code):
        if code < 0:
            raise OSError(-code, os.strerror(-code))

    def places(self, ids):
        start = 0 if self.setting.writes else self.setting.start
        offsets = np.asarray(ids, np.uint64) * np.uint64(self.setting.nbytes) + np.uint64(start)
        self.ids, self.used = ids, np.zeros(len(ids), np.uint32)
        return ctypes.c_void_p(offsets.ctypes.data), ctypes.c_void_p(self.used.ctypes.data), offsets

    def move(self, ids):
        offsets, used, _ = self.places(ids)
        every = self.setting.sync_nbytes // self.setting.nbytes if self.setting.op == "durable" \
            else 0
        self.ok(self.library.floor_run(self.floor, self.setting.writes, offsets, used, len(ids),
                                       every))

    def held(self):
        if self.setting.writes:
            return []
        return [(self.rows[slot], int(number))
                for slot, number in dict(zip(self.used.tolist(), self.ids)).items()]

    def close(self):
        self.library.floor_close(self.floor)
        if self.setting.writes:
            os.unlink(self.path)


@contender
class Liburing(Floor):
    """liburing from C: registered buffers and file, a sliding window, ordinary memory."""
    huge = False


@contender
class LiburingHuge(Floor):
    """The same in huge pages, as kvio's pools are: what is left of the difference is code."""


@contender
class Pread4(Floor):
    """pread in four threads of C, into as much memory as kvio's: copies into memory that lies in
    a cache are another thing."""
    threads = 4

    def num_slots(self):
        return 2 * CALL // self.setting.nbytes

    def open(self):
        self.fd = os.open(self.setting.segment, self.setting.flags)

    def move(self, ids):
        offsets, used, _ = self.places(ids)
        self.ok(self.library.pread_run(
            self.fd, ctypes.c_void_p(self.rows.ctypes.data), self.setting.nbytes, len(self.rows),
            offsets, used, len(ids), self.threads))

    def close(self):
        os.close(self.fd)


@contender
class Pread(Contender):
    """os.preadv, one block at a time."""

    def setup(self):
        self.rows = pages(1, self.setting.nbytes)
        self.fd = os.open(self.setting.segment, self.setting.flags)

    def move(self, ids):
        rows, nbytes, start = [self.rows[0]], self.setting.nbytes, self.setting.start
        for number in ids.tolist():
            assert os.preadv(self.fd, rows, start + number * nbytes) == nbytes
        self.last = number

    def held(self):
        return [(self.rows[0], self.last)]

    def close(self):
        os.close(self.fd)


# ---- fio

@contender
class Fio(Contender):
    """fio, io_uring with fixed buffers and registered files, on the same file."""

    def setup(self):
        if not shutil.which("fio"):
            raise Missing("fio is not installed")
        setting = self.setting
        self.path, start = setting.segment, setting.start
        if setting.writes:
            self.path, start = os.path.join(setting.folder, "fio.target"), 0
            if not os.path.exists(self.path):
                with open(self.path, "wb") as file:
                    for _ in range(setting.num_blocks):
                        file.write(bytes(setting.nbytes))
                    os.fsync(file.fileno())
        self.command = [
            "fio", "--name=x", "--thread", f"--filename={self.path}", f"--offset={start}",
            f"--size={setting.num_blocks * setting.nbytes}", f"--bs={setting.nbytes}",
            "--rw=" + ("write" if setting.writes else "randread"), "--norandommap",
            "--randrepeat=0", f"--direct={int(setting.direct)}", "--invalidate=0",
            "--ioengine=io_uring", "--fixedbufs", "--registerfiles", f"--iodepth={setting.depth}",
            "--output-format=json", "--overwrite=1"]
        if setting.op == "durable":
            self.command += [f"--fdatasync={setting.sync_nbytes // setting.nbytes}",
                             "--end_fsync=1"]

    def move(self, ids):
        """By fio's own figures: they leave out its start. Its CPU is that of the job's thread."""
        done = subprocess.run([*self.command, f"--io_size={len(ids) * self.setting.nbytes}"],
                              capture_output=True, text=True)
        if done.returncode or "{" not in done.stdout:
            raise RuntimeError(f"fio: {done.stderr[-300:]}")
        job = json.loads(done.stdout[done.stdout.index("{"):])["jobs"][0]
        result = job["write" if self.setting.writes else "read"]
        assert result["io_bytes"] == len(ids) * self.setting.nbytes, result["io_bytes"]
        cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
        return result["io_bytes"] / result["bw_bytes"], cpu

    def close(self):
        if self.setting.writes and os.path.exists(self.path):
            os.unlink(self.path)
