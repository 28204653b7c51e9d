"""The order of the router's questions, before, while and after the edge decodes. Pure.

Before: the caller's pin; who is not pinned begins at the edge. While decoding: giving the edge up early is
worth it only where the breaker lets a call through and there is time for one. After: the confidence against
the threshold of this release and variant.
"""

from __future__ import annotations

from router.decision import Reason, RoutingPolicy, Tier, TierPolicy, Verdict
from router.signals import Signals


def before_decoding(policy: RoutingPolicy) -> Verdict:
    """Where a request begins."""
    if policy.tier is TierPolicy.CLOUD_ONLY:
        return Verdict(tier=Tier.CLOUD, reason=Reason.PINNED, explanation="the caller asked for the cloud")
    if policy.tier is TierPolicy.EDGE_ONLY:
        return Verdict(tier=Tier.EDGE, reason=Reason.PINNED, explanation="the caller asked for the edge")
    return Verdict(tier=Tier.EDGE, reason=Reason.CONFIDENT, explanation="the edge tries first")


def worth_forwarding(*, breaker_lets_through: bool, left_s: float, margin_s: float) -> bool:
    """Whether an edge that is still at work may be given up for the cloud.

    Args:
        breaker_lets_through: False also where there is no cloud.
        left_s: Seconds until the request's deadline.
        margin_s: Kept of them for answering on the edge after all.
    """
    return breaker_lets_through and left_s > margin_s


def effective_threshold(release_threshold: float, policy: RoutingPolicy) -> float:
    """The release's threshold, raised (never lowered) by the caller's."""
    if policy.min_confidence is None:
        return release_threshold
    return max(release_threshold, policy.min_confidence)


def after_decoding(
    *, confidence: float, threshold: float, policy: RoutingPolicy, signals: Signals, unseen: bool
) -> Verdict:
    """Keep the finished edge answer, or forward.

    Args:
        confidence: Of the whole answer.
        threshold: From `effective_threshold`.
        signals: Of the whole answer. One that was cut by its length is not a confident one.
        unseen: Whether some of the text has not been shown. What was shown in full is final.
    """
    if policy.tier is TierPolicy.EDGE_ONLY:
        return Verdict(
            tier=Tier.EDGE,
            reason=Reason.PINNED,
            explanation="the caller asked for the edge",
            confidence=confidence,
        )
    if not unseen:
        return Verdict(
            tier=Tier.EDGE,
            reason=Reason.CONFIDENT,
            explanation="the answer was confident as it was streamed",
            confidence=confidence,
            threshold=threshold,
        )
    if signals.truncated:
        return Verdict(
            tier=Tier.CLOUD,
            reason=Reason.LOW_CONFIDENCE,
            explanation="the edge's answer was cut at max_tokens",
            confidence=confidence,
            threshold=threshold,
        )
    if confidence < threshold:
        return Verdict(
            tier=Tier.CLOUD,
            reason=Reason.LOW_CONFIDENCE,
            explanation=f"confidence {confidence:.3f} is under the threshold {threshold:.3f}",
            confidence=confidence,
            threshold=threshold,
        )
    return Verdict(
        tier=Tier.EDGE,
        reason=Reason.CONFIDENT,
        explanation=f"confidence {confidence:.3f} reaches the threshold {threshold:.3f}",
        confidence=confidence,
        threshold=threshold,
    )


def after_labels(*, confidence: float, threshold: float, policy: RoutingPolicy) -> Verdict:
    """Keep the edge's label, or forward. `confidence` is the label's probability over the set."""
    if policy.tier is TierPolicy.EDGE_ONLY:
        return Verdict(
            tier=Tier.EDGE,
            reason=Reason.PINNED,
            explanation="the caller asked for the edge",
            confidence=confidence,
        )
    kept = confidence >= threshold
    return Verdict(
        tier=Tier.EDGE if kept else Tier.CLOUD,
        reason=Reason.CONFIDENT if kept else Reason.LOW_CONFIDENCE,
        explanation=f"probability {confidence:.3f} {'reaches' if kept else 'is under'} "
        f"the threshold {threshold:.3f}",
        confidence=confidence,
        threshold=threshold,
    )


def early_exit(*, tokens: int, confidence: float, threshold: float) -> Verdict:
    """The edge is given up before it has finished."""
    return Verdict(
        tier=Tier.CLOUD,
        reason=Reason.EARLY_EXIT,
        explanation=f"after {tokens} tokens the confidence was {confidence:.3f}, "
        f"far under the threshold {threshold:.3f}",
        confidence=confidence,
        threshold=threshold,
    )


def edge_cannot(*, busy: bool) -> Verdict:
    """The edge has no room (`busy`), or its engine failed."""
    return Verdict(
        tier=Tier.CLOUD,
        reason=Reason.EDGE_BUSY if busy else Reason.EDGE_FAILED,
        explanation="the edge had no room" if busy else "the edge engine failed",
    )


def degraded(verdict: Verdict, *, reason: Reason, detail: str) -> Verdict:
    """The edge answers although `verdict` sent the request to the cloud."""
    return Verdict(
        tier=Tier.EDGE,
        reason=reason,
        explanation=f"{verdict.explanation}, but the cloud did not answer: {detail}",
        confidence=verdict.confidence,
        threshold=verdict.threshold,
    )
