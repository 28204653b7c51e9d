"""The error table: complete, the same on both ends of a real wire, and bounded."""

from __future__ import annotations

import math
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from protos import errors, limits, metadata
from protos.error_docs import BAD_INPUT, render
from protos.errors import (
    CloudUnavailable,
    ContextTooLong,
    DeadlineExpired,
    ForebayError,
    InternalFault,
    InvalidArgument,
    Overloaded,
    PermissionDenied,
    RequestCancelled,
    RequestError,
    Unauthenticated,
    UnavailableError,
    UnknownModel,
)
from protos.manifest import ManifestError
from protos.status import (
    DEFAULT_RETRY_AFTER_S,
    TABLE,
    code_of,
    from_rpc_error,
    from_status,
    to_status,
    trailing_metadata,
)

TREE = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, ForebayError)]


def make(cls: type[ForebayError]) -> ForebayError:
    facts = {"model": "support-bot@7", "limit": "4096"}
    if issubclass(cls, UnavailableError):
        return cls("come back later", retry_after_s=2.5, metadata=facts)
    if issubclass(cls, InvalidArgument):
        return cls("no good", field="sampling.top_p", metadata=facts)
    return cls("a sentence", metadata=facts)


def rpc_error(
    code: grpc.StatusCode, details: str = "", trailers: tuple[tuple[str, str | bytes], ...] = ()
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details)


def facts_of(error: ForebayError) -> tuple[object, ...]:
    return (
        error.message,
        error.metadata,
        getattr(error, "retry_after_s", None),
        getattr(error, "field", None),
    )


def test_every_class_of_the_tree_has_a_row_and_a_reason_of_its_own() -> None:
    assert set(TABLE) == set(TREE)
    reasons = [cls.reason for cls in TREE if cls is not ForebayError]
    assert len(set(reasons)) == len(reasons)


@pytest.mark.parametrize("cls", TREE)
def test_every_class_comes_back_from_its_status(cls: type[ForebayError]) -> None:
    error = make(cls)
    trailers = trailing_metadata(error)
    back = from_rpc_error(rpc_error(code_of(error), error.message, trailers))
    # The bare base class says no more than that something failed inside.
    assert type(back) is (InternalFault if cls is ForebayError else cls)
    assert facts_of(back) == facts_of(error)


@pytest.mark.parametrize("cls", TREE)
def test_retry_info_and_pushback_come_with_unavailability_only(cls: type[ForebayError]) -> None:
    error = make(cls)
    retry = error_details_pb2.RetryInfo()
    has_retry = any(
        detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry) for detail in to_status(error).details
    )
    pushback = metadata.first(trailing_metadata(error), metadata.RETRY_PUSHBACK_MS)
    if isinstance(error, UnavailableError):
        assert has_retry
        assert retry.retry_delay.ToMilliseconds() == 2500
        assert pushback == "2500"
    else:
        assert not has_retry
        assert pushback is None
    assert TABLE[cls].retry is (isinstance(error, UnavailableError) or cls is DeadlineExpired)


def test_a_class_without_a_row_travels_as_its_nearest_ancestor() -> None:
    class Nearer(ContextTooLong):
        reason = "NEARER"

    status = to_status(Nearer("too long", field="prompt"))
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    back = from_status(status)
    assert type(back) is InvalidArgument
    assert back.field == "prompt"
    assert code_of(ManifestError) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("code", "details", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses", UnavailableError),
        (grpc.StatusCode.ABORTED, "", UnavailableError),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", UnavailableError),
        (grpc.StatusCode.INTERNAL, "boom", InternalFault),
        (grpc.StatusCode.UNKNOWN, "", InternalFault),
        (grpc.StatusCode.DATA_LOSS, "", InternalFault),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", DeadlineExpired),
        (grpc.StatusCode.CANCELLED, "", RequestCancelled),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max", InvalidArgument),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "quota", Overloaded),
        (grpc.StatusCode.UNAUTHENTICATED, "", Unauthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, "", PermissionDenied),
        (grpc.StatusCode.NOT_FOUND, "", UnknownModel),
        (grpc.StatusCode.INVALID_ARGUMENT, "", InvalidArgument),
        (grpc.StatusCode.FAILED_PRECONDITION, "", RequestError),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", RequestError),
    ],
)
def test_plain_statuses_of_grpc_and_proxies_mean_something(
    code: grpc.StatusCode, details: str, cls: type[ForebayError]
) -> None:
    error = from_rpc_error(rpc_error(code, details))
    assert type(error) is cls
    assert (details or code.name) in error.message


def test_details_that_are_garbage_or_contradict_the_code_are_not_believed() -> None:
    garbage = ((metadata.STATUS_DETAILS, b"\xff\xff\xff"),)
    assert type(from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, "x", garbage))) is UnavailableError
    contradiction = trailing_metadata(UnknownModel("x"))
    assert (
        type(from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, "x", contradiction))) is UnavailableError
    )


def test_a_stranger_s_error_info_counts_by_code_only() -> None:
    status = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="busy")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="UNKNOWN_MODEL", domain="example.com"))
    error = from_status(status)
    assert type(error) is UnavailableError
    assert error.retry_after_s == DEFAULT_RETRY_AFTER_S


@pytest.mark.parametrize(
    ("retry_after_s", "expected_s"),
    [(0.0, 0.001), (-5.0, 0.001), (math.nan, 300.0), (math.inf, 300.0), (1e9, 300.0), (0.25, 0.25)],
)
def test_retry_hints_are_positive_and_bounded(retry_after_s: float, expected_s: float) -> None:
    back = from_status(to_status(Overloaded("full", retry_after_s=retry_after_s)))
    assert isinstance(back, Overloaded)
    assert back.retry_after_s == expected_s


def test_a_status_stays_small_whatever_the_error_says() -> None:
    error = InvalidArgument(
        "ü" * 100_000, field="f" * 10_000, metadata={f"key{i}": "v" * 500 for i in range(100)}
    )
    status = to_status(error)
    assert len(status.message.encode()) <= limits.MAX_ERROR_MESSAGE_BYTES
    size_bytes = len(status.SerializeToString()) * 4 / 3 + 3 * limits.MAX_ERROR_MESSAGE_BYTES
    assert size_bytes < 8 * 1024
    back = from_status(status)
    assert 0 < len(back.metadata) < 100
    assert all(value == "v" * 500 for value in back.metadata.values())


def test_lone_surrogates_do_not_break_a_status() -> None:
    assert to_status(CloudUnavailable("bad \ud800 text" + "x" * 2000, retry_after_s=1)).message
    status = to_status(UnknownModel("bad \ud800 text", metadata={"given": "\udc00"}))
    assert status.message == "bad ? text"
    assert from_status(status).metadata == {"given": "?"}


def test_the_errors_page_is_current_and_complete() -> None:
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    assert page == render(), "run: python -m protos.error_docs > docs/errors.md"
    for cls in TREE:
        assert f"`{cls.reason}`" in page
    assert all(given in page for given, _ in BAD_INPUT)
