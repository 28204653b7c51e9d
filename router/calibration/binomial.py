"""The exact binomial tail, and what it says about how many bad outcomes may be seen.

Exact up to rounding (relative error about 1e-12); terms are summed in logarithms so that nothing underflows.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def binomial_cdf(count: int, rows: int, rate: float) -> float:
    """P(Binomial(rows, rate) <= count).

    Raises:
        ValueError: `rows` is negative or `rate` is outside (0, 1).
    """
    _check(rows, rate)
    if count < 0:
        return 0.0
    if count >= rows:
        return 1.0
    return min(1.0, math.exp(float(_log_cdf(count, rows, rate)[-1])))


def largest_passing_count(rows: int, *, alpha: float, delta: float) -> int:
    """The largest count k with P(Binomial(rows, alpha) <= k) <= delta; -1 when not even 0 passes.

    Seeing at most k bad outcomes in `rows` rejects "the rate is above alpha" at level delta.

    Raises:
        ValueError: `rows` is negative, or `alpha` or `delta` is outside (0, 1).
    """
    _check(rows, alpha)
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta is {delta}; it must be between 0 and 1")
    log_delta = math.log(delta)
    # From the mean's floor on the tail is about a half or more, so most levels need no more terms than that.
    last = min(rows, math.ceil(rows * alpha)) if delta < 0.25 else rows
    return int(np.searchsorted(_log_cdf(last, rows, alpha), log_delta, side="right")) - 1


def rows_needed(*, alpha: float, delta: float) -> int:
    """The least rows with which anything can be certified: (1 - alpha)^rows <= delta."""
    _check(1, alpha)
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta is {delta}; it must be between 0 and 1")
    rows = max(1, math.ceil(math.log(delta) / math.log1p(-alpha)))
    while largest_passing_count(rows, alpha=alpha, delta=delta) < 0:  # rounding at the border
        rows += 1
    return rows


def _log_cdf(count: int, rows: int, rate: float) -> NDArray[np.float64]:
    """Logarithms of the cumulative probabilities of 0 .. count."""
    steps = np.arange(1, count + 1, dtype=np.float64)
    # pmf(i) / pmf(i - 1) = (rows - i + 1) / i * rate / (1 - rate)
    ratios = np.log((rows - steps + 1.0) / steps) + (math.log(rate) - math.log1p(-rate))
    log_pmf = rows * math.log1p(-rate) + np.concatenate(([0.0], np.cumsum(ratios)))
    return np.asarray(np.logaddexp.accumulate(log_pmf), dtype=np.float64)


def _check(rows: int, rate: float) -> None:
    if rows < 0:
        raise ValueError(f"rows is {rows}; it must not be negative")
    if not 0.0 < rate < 1.0:
        raise ValueError(f"the rate is {rate}; it must be between 0 and 1")
