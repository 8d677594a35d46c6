"""NICs for the tests: of every provider (`provider`), or soft ones in virtual time (`virtual`).

"standin" is the provider verbs on the stand-in for libibverbs, wherever that can be built. "cuda"
is on the fake libcuda unless KVIO_REQUIRE names it; "gpu" always is: there a pair's own memory is
the GPU's, which the fake lets the tests see.
"""
import gc
import os
import uuid

import fake_cuda as fakes
import ibverbs_standin
import pytest
from cuda_app import App

from kvio.errors import BackendUnavailable
from kvio.transfer import COLLECTIVE, KV, Fabric, Nic
from nics import Pair
from require import parts_used, required, skip_or_fail
from tensors import Gpu

INSIDE = bool(os.environ.get("KVIO_LAB"))
# shared: soft NICs as in different processes, each on a fabric of its own.
DEVICES = {"soft": "soft", "shared": "soft", "verbs": "verbs:rxe0", "cuda": "cuda:0",
           "gpu": "cuda:0", "standin": "verbs:standin0"}
# In the lab what "a" and "b" of a pair say to each other crosses a cable.
FAR_ENDS = {"verbs": "verbs:rxe1"} if INSIDE else {}

if not INSIDE:
    ibverbs_standin.choose()        # before anything in this process opens libibverbs
    fakes.choose()                  # or libcuda


def why_not(name):
    """Why this provider cannot run here, or None."""
    if name == "standin":
        return ibverbs_standin.why_not()
    if name == "gpu" and fakes.why_not():
        return fakes.why_not()
    try:
        Nic.open(DEVICES[name]).close()
    except BackendUnavailable as missing:
        return str(missing)
    return None


# What is missing is skipped once, by test_a_provider_is_here, and not by each of the tests.
# The lab is slow, and there for verbs.
PROVIDERS = ["verbs"] if INSIDE else [
    name for name in DEVICES if DEVICES[name] == "soft" or required(name) or not why_not(name)]


@pytest.fixture(scope="session", autouse=True)
def the_gpus_context():
    """A real GPU's context goes with its last NIC, and takes some tenths of a second to be made and
    to end: with one NIC open all the time that is not paid again by each of a hundred tests."""
    kept = Nic.open("cuda:0", copy="loop") if required("cuda") and not why_not("cuda") else None
    yield
    if kept is not None:
        kept.close(cancel=True)


class SharedNic(Nic):
    """Its names are those of Unix sockets in `folder`."""

    folder = None

    def listen(self, address, *args, **options):
        return super().listen(self._socket(address), *args, **options)

    def connect(self, address, *args, **options):
        return super().connect(self._socket(address), *args, **options)

    def _socket(self, address):
        return address if ":" in address else f"unix:{self.folder}/{address}"


@pytest.fixture(scope="session")
def standin_library():
    """The controls of the stand-in for libibverbs, which kvio has open."""
    if ibverbs_standin.why_not():
        pytest.skip(ibverbs_standin.why_not())
    return ibverbs_standin.StandIn(ibverbs_standin.build())


@pytest.fixture
def standin(standin_library):
    """The same, as new; at the end nothing may be left of what was made on it."""
    before = standin_library.objects()
    standin_library.reset()
    yield standin_library
    standin_library.reset()
    gc.collect()
    assert standin_library.objects() == before


@pytest.fixture(scope="session")
def fake_cuda_library():
    """The controls of the fake libcuda, which kvio has open."""
    if fakes.why_not():
        skip_or_fail("cuda-headers", fakes.why_not())
    parts_used["cuda-headers"] += 1
    return fakes.FakeCuda(fakes.build())


@pytest.fixture
def fake_cuda(fake_cuda_library):
    """The same, as new; at the end nothing may be left of what was made on it, and nothing may
    have happened that a GPU would have answered with corrupt memory."""
    fake = fake_cuda_library
    fake.reset()
    gc.collect()                            # NICs that tests before this one have dropped
    before = fake.objects(), fake.depth()
    yield fake
    fake.hold(held=False)
    gc.collect()
    assert fake.violations() == []
    assert (fake.objects(), fake.depth()) == before
    fake.reset()


