"""All back ends for every test that takes `backend`. uring needs a kernel that allows it; usrbio
runs on a stand-in for 3FS (standin.py), with private pools and with named ones."""
import os
import warnings

import pytest

import blocks
import standin as standins
from kvio import pages
from kvio._ext import ring as _ring
from kvio.errors import errno_name
from require import need, skip_or_fail


@pytest.fixture(scope="session")
def standin_library(tmp_path_factory):
    """The stand-in's path, with the folder of all temporary folders as its mount; None without a
    C compiler."""
    os.makedirs(tmp_path_factory.getbasetemp() / "3fs-virt" / "iovs")
    yield standins.build(tmp_path_factory.mktemp("standin"))
    pages._unlink_orphans()                # of processes that tests have killed


@pytest.fixture
def standin(standin_library, tmp_path_factory, monkeypatch):
    """The stand-in for 3FS, open in this process; every tmp_path lies on it."""
    if standin_library is None:
        need("compiler")
    for name, value in standins.environment(standin_library).items():
        monkeypatch.setenv(name, value)
    code, why = _ring.usrbio_load()
    assert code == 0, why
    warnings.filterwarnings("ignore", "a pool without a name", RuntimeWarning)
    controls = standins.StandIn(standin_library, tmp_path_factory.getbasetemp())
    controls.reset()
    yield controls
    controls.reset()


@pytest.fixture(params=["uring", "threads", "usrbio", "usrbio-named"])
def backend(request, monkeypatch):
    if request.param == "uring":
        need("uring")
        code = _ring.probe("uring")
        if code:
            skip_or_fail("uring", f"kvio was built without it, or {errno_name(code)}")
    if request.param.startswith("usrbio"):
        request.getfixturevalue("standin")
        monkeypatch.setattr(blocks, "NAMED", request.param == "usrbio-named")
    return request.param.split("-")[0]
