"""kill -9 of writers at random points of opening, writing and eviction, round after round.

    python tests/soak/soak_kill.py [--rounds 500] [--seed N] [--dir DIR] [--log FILE]

A round: one to three processes write chains of blocks into one small store, each on its own back
end, visible or durable; they are killed, each at a random time or at a random system call. A
further process then opens the store: every block that it gives is right to the byte, every block
whose write had completed is there (unless it was dropped, or could have been evicted, since), every
header fits its payload. Prints the seed, the rounds and what was tested; a failure is found again,
chance of timing aside, with --seed and --rounds.
"""
import argparse
import fcntl
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")      # forks must not find threads
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(os.path.dirname(HERE)), HERE,
                os.path.join(os.path.dirname(HERE), "storage")]

from blocks import Blocks, chain, open_store, readable                      # noqa: E402
from build_hash import build_hash                                           # noqa: E402
from kvio._ext import ring as _ring                                         # noqa: E402
from kvio.errors import TransferError                                       # noqa: E402
from kvio.storage import admin                                              # noqa: E402
from kvio.storage.fsck import fsck                                          # noqa: E402

SEGMENT = 400_000           # 31 slots
CAPACITY = 2 * SEGMENT      # so that room has to be made within a round
BATCH = 12
KEPT = 5                    # chains that are pinned
STORE_BYTES = 8 << 20       # older segments go beyond that
CALLS = ("open", "pwrite", "preadv", "ftruncate", "truncate", "fsync", "unlink", "link", "rename")
WRITE = 2


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_call(rng):
    """The process ends before or after one of the coming system calls that Python makes."""
    left, before = rng.randrange(1, 80), rng.random() < 0.5

    def counted(real):
        def call(*arguments, **named):
            nonlocal left
            left -= 1
            if left == 0 and before:
                die()
            result = real(*arguments, **named)
            if left == 0:
                die()
            return result
        return call
    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    _ring.allocate = counted(_ring.allocate)


def writer(path, plan, say):
    """Writes until it is killed, or leaves; says what is under way, stored, or may go again."""
    rng = random.Random(plan["seed"])
    if plan["die_at_call"]:
        die_at_call(rng)
    store = open_store(path, plan["backend"], segment_bytes=SEGMENT,
                       durability=plan["durability"], capacity_bytes=CAPACITY)
    say("open")
    ring, kept = store.open_ring(), []
    if plan["short_writes"]:                            # a page at a time: long in the middle
        for one in (ring, store._default_ring()):
            one._ring._fault(WRITE, 4096, count=1 << 20)
    until = time.monotonic() + plan["leave_after_s"]
    while time.monotonic() < until:
        pending = []
        for _ in range(rng.randrange(1, 4)):            # several in flight, two rings
            number = rng.randrange(1 << 40)
            keys = chain(rng.randrange(1, BATCH), number)
            source = Blocks(len(keys), keys=keys, scattered=rng.random() < 0.3)
            say("begin", number, len(keys))
            target = rng.choice([ring, store])
            pending.append((number, keys, target.write(keys, source.pool, source.ids)))
        for number, keys, transfer in pending:
            try:
                transfer.wait()
            except TransferError:                       # no room: nothing is promised
                continue
            if plan["sync"]:
                store.sync()
            if store.pin(keys) == len(keys):
                kept.append((number, keys))
                say("stored", number, len(keys))
        while len(kept) > KEPT:
            number, keys = kept.pop(rng.randrange(len(kept)))
            say("dropped", number, len(keys))
            store.unpin(keys)
        say("evicted", store.stats()["evicted_blocks"])
    say("left")
    store.close(drain=True)


def check(path, required, known, seed):
    """In a process of its own: every promise is kept. Returns what is known to be there now."""
    rng = random.Random(seed)
    options = rng.choice([{}, {"durability": "durable", "verify": "never"}])
    found = {bytes(key) for _, _, blocks in admin.list_blocks(path) for key in blocks["key"]}
    with open_store(path, rng.choice(["uring", "threads"]), **options) as store:
        for number, count in required.items():
            keys = chain(count, number)
            assert store.match(keys) == count, f"chain {number}: {store.match(keys)} of {count}"
        present = {}
        for number, count in known.items():
            keys = chain(count, number)
            can = readable(store, keys)
            mine = {key["key"].tobytes() for key in keys}
            assert sum(can) == len(mine & found), f"chain {number}: a header without its payload"
            if mine & found:
                present[number] = count
            assert number not in required or can.all(), f"chain {number} cannot be read"
            found -= mine
        assert not found, f"{len(found)} blocks that nobody wrote"
        stats = store.stats()
        assert stats["headers_damaged"] == 0 and stats["lost_blocks"] == 0, stats
    report = fsck(path, repair=True, remove_unusable=True, dead_after_s=0)
    odd = [finding for finding in report.findings if finding.kind not in ("unusable", "leftover")]
    assert not odd, odd
    removed = admin.gc(path, max_bytes=STORE_BYTES, dead_after_s=0)["removed"]
    lost = {one["file"] for one in removed if one["why"].startswith("writer")}
    return {"known": present, "gone": bool(lost), "blocks": report.blocks}


