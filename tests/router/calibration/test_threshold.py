"""A certified threshold keeps its promise as often as it says, and keeps as much as that allows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from router.calibration.binomial import largest_passing_count
from router.calibration.isotonic import fit_isotonic
from router.calibration.threshold import Threshold, certify, plain, within_budget

ALPHA, DELTA = 0.05, 0.1
rows_of_outcomes = st.lists(st.tuples(st.integers(-3, 8), st.booleans()), min_size=1, max_size=120)


def draw(
    rng: np.random.Generator, rows: int, *, levels: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Scores on a grid of `levels` points of [0, 1), each as likely; P(bad | s) = (1 - s) / 2."""
    score = rng.integers(0, levels, rows) / levels
    return score, rng.random(rows) < (1 - score) / 2


def true_regret(threshold: float, *, levels: int) -> float:
    grid = np.arange(levels) / levels
    return float(np.sum(((1 - grid) / 2)[grid >= threshold]) / levels)


def study(repeats: int, rows: int, *, levels: int, through_curve: bool) -> tuple[float, float]:
    """Share of violations of the certified and of the naive threshold, against the known truth."""
    rng = np.random.default_rng(20)
    grid = np.arange(levels) / levels
    certified = naive = 0.0
    for _ in range(repeats):
        score, bad = draw(rng, rows, levels=levels)
        if through_curve:  # fitted on the very rows that certify
            curve = fit_isotonic(score, ~bad)
            found = certify(curve(score), bad, alpha=ALPHA, delta=DELTA)
            kept = grid[curve(grid) >= found.bar]
        else:
            found = certify(score, bad, alpha=ALPHA, delta=DELTA)
            kept = grid[grid >= found.bar]
        certified += np.sum((1 - kept) / 2) / levels > ALPHA
        fits = [t for t in np.unique(score) if np.mean(bad & (score >= t)) <= ALPHA]
        naive += bool(fits) and true_regret(min(fits), levels=levels) > ALPHA
    return certified / repeats, naive / repeats


@pytest.mark.parametrize("through_curve", [False, True], ids=["raw scores", "curve fitted on the same rows"])
@pytest.mark.parametrize("levels", [10_000, 12], ids=["no ties", "many ties"])
def test_violations_are_as_rare_as_promised(levels: int, through_curve: bool) -> None:
    repeats = 400
    certified, naive = study(repeats, 200, levels=levels, through_curve=through_curve)
    assert certified <= DELTA + 3 * math.sqrt(DELTA * (1 - DELTA) / repeats)
    assert naive > 0.25, "the table is too easy to show anything"


@pytest.mark.slow
@pytest.mark.parametrize("through_curve", [False, True])
@pytest.mark.parametrize("levels", [2000, 25, 5])
@pytest.mark.parametrize("rows", [60, 500])
def test_violations_are_as_rare_as_promised_over_many_repeats(
    rows: int, levels: int, through_curve: bool
) -> None:
    repeats = 1500
    certified, _ = study(repeats, rows, levels=levels, through_curve=through_curve)
    assert certified <= DELTA + 3 * math.sqrt(DELTA * (1 - DELTA) / repeats)


def test_violations_come_near_the_level_so_that_nothing_is_given_away() -> None:
    rng = np.random.default_rng(5)
    regrets = []
    for _ in range(2000):
        score, bad = draw(rng, 200, levels=1_000_000)
        regrets.append((1 - certify(score, bad, alpha=ALPHA, delta=DELTA).bar) ** 2 / 4)
    level = np.mean(np.array(regrets) > ALPHA)
    # The binomial distribution is discrete: the exact level at 200 rows is 0.0627, not 0.1.
    assert 0.04 < level < 0.085


@settings(max_examples=150, deadline=None)
@given(rows_of_outcomes, st.sampled_from([0.02, 0.1, 0.3]), st.sampled_from([0.05, 0.2, 0.6]))
def test_it_is_the_largest_kept_set_that_passes_the_test(
    rows: list[tuple[int, bool]], alpha: float, delta: float
) -> None:
    score = np.array([score / 4 for score, _ in rows])
    bad = np.array([bad for _, bad in rows])
    allowed = largest_passing_count(len(rows), alpha=alpha, delta=delta)
    found = certify(score, bad, alpha=alpha, delta=delta)
    passing = [int((score >= t).sum()) for t in np.unique(score) if (bad & (score >= t)).sum() <= allowed]
    largest = max(passing, default=0)
    best = np.sort(score)[len(rows) - largest :]
    bad_kept = int((bad & (score >= best.min(initial=np.inf))).sum())
    if bad_kept and largest < len(rows) and bad_kept / largest >= bad.mean():
        assert found.forwards_all
        largest = 0
    assert int((score >= found.bar).sum()) == largest
    assert found.share_kept == pytest.approx(largest / len(rows))


