"""Rules that every provider keeps when something goes wrong or ends; see test_contract.py."""
import asyncio
import errno
import gc
import os
import select
import threading
import uuid

import numpy as np
import pytest

from kvio import completion
from kvio.errors import BackendUnavailable, Closed, InvalidArgument, TransferError
from kvio.layout import READ, SGE_DTYPE, WRITE, BlockLayout
from kvio.memory import BlockPool
from kvio.transfer import COLLECTIVE, KV, Access, Nic, TrafficClass
from nics import Pair, pattern, requests


# ---- errors that are completions

def spoil(pair, wrs, how):
    index = len(wrs) // 2
    end = np.uint64(pair.remote.addr + pair.remote.nbytes)
    match how:
        case "unknown rkey": wrs["rkey"][index] += np.uint64(1 << 24)
        case "zero rkey": wrs["rkey"][index] = 0
        case "remote end": wrs["remote_addr"][index] = end - wrs["length"][index] + np.uint64(1)
        case "remote start": wrs["remote_addr"][index] = pair.remote.addr - 1
        case "remote wraps": wrs["remote_addr"][index] = 2**64 - 1
        case "remote length": wrs["length"][index] = 2**32 - 1
        case "unknown lkey": wrs["lkey"][index] += np.uint64(1 << 24)
        case "local end": wrs["local_addr"][index] = pair.local.addr + pair.local.nbytes - 99
        case "local wraps": wrs["local_addr"][index] = 2**64 - 2
        case "opcode": wrs["opcode"][index] = 77
    return index


@pytest.mark.parametrize("opcode", [READ, WRITE])
@pytest.mark.parametrize("how, name, code", [
    ("unknown rkey", "REM_ACCESS_ERR", errno.EACCES),
    ("zero rkey", "REM_ACCESS_ERR", errno.EACCES),
    ("remote end", "REM_ACCESS_ERR", errno.EACCES),
    ("remote start", "REM_ACCESS_ERR", errno.EACCES),
    ("remote wraps", "REM_ACCESS_ERR", errno.EACCES),
    ("remote length", "LOC_PROT_ERR", errno.EFAULT),
    ("unknown lkey", "LOC_PROT_ERR", errno.EFAULT),
    ("local end", "LOC_PROT_ERR", errno.EFAULT),
    ("local wraps", "LOC_PROT_ERR", errno.EFAULT),
    ("opcode", "LOC_QP_OP_ERR", errno.EINVAL),
])
def test_a_bad_work_request_fails_alone_and_flushes_what_follows(pair, opcode, how, name, code):
    at = 1024 * np.arange(9)
    wrs = requests(opcode, pair.local, pair.remote, at, at, 1000)
    bad = spoil(pair, wrs, how)
    mine, theirs = pair.mine.copy(), pair.theirs.copy()
    transfer = pair.peer.post(wrs)
    with pytest.raises(TransferError) as failure:
        transfer.wait()
    assert failure.value.errno == code and name in str(failure.value)
    for word in "NIC a", "peer b", "class kv", f"first element {bad}":
        assert str(failure.value).count(word) == 1
    assert transfer.status.tolist() == [0] * bad + [-code] + [-errno.ECONNABORTED] * 4
    for start in at[:bad]:
        span = slice(start, start + 1000)
        if opcode == READ:
            mine[span] = theirs[span]
        else:
            theirs[span] = mine[span]
    assert (pair.mine == mine).all() and (pair.theirs == theirs).all()
    assert pair.a.stats()["errors"] == 5

    assert pair.peer.query()["kv"]["state"] == "error"
    assert pair.peer.query()["collective"]["state"] == "ready"
    with pytest.raises(TransferError, match="WR_FLUSH_ERR.*reset"):
        pair.peer.read(pair.read(0, 0, 16)).wait()
    pair.peer.read(pair.read(0, 0, 16), COLLECTIVE).wait()
    pair.peer.reset()
    assert pair.peer.query()["kv"]["state"] == "ready"
    pair.peer.read(pair.read(0, 0, 5000)).wait()
    assert (pair.mine[:5000] == pair.theirs[:5000]).all()


