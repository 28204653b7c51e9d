"""A request's life: edge first, cloud where the edge is not sure enough, and never a word taken back.

One data plane for unary and streamed calls. They differ in one thing only: a stream shows text while it
forms, and what has been shown binds whoever continues.

Invariants
- The deltas of a request, joined, are the text of its `Answer`; exactly one `Answer` ends it, or one error.
- The cloud continues the shown text; text that the edge had decoded but not shown is thrown away.
- Where the cloud should have answered and cannot, the edge goes on from the shown text, marked degraded,
  or the request fails with `CloudUnavailable` when its policy forbids that.
- Leaving the iterator stops the engine's and the cloud's work on the request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from edge.cloud_values import CloudEnd, CloudQuery
from edge.engine.protocol import EngineRequest, Finished, Started, Tokens
from edge.ledger import Ledger
from edge.meter import Meter
from edge.request import Answer, CascadeEvent, Delta, HandOff, Query, Routed
from edge.serving import ServedModel
from edge.uplink import Uplink
from edge.verdicts import CLOUD_FAILURES, EDGE_FAILURES, failure_reason, no_cloud, refusal
from protos.errors import CloudUnavailable, ContextTooLong, ForebayError, InvalidArgument, Overloaded
from protos.values import FinishReason, ReleaseRef, TokenLogprob
from router.decision import Reason, Tier, TierPolicy, Verdict
from router.policy import (
    after_decoding,
    before_decoding,
    degraded,
    early_exit,
    edge_cannot,
    effective_threshold,
    worth_forwarding,
)
from router.signals import RunningSignals
from router.stream_gate import GateAction, GateSettings, gate


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeSettings:
    """How the cascade behaves on this node.

    Attributes:
        quantile: Of token log-probabilities, the first signal.
        gate: When text is shown and the edge is given up.
        flush_interval_s: Deltas are joined for at most this long, the first excepted.
        deadline_margin_s: Kept of a request's time for answering on the edge after all.
    """

    quantile: float = 0.1
    gate: GateSettings = dataclasses.field(default_factory=GateSettings)
    flush_interval_s: float = 0.015
    deadline_margin_s: float = 0.5


def answer(
    query: Query,
    model: ServedModel,
    *,
    uplink: Uplink | None,
    settings: CascadeSettings,
    show_early: bool,
    clock: Callable[[], float],
) -> AsyncGenerator[CascadeEvent, None]:
    """Answer one request. Close the iterator to stop.

    Args:
        uplink: None where no cloud is configured.
        show_early: Whether deltas are wanted (a stream), or only the `Answer`.
        clock: Monotonic seconds.

    Raises:
        ForebayError: As `edge.engine.protocol.Engine.generate`, or `CloudUnavailable`.
    """
    return _Answering(query, model, uplink, settings, show_early, clock).run()


class _Answering:
    """The state of one request."""

    def __init__(
        self,
        query: Query,
        model: ServedModel,
        uplink: Uplink | None,
        settings: CascadeSettings,
        show_early: bool,
        clock: Callable[[], float],
    ) -> None:
        self._query = query
        self._model = model
        self._uplink = uplink
        self._settings = settings
        self._show_early = show_early
        self._clock = clock
        self._meter = Meter(clock)
        self._threshold = effective_threshold(model.variant.threshold, query.policy)
        self._pinned = query.policy.tier is TierPolicy.EDGE_ONLY
        # Nobody else could answer, and the caller takes what there is: holding text back would help nobody.
        self._alone = uplink is None and query.policy.allow_degraded
        self._ledger = Ledger()
        # How much of the edge's text the gate has let through for its confidence.
        self._sure_characters = 0
        self._edge_began = False
        self._edge_finish: FinishReason | None = None
        self._cloud_logprobs: list[TokenLogprob] = []
        self._cloud_release: ReleaseRef | None = None
        # The cloud's part where nobody reads deltas: if the cloud breaks off, it leaves no trace.
        self._unseen_cloud_text = ""
        self._unseen_cloud_tokens = 0
        self._hand_off_offset: int | None = None
        # Shown text that waits to be sent together with what follows it.
        self._unsent = ""
        self._flushed_at: float | None = None
        self._engine_calls = 0

    async def run(self) -> AsyncGenerator[CascadeEvent, None]:
        verdict = before_decoding(self._query.policy)
        if verdict.tier is Tier.EDGE:
            outcome: list[Verdict] = []
            async with aclosing(self._try_edge(outcome)) as events:
                async for event in events:
                    yield event
            verdict = outcome[0]
        if verdict.tier is Tier.EDGE:
            yield self._edge_answer(verdict)
            return
        async with aclosing(self._from_cloud(verdict)) as events:
            async for event in events:
                yield event

    async def _try_edge(self, outcome: list[Verdict]) -> AsyncGenerator[CascadeEvent, None]:
        """Decode on the edge until it is finished or given up; puts the verdict into `outcome`."""
        signals = RunningSignals(quantile=self._settings.quantile)
        try:
            prompt = await self._model.encode(self._query.messages, self._query.prompt)
            async with aclosing(self._decode(prompt, self._query.sampling.max_tokens)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        break
                    for stat in event.stats:
                        signals.add(logprob=stat.logprob, entropy=stat.entropy, margin=stat.margin)
                    if (verdict := self._pass_gate(signals)) is not None:
                        outcome.append(verdict)
                        break
                    if self._flush_is_due() and (delta := self._show()) is not None:
                        yield delta
        except EDGE_FAILURES as error:
            if self._pinned or self._uplink is None:
                raise
            outcome.append(edge_cannot(busy=isinstance(error, Overloaded)))
        if not outcome:
            outcome.append(self._judge(signals))
        if outcome[0].tier is Tier.EDGE:
            self._release()
        # What the gate let through is the answer's, whoever continues it.
        if (shown := self._show()) is not None:
            yield shown

    def _pass_gate(self, signals: RunningSignals) -> Verdict | None:
        """Let the edge's text so far through, or hold it. A verdict means: leave the edge."""
        running = signals.snapshot()
        confidence = self._model.confidence.confidence(running)
        action = gate(
            tokens=running.tokens,
            confidence=confidence,
            threshold=self._threshold,
            settings=self._settings.gate,
        )
        leaving = action is GateAction.LEAVE and not self._pinned
        if leaving and worth_forwarding(
            breaker_lets_through=self._uplink is not None and self._uplink.likely(),
            left_s=self._query.deadline - self._clock(),
            margin_s=self._settings.deadline_margin_s,
        ):
            return early_exit(tokens=running.tokens, confidence=confidence, threshold=self._threshold)
        if action is GateAction.SHOW:
            self._sure_characters = len(self._ledger.edge_text)
        if action is GateAction.SHOW or self._pinned or self._alone:
            self._release()
        return None

    def _judge(self, signals: RunningSignals) -> Verdict:
        """Keep the finished edge answer, or forward."""
        final = signals.snapshot(truncated=self._edge_finish is FinishReason.LENGTH)
        return after_decoding(
            confidence=self._model.confidence.confidence(final),
            threshold=self._threshold,
            policy=self._query.policy,
            signals=final,
            unseen=not self._ledger.edge_text
            or self._ledger.has_unreleased
            or self._sure_characters < len(self._ledger.edge_text),
        )

    async def _decode(
        self, prompt: tuple[int, ...], max_tokens: int
    ) -> AsyncGenerator[Tokens | Finished, None]:
        """The engine's events, with the books kept: edge text, tokens, times, logprobs."""
        self._engine_calls += 1
        request = EngineRequest(
            request_id=f"{self._query.request_id}/{self._engine_calls}",
            prompt_tokens=prompt,
            sampling=dataclasses.replace(self._query.sampling, max_tokens=max_tokens),
            deadline_s=max(0.0, self._query.deadline - self._clock()),
        )
        self._meter.prompt(len(prompt))
        self._edge_finish = None
        began: float | None = None
        try:
            async with aclosing(self._model.engine.generate(request)) as events:
                async for event in events:
                    if isinstance(event, Started):
                        began = self._clock()
                        self._edge_began = True
                        self._meter.timings.queue_s += event.queue_s
                        continue
                    if isinstance(event, Tokens):
                        self._meter.usage.edge_tokens += len(event.stats)
                        self._ledger.decoded(event, logprobs=self._query.sampling.logprobs is not None)
                    else:
                        self._edge_finish = event.reason
                    yield event
        finally:
            if began is not None:
                self._meter.timings.decode_s += self._clock() - began

    def _release(self) -> None:
        """The edge's text so far may be shown. Without a reader of deltas nothing is, before the end."""
        if self._show_early or self._edge_finish is not None:
            self._ledger.release()

    def _flush_is_due(self) -> bool:
        """Whether the last delta is long enough ago; the first one is due at once."""
        last = self._flushed_at
        return last is None or self._clock() - last >= self._settings.flush_interval_s

    def _show(self) -> Delta | None:
        """Send what may be shown and is new. Where nobody reads deltas, it counts all the same."""
        text = self._unsent + self._ledger.take()
        self._unsent = ""
        if not text or not self._show_early:
            return None
        self._flushed_at = self._meter.shown()
        return Delta(text)

    async def _from_cloud(self, verdict: Verdict) -> AsyncGenerator[CascadeEvent, None]:
        """The cloud's answer, continuing what was shown; or the edge's, degraded."""
        failure: ForebayError = no_cloud()
        if self._uplink is not None:
            self._meter.cloud_began()
            try:
                async with aclosing(self._ask_cloud(self._uplink, verdict)) as events:
                    async for event in events:
                        yield event
                return
            except (*CLOUD_FAILURES, InvalidArgument) as error:
                # What the cloud cannot do, such as so long a text, an edge that took the request can.
                if isinstance(error, InvalidArgument) and not self._edge_began:
                    raise
                failure = error
            finally:
                self._meter.cloud_ended()
        if not self._query.policy.allow_degraded:
            raise refusal(failure) from failure
        try:
            async with aclosing(self._finish_on_edge()) as deltas:
                async for delta in deltas:
                    yield delta
        except (*EDGE_FAILURES, ContextTooLong) as error:
            edge_was_first = verdict.reason in (Reason.EDGE_BUSY, Reason.EDGE_FAILED)
            # What is too long for the edge, the cloud could have served: that is not the caller's fault.
            if edge_was_first and not isinstance(error, ContextTooLong):
                raise
            raise refusal(failure) from error
        reason = failure_reason(failure, has_cloud=self._uplink is not None)
        instead = degraded(verdict, reason=reason, detail=failure.message)
        yield self._edge_answer(instead, degraded=True)

    async def _ask_cloud(self, uplink: Uplink, verdict: Verdict) -> AsyncGenerator[CascadeEvent, None]:
        sampling = self._query.sampling
        shown = self._ledger.shown
        left = sampling.max_tokens - self._ledger.shown_tokens
        if shown and left <= 0:
            # Everything that was asked for has been shown.
            self._edge_finish = FinishReason.LENGTH
            yield self._edge_answer(dataclasses.replace(verdict, tier=Tier.EDGE))
            return
        query = CloudQuery(
            request_id=self._query.request_id,
            release=self._model.release.ref,
            messages=self._query.messages,
            prompt=self._query.prompt,
            prefix=shown,
            sampling=dataclasses.replace(sampling, max_tokens=left),
        )
        deadline = self._query.deadline - self._settings.deadline_margin_s
        tokens = 0
        async with aclosing(uplink.generate(query, deadline=deadline)) as events:
            async for event in events:
                if shown and self._hand_off_offset is None:
                    self._hand_off_offset = len(shown)
                    yield HandOff(
                        offset=len(shown), reason=verdict.reason, confidence=verdict.confidence or 0.0
                    )
                if isinstance(event, CloudEnd):
                    self._cloud_release = event.release
                    # The cloud's own count is the truer one; pieces may lack theirs.
                    self._add_cloud_text("", max(event.completion_tokens - tokens, 0))
                    self._meter.prompt(event.prompt_tokens)
                    if (delta := self._show()) is not None:
                        yield delta
                    yield self._answer(verdict, event.finish_reason, self._cloud_logprobs)
                    return
                tokens += event.tokens
                self._cloud_logprobs.extend(event.logprobs)
                self._add_cloud_text(event.text, event.tokens)
                if self._flush_is_due() and (delta := self._show()) is not None:
                    yield delta
        raise CloudUnavailable("the cloud's answer broke off", retry_after_s=1.0)

    def _add_cloud_text(self, text: str, tokens: int) -> None:
        self._meter.usage.cloud_tokens += tokens
        if self._show_early:
            self._ledger.continued(text, tokens)
            self._unsent += text
        else:
            self._unseen_cloud_text += text
            self._unseen_cloud_tokens += tokens

    async def _finish_on_edge(self) -> AsyncGenerator[Delta, None]:
        """Complete the text on the edge, from the shown text or, where the cloud added none, the edge's."""
        self._unseen_cloud_text, self._unseen_cloud_tokens = "", 0
        if self._edge_finish is None or self._ledger.by_cloud:
            base, base_tokens = self._ledger.resume()
            left = self._query.sampling.max_tokens - base_tokens
            if left <= 0:
                self._edge_finish = FinishReason.LENGTH
            else:
                async with aclosing(self._resume(base, left)) as deltas:
                    async for delta in deltas:
                        yield delta
        self._release()
        if (rest := self._show()) is not None:
            yield rest

    async def _resume(self, base: str, left: int) -> AsyncGenerator[Delta, None]:
        try:
            prompt = await self._model.encode(self._query.messages, self._query.prompt, prefix=base)
            async with aclosing(self._decode(prompt, left)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        break
                    self._release()
                    if self._flush_is_due() and (delta := self._show()) is not None:
                        yield delta
        except ContextTooLong:
            # The prompt fits and the text so far came from it: it is the end of the context.
            if not base:
                raise
            self._edge_finish = FinishReason.LENGTH

    def _edge_answer(self, verdict: Verdict, *, degraded: bool = False) -> Answer:
        assert self._edge_finish is not None, "the edge's answer is given only when it is finished"
        return self._answer(verdict, self._edge_finish, self._ledger.edge_logprobs, degraded=degraded)

    def _answer(
        self,
        verdict: Verdict,
        finish: FinishReason,
        logprobs: list[TokenLogprob],
        *,
        degraded: bool = False,
    ) -> Answer:
        self._meter.finish()
        self._meter.usage.completion_tokens = self._ledger.shown_tokens + self._unseen_cloud_tokens
        return Answer(
            text=self._ledger.shown + self._unseen_cloud_text,
            finish_reason=finish,
            routed=Routed(
                verdict=verdict,
                edge_release=self._model.release.ref,
                edge_variant=self._model.variant.name,
                cloud_release=self._cloud_release,
                degraded=degraded,
                hand_off_offset=self._hand_off_offset,
            ),
            usage=self._meter.usage,
            timings=self._meter.timings,
            logprobs=tuple(logprobs),
        )
