"""Scores labels by the cloud model's likelihood of each, less what it thinks of the label alone.

The strings are those of `protos.labels`, the same as on the edge. The prior of a label set is computed once
and kept; the cache is bounded. One request to the engine carries a bounded number of tokens, so that a
large label set does not push everybody else out of the batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from cloud.text import CloudTokenizer
from cloud.vllm.client import VllmClient
from protos.errors import ContextTooLong
from protos.labels import label_context, label_continuation, label_prior_context, label_scores
from protos.values import LabelScore

_MAX_PROMPTS_PER_CALL = 16
_MAX_TOKENS_PER_CALL = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """Scores in the order of the labels. `prompt_tokens` counts the text and the cue once."""

    scores: tuple[LabelScore, ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class _LabelSet:
    tokens: tuple[tuple[int, ...], ...]
    prior: tuple[float, ...]


class Classifier:
    """Args:
    cached_sets: Most label sets whose prior is kept, the least recently used dropped first.
    """

    def __init__(self, client: VllmClient, tokenizer: CloudTokenizer, *, cached_sets: int = 256) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._cached_sets = cached_sets
        self._sets: OrderedDict[tuple[str, tuple[str, ...]], _LabelSet] = OrderedDict()

    async def classify(
        self, *, text: str, labels: tuple[str, ...], kind: str, context_tokens: int | None
    ) -> Classification:
        """Score `labels` as continuations of `text`.

        Args:
            context_tokens: The model's context; None when the engine does not say.

        Raises:
            ContextTooLong: Text and label do not fit it.
        """
        context = self._tokenizer.encode(label_context(text, kind), special=True)
        label_tokens = [self._label_tokens(label) for label in labels]
        longest = len(context) + max(map(len, label_tokens))
        # The engine decodes one token behind what it scores.
        if context_tokens is not None and longest + 1 > context_tokens:
            raise ContextTooLong(
                f"text and label take {longest} tokens; the cloud model's context is {context_tokens}",
                field="text",
                metadata={"context_tokens": str(context_tokens), "prompt_tokens": str(longest)},
            )
        known = await self._label_set(labels, kind)
        likelihoods = await self._score(context, known.tokens)
        return Classification(
            scores=label_scores(labels, likelihoods, known.prior), prompt_tokens=len(context)
        )

    async def _label_set(self, labels: tuple[str, ...], kind: str) -> _LabelSet:
        key = (kind, labels)
        if key in self._sets:
            self._sets.move_to_end(key)
            return self._sets[key]
        tokens = tuple(self._label_tokens(label) for label in labels)
        prior_context = self._tokenizer.encode(label_prior_context(kind), special=True)
        known = _LabelSet(tokens, tuple(await self._score(prior_context, tokens)))
        self._sets[key] = known
        while len(self._sets) > self._cached_sets:
            self._sets.popitem(last=False)
        return known

    async def _score(self, context: tuple[int, ...], labels: Sequence[tuple[int, ...]]) -> list[float]:
        likelihoods: list[float] = []
        for batch in _batches([context + tokens for tokens in labels]):
            starts = [len(context)] * len(batch)
            likelihoods += await self._client.log_likelihoods(batch, starts, field="text")
        return likelihoods

    def _label_tokens(self, label: str) -> tuple[int, ...]:
        return self._tokenizer.encode(label_continuation(label), special=False)


def _batches(prompts: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Split in order, each batch within both bounds (or a single prompt)."""
    batches: list[list[tuple[int, ...]]] = []
    size = 0
    for prompt in prompts:
        full = batches and len(batches[-1]) >= _MAX_PROMPTS_PER_CALL
        if not batches or full or size + len(prompt) > _MAX_TOKENS_PER_CALL:
            batches.append([])
            size = 0
        batches[-1].append(prompt)
        size += len(prompt)
    return batches
