"""The classifier's bounds: tokens per call, cached label sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud.classifier import _MAX_PROMPTS_PER_CALL, _MAX_TOKENS_PER_CALL, Classifier, _batches
from cloud.text import CloudTokenizer
from cloud.vllm.client import VllmClient
from protos.errors import ContextTooLong
from tests.fakes.openai_server import FakeOpenAIServer


@given(st.lists(st.integers(1, 5000), max_size=128))
def test_batches_keep_the_order_and_both_bounds(lengths: list[int]) -> None:
    prompts = [(index,) * length for index, length in enumerate(lengths)]
    batches = _batches(prompts)
    assert [prompt for batch in batches for prompt in batch] == prompts
    for batch in batches:
        assert 1 <= len(batch) <= _MAX_PROMPTS_PER_CALL
        assert len(batch) == 1 or sum(map(len, batch)) <= _MAX_TOKENS_PER_CALL


async def test_the_least_recently_used_label_set_is_forgotten_first(
    client: VllmClient, tokenizer: CloudTokenizer, engine: FakeOpenAIServer
) -> None:
    classifier = Classifier(client, tokenizer, cached_sets=2)

    async def calls(*labels: str) -> int:
        before = len(engine.requests)
        await classifier.classify(text="t", labels=labels, kind="Topic", context_tokens=None)
        return len(engine.requests) - before

    assert [await calls("a", "b"), await calls("c", "d"), await calls("a", "b")] == [2, 2, 1]
    assert await calls("e", "f") == 2
    assert [await calls("a", "b"), await calls("c", "d")] == [1, 2]


async def test_the_kind_is_part_of_the_set(
    client: VllmClient, tokenizer: CloudTokenizer, engine: FakeOpenAIServer
) -> None:
    classifier = Classifier(client, tokenizer)
    for kind in ("Topic", "Mood"):
        await classifier.classify(text="t", labels=("a", "b"), kind=kind, context_tokens=None)
    assert len(engine.requests) == 4


async def test_a_label_that_just_does_not_fit_is_refused_before_the_engine_is_asked(
    client: VllmClient, tokenizer: CloudTokenizer, engine: FakeOpenAIServer
) -> None:
    classifier = Classifier(client, tokenizer)
    # "t\nTopic:" is 8 bytes, " label" 6, and the engine wants room for one more.
    await classifier.classify(text="t", labels=("a", "label"), kind="Topic", context_tokens=15)
    engine.requests.clear()
    with pytest.raises(ContextTooLong):
        await classifier.classify(text="t", labels=("a", "label"), kind="Topic", context_tokens=14)
    assert engine.requests == []