@pytest.mark.parametrize("opcode, access, side, name", [
    (READ, Access.LOCAL_WRITE, "remote", "REM_ACCESS_ERR"),
    (WRITE, Access.LOCAL_WRITE | Access.REMOTE_READ, "remote", "REM_ACCESS_ERR"),
    (READ, Access.REMOTE_READ, "local", "LOC_PROT_ERR"),
    (WRITE, Access(0), "local", None),
    (READ, Access.REMOTE_READ, "remote", None),
])
def test_permissions(pair, opcode, access, side, name):
    if side == "remote":
        region = pair.b.register(pair.theirs, access)
        wrs = requests(opcode, pair.local, region, 0, 0, 64)
    else:
        region = pair.a.register(pair.memory, access)
        wrs = requests(opcode, region, pair.remote, 0, 0, 64)
    before = pair.mine.copy(), pair.theirs.copy()
    if name is None:
        return pair.peer.post(wrs).wait()
    with pytest.raises(TransferError, match=name):
        pair.peer.post(wrs).wait()
    assert (pair.mine == before[0]).all() and (pair.theirs == before[1]).all()


def test_a_key_dies_with_its_registration_and_is_never_given_out_again(pair):
    wrs = pair.read(0, 0, 64)
    pair.b.deregister(pair.remote)
    keys = {pair.b.register(pair.theirs).key for _ in range(3)}
    assert pair.remote.key not in keys
    with pytest.raises(TransferError, match="REM_ACCESS_ERR"):
        pair.peer.read(wrs).wait()
    with pytest.raises(InvalidArgument, match="not registered"):
        pair.b.deregister(pair.remote)


def test_a_bad_scatter_gather_entry_fails_before_anything_is_copied(pair):
    sges = np.zeros(2, SGE_DTYPE)
    sges["addr"] = pair.local.addr + np.array([0, pair.local.nbytes - 10], np.uint64)
    sges["lkey"], sges["length"] = pair.local.key, 100
    wrs = pair.read(0, 0, 200)
    wrs["num_sge"] = 2
    before = pair.mine.copy()
    with pytest.raises(TransferError, match="LOC_PROT_ERR"):
        pair.peer.post(wrs, sges).wait()
    assert (pair.mine == before).all()


# ---- errors of the call

@pytest.mark.parametrize("change", [
    dict(num_sge=3), dict(sge_first=2, num_sge=1), dict(sge_first=2**32 - 1, num_sge=1),
    dict(num_sge=1, length=99), dict(num_sge=2**32 - 1),
])
def test_malformed_scatter_gather_lists_are_refused_whole(pair, change):
    sges = np.zeros(2, SGE_DTYPE)
    sges["addr"], sges["lkey"], sges["length"] = pair.local.addr, pair.local.key, 100
    wrs = pair.read([0, 0], 0, 100)
    for field, value in change.items():
        wrs[field][1] = value
    before = pair.a.stats()
    with pytest.raises(InvalidArgument, match="nothing was posted"):
        pair.peer.post(wrs, sges)
    assert pair.a.stats() == before and completion.in_flight() == 0


