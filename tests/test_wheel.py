"""The wheel: built from the sdist, holds what it should, and runs where there is no compiler."""
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NUMPY_WHEELS = Path(sys.prefix) / "wheels"          # kept by the Makefile: no network needed here
# Of kvio/, not in a wheel as they are.
SOURCE = {".c", ".h", ".cu", ".pyx", ".pxd", ".pxi", ".so", ".pyc"}

ROUND_TRIP = """
import os, shutil, sys
for tool in ("cc", "gcc", "clang", "c++", "ld", "as"):
    assert shutil.which(tool) is None, f"{tool} is on PATH: this proves nothing"
import kvio, kvio.layout, kvio._ext.block
here = os.path.dirname(kvio.__file__)
assert here.startswith(sys.prefix), here
assert os.path.exists(os.path.join(here, "include", "kvio", "block.h"))
import numpy as np
layout = kvio.layout.BlockLayout(num_layers=2, block_tokens=16, bytes_per_token=256)
keys = kvio.layout.block_keys(np.arange(64, dtype=np.uint32), layout, namespace=b"wheel")
assert len(keys) == 4 and (keys["parent"][1:] == keys["key"][:-1]).all()
import tempfile
pool = kvio.BlockPool(layout, 4)
ids = pool.alloc(4)
for i in ids:
    pool.full(i)[:] = i + 1
with tempfile.TemporaryDirectory() as folder, kvio.BlockStore.open(folder, layout) as store:
    store.write(keys, pool, ids).wait()
    for i in ids:
        pool.full(i)[:] = 0
    assert store.match(keys) == 4 and store.read(keys, pool, ids).wait() == 4
assert all((pool.full(i) == i + 1).all() for i in ids)
with kvio.Nic.open("soft") as nic:
    work = np.zeros(4 * 4096, np.uint8)
    here, there = nic.register(work), nic.register(pool)
    nic.listen("here")
    side = kvio.Side(here.addr, 4096, (0, 0), here.key)
    layer = kvio.LayerDescriptors(kvio.READ, layout, side, None, pool.side(there.key), ids, 64)
    nic.connect("here").read(layer.layer(1)).wait()
assert (work.reshape(4, 4096) == (ids + 1)[:, None]).all()
from kvio.transfer import cuda              # a wheel brings the kernel for GPUs, compiled
assert b".entry kvio_copy" in cuda._kernel()
assert os.path.exists(os.path.join(os.path.dirname(kvio.__file__), "include", "kvio", "gpu.h"))
"""


def run(*command, **options):
    ran = subprocess.run([str(word) for word in command], capture_output=True, text=True,
                         stdin=subprocess.DEVNULL, **options)
    assert ran.returncode == 0, f"{command}\n{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}"
    return ran.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Made in the tree as a front end would make it."""
    folder = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    run(sys.executable, "-c", code, cwd=ROOT)
    return next(folder.glob("kvio-*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """Built from the sdist alone, so a file that the sdist lacks fails here."""
    keep = os.environ.get("KVIO_WHEEL_DIR")
    folder = ROOT / keep if keep else tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
        "-w", folder, sdist)
    return max(folder.glob("kvio-*.whl"), key=os.path.getmtime)


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """`bare(*command)` runs in a venv with the wheel and numpy, where PATH has nothing else."""
    venv = tmp_path_factory.mktemp("bare") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    source = ["--no-index", "--find-links", NUMPY_WHEELS] if NUMPY_WHEELS.exists() else []
    run(sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "-q",
        "--only-binary", ":all:", *source, wheel,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"})
    home = tmp_path_factory.mktemp("elsewhere")

    def bare(name, *arguments):
        return run(venv / "bin" / name, *arguments, cwd=home,
                   env={"PATH": str(venv / "bin"), "HOME": str(home)})
    return bare


def test_sdist_has_what_a_build_and_its_tests_need(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("setup.py", "pyproject.toml", "Makefile", "LICENSE", "README.md",
                 "include/kvio/block.h", "kvio/_ext/core.pxd", "tests/conftest.py", ".ci/run",
                 "include/kvio/gpu.h", "kvio/_ext/copy_kernel.cu", "kvio/_ext/copy_kernel.ptx",
                 ".ci/ptx", "benchmarks/gpu_check.sh"):
        assert name in names
    assert not [name for name in names if name.endswith(".so")]


def test_wheel_has_no_source_and_every_data_file(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert not [name for name in names if name.endswith((".c", ".cu", ".pyx"))]
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "build"))]
    here = {str(path.relative_to(ROOT)) for path in (ROOT / "kvio").rglob("*")
            if path.is_file() and path.suffix not in SOURCE}
    here |= {f"kvio/include/kvio/{path.name}" for path in (ROOT / "include/kvio").iterdir()}
    assert here - names == set(), "not in the wheel; see package-data in pyproject.toml"


def test_wheel_needs_no_other_library_where_it_runs(wheel, tmp_path):
    """Those of NICs and GPUs are opened when they are asked for. A wheel that is passed on carries
    liburing inside; where only the shared library is installed setup.py links that, and the wheel
    is for this machine alone."""
    with zipfile.ZipFile(wheel) as archive:
        modules = [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(tmp_path, modules)
    assert modules
    needed = "".join(run("ldd", tmp_path / name) for name in modules)
    assert "not found" not in needed
    assert not [name for name in ("cuda", "nvrtc", "ibverbs") if f"lib{name}" in needed]
    if any(Path("/usr").glob("lib/*/liburing.a")):
        assert "liburing" not in needed


def test_it_runs_without_a_compiler(bare):
    bare("python", "-W", "error", "-c", ROUND_TRIP)


def test_both_commands_run_elsewhere(bare, wheel):
    version = wheel.name.split("-")[1]
    assert bare("kvio", "--version").strip() == f"kvio {version}"
    assert "doctor" in bare("python", "-m", "kvio", "--help")
    assert "model package" in bare("kvio", "doctor", "--json")
