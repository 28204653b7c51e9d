"""When the engine child is started, given up, started again, and stopped. Pure.

    STOPPED ──start──▶ STARTING ──healthy──▶ READY
                        │  ▲                   │
           exit, timeout│  │time is up         │exit, unhealthy too often
                        ▼  │                   ▼
                       BACKOFF ◀───────────────┘
    any ──stop──▶ STOPPING ──exit──▶ STOPPED

`advance` takes a state and an event and gives the next state and what the shell must do. The shell does it
and reports what happened. After `KILL` the shell goes on only when the whole process group is gone, so
that a `SPAWN` never meets its predecessor.

Invariants
- At most one child: `SPAWN` comes only from STOPPED and BACKOFF.
- The pause doubles with every failure up to a cap, spread by jitter; it starts anew once a child has
  been ready for `stable_after_s`.
- STOPPING and STOPPED never spawn by themselves.

Not here: processes, HTTP, clocks, randomness, logs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace


class Phase(enum.Enum):
    """Where the child is."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"
    STOPPING = "stopping"


class Action(enum.Enum):
    """What the shell must do now.

    `TERMINATE` gives the child its grace, `INTERRUPT` is for one that has nothing to lose.
    """

    NONE = "none"
    SPAWN = "spawn"
    INTERRUPT = "interrupt"
    TERMINATE = "terminate"
    KILL = "kill"


class Event(enum.Enum):
    """What happened. `TICK` says only that time has passed."""

    START = "start"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    EXITED = "exited"
    STOP = "stop"
    TICK = "tick"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Attributes:
    startup_timeout_s: A child that is not healthy by then is killed.
    stop_grace_s: How long the engine may take to end once asked; its launcher kills it then.
    kill_margin_s: How much later a launcher that is still there is killed.
    first_backoff_s: The pause after the first failure.
    max_backoff_s: The longest pause, before jitter.
    jitter: Share of the pause, 0 to 1, by which it may be longer, so that many nodes do not start at once.
    stable_after_s: A child ready this long clears the count of failures.
    unhealthy_limit: Failed health checks in a row after which a ready child is given up.
    """

    startup_timeout_s: float
    stop_grace_s: float
    kill_margin_s: float = 12.0
    first_backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    jitter: float = 0.25
    stable_after_s: float = 120.0
    unhealthy_limit: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    """The state of one child.

    Attributes:
        phase: Where it is.
        since_s: When it came into this phase, on the shell's monotonic clock.
        until_s: When the pause ends (BACKOFF only).
        failures: Failures since the last stable run.
        unhealthy: Failed health checks in a row (READY only).
        starts: How often a child was spawned.
    """

    phase: Phase = Phase.STOPPED
    since_s: float = 0.0
    until_s: float = 0.0
    failures: int = 0
    unhealthy: int = 0
    starts: int = 0

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)


def advance(
    state: Lifecycle, event: Event, *, now_s: float, policy: RestartPolicy, jitter: float
) -> tuple[Lifecycle, Action]:
    """One transition. Events that mean nothing in a phase change nothing.

    Args:
        now_s: Monotonic seconds.
        jitter: A random number in [0, 1).
    """
    if event is Event.STOP:
        return _stop(state, now_s)
    match state.phase:
        case Phase.STOPPED:
            if event is Event.START:
                return _spawn(state, now_s)
        case Phase.STARTING:
            if event is Event.EXITED:
                return _back_off(state, now_s, policy, jitter), Action.NONE
            if event is Event.HEALTHY:
                return replace(state, phase=Phase.READY, since_s=now_s, unhealthy=0), Action.NONE
            if now_s - state.since_s >= policy.startup_timeout_s:
                return _back_off(state, now_s, policy, jitter), Action.KILL
        case Phase.READY:
            return _ready(state, event, now_s, policy, jitter)
        case Phase.BACKOFF:
            if now_s >= state.until_s:
                return _spawn(state, now_s)
        case Phase.STOPPING:
            if event is Event.EXITED:
                return replace(state, phase=Phase.STOPPED, since_s=now_s), Action.NONE
            if now_s - state.since_s >= policy.stop_grace_s + policy.kill_margin_s:
                return state, Action.KILL
    return state, Action.NONE


def _ready(
    state: Lifecycle, event: Event, now_s: float, policy: RestartPolicy, jitter: float
) -> tuple[Lifecycle, Action]:
    if now_s - state.since_s >= policy.stable_after_s and state.failures:
        state = replace(state, failures=0)
    if event is Event.EXITED:
        return _back_off(state, now_s, policy, jitter), Action.NONE
    if event is Event.HEALTHY:
        return replace(state, unhealthy=0), Action.NONE
    if event is Event.UNHEALTHY:
        state = replace(state, unhealthy=state.unhealthy + 1)
        if state.unhealthy >= policy.unhealthy_limit:
            return _back_off(state, now_s, policy, jitter), Action.KILL
    return state, Action.NONE


def _spawn(state: Lifecycle, now_s: float) -> tuple[Lifecycle, Action]:
    return replace(state, phase=Phase.STARTING, since_s=now_s, starts=state.starts + 1), Action.SPAWN


def _stop(state: Lifecycle, now_s: float) -> tuple[Lifecycle, Action]:
    if state.phase in (Phase.STOPPED, Phase.STOPPING):
        return state, Action.NONE
    if state.phase is Phase.BACKOFF:
        return replace(state, phase=Phase.STOPPED, since_s=now_s), Action.NONE
    action = Action.TERMINATE if state.phase is Phase.READY else Action.INTERRUPT
    return replace(state, phase=Phase.STOPPING, since_s=now_s), action


def _back_off(state: Lifecycle, now_s: float, policy: RestartPolicy, jitter: float) -> Lifecycle:
    # The exponent is bounded first: 2.0**1100 would overflow.
    doubled = policy.first_backoff_s * 2.0 ** min(state.failures, 30)
    pause_s = min(doubled, policy.max_backoff_s) * (1.0 + policy.jitter * jitter)
    return replace(
        state,
        phase=Phase.BACKOFF,
        since_s=now_s,
        until_s=now_s + pause_s,
        failures=state.failures + 1,
        unhealthy=0,
    )
