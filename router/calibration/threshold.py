"""Thresholds: certified by Learn-then-Test, by budget, or plain.

Regret of a threshold t is R(t) = P(score >= t, the edge is wrong, the cloud is right) over a fresh request.
`certify` finds the lowest t for which "R(t) > alpha" is rejected, testing from the highest t downwards with
an exact binomial test at level delta, and stopping at the first that is not rejected (fixed-sequence testing,
Angelopoulos et al., "Learn then Test", 2021).

Why no grid is needed, and why ties and data-dependent choices do no harm
- The sets {score >= t} and {score > t} are totally ordered by inclusion, whatever the scores are. R and the
  number k of bad rows kept both grow with the set, so the test from the top over *all* such sets is the
  same as taking the largest set with k <= k*, where k* is the largest count with P(Bin(n, alpha) <= k*) <=
  delta.
- Let V be the intersection of all sets with R > alpha: one of these sets, fixed by the distribution alone,
  with R(V) >= alpha by continuity. Whatever set with R > alpha passes, V passes with it, for k(V) <= k. So
  the probability that *any* such set passes is at most P(Bin(n, R(V)) <= k*) <= P(Bin(n, alpha) <= k*) <=
  delta.
- Hence, with probability at least 1 - delta over the calibration rows, *every* set with k <= k* has R <=
  alpha, at once. The threshold may be chosen among them after looking at the data, moved later towards
  fewer kept answers (a caller's `min_confidence`, a budget, online control), or expressed in another score
  that is a non-decreasing function of this one, fitted on the very same rows: the kept set is still one of
  these sets.

What is assumed
- The rows are independent draws from the traffic that the threshold will meet.
- The *order* of the scores was fixed without these rows: a signal chosen beforehand, or a score learned on
  other rows.

Where the kept answers would be no better than the others, everything is forwarded: see
`no_better_than_chance`. Rows that may never be kept (an answer cut by its length) count in n, and in no
kept set.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from router.calibration.binomial import largest_passing_count, rows_needed

DEFAULT_ALPHA = 0.05
DEFAULT_DELTA = 0.1

_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class Threshold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When an answer stays at the edge: when its score is at least `value`.

    Attributes:
        policy: How it came about.
        value: The score that an answer needs. None: forward all.
        reason: One sentence for people; says why where everything is forwarded.
        rows: Calibration rows behind it.
        share_kept: Of those rows, at the edge.
        regrets_kept: Of those rows, kept though wrong where the cloud is right. None: labels were not
            looked at.
        alpha: The regret that is not exceeded. None unless certified.
        delta: With which probability the certificate may be wrong. None unless certified.
    """

    policy: Literal["certified", "budget", "plain"]
    value: float | None
    reason: str
    rows: _Count = 0
    share_kept: _Share = 0.0
    regrets_kept: _Count | None = None
    alpha: float | None = None
    delta: float | None = None

    @property
    def forwards_all(self) -> bool:
        return self.value is None

    @property
    def bar(self) -> float:
        """`value`, or infinity where everything is forwarded: compares with any score."""
        return math.inf if self.value is None else self.value


def certify(
    scores: ArrayLike,
    regrets: ArrayLike,
    *,
    alpha: float = DEFAULT_ALPHA,
    delta: float = DEFAULT_DELTA,
    keepable: ArrayLike | None = None,
) -> Threshold:
    """The lowest threshold whose regret is at most `alpha`, with confidence 1 - `delta`.

    Args:
        scores: (n,) finite; higher is surer.
        regrets: (n,) bool: the edge is wrong and the cloud is right.
        alpha: In (0, 1).
        delta: In (0, 1).
        keepable: (n,) bool; False where the answer would be forwarded whatever its score. None: all.

    Raises:
        ValueError: Shapes differ, a score is not finite, `alpha` or `delta` is out of range.
    """
    score, regret, may_keep = checked_rows(scores, regrets, keepable)
    rows = len(score)
    allowed = largest_passing_count(rows, alpha=alpha, delta=delta)
    if allowed < 0:
        least = rows_needed(alpha=alpha, delta=delta)
        reason = (
            f"forward all: {rows} rows cannot certify a regret of {alpha:g} with confidence {1 - delta:g}; "
            f"at least {least} are needed"
        )
        return _certified(None, reason, rows=rows, alpha=alpha, delta=delta)

    kept, bad = np.sort(score[may_keep]), np.sort(score[may_keep & regret])
    value = _lowest_passing(kept, bad, allowed)
    if value is None:
        reason = (
            f"forward all: no share of the answers can be kept with a certified regret of {alpha:g}; "
            f"the highest scores already hold more than the {allowed} bad answers of {rows} that may be seen"
        )
        return _certified(None, reason, rows=rows, alpha=alpha, delta=delta)
    count, seen = int(np.count_nonzero(kept >= value)), int(np.count_nonzero(bad >= value))
    if no_better_than_chance(count, seen, of=len(kept), bad=len(bad)):
        reason = (
            f"forward all: of the {count} answers with the highest scores {seen} are bad, no smaller part "
            "than of all; this score cannot tell which to keep"
        )
        return _certified(None, reason, rows=rows, alpha=alpha, delta=delta)
    share = count / rows
    reason = (
        f"regret is at most {alpha:g} with confidence {1 - delta:g}: "
        f"{seen} of {rows} answers were kept and bad, {allowed} may be"
    )
    return _certified(value, reason, rows=rows, alpha=alpha, delta=delta, share=share, seen=seen)


