"""Bodies of control frames: whatever a peer puts into them, what comes out has the types and ranges
that the rest of kvio relies on, or is refused by a typed error."""
import errno

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bodies import FIELDS, anything, honest_frames, hostile_frames
from kvio.errors import InvalidArgument, TransferError
from kvio.transfer import TrafficClass, bodies, frames, handshake
from kvio.transfer.bodies import checked


def is_int(value, least, most):
    return type(value) is int and least <= value <= most


def is_name(value):
    return isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable()


def are_names(value):
    return isinstance(value, tuple) and len(value) <= 64 and all(map(is_name, value))


def are_endpoints(value):
    return isinstance(value, dict) and 0 < len(value) <= 64 and all(
        is_name(name) and isinstance(raw, bytes) and len(raw) % 36 == 0 and 36 <= len(raw) <= 288
        for name, raw in value.items())


def is_setting(value):
    return len(value) == 3 and all(map(is_int, value, (0, 0, 0), (15, 255, 1 << 20)))


# A second opinion of what may come out, written by itself.
MEANT = {
    "magic": lambda v: v == "kvio", "version": lambda v: v == 1 and type(v) is int,
    "role": lambda v: v in ("initiator", "target"), "secret": lambda v: isinstance(v, bool),
    "nonce": lambda v: isinstance(v, bytes) and len(v) == 32,
    "proof": lambda v: isinstance(v, bytes) and len(v) == 32,
    "code": lambda v: v.isprintable() and len(v) <= 20,
    "reason": lambda v: v.isprintable() and len(v) <= 1000, "name": is_name,
    "mtu": lambda v: is_int(v, 1, 1 << 20), "rails": lambda v: is_int(v, 0, 8),
    "epoch": lambda v: is_int(v, 0, 2**64 - 1), "fds": lambda v: is_int(v, 0, 32),
    "carrier": lambda v: v == {} or [*v] == ["bytes_per_s"] and is_int(*v.values(), 0, 1 << 50),
    "classes": lambda v: 0 < len(v) == len({c.name for c in v}) <= 64 and all(
        isinstance(c, TrafficClass) and is_int(c.sl, 0, 15) and is_int(c.tclass, 0, 255)
        for c in v),
    "readback": lambda v: 0 < len(v) <= 64 and all(map(is_name, v))
    and all(map(is_setting, v.values())),
    "ad": lambda v: isinstance(v, bytes) and 0 < len(v) <= 256 << 10,
    "key": lambda v: is_int(v, 1, 2**64 - 1), "of": lambda v: v in (8, 9) and type(v) is int,
    "id": lambda v: is_int(v, 1, 2**63), "look": are_names, "failed": are_names,
    "join": are_endpoints, "endpoints": are_endpoints, "more": lambda v: v is True,
    "busy": lambda v: v is True, "collision": lambda v: v is True, "closed": lambda v: v is True}
OPTIONAL = {"more"}


def check(kind, found):
    says = {"id"} if kind in (frames.RESET, frames.ANSWER) else set(FIELDS[kind]) - OPTIONAL
    assert says <= found.keys() <= set(FIELDS[kind])
    assert len(says) != 1 or kind not in (frames.RESET, frames.ANSWER) or len(found) == 2
    for name, value in found.items():
        assert MEANT[name](value), (name, value)


@settings(deadline=None)
@given(honest_frames())
def test_what_an_honest_peer_says_is_taken(frame):
    check(frame[0], checked(*frame))


@settings(max_examples=1000, deadline=None)
@given(hostile_frames())
def test_what_comes_through_is_what_was_meant(frame):
    kind, body = frame
    try:
        found = checked(kind, body)
    except TransferError as wrong:
        assert wrong.errno in (errno.EPROTO, errno.EPROTONOSUPPORT) and str(wrong).isprintable()
    else:
        check(kind, found)


@pytest.mark.parametrize("kind", sorted(FIELDS))
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_every_field_is_looked_at(kind, data):
    """An honest body with one field that is anything: refused, unless it happens to be one."""
    _, body = data.draw(honest_frames((kind,)))
    for name in body:
        changed = body | {name: data.draw(anything)}
        try:
            check(kind, checked(kind, changed))
        except TransferError:
            pass
        if (kind, name) not in ((frames.REFUSE, "code"), (frames.REFUSE, "reason")):
            with pytest.raises(TransferError):
                checked(kind, {each: value for each, value in body.items() if each != name})


