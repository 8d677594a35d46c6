"""Regions and pools: who owns which bytes, and when they may be given to someone else.

`Region` is a span of memory, of the host or of a GPU, whose owner is held for as long as the region
lives (the export of a host buffer makes resizing impossible). `BlockPool` and `LayerPool` hand out
blocks of one region. A block that is
freed while a transfer still touches it waits, out of everybody's reach, until that transfer has
drained; then its epoch rises and it is free.
"""
import os
import threading
import warnings
import weakref

import numpy as np

from kvio._ext.block import BlockStates
from kvio.errors import Busy, Closed, InvalidArgument, KvioError, OutOfBlocks, checked_int
from kvio.layout import PAGE, BlockLayout, Side, any_array
from kvio.pages import (advise_huge, anonymous, bind_to_node, named_shm, release_shm,
                        sealed_memfd)
from kvio.spans import DeviceView, check_there, ordinal_of, span_of

__all__ = ["BlockAllocator", "BlockPool", "LayerPool", "POISON", "Region", "has_twins"]

POISON = 0xA5               # fills freed blocks, so that stale bytes cannot pass for KV
DEVICE_ALIGN = 256          # of a device pool's start: what CUDA's allocators give


class Region:
    """A span of memory: `addr`, `nbytes`, `writable`, and `array`, its uint8 view, or None if it is
    a GPU's; `device` is that ("cuda:0"), or None.

    Takes whatever has the buffer protocol (numpy, bytearray, mmap, ctypes), lends its host memory
    by DLPack (a torch tensor on the CPU, pinned or not; of a type that numpy knows:
    `tensor.view(torch.uint8)` for bfloat16), or says by `__cuda_array_interface__` or DLPack where
    its GPU memory is; if it is C-contiguous.
    """

    __slots__ = ("array", "owner", "addr", "nbytes", "writable", "_ordinal", "__weakref__")

    def __init__(self, memory, *, writable: bool = True):
        self._ordinal = None
        span = span_of(memory)
        if span is not None:
            if writable and not span.writable:
                raise InvalidArgument("this GPU memory is read-only; pass a writable tensor (for "
                                      "JAX, whose arrays are not, take nic.device_memory and let "
                                      "jax.dlpack.from_dlpack see it)")
            self.array, self.owner, self.addr, self.nbytes = None, span, span.addr, span.nbytes
            self.writable = span.writable and writable
            return
        try:
            array = np.frombuffer(_lent(memory), np.uint8)
        except InvalidArgument:
            raise
        except (ValueError, TypeError, BufferError) as wrong:
            raise InvalidArgument(f"a region needs one contiguous, non-empty buffer: {wrong}") \
                from None
        if array.nbytes == 0:
            raise InvalidArgument("the buffer is empty")
        if writable and not array.flags.writeable:
            raise InvalidArgument("the buffer is read-only; pass a writable one")
        self.array, self.owner = array, memory
        self.addr = array.__array_interface__["data"][0]
        self.nbytes, self.writable = array.nbytes, bool(array.flags.writeable and writable)

    def __repr__(self):
        return f"<{type(self).__name__} {self.nbytes} bytes at {self.addr:#x}>"

    @property
    def device(self) -> str | None:
        """The GPU whose memory this is, "cuda:0"; None: the host's."""
        return None if self.array is not None else f"cuda:{self.ordinal}"

    @property
    def ordinal(self) -> int:
        """CUDA's number of that GPU. BackendUnavailable, InvalidArgument: nobody knows it."""
        if self._ordinal is None:
            self._ordinal = ordinal_of(self.owner)
        return self._ordinal

    def view(self):
        """All bytes: uint8 `[nbytes]`, an array or a DeviceView."""
        if self.array is not None:
            return self.array
        return DeviceView(self.addr, (self.nbytes,), None, self.ordinal, self)


def _lent(memory):
    """Something with the buffer protocol for the same bytes."""
    if not hasattr(memory, "__dlpack__") or isinstance(memory, np.ndarray):
        return memory
    try:
        return np.from_dlpack(memory)
    except Exception as wrong:              # another library's, about its own tensor
        raise InvalidArgument("this object does not lend its host memory by DLPack: "
                              f"{wrong!r}") from None


# What `alloc` and `close` call before they give up: `completion.reap`, which stands above us, looks
# at transfers that have drained and that nobody has waited for.
last_resorts: list = []


def _look_again():
    for look in last_resorts:
        look()


