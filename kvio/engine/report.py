"""The demo's figures as text for people."""

__all__ = ["render", "table"]

LEGEND_COLLECTIVES = (
    "one class: collectives travel in the class of KV. two classes: in one of their own. Latency:",
    "link time from the doorbell to the last completion of one exchange.")
LEGEND_DEVICE = (
    "copied by: the GPU's ways of copying (docs/gpu.md) that KV took, and how often. HBM fetched,",
    "written for the CPU: what its arithmetic had copied beside KV, which no NIC counts.")
LEGEND = (
    "none: no store, every prompt is computed whole. basic: only the prefill side (PE) reads",
    "storage. dualpath: the side with the shorter reading queue does, PE or decode side (DE).",
    "split: both do; any_node: others too; push: as dualpath, written into HBM instead of read;",
    "round_robin: PE and DE in turn; oracle: loading takes no time.",
    "JCT: all agents served, their blocks stored. TTFT, TTST, TPOT: to the first token, from it to",
    "the second, per token after that. SNIC: a node's storage NIC; max/avg 1.00 is balanced.")


def render(report: dict) -> str:
    """The whole report: per part what was run, the table of modes, and the verdict."""
    lines, legend = [], []
    if set(report) & {"real", "timed"}:
        legend += LEGEND
    if any(" memory of cuda" in part["summary"].get("hbm", "") for part in report.values()
           if isinstance(part, dict)):
        legend += LEGEND_DEVICE
    if "collectives" in report:
        legend += LEGEND_COLLECTIVES
    for name, part in report.items():
        if name == "real":
            lines += _real(part)
        elif name.startswith("timed"):
            lines += _timed(part)
        elif name == "collectives":
            lines += _collectives(part)
    runs = "with one class and with two" if list(report)[0] == "collectives" else "in every mode"
    verdict = f"the same tokens {runs}" if report["tokens_equal"] else f"TOKENS DIFFER {runs}"
    if not report["ok"]:
        verdict += "; CHECK FAILED: see hits, KV errors and wrong bytes above"
    return "\n".join([*lines, "", *legend, "", f"Result: {verdict}."])


def _modes(part):
    return {mode: f for mode, f in part.items() if mode != "summary"}


def _real(part):
    summary = part["summary"]
    lines = ["", f"(a) Language model: {summary['model']}, real files and queues, "
             f"{_links(summary['nic'])}; {_hbm(summary)}", "", table(_modes(part)), "",
             *_checks(part)]
    for mode, mismatches in summary["mismatches"].items():
        lines += [f"    {mode} against none: {line}" for line in mismatches]
    return [*lines, f"    the agent \"{summary['sample']['agent']}\" generated, in its last turn: "
            f"{summary['sample']['text']!r}"]


def _timed(part):
    summary, emulated = part["summary"], part["summary"]["emulated"]
    lines = [
        "", f"(b) Timed run, {summary['nodes']}: {summary['num_agents']} agents, "
        f"{summary['num_requests']} requests, {summary['hit_bytes'] / 1e9:.2f} GB of hits; "
        + ("real bytes over soft NICs, in their own time; " if summary["clock"] == "link time"
           else "real bytes, files and queues, ")
        + f"sleep in place of arithmetic; {_hbm(summary)}",
        f"    EMULATED: SNIC {emulated['snic_bytes_per_s'] / 1e6:.0f} MB/s a node, "
        f"{_cnic(summary)}, "
        f"{emulated['prefill_s_per_new_token'] * 1e6:.0f} us a new token, "
        f"{emulated['decode_step_s'] * 1e3:.0f} ms a decode step",
        f"    ({emulated['why']})",
        f"    Basic's load/compute ratio: {summary['load_compute_ratio']:.1f}", "",
        table(_modes(part)), "", *_checks(part)]
    if "speedup" in summary:
        busy = f"Basic's SNIC was busy {summary['basic_snic_busy']:.1%} of the time"
        if summary["void"]:
            lines.append(f"    VOID: {busy}, under 90 %: storage was not the limit, no speed-up "
                         "is claimed")
        else:
            lines += [f"    {_called(name)} over Basic: {ratio:.2f} x" + (
                      f" (ideal {summary['ideal_speedup']:.0f})" if name != "oracle" else "")
                      for name, ratio in summary["speedups"].items()]
            lines.append(f"    {busy}")
    return lines


