"""From post to completion nothing is allocated and nothing synchronised: which functions of the
driver are called there, and how often kvio's C asks for memory."""
import os
import subprocess
import sys
from pathlib import Path

import fake_cuda as fakes
import numpy as np
import pytest

import cbuild
from kvio.layout import READ, WRITE
from nics import requests
from require import skip_or_fail
from test_cuda_ways import CALLS, WAYS, Machine, rows

# They return at once whatever the device does, and make nothing.
AT_ONCE = {"cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuThreadExchangeStreamCaptureMode",
           "cuStreamIsCapturing", "cuStreamGetCaptureInfo_v2", "cuStreamGetCtx", "cuEventRecord",
           "cuEventQuery", "cuStreamWaitEvent", "cuLaunchHostFunc"}
# In a process of its own: the counter has to be there before Python.
COUNT = """
import ctypes, sys
import fake_cuda
fake_cuda.choose()
from test_cuda_ways import Machine, rows
counter = ctypes.CDLL(None)
counter.malloc_count.restype = ctypes.c_uint64
with open("/proc/self/maps") as maps:
    code = [line.split()[0] for line in maps if "/_ext/nic." in line and "r-xp" in line]
begin, end = (int(word, 16) for word in code[0].split("-"))
machine = Machine(fake_cuda.FakeCuda(fake_cuda.build()), copy=sys.argv[1], queue_depth=1024)
for count in 1, 500:
    machine.post(rows(count, 16, 64, 128)).wait()
    counter.malloc_count_of(ctypes.c_uint64(begin), ctypes.c_uint64(end))
    for i in range(20):
        machine.post(rows(count, 16, 64, 128)).wait()
    print(counter.malloc_count())
machine.close()
"""


@pytest.fixture
def machine(fake_cuda):
    made = []

    def make(*arguments, **options):
        made.append(Machine(fake_cuda, *arguments, **options))
        return made[-1]
    yield make
    while made:
        made.pop().close()


@pytest.mark.parametrize("kind", ["H2D", "D2H"])
@pytest.mark.parametrize("way", ["auto", *WAYS])
def test_nothing_is_made_or_waited_for(machine, gpu, fake_cuda, way, kind):
    """Behind the user's stream and before it; driven by polling and by sleeping."""
    m, stream = machine(kind, copy=way), gpu.stream()
    with fake_cuda.held(), pytest.raises(TimeoutError):
        m.post(rows(1)).wait(0.01)      # the first who sleeps makes the stream that wakes him
    before, first = fake_cuda.objects(), len(fake_cuda.log())
    for count in 1, 3, 100, 1000:
        to, at, nbytes = np.asarray(rows(count, 64, 128, 256)).T
        blocks = requests(READ, m.target, m.source, to, at, nbytes)
        transfer = m.peer.read(blocks, after=stream)
        transfer.block_stream(stream)
        transfer.wait()
    called = {name for name, *_ in fake_cuda.log()[first:]}
    copies = {name for names in CALLS.values() for name in names}
    assert called & copies and called <= copies | AT_ONCE
    assert fake_cuda.objects() == before


@pytest.mark.parametrize("way", ["auto", *WAYS])
def test_no_memory_is_allocated_but_the_batch_itself(tmp_path, way):
    """However many blocks it has."""
    if fakes.why_not():
        skip_or_fail("cuda-headers", fakes.why_not())
    if cbuild.sanitizer():
        pytest.skip("the sanitizer's malloc is there")
    here = Path(__file__).parent
    counter = cbuild.shared_library(tmp_path / "malloc_count.so", [here / "malloc_count.c"],
                                    "-fno-builtin")
    path = os.pathsep.join(map(str, (here.parents[1], here.parent, here)))
    done = subprocess.run([sys.executable, "-c", COUNT, way], capture_output=True, text=True,
                          env={**os.environ, "LD_PRELOAD": counter, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["20", "20"]


def test_a_second_gpu_is_used_without_the_first(application, fake_cuda):
    """Not opened, no context of it, nothing left current in this thread."""
    gpu = application(1)
    first = len(fake_cuda.log())
    tensor, data = gpu.tensor(4096, 1)
    nic, peer, near, far = gpu.loop_back(tensor, bytearray(4096))
    peer.write(requests(WRITE, near, far, 0, 0, 4096), after=gpu.stream()).wait()
    assert (far.array == data).all() and nic.info()["copy"]["device"] == "cuda:1"
    retained = {a for name, _, a, _ in fake_cuda.log()[first:]
                if name == "cuDevicePrimaryCtxRetain"}
    assert retained == {1} and fake_cuda.depth() == 0


def test_more_batches_in_flight_than_ever_are_events_made_once(machine, fake_cuda):
    m, made = machine(copy="loop"), []
    for _ in range(3):
        calls = fake_cuda.calls("cuEventCreate")
        with fake_cuda.held():
            transfers = [m.post(rows(1)) for _ in range(600)]
        for transfer in transfers:
            transfer.wait()
        made.append(fake_cuda.calls("cuEventCreate") - calls)
    assert 0 < made[0] < 1024 and made[1:] == [0, 0]
