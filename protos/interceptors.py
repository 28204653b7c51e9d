"""What every call of either server goes through, before and after its servicer.

Invariants
- A call ends in the servicer's answer, a status from `protos.status`, or cancellation; never in a bare
  exception. A bug becomes INTERNAL whose message has the request id, and a log entry with the same id.
- The log entry has the types and places of the exceptions, not their messages: those may quote a prompt.
- Who calls is settled before the servicer runs. Health is open: load balancers have no keys. Reflection is
  not, once keys are configured.
- A call of ours without a deadline gets the default one.
- A servicer's asynchronous generator is closed when its call ends, however it ends.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any, cast

import grpc
import grpc.aio

from protos import limits, metadata
from protos.auth import CALLER, Authenticator
from protos.checks import check_request_id
from protos.errors import DeadlineExpired, ForebayError, InternalFault, InvalidArgument
from protos.health import HEALTH_SERVICE
from protos.status import abort_with

_log = logging.getLogger(__name__)

OUR_PACKAGE = "/forebay."
_Context = grpc.aio.ServicerContext[Any, Any]
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


def remaining_s(context: _Context, *, default_s: float = limits.DEFAULT_DEADLINE_S) -> float:
    """Seconds that a call has left: the caller's deadline, else `default_s`; 0 to `MAX_DEADLINE_S`."""
    # grpc.aio says None without a deadline, whatever its types say.
    remaining = cast("float | None", context.time_remaining())
    if remaining is None:
        remaining = default_s
    return min(max(remaining, 0.0), limits.MAX_DEADLINE_S)


def request_id_of(request: Any, context: _Context) -> str:
    """The caller's id for a call: the message's `request_id`, else the metadata's, else a new one.

    Raises:
        InvalidArgument: Not 1 to 128 printable ASCII characters.
    """
    inner = getattr(request, "request", request)
    given = getattr(inner, "request_id", "") or metadata.first(
        context.invocation_metadata(), metadata.REQUEST_ID
    )
    return check_request_id(given or "") or uuid.uuid4().hex


class BorderInterceptor(grpc.aio.ServerInterceptor):
    """Authentication, default deadline and errors, for all four kinds of call."""

    def __init__(
        self, authenticator: Authenticator, *, default_deadline_s: float = limits.DEFAULT_DEADLINE_S
    ) -> None:
        self._authenticator = authenticator
        self._default_deadline_s = default_deadline_s

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return self._wrap(handler, handler_call_details.method)

    def _wrap(self, handler: Any, method: str) -> Any:
        make: Callable[..., Any]
        if handler.unary_unary is not None:
            make, behavior = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        elif handler.unary_stream is not None:
            make, behavior = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        elif handler.stream_unary is not None:
            make, behavior = grpc.stream_unary_rpc_method_handler, handler.stream_unary
        else:
            make, behavior = grpc.stream_stream_rpc_method_handler, handler.stream_stream

        async def serve(request: Any, context: _Context) -> Any:
            return await self._serve(behavior, method, request, context)

        return make(
            serve,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _serve(
        self, behavior: Callable[[Any, _Context], Any], method: str, request: Any, context: _Context
    ) -> Any:
        deadline: asyncio.Timeout | None = None
        try:
            if not method.startswith(f"/{HEALTH_SERVICE}/"):
                caller = self._authenticator.identify(context.invocation_metadata(), context.auth_context())
                CALLER.set(caller)
            if remaining_s(context) < limits.LEAST_DEADLINE_S:
                raise DeadlineExpired("the deadline had passed when the request arrived")
            async with self._deadline(method, context) as deadline:
                return await _run(behavior, request, context)
        except TimeoutError as error:
            if deadline is not None and deadline.expired():
                await abort_with(context, self._expired())
            await _abort_as_bug(error, method, request, context)
        except ForebayError as error:
            await abort_with(context, error)
        except grpc.aio.BaseError:
            # The servicer aborted, or gRPC's own machinery failed: it has its status already.
            raise
        except Exception as error:
            await _abort_as_bug(error, method, request, context)

    def _deadline(
        self, method: str, context: _Context
    ) -> AbstractAsyncContextManager[asyncio.Timeout | None]:
        """A timeout for calls of ours without a deadline; gRPC cancels the others itself."""
        if cast("float | None", context.time_remaining()) is None and method.startswith(OUR_PACKAGE):
            return asyncio.timeout(self._default_deadline_s)
        return nullcontext()

    def _expired(self) -> DeadlineExpired:
        return DeadlineExpired(f"the server's default deadline of {self._default_deadline_s:g} s is over")


async def _run(behavior: Callable[[Any, _Context], Any], request: Any, context: _Context) -> Any:
    """Run a servicer's method of either style: one answer, or a stream of them."""
    outcome = behavior(request, context)
    if inspect.isasyncgen(outcome):
        async with aclosing(outcome) as responses:
            async for response in responses:
                await context.write(response)
        return None
    return await outcome


async def _abort_as_bug(error: BaseException, method: str, request: Any, context: _Context) -> None:
    try:
        request_id = request_id_of(request, context)
    except InvalidArgument:
        request_id = uuid.uuid4().hex
    _log.error("bug in %s, request %s: %s", method, request_id, places_of(error))
    await abort_with(
        context,
        InternalFault(
            f"internal error; the server's log has more under request id {request_id}",
            metadata={"request_id": request_id},
        ),
    )


def places_of(error: BaseException) -> str:
    """An exception and its causes as types and places in the code, without their messages."""
    parts: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        frames = traceback.extract_tb(current.__traceback__)
        where = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames))
        parts.append(f"{type(current).__qualname__} at {where or 'an unknown place'}")
        current = current.__cause__ or current.__context__
    return "; from ".join(parts)
