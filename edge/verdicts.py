"""What a failure of either tier means for a request: its reason, or its error. Shared by text and labels."""

from __future__ import annotations

from protos.errors import (
    CloudUnavailable,
    DeadlineExpired,
    EngineUnavailable,
    ForebayError,
    InternalFault,
    InvalidArgument,
    Overloaded,
    ReleaseMismatch,
    UnavailableError,
)
from router.decision import Reason

# Errors of the cloud that the edge may make good. Anything else is the caller's or ours, and is raised.
CLOUD_FAILURES = (UnavailableError, DeadlineExpired, ReleaseMismatch)
# Errors of the edge's engine that the cloud may make good.
EDGE_FAILURES = (Overloaded, EngineUnavailable, InternalFault)

_RETRY_WITHOUT_CLOUD_S = 60.0


def no_cloud() -> CloudUnavailable:
    """What asking the cloud comes to on a node that has none."""
    return CloudUnavailable("no cloud is configured on this node", retry_after_s=_RETRY_WITHOUT_CLOUD_S)


def failure_reason(failure: ForebayError, *, has_cloud: bool) -> Reason:
    """Why the answer is a degraded one."""
    if not has_cloud:
        return Reason.NO_CLOUD
    if isinstance(failure, DeadlineExpired):
        return Reason.CLOUD_DEADLINE
    if isinstance(failure, ReleaseMismatch):
        return Reason.RELEASE_MISMATCH
    return Reason.CLOUD_OVERLOADED if isinstance(failure, Overloaded) else Reason.CLOUD_UNAVAILABLE


def refusal(failure: ForebayError) -> ForebayError:
    """What a caller hears who should have had the cloud's answer and gets no other."""
    if isinstance(failure, DeadlineExpired):
        return CloudUnavailable("the cloud did not answer in the time that was left", retry_after_s=1.0)
    if isinstance(failure, CloudUnavailable | InvalidArgument):
        return failure
    retry_after_s = failure.retry_after_s if isinstance(failure, UnavailableError) else 5.0
    return CloudUnavailable(
        f"the cloud refused: {failure.message}", retry_after_s=retry_after_s, metadata=failure.metadata
    )
