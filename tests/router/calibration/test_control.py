"""Online control spends its budget and never leaves the certified region."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.calibration.control import LatencyControl, ThresholdControl
from router.calibration.threshold import certify, plain

SCALE = np.linspace(0, 1, 1001)


def control(**changes: object) -> ThresholdControl:
    return ThresholdControl(
        **{"certified": plain(0.2), "confidences": SCALE, "target": 0.4, "step": 0.02, **changes}  # type: ignore[arg-type]
    )


@settings(max_examples=80, deadline=None)
@given(st.lists(st.booleans(), max_size=300), st.floats(0, 1), st.floats(0, 1), st.floats(0.05, 1))
def test_the_threshold_is_never_under_the_certified_one(
    spent: list[bool], floor: float, target: float, highest: float
) -> None:
    loop = control(certified=plain(floor), target=target, highest=highest)
    for one in spent:
        assert loop.observe(spent=one) >= floor


@pytest.mark.parametrize("shape", [1.0, 3.0, 0.4], ids=["as calibrated", "less sure", "surer"])
def test_the_share_forwarded_comes_to_the_budget_whatever_the_traffic(shape: float) -> None:
    rng = np.random.default_rng(0)
    loop = control(certified=plain(0.0), target=0.4)
    requests, forwarded = 4000, 0
    for confidence in rng.random(requests) ** shape:
        out = bool(confidence < loop.threshold)
        forwarded += out
        loop.observe(spent=out)
    assert forwarded / requests == pytest.approx(0.4, abs=(1 + 0.02) / (0.02 * requests) + 1e-9)


def test_a_budget_that_the_certificate_cannot_meet_is_missed_and_said() -> None:
    rng = np.random.default_rng(1)
    loop = control(certified=plain(0.7), target=0.3)
    forwarded = []
    for confidence in rng.random(2000):
        forwarded.append(confidence < loop.threshold)
        loop.observe(spent=bool(forwarded[-1]))
    assert np.mean(forwarded) == pytest.approx(0.7, abs=0.05)
    assert loop.threshold == pytest.approx(0.7, abs=0.02)
    assert loop.clamped


def test_it_does_not_wind_up_while_clamped() -> None:
    loop = control(certified=plain(0.7), target=0.5)
    for _ in range(1000):
        loop.observe(spent=True)
    assert loop.clamped
    for _ in range(20):
        loop.observe(spent=False)
    assert not loop.clamped
    assert loop.threshold > 0.8


def test_a_certificate_that_forwards_all_leaves_nothing_to_control() -> None:
    loop = control(certified=certify([0.5], [False]), target=0.1)
    assert loop.observe(spent=True) == math.inf
    assert loop.clamped


def test_confidences_above_all_that_was_seen_still_meet_the_budget() -> None:
    loop = control(certified=plain(0.0), target=0.5)
    forwarded = []
    for _ in range(4000):
        forwarded.append(loop.threshold > 2.0)
        loop.observe(spent=forwarded[-1])
    assert np.mean(forwarded) == pytest.approx(0.5, abs=0.02)


def test_lateness_lowers_the_threshold_and_good_time_raises_it() -> None:
    loop = LatencyControl(control(target=0.1, highest=0.6), target_s=2.0)
    for _ in range(1000):
        loop.observe(latency_s=0.5)
    assert loop.threshold == pytest.approx(0.6)
    for _ in range(50):
        loop.observe(latency_s=3.0)
    assert loop.clamped
    assert loop.threshold == pytest.approx(0.2)


@pytest.mark.parametrize(
    "changes",
    [
        {"target": 1.1},
        {"target": math.nan},
        {"step": 0.0},
        {"highest": 0.0},
        {"confidences": []},
        {"confidences": [math.nan]},
    ],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        control(**changes)


def test_a_latency_target_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        LatencyControl(control(), target_s=0.0)
