"""The verbs provider on the stand-in for libibverbs: what devices do when something goes wrong."""
import asyncio
import errno
import re
import threading
import time

import ibverbs_standin as s
import numpy as np
import pytest

from kvio.errors import (BackendUnavailable, Busy, Closed, KvioError, TransferError,
                         TransferTimeout)
from kvio.layout import WRITE
from kvio.transfer import COLLECTIVE, KV, Nic
from nics import requests

FAILURES = sorted(set(s.STATUS) - {"SUCCESS", "WR_FLUSH_ERR"})
CODES = {"REM_ACCESS_ERR": errno.EACCES, "RETRY_EXC_ERR": errno.ETIMEDOUT,
         "LOC_PROT_ERR": errno.EFAULT, "LOC_LEN_ERR": errno.EMSGSIZE}


def works(pair, at=0):
    """Both directions, both classes."""
    for traffic_class in KV, COLLECTIVE:
        pair.mine[at:at + 5000] = 0
        pair.peer.read(pair.read(at, at, 5000), traffic_class).wait()
        assert (pair.mine[at:at + 5000] == pair.theirs[at:at + 5000]).all()
        pair.back.write(requests(WRITE, pair.remote, pair.local, at, at + 9000, 5000),
                        traffic_class).wait()
        assert (pair.mine[at:at + 5000] == pair.theirs[at + 9000:at + 14000]).all() or \
            (pair.mine[at + 9000:at + 14000] == pair.theirs[at:at + 5000]).all()


# ---- statuses

@pytest.mark.parametrize("wr_api", [1, 0])
@pytest.mark.parametrize("status", FAILURES)
def test_every_status_is_named_and_recovered_from(standin, connect, status, wr_api):
    standin.set(wr_api=wr_api)
    pair = connect()
    at = 4096 * np.arange(9)
    before = pair.mine.copy()
    standin.fail(status, nth=4)
    transfer = pair.peer.read(pair.read(at, at, 4096))
    with pytest.raises(TransferError) as failure:
        transfer.wait()
    text = str(failure.value)
    for part in (status, "NIC a", "peer b", "class kv", "first element 3", "6 of 9",
                 "10.0.0.1 to ::ffff:10.0.0.2"):
        assert part in text, text
    assert re.search(rf"{status} \(.*\): \w+", text), text          # a hint
    code = CODES.get(status, failure.value.errno)
    assert failure.value.errno == code and code
    assert transfer.status.tolist() == [0] * 3 + [-code] + [-errno.ECONNABORTED] * 5
    assert (pair.mine[:3 * 4096] == pair.theirs[:3 * 4096]).all()
    assert (pair.mine[3 * 4096:] == before[3 * 4096:]).all()
    assert pair.peer.query()["kv"]["state"] == "error"
    pair.peer.read(pair.read(0, 0, 64), COLLECTIVE).wait()          # the other class goes on
    pair.peer.reset()
    works(pair)


def test_a_region_that_the_device_does_not_know_any_more(standin, connect):
    """The far table is late: the device's verdict counts, and both ends are in error."""
    pair = connect()
    standin.set(1, rkeys=0)                     # nobody is told
    before = pair.mine.copy()
    with pytest.raises(TransferError, match="REM_ACCESS_ERR.*registered"):
        pair.peer.read(pair.read(0, 0, 4096)).wait()
    assert (pair.mine == before).all()
    pair.b.poll()                               # it has heard from its device
    assert pair.back.query()["kv"]["state"] == "error"
    standin.set(1, rkeys=1)
    pair.peer.reset()
    works(pair)


def test_a_peer_that_does_not_answer(standin, connect):
    pair = connect()
    standin.drop_qp(pair.back.query()["kv"]["qpn"])
    with pytest.raises(TransferError, match="RETRY_EXC_ERR.*does not answer"):
        pair.peer.read(pair.read(0, 0, 4096)).wait()
    pair.peer.reset()
    works(pair)


