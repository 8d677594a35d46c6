"""Transfers that wait for a user's stream and are waited for by one, on the fake libcuda: the order
on the GPU holds, and the host waits for nobody."""
import asyncio
import errno
import os
import threading
import time

import numpy as np
import pytest

from kvio.errors import Busy, Closed, InvalidArgument, TransferError
from kvio.layout import READ, WRITE
from kvio.spans import stream_handle
from kvio.transfer import COLLECTIVE, KV, Nic
from nics import Pair, pattern, requests
from tensors import own_context

WAITS = ("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize")


class Having:
    """An object with these attributes."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


class CudaStream:
    """What cuda.core calls a stream."""

    def __init__(self, handle, version=0):
        self.answer = version, handle

    def __cuda_stream__(self):
        return self.answer


def cupy_stream(handle):
    return Having(ptr=handle, wait_event=None)


FORMS = {"int": int, "numpy": np.uint64, "torch": lambda h: Having(cuda_stream=h),
         "cupy": cupy_stream, "cuda.core": CudaStream,
         "cuda.core, a property": lambda h: Having(__cuda_stream__=(0, h))}


@pytest.mark.parametrize("form", FORMS)
def test_what_a_stream_is(form):
    for handle in 0, 1, 2, 0x7f0012345678, 2**64 - 1:
        assert stream_handle(FORMS[form](handle)) == handle


def torch_event():
    return Having(cuda_event=3, record=None)


@pytest.mark.parametrize("wrong", [
    None, "0", b"0", 1.0, -1, 1 << 64, True, object(), [1], torch_event(),
    Having(ptr=5, record=None), Having(cuda_stream=None), Having(cuda_stream="7"),
    CudaStream(3, version=1), CudaStream(None), Having(__cuda_stream__=3),
    Having(__cuda_stream__=lambda: 1 // 0)], ids=lambda w: type(w).__name__)
def test_what_no_stream_is(wrong):
    with pytest.raises(InvalidArgument, match="a stream is an object with __cuda_stream__.*event"):
        stream_handle(wrong)


class Bench:
    """Memory on both sides, a loop-back over it, and a stream of the user's."""

    def __init__(self, gpu, nbytes=65536, **options):
        self.gpu, self.nbytes = gpu, nbytes
        self.tensor, self.hbm = gpu.tensor(nbytes, 1)
        self.host, self.result = pattern(nbytes, 2), np.zeros(nbytes, np.uint8)
        self.nic, self.peer, self.near, self.far, _ = gpu.loop_back(
            self.tensor, self.host, self.result, classes=(COLLECTIVE, KV), **options)
        self.stream = gpu.stream()

    def read(self, **options):
        wrs = requests(READ, self.near, self.far, 0, 0, self.nbytes)
        return self.peer.read(wrs, **options)

    def write(self, **options):
        wrs = requests(WRITE, self.near, self.far, 0, 0, self.nbytes)
        return self.peer.write(wrs, **options)

    def user_reads(self):
        """The user's stream copies the tensor to `result`."""
        self.gpu.copy(self.result.ctypes.data, self.near.addr, self.nbytes, self.stream)

    def user_writes(self, other):
        self.gpu.copy(self.near.addr, other.ctypes.data, self.nbytes, self.stream)


@pytest.fixture
def bench(gpu):
    made = Bench(gpu)
    yield made
    vars(made).clear()


@pytest.mark.parametrize("form", FORMS)
def test_a_transfer_comes_after_what_is_in_the_stream(bench, fake_cuda, form):
    data = pattern(bench.nbytes, 3)
    bench.nic.register(data)                    # pinned: the user's copy does not wait
    stream = FORMS[form](bench.stream)
    calls = fake_cuda.calls(*WAITS)
    with fake_cuda.held(bench.stream):
        bench.user_writes(data)
        transfer = bench.write(after=stream)
        other = bench.peer.read(requests(READ, bench.near, bench.far, 0, 0, 0), COLLECTIVE)
        other.wait()                            # another queue pair, which did not have to wait
        assert not transfer.done and fake_cuda.queued(bench.stream)
        assert (bench.host == pattern(bench.nbytes, 2)).all()
    transfer.wait()
    assert (bench.host == data).all() and fake_cuda.calls(*WAITS) == calls


