"""The life of a request over scripted tiers: who answers, and that no word is lost or taken back."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.cascade import CascadeSettings, answer
from edge.request import Answer, CascadeEvent, Delta, HandOff, Query
from protos.errors import (
    CloudUnavailable,
    DeadlineExpired,
    EngineUnavailable,
    ForebayError,
    Overloaded,
    ReleaseMismatch,
)
from protos.values import ChatMessage, FinishReason, Role, SamplingParams
from router.decision import Reason, RoutingPolicy, Tier, TierPolicy
from router.stream_gate import GateSettings
from tests.fakes.edge_parts import FakeCloud, FakeEngine, FakeTokenizer, logprob_of, served_model, true_text

WORDS = 20
TEXT = true_text(WORDS)
SURE, UNSURE, HOPELESS = logprob_of(0.9), logprob_of(0.5), logprob_of(0.01)
THRESHOLD = 0.6
AWAY = CloudUnavailable("away", retry_after_s=1.0)


def engine(*logprobs: float, **options: object) -> FakeEngine:
    return FakeEngine(FakeTokenizer(), TEXT, logprobs or (SURE,), **options)  # type: ignore[arg-type]


def query(tier: TierPolicy = TierPolicy.AUTO, *, allow_degraded: bool = True, max_tokens: int = 64) -> Query:
    return Query(
        request_id="r",
        messages=(ChatMessage(role=Role.USER, content="hello"),),
        prompt="",
        sampling=SamplingParams(max_tokens=max_tokens, seed=1),
        policy=RoutingPolicy(tier=tier, allow_degraded=allow_degraded),
        deadline=1e9,
    )


async def run(
    edge: FakeEngine,
    cloud: FakeCloud | None,
    asked: Query,
    *,
    stream: bool = True,
    flush_interval_s: float = 0.0,
    stop_after: int | None = None,
) -> list[CascadeEvent]:
    ticks = itertools.count()
    events = answer(
        asked,
        served_model(edge, threshold=THRESHOLD),
        uplink=None if cloud is None else cloud.as_uplink(),
        settings=CascadeSettings(
            gate=GateSettings(hold_back_tokens=4, min_tokens=4, early_exit_ratio=0.5),
            flush_interval_s=flush_interval_s,
        ),
        show_early=stream,
        clock=lambda: next(ticks) * 1e-3,
    )
    seen: list[CascadeEvent] = []
    async with aclosing(events):
        async for event in events:
            seen.append(event)
            if stop_after is not None and len(seen) >= stop_after:
                break
    assert edge.live == 0
    assert cloud is None or cloud.live == 0
    return seen


def final(events: list[CascadeEvent]) -> Answer:
    assert [isinstance(e, Answer) for e in events].count(True) == 1
    last = events[-1]
    assert isinstance(last, Answer)
    deltas = "".join(e.text for e in events if isinstance(e, Delta))
    if deltas:
        assert deltas == last.text
    return last


def route(result: Answer) -> tuple[Tier, Reason, bool]:
    return result.routed.verdict.tier, result.routed.verdict.reason, result.routed.degraded


@pytest.mark.parametrize("stream", [True, False])
async def test_a_confident_answer_stays_at_the_edge(stream: bool) -> None:
    cloud = FakeCloud(TEXT)
    result = final(await run(engine(), cloud, query(), stream=stream))
    assert route(result) == (Tier.EDGE, Reason.CONFIDENT, False)
    assert (result.text, cloud.asked) == (TEXT, [])
    assert (result.usage.completion_tokens, result.usage.edge_tokens) == (WORDS, WORDS)


async def test_an_unsure_answer_is_forwarded_whole() -> None:
    cloud = FakeCloud(TEXT)
    result = final(await run(engine(UNSURE), cloud, query()))
    assert route(result) == (Tier.CLOUD, Reason.LOW_CONFIDENCE, False)
    assert cloud.asked[0].prefix == ""
    assert result.usage.edge_tokens == WORDS


async def test_a_hopeless_answer_is_given_up_early() -> None:
    result = final(await run(engine(HOPELESS), FakeCloud(TEXT), query()))
    assert route(result) == (Tier.CLOUD, Reason.EARLY_EXIT, False)
    assert result.usage.edge_tokens == 4


async def test_a_hand_off_continues_exactly_what_was_shown() -> None:
    cloud = FakeCloud(TEXT)
    events = await run(engine(*[SURE] * 8, *[HOPELESS] * 20), cloud, query())
    result = final(events)
    hand_off = next(e for e in events if isinstance(e, HandOff))
    assert route(result)[0] is Tier.CLOUD
    assert TEXT.startswith(cloud.asked[0].prefix)
    assert cloud.asked[0].prefix
    assert hand_off.offset == len(cloud.asked[0].prefix) == result.routed.hand_off_offset
    assert result.text == TEXT
    assert cloud.asked[0].sampling.max_tokens == 64 - 8


async def test_a_unary_answer_that_was_cut_is_forwarded() -> None:
    result = final(await run(engine(), FakeCloud(TEXT), query(max_tokens=5), stream=False))
    assert route(result) == (Tier.CLOUD, Reason.LOW_CONFIDENCE, False)
    assert result.finish_reason is FinishReason.LENGTH


async def test_a_cut_answer_that_was_streamed_in_full_is_final() -> None:
    cloud = FakeCloud(TEXT)
    result = final(await run(engine(), cloud, query(max_tokens=6), flush_interval_s=99.0))
    assert route(result) == (Tier.EDGE, Reason.CONFIDENT, False)
    assert (result.finish_reason, cloud.asked) == (FinishReason.LENGTH, [])


async def test_deltas_are_joined_within_the_flush_interval() -> None:
    many = await run(engine(), None, query(TierPolicy.EDGE_ONLY))
    few = await run(engine(), None, query(TierPolicy.EDGE_ONLY), flush_interval_s=99.0)
    assert len(many) > len(few) == 3
    assert final(few).text == final(many).text == TEXT


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (AWAY, Reason.CLOUD_UNAVAILABLE),
        (Overloaded("full", retry_after_s=1.0), Reason.CLOUD_OVERLOADED),
        (DeadlineExpired("late"), Reason.CLOUD_DEADLINE),
        (ReleaseMismatch("other"), Reason.RELEASE_MISMATCH),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fail_at", [0, 3])
@pytest.mark.parametrize("logprob", [UNSURE, HOPELESS])
async def test_when_the_cloud_fails_the_edge_goes_on_degraded(
    error: ForebayError, reason: Reason, stream: bool, fail_at: int, logprob: float
) -> None:
    cloud = FakeCloud(TEXT, fail_at=fail_at, error=error)
    result = final(await run(engine(logprob), cloud, query(), stream=stream))
    assert route(result) == (Tier.EDGE, reason, True)
    assert result.text == TEXT


@pytest.mark.parametrize("logprobs", [(UNSURE,), (HOPELESS,), (*[SURE] * 8, HOPELESS)])
async def test_logprobs_leave_out_tokens_that_were_thrown_away(logprobs: tuple[float, ...]) -> None:
    cloud = FakeCloud(TEXT, fail_at=3, error=AWAY)
    asked = query()
    asked = dataclasses.replace(asked, sampling=dataclasses.replace(asked.sampling, logprobs=0))
    result = final(await run(engine(*logprobs), cloud, asked))
    assert result.text == TEXT
    assert result.usage.cloud_tokens == 3
    assert len(result.logprobs) == WORDS - 3


async def test_without_a_cloud_an_unsure_answer_says_so() -> None:
    result = final(await run(engine(UNSURE), None, query()))
    assert route(result) == (Tier.EDGE, Reason.NO_CLOUD, True)


@pytest.mark.parametrize("tier", [TierPolicy.AUTO, TierPolicy.CLOUD_ONLY])
async def test_who_forbids_degraded_answers_hears_that_the_cloud_is_away(tier: TierPolicy) -> None:
    cloud = FakeCloud(TEXT, fail_at=0, error=AWAY)
    with pytest.raises(CloudUnavailable) as caught:
        await run(engine(UNSURE), cloud, query(tier, allow_degraded=False))
    assert caught.value.retry_after_s > 0


async def test_edge_only_never_leaves() -> None:
    cloud = FakeCloud(TEXT)
    result = final(await run(engine(HOPELESS), cloud, query(TierPolicy.EDGE_ONLY)))
    assert (route(result), cloud.asked) == ((Tier.EDGE, Reason.PINNED, False), [])


async def test_cloud_only_never_decodes_at_the_edge() -> None:
    edge = engine()
    result = final(await run(edge, FakeCloud(TEXT), query(TierPolicy.CLOUD_ONLY)))
    assert (route(result), edge.asked) == ((Tier.CLOUD, Reason.PINNED, False), [])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Overloaded("full", retry_after_s=1.0), Reason.EDGE_BUSY),
        (EngineUnavailable("gone", retry_after_s=1.0), Reason.EDGE_FAILED),
    ],
)
@pytest.mark.parametrize("fail_at", [0, 7])
async def test_an_edge_that_cannot_goes_to_the_cloud(
    error: ForebayError, reason: Reason, fail_at: int
) -> None:
    cloud = FakeCloud(TEXT)
    result = final(await run(engine(fail_at=fail_at, error=error), cloud, query()))
    assert route(result) == (Tier.CLOUD, reason, False)
    assert result.text == TEXT
    assert bool(cloud.asked[0].prefix) is (fail_at > 0)


async def test_a_busy_edge_without_a_cloud_is_overloaded() -> None:
    full = Overloaded("full", retry_after_s=1.0)
    for cloud in (None, FakeCloud(TEXT, fail_at=0, error=AWAY)):
        with pytest.raises(Overloaded):
            await run(engine(fail_at=0, error=full), cloud, query())


CONFIDENCES = st.lists(st.sampled_from([SURE, UNSURE, HOPELESS]), min_size=1, max_size=WORDS)
FAULT = st.none() | st.tuples(
    st.integers(0, WORDS + 1),
    st.sampled_from([AWAY, DeadlineExpired("late"), Overloaded("x", retry_after_s=1)]),
)


@settings(max_examples=300, deadline=None)
@given(
    confidences=CONFIDENCES,
    cloud_fault=FAULT,
    edge_fault=st.none() | st.integers(0, WORDS),
    tier=st.sampled_from(TierPolicy),
    degraded=st.booleans(),
    stream=st.booleans(),
    max_tokens=st.integers(1, WORDS + 5),
    flush=st.sampled_from([0.0, 0.005, 99.0]),
    stop_after=st.none() | st.integers(1, 6),
    has_cloud=st.booleans(),
)
def test_what_was_shown_is_the_answer_whatever_happens(
    confidences: list[float],
    cloud_fault: tuple[int, ForebayError] | None,
    edge_fault: int | None,
    tier: TierPolicy,
    degraded: bool,
    stream: bool,
    max_tokens: int,
    flush: float,
    stop_after: int | None,
    has_cloud: bool,
) -> None:
    edge = engine(*confidences)
    if edge_fault is not None:
        edge.fail_at, edge.error = edge_fault, EngineUnavailable("gone", retry_after_s=1.0)
    cloud = FakeCloud(TEXT) if has_cloud else None
    if cloud is not None and cloud_fault is not None:
        cloud.fail_at, cloud.error = cloud_fault

    async def one() -> None:
        asked = query(tier, allow_degraded=degraded, max_tokens=max_tokens)
        try:
            events = await run(
                edge, cloud, asked, stream=stream, flush_interval_s=flush, stop_after=stop_after
            )
        except ForebayError:
            assert edge.live == 0
            assert cloud is None or cloud.live == 0
            return
        shown = "".join(e.text for e in events if isinstance(e, Delta))
        assert TEXT.startswith(shown)
        if not isinstance(events[-1], Answer):
            assert stop_after is not None
            return
        result = final(events)
        assert TEXT.startswith(result.text)
        assert result.usage.completion_tokens == len(result.text.split())
        assert result.usage.completion_tokens <= max_tokens
        if result.finish_reason is FinishReason.STOP:
            assert result.text == TEXT
        if stream:
            assert shown == result.text

    asyncio.run(one())
