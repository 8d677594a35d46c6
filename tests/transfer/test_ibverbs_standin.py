"""The stand-in for libibverbs by itself: does it do, and refuse, what hardware would?"""
import os
import subprocess

import cbuild
import ibverbs_standin as s
import pytest

pytestmark = pytest.mark.needs("compiler", "ibverbs-headers")


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """Runs one of the checks written in C, on so many devices."""
    library = s.build()
    program = cbuild.compile_c(tmp_path_factory.mktemp("check") / "check", [s.CHECK], library,
                               f"-Wl,-rpath,{os.path.dirname(library)}")

    def check(name, devices):
        return subprocess.run([program, name], capture_output=True, text=True, timeout=60,
                              env={**os.environ, "KVIO_STANDIN": f"devices={devices}"})
    return check


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", ["moves", "errors", "full", "events", "refusals"])
def test_it_behaves_like_a_device(check, name, devices):
    ran = check(name, devices)
    assert ran.returncode == 0, ran.stderr


def test_overrunning_a_completion_queue_ends_the_process(check):
    ran = check("overrun", 1)
    assert ran.returncode < 0 and "completion queue overrun" in ran.stderr


def test_a_check_that_is_not_there_fails(check):
    assert check("nothing", 1).returncode == 2
    assert "no setting" in check("moves", "1,maximum=3").stderr
