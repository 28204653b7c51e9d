"""CloudInferenceService: messages to values and back. Everything else is `cloud.dataplane`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc.aio

from cloud.dataplane import CloudEnd, CloudRequest, Dataplane
from protos import limits, metadata
from protos.convert import (
    chat_messages_from_pb,
    check_classify_text,
    check_input,
    check_int_range,
    check_label_kind,
    check_labels,
    check_request_id,
    check_text_bytes,
    finish_reason_to_pb,
    label_score_to_pb,
    release_from_pb,
    release_to_pb,
    sampling_from_pb,
    token_logprob_to_pb,
)
from protos.errors import InvalidArgument
from protos.forebay.v1 import cloud_pb2, cloud_pb2_grpc
from protos.interceptors import remaining_s

SERVICE_NAME: str = cloud_pb2.DESCRIPTOR.services_by_name["CloudInferenceService"].full_name

_Context = grpc.aio.ServicerContext[Any, Any]


class CloudServicer(cloud_pb2_grpc.CloudInferenceServiceServicer):
    """Errors leave as `ForebayError`; the interceptor gives them their status.

    Args:
        remaining: Seconds that a call has left.
    """

    def __init__(self, dataplane: Dataplane, *, remaining: Callable[[_Context], float] = remaining_s) -> None:
        self._dataplane = dataplane
        self._remaining = remaining

    async def StreamGenerate(  # noqa: N802
        self, request: cloud_pb2.CloudStreamGenerateRequest, context: _Context
    ) -> AsyncIterator[cloud_pb2.CloudStreamGenerateResponse]:
        timeout_s = self._remaining(context)
        self._say_release(context)
        generation = self._dataplane.generate(request_from_pb(request), timeout_s=timeout_s)
        async with aclosing(generation) as events:
            async for event in events:
                if isinstance(event, CloudEnd):
                    yield cloud_pb2.CloudStreamGenerateResponse(final=self._final(event))
                elif event.text or event.tokens:
                    delta = cloud_pb2.CloudTextDelta(text=event.text, tokens=event.tokens)
                    delta.logprobs.extend(token_logprob_to_pb(token) for token in event.logprobs)
                    yield cloud_pb2.CloudStreamGenerateResponse(delta=delta)

    async def Classify(  # noqa: N802
        self, request: cloud_pb2.CloudClassifyRequest, context: _Context
    ) -> cloud_pb2.CloudClassifyResponse:
        check_request_id(request.request_id)
        self._say_release(context)
        result = await self._dataplane.classify(
            release_from_pb(request.release),
            text=check_classify_text(request.text),
            labels=check_labels(request.labels),
            kind=check_label_kind(request.label_kind),
            timeout_s=self._remaining(context),
        )
        return cloud_pb2.CloudClassifyResponse(
            release=release_to_pb(self._dataplane.release),
            scores=[label_score_to_pb(score) for score in result.scores],
            prompt_tokens=result.prompt_tokens,
            queue_s=result.queue_s,
            service_s=result.service_s,
        )

    async def GetStatus(  # noqa: N802
        self, request: cloud_pb2.GetStatusRequest, context: _Context
    ) -> cloud_pb2.GetStatusResponse:
        status = self._dataplane.status()
        return cloud_pb2.GetStatusResponse(
            ready_releases=[] if status.ready is None else [release_to_pb(status.ready)],
            running=status.running,
            queued=status.queued,
            queue_capacity=status.queue_capacity,
        )

    def _say_release(self, context: _Context) -> None:
        context.set_trailing_metadata(((metadata.RELEASE, str(self._dataplane.release)),))

    def _final(self, end: CloudEnd) -> cloud_pb2.CloudFinal:
        return cloud_pb2.CloudFinal(
            release=release_to_pb(self._dataplane.release),
            finish_reason=finish_reason_to_pb(end.finish_reason),
            prompt_tokens=end.prompt_tokens,
            completion_tokens=end.completion_tokens,
            queue_s=end.queue_s,
            time_to_first_token_s=end.time_to_first_token_s,
            decode_s=end.decode_s,
        )


def request_from_pb(request: cloud_pb2.CloudStreamGenerateRequest) -> CloudRequest:
    """Check and convert.

    Raises:
        InvalidArgument: Names the field.
    """
    check_request_id(request.request_id)
    release = release_from_pb(request.release)
    messages = chat_messages_from_pb(request.messages)
    prompt_tokens = tuple(request.prompt_tokens.ids)
    if request.HasField("prompt_tokens"):
        if messages or request.prompt:
            raise InvalidArgument(
                "prompt_tokens is set beside messages or prompt; set exactly one", field="prompt_tokens"
            )
        _check_tokens(prompt_tokens, "prompt_tokens.ids")
    else:
        check_input(messages, request.prompt)
    prefix_tokens = tuple(request.prefix_tokens.ids)
    if prefix_tokens:
        _check_tokens(prefix_tokens, "prefix_tokens.ids")
    if request.prefix_text:
        check_text_bytes(request.prefix_text, "prefix_text", maximum=limits.MAX_PREFIX_BYTES)
    return CloudRequest(
        release=release,
        messages=messages,
        prompt=request.prompt,
        prompt_tokens=prompt_tokens,
        prefix_text=request.prefix_text,
        prefix_tokens=prefix_tokens,
        sampling=sampling_from_pb(request.sampling),
    )


def _check_tokens(ids: tuple[int, ...], field: str) -> None:
    check_int_range(len(ids), f"len({field})", minimum=1, maximum=limits.MAX_PROMPT_TOKENS)
    if min(ids) < 0:
        raise InvalidArgument(f"{field} has a negative token id", field=field)