def forked(run):
    """(pid, read end of a pipe) of a child that calls run(say)."""
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 1 << 20)
    pid = os.fork()
    if pid:
        os.close(ends[1])
        return pid, ends[0]
    status = 1
    try:
        os.close(ends[0])
        run(lambda *words: os.write(ends[1], (" ".join(map(str, words)) + "\n").encode()))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def read_all(fd):
    with open(fd, "rb") as pipe:
        lines = pipe.read().decode().split("\n")
    return [line.split() for line in lines[:-1]]


def plan_of(rng, backends):
    return {"seed": rng.getrandbits(40), "backend": rng.choice(backends),
            "durability": rng.choice(["visible", "visible", "durable"]),
            "sync": False, "die_at_call": rng.random() < 0.3, "short_writes": rng.random() < 0.3,
            "leave_after_s": rng.choice([60, 60, 60, rng.uniform(0, 0.3)]),
            "once_open": rng.random() < 0.7,        # the delay counts from then on
            "delay_s": rng.choice([rng.uniform(0, most) for most in (0.03, 0.4, 1)])}


def kill_all(children, plans):
    """Each at its time."""
    start = {pid: None if plan["once_open"] else time.monotonic()
             for (pid, _), plan in zip(children, plans)}
    waiting = list(zip(children, plans))
    until = time.monotonic() + 30
    while waiting:
        for (pid, fd), plan in list(waiting):
            if start[pid] is None and select.select([fd], [], [], 0)[0]:     # it said something,
                start[pid] = time.monotonic()                               # or is dead
            if time.monotonic() > (until if start[pid] is None else start[pid] + plan["delay_s"]):
                os.kill(pid, signal.SIGKILL)
                waiting.remove(((pid, fd), plan))
        time.sleep(0.0005)


def kill_round(path, rng, backends):
    """Returns (chains that must be there, all chains that were begun, figures)."""
    plans = [plan_of(rng, backends) for _ in range(rng.randrange(1, 4))]
    children = [forked(lambda say, plan=plan: writer(path, plan, say)) for plan in plans]
    required, ever, counts = {}, {}, dict.fromkeys(
        ("killed", "left", "opened", "stored", "dropped", "evicted"), 0)
    kill_all(children, plans)
    for (pid, fd), plan in zip(children, plans):
        status = os.waitpid(pid, 0)[1]
        lines = read_all(fd)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert killed or status == 0, f"a writer failed by itself: {plan}"
        mine, left, evicted = {}, False, 0
        for what, *figures in lines:
            figures = [int(figure) for figure in figures]
            if what == "begin":
                ever[figures[0]] = figures[1]
            elif what == "stored":
                mine[figures[0]] = figures[1]
            elif what == "dropped":
                mine.pop(figures[0])
            elif what == "evicted":
                evicted = figures[0]
            left |= what == "left"
            if what in ("stored", "dropped"):
                counts[what] += 1
        # Who has said that it closes is dead for the others at once, and may be reclaimed.
        if not left:
            required.update(mine)
        counts["killed"] += killed
        counts["evicted"] += evicted
        counts["left"] += left
        counts["opened"] += any(line[0] == "open" for line in lines)
    return required, ever, counts


def run(rounds, seed, folder, log):
    backends = ["threads"] + (["uring"] if _ring.probe("uring") == 0 else [])
    sums, required, known = {}, {}, {}
    for number in range(rounds):
        rng = random.Random(f"{seed} {number}")
        began = time.monotonic()
        more, ever, counts = kill_round(folder, rng, backends)
        required.update(more)
        known.update(ever)
        if not os.path.exists(os.path.join(folder, "kvio.json")):
            continue                                    # killed before there was a store
        time.sleep(0.1)                                 # most of what is in flight lands by then
        pid, fd = forked(lambda say: say(json.dumps(
            check(folder, required, known, rng.random()))))
        status, lines = os.waitpid(pid, 0)[1], read_all(fd)
        assert status == 0, f"round {number}: the check failed"
        result = json.loads(" ".join(lines[-1]))
        # What a killed process had in flight may land after the check has looked (io_uring ends
        # it in the kernel's own time): chains of this round are expected in the next one too.
        known = {**ever, **{int(name): count for name, count in result["known"].items()}}
        required = {} if result["gone"] else required
        counts.update(blocks=result["blocks"], required=len(more))
        for name, value in counts.items():
            sums[name] = sums.get(name, 0) + value
        log(f"round {number}: {time.monotonic() - began:.2f} s, " + ", ".join(
            f"{value} {name}" for name, value in counts.items()))
    return sums


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "little"))
    parser.add_argument("--dir", help="where the store is made (default: the temporary directory)")
    parser.add_argument("--log", help="a line a round goes there (default: nowhere)")
    arguments = parser.parse_args()
    head = f"soak_kill: seed {arguments.seed}, {arguments.rounds} rounds, {build_hash()}"
    print(head, flush=True)
    folder = tempfile.mkdtemp(prefix="kvio-soak-", dir=arguments.dir)
    out = open(arguments.log or os.devnull, "a", buffering=1)
    out.write(head + "\n")
    try:
        sums = run(arguments.rounds, arguments.seed, folder, lambda line: out.write(line + "\n"))
    except BaseException:
        print(f"FAILED: the store is kept at {folder}; again with --seed {arguments.seed} "
              f"--rounds {arguments.rounds}", flush=True)
        raise
    shutil.rmtree(folder)
    last = "passed: " + ", ".join(f"{value} {name}" for name, value in sums.items())
    out.write(last + "\n")
    print(last)


if __name__ == "__main__":
    main()
