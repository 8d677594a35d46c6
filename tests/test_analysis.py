"""The theory: formulas against the flows of the product's own plans, and the paper's figures."""
import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvio import analysis
from kvio.analysis import ClusterShape
from kvio.errors import InvalidArgument

PAPER = ClusterShape(8, 1.0, 500e9, 50e9)
shapes = st.builds(ClusterShape, st.integers(1, 16), st.floats(0.1, 20), st.floats(1e10, 2e12),
                   st.floats(1e9, 2e11))


def kvio(*arguments):
    return subprocess.run([sys.executable, "-m", "kvio", "analyze", *arguments],
                          capture_output=True, text=True, timeout=60)


def test_the_paper_s_node():
    found = analysis.bottleneck_free_range(PAPER)
    assert found == {"least": 1 / 7, "most": 7 / 2, "binds_below": ["PE CNIC write"],
                     "binds_above": ["DE CNIC write", "DE DRAM"]}
    upper = {name: most for name, (_, most) in analysis.formula_bounds(PAPER).items()}
    assert (upper["DE CNIC read"], upper["DE CNIC write"], upper["DE DRAM"]) == (6, 3.5, 3.5)


def test_the_flows_load_the_links_as_the_paper_s_table_says():
    """Its terms, a hit byte each: PE 3 and 5, PE 4, PE 8, PE 7 and 9; DE 5, DE 3 and 6, DE 7."""
    flows = analysis.flow_coefficients()
    assert {path: [flows[path, link.side, link.port] for link in analysis.LINKS]
            for path in ("pe", "de")} == {"pe": [2, 1, 2, 1, 2, 2], "de": [0, 1, 0, 2, 1, 3]}


@given(shapes)
def test_formula_and_flows_agree(shape):
    for name, bound in analysis.formula_bounds(shape).items():
        assert analysis.derived_bounds(shape)[name] == pytest.approx(bound, rel=1e-9)


@given(shapes, st.integers(1, 40), st.integers(1, 40))
def test_inside_the_range_nothing_else_binds_and_outside_what_is_named_does(shape, p, d):
    """`utilisation` walks the flows for given P and D; the range comes from the formulas."""
    found, ratio = analysis.bottleneck_free_range(shape), p / d
    load = analysis.utilisation(shape, p, d)
    rates = analysis.best_read_rates(shape, p, d)
    everything = (p + d) * shape.snic_bytes_per_s
    inside = found["least"] is not None and \
        found["least"] * (1 + 1e-6) < ratio < found["most"] * (1 - 1e-6)
    if inside:
        assert max(load.values()) <= 1 + 1e-9
        assert rates["total_bytes_per_s"] == pytest.approx(everything)
    elif found["least"] is None or not (found["least"] * (1 - 1e-6) <= ratio
                                        <= found["most"] * (1 + 1e-6)):
        assert max(load.values()) > 1 and rates["total_bytes_per_s"] < everything
        side = "binds_below" if found["least"] is not None and ratio < found["least"] \
            else "binds_above"
        if found["least"] is not None:
            assert any(load[name] > 1 for name in found[side])


@given(shapes, st.integers(1, 9), st.integers(1, 9), st.floats(0, 1), st.floats(0, 1))
def test_no_other_rates_read_more(shape, p, d, share_p, share_d):
    """Whatever rates keep all links within their capacity, the best ones are not worse."""
    best = analysis.best_read_rates(shape, p, d)
    full = shape.snic_bytes_per_s
    loads = {link: (analysis.flow_coefficients()["pe", link.side, link.port] * share_p * p
                    + analysis.flow_coefficients()["de", link.side, link.port] * share_d * d)
             / (p if link.side == "pe" else d) / shape.headroom(link) for link in analysis.LINKS}
    scale = max(1.0, *loads.values())
    assert (share_p * p + share_d * d) * full / scale <= best["total_bytes_per_s"] * (1 + 1e-6)
    assert analysis.best_read_rates(shape, p, d, ("pe",))["total_bytes_per_s"] \
        <= best["total_bytes_per_s"] * (1 + 1e-9)


def test_the_paper_s_condition_on_s_is_a_slip():
    """s <= g says it; its own sum, 2 B s / g <= B, says s <= g/2: what its flows need."""
    over = ClusterShape(4, 2.5, 1e15, 50e9)             # g/2 < s <= g
    assert analysis.utilisation(over, 1, 1)["PE CNIC read"] == pytest.approx(1.25)
    assert analysis.bottleneck_free_range(over)["least"] is None


@pytest.mark.parametrize("model, context, wanted, within", [
    ("qwen2.5-32b", 16384, 117, .03), ("qwen2.5-32b", 65536, 267, .03),
    ("gpt-oss-120b", 16384, 47, .03), ("gpt-oss-120b", 65536, 95, .03),
    ("qwen3-235b-a22b", 16384, 39, .03), ("qwen3-235b-a22b", 65536, 60, .03),
    ("deepseek-v3.2", 16384, 13, .08), ("deepseek-v3.2", 32700, 22, .08),
    ("deepseek-v3.2", 65536, 36, .08), ("deepseek-v3", 16384, 4.8, .13),
    ("deepseek-v3", 65536, 5.8, .13)])
