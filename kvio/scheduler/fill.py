"""Sharing a read among storage NICs so that all finish together, at block granularity.

A `Lane` is a NIC as a read sees it: it comes free at `start_s`, then reads `tokens_per_s`, and
takes `max_tokens` at most. Filling lanes like vessels to one level gives the earliest finish of
the whole read, since a lane that ended early could take from the one that ends last.
"""
import heapq
from math import ceil, floor
from typing import NamedTuple

__all__ = ["Lane", "fill", "fill_some", "level"]

INF = float("inf")
_FUZZ = 1e-9                # blocks: how far a share may be from a whole block by rounding


class Lane(NamedTuple):
    """When a storage NIC is free for a read (s from now), its rate, and what it takes at most."""

    start_s: float
    tokens_per_s: float
    max_tokens: float = INF


def level(lanes, num_tokens: float) -> float:
    """When all lanes together can have read `num_tokens`, in s from now; tokens may be cut.

    The level T with sum(min(max, rate * (T - start)) over lanes that start before T) =
    num_tokens; inf when the lanes cannot take that much. 0 tokens are read at once.
    """
    if num_tokens <= 0:
        return 0.0
    if len(lanes) == 1:
        lane = lanes[0]
        return lane[0] + num_tokens / lane[1] if num_tokens <= lane[2] else INF
    events = []                             # the rate changes when a lane joins or is full
    for start, rate, most in lanes:
        events.append((start, -rate))       # those that join first first
        if most < num_tokens:
            events.append((start + most / rate, rate))
    events.sort()
    now, rate, done, active = 0.0, 0.0, 0.0, 0
    for at, change in events:
        if active and done + rate * (at - now) >= num_tokens:
            break
        done += rate * (at - now) if active else 0.0
        active += 1 if change < 0 else -1
        now, rate = at, rate - change if active else 0.0
    return now + (num_tokens - done) / rate if active else INF


