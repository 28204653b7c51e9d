"""What the cloud tier does for an edge: generate, continue, classify. Domain values only; no gRPC, no HTTP.

Invariants
- Release first: a request for another release is refused before anything is spent on it.
- Everything happens inside the request's time; what is over it ends in `DeadlineExpired`.
- A place in the engine is held exactly while the engine works for the request.
- A prefix is tokens behind the prompt, so the answer goes on right behind it: no character of it is
  repeated, trimmed or changed, whatever the chat template does to an assistant's message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeVar

from cloud.admission import AdmissionGate
from cloud.classifier import Classifier
from cloud.prefix import PrefixJoin
from cloud.text import CloudTokenizer
from cloud.vllm.client import StreamEnd, TextPiece, VllmClient
from protos.errors import ContextTooLong, DeadlineExpired, EngineUnavailable, ReleaseMismatch
from protos.values import ChatMessage, FinishReason, LabelScore, ReleaseRef, SamplingParams

T = TypeVar("T")

# While vLLM starts or restarts; it takes tens of seconds.
_NOT_READY_RETRY_S = 2.0
# Encoding fewer characters than this takes under a millisecond, so a thread would cost more.
_INLINE_CHARACTERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudRequest:
    """One text to produce. Exactly one of `messages`, `prompt`, `prompt_tokens` is set.

    Attributes:
        prefix_text: What the caller has been shown already; or
        prefix_tokens: the same as this model's token ids.
    """

    release: ReleaseRef
    sampling: SamplingParams
    messages: tuple[ChatMessage, ...] = ()
    prompt: str = ""
    prompt_tokens: tuple[int, ...] = ()
    prefix_text: str = ""
    prefix_tokens: tuple[int, ...] = ()

    @property
    def input_field(self) -> str:
        """The field that holds the input, for error messages."""
        return "messages" if self.messages else "prompt" if self.prompt else "prompt_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudEnd:
    """The facts at the end of an answer. Times in seconds; `prompt_tokens` includes the prefix."""

    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    queue_s: float
    time_to_first_token_s: float
    decode_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudScores:
    """Scores in the order of the request's labels. Times in seconds."""

    scores: tuple[LabelScore, ...]
    prompt_tokens: int
    queue_s: float
    service_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudStatus:
    """What is served now, and how busy it is. `ready` is None while the engine is not there."""

    ready: ReleaseRef | None
    running: int
    queued: int
    queue_capacity: int


