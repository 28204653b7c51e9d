"""How often a threshold breaks its promise: calibrated again and again on random rows of one table.

Two ways of knowing the truth
- `table_as_population`: each calibration set is `rows` independent draws from the table, with replacement,
  and the regret of a threshold is its regret on the whole table. The table *is* the distribution, exactly
  as the guarantee has it, so a violation is a violation, however small the table. The draws are bootstrap
  replications at once.
- `held_out`: each calibration set is drawn without replacement and the regret is measured on the rows left
  out. With few rows left out, this counts their own sampling noise as violations: even a threshold whose
  regret is under the target exceeds it on some sets of 200 rows.

Beside the certified threshold stands the naive one: the lowest whose *observed* regret is within the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from router.calibration.binomial import largest_passing_count
from router.calibration.isotonic import fit_isotonic
from router.calibration.threshold import no_better_than_chance
from router.evaluation.metrics import ECE_BINS, Bools, Floats, expected_calibration_error, regrets

Truth = Literal["table_as_population", "held_out"]

# Cells of a block of splits that are in memory at once: 8 MB a column.
_CELLS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One rule over all splits. Every array is (splits,).

    Attributes:
        thresholds: Infinity where everything is forwarded.
        share_kept: True share kept at the threshold.
        regret: True regret at the threshold.
        accuracy: True accuracy of the cascade.
        alpha: The target.
    """

    thresholds: Floats
    share_kept: Floats
    regret: Floats
    accuracy: Floats
    alpha: float

    @property
    def violation_rate(self) -> float:
        """Share of splits whose true regret is above the target."""
        return float((self.regret > self.alpha + 1e-12).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitStudy:
    """The two rules on the same calibration sets."""

    calibration_rows: int
    certified: Outcome
    naive: Outcome


def study_splits(
    confidence: Floats,
    edge_right: Bools,
    cloud_right: Bools,
    *,
    alpha: float,
    delta: float,
    calibration_rows: int,
    splits: int,
    rng: np.random.Generator,
    truth: Truth = "table_as_population",
) -> SplitStudy:
    """Calibrate `splits` times and compare with the truth.

    Raises:
        ValueError: `calibration_rows` or `splits` is below 1, or no row would be left out.
    """
    rows = len(confidence)
    if calibration_rows < 1 or splits < 1:
        raise ValueError("calibration_rows and splits must be at least 1")
    if truth == "held_out" and calibration_rows >= rows:
        raise ValueError(f"{calibration_rows} of {rows} rows for calibration leave none out")
    order = np.argsort(confidence, kind="stable")
    table = _Table(confidence[order], edge_right[order], cloud_right[order])
    certified_count = largest_passing_count(calibration_rows, alpha=alpha, delta=delta)
    naive_count = int(np.floor(alpha * calibration_rows + 1e-9))
    parts: tuple[list[tuple[Floats, ...]], ...] = ([], [])
    for drawn in _draws(rows, calibration_rows, splits, rng, truth):
        for found, count, guarded in zip(parts, (certified_count, naive_count), (True, False), strict=True):
            thresholds = table.thresholds(drawn, count, guarded=guarded)
            found.append((thresholds, *table.truth(thresholds, drawn if truth == "held_out" else None)))
    certified, naive = (
        Outcome(
            thresholds=np.concatenate([part[0] for part in found]),
            share_kept=np.concatenate([part[1] for part in found]),
            regret=np.concatenate([part[2] for part in found]),
            accuracy=np.concatenate([part[3] for part in found]),
            alpha=alpha,
        )
        for found in parts
    )
    return SplitStudy(calibration_rows=calibration_rows, certified=certified, naive=naive)


def held_out_ece(
    confidence: Floats, good: Bools, *, halves: int, rng: np.random.Generator, bins: int = ECE_BINS
) -> tuple[float, float]:
    """Mean ECE on held-out halves: of the confidence as it is, and after isotonic calibration on the other
    half.

    Args:
        confidence: (n,) in [0, 1].
        good: (n,) what the confidence is the probability of.
        halves: How many random halves.
    """
    before, after = np.empty(halves), np.empty(halves)
    for k in range(halves):
        shuffled = rng.permutation(len(confidence))
        fit, out = np.array_split(shuffled, 2)
        curve = fit_isotonic(confidence[fit], good[fit])
        before[k] = expected_calibration_error(confidence[out], good[out], bins=bins)
        after[k] = expected_calibration_error(curve(confidence[out]), good[out], bins=bins)
    return float(before.mean()), float(after.mean())


class _Table:
    """Rows in ascending order of confidence."""

    def __init__(self, confidence: Floats, edge_right: Bools, cloud_right: Bools) -> None:
        self.confidence = confidence
        self.rows = len(confidence)
        self.bad = regrets(edge_right, cloud_right)
        columns = (np.ones(self.rows), self.bad, edge_right, cloud_right)
        self._right: Floats = np.column_stack(columns).astype(np.float64)
        self._sums: Floats = np.concatenate((np.zeros((1, 4)), np.cumsum(self._right, axis=0)))
        # Where the next larger confidence begins, for every row.
        self._next = np.searchsorted(confidence, confidence, side="right")

    def thresholds(self, drawn: NDArray[np.int64], count: int, *, guarded: bool) -> Floats:
        """(splits,) lowest thresholds that keep at most `count` bad rows of each set of row numbers
        (splits, n).

        The same rule as `router.calibration.threshold.certify`, for many sets at once; `guarded` forwards
        all where what would be kept is no better than chance.
        """
        splits, size = drawn.shape
        if count < 0:
            return np.full(splits, np.inf)
        if count >= size:
            return np.zeros(splits)
        # Bad rows by position, good ones at -1: the (count + 1)-th largest is the best that must go.
        places = np.where(self.bad[drawn], drawn, -1)
        excluded = np.partition(places, size - 1 - count, axis=1)[:, size - 1 - count]
        # The drawn row that comes next above its confidence; `rows` where there is none.
        above = self._next[np.maximum(excluded, 0)]
        upper = np.where(drawn >= above[:, None], drawn, self.rows).min(axis=1)
        padded = np.concatenate((self.confidence, [np.inf]))
        middle = (padded[np.maximum(excluded, 0)] + padded[upper]) / 2.0
        found = np.where(excluded < 0, 0.0, middle)
        if guarded:
            kept = self.confidence[drawn] >= found[:, None]
            bad = self.bad[drawn]
            shares = (kept.sum(axis=1), (kept & bad).sum(axis=1), bad.sum(axis=1))
            useless = [
                no_better_than_chance(int(k), int(b), of=size, bad=int(all_bad))
                for k, b, all_bad in zip(*shares, strict=True)
            ]
            found = np.where(useless, np.inf, found)
        return np.asarray(found, dtype=np.float64)

    def truth(self, thresholds: Floats, but_for: NDArray[np.int64] | None) -> tuple[Floats, Floats, Floats]:
        """Share kept, regret and accuracy of the cascade over the table, but for these rows of each set."""
        cuts = np.searchsorted(self.confidence, thresholds, side="left")
        below, total = self._sums[cuts], self._sums[-1]
        above, size = total - below, self.rows
        if but_for is not None:
            is_above = but_for >= cuts[:, None]
            drawn = self._right[but_for]
            above = above - (drawn * is_above[:, :, None]).sum(axis=1)
            below = below - (drawn * ~is_above[:, :, None]).sum(axis=1)
            size -= but_for.shape[1]
        return above[:, 0] / size, above[:, 1] / size, (above[:, 2] + below[:, 3]) / size


def _draws(
    rows: int, size: int, splits: int, rng: np.random.Generator, truth: Truth
) -> Iterator[NDArray[np.int64]]:
    """Blocks of calibration sets as row numbers (block, size)."""
    block = max(1, _CELLS // size)
    for start in range(0, splits, block):
        here = min(block, splits - start)
        if truth == "table_as_population":
            yield rng.integers(0, rows, size=(here, size))
        else:
            yield np.stack([rng.choice(rows, size, replace=False, shuffle=False) for _ in range(here)])
