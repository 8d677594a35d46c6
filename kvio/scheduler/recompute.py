"""Load a hit or compute it again: what is there first?

Loading is not always faster than computing: behind a long reading queue, or with a slow store, a
prefill engine with nothing to do would have computed the same KV meanwhile. The rule compares both
from measured rates, for every number of blocks of the hit prefix. Not in the paper.
"""
from dataclasses import dataclass
from typing import NamedTuple

from kvio.errors import InvalidArgument, checked_int
from kvio.scheduler.fill import INF, Lane, level
from kvio.scheduler.paths import ShorterQueue
from kvio.scheduler.quota import AttentionModel
from kvio.scheduler.reason import Reason

__all__ = ["LoadChoice", "LoadOrRecompute"]


class LoadChoice(NamedTuple):
    """Load `num_tokens` of the hits; then the prefill ends `finish_s` from now.

    `load_all_s` and `recompute_s`: when it would end with all hits loaded, and with none.
    `compute_s`: the computing that is chosen, which is to be counted as the engine's `busy_s`
    from now on.
    """

    num_tokens: int
    finish_s: float
    load_all_s: float
    recompute_s: float
    compute_s: float
    reason: Reason


@dataclass(frozen=True)
class LoadOrRecompute:
    """How many hit tokens to load, a prefix in whole blocks; the rest is computed again.

    Minimises finish(n) = max(load(n), busy) + compute(n, hit + miss - n), where load(n) is when n
    tokens have been read, busy the computing that the prefill engine has been given already, and
    compute(cached, new) = attention(cached, new) + linear_s_per_token * new. `attention` is an
    `AttentionModel` or any other prediction in seconds; `linear_s_per_token` what a new token
    costs beside it. All from measured rates.

    busy counts requests whose hits are still being read as well: were only those counted that
    could be computed now, an engine would look idle while a burst is being loaded, and requests
    computed again would hold up all of it (in the model of tests/scheduler, up to 37 % later
    than loading everything, against 2 %).

    The minimum is exact at block granularity. What is read while the engine is busy costs
    nothing, so n reaches as far at least. Beyond, with an `AttentionModel`, compute is concave in
    n (its pairs are (T^2 - n^2 + T - n) / 2, T = hit + miss), and so is the time to read n tokens
    over lanes that join one after the other; a concave sum is least at an end. So only a few n
    can be the best: none, one block, the last that is free, the next, all, and those next to
    where a lane is full. With other predictions every number of blocks is tried.
    """

    attention: object
    linear_s_per_token: float = 0.0
    block_tokens: int = 1

    def __post_init__(self):
        checked_int("block_tokens", self.block_tokens, 1)
        if not callable(self.attention) or not _is_time(self.linear_s_per_token):
            raise InvalidArgument(
                "load_or_recompute needs attention(cached, new) in seconds and a "
                f"linear_s_per_token of 0 or more; got {self.attention!r} and "
                f"{self.linear_s_per_token!r}")

    def num_load_tokens(self, num_hit: int, num_miss: int, load, busy_s: float = 0.0) -> int:
        """Hit tokens to load; see `choose`."""
        return self.choose(num_hit, num_miss, load, busy_s).num_tokens

    def choose(self, num_hit: int, num_miss: int, load, busy_s: float = 0.0) -> LoadChoice:
        """The best n <= `num_hit` (whole blocks; on a tie the least).

        `load` is a sequence of `Lane`s (start_s, tokens_per_s, max_tokens), over which reads are
        spread to finish together, or a callable tokens -> seconds. inf means never.
        """
        block = self.block_tokens
        if num_hit < 0 or num_hit % block or num_miss < 1 or not _is_time(busy_s):
            raise InvalidArgument(
                f"needs hits in whole blocks of {block} tokens, 1 miss token or more, and a "
                f"busy_s of 0 or more; got {num_hit}, {num_miss}, {busy_s!r}")
        if callable(load):
            load_s, blocks = load, range(num_hit // block + 1)
        else:
            lanes = _checked_lanes(load)
            blocks = self._ends(num_hit, lanes, busy_s) \
                if isinstance(self.attention, AttentionModel) else range(num_hit // block + 1)

            def load_s(tokens):
                return level(lanes, tokens)
        total = num_hit + num_miss
        ends = {n: self._finish_s(n * block, total, load_s, busy_s) for n in blocks}
        best = min(ends, key=lambda n: (ends[n], n))
        all_s, none_s = ends[num_hit // block], ends[0]
        return LoadChoice(
            best * block, ends[best], all_s, none_s, self._compute_s(best * block, total), Reason(
                "load {} of {} hit tokens: done in {:.3g} s (all {:.3g} s, none {:.3g} s; the "
                "engine is busy for {:.3g} s)", best * block, num_hit, ends[best], all_s, none_s,
                busy_s))

    def for_request(self, request, policy, pe, de, others, busy_s: float = 0.0) -> LoadChoice:
        """The choice for a `Request` whose reads `policy` is going to place.

        `pe`, `de`, `others` as for `policy.choose`; its `lanes` (if it has none, those of the
        side with the shorter queue) say how fast it reads. `busy_s`: see above, of this PE.
        """
        lanes = getattr(policy, "lanes", ShorterQueue().lanes)(pe, de, others)
        hits = request.num_cached_tokens
        return self.choose(hits, request.num_prompt_tokens - hits, lanes, busy_s)

    def _compute_s(self, num_load, total):
        new = total - num_load
        return self.attention(num_load, new) + self.linear_s_per_token * new

    def _finish_s(self, num_load, total, load_s, busy_s):
        loaded = load_s(num_load) if num_load else 0.0
        computed = self._compute_s(num_load, total)
        if not 0 <= loaded or not 0 <= computed:        # NaN fails both
            raise InvalidArgument(f"times must be 0 s or more: loading {num_load} of {total} "
                                  f"tokens takes {loaded!r} s, the rest {computed!r} s")
        return max(loaded, busy_s) + computed

    def _ends(self, num_hit, lanes, busy_s):
        """Numbers of blocks of which one is the best."""
        block, most = self.block_tokens, num_hit // self.block_tokens
        full = [lane.start_s + lane.max_tokens / lane.tokens_per_s for lane in lanes
                if lane.max_tokens < num_hit]
        found = {0, 1, most}
        for at_s in (busy_s, *full):
            tokens = sum(min(lane.max_tokens, lane.tokens_per_s * max(0.0, at_s - lane.start_s))
                         for lane in lanes)
            if tokens < INF:
                near = int(tokens // block)
                found.update((near - 1, near, near + 1))
        return sorted(n for n in found if 0 <= n <= most)


def _is_time(value) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < INF


def _checked_lanes(load) -> list[Lane]:
    try:
        lanes = [Lane(*lane) for lane in load]
        if all(0 <= lane.start_s < INF and 0 < lane.tokens_per_s < INF and 0 <= lane.max_tokens
               for lane in lanes):
            return lanes
    except TypeError:
        pass
    raise InvalidArgument("load must be a callable tokens -> seconds or lanes (start_s >= 0, "
                          f"tokens_per_s > 0, max_tokens >= 0), no dead ones; got {load!r}")
