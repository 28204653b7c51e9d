"""The border on a real wire: every end of a call is an answer, a typed status or a cancellation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from protos.errors import (
    DeadlineExpired,
    EngineUnavailable,
    ForebayError,
    InternalFault,
    InvalidArgument,
    RequestError,
    UnavailableError,
    UnknownModel,
)
from protos.forebay.v1 import inference_pb2, inference_pb2_grpc
from protos.interceptors import places_of, remaining_s, request_id_of
from protos.limits import DEFAULT_DEADLINE_S, MAX_DEADLINE_S
from protos.status import from_rpc_error
from tests.fakes.scripted_inference import Context, ScriptedInference, serving

SECRET = "my card is 4111 1111"
REQUEST = inference_pb2.GenerateRequest(prompt=SECRET, request_id="r-1")
STREAM_REQUEST = inference_pb2.StreamGenerateRequest(request=REQUEST)
Stub = inference_pb2_grpc.InferenceServiceStub


def delta(text: str) -> inference_pb2.StreamGenerateResponse:
    return inference_pb2.StreamGenerateResponse(delta=inference_pb2.TextDelta(text=text))


def raising(error: BaseException) -> ScriptedInference:
    async def on_generate(
        request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        raise error

    async def on_stream(
        request: inference_pb2.StreamGenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.StreamGenerateResponse]:
        yield delta("a")
        raise error

    return ScriptedInference(on_generate, on_stream)


async def unary_error(address: str, *, timeout_s: float | None = 10) -> ForebayError:
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Stub(channel).Generate(REQUEST, timeout=timeout_s)
        return from_rpc_error(caught.value)


async def stream_error(address: str, *, timeout_s: float | None = 10) -> tuple[list[str], ForebayError]:
    texts: list[str] = []

    async def read(stub: Stub) -> None:
        async for response in stub.StreamGenerate(STREAM_REQUEST, timeout=timeout_s):
            texts.append(response.delta.text)  # noqa: PERF401  # kept when the stream breaks off

    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(Stub(channel))
        return texts, from_rpc_error(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("no good", field="sampling.top_p"),
        UnknownModel("no such model", metadata={"known": "support-bot@1"}),
        EngineUnavailable("restarting", retry_after_s=0.5),
    ],
)
async def test_typed_errors_arrive_as_they_were_raised(error: ForebayError) -> None:
    async with serving(raising(error)) as (address, _):
        unary = await unary_error(address)
        texts, streamed = await stream_error(address)
    assert texts == ["a"]
    for arrived in (unary, streamed):
        assert type(arrived) is type(error)
        assert (arrived.message, arrived.metadata) == (error.message, error.metadata)
        assert vars(arrived) == vars(error)


async def test_a_bug_becomes_internal_and_its_log_entry_has_no_prompt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bug = ValueError(f"cannot parse {SECRET}")
    bug.__cause__ = KeyError(SECRET)
    with caplog.at_level(logging.DEBUG):
        async with serving(raising(bug)) as (address, _):
            unary = await unary_error(address)
            texts, streamed = await stream_error(address)
    assert texts == ["a"]
    for arrived in (unary, streamed):
        assert type(arrived) is InternalFault
        assert arrived.metadata == {"request_id": "r-1"}
        assert "r-1" in arrived.message
        assert SECRET not in arrived.message
    entries = [record.getMessage() for record in caplog.records if record.name == "protos.interceptors"]
    assert len(entries) == 2
    for entry in entries:
        assert "r-1" in entry
        assert "ValueError at" in entry
        assert "from KeyError" in entry
        assert "test_interceptors.py" in entry
    assert SECRET not in caplog.text


async def test_a_servicer_that_aborts_by_itself_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def on_generate(
        request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "as I say")

    async with serving(ScriptedInference(on_generate)) as (address, _):
        error = await unary_error(address)
    assert type(error) is RequestError
    assert error.message == "as I say"
    assert [record for record in caplog.records if record.name == "protos.interceptors"] == []


async def test_answers_and_streams_pass_unchanged() -> None:
    async def on_stream(
        request: inference_pb2.StreamGenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.StreamGenerateResponse]:
        for text in ("a", "", "ü"):
            yield delta(text)

    async with (
        serving(ScriptedInference(on_stream=on_stream)) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        assert (await Stub(channel).Generate(REQUEST, timeout=10)).request_id == "r-1"
        stream = Stub(channel).StreamGenerate(STREAM_REQUEST, timeout=10)
        assert [response.delta.text async for response in stream] == ["a", "", "ü"]


async def test_a_cancelled_stream_closes_the_servicer_s_generator() -> None:
    closed = asyncio.Event()

    async def on_stream(
        request: inference_pb2.StreamGenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.StreamGenerateResponse]:
        try:
            yield delta("a")
            await asyncio.Event().wait()
        finally:
            closed.set()

    async with (
        serving(ScriptedInference(on_stream=on_stream)) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = Stub(channel).StreamGenerate(STREAM_REQUEST, timeout=10)
        assert (await call.read()).delta.text == "a"
        call.cancel()
        await asyncio.wait_for(closed.wait(), 1.0)


async def test_calls_without_a_deadline_get_the_default_one() -> None:
    closed = 0

    async def on_generate(
        request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        nonlocal closed
        try:
            await asyncio.Event().wait()
        finally:
            closed += 1
        raise AssertionError

    async def on_stream(
        request: inference_pb2.StreamGenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.StreamGenerateResponse]:
        nonlocal closed
        try:
            yield delta("a")
            await asyncio.Event().wait()
        finally:
            closed += 1

    async with serving(ScriptedInference(on_generate, on_stream), default_deadline_s=0.05) as (address, _):
        unary = await unary_error(address, timeout_s=None)
        texts, streamed = await stream_error(address, timeout_s=None)
    assert (type(unary), type(streamed)) == (DeadlineExpired, DeadlineExpired)
    assert "0.05 s" in unary.message
    assert texts == ["a"]
    assert closed == 2


async def test_a_timeout_inside_the_servicer_is_a_bug_and_not_the_deadline() -> None:
    async with serving(raising(TimeoutError())) as (address, _):
        assert type(await unary_error(address)) is InternalFault
        assert type(await unary_error(address, timeout_s=None)) is InternalFault


async def test_a_zero_deadline_is_deadline_expired() -> None:
    async with serving() as (address, _):
        # Many times, since the caller's own timer wins some of them.
        for _ in range(50):
            assert type(await unary_error(address, timeout_s=0)) is DeadlineExpired


async def test_remaining_time_is_the_caller_s_else_the_default() -> None:
    async def on_generate(
        request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        return inference_pb2.GenerateResponse(
            text=f"{remaining_s(context)} {remaining_s(context, default_s=7)}"
        )

    async with (
        serving(ScriptedInference(on_generate)) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        for timeout_s, low_s, high_s in ((20.0, 15.0, 20.1), (1e9, MAX_DEADLINE_S, MAX_DEADLINE_S)):
            seen = float((await Stub(channel).Generate(REQUEST, timeout=timeout_s)).text.split()[0])
            assert low_s <= seen <= high_s
        assert (await Stub(channel).Generate(REQUEST)).text == f"{DEFAULT_DEADLINE_S} 7"


async def test_the_request_id_is_the_message_s_else_the_metadata_s_else_made() -> None:
    async def on_generate(
        request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        return inference_pb2.GenerateResponse(request_id=request_id_of(request, context))

    metadata = (("forebay-request-id", "from-metadata"),)
    async with (
        serving(ScriptedInference(on_generate)) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = Stub(channel)
        empty = inference_pb2.GenerateRequest()
        assert (await stub.Generate(REQUEST, timeout=10, metadata=metadata)).request_id == "r-1"
        assert (await stub.Generate(empty, timeout=10, metadata=metadata)).request_id == "from-metadata"
        made = {(await stub.Generate(empty, timeout=10)).request_id for _ in range(3)}
        assert len(made) == 3
        assert all(len(request_id) == 32 for request_id in made)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(inference_pb2.GenerateRequest(request_id="x" * 129), timeout=10)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_over_the_limit_is_an_invalid_argument() -> None:
    async with (
        serving(max_message_bytes=1024) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Stub(channel).Generate(inference_pb2.GenerateRequest(prompt="x" * 4096), timeout=10)
        assert type(from_rpc_error(caught.value)) is InvalidArgument


async def test_a_method_that_is_not_served_and_a_port_without_a_server_are_typed() -> None:
    async with serving() as (address, _), grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/forebay.v1.NoService/Nothing")(b"", timeout=10)
        assert type(from_rpc_error(caught.value)) is RequestError
    assert type(await unary_error(address)) is UnavailableError


def test_places_of_a_chain_that_bites_its_tail_end() -> None:
    first, second = ValueError("x"), KeyError("y")
    first.__cause__, second.__cause__ = second, first
    assert places_of(first) == "ValueError at an unknown place; from KeyError at an unknown place"
