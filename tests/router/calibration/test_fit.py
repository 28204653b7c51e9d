"""Fitting uses each row for what it may be used for, and the guarantee survives learning."""

from __future__ import annotations

import math

import numpy as np
import pytest

from router.calibration.errors import BadSignal, TooFewRows
from router.calibration.fit import Rows, fit_head
from router.calibration.logistic import sigmoid

ALPHA, DELTA = 0.05, 0.1


def rows_of(count: int, rng: np.random.Generator, *, tasks: bool = False) -> Rows:
    """Two useful signals and one useless; the cloud is right in nine of ten."""
    signals = rng.normal(size=(3, count))
    keys = rng.integers(0, 2, count)
    ease = 1.5 * signals[0] + signals[1] + (2.0 * keys if tasks else 0.5)
    return Rows(
        signals={"low_logprob": signals[0], "mean_margin": signals[1], "tokens": signals[2]},
        edge_right=rng.random(count) < sigmoid(ease),
        cloud_right=rng.random(count) < 0.9,
        tasks=[("hard", "easy")[key] for key in keys] if tasks else (),
    )


def regret_at(rows: Rows, kept: np.ndarray) -> float:
    return float((kept & ~rows.edge_right & rows.cloud_right).mean())


@pytest.mark.parametrize("order", [None, "low_logprob"], ids=["learned order", "fixed order"])
def test_the_guarantee_holds_on_fresh_rows(order: str | None) -> None:
    rng = np.random.default_rng(11)
    population = rows_of(60_000, rng)
    repeats, broken, kept_shares = 60, 0, []
    for _ in range(repeats):
        head = fit_head(rows_of(600, rng), rng=rng, order=order, alpha=ALPHA, delta=DELTA).head
        kept = head.evaluate_columns(population.signals) >= head.threshold.bar
        broken += regret_at(population, kept) > ALPHA
        kept_shares.append(kept.mean())
    assert broken / repeats <= DELTA + 3 * math.sqrt(DELTA * (1 - DELTA) / repeats)
    assert np.mean(kept_shares) > 0.15


def test_learning_from_two_signals_keeps_more_than_the_first_alone() -> None:
    rng = np.random.default_rng(12)
    rows, population = rows_of(4000, rng), rows_of(20_000, rng)
    learned = fit_head(rows, rng=rng).head
    fixed = fit_head(rows, rng=rng, order="low_logprob").head
    assert set(learned.signals) == {"low_logprob", "mean_margin"}
    shares = [(h.evaluate_columns(population.signals) >= h.threshold.bar).mean() for h in (learned, fixed)]
    assert shares[0] > shares[1] + 0.05


@pytest.mark.parametrize("method", ["isotonic", "logistic"])
def test_the_confidence_is_the_share_of_answers_as_good_as_the_clouds(method: str) -> None:
    rng = np.random.default_rng(13)
    population = rows_of(40_000, rng)
    head = fit_head(rows_of(5000, rng), rng=rng, method=method).head  # type: ignore[arg-type]
    confidence = head.evaluate_columns(population.signals)
    good = population.edge_right | ~population.cloud_right
    for low in np.arange(0.3, 1.0, 0.1):
        inside = (confidence >= low) & (confidence < low + 0.1)
        assert good[inside].mean() == pytest.approx(confidence[inside].mean(), abs=0.04)


def test_rows_that_learned_the_order_never_certify_it() -> None:
    rng = np.random.default_rng(14)
    fitted = fit_head(rows_of(1000, rng), rng=rng, learning_share=0.3)
    assert fitted.head.fitted_rows == 300
    assert len(fitted.certified_on) == fitted.head.calibrated_rows == fitted.head.threshold.rows == 700
    assert len(np.unique(fitted.certified_on)) == 700


def test_a_fixed_order_uses_every_row_for_both() -> None:
    rng = np.random.default_rng(15)
    fitted = fit_head(rows_of(1000, rng), rng=rng, order="mean_margin")
    assert fitted.selection is None
    assert (fitted.head.fitted_rows, fitted.head.threshold.rows) == (0, 1000)


