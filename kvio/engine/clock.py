"""The engines' clock is that of the event loop they run in: monotonic time, or link time.

In link time (`run_in_link_time`) nothing waits for a wall clock. Whenever no task can go on, the
virtual clock of a `Fabric` moves on to the next timer or completion that is due by it. So a run
gives the same figures on any machine, however slow or busy, and its bytes are moved all the same.
"""
import asyncio
import selectors

from kvio import completion
from kvio.errors import InvalidArgument
from kvio.transfer import Fabric, Nic

__all__ = ["now_s", "run_in_link_time", "sleep_until"]


def now_s() -> float:
    """Seconds on the running loop's clock."""
    return asyncio.get_running_loop().time()


async def sleep_until(deadline_s: float) -> None:
    """Sleep until `now_s()` is `deadline_s`."""
    delay = deadline_s - now_s()
    if delay > 0:
        await asyncio.sleep(delay)


_FURTHEST_NS = 10**12           # at once; who sleeps longer is looked at again


class _LinkTimeSelector(selectors.DefaultSelector):
    """Where a loop would sleep, time passes on the fabric instead."""

    def __init__(self, fabric):
        super().__init__()
        self._fabric = fabric
        self._nic = Nic.open("soft", name="clock", fabric=fabric)   # whose poll drives them all

    def select(self, timeout=None):
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        due = self._fabric.next_ns if completion.in_flight() else None
        wait = [] if due is None else [due - self._fabric.now_ns]
        if timeout is not None:
            wait.append(round(timeout * 1e9))
        if not wait:
            return super().select(None)         # nothing is due here: somebody outside wakes us
        self._fabric.advance(max(1, min(*wait, _FURTHEST_NS)))
        self._nic.poll()
        return super().select(0)

    def close(self):
        self._nic.close()
        super().close()


class _LinkTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self, fabric):
        self._fabric = fabric
        super().__init__(_LinkTimeSelector(fabric))

    def time(self) -> float:
        return self._fabric.now_ns / 1e9


def run_in_link_time(coroutine, fabric):
    """`asyncio.run` in the time of `fabric`, whose clock must be virtual. InvalidArgument for
    anything else, and inside another loop.

    All that the coroutine waits for has to be on that clock: a transfer of soft NICs on the
    fabric, or a timer. Work of threads and devices takes no time on it. Tasks that it leaves are
    cancelled.
    """
    if not asyncio.iscoroutine(coroutine):
        raise InvalidArgument(f"link time runs a coroutine, not {coroutine!r}")
    try:
        if not isinstance(fabric, Fabric):
            raise InvalidArgument(f"link time is that of a Fabric, not of {fabric!r}")
        if asyncio._get_running_loop() is not None:
            raise InvalidArgument("a loop runs in this thread already: link time has its own")
        fabric.advance(0)                       # says so if the clock does not move by hand
    except BaseException:
        coroutine.close()
        raise
    loop = _LinkTimeLoop(fabric)
    task = loop.create_task(coroutine)
    try:
        return loop.run_until_complete(task)
    finally:
        try:
            left = asyncio.all_tasks(loop)      # interrupted: what they hold is given back
            for each in left:
                each.cancel()
            if left:
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