class BlockAllocator:
    """Which of `num_blocks` blocks are free, held, or freed but still touched by a transfer."""

    def __init__(self, num_blocks: int):
        self.num_blocks = checked_int("num_blocks", num_blocks, 1, 1 << 31)
        self.epoch = np.zeros(self.num_blocks, np.uint64)
        self._free = np.ones(self.num_blocks, bool)
        self._pins = np.zeros(self.num_blocks, np.int32)
        self._leaving = np.zeros(self.num_blocks, bool)     # freed, but still pinned
        self._states = BlockStates(self._free.view(np.uint8), self._leaving.view(np.uint8),
                                   self._pins)
        self._lock = threading.RLock()      # a __del__ that frees may run inside `alloc`
        self._closed = False

    @property
    def num_free(self) -> int:
        """Blocks that `alloc` could hand out now."""
        return int(np.count_nonzero(self._free))

    def alloc(self, num_blocks: int) -> np.ndarray:
        """Block ids (int64), adjacent where possible: the smallest run that fits, else the
        longest runs. OutOfBlocks if there are too few; then nothing is handed out."""
        num_blocks = checked_int("num_blocks", num_blocks, 0)
        if self.num_free < num_blocks and self._leaving.any():
            _look_again()
        with self._lock:
            self._check_open()
            free = np.flatnonzero(self._free)
            if len(free) < num_blocks:
                raise OutOfBlocks(f"{num_blocks} blocks asked for, {len(free)} of "
                                  f"{self.num_blocks} free; free some or make a larger pool")
            ids = _choose(free, num_blocks)
            self._free[ids] = False
        return ids

    def free(self, block_ids) -> None:
        """Give blocks back. Those that a transfer still touches follow when it has drained."""
        ids = self.check_ids(block_ids)
        with self._lock:
            if has_twins(ids):
                raise InvalidArgument("a block is freed twice in one call")
            stray = self._free[ids] | self._leaving[ids]
            if stray.any():
                raise InvalidArgument("blocks were freed that are not allocated (freed twice?): "
                                      f"{_few(ids[stray])}")
            busy = self._pins[ids] > 0
            self._leaving[ids[busy]] = True
            self._release(ids[~busy])

    def pin(self, block_ids: np.ndarray) -> None:
        """A transfer begins to touch these blocks (an id may occur more than once)."""
        with self._lock:
            self._check_open()
            if not self._states.pin(block_ids):
                stray = self._free[block_ids] | self._leaving[block_ids]
                raise InvalidArgument("a transfer names blocks that are not allocated (or were "
                                      f"freed): {_few(block_ids[stray])}; take them with alloc")

    def unpin(self, block_ids: np.ndarray) -> None:
        """A transfer that touched these blocks has drained."""
        with self._lock:
            if self._states.unpin(block_ids):
                leaving = block_ids[self._leaving[block_ids]]
                self._release(np.unique(leaving[self._pins[leaving] == 0]))

    def _release(self, ids):
        if len(ids):
            self._clear(ids)
            self.epoch[ids] += np.uint64(1)
            self._leaving[ids] = False
            self._free[ids] = True

    def _clear(self, ids):
        """Called before blocks become free again."""

    def check_ids(self, block_ids) -> np.ndarray:
        """`block_ids` as a contiguous int64 array; InvalidArgument unless all lie in the pool."""
        ids = any_array(block_ids, "block ids")
        if ids.size == 0:
            return np.empty(0, np.int64)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise InvalidArgument(f"block ids must be ints in one dimension, not {ids.dtype} of "
                                  f"shape {ids.shape}")
        if int(ids.min()) < 0 or int(ids.max()) >= self.num_blocks:
            raise InvalidArgument(f"block ids must lie between 0 and {self.num_blocks - 1}; got "
                                  f"{int(ids.min())} to {int(ids.max())}")
        return np.ascontiguousarray(ids, np.int64)

    def _check_open(self):
        if self._closed:
            raise Closed("the pool is closed")

    def close(self) -> None:
        """Refuse further use. Busy while a transfer touches a block; views keep the memory."""
        if self._pins.any():
            _look_again()
        with self._lock:
            if self._pins.any():
                raise Busy(f"{int(np.count_nonzero(self._pins))} blocks are being transferred: "
                           "wait for the transfers or cancel them, then close")
            self._closed = True

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            self.close()
        except Busy:                                # what is in flight keeps the memory itself
            if kind is None:
                raise                               # else what ended the block says more

    def __repr__(self):
        return f"<{type(self).__name__} {self.num_free} of {self.num_blocks} blocks free>"


