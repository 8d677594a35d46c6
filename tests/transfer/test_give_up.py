"""Memory that is given back while something is on its way: regions that came late, NICs that close
in the middle, a fabric that a peer keeps busy."""
import errno
import time

import numpy as np
import pytest

from connected import until
from kvio.errors import Busy, Closed, InvalidArgument, TransferError
from kvio.layout import READ, WRITE
from kvio.transfer import Fabric, Nic, TrafficClass, handshake
from nics import Pair, pattern, requests
from test_shared_hostile import ADDR, KEY, RETIRED, Hostile

GB = 10**9


class Handle:
    """A region as work requests name it, before there is one."""

    def __init__(self, memory, key):
        self.addr, self.key = memory.__array_interface__["data"][0], key


@pytest.mark.parametrize("opcode, status", [(READ, "REM_ACCESS_ERR"), (WRITE, "REM_ACCESS_ERR")])
def test_a_key_that_nobody_had_at_the_post_is_never_a_later_region(virtual, opcode, status):
    """It would not be held: its memory could be taken back in the middle."""
    pair = Pair(virtual, bytes_per_s=GB)
    late = np.full(1 << 16, 9, np.uint8)
    coming = Handle(late, ((pair.remote.key >> 24) + 1) << 24 | 1)
    first = pair.peer.post(pair.read(0, 0, 1 << 16))
    second = pair.peer.post(requests(opcode, pair.local, coming, 0, 0, 1 << 16))
    virtual.fabric.advance(1000)
    region = pair.b.register(late)
    assert region.key == coming.key
    virtual.fabric.advance(1 << 17)
    first.wait()
    with pytest.raises(TransferError, match=status):
        second.wait()
    pair.b.deregister(region)
    assert (late == 9).all()
    pair.peer.reset()                           # and who posts now may use it
    third = pair.peer.post(requests(opcode, pair.local, coming, 0, 0, 0))
    third.wait()


def test_a_local_key_that_came_late_is_none_either(virtual):
    pair = Pair(virtual, bytes_per_s=GB)
    late = np.zeros(1 << 16, np.uint8)
    coming = Handle(late, ((pair.remote.key >> 24) + 1) << 24 | 1)
    first = pair.peer.post(pair.read(0, 0, 1 << 16))
    second = pair.peer.post(requests(READ, coming, pair.remote, 0, 0, 1 << 16))
    region = pair.a.register(late)
    assert region.key == coming.key
    virtual.fabric.advance(1 << 18)
    first.wait()
    with pytest.raises(TransferError, match="LOC_PROT_ERR"):
        second.wait()
    assert not late.any()


def test_a_nic_closes_on_a_clock_that_stands(virtual):
    """What is half-sent there would never end; afterwards nobody writes the memory."""
    pair = Pair(virtual, bytes_per_s=GB)
    transfer = pair.peer.read(pair.read(0, 0, 1 << 20))
    virtual.fabric.advance(4096 * 10)
    with pytest.raises(Busy):
        pair.a.close()
    pair.a.close(cancel=True)
    assert transfer.done
    with pytest.raises(TransferError, match="WR_FLUSH_ERR"):
        transfer.wait()
    pair.mine[:] = 7
    virtual.fabric.advance(1 << 21)
    assert pair.b.poll() == 0 and (pair.mine == 7).all()


def test_a_nic_closes_on_a_link_that_takes_years(monkeypatch):
    monkeypatch.setattr("kvio.transfer.remote.GIVE_UP_S", 0.05)
    with Nic.open("soft", clock="monotonic", bytes_per_s=1000) as slow:
        memory = np.zeros(1 << 20, np.uint8)
        region = slow.register(memory)
        slow.listen("me")
        peer = slow.connect("me")
        transfer = peer.read(requests(READ, region, region, 0, 1 << 19, 1 << 19))
        time.sleep(0.01)
        slow.close(cancel=True)
        assert transfer.done


# ---- regions that go while somebody comes

def test_who_connects_while_a_region_goes_never_hears_of_it(tmp_path):
    """Else its place in the table could not be used again, and that ended the connection."""
    nics = a, b = [Nic.open("soft", name=name, fabric=Fabric()) for name in "ab"]
    listener, made = b.listen(f"unix:{tmp_path}/b"), []
    first = a.connect(listener.address)
    going = b.register(pattern(4096))
    retract = b._control.retract

    def retract_and_meet(key):
        retract(key)
        made.append(a.connect(listener.address))
    b._control.retract = retract_and_meet
    b.deregister(going)
    new, mine = b.register(pattern(4096)), a.register(np.zeros(4096, np.uint8))
    assert new.key & 0xffffff == going.key & 0xffffff
    for peer in first, *made:
        assert set(peer.far.owners) == {new.key}
        peer.read(requests(READ, mine, new, 0, 0, 4096)).wait()
        peer.close()
    for nic in nics:
        nic.close()


