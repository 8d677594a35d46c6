"""The seeded fault driver over hundreds of seeds, and the proof that it can fail.

FAULT_SEEDS=5000 runs more; `make soak` does. A failure prints its seed and how to run it again.
"""
import os
import pathlib
import re
import subprocess
import sys

import pytest

from fault_driver import report, run_seed
from fault_mutants import MUTANTS

NUM_SEEDS, PER_TEST = int(os.environ.get("FAULT_SEEDS", 300)), 20


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, PER_TEST))
def test_random_faults(first):
    for seed in range(first, min(first + PER_TEST, NUM_SEEDS)):
        run = run_seed(seed)
        assert not run.problems, report(run)


def test_random_faults_in_real_time_on_a_real_disk():
    for seed in range(40):
        run = run_seed(seed, real=True)
        assert not run.problems, report(run)


def test_a_seed_goes_the_same_way_again():
    """Step by step: or there would be little use in printing it."""
    for seed in range(NUM_SEEDS, NUM_SEEDS + 15):
        first, again = run_seed(seed), run_seed(seed)
        assert first.steps.names == again.steps.names and first.told == again.told
        assert first.cluster.counters() == again.cluster.counters()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name):
    """In a process of its own: what it leaves in flight is nobody else's."""
    here = pathlib.Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), str(here.parent.parent)])
    found = subprocess.run([sys.executable, here / "fault_mutants.py", name], text=True,
                           capture_output=True, env={**os.environ, "PYTHONPATH": path},
                           timeout=240)
    assert found.returncode == 0, found.stdout + found.stderr
    assert re.search(MUTANTS[name][1], found.stdout), found.stdout
