"""Carries out a plan: each step starts when the steps it waits for have finished."""
import asyncio

__all__ = ["run_plan"]


async def run_plan(steps, perform) -> None:
    """Run `await perform(step)` for every step, as early as `after` allows.

    When a step fails (or the caller is cancelled) no further step starts, those in flight are
    waited for, and then the first error is raised: afterwards nothing of the plan touches memory.
    """
    waiting = [len(step.after) for step in steps]
    unlocks = [[] for _ in steps]
    for step in steps:
        for index in step.after:
            unlocks[index].append(step.index)
    running = {}                                    # task -> step

    def start(index):
        running[asyncio.ensure_future(perform(steps[index]))] = steps[index]

    for step in steps:
        if not step.after:
            start(step.index)
    try:
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            finished = sorted((running.pop(task).index, task) for task in done)
            failures = [task for _, task in finished if task.cancelled() or task.exception()]
            if failures:
                failures[0].result()                # raises the first, in the plan's order
            for index, _ in finished:
                for other in unlocks[index]:
                    waiting[other] -= 1
                    if waiting[other] == 0:
                        start(other)
    finally:
        await _drain(running)
        done = finished = failures = _ = None       # errors of tasks hold this frame, and it them


async def _drain(running) -> None:
    """Steps that have begun finish: cancelling a wait does not stop a device."""
    while running:
        try:
            done, _ = await asyncio.wait(running)
        except asyncio.CancelledError:
            continue                                # memory safety comes before promptness
        for task in done:
            running.pop(task)
            if not task.cancelled():
                task.exception()                    # retrieved: the first one is raised already
