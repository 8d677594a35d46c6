"""The engines of `kvio demo` on RDMA NICs: the same tokens as on soft ones."""
import json
import subprocess
import sys

import pytest


def demo(nic):
    done = subprocess.run([sys.executable, "-m", "kvio", "demo", "--only", "real", "--model",
                           "seeded:2", "--json", "--quiet", "--nic", nic], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)["real"]


@pytest.fixture(scope="module")
def soft():
    return demo("soft")


@pytest.mark.parametrize("nic", ["verbs:rxe0", "verbs:rxe0,rxe1"])
def test_the_demo_gives_the_same_tokens(soft, nic):
    """In both modes as without any KV moved, which is compared token by token; and that, with what
    a run on soft NICs says."""
    verbs = demo(nic)
    for found in verbs, soft:
        assert found["summary"]["tokens_equal"]
    assert verbs["summary"]["sample"] == soft["summary"]["sample"]
    for mode in "basic", "dualpath":
        for figure in "hit_tokens", "prompt_tokens", "generated_tokens", "kv_errors":
            assert verbs[mode][figure] == soft[mode][figure], (mode, figure)
        assert verbs[mode]["hit_tokens"] and verbs[mode]["doorbells"]
