"""`kvio analyze`: the bottleneck-free range, what loading costs, how large buffers must be."""
import json
import sys

from kvio import analysis
from kvio.errors import InvalidArgument, PlotMissing
from kvio.layout import BlockLayout

CONTEXTS = 16384, 32768, 65536


def add_command(commands) -> None:
    command = commands.add_parser(
        "analyze", help="which link binds, what loading costs beside computing",
        description="Arithmetic only. Of a node's bandwidths: the range of P/D in which storage "
        "NICs can all read at full rate, and which link binds outside it. With --prefill-nodes "
        "and --decode-nodes: how full each link is, and what can be read. With --model: bytes "
        "loaded a computed operation, and the scheduler's alpha.")
    add = command.add_argument
    add("--gpus-per-node", type=int, default=8, metavar="G")
    add("--snic-ratio", type=float, default=1.0, metavar="S", help="a storage NIC's bandwidth over "
        "one compute NIC's (default: 1)")
    add("--dram-bytes-per-s", type=float, default=500e9, metavar="RATE")
    add("--snic-bytes-per-s", type=float, default=50e9, metavar="RATE", help="of a node's storage "
        "NIC; its compute NICs have 1/S of that each")
    add("--prefill-nodes", type=int, metavar="P")
    add("--decode-nodes", type=int, metavar="D")
    add("--model", choices=sorted(analysis.COSTS))
    add("--append", type=int, default=429, metavar="TOKENS", help="new tokens of a prompt "
        "(default: 429)")
    add("--gpu-flop-per-s", type=float, metavar="RATE", help="with --model: what a GPU computes, "
        "for the scheduler's beta")
    add("--agents-per-s", type=float, metavar="RATE", help="with --model: sessions that begin a "
        "second; --session-s and --total-tokens give the working set")
    add("--session-s", type=float, metavar="S", help="how long a session lasts")
    add("--total-tokens", type=int, metavar="TOKENS", help="of a session at its end")
    add("--residency-s", type=float, metavar="S", help="how long a request stays in a buffer: "
        "prints how large that must be")
    add("--plot", metavar="FILE", help="draw the links over P/D (svg, pdf or png; needs "
        "matplotlib: pip install 'kvio[plot]')")
    add("--json", action="store_true", help="for programs")
    command.set_defaults(run=run)


def run(arguments) -> int:
    """The command. Always 0: a range may be empty, and that is an answer."""
    _check(arguments)
    shape = analysis.ClusterShape(arguments.gpus_per_node, arguments.snic_ratio,
                                  arguments.dram_bytes_per_s, arguments.snic_bytes_per_s)
    report = {"range": _range(shape), "links": _links(shape)}
    if arguments.prefill_nodes is not None:
        report["nodes"] = _nodes(shape, arguments.prefill_nodes, arguments.decode_nodes)
    if arguments.model:
        report["model"] = _model(shape, arguments)
    if arguments.residency_s is not None:
        report["buffer_bytes"] = analysis.buffer_bytes(shape.snic_bytes_per_s,
                                                       arguments.residency_s)
    if arguments.plot:
        plot(shape, arguments.plot)
        print(f"the plot is in {arguments.plot}", file=sys.stderr)
    print(json.dumps(report, indent=2) if arguments.json else _text(report, shape))
    return 0


def _check(arguments):
    together = "prefill_nodes", "decode_nodes"
    session = "agents_per_s", "session_s", "total_tokens"
    for names in (together, session):
        given = [getattr(arguments, name) is not None for name in names]
        if any(given) and not all(given):
            options = ", ".join("--" + name.replace("_", "-") for name in names)
            raise InvalidArgument(f"{options} go together")
    of_model = arguments.agents_per_s, arguments.gpu_flop_per_s
    if arguments.model is None and of_model != (None, None):
        raise InvalidArgument("--gpu-flop-per-s and --agents-per-s need a --model")


def _range(shape):
    found = analysis.bottleneck_free_range(shape)
    derived = analysis.bottleneck_free_range(shape, analysis.derived_bounds(shape))
    return {**found, "derived": {"least": derived["least"], "most": derived["most"]}}


def _links(shape):
    """JSON has no infinity: None is no limit on that side."""
    return {name: {"least": least or None, "most": None if most == float("inf") else most}
            for name, (least, most) in analysis.formula_bounds(shape).items()
            if least <= most} | {
        name: {"least": None, "most": None, "never_suffices": True}
        for name, (least, most) in analysis.formula_bounds(shape).items() if least > most}


def _nodes(shape, num_prefill, num_decode):
    both = analysis.best_read_rates(shape, num_prefill, num_decode)
    basic = analysis.best_read_rates(shape, num_prefill, num_decode, ("pe",))
    return {"prefill": num_prefill, "decode": num_decode,
            "utilisation": analysis.utilisation(shape, num_prefill, num_decode),
            "dual_path": both, "basic": basic,
            "gain": both["total_bytes_per_s"] / basic["total_bytes_per_s"]
            if basic["total_bytes_per_s"] else None}


