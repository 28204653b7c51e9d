"""Regularized logistic regression on standardized signals, by Newton's method (IRLS).

A small ridge penalty keeps the weights finite where the classes can be separated; Platt's targets
(Platt 1999: (good + 1) / (good + 2) and 1 / (bad + 2) in place of 1 and 0) keep the intercept finite where
all rows are good or all are bad. The objective is strictly convex, so there is one answer and no randomness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from router.calibration.errors import CalibrationUnusable, TooFewRows

# A signal farther from the calibration rows than this many standard deviations says no more than one at it.
LARGEST_Z = 8.0
_MAX_STEPS = 100
_TOLERANCE = 1e-10


class LogisticScore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """sigmoid(intercept + sum of weight * (signal - center) / scale), in the order of the signals' names."""

    centers: tuple[float, ...]
    scales: tuple[float, ...]
    weights: tuple[float, ...]
    intercept: float

    def __post_init__(self) -> None:
        if not len(self.centers) == len(self.scales) == len(self.weights):
            raise CalibrationUnusable("centers, scales and weights must be as many as the signals")
        numbers = (*self.centers, *self.scales, *self.weights, self.intercept)
        if not all(math.isfinite(number) for number in numbers) or not all(
            scale > 0 for scale in self.scales
        ):
            raise CalibrationUnusable("the logistic score needs finite numbers and scales above 0")

    def __call__(self, signals: ArrayLike) -> NDArray[np.float64]:
        """Probabilities (n,) for signals (n, k)."""
        z = (np.asarray(signals, dtype=np.float64) - np.asarray(self.centers)) / np.asarray(self.scales)
        z = np.clip(z, -LARGEST_Z, LARGEST_Z)
        return sigmoid(z @ np.asarray(self.weights) + self.intercept)


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 / (1 + exp(-x)) without overflow."""
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1.0, small) / (1.0 + small), dtype=np.float64)


def fit_logistic(signals: ArrayLike, good: ArrayLike, *, ridge: float = 1.0) -> LogisticScore:
    """Fit by penalized maximum likelihood.

    Args:
        signals: (n, k) finite.
        good: (n,) bool or 0/1.
        ridge: Weight of half the squared length of the standardized weights, in rows. The intercept is free.

    Raises:
        TooFewRows: There are none.
        ValueError: Shapes differ or a signal is not finite.
    """
    x, label = np.asarray(signals, dtype=np.float64), np.asarray(good, dtype=np.float64)
    if x.ndim != 2 or label.shape != (len(x),):
        raise ValueError(f"signals {x.shape} must be (rows, signals) and labels {label.shape} one per row")
    if len(x) == 0:
        raise TooFewRows("a logistic score needs at least one row", minimum=1)
    if not np.isfinite(x).all():
        raise ValueError("every signal must be a finite number")
    center, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    z = np.clip((x - center) / scale, -LARGEST_Z, LARGEST_Z)
    design = np.column_stack((np.ones(len(x)), z))
    goods = float(label.sum())
    bads = len(label) - goods
    target = np.where(label > 0.5, (goods + 1.0) / (goods + 2.0), 1.0 / (bads + 2.0))
    penalty = np.full(design.shape[1], ridge)
    penalty[0] = 0.0
    solution = _newton(design, target, penalty)
    return LogisticScore(
        centers=_floats(center),
        scales=_floats(scale),
        weights=_floats(solution[1:]),
        intercept=float(solution[0]),
    )


def log_loss(probabilities: NDArray[np.float64], good: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Each row's negative log-likelihood, in nats."""
    safe = np.clip(probabilities, 1e-12, 1.0 - 1e-12)
    return np.asarray(-np.where(good, np.log(safe), np.log1p(-safe)), dtype=np.float64)


def _newton(
    design: NDArray[np.float64], target: NDArray[np.float64], penalty: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The minimum of the penalized objective; steps are halved where a full one would not improve."""
    beta = np.zeros(design.shape[1])
    value = _objective(design, target, penalty, beta)
    for _ in range(_MAX_STEPS):
        p = sigmoid(design @ beta)
        gradient = design.T @ (p - target) + penalty * beta
        # The tiny diagonal keeps the system solvable where every p is at 0 or 1.
        curvature = (design * (p * (1.0 - p))[:, None]).T @ design + np.diag(penalty + 1e-12)
        step = np.linalg.solve(curvature, gradient)
        size = 1.0
        while size > 1e-8:
            moved = beta - size * step
            new_value = _objective(design, target, penalty, moved)
            if new_value <= value:
                break
            size /= 2.0
        else:
            return beta
        beta, gained, value = moved, value - new_value, new_value
        if gained <= _TOLERANCE * (abs(value) + 1.0):
            return beta
    return beta


def _objective(
    design: NDArray[np.float64],
    target: NDArray[np.float64],
    penalty: NDArray[np.float64],
    beta: NDArray[np.float64],
) -> float:
    logit = design @ beta
    return float(np.sum(np.logaddexp(0.0, logit) - target * logit) + 0.5 * np.sum(penalty * beta * beta))


def _floats(values: NDArray[np.float64] | Sequence[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
