"""The core of the provider cuda on the fake libcuda: what goes into a queue pair's stream and in
which order, calls that fail in the middle, completion and who is woken by it."""
import asyncio
import contextlib
import errno
import gc
import os
import threading
import time

import numpy as np
import pytest

from kvio.errors import Busy, KvioError, TransferError
from kvio.layout import READ, SGE_DTYPE, WRITE
from kvio.transfer import COLLECTIVE, KV, Nic
from nics import pattern, requests

H2D, D2H = "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"
EIO, FLUSH = -errno.EIO, -errno.ECONNABORTED
NBYTES = 65536


class Bench:
    """Memory of the GPU (`hbm` are its bytes) and of the host, and a NIC connected to itself."""

    def __init__(self, gpu, fake, copy="loop", classes=(KV,), **options):
        self.fake = fake
        tensor, self.hbm = gpu.tensor(NBYTES, 1)
        self.host = pattern(NBYTES, 2)
        self.nic, self.peer, self.near, self.far = gpu.loop_back(
            tensor, self.host, copy=copy, classes=classes, **options)

    def read(self, at=0, length=NBYTES):
        """The host's bytes to the same places on the GPU."""
        return requests(READ, self.near, self.far, at, at, length)

    def write(self, at=0, length=NBYTES):
        return requests(WRITE, self.near, self.far, at, at, length)

    def moved(self, first):
        """Calls that copy or record, in their order, from that one of the log on."""
        return [call for call, *_ in self.fake.log()[first:]
                if "Memcpy" in call or call == "cuEventRecord"]


@pytest.fixture
def bench(gpu, fake_cuda):
    made = []

    def bench(**options):
        made.append(Bench(gpu, fake_cuda, **options))
        return made[-1]
    yield bench
    for each in made:
        vars(each).clear()


# ---- segments

def test_a_batch_is_cut_where_its_direction_changes_and_nowhere_else(bench, fake_cuda):
    b = bench(copy="batch")
    at = 1024 * np.arange(0, 64, 2)
    before, data = len(fake_cuda.log()), b.host.copy()
    wrs = np.concatenate([b.read(at, 1000), b.write(at + 1024, 100), b.read(at[:3], 10)])
    b.peer.post(wrs).wait()
    assert b.moved(before) == ["cuMemcpyBatchAsync_v2"] * 3 + ["cuEventRecord"]
    assert b.nic.stats()["copies"]["batch"] == {"segments": 3, "copies": 3}
    for start in at:
        assert (b.hbm[start:start + 1000] == data[start:start + 1000]).all()
        assert (b.host[start + 1024:start + 1124] == b.hbm[start + 1024:start + 1124]).all()


def test_the_pieces_of_one_work_request_may_be_of_both_memories(gpu, bench, fake_cuda):
    """A gather list with entries on the GPU and on the host goes to its places in its order."""
    b = bench()
    host = pattern(8192, 5)
    near = b.nic.register(host)
    sges = np.zeros(4, SGE_DTYPE)
    sges["addr"] = [b.near.addr, near.addr, near.addr + 4096, b.near.addr + 100]
    sges["lkey"] = [b.near.key, near.key, near.key, b.near.key]
    sges["length"] = [100, 50, 0, 200]
    wrs = b.write(0, 350)
    wrs["num_sge"] = 4
    expected = np.concatenate([b.hbm[:100], host[:50], b.hbm[100:300]])
    b.peer.post(wrs, sges).wait()
    assert (b.host[:350] == expected).all()


def test_a_class_is_a_stream(bench, fake_cuda):
    b = bench(classes=(COLLECTIVE, KV))
    created = [flags for name, _, flags, _ in fake_cuda.log()
               if name == "cuStreamCreateWithPriority"]
    before = len(fake_cuda.log())
    assert set(created) == {1}                  # non-blocking: none waits for default streams
    for c in COLLECTIVE, KV, COLLECTIVE:
        b.peer.read(b.read(0, 64), c).wait()
    streams = [stream for name, stream, *_ in fake_cuda.log()[before:] if name == H2D]
    assert len(streams) == 3 and streams[0] == streams[2] != streams[1]
    assert "cuStreamSynchronize" not in {name for name, *_ in fake_cuda.log()[before:]}


