"""Soft NICs of two processes: whatever test_contract.py cannot see within one."""
import asyncio
import errno
import os
import select
import signal
import threading
import time

import numpy as np
import pytest

from far_process import Here
from kvio import completion
from kvio.errors import Busy, Closed, InvalidArgument, TransferError, TransferTimeout
from kvio.layout import READ, SGE_DTYPE, WR_DTYPE, WRITE, BlockLayout
from kvio.memory import BlockPool
from kvio.transfer import COLLECTIVE, KV, Access, Fabric, Nic
from nics import pattern, requests

MB = 1 << 20


@pytest.fixture
def here(tmp_path):
    made = []

    def start(**options):
        made.append(Here(tmp_path, **options))
        return made[-1]
    yield start
    for each in made:
        each.close()


def gone(transfer):
    """It fails because the peer is not there any more."""
    with pytest.raises(TransferError) as failure:
        transfer.wait(30)
    assert failure.value.errno in (errno.ETIMEDOUT, errno.ECONNABORTED)
    return failure.value


# ---- bytes

def test_read_and_write(here):
    us = here()
    at = 4096 * np.arange(256)
    us.peer.read(us.read(at, at[::-1].copy(), 4096)).wait(30)
    assert (us.mine.reshape(-1, 4096) == us.theirs.reshape(-1, 4096)[::-1]).all()
    us.mine[:] = pattern(MB, 3)
    us.peer.write(us.write(at + 7, at, 4000)).wait(30)
    there = np.frombuffer(us.tell("bytes", 0, MB), np.uint8).reshape(-1, 4096)
    for i in range(256):
        assert (there[i, :4000] == us.mine[i * 4096 + 7:i * 4096 + 4007]).all()
    assert (there[:, 4000:] == us.theirs.reshape(-1, 4096)[:, 4000:]).all()
    us.tell("post", READ, us.far, 0, 100, 5000)
    us.tell("wait")
    assert us.tell("bytes", 0, 5000) == bytes(us.mine[100:5100])
    us.tell("post", WRITE, us.far, 0, 200000, 5000)
    us.tell("wait")
    assert (us.mine[200000:205000] == us.mine[100:5100]).all()


def test_scatter_gather(here):
    us = here()
    sges = np.zeros(15, SGE_DTYPE)
    sges["addr"] = us.local.addr + 10000 * np.arange(15, dtype=np.uint64)
    sges["lkey"], sges["length"] = us.local.key, np.arange(15) * 300
    wrs = np.zeros(300, WR_DTYPE)
    wrs["opcode"], wrs["rkey"], wrs["num_sge"] = WRITE, us.remote.key, 15
    wrs["length"] = sges["length"].sum()
    wrs["remote_addr"] = us.remote.addr + 3 * np.arange(300, dtype=np.uint64)
    us.peer.post(wrs, sges).wait(30)
    expected = np.concatenate([us.mine[10000 * i:10000 * i + 300 * i] for i in range(15)])
    there = us.tell("bytes", 0, MB)
    assert there[3 * 299:3 * 299 + len(expected)] == bytes(expected)
    wrs["opcode"] = READ
    us.peer.post(wrs[-1:], sges).wait(30)
    assert (np.concatenate([us.mine[10000 * i:10000 * i + 300 * i] for i in range(15)])
            == expected).all()


def test_reads_and_writes_go_in_order_also_where_the_ring_is_too_small(here):
    us = here()
    wrs = np.concatenate([each for i in range(3000) for each in (
        us.write(i * 128, i * 64, 64), us.read(400000 + i * 64, i * 64, 64))][:4000])
    more = us.write(np.arange(3000) * 8, 500000 + np.arange(3000) * 8, 8)
    transfers = [us.peer.post(wrs), us.peer.write(more), us.peer.read(us.read(0, 0, 64))]
    for transfer in transfers:
        transfer.wait(30)
    for i in range(1, 2000):
        assert (us.mine[400000 + i * 64:400064 + i * 64] == us.mine[i * 128:i * 128 + 64]).all()
    there = us.tell("bytes", 500000, 524000)
    assert there[64:] == bytes(us.mine[64:24000])