def within_budget(
    scores: ArrayLike, *, largest_share_forwarded: float, keepable: ArrayLike | None = None
) -> Threshold:
    """The highest threshold that forwards at most this share of the rows. Says nothing about regret.

    Raises:
        ValueError: The share is outside [0, 1], there are no rows, or a score is not finite.
    """
    if not 0.0 <= largest_share_forwarded <= 1.0:
        raise ValueError(f"the largest share forwarded is {largest_share_forwarded}; it must be in [0, 1]")
    score, _, may_keep = checked_rows(scores, np.zeros(np.shape(scores), dtype=bool), keepable)
    rows = len(score)
    if rows == 0:
        raise ValueError("a budget needs at least one row")
    if largest_share_forwarded == 1.0:
        return Threshold(policy="budget", value=None, reason="forward all: the budget allows it", rows=rows)
    kept = np.sort(score[may_keep])
    # The 1e-9 keeps 0.3 * 10 rows at 3 forwarded: the product falls a hair short of it in binary.
    allowed = math.floor(largest_share_forwarded * rows + 1e-9) - (rows - len(kept))
    value = float(kept[max(0, min(allowed, len(kept) - 1))]) if len(kept) else 0.0
    share = float(np.count_nonzero(kept >= value)) / rows
    reason = f"at most {largest_share_forwarded:.1%} forwarded; regret is not certified"
    if 1.0 - share > largest_share_forwarded + 1e-9:
        reason = (
            f"{1 - share:.1%} is forwarded at least: so many answers may not be kept whatever their score; "
            f"the budget of {largest_share_forwarded:.1%} cannot be met, and regret is not certified"
        )
    return Threshold(policy="budget", value=value, reason=reason, rows=rows, share_kept=share)


def plain(value: float) -> Threshold:
    """A threshold that somebody chose.

    Raises:
        ValueError: It is not finite.
    """
    if not math.isfinite(value):
        raise ValueError(f"the threshold is {value}; it must be a finite number")
    return Threshold(policy="plain", value=value, reason="a plain value; regret is not certified")


def checked_rows(
    scores: ArrayLike, regrets: ArrayLike, keepable: ArrayLike | None = None
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
    """The three columns as arrays of one length.

    Raises:
        ValueError: Shapes differ or a score is not finite.
    """
    score = np.asarray(scores, dtype=np.float64)
    regret = np.asarray(regrets, dtype=bool)
    may_keep = np.ones(score.shape, dtype=bool) if keepable is None else np.asarray(keepable, dtype=bool)
    if score.ndim != 1 or regret.shape != score.shape or may_keep.shape != score.shape:
        raise ValueError(
            f"scores, regrets and keepable must be columns of one length, not {score.shape}, {regret.shape} "
            f"and {may_keep.shape}"
        )
    if not np.isfinite(score).all():
        row = int(np.flatnonzero(~np.isfinite(score))[0])
        raise ValueError(f"the score in row {row} is {score[row]}; every score must be a finite number")
    return score, regret, may_keep


def no_better_than_chance(kept: int, bad_kept: int, *, of: int, bad: int) -> bool:
    """Whether what is kept of `of` rows is at least as bad as they are; never when all of them are kept.

    A certificate alone would keep a share below alpha of answers that are all bad: their regret is small only
    because they are few. Forwarding all instead is always within the guarantee.
    """
    return bad_kept > 0 and kept < of and bad_kept * of >= bad * kept


def _lowest_passing(kept: NDArray[np.float64], bad: NDArray[np.float64], allowed: int) -> float | None:
    """The lowest threshold that keeps at most `allowed` bad rows; None when it keeps nothing.

    Between two observed scores any value keeps the same rows; half-way is the least sensitive to rounding.
    """
    if len(kept) == 0:
        return None
    if len(bad) <= allowed:
        return min(0.0, float(kept[0]))  # everything, also what scores below all that was seen
    excluded = float(bad[len(bad) - 1 - allowed])
    above = kept[np.searchsorted(kept, excluded, side="right") :]
    if len(above) == 0:
        return None
    middle = excluded + (float(above[0]) - excluded) / 2.0
    return middle if middle > excluded else float(above[0])


def _certified(
    value: float | None,
    reason: str,
    *,
    rows: int,
    alpha: float,
    delta: float,
    share: float = 0.0,
    seen: int = 0,
) -> Threshold:
    return Threshold(
        policy="certified",
        value=value,
        reason=reason,
        rows=rows,
        share_kept=share,
        regrets_kept=seen,
        alpha=alpha,
        delta=delta,
    )