def test_a_large_batch_is_several_segments_and_more_than_the_queue_takes(bench, fake_cuda):
    b = bench(copy="batch", queue_depth=20000)
    at = np.arange(40000) % 13 * 4096 + np.arange(40000) // 13
    before = len(fake_cuda.log())
    b.peer.read(b.read(at, 1)).wait()
    assert (b.hbm[at] == b.host[at]).all()
    calls = [name for name, *_ in fake_cuda.log()[before:] if "Batch" in name]
    assert len(calls) >= 3 and b.nic.stats()["work_requests"] == 40000


# ---- calls that fail

@pytest.mark.parametrize("nth", [0, 1, 3, 7])
def test_a_copy_that_fails_takes_its_segment_with_it_and_no_other(bench, fake_cuda, nth):
    b = bench()
    at = 1024 * np.arange(0, 16, 2)
    wrs = np.concatenate([b.write(at + 1024, 100), b.read(at, 100), b.write(at + 1024, 7)])
    fake_cuda.fail(H2D, "OUT_OF_MEMORY", after=nth)
    hbm = b.hbm.copy()
    with fake_cuda.held():
        transfer = b.peer.post(wrs)
        assert not transfer.done        # what the stream has may still be written: nothing is said
        with pytest.raises(Busy):
            b.nic.deregister(b.near)
    with pytest.raises(TransferError, match="GENERAL_ERR.*cuMemcpyHtoDAsync.*OUT_OF_MEMORY"):
        transfer.wait()
    assert transfer.status.tolist() == [0] * 8 + [EIO] + [FLUSH] * 15
    assert b.nic.stats()["errors"] == 16
    for start in at + 1024:
        assert (b.host[start:start + 100] == hbm[start:start + 100]).all()
    b.peer.reset()
    b.peer.read(b.read()).wait()
    assert (b.hbm == b.host).all()


def test_an_event_that_cannot_be_recorded_at_first(bench, fake_cuda):
    """Nothing is said of the batch until the stream is known to have passed it."""
    b = bench()
    fake_cuda.fail("cuEventRecord", "OUT_OF_MEMORY", times=3)
    transfer = b.peer.read(b.read())
    assert not transfer.done
    transfer.wait()
    assert (b.hbm == b.host).all()
    b.peer.read(b.read()).wait()


def test_no_event_is_to_be_had_and_nothing_is_posted(bench, fake_cuda):
    b = bench(copy="loop")
    fake_cuda.fail("cuEventCreate", "OUT_OF_MEMORY", times=10**6)
    with fake_cuda.held():
        transfers, copies = [], fake_cuda.calls(H2D)
        with pytest.raises(TransferError, match="cuEventCreate"):
            for _ in range(2000):
                transfers.append(b.peer.read(b.read(0, 64)))
        assert fake_cuda.calls(H2D) - copies == len(transfers) >= 256
    for transfer in transfers:
        transfer.wait()
    b.peer.read(b.read(0, 64)).wait()
    fake_cuda.reset()


@pytest.mark.parametrize("call", [H2D, "cuEventRecord", "cuEventQuery", ""],
                         ids=["post", "record", "query", "work"])
def test_a_sticky_error_ends_every_batch_and_everything_else(bench, fake_cuda, call):
    b = bench()
    b.peer.read(b.read(0, 64)).wait()
    fake_cuda.hold()
    running = [b.peer.read(b.read(0, 64)) for _ in range(3)]
    assert not any(transfer.done for transfer in running)
    fake_cuda.fail(call, "ILLEGAL_ADDRESS", sticky=True)
    last = b.peer.read(b.read(0, 64))
    fake_cuda.hold(held=False)
    for transfer in *running, last:
        with pytest.raises(TransferError, match="FATAL_ERR.*ILLEGAL_ADDRESS"):
            transfer.wait()
        assert transfer.status.tolist() == [EIO]
    with pytest.raises(TransferError, match="ILLEGAL_ADDRESS"):
        b.peer.read(b.read())
    with pytest.raises(KvioError, match="ILLEGAL_ADDRESS"):
        b.nic.register(bytearray(4096))
    b.nic.close()


@pytest.mark.parametrize("code", [226, 721, 810])
def test_codes_that_end_a_context_in_newer_drivers_leave_no_batch_in_flight(bench, fake_cuda, code):
    """CONTAINED, TENSOR_MEMORY_LEAK, MPS_CLIENT_TERMINATED: no event can be recorded any more."""
    b = bench()
    b.peer.read(b.read(0, 64)).wait()
    fake_cuda.fail(H2D, code, sticky=True)
    transfer = b.peer.read(b.read(0, 64))
    with pytest.raises(TransferError, match="FATAL_ERR"):
        transfer.wait(10)
    b.nic.close()


