"""Power cuts: a guest writes durable blocks to a disk with a volatile write cache, and is killed.

    python tests/soak/soak_power.py [--rounds 100] [--seed N] [--log FILE]

A round: a virtual machine starts (from a snapshot, taken when it had booted and loaded Python,
before it touched the disk; --boot boots it each time), mounts the disk, checks the store on it, and
writes blocks, with slots used again, telling which are durable. At a random write or flush the disk
stops; the machine is killed; of the writes that were not flushed the disk keeps none, all, or some,
in any order and in pieces. In the next round every durable block must be there and right to
the byte, and whatever else is found must be right. Prints seed, rounds and what was tested.

--control visible   says of blocks that they are durable which are not: has to fail
--control flush     a disk that forgets to flush: has to fail
"""
import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TESTS = os.path.dirname(HERE)
sys.path[:0] = [TESTS, HERE]

from lab import kernel, nbd, vm                                             # noqa: E402
from build_hash import build_hash                                           # noqa: E402

DISK_BYTES = 64 << 20
GUEST = os.path.join(HERE, "power_guest.py")
HOW = ["none", "all", "writes", "writes", "pieces", "pieces"]


class Failed(Exception):
    """A promise of the store was broken, or the guest could not run."""


def torn(block) -> bool:
    """kvio's header pages and pages 1 may be torn into sectors. ext4 is promised whole blocks of
    4096 bytes: a torn superblock it does not mount (its checksum fails), whatever lies in it."""
    return block[:7] == b"KVIOPG1" or any(block[at:at + 4] == b"KVBH"
                                          for at in range(0, len(block), 128))


class Lying(nbd.Disk):
    """For --control flush: says that it has flushed."""

    def flush(self):
        self.counts["flushes"] += 1
        return self._goes_on()


def new_disk(folder) -> bytearray:
    """An empty ext4."""
    path = os.path.join(folder, "disk")
    with open(path, "wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", path],
                   check=True)
    with open(path, "rb") as file:
        return bytearray(file.read())


