"""A real grpc.aio server of CloudInferenceService whose methods do what the test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from protos.channel import server_options
from protos.forebay.v1 import cloud_pb2, cloud_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
OnStream = Callable[
    [cloud_pb2.CloudStreamGenerateRequest, Context], AsyncIterator[cloud_pb2.CloudStreamGenerateResponse]
]
OnClassify = Callable[[cloud_pb2.CloudClassifyRequest, Context], Awaitable[cloud_pb2.CloudClassifyResponse]]


def delta(text: str) -> cloud_pb2.CloudStreamGenerateResponse:
    """One token."""
    return cloud_pb2.CloudStreamGenerateResponse(delta=cloud_pb2.CloudTextDelta(text=text, tokens=1))


def final(
    request: cloud_pb2.CloudStreamGenerateRequest, tokens: int
) -> cloud_pb2.CloudStreamGenerateResponse:
    """The end of an answer of this many tokens, which stopped by itself."""
    return cloud_pb2.CloudStreamGenerateResponse(
        final=cloud_pb2.CloudFinal(release=request.release, finish_reason=1, completion_tokens=tokens)  # type: ignore[arg-type]
    )


class CloudService(cloud_pb2_grpc.CloudInferenceServiceServicer):
    """Keeps what it was asked, and how many of its streams are still at work."""

    def __init__(self) -> None:
        self.on_stream: OnStream | None = None
        self.on_classify: OnClassify | None = None
        self.asked: list[cloud_pb2.CloudStreamGenerateRequest] = []
        self.classified: list[cloud_pb2.CloudClassifyRequest] = []
        self.remaining_s: list[float] = []
        self.live = 0
        self.address = ""

    async def StreamGenerate(  # noqa: N802
        self, request: cloud_pb2.CloudStreamGenerateRequest, context: Context
    ) -> AsyncIterator[cloud_pb2.CloudStreamGenerateResponse]:
        assert self.on_stream is not None
        self.asked.append(request)
        self.remaining_s.append(context.time_remaining())
        self.live += 1
        try:
            async for message in self.on_stream(request, context):
                yield message
        finally:
            self.live -= 1

    async def Classify(  # noqa: N802
        self, request: cloud_pb2.CloudClassifyRequest, context: Context
    ) -> cloud_pb2.CloudClassifyResponse:
        assert self.on_classify is not None
        self.classified.append(request)
        return await self.on_classify(request, context)


@asynccontextmanager
async def cloud_service() -> AsyncIterator[tuple[CloudService, grpc.aio.Server]]:
    """A running service on a free port of loopback."""
    server = grpc.aio.server(options=server_options())
    service = CloudService()
    cloud_pb2_grpc.add_CloudInferenceServiceServicer_to_server(service, server)
    service.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield service, server
    finally:
        await server.stop(0)
