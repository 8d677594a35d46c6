"""Figures of one run of the embedded cluster, as plain data."""
import asyncio
import statistics

__all__ = ["SnicSampler", "figures"]


class SnicSampler:
    """Bytes read by each storage NIC in windows of a second."""

    def __init__(self, cluster, window_s: float = 1.0):
        self._rings = [e.ring for e in cluster.engines if e.ring is not None]
        self._window_s, self._task, self.windows = window_s, None, []

    async def __aenter__(self):
        self._task = asyncio.ensure_future(self._sample())
        return self

    async def __aexit__(self, *exc):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _sample(self):
        before = self._read()
        while True:
            await asyncio.sleep(self._window_s)
            now = self._read()
            self.windows.append([b - a for a, b in zip(before, now, strict=True)])
            before = now

    def _read(self):
        return [ring.stats()["read_bytes"] for ring in self._rings]

    def max_over_avg(self) -> float | None:
        """Mean over the windows in which any SNIC read; 1 is perfect balance."""
        ratios = [max(w) / (sum(w) / len(w)) for w in self.windows if sum(w)]
        return statistics.fmean(ratios) if ratios else None


def figures(cluster, served: dict, jct_s: float, sampler: SnicSampler | None) -> dict:
    """Everything the demo reports of a mode, as plain data.

    jct_s: until the last agent had its last token and its blocks were stored. ttft: arrival to
    the first token, queueing included; ttst: first to second token; tpot: mean gap after that.
    """
    requests = [r for session in served.values() for r in session]
    gaps = [b - a for r in requests for a, b in zip(r.token_times[1:], r.token_times[2:])]
    nics = {e.name: e.nic.stats() for e in cluster.engines}
    result = {
        "jct_s": jct_s,
        "num_requests": len(requests),
        "ttft_s": statistics.fmean(r.token_times[0] - r.arrived_s for r in requests),
        "ttst_s": _mean(r.token_times[1] - r.token_times[0] for r in requests
                        if len(r.token_times) > 1),
        "tpot_s": _mean(gaps),
        "prompt_tokens": sum(r.num_prompt_tokens for r in requests),
        "hit_tokens": sum(r.num_hit_tokens for r in requests),
        "generated_tokens": sum(len(r.generated) for r in requests),
        "paths": {path: sum(r.path == path and r.num_hit_tokens > 0 for r in requests)
                  for path in ("pe", "de")},
        "replans": sum(r.num_replans for r in requests),
        "persist_failures": sum(e.num_persist_failures for e in cluster.decode),
        "nics": {name: {key: stats[key] for key in
                        ("tx_bytes", "rx_bytes", "doorbells", "work_requests")}
                 for name, stats in nics.items()},
        "doorbells": sum(s["doorbells"] for s in nics.values()),
        "work_requests": sum(s["work_requests"] for s in nics.values()),
        "snics": {},
        "snic_max_over_avg": sampler.max_over_avg() if sampler else None,
    }
    for engine in cluster.engines:
        if engine.ring is not None:
            stats = engine.ring.stats()
            result["snics"][engine.name] = {
                "read_bytes": stats["read_bytes"], "write_bytes": stats["write_bytes"],
                "busy_share": stats["read_busy_ns"] / 1e9 / jct_s
                if cluster.config.snic_bytes_per_s else None}
    return result


def _mean(values):
    values = list(values)
    return statistics.fmean(values) if values else None
