"""Compute-quota packing (DualPath §6) by examples and invariants; the attention model's fit."""
from collections import deque
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvio.errors import InvalidArgument
from kvio.scheduler import AttentionModel, PrefillWork, fit_attention, pack_prefill, profile

QUOTA_S = 0.3                       # 300 ms, the paper's


def work(*cached_new):
    return [PrefillWork(i, cached, new) for i, (cached, new) in enumerate(cached_new)]


MS = 2**-10                         # about a millisecond, exact in binary


def per_token(seconds):
    return lambda cached, new: new * seconds


@pytest.mark.parametrize("ready, batch", [
    ([], []),
    ([(0, 100), (0, 100)], [(0, 100), (1, 100)]),               # all fit
    ([(0, 100), (0, 100), (0, 101)], [(0, 100), (1, 100), (2, 100)]),   # the third is cut
    ([(0, 300), (0, 1)], [(0, 300)]),                           # the quota is reached
    ([(0, 299), (0, 2), (0, 1)], [(0, 299), (1, 1)]),           # first in, first out: 2 waits
    ([(0, 1000)], [(0, 300)]),
])
def test_packs_first_in_first_out_until_the_quota_and_cuts_who_would_exceed_it(ready, batch):
    assert pack_prefill(work(*ready), 300 * MS, per_token(MS)) == batch


def test_cached_tokens_count():
    """Two requests with the same new tokens: behind the longer context fewer fit."""
    model = AttentionModel(per_pair_s=1e-8)
    for cached in (0, 10_000, 100_000):
        [(_, new)] = pack_prefill(work((cached, 10**6)), QUOTA_S, model)
        assert model(cached, new) <= QUOTA_S < model(cached, new + 1)
    assert pack_prefill(work((100_000, 10**6)), QUOTA_S, model) == [(0, 299)]
    assert pack_prefill(work((0, 10**6)), QUOTA_S, model) == [(0, 7745)]    # n (n + 1) / 2 = 3e7


def test_a_request_that_alone_exceeds_the_quota_gets_on_by_a_token():
    assert pack_prefill(work((0, 5), (0, 5)), QUOTA_S, per_token(1.0)) == [(0, 1)]
    # ... at the head only: behind another it waits.
    slow = {0: 0.2, 1: 5.0}
    assert pack_prefill(work((0, 1), (1, 5)), QUOTA_S, lambda c, n: slow[c] * n) == [(0, 1)]


def test_without_a_quota_the_head_goes_whole():
    assert pack_prefill(work((640, 70), (0, 10))) == [(0, 70)] and pack_prefill([]) == []


@pytest.mark.parametrize("most, batch", [
    (1, [(0, 1)]), (70, [(0, 70)]), (75, [(0, 70), (1, 5)]), (999, [(0, 70), (1, 10)])])
def test_a_bound_on_new_tokens_cuts_as_well(most, batch):
    ready = work((640, 70), (0, 10))
    assert pack_prefill(ready, max_tokens=most) == batch
    assert pack_prefill(ready, 100.0, per_token(1.0), max_tokens=most) == batch
    assert pack_prefill(ready, 5.0, per_token(1.0), max_tokens=most) == [(0, min(most, 5))]


def test_few_predictions_are_asked_for():
    asked = []

    def attention(cached, new):
        asked.append(new)
        return new * 1e-9

    [(_, new)] = pack_prefill(work((0, 10**9)), QUOTA_S, attention)
    assert new == pytest.approx(3 * 10**8, abs=1)
    assert len(asked) <= 2 + 30         # log2 of 10^9, by bisection


@pytest.mark.parametrize("wrong", [
    lambda: pack_prefill([], quota_s=0.3), lambda: pack_prefill([], 0, per_token(1)),
    lambda: pack_prefill([], -1, per_token(1)), lambda: pack_prefill([], nan, per_token(1)),
    lambda: pack_prefill([], "all", per_token(1)), lambda: pack_prefill([], 0.3, 7),
    lambda: pack_prefill([], None, per_token(1)), lambda: pack_prefill([], max_tokens=0),
    lambda: pack_prefill(work((0, 9)), 0.3, per_token(nan)),
    lambda: pack_prefill(work((0, 9)), 0.3, per_token(-1.0)),
    lambda: pack_prefill(work((0, 0))), lambda: pack_prefill(work((0, 0)), 0.3, per_token(1)),
    lambda: pack_prefill(work((-1, 1)), 0.3, per_token(1)), lambda: pack_prefill([7]),
    lambda: pack_prefill(work((nan, 1)), 0.3, per_token(1)),
    lambda: pack_prefill(work((0, "1")), 0.3, per_token(1)),
    lambda: pack_prefill(work((0, 9)), 0.3, lambda cached, new: None), lambda: profile(7),
    lambda: AttentionModel(-1e-9), lambda: AttentionModel(1e-9, nan), lambda: AttentionModel("1"),
    lambda: AttentionModel(1e-9, 0, inf),
])
def test_bad_input_is_refused(wrong):
    with pytest.raises(InvalidArgument):
        wrong()


