"""The chat completions of a cluster that is OpenAI-compatible but does not tokenize for us. Pure.

vLLM's own server is asked by token ids (`cloud.vllm.wire`); this is for fronts that have no `/tokenize`.
Fields beyond OpenAI's are sent only where they say something, since some fronts refuse what they do not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cloud.vllm.wire import SEED_MASK, ErrorBody, Usage
from protos.values import ChatMessage, SamplingParams


class ChatDelta(msgspec.Struct, frozen=True):
    """New text."""

    content: str | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """Of the one answer asked for."""

    delta: ChatDelta = ChatDelta()
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, frozen=True):
    """One event; as `cloud.vllm.wire.StreamChunk`."""

    choices: list[ChatChoice] = []
    usage: Usage | None = None
    error: ErrorBody | None = None


def chat_body(
    model: str, messages: Sequence[ChatMessage], prefix_text: str, sampling: SamplingParams
) -> dict[str, Any]:
    """A streamed chat completion; a prefix becomes an assistant's message that is to be continued."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": m.role.value, "content": m.content} for m in messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    if prefix_text:
        body["messages"].append({"role": "assistant", "content": prefix_text})
        body["add_generation_prompt"] = False
        body["continue_final_message"] = True
    if sampling.top_k:
        body["top_k"] = sampling.top_k
    if sampling.repetition_penalty != 1.0:
        body["repetition_penalty"] = sampling.repetition_penalty
    if sampling.seed is not None:
        body["seed"] = sampling.seed & SEED_MASK
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    return body
