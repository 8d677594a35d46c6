"""What another process may send us: descriptors of all kinds, and a ring full of anything."""
import errno
import fcntl
import mmap
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvio import pages
from kvio._ext import nic as ext
from kvio.errors import InvalidArgument, MappingFailed
from kvio.layout import READ, SGE_DTYPE, WR_DTYPE, WRITE
from kvio.transfer import Access, Fabric, Nic
from kvio.transfer.shared import _AD, _AT, SharedCarrier
from nics import pattern, requests

PAGE, KB = 4096, 1024
GUARD = 16 * KB
LANES, LANE_NBYTES, SLOTS = 128 + 8 * 1024, 128 + 64 * 1024, 1024
RETIRED, KEYS = 64, 128                 # in the ring's head
KEYS_ROOM = 1024
TAIL, ACK, FIRST = 0, 64, 128           # in a lane
LIFE = 5                                # of the hostile end's queue pair
KEY, ADDR, NBYTES = 7 << 24, 0x10000, 64 * KB


class Hostile:
    """A NIC of ours, and an other end that is nothing but memory that the test writes."""

    def __init__(self):
        self.nic = Nic.open("soft", fabric=Fabric())
        self.all = pattern(GUARD + NBYTES + GUARD)
        self.target = self.nic.register(self.all[GUARD:-GUARD])
        self.fixed = pattern(PAGE, 5)
        self.read_only = self.nic.register(self.fixed, Access.REMOTE_READ)
        self.before = self.all.copy(), self.fixed.copy()
        self.carrier = SharedCarrier(self.nic)
        self.carrier.offer()
        memory, fd = pages.sealed_memfd(ext.RING_NBYTES)
        self.ring = np.frombuffer(memory, np.uint8)
        self.far = self.carrier.attach(0, {"bytes_per_s": 0}, [
            fd, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), os.pidfd_open(os.getpid())])
        source, fd = pages.sealed_memfd(NBYTES)
        self.source = np.frombuffer(source, np.uint8)
        self.source[:] = pattern(NBYTES, 9)
        self.carrier.add(self.far, ad(KEY, ADDR, NBYTES, 7, 0), fd)
        self.carrier.add(self.far, ad(KEY + 1, ADDR, NBYTES, 7, 2**64 - 1), None)
        self.qp = ext.QueuePair(self.nic._ext, 2, 32, far=self.far)
        self.life = struct.unpack_from("<4I", self.qp.endpoints())[1]
        self.qp.connect_endpoints(struct.pack("<4IHBB16x", 1, LIFE, 4096, 0, 0, 2, 32))

    def put(self, at, value):
        self.ring[at:at + 8] = np.frombuffer(struct.pack("<Q", value & 2**64 - 1), np.uint8)

    def lane(self, at, value):
        self.put(LANES + at, value)

    def request(self, slot, addr, lkey, remote_addr, rkey, length, num_sge=0):
        raw = struct.pack("<4Q2I", addr, lkey, remote_addr, rkey, length, num_sge)
        at = LANES + FIRST + 64 * (slot % SLOTS)
        self.ring[at:at + len(raw)] = np.frombuffer(raw, np.uint8)

    def good(self, slot, length=4096, at=0):
        self.request(slot, ADDR + at, KEY, self.target.addr + at, self.target.key, length)

    def acknowledged(self):
        """(life, status, count) of what we say of its requests."""
        word, = struct.unpack_from("<Q", self.carrier._ring, LANES + ACK)
        return word >> 40, word >> 32 & 255, word & 0xffffffff

    def drive(self):
        for _ in range(3):
            self.nic.poll()

    def check(self):
        """Not a byte was written outside of the region that it may write."""
        for part in slice(0, GUARD), slice(GUARD + NBYTES, None):
            assert (self.all[part] == self.before[0][part]).all()
        assert (self.fixed == self.before[1]).all()

    def close(self):
        self.far.lost()
        self.drive()
        self.check()
        self.qp.close()
        self.carrier.detach(self.far)
        for region in self.target, self.read_only:
            self.nic.deregister(region)         # nothing holds them any more
        self.nic.close()


