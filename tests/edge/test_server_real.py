"""The edge node on real SmolLM2 at int4, over a real wire: answers, loads, crashes, cancellations."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from pathlib import Path

import grpc
import psutil
import pytest

from edge.engine.protocol import EngineStats
from protos.errors import EngineUnavailable
from protos.forebay.v1 import common_pb2
from tests.fakes.asking import AUTO, COUNTING, EDGE_ONLY, Outcome, ask, edge_node, question
from tests.fakes.waiting import eventually

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

REQUESTS = 200
STREAMS = 32
MAY_GROW_BYTES = 100 * 2**20


async def test_a_stream_joins_to_the_final_text_and_names_the_release(release_store: Path) -> None:
    async with edge_node(release_store) as (_, stub):
        outcome = await ask(stub, question("What is the capital of France?", 32, tier=EDGE_ONLY))
    assert outcome.final is not None
    assert "Paris" in outcome.text
    assert outcome.final.text == outcome.text
    decision = outcome.final.decision
    assert (decision.tier, decision.reason) == (common_pb2.TIER_EDGE, common_pb2.REASON_PINNED)
    assert decision.edge_release == common_pb2.ReleaseRef(line="support-bot", version=1)
    assert decision.edge_variant == "int4"
    assert not decision.HasField("cloud_release")
    assert outcome.final.usage.cloud_tokens == 0


async def test_every_request_of_a_crowd_ends_once_and_nothing_is_left(release_store: Path) -> None:
    rng = random.Random(7)
    places = asyncio.Semaphore(STREAMS)
    async with edge_node(release_store) as (server, stub):

        async def one(max_tokens: int, timeout_s: float, cancel_after_s: float | None) -> Outcome:
            words = "shipping and returns " * rng.randint(1, 8)
            tier = rng.choice((EDGE_ONLY, EDGE_ONLY, AUTO))
            request = question(f"Tell me about {words}", max_tokens, tier=tier)
            async with places:
                return await ask(stub, request, timeout_s=timeout_s, cancel_after_s=cancel_after_s)

        # Memory is taken on first use: the warm-up fills every place.
        await asyncio.gather(*(one(24, 120.0, None) for _ in range(STREAMS)))
        assert server.engine.pid is not None
        worker = psutil.Process(server.engine.pid)
        before = worker.memory_info().rss
        plans = [
            (
                rng.randint(4, 24),
                rng.choice((120.0, 120.0, 0.3)),
                rng.choice((None, None, None, rng.uniform(0.0, 1.0))),
            )
            for _ in range(REQUESTS)
        ]
        outcomes = await asyncio.gather(*(one(*plan) for plan in plans))
        await eventually(lambda: _idle(server.engine.stats()), timeout_s=10)
        grown = worker.memory_info().rss - before
    assert len(outcomes) == REQUESTS
    for outcome in outcomes:
        ended = (outcome.final is not None, outcome.error is not None, outcome.cancelled)
        assert sum(ended) == 1
        if outcome.error is not None and outcome.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
            assert outcome.has_error_info, outcome
        if outcome.final is not None:
            assert outcome.final.text == outcome.text
    assert sum(outcome.final is not None for outcome in outcomes) > REQUESTS // 4
    assert any(outcome.cancelled for outcome in outcomes)
    assert grown < MAY_GROW_BYTES


async def test_a_killed_engine_is_a_typed_error_for_each_request_and_heals(release_store: Path) -> None:
    async with edge_node(release_store) as (server, stub):
        asked = [
            asyncio.create_task(ask(stub, question(COUNTING, 1000, tier=tier, prompt=True)))
            for tier in (EDGE_ONLY, AUTO) * 4
        ]
        await eventually(lambda: server.engine.stats().running == len(asked))
        pid = server.engine.pid
        assert pid is not None
        psutil.Process(pid).kill()
        for outcome in await asyncio.gather(*asked):
            assert isinstance(outcome.error, EngineUnavailable)
            assert outcome.code is grpc.StatusCode.UNAVAILABLE
            assert outcome.has_error_info
            assert outcome.retry_info
        await server.engine.wait_ready(60.0)
        assert server.engine.pid != pid
        assert server.engine.stats().restarts == 1
        healed = await ask(stub, question("What is the capital of France?", 16, tier=EDGE_ONLY))
    assert healed.final is not None
    assert "Paris" in healed.text


async def test_without_its_cloud_an_unsure_edge_answers_degraded(release_store: Path) -> None:
    request = question("What is the capital of France?", 24, tier=AUTO, min_confidence=1.0)
    async with edge_node(release_store, cloud=_dead_address()) as (_, stub):
        outcome = await ask(stub, request)
    assert outcome.final is not None
    decision = outcome.final.decision
    assert decision.degraded
    assert (decision.tier, decision.reason) == (common_pb2.TIER_EDGE, common_pb2.REASON_CLOUD_UNAVAILABLE)
    assert outcome.final.text == outcome.text
    assert "Paris" in outcome.text


async def test_without_its_cloud_a_caller_that_wants_no_degraded_answer_is_told_to_come_back(
    release_store: Path,
) -> None:
    request = question(
        "What is the capital of France?", 24, tier=AUTO, min_confidence=1.0, allow_degraded=False
    )
    async with edge_node(release_store, cloud=_dead_address()) as (_, stub):
        outcome = await ask(stub, request)
    assert outcome.code is grpc.StatusCode.UNAVAILABLE
    assert outcome.has_error_info
    assert outcome.retry_info


async def test_a_cancelled_stream_frees_its_memory_at_once(release_store: Path) -> None:
    async with edge_node(release_store) as (server, stub):
        whole = await ask(stub, question(COUNTING, 24, tier=EDGE_ONLY, prompt=True))
        assert whole.final is not None
        step_s = whole.final.timings.decode_s / max(1, whole.final.usage.edge_tokens - 1)
        call = stub.StreamGenerate(question(COUNTING, 1500, tier=EDGE_ONLY, prompt=True), timeout=120)
        await call.read()
        assert server.engine.stats().kv_reserved_tokens > 1500
        began = time.monotonic()
        call.cancel()
        await eventually(lambda: _idle(server.engine.stats()), timeout_s=10)
        took_s = time.monotonic() - began
    assert took_s < 0.1 + step_s, f"freed after {took_s:.3f} s, with steps of {step_s:.3f} s"


def _idle(stats: EngineStats) -> bool:
    return (stats.running, stats.waiting, stats.kv_reserved_tokens) == (0, 0, 0)


def _dead_address() -> str:
    """A port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"