class BlockPool(BlockAllocator):
    """`num_blocks` Full Blocks in one region, `block_stride` bytes apart (whole 4 KiB pages).

    `shared=True` backs it by a sealed memfd (`pool.fd`), `named=True` by a file in /dev/shm
    (`pool.shm_path`; what 3FS reads and writes without a copy), `memory=` by memory of the
    caller's, as `Region` takes it, that starts on a 4 KiB page: block i lies at
    `i * layout.stride`. `poison=True` fills blocks with 0xA5 when they are freed. `hugepages` and
    `numa_node` as in `kvio.pages.anonymous`.

    Memory of a GPU (`pool.device` is "cuda:0") has to start at a multiple of 256 bytes. The CPU
    does not see it: `full` and `layer` return a `DeviceView`, which other libraries take. NICs
    move its blocks; a store does not.
    """

    def __init__(self, layout: BlockLayout, num_blocks: int, *, shared: bool = False,
                 named: bool = False, memory=None, hugepages: bool | None = None,
                 numa_node: int | None = None, poison: bool = False):
        super().__init__(num_blocks)
        self.layout, self.block_stride = _checked(layout), layout.stride
        if memory is not None and (shared or named or hugepages or numa_node is not None):
            raise InvalidArgument("memory= brings its own pages: shared, named, hugepages and "
                                  "numa_node do not apply")
        if named and (shared or hugepages or numa_node is not None):
            raise InvalidArgument("a named pool is a file in /dev/shm: shared, hugepages and "
                                  "numa_node do not apply")
        nbytes, self.fd, self._poison = self.num_blocks * self.block_stride, -1, poison
        self.shm_path, self._unlink = None, None
        if named:
            memory, self.shm_path, fd = named_shm(nbytes)
            self._unlink = weakref.finalize(self, release_shm, self.shm_path, fd, os.getpid())
        elif shared:
            memory, self.fd = sealed_memfd(nbytes)
            if hugepages:
                advise_huge(memory, hugepages, "shmem_enabled")
            bind_to_node(memory, numa_node)
        elif memory is None:
            memory = anonymous(nbytes, hugepages, numa_node)
        self.region = Region(memory)
        if self.region.nbytes < nbytes:
            raise InvalidArgument(f"{num_blocks} blocks need {nbytes} bytes, the memory has "
                                  f"{self.region.nbytes}")
        _check_start(self.region, PAGE)
        self._rows = self.region.view()[:nbytes].reshape(self.num_blocks, self.block_stride)
        if poison:
            self._rows.fill(POISON)

    @property
    def device(self) -> str | None:
        """The GPU whose memory this is, "cuda:0"; None: the host's."""
        return self.region.device

    def side(self, key: int = 0) -> Side:
        """This pool as one end of a transfer; `key` is its region's key at the NIC."""
        return Side(self.region.addr, self.block_stride, self.layout.layer_offsets[:-1], key)

    def full(self, block_id: int) -> np.ndarray:
        """A view of a Full Block: uint8 `[num_layers, block_tokens, bytes]`, or `[nbytes]` when
        layers differ."""
        flat = self._rows[self._one(block_id), :self.layout.full_block_nbytes]
        if not self.layout.is_uniform:
            return flat
        return flat.reshape(self.layout.num_layers, self.layout.block_tokens, -1)

    def layer(self, block_id: int, layer: int) -> np.ndarray:
        """A view of a Layer Block: uint8 `[block_tokens, bytes]`."""
        layer = checked_int("layer", layer, 0, self.layout.num_layers - 1)
        start, stop = self.layout.layer_offsets[layer:layer + 2]
        return self._rows[self._one(block_id), start:stop].reshape(self.layout.block_tokens, -1)

    def _one(self, block_id):
        self._check_open()
        return checked_int("block_id", block_id, 0, self.num_blocks - 1)

    def _clear(self, ids):
        if self._poison:
            _poison(self._rows, False, ids)

    def close(self) -> None:
        super().close()
        if self._unlink:
            self._unlink()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class LayerPool(BlockAllocator):
    """`num_blocks` blocks kept layer by layer, as attention kernels want them in HBM: all Layer
    Blocks of layer 0, then all of layer 1, ... `memory` of a GPU: see `BlockPool`."""

    def __init__(self, layout: BlockLayout, num_blocks: int, *, memory=None, poison: bool = False):
        super().__init__(num_blocks)
        self.layout, self._poison = _checked(layout), poison
        if not layout.is_uniform:
            raise InvalidArgument("a LayerPool needs layers of equal size; use a BlockPool")
        self.block_stride = layout.layer_block_nbytes(0)
        nbytes = layout.num_layers * self.num_blocks * self.block_stride
        self.region = Region(anonymous(nbytes) if memory is None else memory)
        if self.region.nbytes < nbytes:
            raise InvalidArgument(f"{num_blocks} blocks need {nbytes} bytes, the memory has "
                                  f"{self.region.nbytes}")
        _check_start(self.region, 1)
        self._rows = self.region.view()[:nbytes].reshape(
            layout.num_layers, self.num_blocks, layout.block_tokens, -1)
        if poison:
            self._rows.fill(POISON)

    @property
    def device(self) -> str | None:
        """The GPU whose memory this is, "cuda:0"; None: the host's."""
        return self.region.device

    def side(self, key: int = 0) -> Side:
        """This pool as one end of a transfer; `key` is its region's key at the NIC."""
        step = self.num_blocks * self.block_stride
        return Side(self.region.addr, self.block_stride,
                    tuple(layer * step for layer in range(self.layout.num_layers)), key)

    def layer(self, layer: int) -> np.ndarray:
        """A view of all Layer Blocks of a layer: uint8 `[num_blocks, block_tokens, bytes]`."""
        return self._rows[checked_int("layer", layer, 0, self.layout.num_layers - 1)]

    def records(self, block_id: int, offset: int) -> np.ndarray:
        """A view of one token's records, layer by layer: uint8 `[num_layers, bytes]`."""
        return self._rows[:, checked_int("block_id", block_id, 0, self.num_blocks - 1),
                          checked_int("offset", offset, 0, self.layout.block_tokens - 1)]

    def _clear(self, ids):
        if self._poison:
            _poison(self._rows, True, ids)


