"""Classification: the edge scores the labels; where its best one is not probable enough, the cloud does.

As the cascade for text, without streaming: one answer or one error, and a degraded answer where the cloud
should have decided and cannot.
"""

from __future__ import annotations

from collections.abc import Callable

from edge.engine.protocol import LabelRequest
from edge.meter import Meter
from edge.request import LabelAnswer, LabelQuery, Routed
from edge.serving import ServedModel
from edge.uplink import Uplink
from edge.verdicts import CLOUD_FAILURES, EDGE_FAILURES, failure_reason, no_cloud, refusal
from protos.errors import ContextTooLong, ForebayError, InvalidArgument, Overloaded
from protos.labels import label_context, label_prior_context
from protos.values import LabelScore, ReleaseRef
from router.decision import Reason, Tier, TierPolicy, Verdict
from router.policy import after_labels, before_decoding, degraded, edge_cannot, effective_threshold


async def classify(
    query: LabelQuery,
    model: ServedModel,
    *,
    uplink: Uplink | None,
    threshold: float,
    deadline_margin_s: float,
    clock: Callable[[], float],
) -> LabelAnswer:
    """Classify one text.

    Args:
        threshold: Probability of the best label under which the cloud is asked.
        deadline_margin_s: Kept of the request's time when the cloud is asked.
        clock: Monotonic seconds.

    Raises:
        ForebayError: As `edge.engine.protocol.Engine.score_labels`, or `CloudUnavailable`.
    """
    return await _Classifying(query, model, uplink, deadline_margin_s, clock).run(
        effective_threshold(threshold, query.policy)
    )


class _Classifying:
    """The state of one classification."""

    def __init__(
        self,
        query: LabelQuery,
        model: ServedModel,
        uplink: Uplink | None,
        deadline_margin_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._query = query
        self._model = model
        self._uplink = uplink
        self._deadline_margin_s = deadline_margin_s
        self._clock = clock
        self._meter = Meter(clock)

    async def run(self, threshold: float) -> LabelAnswer:
        policy = self._query.policy
        verdict = before_decoding(policy)
        edge_scores: tuple[LabelScore, ...] | None = None
        if verdict.tier is Tier.EDGE:
            try:
                edge_scores = await self._on_edge()
            except EDGE_FAILURES as error:
                if policy.tier is TierPolicy.EDGE_ONLY or self._uplink is None:
                    raise
                verdict = edge_cannot(busy=isinstance(error, Overloaded))
            else:
                verdict = after_labels(
                    confidence=edge_scores[0].probability, threshold=threshold, policy=policy
                )
        if verdict.tier is Tier.EDGE:
            assert edge_scores is not None, "an edge verdict follows an edge answer"
            return self._answer(edge_scores, verdict)
        try:
            release, scores = await self._in_cloud()
        except (*CLOUD_FAILURES, InvalidArgument) as failure:
            # What the cloud cannot do, such as so long a text, an edge that has its scores did.
            if isinstance(failure, InvalidArgument) and edge_scores is None:
                raise
            return await self._degraded(verdict, edge_scores, failure)
        return self._answer(scores, verdict, cloud_release=release)

    async def _degraded(
        self, verdict: Verdict, scores: tuple[LabelScore, ...] | None, failure: ForebayError
    ) -> LabelAnswer:
        if not self._query.policy.allow_degraded:
            raise refusal(failure) from failure
        if scores is None:
            try:
                scores = await self._on_edge()
            except EDGE_FAILURES as error:
                if verdict.reason in (Reason.EDGE_BUSY, Reason.EDGE_FAILED):
                    raise
                raise refusal(failure) from error
            except ContextTooLong as error:
                # Too long for the edge, which was not asked first: the cloud could have served it.
                raise refusal(failure) from error
        reason = failure_reason(failure, has_cloud=self._uplink is not None)
        instead = degraded(verdict, reason=reason, detail=failure.message)
        return self._answer(scores, instead, degraded=True)

    async def _on_edge(self) -> tuple[LabelScore, ...]:
        query = self._query
        context = label_context(query.text, query.kind)
        context_tokens = await self._model.encode((), context)
        request = LabelRequest(
            request_id=f"{query.request_id}/labels",
            context_tokens=context_tokens,
            prior_tokens=await self._model.encode((), label_prior_context(query.kind)),
            labels=query.labels,
            label_tokens=await self._model.encode_labels(context, query.labels),
            deadline_s=max(0.0, query.deadline - self._clock()),
        )
        result = await self._model.engine.score_labels(request)
        self._meter.prompt(len(context_tokens))
        self._meter.timings.queue_s += result.queue_s
        self._meter.timings.decode_s += result.service_s
        return _best_first(result.scores)

    async def _in_cloud(self) -> tuple[ReleaseRef, tuple[LabelScore, ...]]:
        if self._uplink is None:
            raise no_cloud()
        self._meter.cloud_began()
        try:
            result = await self._uplink.classify(
                self._query,
                self._model.release.ref,
                deadline=self._query.deadline - self._deadline_margin_s,
            )
        finally:
            self._meter.cloud_ended()
        self._meter.prompt(result.prompt_tokens)
        return result.release, _best_first(result.scores)

    def _answer(
        self,
        scores: tuple[LabelScore, ...],
        verdict: Verdict,
        *,
        cloud_release: ReleaseRef | None = None,
        degraded: bool = False,
    ) -> LabelAnswer:
        self._meter.finish()
        return LabelAnswer(
            scores=scores,
            routed=Routed(
                verdict=verdict,
                edge_release=self._model.release.ref,
                edge_variant=self._model.variant.name,
                cloud_release=cloud_release,
                degraded=degraded,
            ),
            usage=self._meter.usage,
            timings=self._meter.timings,
        )


def _best_first(scores: tuple[LabelScore, ...]) -> tuple[LabelScore, ...]:
    return tuple(sorted(scores, key=lambda score: -score.probability))
