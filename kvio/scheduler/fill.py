"""Sharing a read among storage NICs so that all finish together, at block granularity.

A `Lane` is a NIC as a read sees it: it comes free at `start_s`, then reads `tokens_per_s`, and
takes `max_tokens` at most. Filling lanes like vessels to one level gives the earliest finish of
the whole read, since a lane that ended early could take from the one that ends last.
"""
import heapq
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
        events.append((start, rate))
        if most < num_tokens:
            events.append((start + most / rate, -rate))
    events.sort()
    now, rate, done, active = 0.0, 0.0, 0.0, 0
    for at, change in events:
        if active and done + rate * (at - now) >= num_tokens:
            break
        done += rate * (at - now) if active else 0.0
        active += 1 if change > 0 else -1
        now, rate = at, rate + change if active else 0.0
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
    top = level([(lane[0], lane[1], most * block_tokens)
                 for lane, most in zip(lanes, room, strict=True)], num_blocks * block_tokens)
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
    of all choices of helpers that keep to this. By level T a lane can have read some whole number
    of blocks, which grows with T; so T is feasible if own lanes and the helpers that can have
    read the most, among those that can have read enough, make up all blocks, and what is feasible
    stays so. From the finish without helpers the search goes down: those that were the best just
    before T set the next, smaller T, until none are enough just before it.
    """
    own_counts = fill(own, num_blocks, block_tokens)
    best = {}, own_counts, (finish_s(own, own_counts, block_tokens)
                            if sum(own_counts) == num_blocks else INF)
    most = num_blocks // least_blocks
    if max_helpers is not None:
        most = min(most, max_helpers)
    if most < 1:
        return best
    rooms = [_room(lane, num_blocks, block_tokens) for lane in helpers]
    useful = [i for i, lane in enumerate(helpers) if rooms[i] >= least_blocks and
              lane[0] + least_blocks * block_tokens / lane[1] < best[2]]
    while useful:
        top = best[2]
        done = {i: _before(helpers[i], rooms[i], top, block_tokens) for i in useful}
        useful = [i for i in useful if done[i] >= least_blocks]
        chosen = useful if len(useful) <= most else \
            heapq.nsmallest(most, useful, key=lambda i: (-done[i], helpers[i][0], i))
        if sum(done[i] for i in chosen) + sum(
                _before(lane, num_blocks, top, block_tokens) for lane in own) < num_blocks:
            break
        counts = _fill_at_least(own, [helpers[i] for i in chosen], num_blocks, block_tokens,
                                least_blocks)
        lanes = [*own, *(helpers[i] for i in chosen)]
        finish = finish_s(lanes, counts, block_tokens)
        if not finish < top:
            break
        best = dict(zip(chosen, counts[len(own):], strict=True)), counts[:len(own)], finish
    return best


def _before(lane: Lane, room: int, top: float, block_tokens: int) -> int:
    """Blocks that a lane can have read strictly before `top`."""
    if top == INF:
        return room
    blocks = (top - lane[0]) * lane[1] / block_tokens
    return max(0, min(room, -int(-(blocks - _FUZZ - 1e-12 * blocks) // 1) - 1))


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
