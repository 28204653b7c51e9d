"""A small client of the edge's gRPC API, for `forebay ask`, `forebay chat` and the demo.

Every call has a deadline and is cancelled when its iterator is left. Failures are `ForebayError`s.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

import grpc

from protos.forebay.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from protos.metadata import AUTHORIZATION
from protos.status import from_rpc_error

TIERS = {
    "auto": common_pb2.TIER_POLICY_AUTO,
    "edge": common_pb2.TIER_POLICY_EDGE_ONLY,
    "cloud": common_pb2.TIER_POLICY_CLOUD_ONLY,
}


class EdgeClient:
    """One channel to an edge node. Use as an async context manager.

    Args:
        address: `host:port`.
        credentials: Of the channel; None is plaintext.
        api_key: Sent with every call when given.
    """

    def __init__(
        self, address: str, *, credentials: grpc.ChannelCredentials | None = None, api_key: str | None = None
    ) -> None:
        self._channel = (
            grpc.aio.insecure_channel(address)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials)
        )
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._metadata = None if api_key is None else ((AUTHORIZATION, f"Bearer {api_key}"),)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def stream(
        self, request: inference_pb2.GenerateRequest, *, timeout_s: float
    ) -> AsyncIterator[inference_pb2.StreamGenerateResponse]:
        """The events of one answer; the last one is `final`.

        Raises:
            ForebayError: As the server says, or the connection.
        """
        call = self._stub.StreamGenerate(
            inference_pb2.StreamGenerateRequest(request=request), timeout=timeout_s, metadata=self._metadata
        )
        try:
            async for event in call:
                yield event
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()


def chat_request(
    messages: Sequence[tuple[str, str]], *, model: str, tier: str = "auto", max_tokens: int = 256
) -> inference_pb2.GenerateRequest:
    """A request out of `(role, content)` pairs; roles are `system`, `user` and `assistant`."""
    return inference_pb2.GenerateRequest(
        model=model,
        messages=[
            common_pb2.ChatMessage(role=common_pb2.Role.Value(f"ROLE_{role.upper()}"), content=content)
            for role, content in messages
        ],
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens),
        policy=common_pb2.RoutingPolicy(tier=TIERS[tier]),
    )
