"""vLLM's HTTP messages as typed values: request bodies out, JSON and server-sent events in.

Pure. Only the fields that this tier reads are declared; unknown ones are skipped, so a newer vLLM may say
more. Tested against vLLM 0.32's completions API with its extensions `return_token_ids`,
`return_tokens_as_token_ids` and `prompt_logprobs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from protos.values import ChatMessage, FinishReason, SamplingParams, TokenAlternative, TokenLogprob

DONE: Final = "[DONE]"
_TOKEN_PREFIX: Final = "token_id:"  # noqa: S105 - a marker of vLLM's, not a secret
# vLLM takes a signed 64-bit seed, the contract an unsigned one.
SEED_MASK: Final = 2**63 - 1


class WireError(Exception):
    """The engine said something that this tier does not understand."""


class ErrorBody(msgspec.Struct, frozen=True):
    """The inside of an error answer. `code` repeats the HTTP status."""

    message: str = ""
    param: str | None = None
    code: int | str | None = None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """An error answer."""

    error: ErrorBody


class Usage(msgspec.Struct, frozen=True):
    """Token counts so far."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """One entry per token. With `return_tokens_as_token_ids` a token is written `token_id:42`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class StreamChoice(msgspec.Struct, frozen=True):
    """New text of the one answer asked for."""

    text: str = ""
    token_ids: list[int] | None = None
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class StreamChunk(msgspec.Struct, frozen=True):
    """One event. The one with `usage` alone has no choice; an error in mid-stream has only `error`."""

    choices: list[StreamChoice] = []
    usage: Usage | None = None
    error: ErrorBody | None = None


class PromptLogprob(msgspec.Struct, frozen=True):
    """Of one prompt token."""

    logprob: float


class ScoredChoice(msgspec.Struct, frozen=True):
    """The prompt's log-probabilities by position and token id; the first position has none."""

    index: int
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class ScoredAnswer(msgspec.Struct, frozen=True):
    """One choice per prompt."""

    choices: list[ScoredChoice]


class TokenizeAnswer(msgspec.Struct, frozen=True):
    """A rendered and tokenized conversation."""

    tokens: list[int]


class ModelCard(msgspec.Struct, frozen=True):
    """A served model. `max_model_len` is the context in tokens."""

    id: str
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True):
    """The served models."""

    data: list[ModelCard]


def tokenize_body(model: str, messages: Sequence[ChatMessage]) -> dict[str, Any]:
    """Render a conversation, up to where the assistant's answer begins.

    The template writes special tokens itself, so none are added.
    """
    return {
        "model": model,
        "messages": [{"role": m.role.value, "content": m.content} for m in messages],
        "add_generation_prompt": True,
        "add_special_tokens": False,
    }


def stream_body(model: str, prompt_tokens: Sequence[int], sampling: SamplingParams) -> dict[str, Any]:
    """A streamed completion. Every sampling field is said, since vLLM else takes the model's own defaults."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt_tokens),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "n": 1,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": sampling.repetition_penalty,
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed & SEED_MASK
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.logprobs is not None:
        body["logprobs"] = sampling.logprobs
        body["return_tokens_as_token_ids"] = True
    return body


def score_body(model: str, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Log-probabilities of prompts. vLLM always decodes one token; it is thrown away."""
    return {
        "model": model,
        "prompt": [list(prompt) for prompt in prompts],
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
    }


def event_data(line: str) -> str | None:
    """The data of one line of a server-sent event stream. None: a comment, another field, or a blank."""
    if not line.startswith("data:"):
        return None
    return line[len("data:") :].strip()


def finish_reason_of(name: str) -> FinishReason:
    """Raises WireError for an end that is not one of the contract's, such as `abort`."""
    match name:
        case "stop":
            return FinishReason.STOP
        case "length":
            return FinishReason.LENGTH
        case _:
            raise WireError(f"the engine ended the text for the reason {name!r}")


def token_logprobs_of(
    raw: CompletionLogprobs, *, count: int, token_text: Callable[[int], str]
) -> tuple[TokenLogprob, ...]:
    """Log-probabilities in the contract's form.

    Args:
        count: How many alternatives were asked for.
        token_text: The text of a token id.

    Raises:
        WireError: The lists do not match, or tokens are not given by id.
    """
    tops = raw.top_logprobs if raw.top_logprobs is not None else [None] * len(raw.tokens)
    if not len(raw.tokens) == len(raw.token_logprobs) == len(tops):
        raise WireError("the engine gave log-probabilities of unequal length")
    out: list[TokenLogprob] = []
    for token, logprob, top in zip(raw.tokens, raw.token_logprobs, tops, strict=True):
        if logprob is None:
            raise WireError("the engine left out a log-probability")
        # The chosen token comes on top of the alternatives when it is not one of them.
        best = sorted((top or {}).items(), key=lambda item: -item[1])[:count]
        alternatives = [(_token_id(name), value) for name, value in best]
        token_id = _token_id(token)
        out.append(
            TokenLogprob(
                token_id=token_id,
                token=token_text(token_id),
                logprob=logprob,
                top=tuple(
                    TokenAlternative(token_id=other, token=token_text(other), logprob=value)
                    for other, value in alternatives
                ),
            )
        )
    return tuple(out)


def log_likelihood_of(choice: ScoredChoice, prompt: Sequence[int], start: int) -> float:
    """Sum of the log-probabilities of `prompt[start:]`, each given what stands before it.

    Raises:
        WireError: The engine did not score this prompt.
    """
    scored = choice.prompt_logprobs
    if scored is None or len(scored) != len(prompt):
        raise WireError("the engine did not score the prompt: is it vLLM, with prompt_logprobs allowed?")
    values: list[float] = []
    for position in range(start, len(prompt)):
        entry = (scored[position] or {}).get(str(prompt[position]))
        if entry is None:
            raise WireError("the engine left out a log-probability of the prompt")
        values.append(entry.logprob)
    return math.fsum(values)


def _token_id(name: str) -> int:
    digits = name.removeprefix(_TOKEN_PREFIX)
    if digits == name or not digits.isascii() or not digits.isdigit():
        raise WireError("the engine does not give tokens by id: it must be vLLM")
    return int(digits)
