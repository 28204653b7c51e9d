"""Progress on the terminal: a bar for each step, or plain lines where there is no terminal.

Steps may be told from several threads. A step that failed keeps its last state; the error speaks for itself.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)


class Steps(Protocol):
    """As `cloud.authoring.progress.Progress`."""

    def start(self, step: str, *, total_bytes: int | None = None) -> None: ...
    def advance(self, step: str, done_bytes: int) -> None: ...
    def finish(self, step: str, note: str) -> None: ...


class StepLines:
    """One line when a step begins and one when it ends, each flushed."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._started: dict[str, float] = {}
        self._lock = threading.Lock()

    def start(self, step: str, *, total_bytes: int | None = None) -> None:
        with self._lock:
            self._started[step] = self._clock()
        self._say(f"{step} ...")

    def advance(self, step: str, done_bytes: int) -> None:
        pass

    def finish(self, step: str, note: str) -> None:
        with self._lock:
            took = self._clock() - self._started.pop(step, self._clock())
        self._say(f"{step}: {note} ({took:.1f} s)")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class StepBars:
    """A live bar for each step. Only inside `show_steps`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def start(self, step: str, *, total_bytes: int | None = None) -> None:
        with self._lock:
            self._tasks[step] = self._progress.add_task(step, total=total_bytes, note="")

    def advance(self, step: str, done_bytes: int) -> None:
        with self._lock:
            task = self._tasks.get(step)
        if task is not None:
            self._progress.update(task, completed=done_bytes)

    def finish(self, step: str, note: str) -> None:
        with self._lock:
            task = self._tasks.pop(step, None)
        if task is not None:
            self._progress.update(task, total=1, completed=1, note=note)
            self._progress.stop_task(task)


@contextlib.contextmanager
def show_steps(console: Console) -> Iterator[Steps]:
    """Progress for the time of the block, fit for what `console` writes to."""
    if not console.is_terminal:
        yield StepLines(console)
        return
    columns = (
        SpinnerColumn(finished_text="[green]✓[/green]"),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False, style="dim"),
    )
    with Progress(*columns, console=console) as progress:
        yield StepBars(progress)
