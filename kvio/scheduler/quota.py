"""What goes into the next prefill batch.

Source: DualPath §6: first in, first out, until the predicted attention time reaches a compute
quota; the request that would exceed it is cut. Without that, engines that prefill together (data
parallel attention, expert parallel layers) wait in each layer for whoever has the longest contexts.
"""
import itertools
from operator import index

from kvio.errors import InvalidArgument, checked_int
from kvio.scheduler.attention import AttentionFit, AttentionModel, fit_attention, profile
from kvio.scheduler.data import PrefillWork

__all__ = ["AttentionFit", "AttentionModel", "fit_attention", "is_quota", "pack_prefill",
           "profile"]


def pack_prefill(ready, quota_s: float | None = None, attention_time=None,
                 max_tokens: int | None = None) -> list:
    """The next prefill batch from `ready` (first in, first out), as [(request_id, num_new_tokens)].

    `ready` are `PrefillWork`s. `attention_time(cached, new)` predicts seconds, adds up over the
    batch and must not fall when `new` grows (an `AttentionModel`, say). Requests are taken whole
    while their sum stays within `quota_s`; the first that would exceed it gets as many new tokens
    as fit, found by binary search, and ends the batch: the rest of it stays at the head of the
    queue, with what was computed now among its cached tokens. The head gets one token at least,
    even if that alone exceeds the quota, so there is always progress. `max_tokens` bounds the new
    tokens of a batch in the same way. Without quota and bound: the head request, whole.
    """
    if quota_s is None and attention_time is not None:
        raise InvalidArgument("attention_time predicts for a quota: pass quota_s as well")
    if quota_s is None and max_tokens is None:
        head = ((_new(work), work) for work in itertools.islice(ready, 1))
        return [(work.request_id, new) for new, work in head]
    if quota_s is not None and (not callable(attention_time) or not is_quota(quota_s)):
        fit = "; of a fit pass its .model" if isinstance(attention_time, AttentionFit) else ""
        raise InvalidArgument(f"a quota must be above 0 s and needs attention_time(cached, new); "
                              f"got {quota_s!r} and {attention_time!r}{fit}")
    room = checked_int("max_tokens", max_tokens, 1) if max_tokens is not None else float("inf")
    batch, spent_s = [], 0.0
    for work in ready:
        new = min(_new(work), room)
        if quota_s is not None:
            new, spent_s = _cut(work, new, spent_s, quota_s, attention_time, not batch)
        if new:
            batch.append((work.request_id, new))
        room -= new
        if new < work.num_new_tokens or not room:
            break
    return batch


def is_quota(value) -> bool:
    """Whether it is a number of seconds above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _new(work: PrefillWork) -> int:
    try:                                            # ints: halves of others never come to an end
        if index(work.num_new_tokens) >= 1 and index(work.num_cached_tokens) >= 0:
            return work.num_new_tokens
    except (AttributeError, TypeError):
        pass
    raise InvalidArgument("work that is ready is a PrefillWork with a token or more to compute, "
                          f"not {work!r}")


def _cut(work: PrefillWork, most: int, spent_s, quota_s, attention_time, is_head):
    """(new tokens that fit, seconds spent then); the largest number that keeps to the quota."""
    def total(new):
        seconds = attention_time(work.num_cached_tokens, new)
        try:
            if 0 <= seconds < float("inf"):
                return spent_s + seconds
        except TypeError:
            pass
        raise InvalidArgument(f"attention_time({work.num_cached_tokens}, {new}) must be a "
                              f"time of 0 s or more, not {seconds!r}")

    after = total(most)
    if after <= quota_s:
        return most, after
    low, low_s, high = 0, spent_s, most             # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        after = total(middle)
        if after <= quota_s:
            low, low_s = middle, after
        else:
            high = middle
    if low == 0 and is_head:
        return 1, total(1)
    return low, low_s
