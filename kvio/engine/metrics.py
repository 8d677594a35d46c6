"""Figures of one run of the embedded cluster, as plain data."""
import statistics
from collections import Counter

import numpy as np

__all__ = ["figures", "max_over_avg_by_round", "snic_max_over_avg"]


def snic_max_over_avg(rings) -> float | None:
    """Reading balance of storage NICs: max / mean of the bytes read, averaged over the windows (of
    a second) in which any of them read; 1 is perfect, their number is the worst."""
    spans = [ring.busy_windows("read") for ring in rings]
    spans = [(start // window_ns, nbytes) for start, window_ns, nbytes in spans if len(nbytes)]
    if not spans:
        return None
    first = min(start for start, _ in spans)
    table = np.zeros((len(rings), max(start + len(nbytes) for start, nbytes in spans) - first))
    for row, (start, nbytes) in zip(table, spans):
        row[start - first:start - first + len(nbytes)] = nbytes
    table = table[:, table.any(axis=0)]
    return float((table.max(axis=0) / table.mean(axis=0)).mean())


def max_over_avg_by_round(series) -> float | None:
    """Balance of prefill engines: max / mean of what their k-th batches took, averaged over the
    rounds k in which every engine had one. None with one engine, no round, or no figures.

    Engines whose layers wait for one another (expert parallelism) take the slowest one's time in
    each round. Source: DualPath, figure 14."""
    rounds = [each for each in zip(*series) if None not in each and sum(each)]
    if len(series) < 2 or not rounds:
        return None
    return statistics.fmean(max(each) * len(each) / sum(each) for each in rounds)


def figures(cluster, served: dict, jct_s: float) -> dict:
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
                  for path in ("pe", "de", "split", "any")},
        **cluster.counters(),
        "nics": {name: {key: stats[key] for key in
                        ("tx_bytes", "rx_bytes", "doorbells", "work_requests")}
                 for name, stats in nics.items()},
        "doorbells": sum(s["doorbells"] for s in nics.values()),
        "work_requests": sum(s["work_requests"] for s in nics.values()),
        "snics": {},
        "attention_max_over_avg": max_over_avg_by_round(
            [engine.batch_attention_s for engine in cluster.prefill]),
        "snic_max_over_avg": snic_max_over_avg(
            [e.ring for e in cluster.engines if e.ring is not None]),
    }
    if cluster.config.device is not None:
        result["hbm"] = _hbm(cluster, nics)
    for engine in cluster.engines:
        if engine.ring is not None:
            stats = engine.ring.stats()
            result["snics"][engine.name] = {
                "read_bytes": stats["read_bytes"], "write_bytes": stats["write_bytes"],
                "busy_share": stats["read_busy_ns"] / 1e9 / jct_s
                if cluster.config.snic_bytes_per_s else None}
    return result


def _hbm(cluster, nics):
    """Of HBM on a GPU: how KV was copied (how often each way was taken), and what the arithmetic,
    which is the CPU's, had copied beside that."""
    memories, segments = [engine.memory for engine in cluster.engines], Counter()
    for stats in nics.values():
        segments.update({way: each["segments"] for way, each in stats.get("copies", {}).items()})
    return {"device": cluster.config.device, "title": memories[0].title, "ways": dict(+segments),
            "fetched_bytes": sum(memory.fetched_nbytes for memory in memories),
            "written_bytes": sum(memory.written_nbytes for memory in memories)}


def _mean(values):
    values = list(values)
    return statistics.fmean(values) if values else None
