"""Connections through the whole handshake, within a process: addresses, secrets, classes, regions,
reset, the end. Over verbs on the stand-in for libibverbs."""
import errno
import gc
import os
import socket
import threading
import time

import numpy as np
import pytest

from connected import DEVICE, open_nic, pair, until, works      # noqa: F401
from kvio.errors import Busy, Closed, InvalidArgument, TransferError
from kvio.layout import READ
from kvio.transfer import (COLLECTIVE, KV, Access, Fabric, Nic, TrafficClass, addresses, carrier,
                           connection, links, shared)
from nics import pattern, requests

SECRET = "the secret of these tests"


# ---- addresses

def test_the_listener_tells_its_port_and_regions_are_known_at_once(pair):
    host, _, port = pair.listener.address.rpartition(":")
    assert host == "127.0.0.1" and int(port) > 0
    for peer, region in (pair.peer, pair.remote), (pair.back, pair.local):
        assert set(peer.far.owners) == {region.key}
    pair.peer.read(pair.read(0, 0, 65536)).wait()
    assert (pair.mine == pair.theirs).all()
    assert pair.peer.remote_name == "b" and pair.back.remote_name == "a"
    assert pair.peer.remote_epoch == pair.b._control.epoch
    state = pair.peer.query()["kv"]
    assert (state["remote_sl"], state["remote_tclass"]) == (KV.sl, KV.tclass)


def test_the_kernel_looks_whether_the_other_host_is_alive(pair):
    for peer in pair.peer, pair.back:
        sock = peer._other.stream.sock
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert 0 < sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 5
        assert 0 < sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 15000


@pytest.mark.parametrize("address", ["[::1]:0", "localhost:0", "lo:0", "lo%:0", ":0"])
def test_ways_to_write_an_address(open_nic, address):
    if address == "[::1]:0" and not socket.has_ipv6:
        pytest.skip("no IPv6")
    a, b = open_nic(name="a"), open_nic(name="b")
    try:
        listener = b.listen(address)
    except TransferError as wrong:
        if address != "[::1]:0":
            raise
        pytest.skip(str(wrong))
    a.connect(listener.address).close()
    with pytest.raises(InvalidArgument, match="already"):
        b.listen(listener.address)
    listener.close()
    with pytest.raises(TransferError, match="nobody listens"):
        a.connect(listener.address)


def test_a_unix_socket_is_its_users_alone_and_survives_a_crash(open_nic, tmp_path):
    a, b = open_nic(name="a"), open_nic(name="b")
    path = tmp_path / "socket"
    address = f"unix:{path}"
    with socket.socket(socket.AF_UNIX) as left_by_a_crash:
        left_by_a_crash.bind(str(path))
    listener = b.listen(address)
    assert address in repr(listener)
    assert path.stat().st_mode & 0o777 == 0o600
    a.connect(address).close()
    with pytest.raises(InvalidArgument, match="already"):
        a.listen(address)
    listener.close()
    assert not path.exists()
    path.write_text("a file of somebody's")
    with pytest.raises(InvalidArgument, match="no socket"):
        b.listen(address)
    assert path.read_text() == "a file of somebody's"


@pytest.mark.parametrize("address", ["host", "a:b:c", "x:", "x:-1", "x:65536", "x:1²", ":", "",
                                     "::1:80", "unix:", "unix:" + "x" * 108, None, 7, b":1"])
def test_what_is_no_address(open_nic, address):
    nic = open_nic()
    with pytest.raises((InvalidArgument, TransferError)):
        nic.connect(address)
    if address not in ("host", ""):             # a name in this process, for a NIC without fabric
        with pytest.raises(InvalidArgument):
            nic.listen(address)


