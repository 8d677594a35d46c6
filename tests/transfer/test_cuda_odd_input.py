"""What others' objects say of their memory and cannot be so, and indices, shapes and arguments that
are no such thing: InvalidArgument for each, and never what Python or C makes of it."""
import numpy as np
import pytest

from kvio.errors import InvalidArgument, TransferError
from kvio.layout import BlockLayout
from kvio.memory import LayerPool, Region
from kvio.spans import span_of
from kvio.transfer import KV, Nic


class Says:
    """An object whose interface says this."""

    def __init__(self, addr, **others):
        self.__cuda_array_interface__ = {"shape": (4096,), "typestr": "|u1", "version": 3,
                                         "data": (addr, False), "strides": None, **others}


@pytest.mark.parametrize("says", [
    {"shape": (-4,)}, {"shape": (-4, -4)}, {"typestr": "|V-8"}, {"shape": (2**70,)},
    {"data": (-5, False)}, {"data": (2**70, False)}, {"data": (2**64 - 8, False)}], ids=str)
def test_memory_that_no_memory_is(gpu, says):
    nic, (addr, _) = gpu.nic(), gpu.memory(4096, 1)
    assert span_of(Says(addr)).nbytes == 4096
    for take in nic.register, Region:
        with pytest.raises(InvalidArgument, match="no memory"):
            take(Says(addr, **says))


class OfHost:
    """An exporter of host memory that fails."""

    def __init__(self, wrong):
        self.wrong = wrong

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **options):
        raise self.wrong


class Interface:
    @property
    def __array_interface__(self):
        raise KeyError("gone")


@pytest.mark.parametrize("wrong", [KeyError("gone"), OSError(5, "gone"), AttributeError("gone")],
                         ids=lambda wrong: type(wrong).__name__)
def test_host_memory_that_is_not_lent(wrong):
    with pytest.raises(InvalidArgument, match="does not lend its host memory.*gone"):
        Region(OfHost(wrong))


def test_an_array_interface_that_raises():
    with Nic.open("soft") as nic, pytest.raises(InvalidArgument, match="does not say.*gone"):
        nic.register(Interface())


def test_indices_and_shapes_of_views(gpu):
    view = gpu.nic().device_memory(4096).view()
    for piece in slice("a", None), slice(1.5, 3), slice(None, None, 0), slice(None, None, -1):
        with pytest.raises(InvalidArgument, match="slices of ints without a step"):
            view[piece]
    for shape in (0, -1), (-1, -1), (-1, -1, 4096), (3, -1):
        with pytest.raises(InvalidArgument, match="cannot have the shape"):
            view.reshape(*shape)
    for shape in (-64, -64), (None,), ("a",), ((64, 64),):
        with pytest.raises(InvalidArgument, match="a length must be an int"):
            view.reshape(*shape)
    assert view.reshape(-1, 64).shape == (64, 64) and view[:0].reshape(-1).shape == (0,)
    with pytest.raises(BufferError, match="at most 8 dimensions"):
        view.reshape(*(1,) * 8, 4096).__dlpack__()


@pytest.mark.parametrize("on_gpu", [False, True])
def test_records_of_no_block_and_no_token(gpu, on_gpu):
    """Neither end of a pool is the other's neighbour."""
    memory = gpu.nic().device_memory(4096) if on_gpu else None
    pool = LayerPool(BlockLayout(2, 4, 64), 8, memory=memory)
    assert pool.records(np.int64(7), 3).shape == (2, 64)
    for block_id, offset in (-1, 0), (8, 0), (0, -1), (0, 4), ("a", 0), (0, None), (True, 0):
        with pytest.raises(InvalidArgument, match="must be an int"):
            pool.records(block_id, offset)


@pytest.mark.parametrize("name", ["queue_depth", "max_sge"])
def test_what_is_wrong_is_named(fake_cuda, name):
    for value in -1, 0, "a", None, 10**30, 2**21, 1.5:
        with pytest.raises(InvalidArgument, match=f"{name} must be an int, 1 to"):
            Nic.open("cuda:0", **{name: value})


def test_a_number_of_very_many_digits(fake_cuda):
    with pytest.raises(InvalidArgument, match="cuda:N") as refused:
        Nic.open("cuda:" + "1" * 5000)
    assert len(str(refused.value)) < 200


def test_a_stream_that_cannot_be_made_is_a_typed_error_of_connect(gpu, fake_cuda):
    """The call of the driver is named, nothing is left, and the next try works."""
    nic = gpu.nic()
    nic.listen("odd")
    before = fake_cuda.objects()
    for after in 0, 1:
        fake_cuda.fail("cuStreamCreateWithPriority", "OUT_OF_MEMORY", after=after)
        with pytest.raises(TransferError, match="cuda:0 cannot connect to cuda:0: .*"
                           "cuStreamCreateWithPriority.*OUT_OF_MEMORY"):
            nic.connect("odd", classes=[KV])
        assert fake_cuda.objects() == before
    nic.connect("odd", classes=[KV]).close()
