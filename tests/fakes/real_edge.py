"""A real edge node on a real model, for tests: not a fake itself, only set up small."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from edge.serve import EdgeServer
from edge.settings import CloudSettings, EdgeSettings, EngineSettings, ReleaseSettings, ServerSettings
from protos.channel import channel_options
from protos.forebay.v1 import common_pb2, inference_pb2, inference_pb2_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class RealEdge:
    """A running node and a channel to it."""

    server: EdgeServer
    channel: grpc.aio.Channel
    stub: inference_pb2_grpc.InferenceServiceAsyncStub


@asynccontextmanager
async def real_edge(
    store: Path, *, variant: str = "int4", cloud_address: str = "", max_waiting: int = 32
) -> AsyncIterator[RealEdge]:
    settings = EdgeSettings(
        server=ServerSettings(listen="127.0.0.1:0"),
        release=ReleaseSettings(store=store, variant=variant),
        engine=EngineSettings(context_tokens=1024, max_waiting=max_waiting),
        cloud=CloudSettings(address=cloud_address, attempts=1),
    )
    server = EdgeServer(settings)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address, channel_options(2**20)) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            yield RealEdge(server=server, channel=channel, stub=stub)
    finally:
        await server.stop(0.0)


def ask(
    text: str,
    *,
    tier: str = "AUTO",
    max_tokens: int = 32,
    min_confidence: float | None = None,
    **policy: bool,
) -> inference_pb2.GenerateRequest:
    """A request to support-bot."""
    request = inference_pb2.GenerateRequest(
        model="support-bot",
        messages=[common_pb2.ChatMessage(role=common_pb2.ROLE_USER, content=text)],
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens),
        policy=common_pb2.RoutingPolicy(tier=common_pb2.TierPolicy.Value(f"TIER_POLICY_{tier}"), **policy),
    )
    if min_confidence is not None:
        request.policy.min_confidence = min_confidence
    return request


async def stream(
    edge: RealEdge, request: inference_pb2.GenerateRequest, *, timeout_s: float
) -> tuple[str, inference_pb2.GenerateResponse]:
    """The deltas joined, and the last message."""
    shown = ""
    call = edge.stub.StreamGenerate(inference_pb2.StreamGenerateRequest(request=request), timeout=timeout_s)
    try:
        async for event in call:
            shown += event.delta.text
            if event.HasField("final"):
                return shown, event.final
    finally:
        call.cancel()
    raise AssertionError("a stream ended without its last message")
