"""Regions hold their owners; pools hand out runs and never give away what is in use."""
import ctypes
import faulthandler
import fcntl
import gc
import mmap
import os
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvio.errors import Busy, Closed, InvalidArgument, OutOfBlocks
from kvio.layout import BlockLayout
from kvio.memory import POISON, BlockPool, LayerPool, Region
from kvio.pages import anonymous, numa_nodes

LAYOUT = BlockLayout(3, 4, 24)


def test_a_region_keeps_its_owner_from_being_resized():
    owner = bytearray(100)
    region = Region(owner)
    with pytest.raises(BufferError):
        owner.append(0)
    region.array[7] = 9
    assert owner[7] == 9 and region.nbytes == 100
    del region
    owner.append(0)                                     # released with the region


@pytest.mark.parametrize("memory", [
    b"read only", np.zeros(0, np.uint8), np.zeros((4, 4))[:, ::2], "text", 7, None, [1, 2]])
def test_what_is_no_writable_contiguous_buffer_is_refused(memory):
    with pytest.raises(InvalidArgument):
        Region(memory)


def test_read_only_memory_makes_a_read_only_region():
    region = Region(b"abc", writable=False)
    assert not region.writable and not region.array.flags.writeable


def test_device_memory_is_named_as_such():
    class Device:
        __cuda_array_interface__ = {}
    with pytest.raises(InvalidArgument, match="does not say where its GPU memory is"):
        Region(Device())


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.uint8, "V8"])
def test_arrays_of_any_type_are_regions(dtype):
    array = np.zeros((3, 5), dtype)
    assert Region(array).nbytes == array.nbytes
    assert Region(array).addr == array.ctypes.data


def test_pool_geometry_and_views_are_views():
    pool = BlockPool(LAYOUT, 5)
    assert pool.block_stride == 4096 and pool.region.addr % 4096 == 0
    assert pool.full(2).shape == (3, 4, 24) and pool.layer(2, 1).shape == (4, 24)
    assert np.shares_memory(pool.full(2), pool.layer(2, 1))
    pool.layer(2, 1)[:] = 7
    assert (pool.full(2)[1] == 7).all() and not pool.full(2)[0].any()
    at = pool.region.addr + 2 * pool.block_stride + LAYOUT.layer_offsets[1]
    assert ctypes.string_at(at, 96) == b"\x07" * 96


def test_unequal_layers_are_flat():
    layout = BlockLayout(2, 4, [8, 24])
    pool = BlockPool(layout, 2)
    assert pool.full(0).shape == (128,) and pool.layer(1, 1).shape == (4, 24)
    with pytest.raises(InvalidArgument):
        LayerPool(layout, 2)


def test_a_layer_pool_keeps_each_layer_together():
    pool = LayerPool(LAYOUT, 6)
    side, view = pool.side(5), pool.layer(2)
    assert view.shape == (6, 4, 24) and side.key == 5
    view[4] = 9
    at = side.base + side.layer_offsets[2] + 4 * side.block_stride
    assert ctypes.string_at(at, 96) == b"\x09" * 96


def test_memory_of_the_caller():
    page = mmap.mmap(-1, 3 * 4096)
    pool = BlockPool(LAYOUT, 3, memory=page)
    pool.full(1)[:] = 5
    assert page[4096] == 5
    with pytest.raises(InvalidArgument, match="need"):
        BlockPool(LAYOUT, 4, memory=page)
    with pytest.raises(InvalidArgument, match="4 KiB page"):
        BlockPool(LAYOUT, 2, memory=memoryview(page)[8:])
    with pytest.raises(InvalidArgument, match="read-only"):
        BlockPool(LAYOUT, 1, memory=bytes(4096))