def test_an_error_on_one_rail_fails_the_batch_and_nothing_else(standin, connect):
    rails = "standin0,standin1,standin2"
    pair = connect(near=rails, far=rails, queue_depth=512)
    at = 4096 * np.arange(200)
    standin.set(2, frozen=1)
    standin.fail("RETRY_EXC_ERR", nth=20, device=1)
    transfer = pair.peer.read(pair.read(at, at, 4096))
    with pytest.raises(TransferError):          # the first one may be a flush, on another rail
        transfer.wait()
    status = transfer.status
    assert (status == -errno.ETIMEDOUT).sum() == 1
    assert set(status) <= {0, -errno.ETIMEDOUT, -errno.ECONNABORTED}
    for i in np.flatnonzero(status == 0):
        assert (pair.mine[at[i]:at[i] + 4096] == pair.theirs[at[i]:at[i] + 4096]).all()
    for device in range(3):                     # all rails left their work, on both ends' word
        assert standin.count("work_requests", device) > 60
    standin.set(2, frozen=0)
    pair.peer.reset()
    works(pair)


def test_several_batches_behind_a_failure_flush(standin, connect):
    pair = connect(queue_depth=16)
    standin.set(frozen=1)
    transfers = [pair.peer.read(pair.read(0, 0, [64] * 10)) for _ in range(5)]
    standin.fail("REM_OP_ERR", nth=5)
    standin.set(frozen=0)
    for i, transfer in enumerate(transfers):
        with pytest.raises(TransferError, match="WR_FLUSH_ERR" if i else "REM_OP_ERR"):
            transfer.wait()
    pair.peer.reset()
    works(pair)


@pytest.mark.parametrize("wr_api", [1, 0])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_device_that_refuses_a_post(standin, connect, wr_api, nth):
    standin.set(wr_api=wr_api)
    pair = connect()
    if nth == 2:
        pair.peer.read(pair.read(0, 0, 64)).wait()
    standin.refuse("post_send", errno.ENOMEM)
    with pytest.raises(TransferError):
        pair.peer.read(pair.read(0, 0, [64] * 5)).wait()
    pair.peer.reset()
    works(pair)


# ---- memory that a device may still write

def test_cancelled_work_is_waited_for_before_the_memory_is_given_back(standin, connect):
    """The device is late. What it was given is still its own when cancel is called, and is done
    before cancel returns: nothing is written afterwards."""
    pair = connect(queue_depth=8)
    standin.set(delay_ns=100_000_000)
    said, at = [], 4096 * np.arange(40)
    pair.mine[:] = 1
    transfer = pair.peer.read(pair.read(at, at, 4096),
                              on_drain=lambda: said.append(standin.count("nbytes")))
    assert (pair.mine == 1).all() and not transfer.done
    with pytest.raises(Busy):
        pair.a.deregister(pair.local)
    transfer.cancel()
    assert said == [8 * 4096] and transfer.done
    assert transfer.status.tolist() == [0] * 8 + [-errno.ECANCELED] * 32
    assert (pair.mine[:8 * 4096] == pair.theirs[:8 * 4096]).all()
    pair.mine[:] = 2                            # somebody else's now
    standin.set(delay_ns=0)
    time.sleep(0.15)
    assert (pair.mine == 2).all()
    works(pair)


def test_cancel_waits_for_a_device_that_does_nothing(standin, connect):
    pair = connect(queue_depth=8)
    standin.set(frozen=1)
    transfer, seen = pair.peer.read(pair.read(0, 0, [512] * 20)), []
    canceller = threading.Thread(target=lambda: (transfer.cancel(), seen.append("back")))
    canceller.start()
    with pytest.raises(TransferTimeout):
        transfer.wait(0.2)
    assert seen == [] and canceller.is_alive()
    standin.set(frozen=0)
    canceller.join(10)
    assert seen == ["back"] and transfer.status.tolist() == [0] * 8 + [-errno.ECANCELED] * 12


def test_a_closed_nic_gives_up_what_its_peer_does_not_answer(standin, connect):
    """The peer is stopped. The queue pairs are moved to the error state, and flush."""
    pair = connect()
    standin.set(frozen=1)
    transfer = pair.peer.read(pair.read(0, 0, [512] * 20))
    with pytest.raises(Busy):
        pair.a.close()
    pair.a.close(cancel=True)
    assert transfer.done and transfer.status.all()
    assert standin.count("nbytes") == 0