def test_await_what_another_process_completes(here):
    us = here()

    async def one(i):
        await us.peer.write(us.write(i * 4096, i * 4096, 4096), (KV, COLLECTIVE)[i % 2])
        await us.peer.read(us.read(i * 4096, MB - 4096 * (i + 1), 4096), (KV, COLLECTIVE)[i % 2])

    async def main():
        await asyncio.gather(*(one(i) for i in range(64)))
    asyncio.run(main())
    assert us.nic.stats()["in_flight"] == 0


def test_both_write_at_once(here):
    us = here()
    for i in range(20):
        us.tell("post", WRITE, us.far, np.arange(128) * 1000, MB // 2 + np.arange(128) * 1000, 1000)
        transfer = us.peer.write(us.write(np.arange(128) * 1000, MB // 2 + np.arange(128) * 1000,
                                          1000))
        us.tell("wait")
        transfer.wait(30)
    assert us.tell("bytes", MB // 2, MB // 2 + 128000) == bytes(us.mine[:128000])
    assert (us.mine[MB // 2:MB // 2 + 128000] == us.theirs[:128000]).all()


# ---- errors by name

def test_private_memory_is_refused_by_name(here):
    us = here()
    wrs = requests(READ, us.local, us.private, 0, 0, 64)
    sges = np.zeros(2, SGE_DTYPE)
    private = us.nic.register(np.zeros(4096, np.uint8))
    sges["addr"], sges["lkey"], sges["length"] = us.local.addr, [us.local.key, private.key], 32
    sges["addr"][1] = private.addr
    listed = requests(WRITE, us.local, us.remote, 0, 0, 64)
    listed["num_sge"] = 2
    for posted, whose, name in (
            ((wrs,), "the peer's", "REM_ACCESS_ERR"),
            ((requests(WRITE, private, us.remote, 0, 0, 64),), "the local", "LOC_PROT_ERR"),
            ((listed, sges), "the local", "LOC_PROT_ERR")):
        with pytest.raises(TransferError) as failure:
            us.peer.post(*posted).wait(30)
        said = f"{name}: {whose} memory is private to its process: others can read only that of " \
            "a BlockPool(shared=True); call peer.reset()"
        assert said in str(failure.value)           # that cause, and no other
        assert failure.value.errno == {"R": errno.EACCES, "L": errno.EFAULT}[name[0]]
        us.peer.reset()
    for wrong in dict(rkey=us.private.key + (1 << 24)), dict(remote_addr=us.private.addr - 1):
        spoiled = wrs.copy()
        spoiled[[*wrong][0]] = np.uint64([*wrong.values()][0])
        with pytest.raises(TransferError, match="does not lie in a region") as failure:
            us.peer.post(spoiled).wait(30)
        assert "private" not in str(failure.value)
        us.peer.reset()
    us.peer.post(requests(READ, private, us.remote, 0, 0, 64)).wait(30)     # into it: fine
    us.peer.post(requests(WRITE, us.local, us.private, 0, 0, 64)).wait(30)
    assert us.tell("bytes", 0, 64, True) == bytes(us.mine[:64])


def test_pools(here):
    us, layout = here(), BlockLayout(2, 64, 64)
    with BlockPool(layout, 8, shared=True) as shared, BlockPool(layout, 8, named=True) as named:
        part = us.nic.register(shared.full(3), Access(0))
        us.peer.post(requests(WRITE, part, us.remote, 0, 0, 8192)).wait(30)
        assert us.tell("bytes", 0, 8192) == bytes(shared.full(3))
        with pytest.raises(TransferError, match="LOC_PROT_ERR"):
            us.peer.post(requests(WRITE, us.nic.register(named), us.remote, 0, 0, 64)).wait(30)


def test_bad_requests_fail_in_order(here):
    us = here()
    wrs = us.write(np.arange(100) * 64, np.arange(100) * 64, 64)
    wrs["rkey"][50] += np.uint64(1 << 24)
    transfer = us.peer.write(wrs)
    with pytest.raises(TransferError, match="REM_ACCESS_ERR.*first element 50|first element 50"):
        transfer.wait(30)
    assert transfer.status.tolist() == [0] * 50 + [-errno.EACCES] + [-errno.ECONNABORTED] * 49
    assert us.tell("bytes", 0, 3200) == bytes(us.mine[:3200])
    assert us.tell("bytes", 3200, 6400) == bytes(us.theirs[3200:6400])


def test_a_virtual_clock_has_no_other_processes(tmp_path):
    with Nic.open("soft", clock="virtual") as nic:
        listener = nic.listen(f"unix:{tmp_path}/x")
        with Nic.open("soft", fabric=Fabric()) as other, pytest.raises(
                (InvalidArgument, TransferError)):
            other.connect(f"unix:{tmp_path}/x")
        listener.close()


# ---- death

def test_killed_while_idle(here):
    us = here()
    us.peer.read(us.read(0, 0, 64)).wait(30)
    us.kill()
    while us.peer._qps:                         # the control connection tells
        time.sleep(0.001)
    with pytest.raises(Closed, match="has gone"):
        us.peer.read(us.read(0, 0, 64)).wait(30)


@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_killed_in_the_middle(here, opcode):
    """A stopped process pulls nothing, a slow link takes its time: it dies with both in flight."""
    us = here(bytes_per_s=MB)
    before = us.mine.copy()
    us.kill(signal.SIGSTOP)
    wrs = us.read(0, 0, [MB // 4] * 4) if opcode == READ else us.write(0, 0, [4096] * 50)
    transfer = us.peer.post(wrs)
    with pytest.raises(TransferTimeout):
        transfer.wait(0.05)
    us.kill()
    gone(transfer)
    assert completion.in_flight() == 0
    us.nic.deregister(us.local)                 # nobody writes it any more
    if opcode == WRITE:
        assert (us.mine == before).all()


def test_killed_while_it_writes_to_us(here):
    for _ in range(3):
        us = here()
        us.tell("write_for_ever", us.far)
        time.sleep(0.01)
        us.kill()
        while us.peer._qps:
            time.sleep(0.001)
        us.nic.poll()
        us.mine[:] = 0xA5
        us.nic.deregister(us.local)
        for _ in range(10):
            us.nic.poll()
            time.sleep(0.001)
        assert (us.mine == 0xA5).all()


def test_a_stopped_peer(here, monkeypatch):
    us = here()
    us.kill(signal.SIGSTOP)
    us.peer.read(us.read(0, 0, 65536)).wait(30)         # we pull
    assert (us.mine[:65536] == us.theirs[:65536]).all()
    drained = []
    transfer = us.peer.write(us.write(0, 500000, [4096] * 3), on_drain=lambda: drained.append(1))
    for timeout in 0, 0.05, 0.1:
        with pytest.raises(TransferTimeout):
            transfer.wait(timeout)
    assert completion.in_flight() == 1 and not drained
    with monkeypatch.context() as patch, pytest.raises(Busy):
        # Told that the region goes, it could forget it before it has pulled this transfer.
        patch.setattr(us.nic._control, "retract", pytest.fail)
        us.nic.deregister(us.local)
    threading.Timer(0.05, us.kill, [signal.SIGCONT]).start()
    transfer.wait(30)
    assert drained == [1]
    assert us.tell("bytes", 500000, 504096) == bytes(us.mine[:4096])


def test_what_was_put_before_the_queue_pair_failed_ends(here):
    """The peer hears of both at once: it pulls nothing of it, and says so."""
    us = here()
    us.tell("wait")
    us.kill(signal.SIGSTOP)
    transfer = us.peer.write(us.write(4096 * np.arange(20), 0, 4096))
    us.peer._qps[KV.name].fail()
    assert not transfer.done                # who knows what is being pulled
    us.kill(signal.SIGCONT)
    gone(transfer)
    us.peer.reset()
    us.peer.write(us.write(0, 4096, 4096)).wait()
    assert us.tell("bytes", 4096, 8192) == bytes(us.mine[:4096])


def test_memory_that_is_taken_back_while_we_read_it_is_never_data(here):
    """The owner waits a second for us; we are slower than that."""
    us = here(bytes_per_s=MB // 4)
    transfer = us.peer.read(us.read(0, 0, [MB // 2, MB // 2]))
    with pytest.raises(TransferTimeout):
        transfer.wait(0.01)
    us.pipe.send(("reuse", (0xEE,)))
    with pytest.raises(TransferError, match="REM_ACCESS_ERR"):
        transfer.wait(30)
    assert us._answer() is None


def test_we_close_while_it_writes(here):
    us = here()
    us.tell("write_for_ever", us.far)
    us.nic.close(cancel=True)
    us.mine[:] = 0xA5
    time.sleep(0.02)
    assert (us.mine == 0xA5).all()
    us.kill()


# ---- threads, forks, ports

def threads():
    return len(os.listdir("/proc/self/task"))


def test_the_thread_ends_with_the_last_peer(tmp_path):
    a, b = (Nic.open("soft", fabric=Fabric()) for _ in "ab")
    listener = b.listen(f"unix:{tmp_path}/b")
    before = threads()
    peers = [a.connect(f"unix:{tmp_path}/b", classes=[KV]) for _ in range(3)]
    assert threads() == before + 3              # a's control thread, and an engine for each fabric
    for peer in peers:
        peer.close()
    until = time.monotonic() + 30
    while threads() != before + 1:
        assert time.monotonic() < until
        time.sleep(0.001)
    listener.close()
    a.close()
    b.close()


def test_a_forked_child_has_none_of_it(here):
    us = here()
    us.peer.write(us.write(0, 0, 4096)).wait(30)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for use in (lambda: us.peer.read(us.read(0, 0, 64)), us.nic.poll):
                try:
                    use()
                except Exception:
                    os.write(writer, b"x")
            os.write(writer, b"%d" % threads())
        finally:
            os._exit(0)
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(reader, 9) == b"xx1"
    os.close(reader)
    us.peer.write(us.write(0, 8192, 4096)).wait(30)
    assert us.tell("bytes", 8192, 12288) == bytes(us.mine[:4096])


def test_all_who_read_from_a_nic_share_its_link(tmp_path):
    rate = 1 << 30
    source = Nic.open("soft", name="source", fabric=Fabric(), bytes_per_s=rate)
    remote = source.register(pattern(8 * MB))
    source.listen(f"unix:{tmp_path}/s")
    readers, transfers = [], []
    for _ in range(3):
        nic = Nic.open("soft", fabric=Fabric())
        local = nic.register(np.zeros(8 * MB, np.uint8))
        peer = nic.connect(f"unix:{tmp_path}/s", classes=[KV])
        readers.append((nic, peer, requests(READ, local, remote, 0, 0, 8 * MB)))
    for nic, peer, wrs in readers:
        transfers.append(peer.read(wrs))
    waiting = [threading.Thread(target=t.wait, args=(60,)) for t in transfers]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    begin = min(t.stats["submitted_ns"] for t in transfers)
    end = max(t.stats["completed_ns"] for t in transfers)
    assert end - begin >= 3 * 8 * MB / rate * 1e9 * 0.999
    for nic, *_ in readers:
        nic.close()
    source.close()


def test_nothing_wakes_when_nothing_happens(here):
    """The thread sleeps: an event loop that watches the NIC does, too."""
    us = here()
    us.peer.write(us.write(0, 0, 64)).wait(30)
    fd = us.nic._ext.drive_fd()
    assert not select.select([fd], [], [], 0.05)[0]