def test_a_shared_pool_is_sealed():
    with BlockPool(LAYOUT, 2, shared=True) as pool:
        seals = fcntl.fcntl(pool.fd, 1034)              # F_GET_SEALS
        assert seals == 0x1 | 0x2 | 0x4 | 0x10
        with pytest.raises(OSError):
            os.ftruncate(pool.fd, 4096)
        with pytest.raises(PermissionError):
            mmap.mmap(pool.fd, 0, mmap.MAP_SHARED)      # nobody else maps it writable
        other = mmap.mmap(pool.fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        pool.full(1)[:] = 8
        assert other[4096] == 8


def test_forked_children_do_not_inherit_pool_memory():
    pool = BlockPool(LAYOUT, 1)
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        ctypes.string_at(pool.region.addr, 1)           # unmapped: SIGSEGV
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == 11


def test_huge_pages_fall_back_aloud(recwarn):
    memory = anonymous(1 << 20, hugepages=True)
    free = int(open("/proc/sys/vm/nr_hugepages").read())
    assert len(memory) >= 1 << 20
    assert free or any("huge pages" in str(w.message) for w in recwarn)


def vm_flags(addr):
    """What the kernel says of the mapping at this address."""
    inside = False
    with open("/proc/self/smaps") as file:
        lines = file.readlines()
    for line in lines:
        first = line.split()[0]
        if "-" in first and ":" not in first:
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= addr < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("not mapped")


def test_pools_ask_for_transparent_huge_pages_quietly(recwarn):
    layout = BlockLayout(num_layers=1, block_tokens=1, bytes_per_token=1 << 20)
    assert "hg" in vm_flags(BlockPool(layout, 4).region.addr)
    assert "nh" in vm_flags(BlockPool(layout, 4, hugepages=False).region.addr)
    assert not recwarn.list, recwarn.list[0].message
    assert "hg" not in vm_flags(BlockPool(LAYOUT, 1).region.addr)       # a page or two


def test_huge_pages_of_a_shared_pool_are_asked_for_aloud(recwarn):
    with open("/sys/kernel/mm/transparent_hugepage/shmem_enabled") as file:
        knob = file.read()
    with BlockPool(LAYOUT, 1, shared=True, hugepages=True):
        refused = "[never]" in knob or "[deny]" in knob
        assert any("shmem_enabled" in str(w.message) for w in recwarn) == refused
    with pytest.raises(InvalidArgument, match="numa_node do not apply"):
        BlockPool(LAYOUT, 1, memory=mmap.mmap(-1, 4096), numa_node=0)


@pytest.mark.parametrize("shared", [False, True])
def test_a_pool_lies_on_the_node_that_was_asked_for(shared):
    if not os.path.isdir("/sys/devices/system/node"):
        pytest.skip("a kernel without NUMA")
    node = numa_nodes()[-1]
    pool = BlockPool(LAYOUT, 3, shared=shared, numa_node=node)
    pool.full(2)[:] = 1
    libc, mode = ctypes.CDLL(None, use_errno=True), ctypes.c_int(-1)
    mask = (ctypes.c_ulong * 16)()
    get_mempolicy, move_pages = (239, 279) if os.uname().machine == "x86_64" else (236, 239)
    by_address = 2
    assert libc.syscall(get_mempolicy, ctypes.byref(mode), mask, ctypes.c_ulong(1024),
                        ctypes.c_void_p(pool.region.addr), by_address) == 0
    assert mode.value == 2 and mask[node // 64] == 1 << node % 64       # MPOL_BIND
    page = ctypes.c_void_p(pool.full(2).__array_interface__["data"][0])
    where = ctypes.c_int(-1)
    assert libc.syscall(move_pages, 0, ctypes.c_ulong(1), ctypes.byref(page), None,
                        ctypes.byref(where), 0) == 0
    assert where.value == node


def test_a_node_that_is_not_there():
    for wrong in (999, -1, "0"):
        with pytest.raises(InvalidArgument, match="numa_node|NUMA node"):
            BlockPool(LAYOUT, 1, numa_node=wrong)


def test_alloc_prefers_the_smallest_run_that_fits():
    pool = BlockPool(LAYOUT, 12)
    ids = pool.alloc(12)
    pool.free(ids[[0, 1, 2, 3, 6, 7, 9]])               # runs of 4, 2 and 1
    assert pool.alloc(2).tolist() == [6, 7]
    assert pool.alloc(1).tolist() == [9]
    assert pool.alloc(3).tolist() == [0, 1, 2]
    pool.free(ids[[6, 7, 9]])
    assert sorted(pool.alloc(4).tolist()) == [3, 6, 7, 9]   # no run: the longest first
    with pytest.raises(OutOfBlocks):
        pool.alloc(1)


def test_a_freed_block_waits_for_its_transfers():
    pool = BlockPool(LAYOUT, 2, poison=True)
    ids = pool.alloc(1)
    pool.full(ids[0])[:] = 3
    pool.pin(ids)
    pool.pin(ids)
    pool.free(ids)
    assert pool.num_free == 1 and pool.epoch[ids[0]] == 0
    assert pool.alloc(1)[0] != ids[0]                   # not handed out
    with pytest.raises(Busy, match="1 blocks"):
        pool.close()
    with pytest.raises(InvalidArgument):
        pool.pin(ids)                                   # nor to a new transfer
    pool.unpin(ids)
    assert (pool.full(ids[0]) == 3).all()
    pool.unpin(ids)
    assert pool.num_free == 1 and pool.epoch[ids[0]] == 1
    assert (pool.full(ids[0]) == POISON).all()


@pytest.mark.parametrize("ids", [[-1], [4], [0.5], [[0]], ["0"]])
def test_wrong_ids_are_refused(ids):
    pool = BlockPool(LAYOUT, 4)
    pool.alloc(4)
    with pytest.raises(InvalidArgument):
        pool.free(ids)
    assert pool.num_free == 0


def test_freeing_twice_is_refused_and_changes_nothing():
    pool = BlockPool(LAYOUT, 4)
    ids = pool.alloc(2)
    with pytest.raises(InvalidArgument):
        pool.free([ids[0], ids[0]])
    pool.free(ids)
    with pytest.raises(InvalidArgument):
        pool.free(ids)
    assert pool.num_free == 4
    pool.close()
    with pytest.raises(Closed):
        pool.alloc(1)


@pytest.mark.parametrize("layout, num", [(None, 1), (LAYOUT, 0), (LAYOUT, -1), (LAYOUT, 1.5)])
def test_impossible_pools_are_refused(layout, num):
    with pytest.raises(InvalidArgument):
        BlockPool(layout, num)


class PoolMachine(RuleBasedStateMachine):
    """Against a model: held, pinned and freed-while-pinned blocks."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(LAYOUT, 8, poison=True)
        self.held, self.pins, self.leaving = set(), [], set()

    @rule(count=st.integers(0, 9))
    def alloc(self, count):
        busy = self.held | self.leaving
        if count > 8 - len(busy):
            with pytest.raises(OutOfBlocks):
                self.pool.alloc(count)
            return
        ids = set(self.pool.alloc(count).tolist())
        assert len(ids) == count and not ids & busy
        for i in ids:
            assert (self.pool.full(i) == POISON).all()
            self.pool.full(i)[:] = i
        self.held |= ids

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def pin(self, data):
        ids = data.draw(st.lists(st.sampled_from(sorted(self.held)), min_size=1))
        self.pool.pin(np.array(ids))
        self.pins.append(ids)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        ids = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.pool.unpin(np.array(ids))
        self.leaving &= {i for pin in self.pins for i in pin}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        ids = data.draw(st.sets(st.sampled_from(sorted(self.held)), min_size=1))
        self.pool.free(sorted(ids))
        self.held -= ids
        self.leaving |= ids & {i for pin in self.pins for i in pin}

    @invariant()
    def nothing_in_use_is_free_or_overwritten(self):
        assert self.pool.num_free == 8 - len(self.held | self.leaving)
        for i in self.held | self.leaving:
            assert (self.pool.full(i) == i).all()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_numbers_that_are_no_ints_are_refused():
    pool = BlockPool(BlockLayout(1, 1, 16), 4)
    for wrong in (1.5, "1", None):
        with pytest.raises(InvalidArgument):
            pool.alloc(wrong)
        with pytest.raises(InvalidArgument):
            pool.full(wrong)
    with pytest.raises(InvalidArgument):
        pool.free([[1], [1, 2]])


def test_blocks_may_be_freed_by_the_garbage_collector():
    """It runs whenever it likes, also while this very thread is inside the pool."""
    pool = BlockPool(BlockLayout(1, 1, 16), 4096)

    class Sequence:
        def __init__(self):
            self.ids, self.cycle = pool.alloc(1), self

        def __del__(self):
            pool.free(self.ids)

    def work():
        for _ in range(3000):
            Sequence()
        done.append(True)
    done, before = [], gc.get_threshold()
    gc.set_threshold(1)
    try:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(30)
    finally:
        gc.set_threshold(*before)
    assert done
    gc.collect()
    assert pool.num_free == 4096


def test_what_ends_a_block_is_not_hidden_by_blocks_in_flight():
    """Ctrl-C in the midst of a transfer stays Ctrl-C; without an error it is Busy."""
    with pytest.raises(KeyboardInterrupt), BlockPool(LAYOUT, 2) as pool:
        pool.pin(pool.alloc(1))
        raise KeyboardInterrupt
    with pytest.raises(Busy), BlockPool(LAYOUT, 2) as pool:
        pool.pin(pool.alloc(1))