models = st.builds(AttentionModel, st.sampled_from([0.0, 1e-7, 1e-6]),
                   st.sampled_from([0.0, 1e-5, 1e-3]), st.sampled_from([0.0, 0.01]))
queues = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 300)), max_size=6)


@settings(deadline=None)
@given(queues, models, st.sampled_from([0.02, 0.3, 1.0]), st.sampled_from([None, 1, 64, 500]))
def test_every_token_is_packed_once_in_order_within_the_quota(cached_new, model, quota_s, most):
    """The engine's loop around the packing, until nothing is left."""
    ready, seen = deque(work(*cached_new)), {i: [] for i in range(len(cached_new))}
    left = {w.request_id: w.num_new_tokens for w in ready}
    while ready:
        batch = pack_prefill(ready, quota_s, model, most)
        assert batch and [r for r, _ in batch] == [w.request_id for w in ready][:len(batch)]
        seconds = sum(model(w.num_cached_tokens, new)
                      for w, (_, new) in zip(ready, batch, strict=False))
        assert seconds <= quota_s or [new for _, new in batch] == [1]
        assert most is None or sum(new for _, new in batch) <= most
        whole = [new == w.num_new_tokens for w, (_, new) in zip(ready, batch, strict=False)]
        assert all(whole[:-1])                              # who is cut ends the batch
        beyond = ready[len(batch)] if whole[-1] and len(batch) < len(ready) else None
        if most is None or sum(new for _, new in batch) < most:     # one token more is too much
            if not whole[-1]:
                last, new = ready[len(batch) - 1], batch[-1][1]
                more = model(last.num_cached_tokens, new + 1) - model(last.num_cached_tokens, new)
                assert seconds + more > quota_s - 1e-12
            elif beyond is not None:
                assert seconds + model(beyond.num_cached_tokens, 1) > quota_s - 1e-12
        for request_id, new in batch:
            seen[request_id].append(new)
            left[request_id] -= new
            head = ready.popleft()
            if left[request_id]:
                ready.appendleft(PrefillWork(request_id, head.num_cached_tokens + new,
                                             left[request_id]))
    assert [sum(seen[i]) for i in seen] == [new for _, new in cached_new]


def test_the_model_counts_the_pairs_of_causal_attention():
    model = AttentionModel(per_pair_s=1.0)
    for cached, new in [(0, 1), (0, 5), (7, 1), (7, 4)]:
        assert model(cached, new) == sum(cached + i for i in range(1, new + 1))
    assert AttentionModel(0.0, 2.0, 3.0)(9, 4) == 11 and model(9, 0) == 0


@settings(deadline=None)
@given(models, st.integers(0, 10**5), st.integers(1, 10**5))
def test_the_model_never_falls_when_tokens_are_added(model, cached, new):
    assert model(cached, new) <= model(cached, new + 1)
    assert model(cached, new) <= model(cached + 1, new)


def test_the_paper_s_balance_on_a_skewed_queue():
    """What the quota is for: batches of very different contexts take nearly the same time."""
    model = AttentionModel(per_pair_s=2e-9, per_token_s=1e-7)
    ready = deque(work(*[(64_000 if i % 3 == 0 else 500, 2000 + 37 * i) for i in range(60)]))
    whole = [model(w.num_cached_tokens, w.num_new_tokens) for w in ready]
    assert max(whole) / np.mean(whole) > 2
    taken = []
    while ready:
        seconds = 0.0
        for _, new in pack_prefill(ready, QUOTA_S, model):
            head = ready.popleft()
            seconds += model(head.num_cached_tokens, new)
            if new < head.num_new_tokens:
                ready.appendleft(PrefillWork(head.request_id, head.num_cached_tokens + new,
                                             head.num_new_tokens - new))
        taken.append(seconds)
    assert max(taken[:-1]) / np.mean(taken[:-1]) < 1.001        # all but the last are full


# -- fitting

GRID = [(c, n) for c in (0, 1000, 8000, 32000) for n in (1, 50, 400, 1500)]


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("truth", [(1e-9, 2e-6, 3e-4), (1e-9, 0.0, 0.0), (0.0, 2e-6, 0.0),
                                   (3e-10, 0.0, 1e-3)])
