"""The edge's service over a real wire, with scripted tiers: bad input, a crowd of impatient callers."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from edge.cascade import CascadeSettings
from edge.servicer import SERVICE_NAME, InferenceServicer
from edge.serving import ServedModels
from protos.auth import Authenticator, AuthSettings
from protos.channel import channel_options, server_options
from protos.forebay.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from protos.health import add_health
from protos.interceptors import BorderInterceptor
from tests.fakes.edge_parts import FakeCloud, FakeEngine, FakeTokenizer, logprob_of, served_model, true_text

TEXT = true_text(12)
HELLO = [common_pb2.ChatMessage(role=common_pb2.ROLE_USER, content="hello")]


@asynccontextmanager
async def serving(
    engine: FakeEngine, cloud: FakeCloud | None = None
) -> AsyncIterator[inference_pb2_grpc.InferenceServiceAsyncStub]:
    authenticator = Authenticator(AuthSettings(), clock=time.monotonic)
    server = grpc.aio.server(
        interceptors=[BorderInterceptor(authenticator)], options=server_options(16 * 1024 * 1024)
    )
    servicer = InferenceServicer(
        ServedModels((served_model(engine, threshold=0.6),)),
        uplink=None if cloud is None else cloud.as_uplink(),
        settings=CascadeSettings(),
        classify_threshold=0.6,
        default_deadline_s=10.0,
        clock=time.monotonic,
        seed=lambda: 7,
    )
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    add_health(server, [SERVICE_NAME])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{port}", channel_options(16 * 1024 * 1024)
        ) as channel:
            yield inference_pb2_grpc.InferenceServiceStub(channel)
    finally:
        await server.stop(0)


def engine() -> FakeEngine:
    return FakeEngine(FakeTokenizer(), TEXT, (logprob_of(0.9),))


def details(error: grpc.aio.AioRpcError) -> tuple[grpc.StatusCode, str, str]:
    """Code, reason, and the field that a BadRequest names."""
    status: status_pb2.Status | None = rpc_status.from_call(error)
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details if status is not None else ():
        detail.Unpack(info)
        detail.Unpack(bad)
    return error.code(), info.reason, bad.field_violations[0].field if bad.field_violations else ""


def sampling(**values: float) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**values)  # type: ignore[arg-type]


BAD = grpc.StatusCode.INVALID_ARGUMENT
BAD_REQUESTS = {
    "empty": ({}, BAD, "model"),
    "no messages": ({"model": "support-bot"}, BAD, "messages"),
    "messages and prompt": ({"model": "support-bot", "messages": HELLO, "prompt": "x"}, BAD, ""),
    "unknown model": ({"model": "other", "messages": HELLO}, grpc.StatusCode.NOT_FOUND, ""),
    "unknown version": ({"model": "support-bot@9", "messages": HELLO}, grpc.StatusCode.NOT_FOUND, ""),
    "no model name": ({"model": "Support Bot!", "messages": HELLO}, BAD, "model"),
    "negative max_tokens": (
        {"model": "support-bot", "messages": HELLO, "sampling": sampling(max_tokens=-1)},
        BAD,
        "sampling.max_tokens",
    ),
    "NaN temperature": (
        {"model": "support-bot", "messages": HELLO, "sampling": sampling(temperature=math.nan)},
        BAD,
        "sampling.temperature",
    ),
    "10 MB prompt": ({"model": "support-bot", "prompt": "x" * 10_000_000}, BAD, "prompt"),
    "unknown role": (
        {"model": "support-bot", "messages": [common_pb2.ChatMessage(role=77, content="x")]},  # type: ignore[arg-type]
        BAD,
        "messages[0].role",
    ),
    "unknown tier": (
        {"model": "support-bot", "messages": HELLO, "policy": common_pb2.RoutingPolicy(tier=9)},  # type: ignore[arg-type]
        BAD,
        "policy.tier",
    ),
    "confidence over one": (
        {
            "model": "support-bot",
            "messages": HELLO,
            "policy": common_pb2.RoutingPolicy(min_confidence=1.5),
        },
        BAD,
        "policy.min_confidence",
    ),
    "request id": ({"model": "support-bot", "messages": HELLO, "request_id": "é"}, BAD, "request_id"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_bad_input_gets_its_typed_error(name: str) -> None:
    fields, code, field = BAD_REQUESTS[name]
    request = inference_pb2.GenerateRequest(**fields)  # type: ignore[arg-type]
    async with serving(engine()) as edge:
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await edge.Generate(request, timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            async for _ in edge.StreamGenerate(
                inference_pb2.StreamGenerateRequest(request=request), timeout=10
            ):
                pass
    for caught in (unary, streamed):
        got_code, reason, got_field = details(caught.value)
        assert got_code == code
        assert reason
        if field:
            assert got_field == field


@pytest.mark.parametrize(
    ("labels", "text", "field"),
    [
        ([f"label {i}" for i in range(300)], "x", "labels"),
        (["one"], "x", "labels"),
        (["a", "a"], "x", "labels[1]"),
        (["a", "b"], "", "text"),
    ],
)
async def test_bad_label_sets_are_refused(labels: list[str], text: str, field: str) -> None:
    async with serving(engine()) as edge:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await edge.Classify(
                inference_pb2.ClassifyRequest(model="support-bot", text=text, labels=labels), timeout=10
            )
    assert details(caught.value) == (BAD, "INVALID_ARGUMENT", field)


async def test_a_zero_deadline_is_exceeded() -> None:
    async with serving(engine()) as edge:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await edge.Generate(inference_pb2.GenerateRequest(model="support-bot", messages=HELLO), timeout=0)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_wrong_port_is_unavailable() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=10)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(("gains", "tier"), [((3.0, 0.0), "TIER_EDGE"), ((0.1, 0.0), "TIER_CLOUD")])
async def test_an_unsure_label_is_forwarded(gains: tuple[float, float], tier: str) -> None:
    fake = engine()
    fake.gains = gains
    async with serving(fake, FakeCloud(TEXT)) as edge:
        reply = await edge.Classify(
            inference_pb2.ClassifyRequest(model="support-bot", text="x", labels=["a", "b"]), timeout=10
        )
    assert common_pb2.Tier.Name(reply.decision.tier) == tier
    assert reply.label == ("a" if tier == "TIER_EDGE" else "b")
    assert math.fsum(score.probability for score in reply.scores) == pytest.approx(1.0)


async def test_models_are_listed_and_found() -> None:
    async with serving(engine()) as edge:
        listed = await edge.ListModels(inference_pb2.ListModelsRequest(), timeout=10)
        got = await edge.GetModel(inference_pb2.GetModelRequest(name="support-bot@1"), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await edge.GetModel(inference_pb2.GetModelRequest(name="nobody"), timeout=10)
    assert list(listed.models) == [got.model]
    assert (got.model.line, got.model.active_version, got.model.context_tokens) == ("support-bot", 1, 2048)
    assert [v.name for v in got.model.variants if v.serving] == ["int4"]
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_200_impatient_requests_over_32_streams_each_end_once() -> None:
    fake, cloud = engine(), FakeCloud(TEXT)
    rng = random.Random(5)
    places = asyncio.Semaphore(32)
    async with serving(fake, cloud) as edge:

        async def one() -> str:
            async with places:
                request = inference_pb2.GenerateRequest(
                    model="support-bot",
                    messages=HELLO,
                    sampling=common_pb2.SamplingParams(max_tokens=rng.randint(1, 16)),
                    policy=common_pb2.RoutingPolicy(tier=rng.choice([1, 2, 3])),  # type: ignore[arg-type]
                )
                timeout = rng.choice([0.0, 0.005, 10.0, 10.0])
                call = edge.StreamGenerate(
                    inference_pb2.StreamGenerateRequest(request=request), timeout=timeout
                )
                shown, stop_after = "", rng.choice([1, 99, 99])
                try:
                    async for event in call:
                        shown += event.delta.text
                        stop_after -= 1
                        if event.HasField("final"):
                            assert event.final.text == shown
                            return "answer"
                        if stop_after == 0:
                            return "cancelled"
                except grpc.aio.AioRpcError as error:
                    return error.code().name
                finally:
                    call.cancel()
                raise AssertionError("a stream ended without an answer or an error")

        ends = await asyncio.gather(*(one() for _ in range(200)))
        assert len(ends) == 200
        assert set(ends) == {"answer", "cancelled", "DEADLINE_EXCEEDED"}
        for _ in range(100):
            if fake.live == cloud.live == 0:
                break
            await asyncio.sleep(0.02)
        assert (fake.live, cloud.live) == (0, 0)