@pytest.fixture
def application(fake_cuda):
    """`application(device=0)`: a `Gpu` of the fake. NICs that it opens are closed at the end."""
    opened, made = [], []

    def open_nic(device, **options):
        opened.append(Nic.open(device, **options))
        return opened[-1]

    def application(device=0):
        made.append(Gpu(fake_cuda, open_nic, device))
        return made[-1]
    yield application
    fake_cuda.hold(held=False)
    for nic in opened:
        nic.close(cancel=True)
    gc.collect()
    for each in made:
        each.close()


@pytest.fixture
def gpu(application):
    """The application on the first GPU."""
    return application()


def on_device(fake, nic, data):
    """Memory of the GPU with these bytes, and an array that shares them."""
    memory = nic.device_memory(len(data))
    memory.write(0, data)
    return memory, fake.bytes_at(memory.addr, len(data))


@pytest.fixture
def app(fake_cuda):
    """An application with device 0's primary context."""
    app = App(fake_cuda)
    yield app
    app.close()


@pytest.fixture(params=PROVIDERS)
def provider(request, tmp_path):
    """Opens NICs of one provider; closes them at the end."""
    name, opened = request.param, []

    def open_nic(**options):
        kind = Nic
        if name == "shared":
            kind, options["fabric"] = SharedNic, Fabric()
        elif DEVICES[name] != "soft":
            options.pop("bytes_per_s", None)
        ends = FAR_ENDS if options.get("name") == "b" else DEVICES
        opened.append(kind.open(ends.get(name, DEVICES[name]), **options))
        opened[-1].folder = tmp_path
        return opened[-1]
    if name == "standin":
        request.getfixturevalue("standin")
    elif DEVICES[name] == "cuda:0" and not fakes.why_not():
        fake = request.getfixturevalue("fake_cuda")
        if name == "gpu":
            open_nic.on_device = lambda nic, data: on_device(fake, nic, data)
    elif DEVICES[name] != "soft":
        if why_not(name):
            skip_or_fail(name, why_not(name))
        parts_used[name] += 1
    yield open_nic
    while opened:
        opened.pop().close(cancel=True)


@pytest.fixture
def pair(provider):
    made = Pair(provider, address=uuid.uuid4().hex)
    yield made
    vars(made).clear()              # pytest keeps it, and a device is closed with its last NIC


@pytest.fixture
def virtual():
    """A fabric whose clock stands still, and soft NICs on it: `virtual("a", bytes_per_s=...)`."""
    fabric, opened = Fabric("virtual"), []

    def open_nic(name="nic", **options):
        opened.append(Nic.open("soft", name=name, fabric=fabric, **options))
        return opened[-1]
    open_nic.fabric = fabric
    yield open_nic
    fabric.advance(10**12)
    for nic in opened:
        nic.close(cancel=True)


@pytest.fixture
def connect(standin):
    """`connect(near="standin0", far="standin1", ...)`: a `Pair` over the stand-in's devices, each
    a list; far=None: a loop-back, both ends are one NIC."""
    made = []

    def connect(near="standin0", far="standin1", nbytes=1 << 20, classes=(COLLECTIVE, KV),
                **options):
        nics = [Nic.open(f"verbs:{near}", name="a", **options)]
        made.append(nics)
        nics.append(Nic.open(f"verbs:{far}", name="b", **options) if far else nics[0])
        given = iter(nics)
        pair = Pair(lambda **_: next(given), nbytes, uuid.uuid4().hex, classes)
        nics.append(pair)
        return pair
    yield connect
    standin.reset()
    for nics in made:
        for nic in nics[:2]:
            nic.close(cancel=True)
        for pair in nics[2:]:
            vars(pair).clear()
    made.clear()
