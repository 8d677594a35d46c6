"""The installed LMCache drives the connector: its StorageManager, its adapter, its memory; no
inference engine. Each step is a process of its own, so a hit can come from the store alone.

Needs the package lmcache (docs/lmcache.md says how to install it without all it asks for).
"""
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.needs("lmcache")

HERE = pathlib.Path(__file__).parent
WHOLE = [2, 4, 256, 64]             # 256 KiB in bfloat16: whole pages, so nothing is copied
ODD = [2, 3, 33, 10]                # 3,960 bytes


def lmcache(what, path, shape, *, count=4, first=0, **more):
    """One process of LMCache: what its driver tells, and all that it printed."""
    task = {"path": str(path), "shape": shape, "count": count, "first": first, **more}
    env = {**os.environ, "PYTHONPATH": str(HERE.parent.parent), "LMCACHE_LOG_LEVEL": "WARNING",
           "LMCACHE_TRACK_USAGE": "false"}
    ran = subprocess.run([sys.executable, str(HERE / "lmcache_driver.py"), what, json.dumps(task)],
                         capture_output=True, text=True, timeout=120, env=env)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr + ran.stdout, ran.stdout + ran.stderr
    return {**json.loads(ran.stdout.strip().split("\n")[-1]), "log": ran.stdout + ran.stderr}


@pytest.mark.parametrize("shape, copied", [(WHOLE, False), (ODD, True)])
def test_two_processes_4_of_4_hits_bit_equal(tmp_path, shape, copied):
    stored = lmcache("store", tmp_path, shape)
    loaded = lmcache("load", tmp_path, shape)
    assert stored["reserved"] == 4 and stored["used"] > 0
    assert (loaded["hits"], loaded["l1_hits"], loaded["l2_hits"]) == (4, 0, 4)
    assert loaded["equal"] == [True] * 4
    assert loaded["staged" if copied else "direct"] == 4
    assert loaded["direct" if copied else "staged"] == 0


def test_a_prefix_is_found(tmp_path):
    lmcache("store", tmp_path, WHOLE, count=3)
    loaded = lmcache("load", tmp_path, WHOLE, count=5)
    assert (loaded["hits"], loaded["equal"]) == (3, [True] * 3)
    assert lmcache("load", tmp_path, WHOLE, first=3)["hits"] == 0


def test_a_damaged_chunk_is_a_miss(tmp_path):
    lmcache("store", tmp_path, WHOLE)
    segment, = tmp_path.glob("chunks-*/segment-*")
    data = bytearray(segment.read_bytes())
    data[-1000] ^= 1                            # in the last slot, whichever chunk that is
    segment.write_bytes(data)
    loaded = lmcache("load", tmp_path, WHOLE)
    assert loaded["hits"] < 4 and loaded["equal"] == [True] * loaded["hits"]


def test_groups_of_other_sizes_share_the_path(tmp_path):
    lmcache("store", tmp_path, WHOLE)
    lmcache("store", tmp_path, ODD, group=1)
    assert lmcache("load", tmp_path, WHOLE)["equal"] == [True] * 4
    assert lmcache("load", tmp_path, ODD, group=1)["equal"] == [True] * 4
    assert lmcache("load", tmp_path, ODD, group=2)["hits"] == 0


def test_a_size_that_is_refused_leaves_lmcache_running(tmp_path):
    params = {"chunk_bytes": 4096}
    stored = lmcache("store", tmp_path, WHOLE, params=params, fails=True)
    assert (stored["reserved"], stored["used"]) == (4, 0)
    assert "did not store a chunk: a chunk of 262144 bytes; this store was opened for chunk_bytes" \
        in stored["log"]
    assert lmcache("load", tmp_path, WHOLE, params=params)["hits"] == 0


def test_what_lmcache_deletes_is_gone(tmp_path):
    stored = lmcache("store", tmp_path, WHOLE, delete=2, adapter={"max_capacity_gb": 1})
    assert stored["used"] == 2 * 256 << 10