def _check_start(region, align):
    if region.array is None:
        check_there(region.ordinal, region.addr, region.nbytes)
        if region.addr % DEVICE_ALIGN:
            raise InvalidArgument(f"the memory of a pool on {region.device} must start at a "
                                  f"multiple of {DEVICE_ALIGN} bytes, as an allocation does; this "
                                  f"is at {region.addr:#x}")
    elif region.addr % align:
        raise InvalidArgument("the memory must start on a 4 KiB page, as an mmap does; without "
                              "memory= the pool makes its own")


def _poison(rows, by_layer, ids):
    """Fill the rows of these blocks, `rows[ids]` (`by_layer`: `rows[:, ids]`), in host memory or
    on a GPU. One that has failed keeps nobody from giving its blocks back."""
    if isinstance(rows, np.ndarray):
        rows[(slice(None), ids) if by_layer else ids] = POISON
        return
    ids = np.sort(ids)
    starts, lengths = _runs(ids)
    try:
        for first, length in zip(ids[starts].tolist(), lengths.tolist()):
            run = slice(first, first + length)
            rows[(slice(None), run) if by_layer else run].fill(POISON)
    except (KvioError, OSError) as failed:
        warnings.warn(f"freed blocks could not be filled: {failed}", RuntimeWarning, stacklevel=3)


def _checked(layout):
    if not isinstance(layout, BlockLayout):
        raise InvalidArgument(f"layout must be a BlockLayout, not {type(layout).__name__}")
    return layout


def has_twins(ids: np.ndarray) -> bool:
    """Does an id occur twice? (np.unique takes ten times as long for a few hundred.)"""
    if (ids[1:] > ids[:-1]).all():
        return False
    ids = np.sort(ids)
    return bool((ids[1:] == ids[:-1]).any())


def _few(ids) -> str:
    """Block ids for an error, the first ones of many."""
    return ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")


def _runs(ids: np.ndarray) -> tuple:
    """Where runs of adjacent ids start in `ids` (sorted), and how long they are."""
    starts = np.flatnonzero(np.diff(ids, prepend=-2) != 1)
    return starts, np.diff(starts, append=len(ids))


def _choose(free: np.ndarray, count: int) -> np.ndarray:
    """`count` of the free ids (sorted): the smallest run that fits, else the longest runs."""
    if count == 0:
        return free[:0]
    starts, lengths = _runs(free)
    fits = np.flatnonzero(lengths >= count)
    if len(fits):
        start = starts[fits[np.argmin(lengths[fits])]]
        return free[start:start + count]
    chosen, wanted = [], count
    for run in np.argsort(-lengths, kind="stable"):
        take = min(wanted, int(lengths[run]))
        chosen.append(free[starts[run]:starts[run] + take])
        wanted -= take
        if wanted == 0:
            break
    return np.concatenate(chosen)
