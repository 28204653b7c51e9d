"""A request between the socket and its reader, in the servicer's process.

Events wait here until they are read. What waits is bounded by the request itself: at most its own
`max_tokens` tokens. So a slow reader delays nobody, and holds no more than its answer; the engine meanwhile
ends the request and frees its KV memory. Tokens that wait are handed over together.

Exactly one end comes out: `Finished` or a `LabelResult`, or one error raised.
"""

from __future__ import annotations

import asyncio
from collections import deque

from edge.engine.frames import (
    ErrorWire,
    EventWire,
    FinishedWire,
    LabelsWire,
    StartedWire,
    TokensWire,
    error_from_wire,
    tokens_from_wire,
)
from edge.engine.protocol import EngineEvent, Finished, LabelResult, Started
from protos.errors import ForebayError


class LiveRequest:
    """One request that the worker has, or had, and that its reader has not read to the end."""

    def __init__(self, wire_id: str) -> None:
        self.wire_id = wire_id
        self.ended = False
        self.timer: asyncio.TimerHandle | None = None
        self._events: deque[EventWire] = deque()
        self._error: ForebayError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, event: EventWire) -> None:
        """Take the next event. After the end, nothing is taken."""
        if self.ended:
            return
        if isinstance(event, ErrorWire):
            self.fail(error_from_wire(event))
            return
        self._events.append(event)
        if isinstance(event, FinishedWire | LabelsWire):
            self._end()
        else:
            self._wake()

    def fail(self, error: ForebayError) -> None:
        """End with an error, raised after the events that came before it."""
        if not self.ended:
            self._error = error
            self._end()

    def leave(self) -> bool:
        """The reader is gone. True when the worker has to be told."""
        tell = not self.ended
        self._events.clear()
        self._end()
        return tell

    async def next(self) -> EngineEvent | LabelResult:
        """The next event; waits for it.

        Raises:
            ForebayError: The request's end.
        """
        while not self._events:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._take()

    def _take(self) -> EngineEvent | LabelResult:
        events = self._events
        event = events.popleft()
        if isinstance(event, TokensWire):
            parts = [event]
            while events and isinstance(events[0], TokensWire):
                part = events.popleft()
                assert isinstance(part, TokensWire)
                parts.append(part)
            return tokens_from_wire(parts)
        if isinstance(event, FinishedWire):
            return Finished(reason=event.reason, decode_s=event.decode_s)
        if isinstance(event, StartedWire):
            return Started(
                queue_s=event.queue_s,
                prefill_s=event.prefill_s,
                prompt_logprob_mean=event.prompt_logprob_mean,
            )
        assert isinstance(event, LabelsWire)
        return event.result

    def _end(self) -> None:
        self.ended = True
        if self.timer is not None:
            self.timer.cancel()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
