"""One way to stop a build: a `threading.Event` that every loop and wait looks at."""

from __future__ import annotations

import threading

from cloud.authoring.errors import BuildCancelled


def raise_if_stopped(stop: threading.Event, *, timeout_s: float = 0.0) -> None:
    """Wait up to `timeout_s` for the event.

    Raises:
        BuildCancelled: It is set.
    """
    if stop.wait(timeout_s):
        raise BuildCancelled("stopped; finished steps are kept, and the next run goes on from there")
