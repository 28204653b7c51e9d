"""The report answers the questions of the table, and says when a figure does not exist."""

from __future__ import annotations

import numpy as np
import pytest

from router.calibration.errors import TooFewRows
from router.evaluation.report import Outcomes, evaluate_table


def outcomes(
    rows: int = 600, *, edge: bool | None = None, cloud: bool | None = None, constant: bool = False
) -> Outcomes:
    rng = np.random.default_rng(0)
    confidence = np.full(rows, 0.8) if constant else rng.random(rows)
    return Outcomes(
        confidence=confidence,
        edge_right=rng.random(rows) < confidence if edge is None else np.full(rows, edge),
        cloud_right=rng.random(rows) < 0.9 if cloud is None else np.full(rows, cloud),
    )


def test_figures_of_the_whole_table() -> None:
    table = outcomes()
    report = evaluate_table(table, splits=20).report
    assert report.rows == 600
    assert report.edge_accuracy == table.edge_right.mean()
    assert report.oracle_accuracy == (table.edge_right | table.cloud_right).mean()
    assert report.edge_accuracy < report.cascade_accuracy <= report.oracle_accuracy


def test_the_seed_decides_every_figure() -> None:
    table = outcomes()
    assert evaluate_table(table, splits=30, seed=5).report == evaluate_table(table, splits=30, seed=5).report
    assert evaluate_table(table, splits=30, seed=5).report != evaluate_table(table, splits=30, seed=6).report


def test_a_bar_of_calibration_rows_is_named_when_it_is_not_reached() -> None:
    with pytest.raises(TooFewRows) as table:
        evaluate_table(outcomes(44))
    assert table.value.minimum == 45
    with pytest.raises(TooFewRows) as split:
        evaluate_table(outcomes(), calibration_rows=30)
    assert split.value.minimum == 45
    with pytest.raises(TooFewRows) as plain:
        evaluate_table(outcomes(10), alpha=0.5, delta=0.5)
    assert plain.value.minimum == 20


def test_more_calibration_rows_than_the_table_has_are_refused() -> None:
    with pytest.raises(ValueError, match="more than the 600"):
        evaluate_table(outcomes(), calibration_rows=601)


def test_all_right_keeps_all_and_has_no_auroc() -> None:
    found = evaluate_table(outcomes(edge=True), splits=20)
    assert (found.report.share_kept, found.report.auroc, found.report.regret) == (1.0, None, 0.0)
    assert any("every edge answer is right" in note for note in found.notes)


def test_all_wrong_forwards_all_and_says_so() -> None:
    found = evaluate_table(outcomes(edge=False, cloud=True), splits=20)
    assert (found.report.share_kept, found.report.threshold, found.report.auroc) == (0.0, None, None)
    assert any("forward all" in note for note in found.notes)
    assert found.report.cascade_accuracy == 1.0


def test_a_constant_confidence_forwards_all_and_says_so() -> None:
    found = evaluate_table(outcomes(constant=True), splits=20)
    assert (found.report.share_kept, found.report.threshold) == (0.0, None)
    assert any("constant" in note for note in found.notes)


def test_a_reversed_confidence_forwards_nearly_all_and_is_noticed() -> None:
    table = outcomes(2000)
    turned = Outcomes(
        confidence=1 - table.confidence, edge_right=table.edge_right, cloud_right=table.cloud_right
    )
    found = evaluate_table(turned, splits=100)
    assert any("worse than chance" in note for note in found.notes)
    assert found.on_all_rows.forwards_all
    assert found.report.share_kept < 0.02


def test_a_cloud_that_is_no_better_has_no_apgr() -> None:
    found = evaluate_table(outcomes(cloud=False), splits=20)
    assert (found.report.apgr, found.report.cpt80) == (None, None)
    assert any("not better" in note for note in found.notes)


def test_intervals_hold_their_figures() -> None:
    found = evaluate_table(outcomes(), splits=200)
    for name, (low, high) in found.intervals.items():
        assert low <= getattr(found.report, name) <= high
