"""What a GPU's NIC refuses and how, on the fake libcuda: wrong memory, wrong arguments, drivers
that are too old, memory that runs out, calls that fail, and a GPU that is lost to the process."""
import errno
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from kvio.errors import (BackendUnavailable, InvalidArgument, KvioError, MappingFailed,
                         TransferError)
from kvio.layout import READ, WRITE, BlockLayout
from kvio.memory import LayerPool
from kvio.spans import span_of
from kvio.transfer import KV, Access, Nic
from nics import pattern, requests
from tensors import CUDA_HOST, DlTensor, Tensor, own_context


# ---- memory

class Raising:
    """What PyTorch's tensors do where the interface has no type for them, or gradients are kept."""

    def __init__(self, dlpack=None, interface=TypeError("no typestr for bfloat16")):
        self._dlpack, self._interface = dlpack, interface

    @property
    def __cuda_array_interface__(self):
        raise self._interface

    def __dlpack_device__(self):
        return self._dlpack.__dlpack_device__()

    def __dlpack__(self, **options):
        return self._dlpack.__dlpack__(**options)


class NoDlpack:
    @property
    def __cuda_array_interface__(self):
        raise RuntimeError("this array was deleted")


def test_types_that_the_interface_does_not_know_go_by_dlpack(gpu):
    addr, data = gpu.memory(4096, 1)
    dlpack = DlTensor(addr, (2048,))
    nic, peer, near, far = gpu.loop_back(Raising(dlpack), bytearray(4096))
    assert near.nbytes == 4096 and dlpack.asked == [{"stream": -1}]
    peer.write(requests(WRITE, near, far, 0, 0, 4096)).wait()
    assert bytes(far.array) == data.tobytes()


@pytest.mark.parametrize("why", [
    BufferError("tensor that requires gradient"), RuntimeError("Array has been deleted."),
    NotImplementedError("sparse"), OSError(5, "x"), KeyError("x")], ids=lambda w: type(w).__name__)
def test_a_tensor_that_raises(gpu, why):
    nic = gpu.nic()
    for tensor in DlTensor(4096, (8,), raises=why), Raising(DlTensor(4096, (8,), raises=why)):
        for take in nic.register, lambda t: LayerPool(BlockLayout(1, 1, 8), 1, memory=t):
            with pytest.raises(InvalidArgument, match="does not say where.*detach"):
                take(tensor)
    with pytest.raises(InvalidArgument, match="does not say where.*was deleted"):
        nic.register(NoDlpack())