@settings(max_examples=100, deadline=None)
@given(rows_of_outcomes, st.integers(0, 119))
def test_one_more_bad_row_never_keeps_more(rows: list[tuple[int, bool]], which: int) -> None:
    score = np.array([float(score) for score, _ in rows])
    bad = np.array([bad for _, bad in rows])
    worse = bad.copy()
    worse[which % len(rows)] = True
    before, after = certify(score, bad, alpha=0.2), certify(score, worse, alpha=0.2)
    # More bad rows among those that are forwarded may show that the score is worth something after all.
    assert before.forwards_all or after.bar >= before.bar


@settings(max_examples=60, deadline=None)
@given(rows_of_outcomes)
def test_a_stretched_scale_keeps_the_same_rows(rows: list[tuple[int, bool]]) -> None:
    score = np.array([float(score) for score, _ in rows])
    bad = np.array([bad for _, bad in rows])
    one, other = certify(score, bad, alpha=0.2), certify(np.exp(score), bad, alpha=0.2)
    assert (score >= one.bar).tolist() == (np.exp(score) >= other.bar).tolist()


def test_rows_that_may_not_be_kept_count_but_are_never_kept() -> None:
    score = np.linspace(0, 1, 200)
    bad = np.zeros(200, dtype=bool)
    bad[::2] = True
    found = certify(score, bad, keepable=~bad)
    assert not found.forwards_all
    assert found.share_kept == pytest.approx(0.5)
    assert found.rows == 200


def test_nothing_bad_keeps_everything_even_below_what_was_seen() -> None:
    assert certify(np.full(100, 0.8), np.zeros(100, dtype=bool)).value == 0.0


def test_too_few_rows_forward_all_and_name_the_minimum() -> None:
    found = certify(np.ones(44), np.zeros(44, dtype=bool))
    assert found.forwards_all
    assert found.bar == math.inf
    assert "at least 45" in found.reason


def test_bad_rows_on_top_forward_all_and_say_so() -> None:
    score = np.round(np.linspace(0, 1, 500), 1)
    found = certify(score, score == 1.0)
    assert found.forwards_all
    assert "forward all: no share" in found.reason


@pytest.mark.parametrize("reversed_order", [False, True], ids=["all are wrong", "the order is reversed"])
def test_a_small_share_of_bad_answers_is_not_kept_just_because_it_is_small(reversed_order: bool) -> None:
    score = np.linspace(0, 1, 500)
    found = certify(score, score > 0.5 if reversed_order else np.ones(500, dtype=bool))
    assert found.forwards_all
    assert "cannot tell which to keep" in found.reason


def test_a_constant_score_keeps_all_or_nothing() -> None:
    bad = np.arange(500) < 5
    assert certify(np.full(500, 0.5), bad).share_kept == 1.0
    assert certify(np.full(500, 0.5), np.arange(500) < 100).forwards_all


def test_neighbouring_floats_are_told_apart() -> None:
    above = np.nextafter(0.5, 1.0)
    score = np.array([0.5] * 30 + [above] * 170)
    found = certify(score, score == 0.5)
    assert found.value == above


def test_all_answers_unkeepable_forward_all() -> None:
    assert certify(np.ones(100), np.zeros(100, dtype=bool), keepable=np.zeros(100, dtype=bool)).forwards_all


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_no_numbers_are_refused_by_row(bad: float) -> None:
    with pytest.raises(ValueError, match="row 1"):
        certify([0.1, bad], [False, False])


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="one length"):
        certify([0.1, 0.2], [False])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=50), st.floats(0.0, 1.0))
def test_a_budget_is_never_exceeded_and_used_as_far_as_ties_allow(scores: list[int], budget: float) -> None:
    score = np.array([score / 10 for score in scores])
    found = within_budget(score, largest_share_forwarded=budget)
    forwarded = float(np.mean(score < found.bar))
    assert forwarded <= budget + 1e-9
    higher = np.unique(score)[np.unique(score) > found.bar]
    if len(higher):
        assert float(np.mean(score < higher[0])) > budget


def test_a_budget_counts_answers_that_are_forwarded_anyway() -> None:
    score = np.linspace(0.01, 1.0, 100)
    keepable = np.arange(100) >= 20
    found = within_budget(score, largest_share_forwarded=0.3, keepable=keepable)
    assert np.mean((score < found.bar) | ~keepable) == pytest.approx(0.3)
    impossible = within_budget(score, largest_share_forwarded=0.1, keepable=keepable)
    assert "cannot be met" in impossible.reason


def test_a_whole_budget_forwards_all_and_none_keeps_all() -> None:
    assert within_budget([0.1, 0.9], largest_share_forwarded=1.0).forwards_all
    assert within_budget([0.1, 0.9], largest_share_forwarded=0.0).share_kept == 1.0


def test_a_plain_value_promises_nothing() -> None:
    found = plain(0.7)
    assert (found.bar, found.alpha, found.regrets_kept) == (0.7, None, None)
    assert "not certified" in found.reason
    with pytest.raises(ValueError, match="finite"):
        plain(math.nan)


def test_a_threshold_that_forwards_all_has_an_unreachable_bar() -> None:
    assert Threshold(policy="plain", value=None, reason="none").bar > 1e308
