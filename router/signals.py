"""Running statistics of a decoded text: what the router knows while tokens come.

Pure and incremental. The first signal is a low quantile of the tokens' log-probabilities: unlike their sum
or plain mean it does not drift with the answer's length.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """A snapshot.

    Attributes:
        tokens: How many tokens it is over.
        low_logprob: The low quantile of their log-probabilities (natural logarithm); 0 without tokens.
        mean_logprob: Their mean.
        mean_entropy: Mean entropy of the distributions they came from, in nats.
        mean_margin: Mean of the largest probability less the second.
        truncated: The text was cut by its length.
    """

    tokens: int
    low_logprob: float
    mean_logprob: float
    mean_entropy: float
    mean_margin: float
    truncated: bool = False


class RunningSignals:
    """Collects tokens; `snapshot` is the state so far.

    Args:
        quantile: Which quantile is the low one, in (0, 1).
    """

    def __init__(self, *, quantile: float) -> None:
        if not 0.0 < quantile < 1.0:
            raise ValueError(f"quantile is {quantile}; it must be between 0 and 1")
        self._quantile = quantile
        self._sorted: list[float] = []
        self._logprob = 0.0
        self._entropy = 0.0
        self._margin = 0.0

    def add(self, *, logprob: float, entropy: float, margin: float) -> None:
        """One more token."""
        bisect.insort(self._sorted, logprob)
        self._logprob += logprob
        self._entropy += entropy
        self._margin += margin

    def snapshot(self, *, truncated: bool = False) -> Signals:
        """The signals of all tokens so far."""
        count = len(self._sorted)
        return Signals(
            tokens=count,
            low_logprob=self._low(),
            mean_logprob=self._logprob / count if count else 0.0,
            mean_entropy=self._entropy / count if count else 0.0,
            mean_margin=self._margin / count if count else 0.0,
            truncated=truncated,
        )

    def _low(self) -> float:
        """The quantile by linear interpolation between order statistics (numpy's default)."""
        if not self._sorted:
            return 0.0
        position = self._quantile * (len(self._sorted) - 1)
        below = int(position)
        above = min(below + 1, len(self._sorted) - 1)
        low, high = self._sorted[below], self._sorted[above]
        return low + (high - low) * (position - below)
