"""Where bytes take no time whole messages go in one loop: nothing may differ from packet by packet.

The same steps run on two fabrics. On one of them a fault that lies far ahead forbids the loop.
"""
import errno
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvio._ext import nic as ext
from kvio.layout import READ, SGE_DTYPE, WR_DTYPE, WRITE
from kvio.transfer import COLLECTIVE, KV, Access, Arbitration, Fabric, Nic
from nics import Pair, requests

MTU, NBYTES, ORDERED = 256, 1 << 14, 15
NEVER = 2**60
TABLES = ((0, 9), (2, 8), (0, 4)), ((2, 6), (0, 9), (3, 1)), (0, 0, 2, 3) * 4


class World:
    """Two NICs whose bytes take no time; regions: whole, read-only, and one that is gone."""

    def __init__(self, may_burst, limit=1, depth=64):
        self.fabric = Fabric("virtual", arbitration=Arbitration(limit, *TABLES))
        self.pair = pair = Pair(
            lambda **o: Nic.open("soft", fabric=self.fabric, mtu=MTU, queue_depth=depth, **o),
            nbytes=NBYTES)
        self.nics, self.peers = (pair.a, pair.b), (pair.peer, pair.back)
        self.memory, self.regions, self.transfers = (pair.mine, pair.theirs), [], []
        for nic, first, memory in zip(self.nics, (pair.local, pair.remote), self.memory):
            gone = nic.register(memory)
            self.regions.append([first, nic.register(memory, Access.REMOTE_READ), gone])
            nic.deregister(gone)
            if not may_burst:
                nic._ext._fault(ext.DROP, NEVER)
        self.third = Nic.open("soft", fabric=self.fabric, mtu=MTU)
        self.pair.a.listen("a")
        self.thirds = self.third.connect("a"), self.third.connect("b")

    def post(self, end, lane, messages):
        wrs, sges = np.zeros(len(messages), WR_DTYPE), []
        for wr, (reads, own, far, length, mine, theirs, pieces) in zip(wrs, messages):
            local, remote = self.regions[end][mine], self.regions[1 - end][theirs]
            wr["opcode"], wr["length"] = READ if reads else WRITE, length
            wr["remote_addr"], wr["rkey"] = remote.addr + far, remote.key
            wr["local_addr"], wr["lkey"] = local.addr + own, local.key     # or of no account
            if pieces:
                cut = length // 2
                wr["sge_first"], wr["num_sge"] = len(sges), 2
                sges += [(local.addr + own + cut, local.key, length - cut, 0),
                         (local.addr + own, local.key, cut, 0)]
        self.transfers.append(self.peers[end].post(wrs, np.array(sges, SGE_DTYPE), lane))

    def advance(self, ns):
        self.fabric.advance(ns)

    def poll(self, end):
        self.nics[end].poll()

    def cancel(self, which):
        if self.transfers:
            self.transfers[which % len(self.transfers)]._handle.cancel()

    def cancel_all(self, end):
        self.nics[end]._ext.drain(True, 0)

    def delay(self, end, ns):
        self.nics[end]._ext._fault(ext.DELAY, 0, ns)

    def status(self, end, nth):
        self.nics[end]._ext._fault(ext.STATUS, nth, 12)

    def state(self):
        """All that can be seen, without driving."""
        return ([[list(t._handle.status), t._handle.stats()] for t in self.transfers],
                [nic._ext.counters() for nic in self.nics],
                [memory.tobytes() for memory in self.memory])

    def orders(self):
        """What all ports remember: the receiving ones, and the sending ones, whom that concerns
        when two others would receive."""
        return [self.order(self.nics[end], self.peers[end], *other, 1 - end) for end in range(2)
                for other in ((self.nics[end], self.peers[end]),
                              (self.third, self.thirds[1 - end]))]

    def order(self, one, peer, other, other_peer, source):
        """In which order 15 packets of each of two lanes leave: of the first lane each fills a row
        of a board with 1, of the second a column with 2."""
        board, ones = np.zeros((ORDERED + 1, MTU), np.uint8), np.repeat([1, 2], MTU)
        remote = self.nics[source].register(ones.astype(np.uint8))
        local, same = one.register(board), other.register(board)
        rows = requests(READ, local, remote, MTU * np.arange(ORDERED), 0, MTU)
        columns = requests(READ, same, remote, 0, MTU, np.full(ORDERED, MTU))
        columns["num_sge"] = ORDERED + 1
        columns["sge_first"] = (ORDERED + 1) * np.arange(ORDERED)
        sges = [(same.addr + MTU * row + column, same.key, 1, 0) if row < ORDERED else
                (same.addr + MTU * row, same.key, MTU - ORDERED, 0)
                for column in range(ORDERED) for row in range(ORDERED + 1)]
        sent = [peer.post(rows, None, COLLECTIVE),
                other_peer.post(columns, np.array(sges, SGE_DTYPE), KV)]
        for transfer in sent:
            transfer.wait()
        return board[:ORDERED, :ORDERED].tolist()

    def settle(self):
        """Everything ends, and what was in error is as new."""
        for nic in self.nics:
            nic._ext._fault(ext.STATUS, 0)
            nic._ext._fault(ext.DELAY, 0, 0)
        self.fabric.advance(10**9)
        for peer, nic in zip(self.peers, self.nics):
            nic.poll()
            peer.reset()

    def close(self):
        for nic in self.third, *self.nics:
            nic.close(cancel=True)


