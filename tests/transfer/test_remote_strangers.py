"""Strangers at the handshake port, and somebody between the two ends. Over verbs on the stand-in
for libibverbs."""
import gc
import os
import socket
import struct
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connected import open_nic, pair, until, works      # noqa: F401
from kvio.errors import InvalidArgument, TransferError
from kvio.transfer import control, frames


def raw(listener):
    host, _, port = listener.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


@pytest.mark.parametrize("said", [
    b"", b"\0", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 100000, os.urandom(4096),
    struct.pack("!IB", 2049, 1) + bytes(2048), struct.pack("!IB", 3, 1) + b"{}",
    struct.pack("!IB", 3, 8) + b"{}", struct.pack("!IB", 12, 3) + b'{"reason":1}'])
def test_garbage_ends_the_connection_and_not_the_listener(pair, said):
    with raw(pair.listener) as sock:
        try:
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            assert len(sock.recv(100)) == 0
        except OSError:
            pass                                # it hung up before we were through
    until(lambda: pair.listener.refused)
    assert isinstance(pair.listener.refused[-1], TransferError) and works(pair)
    until(lambda: len(pair.b._control.connections) == 1)


def test_a_slow_loris_is_cut_off(pair, monkeypatch):
    monkeypatch.setattr(control, "HANDSHAKE_S", 0.2)
    codec = frames.Codec(frames.INITIATOR)
    hello = codec.encode(frames.HELLO, {"magic": "kvio"})
    with raw(pair.listener) as sock:
        try:
            for at in range(1000):              # never a whole frame
                sock.sendall(hello[at % 5:at % 5 + 1] if at >= 5 else hello[at:at + 1])
                time.sleep(0.01)
        except OSError:
            pass
        else:
            raise AssertionError("it was served for 10 s")
    until(lambda: pair.listener.refused)
    assert works(pair)


def test_half_open_connections_are_bounded_and_do_not_keep_others_out(pair, monkeypatch):
    monkeypatch.setattr(control, "MAX_HALF_OPEN", 8)
    monkeypatch.setattr(control, "CROWDED_S", 0.1)
    crowd = [raw(pair.listener) for _ in range(40)]
    until(lambda: len(pair.b._control.half_open) == 8)
    for _ in range(3):
        assert works(pair)
        assert len(pair.b._control.half_open) <= 8
    for sock in crowd:
        sock.close()
    until(lambda: not pair.b._control.half_open)


def test_a_thousand_strangers_leave_nothing(pair):
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for i in range(1000):
        with raw(pair.listener) as sock:
            sock.sendall((b"", b"x", b"GET / HTTP/1.1\r\n\r\n")[i % 3])
    until(lambda: len(pair.b._control.connections) == 1)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert len(pair.listener.refused) <= 64 and works(pair)


class Between:
    """Passes bytes on between one connection and a listener, but for one bit or a cut."""

    def __init__(self, listener, victim, at, change):
        self.listener, self.victim, self.at, self.change = listener, victim, at, change
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self.server.getsockname()[1]
        self.hit = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        with self.server, self.server.accept()[0] as near, raw(self.listener) as far:
            pumps = [threading.Thread(target=self.pump, args=each)
                     for each in ((near, far, 0), (far, near, 1))]
            for pump in pumps:
                pump.start()
            for pump in pumps:
                pump.join()

    def pump(self, source, target, direction):
        passed = 0
        try:
            while data := source.recv(65536):
                place = self.at - passed
                passed += len(data)
                if direction == self.victim and 0 <= place < len(data):
                    self.hit = True
                    if self.change is None:
                        target.sendall(data[:place])
                        break
                    data = bytearray(data)
                    data[place] ^= self.change
                target.sendall(data)
        except OSError:
            pass
        for sock in source, target:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


@settings(max_examples=40, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(victim=st.integers(0, 1), at=st.integers(0, 1400),
       change=st.none() | st.integers(0, 7).map(lambda bit: 1 << bit))
def test_nobody_between_the_two_can_change_anything(pair, victim, at, change):
    between = Between(pair.listener, victim, at, change)
    try:
        peer = pair.a.connect(between.address, timeout=0.5)
    except (TransferError, InvalidArgument):
        peer = None
    if peer is not None:                # changed later than that, if at all
        peer.close()
    between.thread.join(10)
    assert not between.thread.is_alive()
    assert peer is None or not between.hit or at > 700
    while pair.listener.accept():
        pass
    until(lambda: not pair.b._control.half_open)
    assert works(pair)
