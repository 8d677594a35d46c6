"""GPU memory with the verbs provider, on a fake libcuda and a stand-in for libibverbs: registered
by dma-buf or else by nvidia-peermem, moved without the CPU, and refused in words."""
import ctypes
import errno
import gc
import os
import weakref

import numpy as np
import pytest

from kvio.errors import InvalidArgument, TransferError
from kvio.layout import READ, WRITE
from kvio.transfer import Access, Nic
from nics import pattern, requests


class Gpu:
    """Memory that the CPU cannot reach, in segments one after another, and its bytes."""

    def __init__(self, fake, sizes, at=0, context=0):
        self.fake, self.addr, self.places = fake, 0, []
        place = self.addr = at + fake.cu.fake_cuda_reserve(ctypes.c_uint64(at + sum(sizes)))
        for size in sizes:
            fake.cu.fake_cuda_segment(ctypes.c_uint64(place), ctypes.c_uint64(size),
                                      ctypes.c_void_p(context))
            self.places.append((place, size))
            place += size

    def release(self):
        for place, _ in self.places:
            self.fake.cu.fake_cuda_release(ctypes.c_uint64(place))

    @property
    def bytes(self):
        return np.concatenate([self.fake.bytes_at(*place) for place in self.places])

    def fill(self, data):
        for place, size in self.places:
            self.fake.bytes_at(place, size)[:] = data[place - self.addr:][:size]

    def tensor(self, start=0, stop=None, **more):
        """An object with `__cuda_array_interface__`."""
        nbytes = (sum(size for _, size in self.places) if stop is None else stop) - start
        return Tensor({"data": (self.addr + start, False), "shape": (nbytes,), "typestr": "|u1",
                       "strides": None, "version": 3} | more)


class Tensor:
    def __init__(self, interface):
        self.__cuda_array_interface__ = interface


def exported():
    """How many descriptors of GPU memory this process has."""
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(link) and "memfd:gpu" in os.readlink(link) for link in links)


@pytest.fixture
def gpu(standin, fake_cuda):
    """`gpu(sizes, ...)`: a `Gpu` in a context that is not current."""
    fake, made, before = fake_cuda, [], exported()
    fake.do("cuInit", 0)                        # an application did
    context = fake.new("cuDevicePrimaryCtxRetain", 0)

    def gpu(*sizes, mapped=False, **options):
        made.append(Gpu(fake, sizes, context=0 if mapped else context, **options))
        return made[-1]
    gpu.exports = fake.exports
    yield gpu
    assert fake.depth() == 0                    # contexts were left as they were found
    for each in made:
        each.release()
    assert exported() == before                 # nor is a dma-buf held open
    fake.do("cuDevicePrimaryCtxRelease_v2", 0)


def moves(pair, memory, region, offset=0):
    """Both ways, all of the region; `offset`: where it begins in the memory."""
    data, nbytes = memory.bytes.copy(), region.nbytes
    pair.peer.post(requests(READ, region, pair.remote, 0, 77, nbytes)).wait()
    data[offset:offset + nbytes] = pair.theirs[77:77 + nbytes]
    assert (memory.bytes == data).all()
    memory.fill(pattern(len(data), 8))
    pair.peer.post(requests(WRITE, region, pair.remote, 0, 5000, nbytes)).wait()
    assert (pair.theirs[5000:5000 + nbytes] == memory.bytes[offset:offset + nbytes]).all()


@pytest.mark.parametrize("at, start, stop", [(0, 0, None), (0, 12345, 100000), (256, 0, None),
                                             (256, 3, 4001)])
