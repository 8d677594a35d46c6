"""The soaks in short, and that they see what they are there to see. The long form: `make soak`."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

import soak_kill
from blocks import LAYOUT, chain, edit, open_store, put, segments
from kvio.storage import format as fmt

HERE = Path(__file__).parent


def soak(name, *arguments, status=0, folder=None):
    done = subprocess.run([sys.executable, str(HERE / name), *arguments], capture_output=True,
                          text=True, timeout=600,
                          env={**os.environ, **({"TMPDIR": str(folder)} if folder else {})})
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_kill_9_at_random_points(tmp_path):
    said = soak("soak_kill.py", "--rounds", "10", "--dir", str(tmp_path))
    print(said)
    assert "seed" in said and "passed:" in said
    assert os.listdir(tmp_path) == []


@pytest.fixture
def filled(tmp_path):
    """(path, a segment file, {chain: blocks}) of a store in which all is well."""
    with open_store(tmp_path) as store:
        for seed in range(3):
            put(store, chain(4, seed))
    [segment] = segments(tmp_path)
    known = {seed: 4 for seed in range(3)}
    assert soak_kill.check(str(tmp_path), known, known, 1)["blocks"] == 12
    return str(tmp_path), segment, known


@pytest.mark.parametrize("at, what", [
    (8192 + 5 * 128 + 30, "of 4"),                              # a header is damaged: a block lost
    (None, "cannot be read|without its payload"),               # a payload is wrong
])
@pytest.mark.parametrize("seed", range(4))
def test_the_check_sees_damage(filled, at, what, seed):
    path, segment, known = filled
    start = fmt.read_description(path).geometry.payload_offset
    edit(segment, at or start + 5 * LAYOUT.stride + 77, lambda byte: byte ^ 1)
    with pytest.raises(AssertionError, match=what):
        soak_kill.check(path, known, known, seed)


def test_the_check_sees_blocks_that_nobody_wrote(filled):
    path, _, known = filled
    del known[1]
    with pytest.raises(AssertionError, match="nobody wrote"):
        soak_kill.check(path, {}, known, 1)


def test_the_check_sees_lost_blocks(filled):
    path, _, known = filled
    known[7] = 2
    with pytest.raises(AssertionError, match="0 of 2"):
        soak_kill.check(path, {7: 2}, known, 1)


@pytest.mark.needs("soak")
def test_power_cuts(tmp_path):
    assert "passed:" in soak("soak_power.py", "--rounds", "3", folder=tmp_path)


@pytest.mark.needs("soak")
@pytest.mark.parametrize("control", ["visible", "flush"])
def test_power_cuts_are_seen(tmp_path, control):
    said = soak("soak_power.py", "--rounds", "25", "--control", control, status=1, folder=tmp_path)
    assert "AssertionError" in said or "mount:" in said
