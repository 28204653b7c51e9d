"""The demo: realistic prompts through the edge's gRPC API, and what came of them.

Reads its prompts from `demo_prompts.toml`. Success means that every prompt was answered and each tier
answered at least one; `Summary.failure` decides, the command's exit code follows it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

import msgspec

from deploy.client import EdgeClient, chat_request
from protos.errors import ForebayError
from protos.forebay.v1 import common_pb2, inference_pb2

MAX_TOKENS = 96
TIMEOUT_S = 60.0


class Prompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt. `hard` marks what a 135M model cannot do."""

    text: str
    hard: bool = False


class Prompts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is asked, and the operator's instructions that go along each time."""

    system: str
    prompts: list[Prompt]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one prompt. Times are as the caller saw them, in seconds.

    Attributes:
        tier: `edge` or `cloud`; None when there was no answer.
        reason: Lower-case name, such as `low_confidence`.
        confidence: Of the edge's answer; None when it had none.
        time_to_first_token_s: Until the first text; equal to the total for an empty answer.
        degraded: The edge's text stood in for the cloud's.
        error: The sentence of the error that came instead of an answer.
    """

    prompt: str
    text: str = ""
    tier: str | None = None
    reason: str = ""
    confidence: float | None = None
    time_to_first_token_s: float = 0.0
    total_s: float = 0.0
    degraded: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Of one tier's answers, in seconds."""

    tier: str
    answers: int
    mean_s: float
    p50_s: float
    p95_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Over all prompts. `failure` is None for success, else a sentence."""

    answered: int
    asked: int
    edge_share: float
    latencies: tuple[Latency, ...]
    failure: str | None


def load_prompts() -> Prompts:
    """The packaged prompts."""
    raw = resources.files(__package__).joinpath("demo_prompts.toml").read_bytes()
    return msgspec.toml.decode(raw, type=Prompts)


async def ask_one(
    client: EdgeClient,
    prompt: Prompt,
    *,
    system: str,
    model: str,
    clock: Callable[[], float],
    on_text: Callable[[str], None],
) -> Outcome:
    """Ask one prompt, handing each piece of text to `on_text` as it comes. An error becomes the outcome's."""
    messages = [("system", system), ("user", prompt.text)]
    request = chat_request(messages, model=model, max_tokens=MAX_TOKENS)
    started = clock()
    first: float | None = None
    final: inference_pb2.GenerateResponse | None = None
    try:
        async for event in client.stream(request, timeout_s=TIMEOUT_S):
            if event.HasField("delta") and event.delta.text:
                first = clock() if first is None else first
                on_text(event.delta.text)
            elif event.HasField("final"):
                final = event.final
    except ForebayError as error:
        failure = f"{error.reason}: {error.message}"
        return Outcome(prompt=prompt.text, error=failure, total_s=clock() - started)
    ended = clock()
    if final is None:
        failure = "the stream ended without a final message"
        return Outcome(prompt=prompt.text, error=failure, total_s=ended - started)
    decision = final.decision
    return Outcome(
        prompt=prompt.text,
        text=final.text,
        tier=common_pb2.Tier.Name(decision.tier).removeprefix("TIER_").lower(),
        reason=common_pb2.Reason.Name(decision.reason).removeprefix("REASON_").lower(),
        confidence=decision.confidence if decision.HasField("confidence") else None,
        time_to_first_token_s=(ended if first is None else first) - started,
        total_s=ended - started,
        degraded=decision.degraded,
    )


def summarize(outcomes: Sequence[Outcome]) -> Summary:
    """Shares and latencies, and whether the demo showed what it is to show."""
    answered = [o for o in outcomes if o.error is None and o.tier is not None]
    by_tier = {tier: [o.total_s for o in answered if o.tier == tier] for tier in ("edge", "cloud")}
    unanswered = len(outcomes) - len(answered)
    failure = None
    if not outcomes:
        failure = "nothing was asked"
    elif unanswered:
        failure = f"{unanswered} of {len(outcomes)} prompts got no answer"
    elif silent := [tier for tier, times in by_tier.items() if not times]:
        failure = f"the {silent[0]} answered none of the prompts"
    return Summary(
        answered=len(answered),
        asked=len(outcomes),
        edge_share=len(by_tier["edge"]) / len(answered) if answered else 0.0,
        latencies=tuple(_latency(tier, times) for tier, times in by_tier.items() if times),
        failure=failure,
    )


def _latency(tier: str, times: list[float]) -> Latency:
    ordered = sorted(times)
    # Nearest rank: with a dozen answers an interpolated 95th percentile would be a number that never was.
    p95 = ordered[min(len(ordered) - 1, -(-95 * len(ordered) // 100) - 1)]
    return Latency(
        tier=tier,
        answers=len(times),
        mean_s=statistics.fmean(times),
        p50_s=statistics.median(times),
        p95_s=p95,
    )
