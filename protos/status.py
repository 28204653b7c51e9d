"""The one table between the error tree and gRPC, both ways.

Invariants
- Every `ForebayError` has a code: its own row, or that of its nearest ancestor.
- What a server sends with `abort_with`, a client gets back from `from_rpc_error` as the same class with
  the same message, metadata, field and retry hint.
- A status never outgrows gRPC's metadata: message and metadata are cut to `protos.limits`.

It does not log, and it does not decide whether to retry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from protos import limits, metadata
from protos.errors import (
    CloudUnavailable,
    ContextTooLong,
    DeadlineExpired,
    EngineUnavailable,
    ForebayError,
    InternalFault,
    InvalidArgument,
    Overloaded,
    PermissionDenied,
    ReleaseMismatch,
    RequestCancelled,
    RequestError,
    Unauthenticated,
    UnavailableError,
    UnknownModel,
)

ERROR_DOMAIN = "forebay.dev"
# For peers that say UNAVAILABLE without saying when to come back.
DEFAULT_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """How one class travels.

    Attributes:
        code: The gRPC code.
        retry: Whether the same request may succeed later.
        advice: What the caller should do, for the docs.
    """

    code: grpc.StatusCode
    retry: bool
    advice: str


TABLE: Mapping[type[ForebayError], Row] = {
    ForebayError: Row(grpc.StatusCode.INTERNAL, False, "Report it with the request id."),
    RequestError: Row(grpc.StatusCode.INVALID_ARGUMENT, False, "Correct the request."),
    InvalidArgument: Row(grpc.StatusCode.INVALID_ARGUMENT, False, "Correct the field that BadRequest names."),
    ContextTooLong: Row(
        grpc.StatusCode.INVALID_ARGUMENT,
        False,
        "Shorten the conversation or lower max_tokens; the metadata names the limit.",
    ),
    UnknownModel: Row(
        grpc.StatusCode.NOT_FOUND, False, "Use a name from ListModels; the metadata lists what there is."
    ),
    ReleaseMismatch: Row(
        grpc.StatusCode.FAILED_PRECONDITION,
        False,
        "Ask for a release that is served; the metadata lists them.",
    ),
    Unauthenticated: Row(
        grpc.StatusCode.UNAUTHENTICATED,
        False,
        "Send a valid key as `authorization: Bearer KEY` or `x-api-key: KEY`, or a client certificate.",
    ),
    PermissionDenied: Row(grpc.StatusCode.PERMISSION_DENIED, False, "Use an identity that may do this."),
    UnavailableError: Row(grpc.StatusCode.UNAVAILABLE, True, "Retry after the delay in RetryInfo."),
    Overloaded: Row(
        grpc.StatusCode.RESOURCE_EXHAUSTED, True, "Retry after the delay in RetryInfo, with fewer at once."
    ),
    CloudUnavailable: Row(
        grpc.StatusCode.UNAVAILABLE,
        True,
        "Retry after the delay in RetryInfo, or allow degraded answers.",
    ),
    EngineUnavailable: Row(grpc.StatusCode.UNAVAILABLE, True, "Retry after the delay in RetryInfo."),
    DeadlineExpired: Row(grpc.StatusCode.DEADLINE_EXCEEDED, True, "Give more time, or ask for fewer tokens."),
    RequestCancelled: Row(grpc.StatusCode.CANCELLED, False, "Nothing: the caller cancelled."),
    InternalFault: Row(grpc.StatusCode.INTERNAL, False, "Report it with the request id."),
}

# The base class shares INTERNAL with InternalFault, which is what a client should see.
_BY_REASON: Mapping[str, type[ForebayError]] = {cls.reason: cls for cls in TABLE}


def row_of(error: ForebayError | type[ForebayError]) -> Row:
    """The table's row for an error: its class's, else its nearest ancestor's."""
    cls = error if isinstance(error, type) else type(error)
    return next(TABLE[ancestor] for ancestor in cls.__mro__ if ancestor in TABLE)


def code_of(error: ForebayError | type[ForebayError]) -> grpc.StatusCode:
    return row_of(error).code


