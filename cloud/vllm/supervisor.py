"""Keeps one vLLM child running. The thin shell around `cloud.vllm.lifecycle`.

One task waits for what happens next (the child ends, a health check, a pause is over, a stop is asked),
puts it to `advance`, and does what that says.

Invariants
- READY is reported only after the engine has answered a health check and the warm-up.
- A listener hears every change of phase, in order, on the event loop.
- After `stop` nothing of the child runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from cloud.vllm.command import VllmCommand
from cloud.vllm.lifecycle import Action, Event, Lifecycle, Phase, RestartPolicy, advance
from cloud.vllm.process import EngineProcess, LogSpec
from protos.errors import ForebayError

_log = logging.getLogger(__name__)

PhaseListener = Callable[[Phase], None]


class EngineStartFailed(Exception):
    """The engine did not come up. `log_tail` is the end of its log. For operators; never sent to a peer."""

    def __init__(self, message: str, *, log_tail: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.log_tail = log_tail


class VllmSupervisor:
    """Starts, watches and stops the child.

    Args:
        command: What to run.
        socket_path: Removed before each start: a killed child leaves it behind.
        healthy: One health check; bounded in time by itself.
        warm_up: Called once per child when it is first healthy; it raises when the engine is not usable.
        health_interval_s: Between health checks, in seconds.
        clock: Monotonic seconds.
        random: Numbers in [0, 1), for the jitter of pauses.
        listener: Hears every change of phase.
    """

    def __init__(
        self,
        command: VllmCommand,
        *,
        socket_path: Path,
        log: LogSpec,
        policy: RestartPolicy,
        healthy: Callable[[], Awaitable[bool]],
        warm_up: Callable[[], Awaitable[None]],
        health_interval_s: float,
        clock: Callable[[], float],
        random: Callable[[], float],
        listener: PhaseListener,
    ) -> None:
        self._command = command
        self._socket_path = socket_path
        self._log = log
        self._policy = policy
        self._healthy = healthy
        self._warm_up = warm_up
        self._health_interval_s = health_interval_s
        self._clock = clock
        self._random = random
        self._listener = listener
        self._state = Lifecycle()
        self._process: EngineProcess | None = None
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def phase(self) -> Phase:
        return self._state.phase

    @property
    def restarts(self) -> int:
        return self._state.restarts

    @property
    def pid(self) -> int | None:
        """Of the launcher of the child that runs now."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Begin; returns at once."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="vllm-supervisor")

    async def wait_ready(self) -> None:
        """Return once the engine is ready.

        Raises:
            EngineStartFailed: A start failed first (the supervisor goes on trying), or it was stopped.
        """
        while self.phase is not Phase.READY:
            if self._task is None or self._task.done():
                raise EngineStartFailed("the engine is not being started")
            if self._state.failures:
                raise EngineStartFailed(
                    f"vLLM did not start; its log is {self._log.path}", log_tail=self._log.tail()
                )
            self._changed.clear()
            await self._changed.wait()

    async def stop(self) -> None:
        """End the child and the supervision. Safe to call twice."""
        self._stop.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self._changed.set()

    async def _run(self) -> None:
        try:
            await self._step(Event.START)
            while self.phase is not Phase.STOPPED:
                await self._step(await self._next_event())
        except Exception:
            _log.exception("the supervisor of vLLM broke")
            raise
        finally:
            # Reached with a live child only by cancellation or a bug.
            if self._process is not None:
                await asyncio.shield(self._process.kill())
                self._process = None
            self._changed.set()

    async def _step(self, event: Event) -> None:
        before = self._state
        if event is Event.EXITED:
            await self._reap()
        self._state, action = advance(
            before, event, now_s=self._clock(), policy=self._policy, jitter=self._random()
        )
        # Listeners first: nobody must be sent to an engine that is about to be killed.
        if self._state.phase is not before.phase:
            self._report(before)
        match action:
            case Action.SPAWN:
                await self._spawn()
            case Action.TERMINATE:
                if self._process is not None:
                    self._process.terminate()
            case Action.INTERRUPT:
                if self._process is not None:
                    self._process.interrupt()
            case Action.KILL:
                if self._process is not None:
                    await self._process.kill()
                if self.phase is not Phase.STOPPING:
                    self._process = None
            case Action.NONE:
                pass

    async def _spawn(self) -> None:
        self._socket_path.unlink(missing_ok=True)
        try:
            self._process = await EngineProcess.spawn(
                self._command, log=self._log, grace_s=self._policy.stop_grace_s
            )
        except OSError as error:
            _log.error("vLLM cannot be started: %s", error)
            await self._step(Event.EXITED)

    async def _reap(self) -> None:
        if self._process is not None:
            code = await self._process.wait()
            self._process = None
            if self.phase is not Phase.STOPPING:
                _log.error("vLLM ended with status %d; the end of its log:\n%s", code, self._log.tail())

    async def _next_event(self) -> Event:
        """Whatever comes first. The end of the child goes before a stop, and both before a check."""
        exited = asyncio.create_task(self._exited())
        stopping = asyncio.create_task(self._stop_asked())
        work = asyncio.create_task(self._work())
        tasks: tuple[asyncio.Task[Event], ...] = (exited, stopping, work)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return next(task for task in tasks if task in done).result()

    async def _exited(self) -> Event:
        if self._process is None:
            await asyncio.Event().wait()
        else:
            await self._process.wait()
        return Event.EXITED

    async def _stop_asked(self) -> Event:
        if self.phase is Phase.STOPPING:
            await asyncio.Event().wait()
        await self._stop.wait()
        return Event.STOP

    async def _work(self) -> Event:
        """A health check in its time, or the passing of time."""
        age_s = self._clock() - self._state.since_s
        match self.phase:
            case Phase.STARTING:
                left_s = max(0.0, self._policy.startup_timeout_s - age_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await asyncio.sleep(self._health_interval_s)
                        return await self._check_new()
            case Phase.READY:
                await asyncio.sleep(self._health_interval_s)
                return Event.HEALTHY if await self._healthy() else Event.UNHEALTHY
            case Phase.BACKOFF:
                await asyncio.sleep(max(0.0, self._state.until_s - self._clock()))
            case Phase.STOPPING:
                # The launcher kills at the end of the grace; this is for a launcher that hangs.
                grace_s = self._policy.stop_grace_s + self._policy.kill_margin_s
                await asyncio.sleep(max(0.0, grace_s - age_s))
            case Phase.STOPPED:
                pass
        return Event.TICK

    async def _check_new(self) -> Event:
        if not await self._healthy():
            return Event.UNHEALTHY
        try:
            await self._warm_up()
        except ForebayError as error:
            _log.warning("vLLM is up but not usable: %s", error.message)
            return Event.UNHEALTHY
        return Event.HEALTHY

    def _report(self, before: Lifecycle) -> None:
        _log.info(
            "vLLM %s -> %s (starts %d, failures %d)",
            before.phase.value,
            self.phase.value,
            self._state.starts,
            self._state.failures,
        )
        self._listener(self.phase)
        self._changed.set()
