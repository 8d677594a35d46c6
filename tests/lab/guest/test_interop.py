"""kvio's queue pairs against programs that know nothing of it: see peers.py."""
import numpy as np
import pytest

from kvio.layout import READ, WRITE
from kvio.transfer import COLLECTIVE, KV, Nic
from lab.guest import peers
from nics import pattern
from require import skip_or_fail

REM_ACCESS_ERR = 10


@pytest.fixture(params=["C", "pyverbs"])
def program(request):
    if request.param == "C":
        return peers.plain_verbs()
    if peers.why_no_pyverbs():
        skip_or_fail("rxe", peers.why_no_pyverbs())
    return peers.plain_pyverbs()


@pytest.mark.parametrize("c", [KV, COLLECTIVE], ids=lambda c: c.name)
def test_reads_and_writes_both_ways(program, c):
    with Nic.open("verbs:rxe0", name="a") as nic:
        with peers.Stranger(program, "rxe1", nic, c, pattern(1 << 18)) as stranger:
            mine, theirs = stranger.mine, stranger.show(0, 65536)
            expected = mine.copy()

            batch = stranger.post(READ, 100000, 3, 5001, count=5)
            assert batch.wait(30) and not np.asarray(batch.status).any()
            expected[100000:125005] = theirs[3:25008]
            assert (mine == expected).all()

            batch = stranger.post(WRITE, 7, 40000, 3333, count=5)
            assert batch.wait(30) and not np.asarray(batch.status).any()
            theirs = theirs.copy()
            theirs[40000:40000 + 5 * 3333] = mine[7:7 + 5 * 3333]
            assert (stranger.show(0, 65536) == theirs).all()

            assert stranger.ask("read", 1000, 200000, 9999) == 0
            theirs[1000:10999] = mine[200000:209999]
            assert (stranger.show(0, 65536) == theirs).all()

            assert stranger.ask("write", 20000, 150001, 9999) == 0
            expected[150001:160000] = theirs[20000:29999]
            assert (mine == expected).all()


def test_both_directions_at_once(program):
    with Nic.open("verbs:rxe0", name="a") as nic:
        with peers.Stranger(program, "rxe1", nic, KV, pattern(1 << 18)) as stranger:
            theirs = stranger.show(0, 32768)
            batch = stranger.post(READ, 65536, 0, 4096, count=8)
            assert stranger.ask("write", 0, 0, 32768) == 0
            assert batch.wait(30) and not np.asarray(batch.status).any()
            assert (stranger.mine[:32768] == theirs).all()
            assert (stranger.mine[65536:98304] == theirs).all()


def test_they_cannot_touch_what_is_not_registered():
    """The device refuses it, whatever the program thinks."""
    with Nic.open("verbs:rxe0", name="a") as nic:
        with peers.Stranger(peers.plain_verbs(), "rxe1", nic, KV, pattern(65536)) as stranger:
            before = stranger.mine.copy()
            assert stranger.ask("write", 0, 65536 - 100, 4096) == REM_ACCESS_ERR
            assert (stranger.mine == before).all()
