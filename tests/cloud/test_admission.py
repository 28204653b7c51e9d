"""Admission: bounds hold, order is kept, late work is dropped, and a place always comes back."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud.admission import AdmissionBook, AdmissionGate, AdmissionLimits, Verdict
from protos.errors import DeadlineExpired, EngineUnavailable, Overloaded


def limits(*, running: int = 1, queued: int = 2, wait: float = 100.0, least: float = 0.0) -> AdmissionLimits:
    return AdmissionLimits(max_running=running, max_queued=queued, max_wait_s=wait, least_service_s=least)


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_it_runs_then_queues_then_sheds() -> None:
    book = AdmissionBook(limits())
    verdicts = [book.arrive(ticket, 0.0, math.inf) for ticket in range(4)]
    assert verdicts == [Verdict.RUN, Verdict.WAIT, Verdict.WAIT, Verdict.SHED]


def test_the_queue_is_first_come_first_served() -> None:
    book = AdmissionBook(limits())
    for ticket in range(3):
        book.arrive(ticket, 0.0, math.inf)
    assert book.leave(0, 1.0).started == (1,)
    assert book.leave(1, 2.0).started == (2,)


def test_work_that_is_late_is_dropped_and_the_next_one_started() -> None:
    book = AdmissionBook(limits(least=0.5))
    book.arrive(0, 0.0, math.inf)
    book.arrive(1, 0.0, 2.0)
    book.arrive(2, 0.0, 9.0)
    departures = book.leave(0, 1.6)
    assert departures.expired == (1,)
    assert departures.started == (2,)


def test_a_turn_that_must_come_too_late_is_refused_at_once() -> None:
    book = AdmissionBook(limits(queued=10))
    for _ in range(2):
        book.arrive(0, 0.0, math.inf)
        book.leave(0, 0.0, service_s=3.0)
    book.arrive(0, 0.0, math.inf)
    assert book.arrive(1, 0.0, 4.0) is Verdict.WAIT
    assert book.arrive(2, 0.0, 2.0) is Verdict.SHED
    assert book.arrive(3, 0.0, 4.0) is Verdict.WAIT


def test_the_retry_hint_follows_the_queue_and_the_pace_within_bounds() -> None:
    book = AdmissionBook(limits(queued=100))
    assert book.retry_after_s() == 1.0
    book.arrive(0, 0.0, math.inf)
    book.leave(0, 0.0, service_s=2.0)
    assert book.retry_after_s() == 2.0
    book.arrive(0, 0.0, math.inf)
    for ticket in range(1, 4):
        book.arrive(ticket, 0.0, math.inf)
    assert book.retry_after_s() == 8.0
    for ticket in range(4, 90):
        book.arrive(ticket, 0.0, math.inf)
    assert book.retry_after_s() == 30.0


operations = st.lists(
    st.tuples(st.sampled_from(["arrive", "leave", "leave_waiting"]), st.floats(0, 3), st.floats(0, 10)),
    max_size=60,
)


@given(operations, st.integers(1, 3), st.integers(0, 4))
def test_bounds_hold_and_every_ticket_is_settled_once(
    steps: list[tuple[str, float, float]], running: int, queued: int
) -> None:
    book = AdmissionBook(limits(running=running, queued=queued, wait=5.0))
    now_s, next_ticket = 0.0, 0
    holders: list[int] = []
    waiters: list[int] = []
    for kind, passed_s, deadline_s in steps:
        now_s += passed_s
        if kind == "arrive":
            verdict = book.arrive(next_ticket, now_s, now_s + deadline_s)
            if verdict is Verdict.RUN:
                holders.append(next_ticket)
            elif verdict is Verdict.WAIT:
                waiters.append(next_ticket)
            next_ticket += 1
        else:
            group = holders if kind == "leave" else waiters
            if not group:
                continue
            departures = book.leave(group.pop(0), now_s, 1.0)
            for ticket in departures.started:
                waiters.remove(ticket)
                holders.append(ticket)
            for ticket in departures.expired:
                waiters.remove(ticket)
        assert (book.running, book.queued) == (len(holders), len(waiters))
        assert len(holders) <= running
        assert len(waiters) <= queued
        # Nobody waits while there is room.
        assert not waiters or len(holders) == running


async def hold(gate: AdmissionGate, until: asyncio.Event, timeout_s: float = 100.0) -> float:
    async with gate.admit(timeout_s) as place:
        await until.wait()
        return place.queue_s


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_waiter_gets_the_place_and_is_told_how_long_it_waited() -> None:
    clock = Clock()
    gate = AdmissionGate(limits(), clock=clock)
    first_done, second_done = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(hold(gate, first_done))
    await settle()
    second = asyncio.create_task(hold(gate, second_done))
    await settle()
    assert (gate.running, gate.queued) == (1, 1)
    clock.now_s = 3.0
    first_done.set()
    second_done.set()
    assert await first == 0.0
    assert await second == 3.0
    assert (gate.running, gate.queued) == (0, 0)


async def test_a_full_queue_sheds_with_a_retry_hint() -> None:
    gate = AdmissionGate(limits(queued=0), clock=Clock())
    done = asyncio.Event()
    holder = asyncio.create_task(hold(gate, done))
    await settle()
    with pytest.raises(Overloaded) as caught:
        await hold(gate, done)
    assert caught.value.retry_after_s > 0
    done.set()
    await holder


async def test_cancelling_a_waiter_or_a_holder_gives_its_place_back() -> None:
    gate = AdmissionGate(limits(), clock=Clock())
    done = asyncio.Event()
    holder = asyncio.create_task(hold(gate, done))
    await settle()
    waiter = asyncio.create_task(hold(gate, done))
    last = asyncio.create_task(hold(gate, done))
    await settle()
    waiter.cancel()
    await settle()
    assert (gate.running, gate.queued) == (1, 1)
    holder.cancel()
    await settle()
    assert (gate.running, gate.queued) == (1, 0)
    done.set()
    await last
    assert (gate.running, gate.queued) == (0, 0)


async def test_a_waiter_cancelled_in_the_turn_in_which_it_was_granted_passes_the_place_on() -> None:
    gate = AdmissionGate(limits(), clock=Clock())
    first_done, done = asyncio.Event(), asyncio.Event()
    holder = asyncio.create_task(hold(gate, first_done))
    await settle()
    waiter = asyncio.create_task(hold(gate, done))
    last = asyncio.create_task(hold(gate, done))
    await settle()
    holder.cancel()
    holder.add_done_callback(lambda _: waiter.cancel())
    await asyncio.gather(holder, waiter, return_exceptions=True)
    await settle()
    assert (gate.running, gate.queued) == (1, 0)
    done.set()
    await last
    assert gate.running == 0


async def test_a_deadline_that_passes_in_the_queue_is_told_as_such() -> None:
    gate = AdmissionGate(limits(), clock=Clock())
    done = asyncio.Event()
    holder = asyncio.create_task(hold(gate, done))
    await settle()
    with pytest.raises(DeadlineExpired):
        await hold(gate, done, timeout_s=0.02)
    assert (gate.running, gate.queued) == (1, 0)
    done.set()
    await holder


async def test_a_wait_over_the_queues_own_limit_is_overload() -> None:
    gate = AdmissionGate(limits(wait=0.02), clock=Clock())
    done = asyncio.Event()
    holder = asyncio.create_task(hold(gate, done))
    await settle()
    with pytest.raises(Overloaded):
        await hold(gate, done)
    done.set()
    await holder


async def test_what_cannot_be_done_in_time_is_not_started() -> None:
    gate = AdmissionGate(limits(least=0.5), clock=Clock())
    with pytest.raises(DeadlineExpired):
        await hold(gate, asyncio.Event(), timeout_s=0.4)


async def test_closing_refuses_the_waiting_and_the_new_and_lets_the_running_end() -> None:
    gate = AdmissionGate(limits(), clock=Clock())
    done = asyncio.Event()
    holder = asyncio.create_task(hold(gate, done))
    await settle()
    waiter = asyncio.create_task(hold(gate, done))
    await settle()
    gate.close()
    with pytest.raises(EngineUnavailable):
        await waiter
    with pytest.raises(EngineUnavailable):
        await hold(gate, done)
    idle = asyncio.create_task(gate.wait_idle())
    await settle()
    assert not idle.done()
    done.set()
    await holder
    await idle
