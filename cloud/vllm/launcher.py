"""A small process between the cloud server and vLLM: nobody is left behind, and the log stays bounded.

vLLM's own process starts workers (one per tensor-parallel rank), which outlive a parent that is killed.
This process adopts every orphan below it (Linux: child subreaper), so when the server goes, when vLLM's
front process goes, or when it is told to stop, it ends all of them:

- SIGTERM: passed on to vLLM; after `--grace-s` everything left is killed.
- SIGINT: the same in 2 s, for when there is nothing to lose.
- End of file on standard input: the server is gone, even by SIGKILL. As SIGINT.
- vLLM exits for whatever reason: the rest is killed, and this process ends with the same status.

vLLM's output goes to `--log`, which is rotated by size. Runs by itself (`python -m cloud.vllm.launcher`),
imports no asyncio and no gRPC, and is the only thread in its process.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SHORT_GRACE_S = 2.0
_TRACKER_GRACE_S = 2.0
_KILL_LIMIT_S = 10.0
_READ_BYTES = 64 * 1024


class RotatingLog:
    """Appends bytes to `path`; at `max_bytes` it becomes `path.1`, and so on up to `path.<keep>`."""

    def __init__(self, path: Path, *, max_bytes: int, keep: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._size = self._file.tell()

    def write(self, data: bytes) -> None:
        # A full disk must not take the engine down with it.
        with contextlib.suppress(OSError):
            if self._size and self._size + len(data) > self._max_bytes:
                self._rotate()
            self._size += self._file.write(data)

    def _rotate(self) -> None:
        self._file.close()
        for number in range(self._keep, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            newer = self._path.with_name(f"{self._path.name}.{number - 1}") if number > 1 else self._path
            if newer.exists():
                newer.replace(older)
        self._file = self._path.open("wb", buffering=0)
        self._size = 0


def main(arguments: Sequence[str]) -> int:
    """Run the command behind `--` and give its exit status (128 + signal when a signal ended it)."""
    parser = argparse.ArgumentParser(prog="python -m cloud.vllm.launcher")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--log-max-bytes", type=int, required=True)
    parser.add_argument("--log-keep", type=int, required=True)
    parser.add_argument("--grace-s", type=float, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)

    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wakeup = _listen_for_signals()
    child = subprocess.Popen(
        options.command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=_die_with_parent,
    )
    log = RotatingLog(options.log, max_bytes=options.log_max_bytes, keep=options.log_keep)
    try:
        _watch(child, wakeup, log, options.grace_s)
    finally:
        _kill_descendants()
        code = child.wait()
        _reap()
    return 128 - code if code < 0 else code


def _watch(child: subprocess.Popen[bytes], wakeup: socket.socket, log: RotatingLog, grace_s: float) -> None:
    """Pump output until the child is gone or its grace is over."""
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    deadline_s: float | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(wakeup, selectors.EVENT_READ)
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        selector.register(child.stdout, selectors.EVENT_READ)
        while child.poll() is None:
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return
            for key, _ in selector.select(left_s):
                stop_within_s: float | None = None
                if key.fileobj is wakeup:
                    numbers = set(wakeup.recv(64))
                    if signal.SIGTERM in numbers:
                        stop_within_s = grace_s
                    if signal.SIGINT in numbers:
                        stop_within_s = _SHORT_GRACE_S
                elif key.fileobj is child.stdout:
                    if not _pump(child.stdout.fileno(), log):
                        selector.unregister(child.stdout)
                elif not os.read(sys.stdin.fileno(), 64):
                    selector.unregister(sys.stdin.fileno())
                    stop_within_s = _SHORT_GRACE_S
                if stop_within_s is not None:
                    until_s = time.monotonic() + stop_within_s
                    deadline_s = until_s if deadline_s is None else min(deadline_s, until_s)
                    child.terminate()
    _pump(child.stdout.fileno(), log)


def _pump(descriptor: int, log: RotatingLog) -> bool:
    """Move what is there to the log. False at the end of the output."""
    try:
        data = os.read(descriptor, _READ_BYTES)
    except BlockingIOError:
        return True
    log.write(data)
    return bool(data)


def _listen_for_signals() -> socket.socket:
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return reader


def _kill_descendants() -> None:
    """Kill until none is left. Orphans of the killed come to this process, so each round sees them.

    Python's resource trackers get a moment more: with their users gone they remove the shared memory that
    those have left, and end.
    """
    until_s = time.monotonic() + _KILL_LIMIT_S
    trackers_until_s = time.monotonic() + _TRACKER_GRACE_S
    shared: set[Path] = set()
    while time.monotonic() < until_s:
        left = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
        if not left:
            break
        shared.update(path for process in left for path in _shared_memory_of(process.pid))
        users = [process for process in left if not _is_tracker(process)]
        if users:
            # Giving back gigabytes takes a killed process a while, and until then its tracker waits.
            trackers_until_s = time.monotonic() + _TRACKER_GRACE_S
        for process in users if time.monotonic() < trackers_until_s else left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=0.1)
    # Not all of vLLM's segments are known to a tracker. The names are random, so they were ours alone.
    for path in shared:
        with contextlib.suppress(OSError):
            path.unlink()


def _shared_memory_of(pid: int) -> set[Path]:
    """Files of the shared memory and semaphores of Python's that a process has mapped (Linux)."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {Path(line.split()[-1]) for line in lines if "/dev/shm/" in line}  # noqa: S108
    return {path for path in paths if path.name.startswith(("psm_", "sem.mp-"))}


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any(
            "multiprocessing.resource_tracker import main" in argument for argument in process.cmdline()
        )
    except psutil.NoSuchProcess:
        return False


def _reap() -> None:
    """Collect the adopted dead, which else would stay zombies where the system's init is careless."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
