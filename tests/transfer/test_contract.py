"""Rules that every provider keeps. The soft NIC runs anywhere; others join by the fixture."""
import mmap
import os
import uuid

import numpy as np
import pytest

from kvio import completion, pages
from kvio.errors import BackendUnavailable
from kvio.layout import (READ, SGE_DTYPE, WR_DTYPE, WRITE, BlockLayout, LayerDescriptors,
                         Side)
from kvio.transfer import COLLECTIVE, KV, Nic, TrafficClass
from nics import Pair, pattern, requests
from require import skip_or_fail


@pytest.mark.parametrize("name, device", [("verbs", "verbs:rxe0"), ("cuda", "cuda:0")])
def test_a_provider_is_here(name, device):
    try:
        Nic.open(device).close()
    except BackendUnavailable as missing:
        skip_or_fail(name, str(missing))


def test_read_and_write_move_exactly_those_bytes(pair):
    at = 8192 * np.arange(16)
    mine, theirs = pair.mine.copy(), pair.theirs.copy()
    assert pair.peer.read(pair.read(at + 5, at + 3, 5001)).wait() is None
    for start in at:
        mine[start + 5:start + 5006] = theirs[start + 3:start + 5004]
    assert (pair.mine == mine).all() and (pair.theirs == theirs).all()
    assert pair.peer.write(pair.write(at + 1, at + 2, 4096)).wait() is None
    for start in at:
        theirs[start + 2:start + 4098] = mine[start + 1:start + 4097]
    assert (pair.mine == mine).all() and (pair.theirs == theirs).all()


def test_one_post_is_one_doorbell_and_one_signalled_completion(pair):
    pair.peer.read(pair.read(1024 * np.arange(511), 1024 * np.arange(511), 1024)).wait()
    stats = pair.a.stats()
    assert (stats["doorbells"], stats["work_requests"]) == (1, 511)
    assert stats["signalled_completions"] == 1


def test_descriptors_may_change_as_soon_as_they_are_posted(pair):
    wrs = pair.read(0, 0, 4096)
    transfer = pair.peer.read(wrs)
    wrs["length"], wrs["rkey"] = 1 << 30, 0
    transfer.wait()
    assert (pair.mine[:4096] == pair.theirs[:4096]).all()


def test_offsets_are_added_to_the_addresses(pair):
    class Layer:
        wrs, local_offset, remote_offset = pair.read([4096, 8192], [0, 4096], 4096), -4096, 65536
    pair.peer.read(Layer).wait()
    assert (pair.mine[:8192] == pair.theirs[65536:73728]).all()


@pytest.mark.parametrize("depth", [3, 2048])
@pytest.mark.parametrize("widths", [[64] * 4, [64, 32, 64, 128]], ids=["equal", "unequal"])
def test_one_set_of_descriptors_serves_every_layer(provider, depth, widths):
    """All layers are posted before any is waited for, also where the queue takes them in parts."""
    layout, ids = BlockLayout(4, 8, widths), np.array([5, 0, 9, 2, 7], np.int64)
    pair = Pair(provider, address=uuid.uuid4().hex, queue_depth=depth)
    offsets = layout.layer_offsets[:4]
    source = Side(pair.remote.addr, layout.full_block_nbytes, offsets, pair.remote.key)
    target = Side(pair.local.addr, 8 * max(widths), tuple(o * 100 for o in offsets),
                  pair.local.key)
    made = LayerDescriptors(READ, layout, target, None, source, ids, 5 * 8 - 3)
    for transfer in [pair.peer.read(made.layer(layer)) for layer in (2, 0, 3, 1)]:
        transfer.wait()
    for layer, width in enumerate(widths):
        for i, block in enumerate(ids):
            nbytes = (8 - 3 * (i == 4)) * width
            here = 100 * offsets[layer] + i * 8 * max(widths)
            there = int(block) * layout.full_block_nbytes + offsets[layer]
            assert (pair.mine[here:here + nbytes] == pair.theirs[there:there + nbytes]).all()


