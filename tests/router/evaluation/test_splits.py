"""The study of splits uses the deployed rule, and counts violations against a truth that is one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from router.calibration.threshold import certify
from router.evaluation import splits as module
from router.evaluation.metrics import at_threshold
from router.evaluation.splits import held_out_ece, study_splits

Table = tuple[np.ndarray, np.ndarray, np.ndarray]
ALPHA, DELTA = 0.05, 0.1


def table(rows: int, *, seed: int = 0, digits: int = 6) -> Table:
    rng = np.random.default_rng(seed)
    confidence = np.round(rng.random(rows), digits)
    return confidence, rng.random(rows) < confidence, rng.random(rows) < 0.85


@pytest.mark.parametrize("digits", [6, 1], ids=["few ties", "many ties"])
def test_every_threshold_is_the_one_that_certify_finds(digits: int) -> None:
    confidence, edge, cloud = table(300, digits=digits)
    study = study_splits(
        confidence,
        edge,
        cloud,
        alpha=ALPHA,
        delta=DELTA,
        calibration_rows=150,
        splits=60,
        rng=np.random.default_rng(4),
    )
    order = np.argsort(confidence, kind="stable")
    drawn = np.random.default_rng(4).integers(0, 300, size=(60, 150))
    for split, rows in enumerate(order[drawn]):
        found = certify(confidence[rows], ~edge[rows] & cloud[rows], alpha=ALPHA, delta=DELTA)
        assert study.certified.thresholds[split] == found.bar
        point = at_threshold(confidence, edge, cloud, found.bar)
        assert study.certified.share_kept[split] == pytest.approx(point.share_kept)
        assert study.certified.regret[split] == pytest.approx(point.regret)
        assert study.certified.accuracy[split] == pytest.approx(point.accuracy)


def test_held_out_figures_are_of_the_rows_that_were_not_drawn() -> None:
    confidence, edge, cloud = table(120)
    study = study_splits(
        confidence,
        edge,
        cloud,
        alpha=0.1,
        delta=DELTA,
        calibration_rows=80,
        splits=20,
        rng=np.random.default_rng(4),
        truth="held_out",
    )
    order = np.argsort(confidence, kind="stable")
    rng = np.random.default_rng(4)
    for split in range(20):
        drawn = rng.choice(120, 80, replace=False, shuffle=False)
        left = np.delete(order, drawn)
        threshold = study.certified.thresholds[split]
        point = at_threshold(confidence[left], edge[left], cloud[left], threshold)
        assert study.certified.share_kept[split] == pytest.approx(point.share_kept)
        assert study.certified.regret[split] == pytest.approx(point.regret)
        assert study.certified.accuracy[split] == pytest.approx(point.accuracy)


@pytest.mark.parametrize("rows", [700, 10_000])
@pytest.mark.parametrize("digits", [6, 1], ids=["few ties", "many ties"])
def test_the_certified_threshold_keeps_its_promise_and_the_naive_one_does_not(rows: int, digits: int) -> None:
    study = study_splits(
        *table(rows, digits=digits),
        alpha=ALPHA,
        delta=DELTA,
        calibration_rows=500,
        splits=500,
        rng=np.random.default_rng(1),
    )
    assert study.certified.violation_rate <= DELTA + 3 * math.sqrt(DELTA * (1 - DELTA) / 500)
    assert study.naive.violation_rate > 0.2
    assert study.certified.share_kept.mean() < study.naive.share_kept.mean()


def test_blocks_do_not_change_the_kind_of_result(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"alpha": ALPHA, "delta": DELTA, "calibration_rows": 200, "splits": 50}
    whole = study_splits(*table(400), **settings, rng=np.random.default_rng(2))  # type: ignore[arg-type]
    monkeypatch.setattr(module, "_CELLS", 200 * 7)
    parts = study_splits(*table(400), **settings, rng=np.random.default_rng(2))  # type: ignore[arg-type]
    assert parts.certified.thresholds.tolist() == whole.certified.thresholds.tolist()


def test_calibration_without_rows_left_out_has_no_held_out_figures() -> None:
    with pytest.raises(ValueError, match="leave none out"):
        study_splits(
            *table(100),
            alpha=ALPHA,
            delta=DELTA,
            calibration_rows=100,
            splits=2,
            rng=np.random.default_rng(0),
            truth="held_out",
        )


def test_calibration_repairs_an_overconfident_score() -> None:
    rng = np.random.default_rng(3)
    honest = rng.random(4000)
    before, after = held_out_ece(np.sqrt(honest), rng.random(4000) < honest, halves=20, rng=rng)
    assert before > 0.12
    assert after < 0.04
