"""The binomial tail is exact, and the counts drawn from it mean what they say."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.calibration.binomial import binomial_cdf, largest_passing_count, rows_needed


def rational_cdf(count: int, rows: int, rate: Fraction) -> Fraction:
    """The same by exact arithmetic."""
    return sum(
        (math.comb(rows, i) * rate**i * (1 - rate) ** (rows - i) for i in range(min(count, rows) + 1)),
        Fraction(0),
    )


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 150),
    share=st.floats(0.0, 1.0),
    rate=st.integers(1, 99).map(lambda percent: Fraction(percent, 100)),
)
def test_the_tail_equals_exact_arithmetic(rows: int, share: float, rate: Fraction) -> None:
    count = int(share * rows)
    assert binomial_cdf(count, rows, float(rate)) == pytest.approx(
        float(rational_cdf(count, rows, rate)), rel=1e-10
    )


@pytest.mark.parametrize(("count", "expected"), [(-1, 0.0), (20, 1.0), (25, 1.0)])
def test_the_tail_is_whole_outside_of_the_range(count: int, expected: float) -> None:
    assert binomial_cdf(count, 20, 0.3) == expected


def test_a_tail_far_too_small_for_naive_products_does_not_vanish() -> None:
    # 0.5^1000 is 9.33e-302; its 1000-fold products of single factors would still be fine, 0.05^5000 not.
    assert binomial_cdf(0, 1000, 0.5) == pytest.approx(2.0**-1000, rel=1e-9)
    assert 0.5 < binomial_cdf(5000, 100_000, 0.05) < 0.51


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(0, 120),
    alpha=st.integers(1, 60).map(lambda percent: Fraction(percent, 100)),
    delta=st.sampled_from([Fraction(1, 100), Fraction(1, 10), Fraction(3, 10), Fraction(8, 10)]),
)
def test_the_largest_passing_count_is_the_last_one_under_delta(
    rows: int, alpha: Fraction, delta: Fraction
) -> None:
    count = largest_passing_count(rows, alpha=float(alpha), delta=float(delta))
    if count >= 0:
        assert rational_cdf(count, rows, alpha) <= delta * (1 + Fraction(1, 10**9))
    if count < rows:
        assert rational_cdf(count + 1, rows, alpha) > delta * (1 - Fraction(1, 10**9))


def test_known_counts_at_the_defaults() -> None:
    assert largest_passing_count(500, alpha=0.05, delta=0.1) == 18
    assert largest_passing_count(500, alpha=0.02, delta=0.1) == 5


@pytest.mark.parametrize(
    ("alpha", "delta"), [(0.05, 0.1), (0.02, 0.1), (0.01, 0.01), (0.5, 0.5), (0.3, 0.09)]
)
def test_rows_needed_is_the_least_that_certifies_anything(alpha: float, delta: float) -> None:
    least = rows_needed(alpha=alpha, delta=delta)
    assert largest_passing_count(least, alpha=alpha, delta=delta) == 0
    assert largest_passing_count(least - 1, alpha=alpha, delta=delta) == -1


@pytest.mark.parametrize(
    ("rows", "alpha", "delta"),
    [(-1, 0.1, 0.1), (5, 0.0, 0.1), (5, 1.0, 0.1), (5, 0.1, 0.0), (5, math.nan, 0.1), (5, 0.1, math.nan)],
)
def test_numbers_out_of_range_are_refused(rows: int, alpha: float, delta: float) -> None:
    with pytest.raises(ValueError, match="must"):
        largest_passing_count(rows, alpha=alpha, delta=delta)
