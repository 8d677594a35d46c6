"""The timed run of the demo: Basic against DualPath at a load/compute ratio of 3.0.

Real bytes, files, rings and NIC queues; bandwidths are emulated, arithmetic is slept. Wanted: 1P1D
>= 1.8 x (ideal 2), 1P2D >= 2.4 x (ideal 3), Basic's SNIC >= 90 % busy. In smoke mode a small trace
with fast links runs once and only its tokens and hits are checked.
"""
from dataclasses import replace

import pytest

from kvio.engine.demo import TimedSetting, timed_part

SMOKE = {"num_agents": 3, "num_turns": 1, "snic_bytes_per_s": 2_000_000_000}


@pytest.mark.parametrize("num_decode", [1, 2], ids=["1P1D", "1P2D"])
def test_timed_run(benchmark, num_decode, tmp_path):
    setting = replace(TimedSetting(), num_decode=num_decode)
    if benchmark.disabled:
        setting = replace(setting, **SMOKE)
    parts = []
    benchmark.pedantic(lambda: parts.append(timed_part(setting, str(tmp_path))), rounds=3,
                       iterations=1)
    for part in parts:
        assert part["tokens_equal"]
        assert all(f["hits_as_predicted"] and f["kv_errors"] == 0
                   for f in part["modes"].values())
    if not benchmark.disabled:
        benchmark.extra_info["speedups"] = [part["speedup"] for part in parts]
        benchmark.extra_info["basic_snic_busy"] = [part["basic_snic_busy"] for part in parts]
        print("\n", setting.name, benchmark.extra_info["speedups"],
              benchmark.extra_info["basic_snic_busy"])