def test_a_transfer_that_is_being_posted_is_not_taken_for_drained(pair):
    """Pools look at all transfers when they are short of blocks, from any thread, at any time."""
    drained = []

    class Layer:
        wrs = pair.read(0, 0, 4096)

        @property
        def local_offset(self):
            completion.reap()
            seen.append((completion.in_flight(), list(drained)))
            return 0

    seen, before = [], completion.in_flight()
    pair.peer.read(Layer(), on_drain=lambda: drained.append(1)).wait()
    assert seen == [(before + 1, [])] and drained == [1]

    class Broken:
        wrs = property(lambda self: 1 // 0)

    with pytest.raises(ZeroDivisionError):
        pair.peer.read(Broken(), on_drain=lambda: drained.append(2))
    assert drained == [1, 2] and completion.in_flight() == before


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_scatter_gather_on_the_local_side(pair, opcode):
    sges = np.zeros(5, SGE_DTYPE)
    sges["addr"] = pair.local.addr + np.array([999, 9000, 20000, 50000, 70000], np.uint64)
    sges["lkey"], sges["length"] = pair.local.key, [1, 5000, 3000, 0, 4096]
    wrs = np.zeros(2, WR_DTYPE)
    wrs["opcode"], wrs["rkey"] = opcode, pair.remote.key
    wrs["remote_addr"] = pair.remote.addr + np.array([100, 60000], np.uint64)
    wrs["sge_first"], wrs["num_sge"], wrs["length"] = [0, 2], [2, 3], [5001, 7096]
    mine, theirs = pair.mine.copy(), pair.theirs.copy()
    for (far, parts) in (100, [(999, 1), (9000, 5000)]), (60000, [(20000, 3000), (70000, 4096)]):
        for near, n in parts:
            if opcode == READ:
                mine[near:near + n] = theirs[far:far + n]
            else:
                theirs[far:far + n] = mine[near:near + n]
            far += n
    pair.peer.post(wrs, sges).wait()
    assert (pair.mine == mine).all() and (pair.theirs == theirs).all()


def test_reads_and_writes_in_one_batch_go_in_order(pair):
    there, back = pair.write(0, 0, 5000), pair.read(10000, 0, 5000)
    pair.peer.post(np.concatenate([there, back])).wait()
    assert (pair.mine[10000:15000] == pair.mine[:5000]).all()


def test_loop_back(provider):
    nic, address = provider(), uuid.uuid4().hex
    host, hbm = pattern(65536), np.zeros(65536, np.uint8)
    near, far = nic.register(hbm), nic.register(host)
    nic.listen(address)
    peer = nic.connect(address, classes=[KV])
    peer.read(requests(READ, near, far, 4096 * np.arange(16), 4096 * np.arange(15, -1, -1),
                       4096)).wait()
    assert (hbm.reshape(16, -1) == host.reshape(16, -1)[::-1]).all()
    peer.close()


def test_both_ends_can_post(pair):
    wrs = requests(READ, pair.remote, pair.local, 0, 0, 9999)
    pair.back.read(wrs, COLLECTIVE).wait()
    assert (pair.theirs[:9999] == pair.mine[:9999]).all()


def test_classes_are_set_on_both_ends_and_read_back(pair):
    for peer in pair.peer, pair.back:
        for c in COLLECTIVE, KV:
            read_back = peer.query()[c.name]
            assert read_back["state"] == "ready"
            # What a device does not honour is said: Soft-RoCE knows no service levels, a copy
            # engine no classes.
            assert read_back["ignored"] == [
                what for what in ("sl", "tclass") if read_back[what] != getattr(c, what)]
            assert set(read_back["ignored"]) <= {"verbs": {"sl"}, "cuda": {"sl", "tclass"}}.get(
                pair.a.provider, set())
            if read_back["ignored"]:
                assert any(f"class {c.name}:" in words for words in peer.dishonoured)
    assert (COLLECTIVE.sl, COLLECTIVE.tclass, KV.sl, KV.tclass) == (0, 184, 2, 32)


def test_classes_of_ones_own(provider):
    """Any names, service levels and traffic class bytes; bytes are counted for each."""
    classes = [TrafficClass("experts", 1, 96), TrafficClass("weights", 5, 8),
               TrafficClass("logs", 15, 252)]
    pair = Pair(provider, address=uuid.uuid4().hex, classes=classes)
    for nbytes, c in zip((1000, 2000, 3000), classes):
        pair.peer.read(pair.read(0, 0, nbytes), c).wait()
        assert (pair.mine[:nbytes] == pair.theirs[:nbytes]).all()
        for peer in pair.peer, pair.back:
            assert peer.query()[c.name]["tclass"] == (c.tclass if pair.a.provider != "cuda" else 0)
    assert {name: counted["rx_bytes"] for name, counted in pair.a.stats()["by_class"].items()} == {
        "experts": 1000, "weights": 2000, "logs": 3000}


def mapped(fd, nbytes):
    os.ftruncate(fd, nbytes)
    with open(fd, "r+b") as file:
        return mmap.mmap(file.fileno(), nbytes)


def huge(nbytes):
    """A reserved huge page, where the system has one."""
    try:
        return mmap.mmap(-1, 2 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)
    except OSError:
        pytest.skip("no reserved huge page: sysctl vm.nr_hugepages=1")


HOST_MEMORY = {
    "heap": bytearray,
    "private pages": lambda nbytes: mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    "shared pages": lambda nbytes: mmap.mmap(-1, nbytes),
    "transparent huge pages": lambda nbytes: pages.anonymous(nbytes),
    "reserved huge pages": huge,
    "memfd": lambda nbytes: mapped(os.memfd_create("x"), nbytes),
    "file in /dev/shm": lambda nbytes: mapped(
        os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600), nbytes),
}


