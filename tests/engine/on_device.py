"""HBM for the tests of engines on a GPU: on the fake libcuda, whose device memory the CPU cannot
touch by its address, or on the machine's own where KVIO_REQUIRE names cuda."""
import contextlib
import gc
import os
import sys

import numpy as np
import pytest
from require import parts_used, required, skip_or_fail

from kvio import completion
from kvio.memory import POISON
from kvio.transfer import Nic

DEVICE = "cuda:0"
TRANSFER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "transfer")

sys.path.insert(0, TRANSFER)
try:
    import fake_cuda
finally:
    sys.path.remove(TRANSFER)

fake_cuda.choose()                      # before anything in this process opens libcuda


@contextlib.contextmanager
def opened(controls=True):
    """The device, which stays open meanwhile, so that what copies cost is measured once: the fake's
    controls. Without `controls` it may be the machine's own, and None."""
    if fake_cuda.why_not() and (controls or not required("cuda")):
        skip_or_fail("cuda-headers", fake_cuda.why_not())
    parts_used["cuda" if required("cuda") else "cuda-headers"] += 1
    fake = None if required("cuda") else fake_cuda.FakeCuda(fake_cuda.build())
    with Nic.open(DEVICE, name="keeps the device open"):
        if fake is not None:
            fake.reset()
        yield fake


@pytest.fixture(scope="module")
def device():
    with opened() as fake:
        yield fake


@pytest.fixture
def fake(device):
    """Whatever a test has done, all it had of the driver is given back in the end."""
    gc.collect()                            # what other tests have left
    device.reset()
    before = device.objects()
    yield device
    gc.collect()
    assert completion.in_flight() == 0
    assert device.objects() == before
    assert device.violations() == []


def bytes_of(fake, region) -> np.ndarray:
    """A region in device memory, uint8, to look into and to spoil behind everybody's back."""
    return fake.bytes_at(region.addr, region.nbytes)


def left_behind(fake, cluster) -> list[str]:
    """What has not been given back by a cluster that serves nobody any more."""
    found = []
    for engine in cluster.engines:
        buffer = engine.buffer.pool
        if buffer.num_free != buffer.num_blocks or (buffer.region.array != POISON).any():
            found.append(f"{engine.name}: {buffer}, or its bytes")
        if engine in cluster.prefill:
            found += [f"{engine.name}: PE HBM is held" for w in engine.workspaces if w.num_taken]
        elif engine.hbm.num_free != engine.hbm.num_blocks or engine.hbm._pins.any():
            found.append(f"{engine.name}: {engine.hbm}")
        elif (bytes_of(fake, engine.hbm.region) != POISON).any():
            found.append(f"{engine.name}: bytes have come into free blocks of HBM")
        figures = {name: getattr(engine, name) for name in (
            "num_requests", "num_tokens", "waiting_read_tokens", "wanted_blocks",
            "promised_blocks") if hasattr(engine, name)}
        if any(figures.values()):
            found.append(f"{engine.name}: {figures}")
        if getattr(engine.compute, "num_kv_errors", 0):
            found.append(f"{engine.name}: {engine.compute.num_kv_errors} wrong KV records")
    return found