@pytest.mark.parametrize("call", ["cuEventRecord", "cuEventQuery"])
def test_an_answer_that_proves_nothing_ends_no_batch(bench, fake_cuda, call):
    """Out of memory, say: the copy is still under way, and its memory nobody else's."""
    b = bench()
    with fake_cuda.held():
        fake_cuda.fail(call, "OUT_OF_MEMORY", times=20)
        transfer = b.peer.read(b.read(0, 64))
        for _ in range(5):
            assert not transfer.done
    transfer.wait(30)


def test_closing_waits_for_what_the_stream_has(bench, fake_cuda):
    b = bench()
    fake_cuda.hold()
    transfer = b.peer.read(b.read())
    with pytest.raises(Busy):
        b.nic.close()
    closer = threading.Thread(target=b.nic.close, kwargs={"cancel": True})
    closer.start()
    closer.join(0.1)
    assert closer.is_alive() and not transfer.done and fake_cuda.objects()["registered"] > 0
    fake_cuda.hold(held=False)
    closer.join(30)
    assert not closer.is_alive() and transfer.done and (b.hbm == b.host).all()


# ---- who is woken

def test_threads_that_wait_are_woken_whoever_drives(bench, fake_cuda):
    b = bench()
    fake_cuda.hold()
    transfers = [b.peer.read(b.read(4096 * i, 4096)) for i in range(8)]
    threads = [threading.Thread(target=transfer.wait) for transfer in transfers]
    for thread in threads:
        thread.start()
    for _ in range(50):
        b.nic.poll()
        threads[0].join(0.002)
    assert all(thread.is_alive() for thread in threads)
    assert fake_cuda.calls("cuLaunchHostFunc") == 1     # they share one, of the first batch
    fake_cuda.hold(held=False)
    for thread in threads:
        while thread.is_alive():
            b.nic.poll()
            thread.join(0.001)
    assert (b.hbm[:32768] == b.host[:32768]).all()


def test_closing_waits_for_no_host_function(gpu, fake_cuda):
    """The driver may have put it behind an application's, which may wait for the closing thread. It
    runs after the device was closed, and closes its descriptor then."""
    before, host = eventfds(), pattern(NBYTES, 2)
    tensor, _ = gpu.tensor(NBYTES)
    nic = Nic.open("cuda:0", copy="loop")
    near, far = nic.register(tensor), nic.register(host)
    nic.listen("me")
    peer = nic.connect("me", [KV])
    wrs = requests(READ, near, far, 0, 0, NBYTES)
    peer.read(wrs).wait()
    ours = next(stream for name, stream, *_ in fake_cuda.log() if name == H2D)
    fake_cuda.hold(ours)
    calls = fake_cuda.calls("cuLaunchHostFunc")
    waiting = threading.Thread(target=peer.read(wrs).wait)
    waiting.start()
    while fake_cuda.calls("cuLaunchHostFunc") == calls:
        waiting.join(0.001)
    notify = [stream for name, stream, *_ in fake_cuda.log() if name == "cuLaunchHostFunc"][-1]
    fake_cuda.hold(notify)
    fake_cuda.hold(ours, False)
    waiting.join()                      # it looks by itself: nobody calls it
    nic.close()
    del waiting, nic, peer, near, far
    assert fake_cuda.queued(notify) and eventfds() == before + 1
    fake_cuda.hold(notify, False)
    for _ in range(1000):
        if eventfds() == before:
            return
        time.sleep(0.01)
    pytest.fail("nobody closed what the host function wrote to")


def eventfds():
    gc.collect()
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += "eventfd" in os.readlink(f"/proc/self/fd/{fd}")
    return count


def test_who_moves_blocks_does_not_wait_for_memory_that_is_freed(bench, fake_cuda):
    """The driver may wait for the GPU then, and the GPU for an application's host function."""
    b = bench()
    memory = [b.nic.device_memory(4096)]
    before = fake_cuda.calls("cuCtxPushCurrent_v2")
    fake_cuda.cost("cuMemFree_v2", call_ns=2_000_000_000)
    freeing = threading.Thread(target=memory.clear)
    freeing.start()
    while fake_cuda.calls("cuCtxPushCurrent_v2") == before:
        freeing.join(0.001)
    b.peer.read(b.read()).wait()
    assert fake_cuda.calls("cuMemFree_v2") == 0
    freeing.join()
    assert fake_cuda.calls("cuMemFree_v2") == 1 and (b.hbm == b.host).all()