def test_an_allocation_is_exported_once_for_all_rails_and_slices(standin, connect, gpu, at, start,
                                                                 stop, monkeypatch):
    """Also a part of it, and one that begins within a page: by its base and an offset."""
    monkeypatch.setenv("KVIO_IB_SLICE_BYTES", "16384")
    pair = connect(near="standin0,standin1,standin2")
    memory, before = gpu(200_000, at=at), standin.objects()
    region = pair.a.register(memory.tensor(start, stop))
    slices = -(-region.nbytes // 16384)
    assert gpu.exports() == (1, 1)
    assert standin.count("reg_dmabufs") == 3 * slices
    assert region.access == sum(Access) and region.array is None
    moves(pair, memory, region, start)
    pair.a.deregister(region)
    assert standin.objects() == before


@pytest.mark.parametrize("pcie", [1, 0])
def test_the_mapping_by_pcie_is_asked_for_first(connect, gpu, fake_cuda, pcie):
    fake_cuda.set(pcie=pcie)
    pair, memory = connect(), gpu(65536)
    moves(pair, memory, pair.a.register(memory.tensor()))
    assert gpu.exports() == (1, pcie)


@pytest.mark.parametrize("start, stop, exports", [
    (0, None, 5), (0, 65536 * 2 + 5, 3), (65536, None, 4), (70000, 100000, 1)])
def test_mapped_segments_are_exported_one_by_one(connect, gpu, start, stop, exports):
    pair, memory = connect(), gpu(*[65536] * 5, mapped=True)
    region = pair.a.register(memory.tensor(start, stop))
    assert gpu.exports()[0] == exports
    moves(pair, memory, region, start)


@pytest.mark.parametrize("sizes, start", [((65536,) * 3, 4096), ((65536, 32768, 65536), 0),
                                          ((32768, 65536), 0)])
def test_segments_that_cannot_be_slices_are_refused(connect, gpu, sizes, start):
    pair, memory = connect(), gpu(*sizes, mapped=True)
    with pytest.raises(TransferError, match="physical segments.*expandable_segments") as failure:
        pair.a.register(memory.tensor(start))
    assert failure.value.errno == errno.EXDEV and gpu.exports() == (0, 0)


@pytest.mark.parametrize("driver, nic", [(0, 1), (1, 0)])
@pytest.mark.parametrize("peermem", [1, 0])
def test_without_dma_buf_it_is_peermem_and_without_both_they_are_named(standin, connect, gpu,
                                                                      fake_cuda, driver, nic,
                                                                      peermem):
    fake_cuda.set(dma_buf=driver)
    standin.set(dmabuf=nic, peermem=peermem)
    pair, memory = connect(near="standin0,standin1"), gpu(65536)
    before = standin.objects()
    if peermem:
        registered = standin.count("reg_mrs")
        region = pair.a.register(memory.tensor())
        assert standin.count("reg_mrs") == registered + 2
        pair.a.deregister(region)
    else:
        with pytest.raises(TransferError, match="dma-buf.*nor nvidia-peermem") as failure:
            pair.a.register(memory.tensor())
        assert failure.value.errno == errno.EFAULT
    assert standin.objects() == before


def test_a_rail_that_refuses_the_dma_buf_leaves_nothing(standin, connect, gpu):
    pair, memory = connect(near="standin0,standin1"), gpu(65536)
    before = standin.objects()
    standin.refuse("reg_dmabuf_mr", errno.ENOMEM, after=1)
    with pytest.raises(TransferError, match="GPU"):
        pair.a.register(memory.tensor())
    assert standin.objects() == before
    moves(pair, memory, pair.a.register(memory.tensor()))


def test_a_cuda_that_nobody_initialised_is_not_asked(standin, connect, gpu, fake_cuda):
    fake_cuda.set(uninitialised=1)
    pair, memory = connect(), gpu(65536)
    with pytest.raises(TransferError):
        pair.a.register(memory.tensor())        # not the host's either
    pair.a.register(np.zeros(64, np.uint8))
    assert gpu.exports() == (0, 0) and standin.count("reg_dmabufs") == 0
    fake_cuda.set(uninitialised=0)


def test_soft_nics_refuse_it(gpu):
    memory = gpu(4096)
    with Nic.open("soft", clock="virtual") as nic, \
            pytest.raises(InvalidArgument, match="GPU's memory.*verbs"):
        nic.register(memory.tensor())


@pytest.mark.parametrize("wrong, why", [
    (dict(shape=(2, 8), strides=(16, 1)), "contiguous"), (dict(shape=(0,)), "empty"),
    (dict(data=(0, False)), "empty"), (dict(data=None), "does not say"),
    (dict(typestr="|uX"), "does not say"), (dict(shape="ab"), "does not say")])
def test_what_is_not_one_piece_of_memory_is_refused(connect, gpu, wrong, why):
    pair, memory = connect(), gpu(4096)
    with pytest.raises(InvalidArgument, match=why):
        pair.a.register(memory.tensor(**wrong))


def test_read_only_and_strided_alike(connect, gpu):
    pair, memory = connect(), gpu(4096)
    fixed = memory.tensor(data=(memory.addr, True))
    assert pair.a.register(fixed).access == Access.REMOTE_READ
    with pytest.raises(InvalidArgument, match="read-only"):
        pair.a.register(fixed, Access.LOCAL_WRITE)
    whole = memory.tensor(shape=(4, 1, 256), typestr="<f4", strides=(1024, 7, 4))
    assert pair.a.register(whole).nbytes == 4096


class DlManaged(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64), ("device", ctypes.c_int32 * 2),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
                ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
                ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class DlTensor:
    """Two rows of bfloat16, by DLPack alone."""

    def __init__(self, addr, columns, strides=None):
        self.shape = (ctypes.c_int64 * 2)(2, columns)
        self.strides = (ctypes.c_int64 * 2)(*strides) if strides else None
        self.managed = DlManaged(addr - 32, (2, 0), 2, 4, 16, 1, ctypes.addressof(self.shape),
                                 ctypes.addressof(self.strides) if strides else None, 32)

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **_):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
        return new(ctypes.addressof(self.managed), b"dltensor", None)


def test_memory_that_dlpack_lends(connect, gpu):
    pair, memory = connect(), gpu(65536)
    tensor = DlTensor(memory.addr + 64, 100)
    alive = weakref.ref(tensor)
    region = pair.a.register(tensor)
    del tensor
    gc.collect()
    assert alive() is not None                  # the registration keeps it
    assert (region.addr, region.nbytes) == (memory.addr + 64, 400)
    moves(pair, memory, region, 64)
    pair.a.deregister(region)
    del region
    gc.collect()
    assert alive() is None
    with pytest.raises(InvalidArgument, match="contiguous"):
        pair.a.register(DlTensor(memory.addr, 100, (1, 2)))
    pair.a.register(DlTensor(memory.addr, 100, (100, 1)))
