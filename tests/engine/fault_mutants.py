"""The engine, broken on purpose: the fault driver has to find it.

    python tests/engine/fault_mutants.py drain     # until a seed finds it; prints what it found
"""
import asyncio
import os
import sys

from fault_driver import run_seed
from kvio.engine import rerouting
from kvio.engine.attempt import Attempt
from kvio.engine.request import EngineRequest
from kvio.engine.serving import Serving
from kvio.loader import run as running
from kvio.loader.mover import Mover
from kvio.memory import BlockAllocator
from kvio.scheduler import Scheduler


async def does_not_drain(tasks):
    """In place of run_plan's draining: the tasks end, their transfers go on."""
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def reads_what_is_not_there(mover, step, binding):
    first, stop = mover._blocks(step)
    place = binding.places[step.target]
    await mover.rings[step.side].read(binding.keys[first:stop], place.pool, place.ids[first:stop])


def all_of_it(request, layout):
    return EngineRequest(request.request_id, request.session, request.prompt,
                         request.num_new_tokens, request.keys, request.root,
                         origin=request.origin or request)


# name -> ([(owner, attribute, what it becomes)], what the driver has to say of it)
MUTANTS = {
    "drain": ([(running, "_drain", does_not_drain),
               (BlockAllocator, "pin", lambda pool, ids: None),
               (BlockAllocator, "unpin", lambda pool, ids: None)],
              "somebody else's|that was given back|wrong KV records|in flight"),
    "pins": ([(BlockAllocator, "pin", lambda pool, ids: None),
              (BlockAllocator, "unpin", lambda pool, ids: None)],
             "somebody else's|come into free blocks"),
    "bad block": ([(Mover, "_read", reads_what_is_not_there)], "wrong tokens|wrong KV records"),
    "all again": ([(EngineRequest, "rest", all_of_it)], "wrong tokens"),
    "stale request": ([(EngineRequest, "rest", lambda request, layout: request)], "wrong tokens"),
    "hbm": ([(Attempt, "free_hbm", lambda attempt: None)], "LayerPool .* blocks free"),
    "counts": ([(Serving, "leave_all", lambda serving: None)], "num_requests"),
    "lose": ([(Scheduler, "lose", lambda *args: [])], "Closed|nothing goes on"),
    "recover": ([(rerouting, "_reset", lambda mover: True)], "no fault explains TransferError"),
}


def main(name, num_seeds=300) -> int:
    for owner, what, mutant in MUTANTS[name][0]:
        setattr(owner, what, mutant)
    for seed in range(num_seeds):
        run = run_seed(seed)
        if run.problems:
            print(f"seed {seed}:", *run.problems, sep="\n", flush=True)
            os._exit(0)                         # what a mutant has left in flight stays there
    print(f"{num_seeds} seeds have found nothing")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
