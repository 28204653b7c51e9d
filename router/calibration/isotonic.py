"""Isotonic calibration: a non-decreasing curve from a score to a probability, stored as knots.

Fitting: rows of equal score are pooled first, so that ties cannot be told apart; then pool-adjacent-violators
(Ayer et al. 1955) gives blocks of equal probability. A knot sits at each block's weighted mean score
(centered isotonic regression, Oron and Flournoy 2017), plus one at the lowest and one at the highest score.
Evaluation: linear between knots, constant beyond the outer ones.

Invariants
- Knot positions and values are strictly increasing when there is more than one knot. Strictness comes from
  a tilt of `TILT` over the range of scores: without it scores inside a flat stretch could no longer be told
  apart, and a threshold there would have to give the whole stretch away.
- Values lie strictly between 0 and 1: no finite number of rows shows a probability of exactly 1.
"""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from router.calibration.errors import CalibrationUnusable, TooFewRows

# Adds at most this much error to a probability.
TILT = 1e-3


class IsotonicCurve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Knots of a piecewise-linear, non-decreasing curve. `scores[i]` maps to `probabilities[i]`."""

    scores: tuple[float, ...]
    probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        scores, values = np.asarray(self.scores), np.asarray(self.probabilities)
        if len(scores) == 0 or len(scores) != len(values):
            raise CalibrationUnusable("a curve needs as many probabilities as scores, and at least one")
        if not (np.isfinite(scores).all() and (np.diff(scores) > 0).all()):
            raise CalibrationUnusable("the scores of a curve must be finite and strictly increasing")
        if not ((values >= 0).all() and (values <= 1).all() and (np.diff(values) >= 0).all()):
            raise CalibrationUnusable("the probabilities of a curve must be in [0, 1] and never fall")

    def __call__(self, scores: ArrayLike) -> NDArray[np.float64]:
        """Probabilities for scores of any shape."""
        x = np.asarray(scores, dtype=np.float64)
        return np.asarray(np.interp(x, self.scores, self.probabilities), dtype=np.float64)


def fit_isotonic(scores: ArrayLike, good: ArrayLike) -> IsotonicCurve:
    """The curve that fits best in squared error among the non-decreasing ones.

    Args:
        scores: (n,) finite.
        good: (n,) bool or 0/1.

    Raises:
        TooFewRows: There are none.
        ValueError: Shapes differ or a score is not finite.
    """
    score, label = np.asarray(scores, dtype=np.float64), np.asarray(good, dtype=np.float64)
    if score.ndim != 1 or label.shape != score.shape:
        raise ValueError(f"scores {score.shape} and labels {label.shape} must be columns of one length")
    if len(score) == 0:
        raise TooFewRows("an isotonic curve needs at least one row", minimum=1)
    if not np.isfinite(score).all():
        raise ValueError("every score must be a finite number")
    distinct, inverse, weight = np.unique(score, return_inverse=True, return_counts=True)
    mean = np.bincount(inverse, weights=label) / weight
    return _with_knots(distinct, pool_adjacent_violators(mean, weight), weight, rows=len(score))


def pool_adjacent_violators(values: ArrayLike, weights: ArrayLike) -> NDArray[np.float64]:
    """The non-decreasing sequence with the least weighted squared distance from `values`. Linear time."""
    levels: list[float] = []
    masses: list[float] = []
    lengths: list[int] = []
    for level, mass in zip(
        np.asarray(values, dtype=np.float64).tolist(),
        np.asarray(weights, dtype=np.float64).tolist(),
        strict=True,
    ):
        length = 1
        while levels and levels[-1] >= level:
            before = masses.pop()
            level = (levels.pop() * before + level * mass) / (before + mass)
            mass += before
            length += lengths.pop()
        levels.append(level)
        masses.append(mass)
        lengths.append(length)
    return np.repeat(levels, lengths)


def _with_knots(
    distinct: NDArray[np.float64], fitted: NDArray[np.float64], weight: NDArray[np.int64], *, rows: int
) -> IsotonicCurve:
    borders = [0, *(np.flatnonzero(np.diff(fitted) > 0) + 1).tolist(), len(fitted)]
    blocks = [slice(a, b) for a, b in itertools.pairwise(borders)]
    x = [float(np.average(distinct[block], weights=weight[block])) for block in blocks]
    y = [float(fitted[block.start]) for block in blocks]
    positions = np.array([distinct[0], *x, distinct[-1]])
    levels = np.array([y[0], *y, y[-1]])
    # Rounding may put a block's mean on its own end.
    first = np.concatenate(([True], np.diff(positions) > 0))
    positions, levels = positions[first], levels[first]
    levels = np.clip(levels, 1.0 / (rows + 1), rows / (rows + 1))
    if len(positions) > 1:
        place = (positions - positions[0]) / (positions[-1] - positions[0])
        levels = (1.0 - TILT) * levels + TILT * place
    return IsotonicCurve(scores=tuple(positions.tolist()), probabilities=tuple(levels.tolist()))
