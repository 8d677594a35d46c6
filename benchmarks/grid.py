"""Do `split` and `any_node` ever lose to `shorter_queue`? A grid of clusters, in link time.

    python benchmarks/grid.py --configs 500 --json grid.json --plot docs/figures/grid.svg

Each configuration is drawn from its number: nodes, rates, agents, contexts, what loading costs
beside computing, buffers. The engines run it in link time, so the figures are those of the links
and the policies alone: the same on any machine, twice. The compute is timed, the bytes are real.

With a few agents, who comes first decides by chance which engine waits: another draw of the same
configuration ends up to 20 % earlier or later under any policy. So a configuration's figure is the
mean over `DRAWS` traces. Of a thousand such means some are losses by chance: where one loses, all
policies are looked at again over `MORE_DRAWS` traces, those that lost included.
"""
import argparse
import json
import random
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np

from kvio.analysis import ClusterShape, utilisation
from kvio.engine.clock import now_s, run_in_link_time
from kvio.engine.cluster import Cluster, ClusterConfig
from kvio.engine.compute import TimedCompute
from kvio.engine.link_storage import LinkStore
from kvio.engine.workload import run_sessions, timed_sessions, timed_totals
from kvio.layout import BlockLayout, block_keys
from kvio.transfer import Fabric

POLICIES = "shorter_queue", "split", "any_node"
LAYOUT = BlockLayout(2, 16, 16)
SNIC = 1_000_000                    # bytes/s: what counts are ratios
MAY_LOSE = 0.02
DRAWS, MORE_DRAWS = 4, 12


@dataclass(frozen=True)
class Config:
    """One point of the grid. `load_compute`: hit bytes over one SNIC's rate, over the time that
    one GPU computes. `buffer_requests`: longest prompts that a node's buffer holds."""

    number: int
    num_prefill: int
    num_decode: int
    num_agents: int
    num_turns: int
    context_tokens: tuple[int, int]
    append_tokens: tuple[int, int]
    load_compute: float
    cnic_per_snic: int
    buffer_requests: int
    depth: int


def draw(number: int) -> Config:
    """Configuration `number` of the grid."""
    random_ = random.Random(number)
    least = random_.choice([64, 200, 400, 800])
    return Config(
        number, random_.randint(1, 3), random_.randint(1, 4),
        random_.choice([1, 1, 2, 3, 4, 6, 8, 12, 16]), random_.randint(1, 3),
        (least, round(least * random_.choice([1, 1.5, 3]))),
        random_.choice([(1, 8), (8, 40), (60, 140)]), random_.choice([0.3, 0.7, 1, 2, 3, 6]),
        random_.choice([1, 2, 4, 8]), random_.choice([1, 2, 4, 64]), random_.choice([1, 2]))


def run(config: Config, policy: str, draws: int = DRAWS) -> dict:
    """Means over the draws of `run_once`'s figures."""
    made = [run_once(config, policy, draw) for draw in range(draws)]
    return {name: statistics.fmean(each[name] for each in made) for name in made[0]}


def is_free_of_bottlenecks(config: Config) -> bool:
    """Whether the configuration lies in the bottleneck-free range: its CNICs could carry what all
    storage NICs read. (One CNIC a node stands for all of them; DRAM is not emulated.)"""
    shape = ClusterShape(1, 1 / config.cnic_per_snic, 1e12 * SNIC, SNIC)
    return max(utilisation(shape, config.num_prefill, config.num_decode).values()) <= 1


def run_once(config: Config, policy: str, draw: int) -> dict:
    """{"jct_s", "makespan_s", "ttft_s"} of the configuration under a policy; RuntimeError if a
    byte was wrong. jct_s is the mean over the agents: from the start to an agent's last token."""
    fabric = Fabric("virtual")
    sessions = timed_sessions(config.num_agents, config.num_turns, 32000,
                              config.number * 1000 + draw, config.context_tokens,
                              config.append_tokens, (4, 8))
    totals = timed_totals(sessions, LAYOUT)
    per_token = max(totals["hit_bytes"], 1) / SNIC / config.load_compute / totals["miss_tokens"]
    longest = max(len(s.context) + sum(len(t.append) + t.num_new_tokens for t in s.turns)
                  for s in sessions)
    blocks = LAYOUT.num_blocks(longest)
    cluster_config = ClusterConfig(
        LAYOUT, config.num_prefill, config.num_decode, snic_bytes_per_s=SNIC,
        cnic_bytes_per_s=config.cnic_per_snic * SNIC,
        buffer_blocks=blocks * config.buffer_requests, hbm_blocks=blocks * config.num_agents,
        max_tokens=longest, depth=config.depth, policy=policy)
    computes = []

    def compute():
        computes.append(TimedCompute(LAYOUT, per_token, 0.0005))
        return computes[-1]

    store = LinkStore(LAYOUT, fabric, blocks * (config.num_agents + 1))
    try:
        _prime(store, sessions, cluster_config)

        async def serve():
            async with Cluster(cluster_config, "dualpath", store, compute, fabric) as cluster:
                begin = now_s()
                served = await run_sessions(cluster, sessions)
                return begin, now_s(), list(served.values())

        begin, end, served = run_in_link_time(serve(), fabric)
    finally:
        store.close()
    if any(each.num_kv_errors for each in computes):
        raise RuntimeError(f"wrong KV in configuration {config.number} under {policy}")
    return {"jct_s": statistics.fmean(r[-1].token_times[-1] - begin for r in served),
            "makespan_s": end - begin,
            "ttft_s": statistics.fmean(r.token_times[0] - r.arrived_s
                                       for requests in served for r in requests)}


