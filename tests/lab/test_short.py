"""The lab's guest runs here, and some of its tests pass in it; `make lab` runs all of them."""
import os
import subprocess
import sys

import pytest

from lab import kernel
from require import skip_or_fail

HERE = os.path.dirname(os.path.abspath(__file__))
pytestmark = pytest.mark.needs("lab")


@pytest.fixture(scope="module", autouse=True)
def a_kernel():
    try:
        kernel.tree()
    except kernel.LabMissing as missing:
        skip_or_fail("lab", str(missing))


def run(script, *arguments):
    done = subprocess.run([sys.executable, os.path.join(HERE, script), *arguments],
                          capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_a_command_runs_in_the_guest():
    status, out, err = run("rxe.py", "--realtime", "--", "/bin/sh", "-c",
                           "cat /sys/class/infiniband/rxe*/ports/1/state; echo wrong >&2; exit 7")
    assert (status, out) == (7, "4: ACTIVE\n4: ACTIVE\n") and "wrong" in err, err


def test_a_guest_that_dies_and_one_that_hangs():
    status, _, err = run("rxe.py", "--net", "none", "--", "/bin/sh", "-c",
                         "echo c >/proc/sysrq-trigger; sleep 60")
    assert status == 125 and "sysrq triggered crash" in err, err
    status, _, err = run("rxe.py", "--net", "none", "--timeout", "1", "--", "sleep", "1")
    assert status == 124 and "timed out" in err, err


def test_verbs_on_real_packets():
    status, out, err = run("suite.py", "--short")
    assert status == 0 and " passed" in out, out + err
