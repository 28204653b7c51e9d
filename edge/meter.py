"""Tokens and time of one request, kept as it goes. Reads the clock; decides nothing."""

from __future__ import annotations

from collections.abc import Callable

from edge.request import Timings, Usage


class Meter:
    """Books of one request, which is accepted now.

    Args:
        clock: Monotonic seconds.

    Attributes:
        usage: Tokens so far; whoever spends them adds them.
        timings: Times so far; `finish` makes them whole.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accepted_at = clock()
        self._cloud_since: float | None = None
        self._shown = False
        self.usage = Usage()
        self.timings = Timings()

    def prompt(self, tokens: int) -> None:
        """The prompt's length, as the first tier counts that saw it."""
        self.usage.prompt_tokens = self.usage.prompt_tokens or tokens

    def shown(self) -> float:
        """Text goes to the caller now. Returns the time."""
        now = self._clock()
        if not self._shown:
            self._shown = True
            self.timings.time_to_first_token_s = now - self._accepted_at
        return now

    def cloud_began(self) -> None:
        """A call to the cloud is made now."""
        self._cloud_since = self._clock()

    def cloud_ended(self) -> None:
        """The call is over, if there is one and it was not over before."""
        if self._cloud_since is not None:
            self.timings.cloud_s += self._clock() - self._cloud_since
            self._cloud_since = None

    def finish(self) -> None:
        """The answer is made now; text that was not shown before has the whole time to its first token.

        An answer is told while the generators that made it still stand: an open call to the cloud ends here.
        """
        self.cloud_ended()
        self.timings.total_s = self._clock() - self._accepted_at
        if not self._shown:
            self.timings.time_to_first_token_s = self.timings.total_s
