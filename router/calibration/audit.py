"""Shadow audit: does the certified regret still hold in production? An anytime-valid test by betting.

A coin decides for each request, before anything is known about it, whether it is audited. An audited
request that is forwarded anyway counts as 0; one that was kept also goes to the cloud in the background,
and counts as 1 when its answer was wrong where the cloud's is right, else 0. So each audited request is a
draw Z with E[Z] = regret.

The test
- Null: E[Z | past] <= alpha, always. A bet on rate p > alpha multiplies its stake by p / alpha when Z = 1 and
  by (1 - p) / (1 - alpha) when Z = 0; under the null its expected factor is at most 1 (Waudby-Smith and
  Ramdas 2024).
- Stakes are spread over several rates p and over the moment at which the trouble begins: a part w_s = 1 /
  (s (s + 1)) of the unit stake enters with the s-th audited request (a Shiryaev-Roberts sum with weights
  that add to 1). So months without trouble do not have to be won back first.
- The wealth is a non-negative supermartingale that starts at 1. By Ville's inequality it ever reaches 1 /
  delta with probability at most delta while the null holds, at whatever moments one looks.

After an alarm, `recommend` certifies a higher threshold on the recent audited requests. That is advice for
the time until the release is calibrated again, not a guarantee: the moment of the alarm was not chosen
independently of those rows.

Not thread-safe; holds at most `window` outcomes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from router.calibration.threshold import DEFAULT_ALPHA, Threshold, certify

# Rates bet on, as multiples of alpha: slightly broken to entirely.
_MULTIPLES = (1.25, 1.5, 2.0, 3.0, 5.0, 8.0)
DEFAULT_FALSE_ALARM = 0.01
DEFAULT_WINDOW = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditState:
    """Where the test stands.

    Attributes:
        audited: Requests seen by the test since it began.
        regrets: Of those, kept though wrong where the cloud is right.
        wealth: The e-value: how strongly the promise is contradicted. 1 at the start.
        alarm: Whether the wealth ever reached 1 / delta. Stays until `restart`.
    """

    audited: int
    regrets: int
    wealth: float
    alarm: bool

    @property
    def observed_regret(self) -> float | None:
        """Share of audited requests; None before the first."""
        return self.regrets / self.audited if self.audited else None


class RegretAudit:
    """The test, fed one audited request at a time.

    Args:
        alpha: The promised regret, in (0, 1).
        delta: Probability of ever raising a false alarm, in (0, 1).
        window: How many outcomes are kept for `recommend`.

    Raises:
        ValueError: A number is out of its range.
    """

    def __init__(
        self,
        *,
        alpha: float = DEFAULT_ALPHA,
        delta: float = DEFAULT_FALSE_ALARM,
        window: int = DEFAULT_WINDOW,
    ) -> None:
        if not (0.0 < alpha < 1.0 and 0.0 < delta < 1.0 and window >= 1):
            raise ValueError("alpha and delta must be between 0 and 1, and the window at least 1")
        self._alpha = alpha
        self._alarm_at = 1.0 / delta
        rates = np.array([multiple * alpha for multiple in _MULTIPLES if multiple * alpha < 1.0])
        # An alpha so large that no multiple is left: bet half-way to certainty.
        self._rates = rates if len(rates) else np.array([(1.0 + alpha) / 2.0])
        self._recent: deque[tuple[float, bool]] = deque(maxlen=window)
        self._begin()

    def observe_forwarded(self) -> AuditState:
        """An audited request that was forwarded."""
        return self._observe(-math.inf, regret=False)

    def observe_kept(self, *, confidence: float, regret: bool) -> AuditState:
        """An audited request whose edge answer was kept, once the cloud's is known.

        Raises:
            ValueError: The confidence is not finite.
        """
        if not math.isfinite(confidence):
            raise ValueError(f"the confidence is {confidence}; it must be a finite number")
        return self._observe(confidence, regret=regret)

    @property
    def state(self) -> AuditState:
        return AuditState(
            audited=self._audited, regrets=self._regrets, wealth=self._wealth(), alarm=self._alarm
        )

    def recommend(self, current: Threshold, *, delta: float) -> Threshold:
        """A threshold that is at least as high as the current one and passes on the recent outcomes.

        Args:
            current: In force while the outcomes were collected.
            delta: Of the binomial test on the recent outcomes.
        """
        if current.value is None:
            return current
        kept = np.array([math.isfinite(confidence) for confidence, _ in self._recent], dtype=bool)
        scores: NDArray[np.float64] = np.array([c if math.isfinite(c) else 0.0 for c, _ in self._recent])
        regrets = np.array([regret for _, regret in self._recent], dtype=bool)
        tighter = certify(scores, regrets, alpha=self._alpha, delta=delta, keepable=kept)
        if tighter.value is not None and tighter.value <= current.value:
            return current
        return tighter

    def restart(self) -> None:
        """Begin anew: after the threshold was tightened or another release was activated. Forgets all."""
        self._recent.clear()
        self._begin()

    def _begin(self) -> None:
        self._bets = np.zeros(len(self._rates))
        self._unspent = 1.0
        self._audited = 0
        self._regrets = 0
        self._alarm = False

    def _observe(self, confidence: float, *, regret: bool) -> AuditState:
        self._recent.append((confidence, regret))
        self._audited += 1
        self._regrets += regret
        unspent = 1.0 / (self._audited + 1)
        entering = (self._unspent - unspent) / len(self._rates)
        self._unspent = unspent
        factor = self._rates / self._alpha if regret else (1.0 - self._rates) / (1.0 - self._alpha)
        # Far beyond any alarm level; keeps an alarm that nobody answers from overflowing.
        self._bets = np.minimum((self._bets + entering) * factor, 1e300)
        self._alarm = self._alarm or self._wealth() >= self._alarm_at
        return self.state

    def _wealth(self) -> float:
        return float(self._bets.sum()) + self._unspent
