"""The handshake without a network: both ends, and somebody between them who changes what passes."""
import errno
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvio.errors import InvalidArgument, TransferError
from kvio.transfer import COLLECTIVE, KV, TrafficClass, bodies, frames, handshake
from kvio.transfer.frames import INITIATOR, TARGET

SECRET = b"the secret of these tests"
CLASSES = (COLLECTIVE, KV)
GOOD = "00" * 36                    # endpoints of one rail


class FakeLink:
    """Counts what is asked of it; its endpoints name it."""

    def __init__(self, name):
        self.name, self.seen, self.connected = name, None, None

    def offer(self):
        return {"name": self.name, "mtu": 4096, "rails": 2, "epoch": 7, "carrier": {}}, []

    def attach(self, classes, theirs, fds):
        self.classes, self.seen = classes, theirs

    def endpoints(self):
        return {c.name: self.name.encode() * 36 for c in self.classes}

    def connect(self, endpoints):
        self.connected = endpoints


class End:
    """One end, with what follows the handshake: two regions and READY each way."""

    def __init__(self, role, secret=SECRET, classes=CLASSES):
        self.codec, self.link = frames.Codec(role), FakeLink("ab"[role])
        steps = handshake.initiate if role == INITIATOR else handshake.respond
        self.steps = steps(self.codec, secret, self.link, classes)
        self.role, self.out, self.error, self.connected = role, [], None, False
        self._run(self.step, None)

    def _run(self, call, *args):
        try:
            call(*args)
        except (TransferError, InvalidArgument) as wrong:
            self.error, self.connected = wrong, False

    def step(self, frame):
        try:
            out = self.steps.send(frame)
        except StopIteration as end:
            self.steps = None
            self.out += [end.value[0]] if end.value else []
            if self.role == INITIATOR:
                self.be_ready()
        else:
            self.out += [out[0]] if out else []

    def be_ready(self):
        for key in 1, 2:
            self.out.append(self.codec.encode(frames.REGION, {"ad": f"{key:080x}", "fds": 0}))
        self.out.append(self.codec.encode(frames.READY, {"readback": {"kv": [2, 32, 4096]}}))

    def take(self, data):
        if self.error is None:
            self._run(self.frames, data)

    def frames(self, data):
        self.codec.feed(data)
        while (frame := self.codec.next()) is not None:
            if self.steps is not None:
                self.step((*frame, []))
            elif frame[0] == frames.READY:
                if self.connected:
                    raise frames.broken("READY came twice")
                self.connected = True
                if self.role == TARGET:
                    self.be_ready()
            elif frame[0] != frames.REGION:
                raise frames.broken(f"frame {frame[0]}")


def converse(a, b, between=lambda sender, index, frame: [frame]):
    """Until nobody has anything to say. `between` gets every frame and who sent it (and which of
    its frames that is), and returns what passes. Who has failed has hung up."""
    count, said = [0, 0], [[], []]
    while (a.out and a.error is None) or (b.out and b.error is None):
        for sender, other in (a, b), (b, a):
            out, sender.out = sender.out, []
            for frame in out:
                said[sender.role].append(frame)
                for passed in between(sender.role, count[sender.role], frame):
                    other.take(passed)
                count[sender.role] += 1
    return said


def spoken():
    """How many frames each end sends, if nobody interferes."""
    return [len(said) for said in converse(End(INITIATOR), End(TARGET))]


def test_both_ends_agree():
    a, b = End(INITIATOR), End(TARGET)
    said = converse(a, b)
    assert a.connected and b.connected and a.error is None and b.error is None
    assert a.codec.key == b.codec.key and len(a.codec.key) == 32
    assert a.link.connected == {"collective": b"b" * 36, "kv": b"b" * 36}
    assert b.link.connected == {"collective": b"a" * 36, "kv": b"a" * 36}
    assert b.link.classes == CLASSES and a.link.seen["epoch"] == 7
    everything = b"".join(said[0] + said[1])
    assert SECRET not in everything and a.codec.key not in everything
    again = End(INITIATOR), End(TARGET)
    converse(*again)
    assert again[0].codec.key != a.codec.key


def test_nothing_is_told_before_the_secret_is_proven():
    """Whoever does not know the secret sees hello and proof, and neither offers nor endpoints."""
    for known in INITIATOR, TARGET:
        ends = [End(role, SECRET if role == known else b"wrong") for role in (INITIATOR, TARGET)]
        said = converse(*ends)
        kinds = [frame[4] for frame in said[known]]
        assert set(kinds) <= {frames.HELLO, frames.PROOF}
        assert all(end.link.seen is None and not end.connected for end in ends)
        assert ends[TARGET].error.errno == errno.EACCES
        assert "secret" in str(ends[TARGET].error)
    said = converse(End(INITIATOR, b"x"), End(TARGET, b"y"))
    assert [frame[4] for frame in said[TARGET]] == [frames.HELLO]     # not even a proof


