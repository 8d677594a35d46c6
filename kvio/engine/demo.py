"""`kvio demo`: the same tokens in every mode, with real bytes, and two read paths against one.

(a) A real language model serves a small agent conversation in the modes none, basic, dualpath.
The real model may be a seeded one, which costs next to nothing (demo_model.py).
(b) Timed stand-in compute serves a longer, storage-bound trace: the same files, rings, queues and
bytes, with sleep in place of arithmetic and emulated bandwidths, so that on two cores the storage
NICs are what limits, as they do in the clusters that DualPath is for.
(c) On request, collectives beside KV, in one traffic class and in two (demo_collectives.py).
"""
import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass, replace

import numpy as np

from kvio.engine.cluster import Cluster, ClusterConfig
from kvio.engine.compute import ModelCompute, TimedCompute
from kvio.engine.demo_collectives import collectives_part
from kvio.engine.demo_model import check_model, load_model, one_blas_thread
from kvio.engine.metrics import figures
from kvio.engine.report import render
from kvio.engine.request import predicted_hit_tokens
from kvio.engine.workload import prime_store, run_sessions, timed_sessions, timed_totals
from kvio.errors import InvalidArgument
from kvio.layout import BlockLayout
from kvio.memory import BlockPool
from kvio.storage import BlockStore
from kvio.transfer import Nic

__all__ = ["TimedSetting", "real_part", "run", "timed_part"]

CLOSE_LOGITS = 1e-3             # a first mismatch is a tie, not an error, below this gap
DEFAULT_MODEL = "smollm2"
NO_TIE = " (NOT a tie)"
BUSY_SHARE = 0.90               # Basic's SNIC must be this busy, else storage was not the limit


@dataclass(frozen=True)
class TimedSetting:
    """The timed run. All bandwidths are emulated; `why` says how they were chosen."""

    num_prefill: int = 1
    num_decode: int = 1
    num_agents: int = 16
    num_turns: int = 5
    layout: BlockLayout = BlockLayout(num_layers=8, block_tokens=64, bytes_per_token=512)
    depth: int = 4
    snic_bytes_per_s: int = 100_000_000
    cnic_per_snic: int = 8
    load_compute_ratio: float = 3.0
    decode_s: float = 0.004
    vocabulary: int = 32000

    why = ("a tenth of what one disk gives, so that three emulated SNICs together stay below it; "
           "8 CNICs of one SNIC's bandwidth a node, as in the paper's nodes, seen as one")

    @property
    def name(self) -> str:
        return f"{self.num_prefill}P{self.num_decode}D"

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
        alpha = 3 * self.snic_bytes_per_s / sum(self.layout.layer_bytes_per_token)
        compute_s = totals["miss_tokens"] * self.prefill_s_per_token(totals)
        beta = 5 * (totals["hit_tokens"] + totals["miss_tokens"]) / compute_s
        return {"alpha": int(alpha), "beta": int(beta)}


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


async def _serve(config, mode, store, make_compute, sessions, progress, in_step=False):
    computes = []

    def tracked():
        computes.append(make_compute())
        return computes[-1]

    async with Cluster(config, mode, store, tracked) as cluster:
        begin = time.monotonic()
        served = await run_sessions(cluster, sessions, progress, in_step)
        result = figures(cluster, served, time.monotonic() - begin)
    result["kv_errors"] = sum(getattr(c, "num_kv_errors", 0) for c in computes)
    return result, served


@contextlib.contextmanager
def _fresh_store(folder, layout, **options):
    options = {name: value for name, value in options.items() if value is not None}
    with tempfile.TemporaryDirectory(prefix="kvio-demo-", dir=folder) as path, \
            BlockStore.open(path, layout, **options) as store:
        yield store


def _check_hits(result, served, sessions, layout):
    """Hits of every request against the trace's own prediction."""
    predicted = {s.name: predicted_hit_tokens(s, layout) for s in sessions}
    found = {name: [r.num_hit_tokens for r in requests] for name, requests in served.items()}
    result["predicted_hit_tokens"] = sum(map(sum, predicted.values()))
    result["hits_as_predicted"] = predicted == found


def compare_tokens(reference: dict, other: dict) -> list[str]:
    """First mismatches between two runs' generated tokens, one line each; [] when equal.

    After a first mismatch a session's contexts differ, so nothing later is compared.
    """
    lines = []
    for name, requests in reference.items():
        for turn, (a, b) in enumerate(zip(requests, other[name], strict=True)):
            if a.generated != b.generated:
                i = next(i for i, (x, y) in enumerate(zip(a.generated, b.generated)) if x != y)
                gap = min(a.margins[i], b.margins[i])
                lines.append(f"{name} turn {turn + 1} token {i + 1}: {a.generated[i]} against "
                             f"{b.generated[i]}, top two logits {gap:.2g} apart"
                             + ("" if gap < CLOSE_LOGITS else NO_TIE))
                break
    return lines


