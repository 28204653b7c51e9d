"""The engine process with a real model in it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from edge.engine.process import EngineProcess
from edge.engine.protocol import EngineRequest, Finished, LabelRequest, Tokens
from edge.engine.spec import engine_spec
from edge.models import LoadedRelease, ReleaseStore
from edge.text.tokenizer import ChatTokenizer
from protos.errors import EngineUnavailable
from protos.labels import label_context, label_prior_context
from protos.values import ChatMessage, Role, SamplingParams
from tests.fakes.waiting import alive, eventually

pytestmark = pytest.mark.model

QUESTIONS = ("Where is my order?", "Name three colours.", "What is the capital of France?", "Say hello.")


@pytest.fixture(scope="module")
def release(release_store: Path) -> LoadedRelease:
    return ReleaseStore(release_store).resolve("support-bot@1")


@pytest.fixture(scope="module")
def tokenizer(release: LoadedRelease) -> ChatTokenizer:
    return ChatTokenizer.load(release.tokenizer_dir)


@pytest.fixture
async def engine(release: LoadedRelease) -> AsyncIterator[EngineProcess]:
    engine = await EngineProcess.start(engine_spec(release, "int4", threads=2))
    yield engine
    await engine.close()


def ask(tokenizer: ChatTokenizer, question: str, *, tokens: int = 24) -> EngineRequest:
    return EngineRequest(
        request_id=question,
        prompt_tokens=tokenizer.encode_chat([ChatMessage(role=Role.USER, content=question)]),
        sampling=SamplingParams(max_tokens=tokens, seed=0),
    )


async def answer(engine: EngineProcess, request: EngineRequest) -> tuple[list[int], str]:
    ids, text = [], ""
    async for event in engine.generate(request):
        if isinstance(event, Tokens):
            ids += [stat.token_id for stat in event.stats]
            text += event.text
    return ids, text


async def test_answers_are_the_same_alone_and_together(
    engine: EngineProcess, tokenizer: ChatTokenizer
) -> None:
    alone = [await answer(engine, ask(tokenizer, question)) for question in QUESTIONS]
    together = await asyncio.gather(*(answer(engine, ask(tokenizer, question)) for question in QUESTIONS))
    assert "Paris" in alone[2][1]
    for ids, text in alone:
        assert text == tokenizer.decode(ids)
    # int4 rounds differently for other batch sizes: most answers are equal to the letter, and all begin so.
    assert sum(a == b for a, b in zip(alone, together, strict=True)) >= 2
    assert [ids[0] for ids, _ in alone] == [ids[0] for ids, _ in together]


async def test_a_label_is_recognized(engine: EngineProcess, tokenizer: ChatTokenizer) -> None:
    labels = ("delivery of a parcel", "password and login", "refund of a payment")
    context = label_context("I cannot log in, the site says that my password is wrong.", "Topic")
    prior = label_prior_context("Topic")
    result = await engine.score_labels(
        LabelRequest(
            request_id="l",
            context_tokens=tokenizer.encode(context),
            prior_tokens=tokenizer.encode(prior),
            labels=labels,
            label_tokens=tuple(tokenizer.encode_label(context, label) for label in labels),
        )
    )
    assert max(result.scores, key=lambda score: score.probability).label == "password and login"


async def test_leaving_frees_the_place_within_100_ms(engine: EngineProcess, tokenizer: ChatTokenizer) -> None:
    took = []
    for _ in range(4):
        requests = [ask(tokenizer, f"{n}: tell a long story", tokens=300) for n in range(4)]
        others = [asyncio.create_task(answer(engine, request)) for request in requests[1:]]
        async with aclosing(engine.generate(requests[0])) as events:
            async for event in events:
                if isinstance(event, Tokens) and engine.stats().running == 4:
                    break
            began = time.monotonic()
        await eventually(lambda: engine.stats().running == 3)
        took.append(time.monotonic() - began)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await eventually(lambda: engine.stats().kv_reserved_tokens == 0)
    assert min(took) < 0.1


async def test_a_killed_engine_heals_and_answers_as_before(
    engine: EngineProcess, tokenizer: ChatTokenizer
) -> None:
    before = await answer(engine, ask(tokenizer, QUESTIONS[2]))
    request = ask(tokenizer, "Tell a long story.", tokens=400)
    running = [asyncio.create_task(answer(engine, request)) for _ in range(4)]
    await eventually(lambda: engine.stats().running == 4)
    pid = engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    outcomes = await asyncio.gather(*running, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [EngineUnavailable] * 4
    await engine.wait_ready(60)
    assert await answer(engine, ask(tokenizer, QUESTIONS[2])) == before


async def test_closing_gives_all_memory_back(release: LoadedRelease, tokenizer: ChatTokenizer) -> None:
    engine = await EngineProcess.start(engine_spec(release, "int4", threads=2))
    pid = engine.pid
    assert pid is not None
    events = [event async for event in engine.generate(ask(tokenizer, "Hello"))]
    assert isinstance(events[-1], Finished)
    await engine.close()
    assert not alive(pid)
