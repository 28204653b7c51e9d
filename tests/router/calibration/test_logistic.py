"""The logistic fit is the penalized optimum, and stays finite where maximum likelihood does not."""

from __future__ import annotations

import numpy as np
import pytest

from router.calibration.errors import CalibrationUnusable, TooFewRows
from router.calibration.logistic import LogisticScore, fit_logistic, log_loss, sigmoid


def test_known_weights_are_found_again() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50_000, 2)) * [1.0, 10.0] + [0.0, 3.0]
    truth = sigmoid(0.5 + 1.5 * x[:, 0] - 0.08 * x[:, 1])
    score = fit_logistic(x, rng.random(len(x)) < truth)
    assert np.abs(score(x) - truth).max() < 0.03


def test_the_gradient_is_zero_at_the_fit() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 3))
    good = rng.random(200) < sigmoid(x[:, 0])
    score = fit_logistic(x, good, ridge=2.0)
    z = (x - x.mean(axis=0)) / x.std(axis=0)
    goods, bads = good.sum(), (~good).sum()
    target = np.where(good, (goods + 1) / (goods + 2), 1 / (bads + 2))
    rest = score(x) - target
    assert z.T @ rest + 2.0 * np.array(score.weights) == pytest.approx(np.zeros(3), abs=1e-4)
    assert rest.sum() == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("good", [np.ones(40, dtype=bool), np.zeros(40, dtype=bool)])
def test_one_class_gives_a_finite_probability_near_it(good: np.ndarray) -> None:
    x = np.random.default_rng(2).normal(size=(40, 2))
    probability = fit_logistic(x, good)(x)
    assert np.abs(probability - good).max() < 0.1
    assert ((probability > 0) & (probability < 1)).all()


def test_separable_classes_give_finite_weights() -> None:
    x = np.linspace(-1, 1, 60)[:, None]
    score = fit_logistic(x, x[:, 0] > 0)
    assert np.isfinite(score.weights).all()
    assert (score(x)[x[:, 0] > 0.1] > 0.5).all()


def test_a_constant_signal_changes_nothing() -> None:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(100, 1))
    good = rng.random(100) < sigmoid(x[:, 0])
    padded = np.column_stack((x, np.full(100, 7.0)))
    assert fit_logistic(padded, good)(padded) == pytest.approx(fit_logistic(x, good)(x), abs=1e-6)


def test_a_signal_far_outside_of_the_calibration_rows_does_not_run_away() -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(100, 1))
    score = fit_logistic(x, rng.random(100) < sigmoid(x[:, 0]))
    assert score([[1e12]])[0] == score([[1e6]])[0]


def test_no_signals_give_the_overall_share() -> None:
    good = np.array([True] * 30 + [False] * 10)
    assert fit_logistic(np.zeros((40, 0)), good)(np.zeros((1, 0)))[0] == pytest.approx(0.75, abs=0.03)


def test_no_rows_and_bad_numbers_are_refused() -> None:
    with pytest.raises(TooFewRows):
        fit_logistic(np.zeros((0, 1)), [])
    with pytest.raises(ValueError, match="finite"):
        fit_logistic([[np.nan]], [True])
    with pytest.raises(ValueError, match="one per row"):
        fit_logistic([[1.0]], [True, False])


@pytest.mark.parametrize(
    ("centers", "scales", "weights"),
    [((0.0,), (0.0,), (1.0,)), ((0.0,), (1.0,), (1.0, 2.0)), ((np.nan,), (1.0,), (1.0,))],
)
def test_a_stored_score_that_cannot_be_evaluated_is_refused(
    centers: tuple[float, ...], scales: tuple[float, ...], weights: tuple[float, ...]
) -> None:
    with pytest.raises(CalibrationUnusable):
        LogisticScore(centers=centers, scales=scales, weights=weights, intercept=0.0)


def test_log_loss_of_a_certain_mistake_is_finite() -> None:
    assert np.isfinite(log_loss(np.array([0.0, 1.0]), np.array([True, False]))).all()
