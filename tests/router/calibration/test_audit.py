"""The audit is rarely wrong, soon right, and advises a tighter threshold."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from router.calibration.audit import AuditState, RegretAudit
from router.calibration.threshold import certify, plain


def feed(audit: RegretAudit, regrets: np.ndarray) -> AuditState:
    state = audit.state
    for regret in regrets:
        state = audit.observe_kept(confidence=0.9, regret=bool(regret))
    return state


def test_the_expected_wealth_at_the_border_of_the_null_is_one_exactly() -> None:
    alpha, length = 0.3, 9
    expected = 0.0
    for outcome in itertools.product((False, True), repeat=length):
        state = feed(RegretAudit(alpha=alpha), np.array(outcome))
        expected += state.wealth * alpha ** sum(outcome) * (1 - alpha) ** (length - sum(outcome))
    assert expected == pytest.approx(1.0, rel=1e-9)


def test_false_alarms_are_as_rare_as_promised_however_long_one_looks() -> None:
    rng = np.random.default_rng(0)
    runs, delta = 150, 0.2
    alarms = sum(
        feed(RegretAudit(alpha=0.05, delta=delta), rng.random(600) < 0.05).alarm for _ in range(runs)
    )
    assert alarms / runs <= delta + 3 * math.sqrt(delta * (1 - delta) / runs)


@pytest.mark.parametrize("good_before", [0, 2000], ids=["from the start", "after a long good time"])
def test_a_broken_promise_raises_an_alarm_soon(good_before: int) -> None:
    rng = np.random.default_rng(1)
    delays = []
    for _ in range(20):
        audit = RegretAudit(alpha=0.05, delta=0.01)
        feed(audit, rng.random(good_before) < 0.01)
        assert not audit.state.alarm
        delay = 0
        while not audit.state.alarm:
            feed(audit, rng.random(1) < 0.2)
            delay += 1
        delays.append(delay)
    assert np.median(delays) < (60 if good_before == 0 else 150)


def test_an_alarm_stays_until_restart() -> None:
    audit = RegretAudit(alpha=0.05)
    feed(audit, np.ones(20, dtype=bool))
    state = feed(audit, np.zeros(500, dtype=bool))
    assert state.wealth < 1
    assert state.alarm
    audit.restart()
    assert audit.state == AuditState(audited=0, regrets=0, wealth=1.0, alarm=False)


def test_forwarded_requests_count_as_not_regretted() -> None:
    audit = RegretAudit(alpha=0.05)
    audit.observe_kept(confidence=0.9, regret=True)
    for _ in range(9):
        state = audit.observe_forwarded()
    assert state.observed_regret == 0.1
    assert RegretAudit().state.observed_regret is None


def test_an_unanswered_alarm_does_not_overflow() -> None:
    audit = RegretAudit(alpha=0.01)
    assert math.isfinite(feed(audit, np.ones(3000, dtype=bool)).wealth)


def test_the_advice_is_a_higher_threshold_that_passes_on_recent_requests() -> None:
    rng = np.random.default_rng(2)
    audit, current = RegretAudit(alpha=0.05), plain(0.5)
    seen = []
    for confidence in rng.random(1500):
        if confidence < 0.5:
            audit.observe_forwarded()
            seen.append((0.0, False))
        else:
            regret = bool(rng.random() < 1.2 * (1 - confidence))
            audit.observe_kept(confidence=confidence, regret=regret)
            seen.append((confidence, regret))
    advice = audit.recommend(current, delta=0.1)
    assert advice.bar > 0.5
    scores, regrets = np.array([c for c, _ in seen]), np.array([r for _, r in seen])
    assert advice.value == certify(scores, regrets, keepable=scores > 0).value


def test_the_advice_never_lowers_the_threshold_and_never_revives_one_that_forwards_all() -> None:
    audit = RegretAudit()
    feed(audit, np.zeros(200, dtype=bool))
    assert audit.recommend(plain(0.7), delta=0.1) == plain(0.7)
    nothing = certify([0.5], [False])
    assert audit.recommend(nothing, delta=0.1) == nothing


def test_too_few_recent_requests_advise_to_forward_all() -> None:
    audit = RegretAudit(window=30)
    feed(audit, np.zeros(100, dtype=bool))
    assert audit.recommend(plain(0.5), delta=0.1).forwards_all


def test_numbers_out_of_range_are_refused() -> None:
    for alpha, delta, window in ((0.0, 0.1, 5), (0.1, 1.0, 5), (0.1, 0.1, 0)):
        with pytest.raises(ValueError, match="must be"):
            RegretAudit(alpha=alpha, delta=delta, window=window)
    with pytest.raises(ValueError, match="finite"):
        RegretAudit().observe_kept(confidence=math.nan, regret=False)


def test_a_large_alpha_still_has_a_rate_to_bet_on() -> None:
    assert feed(RegretAudit(alpha=0.9, delta=0.5), np.ones(60, dtype=bool)).alarm
