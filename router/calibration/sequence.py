"""Learn-then-Test over any policies, when their kept sets are not nested.

`router.calibration.threshold.certify` covers all policies of the form "keep when the score reaches t". A
policy with several bars (a streaming gate with an early exit, a hedge between two bars) keeps sets that
need not be nested. For these, fix a finite sequence of policies beforehand, the most careful first, run
each over the calibration rows, and test in that order: the first that does not pass ends it. Fixed-sequence
testing needs no correction for the number of policies, but the sequence must not depend on these rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from router.calibration.binomial import largest_passing_count
from router.calibration.threshold import DEFAULT_ALPHA, DEFAULT_DELTA


def certify_sequence(
    regretted: ArrayLike, *, alpha: float = DEFAULT_ALPHA, delta: float = DEFAULT_DELTA
) -> int | None:
    """The last policy of the sequence up to which all pass.

    Args:
        regretted: (policies, n) bool: under this policy the edge's answer was given, and it is wrong where
            the cloud's is right.
        alpha: Largest regret, in (0, 1).
        delta: Probability with which the answer may be wrong, in (0, 1).

    Returns:
        Its index; None when already the first does not pass: forward all. With probability at least
        1 - delta every policy up to the index has a regret of at most alpha.

    Raises:
        ValueError: Not a table, or alpha or delta is out of range.
    """
    table = np.asarray(regretted, dtype=bool)
    if table.ndim != 2:
        raise ValueError(f"expected (policies, rows), not {table.shape}")
    allowed = largest_passing_count(table.shape[1], alpha=alpha, delta=delta)
    failing = np.flatnonzero(table.sum(axis=1) > allowed)
    passing = int(failing[0]) if len(failing) else len(table)
    return passing - 1 if passing else None