def build_initrd(tree, folder) -> str:
    """An initramfs with Python, numpy and kvio, as a rehearsal on this machine uses them."""
    paths = [os.path.dirname(TESTS), os.path.join(TESTS, "storage")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"}
    rehearsal = os.path.join(folder, "rehearsal")
    os.mkdir(rehearsal)
    done = subprocess.run([sys.executable, GUEST, rehearsal], env=env, capture_output=True,
                          text=True)
    if done.returncode:
        raise Failed(f"the rehearsal failed: {done.stderr[-2000:]}")
    files = set(json.loads(done.stdout)) | {GUEST}
    program = os.path.realpath(sys.executable)
    files |= {program} | vm.libraries([program, *(path for path in files if ".so" in path)])
    paths += sorted(path for path in sys.path if path.endswith("site-packages"))
    command = (f"PYTHONHOME={sys.base_prefix} PYTHONPATH={os.pathsep.join(paths)} "
               f"OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 {program} -S -s {GUEST}")
    path = os.path.join(folder, "initrd")
    with open(path, "wb") as file:
        file.write(vm.initramfs(tree, files, command))
    return path


def order_of(rng, uring, required, known, control):
    """What the guest shall do."""
    backends = ["threads", "uring"] if uring else ["threads"]
    durable = rng.random() < 0.75 and control != "visible"
    plan = {"seed": rng.getrandbits(40), "backend": rng.choice(backends), "die_at_call": False,
            "durability": "durable" if durable else "visible", "leave_after_s": 600,
            "sync": not durable and control != "visible", "short_writes": rng.random() < 0.2}
    return {"entropy": rng.randbytes(64).hex(), "backend": rng.choice(backends), "plan": plan,
            "trusting": rng.random() < 0.5, "required": required, "known": known}


class Round:
    """One boot of the guest, and what it said."""

    def __init__(self, guest, disk, rng, required, known):
        self.guest, self.disk, self.rng = guest, disk, rng
        self.required, self.known = dict(required), dict(known)
        self.heard = {}

    def run(self, order) -> None:
        """Until the power goes."""
        self.guest.tell(json.dumps(order))
        early = self.rng.random() < 0.15                # already while it mounts and checks
        stop = int(2 ** self.rng.uniform(0, 6 if early else 9.5))
        if not early and self.rng.random() < 0.5:
            stop = self.rng.randrange(1, 400)
        until = time.monotonic() + 300
        while not self.disk.stopped.is_set():
            try:
                line = self.guest.line(0.05)
            except EOFError:
                raise Failed("the guest ended") from None
            if line:
                self._take(line, stop, early)
            if time.monotonic() > until:
                raise Failed(f"the guest hangs: heard {self.heard}")
        self._rest()

    def _rest(self):
        """What had been said before the power went."""
        try:
            while True:
                line = self.guest.line(0.1)
                if line is None:
                    return
                self._take(line, 0, False)
        except EOFError:
            pass

    def _take(self, line, stop, early):
        what, *more = line.split(" ")
        self.heard[what] = self.heard.get(what, 0) + 1
        if what == ("mounted" if early else "writing"):
            self.disk.stop_after(stop)
        if what == "begin":
            self.known[more[0]] = int(more[1])
        elif what == "stored":
            self.required[more[0]] = int(more[1])
        elif what == "dropped":
            self.required.pop(more[0], None)
        elif what == "absent":
            self.known.pop(more[0], None)
        elif what == "gone":
            self.required = {}
        elif what == "checked":
            self.heard["blocks"], self.heard["durable"], self.heard["findings"] = map(int, more)
        elif what == "failed":
            raise Failed(line)


class Machine:
    """Starts guests that are ready for an order."""

    def __init__(self, folder, boot):
        self._folder, self._boot = folder, boot
        self._tree, self.socket = kernel.tree(), os.path.join(folder, "nbd")
        self._initrd, self._state = build_initrd(self._tree, folder), None
        self.uring = False

    def start(self, disk):
        """(server, guest) on this disk."""
        server = nbd.Server(self.socket, disk)
        try:
            guest = vm.Guest(self._tree, self._initrd, disk=self.socket, folder=self._folder,
                             state=self._state)
            if self._state is None:
                self._wait_ready(guest)
            if self._state is None and not self._boot:
                path = os.path.join(self._folder, "state")
                guest.save(path)
                self._state = path
                guest = vm.Guest(self._tree, self._initrd, disk=self.socket,
                                 folder=self._folder, state=path)
        except BaseException:
            server.close()
            raise
        return server, guest

    def _wait_ready(self, guest):
        try:
            line = guest.line(300) or ""
        except EOFError:
            line = ""
        if not line.startswith("ready"):
            guest.kill()
            raise Failed(f"the guest does not come up: {line} {guest.problem()}")
        self.uring = line == "ready 0"


def run(arguments, folder, log):
    machine, medium = Machine(folder, arguments.boot), new_disk(folder)
    required, known, sums = {}, {}, {}
    for number in range(arguments.rounds):
        rng = random.Random(f"{arguments.seed} {number}")
        began = time.monotonic()
        disk = (Lying if arguments.control == "flush" else nbd.Disk)(medium, torn)
        server, guest = machine.start(disk)
        one = Round(guest, disk, rng, required, known)
        try:
            one.run(order_of(rng, machine.uring, required, known, arguments.control))
        except Failed as failed:
            guest.kill()
            with open(f"{folder}.disk", "wb") as file:
                file.write(medium)
            raise Failed(f"round {number}: {failed} {guest.problem()}\nthe disk is kept at "
                         f"{folder}.disk") from None
        finally:
            guest.close()
            server.close()
        if server.problem:
            raise Failed(f"the disk failed: {server.problem!r}")
        how = rng.choice(HOW)
        lost = disk.cut(rng, how)
        medium = disk.medium
        required, known = one.required, one.known
        figures = {"unflushed": lost, **disk.counts, **one.heard, "required": len(required)}
        for name, value in figures.items():
            sums[name] = sums.get(name, 0) + value
        log(f"round {number}: {time.monotonic() - began:.1f} s, kept {how}, " + ", ".join(
            f"{value} {name}" for name, value in figures.items()))
    return sums


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "little"))
    parser.add_argument("--boot", action="store_true", help="boot the guest in every round")
    parser.add_argument("--control", choices=["visible", "flush"])
    parser.add_argument("--log", help="a line a round goes there (default: nowhere)")
    arguments = parser.parse_args()
    reason = vm.missing()
    if reason:
        sys.exit(f"soak_power: {reason}")
    head = f"soak_power: seed {arguments.seed}, {arguments.rounds} rounds, {build_hash()}" + (
        f", control {arguments.control}" if arguments.control else "")
    print(head, flush=True)
    out = open(arguments.log or os.devnull, "a", buffering=1)
    out.write(head + "\n")
    folder = tempfile.mkdtemp(prefix="kvio-power-")
    try:
        sums = run(arguments, folder, lambda line: out.write(line + "\n"))
    except (Failed, kernel.LabMissing) as failed:
        print(f"FAILED: {failed}\nagain with --seed {arguments.seed} --rounds {arguments.rounds}")
        sys.exit(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    last = "passed: " + ", ".join(f"{value} {name}" for name, value in sums.items())
    out.write(last + "\n")
    print(last)


if __name__ == "__main__":
    main()