class JaxArray(DlTensor):
    """It has the interface too, which must not be asked."""

    __cuda_array_interface__ = property(lambda self: 1 // 0)


JaxArray.__module__ = "jaxlib.xla"


@pytest.mark.parametrize("versioned", [None, (1, 0)])
def test_arrays_of_jax_are_read_by_dlpack_without_a_stream(gpu, versioned):
    addr, data = gpu.memory(4096, 1)
    array = JaxArray(addr, (2048,), versioned=versioned)
    nic, peer, near, far = gpu.loop_back(array, bytearray(4096))
    assert array.asked == [{} if versioned is None else {"max_version": (1, 0)}]
    assert near.access == Access.REMOTE_READ
    peer.write(requests(WRITE, near, far, 0, 0, 4096)).wait()
    assert bytes(far.array) == data.tobytes()
    with pytest.raises(InvalidArgument, match="JAX.*nic.device_memory"):
        LayerPool(BlockLayout(1, 1, 64), 1, memory=array)


def refused_layouts(addr):
    yield "contiguous", Tensor(addr, 64, shape=(4, 8), strides=(16, 1))
    yield "contiguous", Tensor(addr, 64, shape=(4, 8), strides=(1, 4))
    yield "contiguous", Tensor(addr, 64, shape=(4, 8), strides=(-8, 1))
    yield "contiguous", DlTensor(addr, (4, 8), (16, 1))
    yield "contiguous", DlTensor(addr, (4, 8), (0, 1), versioned=(1, 0))
    yield "empty", Tensor(addr, 64, shape=(0, 8))
    yield "empty", Tensor(addr, 64, shape=(0, 8), strides=(8, 1))
    yield "empty", Tensor(0, 64)
    yield "empty", DlTensor(addr, (4, 0))
    yield "empty", DlTensor(0, (4, 1))
    yield "does not say", Tensor(addr, 64, data=None)
    yield "does not say", Tensor(addr, 64, typestr="|uX")
    yield "does not say", Tensor(addr, 64, shape="ab")
    yield "does not say", Tensor(addr, 64, shape=None)
    yield "does not say", DlTensor(addr, (4,), versioned=(2, 0))
    yield "mask", Tensor(addr, 64, mask=Tensor(addr, 64))


def test_memory_that_is_not_one_piece(gpu):
    nic = gpu.nic()
    for why, tensor in refused_layouts(gpu.memory(4096)[0]):
        with pytest.raises(InvalidArgument, match=why):
            nic.register(tensor)
    assert not nic._ext.owners


def test_how_many_bytes_a_tensor_has(gpu):
    addr, _ = gpu.memory(4096)
    for tensor, nbytes in [(Tensor(addr, 0, shape=(3, 5), typestr="<f4"), 60),
                           (Tensor(addr, 0, shape=(), typestr="<f8"), 8),
                           (Tensor(addr, 0, shape=(2, 1, 3), strides=(3, 77, 1)), 6),
                           (DlTensor(addr, (7,), bits=32), 28), (DlTensor(addr, ()), 2),
                           (DlTensor(addr, (7,), bits=4), 4),           # two to a byte
                           (DlTensor(addr, (7,), bits=4, versioned=(1, 1), flags=4), 7),
                           (DlTensor(addr, (3, 1), (1, 999)), 6)]:
        assert span_of(tensor).nbytes == nbytes
    assert span_of(DlTensor(addr, (7,), device=(CUDA_HOST, 0))) is None
    assert span_of(np.zeros(3)) is None and span_of(bytearray(3)) is None and span_of(7) is None


def test_memory_of_another_device(gpu, application):
    other = application(1)
    addr, _ = other.memory(4096)
    nic = gpu.nic(name="mine")
    for tensor in Tensor(addr, 4096), DlTensor(addr, (8,), device=(2, 1)), \
            LayerPool(BlockLayout(1, 1, 4096), 1, memory=Tensor(addr, 4096)):
        with pytest.raises(InvalidArgument, match='mine: .*lies on cuda:1.*Nic.open."cuda:1"'):
            nic.register(tensor)
    with pytest.raises(InvalidArgument, match="cuda:1"):    # its owner is wrong about it
        nic.register(DlTensor(addr, (8,), device=(2, 0)))
    near = other.nic().register(Tensor(addr, 4096))
    assert near.device == "cuda:1"


def test_memory_of_another_context(gpu, fake_cuda):
    with own_context(fake_cuda):
        addr = fake_cuda.new("cuMemAlloc_v2", 4096)
        with pytest.raises(InvalidArgument, match="another context.*primary"):
            gpu.nic().register(Tensor(addr, 4096))
        fake_cuda.do("cuMemFree_v2", addr)


def test_memory_that_was_freed(gpu):
    addr, _ = gpu.memory(4096)
    nic, tensor = gpu.nic(), DlTensor(addr, (2048,))
    gpu.free(addr)
    for gone in tensor, Tensor(addr, 4096):
        with pytest.raises(InvalidArgument):
            nic.register(gone)
        with pytest.raises(KvioError):
            LayerPool(BlockLayout(1, 1, 4096), 1, memory=gone, poison=True)
    assert not nic._ext.owners


def test_memory_that_is_longer_than_its_allocation(gpu):
    addr, _ = gpu.memory(4096)
    with pytest.raises(InvalidArgument, match="not allocated"):
        gpu.nic().register(Tensor(addr, 1 << 20))


def test_rights(gpu):
    addr, _ = gpu.memory(64)
    nic, fixed = gpu.nic(), np.zeros(64, np.uint8)
    fixed.flags.writeable = False
    for memory in Tensor(addr, 64, data=(addr, True)), b"x" * 64, fixed:
        assert nic.register(memory).access == Access.REMOTE_READ
        with pytest.raises(InvalidArgument, match="read-only"):
            nic.register(memory, Access.LOCAL_WRITE)


def test_host_memory_that_cannot_be_pinned(gpu, fake_cuda):
    fake_cuda.set(pinned_limit=4096)
    nic = gpu.nic()
    with pytest.raises(TransferError, match="cuda:0: cuMemHostRegister.*OUT_OF_MEMORY.*ulimit") \
            as failed:
        nic.register(bytearray(1 << 20))
    assert failed.value.errno == errno.ENOMEM and not nic._ext.owners
    fake_cuda.set(pinned_limit=1 << 30)
    nic.register(bytearray(1 << 20))


def test_memory_that_runs_out(gpu, fake_cuda):
    fake_cuda.set(total=1 << 20)
    nic = gpu.nic()
    with pytest.raises(MappingFailed, match=f"{1 << 21} bytes of device memory: cuda:0: "
                                            "cuMemAlloc.*OUT_OF_MEMORY") as failed:
        nic.device_memory(1 << 21)
    assert failed.value.errno == errno.ENOMEM
    assert nic.device_memory(1024).nbytes == 1024


# ---- arguments

def test_wrong_arguments_of_open(fake_cuda):
    for device, options in [("cuda:x", {}), ("cuda:-1", {}), ("cuda:0,1", {}), ("cuda:1.5", {}),
                            ("cuda:0", dict(copy="fast")), ("cuda:0", dict(copy=3)),
                            ("cuda:0", dict(copy=["loop"])), ("cuda:0", dict(max_sms=0)),
                            ("cuda:0", dict(max_sms="8")), ("cuda:0", dict(queue_depth=0)),
                            ("cuda:0", dict(queue_depth=None)), ("cuda:0", dict(max_sge=65)),
                            ("cuda:0", dict(max_sge=-1)), ("cuda:0", dict(fabric="x")),
                            ("cuda:0", dict(clock="virtual")), ("cuda:0", dict(mtu=1024)),
                            ("cuda:0", dict(bytes_per_s=1)), ("cuda:0", dict(gid_index=1)),
                            ("cuda:0", dict(pd=1)), ("soft", dict(copy="loop")),
                            ("soft", dict(max_sms=8)), ("verbs", dict(copy="auto"))]:
        with pytest.raises(InvalidArgument):
            Nic.open(device, **options)
    for ordinal in 2, 99, 1 << 40:
        with pytest.raises((BackendUnavailable, InvalidArgument)):
            Nic.open(f"cuda:{ordinal}")


def test_which_gpu_is_opened(gpu, application):
    nic, second = gpu.nic(copy="loop", max_sms=3), application(1).nic(name="two")
    info = nic.info()
    assert (info["provider"], info["name"], info["rails"]) == ("cuda", "cuda:0", [])
    assert info["copy"]["device"] == "cuda:0" and info["copy"]["driver"] == "13.0"
    assert info["copy"]["capability"] == "sm_90" and info["copy"]["num_sms"] == 132
    assert info["copy"]["copy"] == "loop" and info["copy"]["ways"]["loop"] is None
    assert set(info["copy"]["ways"]) == {"loop", "batch", "strided", "kernel"}
    assert second.name == "two" and second.info()["copy"]["device"] == "cuda:1"
    assert "cuda" in repr(nic) and nic.provider == "cuda" and nic.fabric is None
    alone = Nic.open("cuda")
    assert alone.name == "cuda:0"
    alone.close()


def test_only_the_gpu_that_was_named_is_touched(fake_cuda, gpu):
    gpu.nic().register(bytearray(64))
    retained = [a for name, _, a, _ in fake_cuda.log() if name == "cuDevicePrimaryCtxRetain"]
    assert retained and not any(retained) and fake_cuda.depth() == 0


def test_addresses(gpu, application):
    nic, second = gpu.nic(name="first"), application(1).nic()
    for address in "host:1", "unix:/x", ":5", "cuda:0":
        for use in nic.listen, nic.connect:
            with pytest.raises(InvalidArgument, match="first: .*within its own.*verbs.*soft"):
                use(address)
    for address in 5, None:
        with pytest.raises(InvalidArgument, match="a str"):
            nic.listen(address)
    nic.listen("here")
    with pytest.raises(InvalidArgument, match="already"):
        gpu.nic().listen("here")
    with pytest.raises(InvalidArgument, match="'here' is a NIC of cuda:0.*own GPU"):
        second.connect("here")
    second.listen("here")                       # names are each GPU's own
    with pytest.raises(TransferError, match="nobody listens at 'nowhere' on cuda:0"):
        nic.connect("nowhere")
    with Nic.open("soft", clock="virtual") as soft, \
            pytest.raises(TransferError, match="nobody listens"):
        soft.connect("here")


def test_only_a_gpus_nic_has_its_memory():
    with Nic.open("soft", name="plain", clock="virtual") as nic:
        for use in nic.pinned, nic.device_memory:
            with pytest.raises(InvalidArgument, match='plain is a soft NIC.*Nic.open."cuda:0"'):
                use(64)


# ---- calls that fail

@pytest.mark.parametrize("error, word", [
    ("OUT_OF_MEMORY", "free some"), ("INVALID_VALUE", "has been freed"),
    ("NOT_SUPPORTED", "newer driver")])
def test_a_call_that_fails_is_named_and_the_nic_goes_on(gpu, fake_cuda, error, word):
    tensor, data = gpu.tensor(65536)
    host = pattern(65536, 2)
    nic, peer, near, far = gpu.loop_back(tensor, host, copy="loop")
    fake_cuda.fail("cuMemcpyHtoDAsync_v2", error)
    transfer = peer.read(requests(READ, near, far, [0, 4096], [0, 8192], 4096))
    with pytest.raises(TransferError, match=f"GENERAL_ERR: cuda:0: cuMemcpyHtoDAsync: "
                                            f"CUDA_ERROR_{error} .*{word}"):
        transfer.wait()
    assert peer.query()["kv"]["state"] == "error"
    with pytest.raises(TransferError, match="WR_FLUSH_ERR"):
        peer.read(requests(READ, near, far, 0, 0, 64)).wait()
    peer.reset()
    peer.read(requests(READ, near, far, 0, 0, 65536)).wait()
    assert (data == host).all()


def python(code, **environment):
    """A process of its own, since a process opens one driver, and a lost GPU stays lost."""
    here = os.path.dirname(__file__)
    path = os.pathsep.join([os.path.dirname(here), here, *sys.path])
    text = textwrap.dedent("""
        import fake_cuda, kvio, numpy as np
        from kvio.errors import *
        fake_cuda.choose()
        fake = fake_cuda.FakeCuda(fake_cuda.build())

        def error(call, *arguments, **options):
            try:
                call(*arguments, **options)
            except KvioError as wrong:
                return type(wrong).__name__ + " " + str(wrong)
            return "none"
    """) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": path} | environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_gpu_that_is_lost_takes_nothing_else_with_it(fake_cuda):
    """An illegal address in somebody's kernel: what is in flight fails, the NIC says what has
    happened and closes, and a NIC in software goes on."""
    out = python("""
        from kvio.layout import READ, WR_DTYPE
        nic = kvio.Nic.open("cuda:0", copy="loop")
        pool = kvio.LayerPool(kvio.BlockLayout(1, 4, 1024), 4, memory=nic.device_memory(16384),
                              poison=True)
        ids = pool.alloc(2)
        near, far = nic.register(pool), nic.register(bytearray(16384))
        nic.listen("me")
        peer = nic.connect("me", classes=[kvio.KV])
        wrs = np.zeros(1, WR_DTYPE)
        wrs["opcode"], wrs["length"], wrs["lkey"], wrs["rkey"] = READ, 4096, near.key, far.key
        wrs["local_addr"], wrs["remote_addr"] = near.addr, far.addr
        peer.read(wrs).wait()
        fake.fail("", "ILLEGAL_ADDRESS", sticky=True)
        print(error(lambda: peer.read(wrs).wait()))
        print(error(lambda: peer.read(wrs).wait()))
        print(error(nic.register, bytearray(4096)))
        print(error(nic.device_memory, 64))
        print(error(kvio.Nic.open, "cuda:0"))
        import warnings
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            pool.free(ids)
        print(pool.num_free, [str(each.message)[:32] for each in seen])
        print(error(nic.deregister, near), error(peer.close), error(nic.close))
        soft = kvio.Nic.open("soft")
        a, b = soft.register(bytearray(64)), soft.register(bytearray(b"x" * 64))
        soft.listen("x")
        wrs["lkey"], wrs["rkey"], wrs["length"] = a.key, b.key, 64
        wrs["local_addr"], wrs["remote_addr"] = a.addr, b.addr
        there = soft.connect("x", classes=[kvio.KV])
        print(error(lambda: there.read(wrs).wait()), bytes(a.array[:3]))
        soft.close()
    """)
    first, second, register, memory, reopened, freed, closed, soft = out.splitlines()
    for line in first, register, memory, reopened:
        assert "ILLEGAL_ADDRESS" in line and "cuda:0" in line and \
            "only a new process" in line and "compute-sanitizer" in line, line
    assert first.startswith("TransferError") and "FATAL_ERR" in first
    assert second.startswith("TransferError") and reopened.startswith("BackendUnavailable")
    assert freed == "4 ['freed blocks could not be filled']"
    assert closed == "none none none" and soft == "none b'xxx'"


def test_drivers_that_are_too_old(fake_cuda):
    old = """
        fake.set(driver={driver})
        print(error(kvio.Nic.open, "cuda:0"{more}))
    """
    out = python(old.format(driver=11020, more=""))
    assert out.startswith("BackendUnavailable") and "11.2" in out and "newer" in out
    out = python(old.format(driver=12040, more=', copy="batch"') + """
        nic = kvio.Nic.open("cuda:0")
        print(nic.info()["copy"]["driver"], nic.info()["copy"]["ways"]["batch"])
        nic.close()
    """)
    refused, found = out.splitlines()
    assert refused.startswith("BackendUnavailable") and "12.8" in refused
    assert found.startswith("12.4 ") and "12.8" in found


def test_a_machine_without_a_gpu_or_a_driver(fake_cuda):
    out = python("""
        fake.set(devices=0)
        print(error(kvio.Nic.open, "cuda:0"))
    """)
    assert out.startswith("BackendUnavailable") and "soft" in out
    out = python("""
        import os
        os.environ["KVIO_CUDA_LIBRARY"] = "libnone-of-these.so.1"
        print(error(kvio.Nic.open, "cuda:0"))
        class Tensor:
            __cuda_array_interface__ = dict(data=(4096, False), shape=(64,), typestr="|u1")
        print(error(kvio.LayerPool, kvio.BlockLayout(1, 1, 64), 1, memory=Tensor()))
    """)
    nic, pool = out.splitlines()
    for line in nic, pool:
        assert line.startswith("BackendUnavailable") and "libnone-of-these" in line
