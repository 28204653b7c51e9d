"""How a worker process is watched: states, times, and the pause before a restart. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from protos.errors import ForebayError


class EngineState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    FAILED = "failed"


class EngineStartError(ForebayError):
    """The worker did not become ready. For operators: `log_tail` is what it wrote last.

    `permanent`: the model cannot be served, so trying again is of no use.
    """

    reason = "ENGINE_START_FAILED"

    def __init__(self, message: str, *, log_tail: str, permanent: bool = False) -> None:
        super().__init__(f"{message}\n{log_tail}" if log_tail else message)
        self.log_tail = log_tail
        self.permanent = permanent


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """How a worker is watched. All in seconds.

    Attributes:
        start_timeout_s: Most time to load the model.
        hang_timeout_s: Longest silence of a live worker; its heartbeat is a fifth of this, at most 5 s.
        stop_grace_s: Time to end by itself when closed.
        backoff_least_s, backoff_most_s: Pause before a restart, doubling from the one to the other.
        stable_s: A worker that ran this long starts the doubling over.
    """

    start_timeout_s: float = 120.0
    hang_timeout_s: float = 30.0
    stop_grace_s: float = 2.0
    backoff_least_s: float = 0.1
    backoff_most_s: float = 30.0
    stable_s: float = 60.0

    @property
    def heartbeat_s(self) -> float:
        return min(5.0, self.hang_timeout_s / 5)

    def backoff_s(self, failures: int, jitter: float) -> float:
        """The pause after `failures` (≥ 1) in a row; `jitter` in [0, 1) takes up to half of it away."""
        longest = min(self.backoff_least_s * 2.0 ** min(failures - 1, 30), self.backoff_most_s)
        return longest * (1.0 - jitter / 2)
