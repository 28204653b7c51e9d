"""The life of a request over scripted tiers: who answers, and that no word is lost or taken back."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.cascade import CascadeSettings, answer
from edge.request import Answer, CascadeEvent, Delta, HandOff, Query
from protos.errors import (
    CloudUnavailable,
    ContextTooLong,
    DeadlineExpired,
    EngineUnavailable,
    ForebayError,
    InternalFault,
    InvalidArgument,
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


def query(
    tier: TierPolicy = TierPolicy.AUTO,
    *,
    allow_degraded: bool = True,
    max_tokens: int = 64,
    deadline: float = 1e9,
) -> Query:
    return Query(
        request_id="r",
        messages=(ChatMessage(role=Role.USER, content="hello"),),
        prompt="",
        sampling=SamplingParams(max_tokens=max_tokens, seed=1),
        policy=RoutingPolicy(tier=tier, allow_degraded=allow_degraded),
        deadline=deadline,
    )


def ticking(step_s: float) -> Callable[[], float]:
    """A clock that goes on by a step whenever it is read."""
    ticks = itertools.count()
    return lambda: next(ticks) * step_s


async def run(
    edge: FakeEngine,
    cloud: FakeCloud | None,
    asked: Query,
    *,
    stream: bool = True,
    flush_interval_s: float = 0.0,
    stop_after: int | None = None,
) -> list[CascadeEvent]:
    events = answer(
        asked,
        served_model(edge, threshold=THRESHOLD),
        uplink=None if cloud is None else cloud.as_uplink(),
        settings=CascadeSettings(
            gate=GateSettings(hold_back_tokens=4, min_tokens=4, early_exit_ratio=0.5),
            flush_interval_s=flush_interval_s,
        ),
        show_early=stream,
        clock=ticking(1e-3),
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
        (InternalFault("not a number"), Reason.EDGE_FAILED),
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


@pytest.mark.parametrize("edge_says", [UNSURE, HOPELESS])
async def test_a_request_that_only_the_edge_can_serve_is_served_there(edge_says: float) -> None:
    long = ContextTooLong("over the cloud's context", field="prompt")
    result = final(await run(engine(edge_says), FakeCloud(TEXT, fail_at=0, error=long), query()))
    assert route(result) == (Tier.EDGE, Reason.CLOUD_UNAVAILABLE, True)
    assert result.text == TEXT
    assert "over the cloud's context" in result.routed.verdict.explanation


async def test_a_request_that_the_cloud_refuses_and_the_edge_never_saw_is_the_callers_fault() -> None:
    bad = InvalidArgument("no", field="prompt")
    for asked in (query(TierPolicy.CLOUD_ONLY), query(allow_degraded=False)):
        with pytest.raises(InvalidArgument):
            await run(engine(UNSURE), FakeCloud(TEXT, fail_at=0, error=bad), asked)


async def test_a_request_too_long_for_the_edge_is_not_blamed_on_the_caller_while_the_cloud_is_away() -> None:
    edge = engine(fail_at=0, error=ContextTooLong("over the edge's context", field="prompt"))
    with pytest.raises(CloudUnavailable):
        await run(edge, FakeCloud(TEXT, fail_at=0, error=AWAY), query(TierPolicy.CLOUD_ONLY))


async def test_the_edge_is_not_given_up_early_without_time_for_the_cloud() -> None:
    edge, cloud = engine(HOPELESS), FakeCloud(TEXT, fail_at=0, error=DeadlineExpired("no time"))
    result = final(await run(edge, cloud, query(deadline=0.4)))
    assert route(result) == (Tier.EDGE, Reason.CLOUD_DEADLINE, True)
    assert len(edge.asked) == 1, "it was decoded once, to its end"


async def test_where_nobody_else_could_answer_an_unsure_stream_is_shown_as_it_forms() -> None:
    events = await run(engine(UNSURE), None, query())
    assert len(events) == WORDS + 1
    assert route(final(events)) == (Tier.EDGE, Reason.NO_CLOUD, True)
    assert route(final(await run(engine(), None, query()))) == (Tier.EDGE, Reason.CONFIDENT, False)


async def test_what_the_gate_let_through_is_shown_in_time_even_while_it_holds() -> None:
    cloud = FakeCloud(TEXT)
    seen: list[int] = []
    edge = engine(*[SURE] * 6, *[UNSURE] * 14)
    events = answer(
        query(),
        served_model(edge, threshold=THRESHOLD),
        uplink=cloud.as_uplink(),
        settings=CascadeSettings(
            gate=GateSettings(hold_back_tokens=4, min_tokens=4, early_exit_ratio=0.5), flush_interval_s=0.005
        ),
        show_early=True,
        clock=ticking(1e-3),
    )
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Delta):
                seen.append(edge.spoken)
            if isinstance(event, HandOff):
                break
    assert seen[0] == 4
    assert seen[1] < WORDS, "not only when the edge has finished"


@pytest.mark.parametrize("stream", [True, False])
async def test_the_time_in_the_cloud_is_in_the_answer(stream: bool) -> None:
    cloud = FakeCloud(TEXT)
    events = answer(
        query(TierPolicy.CLOUD_ONLY),
        served_model(engine(), threshold=THRESHOLD),
        uplink=cloud.as_uplink(),
        settings=CascadeSettings(),
        show_early=stream,
        clock=ticking(1e-3),
    )
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Answer):
                # Read while the generator stands at this event, as a servicer does.
                assert 0.0 < event.timings.cloud_s <= event.timings.total_s
                assert event.timings.decode_s == 0.0


async def test_the_clouds_deltas_are_joined_too() -> None:
    events = await run(engine(HOPELESS), FakeCloud(TEXT), query(), flush_interval_s=99.0)
    assert final(events).text == TEXT
    assert len(events) == 3, "the first piece, the rest, the answer"


async def test_a_broken_off_cloud_leaves_no_tokens_in_an_answer_that_nobody_saw() -> None:
    cloud = FakeCloud(TEXT, fail_at=3, error=AWAY)
    result = final(await run(engine(HOPELESS), cloud, query(), stream=False))
    assert (result.text, result.usage.completion_tokens, result.usage.cloud_tokens) == (TEXT, WORDS, 3)


CONFIDENCES = st.lists(st.sampled_from([SURE, UNSURE, HOPELESS]), min_size=1, max_size=WORDS)
FAULT = st.none() | st.tuples(
    st.integers(0, WORDS + 1),
    st.sampled_from(
        [
            AWAY,
            DeadlineExpired("late"),
            Overloaded("x", retry_after_s=1),
            ContextTooLong("long", field="prompt"),
        ]
    ),
)
EDGE_FAULT = st.none() | st.tuples(
    st.integers(0, WORDS),
    st.sampled_from(
        [
            EngineUnavailable("gone", retry_after_s=1.0),
            Overloaded("full", retry_after_s=1.0),
            DeadlineExpired("late"),
        ]
    ),
)


@settings(max_examples=300, deadline=None)
@given(
    confidences=CONFIDENCES,
    cloud_fault=FAULT,
    edge_fault=EDGE_FAULT,
    left_s=st.sampled_from([0.01, 0.52, 1e9]),
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
    edge_fault: tuple[int, ForebayError] | None,
    left_s: float,
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
        edge.fail_at, edge.error = edge_fault
    cloud = FakeCloud(TEXT) if has_cloud else None
    if cloud is not None and cloud_fault is not None:
        cloud.fail_at, cloud.error = cloud_fault

    async def one() -> None:
        asked = query(tier, allow_degraded=degraded, max_tokens=max_tokens, deadline=left_s)
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
