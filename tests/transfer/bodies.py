"""Bodies of control frames for hypothesis: what an honest peer sends, what a hostile one may."""
from hypothesis import strategies as st

from kvio.transfer import bodies, frames

names = st.sampled_from(["kv", "collective", "bulk", "größer", "x" * 200])
numbers = st.integers(1, 2**63)
digits = st.binary(min_size=32, max_size=32).map(bytes.hex)
endpoints = st.dictionaries(names, st.integers(1, 8).flatmap(
    lambda rails: st.binary(min_size=36 * rails, max_size=36 * rails).map(bytes.hex)), min_size=1)
levels, tclasses = st.integers(0, 15), st.integers(0, 255)
said = st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=20)
HONEST = {
    frames.HELLO: dict(magic=st.just(bodies.MAGIC), version=st.just(bodies.VERSION), nonce=digits,
                       role=st.sampled_from(bodies.ROLES), secret=st.booleans()),
    frames.PROOF: dict(proof=digits),
    frames.REFUSE: dict(code=said, reason=said),
    frames.OFFER: dict(
        name=names, mtu=st.integers(1, 1 << 20), rails=st.integers(0, 8),
        epoch=st.integers(0, 2**64 - 1), fds=st.integers(0, 4),
        carrier=st.just({}) | st.fixed_dictionaries({"bytes_per_s": st.integers(0, 2**50)}),
        classes=st.lists(st.tuples(names, levels, tclasses).map(list), min_size=1, max_size=5,
                         unique_by=lambda c: c[0])),
    frames.CONNECT: dict(endpoints=endpoints),
    frames.ACCEPT: dict(endpoints=endpoints),
    frames.READY: dict(readback=st.dictionaries(
        names, st.tuples(levels, tclasses, st.integers(0, 1 << 20)).map(list), min_size=1)),
    frames.REGION: dict(ad=st.binary(min_size=1, max_size=99).map(bytes.hex),
                        fds=st.integers(0, 1)),
    frames.GONE: dict(key=numbers),
    frames.ACK: dict(of=st.sampled_from([frames.REGION, frames.GONE]), key=numbers),
    frames.BYE: {},
}
SAYS = {frames.RESET: dict(look=st.lists(names, max_size=3), join=endpoints),
        frames.ANSWER: dict(failed=st.lists(names, max_size=3), endpoints=endpoints,
                            busy=st.just(True), collision=st.just(True), closed=st.just(True))}
FIELDS = {kind: [*fields] for kind, fields in HONEST.items()} | {
    frames.REGION: ["ad", "fds", "more"],
    **{kind: ["id", *says] for kind, says in SAYS.items()}}

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from([0, -1, 2**64, 2**53, "", "0g", "ff", "00" * 36, "kv", "\ud800", "\0", " 00"])
    | endpoints | digits,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | names, inner,
                                                                max_size=4), max_leaves=8)


@st.composite
def honest_frames(draw, kinds=tuple(sorted(FIELDS))):
    """(kind, body) as an honest peer would send it."""
    kind = draw(st.sampled_from(kinds))
    if kind in HONEST:
        return kind, draw(st.fixed_dictionaries(HONEST[kind]))
    what = draw(st.sampled_from([*SAYS[kind]]))
    return kind, {"id": draw(numbers), what: draw(SAYS[kind][what])}


@st.composite
def hostile_frames(draw, kinds=tuple(sorted(FIELDS))):
    """The same with fields that are missing, of another frame or anything at all."""
    kind, body = draw(honest_frames(kinds))
    body = dict(body)
    fields = st.sampled_from(FIELDS[kind]) if FIELDS[kind] else st.nothing()
    for name in draw(st.lists(fields | st.text(max_size=5), max_size=3)):
        if draw(st.booleans()):
            body[name] = draw(anything)
        else:
            body.pop(name, None)
    return kind, body