def test_a_name_that_nobody_answers_for_takes_no_longer_than_connect(open_nic, monkeypatch):
    nic, answer = open_nic(), threading.Event()
    honest = socket.getaddrinfo

    def slow(host, *args, flags=0, **options):
        if host == "slow.example" and not flags & socket.AI_NUMERICHOST:
            answer.wait(30)
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return honest(host, *args, flags=flags, **options)
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    begin = time.monotonic()
    with pytest.raises(TransferError, match="no name server has answered within 0.1 s") as failure:
        nic.connect("slow.example:7000", timeout=0.1)
    assert failure.value.errno == errno.ETIMEDOUT
    monkeypatch.setattr(addresses, "RESOLVE_S", 0.1)
    with pytest.raises(TransferError, match="no name server"):
        nic.listen("slow.example:7000")
    answer.set()
    with pytest.raises(TransferError, match="no address is known for 'slow.example'.*try again"):
        nic.connect("slow.example:7000")
    assert time.monotonic() - begin < 5                 # or else it has waited for the answer
    with pytest.raises(TransferError, match="no address is known"):
        nic.connect("a" * 70 + ".example:7000")         # no name at all


def test_who_forgets_unix_or_the_socket_is_told_what_to_write(open_nic, tmp_path):
    path = f"{tmp_path}/socket"
    for nic in open_nic(), Nic.open("soft"):
        with pytest.raises(TransferError, match=f'for a socket write "unix:{path}"'):
            nic.connect(path)
        with pytest.raises(TransferError, match="call listen first, or give"):
            nic.connect("name")
        with pytest.raises(TransferError, match="no such socket; call listen") as failure:
            nic.connect(f"unix:{path}")
        assert failure.value.errno == errno.ECONNREFUSED
    nic.close()
    with socket.socket(socket.AF_UNIX) as left_by_a_crash:
        left_by_a_crash.bind(path)
    with pytest.raises(TransferError, match="the listener .* is no more"):
        open_nic().connect(f"unix:{path}")
    os.unlink(path)
    with open(path, "w"):
        with pytest.raises(TransferError, match="it is no socket"):
            open_nic().connect(f"unix:{path}")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("is_seen", [True, False])
def test_a_socket_of_another_user(open_nic, tmp_path, monkeypatch, number, is_seen):
    """Root may open all sockets, so the kernel's refusal is made up."""
    path = tmp_path / "socket"
    if is_seen:
        path.touch()

    class Refused(socket.socket):
        def connect(self, address):
            raise OSError(number, os.strerror(number))
    monkeypatch.setattr(socket, "socket", Refused)
    nic = open_nic()
    with pytest.raises(TransferError, match="both ends must be the same user") as failure:
        nic.connect(f"unix:{path}")
    assert failure.value.errno == number
    whose = f"that of user {os.geteuid()}" if is_seen else "in a directory"
    assert whose in str(failure.value)


def test_a_soft_nic_reaches_others_by_a_unix_socket_only():
    with Nic.open("soft") as nic:
        for use in nic.listen, nic.connect:
            with pytest.raises(InvalidArgument, match="unix:PATH"):
                use("localhost:7000")


def test_only_loopback_without_a_secret(open_nic):
    nic = open_nic()
    for use in nic.listen, nic.connect:
        with pytest.raises(InvalidArgument, match="secret"):
            use("0.0.0.0:7000")
        with pytest.raises(InvalidArgument, match="secret"):
            use("192.0.2.1:7000")
    listener = nic.listen("0.0.0.0:0", secret=SECRET)
    nic.connect("127.0.0.1" + listener.address[7:], secret=SECRET).close()


def test_descriptors_that_nobody_asked_for_are_closed(open_nic, tmp_path, monkeypatch):
    """Verbs needs none, but a Unix socket carries them."""
    a, b, address = open_nic(name="a"), open_nic(name="b"), f"unix:{tmp_path}/socket"
    listener = b.listen(address)
    a.connect(address).close()

    def open_files():
        listener.refused.clear()
        gc.collect()
        return len(os.listdir("/proc/self/fd"))
    shared._own_pidfd()                     # of the process, and it stays
    before = open_files()
    with Nic.open("soft", fabric=Fabric()) as soft:
        with pytest.raises(InvalidArgument, match="one end is a soft NIC"):
            soft.connect(address)
    until(lambda: not b._control.connections and open_files() == before)
    with open(os.devnull) as file:
        with monkeypatch.context() as patch:
            patch.setattr(carrier.Carrier, "offer", lambda self: ({}, [file.fileno()] * 2))
            with pytest.raises(InvalidArgument, match="has sent descriptors"):
                a.connect(address)
        until(lambda: not b._control.connections and open_files() == before + 1)
        peer = a.connect(address)
        with monkeypatch.context() as patch:
            honest = carrier.Carrier.describe
            patch.setattr(carrier.Carrier, "describe", lambda self, region: (
                honest(self, region)[0], file.fileno()))
            a.register(bytearray(4096))
        until(lambda: peer.gone)
        assert "a region is malformed" in peer.gone
    peer.close()
    until(lambda: not b._control.connections and open_files() == before)


