"""Keeps one worker process running: starts it, watches it, and replaces it when it dies or hangs.

States: starting → ready ⇄ restarting, and at the end stopped (closed) or failed (the model cannot be served,
which no restart changes).

Invariants
- At most one worker exists at a time, and after `close`, or when `start` raises, none.
- A worker that is silent for `hang_timeout_s` is taken for hung and killed; its heartbeat is far shorter.
- Restarts wait longer each time, up to a bound, with jitter, and start over after a stable while.
- `on_gone` is called once for every worker that was ready, after the state has left `ready`.

It knows nothing of requests; `edge.engine.process` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from edge.engine.child import WorkerProcess
from edge.engine.frames import Fault, Load, Ready, Refused, Report, Step
from edge.engine.protocol import EngineInfo
from edge.engine.spec import EngineSpec
from edge.engine.supervision import EngineStartError, EngineState, Supervision
from protos.errors import EngineUnavailable

_log = logging.getLogger(__name__)


class WorkerKeeper:
    """One worker after the other.

    Args:
        spec: What they load.
        supervision: Times.
        command: What is run, with `--fd N` behind it.
        jitter: Random numbers in [0, 1).
        on_step: Called for every step's report; must not block or raise.
        on_gone: Called when a worker that was ready is gone.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        supervision: Supervision,
        command: Sequence[str],
        jitter: Callable[[], float],
        on_step: Callable[[Step], None],
        on_gone: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._spec = spec
        self._supervision = supervision
        self._command = command
        self._jitter = jitter
        self._on_step = on_step
        self._on_gone = on_gone
        self._listeners: list[Callable[[EngineState], None]] = []
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._info: EngineInfo | None = None
        self._start_s = 1.0  # how long the last start took
        self._expected_at = 0.0  # when the next worker may be ready
        self._fault = ""
        self._task: asyncio.Task[None] | None = None
        self.state = EngineState.STARTING
        self.worker: WorkerProcess | None = None
        self.restarts = 0

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "start() sets it"
        return self._info

    async def start(self) -> None:
        """Start the first worker and wait until it is ready. Raises EngineStartError."""
        await self._launch()
        self._task = asyncio.create_task(self._supervise_safely(), name=f"engine-{self._spec.name}")

    async def close(self) -> None:
        """End the worker and the supervision. May be called again."""
        self._set_state(EngineState.STOPPED)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.worker is not None:  # the task was cancelled before it ran at all
            await self._bury(self.worker)

    def subscribe(self, listener: Callable[[EngineState], None]) -> Callable[[], None]:
        """Call `listener` at every change of state. Returns what ends that."""
        self._listeners.append(listener)

        def unsubscribe() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return unsubscribe

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until there is a worker. Raises EngineUnavailable: not in time, or never again."""
        changed = asyncio.Event()
        unsubscribe = self.subscribe(lambda _: changed.set())
        try:
            async with asyncio.timeout(timeout_s):
                while self.state is not EngineState.READY:
                    if self.state in (EngineState.STOPPED, EngineState.FAILED):
                        raise self.unavailable()
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            raise self.unavailable() from None
        finally:
            unsubscribe()

    def unavailable(self) -> EngineUnavailable:
        """What a request is told now that there is no worker."""
        what = {
            EngineState.STOPPED: "the engine is stopped",
            EngineState.FAILED: "the engine cannot serve this model",
        }.get(self.state, "the engine is starting again")
        wait_s = min(max(self._expected_at - self._loop.time(), 0.1), self._supervision.backoff_most_s)
        return EngineUnavailable(what, retry_after_s=wait_s, metadata={"engine_state": self.state.value})

    def _on_report(self, report: Report) -> None:
        if isinstance(report, Step):
            self._on_step(report)
        elif isinstance(report, Fault):
            self._fault = report.message
        elif not self._ready.done():
            if isinstance(report, Ready):
                self._ready.set_result(report.info)
            elif isinstance(report, Refused):
                self._ready.set_exception(EngineStartError(report.message, log_tail="", permanent=True))

    async def _launch(self) -> None:
        """Start a worker and wait until it is ready. Raises EngineStartError."""
        began = self._loop.time()
        self._fault = ""
        self._ready = self._loop.create_future()
        try:
            worker = await WorkerProcess.spawn(self._command, self._on_report)
        except OSError as error:
            raise EngineStartError(f"cannot start {self._command[0]}: {error}", log_tail="") from error
        try:
            worker.send(Load(self._spec, self._supervision.heartbeat_s))
            first: set[asyncio.Future[Any]] = {self._ready, worker.ended}
            await asyncio.wait(
                first, timeout=self._supervision.start_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not self._ready.done():
                raise await self._start_error(worker)
            self._info = self._ready.result()
        except BaseException:
            await worker.stop(0.0)
            raise
        self.worker = worker
        self._start_s = self._loop.time() - began
        self._set_state(EngineState.READY)

    async def _start_error(self, worker: WorkerProcess) -> EngineStartError:
        if not worker.ended.done():
            what = f"not ready after {self._supervision.start_timeout_s:g} s"
            worker.kill("start timed out")
            await worker.stop(0.0)
        else:
            what = f"ended with status {await worker.stop(self._supervision.stop_grace_s)}"
        return EngineStartError(f"the engine of {self._spec.name} {what}", log_tail=worker.log_tail())

    async def _supervise_safely(self) -> None:
        try:
            await self._supervise()
        except Exception:
            _log.exception("the supervision of engine %s failed", self._spec.name)
            self._set_state(EngineState.FAILED)

    async def _supervise(self) -> None:
        failures = 0
        while (worker := self.worker) is not None:
            ready_at = self._loop.time()
            try:
                await self._watch(worker)
            finally:
                await self._bury(worker)
            if self._loop.time() - ready_at >= self._supervision.stable_s:
                failures = 0
            failures = await self._relaunch(failures)

    async def _watch(self, worker: WorkerProcess) -> None:
        """Return when the worker has ended; kill it when it hangs."""
        limit_s = self._supervision.hang_timeout_s
        while not worker.ended.done():
            await asyncio.wait({worker.ended}, timeout=limit_s / 4)
            if not worker.ended.done() and self._loop.time() - worker.last_heard_s > limit_s:
                worker.kill(f"silent for {limit_s:g} s")

    async def _bury(self, worker: WorkerProcess) -> None:
        """The worker is dead, or shall be."""
        self.worker = None
        self._expected_at = self._loop.time() + self._supervision.backoff_least_s + self._start_s
        self._set_state(EngineState.RESTARTING)
        self._on_gone()
        status = await worker.stop(self._supervision.stop_grace_s)
        if self.state is not EngineState.STOPPED:
            why = f"{worker.ended.result()}; status {status}{'; ' if self._fault else ''}{self._fault}"
            _log.error("engine %s: worker %d is gone: %s", self._spec.name, worker.pid, why)

    async def _relaunch(self, failures: int) -> int:
        """Start the next worker, unless the model is refused. Returns the failures in a row so far."""
        while True:
            failures += 1
            pause_s = self._supervision.backoff_s(failures, self._jitter())
            self._expected_at = self._loop.time() + pause_s + self._start_s
            await asyncio.sleep(pause_s)
            self.restarts += 1
            try:
                await self._launch()
            except EngineStartError as error:
                _log.error("engine %s: %s", self._spec.name, error.message)
                if not error.permanent:
                    continue
                self._set_state(EngineState.FAILED)
            return failures

    def _set_state(self, state: EngineState) -> None:
        if state is self.state or self.state is EngineState.STOPPED:
            return
        self.state = state
        for listener in list(self._listeners):
            try:
                listener(state)
            except Exception:  # a listener's bug must not stop the supervision
                _log.exception("a listener of engine %s failed", self._spec.name)
