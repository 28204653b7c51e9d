"""The error tree of both tiers, and the reasons that travel on the wire.

    ForebayError
    ├── RequestError            the peer's fault: do not retry unchanged
    │   ├── InvalidArgument     a field is wrong; `field` names it
    │   │   └── ContextTooLong  prompt and answer do not fit the model's context
    │   ├── UnknownModel        no such line, or no such version of it
    │   ├── ReleaseMismatch     the peer serves another release
    │   ├── Unauthenticated     no key, or a wrong one
    │   └── PermissionDenied    a valid identity that may not do this
    ├── UnavailableError        nobody's fault: retry after `retry_after_s`
    │   ├── Overloaded          a bounded queue or budget is full
    │   ├── CloudUnavailable    the cloud cannot be reached, or refused
    │   └── EngineUnavailable   the engine is starting, restarting or stopped
    ├── DeadlineExpired         the time that the caller gave is over
    ├── RequestCancelled        the caller went away
    └── InternalFault           our bug; the log has more

Domain errors carry no transport code. `protos.status` maps them, in one table, to gRPC.
This module imports nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping


class ForebayError(Exception):
    """Base of every error that may reach a caller.

    Args:
        message: One sentence that says what is wrong and what to do.
        metadata: Facts for machines (bounded, no prompts, no secrets); becomes ErrorInfo.metadata.
    """

    reason: str = "INTERNAL"

    def __init__(self, message: str, *, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.metadata: dict[str, str] = dict(metadata or {})


class RequestError(ForebayError):
    """The peer's fault. Sending the same request again gives the same error."""

    reason = "INVALID_REQUEST"


class InvalidArgument(RequestError):
    """A field of the request is wrong. `field` is its path in the message, such as `sampling.top_p`."""

    reason = "INVALID_ARGUMENT"

    def __init__(self, message: str, *, field: str, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message, metadata=metadata)
        self.field = field


class ContextTooLong(InvalidArgument):
    """Prompt and answer do not fit. The message and the metadata name the limit in tokens."""

    reason = "CONTEXT_TOO_LONG"


class UnknownModel(RequestError):
    """No such model line here, or no such version of it. The metadata lists what there is."""

    reason = "UNKNOWN_MODEL"


class ReleaseMismatch(RequestError):
    """The request names a release that this tier does not serve. The metadata lists the served ones."""

    reason = "RELEASE_MISMATCH"


class Unauthenticated(RequestError):
    """No API key or client certificate, or one that is not known."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(RequestError):
    """A known identity that may not do this."""

    reason = "PERMISSION_DENIED"


class UnavailableError(ForebayError):
    """Nobody's fault. Trying again after `retry_after_s` seconds may work."""

    reason = "UNAVAILABLE"

    def __init__(
        self, message: str, *, retry_after_s: float, metadata: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message, metadata=metadata)
        self.retry_after_s = retry_after_s


class Overloaded(UnavailableError):
    """A bounded queue, batch or memory budget is full."""

    reason = "OVERLOADED"


class CloudUnavailable(UnavailableError):
    """The cloud tier cannot be reached, refused, or broke off, and the edge may not answer instead."""

    reason = "CLOUD_UNAVAILABLE"


class EngineUnavailable(UnavailableError):
    """The engine process is starting, restarting or stopped."""

    reason = "ENGINE_UNAVAILABLE"


class DeadlineExpired(ForebayError):
    """The time that the caller gave is over."""

    reason = "DEADLINE_EXPIRED"


class RequestCancelled(ForebayError):
    """The caller went away; nobody reads this error, but the log and the metrics do."""

    reason = "CANCELLED"


class InternalFault(ForebayError):
    """Our bug. The message says nothing of our insides; the log does."""

    reason = "INTERNAL"