# ---- secrets, classes

@pytest.mark.parametrize("theirs, ours", [(SECRET, None), (SECRET, "another"), (None, SECRET)])
def test_who_does_not_know_the_secret_is_refused(open_nic, theirs, ours):
    a, b = open_nic(name="a"), open_nic(name="b")
    listener = b.listen(":0", secret=theirs)
    with pytest.raises(TransferError, match="secret") as failure:
        a.connect(listener.address, secret=ours)
    assert failure.value.errno == errno.EACCES and listener.address in str(failure.value)
    until(lambda: listener.refused)
    assert listener.refused[-1].errno == errno.EACCES and listener.accept() is None
    assert not a._peers and not b._peers
    a.connect(listener.address, secret=theirs).close()


def test_the_secret_may_stand_in_a_file(open_nic, tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    monkeypatch.setenv("KVIO_SECRET_FILE", str(path))
    a, b = open_nic(name="a"), open_nic(name="b")
    for address in ":0", "a name":
        a.connect(b.listen(address).address).close()
    a.connect(b.listen(":0", secret=SECRET).address).close()
    with pytest.raises(TransferError, match="secret"):
        a.connect(b.listen(":0").address, secret="another")
    path.chmod(0o644)
    with pytest.raises(InvalidArgument, match="chmod"):
        b.listen(":0")


def test_a_class_list_that_differs_is_an_error_on_both_ends_that_names_both(open_nic):
    a, b = open_nic(name="a"), open_nic(name="b")
    listener = b.listen(":0", classes=[COLLECTIVE, KV])
    other = [COLLECTIVE, TrafficClass("kv", 5, 32)]
    with pytest.raises(InvalidArgument) as failure:
        a.connect(listener.address, classes=other)
    until(lambda: listener.refused)
    for wrong in failure.value, listener.refused[-1]:
        assert isinstance(wrong, InvalidArgument)
        for words in "kv (sl 5, tclass 32)", "kv (sl 2, tclass 32)", "same list":
            assert words in str(wrong)
    a.connect(listener.address).close()


def test_a_class_that_the_device_does_not_honour_is_reported(open_nic, monkeypatch):
    a, b = open_nic(name="a"), open_nic(name="b")
    listener = b.listen(":0")
    honest = links.Link.readback

    def readback(link):
        found = honest(link)
        return found if link.nic is a else found | {"kv": (0, 32, found["kv"][2])}
    monkeypatch.setattr(links.Link, "readback", readback)
    words = "NIC b does not honour class kv: asked for sl 2 .* reads back 0"
    with pytest.warns(RuntimeWarning, match=words):
        peer = a.connect(listener.address)
    with pytest.warns(RuntimeWarning, match=words):
        back = listener.accept()
    assert peer.query()["kv"]["remote_sl"] == 0
    assert len(peer.dishonoured) == len(back.dishonoured) == 1


def test_queue_pairs_with_different_mtus_are_not_used(open_nic, monkeypatch):
    a, b = open_nic(name="a"), open_nic(name="b")
    listener = b.listen(":0")
    honest = links.Link.readback
    monkeypatch.setattr(links.Link, "readback", lambda link: {
        name: (sl, tclass, mtu // (1 + (link.nic is a)))
        for name, (sl, tclass, mtu) in honest(link).items()})
    with pytest.raises(TransferError, match="MTU"):
        a.connect(listener.address)
    assert listener.accept() is None and not a._peers


def test_nics_of_different_mtus_agree(open_nic):
    a, b = open_nic(name="a", mtu=1024), open_nic(name="b", mtu=4096)
    listener = b.listen(":0")
    peer = a.connect(listener.address)
    assert peer.query()["kv"]["mtu"] == listener.accept().query()["kv"]["mtu"] == 1024


# ---- regions

def test_regions_come_and_go_while_connected(pair):
    memory = pattern(4096, 5)
    region = pair.b.register(memory)
    assert set(pair.peer.far.owners) == {pair.remote.key, region.key}
    wrs = requests(READ, pair.local, region, 0, 0, 4096)
    pair.peer.read(wrs).wait()
    assert (pair.mine[:4096] == memory).all()
    pair.b.deregister(region)
    assert set(pair.peer.far.owners) == {pair.remote.key}
    with pytest.raises(TransferError, match="REM_ACCESS_ERR"):
        pair.peer.read(wrs).wait()
    private = pair.b.register(memory, Access.LOCAL_WRITE)
    assert private.key not in pair.peer.far.owners
    third = pair.a.connect(pair.listener.address)
    assert set(third.far.owners) == {pair.remote.key}


def test_a_region_in_use_stays_on_both_ends(pair, standin):
    standin.set(frozen=1)
    transfer = pair.back.write(requests(2, pair.remote, pair.local, 0, 0, 4096))
    with pytest.raises(Busy, match="uses"):
        pair.b.deregister(pair.remote)
    assert pair.remote.key in pair.peer.far.owners
    standin.set(frozen=0)
    transfer.wait()
    pair.b.deregister(pair.remote)
    assert not pair.peer.far.owners


def test_the_other_end_lets_go_of_a_region_once_its_transfers_have_drained(pair, standin):
    standin.set(frozen=1)
    transfer = pair.peer.read(pair.read(0, 0, 4096))
    going = threading.Thread(target=pair.b.deregister, args=[pair.remote])
    going.start()
    until(lambda: pair.a._control.restless)
    assert pair.remote.key in pair.peer.far.owners and going.is_alive()
    standin.set(frozen=0)
    going.join()
    assert not pair.peer.far.owners
    transfer.wait()


@pytest.mark.parametrize("part", [1, 40, 1000, 1039, 1040, 1041, 5000])
def test_a_region_of_many_registrations_is_told_in_parts(pair, monkeypatch, part):
    """Of 250 slices: 40 bytes, and 4 for each."""
    monkeypatch.setattr(connection, "AD_PART_NBYTES", part)
    monkeypatch.setenv("KVIO_IB_SLICE_BYTES", "4096")
    nic = pair.b.open(DEVICE, name="sliced")
    with nic:
        first, memory = nic.register(pattern(250 * 4096, 5)), pattern(250 * 4096, 6)
        peer = pair.a.connect(nic.listen(":0").address)         # told while they connect
        later = nic.register(memory)                            # and afterwards
        assert set(peer.far.owners) == {first.key, later.key}
        at = 4096 * np.arange(16)
        peer.read(requests(READ, pair.local, later, at, 16 * at, 4096)).wait()
        assert (pair.mine.reshape(16, -1) == memory[:256 * 4096].reshape(-1, 4096)[:250:16]).all()
        peer.close()


def test_a_region_that_peers_could_not_be_told_of_is_refused(pair, monkeypatch, standin):
    """By who registers it, and its connections stay."""
    monkeypatch.setattr("kvio.transfer.nic.MAX_AD_NBYTES", 40 + 4 * 8)
    monkeypatch.setenv("KVIO_IB_SLICE_BYTES", "4096")
    with pair.b.open(DEVICE, name="sliced") as nic:
        peer = pair.a.connect(nic.listen(":0").address)
        before = standin.count("mrs")
        with pytest.raises(TransferError, match="76 bytes to describe, and peers take 72") as why:
            nic.register(pattern(9 * 4096))
        assert why.value.errno == errno.EMSGSIZE and standin.count("mrs") == before
        nic.register(pattern(9 * 4096), Access.LOCAL_WRITE)     # nobody is told of this one
        region = nic.register(pattern(8 * 4096))
        peer.read(requests(READ, pair.local, region, 0, 0, 8 * 4096)).wait()
        peer.close()


# ---- reset

@pytest.mark.parametrize("end", ["peer", "back"])
@pytest.mark.parametrize("failed", ["peer", "back"])
def test_reset_mends_both_ends_whichever_failed(pair, failed, end):
    getattr(pair, failed)._qps["kv"].fail()
    kept = {peer: peer.query()["collective"]["rails"] for peer in (pair.peer, pair.back)}
    before = pair.peer.query()["kv"]["rails"][0]["psn"]
    getattr(pair, end).reset()
    for peer in pair.peer, pair.back:
        state = peer.query()
        assert [each["state"] for each in state.values()] == ["ready", "ready"]
        assert state["collective"]["rails"] == kept[peer]       # untouched
    assert pair.peer.query()["kv"]["rails"][0]["psn"] != before
    pair.peer.read(pair.read(0, 0, 65536)).wait()
    pair.back.read(requests(READ, pair.remote, pair.local, 0, 0, 65536)).wait()
    pair.peer.reset()                                           # nothing to mend


def test_reset_while_the_other_end_is_busy(pair, standin):
    standin.set(frozen=1)
    transfer = pair.back.read(requests(READ, pair.remote, pair.local, 0, 0, 64))
    pair.peer._qps["kv"].fail()
    with pytest.raises(Busy, match="b: transfers of the other end"):
        pair.peer.reset()
    standin.set(frozen=0)
    with pytest.raises(TransferError):
        transfer.wait()
    pair.peer.reset()
    pair.peer.read(pair.read(0, 0, 64)).wait()


def test_both_ends_may_reset_at_once(pair):
    wrong = []

    def reset(peer):
        try:
            peer.reset()
        except Exception as failed:
            wrong.append(failed)
    for _ in range(20):
        pair.peer._qps["kv"].fail()
        threads = [threading.Thread(target=reset, args=[p]) for p in (pair.peer, pair.back)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        pair.peer.read(pair.read(0, 0, 64)).wait()
        pair.back.read(requests(READ, pair.remote, pair.local, 0, 0, 64)).wait()


# ---- the end

@pytest.mark.parametrize("closing, other", [("peer", "back"), ("back", "peer")])
def test_closing_one_end_ends_the_other(pair, standin, closing, other):
    far = getattr(pair, other)
    local, remote = (pair.remote, pair.local) if other == "back" else (pair.local, pair.remote)
    standin.set(frozen=1)
    transfer = far.read(requests(READ, local, remote, 0, 0, 64))
    getattr(pair, closing).close()
    with pytest.raises(TransferError, match="WR_FLUSH_ERR.*gone: connect again"):
        transfer.wait()
    standin.set(frozen=0)
    for use in (far.query, far.reset, lambda: far.read(requests(READ, local, remote, 0, 0, 64))):
        with pytest.raises(Closed, match="connect again"):
            use()
    far.close()
    until(lambda: not pair.a._peers and not pair.b._peers)
    assert works(pair)


def test_an_end_that_nobody_accepted_goes_with_the_other(pair):
    third = pair.a.connect(pair.listener.address)
    third.close()
    assert pair.listener.accept() is None and pair.b._peers == {pair.back}


def test_close_while_a_transfer_is_in_flight_is_busy(pair, standin):
    standin.set(frozen=1)
    transfer = pair.peer.read(pair.read(0, 0, 64))
    for thing in pair.peer, pair.a:
        with pytest.raises(Busy):
            thing.close()
    standin.set(frozen=0)
    transfer.wait()
    pair.peer.read(pair.read(0, 0, 64)).wait()          # nothing was lost
    pair.a.close()


def test_a_nic_that_is_closed_gives_up_what_a_device_never_answers(pair, standin, monkeypatch):
    monkeypatch.setattr("kvio.transfer.remote.GIVE_UP_S", 0.1)
    standin.set(frozen=1)
    transfer = pair.peer.read(pair.read(0, 0, 64))
    pair.a.close(cancel=True)
    assert transfer.done and transfer.status[0] < 0


def test_a_nic_that_nobody_closed_is_collected_and_its_thread_ends(standin):
    gc.collect()
    threads = threading.active_count()
    nic = Nic.open(DEVICE, name="forgotten")
    nic.listen(":0")
    with pytest.warns(ResourceWarning, match="forgotten was not closed"):
        del nic
        gc.collect()
    until(lambda: threading.active_count() == threads)