def test_a_region_that_stays_is_told_of_again(tmp_path, monkeypatch):
    nics = a, b = [Nic.open("soft", name=name, fabric=Fabric()) for name in "ab"]
    listener = b.listen(f"unix:{tmp_path}/b")
    peer, region = a.connect(listener.address), b.register(pattern(4096))

    def interrupted(key):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(b, "_ext", type("Ext", (), {
            "__getattr__": lambda _, name, ext=b._ext: getattr(ext, name),
            "dereg": staticmethod(interrupted)})())
        with pytest.raises(KeyboardInterrupt):
            b.deregister(region)
    assert set(peer.far.owners) == {region.key} and not b._going
    for nic in nics:
        nic.close()


def test_more_classes_than_a_soft_nic_has_lanes(tmp_path):
    nics = a, b = [Nic.open("soft", name=name, fabric=Fabric()) for name in "ab"]
    b.listen(f"unix:{tmp_path}/b")
    with pytest.raises(TransferError, match="17 classes.*ask for fewer"):
        a.connect(f"unix:{tmp_path}/b", [TrafficClass(f"c{i}", i % 16, 0) for i in range(17)])
    for nic in nics:
        nic.close()


@pytest.mark.parametrize("name", ["", 5, "x" * 201, "\x1b[2J", "\ud800"])
def test_names_of_classes_are_words(name):
    with pytest.raises(InvalidArgument, match="name"):
        TrafficClass(name, 1, 1)


def test_what_is_no_region_no_address_no_secret(tmp_path):
    with Nic.open("soft", fabric=Fabric()) as nic:
        for key in -1, 2**64, "x", None, []:
            with pytest.raises(InvalidArgument, match="deregister"):
                nic.deregister(type("Odd", (), {"key": key})())
        for use in nic.listen, nic.connect:
            with pytest.raises(InvalidArgument, match="address"):
                use([])
    with pytest.raises(InvalidArgument):
        Nic.open("verbs:\ud800")
    assert handshake.load_secret("\udc80") == b"\x80"
    with pytest.raises(InvalidArgument, match="secret"):
        handshake.load_secret("\ud800")


# ---- the control thread

class _Restless:
    """One whose end brings in another, as a connection's does its peer."""

    def __init__(self, control, more=1):
        self.control, self.more, self.ticked = control, more, False

    def tick(self):
        self.ticked = True
        if self.more:
            self.next = _Restless(self.control, 0)
            self.control.restless.add(self.next)
        return True


def test_a_connection_that_ends_in_a_tick_leaves_its_peer_to_be_drained(tmp_path):
    with Nic.open("soft", fabric=Fabric()) as nic:
        nic.listen(f"unix:{tmp_path}/socket")
        control = nic._control
        one = _Restless(control)
        control.ask(lambda waiter: (control.restless.add(one), waiter.finish()), 5)
        until(lambda: one.ticked and one.next.ticked)
        assert not control.ended


def test_what_comes_as_the_thread_ends_is_told_so(tmp_path):
    """And does not wait for somebody who is gone."""
    nic = Nic.open("soft", fabric=Fabric())
    nic.listen(f"unix:{tmp_path}/socket")
    control = nic._control

    class Late:
        """`ended` as seen just before the thread ended."""
        looks = 0

        def __call__(self, control):
            self.looks += 1
            return self.looks > 1
    late = Late()
    control.stop()
    until(lambda: control.ended)
    nic.close()
    kind = type("Late", (type(control),), {"ended": property(late)})
    control.__dict__.pop("ended")
    control.__class__ = kind
    with pytest.raises(Closed):
        control.submit(lambda: None)
    assert not control._jobs


@pytest.mark.parametrize("count, alive", [(1023, True), (1024, False), (2**63, False)])
def test_keys_that_may_have_been_written_over_are_not_believed(count, alive):
    """The place of the next one is written before it is counted: of 1024 the first may be lost."""
    hostile = Hostile()
    far = type("Far", (), {"addr": ADDR, "key": KEY})
    hostile.put(RETIRED, count)
    batch = hostile.qp.post(requests(READ, hostile.target, far, 0, 0, 4096))
    assert batch.wait(5)
    assert batch.status.tolist() == [0 if alive else -errno.ETIMEDOUT]
    hostile.close()
