"""The router's pure rules: signals, confidence, policy, gate, breaker."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.breaker import Breaker, BreakerSettings, BreakerState
from router.confidence import QuantileConfidence
from router.decision import Reason, RoutingPolicy, Tier, TierPolicy
from router.policy import after_decoding, before_decoding, effective_threshold
from router.signals import RunningSignals, Signals
from router.stream_gate import GateAction, GateSettings, gate

LOGPROBS = st.lists(st.floats(-20.0, 0.0), min_size=1, max_size=60)


def signals(low: float, *, tokens: int = 10, truncated: bool = False) -> Signals:
    return Signals(
        tokens=tokens,
        low_logprob=low,
        mean_logprob=low,
        mean_entropy=0.0,
        mean_margin=0.0,
        truncated=truncated,
    )


@given(LOGPROBS, st.floats(0.01, 0.99))
def test_the_low_quantile_is_numpys(logprobs: list[float], quantile: float) -> None:
    running = RunningSignals(quantile=quantile)
    for logprob in logprobs:
        running.add(logprob=logprob, entropy=0.5, margin=0.25)
    snapshot = running.snapshot()
    assert snapshot.low_logprob == pytest.approx(np.quantile(logprobs, quantile), abs=1e-9)
    assert snapshot.mean_logprob == pytest.approx(np.mean(logprobs), abs=1e-9)
    assert (snapshot.tokens, snapshot.mean_entropy, snapshot.mean_margin) == (len(logprobs), 0.5, 0.25)


@given(LOGPROBS)
def test_repeating_an_answer_leaves_its_low_quantile_nearly_alone(logprobs: list[float]) -> None:
    once, thrice = RunningSignals(quantile=0.1), RunningSignals(quantile=0.1)
    for logprob in logprobs:
        once.add(logprob=logprob, entropy=0.0, margin=0.0)
    for logprob in logprobs * 3:
        thrice.add(logprob=logprob, entropy=0.0, margin=0.0)
    # The sum would triple; a quantile stays between its neighbours of the order statistics.
    ordered = sorted(logprobs)
    index = math.ceil(0.1 * (len(ordered) - 1))
    assert ordered[0] <= thrice.snapshot().low_logprob <= ordered[index]


@given(LOGPROBS)
def test_confidence_is_a_probability(logprobs: list[float]) -> None:
    assert 0.0 <= QuantileConfidence().confidence(signals(min(logprobs))) <= 1.0


def test_no_tokens_and_nan_give_no_confidence() -> None:
    model = QuantileConfidence()
    assert model.confidence(signals(0.0, tokens=0)) == 0.0
    assert model.confidence(signals(math.nan)) == 0.0


def test_pins_come_first() -> None:
    assert before_decoding(RoutingPolicy(tier=TierPolicy.CLOUD_ONLY)).tier is Tier.CLOUD
    assert before_decoding(RoutingPolicy(tier=TierPolicy.EDGE_ONLY)).reason is Reason.PINNED
    assert before_decoding(RoutingPolicy()).tier is Tier.EDGE


@pytest.mark.parametrize(("asked", "expected"), [(None, 0.4), (0.2, 0.4), (0.7, 0.7)])
def test_a_caller_raises_the_threshold_and_never_lowers_it(asked: float | None, expected: float) -> None:
    assert effective_threshold(0.4, RoutingPolicy(min_confidence=asked)) == expected


@pytest.mark.parametrize(
    ("confidence", "truncated", "unseen", "tier", "reason"),
    [
        (0.5, False, True, Tier.EDGE, Reason.CONFIDENT),
        (0.4, False, True, Tier.EDGE, Reason.CONFIDENT),
        (0.39, False, True, Tier.CLOUD, Reason.LOW_CONFIDENCE),
        (0.9, True, True, Tier.CLOUD, Reason.LOW_CONFIDENCE),
        (0.1, True, False, Tier.EDGE, Reason.CONFIDENT),
    ],
)
def test_after_decoding(confidence: float, truncated: bool, unseen: bool, tier: Tier, reason: Reason) -> None:
    verdict = after_decoding(
        confidence=confidence,
        threshold=0.4,
        policy=RoutingPolicy(),
        signals=signals(-1.0, truncated=truncated),
        unseen=unseen,
    )
    assert (verdict.tier, verdict.reason) == (tier, reason)
    assert verdict.explanation


def test_a_pinned_edge_answer_stays_whatever_its_confidence() -> None:
    verdict = after_decoding(
        confidence=0.0,
        threshold=1.0,
        policy=RoutingPolicy(tier=TierPolicy.EDGE_ONLY),
        signals=signals(-9.0, truncated=True),
        unseen=True,
    )
    assert (verdict.tier, verdict.reason, verdict.threshold) == (Tier.EDGE, Reason.PINNED, None)


@pytest.mark.parametrize(
    ("tokens", "confidence", "action"),
    [
        (3, 0.9, GateAction.HOLD),
        (4, 0.9, GateAction.SHOW),
        (4, 0.5, GateAction.HOLD),
        (5, 0.1, GateAction.HOLD),
        (6, 0.1, GateAction.LEAVE),
        (6, 0.3, GateAction.HOLD),
    ],
)
def test_the_gate(tokens: int, confidence: float, action: GateAction) -> None:
    settings = GateSettings(hold_back_tokens=4, min_tokens=6, early_exit_ratio=0.5)
    assert gate(tokens=tokens, confidence=confidence, threshold=0.6, settings=settings) is action


def test_the_breaker_opens_tries_once_and_closes() -> None:
    breaker = Breaker(BreakerSettings(failures=2, pause_s=1.0, longest_pause_s=4.0))
    breaker.failed(0.0)
    assert breaker.allow(0.0)
    breaker.failed(0.0)
    assert breaker.state(0.5) is BreakerState.OPEN
    assert not breaker.allow(0.5)
    assert breaker.retry_after_s(0.5) == 0.5
    assert breaker.allow(1.0), "half-open lets one through"
    assert not breaker.allow(1.0), "and only one"
    breaker.succeeded()
    assert breaker.state(1.0) is BreakerState.CLOSED


def test_a_failed_trial_doubles_the_pause_up_to_its_bound() -> None:
    breaker = Breaker(BreakerSettings(failures=1, pause_s=1.0, longest_pause_s=4.0))
    now, pauses = 0.0, []
    for _ in range(4):
        breaker.failed(now)
        pauses.append(breaker.retry_after_s(now))
        now += pauses[-1]
        assert breaker.allow(now)
    assert pauses == [1.0, 2.0, 4.0, 4.0]


def test_an_abandoned_trial_gives_its_place_back() -> None:
    breaker = Breaker(BreakerSettings(failures=1, pause_s=1.0))
    breaker.failed(0.0)
    assert breaker.allow(1.0)
    breaker.abandoned()
    assert breaker.allow(1.0)
