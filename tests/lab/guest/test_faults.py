"""A cable that is cut, packets that get lost, peers that die: every transfer ends, and says why."""
import os
import signal
import time

import numpy as np
import pytest

from kvio.errors import TransferError
from kvio.layout import READ, WRITE
from kvio.transfer import KV, Nic
from lab.guest import peers
from lab.guest.wire import shaped, wire
from nics import pattern


@pytest.fixture(autouse=True)
def mended():
    yield
    wire("mend")


@pytest.fixture
def patient(monkeypatch):
    """0.5 s before a packet counts as lost, six times: a slow link and a slow machine are none."""
    monkeypatch.setenv("KVIO_IB_TIMEOUT", "17")


@pytest.fixture
def program():
    return peers.plain_verbs()


def works(pair):
    """The whole memory of b is read, and is right."""
    pair.mine[:] = 0
    at = 4096 * np.arange(pair.mine.nbytes // 4096)
    pair.peer.read(pair.read(at, at, 4096)).wait(60)
    assert (pair.mine == pair.theirs).all()


@pytest.mark.parametrize("post", ["read", "write"])
def test_a_transfer_survives_a_short_outage(patient, pair, post):
    at = 65536 * np.arange(16)
    with shaped("plain", "2mbit"):
        transfer = getattr(pair.peer, post)(getattr(pair, post)(at, at, 65536))
        time.sleep(0.1)                             # of 4 s, on a busy host too
        wire("lose")
        time.sleep(0.1)
        assert not transfer.done
        wire("mend")
        transfer.wait(60)
    assert (pair.mine == pair.theirs).all()


def test_a_peer_that_nothing_reaches(pair):
    """It ends with RETRY_EXC_ERR after the queue pair's retries, and the rest is flushed."""
    wire("lose")
    transfer = pair.peer.read(pair.read([0, 4096, 8192], 0, 4096))
    with pytest.raises(TransferError, match="RETRY_EXC_ERR.*peer b|peer b.*RETRY_EXC_ERR"):
        transfer.wait(60)
    assert pair.peer.query()["kv"]["state"] == "error"
    wire("mend")
    pair.peer.reset()
    works(pair)


@pytest.mark.parametrize("device", ["w0", "w1"])
def test_a_link_goes_down_and_comes_up(patient, pair, device):
    """The kernel's stack does not wait for a link that is down: what is under way fails at once."""
    at = 65536 * np.arange(16)
    with shaped("plain", "4mbit"):
        transfer = pair.peer.write(pair.write(at, at, 65536))
        time.sleep(0.1)
        wire("cut", device)
        with pytest.raises(TransferError, match="class kv"):
            transfer.wait(60)
        wire("mend")
    pair.peer.reset()
    works(pair)


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_the_device_itself_refuses_a_wrong_rkey(program, opcode):
    """kvio's far table is made to believe in it; the memory of neither end changes."""
    with Nic.open("verbs:rxe0", name="a") as nic:
        with peers.Stranger(program, "rxe1", nic, KV, pattern(65536), wrong_rkey=256) as stranger:
            mine, theirs = stranger.mine.copy(), stranger.show(0, 4096)
            batch = stranger.post(opcode, 0, 0, 4096)
            assert batch.wait(60)
            assert "REM_ACCESS_ERR" in batch.explain(0)
            assert stranger.qp.query()["state"] == "error"
            assert (stranger.mine == mine).all() and (stranger.show(0, 4096) == theirs).all()


def test_a_peer_killed_in_the_middle(program):
    """While the kernel clears up after it, its memory is gone before its queue pair is."""
    with Nic.open("verbs:rxe0", name="a") as nic, shaped("plain", "24mbit"):
        with peers.Stranger(program, "rxe1", nic, KV, pattern(1 << 20)) as stranger:
            batch = stranger.post(READ, 0, 0, 65536, count=16)
            time.sleep(0.1)
            os.kill(stranger.process.pid, signal.SIGKILL)
            assert batch.wait(60)
            status = list(batch.status)
            first = next(at for at, one in enumerate(status) if one)
            assert any(name in batch.explain(first) for name in ("RETRY_EXC_ERR", "REM_ACCESS_ERR"))
            assert all(status[first:]) and stranger.qp.query()["state"] == "error"


def test_a_stopped_peer_is_read_all_the_same(program):
    """One-sided: the peer's processor has no part in it."""
    with Nic.open("verbs:rxe0", name="a") as nic:
        with peers.Stranger(program, "rxe1", nic, KV, pattern(65536)) as stranger:
            theirs = stranger.show(0, 4096)
            os.kill(stranger.process.pid, signal.SIGSTOP)
            batch = stranger.post(READ, 8192, 0, 4096)
            assert batch.wait(60) and not any(batch.status)
            assert (stranger.mine[8192:12288] == theirs).all()
