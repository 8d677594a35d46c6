"""`kvio demo --collectives`: what a traffic class of their own is worth to collectives.

The reference engine serves agents while its decode engines exchange bytes in every step, twice:
all on the KV class, then collectives on theirs. Links are emulated, and KV saturates them; the
run is in link time (clock.py), so its figures depend on the bytes and the arbiter alone. On an
RDMA NIC it is the same run in real time, and the fabric decides.
"""
import asyncio
from dataclasses import dataclass

import numpy as np

from kvio.engine.clock import now_s, run_in_link_time
from kvio.engine.cluster import Cluster, ClusterConfig
from kvio.engine.collectives import CollectiveSetting
from kvio.engine.compute import TimedCompute
from kvio.engine.metrics import figures
from kvio.engine.workload import run_sessions, timed_sessions
from kvio.errors import InvalidArgument
from kvio.layout import BlockLayout
from kvio.transfer import COLLECTIVE, KV, Fabric, TrafficClass

__all__ = ["CollectivesSetting", "collectives_part"]


@dataclass(frozen=True)
class CollectivesSetting:
    """There is no store: all KV is computed, and crosses the links twice, prefill to decode node
    and there into HBM. `why` says how the rates were chosen."""

    num_prefill: int = 2
    num_decode: int = 2
    num_agents: int = 12
    num_turns: int = 2
    context_tokens: tuple[int, int] = (1000, 2000)
    layout: BlockLayout = BlockLayout(num_layers=8, block_tokens=64, bytes_per_token=512)
    cnic_bytes_per_s: int = 400_000_000
    prefill_s_per_token: float = 2e-6
    decode_s: float = 0.004
    nbytes: int = 64 << 10
    num_per_step: int = 16
    vocabulary: int = 32000
    collective: TrafficClass = COLLECTIVE
    kv: TrafficClass = KV

    why = ("so that KV of 4 KiB a token keeps the decode nodes' links busy; 16 exchanges a step, "
           "as dispatch and combine of 8 layers")

    def config(self, collective: TrafficClass, nic: str) -> ClusterConfig:
        """The cluster whose collectives travel in the class `collective`."""
        longest = self.context_tokens[1] + self.num_turns * 160
        blocks = self.num_agents * self.layout.num_blocks(longest)
        return ClusterConfig(
            self.layout, self.num_prefill, self.num_decode,
            cnic_bytes_per_s=self.cnic_bytes_per_s if nic == "soft" else 0,
            buffer_blocks=blocks, hbm_blocks=blocks, max_tokens=longest, depth=4,
            model_name="collectives", nic=nic, kv_class=self.kv,
            collectives=CollectiveSetting(self.nbytes, self.num_per_step, collective))


def collectives_part(setting: CollectivesSetting = CollectivesSetting(), nic: str = "soft",
                     progress=None) -> dict:
    """Figures of "one_class" and "two_classes", and how they compare."""
    sessions = timed_sessions(setting.num_agents, setting.num_turns, setting.vocabulary,
                              context_tokens=setting.context_tokens)
    results, tokens = {}, {}
    for mode, collective in ("one_class", setting.kv), ("two_classes", setting.collective):
        if progress is not None:
            progress.line(f"collectives, {mode.replace('_', ' ')}")
        results[mode], tokens[mode] = _run(setting, collective, nic, sessions)
    one, two = results["one_class"], results["two_classes"]
    ratios = {f"{key}_ratio": one["collective"][key] / two["collective"][key]
              for key in ("p50_s", "p99_s")}
    return {"modes": results, "tokens_equal": tokens["one_class"] == tokens["two_classes"],
            "nodes": f"{setting.num_prefill}P{setting.num_decode}D", "nic": nic,
            "num_agents": setting.num_agents, "nbytes": setting.nbytes,
            "num_per_step": setting.num_per_step, **ratios,
            "tpot_ratio": one["tpot_s"] / two["tpot_s"],
            "jct_ratio": one["jct_s"] / two["jct_s"],
            "emulated": {"clock": "link time", "cnic_bytes_per_s": setting.cnic_bytes_per_s,
                         "decode_step_s": setting.decode_s,
                         "prefill_s_per_new_token": setting.prefill_s_per_token,
                         "why": setting.why} if nic == "soft" else {"clock": "real time"}}


def _run(setting, collective, nic, sessions):
    computes, config = [], setting.config(collective, nic)

    def make_compute():
        computes.append(TimedCompute(setting.layout, setting.prefill_s_per_token,
                                     setting.decode_s, setting.vocabulary))
        return computes[-1]

    fabric = Fabric("virtual") if nic == "soft" else None
    serving = _serve(Cluster(config, "none", None, make_compute, fabric), sessions)
    result, served = run_in_link_time(serving, fabric) if fabric else asyncio.run(serving)
    result["kv_errors"] = sum(compute.num_kv_errors for compute in computes)
    return result, {name: [r.generated for r in requests] for name, requests in served.items()}


async def _serve(cluster, sessions):
    async with cluster:
        for i in range(len(cluster.decode)):        # alone: no KV, and one engine at a time
            await cluster.collectives.of(i)()
        alone = cluster.collectives.take_latencies_s()
        before, begin = _link_ns(cluster), now_s()
        served = await run_sessions(cluster, sessions)
        jct_s = now_s() - begin
        result = figures(cluster, served, jct_s)
        result["collective"] = _latencies(cluster.collectives.take_latencies_s(), alone)
        result["collective_errors"] = cluster.collectives.num_errors()
        busy = [(after - start) / 1e9 / jct_s
                for start, after in zip(before, _link_ns(cluster), strict=True)]
        result["link_busy_share"] = max(busy) if cluster.config.cnic_bytes_per_s else None
    return result, served


def _link_ns(cluster):
    """Time that each decode node's receiving port has been busy, ns."""
    return [engine.nic.stats()["rx_busy_ns"] for engine in cluster.decode]


def _latencies(seconds, alone):
    if not seconds:
        raise InvalidArgument("no request decoded a token beyond its first: nothing was exchanged")
    p50, p99 = np.percentile(seconds, [50, 99])
    return {"num": len(seconds), "p50_s": float(p50), "p99_s": float(p99),
            "max_s": max(seconds), "alone_p50_s": float(np.median(alone))}
