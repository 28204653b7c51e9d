"""Who runs, who waits, and on which row. Pure bookkeeping: no model, no clock, no text.

Rows 0 … D-1 decode, row D holds the one job whose prompt is being read, the rest are free.

Invariants
- Decoding rows are packed at the front; when a job leaves, `remove` says which rows to copy where, in order.
- The tokens reserved by the jobs that hold rows never exceed the KV capacity.
- Jobs start in the order in which they came. A head of the queue that does not fit yet waits, and nobody
  overtakes it: everything that holds memory ends, so its turn comes.
- The queue is bounded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Job(Protocol):
    """What the scheduler needs to know of a request."""

    @property
    def request_id(self) -> str: ...

    @property
    def reserve_tokens(self) -> int:
        """Most KV positions that it will ever hold."""
        ...

    @property
    def deadline_at(self) -> float | None:
        """On the engine's clock; None: no deadline."""
        ...


J = TypeVar("J", bound=Job)


@dataclass(frozen=True, slots=True)
class Move(Generic[J]):
    """Copy the KV memory of `job` from one row to another."""

    job: J
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Removal(Generic[J]):
    """What to do with the rows after a job has left: the moves in order, then release `freed_row`.

    `freed_row` is None when the job held no row.
    """

    job: J
    moves: tuple[Move[J], ...]
    freed_row: int | None


class QueueFullError(Exception):
    """As many jobs as rows and queue hold are there already."""


class Scheduler(Generic[J]):
    """Rows, queue and token budget of one engine."""

    def __init__(self, *, max_rows: int, kv_capacity_tokens: int, max_waiting: int) -> None:
        self._max_rows = max_rows
        self._kv_capacity_tokens = kv_capacity_tokens
        self._max_waiting = max_waiting
        self._waiting: deque[J] = deque()
        self._decoding: list[J] = []
        self._prefilling: J | None = None
        self._reserved_tokens = 0
        self._jobs: dict[str, J] = {}

    @property
    def decoding(self) -> tuple[J, ...]:
        """The jobs of rows 0 … D-1, in the order of the rows."""
        return tuple(self._decoding)

    @property
    def prefilling(self) -> J | None:
        """The job of row D."""
        return self._prefilling

    @property
    def prefill_row(self) -> int:
        """Row D."""
        return len(self._decoding)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def running_count(self) -> int:
        return len(self._decoding) + (self._prefilling is not None)

    @property
    def reserved_tokens(self) -> int:
        """KV positions promised to the jobs that hold rows."""
        return self._reserved_tokens

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._jobs

    def enqueue(self, job: J) -> None:
        """Put a job at the end of the queue.

        Raises:
            QueueFullError: `max_rows` and `max_waiting` jobs are there.
            ValueError: It can never fit, or its id is taken; the caller checks both first.
        """
        if job.reserve_tokens > self._kv_capacity_tokens or job.request_id in self._jobs:
            raise ValueError(f"job {job.request_id} is too large or there already")
        # Counted together: a burst into an idle engine waits only until its rows are given out.
        if len(self._jobs) >= self._max_rows + self._max_waiting:
            raise QueueFullError
        self._waiting.append(job)
        self._jobs[job.request_id] = job

    def admit(self) -> J | None:
        """Move the head of the queue to row D. None while row D is busy, or the head does not fit."""
        if not self._waiting or not self._fits(self._waiting[0]):
            return None
        job = self._waiting.popleft()
        self._reserved_tokens += job.reserve_tokens
        self._prefilling = job
        return job

    def promote(self) -> None:
        """The prompt of row D is read: the row decodes from now on."""
        assert self._prefilling is not None
        self._decoding.append(self._prefilling)
        self._prefilling = None

    def remove(self, request_id: str) -> Removal[J] | None:
        """Take a job out, wherever it is. None when there is no such job."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return None
        if job is self._prefilling:
            self._prefilling = None
            self._reserved_tokens -= job.reserve_tokens
            return Removal(job, (), self.prefill_row)
        row = next((r for r, running in enumerate(self._decoding) if running is job), None)
        if row is None:
            self._waiting.remove(job)
            return Removal(job, (), None)
        self._reserved_tokens -= job.reserve_tokens
        return Removal(job, *self._close_gap(row))

    def expired(self, now: float) -> list[J]:
        """The jobs, waiting or running, whose deadline has passed."""
        return [j for j in self._jobs.values() if j.deadline_at is not None and j.deadline_at <= now]

    def _fits(self, job: J) -> bool:
        return (
            self._prefilling is None
            and len(self._decoding) < self._max_rows
            and self._reserved_tokens + job.reserve_tokens <= self._kv_capacity_tokens
        )

    def _close_gap(self, row: int) -> tuple[tuple[Move[J], ...], int]:
        moves = []
        last = len(self._decoding) - 1
        mover = self._decoding.pop()
        if row != last:
            self._decoding[row] = mover
            moves.append(Move(mover, last, row))
        if self._prefilling is None:
            return tuple(moves), last
        moves.append(Move(self._prefilling, last + 1, last))
        return tuple(moves), last + 1
