"""What the policies are worth, in link time: figures of links and decisions, of no machine."""
from dataclasses import replace

import pytest

from kvio.engine.demo_timed import TimedSetting, timed_part
from kvio.engine.metrics import max_over_avg_by_round
from kvio.layout import BlockLayout
from kvio.scheduler import AttentionModel

# A sixteenth of the demo's bytes at a sixteenth of its rates, so in the same time.
SMALL = replace(TimedSetting(), layout=BlockLayout(4, 64, 64), snic_bytes_per_s=6_250_000)
SKEWED = replace(SMALL, num_decode=2, num_agents=48, context_tokens=(800, 9000), spread=0.7,
                 load_compute_ratio=6.0, seed=1)
UNEVEN = replace(
    SMALL, num_prefill=2, num_decode=2, num_agents=64, num_turns=1, context_tokens=(800, 6000),
    append_tokens=(30, 1500), spread=1.0, load_compute_ratio=0.2, batch_tokens=65536,
    attention_time=AttentionModel(2e-8))


def part(setting, *runs):
    made = timed_part(setting, runs=runs, link_time=True)
    assert made["tokens_equal"]
    for name in runs:
        assert made["modes"][name]["hits_as_predicted"] and made["modes"][name]["kv_errors"] == 0
    return made


@pytest.mark.parametrize("num_decode, least", [(1, 1.8), (2, 2.4)])
def test_dual_path_over_basic_on_a_busy_queue(num_decode, least):
    made = part(replace(SMALL, num_decode=num_decode), "basic", "dualpath")
    assert made["load_compute_ratio"] == pytest.approx(3) and not made["void"]
    assert made["speedup"] >= least


def test_split_reads_a_lone_request_from_both_sides():
    lone = replace(SMALL, num_agents=1, num_turns=1, context_tokens=(5400, 5400))
    made = part(lone, "basic", "dualpath", "split")
    ttft = {name: made["modes"][name]["ttft_s"] - made["emulated"]["prefill_s_per_new_token"]
            * made["miss_tokens"] for name in ("basic", "dualpath", "split")}
    assert ttft["dualpath"] == pytest.approx(ttft["basic"], rel=0.05)   # it is alone: one side
    assert ttft["basic"] / ttft["split"] >= 1.8


def test_storage_nics_are_balanced_on_a_skewed_trace():
    made = part(SKEWED, "round_robin", "dualpath")
    balance = {name: made["modes"][name]["snic_max_over_avg"] for name in made["modes"]}
    assert balance["round_robin"] >= 1.3 and balance["dualpath"] <= 1.18


def test_the_quota_balances_attention():
    without = part(UNEVEN, "dualpath")["modes"]["dualpath"]
    quota = part(replace(UNEVEN, quota_s=0.04), "dualpath")["modes"]["dualpath"]
    assert without["attention_max_over_avg"] >= 1.2
    assert quota["attention_max_over_avg"] <= 1.06


def test_the_oracle_bounds_them_all():
    made = part(SMALL, "oracle", "dualpath", "split", "push", "any_node")
    jct = {name: figures["jct_s"] for name, figures in made["modes"].items()}
    assert min(jct, key=jct.get) == "oracle"


def test_rounds_count_while_every_engine_has_a_batch():
    assert max_over_avg_by_round([[1, 3, 9], [3, 3]]) == (1.5 + 1) / 2
    assert max_over_avg_by_round([[1, 2]]) is None and max_over_avg_by_round([[], [1]]) is None
    assert max_over_avg_by_round([[None], [None]]) is None
