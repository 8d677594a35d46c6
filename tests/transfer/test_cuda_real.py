"""GPU memory on a real GPU, with the libraries whose tensors it is: KVIO_REQUIRE=cuda runs these.

They are short: what matters is that others' memory and streams are what the fake takes them for.
"""
import numpy as np
import pytest

from kvio.errors import InvalidArgument
from kvio.layout import READ, WRITE, BlockLayout, LayerDescriptors
from kvio.memory import BlockPool, LayerPool
from kvio.spans import span_of
from kvio.transfer import KV, Access, Nic
from nics import pattern, requests
from require import need, required

WAYS = ("auto", "loop", "batch", "strided", "kernel")
LAYOUT, NUM = BlockLayout(4, 16, 512), 64               # Layer Blocks of 8 KiB


@pytest.fixture(autouse=True)
def is_wanted():
    if not required("cuda"):
        pytest.skip("cuda: this session may have the fake; KVIO_REQUIRE=cuda takes the real one")
    need("cuda")            # and not by a mark: with that, a library that is missing is a failure


def library(name):
    """The module, if it is installed, and not without CUDA; then it has to see the GPU."""
    module = pytest.importorskip(name, reason=f"{name} is not installed")
    if name == "torch" and module.version.cuda is None:
        pytest.skip("torch is built without CUDA")
    assert module.cuda.is_available(), f"{name} sees no GPU"
    return module


class Loop:
    """A NIC connected to itself."""

    def __init__(self, **options):
        self.nic = Nic.open("cuda:0", **options)
        self.nic.listen("me")
        self.peer = self.nic.connect("me", classes=[KV])

    def move(self, opcode, memory, host, nbytes, **options):
        """All bytes at once; the transfer."""
        near, far = self.nic.register(memory), self.nic.register(host)
        post = self.peer.read if opcode == READ else self.peer.write
        return post(requests(opcode, near, far, 0, 0, nbytes), **options)


@pytest.fixture
def loop(request):
    made = Loop(copy=getattr(request, "param", None))
    yield made
    made.nic.close(cancel=True)


@pytest.mark.parametrize("loop", WAYS[:1], indirect=True)
def test_the_gpu_says_what_it_is(loop):
    copy = loop.nic.info()["copy"]
    assert copy["device"] == "cuda:0" and copy["name"] and copy["num_sms"] > 0
    assert copy["measured"] and copy["ways"]["loop"] is None
    print(copy)


@pytest.mark.parametrize("way", WAYS)
def test_random_blocks_by_each_way(way):
    """In and out through a pool of layers, ids at random; every byte is checked."""
    with Nic.open("cuda:0", copy="loop") as nic:
        missing = nic.info()["copy"]["ways"].get(way)
    if missing:
        pytest.skip(f"no {way}: {missing}")
    loop = Loop(copy=way)
    nic, room = loop.nic, NUM * LAYOUT.stride
    hbm = LayerPool(LAYOUT, NUM, memory=nic.device_memory(NUM * LAYOUT.full_block_nbytes))
    source, back = (BlockPool(LAYOUT, NUM, memory=nic.pinned(room)) for _ in range(2))
    source._rows[:] = pattern(room, 1).reshape(NUM, -1)
    near, far, there = map(nic.register, (hbm, source, back))
    rng = np.random.default_rng(2)
    ids, others = (rng.permutation(NUM).astype(np.int64) for _ in range(2))
    tokens = NUM * LAYOUT.block_tokens
    reads = LayerDescriptors(READ, LAYOUT, hbm.side(near.key), ids, source.side(far.key), others,
                             tokens)
    writes = LayerDescriptors(WRITE, LAYOUT, hbm.side(near.key), ids, back.side(there.key), others,
                              tokens)
    for layer in range(LAYOUT.num_layers):
        transfer = loop.peer.read(reads.layer(layer))
        transfer.wait()
        assert transfer.stats["ways"] == [way] or way in ("auto", "strided")
        mine = hbm.layer(layer).read()
        for block, other in zip(ids, others):
            assert (mine[block] == source.layer(other, layer)).all()
        loop.peer.write(writes.layer(layer)).wait()
    for block in range(NUM):
        assert (back.full(block) == source.full(block)).all()
    nic.close(cancel=True)


