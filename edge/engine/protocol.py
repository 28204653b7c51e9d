"""What an engine is to the rest of the edge. Two engines speak it: ONNX Runtime and torch.

An engine serves one variant of one release. It runs in a process of its own; the object that
implements `Engine` lives in the servicer's process and never blocks the event loop.

Invariants
- Every accepted request ends in exactly one `Finished`, or its iterator raises exactly one `ForebayError`.
- The texts of a request's `Tokens` events, joined, are the answer; each is whole characters.
- Closing the iterator (`aclose`, cancellation) frees the request's batch slot and KV memory within 100 ms.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from protos.values import FinishReason, LabelScore, SamplingParams, TokenAlternative


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about a loaded engine.

    Attributes:
        variant: The quantization, such as `int4`.
        engine: `onnxruntime` or `torch`.
        context_tokens: Most tokens of prompt and answer together.
        max_batch: Most requests decoded in one step.
        kv_capacity_tokens: KV memory, in tokens, over all requests.
        kv_token_bytes: Bytes of KV memory that one token takes.
    """

    variant: str
    engine: str
    context_tokens: int
    max_batch: int
    kv_capacity_tokens: int
    kv_token_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of load.

    Attributes:
        running: Requests that hold KV memory.
        waiting: Requests that wait for it.
        kv_reserved_tokens: KV memory promised to the running ones (prompt + max_tokens each).
        restarts: How often the engine process was started again.
    """

    running: int
    waiting: int
    kv_reserved_tokens: int
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One text to decode.

    Attributes:
        request_id: Unique among the engine's live requests.
        prompt_tokens: Token ids, template applied. To continue a text, its tokens are part of the prompt.
        sampling: As asked. `seed` is never None here.
        deadline_s: Seconds from submission after which the engine drops the request. None: no deadline.
        prompt_stats: Whether the perplexity of the prompt is wanted (costs logits over the prompt).
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    deadline_s: float | None = None
    prompt_stats: bool = False


@dataclass(frozen=True, slots=True)
class TokenStat:
    """One decoded token and what the model thought of it. All under the raw distribution (temperature 1).

    Attributes:
        token_id: The chosen token.
        logprob: Natural logarithm of its probability.
        entropy: Of the distribution it was chosen from, in nats.
        margin: Probability of the most probable token less that of the second.
    """

    token_id: int
    logprob: float
    entropy: float
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The request left the queue and its prompt is in KV memory.

    Attributes:
        queue_s: Seconds it waited.
        prefill_s: Seconds the prompt took.
        prompt_logprob_mean: Mean log-probability of the prompt's tokens, when asked for.
    """

    queue_s: float
    prefill_s: float
    prompt_logprob_mean: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Newly decoded tokens, in order. `text` is what they add, whole characters only (may be empty while
    a character or a possible stop string is incomplete).

    `alternatives` is empty, or (logprobs asked for) one tuple per token; `pieces` likewise, the text
    of each token.
    """

    stats: tuple[TokenStat, ...]
    text: str
    alternatives: tuple[tuple[TokenAlternative, ...], ...] = ()
    pieces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of the text.

    Attributes:
        reason: `STOP` for an end-of-text token or a stop string, `LENGTH` for max_tokens.
        decode_s: Seconds from the first to the last token.
    """

    reason: FinishReason
    decode_s: float


EngineEvent = Started | Tokens | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRequest:
    """Score labels as continuations of a prompt.

    Attributes:
        context_tokens: Token ids of the text and the cue before the label.
        prior_tokens: The same without the text; its scores are cached per label set.
        labels: Display names, in order.
        label_tokens: Token ids of each label as it continues the context.
        deadline_s: As in `EngineRequest`.
    """

    request_id: str
    context_tokens: tuple[int, ...]
    prior_tokens: tuple[int, ...]
    labels: tuple[str, ...]
    label_tokens: tuple[tuple[int, ...], ...]
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelResult:
    """Scores in the order of the request's labels; `probability` is the softmax of likelihood less prior."""

    scores: tuple[LabelScore, ...]
    queue_s: float
    service_s: float


class Engine(Protocol):
    """One variant, loaded and serving."""

    @property
    def info(self) -> EngineInfo: ...

    def stats(self) -> EngineStats:
        """The latest snapshot; never waits."""
        ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Decode one text. `Started`, then `Tokens` as they come, then `Finished`.

        Raises:
            ContextTooLong: Prompt and max_tokens do not fit the context.
            Overloaded: No room within the bounded queue.
            EngineUnavailable: The engine process is not there, or died with this request in it.
            DeadlineExpired: `deadline_s` passed.
        """
        ...

    async def score_labels(self, request: LabelRequest) -> LabelResult:
        """Score labels. Raises as `generate` does."""
        ...

    async def close(self) -> None:
        """Stop, and give back all memory. Live requests raise `EngineUnavailable`."""
        ...