HEX = "0" * 72
BAD = {
    "magic": ["http", None], "role": ["witness", "", None, ["target"]], "secret": ["yes", 0, 1],
    "nonce": [HEX[:62], HEX[:66], "0g" * 32, "A" * 64, " 0" * 32, 7],
    "proof": [HEX[:62], "0g" * 32], "name": ["", "x" * 201, "a\nb", "\ud800", 7],
    "mtu": [0, 2**20 + 1, True, 4096.0, "4096"],
    "rails": [-1, 9, False], "epoch": [-1, 2**64], "fds": [-1, 33, True, None],
    "carrier": [[], {"bytes_per_s": -1}, {"bytes_per_s": 2**50 + 1}, {"bytes_per_s": None}],
    "classes": [[], {}, [["kv", 2]], [["kv", 16, 0]], [["kv", 2, 256]], [["kv", -1, 0]],
                [["kv", 2, 32]] * 2, [["", 1, 1]], [[f"c{i}", 1, 1] for i in range(65)]],
    "endpoints": [{}, {"kv": ""}, {"kv": HEX[1:]}, {"kv": HEX * 9}, {"": HEX}, {"kv": HEX + "00"},
                  {f"c{i}": HEX for i in range(65)}],
    "readback": [{}, {"kv": [16, 0, 1]}, {"kv": [0, 256, 1]}, {"kv": [0, 0, 2**20 + 1]},
                 {"kv": [0, 0]}, {"kv": [0, 0, 1, 1]}],
    "ad": ["", "0", "0G", "00" * ((256 << 10) + 1)], "more": [False, 1, None],
    "key": [0, -1, 2**64, 1.0], "of": [7, 10, True, 8.0], "id": [0, 2**63 + 1, "1"],
    "look": [{}, ["kv"] * 65, [7], [""]], "failed": ["kv", [[]]], "join": [[], {"kv": HEX[2:]}],
    "busy": [False, 1, ["kv"]], "collision": [0], "closed": [{}]}


def test_the_edges_of_every_field():
    """Each field of each frame is refused just beyond what it may be."""
    honest = {kind: honest_frames((kind,)) for kind in FIELDS}
    looked_at = set()

    @settings(max_examples=3, deadline=None)
    @given(st.data())
    def look(data):
        for kind, fields in FIELDS.items():
            _, body = data.draw(honest[kind])
            for name in set(fields) - {"version", "code", "reason"}:
                if "id" in body and name != "id":
                    body = {"id": 1}            # then it says nothing but this
                for bad in BAD[name]:
                    with pytest.raises(TransferError) as failure:
                        checked(kind, body | {name: bad})
                    assert failure.value.errno == errno.EPROTO, (kind, name, bad)
                    looked_at.add(name)
    look()
    assert looked_at == BAD.keys()


@pytest.mark.parametrize("kind", [0, 14, 99, 255])
def test_there_are_no_other_frames(kind):
    with pytest.raises(TransferError, match=f"no frame {kind}"):
        checked(kind, {})


@pytest.mark.parametrize("body", [{"id": 1}, {"id": 1, "look": [], "join": {"kv": "00" * 36}},
                                  {"look": []}, {"id": 0, "look": []}, {"id": True, "look": []}])
def test_a_reset_asks_one_thing(body):
    with pytest.raises(TransferError) as failure:
        checked(frames.RESET, body)
    assert failure.value.errno == errno.EPROTO


@pytest.mark.parametrize("body", [{}, {"code": [], "reason": None}, {"reason": "x" * 5000},
                                  {"reason": "\x1b[2Jboo\n"}, {"code": "argument", "reason": {}}])
def test_a_refusal_may_say_anything_but_not_at_length(body):
    wrong = handshake.refused(checked(frames.REFUSE, body))
    assert isinstance(wrong, (TransferError, InvalidArgument)) and wrong.told
    assert len(str(wrong)) < 1200 and str(wrong).isprintable()


def test_another_version_is_named_whatever_else_it_says():
    for version in 2, "1", 1.0, True, ["\x1b[2J"]:
        with pytest.raises(TransferError, match="versions differ") as failure:
            checked(frames.HELLO, {"magic": bodies.MAGIC, "version": version, "role": 7})
        assert failure.value.errno == errno.EPROTONOSUPPORT and str(failure.value).isprintable()
