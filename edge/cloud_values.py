"""What the edge asks the cloud and what the cloud says: domain values, and their messages. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from edge.request import LabelQuery
from protos.convert import (
    chat_messages_to_pb,
    finish_reason_from_pb,
    label_score_from_pb,
    release_from_pb,
    release_to_pb,
    sampling_to_pb,
    token_logprob_from_pb,
)
from protos.forebay.v1 import cloud_pb2
from protos.values import ChatMessage, FinishReason, LabelScore, ReleaseRef, SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudQuery:
    """What the cloud is asked. Messages or prompt, and the text that the caller has seen."""

    request_id: str
    release: ReleaseRef
    messages: tuple[ChatMessage, ...]
    prompt: str
    prefix: str
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudText:
    """A piece of the cloud's text and how many tokens it is."""

    text: str
    tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudEnd:
    """The end of the cloud's text."""

    release: ReleaseRef
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    queue_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudLabels:
    """The cloud's scores, in the order of the labels."""

    release: ReleaseRef
    scores: tuple[LabelScore, ...]
    prompt_tokens: int


def query_to_pb(query: CloudQuery) -> cloud_pb2.CloudStreamGenerateRequest:
    request = cloud_pb2.CloudStreamGenerateRequest(
        release=release_to_pb(query.release),
        messages=chat_messages_to_pb(query.messages),
        prompt=query.prompt,
        sampling=sampling_to_pb(query.sampling),
        request_id=query.request_id,
    )
    if query.prefix:
        request.prefix_text = query.prefix
    return request


def end_from_pb(final: cloud_pb2.CloudFinal) -> CloudEnd:
    return CloudEnd(
        release=release_from_pb(final.release),
        finish_reason=finish_reason_from_pb(final.finish_reason),
        prompt_tokens=final.prompt_tokens,
        completion_tokens=final.completion_tokens,
        queue_s=final.queue_s,
    )


def text_from_pb(delta: cloud_pb2.CloudTextDelta) -> CloudText:
    return CloudText(
        text=delta.text,
        tokens=delta.tokens,
        logprobs=tuple(token_logprob_from_pb(token) for token in delta.logprobs),
    )


def label_query_to_pb(query: LabelQuery, release: ReleaseRef) -> cloud_pb2.CloudClassifyRequest:
    return cloud_pb2.CloudClassifyRequest(
        release=release_to_pb(release),
        text=query.text,
        labels=query.labels,
        label_kind=query.kind,
        request_id=query.request_id,
    )


def labels_from_pb(reply: cloud_pb2.CloudClassifyResponse) -> CloudLabels:
    return CloudLabels(
        release=release_from_pb(reply.release),
        scores=tuple(label_score_from_pb(score) for score in reply.scores),
        prompt_tokens=reply.prompt_tokens,
    )
