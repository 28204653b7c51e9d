"""One worker process, from its start to its end, as the event loop sees it.

It moves frames and bytes; what they mean to requests is `edge.engine.process`'s. A worker is used once: when
it has ended, another one is spawned.

Invariants
- Nothing here blocks the event loop: the socket is non-blocking and the log is read as it comes.
- What waits to be sent is bounded (`MAX_UNSENT_BYTES`), and so is what is remembered of the log.
- After `stop`, or when `spawn` raises, the process is dead and collected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Callable, Sequence
from typing import Self

from edge.engine.frames import Command, FrameError, FrameWriter, Report, ReportReader, Shutdown

MAX_UNSENT_BYTES = 8 * 1024 * 1024
_READ_BYTES = 256 * 1024
_LOG_READ_BYTES = 4096
_LOG_TAIL_BYTES = 16 * 1024
# A worker whose socket has ended is about to exit; after this it is killed.
_EXIT_GRACE_S = 1.0

_log = logging.getLogger(__name__)


class WorkerProcess:
    """A running child and the socket to it. Made by `spawn`.

    Attributes:
        ended: Done when the connection has ended, for whatever reason. Its result says why, for the log.
        last_heard_s: When the last bytes came, on the loop's clock.
    """

    def __init__(self, process: Process, sock: socket.socket, on_report: Callable[[Report], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._process = process
        self._sock = sock
        self._on_report = on_report
        self._reader = ReportReader()
        self._writer = FrameWriter()
        self._unsent = bytearray()
        self._tail = b""
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self.last_heard_s = self._loop.time()
        self._loop.add_reader(sock, self._readable)
        self._logging = self._loop.create_task(self._read_log(), name="engine-worker-log")

    @classmethod
    async def spawn(cls, command: Sequence[str], on_report: Callable[[Report], None]) -> Self:
        """Start `command` with `--fd N` behind it.

        Args:
            command: Such as `[sys.executable, "-m", "edge.engine.worker"]`.
            on_report: Called in the event loop for every frame, in order; must not block or raise.

        Raises:
            OSError: The command cannot be started.
        """
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            process = await asyncio.create_subprocess_exec(
                *command,
                "--fd",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                # A terminal's ctrl-C is for the parent, which then ends its workers in order.
                process_group=0,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process, ours, on_report)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def congested(self) -> bool:
        """Whether so much waits to be sent that nothing should be added, except to cancel."""
        return len(self._unsent) > MAX_UNSENT_BYTES

    def log_tail(self) -> str:
        """The last few kilobytes that the worker wrote to standard output and standard error."""
        return self._tail.decode(errors="replace").strip()

    def send(self, command: Command) -> None:
        """Send a frame, now or as soon as the socket takes it. Nothing happens when the worker has ended.

        Raises:
            FrameError: The command is too large for a frame.
        """
        frame = self._writer.frame(command)
        if self.ended.done():
            return
        if self._unsent:
            self._unsent += frame
            return
        try:
            sent = self._sock.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._end(f"cannot send: {error}")
            return
        if sent < len(frame):
            self._unsent += frame[sent:]
            self._loop.add_writer(self._sock, self._writable)

    def kill(self, why: str) -> None:
        """SIGKILL."""
        self._end(why)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self, grace_s: float) -> int:
        """End the worker: ask, wait, kill. Returns its exit status (negative: the signal).

        A caller that is cancelled meanwhile leaves it killed.
        """
        try:
            self.send(Shutdown())
            async with asyncio.timeout(grace_s if not self.ended.done() else _EXIT_GRACE_S):
                await self._process.wait()
        except TimeoutError:
            _log.info("engine worker %d is killed", self.pid)
        finally:
            self.kill("stopped")
            status = await asyncio.shield(asyncio.ensure_future(self._process.wait()))
            # What it wrote last says why it ended. Nobody else holds the pipe, so its end comes at once.
            await asyncio.wait({self._logging}, timeout=_EXIT_GRACE_S)
            self._logging.cancel()
        return status

    def _readable(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(f"cannot receive: {error}")
            return
        if not data:
            self._end("the worker closed its socket")
            return
        self.last_heard_s = self._loop.time()
        try:
            reports = self._reader.feed(data)
        except FrameError as error:
            self.kill(f"the worker sent nonsense: {error}")
            return
        for report in reports:
            self._on_report(report)

    def _writable(self) -> None:
        try:
            sent = self._sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(f"cannot send: {error}")
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._sock)

    def _end(self, why: str) -> None:
        if self.ended.done():
            return
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._unsent.clear()
        self.ended.set_result(why)

    async def _read_log(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        while data := await stream.read(_LOG_READ_BYTES):
            self._tail = (self._tail + data)[-_LOG_TAIL_BYTES:]
            for line in data.decode(errors="replace").splitlines():
                _log.info("engine worker %d: %s", self.pid, line)
