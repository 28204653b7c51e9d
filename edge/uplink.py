"""The way to the cloud tier: one gRPC client, with deadline, retries and breaker.

Invariants
- Nothing is retried after the first event of an answer.
- Every call has a deadline and is cancelled when its iterator is left.
- Errors that leave are `ForebayError`; those that speak against the cloud's health feed the breaker.

What to do about a failure is the cascade's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

import grpc.aio

from edge.request import LabelQuery
from protos.channel import ReloadingChannel
from protos.convert import (
    chat_messages_to_pb,
    finish_reason_from_pb,
    label_score_from_pb,
    release_from_pb,
    release_to_pb,
    sampling_to_pb,
    token_logprob_from_pb,
)
from protos.errors import (
    CloudUnavailable,
    DeadlineExpired,
    EngineUnavailable,
    ForebayError,
    InternalFault,
    Overloaded,
    ReleaseMismatch,
    UnavailableError,
)
from protos.forebay.v1 import cloud_pb2, cloud_pb2_grpc
from protos.status import from_rpc_error
from protos.values import ChatMessage, FinishReason, LabelScore, ReleaseRef, SamplingParams, TokenLogprob
from router.breaker import Breaker, BreakerState

_LONGEST_BACKOFF_S = 2.0
# A call that had less time than this says nothing about the cloud when its deadline passes.
_FAIR_TIME_S = 5.0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Tries in all, and the pause before the second one in seconds (doubling)."""

    attempts: int = 2
    first_backoff_s: float = 0.1


