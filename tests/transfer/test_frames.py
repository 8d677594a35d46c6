"""Frames: what one end encodes the other decodes, and nothing else; descriptors go with them."""
import errno
import os
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bodies
from kvio.errors import TransferError
from kvio.transfer import frames
from kvio.transfer.bodies import checked
from kvio.transfer.frames import INITIATOR, TARGET, Codec, Stream

KEY = b"k" * 32


def two(key=KEY):
    """The codecs of both ends; with a key, or before there is one."""
    ends = Codec(INITIATOR), Codec(TARGET)
    for end in ends if key else ():
        end.use(key)
    return ends


def all_of(codec, data):
    codec.feed(data)
    return list(iter(codec.next, None))


@pytest.mark.parametrize("key", [None, KEY])
@settings(deadline=None)
@given(draw=st.data())
def test_frames_survive_being_cut_anywhere(key, draw):
    kinds = bodies.honest_frames() if key else bodies.honest_frames((frames.HELLO, frames.PROOF))
    sent, (a, b) = draw.draw(st.lists(kinds, max_size=5)), two(key)
    data = b"".join(a.encode(kind, body) for kind, body in sent)
    got, at = [], 0
    while at < len(data):
        end = draw.draw(st.integers(at + 1, len(data)))
        got += all_of(b, data[at:end])
        at = end
    assert got == [(kind, checked(kind, body)) for kind, body in sent]
    assert a.digest() == b.digest()


@settings(deadline=None)
@given(st.data())
def test_no_altered_bit_is_accepted(data):
    a, b = two()
    frame = bytearray(a.encode(frames.REGION, {"ad": "00ff" * 30, "fds": 0}))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    try:
        assert all_of(b, bytes(frame)) == []        # a length that grew: more is to come
    except TransferError as wrong:
        assert wrong.errno == errno.EPROTO


@pytest.mark.parametrize("order", [(1,), (0, 0), (0, 2), (1, 0), (0, 1, 1), (0, 1, 0)])
def test_frames_are_taken_once_and_in_order(order):
    a, b = two()
    sent = [a.encode(frames.GONE, {"key": i}) for i in range(1, 4)]
    with pytest.raises(TransferError, match="altered, repeated, reordered or lost"):
        all_of(b, b"".join(sent[i] for i in order))


def test_a_frame_that_is_sent_back_is_not_the_other_ends():
    a, _ = two()
    with pytest.raises(TransferError, match="altered"):
        all_of(a, a.encode(frames.BYE, {}))


def test_another_key_is_another_connection():
    a, b = two()
    b.use(b"x" * 32)
    with pytest.raises(TransferError, match="altered"):
        all_of(b, a.encode(frames.BYE, {}))


@pytest.mark.parametrize("key, length", [
    (None, 0), (None, frames.MAX_FIRST_FRAME + 1), (None, 2**32 - 1), (KEY, 0), (KEY, 32),
    (KEY, frames.MAX_FRAME + 1)])
def test_a_length_that_is_none_is_refused_before_its_bytes_come(key, length):
    _, b = two(key)
    with pytest.raises(TransferError, match=f"a frame of {length} bytes"):
        all_of(b, struct.pack("!IB", length, 1))


@pytest.mark.parametrize("body", [b"", b"7", b"[]", b"{", b"\xff{}", b"[" * 1900, b'{"a":NaN',
                                  b'{"a":' + b"9" * 2000 + b"x}"])
def test_a_body_that_is_no_object_is_refused(body):
    _, b = two(None)
    with pytest.raises(TransferError, match="no JSON object"):
        all_of(b, struct.pack("!IB", 1 + len(body[:2000]), 1) + body[:2000])


def test_a_frame_too_long_to_be_read_is_not_sent():
    a, _ = two()
    with pytest.raises(TransferError, match="too long"):
        a.encode(frames.REGION, {"ad": "0" * frames.MAX_FRAME})


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_garbage_is_kept_in_bounds_and_never_hangs(data):
    for key in None, KEY:
        _, b = two(key)
        try:
            assert all(isinstance(body, dict) for _, body in all_of(b, data))
        except TransferError as wrong:
            assert wrong.errno == errno.EPROTO
        assert len(b._input) <= len(data)


# ---- sockets

@pytest.fixture
def streams():
    made = [Stream(sock) for sock in socket.socketpair()]
    yield made
    for stream in made:
        stream.close()


def pipe_holding(data):
    out, into = os.pipe()
    os.write(into, data)
    os.close(into)
    return out


def test_descriptors_come_with_their_frame_and_are_not_inherited(streams):
    a, b = streams
    for data in b"one", b"two":
        fd = pipe_holding(data)
        a.write(b"frame", [fd])
        os.close(fd)                                # it was duplicated
    data = b.read() + b.read()
    assert data == b"frameframe"
    for expected in b"one", b"two":
        [fd] = b.claim(1)
        assert os.read(fd, 9) == expected and not os.get_inheritable(fd)
        os.close(fd)
    assert b.read() is None and b.claim(0) == []
    with pytest.raises(TransferError, match="names 1 descriptors, 0 came"):
        b.claim(1)


def test_a_stream_keeps_what_the_socket_does_not_take(streams):
    a, b = streams
    data, got = os.urandom(3 << 20), b""
    a.write(data)
    assert a.sending
    while len(got) < len(data):
        chunk = b.read()
        if chunk is None:
            a.flush()
        else:
            got += chunk
    assert got == data and not a.sending
    a.close()
    assert b.read() == b""


def test_whoever_does_not_read_is_not_waited_for_without_bounds(streams):
    a, _ = streams
    with pytest.raises(TransferError, match="does not read"):
        for _ in range(100):
            a.write(bytes(1 << 20))


def test_descriptors_that_nobody_takes_are_closed(streams):
    a, b = streams
    before = len(os.listdir("/proc/self/fd"))
    fd = pipe_holding(b"x")
    a.write(b"1", [fd, fd])
    assert b.read() == b"1"
    a.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    while not a.sending:
        a.write(bytes(1 << 16))
    a.write(b"2", [fd, fd, fd])                     # queued, with duplicates
    os.close(fd)
    b.close()
    a.close()
    assert len(os.listdir("/proc/self/fd")) == before - 2


def test_a_flood_of_descriptors_ends_the_connection(streams):
    a, b = streams
    fd = pipe_holding(b"")
    try:
        with pytest.raises(TransferError, match="descriptors"):
            for _ in range(9):
                a.write(b"x", [fd] * 8)
                b.read()
    finally:
        os.close(fd)


def test_descriptors_need_a_unix_socket():
    with socket.create_server(("127.0.0.1", 0)) as server:
        a = Stream(socket.create_connection(server.getsockname()))
        with pytest.raises(TransferError, match="unix:PATH"):
            a.write(b"x", [0])
        a.close()
