"""Figures of a run and the comparison of its tokens, on made-up data."""
from types import SimpleNamespace

import numpy as np
import pytest

from kvio.engine.demo import compare_tokens
from kvio.engine.metrics import snic_max_over_avg


def ring(first, *nbytes):
    windows = 10**9 * first, 10**9, np.array(nbytes, np.uint64)
    return SimpleNamespace(busy_windows=lambda direction: windows)


def test_balance_is_the_mean_over_windows_in_which_any_snic_read():
    assert snic_max_over_avg([]) is None and snic_max_over_avg([ring(0)]) is None
    assert snic_max_over_avg([ring(7, 5, 5), ring(7, 5, 5)]) == 1
    assert snic_max_over_avg([ring(7, 5, 5), ring(0)]) == 2
    # windows 7: 6 and 0, 8: nobody, 9: 2 and 6, 10: 0 and 4
    assert snic_max_over_avg([ring(7, 6, 0, 2), ring(9, 6, 4)]) == pytest.approx(
        (2 + 1.5 + 2) / 3)


def made(*turns):
    return {"agent": [SimpleNamespace(generated=g, margins=m) for g, m in turns]}


def test_the_first_mismatch_is_named_and_only_a_tie_is_excused():
    one = made(([1, 2], [5.0, 5.0]), ([3, 4], [5.0, 5.0]))
    assert compare_tokens(one, one) == []
    tie, = compare_tokens(one, made(([1, 9], [5.0, 9e-4]), ([7, 7], [5.0, 5.0])))
    assert "agent turn 1 token 2: 2 against 9" in tie and "NOT" not in tie
    wrong, = compare_tokens(one, made(([1, 2], [5.0, 5.0]), ([8, 4], [1e-3, 5.0])))
    assert "turn 2 token 1" in wrong and "NOT a tie" in wrong
