"""Metrics equal their definitions, worked out by hand or by brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.evaluation.metrics import (
    at_threshold,
    auroc,
    bootstrap_means,
    expected_calibration_error,
    forward_curve,
)

tables = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), min_size=1, max_size=40)


def columns(rows: list[tuple[int, bool, bool]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.array([r[0] / 5 for r in rows]), np.array([r[1] for r in rows]), np.array([r[2] for r in rows])


@settings(max_examples=100, deadline=None)
@given(tables)
def test_auroc_is_the_share_of_pairs_in_the_right_order(rows: list[tuple[int, bool, bool]]) -> None:
    score, right, _ = columns(rows)
    pairs = [(a > b) + (a == b) / 2 for a, b in itertools.product(score[right], score[~right])]
    found = auroc(score, right)
    assert (found is None) == (not pairs)
    if pairs:
        assert found == pytest.approx(np.mean(pairs))


@settings(max_examples=100, deadline=None)
@given(tables)
def test_the_curve_joins_edge_and_cloud_and_passes_every_threshold(
    rows: list[tuple[int, bool, bool]],
) -> None:
    score, edge, cloud = columns(rows)
    curve = forward_curve(score, edge, cloud)
    assert curve.edge_accuracy == pytest.approx(edge.mean())
    assert curve.cloud_accuracy == pytest.approx(cloud.mean())
    for threshold in np.unique(score):
        point = at_threshold(score, edge, cloud, threshold)
        assert np.interp(1 - point.share_kept, curve.forwarded, curve.accuracy) == pytest.approx(
            point.accuracy
        )


def test_apgr_and_cpt_of_a_perfect_router_over_a_perfect_cloud() -> None:
    edge = np.array([False] * 2 + [True] * 8)
    curve = forward_curve(np.arange(10.0), edge, np.ones(10, dtype=bool))
    assert (curve.cpt(0.5), curve.cpt(1.0)) == (pytest.approx(0.1), pytest.approx(0.2))
    assert curve.apgr() == pytest.approx(0.9)


def test_apgr_of_a_score_that_knows_nothing_is_a_half() -> None:
    edge = np.array([True, False] * 10)
    curve = forward_curve(np.ones(20), edge, np.ones(20, dtype=bool))
    assert curve.apgr() == pytest.approx(0.5)
    assert curve.cpt(0.8) == pytest.approx(0.8)


def test_a_cloud_that_is_no_better_has_no_gap_to_recover() -> None:
    right = np.array([True, False])
    curve = forward_curve(np.array([0.1, 0.9]), right, right)
    assert curve.apgr() is None
    assert curve.cpt(0.5) is None


def test_ece_by_hand() -> None:
    probability = np.array([0.12, 0.18, 0.95, 0.95, 1.0])
    happened = np.array([False, False, True, False, True])
    expected = (abs(0.15 - 0) * 2 + abs(2.9 / 3 - 2 / 3) * 3) / 5
    assert expected_calibration_error(probability, happened) == pytest.approx(expected)


def test_an_unreachable_threshold_is_the_cloud_alone() -> None:
    edge, cloud = np.array([True, False]), np.array([False, True])
    point = at_threshold(np.array([0.5, 0.6]), edge, cloud, np.inf)
    assert (point.share_kept, point.accuracy, point.regret) == (0.0, 0.5, 0.0)


def test_bootstrap_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        low, high = bootstrap_means({"x": rng.random(200) < 0.3}, rng=rng, resamples=200)["x"]
        covered += low <= 0.3 <= high
    assert 0.88 <= covered / 200 <= 0.99