def real_part(folder=None, exact: bool = False, progress=None, modes=("none", "basic", "dualpath"),
              num_turns: int | None = None, num_new_tokens: int | None = None,
              model: str = "smollm2", nic: str = "soft") -> dict:
    """A language model over a small conversation of agents; figures per mode.

    The agents go in step, so that each round's requests are routed while the others' reads are
    still queued and both read paths are taken. `model`: see `load_model`; `nic`: "soft", or an
    RDMA NIC for all engines.
    """
    progress = progress or Progress(quiet=True)
    limited = one_blas_thread(check_model(model) == "smollm2")
    progress.line(f"loading {model}")
    made = load_model(model, exact, num_turns, num_new_tokens)
    layout, sessions = made.layout, made.sessions
    total = sum(len(s.turns) for s in sessions)
    config = ClusterConfig(layout, buffer_blocks=made.num_blocks, hbm_blocks=made.num_blocks,
                           max_tokens=made.max_tokens, model_name=made.name, nic=nic)
    results, tokens = {}, {}
    with limited:
        for mode in modes:
            counted = progress.start(f"{model}, {mode}", total)
            with contextlib.ExitStack() as stack:
                store = None if mode == "none" else stack.enter_context(
                    _fresh_store(folder, layout, segment_bytes=made.segment_bytes))
                result, served = asyncio.run(_serve(config, mode, store, lambda: ModelCompute(
                    made.model, layout), sessions, counted, in_step=True))
            if mode != "none":
                _check_hits(result, served, sessions, layout)
                result["backend"] = store.backend
            results[mode], tokens[mode] = result, served
    mismatches = {m: compare_tokens(tokens[modes[0]], tokens[m]) for m in modes[1:]}
    first = tokens[modes[0]][sessions[0].name][-1]
    return {"modes": results, "mismatches": mismatches, "model": made.title, "nic": nic,
            "tokens_equal": not any(mismatches.values()),
            "only_ties": not any(line.endswith(NO_TIE) for lines in mismatches.values()
                                 for line in lines),
            "generated": {name: [r.generated for r in requests]
                          for name, requests in tokens[modes[0]].items()},
            "sample": {"agent": sessions[0].name, "text": made.text(first.generated)}}


def timed_part(setting: TimedSetting = TimedSetting(), folder=None, progress=None,
               modes=("basic", "dualpath"), nic: str = "soft") -> dict:
    """The storage-bound trace on timed stand-in compute; figures per mode and the speed-up. An
    RDMA NIC (`nic`) is not paced."""
    progress, layout = progress or Progress(quiet=True), setting.layout
    sessions = timed_sessions(setting.num_agents, setting.num_turns, setting.vocabulary)
    totals = timed_totals(sessions, layout)
    per_token = setting.prefill_s_per_token(totals)
    config = ClusterConfig(
        layout, setting.num_prefill, setting.num_decode, setting.snic_bytes_per_s,
        setting.cnic_bytes_per_s(nic), buffer_blocks=640, hbm_blocks=1600, depth=setting.depth,
        model_name="timed", nic=nic, **setting.thresholds(totals))
    results, tokens = {}, {}
    for mode in modes:
        with _fresh_store(folder, layout) as store:
            progress.line(f"timed {setting.name}, {mode}: storing the agents' contexts", False)
            _prime(store, sessions, layout, config)
            counted = progress.start(f"timed {setting.name}, {mode}", totals["num_requests"])
            result, served = asyncio.run(_serve(
                config, mode, store, lambda: TimedCompute(layout, per_token, setting.decode_s,
                                                          setting.vocabulary), sessions, counted))
            result["backend"] = store.backend
        _check_hits(result, served, sessions, layout)
        results[mode] = result
        tokens[mode] = {n: [r.generated for r in rs] for n, rs in served.items()}
    return {"modes": results, "tokens_equal": all(t == tokens[modes[0]] for t in tokens.values()),
            **_verdict(results, setting, totals, per_token, nic)}


def _prime(store, sessions, layout, config):
    compute = TimedCompute(layout, 0.0, 0.0)

    def fill(block, tokens, position):
        for layer in range(layout.num_layers):
            compute.write_records(block[layer], tokens, position, layer)

    with BlockPool(layout, 64) as pool:
        prime_store(store, sessions, layout, config.namespace, fill, pool)