def _prime(store, sessions, config):
    compute, size = TimedCompute(LAYOUT, 0.0, 0.0), LAYOUT.block_tokens
    for session in sessions:
        tokens = np.asarray(session.context, np.uint32)

        def fill(i, block, tokens=tokens):
            for layer in range(LAYOUT.num_layers):
                compute.write_records(block[layer], tokens[i * size:(i + 1) * size], i * size,
                                      layer)

        store.prime(block_keys(tokens, LAYOUT, config.namespace(session.name)), fill)


def row(number: int) -> dict:
    """All policies on one configuration, and each one's JCT over `shorter_queue`'s.
    "over_first": that of the first draws, where it lost over these and more were made."""
    config = draw(number)
    made = _compared(config, DRAWS)
    if losses([made]):
        made = {**_compared(config, MORE_DRAWS), "over_first": made["over"]}
    return {**asdict(config), "free": is_free_of_bottlenecks(config), **made}


def _compared(config, draws):
    found = {policy: run(config, policy, draws) for policy in POLICIES}
    return {"number": config.number, "draws": draws, **found, **{
        name: {policy: found[policy][figure] / found[POLICIES[0]][figure]
               for policy in POLICIES[1:]}
        for name, figure in (("over", "jct_s"), ("makespan_over", "makespan_s"))}}


def losses(rows) -> list:
    """(number, policy, JCT over shorter_queue's) wherever it loses by more than MAY_LOSE."""
    return [(r["number"], policy, over) for r in rows for policy, over in r["over"].items()
            if over > 1 + MAY_LOSE]


def summary(rows) -> str:
    lines = []
    for free, where in ((True, "in the bottleneck-free range"), (False, "outside")):
        some = [r for r in rows if r["free"] == free]
        lines.append(f"{len(some)} configurations {where}; over shorter_queue's: median "
                     "[quartiles], best, worst")
        for policy in POLICIES[1:] if len(some) > 1 else ():
            for title, name in (("JCT", "over"), ("makespan", "makespan_over")):
                over = sorted(r[name][policy] for r in some)
                low, mid, high = statistics.quantiles(over, n=4)
                lines.append(f"  {policy:<9}{title:<9} {mid:.3f} [{low:.3f}, {high:.3f}], "
                             f"{over[0]:.3f}, {over[-1]:.3f}; worse by more than 2 % in "
                             f"{sum(x > 1 + MAY_LOSE for x in over)}")
    lines += [f"by chance: configuration {r['number']}, {policy}: {over:.3f} over {DRAWS} draws, "
              f"{r['over'][policy]:.3f} over {r['draws']}" for r in rows
              for policy, over in r.get("over_first", {}).items()
              if r["over"][policy] <= 1 + MAY_LOSE < over]
    lines += [f"LOST: configuration {number}, {policy}: {over:.3f}"
              for number, policy, over in losses(rows)]
    return "\n".join(lines)


def plot(rows, path: str) -> None:
    """Where they win: JCT over shorter_queue's against agents for each storage NIC."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    for axes, policy in zip(figure.subplots(1, 2, sharey=True), POLICIES[1:]):
        busy = [r["num_agents"] / (r["num_prefill"] + r["num_decode"]) for r in rows]
        dots = axes.scatter(busy, [r["over"][policy] for r in rows], s=9, cmap="viridis",
                            c=[min(r["load_compute"], 6) for r in rows])
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(policy)
        axes.set_xlabel("agents for each storage NIC")
    figure.axes[0].set_ylabel("JCT over shorter_queue's")
    figure.colorbar(dots, ax=figure.axes, label="loading over computing")
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--plot")
    arguments = parser.parse_args()
    rows = []
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for made in pool.map(row, range(arguments.first, arguments.first + arguments.configs)):
            rows.append(made)
            for number, policy, over in losses([made]):
                print(f"configuration {number}: {policy} {over:.3f}", file=sys.stderr)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)
    if arguments.plot:
        plot(rows, arguments.plot)
    print(summary(rows))
    return 1 if losses(rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
