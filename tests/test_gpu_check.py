"""benchmarks/gpu_check.sh, rehearsed on the fake driver: its steps, what it leaves, what it says of
a step that fails. How long anything takes is not looked at."""
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu_check.sh"
sys.path.insert(0, str(ROOT / "tests" / "transfer"))

import fake_cuda                                                            # noqa: E402

from require import skip_or_fail                                            # noqa: E402

pytestmark = pytest.mark.needs("compiler")


def check(folder, *steps, **environment):
    """One run of the script: (exit code, summary, what it said)."""
    done = subprocess.run(
        [SCRIPT, folder, *steps], capture_output=True, text=True, timeout=240, cwd=folder.parent,
        env={**os.environ, "PYTHON": sys.executable, "LD_PRELOAD": "", **environment})
    summary = folder / "summary.txt"
    return done.returncode, summary.read_text() if summary.exists() else "", \
        done.stdout + done.stderr


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """All steps but the tests, which this session runs anyway, and the 12 s of the timed run."""
    if fake_cuda.why_not():
        skip_or_fail("cuda-headers", fake_cuda.why_not())
    folder = tmp_path_factory.mktemp("check") / "out"
    return folder, *check(folder, "machine", "build", "bench", "real",
                          KVIO_CUDA_LIBRARY=fake_cuda.build())


def test_every_step_passes_and_is_told(rehearsal):
    folder, code, summary, said = rehearsal
    assert code == 0, said
    for step in "machine", "build", "bench", "real":
        assert f"{step:8} rc 0 " in summary and f"{step:8} rc 0 " in said
    assert "every step passed; a fake driver: no figure here says anything of speed" in summary


def test_the_folder_holds_the_results(rehearsal):
    folder, *_ = rehearsal
    assert "numpy" in (folder / "machine.txt").read_text()
    assert "extensions     ok" in (folder / "build.log").read_text()       # says kvio doctor
    report = json.loads((folder / "real.json").read_text())
    assert report["ok"] and "cuda:0" in report["real"]["summary"]["hbm"]


def test_the_summary_ends_with_what_must_be_reached(rehearsal):
    folder, _, summary, _ = rehearsal
    must = summary.partition("What must be reached:")[2]
    assert must.count("fake driver: no speed") >= 10 and "| met" not in must
    assert must.strip() in (folder / "copy.md").read_text()


def test_a_step_that_fails_fails_the_check_and_stops_no_other(tmp_path):
    """No libcuda at all: the demo cannot open the device, and the benchmark does not pass by being
    skipped. Nor does an earlier table stay there."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "copy.md").write_text("What must be reached: long ago\n")
    code, summary, said = check(tmp_path / "out", "machine", "real", "bench", "build",
                                KVIO_CUDA_LIBRARY=str(tmp_path / "none.so"))
    assert code == 1, said
    assert "machine  rc 0 " in summary and "build    rc 0 " in summary
    assert "bench    rc 1 " in summary
    assert "real     rc 2 " in summary and "A STEP HAS FAILED" in summary
    assert "long ago" not in summary
    assert "none.so" in said                    # the last lines of its log


def test_the_tests_of_a_machine_with_a_gpu(tmp_path):
    """The fake as that machine's libcuda.so.1, and nothing installed that is not needed: no test is
    missing a thing that only the fake has, none fails for want of a library."""
    if fake_cuda.why_not():
        skip_or_fail("cuda-headers", fake_cuda.why_not())
    others = [name for name in ("torch", "cupy", "jax") if importlib.util.find_spec(name)]
    if others and not (others == ["torch"] and version("torch").endswith("+cpu")):
        pytest.skip(f"installed here: {', '.join(others)}, which would take the fake for a GPU")
    (tmp_path / "libcuda.so.1").symlink_to(fake_cuda.build())
    code, summary, said = check(tmp_path / "out", "tests", KVIO_CUDA_LIBRARY="",
                                LD_LIBRARY_PATH=str(tmp_path))
    log = (tmp_path / "out" / "tests.log").read_text()
    assert code == 0 and "fake" not in summary, log
    assert re.search(r" passed, \d+ skipped", log) and "not installed" in log, log


def test_it_builds_with_a_setuptools_that_does_not_know_this_projects_metadata(tmp_path):
    """In a copy without what was built: setuptools before 77 refuses the licence's new form."""
    unbuilt = shutil.ignore_patterns("*.so", "__pycache__")
    for name in "benchmarks", "include", "kvio":
        shutil.copytree(ROOT / name, tmp_path / name, ignore=unbuilt)
    (tmp_path / "pyproject.toml").write_text("[project]\nlicense = 5\n")
    (tmp_path / "setup.py").write_text(
        "from setuptools import Extension, setup\n"
        "setup(ext_modules=[Extension('kvio._ext.small', ['small.c'])])\n")
    (tmp_path / "small.c").write_text(
        "#include <Python.h>\n"
        "static struct PyModuleDef it = { PyModuleDef_HEAD_INIT, \"small\" };\n"
        "PyMODINIT_FUNC PyInit_small(void) { return PyModule_Create(&it); }\n")
    subprocess.run([tmp_path / "benchmarks" / "gpu_check.sh", tmp_path / "out", "build"],
                   capture_output=True, timeout=240,
                   env={**os.environ, "PYTHON": sys.executable, "LD_PRELOAD": ""})
    log = (tmp_path / "out" / "build.log").read_text()
    assert list((tmp_path / "kvio" / "_ext").glob("small*.so")), log


def test_a_step_of_another_name_is_refused(tmp_path):
    code, summary, said = check(tmp_path / "out", "benhc")
    assert code == 2 and "benhc" in said and "passed" not in summary