def test_each_task_has_a_threshold_from_its_own_rows() -> None:
    rng = np.random.default_rng(16)
    rows = rows_of(3000, rng, tasks=True)
    head = fit_head(rows, rng=rng, order="low_logprob").head
    assert set(head.tasks) == {"easy", "hard"}
    assert head.tasks["easy"].rows + head.tasks["hard"].rows == 3000
    assert head.tasks["easy"].bar < head.tasks["hard"].bar
    population = rows_of(30_000, rng, tasks=True)
    confidence = head.evaluate_columns(population.signals)
    keys = np.array(population.tasks)
    for key, threshold in head.tasks.items():
        bad = ~population.edge_right & population.cloud_right & (confidence >= threshold.bar)
        assert bad[keys == key].mean() <= ALPHA


def test_thresholds_together_divide_the_error_among_them() -> None:
    rng = np.random.default_rng(17)
    rows = rows_of(2000, rng, tasks=True)
    head = fit_head(rows, rng=rng, order="low_logprob", together=True).head
    assert head.threshold.delta == pytest.approx(DELTA / 3)
    apart = fit_head(rows, rng=rng, order="low_logprob").head
    assert apart.threshold.delta == DELTA
    assert head.threshold.bar >= apart.threshold.bar


def test_a_task_with_few_rows_forwards_all_and_names_the_minimum() -> None:
    rng = np.random.default_rng(18)
    rows = rows_of(1000, rng)
    rows = Rows(
        signals=rows.signals,
        edge_right=rows.edge_right,
        cloud_right=rows.cloud_right,
        tasks=["rare"] * 10 + [None] * 990,
    )
    head = fit_head(rows, rng=rng, order="low_logprob").head
    assert head.tasks["rare"].forwards_all
    assert "at least 45" in head.tasks["rare"].reason
    assert not head.threshold.forwards_all


def test_answers_that_may_not_be_kept_are_not() -> None:
    rng = np.random.default_rng(19)
    rows = rows_of(1000, rng)
    cut = rng.random(1000) < 0.5
    both = Rows(signals=rows.signals, edge_right=rows.edge_right, cloud_right=rows.cloud_right, keepable=~cut)
    head = fit_head(both, rng=rng, order="low_logprob").head
    assert head.threshold.share_kept <= 0.5


@pytest.mark.parametrize("right", [True, False], ids=["all right", "all wrong"])
@pytest.mark.parametrize("order", [None, "low_logprob"])
def test_one_sided_tables_keep_all_or_forward_all(order: str | None, right: bool) -> None:
    rng = np.random.default_rng(20)
    rows = rows_of(400, rng)
    one = Rows(signals=rows.signals, edge_right=np.full(400, right), cloud_right=np.ones(400, dtype=bool))
    threshold = fit_head(one, rng=rng, order=order).head.threshold
    assert threshold.forwards_all is not right
    assert threshold.share_kept == float(right)


def test_a_constant_signal_is_kept_or_forwarded_as_a_whole() -> None:
    rng = np.random.default_rng(21)
    rows = rows_of(400, rng)
    constant = Rows(
        signals={"tokens": np.ones(400)}, edge_right=rows.edge_right, cloud_right=rows.cloud_right
    )
    assert fit_head(constant, rng=rng, order="tokens").head.threshold.forwards_all
    with pytest.raises(BadSignal, match="constant"):
        fit_head(constant, rng=rng)


def test_bad_rows_are_refused_in_words() -> None:
    rng = np.random.default_rng(22)
    rows = rows_of(100, rng)
    with pytest.raises(TooFewRows) as few:
        fit_head(rows_of(19, rng), rng=rng)
    assert few.value.minimum == 20
    with pytest.raises(BadSignal, match="no signal perplexity"):
        fit_head(rows, rng=rng, order="perplexity")
    with pytest.raises(ValueError, match="isotonic"):
        fit_head(rows, rng=rng, order="tokens", method="logistic")
    holed = dict(rows.signals) | {"tokens": np.where(np.arange(100) == 7, np.nan, 1.0)}
    with pytest.raises(BadSignal, match="row 7"):
        fit_head(Rows(signals=holed, edge_right=rows.edge_right, cloud_right=rows.cloud_right), rng=rng)
    with pytest.raises(ValueError, match="lengths"):
        fit_head(
            Rows(signals=rows.signals, edge_right=rows.edge_right[:50], cloud_right=rows.cloud_right), rng=rng
        )
    with pytest.raises(BadSignal, match="no signals"):
        fit_head(Rows(signals={}, edge_right=rows.edge_right, cloud_right=rows.cloud_right), rng=rng)
