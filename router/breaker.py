"""A circuit breaker for the cloud: after repeated failures, ask it rarely instead of always.

Pure: every method takes the time. Closed lets all through; open lets none through until a pause is over;
half-open lets one trial through, whose outcome closes or opens it again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class BreakerState(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """When it opens and for how long.

    Attributes:
        failures: Failures in a row that open it.
        pause_s: First pause, in seconds; doubles with every failed trial.
        longest_pause_s: Bound of the doubling, in seconds.
    """

    failures: int = 5
    pause_s: float = 1.0
    longest_pause_s: float = 30.0


class Breaker:
    """One breaker. Times are monotonic seconds."""

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._failures = 0
        self._trips = 0
        self._open_until: float | None = None
        self._trial_until: float | None = None

    def state(self, now: float) -> BreakerState:
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def retry_after_s(self, now: float) -> float:
        """Seconds until a trial is let through; 0 when one may go now."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - now)

    def allow(self, now: float) -> bool:
        """Whether a call may go now. Half-open: one at a time, whose place is lost after a pause."""
        state = self.state(now)
        if state is BreakerState.CLOSED:
            return True
        if state is BreakerState.OPEN:
            return False
        if self._trial_until is not None and now < self._trial_until:
            return False
        self._trial_until = now + self._settings.longest_pause_s
        return True

    def succeeded(self) -> None:
        self._failures = 0
        self._trips = 0
        self._open_until = None
        self._trial_until = None

    def abandoned(self) -> None:
        """The call said nothing about the cloud (the caller went away): give a trial's place back."""
        self._trial_until = None

    def failed(self, now: float) -> None:
        self._failures += 1
        self._trial_until = None
        if self._open_until is None and self._failures < self._settings.failures:
            return
        pause = min(self._settings.pause_s * 2.0 ** min(self._trips, 30), self._settings.longest_pause_s)
        self._trips += 1
        self._open_until = now + pause
