"""`Transfer` over a handle that the test completes by hand."""
import asyncio
import errno
import gc
import os
import weakref
from contextlib import nullcontext

import numpy as np
import pytest

from handles import Fabric, Handle
from kvio import completion
from kvio.completion import Transfer
from kvio.errors import Busy, Closed, InvalidArgument, OutOfBlocks, TransferError, TransferTimeout
from kvio.layout import BlockLayout
from kvio.memory import BlockPool
from kvio.storage import BlockStore


def test_done_status_and_result():
    handle = Handle()
    transfer = Transfer(handle, "read of three")
    assert not transfer.done and "in flight" in repr(transfer)
    assert (transfer.status == -errno.EINPROGRESS).all()
    handle.finish()
    assert transfer.done and transfer.wait() is None and transfer.wait(0) is None


def test_a_timeout_leaves_the_transfer_going():
    handle, drained = Handle(), []
    transfer = Transfer(handle, "slow", on_drain=lambda: drained.append(1))
    with pytest.raises(TransferTimeout, match="slow"):
        transfer.wait(0.01)
    assert not drained
    handle.finish()
    transfer.wait()
    transfer.wait()
    assert drained == [1]                               # once


def test_a_failed_element_raises_with_its_name_and_keeps_the_status():
    handle = Handle()
    transfer = Transfer(handle, "write")
    handle.finish(0, -errno.ENOSPC, -errno.EIO)
    with pytest.raises(TransferError, match=r"2 of 3 .*element 1.*ENOSPC") as failure:
        transfer.wait()
    assert failure.value.errno == errno.ENOSPC
    assert failure.value.status.tolist() == [0, -errno.ENOSPC, -errno.EIO]
    assert transfer.status.tolist() == [0, -errno.ENOSPC, -errno.EIO]


def test_finish_makes_the_result():
    handle = Handle()
    transfer = Transfer(handle, "read", finish=lambda s: int(np.argmax(s != 0)))
    handle.finish(0, 0, -errno.EBADMSG)
    assert transfer.wait() == 2


def test_cancel_returns_drained():
    handle, drained = Handle(), []
    transfer = Transfer(handle, "read", on_drain=lambda: drained.append(1))
    transfer.cancel()
    assert handle.canceled and drained == [1] and transfer.done
    with pytest.raises(TransferError, match="ECANCELED"):
        transfer.wait()


def test_when_drained_runs_later_or_at_once():
    handle, order = Handle(), []
    transfer = Transfer(handle, "read", on_drain=lambda: order.append("first"))
    transfer.when_drained(lambda: order.append("second"))
    assert order == []
    handle.finish()
    assert transfer.done
    transfer.when_drained(lambda: order.append("third"))
    assert order == ["first", "second", "third"]


def test_memory_outlives_a_forgotten_transfer_until_it_has_drained():
    handle, memory = Handle(), np.zeros(3)
    gone = weakref.ref(memory)
    Transfer(handle, "forgotten", keep=(memory,))
    before = completion.in_flight()
    del memory
    gc.collect()
    assert gone() is not None                           # a device may still write it
    completion.reap()
    assert gone() is not None
    handle.finish()
    assert completion.reap() >= 1
    gc.collect()
    assert gone() is None and completion.in_flight() < before


def test_blocks_of_a_forgotten_transfer_come_back_when_they_are_needed():
    """A transfer that nobody waits for pins its blocks until somebody looks: the pool does."""
    handle, pool = Handle(), BlockPool(BlockLayout(1, 1, 8), 2)
    ids = pool.alloc(2)
    pool.pin(ids)
    Transfer(handle, "forgotten", on_drain=lambda: pool.unpin(ids))
    pool.free(ids)
    with pytest.raises(OutOfBlocks):
        pool.alloc(1)                                   # the device may still write them
    with pytest.raises(Busy):
        pool.close()
    handle.finish()
    assert len(pool.alloc(2)) == 2
    pool.close()


def test_a_forked_child_leaves_its_parents_transfers_alone():
    handle = Handle()
    transfer = Transfer(handle, "read")
    before = completion.in_flight()
    child = os.fork()
    if child == 0:
        os._exit(completion.in_flight() + completion.reap())
    assert os.waitpid(child, 0)[1] == 0 and completion.in_flight() == before
    handle.finish()
    transfer.wait()


