"""What the cascade is asked and what it says. Domain values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from protos.values import ChatMessage, FinishReason, LabelScore, ReleaseRef, SamplingParams, TokenLogprob
from router.decision import Reason, RoutingPolicy, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One accepted request for text.

    Attributes:
        messages: A conversation, or empty when `prompt` is set.
        prompt: Text that goes to the model as it is.
        sampling: As asked; the seed is set.
        deadline: Monotonic seconds, on the cascade's clock.
    """

    request_id: str
    messages: tuple[ChatMessage, ...]
    prompt: str
    sampling: SamplingParams
    policy: RoutingPolicy
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelQuery:
    """One accepted classification. `deadline` as in `Query`."""

    request_id: str
    text: str
    labels: tuple[str, ...]
    kind: str
    policy: RoutingPolicy
    deadline: float


@dataclass(slots=True, kw_only=True)
class Usage:
    """Tokens spent, on either tier, kept or not."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    edge_tokens: int = 0
    cloud_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class Timings:
    """Seconds. What did not happen is 0."""

    queue_s: float = 0.0
    time_to_first_token_s: float = 0.0
    decode_s: float = 0.0
    cloud_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """The verdict and who was involved. `hand_off_offset` counts characters of the edge's text."""

    verdict: Verdict
    edge_release: ReleaseRef
    edge_variant: str
    cloud_release: ReleaseRef | None = None
    degraded: bool = False
    hand_off_offset: int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """More text, whole characters, never taken back."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOff:
    """The cloud continues the shown text from here."""

    offset: int
    reason: Reason
    confidence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The end: everything about it. Deltas, joined, are `text`."""

    text: str
    finish_reason: FinishReason
    routed: Routed
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = field(default=())


CascadeEvent = Delta | HandOff | Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelAnswer:
    """Scores, most probable first."""

    scores: tuple[LabelScore, ...]
    routed: Routed
    usage: Usage
    timings: Timings