class Uplink:
    """A client of CloudInferenceService.

    Args:
        clock: Monotonic seconds.
        jitter: Random numbers in [0, 1).
    """

    def __init__(
        self,
        channel: ReloadingChannel,
        *,
        breaker: Breaker,
        retry: RetryPolicy,
        clock: Callable[[], float],
        jitter: Callable[[], float],
    ) -> None:
        self._channel = channel
        self._breaker = breaker
        self._retry = retry
        self._clock = clock
        self._jitter = jitter

    async def generate(
        self, query: CloudQuery, *, deadline: float
    ) -> AsyncGenerator[CloudText | CloudEnd, None]:
        """The cloud's text from behind the prefix.

        Raises:
            CloudUnavailable: Not reachable, refused, broken off, or the breaker is open.
            Overloaded: The cloud refused for load.
            DeadlineExpired: `deadline` (monotonic seconds) passed.
            ReleaseMismatch: The cloud serves another release.
        """
        request = _to_pb(query)
        attempt = 0
        while True:
            attempt += 1
            begun = False
            try:
                async with aclosing(self._attempt(request, deadline)) as events:
                    async for event in events:
                        begun = True
                        yield event
                return
            except UnavailableError as error:
                if begun or attempt >= self._retry.attempts:
                    raise
                await self._pause(error, attempt, deadline)

    async def classify(self, query: LabelQuery, release: ReleaseRef, *, deadline: float) -> CloudLabels:
        """The cloud's scores. Raises as `generate`."""
        request = cloud_pb2.CloudClassifyRequest(
            release=release_to_pb(release),
            text=query.text,
            labels=query.labels,
            label_kind=query.kind,
            request_id=query.request_id,
        )
        attempt = 0
        while True:
            attempt += 1
            self._enter(deadline)
            stub = cloud_pb2_grpc.CloudInferenceServiceStub(self._channel.current())
            given_s = deadline - self._clock()
            call = stub.Classify(request, timeout=given_s)
            try:
                reply = await call
            except grpc.aio.AioRpcError as rpc_error:
                error = self._failed(rpc_error, given_s)
                if not isinstance(error, UnavailableError) or attempt >= self._retry.attempts:
                    raise error from rpc_error
                await self._pause(error, attempt, deadline)
                continue
            except BaseException:
                self._breaker.abandoned()
                raise
            finally:
                call.cancel()
            self._breaker.succeeded()
            return CloudLabels(
                release=release_from_pb(reply.release),
                scores=tuple(label_score_from_pb(score) for score in reply.scores),
                prompt_tokens=reply.prompt_tokens,
            )

    def likely(self) -> bool:
        """Whether a call would be let through now."""
        return self._breaker.state(self._clock()) is not BreakerState.OPEN

    async def close(self) -> None:
        await self._channel.close()

    async def _attempt(
        self, request: cloud_pb2.CloudStreamGenerateRequest, deadline: float
    ) -> AsyncGenerator[CloudText | CloudEnd, None]:
        self._enter(deadline)
        stub = cloud_pb2_grpc.CloudInferenceServiceStub(self._channel.current())
        given_s = deadline - self._clock()
        call = stub.StreamGenerate(request, timeout=given_s)
        settled = False
        try:
            async for message in call:
                if not settled:
                    settled = True
                    self._breaker.succeeded()
                if message.HasField("final"):
                    yield _end(message.final)
                    return
                yield CloudText(
                    text=message.delta.text,
                    tokens=message.delta.tokens,
                    logprobs=tuple(token_logprob_from_pb(token) for token in message.delta.logprobs),
                )
        except grpc.aio.AioRpcError as rpc_error:
            settled = True
            raise self._failed(rpc_error, given_s) from rpc_error
        finally:
            # grpc.aio goes on with a call whose reader is gone.
            call.cancel()
            if not settled:
                self._breaker.abandoned()
        raise CloudUnavailable("the cloud's stream ended without its last message", retry_after_s=1.0)

    def _enter(self, deadline: float) -> None:
        now = self._clock()
        if deadline <= now:
            raise DeadlineExpired("no time is left for the cloud")
        if not self._breaker.allow(now):
            raise CloudUnavailable(
                "the cloud has failed repeatedly and is left alone for a while",
                retry_after_s=max(0.1, self._breaker.retry_after_s(now)),
            )

    def _failed(self, rpc_error: grpc.aio.AioRpcError, given_s: float) -> ForebayError:
        """The domain error, after the breaker has heard of it."""
        error = from_rpc_error(rpc_error)
        if isinstance(error, Overloaded | ReleaseMismatch):
            # It is alive, and says no.
            self._breaker.succeeded()
            return error
        if isinstance(error, UnavailableError | InternalFault):
            self._breaker.failed(self._clock())
            retry_after_s = error.retry_after_s if isinstance(error, UnavailableError) else 1.0
            what = "is starting" if isinstance(error, EngineUnavailable) else "cannot be reached"
            return CloudUnavailable(
                f"the cloud {what}: {error.message}", retry_after_s=retry_after_s, metadata=error.metadata
            )
        if isinstance(error, DeadlineExpired) and given_s >= _FAIR_TIME_S:
            # A cloud that lets every deadline pass is as good as none; an impatient caller proves nothing.
            self._breaker.failed(self._clock())
            return error
        self._breaker.abandoned()
        return error

    async def _pause(self, error: UnavailableError, attempt: int, deadline: float) -> None:
        """Wait before the next try, or raise when there is no time for one."""
        backoff = min(self._retry.first_backoff_s * 2.0 ** (attempt - 1), _LONGEST_BACKOFF_S)
        pause_s = max(backoff * (1.0 - self._jitter() / 2), 0.0)
        if isinstance(error, Overloaded):
            pause_s = max(pause_s, error.retry_after_s)
        if pause_s > _LONGEST_BACKOFF_S or self._clock() + pause_s >= deadline:
            raise error
        await asyncio.sleep(pause_s)


def _to_pb(query: CloudQuery) -> cloud_pb2.CloudStreamGenerateRequest:
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


def _end(final: cloud_pb2.CloudFinal) -> CloudEnd:
    return CloudEnd(
        release=release_from_pb(final.release),
        finish_reason=finish_reason_from_pb(final.finish_reason),
        prompt_tokens=final.prompt_tokens,
        completion_tokens=final.completion_tokens,
        queue_s=final.queue_s,
    )
