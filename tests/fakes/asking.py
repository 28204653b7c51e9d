"""A client of the edge node, for tests: requests in short, and how each of them ended.

Not a fake itself: it speaks gRPC over a real channel.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from edge.serve import EdgeServer
from edge.settings import CloudSettings, EdgeSettings, EngineSettings, ReleaseSettings, ServerSettings
from protos.errors import ForebayError
from protos.forebay.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from protos.status import from_rpc_error

AUTO = common_pb2.TIER_POLICY_AUTO
EDGE_ONLY = common_pb2.TIER_POLICY_EDGE_ONLY
CLOUD_ONLY = common_pb2.TIER_POLICY_CLOUD_ONLY
# A chat answer may end early; counting goes on.
COUNTING = ", ".join(str(n) for n in range(1, 13)) + ","


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a stream ended. Exactly one of `final`, `error` and `cancelled` says so.

    Attributes:
        text: The deltas joined.
        has_error_info: Whether the server's error had its details.
        retry_info: Whether it said when to come back.
    """

    text: str
    final: inference_pb2.GenerateResponse | None = None
    error: ForebayError | None = None
    code: grpc.StatusCode | None = None
    has_error_info: bool = False
    retry_info: bool = False
    cancelled: bool = False


def question(
    content: str, max_tokens: int, *, tier: Any = AUTO, prompt: bool = False, **policy: Any
) -> inference_pb2.StreamGenerateRequest:
    """A greedy request, as chat or (`prompt`) as plain text to go on with."""
    message = common_pb2.ChatMessage(role=common_pb2.ROLE_USER, content=content)
    return inference_pb2.StreamGenerateRequest(
        request=inference_pb2.GenerateRequest(
            model="support-bot",
            messages=[] if prompt else [message],
            prompt=content if prompt else "",
            sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0),
            policy=common_pb2.RoutingPolicy(tier=tier, **policy),
        )
    )


async def ask(
    stub: Any,
    request: inference_pb2.StreamGenerateRequest,
    *,
    timeout_s: float = 120.0,
    cancel_after_s: float | None = None,
) -> Outcome:
    """Stream to the end. Raises AssertionError when anything follows the final event."""
    call = stub.StreamGenerate(request, timeout=timeout_s)
    handle = None
    if cancel_after_s is not None:
        handle = asyncio.get_running_loop().call_later(cancel_after_s, call.cancel)
    text = ""
    finals: list[inference_pb2.GenerateResponse] = []
    try:
        async for event in call:
            assert not finals, "an event follows the final one"
            if event.HasField("delta"):
                text += event.delta.text
            elif event.HasField("final"):
                finals.append(event.final)
    except asyncio.CancelledError:
        if not call.cancelled():
            raise
        return Outcome(text=text, cancelled=True)
    except grpc.aio.AioRpcError as error:
        assert not finals, "an error follows the answer"
        names = _details(error)
        return Outcome(
            text=text,
            error=from_rpc_error(error),
            code=error.code(),
            has_error_info="ErrorInfo" in names,
            retry_info="RetryInfo" in names,
        )
    finally:
        if handle is not None:
            handle.cancel()
        call.cancel()
    assert len(finals) == 1, "the stream ended without an answer"
    return Outcome(text=text, final=finals[0])


def _details(error: grpc.aio.AioRpcError) -> set[str]:
    status = rpc_status.from_call(error)
    known = (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo)
    details = status.details if status is not None else ()
    return {kind.DESCRIPTOR.name for detail in details for kind in known if detail.Is(kind.DESCRIPTOR)}


@asynccontextmanager
async def edge_node(
    store: Path, *, variant: str = "int4", cloud: str = "", engine: EngineSettings | None = None
) -> AsyncIterator[tuple[EdgeServer, Any]]:
    """An edge node on one variant of the store's model, and a stub connected to it."""
    server = EdgeServer(
        EdgeSettings(
            server=ServerSettings(listen="127.0.0.1:0"),
            release=ReleaseSettings(store=store, variant=variant),
            engine=engine or EngineSettings(),
            cloud=CloudSettings(address=cloud),
        )
    )
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield server, inference_pb2_grpc.InferenceServiceStub(channel)
    finally:
        await server.stop(grace_s=0.0)
