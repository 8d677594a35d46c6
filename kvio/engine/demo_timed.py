"""The timed part of the demo: policies against Basic, with emulated bandwidths and timed compute.

In real time the same files, rings, queues and bytes as ever, with sleep in place of arithmetic.
In link time (clock.py) the same engines, plans and bytes over soft NICs alone, storage NICs
included (link_storage.py): the figures are then those of links and policies, of no machine.
"""
import asyncio
import contextlib
from dataclasses import dataclass, replace

import numpy as np

from kvio.analysis import alpha_tokens, beta_tokens
from kvio.engine.clock import run_in_link_time
from kvio.engine.cluster import ClusterConfig
from kvio.engine.compute import TimedCompute
from kvio.engine.demo_common import Progress, check_hits, fresh_store, serve, where
from kvio.engine.link_storage import LinkStore
from kvio.engine.oracle import MemoryStore
from kvio.engine.workload import prime_store, timed_sessions, timed_totals
from kvio.errors import InvalidArgument
from kvio.layout import BlockLayout, block_keys
from kvio.memory import BlockPool
from kvio.transfer import Fabric

__all__ = ["RUNS", "TimedSetting", "timed_part"]

BUSY_SHARE = 0.90               # Basic's SNIC must be this busy, else storage was not the limit
# What a run is called, its mode and its policy.
RUNS = {"basic": ("basic", None), "dualpath": ("dualpath", "shorter_queue"),
        "oracle": ("oracle", None), "round_robin": ("dualpath", "round_robin"),
        "split": ("dualpath", "split"), "any_node": ("dualpath", "any_node"),
        "push": ("dualpath", "push")}


@dataclass(frozen=True)
class TimedSetting:
    """A timed run. All bandwidths are emulated, NICs' where they are soft; `why` says how
    they were chosen.

    `context_tokens`, `append_tokens` and `new_tokens` are ranges, or with `spread` > 0 the medians'
    and bounds of lognormal draws (`timed_sessions`). `attention_share` of a request's compute is
    attention, in proportion to the tokens it attends to; with `quota_s` a prefill batch has that
    much of it at most. `batch_tokens` is the PE HBM of a batch (None: the longest request's).
    """

    num_prefill: int = 1
    num_decode: int = 1
    num_agents: int = 32
    num_turns: int = 3
    layout: BlockLayout = BlockLayout(num_layers=8, block_tokens=64, bytes_per_token=512)
    depth: int = 4
    snic_bytes_per_s: int = 100_000_000
    cnic_per_snic: int = 8
    load_compute_ratio: float = 3.0
    decode_s: float = 0.004
    vocabulary: int = 32000
    seed: int = 7
    context_tokens: tuple[int, int] = (3200, 5400)
    append_tokens: tuple[int, int] = (60, 140)
    new_tokens: tuple[int, int] = (12, 20)
    spread: float = 0.0
    attention_time: object = None
    quota_s: float | None = None
    batch_tokens: int | None = None

    why_snic = "a tenth of what one disk gives, so that three emulated SNICs together stay below it"
    why_cnic = "8 CNICs of one SNIC's bandwidth a node, as in the paper's nodes, seen as one"

    def why(self, nic: str) -> str:
        """How the emulated rates were chosen."""
        return f"{self.why_snic}; {self.why_cnic}" if nic == "soft" else self.why_snic

    @property
    def name(self) -> str:
        return f"{self.num_prefill}P{self.num_decode}D"

    def sessions(self) -> list:
        """The agents."""
        return timed_sessions(self.num_agents, self.num_turns, self.vocabulary, self.seed,
                              self.context_tokens, self.append_tokens, self.new_tokens,
                              self.spread)

    def cnic_bytes_per_s(self, nic: str) -> int:
        """Only soft NICs can be paced: 0 for others."""
        return self.snic_bytes_per_s * self.cnic_per_snic if nic == "soft" else 0

    def prefill_s_per_token(self, totals: dict) -> float:
        """Compute per new token at which Basic loads `load_compute_ratio` times as long as it
        computes: hit bytes / SNIC bandwidth = ratio * new tokens * this."""
        load_s = totals["hit_bytes"] / self.snic_bytes_per_s
        return load_s / self.load_compute_ratio / totals["miss_tokens"]

    def thresholds(self, totals: dict) -> dict:
        """The scheduler's alpha (tokens that a SNIC reads in 3 s) and beta (tokens that an engine
        prefills in 5 s, hits included). Source: DualPath §6."""
        compute_s = totals["miss_tokens"] * self.prefill_s_per_token(totals)
        return {"alpha": alpha_tokens(self.snic_bytes_per_s,
                                      sum(self.layout.layer_bytes_per_token)),
                "beta": beta_tokens((totals["hit_tokens"] + totals["miss_tokens"]) / compute_s)}

    def config(self, totals: dict, nic: str, longest: int,
               device: str | None = None) -> ClusterConfig:
        """The cluster. A node's buffer and HBM hold the requests that one SNIC and one GPU keep
        busy, as far as the machine's memory goes."""
        blocks = self.layout.num_blocks(longest)
        return ClusterConfig(
            self.layout, self.num_prefill, self.num_decode, self.snic_bytes_per_s,
            0 if device else self.cnic_bytes_per_s(nic), buffer_blocks=max(640, blocks),
            hbm_blocks=max(1600, blocks), max_tokens=max(8192, longest), depth=self.depth,
            model_name="timed", nic=nic, quota_s=self.quota_s,
            batch_tokens=self.batch_tokens, device=device, **self.thresholds(totals))