def ad(key, addr, nbytes, access, offset):
    return _AD.pack(key, addr, nbytes, nbytes, access, 0) + _AT.pack(offset)


def word(count, life=LIFE, status=0):
    return life << 40 | status << 32 | count & 0xffffffff


@pytest.fixture
def hostile():
    made = Hostile()
    yield made
    made.close()


# ---- requests

def test_the_harness_speaks_the_protocol(hostile):
    """Or else the tests below would prove nothing."""
    for slot in range(3):
        hostile.good(slot, 4096, 8192 * slot)
    hostile.lane(TAIL, word(3))
    hostile.drive()
    for at in 0, 8192, 16384:
        assert (hostile.all[GUARD + at:GUARD + at + 4096] == hostile.source[at:at + 4096]).all()
    assert hostile.acknowledged() == (LIFE, 0, 3)


@pytest.mark.parametrize("change, status", [
    (dict(rkey=3), 10), (dict(length=NBYTES + 1), 4), (dict(remote_addr=2**64 - 1), 10),
    (dict(lkey=KEY + 1), 65), (dict(lkey=KEY + 2), 4), (dict(addr=ADDR - 1), 4),
    (dict(addr=ADDR + 1, length=NBYTES), 4), (dict(length=2**32 - 1), 4), ("read only", 10),
])
def test_a_bad_request_is_refused_by_name(hostile, change, status):
    fields = dict(addr=ADDR, lkey=KEY, remote_addr=hostile.target.addr, rkey=hostile.target.key,
                  length=4096)
    if change == "read only":
        change = dict(remote_addr=hostile.read_only.addr, rkey=hostile.read_only.key)
    hostile.good(0)
    hostile.request(1, **fields | change)
    hostile.good(2, 4096, 8192)
    hostile.lane(TAIL, word(3))
    hostile.drive()
    assert hostile.acknowledged() == (LIFE, status, 1)
    assert (hostile.all[GUARD + 8192:GUARD + 12288] == hostile.before[0][
        GUARD + 8192:GUARD + 12288]).all()


@pytest.mark.parametrize("tail", [word(SLOTS + 1), word(2**31), word(2**32 - 1)])
def test_a_ring_that_cannot_be_ends_the_connection(hostile, tail):
    hostile.good(0)
    hostile.lane(TAIL, tail)
    hostile.drive()
    assert hostile.acknowledged()[1] == 12      # RETRY_EXC_ERR


def test_scatter_gather_lists_that_lie(hostile):
    """Their sum is not the length; there are more than fit."""
    for num_sge in 2, 64, 65, 2**32 - 1:
        each = Hostile()
        each.request(0, 0, 0, each.target.addr, each.target.key, 100, num_sge)
        for slot in range(1, 40):
            each.ring[LANES + FIRST + 64 * slot:][:48] = np.frombuffer(
                struct.pack("<QQI4x", ADDR, KEY, 4096) * 2, np.uint8)
        each.lane(TAIL, word(40))
        each.drive()
        assert each.acknowledged()[1] in (9, 12)
        assert (each.all == each.before[0]).all()
        each.close()


def test_acknowledgements_of_what_was_never_asked(hostile):
    hostile.lane(ACK, word(1, hostile.life))
    hostile.drive()
    batch = hostile.qp.post(requests(READ, hostile.target, Far, 0, 0, 64))
    assert batch.wait(30) and list(batch.status) == [-errno.ETIMEDOUT]


@pytest.mark.parametrize("count, status", [(KEYS_ROOM - 1, 0), (KEYS_ROOM, 12), (2**64 - 1, 12)])
def test_more_regions_retired_than_can_be_told(hostile, count, status):
    """Of as many as there are places the first may be overwritten while it is read."""
    hostile.put(RETIRED, count)
    hostile.good(0)
    hostile.lane(TAIL, word(1))
    hostile.drive()
    assert hostile.acknowledged() == (LIFE, status, status == 0)


