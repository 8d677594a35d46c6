"""What engines compute on: HBM, or host memory in its place.

All that an engine's arithmetic does to KV goes through one of two objects. `HostHbm`: rows are
views, and what is computed lies there at once. `DeviceHbm`: a GPU's memory, which the CPU cannot
touch. Rows that are read are fetched into pinned memory, and rows that were made are written back:
one batch a layer, or a decode step, over a queue pair of the arithmetic's own, so that the
engine's NIC counts KV alone. Both happen in the thread of whoever computes, never in the loop's.
"""
import asyncio
import concurrent.futures
import contextlib

import numpy as np

from kvio.engine.moves import drained
from kvio.errors import InvalidArgument, KvioError
from kvio.layout import READ, WR_DTYPE, WRITE
from kvio.memory import POISON, LayerPool, Region
from kvio.pages import anonymous
from kvio.transfer import KV, Access, Nic

__all__ = ["DeviceHbm", "HostHbm", "Slot", "check_device", "new_records"]


class HostHbm:
    """Host memory in HBM's place."""

    device = None
    fetched_nbytes = written_nbytes = 0         # copied for the arithmetic's sake

    def allocate(self, nbytes: int):
        """Memory that a `Region` or a pool takes."""
        return anonymous(nbytes)

    async def run(self, function, *args):
        """`function`, which reads and writes HBM: here and now."""
        return function(*args)

    async def poison(self, region: Region, start: int, nbytes: int) -> None:
        """Fill a part of a region, so that stale bytes cannot pass for KV."""
        region.array[start:start + nbytes] = POISON

    def rows(self, region: Region, start: int, num_rows: int, width: int) -> np.ndarray:
        """Rows one after the other from byte `start` on: uint8 [num_rows, width], to be read."""
        return region.array[start:start + num_rows * width].reshape(num_rows, width)

    @contextlib.contextmanager
    def new_rows(self, region: Region, start: int, num_rows: int, width: int):
        """The same to be written; they lie in HBM when the block is left without an error."""
        yield self.rows(region, start, num_rows, width)

    def blocks(self, pool: LayerPool, layer: int, ids: np.ndarray) -> np.ndarray:
        """Layer Blocks, to be read: uint8 [len(ids), block_tokens, bytes]."""
        return pool.layer(layer)[ids]

    @contextlib.contextmanager
    def new_records(self, pool: LayerPool, places):
        """To be written, as `new_rows`: for each (block id, offset) of `places` one token's
        records in all layers, uint8 [num_layers, bytes]."""
        yield [pool.records(block_id, offset) for block_id, offset in places]

    def close(self) -> None:
        """Nothing to give back."""


class DeviceHbm:
    """Memory of the GPU `device` ("cuda:0"), for one engine of the name `name`. What `HostHbm`
    says of each call holds here; rows that are read stay as they are until the next call that
    reads, and the calls that move bytes come from one thread at a time."""

    def __init__(self, device: str, name: str):
        self.device, address = device, f"{name}.compute"
        self._nic = Nic.open(device, name=address)
        try:
            self._nic.listen(address)
            self._peer = self._nic.connect(address, classes=[KV])
        except BaseException:
            self._nic.close()
            raise
        self._read, self._made = _Staging(self._nic), _Staging(self._nic)
        self._memories, self._keys = {}, {}         # by address
        self.fetched_nbytes = self.written_nbytes = 0
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "kvio-hbm")

    def allocate(self, nbytes):
        memory = self._nic.device_memory(nbytes)
        self._keys[memory.addr] = self._nic.register(memory).key
        self._memories[memory.addr] = memory
        return memory

    async def run(self, function, *args):
        """In a thread, which is waited for whoever is cancelled: it touches memory."""
        work = asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        try:
            await asyncio.wait([work])
            return work.result()
        finally:
            await drained([work])

    async def poison(self, region, start, nbytes):
        await self.run(self._memories[region.addr].fill, POISON, start, nbytes)

    def rows(self, region, start, num_rows, width):
        return self._fetch(region, np.array([start]), num_rows * width).reshape(num_rows, width)

    @contextlib.contextmanager
    def new_rows(self, region, start, num_rows, width):
        made = self._made.array(num_rows * width).reshape(num_rows, width)
        yield made
        self._move(WRITE, region, np.array([start]), self._made, made.nbytes)

    def blocks(self, pool, layer, ids):
        side = pool.side()
        starts = side.layer_offsets[layer] + ids * side.block_stride
        return self._fetch(pool.region, starts, side.block_stride).reshape(
            len(ids), pool.layout.block_tokens, -1)

    @contextlib.contextmanager
    def new_records(self, pool, places):
        side, width = pool.side(), pool.layout.layer_bytes_per_token[0]
        starts = np.array(places, np.int64) @ np.array([side.block_stride, width])
        made = self._made.array(len(starts) * len(side.layer_offsets) * width).reshape(
            len(starts), len(side.layer_offsets), width)
        yield made
        self._move(WRITE, pool.region, (starts[:, None] + side.layer_offsets).reshape(-1),
                   self._made, width)

    def _fetch(self, region, starts, nbytes):
        """Pieces of `nbytes` from these places of a region, one after the other in one array."""
        array = self._read.array(len(starts) * nbytes)
        self._move(READ, region, starts, self._read, nbytes)
        return array

    def _move(self, opcode, region, starts, staging, nbytes):
        if not nbytes or not len(starts):
            return
        work = np.zeros(len(starts), WR_DTYPE)
        work["opcode"], work["length"] = opcode, nbytes
        work["local_addr"], work["lkey"] = staging.addr + np.arange(len(starts)) * nbytes, \
            staging.key
        work["remote_addr"], work["rkey"] = region.addr + starts, self._keys[region.addr]
        try:
            self._peer.post(work, traffic_class=KV).wait()
        except KvioError:
            with contextlib.suppress(KvioError, OSError):
                self._peer.reset()                  # or the next try would fail because of this one
            raise
        if opcode == READ:
            self.fetched_nbytes += len(starts) * nbytes
        else:
            self.written_nbytes += len(starts) * nbytes

    @property
    def title(self) -> str:
        """What the device calls itself."""
        return self._nic.info()["copy"]["name"]

    def close(self) -> None:
        """When nothing computes any more."""
        self._thread.shutdown(cancel_futures=True)
        self._nic.close(cancel=True)
        self._memories.clear()
        self._read = self._made = None


