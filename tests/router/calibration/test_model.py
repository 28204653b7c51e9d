"""A stored calibration comes back as it was, and is refused where it does not belong."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from router.calibration.confidence import CalibratedConfidence
from router.calibration.errors import BadSignal, CalibrationMismatch, CalibrationUnusable
from router.calibration.fit import Rows, fit_head
from router.calibration.isotonic import IsotonicCurve
from router.calibration.model import Calibration, Head, decode_calibration, encode_calibration
from router.calibration.threshold import Threshold, plain
from router.confidence import ConfidenceModel
from router.signals import RunningSignals, Signals


def signals_of(**values: float) -> Signals:
    facts = {"tokens": 5, "low_logprob": -0.5, "mean_logprob": -0.2, "mean_entropy": 0.3, "mean_margin": 0.6}
    return Signals(**{**facts, **values})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def fitted() -> tuple[Head, Rows]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 800))
    rows = Rows(
        signals={"low_logprob": x[0], "mean_entropy": x[1]},
        edge_right=rng.random(800) < 1 / (1 + np.exp(-2 * x[0] + x[1])),
        cloud_right=np.ones(800, dtype=bool),
        tasks=["a", "b"] * 400,
    )
    return fit_head(rows, rng=rng).head, rows


def stored(head: Head) -> Calibration:
    return Calibration(release="support-bot@7", variant="int4", heads={"generate": head}, scorer="numeric")


def test_json_keeps_every_confidence_and_threshold_to_the_last_bit(fitted: tuple[Head, Rows]) -> None:
    head, rows = fitted
    again = decode_calibration(encode_calibration(stored(head)))
    assert again == stored(head)
    assert (
        again.heads["generate"].evaluate_columns(rows.signals) == head.evaluate_columns(rows.signals)
    ).all()


def test_it_is_plain_json_with_a_version(fitted: tuple[Head, Rows]) -> None:
    document = json.loads(encode_calibration(stored(fitted[0])))
    assert (document["schema"], document["release"], document["variant"]) == (1, "support-bot@7", "int4")


def test_one_answer_and_a_table_agree(fitted: tuple[Head, Rows]) -> None:
    head, rows = fitted
    column = head.evaluate_columns(rows.signals)
    for place in range(20):
        one = {name: float(values[place]) for name, values in rows.signals.items()}
        assert head.evaluate(one) == pytest.approx(column[place], abs=1e-12)


@pytest.mark.parametrize(("release", "variant"), [("support-bot@8", "int4"), ("support-bot@7", "int8")])
def test_another_release_or_variant_is_refused(fitted: tuple[Head, Rows], release: str, variant: str) -> None:
    stored(fitted[0]).check(release="support-bot@7", variant="int4")
    with pytest.raises(CalibrationMismatch, match=r"support-bot@7 int4"):
        stored(fitted[0]).check(release=release, variant=variant)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_signal_that_is_no_number_is_refused_by_name(fitted: tuple[Head, Rows], bad: float) -> None:
    with pytest.raises(BadSignal) as caught:
        fitted[0].evaluate({"low_logprob": bad, "mean_entropy": 0.1})
    assert caught.value.name == "low_logprob"
    with pytest.raises(BadSignal):
        fitted[0].evaluate_columns({"low_logprob": np.array([bad]), "mean_entropy": np.array([0.1])})


def test_a_missing_signal_is_refused_by_name(fitted: tuple[Head, Rows]) -> None:
    with pytest.raises(BadSignal, match="mean_entropy is missing"):
        fitted[0].evaluate({"low_logprob": 0.1})
    with pytest.raises(BadSignal, match="mean_entropy is missing"):
        fitted[0].evaluate_columns({"low_logprob": np.array([0.1])})


def test_a_task_key_has_its_threshold_and_an_unknown_one_is_forwarded(fitted: tuple[Head, Rows]) -> None:
    head, _ = fitted
    assert head.threshold_for("a") == head.tasks["a"]
    assert head.threshold_for(None) == head.threshold
    unknown = head.threshold_for("c")
    assert unknown.forwards_all
    assert "has not seen" in unknown.reason


def test_without_tasks_a_key_changes_nothing() -> None:
    head = Head(
        signals=("x",), curve=IsotonicCurve(scores=(0.0,), probabilities=(0.5,)), threshold=plain(0.5)
    )
    assert head.threshold_for("any") == head.threshold


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(schema=2),
        lambda d: d.update(release="support-bot"),
        lambda d: d.update(extra=1),
        lambda d: d.update(heads={}),
        lambda d: d["heads"].update(other=d["heads"]["generate"]),
        lambda d: d["heads"]["generate"].pop("threshold"),
        lambda d: d["heads"]["generate"].update(signals=[]),
        lambda d: d["heads"]["generate"].update(signals=["low_logprob"]),
        lambda d: d["heads"]["generate"]["logistic"].update(scales=[0.0, 1.0]),
        lambda d: d["heads"]["generate"]["curve"]["probabilities"].reverse(),
        lambda d: d["heads"]["generate"].update(logistic=None),
        lambda d: d["heads"]["generate"]["threshold"].update(policy="hopeful"),
    ],
)
def test_a_document_that_was_tampered_with_is_refused(fitted: tuple[Head, Rows], change: object) -> None:
    document = json.loads(encode_calibration(stored(fitted[0])))
    change(document)  # type: ignore[operator]
    with pytest.raises(CalibrationUnusable):
        decode_calibration(json.dumps(document).encode())


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b'{"schema": NaN}'])
def test_what_is_no_calibration_is_refused(raw: bytes) -> None:
    with pytest.raises(CalibrationUnusable):
        decode_calibration(raw)


def test_a_head_is_the_routers_confidence_model(fitted: tuple[Head, Rows]) -> None:
    head, _ = fitted
    model: ConfidenceModel = CalibratedConfidence(head)
    running = RunningSignals(quantile=0.1)
    assert model.confidence(running.snapshot()) == 0.0
    running.add(logprob=-0.1, entropy=0.2, margin=0.9)
    snapshot = running.snapshot()
    expected = head.evaluate({"low_logprob": snapshot.low_logprob, "mean_entropy": snapshot.mean_entropy})
    assert model.confidence(snapshot) == expected > 0


def test_signals_that_are_not_finite_give_no_confidence(fitted: tuple[Head, Rows]) -> None:
    assert CalibratedConfidence(fitted[0]).confidence(signals_of(low_logprob=math.nan)) == 0.0


def test_a_signal_that_the_router_does_not_measure_is_refused_when_loaded() -> None:
    curve = IsotonicCurve(scores=(0.0, 1.0), probabilities=(0.1, 0.9))
    head = Head(signals=("horoscope",), curve=curve, threshold=plain(0.5))
    with pytest.raises(BadSignal, match="horoscope"):
        CalibratedConfidence(head)


def test_a_truth_value_counts_as_a_number() -> None:
    curve = IsotonicCurve(scores=(0.0, 1.0), probabilities=(0.1, 0.9))
    head = Head(
        signals=("truncated",), curve=curve, threshold=Threshold(policy="plain", value=0.5, reason="")
    )
    model = CalibratedConfidence(head)
    assert [model.confidence(signals_of(truncated=cut)) for cut in (False, True)] == [0.1, 0.9]