def to_status(error: ForebayError) -> status_pb2.Status:
    """The error as google.rpc.Status.

    Details: ErrorInfo always; RetryInfo for `UnavailableError`; BadRequest for `InvalidArgument`.
    """
    status = status_pb2.Status(
        code=code_of(error).value[0], message=_cut(error.message, limits.MAX_ERROR_MESSAGE_BYTES)
    )
    info = error_details_pb2.ErrorInfo(
        reason=error.reason, domain=ERROR_DOMAIN, metadata=_bounded(error.metadata)
    )
    status.details.add().Pack(info)
    if isinstance(error, UnavailableError):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(_retry_ms(error))
        status.details.add().Pack(retry)
    if isinstance(error, InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(error.field, limits.MAX_ERROR_MESSAGE_BYTES // 4), reason=error.reason
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    return status


def trailing_metadata(error: ForebayError) -> tuple[tuple[str, str | bytes], ...]:
    """What goes into the trailers: the rich status, and the pushback that gRPC's own retries obey."""
    trailers: list[tuple[str, str | bytes]] = [
        (metadata.STATUS_DETAILS, to_status(error).SerializeToString())
    ]
    if isinstance(error, UnavailableError):
        trailers.append((metadata.RETRY_PUSHBACK_MS, str(_retry_ms(error))))
    return tuple(trailers)


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: ForebayError) -> NoReturn:
    """End a call with this error. Never returns; raises gRPC's own `AbortError`."""
    await context.abort(
        code_of(error),
        _cut(error.message, limits.MAX_ERROR_MESSAGE_BYTES),
        trailing_metadata=trailing_metadata(error),
    )
    raise AssertionError("abort returned")


def from_rpc_error(error: grpc.aio.AioRpcError) -> ForebayError:
    """What a failed call means. Peers of ours say it in ErrorInfo; from others only the code is known."""
    status = _details_of(error)
    if status is None:
        return _from_plain(error.code(), error.details() or "")
    return from_status(status)


def from_status(status: status_pb2.Status) -> ForebayError:
    """The error that `to_status` made this from; for a status without our ErrorInfo, by its code."""
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad = error_details_pb2.BadRequest()
    for detail in status.details:
        for target in (info, retry, bad):
            if detail.Is(target.DESCRIPTOR):
                detail.Unpack(target)
    retry_after_s = retry.retry_delay.ToMilliseconds() / 1000 or DEFAULT_RETRY_AFTER_S
    field = bad.field_violations[0].field if bad.field_violations else ""
    cls = _BY_REASON.get(info.reason) if info.domain == ERROR_DOMAIN else None
    if cls is None:
        plain = _from_plain(_code_from_number(status.code), status.message)
        plain.metadata.update(info.metadata)
        if isinstance(plain, UnavailableError):
            plain.retry_after_s = retry_after_s
        if isinstance(plain, InvalidArgument):
            plain.field = field
        return plain
    return _build(cls, status.message, dict(info.metadata), retry_after_s=retry_after_s, field=field)


def _build(
    cls: type[ForebayError], message: str, facts: dict[str, str], *, retry_after_s: float, field: str
) -> ForebayError:
    if issubclass(cls, UnavailableError):
        return cls(message, retry_after_s=retry_after_s, metadata=facts)
    if issubclass(cls, InvalidArgument):
        return cls(message, field=field, metadata=facts)
    return cls(message, metadata=facts)


def _from_plain(code: grpc.StatusCode, details: str) -> ForebayError:
    """Meaning of a bare code: gRPC's own refusals and failures, proxies, other servers."""
    message = details or code.name
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExpired(message)
        case grpc.StatusCode.CANCELLED:
            return RequestCancelled(message)
        case grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(message)
        case grpc.StatusCode.PERMISSION_DENIED:
            return PermissionDenied(message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in details:
            # gRPC's refusal of a message over the size limit: sending it again cannot help.
            return InvalidArgument(message, field="")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Overloaded(message, retry_after_s=DEFAULT_RETRY_AFTER_S)
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.ABORTED:
            return UnavailableError(message, retry_after_s=DEFAULT_RETRY_AFTER_S)
        case grpc.StatusCode.INTERNAL | grpc.StatusCode.UNKNOWN if "RST_STREAM" in details:
            # The connection broke under the call; nothing says that the peer has a bug.
            return UnavailableError(message, retry_after_s=DEFAULT_RETRY_AFTER_S)
        case grpc.StatusCode.NOT_FOUND:
            return UnknownModel(message)
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidArgument(message, field="")
        case grpc.StatusCode.FAILED_PRECONDITION | grpc.StatusCode.OUT_OF_RANGE:
            return RequestError(message)
        case grpc.StatusCode.UNIMPLEMENTED:
            return RequestError(f"the server at this address does not offer this call: {message}")
        case _:
            return InternalFault(message)


def _details_of(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    raw = metadata.first_bytes(error.trailing_metadata(), metadata.STATUS_DETAILS)
    if raw is None:
        return None
    try:
        status = status_pb2.Status.FromString(raw)
    except DecodeError:
        return None
    # The code on the wire is what proxies and retries saw; details that contradict it are not to be trusted.
    return status if status.code == error.code().value[0] else None


def _code_from_number(number: int) -> grpc.StatusCode:
    return next((code for code in grpc.StatusCode if code.value[0] == number), grpc.StatusCode.UNKNOWN)


def _retry_ms(error: UnavailableError) -> int:
    delay_s = error.retry_after_s if math.isfinite(error.retry_after_s) else limits.MAX_RETRY_AFTER_S
    return round(min(max(delay_s, 0.001), limits.MAX_RETRY_AFTER_S) * 1000)


def _bounded(facts: Mapping[str, str]) -> dict[str, str]:
    """As many whole entries, in order, as fit."""
    kept: dict[str, str] = {}
    size_bytes = 0
    for key, value in facts.items():
        clean_key, clean_value = (text.encode("utf-8", "replace") for text in (key, value))
        size_bytes += len(clean_key) + len(clean_value)
        if size_bytes > limits.MAX_ERROR_METADATA_BYTES:
            break
        kept[clean_key.decode()] = clean_value.decode()
    return kept


def _cut(text: str, maximum_bytes: int) -> str:
    """The text's head, whole characters, in at most that many bytes of UTF-8; lone surrogates become `?`."""
    raw = text.encode("utf-8", "replace")
    return raw[:maximum_bytes].decode("utf-8", "ignore")
