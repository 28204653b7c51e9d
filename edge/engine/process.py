"""The engine as the rest of the edge sees it: requests in, events out, and a worker process that is replaced
when it dies.

States: starting → ready ⇄ restarting, and at the end stopped (closed) or failed (the model cannot be served,
which no restart changes).

Invariants
- Every request ends once. When the worker dies, each live request raises one `EngineUnavailable`; new ones
  raise it at once until the next worker is ready. Nothing is retried here.
- A worker that is silent for `hang_timeout_s` is taken for hung and killed; its heartbeat is far shorter.
- Restarts wait longer each time, up to a bound, with jitter, and start over after a stable while.
- The event loop is never held: per step there is one read and one decode, per token a few microseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import random
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

from edge.engine.child import WorkerProcess
from edge.engine.frames import (
    Cancel,
    Fault,
    FrameError,
    Load,
    Ready,
    Refused,
    Report,
    Step,
    Submit,
    SubmitLabels,
)
from edge.engine.live import LiveRequest
from edge.engine.protocol import (
    EngineEvent,
    EngineInfo,
    EngineRequest,
    EngineStats,
    Finished,
    LabelRequest,
    LabelResult,
)
from edge.engine.spec import EngineSpec
from edge.engine.supervision import EngineStartError, EngineState, Supervision
from protos.errors import (
    ContextTooLong,
    DeadlineExpired,
    EngineUnavailable,
    InvalidArgument,
    Overloaded,
)

WORKER_COMMAND = (sys.executable, "-m", "edge.engine.worker")
# The worker ends a request at its deadline; this much later it is ended here, should the worker be busy.
_DEADLINE_GRACE_S = 0.1

_log = logging.getLogger(__name__)


class EngineProcess:
    """One variant in a process of its own. Implements `edge.engine.protocol.Engine`. Made by `start`."""

    def __init__(
        self,
        spec: EngineSpec,
        supervision: Supervision,
        command: Sequence[str],
        jitter: Callable[[], float],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._spec = spec
        self._supervision = supervision
        self._command = command
        self._jitter = jitter
        self._state = EngineState.STARTING
        self._listeners: list[Callable[[EngineState], None]] = []
        self._worker: WorkerProcess | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._info: EngineInfo | None = None
        self._live: dict[str, LiveRequest] = {}
        self._ids = itertools.count()
        self._step = Step((), 0, 0, 0)
        self._restarts = 0
        self._start_s = 1.0  # how long the last start took
        self._ready_at = 0.0  # when the next worker is expected
        self._fault = ""
        self._supervisor: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        spec: EngineSpec,
        *,
        supervision: Supervision | None = None,
        command: Sequence[str] = WORKER_COMMAND,
        jitter: Callable[[], float] = random.random,
    ) -> Self:
        """Start the worker and wait until the model is loaded.

        Args:
            spec: What to load.
            supervision: Times; None for the defaults.
            command: What is run, with `--fd N` behind it.
            jitter: Random numbers in [0, 1).

        Raises:
            EngineStartError: It ended, refused the model, or took too long. No process is left behind.
        """
        engine = cls(spec, supervision or Supervision(), command, jitter)
        worker = await engine._launch()  # its own class
        engine._supervisor = asyncio.create_task(engine._supervise_safely(worker), name=f"engine-{spec.name}")
        return engine

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "start() sets it"
        return self._info

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def pid(self) -> int | None:
        """Of the present worker; None while there is none."""
        return None if self._worker is None else self._worker.pid

    def stats(self) -> EngineStats:
        return self._step.stats(self._restarts)

    def subscribe(self, listener: Callable[[EngineState], None]) -> Callable[[], None]:
        """Call `listener` in the event loop at every change of state. Returns what ends that."""
        self._listeners.append(listener)

        def unsubscribe() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return unsubscribe

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until requests are accepted.

        Raises:
            EngineUnavailable: Not within `timeout_s`, or never again.
        """
        changed = asyncio.Event()
        unsubscribe = self.subscribe(lambda _: changed.set())
        try:
            async with asyncio.timeout(timeout_s):
                while self._state is not EngineState.READY:
                    if self._state in (EngineState.STOPPED, EngineState.FAILED):
                        raise self._unavailable()
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            raise self._unavailable() from None
        finally:
            unsubscribe()

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineEvent]:
        """See `Engine.generate`. Close the iterator (`aclosing`) when it is not read to its end."""
        live = self._enter(request)
        try:
            while True:
                event = await live.next()
                assert not isinstance(event, LabelResult)
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            self._leave(live)

    async def score_labels(self, request: LabelRequest) -> LabelResult:
        """See `Engine.score_labels`."""
        live = self._enter(request)
        try:
            result = await live.next()
            assert isinstance(result, LabelResult)
            return result
        finally:
            self._leave(live)

    async def close(self) -> None:
        """Stop. Live requests raise `EngineUnavailable`. May be called again."""
        self._set_state(EngineState.STOPPED)
        self._fail_all()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    def _enter(self, request: EngineRequest | LabelRequest) -> LiveRequest:
        """Hand a request to the worker."""
        worker = self._worker
        if self._state is not EngineState.READY or worker is None:
            raise self._unavailable()
        info = self.info
        tokens = request.prompt_tokens if isinstance(request, EngineRequest) else request.context_tokens
        if len(tokens) > info.context_tokens:
            # The worker would say so too, but need not be sent a megabyte for it.
            raise ContextTooLong(
                f"the prompt has {len(tokens)} tokens; the context of the model is {info.context_tokens}",
                field="prompt",
                metadata={"limit_tokens": str(info.context_tokens), "requested_tokens": str(len(tokens))},
            )
        if worker.congested:
            raise Overloaded("the engine is not taking requests fast enough", retry_after_s=1.0)
        live = LiveRequest(str(next(self._ids)))
        if request.deadline_s is not None:
            live.timer = self._loop.call_later(request.deadline_s + _DEADLINE_GRACE_S, self._expire, live)
        self._live[live.wire_id] = live
        try:
            if isinstance(request, EngineRequest):
                worker.send(Submit(dataclasses.replace(request, request_id=live.wire_id)))
            else:
                worker.send(SubmitLabels(dataclasses.replace(request, request_id=live.wire_id)))
        except (FrameError, OverflowError) as error:  # OverflowError: an integer beyond 64 bits
            del self._live[live.wire_id]
            live.leave()
            raise InvalidArgument(f"the request is too large: {error}", field="prompt") from error
        return live

    def _leave(self, live: LiveRequest) -> None:
        """The reader is done, or gone."""
        self._live.pop(live.wire_id, None)
        if live.leave() and self._worker is not None:
            self._worker.send(Cancel(live.wire_id))

    def _expire(self, live: LiveRequest) -> None:
        if self._live.pop(live.wire_id, None) is not None:
            live.fail(DeadlineExpired("the deadline passed in the engine"))
            if self._worker is not None:
                self._worker.send(Cancel(live.wire_id))

    def _fail_all(self) -> None:
        ended, self._live = self._live, {}
        for live in ended.values():
            live.fail(self._unavailable())

    def _unavailable(self) -> EngineUnavailable:
        what = {
            EngineState.STOPPED: "the engine is stopped",
            EngineState.FAILED: "the engine cannot serve this model",
        }.get(self._state, "the engine is starting again")
        wait_s = min(max(self._ready_at - self._loop.time(), 0.1), self._supervision.backoff_most_s)
        return EngineUnavailable(what, retry_after_s=wait_s, metadata={"engine_state": self._state.value})

    def _on_report(self, report: Report) -> None:
        if isinstance(report, Step):
            self._step = report
            for event in report.events:
                live = self._live.get(event.request_id)
                if live is not None:  # else its reader has left; the cancellation is on its way
                    live.push(event)
                    if live.ended:
                        del self._live[event.request_id]
        elif isinstance(report, Ready):
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(report.info)
        elif isinstance(report, Refused):
            if self._ready is not None and not self._ready.done():
                self._ready.set_exception(EngineStartError(report.message, log_tail="", permanent=True))
        elif isinstance(report, Fault):
            self._fault = report.message

    async def _launch(self) -> WorkerProcess:
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
        self._worker = worker
        self._step = Step((), 0, 0, 0)
        self._start_s = self._loop.time() - began
        self._set_state(EngineState.READY)
        return worker

    async def _start_error(self, worker: WorkerProcess) -> EngineStartError:
        if not worker.ended.done():
            what = f"not ready after {self._supervision.start_timeout_s:g} s"
            worker.kill("start timed out")
            await worker.stop(0.0)
        else:
            what = f"ended with status {await worker.stop(self._supervision.stop_grace_s)}"
        return EngineStartError(f"the engine of {self._spec.name} {what}", log_tail=worker.log_tail())

    async def _supervise_safely(self, worker: WorkerProcess) -> None:
        try:
            await self._supervise(worker)
        except Exception:
            _log.exception("the supervision of engine %s failed", self._spec.name)
            self._set_state(EngineState.FAILED)
            self._fail_all()

    async def _supervise(self, worker: WorkerProcess) -> None:
        """Watch the worker and replace it, until closed."""
        failures = 0
        while True:
            ready_at = self._loop.time()
            try:
                await self._watch(worker)
            finally:
                self._worker = None
                if self._state is EngineState.READY:
                    self._ready_at = self._loop.time() + self._supervision.backoff_least_s + self._start_s
                    self._set_state(EngineState.RESTARTING)
                self._fail_all()
                self._step = Step((), 0, 0, 0)
                status = await worker.stop(self._supervision.stop_grace_s)
            _log.error(
                "engine %s: worker %d is gone (%s; status %d%s)",
                self._spec.name,
                worker.pid,
                worker.ended.result(),
                status,
                f"; {self._fault}" if self._fault else "",
            )
            if self._loop.time() - ready_at >= self._supervision.stable_s:
                failures = 0
            relaunched, failures = await self._relaunch(failures)
            if relaunched is None:
                return
            worker = relaunched

    async def _watch(self, worker: WorkerProcess) -> None:
        """Return when the worker has ended; kill it when it hangs."""
        limit_s = self._supervision.hang_timeout_s
        while not worker.ended.done():
            await asyncio.wait({worker.ended}, timeout=limit_s / 4)
            if not worker.ended.done() and self._loop.time() - worker.last_heard_s > limit_s:
                worker.kill(f"silent for {limit_s:g} s")

    async def _relaunch(self, failures: int) -> tuple[WorkerProcess | None, int]:
        """The next worker and the failures so far; None when the model is refused."""
        while True:
            failures += 1
            pause_s = self._supervision.backoff_s(failures, self._jitter())
            self._ready_at = self._loop.time() + pause_s + self._start_s
            await asyncio.sleep(pause_s)
            self._restarts += 1
            try:
                return await self._launch(), failures
            except EngineStartError as error:
                _log.error("engine %s: %s", self._spec.name, error.message)
                if error.permanent:
                    self._set_state(EngineState.FAILED)
                    return None, failures

    def _set_state(self, state: EngineState) -> None:
        if state is self._state or self._state is EngineState.STOPPED:
            return
        self._state = state
        for listener in list(self._listeners):
            try:
                listener(state)
            except Exception:  # a listener's bug must not stop the supervision
                _log.exception("a listener of engine %s failed", self._spec.name)
