"""Stop strings in a text that arrives in pieces.

Invariants
- What is emitted, joined, is the text before the stop string that is complete first. It does not depend on
  how the text was cut into pieces.
- Nothing is held back longer than it may still turn into a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches one text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come. Nothing is emitted after it."""
        return self._stopped

    def feed(self, text: str) -> str:
        """Take the next piece; returns what can be shown now."""
        if self._stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        # The one that ends first wins, and of those that end together the one that begins first.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._stopped = True
            self._held = ""
            return text[: min(found)[1]]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text is over: what was held back is no stop string."""
        held, self._held = self._held, ""
        return "" if self._stopped else held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