@pytest.mark.parametrize("secrets", [(None, SECRET), (SECRET, None)])
def test_one_end_without_a_secret_is_told_so(secrets):
    a, b = (End(role, secret) for role, secret in enumerate(secrets))
    converse(a, b)
    assert b.error.errno == errno.EACCES and "one end has a secret" in str(b.error)
    assert not a.connected


def test_without_secrets_both_ends_agree_too():
    a, b = End(INITIATOR, None), End(TARGET, None)
    converse(a, b)
    assert a.connected and b.connected


# ---- somebody in between

NUM_FRAMES = spoken()
places = st.sampled_from([(role, i) for role in (0, 1) for i in range(NUM_FRAMES[role])])


def interfere(place, change):
    """Converse while the frame at `place` is changed; the end that got it must not connect."""
    a, b = End(INITIATOR), End(TARGET)
    hit = []

    def between(sender, index, frame):
        if (sender, index) != place:
            return [frame]
        hit.append(frame)
        return change(frame, (a, b)[sender])
    converse(a, b, between)
    assert hit, "this conversation never came to that frame"
    victim = (b, a)[place[0]]
    assert not victim.connected
    for end in a, b:
        assert end.error is None or isinstance(end.error, TransferError)
    return victim


@settings(max_examples=300, deadline=None)
@given(places, st.data())
def test_no_bit_may_change(place, data):
    def flip(frame, sender):
        changed = bytearray(frame)
        bit = data.draw(st.integers(0, 8 * len(frame) - 1))
        changed[bit // 8] ^= 1 << bit % 8
        return [bytes(changed)]
    interfere(place, flip)


@settings(deadline=None)
@given(places, st.data())
def test_no_frame_may_be_cut(place, data):
    interfere(place, lambda frame, sender: [frame[:data.draw(st.integers(0, len(frame) - 1))]])


@settings(deadline=None)
@given(places, st.integers(1, 3))
def test_no_frame_may_come_again(place, times):
    victim = interfere(place, lambda frame, sender: [frame] * (1 + times))
    assert victim.error.errno == errno.EPROTO


@settings(deadline=None)
@given(places, st.binary(min_size=1, max_size=64))
def test_nothing_may_be_put_in(place, extra):
    interfere(place, lambda frame, sender: [extra + frame])


@settings(deadline=None)
@given(places)
def test_no_frame_may_come_back_to_its_sender(place):
    """Reflected instead of delivered: its sender takes it for nobody's."""
    def reflect(frame, sender):
        sender.take(frame)
        assert sender.error is not None and not sender.connected
        return []
    interfere(place, reflect)


@settings(deadline=None)
@given(places, st.data())
def test_frames_may_not_be_swapped(place, data):
    held = []

    def between(sender, index, frame):
        if (sender, index) == place:
            held.append(frame)
            return []
        if held and sender == place[0]:
            return [frame, held.pop()]
        return [frame]
    a, b = End(INITIATOR), End(TARGET)
    converse(a, b, between)
    assert not (b, a)[place[0]].connected


@settings(deadline=None)
@given(places, places)
def test_frames_of_another_conversation_do_not_fit(place, other):
    """Replayed from a conversation of the same two with the same secret."""
    said = converse(End(INITIATOR), End(TARGET))
    old = said[other[0]][other[1]]
    interfere(place, lambda frame, sender: [old])


def test_a_whole_conversation_played_again_is_not_believed():
    said = converse(End(INITIATOR), End(TARGET))
    for role in INITIATOR, TARGET:
        victim = End(1 - role)
        for frame in said[role]:
            victim.take(frame)
        assert not victim.connected and victim.error is not None
        assert victim.link.connected is None


def test_an_end_that_talks_to_itself_notices():
    a = End(INITIATOR)
    for _ in range(4):
        for frame in a.out:
            a.take(frame)
    assert a.error is not None and not a.connected


# ---- what does not fit

def answer(end, kind, **changes):
    """An honest other end, but for one frame, whose fields are changed before it is sealed."""
    other = End(1 - end.role)
    encode = other.codec.encode

    def changed(got, body):
        if got == kind:
            body = {name: value for name, value in (body | changes).items() if value is not ...}
        return encode(got, body)
    other.codec.encode = changed
    if kind == frames.HELLO and other.role == INITIATOR:
        other.steps, other.out = handshake.initiate(other.codec, SECRET, other.link, CLASSES), []
        other.step(None)
    converse(*((end, other) if end.role == INITIATOR else (other, end)))
    assert not end.connected and end.link.connected is None
    return end.error


@pytest.mark.parametrize("role", [INITIATOR, TARGET])
@pytest.mark.parametrize("change, number", [
    (dict(version=2), errno.EPROTONOSUPPORT), (dict(version="1"), errno.EPROTONOSUPPORT),
    (dict(version=...), errno.EPROTONOSUPPORT), (dict(magic="http"), errno.EPROTO),
    (dict(role="witness"), errno.EPROTO), (dict(nonce=5), errno.EPROTO),
    (dict(nonce="00"), errno.EPROTO), (dict(secret="yes"), errno.EPROTO)])
def test_a_hello_that_does_not_fit(role, change, number):
    assert answer(End(role), frames.HELLO, **change).errno == number


@pytest.mark.parametrize("role", [INITIATOR, TARGET])
@pytest.mark.parametrize("change", [
    dict(name=""), dict(name=7), dict(name="x" * 201), dict(name="a\nb"), dict(mtu=0),
    dict(mtu=2**21), dict(mtu=True), dict(mtu="4096"), dict(rails=9), dict(rails=-1),
    dict(epoch=2**64), dict(epoch=None), dict(carrier=[]), dict(carrier=...),
    dict(classes=[]), dict(classes="kv"), dict(classes=[["kv", 2]]), dict(classes=[["kv", 16, 0]]),
    dict(classes=[[3, 2, 1]]), dict(classes=[["kv", 2, 32]] * 2), dict(classes=[["", 1, 1]]),
    dict(classes=[[f"c{i}", 1, 1] for i in range(65)]), dict(classes=[{"name": "kv"}]),
    dict(classes=[[["kv"], 1, 1]])])
def test_an_offer_that_is_malformed(role, change):
    wrong = answer(End(role), frames.OFFER, **change)
    assert wrong.errno == errno.EPROTO and "malformed" in str(wrong)


@pytest.mark.parametrize("role", [INITIATOR, TARGET])
@pytest.mark.parametrize("endpoints", [
    None, [], {}, {"kv": GOOD}, {"kv": GOOD, "collective": "0g" * 36},
    {"kv": 5, "collective": GOOD}, {"kv": GOOD, "collective": GOOD[2:]},
    {"kv": GOOD, "collective": GOOD * 9}, {"kv": GOOD, "collective": GOOD, "more": GOOD}])
def test_endpoints_that_are_malformed(role, endpoints):
    kind = frames.ACCEPT if role == INITIATOR else frames.CONNECT
    assert answer(End(role), kind, endpoints=endpoints).errno == errno.EPROTO


@pytest.mark.parametrize("asked", [
    [KV], [KV, COLLECTIVE], [COLLECTIVE, TrafficClass("kv", 3, 32)],
    [COLLECTIVE, TrafficClass("kv", 2, 33)], [COLLECTIVE, TrafficClass("bulk", 2, 32)]])
def test_other_classes_are_refused_in_words_that_name_both_lists(asked):
    a, b = End(INITIATOR, classes=tuple(asked)), End(TARGET)
    converse(a, b)
    assert isinstance(b.error, InvalidArgument) and not a.connected and b.link.seen is None
    for c in (*asked, *CLASSES):
        assert f"{c.name} (sl {c.sl}, tclass {c.tclass})" in str(b.error)
    told = handshake.refused(bodies.checked(frames.REFUSE, handshake.refusal(b.error)))
    assert isinstance(told, InvalidArgument) and str(b.error) in str(told)


def test_a_listener_without_a_list_takes_what_is_asked_for():
    bulk = (TrafficClass("bulk", 1, 8),)
    a, b = End(INITIATOR, classes=bulk), End(TARGET, classes=None)
    converse(a, b)
    assert a.connected and b.connected and b.link.classes == bulk


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=80), max_size=6), st.sampled_from([INITIATOR, TARGET]))
def test_garbage_is_refused(chunks, role):
    end = End(role)
    for chunk in chunks:
        end.take(chunk)
    assert not end.connected and (end.error is None or isinstance(end.error, TransferError))