def _room(lane: Lane, num_blocks: int, block_tokens: int) -> int:
    """Blocks that a lane takes of `num_blocks`, however long it lasts."""
    return num_blocks if lane[2] == INF else min(num_blocks, int(lane[2] // block_tokens))


def fill(lanes, num_blocks: int, block_tokens: int) -> list[int]:
    """Whole blocks for each lane, `num_blocks` in all, so that the last finish is the earliest.

    Greedy from the cut shares rounded down: each block left over goes where it finishes first (on
    a tie to the earlier lane), which is optimal because a lane's finish only grows with its
    blocks. When the lanes cannot take them all, the list sums up to what they take.
    """
    room = [_room(lane, num_blocks, block_tokens) for lane in lanes]
    if sum(room) <= num_blocks:
        return room
    top = level([(start, rate, most * block_tokens)
                 for (start, rate, _), most in zip(lanes, room, strict=True)],
                num_blocks * block_tokens)
    counts = [min(most, int((top - lane[0]) * lane[1] / block_tokens)) if lane[0] < top else 0
              for lane, most in zip(lanes, room, strict=True)]
    left = num_blocks - sum(counts)
    if left:
        _give_out(lanes, counts, room, left, block_tokens)
    return counts


def _give_out(lanes, counts, room, left, block_tokens):
    """`left` blocks more (or fewer, when rounding gave out too many), one by one."""
    sign = 1 if left > 0 else -1

    def entry(i):
        blocks = counts[i] + (1 if sign > 0 else 0)
        return sign * (lanes[i][0] + blocks * block_tokens / lanes[i][1]), i

    heap = [entry(i) for i in range(len(lanes)) if (counts[i] < room[i] if sign > 0 else counts[i])]
    heapq.heapify(heap)
    for _ in range(abs(left)):
        i = heap[0][1]
        counts[i] += sign
        if counts[i] < room[i] if sign > 0 else counts[i]:
            heapq.heapreplace(heap, entry(i))
        else:
            heapq.heappop(heap)


def finish_s(lanes, counts, block_tokens: int) -> float:
    """When the last of the lanes that have blocks has read them."""
    return max((lane[0] + count * block_tokens / lane[1]
                for lane, count in zip(lanes, counts, strict=True) if count), default=0.0)


def fill_some(own, helpers, num_blocks: int, block_tokens: int, *, least_blocks: int = 1,
              max_helpers: int | None = None):
    """Like `fill` over the lanes `own` and some `helpers`: ({index of helper: blocks}, counts of
    own lanes, finish).

    At most `max_helpers` help, and each with `least_blocks` at least. The finish is the earliest
    of all choices of helpers that keep to this, and no fewer helpers reach it. By level T a lane
    can have read some whole number of blocks, which grows with T; so T is feasible if own lanes
    and the helpers that can have read the most, among those that can have read enough, make up
    all blocks, and what is feasible stays so. From the finish without helpers the search goes
    down: those that were the best just before T set the next, smaller T, until none are enough.
    """
    own_counts = fill(own, num_blocks, block_tokens)
    top_s = finish_s(own, own_counts, block_tokens) if sum(own_counts) == num_blocks else INF
    most = num_blocks // least_blocks
    if max_helpers is not None:
        most = min(most, max_helpers)
    rooms = [_room(lane, num_blocks, block_tokens) for lane in helpers]
    chosen, best = (), ({}, own_counts, top_s)
    while most > 0:
        before = _best(own, helpers, rooms, num_blocks, block_tokens, least_blocks, most, top_s, -1)
        if before is None:
            break
        counts = _fill_at_least(own, [helpers[i] for i in before], num_blocks, block_tokens,
                                least_blocks)
        end_s = finish_s([*own, *(helpers[i] for i in before)], counts, block_tokens)
        if not end_s < top_s:                       # rounding
            break
        chosen, top_s = before, end_s
        best = dict(zip(chosen, counts[len(own):], strict=True)), counts[:len(own)], end_s
    fewer = _best(own, helpers, rooms, num_blocks, block_tokens, least_blocks, most, top_s, 1) \
        if len(chosen) > 1 else None
    if fewer is None or len(fewer) >= len(chosen):
        return best
    counts = _fill_at_least(own, [helpers[i] for i in fewer], num_blocks, block_tokens,
                            least_blocks)
    return (dict(zip(fewer, counts[len(own):], strict=True)), counts[:len(own)],
            finish_s([*own, *(helpers[i] for i in fewer)], counts, block_tokens))


def _best(own, helpers, rooms, num_blocks, block_tokens, least_blocks, most, top_s, sign):
    """The fewest helpers, `most` at most, who with the own lanes can have read all blocks by
    `top_s` (sign 1) or strictly before (sign -1); None if nobody can."""
    missing = num_blocks
    for lane in own:
        missing -= _read(lane, num_blocks, top_s, block_tokens, sign)
    ranked = []
    for i, lane in enumerate(helpers):
        count = _read(lane, rooms[i], top_s, block_tokens, sign)
        if count >= least_blocks:
            ranked.append((-count, lane[0], i))
    ranked.sort()
    for number, (count, _, _) in enumerate(ranked[:most], 1):
        missing += count
        if missing <= 0:
            return [i for _, _, i in (ranked[:most] if sign < 0 else ranked[:number])]
    return None


def _read(lane: Lane, room: int, top_s: float, block_tokens: int, sign: int) -> int:
    """Blocks that a lane can have read by `top_s`, or before (sign -1): what lies within
    rounding of a whole block counts by `top_s` and does not count before."""
    if top_s == INF:
        return room
    blocks = (top_s - lane[0]) * lane[1] / block_tokens
    if sign > 0:
        blocks = floor(blocks * (1 + 1e-12) + _FUZZ)
    else:
        blocks = ceil(blocks * (1 - 1e-12) - _FUZZ) - 1
    return room if blocks > room else blocks if blocks > 0 else 0


def _fill_at_least(own, helpers, num_blocks, block_tokens, least_blocks):
    """`fill` in which each helper gets `least_blocks` at least (there are enough for that)."""
    lanes, forced = [*own, *helpers], set()
    while True:
        free = [i for i in range(len(lanes)) if i not in forced]
        counts = [least_blocks] * len(lanes)
        shares = fill([lanes[i] for i in free], num_blocks - least_blocks * len(forced),
                      block_tokens)
        for i, count in zip(free, shares, strict=True):
            counts[i] = count
        short = {i for i in free if i >= len(own) and counts[i] < least_blocks}
        if not short:
            return counts
        forced |= short
