"""Isotonic curves are the best non-decreasing fit, keep order, and cannot claim certainty."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from router.calibration.errors import CalibrationUnusable, TooFewRows
from router.calibration.isotonic import TILT, IsotonicCurve, fit_isotonic, pool_adjacent_violators

values = st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 4)), min_size=1, max_size=25)
outcomes = st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=60)


def minimax(values: NDArray[np.float64], weights: NDArray[np.float64]) -> list[float]:
    """The isotonic fit by its closed form: max over a <= i of min over b >= i of the mean of a..b."""
    n = len(values)
    return [
        max(
            min(float(np.average(values[a : b + 1], weights=weights[a : b + 1])) for b in range(i, n))
            for a in range(i + 1)
        )
        for i in range(n)
    ]


@settings(max_examples=80, deadline=None)
@given(values)
def test_pooling_equals_the_closed_form(pairs: list[tuple[float, int]]) -> None:
    level = np.array([value for value, _ in pairs])
    weight = np.array([weight for _, weight in pairs], dtype=np.float64)
    assert pool_adjacent_violators(level, weight) == pytest.approx(minimax(level, weight), abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(outcomes)
def test_curves_never_fall_and_stay_inside_the_unit_interval(rows: list[tuple[int, bool]]) -> None:
    score = np.array([score / 4 for score, _ in rows])
    curve = fit_isotonic(score, [good for _, good in rows])
    seen = curve(np.linspace(-1.0, 4.0, 400))
    assert (np.diff(seen) >= 0).all()
    assert (seen > 0).all()
    assert (seen < 1).all()


@settings(max_examples=100, deadline=None)
@given(outcomes)
def test_scores_that_differ_still_differ_after_calibration(rows: list[tuple[int, bool]]) -> None:
    distinct = np.unique([score / 4 for score, _ in rows])
    curve = fit_isotonic([score / 4 for score, _ in rows], [good for _, good in rows])
    assert (np.diff(curve(distinct)) > 0).all()


@settings(max_examples=50, deadline=None)
@given(outcomes, st.randoms(use_true_random=False))
def test_the_order_of_tied_rows_does_not_matter(rows: list[tuple[int, bool]], random: object) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = (
        fit_isotonic([float(score) for score, _ in table], [good for _, good in table])
        for table in (rows, shuffled)
    )
    assert one.scores == pytest.approx(other.scores)
    assert one.probabilities == pytest.approx(other.probabilities)


def test_a_curve_through_many_rows_finds_the_truth() -> None:
    rng = np.random.default_rng(3)
    score = rng.random(20_000)
    curve = fit_isotonic(score, rng.random(20_000) < score**2)
    grid = np.linspace(0.05, 0.95, 50)
    assert np.abs(curve(grid) - grid**2).max() < 0.05


def test_two_pure_levels_become_two_knots_joined_by_a_line() -> None:
    curve = fit_isotonic([0.0, 0.0, 1.0, 1.0], [False, False, True, True])
    assert curve.scores == (0.0, 1.0)
    assert curve(0.5) == pytest.approx(0.5, abs=TILT)


def test_a_constant_score_gives_its_share_everywhere() -> None:
    curve = fit_isotonic([0.7] * 10, [True] * 4 + [False] * 6)
    assert curve([0.0, 0.7, 9.0]).tolist() == pytest.approx([0.4] * 3)


def test_no_rows_are_refused() -> None:
    with pytest.raises(TooFewRows) as caught:
        fit_isotonic([], [])
    assert caught.value.minimum == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_that_are_no_numbers_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        fit_isotonic([0.1, bad], [True, False])


@pytest.mark.parametrize(
    ("scores", "probabilities"),
    [
        ((), ()),
        ((0.0, 1.0), (0.5,)),
        ((1.0, 0.0), (0.2, 0.3)),
        ((0.0, 0.0), (0.2, 0.3)),
        ((0.0, 1.0), (0.3, 0.2)),
        ((0.0, 1.0), (0.3, 1.2)),
        ((0.0, float("nan")), (0.2, 0.3)),
        ((0.0, 1.0), (float("nan"), 0.3)),
    ],
)
def test_knots_that_make_no_curve_are_refused(
    scores: tuple[float, ...], probabilities: tuple[float, ...]
) -> None:
    with pytest.raises(CalibrationUnusable):
        IsotonicCurve(scores=scores, probabilities=probabilities)