def test_table_1(model, context, wanted, within):
    assert analysis.cache_compute_ratio(model, context) * 1e6 == pytest.approx(wanted, rel=within)


def test_the_operations_of_attention_by_hand():
    """SmolLM2's shape as an example small enough to count: 9 heads of 64, 30 layers."""
    cost = analysis.ModelCost("smollm2-135m", 1e6, 4.0 * 30 * 9 * 64)
    # 2 new tokens after 10: each uses 1e6 weights twice, and sees 10 + 1 on average.
    assert cost.prefill_flop(10, 2) == 2 * (2e6 + 4 * 30 * 9 * 64 * 11)
    limited = analysis.ModelCost("smollm2-135m", 0, 3.0, top_k=5, indexer_flop=1.0,
                                 window_flop=7.0, window=2)
    assert limited.prefill_flop(10, 2) == 2 * (3 * 5 + 11 + 7 * 2)


def test_sizes():
    assert analysis.alpha_tokens(50e9, 40016) == 3_748_500
    assert analysis.beta_tokens(1000.0) == 5000
    # 1.6 s at 50 GB/s: the 80 GB of buffer that the paper's nodes have.
    assert analysis.buffer_bytes(50e9, 1.6) == 80e9
    assert analysis.working_set_bytes(0.1, 1000, 56000, 20000) == 0.1 * 1000 * 28000 * 20000


@pytest.mark.parametrize("wrong", [
    lambda: ClusterShape(0), lambda: ClusterShape(8.0), lambda: ClusterShape(True),
    lambda: ClusterShape(snic_ratio=0), lambda: ClusterShape(dram_bytes_per_s=math.nan),
    lambda: ClusterShape(snic_bytes_per_s=math.inf), lambda: ClusterShape(snic_ratio="1"),
    lambda: analysis.utilisation(PAPER, 0, 1), lambda: analysis.best_read_rates(PAPER, 1, 1.5),
    lambda: analysis.model_cost("gpt-5"), lambda: analysis.cache_compute_ratio("deepseek-v3", -1),
    lambda: analysis.cache_compute_ratio("deepseek-v3", 10, 0),
    lambda: ClusterShape(snic_bytes_per_s=10**400), lambda: ClusterShape(dram_bytes_per_s=5e-324),
    lambda: analysis.alpha_tokens(0, 1), lambda: analysis.buffer_bytes(-1, 1)])
def test_bad_input_is_refused(wrong):
    with pytest.raises(InvalidArgument):
        wrong()


def test_the_command_in_json():
    done = kvio("--gpus-per-node", "8", "--snic-ratio", "1", "--dram-bytes-per-s", "500e9",
                "--snic-bytes-per-s", "50e9", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["range"] == {
        "least": 1 / 7, "most": 7 / 2, "binds_below": ["PE CNIC write"],
        "binds_above": ["DE CNIC write", "DE DRAM"], "derived": {"least": 1 / 7, "most": 7 / 2}}
    json.dumps(report, allow_nan=False)


def test_the_command_in_words():
    done = kvio("--prefill-nodes", "9", "--decode-nodes", "1", "--model", "deepseek-v3.2",
                "--gpu-flop-per-s", "1e15", "--agents-per-s", "0.1", "--session-s", "600",
                "--total-tokens", "56000", "--residency-s", "1.6")
    assert done.returncode == 0, done.stderr
    for line in ("0.1429 <= P/D <= 3.5", "above, DE CNIC write and DE DRAM", "basic: ",
                 "dual path: 225 GB/s", "12.2 at 16384", "alpha", "beta", "working set: 67.2",
                 "80 GB"):
        assert line in done.stdout
    nothing = kvio("--gpus-per-node", "2", "--snic-ratio", "1.2")
    assert nothing.returncode == 0 and "never  suffices" in nothing.stdout


@pytest.mark.parametrize("arguments, said", [
    (["--prefill-nodes", "2"], "go together"), (["--snic-ratio", "0"], "snic_ratio"),
    (["--agents-per-s", "1", "--session-s", "1", "--total-tokens", "9"], "--model"),
    (["--gpu-flop-per-s", "0"], "--model"),
    (["--plot", "/nowhere/x.svg"], "/nowhere/x.svg"), (["--plot", "x.nosuch"], "x.nosuch")])
def test_the_command_refuses(arguments, said):
    done = kvio(*arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_the_plot_is_drawn(tmp_path):
    done = kvio("--plot", str(tmp_path / "range.svg"))
    drawn = (tmp_path / "range.svg").read_text()
    assert done.returncode == 0 and drawn.lstrip().startswith("<?xml") and "</svg>" in drawn
    assert done.stderr == f"the plot is in {tmp_path / 'range.svg'}\n"
