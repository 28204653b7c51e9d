"""Metadata keys of both tiers, and how to read them.

Keys are lower case, as HTTP/2 wants them. A key that occurs twice counts as its first value.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# Request: the caller's id, for calls whose message has no field for it. Response: the id in use.
REQUEST_ID: Final = "forebay-request-id"
# Response of either tier: the release that answered, `support-bot@7`.
RELEASE: Final = "forebay-release"
# Credentials of a caller: `Bearer KEY`, or the bare key.
AUTHORIZATION: Final = "authorization"
API_KEY: Final = "x-api-key"
# gRPC's own: how long a client's retry policy shall wait, in milliseconds; -1 forbids the retry.
RETRY_PUSHBACK_MS: Final = "grpc-retry-pushback-ms"
# gRPC's own: a serialized google.rpc.Status.
STATUS_DETAILS: Final = "grpc-status-details-bin"

Metadata = Iterable[tuple[str, str | bytes]]


def first(metadata: Metadata | None, key: str) -> str | None:
    """The first text value of `key`, or None. A value that is not UTF-8 is none."""
    raw = first_bytes(metadata, key)
    if raw is None:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def first_bytes(metadata: Metadata | None, key: str) -> bytes | None:
    """The first value of `key` as bytes, or None."""
    for name, value in metadata or ():
        if name == key:
            return value if isinstance(value, bytes) else value.encode()
    return None
