"""KV fills the link; what becomes of a small collective beside it, with two classes and with one.

A test of the arrangement, not of speed: all figures are compared with those of the idle link in
the same run, and with one class for both the same measurement has to come out bad.
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

RATE, MBIT_PER_S = "24mbit", 24
DEPTH, KV_NBYTES, SMALL_NBYTES = 8, 65536, 64
RUNS, ATTEMPTS, COUNT = 3, 6, 300


class Load:
    """load.py beside us."""

    def __init__(self, how):
        self._process = subprocess.Popen(
            [sys.executable, load.__file__, how, str(DEPTH), str(KV_NBYTES)], text=True, bufsize=1,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def go(self):
        print("go", file=self._process.stdin)
        assert self._process.stdout.readline() == "going\n"
        time.sleep(0.5)                     # the queues fill

    def stop(self) -> float:
        """What KV got, in Mbit/s."""
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
    for _ in range(count):
        transfer = peer.write(wrs, traffic_class)
        transfer.wait()
        stats = transfer.stats
        taken.append((stats["completed_ns"] - stats["submitted_ns"]) / 1e6)
        time.sleep(0.003)
    return taken


def figures(taken):
    return {f"p{part}": round(float(np.percentile(taken, part)), 3) for part in (50, 90, 99)} | {
        "max": round(max(taken), 3), "count": len(taken)}


def one_run(beside, sender, wrs):
    """Idle, beside KV in two classes, and in one."""
    found = {}
    with shaped("class", RATE):
        latencies(sender, wrs, COLLECTIVE, 20)              # warm
        found["idle"] = figures(latencies(sender, wrs, COLLECTIVE, COUNT))
        beside.go()
        found["two classes"] = figures(latencies(sender, wrs, COLLECTIVE, COUNT))
        found["one class"] = figures(latencies(sender, wrs, KV, COUNT // 10))
        found["KV Mbit/s"] = round(beside.stop(), 1)
    return found


def valid(tried):
    """A run in which KV did not fill the link has measured something else: a busy machine."""
    return [run for run in tried if run["KV Mbit/s"] > 0.8 * MBIT_PER_S]


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
            tried = []
            while len(tried) < ATTEMPTS and len(valid(tried)) < RUNS:
                tried.append(one_run(beside, sender, wrs))
    runs = valid(tried)
    assert len(runs) == RUNS, f"KV does not fill the link: this machine is too busy ({tried})"
    ratios = {f"{case} {part}": statistics.median(run[case][part] / run["idle"][part]
                                                  for run in runs)
              for case in ("two classes", "one class") for part in ("p50", "p99")}
    with capsys.disabled():
        print("\n" + json.dumps({"KV by": how, "runs": runs, "median of ratios":
                                 {name: round(ratio, 2) for name, ratio in ratios.items()}}))
    assert ratios["two classes p50"] <= 1.2
    assert ratios["two classes p99"] <= 3
    assert ratios["one class p50"] >= 50
