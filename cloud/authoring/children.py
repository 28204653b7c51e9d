"""Child processes with a log, a bound in time, and a way to stop.

A child leads a process group of its own, so that stopping it takes what it started along.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cloud.authoring.errors import ChildFailed, DiskFull
from cloud.authoring.files import no_space_is_an_error
from cloud.authoring.stopping import raise_if_stopped

_POLL_S = 0.1
_GRACE_S = 3.0
_TAIL_BYTES = 4096


def run_child(
    command: Sequence[str],
    *,
    what: str,
    log: Path,
    timeout_s: float,
    stop: threading.Event,
    env: Mapping[str, str],
    on_tick: Callable[[], None] = lambda: None,
    accept: frozenset[int] = frozenset({0}),
) -> int:
    """Run `command` to its end; output goes to `log`.

    Args:
        what: Names the work in error messages, such as "quantizing x to int4".
        timeout_s: Most seconds that it may take.
        on_tick: Called about ten times a second while it runs.
        accept: Exit codes that are no failure.

    Returns:
        The exit code.

    Raises:
        ChildFailed: Another exit code, or out of time. The message quotes the log's last line.
        BuildCancelled: `stop` was set; the child is gone.
    """
    with no_space_is_an_error(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        sink = log.open("wb")
    deadline = time.monotonic() + timeout_s
    with sink:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
        )
        try:
            while (code := child.poll()) is None:
                raise_if_stopped(stop, timeout_s=_POLL_S)
                on_tick()
                if time.monotonic() >= deadline:
                    raise ChildFailed(f"{what} took more than {timeout_s:.0f} s; see {log}")
        finally:
            _end(child)
    if code not in accept:
        if "No space left on device" in _tail(log):
            raise DiskFull(f"no space left while {what}; free some, then run this again")
        raise ChildFailed(f"{what} failed (exit {code}): {last_line(log)}; see {log}")
    return code


def last_line(log: Path) -> str:
    """The last line of a log that says something, shortened to 300 characters."""
    lines = [line.strip() for line in _tail(log).replace("\r", "\n").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    try:
        child.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
