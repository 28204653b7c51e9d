"""An edge node that answers from a script, on a real gRPC port."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from protos.errors import ForebayError
from protos.forebay.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from protos.status import abort_with

Script = Callable[[inference_pb2.GenerateRequest], list[str] | ForebayError]


class _Servicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, script: Script) -> None:
        self._script = script
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.metadata: list[dict[str, Any]] = []

    async def StreamGenerate(  # noqa: N802 - gRPC's name
        self, request: inference_pb2.StreamGenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.StreamGenerateResponse]:
        self.requests.append(request.request)
        self.metadata.append(dict(context.invocation_metadata()))
        pieces = self._script(request.request)
        if isinstance(pieces, ForebayError):
            await abort_with(context, pieces)
        assert isinstance(pieces, list)
        for piece in pieces:
            yield inference_pb2.StreamGenerateResponse(delta=inference_pb2.TextDelta(text=piece))
        decision = common_pb2.Decision(
            tier=common_pb2.TIER_EDGE, reason=common_pb2.REASON_CONFIDENT, confidence=0.75
        )
        yield inference_pb2.StreamGenerateResponse(
            final=inference_pb2.GenerateResponse(
                model="support-bot@1", text="".join(pieces), decision=decision
            )
        )


@contextlib.asynccontextmanager
async def scripted_edge(script: Script) -> AsyncIterator[tuple[str, _Servicer]]:
    """The address, and the servicer that remembers what it was asked."""
    server = grpc.aio.server()
    servicer = _Servicer(script)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        await server.stop(0)
