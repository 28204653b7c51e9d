"""Who may use the engine, who waits, who is sent away.

`AdmissionBook` is pure accounting: it holds no clock, no lock and no task. `AdmissionGate` is the thin
async shell around it, for one event loop.

Invariants
- At most `max_running` hold a place and at most `max_queued` wait, first come first served.
- A place is given back exactly once, however the holder ends: result, error or cancellation.
- A request that can no longer meet its deadline never gets a place: it is dropped before it is started.

Not here: priorities, and anything about what the requests do.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from protos.errors import DeadlineExpired, EngineUnavailable, Overloaded

_RECENT = 32
_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 30.0


class Verdict(enum.Enum):
    """What a newly arrived request is told."""

    RUN = "run"
    WAIT = "wait"
    SHED = "shed"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Attributes:
    max_running: Most requests in the engine.
    max_queued: Most requests waiting for it. 0: nobody waits.
    max_wait_s: Longest time in the queue, in seconds.
    least_service_s: A request with less time left than this is not started.
    """

    max_running: int
    max_queued: int
    max_wait_s: float
    least_service_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Departures:
    """Who leaves the queue: `started` have a place now, `expired` have run out of time."""

    started: tuple[int, ...]
    expired: tuple[int, ...]


@dataclass(slots=True)
class AdmissionBook:
    """Counts running and waiting requests, by ticket. Times are seconds of one monotonic clock."""

    limits: AdmissionLimits
    _running: set[int] = field(default_factory=set)
    _waiting: OrderedDict[int, float] = field(default_factory=OrderedDict)  # ticket -> latest start
    _service_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    def arrive(self, ticket: int, now_s: float, deadline_s: float) -> Verdict:
        """A request comes. `deadline_s` is on the same clock; infinity is none.

        It is shed when the queue is full, or when even at the fastest recent pace its turn would come
        too late. It waits only behind others: a free place with nobody in the queue is taken at once.
        """
        latest_start_s = deadline_s - self.limits.least_service_s
        if len(self._running) < self.limits.max_running and not self._waiting:
            self._running.add(ticket)
            return Verdict.RUN
        latest_start_s = min(latest_start_s, now_s + self.limits.max_wait_s)
        if len(self._waiting) >= self.limits.max_queued or now_s + self._least_wait_s() > latest_start_s:
            return Verdict.SHED
        self._waiting[ticket] = latest_start_s
        return Verdict.WAIT

    def leave(self, ticket: int, now_s: float, service_s: float | None = None) -> Departures:
        """A holder or a waiter goes away, and the queue moves up.

        Args:
            service_s: How long it held its place, when that says something about the next one's time.
        """
        self._waiting.pop(ticket, None)
        self._running.discard(ticket)
        if service_s is not None:
            self._service_s.append(service_s)
        started: list[int] = []
        expired: list[int] = []
        while self._waiting and len(self._running) < self.limits.max_running:
            head, latest_start_s = self._waiting.popitem(last=False)
            if now_s > latest_start_s:
                expired.append(head)
            else:
                self._running.add(head)
                started.append(head)
        return Departures(started=tuple(started), expired=tuple(expired))

    def retry_after_s(self) -> float:
        """When a place is likely to be free: the queue's length in rounds, at the recent mean pace."""
        if not self._service_s:
            return 1.0
        mean_s = math.fsum(self._service_s) / len(self._service_s)
        rounds = (len(self._waiting) + 1) / self.limits.max_running
        return min(max(mean_s * rounds, _MIN_RETRY_S), _MAX_RETRY_S)

    def _least_wait_s(self) -> float:
        # The places held now may all fall free at any moment, so only full rounds behind them count.
        rounds = len(self._waiting) // self.limits.max_running
        return rounds * min(self._service_s) if self._service_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place in the engine. `queue_s` is how long the request waited for it, in seconds."""

    queue_s: float


class AdmissionGate:
    """Hands out places. Used from one event loop.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, limits: AdmissionLimits, *, clock: Callable[[], float]) -> None:
        self._book = AdmissionBook(limits)
        self._limits = limits
        self._clock = clock
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._next_ticket = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    @property
    def running(self) -> int:
        return self._book.running

    @property
    def queued(self) -> int:
        return self._book.queued

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Let nobody in any more. Those who wait are refused; those who run go on."""
        self._closed = True
        for ticket, waiter in list(self._waiters.items()):
            self._book.leave(ticket, self._clock())
            if not waiter.done():
                waiter.set_exception(_closing())

    async def wait_idle(self) -> None:
        """Return once nobody holds a place or waits for one."""
        await self._idle.wait()

    @asynccontextmanager
    async def admit(self, timeout_s: float) -> AsyncIterator[Place]:
        """Hold a place for the length of the block.

        Args:
            timeout_s: Seconds that the request has left, all together.

        Raises:
            Overloaded: The queue is full, or its turn would come too late.
            DeadlineExpired: The time ran out in the queue.
            EngineUnavailable: The gate is closed: this server is stopping.
        """
        if self._closed:
            raise _closing()
        if timeout_s < self._limits.least_service_s:
            raise DeadlineExpired("the deadline leaves no time to start this request")
        arrived_s = self._clock()
        ticket = self._next_ticket
        self._next_ticket += 1
        verdict = self._book.arrive(ticket, arrived_s, arrived_s + timeout_s)
        if verdict is Verdict.SHED:
            raise self._overloaded("the cloud's queue is full")
        self._idle.clear()
        started_s: float | None = None
        try:
            if verdict is Verdict.WAIT:
                await self._wait(ticket, timeout_s)
            started_s = self._clock()
            yield Place(queue_s=started_s - arrived_s)
        finally:
            now_s = self._clock()
            self._settle(self._book.leave(ticket, now_s, None if started_s is None else now_s - started_s))
            if not self._book.running and not self._book.queued:
                self._idle.set()

    async def _wait(self, ticket: int, timeout_s: float) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[ticket] = waiter
        left_s = timeout_s - self._limits.least_service_s
        try:
            async with asyncio.timeout(min(left_s, self._limits.max_wait_s)):
                await waiter
        except TimeoutError:
            if left_s <= self._limits.max_wait_s:
                raise DeadlineExpired("the deadline passed while the request waited for the engine") from None
            raise self._overloaded(f"no place within {self._limits.max_wait_s:g} s") from None
        finally:
            del self._waiters[ticket]

    def _settle(self, departures: Departures) -> None:
        for ticket in departures.started:
            waiter = self._waiters[ticket]
            # A waiter that is done already was cancelled or timed out in this very loop turn; its own
            # `finally` gives the place back.
            if not waiter.done():
                waiter.set_result(None)
        for ticket in departures.expired:
            waiter = self._waiters[ticket]
            if not waiter.done():
                waiter.set_exception(
                    DeadlineExpired("the request could no longer meet its deadline, so it was not started")
                )

    def _overloaded(self, what: str) -> Overloaded:
        return Overloaded(
            f"{what}: {self._book.running} running, {self._book.queued} waiting",
            retry_after_s=self._book.retry_after_s(),
            metadata={"queue_capacity": str(self._limits.max_queued)},
        )


def _closing() -> EngineUnavailable:
    return EngineUnavailable("this cloud server is stopping", retry_after_s=1.0)