def _called(run):
    return "DualPath" if run == "dualpath" else run


def _links(nic):
    if nic.startswith("cuda"):
        return f"all KV moved by the copy engines of {nic}, the arithmetic is the CPU's"
    return "unlimited links" if nic == "soft" else f"all NICs on {nic}"


def _hbm(summary):
    """Quoted where it is none."""
    quote = "" if summary["nic"].startswith("cuda") else '"'
    return f"{quote}HBM{quote} is {summary['hbm']}"


def _cnic(summary):
    rate, nic = summary["emulated"]["cnic_bytes_per_s"], summary["nic"]
    if nic.startswith("cuda"):
        return f"CNICs are the copy engines of {nic}, NOT paced"
    return f"CNIC {rate / 1e6:.0f} MB/s a direction" if rate else \
        f"CNICs on {nic} NOT paced (only soft NICs can be)"


def _collectives(part):
    summary, emulated = part["summary"], part["summary"]["emulated"]
    lines = ["", f"(c) Collectives beside KV, {summary['nodes']}: {summary['num_agents']} agents; "
             f"each decode step does {summary['num_per_step']} exchanges of "
             f"{summary['nbytes'] / 1024:.0f} KiB with each other decode node; no store"]
    if summary["nic"] == "soft":
        lines += [
            f"    EMULATED, in link time: links of {emulated['cnic_bytes_per_s'] / 1e6:.0f} MB/s a "
            f"direction, {emulated['prefill_s_per_new_token'] * 1e6:.0f} us a new token, "
            f"{emulated['decode_step_s'] * 1e3:.0f} ms a decode step",
            f"    ({emulated['why']})"]
    else:
        lines.append(f"    on {summary['nic']}, in real time, not paced: what a class is worth "
                     "here is up to the fabric (kvio qos)")
    names = {mode: mode.replace("_", " ") for mode in _modes(part)}
    rows = [("collective p50", lambda f: _short(f["collective"]["p50_s"])),
            ("collective p99", lambda f: _short(f["collective"]["p99_s"])),
            ("collective max", lambda f: _short(f["collective"]["max_s"])),
            ("collective without KV", lambda f: _short(f["collective"]["alone_p50_s"])),
            ("collectives", lambda f: f"{f['collective']['num']:,}"),
            ("TPOT mean", lambda f: _short(f["tpot_s"])),
            ("JCT", lambda f: _seconds(f["jct_s"])),
            ("busiest link, receiving", lambda f: _percent(f["link_busy_share"]))]
    figures = {names[mode]: f for mode, f in _modes(part).items()}
    wrong = sum(f["kv_errors"] + f["collective_errors"] for f in _modes(part).values())
    return [*lines, "", _aligned(figures, rows), "",
            "    What a class of their own does to collectives beside KV:",
            *(f"        {name}: {_instead(get(part['two_classes']), get(part['one_class']))}"
              for name, get in (
                  ("collective p50", lambda f: f["collective"]["p50_s"]),
                  ("collective p99", lambda f: f["collective"]["p99_s"]),
                  ("TPOT", lambda f: f["tpot_s"]), ("JCT, as KV yields", lambda f: f["jct_s"]))),
            f"    {wrong} RECORDS OR SLOTS WRONG" if wrong else "    all bytes checked"]


def _instead(now, before):
    """One time against another, in words."""
    if _short(now) == _short(before):
        return f"{_short(now)}, as before"
    by = f"{before / now:.2f} times faster" if now < before else f"{now / before:.2f} times slower"
    return f"{_short(now)} instead of {_short(before)}, {by}"