@pytest.mark.parametrize("kind", HOST_MEMORY)
def test_any_memory_of_the_host(pair, kind):
    """It is the local end of a READ and the far end of a WRITE."""
    if kind == "file in /dev/shm" and not os.path.ismount("/dev/shm"):
        pytest.skip("no tmpfs on /dev/shm")
    memory = HOST_MEMORY[kind](1 << 20)
    view = np.frombuffer(memory, np.uint8)
    view[:] = 0
    region = pair.a.register(memory)
    at = 4096 * np.arange(64)
    pair.peer.read(requests(READ, region, pair.remote, at, at[::-1], 4096)).wait()
    expected = pair.theirs[:64 * 4096].reshape(64, -1)
    assert (view[:64 * 4096].reshape(64, -1) == expected[::-1]).all()
    pair.back.write(requests(WRITE, pair.remote, region, at, at + 64 * 4096, 4096)).wait()
    assert (view[64 * 4096:2 * 64 * 4096].reshape(64, -1) == expected).all()
    assert not view[2 * 64 * 4096:].any()
    pair.a.deregister(region)


def test_empty_batches_and_empty_work_requests_complete(pair):
    assert pair.peer.read(np.zeros(0, WR_DTYPE)).wait() is None
    empty = pair.read(0, 0, [0, 16, 0])
    empty["rkey"][[0, 2]] = 0                       # touches nothing, needs no key
    assert pair.peer.read(empty).wait() is None


def test_a_batch_larger_than_the_queue_is_fed_with_further_doorbells(provider):
    pair = Pair(provider, address=uuid.uuid4().hex, queue_depth=8)
    at = 512 * np.arange(1000)
    transfers = [pair.peer.read(pair.read(at, at, 512)), pair.peer.read(pair.read(0, 0, 64))]
    for transfer in transfers:
        transfer.wait()
    assert (pair.mine[:512000] == pair.theirs[:512000]).all()
    assert pair.a.stats()["doorbells"] == 1000 // 4 + 1
    assert pair.a.stats()["work_requests"] == 1001
