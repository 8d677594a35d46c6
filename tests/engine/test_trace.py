"""`--trace-out`: what the trace of a run shows, and that it shows what happened."""
import asyncio
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from kvio.engine.demo_timed import TimedSetting, timed_part
from kvio.engine.trace import Tracer
from kvio.layout import BlockLayout

SETTING = replace(TimedSetting(), layout=BlockLayout(4, 64, 64), snic_bytes_per_s=6_250_000,
                  num_agents=8)


@pytest.fixture(scope="module")
def run():
    """(figures, events) of DualPath splitting, in link time."""
    tracer = Tracer()
    made = timed_part(SETTING, runs=("basic", "split"), link_time=True, tracers={"split": tracer})
    return made["modes"]["split"], tracer.events()


def spans(events, *names, **arguments):
    return [e for e in events if e["ph"] == "X" and e["name"] in names
            and all(e["args"].get(key) == value for key, value in arguments.items())]


def overlap(some, others) -> bool:
    """Whether any of `some` and any of `others` have time in common."""
    return any(a["ts"] < b["ts"] + b["dur"] and b["ts"] < a["ts"] + a["dur"]
               for a in some for b in others if a is not b)


def test_reads_transfers_compute_and_decode_overlap(run):
    _, events = run
    reads, prefills = spans(events, "read"), spans(events, "prefill")
    decodes = spans(events, "decode")
    fetches = spans(events, "pe_buffer → pe_hbm", "de_buffer → pe_hbm")
    for some, others in ((reads, prefills), (reads, decodes), (prefills, decodes),
                         (fetches, reads), (fetches, prefills), (fetches, decodes)):
        assert overlap(some, others)
    # A request that is split is read by both nodes at once, ...
    assert any(overlap(reads[i:i + 1], [r for r in reads[:i] if r["pid"] != read["pid"]
                                        and r["args"]["request"] == read["args"]["request"]])
               for i, read in enumerate(reads))
    # ... and the next layer of it comes in while one is computed.
    assert any(overlap([f for f in fetches if f["args"]["layer"] == layer + 1],
                       spans(events, "prefill", layer=layer)) for layer in range(3))


def test_every_step_is_in_it_once_and_rows_do_not_overlap(run):
    figures, events = run
    number, layers = figures["num_requests"], SETTING.layout.num_layers
    assert len(spans(events, "read")) == figures["paths"]["pe"] + figures["paths"]["de"] \
        + 2 * figures["paths"]["split"]
    for name in "prefill", "pe_hbm → de_buffer", "de_buffer → de_hbm":
        for layer in range(layers):
            assert len(spans(events, name, layer=layer)) == number
    ends, named = {}, {(e["pid"], e.get("tid")) for e in events if e["ph"] == "M"}
    for event in (e for e in events if e["ph"] == "X"):
        row = event["pid"], event["tid"]
        assert row in named and event["dur"] >= 0
        assert event["ts"] >= ends.get(row, 0) - 1e-3           # in microseconds
        ends[row] = event["ts"] + event["dur"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"pe0", "de0"}


def test_what_fails_is_in_it_by_name(tmp_path):
    async def fail():
        with tracer.span("pe0", "GPU", "prefill", layer=3):
            raise KeyError

    tracer = Tracer()
    with pytest.raises(KeyError):
        asyncio.run(fail())
    tracer.write(str(tmp_path / "trace.json"))
    event = json.loads((tmp_path / "trace.json").read_text())["traceEvents"][0]
    assert event["args"] == {"layer": 3, "failed": "KeyError"}


def test_the_option_of_the_demo(tmp_path):
    def demo(*arguments):
        return subprocess.run([sys.executable, "-m", "kvio", "demo", "--json", "--quiet",
                               *arguments], capture_output=True, text=True, timeout=300)

    done = demo("--model", "seeded:2", "--trace-out", str(tmp_path / "t.json"))
    assert done.returncode == 0, done.stderr
    trace = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert {"read", "store", "prefill", "decode"} <= {e["name"] for e in trace["traceEvents"]}
    refused = demo("--model", "seeded:2", "--trace-out", str(tmp_path / "no" / "t.json"))
    assert refused.returncode == 2 and "cannot write the trace" in refused.stderr
    unused = demo("--collectives", "--trace-out", str(tmp_path / "t.json"))
    assert unused.returncode == 2 and "--trace-out" in unused.stderr
