"""KV fills the link; what becomes of a small collective beside it, with two classes and with one.

A test of the arrangement, not of speed: all figures are compared with those of the idle link in
the same run, and with one class for both the same measurement has to come out bad. The machine's
speed changes while we measure, so KV runs and pauses in turn, some tenths of a second each, and
what is compared are neighbours.
"""
import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest

from kvio.layout import WRITE
from kvio.transfer import COLLECTIVE, KV, Nic
from lab.guest import load
from lab.guest.wire import shaped
from nics import requests

MBIT_PER_S = int(os.environ.get("KVIO_LAB_MBIT", 24))
FILLED = 0.8                            # of the rate, by KV's payload alone
# Few and large: the load's Python runs on the same emulated processors. Of several queue pairs, for
# the kernel lets each have 64 packets on the way: 90 ms of this link.
PEERS, DEPTH, KV_NBYTES, SMALL_NBYTES = 4, 2, 196608, 64
RUNS, WARM, IDLE = 3, 2, 100            # runs; WRITEs before a block, and in an idle one
TWO, ONE = (COLLECTIVE, 10, 100), (KV, 2, 5)    # class; blocks with KV in a run, WRITEs in each


class Load:
    """load.py beside us."""

    def __init__(self, how):
        self._process = subprocess.Popen(
            [sys.executable, load.__file__, how, *map(str, (PEERS, DEPTH, KV_NBYTES))],
            text=True, bufsize=1,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def go(self):
        print("go", file=self._process.stdin)
        assert self._process.stdout.readline() == "going\n"
        time.sleep(0.3)                     # the queues fill

    def stop(self) -> float:
        """What KV got, in Mbit/s, from the first post until nothing was left on the link."""
        print("stop", file=self._process.stdin)
        said = json.loads(self._process.stdout.readline())
        return said["nbytes"] * 8e-6 / said["seconds"]

    def __enter__(self):
        return self

    def __exit__(self, *wrong):
        self._process.communicate()


def latencies(peer, wrs, traffic_class, count):
    """Of one small WRITE after the other, from the doorbell to the completion, in ms: the figures
    of the transfers themselves, without the time that Python takes around them."""
    taken = []
    for _ in range(WARM + count):
        transfer = peer.write(wrs, traffic_class)
        transfer.wait()
        stats = transfer.stats
        taken.append((stats["completed_ns"] - stats["submitted_ns"]) / 1e6)
        time.sleep(0.006)                   # most of the processor is KV's
    return taken[WARM:]


def blocks(beside, peer, wrs, traffic_class, wanted, count):
    """Idle and beside KV in turn: what was found in `wanted` blocks beside KV, with the idle link
    before each; and in those in which KV did not fill the link: there a busy machine was measured,
    and they say nothing."""
    good, bad = [], []
    before = latencies(peer, wrs, COLLECTIVE, IDLE)
    while len(good) < wanted and len(bad) <= 2 * wanted:
        beside.go()
        loaded = latencies(peer, wrs, traffic_class, count)
        mbit_per_s = beside.stop()
        after = latencies(peer, wrs, COLLECTIVE, IDLE)
        (good if mbit_per_s >= FILLED * MBIT_PER_S else bad).append({
            "idle": before, "loaded": loaded, "Mbit/s": round(mbit_per_s, 1),
            "ratio": statistics.median(loaded) / statistics.median(before + after)})
        before = after
    return good, bad


def summary(good, bad):
    """Latencies in ms; `ratios`: p50 of neighbours, in the middle block; p99 of all."""
    idle, loaded = (np.concatenate([block[of] for block in good]) for of in ("idle", "loaded"))
    figures = {of: {f"p{part}": round(float(np.percentile(taken, part)), 3)
                    for part in (50, 90, 99, 100)} for of, taken in (("idle", idle),
                                                                     ("loaded", loaded))}
    return figures | {
        "ratios": {"p50": round(statistics.median(block["ratio"] for block in good), 3),
                   "p99": round(figures["loaded"]["p99"] / figures["idle"]["p99"], 3)},
        "KV Mbit/s": [block["Mbit/s"] for block in good],
        "discarded": [[block["Mbit/s"], round(block["ratio"], 3)] for block in bad]}


def one_run(beside, peer, wrs):
    """In two classes, and in one."""
    with shaped("class", f"{MBIT_PER_S}mbit"):
        found = {name: blocks(beside, peer, wrs, *how) for name, how in (
            ("two classes", TWO), ("one class", ONE))}
    for name, (good, bad) in found.items():
        if len(bad) > 2 * len(good):
            pytest.fail(f"KV does not fill the link, {name}: this machine is too busy: "
                        f"{json.dumps(summary(good, bad) if good else len(bad))}")
    return {name: summary(*both) for name, both in found.items()}


@pytest.mark.parametrize("how", ["write", "read"])
def test_collectives_beside_kv(how, capsys, monkeypatch):
    """KV by WRITE fills a -> b; by READ, the responses of b fill b -> a. The collective goes the
    same way."""
    monkeypatch.setenv("KVIO_IB_TIMEOUT", "18")     # 1 s: a full queue is not a lost packet
    with Nic.open("verbs:rxe0", name="a") as a, Nic.open("verbs:rxe1", name="b") as b:
        listener = b.listen("isolation")
        peer = a.connect("isolation")
        sender, from_, to = (peer, a, b) if how == "write" else (listener.accept(), b, a)
        near, far = (nic.register(np.zeros(4096, np.uint8)) for nic in (from_, to))
        wrs = requests(WRITE, near, far, 0, 0, SMALL_NBYTES)
        with Load(how) as beside:
            runs = [one_run(beside, sender, wrs) for _ in range(RUNS)]
    ratios = {name: {part: statistics.median(run[name]["ratios"][part] for run in runs)
                     for part in ("p50", "p99")} for name in runs[0]}
    with capsys.disabled():
        print("\n" + json.dumps({"KV by": how, "Mbit/s": MBIT_PER_S, "medians": ratios,
                                 "runs": runs}))
    assert ratios["two classes"]["p50"] <= 1.2
    assert ratios["two classes"]["p99"] <= 3
    assert ratios["one class"]["p50"] >= 50