def test_what_comes_into_the_stream_later_is_not_waited_for(bench, fake_cuda):
    transfer = bench.write(after=bench.stream)
    bench.gpu.inside("cuStreamSynchronize", bench.stream)      # what it had has run
    with fake_cuda.held(bench.stream):
        bench.user_reads()
        transfer.wait()
        assert fake_cuda.queued(bench.stream) == 1
    assert (bench.host == pattern(bench.nbytes, 1)).all()


def test_batches_behind_one_that_waits_wait_too(bench, fake_cuda):
    """A queue pair is in order."""
    with fake_cuda.held(bench.stream):
        bench.user_reads()
        first, second = bench.read(after=bench.stream), bench.write()
        assert not first.done and not second.done
    second.wait()
    assert first.done and (bench.hbm == pattern(bench.nbytes, 2)).all()


@pytest.mark.parametrize("form", FORMS)
def test_the_stream_waits_for_a_transfer(bench, fake_cuda, form):
    calls = fake_cuda.calls(*WAITS)
    fake_cuda.hold()
    transfer = bench.read()
    assert transfer.block_stream(FORMS[form](bench.stream)) is None
    bench.user_reads()
    fake_cuda.hold(bench.stream, False)         # it could run, but for the transfer
    assert fake_cuda.queued(bench.stream) >= 1 and not bench.result.any()
    fake_cuda.hold(held=False)
    transfer.wait()
    bench.gpu.inside("cuStreamSynchronize", bench.stream)
    assert (bench.result == bench.host).all()
    assert fake_cuda.calls(*WAITS) == calls + 1                 # the user's own


def test_there_and_back_without_the_host(bench, fake_cuda):
    """In from the host, used by the model, out again: three streams, and one wait at the end."""
    data = pattern(bench.nbytes, 5)
    bench.nic.register(data)
    fake_cuda.hold()
    bench.read().block_stream(bench.stream)
    bench.user_reads()
    bench.user_writes(data)
    last = bench.write(after=bench.stream)
    fake_cuda.hold(held=False)
    last.wait()
    assert (bench.result == pattern(bench.nbytes, 2)).all() and (bench.host == data).all()


def test_a_transfer_that_has_drained_holds_up_no_stream(bench, fake_cuda):
    transfer = bench.read()
    transfer.wait()
    calls = fake_cuda.calls("cuStreamWaitEvent")
    transfer.block_stream(bench.stream)
    assert fake_cuda.calls("cuStreamWaitEvent") == calls


def test_awaiting_a_transfer_behind_a_stream(bench, fake_cuda):
    async def main():
        fake_cuda.hold(bench.stream)
        bench.user_reads()
        transfer = bench.read(after=bench.stream)
        waiting = asyncio.ensure_future(transfer)
        await asyncio.sleep(0.02)
        assert not waiting.done()
        fake_cuda.hold(bench.stream, False)
        await asyncio.wait_for(waiting, 30)
    asyncio.run(main())
    assert (bench.hbm == bench.host).all()


@pytest.mark.parametrize("default", [0, 1, 2])
def test_default_streams(bench, fake_cuda, default):
    """0 and 1 are the legacy default stream, 2 is a thread's own."""
    bench.read(after=default).wait()
    transfer = bench.write()
    transfer.block_stream(default)
    transfer.wait()
    assert (bench.hbm == bench.host).all()


# ---- what is refused

def test_a_stream_of_another_device(bench, application):
    foreign = application(1).stream()
    before = bench.nic.stats()["work_requests"]
    with pytest.raises(InvalidArgument, match="another GPU.*cuda:0's primary.*nothing was posted"):
        bench.read(after=foreign)
    assert bench.nic.stats()["work_requests"] == before
    transfer = bench.read()
    with bench.gpu.fake.held():
        late = bench.write()
        with pytest.raises(InvalidArgument, match="not of the primary context.*cuda:0"):
            late.block_stream(foreign)
    late.wait()
    transfer.wait()
    bench.read(after=bench.stream).wait()       # the NIC goes on


def test_a_stream_of_another_context(bench, fake_cuda):
    """Not all that is on the device is in its primary context."""
    with own_context(fake_cuda):
        stream = fake_cuda.new("cuStreamCreate", 1)
        with pytest.raises(InvalidArgument, match="another context.*nothing was posted"):
            bench.read(after=stream)
        fake_cuda.do("cuStreamDestroy_v2", stream)


