"""From rows of signals and outcomes to a head: score, curve, thresholds. Which rows may be used for what.

- Order fixed beforehand (`order`): one signal is the score. All rows give the curve *and* the thresholds;
  the curve is non-decreasing, so fitting it on the same rows leaves the guarantee whole
  (`router.calibration.threshold` says why).
- Order learned: signals are chosen and weighed on one random part of the rows, the curve and the thresholds
  come from the other. The learned order has then never seen the rows that it is tested on.

Thresholds per task key hold each by itself with confidence 1 - delta; `together` divides delta by the
number of thresholds, so that all hold at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from router.calibration.errors import BadSignal, TooFewRows
from router.calibration.isotonic import fit_isotonic
from router.calibration.logistic import fit_logistic
from router.calibration.model import Columns, Head
from router.calibration.selection import Selection, choose_signals
from router.calibration.threshold import DEFAULT_ALPHA, DEFAULT_DELTA, Threshold, certify

# Of the rows, for learning the order. The rest certifies, and needs more.
DEFAULT_LEARNING_SHARE = 0.4
# Fewer say nothing about a probability.
LEAST_ROWS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What was seen of n answers.

    Attributes:
        signals: Name to column (n,).
        edge_right: (n,) bool.
        cloud_right: (n,) bool.
        keepable: (n,) bool; False for an answer that is forwarded whatever its confidence. None: all may be
            kept.
        tasks: n task keys, None for a row without one. Empty: no row has one.
    """

    signals: Columns
    edge_right: NDArray[np.bool_]
    cloud_right: NDArray[np.bool_]
    keepable: NDArray[np.bool_] | None = None
    tasks: Sequence[str | None] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A head, and how it came about.

    Attributes:
        head: To be stored.
        selection: How its signals were chosen. None when the order was fixed.
        certified_on: Row numbers behind its curve and thresholds.
    """

    head: Head
    selection: Selection | None
    certified_on: NDArray[np.int64]


def fit_head(
    rows: Rows,
    *,
    rng: np.random.Generator,
    order: str | None = None,
    method: Literal["isotonic", "logistic"] = "isotonic",
    alpha: float = DEFAULT_ALPHA,
    delta: float = DEFAULT_DELTA,
    learning_share: float = DEFAULT_LEARNING_SHARE,
    together: bool = False,
) -> Fitted:
    """Fit and certify.

    Args:
        rows: At least `LEAST_ROWS`.
        rng: Splits the rows and decides the folds of the selection.
        order: The signal that is the score, decided before looking at these rows. None: learn the order.
        method: What turns the score into a probability. `logistic` needs a learned order.
        alpha: Largest regret, a share of all requests.
        delta: Probability with which a certificate may be wrong.
        learning_share: Part of the rows that learns the order.
        together: All thresholds hold at once with confidence 1 - delta, instead of each by itself.

    Raises:
        TooFewRows: `minimum` are needed.
        BadSignal: A signal is missing, not finite, or none varies.
        ValueError: Columns differ in length, or `method` does not go with a fixed order.
    """
    count = _check(rows)
    if order is not None and method == "logistic":
        raise ValueError("a fixed order goes with the isotonic method: a logistic slope could turn it around")
    good = rows.edge_right | ~rows.cloud_right
    if order is not None:
        if order not in rows.signals:
            raise BadSignal(f"there is no signal {order} among the rows", name=order)
        curve = fit_isotonic(rows.signals[order], good)
        draft = Head(signals=(order,), curve=curve, threshold=_PENDING, calibrated_rows=count)
        selection, certified_on = None, np.arange(count)
    else:
        draft, selection, certified_on = _learn(rows, good, rng, method, learning_share)
    return Fitted(
        head=_with_thresholds(draft, rows, certified_on, alpha=alpha, delta=delta, together=together),
        selection=selection,
        certified_on=certified_on,
    )


def _learn(
    rows: Rows,
    good: NDArray[np.bool_],
    rng: np.random.Generator,
    method: Literal["isotonic", "logistic"],
    learning_share: float,
) -> tuple[Head, Selection, NDArray[np.int64]]:
    if not 0.0 < learning_share < 1.0:
        raise ValueError(f"the learning share is {learning_share}; it must be between 0 and 1")
    count = len(good)
    shuffled = rng.permutation(count)
    learn, certify_on = np.split(shuffled, [round(learning_share * count)])
    selection = choose_signals(
        {name: column[learn] for name, column in rows.signals.items()}, good[learn], rng=rng
    )
    table = np.column_stack([rows.signals[name] for name in selection.names])
    logistic = fit_logistic(table[learn], good[learn])
    curve = fit_isotonic(logistic(table[certify_on]), good[certify_on]) if method == "isotonic" else None
    draft = Head(
        signals=selection.names,
        logistic=logistic,
        curve=curve,
        threshold=_PENDING,
        fitted_rows=len(learn),
        calibrated_rows=len(certify_on),
    )
    return draft, selection, np.sort(certify_on)


def _with_thresholds(
    draft: Head, rows: Rows, on: NDArray[np.int64], *, alpha: float, delta: float, together: bool
) -> Head:
    confidence = draft.evaluate_columns(rows.signals)
    regret = ~rows.edge_right & rows.cloud_right
    keepable = np.ones(len(regret), dtype=bool) if rows.keepable is None else rows.keepable
    # Keys of all rows: how many thresholds there are must not depend on the split.
    keys = sorted({key for key in rows.tasks if key is not None})
    each = delta / (len(keys) + 1) if together else delta

    def certified(where: NDArray[np.int64]) -> Threshold:
        return certify(confidence[where], regret[where], alpha=alpha, delta=each, keepable=keepable[where])

    tasks = np.array(rows.tasks or [None] * len(regret), dtype=object)
    return Head(
        signals=draft.signals,
        logistic=draft.logistic,
        curve=draft.curve,
        fitted_rows=draft.fitted_rows,
        calibrated_rows=draft.calibrated_rows,
        threshold=certified(on),
        tasks={key: certified(on[tasks[on] == key]) for key in keys},
    )


def _check(rows: Rows) -> int:
    count = len(rows.edge_right)
    if count < LEAST_ROWS:
        raise TooFewRows(
            f"{count} rows are too few to calibrate; at least {LEAST_ROWS} are needed", minimum=LEAST_ROWS
        )
    if not rows.signals:
        raise BadSignal("there are no signals", name="all")
    lengths = {len(column) for column in rows.signals.values()} | {len(rows.cloud_right), count}
    if rows.keepable is not None:
        lengths.add(len(rows.keepable))
    if rows.tasks:
        lengths.add(len(rows.tasks))
    if lengths != {count}:
        raise ValueError(f"the columns have different lengths: {sorted(lengths)}")
    for name, column in rows.signals.items():
        if not np.isfinite(column).all():
            row = int(np.flatnonzero(~np.isfinite(column))[0])
            raise BadSignal(f"the signal {name} is {column[row]} in row {row}; it must be finite", name=name)
    return count


# Stands in a draft until its confidences are known and can be certified.
_PENDING = Threshold(policy="plain", value=None, reason="forward all: not certified yet")