def test_wrong_descriptors_are_refused(pair):
    good = pair.read(0, 0, 64)
    for wrong in [good.view(np.uint8), good.reshape(1, 1), np.zeros(4, "u8"), "abc", None, 7,
                  pair.read([0, 1, 2, 3], 0, 1)[::2], [good]]:
        with pytest.raises(InvalidArgument):
            pair.peer.read(wrong)
    other = pair.write(0, 0, 64)
    with pytest.raises(InvalidArgument, match="peer.read takes READ descriptors, and these are "
                                              "WRITE; .* kvio.READ, or call peer.write"):
        pair.peer.read(other)
    with pytest.raises(InvalidArgument, match="peer.write takes WRITE descriptors, and these are "
                                              "READ; .* kvio.WRITE, or call peer.read"):
        pair.peer.write(good)
    with pytest.raises(InvalidArgument, match="and element 1 is WRITE; nothing"):
        pair.peer.read(np.concatenate([good, other, good]))
    other["opcode"] = 77
    with pytest.raises(InvalidArgument, match="these are of opcode 77; nothing .* kvio.WRITE$"):
        pair.peer.write(other)
    with pytest.raises(InvalidArgument, match="collective, kv"):
        pair.peer.read(good, TrafficClass("bulk", 1, 0))
    with pytest.raises(InvalidArgument):
        pair.peer.post(good, np.zeros(3))
    assert completion.in_flight() == 0


def test_wrong_memory_is_refused(pair):
    nic = pair.a
    fixed = np.zeros(64, np.uint8)
    fixed.flags.writeable = False
    assert nic.register(fixed).access == Access.REMOTE_READ
    assert nic.register(b"x" * 64).access == Access.REMOTE_READ
    for memory, access in [(fixed, Access.LOCAL_WRITE), (b"abc", Access.LOCAL_WRITE),
                           (np.zeros(64)[::2], None), (np.zeros(0), None), ([1, 2, 3], None),
                           (None, None), ("text", None), (bytearray(8), 64),
                           (bytearray(8), "rw"), (bytearray(8), Access.REMOTE_WRITE)]:
        with pytest.raises(InvalidArgument):
            nic.register(memory, access)


def test_things_that_can_be_registered(pair):
    class Array:
        base = np.arange(100.0)
        __array_interface__ = base.__array_interface__
    pool = BlockPool(BlockLayout(2, 4, 16), 8)
    for thing, nbytes in [(bytearray(10), 10), (memoryview(bytearray(6)), 6), (Array(), 800),
                          (np.zeros((3, 5), np.float32), 60), (pool, pool.region.nbytes),
                          (pool.region, pool.region.nbytes)]:
        region = pair.a.register(thing)
        assert region.nbytes == nbytes and region.addr and region.key
        pair.a.deregister(region)


def test_registered_memory_is_kept_and_cannot_be_resized(pair):
    owner = bytearray(4096)
    region = pair.a.register(owner)
    with pytest.raises(BufferError):
        owner.append(0)
    pair.a.deregister(region)
    del region
    owner.append(0)
    memory = pattern(4096)
    expected, region = memory.copy(), pair.b.register(memory)
    key, addr = region.key, region.addr
    del memory, region
    gc.collect()
    wrs = pair.read(0, 0, 4096)
    wrs["rkey"], wrs["remote_addr"] = key, addr
    pair.peer.read(wrs).wait()
    assert (pair.mine[:4096] == expected).all()


def test_wrong_use_of_nics_and_peers(pair):
    for device in "verbs:none_of_these", "cuda:77":
        with pytest.raises(BackendUnavailable, match="soft"):
            Nic.open(device)
    for device in "", "mlx5_0", None, 5:
        with pytest.raises(InvalidArgument):
            Nic.open(device)
    for wrong in [dict(mtu=63), dict(mtu=-1), dict(queue_depth=0), dict(max_sge=65),
                  dict(bytes_per_s=-5), dict(bytes_per_s=2**60), dict(mtu="x"),
                  dict(clock="sun")]:
        with pytest.raises(InvalidArgument):
            Nic.open("soft", **wrong)
    with pytest.raises(TransferError, match="nobody listens"):
        pair.a.connect("nowhere")
    with pytest.raises(InvalidArgument, match="already"):
        pair.b.listen(pair.listener.address)
    for classes in [], [KV, KV], KV, ["kv"], None:
        with pytest.raises(InvalidArgument):
            pair.a.connect(pair.listener.address, classes=classes)
    strict = pair.b.listen(uuid.uuid4().hex, classes=[KV])
    with pytest.raises(InvalidArgument, match="same list"):
        pair.a.connect(strict.address)
    pair.a.connect(strict.address, classes=[KV]).close()
    for sl, tclass in (16, 0), (-1, 0), (0, 256):
        with pytest.raises(InvalidArgument):
            TrafficClass("x", sl, tclass)