def test_a_fit_finds_what_made_the_samples(truth, relative):
    model = AttentionModel(*truth)
    fit = fit_attention([(c, n, model(c, n)) for c, n in GRID], relative)
    found = (fit.model.per_pair_s, fit.model.per_token_s, fit.model.base_s)
    assert found == pytest.approx(truth, rel=1e-6, abs=1e-13)
    assert fit.max_relative < 1e-6 and fit.rms_s < 1e-9 and fit.r_squared > 1 - 1e-9


samples = st.lists(st.floats(0.5, 2.0), min_size=len(GRID), max_size=len(GRID))


@settings(deadline=None)
@given(samples, st.booleans())
def test_no_better_fit_without_negative_coefficients(noise, relative):
    """The optimum of a convex problem: the slope is 0 along every coefficient above 0, and
    upwards along those that are 0 (Karush, Kuhn, Tucker)."""
    truth = AttentionModel(1e-9, 2e-6, 3e-4)
    rows = [(c, n, truth(c, n) * factor) for (c, n), factor in zip(GRID, noise, strict=True)]
    fit = fit_attention(rows, relative)
    terms = np.array([(n * (c + (n + 1) / 2), n, 1.0) for c, n, _ in rows])
    seconds = np.array([s for *_, s in rows])
    assert np.array(fit.residuals_s) == pytest.approx(
        [s - fit.model(c, n) for c, n, s in rows], abs=1e-12)
    weight = 1 / seconds if relative else np.ones(len(rows))
    scaled = terms * weight[:, None] / np.linalg.norm(terms * weight[:, None], axis=0)
    slope = -scaled.T @ (np.array(fit.residuals_s) * weight) / np.linalg.norm(seconds * weight)
    found = np.array([fit.model.per_pair_s, fit.model.per_token_s, fit.model.base_s])
    assert (found >= 0).all() and (slope > -1e-7).all() and (abs(slope[found > 0]) < 1e-7).all()


def test_residuals_are_reported():
    model = AttentionModel(1e-9, 2e-6, 3e-4)
    rows = [(c, n, model(c, n)) for c, n in GRID]
    rows[5] = (*rows[5][:2], rows[5][2] * 1.5)
    fit = fit_attention(rows)
    relative = [abs(residual) / s
                for residual, (_, _, s) in zip(fit.residuals_s, rows, strict=True)]
    assert fit.max_relative == max(relative) > 0.01
    assert fit.worst == fit.samples[relative.index(max(relative))]
    assert fit.rms_s == pytest.approx(np.sqrt(np.mean(np.square(fit.residuals_s))))
    assert 0.9 < fit.r_squared < 1 and f"{fit.max_relative:.1%}" in str(fit)


@pytest.mark.parametrize("rows", [
    [], [(0, 1, 1.0)] * 3, [(0, 1, 1.0)] * 9,                       # too few, all the same
    [(0, n, 1.0) for n in (5, 5, 5, 5)], [(c, 5, 1.0) for c in range(9)],      # nothing varies
    [(0, n, nan) for n in (1, 9, 99, 999)], [(0, n, inf) for n in (1, 9, 99, 999)],
    [(0, n, 0.0) for n in (1, 9, 99, 999)], [(0, n, -1.0) for n in (1, 9, 99, 999)],
    [(-1, n, 1.0) for n in (1, 9, 99, 999)], [(0, 0, 1.0)] * 4, [(0, 1)] * 4, [None] * 4, 7,
    ["fast"] * 4,
])
def test_samples_that_cannot_be_fitted_are_refused(rows):
    with pytest.raises(InvalidArgument):
        fit_attention(rows)


def test_profiling_measures_a_grid_and_takes_the_shortest():
    model, calls = AttentionModel(1e-9, 2e-6, 3e-4), []

    def measure(cached, new):
        calls.append((cached, new))
        late = {1: 50.0, 2: 0.2, 3: 0.0, 4: 0.1}[calls.count((cached, new))]    # warming up: 50 s
        return model(cached, new) + late

    fit = profile(measure, cached=(0, 4000), new=(1, 100, 2000))
    assert len(calls) == 6 * 4 and len(fit.samples) == 6
    assert fit.model(20_000, 500) == pytest.approx(model(20_000, 500), rel=1e-6)
    with pytest.raises(InvalidArgument):
        profile(measure, repeats=0)


@pytest.mark.parametrize("new", [float("inf"), 2.5, "3", None])
def test_work_is_counted_in_whole_tokens(new):
    """Or the search for the cut would halve for ever."""
    with pytest.raises(InvalidArgument, match="PrefillWork"):
        pack_prefill([PrefillWork(1, 0, new)], 0.3, lambda cached, new: new * 1.0)