rarely = st.sampled_from([0] * 30 + [1, 2])
place = st.one_of(st.integers(0, NBYTES - 4096), st.integers(0, NBYTES - 4096),
                  st.integers(0, NBYTES - 4096), st.just(NBYTES - 300))
length = st.one_of(st.sampled_from([0, 1, MTU - 1, MTU, MTU, MTU + 1, 2 * MTU, 8 * MTU]),
                   st.integers(0, 4096))
message = st.tuples(st.booleans(), place, place, length, rarely, rarely, rarely.map(bool))
alike = st.builds(lambda one, lengths: [one[:3] + (n,) + one[4:] for n in lengths], message,
                  st.lists(length, min_size=1, max_size=8))
ends = st.integers(0, 1)
step = st.one_of(
    *[st.tuples(st.just("post"), ends, st.sampled_from([COLLECTIVE, KV, KV]),
                st.one_of(alike, st.lists(message, min_size=1, max_size=8)))] * 3,
    st.tuples(st.just("poll"), ends), st.tuples(st.just("advance"), st.integers(1, 3000)),
    st.tuples(st.just("cancel"), st.integers(0, 9)), st.tuples(st.just("cancel_all"), ends),
    st.tuples(st.just("delay"), ends, st.sampled_from([0, 1000])),
    st.tuples(st.just("status"), ends, st.integers(0, 9)))


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(step, max_size=12), limit=st.integers(0, 1), depth=st.sampled_from([3, 64]))
def test_any_steps_end_as_packet_by_packet(steps, limit, depth):
    worlds = [World(may_burst, limit, depth) for may_burst in (True, False)]
    for name, *arguments in steps:
        for world in worlds:
            getattr(world, name)(*arguments)
        same(worlds)
    for world in worlds:
        world.settle()
    same(worlds)
    assert worlds[0].orders() == worlds[1].orders()
    for world in worlds:
        world.close()


def same(worlds):
    for one, other in zip(*[world.state() for world in worlds]):
        assert one == other


@pytest.fixture
def worlds():
    made = [World(True), World(False)]
    yield made
    for world in made:
        world.settle()
    same(made)
    assert made[0].orders() == made[1].orders()
    for world in made:
        world.close()


def whole(at, length=MTU, mine=0, theirs=0, reads=True, pieces=False):
    return (reads, at, at, length, mine, theirs, pieces)


@pytest.mark.parametrize("odd, says", [
    (whole(4096, mine=2), errno.EFAULT), (whole(4096, theirs=2), errno.EACCES),
    (whole(4096, mine=1), errno.EFAULT), (whole(4096, theirs=1), 0),
    (whole(4096, theirs=1, reads=False), errno.EACCES), (whole(4096, mine=1, reads=False), 0),
    (whole(NBYTES - 10), errno.EFAULT), (whole(4096, 0), 0), (whole(4096, pieces=True), 0),
    (whole(4096, 0, mine=2, theirs=2), 0), (whole(4096, reads=False), 0), (whole(4096, 7), 0),
    ((True, 0, NBYTES - 10, MTU, 0, 0, False), errno.EACCES),
    ((True, NBYTES - 10, 0, MTU, 0, 0, False), errno.EFAULT),
])
def test_one_that_is_not_like_the_others(worlds, odd, says):
    """In the middle of a batch, where the loop is under way."""
    for world in worlds:
        before = world.memory[0][3 * MTU:4 * MTU].copy()
        world.post(0, KV, [whole(0), whole(MTU), odd, whole(3 * MTU), whole(4 * MTU)])
        world.poll(0)
        status = list(world.transfers[0].status)
        assert (status[:2], -status[2]) == ([0, 0], says)
        assert status[3:] == [-errno.ECONNABORTED if says else 0] * 2
        now = world.memory[0][3 * MTU:4 * MTU]
        assert (now == (before if says else world.memory[1][3 * MTU:4 * MTU])).all()
        if says:
            world.peers[0].reset()
            world.peers[1].reset()
    same(worlds)


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_status_that_is_to_come(worlds, nth):
    for world in worlds:
        world.status(0, nth)
        world.post(0, KV, [whole(i * MTU) for i in range(5)])
        world.poll(0)
        assert list(world.transfers[0].status) == \
            [0] * (nth - 1) + [-errno.ETIMEDOUT] + [-errno.ECONNABORTED] * (5 - nth)


