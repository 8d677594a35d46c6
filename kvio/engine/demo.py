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
from dataclasses import replace

from kvio.engine.cluster import ClusterConfig
from kvio.engine.compute import ModelCompute
from kvio.engine.demo_collectives import collectives_part
from kvio.engine.demo_common import Progress, check_hits, fresh_store, serve, where
from kvio.engine.demo_model import check_model, load_model, one_blas_thread
from kvio.engine.demo_timed import TimedSetting, timed_part
from kvio.engine.report import render
from kvio.engine.trace import Tracer
from kvio.errors import InvalidArgument
from kvio.transfer import Nic

__all__ = ["TimedSetting", "real_part", "run", "timed_part"]

CLOSE_LOGITS = 1e-3             # a first mismatch is a tie, not an error, below this gap
DEFAULT_MODEL = "smollm2"
NO_TIE = " (NOT a tie)"


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
              model: str = "smollm2", nic: str = "soft", tracer: Tracer | None = None,
              device: str | None = None) -> dict:
    """A language model over a small conversation of agents; figures per mode.

    The agents go in step, so that each round's requests are routed while the others' reads are
    still queued and both read paths are taken. `model`: see `load_model`; `nic`: "soft", or an
    RDMA NIC for all engines; `device`: the GPU whose memory is HBM. `tracer` notes the last mode.
    """
    progress = progress or Progress(quiet=True)
    limited = one_blas_thread(check_model(model) == "smollm2")
    progress.line(f"loading {model}")
    made = load_model(model, exact, num_turns, num_new_tokens)
    layout, sessions = made.layout, made.sessions
    total = sum(len(s.turns) for s in sessions)
    config = ClusterConfig(layout, buffer_blocks=made.num_blocks, hbm_blocks=made.num_blocks,
                           max_tokens=made.max_tokens, model_name=made.name, nic=nic,
                           device=device)
    results, tokens = {}, {}
    with limited:
        for mode in modes:
            counted = progress.start(f"{model}, {mode}", total)
            with contextlib.ExitStack() as stack:
                store = None if mode == "none" else stack.enter_context(
                    fresh_store(folder, layout, segment_bytes=made.segment_bytes))
                result, served = asyncio.run(serve(config, mode, store, lambda: ModelCompute(
                    made.model, layout), sessions, counted, in_step=True,
                    tracer=tracer if mode == modes[-1] else None))
            if mode != "none":
                check_hits(result, served, sessions, layout)
                result["backend"] = store.backend
            results[mode], tokens[mode] = result, served
    mismatches = {m: compare_tokens(tokens[modes[0]], tokens[m]) for m in modes[1:]}
    first = tokens[modes[0]][sessions[0].name][-1]
    return {"modes": results, "mismatches": mismatches, "model": made.title,
            **where(results, nic, device),
            "tokens_equal": not any(mismatches.values()),
            "only_ties": not any(line.endswith(NO_TIE) for lines in mismatches.values()
                                 for line in lines),
            "generated": {name: [r.generated for r in requests]
                          for name, requests in tokens[modes[0]].items()},
            "sample": {"agent": sessions[0].name, "text": made.text(first.generated)}}


def run(arguments) -> int:
    """The command. 0 when all tokens agree, every hit was predicted and no byte was wrong."""
    progress = Progress(quiet=arguments.quiet)
    if arguments.dir is not None and not os.path.isdir(arguments.dir):
        raise InvalidArgument(f"--dir {arguments.dir}: there is no such directory; make it first")
    if arguments.turns is not None and arguments.turns < 1:
        raise InvalidArgument(f"--turns must be at least 1, not {arguments.turns}")
    settings = list(_settings(arguments))       # refused now, and not after the real model
    nic, device = arguments.nic or "soft", arguments.device
    model = check_model(arguments.model or DEFAULT_MODEL)
    parts = _wanted_parts(arguments, model)
    _refuse_unused(arguments, parts)
    if device is not None:
        _refuse_beside_device(arguments, parts)
    with Nic.open(device or nic):               # it is there; what copies cost is measured once
        runs, tracer = _runs(arguments), _tracer(arguments, parts)
        report = _report(arguments, parts, settings, runs, tracer, progress, model, nic)
    report["tokens_equal"] = all(p["tokens_equal"] for p in _summaries(report))
    report["ok"] = all(p["tokens_equal"] or p.get("only_ties", False)
                       for p in _summaries(report)) and all(
        f["kv_errors"] == f.get("collective_errors", 0) == 0 and f.get("hits_as_predicted", True)
        for f in _modes(report))
    if tracer is not None:
        tracer.write(arguments.trace_out)
    print(json.dumps(report, indent=2) if arguments.json else render(report))
    return 0 if report["ok"] else 1


def _report(arguments, parts, settings, runs, tracer, progress, model, nic):
    """The figures of all parts."""
    report, device = {}, arguments.device
    if "real" in parts:
        real = real_part(arguments.dir, arguments.exact, progress, model=model, nic=nic,
                         tracer=None if "timed" in parts else tracer, device=device)
        report["real"] = {**real.pop("modes"), "summary": real}
    if "timed" in parts:
        tracers = {runs[-1]: tracer} if tracer is not None else None    # of the first setting
        timed = [timed_part(setting, arguments.dir, progress, runs, nic, arguments.link_time,
                            tracers if setting is settings[0] else None, device)
                 for setting in settings]
        for part in timed:
            name = "timed" if part is timed[0] else f"timed_{part['nodes'].lower()}"
            report[name] = {**part.pop("modes"), "summary": part}
    if "collectives" in parts:
        part = collectives_part(nic=nic, progress=progress)
        report["collectives"] = {**part.pop("modes"), "summary": part}
    return report


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
            ("--nodes", arguments.nodes, "timed"), ("--turns", arguments.turns, "timed"),
            ("--policy", arguments.policy, "timed"),
            ("--link-time", arguments.link_time, "timed")):
        if given and part not in parts:
            raise InvalidArgument(f"{option} is of the part {part}, and only {', '.join(parts)} "
                                  f"would run: add --only {part}, or leave {option} out")


def _refuse_beside_device(arguments, parts):
    """What HBM on a GPU does not go with."""
    device = arguments.device
    if not device.startswith("cuda"):
        raise InvalidArgument(f"--device takes a GPU like cuda:0, not {device!r}; NICs are --nic")
    for option, given, why in (
            ("--nic", arguments.nic, "its copy engines are the compute NICs"),
            ("--link-time", arguments.link_time, "its copies take their own time"),
            ("--policy oracle", "oracle" in (arguments.policy or ()), "oracle copies by the CPU, "
             "out of whose reach it is"),
            ("--collectives", "collectives" in parts, "engines that share it have no links")):
        if given:
            raise InvalidArgument(f"HBM on {device} and {option} do not go together: {why}; leave "
                                  "one of them out")


def _runs(arguments):
    """Basic, and what is held against it."""
    wanted = ["dualpath" if name == "shorter_queue" else name
              for name in arguments.policy or ["shorter_queue"]]
    if len(set(wanted)) != len(wanted):
        raise InvalidArgument(f"--policy names one twice: {', '.join(wanted)}")
    return ("basic", *wanted)


def _tracer(arguments, parts):
    """One that can be written at the end, which is said now and not then."""
    if arguments.trace_out is None:
        return None
    if not parts & {"real", "timed"}:
        raise InvalidArgument("--trace-out notes the parts real and timed, and neither is run")
    tracer = Tracer()
    tracer.write(arguments.trace_out)
    return tracer


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
