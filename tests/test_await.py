"""What an event loop watches for those who await transfers: how long, and at what price."""
import asyncio
import gc
import os
import selectors
import socket
import threading
import weakref

import pytest

from handles import Fabric, Handle, event_fd
from kvio import completion
from kvio.completion import Transfer

PATIENCE = 30


class CountingSelector(selectors.DefaultSelector):
    """How often a loop has gone around, and what it had done to its descriptors."""

    def __init__(self):
        super().__init__()
        self.turns, self.changes = 0, 0

    def select(self, timeout=None):
        self.turns += 1
        return super().select(timeout)

    def register(self, *args):
        self.changes += 1
        return super().register(*args)

    def unregister(self, *args):
        self.changes += 1
        return super().unregister(*args)

    def modify(self, *args):
        self.changes += 1
        return super().modify(*args)


def run(main, *args):
    """In a loop of its own; `main` gets its selector."""
    selector = CountingSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        return runner.run(main(selector, *args))


async def begun(handle):
    """A task that awaits this handle's transfer, and does so by now."""
    task = asyncio.ensure_future(Transfer(handle, "read"))
    await asyncio.sleep(0)
    return task


async def over(*tasks):
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)


async def given_up(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)                              # the loop lets go of it


async def quiet(selector):
    """Nothing wakes the loop: it goes around for the end of the sleep, and for what may just have
    been under way."""
    await asyncio.sleep(0)
    before = selector.turns
    await asyncio.sleep(0.05)
    return selector.turns - before <= 4


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# ---- what it costs

def test_what_has_drained_needs_no_loop():
    handle = Handle()
    handle.finish()
    with pytest.raises(StopIteration):
        next(Transfer(handle, "read").__await__())


def test_a_loop_gets_one_reader_for_all_that_is_ever_awaited_in_it():
    async def main(selector):
        fabric, before = Fabric(), selector.changes
        for _ in range(20):
            handles = [Handle(), Handle(fabric=fabric), Handle(fabric=fabric)]
            tasks = [await begun(handle) for handle in handles]
            handles[0].finish()
            fabric.make_due(*handles[1:])
            await over(*tasks)
        assert selector.changes - before == 1
    run(main)


@pytest.mark.parametrize("driven", [False, True])
def test_an_await_that_does_not_end_lets_the_loop_sleep(driven):
    async def main(selector):
        handle = Handle(fabric=Fabric() if driven else None)
        task = await begun(handle)
        assert await quiet(selector)
        handle.finish()
        await over(task)
    run(main)


def test_what_is_readable_and_awaited_by_nobody_lets_the_loop_sleep():
    """A fabric that nobody drives, and the eventfd of what was given up, stay readable."""
    async def main(selector):
        fabric = Fabric()
        handle, other = Handle(fabric=fabric), Handle(fabric=fabric)
        await given_up(await begun(handle))
        handle.finish()
        fabric.make_due(other)
        assert await quiet(selector)
        task = await begun(other)                       # which drives it
        await over(task)
    run(main)


# ---- who is woken

def test_who_drives_wakes_the_others_of_its_fabric():
    """The first who waits is not the one that has drained; nor does it miss its own turn."""
    async def main(selector):
        fabric = Fabric()
        handles = [Handle(fabric=fabric) for _ in range(3)]
        tasks = [await begun(handle) for handle in handles]
        fabric.make_due(handles[2])
        await over(tasks[2])
        assert not tasks[0].done() and not tasks[1].done()
        fabric.make_due(handles[0])
        await over(tasks[0])
        assert not tasks[1].done() and await quiet(selector)
        fabric.make_due(handles[1])
        await over(tasks[1])
    run(main)


def test_more_of_them_at_once_than_are_asked_for():
    async def main(selector):
        handles = [Handle() for _ in range(300)]
        tasks = [await begun(handle) for handle in handles]
        for handle in handles:
            handle.finish()
        await over(*tasks)
    run(main)


def test_another_thread_drives_what_a_loop_awaits():
    async def main(selector):
        fabric = Fabric()
        handles = [Handle(fabric=fabric) for _ in range(2)]
        task = await begun(handles[0])

        def drive():
            fabric.due.append(handles[0])               # its descriptor does not say so
            handles[1].poll()
        await asyncio.to_thread(drive)
        await over(task)
    run(main)


