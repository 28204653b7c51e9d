"""The engine as the rest of the edge sees it: requests in, events out, through a worker process.

Invariants
- Every request ends once. When the worker dies, each live request raises one `EngineUnavailable`; new ones
  raise it at once until the next worker is ready. Nothing is retried here.
- A deadline ends its request on time even when the worker hangs.
- The event loop is never held: per step there is one read and one decode, per token a few microseconds.

How workers come and go is `edge.engine.keeper`'s business.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Self

from edge.engine.frames import Cancel, FrameError, Step, Submit, SubmitLabels
from edge.engine.keeper import WorkerKeeper
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
from edge.engine.supervision import EngineState, Supervision
from protos.errors import ContextTooLong, DeadlineExpired, InvalidArgument, Overloaded

WORKER_COMMAND = (sys.executable, "-m", "edge.engine.worker")
# The worker ends a request at its deadline; this much later it is ended here, should the worker be busy.
_DEADLINE_GRACE_S = 0.1
_CONGESTED_RETRY_S = 1.0
_IDLE = Step((), 0, 0, 0)


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
        self._live: dict[str, LiveRequest] = {}
        self._ids = itertools.count()
        self._step = _IDLE
        self._keeper = WorkerKeeper(
            spec,
            supervision=supervision,
            command=command,
            jitter=jitter,
            on_step=self._on_step,
            on_gone=self._on_gone,
        )

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
            jitter: Random numbers in [0, 1), for the pauses before restarts.

        Raises:
            EngineStartError: It ended, refused the model, or took too long. No process is left behind.
        """
        engine = cls(spec, supervision or Supervision(), command, jitter)
        await engine._keeper.start()  # its own class
        return engine

    @property
    def info(self) -> EngineInfo:
        return self._keeper.info

    @property
    def state(self) -> EngineState:
        return self._keeper.state

    @property
    def pid(self) -> int | None:
        """Of the present worker; None while there is none."""
        return None if self._keeper.worker is None else self._keeper.worker.pid

    def stats(self) -> EngineStats:
        return self._step.stats(self._keeper.restarts)

    def subscribe(self, listener: Callable[[EngineState], None]) -> Callable[[], None]:
        """Call `listener` in the event loop at every change of state. Returns what ends that."""
        return self._keeper.subscribe(listener)

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until requests are accepted.

        Raises:
            EngineUnavailable: Not within `timeout_s`, or never again.
        """
        await self._keeper.wait_ready(timeout_s)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
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
        await self._keeper.close()

    def _enter(self, request: EngineRequest | LabelRequest) -> LiveRequest:
        """Hand a request to the worker."""
        worker = self._keeper.worker
        if self.state is not EngineState.READY or worker is None:
            raise self._keeper.unavailable()
        self._check_size(request)
        if worker.congested:
            raise Overloaded("the engine takes no requests now", retry_after_s=_CONGESTED_RETRY_S)
        live = LiveRequest(str(next(self._ids)))
        own = dataclasses.replace(request, request_id=live.wire_id)
        try:
            worker.send(Submit(own) if isinstance(own, EngineRequest) else SubmitLabels(own))
        except (FrameError, OverflowError) as error:  # OverflowError: an integer beyond 64 bits
            raise InvalidArgument(f"the request cannot be served: {error}", field="prompt") from error
        if request.deadline_s is not None:
            live.timer = self._loop.call_later(request.deadline_s + _DEADLINE_GRACE_S, self._expire, live)
        self._live[live.wire_id] = live
        return live

    def _check_size(self, request: EngineRequest | LabelRequest) -> None:
        # The worker would say so too, but need not be sent megabytes for it.
        tokens = request.prompt_tokens if isinstance(request, EngineRequest) else request.context_tokens
        limit = self.info.context_tokens
        if len(tokens) > limit:
            raise ContextTooLong(
                f"the prompt has {len(tokens)} tokens; the model's context is {limit} tokens",
                field="prompt",
                metadata={"limit_tokens": str(limit), "requested_tokens": str(len(tokens))},
            )

    def _leave(self, live: LiveRequest) -> None:
        """The reader is done, or gone."""
        self._live.pop(live.wire_id, None)
        if live.leave():
            self._cancel(live)

    def _expire(self, live: LiveRequest) -> None:
        self._live.pop(live.wire_id, None)
        live.fail(DeadlineExpired("the deadline passed in the engine"))
        self._cancel(live)

    def _cancel(self, live: LiveRequest) -> None:
        if self._keeper.worker is not None:
            self._keeper.worker.send(Cancel(live.wire_id))

    def _on_step(self, step: Step) -> None:
        self._step = step
        for event in step.events:
            live = self._live.get(event.request_id)
            if live is not None:  # else its reader has left, and the cancellation is on its way
                live.push(event)
                if live.ended:
                    del self._live[event.request_id]

    def _on_gone(self) -> None:
        self._step = _IDLE
        ended, self._live = self._live, {}
        for live in ended.values():
            live.fail(self._keeper.unavailable())