def test_after_close(pair):
    pair.peer.read(pair.read(0, 0, 64)).wait()
    pair.peer.close()
    pair.peer.close()
    with pytest.raises(Closed):
        pair.peer.read(pair.read(0, 0, 64))
    with pytest.raises(Closed):
        pair.back.query()
    pair.a.close()
    pair.a.close()
    for use in (lambda: pair.a.register(bytearray(8)), lambda: pair.a.listen("x"), pair.a.poll,
                lambda: pair.a.connect("x"), lambda: pair.a.deregister(pair.local)):
        with pytest.raises(Closed):
            use()


def test_a_peer_that_went_away(provider):
    pair = Pair(provider, address=uuid.uuid4().hex)
    pair.b.close()
    # Between processes the control connection may have told already.
    with pytest.raises((TransferError, Closed), match="RETRY_EXC_ERR|WR_FLUSH_ERR|connect again"):
        pair.peer.read(pair.read(0, 0, 64)).wait()
    with pytest.raises(Closed):
        pair.peer.reset()
    pair.peer.close()


def test_a_nic_that_nobody_closed_says_so():
    nic = Nic.open("soft", name="forgotten", clock="virtual")
    with pytest.warns(ResourceWarning, match="forgotten was not closed"):
        del nic
        gc.collect()


# ---- waiting

def test_status_stats_and_descriptors_of_a_transfer(pair):
    transfer = pair.peer.read(pair.read([0, 64], 0, 64))
    transfer.wait()
    assert transfer.done and transfer.status.dtype == np.int32 and not transfer.status.any()
    assert transfer.stats["nbytes"] == 128
    assert transfer.stats["completed_ns"] >= transfer.stats["submitted_ns"]
    assert select.select([transfer], [], [], 0)[0]          # its eventfd is readable
    assert transfer.wait() is None and transfer.cancel() is None
    assert completion.in_flight() == 0


def test_await_many_at_once(pair):
    async def one(i):
        await pair.peer.read(pair.read(i * 4096, i * 4096, 4096))

    async def main():
        await asyncio.gather(*(one(i) for i in range(64)))
    asyncio.run(main())
    assert (pair.mine[:64 * 4096] == pair.theirs[:64 * 4096]).all()


def test_threads_and_an_event_loop_drive_the_same_nic(pair):
    def work(thread):
        for i in range(40):
            at = (thread * 40 + i) * 2048
            pair.peer.read(pair.read(at, at, 2048), (KV, COLLECTIVE)[i % 2]).wait()

    async def main():
        for i in range(40):
            at = (160 + i) * 2048
            await pair.peer.read(pair.read(at, at, 2048))
    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    asyncio.run(main())
    for thread in threads:
        thread.join()
    assert (pair.mine[:200 * 2048] == pair.theirs[:200 * 2048]).all()
    assert pair.a.stats()["in_flight"] == 0 and pair.a.stats()["work_requests"] == 200


def test_a_thousand_connections_leak_nothing(pair):
    count = 100 if os.environ.get("KVIO_LAB") else 1000     # it computes a hundred times slower
    gc.collect()                            # NICs of other tests, and their descriptors
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(count):
        peer = pair.a.connect(pair.listener.address)
        peer.read(pair.read(0, 0, 64)).wait()
        peer.close()
    assert pair.listener.accept() is None
    assert len(os.listdir("/proc/self/fd")) == before
    assert pair.a._peers == {pair.peer} and pair.b._peers == {pair.back}
