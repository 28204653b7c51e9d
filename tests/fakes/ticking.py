"""A clock that tests move."""

from __future__ import annotations


class Clock:
    """Call it for the time in seconds."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