def test_a_sleeper_is_woken_by_the_driver(bench, fake_cuda):
    b = bench()
    fake_cuda.cost(H2D, run_ns=200_000_000)
    before = fake_cuda.calls("cuEventQuery", "cuStreamSynchronize")
    b.peer.read(b.read()).wait()
    assert fake_cuda.calls("cuLaunchHostFunc") == 1
    # It looks a few times by itself, in case that the device has died, and does not spin.
    assert 2 <= fake_cuda.calls("cuEventQuery", "cuStreamSynchronize") - before < 40


@pytest.mark.parametrize("call", ["cuLaunchHostFunc", "cuStreamWaitEvent",
                                  "cuStreamCreateWithPriority"])
def test_a_driver_that_wakes_nobody_keeps_nobody_asleep(bench, fake_cuda, call):
    b = bench()
    fake_cuda.fail(call, "NOT_SUPPORTED", times=10**6)
    fake_cuda.cost(H2D, run_ns=30_000_000)
    b.peer.read(b.read()).wait()

    async def awaited():
        await b.peer.read(b.read())
    asyncio.run(asyncio.wait_for(awaited(), 60))
    assert (b.hbm == b.host).all()


def test_an_event_loop_hears_of_batches_and_of_a_device_that_dies(bench, fake_cuda):
    b = bench()

    async def go():
        await asyncio.gather(*[b.peer.read(b.read(4096 * i, 4096)) for i in range(16)])
        assert (b.hbm == b.host).all()
        bad = b.read([0, 4096], 64)
        bad["lkey"][1] = 5
        with pytest.raises(TransferError, match="LOC_PROT_ERR"):
            await b.peer.post(bad)
        b.peer.reset()
        fake_cuda.hold()
        waiting = asyncio.ensure_future(_await(b.peer.read(b.read())))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        fake_cuda.fail("", "ECC_UNCORRECTABLE")
        fake_cuda.hold(held=False)
        with pytest.raises(TransferError, match="FATAL_ERR.*ECC_UNCORRECTABLE"):
            await asyncio.wait_for(waiting, 60)
    asyncio.run(go())


async def _await(transfer):
    await transfer


def test_busy_polling_asks_and_never_sleeps(bench, fake_cuda):
    b = bench(busy_poll=True)
    fake_cuda.cost(H2D, run_ns=1_000_000)
    b.peer.read(b.read()).wait()
    assert fake_cuda.calls("cuLaunchHostFunc") == 0 and (b.hbm == b.host).all()


# ---- graphs

def test_a_stream_that_is_being_captured_is_refused(bench, gpu, fake_cuda):
    """Ours would become part of the graph, and its copies wait until somebody launches that."""
    b = bench()
    stream, before = gpu.stream(), len(fake_cuda.log())
    fake_cuda.set(capturing=1)
    with pytest.raises(KvioError, match="captured into a graph"):
        b.peer.read(b.read(), after=stream)
    fake_cuda.set(capturing=0)
    assert b.moved(before) == []
    b.peer.read(b.read(), after=stream).wait()
    assert (b.hbm == b.host).all()


@pytest.mark.parametrize("stream", [0, 1])
def test_a_default_stream_is_left_alone_while_another_is_captured(bench, fake_cuda, stream):
    """STREAM_CAPTURE_IMPLICIT: whatever is done with it then spoils the capture."""
    b = bench()
    for call in "read", "block":
        transfer, before = b.peer.read(b.read()), len(fake_cuda.log())
        fake_cuda.fail("cuStreamIsCapturing", 906)
        with pytest.raises(KvioError, match="cuStreamIsCapturing|does not wait for it"):
            if call == "read":
                b.peer.read(b.read(), after=stream)
            else:
                with fake_cuda.held():
                    held = b.peer.read(b.read())
                    before = len(fake_cuda.log())
                    held.block_stream(stream)
        touched = [name for name, at, *_ in fake_cuda.log()[before:] if at == stream]
        assert not {"cuEventRecord", "cuStreamWaitEvent"} & set(touched)
        transfer.wait()


def test_others_captures_are_left_alone(bench, fake_cuda):
    """Every question is asked in relaxed mode, and the thread's own mode comes back."""
    b = bench()
    before = len(fake_cuda.log())
    b.peer.read(b.read()).wait()
    modes = []
    for name, _, new, _ in fake_cuda.log()[before:]:
        if name == "cuThreadExchangeStreamCaptureMode":
            modes.append(new)
        elif name not in ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"):
            assert len(modes) % 2 == 1, name
    assert modes and modes == [2, 0] * (len(modes) // 2)