def test_await_sleeps_until_a_late_completion(standin, connect):
    pair = connect()
    standin.set(delay_ns=50_000_000)

    async def main():
        await asyncio.gather(*(pair.peer.read(pair.read(64 * i, 64 * i, 64)) for i in range(20)))
    before = time.process_time()
    asyncio.run(main())
    assert (pair.mine[:1280] == pair.theirs[:1280]).all()
    assert standin.count("events") >= 1 and time.process_time() - before < 5


def test_threads_share_a_device_that_is_late(standin, connect):
    pair = connect(queue_depth=16)
    standin.set(delay_ns=1_000_000)

    def work(thread):
        for i in range(20):
            at = (thread * 20 + i) * 1024
            pair.peer.read(pair.read(at, at, [1024]), (KV, COLLECTIVE)[i % 2]).wait()
    threads = [threading.Thread(target=work, args=(t,)) for t in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (pair.mine[:120 * 1024] == pair.theirs[:120 * 1024]).all()


# ---- what devices say unasked

def test_a_port_that_goes_down_and_comes_back(standin, connect):
    pair = connect()
    standin.event(s.PORT_ERR_EVENT)
    with pytest.raises(TransferError, match="RETRY_EXC_ERR"):
        pair.peer.read(pair.read(0, 0, 64)).wait()
    standin.event(s.PORT_ACTIVE_EVENT)
    pair.a.poll()
    pair.peer.reset()
    works(pair)


def test_a_device_that_dies_takes_its_transfers_with_it(standin, connect):
    pair = connect()
    standin.set(0, frozen=1)
    transfer = pair.peer.read(pair.read(0, 0, [64] * 100))
    standin.event(s.DEVICE_FATAL)
    with pytest.raises(TransferError):
        transfer.wait(10)
    assert standin.count("nbytes") == 0


# ---- what cannot be had

@pytest.mark.parametrize("code, why", [
    (errno.ENOMEM, "ulimit -l"), (errno.EFAULT, "not mapped"), (errno.EINVAL, "length"),
    (errno.ENOSPC, "dmesg")])
@pytest.mark.parametrize("nth", [0, 4])
def test_memory_that_a_device_refuses(standin, connect, monkeypatch, code, why, nth):
    """On any rail and slice: what was registered before is given back."""
    monkeypatch.setenv("KVIO_IB_SLICE_BYTES", "65536")
    pair = connect(near="standin0,standin1")
    before, memory = standin.objects(), np.zeros(4 * 65536, np.uint8)
    standin.refuse("reg_mr", code, after=nth)
    with pytest.raises(KvioError, match=f"a: .*{why}"):
        pair.a.register(memory)
    assert standin.objects() == before
    pair.a.deregister(pair.a.register(memory))
    works(pair)


@pytest.mark.parametrize("call", ["create_qp", "create_cq", "modify_qp"])
def test_queue_pairs_that_cannot_be_made(standin, connect, call):
    pair = connect()
    before = standin.objects()
    standin.set(max_cqe=1 << 22)
    standin.refuse(call, errno.ENOMEM, times=50)
    with pytest.raises(KvioError):
        for _ in range(4):                      # until a new completion queue is needed
            pair.a.connect(pair.listener.address)
    standin.reset()
    for peer in list(pair.a._peers - {pair.peer}):
        peer.close()
    deadline = time.monotonic() + 10
    while standin.count("qps") != before["qps"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert standin.count("qps") == before["qps"]
    works(pair)


@pytest.mark.parametrize("call", ["open_device", "query_device", "alloc_pd",
                                  "create_comp_channel"])
def test_devices_that_cannot_be_opened(standin, call):
    before = standin.objects()
    standin.refuse(call, errno.EPERM)
    with pytest.raises(BackendUnavailable, match="standin0"):
        Nic.open("verbs:standin0")
    assert standin.objects() == before
    Nic.open("verbs:standin0").close()


def test_without_devices(standin):
    standin.refuse("get_device_list", errno.ENOSYS)
    with pytest.raises(BackendUnavailable, match="no RDMA device"):
        Nic.open("verbs")


def test_posting_after_the_peer_has_gone(standin, connect):
    pair = connect()
    pair.back.close()
    with pytest.raises((Closed, TransferError), match="connect again|RETRY_EXC_ERR|WR_FLUSH"):
        pair.peer.read(pair.read(0, 0, 64)).wait()
    again = pair.a.connect(pair.listener.address)
    again.read(pair.read(0, 0, 64)).wait()
