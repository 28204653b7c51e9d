"""The way to the cloud tier: one gRPC client, with deadline, retries and breaker.

Invariants
- Nothing is retried after the first event of an answer, and nothing sooner than the cloud asked for.
- Every call has a deadline and is cancelled when its iterator is left.
- Errors that leave are `ForebayError`; those that speak against the cloud's health feed the breaker.
- What is wrong between the tiers (credentials, an address of something else) is `CloudUnavailable`: the
  caller is not blamed for it. `InvalidArgument` is about the request and leaves as it is.

What to do about a failure is the cascade's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

import grpc.aio

from edge.cloud_values import (
    CloudEnd,
    CloudLabels,
    CloudQuery,
    CloudText,
    end_from_pb,
    label_query_to_pb,
    labels_from_pb,
    query_to_pb,
    text_from_pb,
)
from edge.request import LabelQuery
from protos.channel import ReloadingChannel
from protos.errors import (
    CloudUnavailable,
    DeadlineExpired,
    EngineUnavailable,
    ForebayError,
    InvalidArgument,
    Overloaded,
    ReleaseMismatch,
    RequestError,
    UnavailableError,
)
from protos.forebay.v1 import cloud_pb2, cloud_pb2_grpc
from protos.status import from_rpc_error
from protos.values import ReleaseRef
from router.breaker import Breaker, BreakerState

_LONGEST_BACKOFF_S = 2.0
# A call that had less time than this says nothing about the cloud when its deadline passes.
_FAIR_TIME_S = 5.0
# Enough to connect: a call that had this much and no connection when its deadline passed met nobody.
_CONNECT_TIME_S = 1.0
# Until somebody has changed a configuration.
_MISCONFIGURED_RETRY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Tries in all, and the pause before the second one in seconds (doubling)."""

    attempts: int = 2
    first_backoff_s: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """What a failed call means, and how soon it may be tried again. None: it would fail again."""

    error: ForebayError
    again_after_s: float | None = None


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
            InvalidArgument: The cloud cannot serve this request, such as one too long for its model.
        """
        request = query_to_pb(query)
        attempt = 0
        while True:
            attempt += 1
            begun = False
            given_s = self._enter(deadline)
            channel = self._channel.current()
            try:
                async with aclosing(self._attempt(channel, request, given_s)) as events:
                    async for event in events:
                        begun = True
                        yield event
                return
            except grpc.aio.AioRpcError as rpc_error:
                failure = self._failed(rpc_error, channel, given_s)
                if begun or not self._may_retry(failure, attempt, deadline):
                    raise failure.error from rpc_error
            await asyncio.sleep(self._pause_s(failure, attempt))

    async def classify(self, query: LabelQuery, release: ReleaseRef, *, deadline: float) -> CloudLabels:
        """The cloud's scores. Raises as `generate`."""
        request = label_query_to_pb(query, release)
        attempt = 0
        while True:
            attempt += 1
            given_s = self._enter(deadline)
            channel = self._channel.current()
            call = cloud_pb2_grpc.CloudInferenceServiceStub(channel).Classify(request, timeout=given_s)
            try:
                reply = await call
            except grpc.aio.AioRpcError as rpc_error:
                failure = self._failed(rpc_error, channel, given_s)
                if not self._may_retry(failure, attempt, deadline):
                    raise failure.error from rpc_error
            except BaseException:
                self._breaker.abandoned()
                raise
            else:
                self._breaker.succeeded()
                return labels_from_pb(reply)
            finally:
                call.cancel()
            await asyncio.sleep(self._pause_s(failure, attempt))

    def likely(self) -> bool:
        """Whether a call would be let through now."""
        return self._breaker.state(self._clock()) is not BreakerState.OPEN

    async def close(self) -> None:
        await self._channel.close()

    async def _attempt(
        self, channel: grpc.aio.Channel, request: cloud_pb2.CloudStreamGenerateRequest, given_s: float
    ) -> AsyncGenerator[CloudText | CloudEnd, None]:
        """One try. An `AioRpcError` is left to the caller, and so is telling the breaker of it."""
        call = cloud_pb2_grpc.CloudInferenceServiceStub(channel).StreamGenerate(request, timeout=given_s)
        settled = False
        try:
            async for message in call:
                if not settled:
                    settled = True
                    self._breaker.succeeded()
                if message.HasField("final"):
                    yield end_from_pb(message.final)
                    return
                yield text_from_pb(message.delta)
        except grpc.aio.AioRpcError:
            settled = True
            raise
        finally:
            # grpc.aio goes on with a call whose reader is gone.
            call.cancel()
            if not settled:
                self._breaker.abandoned()
        raise CloudUnavailable("the cloud's stream ended without its last message", retry_after_s=1.0)

    def _enter(self, deadline: float) -> float:
        """Seconds that a call may take from now. Raises when none may be made."""
        now = self._clock()
        if deadline <= now:
            raise DeadlineExpired("no time is left for the cloud")
        if not self._breaker.allow(now):
            raise CloudUnavailable(
                "the cloud has failed repeatedly and is left alone for a while",
                retry_after_s=max(0.1, self._breaker.retry_after_s(now)),
            )
        return deadline - now

    def _failed(self, rpc_error: grpc.aio.AioRpcError, channel: grpc.aio.Channel, given_s: float) -> _Failure:
        """The meaning of a failed call, after the breaker has heard of it."""
        error = from_rpc_error(rpc_error)
        if isinstance(error, Overloaded):
            # It is alive, and says no.
            self._breaker.succeeded()
            return _Failure(error=error, again_after_s=error.retry_after_s)
        if isinstance(error, ReleaseMismatch | InvalidArgument):
            self._breaker.succeeded()
            return _Failure(error=error)
        if isinstance(error, DeadlineExpired):
            # A cloud that lets every deadline pass is as good as none; an impatient caller proves nothing.
            unmet = given_s >= _CONNECT_TIME_S and channel.get_state() is not grpc.ChannelConnectivity.READY
            if unmet or given_s >= _FAIR_TIME_S:
                self._breaker.failed(self._clock())
            else:
                self._breaker.abandoned()
            return _Failure(error=error)
        self._breaker.failed(self._clock())
        if isinstance(error, RequestError):
            return _Failure(
                error=CloudUnavailable(
                    f"the cloud does not serve this edge node: {error.message}",
                    retry_after_s=_MISCONFIGURED_RETRY_S,
                    metadata=error.metadata,
                )
            )
        starting = isinstance(error, EngineUnavailable)
        return _Failure(
            error=CloudUnavailable(
                f"the cloud {'is starting' if starting else 'cannot be reached'}: {error.message}",
                retry_after_s=error.retry_after_s if isinstance(error, UnavailableError) else 1.0,
                metadata=error.metadata,
            ),
            # A bare UNAVAILABLE is a broken connection, and the next one may hold. Anything else says that
            # the cloud's engine is gone, or has a bug: neither is over in the time of a pause.
            again_after_s=0.0 if type(error) is UnavailableError else None,
        )

    def _may_retry(self, failure: _Failure, attempt: int, deadline: float) -> bool:
        """Whether another try is wanted, worth its while, and in time."""
        if failure.again_after_s is None or attempt >= self._retry.attempts:
            return False
        pause_s = self._pause_s(failure, attempt, jitter=0.0)
        return pause_s <= _LONGEST_BACKOFF_S and self._clock() + pause_s < deadline

    def _pause_s(self, failure: _Failure, attempt: int, *, jitter: float | None = None) -> float:
        """Never less than the cloud asked for; otherwise the backoff, less up to a half by chance."""
        backoff_s = min(self._retry.first_backoff_s * 2.0 ** (attempt - 1), _LONGEST_BACKOFF_S)
        part = self._jitter() if jitter is None else jitter
        return max(backoff_s * (1.0 - part / 2), failure.again_after_s or 0.0)
