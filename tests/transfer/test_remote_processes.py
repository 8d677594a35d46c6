"""Two processes: what they tell each other; one is killed, stopped, or forks. Over soft NICs, and
over verbs on the stand-in for libibverbs, whose queue pairs move bytes within one process only."""
import errno
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from connected import DEVICE, open_nic, pair, until, works      # noqa: F401
from kvio.errors import Closed, TransferError
from kvio.layout import READ
from kvio.transfer import COLLECTIVE, KV, Nic, control, links
from nics import pattern, requests
from processes import send_signal

CHILD = Path(__file__).with_name("remote_child.py")


class Child:
    def __init__(self, device, address):
        self.process = subprocess.Popen(
            [sys.executable, CHILD, device, address], stdin=subprocess.PIPE, text=True,
            stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        self.address = self.process.stdout.readline().strip()
        assert self.address, "it did not start"

    def ask(self, line):
        self.tell(line)
        return self.process.stdout.readline().split()

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def signal(self, number):
        send_signal(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(params=["soft", "standin"])
def far(request, tmp_path):
    """Starts other processes, each with a NIC, and opens NICs here."""
    device, address, library = "soft", f"unix:{tmp_path}/socket", None
    if request.param == "standin":
        device, address, library = DEVICE, ":0", request.getfixturevalue("standin")
    children, opened = [], []

    class Far:
        name, standin = request.param, library

        def child(self, at=address):
            children.append(Child(device, at))
            return children[-1]

        def open(self):
            opened.append(Nic.open(device, name="near"))
            return opened[-1]
    yield Far()
    for each in children:
        each.end()
    while opened:
        opened.pop().close(cancel=True)


def test_two_processes_tell_each_other_of_their_regions(far):
    other, nic = far.child(), far.open()
    peer = nic.connect(other.address)
    assert other.ask("accept") == ["1"] and other.ask("known") == []
    region = nic.register(pattern(4096))
    assert other.ask("known") == [str(region.key)]
    [key] = other.ask("register")
    assert int(key) in peer.far.owners and len(peer.far.owners) == 2
    assert other.ask("deregister") == ["done"] and len(peer.far.owners) == 1
    nic.deregister(region)
    assert other.ask("known") == []
    other.ask("fail kv")
    peer.reset()
    assert other.ask("state") == ["ready", "ready"]
    peer.close()
    assert other.ask("peers") == ["0"]


@pytest.mark.parametrize("how", ["killed", "exits", "closes"])
def test_a_peer_that_dies_is_noticed_and_can_be_connected_to_again(far, how):
    other, nic = far.child(), far.open()
    mine = pattern(4096)
    local = nic.register(mine)
    peer = nic.connect(other.address)
    wrs = requests(READ, local, local, 0, 0, 4096)
    theirs = other.ask("memory")
    wrs["rkey"], wrs["remote_addr"] = map(int, theirs)
    if far.name == "soft":
        peer.read(wrs).wait()
        assert (mine == pattern(4096, 7)).all()
    else:
        far.standin.set(frozen=1)
    transfers = [peer.post(wrs, traffic_class=c) for c in (KV, COLLECTIVE, KV)]
    if how == "killed":
        other.signal(signal.SIGKILL)
    else:
        other.tell("exit" if how == "exits" else "close")
    for transfer in transfers:
        try:
            transfer.wait(30)
            assert far.name == "soft"
        except TransferError as failed:
            assert any(name in str(failed) for name in ("RETRY_EXC_ERR", "WR_FLUSH_ERR"))
    until(lambda: not nic._peers)
    with pytest.raises(Closed, match="has gone .*connect again"):
        peer.read(wrs)
    if how == "closes":
        other.end()
    other = far.child(other.address)                    # the same address: nothing is sticky
    again = nic.connect(other.address)
    assert again.remote_epoch != peer.remote_epoch
    assert list(again.far.owners) == [int(other.ask("memory")[0])] != [int(theirs[0])]
    again.close()


def test_a_stopped_peer_holds_nobody_up_and_learns_it_all_later(far, monkeypatch):
    monkeypatch.setattr(links, "STUCK_S", 0.3)
    monkeypatch.setattr(control, "ANSWER_S", 0.2)
    waits, ask = [], control.Control.ask

    def counted(self, job, timeout):
        waiter = ask(self, job, timeout)
        waits.append(waiter is None)            # time was up
        return waiter
    monkeypatch.setattr(control.Control, "ask", counted)
    other, nic = far.child(), far.open()
    peer = nic.connect(other.address)
    other.ask("accept")
    other.signal(signal.SIGSTOP)
    first = nic.register(pattern(64))
    second = nic.register(pattern(64))
    nic.deregister(first)
    third = nic.register(pattern(64))        # in the first one's place
    assert waits[-4:] == [True, False, True, False]  # once; and for each that goes
    peer._qps["kv"].fail()
    with pytest.raises(TransferError, match="stopped") as failure:
        peer.reset()
    assert failure.value.errno == errno.ETIMEDOUT
    with pytest.raises(TransferError) as failure:
        nic.connect(other.address, timeout=0.3)
    assert failure.value.errno == errno.ETIMEDOUT
    monkeypatch.setattr(links, "STUCK_S", 30)
    other.signal(signal.SIGCONT)
    peer.reset()
    assert other.ask("known") == [str(key) for key in sorted([second.key, third.key])]
    other.signal(signal.SIGSTOP)
    nic.close(cancel=True)
    other.signal(signal.SIGCONT)
    until(lambda: other.ask("peers") == ["0"])


def test_a_forked_child_has_none_of_its_parents_connections(pair):
    """Nor does it keep them open: the other end notices when the parent closes."""
    into, out = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                 # threads and fork
        pid = os.fork()
    if pid == 0:
        said = []
        for use in (lambda: pair.peer.read(pair.read(0, 0, 64)), pair.peer.query, pair.peer.reset,
                    lambda: pair.a.connect(pair.listener.address),
                    lambda: pair.a.register(bytearray(8)), pair.a.stats):
            try:
                use()
                said.append("nothing")
            except Closed as closed:
                said.append("Closed" if str(closed) else "")
        pair.peer.close()
        pair.a.close(cancel=True)
        os.write(out, " ".join(said).encode())
        os._exit(0)
    os.close(out)
    try:
        assert os.read(into, 1000).split() == [b"Closed"] * 6
    finally:
        os.close(into)
        os.waitpid(pid, 0)
    pair.peer.read(pair.read(0, 0, 64)).wait()
    assert works(pair)


def test_an_interpreter_ends_with_open_connections(standin):
    code = f"""
import numpy as np
from kvio.transfer import Nic
a, b = Nic.open({DEVICE!r}), Nic.open({DEVICE!r})
keep = b.register(np.zeros(4096, np.uint8))
listener = b.listen("b")
peers = [a.connect("b") for _ in range(3)]
"""
    ran = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True,
                         env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert ran.returncode == 0 and "Traceback" not in ran.stderr, ran.stderr
