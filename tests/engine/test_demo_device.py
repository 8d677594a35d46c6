"""`kvio demo --device cuda:0` on the fake libcuda: the tokens of host memory, and honest words."""
import json
import os
import subprocess
import sys

import pytest
from on_device import DEVICE, opened

from kvio.engine.demo_timed import TimedSetting, timed_part
from kvio.errors import InvalidArgument
from kvio.layout import BlockLayout

SMALL = TimedSetting(num_agents=4, num_turns=2, layout=BlockLayout(4, 16, 128),
                     context_tokens=(200, 300), snic_bytes_per_s=10_000_000)


@pytest.fixture(scope="module")
def device():
    with opened() as fake:
        yield fake


def demo(*arguments, **environment):
    return subprocess.run([sys.executable, "-m", "kvio", "demo", "--quiet", *arguments], text=True,
                          capture_output=True, timeout=300, env={**os.environ, **environment})


def test_the_real_part_says_the_same_and_where_it_was(device):
    on_host, there = (demo("--model", "seeded:2", "--json", *where)
                      for where in ((), ("--device", DEVICE)))
    assert there.returncode == 0, there.stderr
    on_host, there = json.loads(on_host.stdout)["real"], json.loads(there.stdout)["real"]
    assert there["summary"]["generated"] == on_host["summary"]["generated"]
    assert there["summary"]["mismatches"] == {"basic": [], "dualpath": []}
    assert there["summary"]["nic"] == DEVICE
    assert on_host["summary"]["hbm"] == "host memory" and "hbm" not in on_host["basic"]
    for mode in "none", "basic", "dualpath":
        assert there[mode]["hit_tokens"] == on_host[mode]["hit_tokens"]
        assert there[mode]["kv_errors"] == 0 and there[mode].get("hits_as_predicted", True)
        assert there[mode]["doorbells"] == on_host[mode]["doorbells"]
        hbm = there[mode]["hbm"]
        assert hbm["device"] == DEVICE and sum(hbm["ways"].values()) > 0
        assert hbm["written_bytes"] > 0 and hbm["title"] in there["summary"]["hbm"]
    assert there["dualpath"]["paths"]["pe"] and there["dualpath"]["paths"]["de"]


def test_the_report_says_what_was_real(device):
    done = demo("--model", "seeded:2", "--device", DEVICE)
    assert done.returncode == 0, done.stderr
    assert f"HBM is the memory of {DEVICE} (" in done.stdout
    assert "host memory" not in done.stdout
    assert f"all KV moved by the copy engines of {DEVICE}, the arithmetic is the CPU's" \
        in done.stdout
    assert "copied by (times)" in done.stdout and "HBM fetched / written" in done.stdout


def test_the_timed_part_paces_storage_alone(device, tmp_path):
    on_host = timed_part(SMALL, str(tmp_path), runs=("basic", "dualpath"))
    there = timed_part(SMALL, str(tmp_path), runs=("basic", "dualpath", "push"), device=DEVICE)
    assert there["tokens_equal"] and there["nic"] == DEVICE and DEVICE in there["hbm"]
    assert there["emulated"]["cnic_bytes_per_s"] is None
    assert there["emulated"]["snic_bytes_per_s"] == SMALL.snic_bytes_per_s
    assert on_host["emulated"]["cnic_bytes_per_s"] and "CNICs" in on_host["emulated"]["why"]
    for name, figures in there["modes"].items():
        assert figures["kv_errors"] == 0 and figures["hits_as_predicted"]
        assert figures["hit_tokens"] == on_host["modes"]["basic"]["hit_tokens"] > 0
        assert sum(figures["hbm"]["ways"].values()) > 0, name


def test_the_timed_report_says_that_copies_are_not_paced(device):
    from kvio.engine.report import render
    part = timed_part(SMALL, runs=("basic",), device=DEVICE)
    text = render({"timed": {**part.pop("modes"), "summary": part}, "tokens_equal": True,
                   "ok": True})
    assert f"CNICs are the copy engines of {DEVICE}, NOT paced" in text
    assert "8 CNICs" not in text and f"HBM is the memory of {DEVICE}" in text


def test_link_time_is_not_a_devices(device):
    with pytest.raises(InvalidArgument, match="link time"):
        timed_part(SMALL, link_time=True, device=DEVICE)


# ---- refused before anything runs

@pytest.mark.parametrize("option", [
    ["--nic", "soft"], ["--nic", "verbs"], ["--link-time", "--only", "timed"],
    ["--only", "timed", "--policy", "push", "--policy", "oracle"], ["--collectives"],
    ["--only", "real", "--only", "collectives"]])
def test_what_does_not_go_with_a_device_is_refused_in_one_line(option):
    done = demo("--device", DEVICE, *option)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"kvio: HBM on {DEVICE} and --")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name, environment", [
    ("cuda:0", {"KVIO_CUDA_LIBRARY": "/nowhere/libcuda.so.1"}), ("cuda:9", {}), ("cuda:x", {}),
    ("soft", {}), ("", {})])
def test_a_gpu_that_is_not_there_is_one_line_and_exit_code_2(name, environment):
    done = demo("--device", name, **environment)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("kvio: ") and len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr
