"""A real grpc.aio server behind the real border, whose one servicer does what the test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from protos.auth import Authenticator, AuthSettings
from protos.channel import listen, server_options
from protos.forebay.v1 import inference_pb2, inference_pb2_grpc
from protos.health import HealthServicer, add_health, enable_reflection
from protos.interceptors import BorderInterceptor
from protos.limits import DEFAULT_DEADLINE_S
from protos.tls import TlsSettings

SERVICE = "forebay.v1.InferenceService"
Context = grpc.aio.ServicerContext[Any, Any]
OnGenerate = Callable[[inference_pb2.GenerateRequest, Context], Awaitable[inference_pb2.GenerateResponse]]
OnStream = Callable[
    [inference_pb2.StreamGenerateRequest, Context], AsyncIterator[inference_pb2.StreamGenerateResponse]
]


async def echo(request: inference_pb2.GenerateRequest, context: Context) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(request_id=request.request_id, text=request.prompt)


class ScriptedInference(inference_pb2_grpc.InferenceServiceServicer):
    """`Generate` and `StreamGenerate` run the test's functions; the rest is unimplemented."""

    def __init__(self, on_generate: OnGenerate = echo, on_stream: OnStream | None = None) -> None:
        self.on_generate = on_generate
        self.on_stream = on_stream

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        return await self.on_generate(request, context)

    async def StreamGenerate(  # noqa: N802
        self, request: inference_pb2.StreamGenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.StreamGenerateResponse]:
        assert self.on_stream is not None
        async for response in self.on_stream(request, context):
            yield response


@asynccontextmanager
async def serving(
    servicer: ScriptedInference | None = None,
    *,
    tls: TlsSettings | None = None,
    auth: AuthSettings | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    default_deadline_s: float = DEFAULT_DEADLINE_S,
    max_message_bytes: int | None = None,
) -> AsyncIterator[tuple[str, HealthServicer]]:
    """Serve on loopback; gives the address and the health servicer."""
    authenticator = Authenticator(auth or AuthSettings(), clock=clock)
    border = BorderInterceptor(authenticator, default_deadline_s=default_deadline_s)
    options = server_options() if max_message_bytes is None else server_options(max_message_bytes)
    server = grpc.aio.server(interceptors=[border], options=options)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer or ScriptedInference(), server)
    health = add_health(server, [SERVICE])
    enable_reflection(server, [SERVICE])
    address = listen(server, "localhost:0" if tls else "127.0.0.1:0", tls or TlsSettings())
    await server.start()
    try:
        yield address, health
    finally:
        await server.stop(None)
