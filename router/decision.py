"""What the router says: values that explain themselves.

Pure. Nothing here reads a clock, a file or a socket.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class TierPolicy(enum.Enum):
    """Where the caller lets an answer come from."""

    AUTO = "auto"
    EDGE_ONLY = "edge_only"
    CLOUD_ONLY = "cloud_only"


class Tier(enum.Enum):
    """Which tier answered."""

    EDGE = "edge"
    CLOUD = "cloud"


class Reason(enum.Enum):
    """Why that tier. The set is closed: it labels metrics."""

    CONFIDENT = "confident"
    LOW_CONFIDENCE = "low_confidence"
    EARLY_EXIT = "early_exit"
    PINNED = "pinned"
    EDGE_BUSY = "edge_busy"
    EDGE_FAILED = "edge_failed"
    CLOUD_UNAVAILABLE = "cloud_unavailable"
    CLOUD_OVERLOADED = "cloud_overloaded"
    CLOUD_DEADLINE = "cloud_deadline"
    NO_CLOUD = "no_cloud"
    RELEASE_MISMATCH = "release_mismatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingPolicy:
    """What the caller accepts.

    Attributes:
        tier: Where the answer may come from.
        min_confidence: Raises the threshold for this request, never lowers it. None: the release's.
        allow_degraded: Whether the edge's own answer may stand in for a cloud that cannot be had.
    """

    tier: TierPolicy = TierPolicy.AUTO
    min_confidence: float | None = None
    allow_degraded: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The router's word on one request, at one point of its life.

    Attributes:
        tier: Who is to answer from here on.
        reason: Why.
        explanation: One sentence for people.
        confidence: In the edge's answer, 0 to 1. None when there is none.
        threshold: What the confidence was held against. None when the tier was pinned.
    """

    tier: Tier
    reason: Reason
    explanation: str
    confidence: float | None = None
    threshold: float | None = None
