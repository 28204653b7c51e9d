"""Children end in time, whole, and say what was wrong."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import psutil
import pytest

from cloud.authoring.children import run_child
from cloud.authoring.errors import BuildCancelled, ChildFailed, DiskFull

GRANDCHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"


def run(
    code: str, log: Path, *, timeout_s: float = 20.0, stop: threading.Event | None = None, tick: object = None
) -> int:
    return run_child(
        [sys.executable, "-c", code],
        what="the work",
        log=log,
        timeout_s=timeout_s,
        stop=stop or threading.Event(),
        env=os.environ,
        on_tick=tick if callable(tick) else (lambda: None),
    )


def test_output_goes_to_the_log(tmp_path: Path) -> None:
    assert run("print('hello')", tmp_path / "logs" / "a.log") == 0
    assert (tmp_path / "logs" / "a.log").read_text() == "hello\n"


def test_a_failure_quotes_the_last_line_and_names_the_log(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with pytest.raises(ChildFailed, match=r"the work failed \(exit 3\): too bad; see .*a\.log"):
        run("print('too bad'); raise SystemExit(3)", log)


def test_a_child_that_ran_out_of_disk_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(DiskFull):
        run("raise OSError(28, 'No space left on device')", tmp_path / "a.log")


def test_a_child_that_takes_too_long_is_gone_with_what_it_started(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match="took more than"):
        run(GRANDCHILD, tmp_path / "a.log", timeout_s=0.5)
    assert [p for p in psutil.Process().children(recursive=True) if "time.sleep(60)" in p.cmdline()] == []


def test_a_stop_ends_the_child(tmp_path: Path) -> None:
    stop = threading.Event()
    with pytest.raises(BuildCancelled):
        run("import time; time.sleep(60)", tmp_path / "a.log", stop=stop, tick=stop.set)
    assert [p for p in psutil.Process().children() if "time.sleep(60)" in " ".join(p.cmdline())] == []
