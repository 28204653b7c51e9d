"""From signals to confidence. One model per release and variant; the first one needs no calibration."""

from __future__ import annotations

import math
from typing import Protocol

from router.signals import Signals


class ConfidenceModel(Protocol):
    """Anything that turns signals into the confidence that the edge's answer is good, 0 to 1."""

    def confidence(self, signals: Signals) -> float: ...


class QuantileConfidence:
    """exp of the low quantile of token log-probabilities: the probability of the answer's shaky tokens.

    Uncalibrated: its values order answers, but 0.7 does not mean right in seven cases of ten.
    """

    def confidence(self, signals: Signals) -> float:
        """0 without tokens (nothing to be sure of) and for NaN; otherwise in [0, 1]."""
        if signals.tokens == 0 or math.isnan(signals.low_logprob):
            return 0.0
        return math.exp(min(signals.low_logprob, 0.0))