def _model(shape, arguments):
    cost, append = analysis.model_cost(arguments.model), arguments.append
    per_token = sum(BlockLayout.preset(cost.layout).layer_bytes_per_token)
    made = {"name": arguments.model, "bytes_per_token": per_token, "append_tokens": append,
            "gb_per_pflop": {str(context): analysis.cache_compute_ratio(cost, context, append)
                             * 1e6 for context in CONTEXTS},
            "alpha_tokens": analysis.alpha_tokens(shape.snic_bytes_per_s, per_token)}
    if arguments.gpu_flop_per_s is not None:
        made["beta_tokens"] = {str(context): analysis.beta_tokens(
            (context + append) * analysis.positive("gpu_flop_per_s", arguments.gpu_flop_per_s)
            / cost.prefill_flop(context, append)) for context in CONTEXTS}
    if arguments.agents_per_s is not None:
        made["working_set_bytes"] = analysis.working_set_bytes(
            arguments.agents_per_s, arguments.session_s, arguments.total_tokens, per_token)
    return made


def _text(report, shape):
    found = report["range"]
    lines = [f"a node: {shape.gpus_per_node} GPUs with {shape.cnic_bytes_per_s / 1e9:g} GB/s each, "
             f"{shape.snic_bytes_per_s / 1e9:g} GB/s of storage, "
             f"{shape.dram_bytes_per_s / 1e9:g} GB/s of DRAM", ""]
    if found["least"] is None:
        against = sorted({*found["binds_below"], *found["binds_above"]})
        lines.append("no P/D is free of a bottleneck: " + ", ".join(against))
    else:
        lines += [f"free of bottlenecks: {found['least']:.4g} <= P/D <= {found['most']:.4g}",
                  f"  below, {' and '.join(found['binds_below']) or 'nothing'} binds; above, "
                  f"{' and '.join(found['binds_above']) or 'nothing'}"]
    lines += ["", f"{'link':<15}{'P/D at least':>14}{'at most':>10}"]
    for name, bound in report["links"].items():
        least, most = ("never", "suffices") if "never_suffices" in bound else (
            "-" if bound[key] is None else f"{bound[key]:.4g}" for key in ("least", "most"))
        lines.append(f"{name:<15}{least:>14}{most:>10}")
    if "nodes" in report:
        lines += ["", *_nodes_text(report["nodes"])]
    if "model" in report:
        lines += ["", *_model_text(report["model"])]
    if "buffer_bytes" in report:
        lines += ["", f"buffer of a node: {report['buffer_bytes'] / 1e9:.4g} GB, and room for the "
                  "largest request"]
    return "\n".join(lines)


def _model_text(model):
    def at(values, form):
        return ", ".join(f"{value:{form}} at {context}" for context, value in values.items())

    yield f"{model['name']}: {model['bytes_per_token']:,} bytes a token"
    yield (f"  GB loaded a PFLOP computed, {model['append_tokens']} tokens appended: "
           f"{at(model['gb_per_pflop'], '.3g')}")
    yield f"  alpha (3 s of reading): {model['alpha_tokens']:,} tokens"
    if "beta_tokens" in model:
        yield (f"  beta (5 s of a GPU, hits included; by the length of the context): "
               f"{at(model['beta_tokens'], ',')}")
    if "working_set_bytes" in model:
        yield f"  working set: {model['working_set_bytes'] / 1e9:.4g} GB"


def _nodes_text(nodes):
    yield f"{nodes['prefill']}P{nodes['decode']}D, all storage NICs at full rate:"
    for name, share in nodes["utilisation"].items():
        yield f"  {name:<15}{share:>8.1%}" + ("  binds" if share > 1 + 1e-9 else "")
    for name in ("basic", "dual_path"):
        rates = nodes[name]
        yield (f"  {name.replace('_', ' ')}: {rates['total_bytes_per_s'] / 1e9:.4g} GB/s can be "
               f"read ({rates['pe_bytes_per_s'] / 1e9:.4g} a PE node, "
               f"{rates['de_bytes_per_s'] / 1e9:.4g} a DE node); "
               f"{', '.join(rates['binds'])} at the limit")


def plot(shape, path: str) -> None:
    """Every link's load over its capacity against P/D, and what can be read of all storage NICs'
    bandwidth; PlotMissing without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotMissing("a plot needs matplotlib: pip install 'kvio[plot]'") from None
    pairs = sorted({(p, d) for p in range(1, 25) for d in range(1, 25)
                    if 1 / 16 <= p / d <= 16}, key=lambda pair: pair[0] / pair[1])
    ratios = [p / d for p, d in pairs]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for link in analysis.LINKS:
        axes.loglog(ratios, [analysis.utilisation(shape, *pair)[link.name] for pair in pairs],
                    label=link.name, linestyle="-" if link.side == "pe" else "--")
    share = [analysis.best_read_rates(shape, *pair)["total_bytes_per_s"]
             / (sum(pair) * shape.snic_bytes_per_s) for pair in pairs]
    axes.loglog(ratios, share, color="black", linewidth=2, label="storage that can be read")
    axes.axhline(1, color="grey", linewidth=0.8)
    found = analysis.bottleneck_free_range(shape)
    if found["least"] is not None:
        axes.axvspan(max(found["least"], ratios[0]), min(found["most"], ratios[-1]),
                     color="green", alpha=0.08)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.set_xlabel("P/D")
    axes.set_ylabel("load over capacity, every SNIC at full rate")
    axes.legend(fontsize=8, ncols=2)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as wrong:
        raise InvalidArgument(f"--plot {path}: {wrong}") from None
