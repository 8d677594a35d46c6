"""`kvio demo` with a seeded model, on soft NICs and through the verbs provider: the same tokens."""
import json
import os
import subprocess
import sys

import pytest

from kvio.engine.demo import real_part
from kvio.engine.demo_model import load_model
from kvio.errors import InvalidArgument

TRANSFER = os.path.join(os.path.dirname(__file__), "..", "transfer")


def demo(*arguments, **environment):
    done = subprocess.run([sys.executable, "-m", "kvio", *arguments, "--json"], text=True,
                          capture_output=True, timeout=300, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def soft():
    return demo("demo", "--model", "seeded:2", "--quiet")


def standin():
    """Where the stand-in for libibverbs is, built for these tests."""
    sys.path.insert(0, TRANSFER)
    try:
        import ibverbs_standin
        return ibverbs_standin.build()
    finally:
        sys.path.remove(TRANSFER)


def test_a_seeded_model_says_the_same_in_every_mode(soft):
    assert soft["ok"] and set(soft) == {"real", "tokens_equal", "ok"}   # no timed run by itself
    real = soft["real"]
    assert real["summary"]["mismatches"] == {"basic": [], "dualpath": []}
    assert [len(turns) for turns in real["summary"]["generated"].values()] == [3, 3, 3]
    for mode in "basic", "dualpath":
        assert real[mode]["hits_as_predicted"] and real[mode]["hit_tokens"] > 0
    assert real["dualpath"]["paths"]["pe"] and real["dualpath"]["paths"]["de"]


@pytest.mark.parametrize("where", [
    pytest.param("standin", marks=pytest.mark.needs("compiler", "ibverbs-headers")),
    pytest.param("rxe0", marks=pytest.mark.needs("rxe"))])
def test_the_tokens_are_those_of_soft_nics(soft, where):
    library = {"KVIO_IBVERBS_LIBRARY": standin()} if where == "standin" else {}
    device = "verbs" if where == "standin" else "verbs:rxe0"
    verbs = demo("demo", "--model", "seeded:2", "--nic", device, "--quiet", **library)
    assert verbs["real"]["summary"]["nic"] == device
    assert verbs["real"]["summary"]["generated"] == soft["real"]["summary"]["generated"]
    for mode in "none", "basic", "dualpath":
        assert verbs["real"][mode]["hit_tokens"] == soft["real"][mode]["hit_tokens"]
        assert verbs["real"][mode]["doorbells"] > 0


@pytest.mark.needs("compiler", "ibverbs-headers")
def test_collectives_and_the_benchmark_go_through_verbs_too():
    library = {"KVIO_IBVERBS_LIBRARY": standin()}
    part = demo("demo", "--collectives", "--nic", "verbs", "--quiet", **library)["collectives"]
    assert part["summary"]["tokens_equal"] and part["summary"]["emulated"] == {"clock": "real time"}
    assert part["one_class"]["collective"]["num"] > 0
    cells = demo("bench", "transfer", "--nic", "verbs", "--sizes", "4K", "--batches", "8",
                 "--seconds", "0", **library)["cells"]
    assert [cell["doorbells_per_wr"] for cell in cells] == [1 / 8, 1 / 8]


def test_a_seeded_model_depends_on_its_layers_alone():
    one, same, other = (load_model(name) for name in ("seeded", "seeded:2", "seeded:3"))
    assert one.sessions == same.sessions and one.layout == same.layout != other.layout
    assert one.model.params == same.model.params and other.layout.num_layers == 3


@pytest.mark.parametrize("name", ["gpt", "seeded:0", "seeded:9", "seeded:", "seeded:2:3", ""])
def test_models_that_are_not_there_are_refused(name, tmp_path):
    with pytest.raises(InvalidArgument, match="seeded:LAYERS"):
        real_part(str(tmp_path), model=name)


def test_a_nic_that_is_not_there_is_one_line_before_anything_runs():
    done = subprocess.run([sys.executable, "-m", "kvio", "demo", "--nic", "verbs:no-such-hca"],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