def test_a_delay_holds_back_what_was_copied(worlds):
    for world in worlds:
        world.delay(0, 1000)
        for at in 0, 4096:
            world.post(0, KV, [whole(at), whole(at + 300, 100)])
        world.poll(0)
        assert (world.memory[0][:MTU] == world.memory[1][:MTU]).all()
        assert (world.memory[0][4096:4096 + MTU] == world.memory[1][4096:4096 + MTU]).all()
        world.advance(999)
        world.poll(0)
        assert not any(t._handle.poll() for t in world.transfers)
        world.advance(1)
        world.poll(0)
        assert [t._handle.stats()["completed_ns"] for t in world.transfers] == [1000, 1000]


def test_later_posts_begin_when_they_were_posted(worlds):
    """Nobody drives in between: two doorbells, the second one a microsecond after the first."""
    for world in worlds:
        for at in 0, 4096:
            world.post(0, KV, [whole(at), whole(at + 512)])
            world.advance(1000)
        world.poll(0)
        assert [t._handle.stats()["completed_ns"] for t in world.transfers] == [0, 1000]


def test_a_message_under_way_goes_on_where_it_is(worlds):
    """Two lanes take turns packet by packet until one of them is done: the other one's message
    has begun then, and is not copied again from its start."""
    for world in worlds:
        world.post(0, KV, [whole(0, 8 * MTU), whole(8 * MTU), whole(9 * MTU)])
        world.post(0, COLLECTIVE, [whole(4096, 8 * MTU)])
        world.poll(0)
        assert world.nics[0]._ext.counters()["rx_packets"] == 8 + 2 + 8
        assert sum(world.nics[0]._ext.counters()["rx_bytes"]) == 18 * MTU
    same(worlds)


@pytest.mark.parametrize("reads", [True, False])
def test_a_far_end_that_fails_answers_no_more(worlds, reads):
    """The first message has been checked before: it still goes."""
    for world in worlds:
        near, far = world.memory if reads else world.memory[::-1]
        before = near[MTU:3 * MTU].copy()
        world.post(0, KV, [whole(i * MTU, reads=reads) for i in range(3)])
        world.peers[1]._qps[KV.name].fail()
        world.poll(0)
        assert list(world.transfers[0].status) == [0, -errno.ETIMEDOUT, -errno.ECONNABORTED]
        assert (near[:MTU] == far[:MTU]).all() and (near[MTU:3 * MTU] == before).all()
        world.peers[0].reset()


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("reads", [True, False])
def test_one_end_of_two_that_takes_time_is_enough(slow, reads):
    fabric, rates = Fabric("virtual"), {"a": 0, "b": 0}
    rates["ab"[slow]] = 10**9
    pair = Pair(lambda name, **o: Nic.open("soft", name=name, fabric=fabric, mtu=MTU,
                                           **o | {"bytes_per_s": rates[name]}))
    wrs = (pair.read if reads else pair.write)(MTU * np.arange(4), MTU * np.arange(4), MTU)
    transfer = pair.peer.post(wrs)
    fabric.advance(4 * MTU - 1)
    pair.a.poll()
    assert not transfer.done
    fabric.advance(1)
    pair.a.poll()
    assert transfer.done and transfer.stats["completed_ns"] == 4 * MTU
    pair.a.close()
    pair.b.close()


def test_given_up_in_the_middle():
    """Another thread gives up a long batch while it is copied (mostly: it tries ten times): some of
    it went, the rest did not, and all that counts agrees with that."""
    message, count, sent, copied = 1 << 14, 1024, 0, 0
    fabric = Fabric()
    pair = Pair(lambda **o: Nic.open("soft", fabric=fabric, **o), message * count)
    wrs = pair.read(message * np.arange(count), message * np.arange(count), message)
    for _ in range(10):
        if 0 < copied < count:
            break
        pair.mine[:] = 0
        transfer = pair.peer.read(wrs)
        thread = threading.Thread(target=transfer._handle.wait)
        thread.start()
        while pair.a._ext.counters()["rx_bytes"] == sent:
            pass
        assert pair.a._ext.drain(True) == 0
        thread.join()
        status = np.array(transfer._handle.status)
        copied = int((status == 0).sum())
        assert (status[copied:] == -errno.ECANCELED).all()
        assert np.array_equal(pair.mine[:copied * message], pair.theirs[:copied * message])
        assert not pair.mine[copied * message:].any()
        sent += copied * message
        assert pair.a.stats()["rx_bytes"] == pair.b.stats()["tx_bytes"] == sent
    pair.a.close()
    pair.b.close()
