"""The lifecycle of the engine child, without a child."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud.vllm.lifecycle import Action, Event, Lifecycle, Phase, RestartPolicy, advance

POLICY = RestartPolicy(
    startup_timeout_s=60.0, stop_grace_s=10.0, first_backoff_s=1.0, max_backoff_s=8.0, unhealthy_limit=3
)


def go(state: Lifecycle, event: Event, now_s: float = 0.0, jitter: float = 0.0) -> tuple[Lifecycle, Action]:
    return advance(state, event, now_s=now_s, policy=POLICY, jitter=jitter)


def ready(now_s: float = 0.0) -> Lifecycle:
    return go(go(Lifecycle(), Event.START, now_s)[0], Event.HEALTHY, now_s)[0]


def test_a_start_spawns_and_a_healthy_child_is_ready() -> None:
    starting, action = go(Lifecycle(), Event.START)
    assert (starting.phase, action) == (Phase.STARTING, Action.SPAWN)
    assert go(starting, Event.HEALTHY) == (ready(), Action.NONE)


def test_a_child_that_is_not_healthy_in_time_is_killed() -> None:
    starting, _ = go(Lifecycle(), Event.START)
    assert go(starting, Event.UNHEALTHY, 59.9)[1] is Action.NONE
    state, action = go(starting, Event.UNHEALTHY, 60.0)
    assert (state.phase, action) == (Phase.BACKOFF, Action.KILL)


def test_a_crash_backs_off_and_the_pause_doubles_up_to_the_cap() -> None:
    state, now_s, pauses = ready(), 0.0, []
    for _ in range(6):
        state, action = go(state, Event.EXITED, now_s)
        assert action is Action.NONE
        pauses.append(state.until_s - now_s)
        assert go(state, Event.TICK, state.until_s - 0.01)[1] is Action.NONE
        now_s = state.until_s
        state, action = go(state, Event.TICK, now_s)
        assert action is Action.SPAWN
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_jitter_only_lengthens_the_pause() -> None:
    assert go(ready(), Event.EXITED, 0.0, jitter=0.8)[0].until_s == pytest.approx(1.2)


def test_a_long_good_run_clears_the_count_of_failures() -> None:
    state, _ = go(ready(), Event.EXITED)
    state, _ = go(state, Event.TICK, 1.0)
    state, _ = go(state, Event.HEALTHY, 2.0)
    assert go(state, Event.HEALTHY, 100.0)[0].failures == 1
    state, _ = go(state, Event.HEALTHY, 122.0)
    assert state.failures == 0


def test_a_ready_child_is_given_up_only_after_several_failed_checks_in_a_row() -> None:
    state = ready()
    for event in (Event.UNHEALTHY, Event.UNHEALTHY, Event.HEALTHY, Event.UNHEALTHY, Event.UNHEALTHY):
        state, action = go(state, event)
        assert action is Action.NONE
    state, action = go(state, Event.UNHEALTHY)
    assert (state.phase, action) == (Phase.BACKOFF, Action.KILL)


def test_a_stop_terminates_then_kills_and_ends_with_the_child() -> None:
    state, action = go(ready(), Event.STOP, 0.0)
    assert (state.phase, action) == (Phase.STOPPING, Action.TERMINATE)
    assert go(state, Event.STOP, 1.0)[1] is Action.NONE
    assert go(state, Event.TICK, 21.9)[1] is Action.NONE
    assert go(state, Event.TICK, 22.0)[1] is Action.KILL
    assert go(state, Event.EXITED, 3.0)[0].phase is Phase.STOPPED


def test_a_child_that_is_still_starting_has_nothing_to_lose() -> None:
    state, action = go(go(Lifecycle(), Event.START)[0], Event.STOP)
    assert (state.phase, action) == (Phase.STOPPING, Action.INTERRUPT)


def test_a_stop_in_a_pause_has_nobody_to_wait_for() -> None:
    state, action = go(go(ready(), Event.EXITED)[0], Event.STOP)
    assert (state.phase, action) == (Phase.STOPPED, Action.NONE)


@given(st.lists(st.tuples(st.sampled_from(list(Event)), st.floats(0, 100), st.floats(0, 0.999)), max_size=80))
def test_there_is_never_more_than_one_child_and_none_after_the_stop(
    steps: list[tuple[Event, float, float]],
) -> None:
    state, now_s, alive, stopped = Lifecycle(), 0.0, False, False
    for event, passed_s, jitter in steps:
        now_s += passed_s
        if event is Event.EXITED:
            if not alive:
                continue
            alive = False
        was_stopped = stopped
        stopped = stopped or (event is Event.STOP and state.phase is not Phase.STOPPED)
        state, action = go(state, event, now_s, jitter)
        if action is Action.SPAWN:
            assert not alive
            assert not was_stopped or event is Event.START
            alive, stopped = True, False
        if action is Action.KILL and state.phase is Phase.BACKOFF:
            alive = False
        if state.phase in (Phase.STARTING, Phase.READY, Phase.STOPPING):
            assert alive
        if state.phase is Phase.BACKOFF:
            assert not alive
            assert 0 < state.until_s - state.since_s <= 8.0 * 1.25
