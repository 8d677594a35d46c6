"""What goes into the next prefill batch. Source: DualPath §6."""
from kvio.errors import InvalidArgument

__all__ = ["pack_prefill"]


def pack_prefill(ready, quota_s: float | None = None, attention_time=None) -> list:
    """The next prefill batch from `ready` (FIFO), as (request_id, num_new_tokens).

    Now the head request, whole. The compute quota belongs here: FIFO packing until
    `attention_time(cached, new)` reaches `quota_s`, the request that would exceed it cut by
    binary search. Until that is built, a quota is refused rather than ignored.
    """
    if quota_s is not None or attention_time is not None:
        raise InvalidArgument("compute-quota packing is not built yet: pass quota_s=None")
    return [(work.request_id, work.num_new_tokens) for work in list(ready)[:1]]
