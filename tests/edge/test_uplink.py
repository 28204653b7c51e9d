"""The way to the cloud over a real wire: what is tried again, what is not, and what the breaker hears."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from edge.cloud_values import CloudEnd, CloudQuery, CloudText
from edge.request import LabelQuery
from edge.uplink import RetryPolicy, Uplink
from protos.channel import ReloadingChannel
from protos.errors import (
    CloudUnavailable,
    ContextTooLong,
    DeadlineExpired,
    EngineUnavailable,
    ForebayError,
    InternalFault,
    Overloaded,
    PermissionDenied,
    ReleaseMismatch,
    Unauthenticated,
)
from protos.forebay.v1 import cloud_pb2
from protos.status import abort_with
from protos.tls import ClientTlsSettings
from protos.values import FinishReason, ReleaseRef, SamplingParams
from router.breaker import Breaker, BreakerSettings, BreakerState
from router.decision import RoutingPolicy
from tests.fakes.cloud_service import CloudService, Context, OnStream, cloud_service, delta, final
from tests.fakes.waiting import eventually

RELEASE = ReleaseRef("support-bot", 1)
QUERY = CloudQuery(
    request_id="r", release=RELEASE, messages=(), prompt="x", prefix="", sampling=SamplingParams(seed=1)
)
LABELS = LabelQuery(
    request_id="r", text="x", labels=("a", "b"), kind="Topic", policy=RoutingPolicy(), deadline=0.0
)


@asynccontextmanager
async def uplink_to(
    address: str, *, attempts: int = 2, breaker: Breaker | None = None
) -> AsyncIterator[tuple[Uplink, Breaker]]:
    breaker = breaker or Breaker(BreakerSettings(failures=1, pause_s=30.0))
    channel = ReloadingChannel(address, ClientTlsSettings(), clock=time.monotonic)
    uplink = Uplink(
        channel,
        breaker=breaker,
        retry=RetryPolicy(attempts=attempts, first_backoff_s=0.01),
        clock=time.monotonic,
        jitter=lambda: 0.0,
    )
    try:
        yield uplink, breaker
    finally:
        await uplink.close()


async def collect(uplink: Uplink, *, within_s: float = 10.0) -> list[CloudText | CloudEnd]:
    async with aclosing(uplink.generate(QUERY, deadline=time.monotonic() + within_s)) as events:
        return [event async for event in events]


def refusing(*errors: ForebayError | grpc.StatusCode, after: int = 0) -> OnStream:
    """Refuse with these, one call after the other, behind `after` pieces; then answer."""
    left = list(errors)

    async def on_stream(request: Any, context: Context) -> AsyncIterator[Any]:
        if left:
            for _ in range(after):
                yield delta("a")
            error = left.pop(0)
            if isinstance(error, grpc.StatusCode):
                await context.abort(error, "bare")
            else:
                await abort_with(context, error)
        yield delta("b")
        yield final(request, 1)

    return on_stream


async def hang(request: Any, context: Context) -> AsyncIterator[Any]:
    yield delta("a")
    await asyncio.Event().wait()


async def mute(request: Any, context: Context) -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield


def free_address() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


def state(breaker: Breaker) -> BreakerState:
    return breaker.state(time.monotonic())


async def test_an_answer_arrives_whole_with_its_facts() -> None:
    async with cloud_service() as (cloud, _), uplink_to(cloud.address) as (uplink, breaker):
        cloud.on_stream = refusing()
        events = await collect(uplink, within_s=5.0)
    assert events[0] == CloudText(text="b", tokens=1)
    end = events[1]
    assert isinstance(end, CloudEnd)
    assert (end.release, end.finish_reason, end.completion_tokens) == (RELEASE, FinishReason.STOP, 1)
    assert 0.0 < cloud.remaining_s[0] <= 5.1, "the deadline travels"
    assert state(breaker) is BreakerState.CLOSED


async def test_a_broken_connection_is_tried_again_before_the_first_token() -> None:
    breaker = Breaker(BreakerSettings(failures=5))
    async with cloud_service() as (cloud, _), uplink_to(cloud.address, breaker=breaker) as (uplink, _b):
        cloud.on_stream = refusing(grpc.StatusCode.UNAVAILABLE)
        events = await collect(uplink)
    assert len(cloud.asked) == 2
    assert [type(event) for event in events] == [CloudText, CloudEnd]


async def test_nothing_is_tried_again_after_the_first_token() -> None:
    breaker = Breaker(BreakerSettings(failures=5))
    async with cloud_service() as (cloud, _), uplink_to(cloud.address, breaker=breaker) as (uplink, _b):
        cloud.on_stream = refusing(grpc.StatusCode.UNAVAILABLE, after=1)
        async with aclosing(uplink.generate(QUERY, deadline=time.monotonic() + 10)) as events:
            assert await anext(events) == CloudText(text="a", tokens=1)
            with pytest.raises(CloudUnavailable):
                await anext(events)
    assert len(cloud.asked) == 1


async def test_tries_are_bounded() -> None:
    breaker = Breaker(BreakerSettings(failures=99))
    async with (
        cloud_service() as (cloud, _),
        uplink_to(cloud.address, breaker=breaker, attempts=3) as (uplink, _b),
    ):
        cloud.on_stream = refusing(*[grpc.StatusCode.UNAVAILABLE] * 9)
        with pytest.raises(CloudUnavailable):
            await collect(uplink)
    assert len(cloud.asked) == 3


async def test_a_full_cloud_is_asked_again_no_sooner_than_it_said() -> None:
    async with cloud_service() as (cloud, _), uplink_to(cloud.address) as (uplink, breaker):
        cloud.on_stream = refusing(Overloaded("full", retry_after_s=0.15))
        began = time.monotonic()
        await collect(uplink)
        took_s = time.monotonic() - began
    assert len(cloud.asked) == 2
    assert took_s >= 0.15
    assert state(breaker) is BreakerState.CLOSED, "a full cloud is alive"


@pytest.mark.parametrize(("retry_after_s", "within_s"), [(30.0, 60.0), (0.5, 0.4)])
async def test_a_pause_that_is_too_long_is_not_waited_for(retry_after_s: float, within_s: float) -> None:
    async with cloud_service() as (cloud, _), uplink_to(cloud.address) as (uplink, _b):
        cloud.on_stream = refusing(Overloaded("full", retry_after_s=retry_after_s))
        began = time.monotonic()
        with pytest.raises(Overloaded) as caught:
            await collect(uplink, within_s=within_s)
    assert time.monotonic() - began < within_s
    assert caught.value.retry_after_s == retry_after_s
    assert len(cloud.asked) == 1


@pytest.mark.parametrize(
    ("said", "heard", "opened"),
    [
        (EngineUnavailable("starting", retry_after_s=2.0), CloudUnavailable, True),
        (InternalFault("a bug"), CloudUnavailable, True),
        (Unauthenticated("no key"), CloudUnavailable, True),
        (PermissionDenied("not you"), CloudUnavailable, True),
        (grpc.StatusCode.UNIMPLEMENTED, CloudUnavailable, True),
        (grpc.StatusCode.CANCELLED, CloudUnavailable, True),
        (ReleaseMismatch("other"), ReleaseMismatch, False),
        (ContextTooLong("too long", field="prompt"), ContextTooLong, False),
    ],
)
async def test_a_refusal_is_asked_once_and_the_caller_is_not_blamed_for_the_tiers(
    said: ForebayError | grpc.StatusCode, heard: type[ForebayError], opened: bool
) -> None:
    async with cloud_service() as (cloud, _), uplink_to(cloud.address) as (uplink, breaker):
        cloud.on_stream = refusing(said)
        with pytest.raises(ForebayError) as caught:
            await collect(uplink)
    assert type(caught.value) is heard
    assert len(cloud.asked) == 1
    assert (state(breaker) is BreakerState.OPEN) is opened


async def test_an_open_breaker_refuses_at_once_and_says_when_to_come_back() -> None:
    breaker = Breaker(BreakerSettings(failures=1, pause_s=30.0))
    breaker.failed(time.monotonic())
    async with (
        cloud_service() as (cloud, _),
        uplink_to(cloud.address, breaker=breaker, attempts=9) as (uplink, _b),
    ):
        assert not uplink.likely()
        later = time.monotonic() + 10
        for ask in (lambda: collect(uplink), lambda: uplink.classify(LABELS, RELEASE, deadline=later)):
            with pytest.raises(CloudUnavailable) as caught:
                await ask()
            assert 20.0 < caught.value.retry_after_s <= 30.0
    assert cloud.asked == cloud.classified == []


async def test_nobody_there_is_unavailable_and_opens_the_breaker() -> None:
    async with uplink_to(free_address(), attempts=1) as (uplink, breaker):
        with pytest.raises(CloudUnavailable):
            await collect(uplink)
    assert state(breaker) is BreakerState.OPEN


async def test_an_impatient_caller_proves_nothing_about_the_cloud() -> None:
    async with cloud_service() as (cloud, _), uplink_to(cloud.address) as (uplink, breaker):
        cloud.on_stream = mute
        with pytest.raises(DeadlineExpired):
            await collect(uplink, within_s=0.2)
        await eventually(lambda: cloud.live == 0)
    assert state(breaker) is BreakerState.CLOSED


async def test_a_peer_that_takes_connections_and_never_speaks_opens_the_breaker() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with uplink_to("{}:{}".format(*silent.getsockname())) as (uplink, breaker):
            with pytest.raises(DeadlineExpired):
                await collect(uplink, within_s=1.1)
            assert state(breaker) is BreakerState.OPEN


async def test_no_call_is_made_without_time_for_it() -> None:
    async with cloud_service() as (cloud, _), uplink_to(cloud.address) as (uplink, _b):
        with pytest.raises(DeadlineExpired):
            await collect(uplink, within_s=-1.0)
    assert cloud.asked == []


async def test_leaving_an_answer_stops_the_clouds_work() -> None:
    async with cloud_service() as (cloud, _), uplink_to(cloud.address) as (uplink, breaker):
        cloud.on_stream = hang
        async with aclosing(uplink.generate(QUERY, deadline=time.monotonic() + 60)) as events:
            assert await anext(events) == CloudText(text="a", tokens=1)
            assert cloud.live == 1
        await eventually(lambda: cloud.live == 0, timeout_s=2.0)
    assert state(breaker) is BreakerState.CLOSED


async def test_a_cancelled_wait_stops_the_clouds_work_and_gives_a_trial_back() -> None:
    breaker = Breaker(BreakerSettings(failures=1, pause_s=0.001))
    breaker.failed(time.monotonic())
    async with cloud_service() as (cloud, _), uplink_to(cloud.address, breaker=breaker) as (uplink, _b):
        cloud.on_stream = mute
        await eventually(lambda: state(breaker) is BreakerState.HALF_OPEN)
        waiting = asyncio.create_task(collect(uplink))
        await eventually(lambda: cloud.live == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await eventually(lambda: cloud.live == 0, timeout_s=2.0)
    assert breaker.allow(time.monotonic())


async def test_a_cloud_that_stops_in_mid_answer_is_unavailable() -> None:
    async with cloud_service() as (cloud, server), uplink_to(cloud.address) as (uplink, breaker):
        cloud.on_stream = hang
        async with aclosing(uplink.generate(QUERY, deadline=time.monotonic() + 60)) as events:
            await anext(events)
            await server.stop(0)
            with pytest.raises(CloudUnavailable):
                await anext(events)
    assert state(breaker) is BreakerState.OPEN


async def test_a_stream_without_a_last_message_is_no_answer() -> None:
    async def cut(request: Any, context: Context) -> AsyncIterator[Any]:
        yield delta("a")

    async with cloud_service() as (cloud, _), uplink_to(cloud.address) as (uplink, _b):
        cloud.on_stream = cut
        with pytest.raises(CloudUnavailable):
            await collect(uplink)


async def test_labels_are_asked_for_with_the_same_care() -> None:
    refusals: list[Any] = [grpc.StatusCode.UNAVAILABLE]

    async def on_classify(
        request: cloud_pb2.CloudClassifyRequest, context: Context
    ) -> cloud_pb2.CloudClassifyResponse:
        if refusals:
            await context.abort(refusals.pop(), "bare")
        return cloud_pb2.CloudClassifyResponse(release=request.release, prompt_tokens=3)

    breaker = Breaker(BreakerSettings(failures=5))
    async with cloud_service() as (cloud, _), uplink_to(cloud.address, breaker=breaker) as (uplink, _b):
        cloud.on_classify = on_classify
        labels = await uplink.classify(LABELS, RELEASE, deadline=time.monotonic() + 10)
    assert (labels.release, labels.prompt_tokens, len(cloud.classified)) == (RELEASE, 3, 2)
    assert list(cloud.classified[0].labels) == ["a", "b"]


async def test_the_prefix_travels_as_text() -> None:
    query = CloudQuery(
        request_id="r",
        release=RELEASE,
        messages=(),
        prompt="x",
        prefix="sö ",
        sampling=SamplingParams(seed=1),
    )
    async with cloud_service() as (cloud, _), uplink_to(cloud.address) as (uplink, _b):
        cloud.on_stream = refusing()
        async with aclosing(uplink.generate(query, deadline=time.monotonic() + 10)) as events:
            async for _event in events:
                pass
    assert _only(cloud).prefix_text == "sö "
    assert _only(cloud).sampling.seed == 1


def _only(cloud: CloudService) -> cloud_pb2.CloudStreamGenerateRequest:
    assert len(cloud.asked) == 1
    return cloud.asked[0]