def _verdict(results, setting, totals, per_token, nic):
    """Speed-up, unless Basic's SNIC was idle too often for storage to have been the limit."""
    load_s = totals["hit_bytes"] / setting.snic_bytes_per_s
    verdict = {
        "nodes": setting.name, "nic": nic, "num_agents": setting.num_agents, **totals,
        "load_compute_ratio": load_s / (totals["miss_tokens"] * per_token),
        "ideal_speedup": min(setting.load_compute_ratio,
                             float(setting.num_prefill + setting.num_decode)),
        **setting.thresholds(totals),
        "emulated": {"snic_bytes_per_s": setting.snic_bytes_per_s,
                     "cnic_bytes_per_s": setting.cnic_bytes_per_s(nic) or None,
                     "prefill_s_per_new_token": per_token, "decode_step_s": setting.decode_s,
                     "why": setting.why}}
    if "basic" in results and "dualpath" in results:
        busy = [s["busy_share"] for name, s in results["basic"]["snics"].items()
                if name.startswith("pe")]
        verdict["basic_snic_busy"] = sum(busy) / len(busy)
        verdict["void"] = verdict["basic_snic_busy"] < BUSY_SHARE
        verdict["speedup"] = None if verdict["void"] else \
            results["basic"]["jct_s"] / results["dualpath"]["jct_s"]
    return verdict


def run(arguments) -> int:
    """The command. 0 when all tokens agree, every hit was predicted and no byte was wrong."""
    progress = Progress(quiet=arguments.quiet)
    if arguments.dir is not None and not os.path.isdir(arguments.dir):
        raise InvalidArgument(f"--dir {arguments.dir}: there is no such directory; make it first")
    if arguments.turns is not None and arguments.turns < 1:
        raise InvalidArgument(f"--turns must be at least 1, not {arguments.turns}")
    settings = list(_settings(arguments))       # refused now, and not after the real model
    nic, model = arguments.nic, check_model(arguments.model or DEFAULT_MODEL)
    report, parts = {}, _wanted_parts(arguments, model)
    _refuse_unused(arguments, parts)
    Nic.open(nic).close()
    if "real" in parts:
        real = real_part(arguments.dir, arguments.exact, progress, model=model, nic=nic)
        report["real"] = {**real.pop("modes"), "summary": real}
    if "timed" in parts:
        timed = [timed_part(setting, arguments.dir, progress, nic=nic) for setting in settings]
        for part in timed:
            name = "timed" if part is timed[0] else f"timed_{part['nodes'].lower()}"
            report[name] = {**part.pop("modes"), "summary": part}
    if "collectives" in parts:
        part = collectives_part(nic=nic, progress=progress)
        report["collectives"] = {**part.pop("modes"), "summary": part}
    report["tokens_equal"] = all(p["tokens_equal"] for p in _summaries(report))
    report["ok"] = all(p["tokens_equal"] or p.get("only_ties", False)
                       for p in _summaries(report)) and all(
        f["kv_errors"] == f.get("collective_errors", 0) == 0 and f.get("hits_as_predicted", True)
        for f in _modes(report))
    print(json.dumps(report, indent=2) if arguments.json else render(report))
    return 0 if report["ok"] else 1


def _wanted_parts(arguments, model):
    """--collectives goes alone, or beside what --only names. A seeded model is for machines where
    a timed run would measure their slowness, so that one goes alone as well."""
    if arguments.only:
        return {*arguments.only, *(["collectives"] if arguments.collectives else [])}
    if arguments.collectives:
        return {"collectives"}
    return {"real", "timed"} if model == DEFAULT_MODEL else {"real"}


def _refuse_unused(arguments, parts):
    """What was asked for and would not be done."""
    for option, given, part in (
            ("--model", arguments.model, "real"), ("--exact", arguments.exact, "real"),
            ("--nodes", arguments.nodes, "timed"), ("--turns", arguments.turns, "timed")):
        if given and part not in parts:
            raise InvalidArgument(f"{option} is of the part {part}, and only {', '.join(parts)} "
                                  f"would run: add --only {part}, or leave {option} out")


def _settings(arguments):
    wanted = [nodes.upper() for nodes in arguments.nodes or ("1P1D", "1P2D")]
    if len(set(wanted)) != len(wanted):
        raise InvalidArgument(f"--nodes names a setting twice: {', '.join(wanted)}")
    for nodes in wanted:
        counts = re.fullmatch("([1-9][0-9]*)P([1-9][0-9]*)D", nodes)
        if not counts:
            raise InvalidArgument("--nodes takes counts of prefill and decode nodes, like 1P2D, "
                                  f"not {nodes!r}")
        yield replace(TimedSetting(), num_prefill=int(counts[1]), num_decode=int(counts[2]),
                      num_turns=arguments.turns or TimedSetting.num_turns)


def _parts(report):
    return [part for part in report.values() if isinstance(part, dict)]


def _summaries(report):
    return [part["summary"] for part in _parts(report)]


def _modes(report):
    """The figures of every mode of every part."""
    return [f for part in _parts(report) for mode, f in part.items() if mode != "summary"]
