"""What the parts of the demo share: a store of their own, serving, progress, the check of hits."""
import contextlib
import sys
import tempfile
import time

from kvio.engine.clock import now_s
from kvio.engine.cluster import Cluster
from kvio.engine.metrics import figures
from kvio.engine.request import predicted_hit_tokens
from kvio.engine.workload import run_sessions
from kvio.storage import BlockStore

__all__ = ["Progress", "check_hits", "fresh_store", "serve", "where"]


class Progress:
    """One line on stderr that says where the run is."""

    def __init__(self, quiet: bool):
        self._quiet, self._tty = quiet, sys.stderr.isatty()

    def start(self, what: str, total: int):
        """Begin a counted stretch; returns the function that counts one."""
        begin, count = time.monotonic(), 0

        def one():
            nonlocal count
            count += 1
            if self._tty or count == total:
                self.line(f"{what}: {count} of {total} turns, {time.monotonic() - begin:.1f} s",
                          keep=count == total)

        return one

    def line(self, text: str, keep: bool = True):
        if not self._quiet:
            end = "\n" if keep or not self._tty else ""
            print(f"\r{text}\033[K" if self._tty else text, end=end, file=sys.stderr, flush=True)


async def serve(config, mode, store, make_compute, sessions, progress, in_step=False,
                fabric=None, tracer=None):
    """Serve all sessions on a cluster of its own: (figures, requests by session)."""
    computes = []

    def tracked():
        computes.append(make_compute())
        return computes[-1]

    async with Cluster(config, mode, store, tracked, fabric, tracer) as cluster:
        begin = now_s()
        served = await run_sessions(cluster, sessions, progress, in_step)
        result = figures(cluster, served, now_s() - begin)
    result["kv_errors"] = sum(getattr(c, "num_kv_errors", 0) for c in computes)
    return result, served


@contextlib.contextmanager
def fresh_store(folder, layout, **options):
    """A store in a directory of its own, which goes with it."""
    options = {name: value for name, value in options.items() if value is not None}
    with tempfile.TemporaryDirectory(prefix="kvio-demo-", dir=folder) as path, \
            BlockStore.open(path, layout, **options) as store:
        yield store


def check_hits(result, served, sessions, layout):
    """Hits of every request against the trace's own prediction."""
    predicted = {s.name: predicted_hit_tokens(s, layout) for s in sessions}
    found = {name: [r.num_hit_tokens for r in requests] for name, requests in served.items()}
    result["predicted_hit_tokens"] = sum(map(sum, predicted.values()))
    result["hits_as_predicted"] = predicted == found


def where(results, nic, device):
    """What carried KV, and where HBM was, from the figures of any mode: for the report."""
    if device is None:
        return {"nic": nic, "hbm": "host memory"}
    title = next(iter(results.values()))["hbm"]["title"]
    return {"nic": device, "hbm": f"the memory of {device} ({title})"}
