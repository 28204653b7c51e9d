"""Rows, queue and token budget."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge.engine.scheduler import Move, QueueFullError, Scheduler

ROWS = 4
CAPACITY = 100
WAITING = 6


@dataclass(frozen=True, slots=True)
class _Job:
    request_id: str
    reserve_tokens: int = 10
    deadline_at: float | None = None


def _scheduler(*, rows: int = ROWS, waiting: int = WAITING) -> Scheduler[_Job]:
    return Scheduler(max_rows=rows, kv_capacity_tokens=CAPACITY, max_waiting=waiting)


def _start(scheduler: Scheduler[_Job], *jobs: _Job) -> None:
    """Bring jobs to decoding, in order."""
    for job in jobs:
        scheduler.enqueue(job)
        assert scheduler.admit() is job
        scheduler.promote()


A, B, C, D = (_Job(name) for name in "abcd")


def test_jobs_start_in_the_order_they_came_and_one_prompt_is_read_at_a_time() -> None:
    scheduler = _scheduler()
    for job in (A, B):
        scheduler.enqueue(job)
    assert scheduler.admit() is A
    assert scheduler.admit() is None
    scheduler.promote()
    assert scheduler.prefill_row == 1
    assert scheduler.admit() is B


def test_a_head_that_does_not_fit_waits_and_nobody_overtakes_it() -> None:
    scheduler = _scheduler()
    _start(scheduler, _Job("big", 60))
    scheduler.enqueue(_Job("head", 50))
    scheduler.enqueue(_Job("small", 1))
    assert scheduler.admit() is None
    scheduler.remove("big")
    assert scheduler.admit() == _Job("head", 50)


def test_the_last_row_fills_the_hole() -> None:
    scheduler = _scheduler()
    _start(scheduler, A, B, C)
    removal = scheduler.remove("a")
    assert removal is not None
    assert (removal.moves, removal.freed_row) == ((Move(C, 2, 0),), 2)
    assert scheduler.decoding == (C, B)


def test_the_last_row_leaves_without_a_move() -> None:
    scheduler = _scheduler()
    _start(scheduler, A, B)
    removal = scheduler.remove("b")
    assert removal is not None
    assert (removal.moves, removal.freed_row) == ((), 1)


def test_the_row_that_reads_a_prompt_follows_the_decoding_rows_down() -> None:
    scheduler = _scheduler()
    _start(scheduler, A, B, C)
    scheduler.enqueue(D)
    scheduler.admit()
    removal = scheduler.remove("b")
    assert removal is not None
    assert (removal.moves, removal.freed_row) == ((Move(C, 2, 1), Move(D, 3, 2)), 3)
    removal = scheduler.remove("c")
    assert removal is not None
    assert (removal.moves, removal.freed_row) == ((Move(D, 2, 1),), 2)


def test_waiting_and_reading_jobs_leave_without_moves() -> None:
    scheduler = _scheduler()
    _start(scheduler, A)
    scheduler.enqueue(B)
    scheduler.enqueue(C)
    scheduler.admit()
    waiting, reading = scheduler.remove("c"), scheduler.remove("b")
    assert waiting is not None
    assert reading is not None
    assert (waiting.moves, waiting.freed_row) == ((), None)
    assert (reading.moves, reading.freed_row) == ((), 1)
    assert scheduler.remove("b") is None


def test_rows_and_queue_together_are_bounded() -> None:
    scheduler = _scheduler(rows=2, waiting=1)
    for job in (A, B, C):
        scheduler.enqueue(job)
    with pytest.raises(QueueFullError):
        scheduler.enqueue(D)
    scheduler.remove("a")
    scheduler.enqueue(D)


def test_a_job_that_can_never_fit_or_comes_twice_is_a_bug_of_the_caller() -> None:
    scheduler = _scheduler()
    with pytest.raises(ValueError, match="too large"):
        scheduler.enqueue(_Job("x", CAPACITY + 1))
    scheduler.enqueue(A)
    with pytest.raises(ValueError, match="there already"):
        scheduler.enqueue(A)


def test_deadlines_pass_for_waiting_reading_and_decoding_jobs() -> None:
    scheduler = _scheduler()
    jobs = [_Job(str(at), 10, float(at)) for at in (1, 2, 3, 9)]
    _start(scheduler, jobs[0])
    for job in jobs[1:]:
        scheduler.enqueue(job)
    scheduler.enqueue(A)
    scheduler.admit()
    assert scheduler.expired(3.0) == jobs[:3]


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, starts and departures, mirrored in a table of who is on which row."""

    @initialize()
    def start(self) -> None:
        self.scheduler = _scheduler()
        self.rows: dict[int, _Job] = {}
        self.arrived: list[_Job] = []
        self.count = 0

    @rule(tokens=st.integers(1, CAPACITY))
    def arrive(self, tokens: int) -> None:
        job = _Job(str(self.count), tokens)
        self.count += 1
        if len(self.rows) + len(self.arrived) >= ROWS + WAITING:
            with pytest.raises(QueueFullError):
                self.scheduler.enqueue(job)
            return
        self.scheduler.enqueue(job)
        self.arrived.append(job)

    @rule()
    def admit(self) -> None:
        busy = self.scheduler.prefilling is not None
        held = sum(job.reserve_tokens for job in self.rows.values())
        admitted = self.scheduler.admit()
        head = self.arrived[0] if self.arrived else None
        fits = head is not None and held + head.reserve_tokens <= CAPACITY
        assert (admitted is not None) == (fits and not busy and len(self.rows) < ROWS)
        if admitted is not None:
            assert admitted is self.arrived.pop(0)
            self.rows[self.scheduler.prefill_row] = admitted

    @precondition(lambda self: self.scheduler.prefilling is not None)
    @rule()
    def promote(self) -> None:
        self.scheduler.promote()

    @precondition(lambda self: self.rows or self.arrived)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from([*self.rows.values(), *self.arrived]))
        removal = self.scheduler.remove(job.request_id)
        assert removal is not None
        assert removal.job is job
        if job in self.arrived:
            self.arrived.remove(job)
            assert removal.freed_row is None
            return
        gone = next(row for row, there in self.rows.items() if there is job)
        del self.rows[gone]
        for move in removal.moves:
            assert move.target not in self.rows
            assert self.rows.pop(move.source) is move.job
            self.rows[move.target] = move.job
        assert removal.freed_row is not None
        assert removal.freed_row not in self.rows

    @invariant()
    def rows_are_packed_and_paid_for(self) -> None:
        decoding = self.scheduler.decoding
        expected = dict(enumerate(decoding))
        if self.scheduler.prefilling is not None:
            expected[len(decoding)] = self.scheduler.prefilling
        assert self.rows == expected
        held = sum(job.reserve_tokens for job in self.rows.values())
        assert self.scheduler.reserved_tokens == held <= CAPACITY
        assert self.scheduler.waiting_count == len(self.arrived)
        assert self.scheduler.running_count == len(self.rows)
        assert self.scheduler.has_work == bool(self.rows or self.arrived)


TestAnyOrder = SchedulerMachine.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