def _checks(part):
    lines = []
    for mode, f in _modes(part).items():
        if "predicted_hit_tokens" in f:
            agree = "as predicted from the trace" if f["hits_as_predicted"] else \
                f"NOT the {f['predicted_hit_tokens']:,} predicted from the trace"
            extra = f", {f['kv_errors']} KV RECORDS WRONG" if f["kv_errors"] else ""
            extra += f", {f['replans']} plans made again" if f["replans"] else ""
            extra += f", {f['persist_failures']} blocks NOT stored" if f["persist_failures"] else ""
            lines.append(f"    {mode}: {f['hit_tokens']:,} hit tokens, {agree}; read by "
                         f"{f['backend']}{extra}")
    return lines


def table(modes: dict) -> str:
    """The figures of several modes side by side."""
    rows = [
        ("JCT", lambda f: _seconds(f["jct_s"])),
        ("TTFT mean", lambda f: _seconds(f["ttft_s"])),
        ("TTST mean", lambda f: _seconds(f["ttst_s"])),
        ("TPOT mean", lambda f: _seconds(f["tpot_s"])),
        ("hit / prompt tokens", lambda f: f"{f['hit_tokens']:,} / {f['prompt_tokens']:,}"),
        ("requests read by PE / DE", lambda f: f"{f['paths']['pe']} / {f['paths']['de']}"),
        ("  by both / by others too", _shared),
        ("attention max/avg", lambda f: _number(f["attention_max_over_avg"])),
        ("SNIC max/avg", lambda f: _number(f["snic_max_over_avg"])),
        ("doorbells", lambda f: f"{f['doorbells']:,}"),
        ("work requests", lambda f: f"{f['work_requests']:,}"),
        ("copied by (times)", lambda f: _ways(f.get("hbm"))),
        ("HBM fetched / written for the CPU", lambda f: _fetched(f.get("hbm"))),
    ]
    for name in sorted({n for f in modes.values() for n in f["snics"]}, key=_prefill_first):
        rows.append((f"SNIC {name} read / written",
                     lambda f, n=name: _snic(f["snics"].get(n))))
        rows.append((f"SNIC {name} busy reading", lambda f, n=name: _share(f["snics"].get(n))))
    for name in sorted({n for f in modes.values() for n in f["nics"]}, key=_prefill_first):
        rows.append((f"NIC {name} out / in", lambda f, n=name: _port(f["nics"].get(n))))
    return _aligned(modes, rows)


def _shared(figure):
    split, others = figure["paths"]["split"], figure["paths"]["any"]
    return f"{split} / {others}" if split or others else "-"


def _aligned(modes, rows):
    cells = [[title, *(show(f) for f in modes.values())] for title, show in rows]
    cells = [["", *modes], *(row for row in cells if set(row[1:]) != {"-"})]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]),
                        *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))])
             for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _prefill_first(name):
    return not name.startswith("pe"), name


def _seconds(value):
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _short(seconds):
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _number(value):
    return "-" if value is None else f"{value:.2f}"


def _ways(hbm):
    """Ways of the provider cuda, and how often each was taken."""
    if hbm is None:
        return "-"
    return ", ".join(f"{way} {count:,}" for way, count in hbm["ways"].items()) or "nothing"


def _fetched(hbm):
    return f"{_mb(hbm['fetched_bytes'])} / {_mb(hbm['written_bytes'])} MB" if hbm else "-"


def _mb(nbytes):
    return f"{nbytes / 1e6:,.1f}"


def _snic(figure):
    return f"{_mb(figure['read_bytes'])} / {_mb(figure['write_bytes'])} MB" if figure else "-"


def _share(figure):
    return _percent(figure and figure["busy_share"])


def _percent(share):
    return "-" if share is None else f"{share:.0%}"


def _port(figure):
    return f"{_mb(figure['tx_bytes'])} / {_mb(figure['rx_bytes'])} MB" if figure else "-"
