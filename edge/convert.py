"""Messages of the edge's service to domain values and back. Checks live with the fields they check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from edge.request import Answer, Delta, HandOff, LabelAnswer, LabelQuery, Query, Routed, Timings, Usage
from edge.serving import ServedModel
from protos.convert import (
    chat_messages_from_pb,
    check_classify_text,
    check_input,
    check_label_kind,
    check_labels,
    check_unit_interval,
    finish_reason_to_pb,
    label_score_to_pb,
    release_to_pb,
    sampling_from_pb,
    token_logprob_to_pb,
)
from protos.errors import InvalidArgument
from protos.forebay.v1 import common_pb2, inference_pb2
from router.decision import RoutingPolicy, TierPolicy

_TIER_POLICIES = {
    common_pb2.TIER_POLICY_UNSPECIFIED: TierPolicy.AUTO,
    common_pb2.TIER_POLICY_AUTO: TierPolicy.AUTO,
    common_pb2.TIER_POLICY_EDGE_ONLY: TierPolicy.EDGE_ONLY,
    common_pb2.TIER_POLICY_CLOUD_ONLY: TierPolicy.CLOUD_ONLY,
}


def query_from_pb(
    request: inference_pb2.GenerateRequest, *, request_id: str, deadline: float, seed: Callable[[], int]
) -> Query:
    """Check and convert.

    Args:
        request_id: The caller's, or one that the server made.
        deadline: Monotonic seconds.
        seed: Called when the request brings none.

    Raises:
        InvalidArgument: Names the field.
    """
    messages = chat_messages_from_pb(request.messages)
    check_input(messages, request.prompt)
    sampling = sampling_from_pb(request.sampling)
    if sampling.seed is None:
        sampling = dataclasses.replace(sampling, seed=seed())
    return Query(
        request_id=request_id,
        messages=messages,
        prompt=request.prompt,
        sampling=sampling,
        policy=policy_from_pb(request.policy),
        deadline=deadline,
    )


def label_query_from_pb(
    request: inference_pb2.ClassifyRequest, *, request_id: str, deadline: float
) -> LabelQuery:
    """As `query_from_pb`."""
    return LabelQuery(
        request_id=request_id,
        text=check_classify_text(request.text),
        labels=check_labels(request.labels),
        kind=check_label_kind(request.label_kind),
        policy=policy_from_pb(request.policy),
        deadline=deadline,
    )


def policy_from_pb(message: common_pb2.RoutingPolicy) -> RoutingPolicy:
    """Raises InvalidArgument for an unknown tier policy or a confidence outside 0 to 1."""
    tier = _TIER_POLICIES.get(message.tier)
    if tier is None:
        raise InvalidArgument(f"policy.tier is {message.tier}, which is no TierPolicy", field="policy.tier")
    return RoutingPolicy(
        tier=tier,
        min_confidence=check_unit_interval(message.min_confidence, "policy.min_confidence")
        if message.HasField("min_confidence")
        else None,
        allow_degraded=message.allow_degraded if message.HasField("allow_degraded") else True,
    )


def delta_to_pb(delta: Delta) -> inference_pb2.StreamGenerateResponse:
    return inference_pb2.StreamGenerateResponse(delta=inference_pb2.TextDelta(text=delta.text))


def hand_off_to_pb(hand_off: HandOff) -> inference_pb2.StreamGenerateResponse:
    return inference_pb2.StreamGenerateResponse(
        hand_off=inference_pb2.HandOff(
            offset=hand_off.offset,
            reason=common_pb2.Reason.Value(f"REASON_{hand_off.reason.name}"),
            confidence=hand_off.confidence,
        )
    )


def answer_to_pb(answer: Answer, *, request_id: str) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        request_id=request_id,
        model=str(answer.routed.edge_release),
        text=answer.text,
        finish_reason=finish_reason_to_pb(answer.finish_reason),
        decision=decision_to_pb(answer.routed),
        usage=usage_to_pb(answer.usage),
        timings=timings_to_pb(answer.timings),
        logprobs=[token_logprob_to_pb(token) for token in answer.logprobs],
    )


def label_answer_to_pb(answer: LabelAnswer, *, request_id: str) -> inference_pb2.ClassifyResponse:
    return inference_pb2.ClassifyResponse(
        request_id=request_id,
        model=str(answer.routed.edge_release),
        label=answer.scores[0].label,
        scores=[label_score_to_pb(score) for score in answer.scores],
        decision=decision_to_pb(answer.routed),
        usage=usage_to_pb(answer.usage),
        timings=timings_to_pb(answer.timings),
    )


def decision_to_pb(routed: Routed) -> common_pb2.Decision:
    verdict = routed.verdict
    decision = common_pb2.Decision(
        tier=common_pb2.Tier.Value(f"TIER_{verdict.tier.name}"),
        reason=common_pb2.Reason.Value(f"REASON_{verdict.reason.name}"),
        edge_release=release_to_pb(routed.edge_release),
        edge_variant=routed.edge_variant,
        degraded=routed.degraded,
        explanation=verdict.explanation,
    )
    if verdict.confidence is not None:
        decision.confidence = verdict.confidence
    if verdict.threshold is not None:
        decision.threshold = verdict.threshold
    if routed.cloud_release is not None:
        decision.cloud_release.CopyFrom(release_to_pb(routed.cloud_release))
    if routed.hand_off_offset is not None:
        decision.hand_off_offset = routed.hand_off_offset
    return decision


def usage_to_pb(usage: Usage) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        edge_tokens=usage.edge_tokens,
        cloud_tokens=usage.cloud_tokens,
    )


def timings_to_pb(timings: Timings) -> common_pb2.Timings:
    return common_pb2.Timings(
        queue_s=timings.queue_s,
        time_to_first_token_s=timings.time_to_first_token_s,
        decode_s=timings.decode_s,
        cloud_s=timings.cloud_s,
        total_s=timings.total_s,
    )


def model_to_pb(model: ServedModel) -> inference_pb2.Model:
    manifest = model.release.manifest
    return inference_pb2.Model(
        line=manifest.line,
        active_version=manifest.version,
        versions=[manifest.version],
        variants=[
            inference_pb2.ModelVariant(
                name=variant.name,
                engine=variant.engine,
                size_bytes=variant.size_bytes,
                threshold=variant.threshold,
                serving=variant.name == model.variant.name,
            )
            for variant in manifest.edge.variants
        ],
        context_tokens=model.context_tokens,
        cloud_model="" if manifest.cloud is None else manifest.cloud.model,
    )