# ---- the secret

def test_secrets_come_from_the_argument_or_a_file(tmp_path, monkeypatch):
    monkeypatch.delenv("KVIO_SECRET_FILE", raising=False)
    assert handshake.load_secret(None) is None
    assert handshake.load_secret("grün") == "grün".encode()
    assert handshake.load_secret(bytearray(b"ab")) == b"ab"
    path = tmp_path / "secret"
    path.write_bytes(b"from a file\n")
    path.chmod(0o600)
    monkeypatch.setenv("KVIO_SECRET_FILE", str(path))
    assert handshake.load_secret(None) == b"from a file"
    assert handshake.load_secret(b"argument") == b"argument"


@pytest.mark.parametrize("secret", ["", b"", 5, ["a"], b"x" * 70000, True])
def test_what_is_no_secret(secret):
    with pytest.raises(InvalidArgument, match="secret must be"):
        handshake.load_secret(secret)


@pytest.mark.parametrize("mode, text, match", [
    (0o644, b"x", "chmod"), (0o640, b"x", "chmod"), (0o604, b"x", "chmod"), (0o620, b"x", "chmod"),
    (0o600, b"", "empty"), (0o600, b"\n", "empty"), (0o600, b"x" * 70000, "longer"),
    (None, b"", "cannot be read"), ("folder", b"", "cannot be read|not a regular")])
def test_a_secret_file_that_others_can_read_is_refused(tmp_path, monkeypatch, mode, text, match):
    path = tmp_path / "secret"
    if mode == "folder":
        os.mkdir(path, 0o700)
    elif mode is not None:
        path.write_bytes(text)
        path.chmod(mode)
    monkeypatch.setenv("KVIO_SECRET_FILE", str(path))
    with pytest.raises(InvalidArgument, match=match):
        handshake.load_secret(None)
