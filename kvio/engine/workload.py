"""Sessions for the engines: the project's own agents as tokens, and a storage-bound trace."""
import asyncio
import random

import numpy as np

from kvio.engine.request import Session, Turn, predicted_hit_tokens
from kvio.layout import BlockLayout, block_keys

__all__ = ["prime_store", "run_sessions", "timed_sessions", "timed_totals"]


def timed_sessions(num_agents: int, num_turns: int, vocabulary: int, seed: int = 7,
                   context_tokens=(3200, 5400), append_tokens=(60, 140),
                   new_tokens=(12, 20), spread: float = 0.0) -> list[Session]:
    """Agents that resume: a long context is stored, each turn appends little and generates
    little, so almost all prompt tokens hit. Drawn once from a fixed seed.

    Contexts and appends are drawn evenly from their ranges; with `spread` > 0 from a lognormal
    distribution of that sigma whose median is the geometric mean of the range, and clipped to it:
    many small ones and a few very large ones.
    """
    draw = random.Random(seed)

    def tokens(count):
        return tuple(draw.randrange(vocabulary) for _ in range(count))

    def some(least, most):
        if not spread:
            return draw.randint(least, most)
        return min(max(round((least * most) ** 0.5 * draw.lognormvariate(0, spread)), least), most)

    return [Session(f"agent{i}",
                    tuple(Turn(tokens(some(*append_tokens)), draw.randint(*new_tokens))
                          for _ in range(num_turns)),
                    tokens(some(*context_tokens)))
            for i in range(num_agents)]


def timed_totals(sessions, layout: BlockLayout) -> dict:
    """What the trace amounts to: requests, hit and miss tokens, bytes that must be loaded, and
    blocks that it may fill."""
    hits = misses = requests = blocks = 0
    for session in sessions:
        total = len(session.context)
        blocks += layout.num_blocks(total + sum(len(t.append) + t.num_new_tokens
                                                for t in session.turns)) + 1
        for turn, hit in zip(session.turns, predicted_hit_tokens(session, layout), strict=True):
            total += len(turn.append)
            hits, misses, requests = hits + hit, misses + total - hit, requests + 1
            total += turn.num_new_tokens
    return {"num_requests": requests, "hit_tokens": hits, "miss_tokens": misses,
            "hit_bytes": hits * sum(layout.layer_bytes_per_token), "num_blocks": 2 * blocks}


async def run_sessions(cluster, sessions, progress=None, in_step: bool = False) -> dict:
    """All agents at once; {session name: [EngineRequest]}.

    Each agent takes one turn after the other, or `in_step` with the others: a round begins when
    all have finished the one before, as in batched rollouts, and its requests arrive together.
    The context grows by the model's own tokens, so blocks persisted in decode are hit later.
    """
    served = {session.name: [] for session in sessions}
    contexts = {session.name: list(session.context) for session in sessions}

    async def take(session, turn):
        context = contexts[session.name]
        context += turn.append
        request = await cluster.generate(session.name, context, turn.num_new_tokens)
        served[session.name].append(request)
        context += request.generated
        if progress is not None:
            progress()

    async def agent(session):
        for turn in session.turns:
            await take(session, turn)

    if not in_step:
        await _together([agent(session) for session in sessions])
        return served
    for i in range(max(len(session.turns) for session in sessions)):
        await _together([take(session, session.turns[i]) for session in sessions
                         if i < len(session.turns)])
    return served


async def _together(coroutines):
    """Gather; when one fails or the caller is cancelled, the others end before this does."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def prime_store(store, sessions, layout, namespace_of, fill, pool) -> int:
    """Store the contexts that the sessions resume from. `fill(block, tokens, position)` writes a
    Full Block's KV into a pool view. Returns the number of blocks."""
    count = 0
    for session in sessions:
        tokens = np.asarray(session.context, np.uint32)
        keys = block_keys(tokens, layout, namespace_of(session.name))
        for start in range(0, len(keys), pool.num_blocks):
            part = keys[start:start + pool.num_blocks]
            ids = pool.alloc(len(part))
            for i, block_id in enumerate(ids):
                position = (start + i) * layout.block_tokens
                fill(pool.full(block_id), tokens[position:position + layout.block_tokens],
                     position)
            store.write(part, pool, ids).wait()
            pool.free(ids)
        count += len(keys)
    return count
