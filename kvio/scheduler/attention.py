"""How long the attention of a prefill takes: a model, and how it is fitted to measurements.

Source: DualPath §6 wants the time of attention predicted, by a model from profiling; the form
here is that of causal attention.
"""
import itertools
from dataclasses import dataclass

import numpy as np

from kvio.errors import InvalidArgument, checked_int

__all__ = ["AttentionFit", "AttentionModel", "fit_attention", "profile"]


@dataclass(frozen=True)
class AttentionModel:
    """Predicted attention time of a prefill, in seconds over all layers.

    Each of `new` tokens attends to those before it and itself: pairs = sum over i in 1..new of
    (cached + i) = new * (cached + (new + 1) / 2), which is what causal attention computes (2 FLOP
    a pair, head and dimension for each of QK^T and PV). seconds = per_pair_s * pairs + per_token_s
    * new + base_s; the second term is what grows with the tokens alone (projections, norms), the
    third what a request costs at all (launches). Additive over the requests of a batch.
    """

    per_pair_s: float
    per_token_s: float = 0.0
    base_s: float = 0.0

    def __post_init__(self):
        for name in ("per_pair_s", "per_token_s", "base_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise InvalidArgument(f"{name} must be a time of 0 s or more, not {value!r}")

    def __call__(self, cached: int, new: int) -> float:
        """Seconds for `new` >= 1 tokens behind `cached` ones; 0 for none."""
        if new < 1:
            return 0.0
        return (self.per_pair_s * (new * (cached + (new + 1) * 0.5)) + self.per_token_s * new
                + self.base_s)


@dataclass(frozen=True)
class AttentionFit:
    """A fitted model, and how far it is from what was measured.

    `residuals_s` (measured less predicted) are in the order of the samples. `max_relative` is the
    largest |residual| / measured, at `worst` (cached, new, seconds); `r_squared` is 1 less the
    residuals' share of the variance (1: all of it explained, 0: no better than the mean).
    """

    model: AttentionModel
    samples: tuple
    residuals_s: tuple
    max_relative: float
    rms_s: float
    r_squared: float

    @property
    def worst(self) -> tuple:
        return max(zip(self.samples, self.residuals_s, strict=True),
                   key=lambda pair: abs(pair[1]) / pair[0][2])[0]

    def __str__(self) -> str:
        model = self.model
        return (f"{model.per_pair_s:.3g} s a pair, {model.per_token_s:.3g} s a token, "
                f"{model.base_s:.3g} s a request; {len(self.samples)} samples, worst "
                f"{self.max_relative:.1%} (cached, new, s: {self.worst}), RMS {self.rms_s:.3g} s, "
                f"R^2 {self.r_squared:.5f}")


def fit_attention(samples, relative: bool = False) -> AttentionFit:
    """An `AttentionModel` by least squares from samples (cached, new, measured seconds).

    No coefficient comes out negative: of the fits with some of the three left out, the best
    whose others are not negative (exact, since there are only seven). `relative` weighs
    residuals by 1 / measured, so that short prefills count as much as long ones.
    InvalidArgument if there are fewer than 4 samples, if one is no number, not above 0 s or has
    new < 1, or if they do not tell the three terms apart: vary `cached` and `new`.
    """
    table = _table(samples)
    cached, new, seconds = table.T
    weight = 1 / seconds if relative else np.ones(len(seconds))
    terms = np.stack([new * (cached + (new + 1) / 2), new, np.ones(len(new))], axis=1)
    scale = np.linalg.norm(terms * weight[:, None], axis=0)
    scaled, wanted = terms * weight[:, None] / scale, seconds * weight
    smallest = np.linalg.svd(scaled, compute_uv=False)[-1]
    if smallest < 1e-6:
        raise InvalidArgument(
            f"{len(seconds)} samples do not tell time a pair, a token and a request apart: "
            "measure at least two values of cached and three of new, far from each other")
    best = None
    for used in itertools.chain.from_iterable(itertools.combinations(range(3), count)
                                              for count in (3, 2, 1)):
        some = np.linalg.lstsq(scaled[:, used], wanted, rcond=None)[0]
        error = float(np.sum((scaled[:, used] @ some - wanted) ** 2))
        if (some >= 0).all() and (best is None or error < best[0]):
            best = error, used, some
    coefficients = np.zeros(3)
    coefficients[list(best[1])] = best[2]
    model = AttentionModel(*(coefficients / scale).tolist())
    residuals = seconds - terms @ (coefficients / scale)
    spread = float(np.sum((seconds - seconds.mean()) ** 2))
    return AttentionFit(
        model, tuple((int(c), int(n), s) for c, n, s in table.tolist()),
        tuple(residuals.tolist()), float(np.max(np.abs(residuals) / seconds)),
        float(np.sqrt(np.mean(residuals ** 2))),
        1 - float(np.sum(residuals ** 2)) / spread if spread else 0.0)


def _table(samples) -> np.ndarray:
    """Samples as float64 [samples, 3]."""
    try:
        table = np.array([(float(c), float(n), float(s)) for c, n, s in samples])
    except (TypeError, ValueError):
        raise InvalidArgument("samples are (cached, new, seconds), all numbers") from None
    if len(table) < 4:
        raise InvalidArgument(f"{len(table)} samples are too few: three coefficients need 4 or "
                              "more, so that something is left over to judge them by")
    bad = ~(np.isfinite(table).all(axis=1) & (table[:, 0] >= 0) & (table[:, 1] >= 1)
            & (table[:, 2] > 0))
    if bad.any():
        raise InvalidArgument("a sample needs cached >= 0, new >= 1 and seconds above 0, all "
                              f"finite, not {tuple(table[bad][0].tolist())}")
    return table


def profile(measure, cached=(0, 1024, 8192, 32768), new=(1, 64, 256, 1024), repeats: int = 3,
            relative: bool = False) -> AttentionFit:
    """Call `measure(cached, new)` -> seconds over a grid and fit.

    `measure` runs the attention of all layers for `new` tokens behind `cached` ones; it is called
    once more for each point before it counts (caches, compilation), then `repeats` times, of
    which the shortest is taken, since disturbances only add.
    """
    checked_int("repeats", repeats, 1)
    if not callable(measure):
        raise InvalidArgument(f"measure(cached, new) -> seconds must be callable, not {measure!r}")
    samples = []
    for context, count in itertools.product(cached, new):
        measure(context, count)
        samples.append((context, count, min(measure(context, count) for _ in range(repeats))))
    return fit_attention(samples, relative)