def test_await_wakes_through_the_eventfd():
    async def main():
        handles = [Handle() for _ in range(20)]
        transfers = [Transfer(handle, "read") for handle in handles]

        async def waiter(transfer):
            await transfer

        tasks = [asyncio.create_task(waiter(transfer)) for transfer in transfers]
        await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)
        for handle in reversed(handles):
            handle.finish()
        await asyncio.gather(*tasks)
    asyncio.run(main())


def test_an_await_that_is_cancelled_leaves_the_transfer_going():
    async def main():
        handle, drained = Handle(), []
        transfer = Transfer(handle, "read", on_drain=lambda: drained.append(1))
        task = asyncio.ensure_future(asyncio.wait_for(transfer, 0.01))
        with pytest.raises(asyncio.TimeoutError):
            await task
        assert not drained and completion.in_flight()
        handle.finish()
        await transfer
        assert drained == [1]
    asyncio.run(main())


def test_any_number_of_tasks_may_await_one_transfer():
    """A loop has one reader a descriptor: the second task must not take the first one's."""
    async def main():
        handle = Handle()
        transfer = Transfer(handle, "read")

        async def waiter():
            await transfer
        tasks = [asyncio.ensure_future(waiter()) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        handle.finish()
        await asyncio.wait_for(asyncio.gather(tasks[0], tasks[2]), 5)
        assert tasks[1].cancelled()
    asyncio.run(main())


def test_an_event_loop_is_not_kept_by_the_nics_that_were_awaited_in_it():
    loops = []

    async def main():
        loops.append(weakref.ref(asyncio.get_running_loop()))
        handle = Handle(fabric=fabric)
        asyncio.get_running_loop().call_later(0.001, handle.finish)
        await Transfer(handle, "read")

    fabric = Fabric()
    asyncio.run(main())
    gc.collect()
    assert loops[0]() is None


@pytest.mark.parametrize("ring", [True, False])
def test_time_outs_are_numbers(tmp_path, ring):
    if ring:
        layout = BlockLayout(1, 1, 16)
        store = BlockStore.open(tmp_path, layout, backend="threads")
        transfer = store.read([], BlockPool(layout, 1), [])
    else:
        store = nullcontext()
        transfer = Transfer(Handle(0), "read")
    with store:
        for timeout in (float("inf"), 1e300, 10**30, None, 0, -1, np.float32(1)):
            transfer.wait(timeout)
        for timeout in (float("nan"), "1", [], 1j):
            with pytest.raises(InvalidArgument):
                transfer.wait(timeout)


def test_a_forked_child_is_told_whose_transfer_it_is(tmp_path):
    layout = BlockLayout(1, 4, 1024)
    with BlockStore.open(tmp_path, layout) as store, BlockPool(layout, 1) as pool:
        transfer = store.read(np.zeros((1, 16), np.uint8), pool, pool.alloc(1))
        pid = os.fork()
        if pid == 0:
            said = 0
            for call in (transfer.wait, transfer.cancel, lambda: transfer.done):
                try:
                    call()
                except Closed:
                    said += 1
            os._exit(0 if said == 3 and "parent" in repr(transfer) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert transfer.wait() == 0


@pytest.mark.parametrize("refused", [False, True])
def test_memory_is_pinned_before_the_device_has_it(tmp_path, monkeypatch, refused):
    """Whatever interrupts a submission, the blocks are pinned and the transfer is held."""
    layout = BlockLayout(1, 4, 1024)
    with BlockStore.open(tmp_path, layout) as store, BlockPool(layout, 1) as pool:
        ring, ids, seen = store.open_ring(), pool.alloc(1), []

        class Watched:
            def submit(self, *args):
                completion.reap()                       # as another thread's alloc does
                seen.append((completion.in_flight(), int(pool._pins.sum())))
                if refused:
                    raise OSError(errno.ENOMEM, "refused")
                return inner.submit(*args)

        inner, ring._opened = ring._ring, lambda: Watched()
        before = completion.in_flight()
        if refused:
            with pytest.raises(InvalidArgument, match="refused"):
                ring.read(np.zeros((1, 16), np.uint8), pool, ids)
        else:
            assert ring.read(np.zeros((1, 16), np.uint8), pool, ids).wait() == 0
        assert seen == [(before + 1, 1)]
        assert completion.in_flight() == before and not pool._pins.any()
        del ring._opened
