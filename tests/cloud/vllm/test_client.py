"""The engine client: what it sends, what it makes of answers, and how it ends when the engine does not."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from cloud.vllm.client import StreamEnd, TextPiece, VllmClient
from protos.errors import (
    ContextTooLong,
    EngineUnavailable,
    ForebayError,
    InternalFault,
    InvalidArgument,
    Overloaded,
)
from protos.values import ChatMessage, FinishReason, Role, SamplingParams
from tests.fakes.openai_server import FakeOpenAIServer
from tests.fakes.waiting import eventually

PROMPT = (72, 105)


async def run(client: VllmClient, sampling: SamplingParams | None = None) -> list[TextPiece | StreamEnd]:
    stream = client.stream(PROMPT, sampling or SamplingParams(), field="messages", token_text=chr)
    return [event async for event in stream]


async def test_a_stream_is_its_pieces_and_one_end(client: VllmClient) -> None:
    *pieces, end = await run(client)
    assert "".join(p.text for p in pieces if isinstance(p, TextPiece)) == "Hello there."
    assert end == StreamEnd(finish_reason=FinishReason.STOP, prompt_tokens=2, completion_tokens=3)


async def test_every_sampling_field_is_said_so_that_the_models_own_defaults_never_count(
    client: VllmClient, engine: FakeOpenAIServer
) -> None:
    await run(client)
    (body,) = engine.bodies("/v1/completions")
    assert body["prompt"] == list(PROMPT)
    expected = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert {key: body[key] for key in expected} == expected
    assert "seed" not in body


async def test_a_seed_of_64_bits_fits_the_engines_signed_one(
    client: VllmClient, engine: FakeOpenAIServer
) -> None:
    await run(client, SamplingParams(temperature=1.0, seed=2**64 - 1))
    assert engine.bodies("/v1/completions")[0]["seed"] == 2**63 - 1


async def test_logprobs_come_by_token_id_best_first_and_no_more_than_asked(client: VllmClient) -> None:
    first = (await run(client, SamplingParams(logprobs=2)))[0]
    assert isinstance(first, TextPiece)
    (token,) = first.logprobs
    assert (token.token_id, token.token, token.logprob) == (72, "H", -0.5)
    assert [(t.token_id, t.logprob) for t in token.top] == [(72, -0.5), (73, -1.5)]


async def test_no_alternatives_are_reported_when_none_are_asked_for(client: VllmClient) -> None:
    first = (await run(client, SamplingParams(logprobs=0)))[0]
    assert isinstance(first, TextPiece)
    assert first.logprobs[0].top == ()


async def test_max_tokens_ends_with_length(client: VllmClient) -> None:
    end = (await run(client, SamplingParams(max_tokens=2)))[-1]
    assert end == StreamEnd(finish_reason=FinishReason.LENGTH, prompt_tokens=2, completion_tokens=2)


async def test_a_connection_that_breaks_off_is_an_error_and_not_a_short_answer(
    client: VllmClient, engine: FakeOpenAIServer
) -> None:
    engine.script.stop_after = 2
    with pytest.raises(EngineUnavailable):
        await run(client)


async def test_an_error_event_in_mid_stream_is_an_error(client: VllmClient, engine: FakeOpenAIServer) -> None:
    engine.script.error_after = 1
    with pytest.raises(EngineUnavailable, match="mid-answer"):
        await run(client)


async def test_an_end_without_a_finish_reason_is_an_error(
    client: VllmClient, engine: FakeOpenAIServer
) -> None:
    engine.script.finish_reason = None
    with pytest.raises(EngineUnavailable, match="without saying why"):
        await run(client)


async def test_an_aborted_text_is_not_passed_off_as_finished(
    client: VllmClient, engine: FakeOpenAIServer
) -> None:
    engine.script.finish_reason = "abort"
    with pytest.raises(InternalFault):
        await run(client)


async def test_leaving_a_stream_drops_the_work_in_the_engine(
    client: VllmClient, engine: FakeOpenAIServer
) -> None:
    engine.script.hold_after = 1
    stream = client.stream(PROMPT, SamplingParams(), field="messages", token_text=chr)
    async with aclosing(stream) as events:
        await anext(events)
        assert engine.running == 1
    await eventually(lambda: engine.running == 0)
    assert engine.aborted == 1


async def test_cancelling_the_reader_drops_the_work_in_the_engine(
    client: VllmClient, engine: FakeOpenAIServer
) -> None:
    engine.script.hold_after = 1
    reader = asyncio.create_task(run(client))
    await engine.holding.wait()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await eventually(lambda: engine.running == 0)


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        ((400, "input_tokens", "too long"), ContextTooLong),
        ((400, "max_tokens", "too many"), ContextTooLong),
        ((400, None, "Token id 9 is out of vocabulary"), InvalidArgument),
        ((404, "model", "no such model"), EngineUnavailable),
        ((401, None, "no key"), EngineUnavailable),
        ((429, None, "slow down"), Overloaded),
        ((503, None, "starting"), Overloaded),
        ((500, None, "boom"), EngineUnavailable),
    ],
)
async def test_each_refusal_has_its_error(
    client: VllmClient,
    engine: FakeOpenAIServer,
    refusal: tuple[int, str | None, str],
    expected: type[ForebayError],
) -> None:
    engine.script.refuse = refusal
    with pytest.raises(expected) as caught:
        await run(client)
    assert type(caught.value) is expected
    if isinstance(caught.value, InvalidArgument):
        assert caught.value.field == "messages"


async def test_an_engine_that_is_not_there_is_unavailable_and_unhealthy(socket_dir: Path) -> None:
    client = VllmClient.connect(
        f"unix://{socket_dir / 'none'}", model="m", max_connections=2, connect_timeout_s=1.0
    )
    assert not await client.healthy(1.0)
    with pytest.raises(EngineUnavailable):
        await run(client)
    await client.aclose()


async def test_health_is_what_the_engine_says(client: VllmClient, engine: FakeOpenAIServer) -> None:
    assert await client.healthy(1.0)
    engine.script.healthy = False
    assert not await client.healthy(1.0)


async def test_the_context_is_the_served_models(client: VllmClient, engine: FakeOpenAIServer) -> None:
    assert await client.context_tokens() == 256
    engine.model = "another@3"
    with pytest.raises(EngineUnavailable, match="does not serve"):
        await client.context_tokens()


async def test_a_conversation_is_rendered_by_the_engine(client: VllmClient, engine: FakeOpenAIServer) -> None:
    messages = [ChatMessage(role=Role.SYSTEM, content="Be"), ChatMessage(role=Role.USER, content="Hi")]
    assert await client.chat_tokens(messages) == tuple(b"BeHi")
    (body,) = engine.bodies("/tokenize")
    assert body["messages"] == [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}]
    assert body["add_generation_prompt"] is True


async def test_likelihoods_sum_the_continuation_only_and_match_prompts_whatever_the_order(
    client: VllmClient,
) -> None:
    scores = await client.log_likelihoods([(1, 2, 50, 60), (1, 2, 70)], [2, 2], field="text")
    assert scores == pytest.approx([-1.1, -0.7])


async def test_an_engine_that_does_not_score_is_found_out(
    client: VllmClient, engine: FakeOpenAIServer
) -> None:
    engine.script.score_none = True
    with pytest.raises(InternalFault, match="did not score"):
        await client.log_likelihoods([(1, 2, 3)], [2], field="text")
