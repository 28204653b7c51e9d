"""Every kind of variant through the same door: another quantization, and the torch engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos.forebay.v1 import common_pb2, inference_pb2
from tests.fakes.asking import EDGE_ONLY, ask, edge_node, question

pytestmark = pytest.mark.model


@pytest.mark.parametrize("variant", ["int8", "nf4"])
async def test_other_variants_serve_through_the_same_door(release_store: Path, variant: str) -> None:
    async with edge_node(release_store, variant=variant) as (_, stub):
        request = question("How do I reset my password?", 8, tier=EDGE_ONLY)
        outcome = await ask(stub, request, timeout_s=120)
        assert outcome.final is not None, outcome.error
        assert outcome.text == outcome.final.text != ""
        assert outcome.final.decision.edge_variant == variant
        reply = await stub.Classify(
            inference_pb2.ClassifyRequest(
                model="support-bot",
                text="My card was stolen yesterday.",
                labels=["lost or stolen card", "exchange rate", "top up failed"],
                policy=common_pb2.RoutingPolicy(tier=EDGE_ONLY),
            ),
            timeout=120,
        )
        assert reply.label == "lost or stolen card"
