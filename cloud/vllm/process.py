"""The engine child as a process: start it, ask it to end, make sure that nothing of it is left.

The child proper is `cloud.vllm.launcher`, in a session of its own; vLLM and its workers are below it.

Invariants
- After `kill` or `wait` nothing of the child's process group runs.
- The child ends by itself when this process is gone: it reads a pipe whose other end only we hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from cloud.vllm.command import VllmCommand

# The launcher's short grace, and its limit for killing all below it.
_LAUNCHER_KILL_S = 13.0
_TAIL_BYTES = 8 * 1024
_TAIL_LINES = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSpec:
    """Where the child's output goes. Rotated at `max_bytes`; `keep` old files stay."""

    path: Path
    max_bytes: int
    keep: int

    def tail(self) -> str:
        """The last lines, for a person to read after a failure. Empty when there is no log."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL_BYTES))
                text = file.read().decode("utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-_TAIL_LINES:])


class EngineProcess:
    """One running child. Made by `spawn`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def spawn(cls, command: VllmCommand, *, log: LogSpec, grace_s: float) -> EngineProcess:
        """Start the child.

        Args:
            grace_s: How long vLLM may take to end once asked, in seconds.

        Raises:
            OSError: The system starts no more processes.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cloud.vllm.launcher", "--log", str(log.path)),
            *("--log-max-bytes", str(log.max_bytes), "--log-keep", str(log.keep)),
            *("--grace-s", str(grace_s), "--", *command.argv),
            env=dict(command.environment),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        """Of the launcher, which leads the child's process group."""
        return self._process.pid

    def terminate(self) -> None:
        """Ask the child to end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def interrupt(self) -> None:
        """Ask the child to end without its grace."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    async def kill(self) -> None:
        """End the child and all below it, without its grace.

        The launcher does it best: it lets shared memory be cleaned up. Only when it hangs we do it.
        """
        self.interrupt()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _LAUNCHER_KILL_S)
        descendants = await asyncio.to_thread(_descendants, self.pid)
        self._kill_group()
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await self._process.wait()

    async def wait(self) -> int:
        """Wait for the end and give the exit status (negative: the signal that ended the launcher)."""
        code = await self._process.wait()
        # Normally the launcher has left nothing. When it was killed itself, its group is still there.
        self._kill_group()
        return code

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
