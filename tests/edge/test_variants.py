"""Every kind of variant through the same door: another quantization, and the torch engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos.forebay.v1 import common_pb2, inference_pb2
from tests.fakes.real_edge import ask, real_edge, stream

pytestmark = pytest.mark.model


@pytest.mark.parametrize("variant", ["int8", "nf4"])
async def test_other_variants_serve_through_the_same_door(release_store: Path, variant: str) -> None:
    async with real_edge(release_store, variant=variant) as edge:
        shown, final = await stream(
            edge, ask("How do I reset my password?", tier="EDGE_ONLY", max_tokens=8), timeout_s=120
        )
        assert shown == final.text != ""
        assert final.decision.edge_variant == variant
        reply = await edge.stub.Classify(
            inference_pb2.ClassifyRequest(
                model="support-bot",
                text="My card was stolen yesterday.",
                labels=["lost or stolen card", "exchange rate", "top up failed"],
                policy=common_pb2.RoutingPolicy(tier=common_pb2.TIER_POLICY_EDGE_ONLY),
            ),
            timeout=120,
        )
        assert reply.label == "lost or stolen card"
