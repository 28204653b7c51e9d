"""Both tiers on real models: SmolLM2 at int4 on the edge, vLLM at tensor parallel 2 behind it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from protos.forebay.v1 import common_pb2
from tests.fakes.asking import AUTO, CLOUD_ONLY, COUNTING, EDGE_ONLY, Outcome, ask, edge_node, question
from tests.fakes.cloud_process import CloudProcess
from tests.fakes.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RELEASE = common_pb2.ReleaseRef(line="support-bot", version=1)
SERVICE = "forebay.v1.InferenceService"
FRANCE = "What is the capital of France? One short sentence."
REQUESTS = 200
STREAMS = 32
# Generous: other work may hold the cores.
CALL_S = 240.0


async def test_each_tier_answers_when_asked_for(real_cloud: CloudProcess, release_store: Path) -> None:
    async with edge_node(release_store, cloud=real_cloud.address) as (_, stub):
        edge = await ask(stub, question(FRANCE, 16, tier=EDGE_ONLY), timeout_s=CALL_S)
        cloud = await ask(stub, question(FRANCE, 16, tier=CLOUD_ONLY), timeout_s=CALL_S)
    for outcome, tier in ((edge, common_pb2.TIER_EDGE), (cloud, common_pb2.TIER_CLOUD)):
        assert outcome.final is not None, outcome.error
        assert outcome.final.text == outcome.text
        assert "Paris" in outcome.text
        assert outcome.final.decision.tier == tier
        assert outcome.final.decision.reason == common_pb2.REASON_PINNED
        assert not outcome.final.decision.degraded
    assert edge.final is not None
    assert edge.final.decision.edge_release == RELEASE
    assert edge.final.decision.edge_variant == "int4"
    assert edge.final.usage.cloud_tokens == 0
    assert cloud.final is not None
    assert cloud.final.decision.cloud_release == RELEASE
    assert cloud.final.usage.cloud_tokens > 0
    assert cloud.final.usage.edge_tokens == 0


async def test_an_unsure_edge_forwards_and_says_why(real_cloud: CloudProcess, release_store: Path) -> None:
    async with edge_node(release_store, cloud=real_cloud.address) as (_, stub):
        outcome = await ask(stub, question(FRANCE, 24, tier=AUTO, min_confidence=1.0), timeout_s=CALL_S)
    assert outcome.final is not None, outcome.error
    decision = outcome.final.decision
    assert decision.tier == common_pb2.TIER_CLOUD
    assert decision.reason in (common_pb2.REASON_LOW_CONFIDENCE, common_pb2.REASON_EARLY_EXIT)
    assert decision.threshold == 1.0
    assert decision.confidence < 1.0
    assert (decision.edge_release, decision.cloud_release) == (RELEASE, RELEASE)
    assert decision.explanation
    assert outcome.final.text == outcome.text


async def test_a_client_that_knows_only_the_address_lists_and_calls(
    real_cloud: CloudProcess, release_store: Path
) -> None:
    async with edge_node(release_store, cloud=real_cloud.address) as (server, _):
        services, answer = await asyncio.to_thread(_by_reflection, server.address)
    assert SERVICE in services
    assert "Paris" in answer


def _by_reflection(address: str) -> tuple[list[str], str]:
    """The services, and what Generate answers; nothing of our generated code is used."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = list(database.get_services())
        pool = descriptor_pool.DescriptorPool(database)
        method: Any = pool.FindServiceByName(SERVICE).FindMethodByName("Generate")
        request: Any = message_factory.GetMessageClass(method.input_type)()
        request.model = "support-bot"
        request.messages.add(role=2, content=FRANCE)
        request.sampling.max_tokens = 16
        request.policy.tier = 2
        call: Any = channel.unary_unary(
            f"/{SERVICE}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        return services, call(request, timeout=CALL_S).text


async def test_every_request_over_both_tiers_ends_once(real_cloud: CloudProcess, release_store: Path) -> None:
    rng = random.Random(11)
    places = asyncio.Semaphore(STREAMS)
    async with edge_node(release_store, cloud=real_cloud.address) as (server, stub):

        async def one(number: int) -> Outcome:
            tier = CLOUD_ONLY if number % 20 == 0 else rng.choice((EDGE_ONLY, EDGE_ONLY, AUTO))
            request = question(
                f"Question {number}: tell me about {'shipping and returns ' * rng.randint(1, 12)}",
                rng.randint(4, 24),
                tier=tier,
            )
            timeout_s = rng.choice((CALL_S, CALL_S, 0.3))
            cancel_after_s = rng.choice((None, None, None, rng.uniform(0.0, 1.0)))
            async with places:
                return await ask(stub, request, timeout_s=timeout_s, cancel_after_s=cancel_after_s)

        outcomes = await asyncio.gather(*(one(number) for number in range(REQUESTS)))
        await eventually(lambda: server.engine.stats().kv_reserved_tokens == 0, timeout_s=10)
        stats = server.engine.stats()
    assert (stats.running, stats.waiting, stats.restarts) == (0, 0, 0)
    for outcome in outcomes:
        assert (outcome.final is not None) + (outcome.error is not None) + outcome.cancelled == 1
        if outcome.error is not None and outcome.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
            assert outcome.has_error_info, outcome
        if outcome.final is not None:
            assert outcome.final.text == outcome.text
    tiers = {outcome.final.decision.tier for outcome in outcomes if outcome.final is not None}
    assert tiers == {common_pb2.TIER_EDGE, common_pb2.TIER_CLOUD}


async def test_requests_of_a_killed_edge_engine_go_to_the_cloud(
    real_cloud: CloudProcess, release_store: Path
) -> None:
    async with edge_node(release_store, cloud=real_cloud.address) as (server, stub):
        asked = [
            asyncio.create_task(ask(stub, question(COUNTING, 400, tier=tier, prompt=True), timeout_s=CALL_S))
            for tier in (EDGE_ONLY, AUTO, AUTO, EDGE_ONLY)
        ]
        await eventually(lambda: server.engine.stats().running == len(asked))
        assert server.engine.pid is not None
        psutil.Process(server.engine.pid).kill()
        pinned, first, second, other = await asyncio.gather(*asked)
        for outcome in (pinned, other):
            assert outcome.code is grpc.StatusCode.UNAVAILABLE
            assert outcome.has_error_info
        for outcome in (first, second):
            if outcome.final is None:
                assert outcome.has_error_info
                continue
            assert outcome.final.decision.tier == common_pb2.TIER_CLOUD
            assert outcome.final.decision.reason == common_pb2.REASON_EDGE_FAILED
            assert outcome.final.text == outcome.text
        assert any(outcome.final is not None for outcome in (first, second))
        await server.engine.wait_ready(60.0)
        healed = await ask(stub, question(FRANCE, 16, tier=EDGE_ONLY), timeout_s=CALL_S)
    assert healed.final is not None
