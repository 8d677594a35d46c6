"""Devices that do not say what became of their work: it is taken from them after a while, whoever
waits and however; and where they do not let it go, nobody else gets the memory."""
import asyncio
import errno
import os
import subprocess
import sys
import threading

import pytest

from kvio.errors import Busy, TransferError, TransferTimeout


@pytest.fixture
def silent(standin, connect, monkeypatch):
    """A connection whose device does nothing any more, and a transfer that it has."""
    monkeypatch.setenv("KVIO_IB_DRAIN_MS", "300")
    pair = connect()
    pair.peer.read(pair.read(0, 0, 64)).wait()
    standin.set(0, mute=1)
    return pair, pair.peer.read(pair.read(0, 0, [512] * 20))


def given_up(transfer):
    assert set(transfer.status) == {-errno.ECONNABORTED}
    return True


def test_it_is_taken_away_while_somebody_waits(standin, silent):
    pair, transfer = silent
    pair.peer._qps["kv"].fail()
    with pytest.raises(TransferError, match="WR_FLUSH_ERR"):
        transfer.wait(30)
    assert given_up(transfer) and standin.count("nbytes") == 64
    pair.a.deregister(pair.local)               # and its memory is free


def test_an_event_loop_wakes_up_for_it(silent):
    """Nobody else drives, and the device says nothing."""
    pair, transfer = silent
    pair.peer._qps["kv"].fail()

    async def main():
        await asyncio.wait_for(transfer, 30)
    with pytest.raises(TransferError, match="WR_FLUSH_ERR"):
        asyncio.run(main())
    assert given_up(transfer)


def test_who_polls_need_not_do_so_often(silent, monkeypatch):
    """It goes by the clock, not by how often somebody looks."""
    pair, transfer = silent
    pair.peer._qps["kv"].fail()
    assert not transfer.done
    threading.Event().wait(0.35)
    pair.a.poll()
    assert transfer.done and given_up(transfer)


def test_a_device_that_flushes_in_time_is_left_alone(standin, silent):
    pair, transfer = silent
    qpn = pair.peer.query()["kv"]["qpn"]
    pair.peer._qps["kv"].fail()
    with pytest.raises(TransferTimeout):
        transfer.wait(0.1)
    standin.set(0, mute=0)
    with pytest.raises(TransferError):
        transfer.wait(30)
    threading.Event().wait(0.35)
    pair.a.poll()
    assert standin.qp_state(qpn) == "error"     # it is still there
    pair.peer.reset()
    pair.peer.read(pair.read(0, 0, 64)).wait()


def test_while_it_does_not_let_go_the_memory_is_not_free(standin, silent):
    """It is asked again and again; once it has let go, all goes on."""
    pair, transfer = silent
    standin.set(0, clings=1)
    pair.peer._qps["kv"].fail()
    with pytest.raises(TransferTimeout):
        transfer.wait(0.7)
    with pytest.raises(Busy):
        pair.a.deregister(pair.local)
    standin.set(0, clings=0)
    with pytest.raises(TransferError):
        transfer.wait(30)
    pair.a.deregister(pair.local)


DROPPED = """
import warnings, weakref
import ibverbs_standin
ibverbs_standin.choose()
from kvio._ext import nic as ext
from kvio.layout import READ
from nics import pattern, requests
class Memory:
    bytes = pattern(4096)
    addr, key = bytes.__array_interface__["data"][0], 0
standin, memory = ibverbs_standin.StandIn(ibverbs_standin.build()), Memory()
nic = ext.Nic("verbs", None, "standin0")
memory.key = nic.reg(memory, memory.addr, 4096, 7)
far = ext.Far(nic, 1)
far.add(nic.describe(memory.key))
qp = ext.QueuePair(nic, 2, 32, 16, far)
qp.connect_endpoints(qp.endpoints())
standin.set(0, mute=1, clings=%d)
batch, watched = qp.post(requests(READ, memory, memory, 0, 2048, 64)), weakref.ref(memory)
with warnings.catch_warnings(record=True, action="always") as said:
    del batch, qp, far, memory, nic
print(watched() is not None, standin.count("mrs"), standin.count("qps"), standin.count("contexts"))
print(*(each.message for each in said))
"""


@pytest.mark.parametrize("clings, left", [(0, "False 0 0 0"), (1, "True 1 1 1")])
def test_a_nic_that_nobody_has_any_more(standin, clings, left):
    """It waits for its device as long as that may take; then all that the device does not let go
    of stays as it is, and that is said."""
    ran = subprocess.run([sys.executable, "-c", DROPPED % clings], timeout=120,
                         capture_output=True, text=True, env={
                             **os.environ, "KVIO_IB_DRAIN_MS": "300",
                             "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert ran.returncode == 0, ran.stderr
    state, said = ran.stdout.splitlines()
    assert state == left, ran.stderr
    assert ("batches: 1" in said and "kept until this process ends" in said) == bool(clings)