def test_host_memory_that_kvio_pins(loop):
    host, memory = pattern(1 << 20, 3), loop.nic.device_memory(1 << 20)
    loop.move(READ, memory, host, 1 << 20).wait()
    assert (memory.read() == pattern(1 << 20, 3)).all()


@pytest.mark.parametrize("dtype", ["uint8", "float32", "bfloat16", "float8_e4m3fn"])
def test_torchs_tensors(loop, dtype):
    torch = library("torch")
    tensor = torch.zeros(65536, dtype=torch.uint8, device="cuda").view(getattr(torch, dtype))
    try:
        assert span_of(tensor).ordinal == 0
    except InvalidArgument:
        assert dtype.startswith("float8")       # an older DLPack: as the error says
        tensor = tensor.view(torch.uint8)
    loop.move(READ, tensor, pattern(65536, 4), 65536).wait()
    assert (tensor.view(torch.uint8).cpu().numpy() == pattern(65536, 4)).all()


def test_what_torch_does_not_give(loop):
    torch = library("torch")
    with pytest.raises(InvalidArgument, match="detach"):
        loop.nic.register(torch.zeros(8, device="cuda", requires_grad=True))
    with pytest.raises(InvalidArgument, match="contiguous"):
        loop.nic.register(torch.zeros(8, 8, device="cuda")[:, :4])
    with pytest.raises(InvalidArgument, match="empty"):
        loop.nic.register(torch.zeros(0, device="cuda"))


def test_torchs_streams(loop):
    torch = library("torch")
    data, out = torch.zeros(1 << 22, dtype=torch.uint8, device="cuda"), np.zeros(1 << 22, np.uint8)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        data.fill_(7)
    loop.move(WRITE, data, out, 1 << 22, after=stream).wait()
    assert (out == 7).all()
    transfer = loop.move(READ, data, pattern(1 << 22, 5), 1 << 22)
    transfer.block_stream(stream)
    with torch.cuda.stream(stream):
        copy = data.clone()
    stream.synchronize()
    assert (copy.cpu().numpy() == pattern(1 << 22, 5)).all()


def test_cupys_arrays_and_streams(loop):
    cupy = library("cupy")
    array, stream = cupy.zeros(1 << 20, cupy.uint8), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    transfer = loop.move(READ, array, pattern(1 << 20, 6), 1 << 20)
    transfer.block_stream(stream)
    with stream:
        doubled = array * 2
    out = np.zeros(1 << 20, np.uint8)
    loop.move(WRITE, doubled, out, 1 << 20, after=stream).wait()
    assert (out == pattern(1 << 20, 6) * 2).all()
    with pytest.raises(InvalidArgument, match="event"):
        transfer.block_stream(cupy.cuda.Event())


def test_others_see_our_memory(loop):
    memory = loop.nic.device_memory(4096)
    memory.write(0, pattern(4096, 7))
    pool = LayerPool(BlockLayout(2, 4, 64), 8, memory=memory)
    expected = pattern(4096, 7).reshape(2, 8, 4, 64)
    seen = 0
    for name, take in [("torch", lambda m: m.from_dlpack(pool.layer(1)).cpu().numpy()),
                       ("torch", lambda m: m.as_tensor(pool.layer(1), device="cuda")
                        .cpu().numpy()),
                       ("cupy", lambda m: m.from_dlpack(pool.layer(1)).get()),
                       ("cupy", lambda m: m.asarray(pool.layer(1)).get()),
                       ("jax.numpy", lambda m: np.asarray(m.from_dlpack(pool.layer(1))))]:
        try:
            module = __import__(name, fromlist=["x"])
        except ImportError:
            continue
        assert (take(module) == expected[1]).all(), name
        seen += 1
    if not seen:
        pytest.skip("neither torch nor cupy nor jax is installed")


def test_jaxs_arrays_are_read(loop):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    array = jax.numpy.arange(4096, dtype="bfloat16").block_until_ready()
    assert loop.nic.register(array).access & Access.REMOTE_READ
    out = np.zeros(8192, np.uint8)
    loop.move(WRITE, array, out, 8192).wait()
    assert (out == np.asarray(array).view(np.uint8)).all()
