"""A bot's request on real models: SmolLM2 at int4 at the edge, vLLM at tensor parallel 2 behind it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from protos.forebay.v1 import common_pb2, inference_pb2
from tests.fakes.cloud_process import CloudProcess
from tests.fakes.real_edge import ask, real_edge, stream

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# Two ranks of vLLM and the edge share two cores here.
PATIENCE_S = 200.0


async def test_both_tiers_answer_and_say_so(release_store: Path, real_cloud: CloudProcess) -> None:
    async with real_edge(release_store, cloud_address=real_cloud.address) as edge:
        shown, kept = await stream(edge, ask("Say hello.", tier="EDGE_ONLY", max_tokens=16), timeout_s=60)
        assert shown == kept.text != ""
        assert kept.decision.tier == common_pb2.TIER_EDGE
        assert kept.decision.edge_variant == "int4"
        assert not kept.decision.HasField("cloud_release")

        request = ask("What is the capital of France?", tier="CLOUD_ONLY", max_tokens=16)
        shown, pinned = await stream(edge, request, timeout_s=PATIENCE_S)
        assert shown == pinned.text
        assert "Paris" in pinned.text
        assert pinned.decision.tier == common_pb2.TIER_CLOUD
        assert pinned.decision.cloud_release == pinned.decision.edge_release
        assert (pinned.usage.edge_tokens, pinned.usage.cloud_tokens > 0) == (0, True)

        request = ask("What is the capital of France?", max_tokens=16, min_confidence=1.0)
        reply = await edge.stub.Generate(request, timeout=PATIENCE_S)
        assert reply.decision.tier == common_pb2.TIER_CLOUD
        assert reply.decision.reason in (common_pb2.REASON_LOW_CONFIDENCE, common_pb2.REASON_EARLY_EXIT)
        assert not reply.decision.degraded
        assert "Paris" in reply.text


async def test_labels_are_forwarded_too(release_store: Path, real_cloud: CloudProcess) -> None:
    request = inference_pb2.ClassifyRequest(
        model="support-bot",
        text="My card was stolen yesterday.",
        labels=["lost or stolen card", "exchange rate"],
        policy=common_pb2.RoutingPolicy(tier=common_pb2.TIER_POLICY_CLOUD_ONLY),
    )
    async with real_edge(release_store, cloud_address=real_cloud.address) as edge:
        reply = await edge.stub.Classify(request, timeout=PATIENCE_S)
    assert reply.label == "lost or stolen card"
    assert reply.decision.tier == common_pb2.TIER_CLOUD


async def test_a_crowd_over_both_tiers_loses_nobody(release_store: Path, real_cloud: CloudProcess) -> None:
    async with real_edge(release_store, cloud_address=real_cloud.address) as edge:

        async def one(number: int) -> inference_pb2.GenerateResponse:
            tier = "CLOUD_ONLY" if number % 6 == 0 else "EDGE_ONLY"
            shown, final = await stream(
                edge, ask(f"Count from {number}.", tier=tier, max_tokens=8), timeout_s=PATIENCE_S
            )
            assert shown == final.text
            return final

        finals = await asyncio.gather(*(one(number) for number in range(24)))
    tiers = [final.decision.tier for final in finals]
    assert tiers.count(common_pb2.TIER_CLOUD) == 4
    assert not any(final.decision.degraded for final in finals)
