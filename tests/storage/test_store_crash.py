"""kill -9 at random moments of writing: no wrong byte, at most unfinished blocks lost.

KVIO_CRASH_ROUNDS and KVIO_SEED make it longer and another; both are printed.
"""
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from blocks import Blocks, chain, open_store, readable, segments

ROUNDS = int(os.environ.get("KVIO_CRASH_ROUNDS", "8"))
SEED = int(os.environ.get("KVIO_SEED", "0")) or int.from_bytes(os.urandom(3), "little")
BATCH = 12


def writer(path, backend, durability, seed):
    """Runs in the child until it is killed: writes chains, says which are stored or dropped."""
    rng = random.Random(seed)
    alive = []
    with open_store(path, backend, durability=durability, segment_bytes=400_000) as store:
        ring = store.open_ring()
        while True:
            pending = []
            for _ in range(rng.randrange(1, 4)):            # several in flight, two rings
                number = rng.randrange(1 << 30)
                keys = chain(rng.randrange(1, BATCH), number)
                source = Blocks(len(keys), keys=keys, scattered=rng.random() < 0.3)
                target = rng.choice([ring, store])
                pending.append((number, len(keys), target.write(keys, source.pool, source.ids)))
            for number, count, transfer in pending:
                transfer.wait()
                alive.append((number, count))
                print("stored", number, count, flush=True)
            while len(alive) > 6:                           # slots are used again
                number, count = alive.pop(rng.randrange(len(alive)))
                print("dropped", number, count, flush=True)
                store.forget(chain(count, number))


def run_and_kill(path, backend, durability, seed, delay_s):
    """Let a child write for delay_s after its first block; {chain number: blocks} stored."""
    code = (f"import sys; sys.path[:0] = {sys.path!r}; import test_store_crash as t; "
            f"t.writer({str(path)!r}, {backend!r}, {durability!r}, {seed})")
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    first = child.stdout.readline()
    time.sleep(delay_s)
    child.send_signal(signal.SIGKILL)
    lines = (first + child.stdout.read()).split("\n")
    assert child.wait() == -signal.SIGKILL, "the writer must not end by itself"
    stored, ever = {}, {}
    for line in lines[:-1]:                                 # the last one may be torn
        what, number, count = line.split()
        ever[int(number)] = int(count)
        if what == "stored":
            stored[int(number)] = int(count)
        else:
            stored.pop(int(number), None)
    return stored, ever


@pytest.mark.parametrize("durability", ["visible", "durable"])
def test_kill_9_while_writing(tmp_path, backend, durability):
    print(f"KVIO_SEED={SEED} rounds={ROUNDS}")
    rng = random.Random(f"{SEED} {backend} {durability}")
    stored, ever = {}, {}
    for _ in range(max(1, ROUNDS // 2)):
        more, touched = run_and_kill(tmp_path, backend, durability, rng.randrange(1 << 30),
                                     rng.uniform(0, 0.15))
        stored.update(more)
        ever.update(touched)
        with open_store(tmp_path, backend, durability=durability) as store:
            for number, count in stored.items():            # nothing that was complete is lost
                keys = chain(count, number)
                assert store.match(keys) == count, (SEED, number)
                assert readable(store, keys).all(), (SEED, number)
            for number, count in ever.items():              # whatever is found is right
                readable(store, chain(count, number))
            assert store.stats()["headers_damaged"] == 0
            assert store.stats()["lost_blocks"] == 0, "a valid header without its payload"
    assert ever and segments(tmp_path)


def test_everything_a_killed_writer_left_is_whole(tmp_path):
    """Not only what it reported: every header of every segment fits its payload."""
    from read_by_format import blocks, payload
    print(f"KVIO_SEED={SEED}")
    run_and_kill(tmp_path, "threads", "visible", SEED, 0.1)
    found = [where for _, _, _, *where in blocks(str(tmp_path))]
    for path, offset, nbytes, _ in found:
        assert nbytes and offset % 4096 == 0
    sample = np.random.default_rng(SEED).permutation(len(found))[:60]
    assert len(found) and all(payload(*found[i]) is not None for i in sample)