def timed_part(setting: TimedSetting = TimedSetting(), folder=None, progress=None,
               runs=("basic", "dualpath"), nic: str = "soft", link_time: bool = False,
               tracers: dict | None = None, device: str | None = None) -> dict:
    """The storage-bound trace on timed stand-in compute, once for each of `runs` (names of RUNS);
    figures of each and its speed-up over Basic. An RDMA NIC (`nic`) is not paced, nor are copies
    where a GPU's memory is HBM (`device`). `tracers` maps names of runs to the `Tracer` that notes
    them."""
    progress, layout = progress or Progress(quiet=True), setting.layout
    for name in runs:
        if name not in RUNS:
            raise InvalidArgument(f"a run is one of {', '.join(RUNS)}, not {name!r}")
    if link_time and (device or nic) != "soft":
        raise InvalidArgument(f"{device or nic!r} has a clock of its own: link time is for soft "
                              "NICs")
    sessions = setting.sessions()
    totals = timed_totals(sessions, layout)
    per_token = setting.prefill_s_per_token(totals)
    longest = max(len(s.context) + sum(len(t.append) + t.num_new_tokens for t in s.turns)
                  for s in sessions)
    config = setting.config(totals, nic, longest, device)

    def compute():
        return TimedCompute(layout, per_token, setting.decode_s, setting.vocabulary,
                            setting.attention_time)

    results, tokens = {}, {}
    for name in runs:
        mode, policy = RUNS[name]
        fabric = Fabric("virtual") if link_time else None
        with _store(mode, folder, layout, fabric, totals) as store:
            progress.line(f"timed {setting.name}, {name}: storing the agents' contexts", False)
            _prime(store, sessions, layout, config)
            counted = progress.start(f"timed {setting.name}, {name}", totals["num_requests"])
            serving = serve(replace(config, policy=policy), mode, store, compute, sessions,
                            counted, fabric=fabric, tracer=(tracers or {}).get(name))
            result, served = run_in_link_time(serving, fabric) if link_time else \
                asyncio.run(serving)
            result["backend"] = store.backend
        check_hits(result, served, sessions, layout)
        results[name] = result
        tokens[name] = {n: [r.generated for r in rs] for n, rs in served.items()}
    return {"modes": results, "tokens_equal": all(t == tokens[runs[0]] for t in tokens.values()),
            **where(results, nic, device),
            **_verdict(results, setting, totals, per_token, device or nic, link_time)}


@contextlib.contextmanager
def _store(mode, folder, layout, fabric, totals):
    if mode == "oracle":
        yield MemoryStore(layout)
    elif fabric is not None:
        with contextlib.closing(LinkStore(layout, fabric, totals["num_blocks"])) as store:
            yield store
    else:
        with fresh_store(folder, layout) as store:
            yield store


def _prime(store, sessions, layout, config):
    compute = TimedCompute(layout, 0.0, 0.0)

    def fill(block, tokens, position):
        for layer in range(layout.num_layers):
            compute.write_records(block[layer], tokens, position, layer)

    if not isinstance(store, LinkStore):
        with BlockPool(layout, 64) as pool:
            prime_store(store, sessions, layout, config.namespace, fill, pool)
        return
    for session in sessions:
        context, size = np.asarray(session.context, np.uint32), layout.block_tokens
        store.prime(block_keys(context, layout, config.namespace(session.name)),
                    lambda i, block: fill(block, context[i * size:(i + 1) * size], i * size))


def _verdict(results, setting, totals, per_token, nic, link_time):
    """Speed-ups, unless Basic's SNIC was idle too often for storage to have been the limit."""
    load_s = totals["hit_bytes"] / setting.snic_bytes_per_s
    verdict = {
        "nodes": setting.name, "num_agents": setting.num_agents,
        **{name: totals[name] for name in ("num_requests", "hit_tokens", "miss_tokens",
                                           "hit_bytes")},
        "clock": "link time" if link_time else "real time",
        "load_compute_ratio": load_s / (totals["miss_tokens"] * per_token),
        "ideal_speedup": min(setting.load_compute_ratio,
                             float(setting.num_prefill + setting.num_decode)),
        **setting.thresholds(totals),
        "emulated": {"snic_bytes_per_s": setting.snic_bytes_per_s,
                     "cnic_bytes_per_s": setting.cnic_bytes_per_s(nic) or None,
                     "prefill_s_per_new_token": per_token, "decode_step_s": setting.decode_s,
                     "why": setting.why(nic)}}
    if "basic" in results and len(results) > 1:
        busy = [s["busy_share"] for name, s in results["basic"]["snics"].items()
                if name.startswith("pe")]
        verdict["basic_snic_busy"] = sum(busy) / len(busy)
        verdict["void"] = verdict["basic_snic_busy"] < BUSY_SHARE
        ratios = {name: None if verdict["void"] else results["basic"]["jct_s"] / result["jct_s"]
                  for name, result in results.items() if name != "basic"}
        verdict["speedups"] = ratios
        verdict["speedup"] = next(iter(ratios.values()))
    return verdict
