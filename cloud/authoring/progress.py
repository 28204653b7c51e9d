"""How a build tells what it does. The command line draws it; nothing here knows of terminals."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told from several threads. Steps are named; a step is started once and finished once."""

    def start(self, step: str, *, total_bytes: int | None = None) -> None:
        """A step begins. With `total_bytes` its share done can be shown."""
        ...

    def advance(self, step: str, done_bytes: int) -> None:
        """So many bytes are done, counted from the step's start."""
        ...

    def finish(self, step: str, note: str) -> None:
        """The step is done; `note` says in a few words with what result."""
        ...


class Silent:
    """Progress for callers that show none."""

    def start(self, step: str, *, total_bytes: int | None = None) -> None:
        pass

    def advance(self, step: str, done_bytes: int) -> None:
        pass

    def finish(self, step: str, note: str) -> None:
        pass
