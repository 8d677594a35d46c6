"""Pools that are files of /dev/shm: `BlockPool(..., named=True)`."""
import os
import signal
import stat
import subprocess
import sys

import numpy as np
import pytest

from kvio import pages
from kvio.errors import InvalidArgument, MappingFailed
from kvio.layout import BlockLayout
from kvio.memory import BlockPool

LAYOUT = BlockLayout(num_layers=2, block_tokens=4, bytes_per_token=600)


def names():
    return {name for name in os.listdir("/dev/shm") if name.startswith("kvio-pool-")}


def test_the_file_is_the_memory_and_goes_with_the_pool():
    before = names()
    with BlockPool(LAYOUT, 4, named=True) as pool:
        found = os.stat(pool.shm_path)
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_size == pool.region.nbytes == 4 * LAYOUT.stride
        assert found.st_blocks * 512 >= found.st_size           # all of it is there: no SIGBUS
        [block] = pool.alloc(1)
        pool.full(block)[:] = 7
        data = np.fromfile(pool.shm_path, np.uint8)
        assert (data[block * LAYOUT.stride:][:LAYOUT.full_block_nbytes] == 7).all()
    assert names() == before
    pool = BlockPool(LAYOUT, 4, named=True)
    view = pool.full(0)
    del pool
    assert names() == before and view.sum() == 0                # views keep the memory
    assert BlockPool(LAYOUT, 4).shm_path is None


def test_one_that_does_not_fit_is_refused_before_it_is_mapped():
    before = names()
    with pytest.raises(MappingFailed, match="/dev/shm.*shm-size"):
        BlockPool(LAYOUT, 1 << 30, named=True)
    assert names() == before


@pytest.mark.parametrize("also", [{"shared": True}, {"hugepages": True},
                                  {"memory": bytearray(1 << 20)}])
def test_a_named_pool_brings_its_own_pages(also):
    with pytest.raises(InvalidArgument):
        BlockPool(LAYOUT, 4, named=True, **also)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_neither_has_the_memory_nor_takes_the_name():
    with BlockPool(LAYOUT, 4, named=True) as pool:
        child = os.fork()
        if child == 0:
            pool.close()
            os._exit(0 if os.path.exists(pool.shm_path) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            pool.region.array[0] = 1
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def test_what_the_killed_have_left_goes_with_the_next_pool_and_nothing_else():
    code = ("import sys; from kvio.layout import BlockLayout; from kvio.memory import BlockPool; "
            "pool = BlockPool(BlockLayout(2, 4, 600), 4, named=True); "
            "print(pool.shm_path, flush=True); sys.stdin.read()")
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    path = child.stdout.readline().strip()
    with BlockPool(LAYOUT, 4, named=True) as mine:
        assert os.path.exists(path) and os.path.exists(mine.shm_path)
        child.kill()
        child.communicate()
        with BlockPool(LAYOUT, 4, named=True):
            assert not os.path.exists(path) and os.path.exists(mine.shm_path)


def test_no_shm_at_all(monkeypatch, tmp_path):
    monkeypatch.setattr(pages, "_SHM", str(tmp_path / "none"))
    with pytest.raises(MappingFailed, match="mount a tmpfs"):
        BlockPool(LAYOUT, 4, named=True)