def test_a_batch_that_is_not_all_posted_cannot_be_waited_for_yet(gpu, fake_cuda):
    bench = Bench(gpu, queue_depth=4)
    wrs = requests(READ, bench.near, bench.far, 512 * np.arange(40), 512 * np.arange(40), 512)
    with fake_cuda.held():
        transfer = bench.peer.read(wrs)
        with pytest.raises(Busy, match="not yet posted.*queue_depth"):
            transfer.block_stream(bench.stream)
    transfer.wait()
    transfer.block_stream(bench.stream)
    assert (bench.hbm[:40 * 512] == bench.host[:40 * 512]).all()


def test_cancelling_waits_for_what_is_in_the_stream(gpu, fake_cuda):
    """A stream takes nothing back: those that it had are done, the others are not begun."""
    bench = Bench(gpu, queue_depth=4)
    before = bench.hbm.copy()
    wrs = requests(READ, bench.near, bench.far, 512 * np.arange(40), 512 * np.arange(40), 512)
    fake_cuda.hold()
    transfer = bench.peer.read(wrs)
    timer = threading.Timer(0.05, fake_cuda.hold, kwargs=dict(held=False))
    timer.start()
    transfer.cancel()
    timer.join()
    done = int((transfer.status == 0).sum())
    assert 0 < done < 40 and transfer.status.tolist() == (
        [0] * done + [-errno.ECANCELED] * (40 - done))
    assert (bench.hbm[:done * 512] == bench.host[:done * 512]).all()
    assert (bench.hbm[done * 512:] == before[done * 512:]).all()
    bench.write().wait()


def test_a_transfer_that_has_failed_is_no_reason_to_go_on(bench, fake_cuda):
    wrs = requests(READ, bench.near, bench.far, 0, 0, [64, 64])
    wrs["rkey"][1] = 0
    with fake_cuda.held():
        transfer = bench.peer.read(wrs)
        with pytest.raises(TransferError, match="does not wait for it"):
            transfer.block_stream(bench.stream)
    with pytest.raises(TransferError, match="REM_ACCESS_ERR"):
        transfer.wait()
    with pytest.raises(TransferError, match="REM_ACCESS_ERR") as failed:
        transfer.block_stream(bench.stream)
    assert failed.value.errno == errno.EACCES
    bench.peer.reset()


def test_other_providers_know_no_streams():
    with Nic.open("soft", name="plain", clock="virtual") as nic:
        pair = Pair(lambda **_: nic, address="x")
        with pytest.raises(InvalidArgument, match="plain is a soft NIC"):
            pair.peer.read(pair.read(0, 0, 64), after=7)
        transfer = pair.peer.read(pair.read(0, 0, 64))
        with pytest.raises(InvalidArgument, match="only what a GPU's NIC"):
            transfer.block_stream(7)
        nic.fabric.advance(10**6)
        transfer.wait()


def test_wrong_streams_post_nothing(bench):
    before = bench.nic.stats()["work_requests"]
    for wrong in "stream", torch_event(), 1.5, -7:
        with pytest.raises(InvalidArgument, match="a stream is"):
            bench.read(after=wrong)
        with pytest.raises(InvalidArgument, match="a stream is"):
            bench.read().block_stream(wrong)
    assert bench.nic.stats()["work_requests"] == before + 4


def test_a_forked_child_has_no_gpu(bench, fake_cuda):
    """It says so, and what it closes is not the parent's."""
    transfer = bench.read()
    transfer.wait()
    before = fake_cuda.objects()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            refused = 0
            for use in (bench.read, lambda: bench.nic.register(bytearray(8)),
                        lambda: bench.nic.pinned(8), lambda: bench.nic.connect("x"),
                        lambda: bench.nic.listen("x"), bench.peer.query, bench.nic.poll,
                        lambda: transfer.block_stream(bench.stream), transfer.wait):
                try:
                    use()
                except Closed as closed:
                    refused += "fork" in str(closed)
            bench.nic.close()
            code = 0 if refused == 9 and fake_cuda.objects() == before else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    bench.write().wait()
