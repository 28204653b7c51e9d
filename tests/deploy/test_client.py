"""The client streams, carries the key, and turns failures into our errors."""

from __future__ import annotations

import time

import pytest

from deploy import talk
from deploy.client import EdgeClient, chat_request
from deploy.demo import Prompt, ask_one
from protos.errors import Overloaded, UnavailableError
from protos.forebay.v1 import common_pb2
from tests.fakes.inference_server import scripted_edge


async def test_a_question_carries_model_tier_limit_and_key() -> None:
    async with (
        scripted_edge(lambda _r: ["Hel", "lo"]) as (address, edge),
        EdgeClient(address, api_key="fb_secret") as client,
    ):
        request = chat_request([("user", "Hi")], model="support-bot", tier="edge", max_tokens=7)
        events = [event async for event in client.stream(request, timeout_s=10)]
    assert [e.WhichOneof("event") for e in events] == ["delta", "delta", "final"]
    seen = edge.requests[0]
    assert (seen.model, seen.sampling.max_tokens) == ("support-bot", 7)
    assert seen.policy.tier == common_pb2.TIER_POLICY_EDGE_ONLY
    assert edge.metadata[0]["authorization"] == "Bearer fb_secret"


async def test_a_refusal_keeps_its_class_and_retry_hint() -> None:
    async with (
        scripted_edge(lambda _r: Overloaded("full", retry_after_s=2.5)) as (address, _),
        EdgeClient(address) as client,
    ):
        with pytest.raises(Overloaded) as caught:
            async for _event in client.stream(chat_request([("user", "x")], model="m"), timeout_s=10):
                pass
    assert caught.value.retry_after_s == pytest.approx(2.5)


async def test_nobody_listening_is_unavailable() -> None:
    async with EdgeClient("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError):
            async for _event in client.stream(chat_request([("user", "x")], model="m"), timeout_s=5):
                pass


async def test_the_demo_takes_tier_reason_and_confidence_from_the_final_message() -> None:
    heard: list[str] = []
    async with scripted_edge(lambda _r: ["a", "b"]) as (address, _), EdgeClient(address) as client:
        outcome = await ask_one(
            client,
            Prompt(text="q"),
            system="s",
            model="support-bot",
            clock=time.monotonic,
            on_text=heard.append,
        )
    assert heard == ["a", "b"]
    assert (outcome.tier, outcome.reason, outcome.confidence) == ("edge", "confident", 0.75)
    assert 0 < outcome.time_to_first_token_s <= outcome.total_s


async def test_the_demo_records_an_error_instead_of_raising_it() -> None:
    async with (
        scripted_edge(lambda _r: Overloaded("full", retry_after_s=1)) as (address, _),
        EdgeClient(address) as client,
    ):
        outcome = await ask_one(
            client, Prompt(text="q"), system="s", model="m", clock=time.monotonic, on_text=lambda _t: None
        )
    assert outcome.tier is None
    assert outcome.error == "OVERLOADED: full"


async def test_a_chat_sends_the_whole_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["Hello", "", "And now?", "/quit"])
    monkeypatch.setattr(talk, "_read_line", lambda: next(lines))
    async with (
        scripted_edge(lambda r: [f"answer {len(r.messages)}"]) as (address, edge),
        EdgeClient(address) as client,
    ):
        await talk.chat(client, model="support-bot", tier="auto", max_tokens=8, timeout_s=10)
    assert [m.content for m in edge.requests[1].messages] == ["Hello", "answer 1", "And now?"]
