"""Which signals a task uses: greedy forward selection by cross-validated log loss.

A signal is added only when it lowers the loss of held-out rows by more than the standard error of that gain:
a signal that does not clearly help is one more thing that can drift. Folds come from the generator passed in.
Whoever certifies a threshold on the chosen score must use other rows (`router.calibration.fit` does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from router.calibration.errors import BadSignal, TooFewRows
from router.calibration.logistic import fit_logistic, log_loss

DEFAULT_FOLDS = 5
MOST_SIGNALS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What was chosen.

    Attributes:
        names: In the order of choice.
        losses: Cross-validated log loss in nats per row: of no signal, then after each choice.
    """

    names: tuple[str, ...]
    losses: tuple[float, ...]


def choose_signals(
    signals: Mapping[str, NDArray[np.float64]],
    good: NDArray[np.bool_],
    *,
    rng: np.random.Generator,
    folds: int = DEFAULT_FOLDS,
    most: int = MOST_SIGNALS,
) -> Selection:
    """Choose among candidates; the first one is always taken, for a score needs at least one.

    Args:
        signals: Name to column (n,), finite. Constant columns are left out.
        good: (n,) whether the edge's answer was as good as the cloud's.
        rng: Decides the folds.
        folds: At least 2.
        most: Largest number of signals.

    Raises:
        TooFewRows: Fewer rows than two per fold.
        BadSignal: A column is not finite, or every column is constant.
    """
    rows = len(good)
    if rows < 2 * folds:
        raise TooFewRows(
            f"{rows} rows are too few to choose signals over {folds} folds; at least {2 * folds} are needed",
            minimum=2 * folds,
        )
    for name, column in signals.items():
        if not np.isfinite(column).all():
            raise BadSignal(f"the signal {name} has values that are not finite numbers", name=name)
    candidates = [name for name, column in signals.items() if np.ptp(column) > 0]
    if not candidates:
        raise BadSignal("every signal is constant: nothing tells one answer from another", name="all")
    fold = rng.permutation(rows) % folds

    def held_out_loss(names: Sequence[str]) -> NDArray[np.float64]:
        x = np.column_stack([signals[name] for name in names]) if names else np.zeros((rows, 0))
        loss = np.empty(rows)
        for k in range(folds):
            out = fold == k
            loss[out] = log_loss(fit_logistic(x[~out], good[~out])(x[out]), good[out])
        return loss

    chosen: list[str] = []
    current = held_out_loss(chosen)
    losses = [float(current.mean())]
    while len(chosen) < most:
        trials = {name: held_out_loss([*chosen, name]) for name in candidates if name not in chosen}
        if not trials:
            break
        best = min(trials, key=lambda name: float(trials[name].mean()))
        gain = current - trials[best]
        if chosen and gain.mean() <= gain.std(ddof=1) / np.sqrt(rows):
            break
        chosen.append(best)
        current = trials[best]
        losses.append(float(current.mean()))
    return Selection(names=tuple(chosen), losses=tuple(losses))