def test_an_empty_request_may_lie_nowhere(hostile):
    hostile.request(0, 0, 0, 0, 0, 0)
    hostile.request(1, 0, 0, 0, 0, 0, 2)
    hostile.ring[LANES + FIRST + 128:][:64] = 0
    hostile.lane(TAIL, word(3))
    hostile.drive()
    assert hostile.acknowledged() == (LIFE, 0, 3)


class Far:
    addr, key = ADDR, KEY


FIELDS = st.one_of(
    st.sampled_from([0, 1, 2, 3, SLOTS, SLOTS + 1, 2**31, 2**32 - 1, 2**64 - 1, ADDR, KEY]),
    st.integers(0, 2**64 - 1), st.builds(word, st.integers(0, 2000)),
    st.builds(word, st.integers(0, 5), st.integers(0, 6), st.integers(0, 255)))
STEPS = st.lists(st.one_of(
    st.tuples(st.just("lane"), st.sampled_from([TAIL, ACK]), FIELDS),
    st.tuples(st.just("lane"), st.integers(0, SLOTS * 8 - 1).map(lambda i: FIRST + 8 * i), FIELDS),
    st.tuples(st.just("lane"), st.integers(0, 60).map(lambda i: FIRST + 8 * i), FIELDS),
    st.tuples(st.just("put"), st.integers(0, LANES // 8 - 1).map(lambda i: 8 * i), FIELDS),
    st.tuples(st.just("put"), st.sampled_from([RETIRED, KEYS]), FIELDS),
    st.tuples(st.just("good"), st.integers(0, 20), st.integers(0, NBYTES)),
    st.tuples(st.just("ack"), st.integers(0, 200), st.integers(0, 255)),
    st.tuples(st.just("post"), st.sampled_from([READ, WRITE]), st.integers(0, 3)),
    st.tuples(st.just("drive"), st.just(0), st.just(0))), max_size=30)


@settings(max_examples=120, deadline=None)
@given(STEPS)
def test_whatever_stands_in_the_ring_nothing_else_is_written(steps):
    hostile, batches, tail = Hostile(), [], 0
    for kind, one, two in steps:
        if kind == "good":
            hostile.good(tail, two, 0)
            tail += 1 + one % 2
            hostile.lane(TAIL, word(tail))
        elif kind == "ack":
            hostile.lane(ACK, word(one, hostile.life, two * (two > 200)))
        elif kind == "post":
            sges = np.zeros(3, SGE_DTYPE)
            sges["addr"], sges["lkey"], sges["length"] = (hostile.target.addr, hostile.target.key,
                                                          [100, 0, 50])
            wrs = np.concatenate([requests(one, hostile.target, Far, 0, 0, [64] * 5)] * (1 + two))
            wrs["num_sge"][1::2], wrs["length"][1::2] = 3, 150
            batches.append(hostile.qp.post(wrs.astype(WR_DTYPE), sges))
        elif kind == "drive":
            hostile.drive()
        else:
            getattr(hostile, kind)(one, two)
    hostile.drive()
    hostile.check()
    hostile.close()
    for batch in batches:
        assert batch.wait(30) and -errno.EINPROGRESS not in list(batch.status)


# ---- descriptors

def memfd(nbytes, seals=None):
    fd = os.memfd_create("x", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals is not None:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


SEALS = 0x17


def bad_descriptors():
    yield "unsealed", memfd(NBYTES), errno.EPERM
    for missing in 0x1, 0x2, 0x4, 0x10:
        yield f"without seal {missing:#x}", memfd(NBYTES, SEALS & ~missing), errno.EPERM
    yield "too small", memfd(NBYTES - PAGE, SEALS), errno.EINVAL
    yield "empty", memfd(0, SEALS), errno.EINVAL
    yield "pipe", os.pipe()[0], errno.EINVAL
    yield "directory", os.open("/", os.O_RDONLY), errno.EINVAL


def test_memory_that_could_be_cut_off_is_refused(hostile):
    before = len(os.listdir("/proc/self/fd"))
    for name, fd, number in bad_descriptors():
        with pytest.raises(MappingFailed) as failure:
            hostile.carrier.add(hostile.far, ad(99 << 24 | 5, ADDR, NBYTES, 7, 0), fd)
        assert failure.value.errno == number, name
        with pytest.raises(OSError):
            os.fstat(fd)                        # it was ours to close
    assert len(os.listdir("/proc/self/fd")) <= before + 1       # the pipe's other end


@pytest.mark.parametrize("raw, fd", [
    (b"", None), (ad(9 << 24, ADDR, NBYTES, 7, 0)[:-1], None),
    (ad(9 << 24, ADDR, NBYTES, 7, 0), None), (ad(9 << 24, ADDR, NBYTES, 7, 2**64 - 1), SEALS),
    (ad(9 << 24, ADDR, NBYTES, 7, 1), SEALS), (ad(9 << 24, ADDR, 2**63, 7, 2**63), SEALS),
    (ad(9 << 24, ADDR, 0, 7, 0), SEALS), (ad(9 << 24, 2**64 - 1, NBYTES, 7, 0), SEALS),
    (ad(9 << 24, ADDR, NBYTES, 64, 0), SEALS), (ad(0, ADDR, NBYTES, 7, 0), SEALS),
    (ad(KEY, ADDR, NBYTES, 7, 0), SEALS),
])
def test_malformed_descriptions_are_refused(hostile, raw, fd):
    with pytest.raises((OSError, ValueError)):
        hostile.carrier.add(hostile.far, raw, None if fd is None else memfd(NBYTES, fd))


def test_offers_of_anything(hostile):
    def good():
        memory, fd = pages.sealed_memfd(ext.RING_NBYTES)
        return [fd, os.eventfd(0, os.EFD_NONBLOCK), os.pidfd_open(os.getpid())]

    def swapped(at, fd):
        fds = good()
        os.close(fds[at])
        fds[at] = fd
        return fds
    carrier = SharedCarrier(hostile.nic)
    carrier.offer()
    fixed, fd = pages.fixed_memfd(PAGE)
    os.close(fd)
    for offer, fds in [
            ({}, good()), ({"bytes_per_s": -1}, good()), ({"bytes_per_s": "x"}, good()),
            ({"bytes_per_s": 2**51}, good()), ({"bytes_per_s": True}, good()),
            ({"bytes_per_s": 0}, []), ({"bytes_per_s": 0}, good() + [memfd(PAGE, 7)]),
            ({"bytes_per_s": 1000}, good()), ({"bytes_per_s": 1000}, good() + [memfd(PAGE)]),
            ({"bytes_per_s": 1000}, good() + [memfd(PAGE - 1, 7)]),
            ({"bytes_per_s": 0}, swapped(0, memfd(ext.RING_NBYTES))),
            ({"bytes_per_s": 0}, swapped(0, memfd(ext.RING_NBYTES - PAGE, SEALS))),
            ({"bytes_per_s": 0}, swapped(1, os.pipe()[1])),
            ({"bytes_per_s": 0}, swapped(1, os.eventfd(0))),
            ({"bytes_per_s": 0}, swapped(2, os.open("/dev/null", os.O_RDONLY)))]:
        with pytest.raises((InvalidArgument, MappingFailed, OSError)):
            carrier.attach(0, offer, fds)
        for fd in fds:
            with pytest.raises(OSError):
                os.fstat(fd)


def test_a_port_that_somebody_spoils_delays_nobody_for_long(tmp_path):
    a, b = (Nic.open("soft", fabric=Fabric(), bytes_per_s=1 << 30) for _ in "ab")
    source, target = pattern(1 << 16), np.zeros(1 << 16, np.uint8)
    remote, local = b.register(source), a.register(target)
    b.listen(f"unix:{tmp_path}/b")
    peer = a.connect(f"unix:{tmp_path}/b")
    spoiled = np.frombuffer(mmap.mmap(b._port_fd.number, PAGE), np.uint64)
    for value in 2**64 - 1, 2**63, 0, 1 << 55:
        spoiled[8] = value
        peer.read(requests(READ, local, remote, 0, 0, 1 << 16)).wait(30)
        assert (target == source).all()
        target[:] = 0
    a.close()
    b.close()
