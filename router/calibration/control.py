"""Online threshold control: spend a budget of forwards, or meet a latency target, while certified.

Both are the same loop. Each finished request either spends (it was forwarded; or it was late) or does not,
and a share `target` may spend. The control holds a level u, a quantile of the calibration's confidences,
and moves it by `step * (target - spent)`: while less than the target is spent the threshold rises, for
forwarding is what quality is bought with; while more is spent it falls. As long as it is not clamped, the
share spent over T requests is within (1 + step) / (step * T) of the target whatever the traffic does (Gibbs
and Candès, "Adaptive conformal inference", 2021).

Invariant: the threshold is never under the certified one. A target that would need less forwarding than the
certificate allows is missed, and `clamped` says so.

The latency loop assumes that the cloud is the slower tier. Where the edge's own queue makes requests late,
forwarding less does not help, and the threshold stays at the certified one.

Pure state; the caller says what happened. Not thread-safe.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from router.calibration.threshold import Threshold

DEFAULT_STEP = 0.01
# Knots of the stored quantile function. Enough for steps of a tenth of a point at the default step.
_KNOTS = 201


class ThresholdControl:
    """The loop.

    Args:
        certified: The floor. One that forwards all leaves nothing to control.
        confidences: (n,) of calibration answers: the scale on which steps are taken. At least one.
        target: Largest share of requests that may spend, in [0, 1].
        step: How far one request moves the level, in (0, 1).
        highest: Level that is never passed, in (0, 1]: bounds what is forwarded when little is spent. At 1
            everything may be forwarded.

    Raises:
        ValueError: A number is out of its range, or a confidence is not finite.
    """

    def __init__(
        self,
        *,
        certified: Threshold,
        confidences: ArrayLike,
        target: float,
        step: float = DEFAULT_STEP,
        highest: float = 1.0,
    ) -> None:
        scores = np.asarray(confidences, dtype=np.float64)
        if scores.ndim != 1 or len(scores) == 0 or not np.isfinite(scores).all():
            raise ValueError("the confidences must be a column of at least one finite number")
        if not (0.0 <= target <= 1.0 and 0.0 < step < 1.0 and 0.0 < highest <= 1.0):
            raise ValueError("target must be in [0, 1], step between 0 and 1, highest in (0, 1]")
        self._target = target
        self._step = step
        self._floor = certified.bar
        self._levels = np.linspace(0.0, 1.0, _KNOTS)
        self._quantiles = np.quantile(scores, self._levels)
        # The level below which every threshold would be clamped: the loop does not wind up under it.
        self._lowest = float(np.mean(scores < self._floor))
        self._highest = max(self._lowest, highest)
        self._level = min(self._highest, max(self._lowest, target))

    @property
    def threshold(self) -> float:
        """What a confidence has to reach now; infinity at level 1, where all is forwarded."""
        if self._level >= 1.0:
            return math.inf
        return max(self._floor, float(np.interp(self._level, self._levels, self._quantiles)))

    @property
    def clamped(self) -> bool:
        """Whether the certificate, not the target, decides now."""
        return self._level <= self._lowest

    def observe(self, *, spent: bool) -> float:
        """One finished request: whether it was forwarded (or late). Returns the threshold for the next."""
        moved = self._level + self._step * (self._target - float(spent))
        self._level = min(self._highest, max(self._lowest, moved))
        return self.threshold


class LatencyControl:
    """`ThresholdControl` that spends lateness: at most `late_share` of requests may take longer than
    `target_s`.

    Args:
        control: Its target is the late share.
        target_s: In seconds, above 0.

    Raises:
        ValueError: `target_s` is not above 0.
    """

    def __init__(self, control: ThresholdControl, *, target_s: float) -> None:
        if not (math.isfinite(target_s) and target_s > 0):
            raise ValueError(f"the latency target is {target_s}; it must be above 0 seconds")
        self._control = control
        self._target_s = target_s

    @property
    def threshold(self) -> float:
        return self._control.threshold

    @property
    def clamped(self) -> bool:
        return self._control.clamped

    def observe(self, *, latency_s: float) -> float:
        """One finished request and how long it took. Returns the threshold for the next."""
        return self._control.observe(spent=latency_s > self._target_s)