class Dataplane:
    """Serves one release.

    Args:
        ready: Whether the engine can be asked now.
        clock: Monotonic seconds, the event loop's own (deadlines are set on it).
    """

    def __init__(
        self,
        *,
        release: ReleaseRef,
        client: VllmClient,
        tokenizer: CloudTokenizer,
        classifier: Classifier,
        gate: AdmissionGate,
        queue_capacity: int,
        ready: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._release = release
        self._client = client
        self._tokenizer = tokenizer
        self._classifier = classifier
        self._gate = gate
        self._queue_capacity = queue_capacity
        self._ready = ready
        self._clock = clock
        self._context_tokens: int | None = None
        self._tokenizes = True

    @property
    def release(self) -> ReleaseRef:
        return self._release

    async def learn(self) -> None:
        """Ask the engine for its context, and whether it tokenizes conversations.

        Raises:
            ForebayError: The engine cannot serve this release.
        """
        self._context_tokens = await self._client.context_tokens()
        self._tokenizes = await self._client.tokenizes()

    async def warm_up(self) -> None:
        """`learn`, and pay the first-request costs of a new engine before anyone waits for them.

        Raises:
            ForebayError: The engine cannot serve this release.
        """
        await self.learn()
        token_ids = self._tokenizer.encode("Hello", special=True)
        # Greedy, and then the sampler and the log-probabilities, which are compiled on first use.
        greedy = SamplingParams(max_tokens=2)
        sampled = SamplingParams(
            max_tokens=2, temperature=0.7, top_p=0.9, top_k=8, seed=1, repetition_penalty=1.1, logprobs=1
        )
        for sampling in (greedy, sampled):
            async with aclosing(self._stream(token_ids, sampling, field="prompt")) as events:
                async for _ in events:
                    pass

    def status(self) -> CloudStatus:
        return CloudStatus(
            ready=self._release if self._ready() else None,
            running=self._gate.running,
            queued=self._gate.queued,
            queue_capacity=self._queue_capacity,
        )

    async def generate(
        self, request: CloudRequest, *, timeout_s: float
    ) -> AsyncGenerator[TextPiece | CloudEnd, None]:
        """Produce one text: `TextPiece`s, then one `CloudEnd`. Close the iterator to stop the work.

        Raises:
            ReleaseMismatch, ContextTooLong, InvalidArgument, Overloaded, EngineUnavailable, DeadlineExpired
        """
        self._check(request.release)
        deadline_s = self._clock() + timeout_s
        join = PrefixJoin.of(request.prefix_text)
        if request.messages and not self._tokenizes and not request.prefix_tokens:
            stream = self._client.stream_chat(request.messages, join.shown_to_model, request.sampling)
        else:
            token_ids = await self._within(deadline_s, lambda: self._tokens(request, join.shown_to_model))
            self._check_context(len(token_ids), request)
            stream = self._stream(token_ids, request.sampling, field=request.input_field)
        async with self._gate.admit(deadline_s - self._clock()) as place:
            started_s = first_s = last_s = self._clock()
            seen = False
            async with aclosing(stream) as events:
                while True:
                    event = await self._within(deadline_s, lambda: anext(events))
                    now_s = self._clock()
                    if isinstance(event, StreamEnd):
                        break
                    if event.tokens:
                        first_s, last_s = (first_s if seen else now_s), now_s
                        seen = True
                    yield replace(event, text=join.take(event.text))
        yield CloudEnd(
            finish_reason=event.finish_reason,
            prompt_tokens=event.prompt_tokens,
            completion_tokens=event.completion_tokens,
            queue_s=place.queue_s,
            time_to_first_token_s=first_s - started_s,
            decode_s=last_s - first_s,
        )

    async def classify(
        self, release: ReleaseRef, *, text: str, labels: tuple[str, ...], kind: str, timeout_s: float
    ) -> CloudScores:
        """Score labels. Raises as `generate` does."""
        self._check(release)
        deadline_s = self._clock() + timeout_s
        async with self._gate.admit(timeout_s) as place:
            started_s = self._clock()
            result = await self._within(
                deadline_s,
                lambda: self._classifier.classify(
                    text=text, labels=labels, kind=kind, context_tokens=self._context_tokens
                ),
            )
            return CloudScores(
                scores=result.scores,
                prompt_tokens=result.prompt_tokens,
                queue_s=place.queue_s,
                service_s=self._clock() - started_s,
            )

    def _check(self, release: ReleaseRef) -> None:
        if release != self._release:
            raise ReleaseMismatch(
                f"this cloud serves {self._release}, not {release}",
                metadata={"served": str(self._release)},
            )
        if not self._ready():
            raise EngineUnavailable("the cloud's engine is not ready", retry_after_s=_NOT_READY_RETRY_S)

    def _check_context(self, prompt_tokens: int, request: CloudRequest) -> None:
        limit = self._context_tokens
        wanted = prompt_tokens + request.sampling.max_tokens
        if limit is not None and wanted > limit:
            raise ContextTooLong(
                f"{prompt_tokens} prompt tokens and max_tokens = {request.sampling.max_tokens} exceed the"
                f" cloud model's context of {limit} tokens",
                field=request.input_field if prompt_tokens >= limit else "sampling.max_tokens",
                metadata={"context_tokens": str(limit), "prompt_tokens": str(prompt_tokens)},
            )

    async def _tokens(self, request: CloudRequest, prefix_text: str) -> tuple[int, ...]:
        if request.prompt:
            prompt = await self._encode(request.prompt + prefix_text, special=True)
            return prompt + request.prefix_tokens
        prompt = request.prompt_tokens
        if request.messages:
            prompt = await self._client.chat_tokens(request.messages)
        prefix = request.prefix_tokens
        if prefix_text:
            prefix = await self._encode(prefix_text, special=False)
        return prompt + prefix

    async def _encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        if len(text) <= _INLINE_CHARACTERS:
            return self._tokenizer.encode(text, special=special)
        return await asyncio.to_thread(self._tokenizer.encode, text, special=special)

    def _stream(
        self, token_ids: tuple[int, ...], sampling: SamplingParams, *, field: str
    ) -> AsyncGenerator[TextPiece | StreamEnd, None]:
        return self._client.stream(token_ids, sampling, field=field, token_text=self._tokenizer.token_text)

    async def _within(self, deadline_s: float, step: Callable[[], Awaitable[T]]) -> T:
        """One step inside the deadline. No timeout ever spans a `yield`, where it would hit the consumer."""
        try:
            async with asyncio.timeout(deadline_s - self._clock()):
                return await step()
        except TimeoutError:
            raise DeadlineExpired("the deadline passed before the cloud's answer was complete") from None