class _Staging:
    """Pinned memory that grows to what is asked of it."""

    def __init__(self, nic):
        self._nic, self._region, self._array = nic, None, np.empty(0, np.uint8)

    @property
    def addr(self):
        return self._region.addr

    @property
    def key(self):
        return self._region.key

    def array(self, nbytes):
        """uint8 [nbytes]; what was there before is of no more use."""
        if nbytes > len(self._array):
            memory = self._nic.pinned(1 << max(16, (nbytes - 1).bit_length()))
            before, self._region = self._region, self._nic.register(memory, Access.LOCAL_WRITE)
            self._array = np.frombuffer(memory, np.uint8)
            if before is not None:
                self._nic.deregister(before)
        return self._array[:nbytes]


class Slot:
    """A layer of `num_tokens` tokens in a region, from byte `start` on, as arithmetic sees it."""

    def __init__(self, memory, region: Region, start: int, num_tokens: int, width: int):
        self._memory, self._region, self._start = memory, region, start
        self.num_tokens, self.width = num_tokens, width

    async def run(self, function, *args):
        """`function(*args)`, which reads and writes the slot, where that holds up nobody."""
        return await self._memory.run(function, *args)

    def rows(self, first: int, stop: int) -> np.ndarray:
        """KV of tokens [first, stop), to be read: uint8 [tokens, bytes_per_token]."""
        return self._memory.rows(self._region, self._start + first * self.width, stop - first,
                                 self.width)

    def new_rows(self, first: int, stop: int):
        """The same to be written, in a `with` block."""
        return self._memory.new_rows(self._region, self._start + first * self.width, stop - first,
                                     self.width)

    async def poison(self) -> None:
        """Nothing of what was here before can pass for KV."""
        await self._memory.poison(self._region, self._start, self.num_tokens * self.width)


def new_records(sequences):
    """Where the next token of each of these sequences of one engine gets its KV, in a `with`
    block: a list of uint8 [num_layers, bytes_per_token]."""
    first = sequences[0]
    return first.memory.new_records(first.pool, [sequence.next_place for sequence in sequences])


def check_device(config) -> None:
    """InvalidArgument for what does not go with a `ClusterConfig.device`."""
    device = config.device
    if not isinstance(device, str) or device.partition(":")[0] != "cuda":
        raise InvalidArgument(f"device is a GPU like 'cuda:0', whose memory is HBM, not {device!r}")
    if config.nic != "soft" or config.cnic_bytes_per_s:
        raise InvalidArgument(f"with HBM on {device} its copy engines are the compute NICs, as "
                              "fast as they go: leave nic and cnic_bytes_per_s out")
    if config.collectives is not None:
        raise InvalidArgument(f"engines that share {device} have no links between them, and copy "
                              "engines no lanes: collectives need nic=, not device=")
