"""A peer that has proven who it is and then says anything: the other end keeps its other peers, its
listener and its descriptors, and raises nothing but typed errors."""
import gc
import os
import re
import select

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bodies import SAYS, anything, hostile_frames
from connected import until
from kvio._ext.nic import DELAY
from kvio.errors import Closed, KvioError
from kvio.layout import READ
from kvio.transfer import Fabric, Nic, connection, frames
from kvio.transfer.shared import SharedCarrier
from nics import pattern, requests

ONCE = dict(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Two:
    """`victim` listens; `friend` is a peer that behaves, `enemy` is one that does not."""

    def __init__(self, folder):
        self.victim, self.friend, self.enemy = (
            Nic.open("soft", name=name, fabric=Fabric()) for name in ("victim", "friend", "enemy"))
        self.address = f"unix:{folder}/victim"
        self.memory = pattern(4096)
        self.region = self.victim.register(self.memory)
        self.listener = self.victim.listen(self.address)
        self.good = self.friend.connect(self.address)
        self.target = bytearray(4096)
        self.local = self.friend.register(self.target)
        self.listener.accept()

    def connect(self):
        """An enemy's peer, and the victim's end of it."""
        peer = self.enemy.connect(self.address)
        return peer, self.listener.accept()

    def check(self):
        """Nothing has happened to the others."""
        self.target[:] = bytes(4096)
        self.good.read(requests(READ, self.local, self.region, 0, 0, 4096)).wait(30)
        assert self.target == bytes(self.memory)
        self.good._qps["kv"].fail()
        self.good.reset()

    def end(self, *peers):
        for peer in peers:
            peer.close()
        until(lambda: len(self.victim._control.connections) == 1 and not self.enemy._peers)

    def close(self):
        for nic in self.friend, self.enemy, self.victim:
            nic.close(cancel=True)


@pytest.fixture
def two(tmp_path):
    made = Two(tmp_path)
    yield made
    made.close()


def say(peer, kind, body, fds=()):
    """What an honest end would not let through; returns once it is on its way."""
    connection = peer._other

    def send(waiter):
        if connection in connection.control.connections:        # else it is over already
            connection.send(kind, body, fds)
        waiter.finish()
    connection.control.ask(send, 10)


def ends(pipe):
    """Nobody has its other end any more."""
    until(lambda: select.select([pipe], [], [], 0)[0])
    os.close(pipe)


def descriptors():
    gc.collect()                                # what an exception's traceback still holds
    return len(os.listdir("/proc/self/fd"))


@settings(max_examples=100, **ONCE)
@given(said=st.lists(hostile_frames(), min_size=1, max_size=3))
def test_an_enemy_may_say_anything(two, said):
    peer, back = two.connect()
    for kind, body in said:
        say(peer, kind, body)
    try:
        back.reset()
    except KvioError:
        pass
    two.check()
    two.end(peer, back)


@settings(max_examples=100, **ONCE)
@given(answer=st.dictionaries(st.sampled_from(["id", *SAYS[frames.ANSWER]]), anything, max_size=3)
       | st.sampled_from([{"failed": ["nobody"]}, {"failed": 7}, {"endpoints": {}}, {"failed": []},
                          {"endpoints": {"kv": "00" * 36}}, {"endpoints": {"collective": "7"}}]))
def test_an_enemy_may_answer_anything(two, answer):
    """`reset` mends the queue pair or raises a typed error: it never says that all is well."""
    peer, back = two.connect()
    peer.on_reset = lambda body: {"failed": ["kv"]} | answer if "look" in body else answer
    back._qps["kv"].fail()
    try:
        back.reset()
    except KvioError:
        pass
    else:
        assert back.query()["kv"]["state"] == "ready"
    two.check()
    two.end(peer, back)


@pytest.mark.parametrize("answer", [
    {"failed": 5}, {"failed": [[]]}, {"failed": {"kv": 1}}, {"endpoints": {"kv": "00" * 36}},
    {"busy": 0}, {}, {"failed": [], "busy": True}])
def test_a_malformed_answer_ends_the_connection(two, answer):
    peer, back = two.connect()
    peer.on_reset = lambda body: answer
    back._qps["kv"].fail()
    with pytest.raises(Closed, match="control connection is broken.*connect again"):
        back.reset()
    two.check()
    two.end(peer, back)


@pytest.mark.parametrize("kind, body", [
    (frames.ANSWER, {"id": 1, "failed": []}), (frames.READY, {"readback": {"kv": [2, 32, 4096]}}),
    (frames.ACK, {"of": [], "key": 1}), (frames.ACK, {"of": 8, "key": {}}),
    (frames.RESET, {"id": 1, "join": {"other": "00" * 36}}), (frames.GONE, {"key": 12345}),
    (frames.OFFER, {}), (frames.REGION, {"ad": "00" * 56, "fds": 0}), (77, {})])
def test_what_has_no_place_ends_the_connection(two, kind, body):
    peer, back = two.connect()
    say(peer, kind, body)
    until(lambda: back.gone)
    assert "control connection is broken" in back.gone
    two.check()
    two.end(peer, back)


@pytest.mark.parametrize("body, match", [
    ({"ad": "00" * 1000, "fds": 1}, "malformed"), ({"ad": "", "fds": 1}, "malformed ad"),
    ({"ad": "00" * 1000, "fds": 1, "more": True}, "too great"),
    ({"ad": "00" * 8, "fds": 1}, "cut short")])
def test_descriptors_of_regions_that_are_none_are_closed(two, body, match):
    peer, back = two.connect()
    out, into = os.pipe()
    say(peer, frames.REGION, body, [into])
    os.close(into)
    until(lambda: back.gone)
    assert re.search(match, back.gone)
    ends(out)
    two.end(peer, back)


def test_a_description_without_an_end_is_not_kept_for_ever(two):
    part = {"ad": "00" * (256 << 10), "more": True, "fds": 0}
    peer, back = two.connect()
    for _ in range(16):
        say(peer, frames.REGION, part)
    say(peer, frames.REGION, {"ad": "00", "more": True, "fds": 0})
    until(lambda: back.gone)
    assert "too great a length" in back.gone
    two.end(peer, back)
    peer, back = two.connect()
    say(peer, frames.REGION, part)
    say(peer, frames.GONE, {"key": two.region.key})
    until(lambda: back.gone)
    assert "no end" in back.gone
    two.end(peer, back)


@pytest.mark.parametrize("bound", ["MAX_DEFERRED", "MAX_DEFERRED_NBYTES"])
def test_regions_that_wait_for_a_transfer_are_bounded(two, monkeypatch, bound):
    region = two.enemy.register(pattern(1 << 20))
    peer, back = two.connect()
    ring = two.victim.register(bytearray(1 << 20))
    two.victim._ext._fault(DELAY, 1, 10**8)             # the transfer that uses the region is slow
    transfer = back.read(requests(READ, ring, region, 0, 0, 1 << 20))
    say(peer, frames.GONE, {"key": region.key})
    until(lambda: back._other._deferred)
    monkeypatch.setattr(connection, bound, 1 if bound == "MAX_DEFERRED" else 99)
    assert not back.gone
    out, into = os.pipe()
    for _ in range(3):
        say(peer, frames.REGION, {"ad": "00" * 48, "fds": 1}, [into])
    os.close(into)
    until(lambda: back.gone)
    assert "too many regions come and go" in back.gone
    try:
        transfer.wait(30)
    except KvioError:
        pass
    two.end(peer, back)
    ends(out)


def test_descriptors_of_an_offer_that_comes_to_nothing_are_closed(two, monkeypatch):
    two.end(*two.connect())
    before = descriptors()

    def offer(carrier):
        raise OSError(24, "Too many open files")
    honest = SharedCarrier.offer
    monkeypatch.setattr(SharedCarrier, "offer", lambda carrier: (
        offer if carrier.nic is two.victim else honest)(carrier))
    with pytest.raises(KvioError, match="Too many open files"):
        two.enemy.connect(two.address)
    until(lambda: len(two.victim._control.connections) == 1)
    two.listener.refused.clear()
    until(lambda: descriptors() == before)