def test_loops_in_threads_await_one_transfer():
    handle = Handle(fabric=Fabric())
    transfer, done = Transfer(handle, "read"), []
    ready = threading.Barrier(5)

    async def main(selector):
        task = asyncio.ensure_future(transfer)
        await asyncio.sleep(0)
        ready.wait(PATIENCE)
        await over(task)
        done.append(1)

    threads = [threading.Thread(target=run, args=(main,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    ready.wait(PATIENCE)
    handle.fabric.make_due(handle)
    for thread in threads:
        thread.join(PATIENCE)
    assert len(done) == 4


# ---- descriptors that are closed, and come back

@pytest.mark.parametrize("end", ["drained", "given up"])
@pytest.mark.parametrize("copied", [False, True], ids=["closed", "kept by a child"])
def test_a_descriptor_closed_and_opened_again_is_another_one(end, copied):
    """Both the handle's and the fabric's. A forked child keeps what its parent has closed."""
    async def main(selector):
        handle = Handle(fabric=Fabric())
        numbers = handle.fileno(), handle.drive_fd()
        copies = [os.dup(number) for number in numbers] if copied else []
        task = await begun(handle)
        if end == "drained":
            handle.fabric.make_due(handle)
            await over(task)
        else:
            await given_up(task)
            handle.status[:] = 0                        # it drains without a word,
            completion.reap()                           # and somebody sees it
        gone = weakref.ref(handle)
        del handle, task
        gc.collect()
        assert gone() is None
        handle = Handle(fd=numbers[0], fabric=Fabric(numbers[1]))
        task = await begun(handle)
        for copy in copies:                             # says "readable", and that number
            os.eventfd_write(copy, 1)
        assert await quiet(selector) and not task.done()
        handle.fabric.make_due(handle)
        await over(task)
        handle = Handle(fd=event_fd(), fabric=handle.fabric)
        task = await begun(handle)
        handle.finish()                                 # by its own descriptor
        await over(task)
        for copy in copies:
            os.close(copy)
    run(main)


def test_a_number_that_was_awaited_may_become_a_socket_of_the_loop():
    async def main(selector):
        handle, pair = Handle(fabric=Fabric()), socket.socketpair()
        numbers = handle.fileno(), handle.drive_fd()
        await given_up(await begun(handle))
        handle.status[:] = 0
        completion.reap()
        del handle
        gc.collect()
        loop = asyncio.get_running_loop()
        for number in numbers:
            os.dup2(pair[0].fileno(), number)
            with socket.socket(fileno=number) as ours:
                ours.setblocking(False)
                received = asyncio.ensure_future(loop.sock_recv(ours, 1))
                await asyncio.sleep(0)
                pair[1].send(b"x")
                assert await asyncio.wait_for(received, PATIENCE) == b"x"
        for each in pair:
            each.close()
    run(main)


# ---- loops that come and go

@pytest.mark.parametrize("cancels", [True, False])
def test_a_loop_is_closed_while_something_is_awaited_in_it(cancels):
    """Another loop awaits the same transfer after it."""
    handle = Handle(fabric=Fabric())
    transfer = Transfer(handle, "read")
    before = descriptors()
    for _ in range(20):
        loop = asyncio.SelectorEventLoop()
        task = loop.create_task(asyncio.wait_for(transfer, PATIENCE))
        loop.run_until_complete(asyncio.sleep(0.001))
        if cancels:
            task.cancel()
            loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        else:
            task._log_destroy_pending = False           # we know
        loop.close()
    del loop, task
    assert descriptors() == before

    async def main(selector):
        task = asyncio.ensure_future(transfer)
        await asyncio.sleep(0)
        handle.fabric.make_due(handle)
        await over(task)
    run(main)


def test_what_cannot_be_watched_is_an_error_and_leaves_nothing_behind():
    """As where the system has no more watches to give."""
    async def main(selector):
        handle = Handle(fabric=Fabric())
        number, handle.fd = handle.fd, os.open("/dev/null", os.O_RDONLY)    # epoll refuses it
        os.close(number)
        with pytest.raises(PermissionError):
            await Transfer(handle, "read")
        other = Handle(fabric=handle.fabric)
        task = await begun(other)
        handle.fabric.make_due(other)
        await over(task)
        handle.status[:] = 0
    run(main)
