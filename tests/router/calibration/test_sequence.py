"""Fixed-sequence testing stops at the first policy that does not pass, and keeps its level."""

from __future__ import annotations

import math

import numpy as np
import pytest

from router.calibration.sequence import certify_sequence


def test_a_policy_behind_a_failing_one_is_not_reached_although_it_would_pass() -> None:
    none, many = np.zeros(200, dtype=bool), np.arange(200) < 30
    assert certify_sequence([none, none, many, none]) == 1
    assert certify_sequence([many, none]) is None
    assert certify_sequence([none, none]) == 1


def test_too_few_rows_certify_no_policy() -> None:
    assert certify_sequence(np.zeros((3, 44), dtype=bool)) is None
    assert certify_sequence(np.zeros((3, 45), dtype=bool)) == 2


def test_policies_that_are_not_nested_are_wrong_as_rarely_as_promised() -> None:
    rng = np.random.default_rng(0)
    rates = np.array([0.01, 0.03, 0.045, 0.055, 0.03, 0.2])
    repeats, alpha, delta = 2000, 0.05, 0.1
    wrong = 0
    for _ in range(repeats):
        last = certify_sequence(rng.random((6, 300)) < rates[:, None], alpha=alpha, delta=delta)
        wrong += last is not None and bool((rates[: last + 1] > alpha).any())
    assert 0 < wrong / repeats <= delta + 3 * math.sqrt(delta * (1 - delta) / repeats)


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(ValueError, match="policies, rows"):
        certify_sequence(np.zeros(5, dtype=bool))
