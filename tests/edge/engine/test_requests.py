"""Limits that only a loaded model knows."""

from __future__ import annotations

import pytest

from edge.engine.protocol import EngineRequest, LabelRequest
from edge.engine.requests import check_labels, check_text
from protos.errors import ContextTooLong, InvalidArgument
from protos.values import SamplingParams
from tests.fakes.history_model import HistoryModel

MODEL = HistoryModel(max_rows=1, context_tokens=64)
PLENTY = 10_000


def _text(prompt: tuple[int, ...], **sampling: object) -> EngineRequest:
    params = SamplingParams(**({"max_tokens": 10} | sampling))  # type: ignore[arg-type]
    return EngineRequest(request_id="r", prompt_tokens=prompt, sampling=params)


def _labels(**changes: object) -> LabelRequest:
    fields: dict[str, object] = {
        "request_id": "r",
        "context_tokens": (1,) * 50,
        "prior_tokens": (1,) * 5,
        "labels": ("a", "b"),
        "label_tokens": ((1,), (1, 2, 3)),
    }
    return LabelRequest(**(fields | changes))  # type: ignore[arg-type]


def test_a_text_is_promised_its_prompt_and_its_answer() -> None:
    assert check_text(_text((1,) * 54), MODEL, PLENTY) == 64


def test_labels_are_promised_the_text_and_the_longest_label() -> None:
    assert check_labels(_labels(), MODEL, PLENTY) == 53


def test_a_context_that_does_not_fit_names_the_limit() -> None:
    with pytest.raises(ContextTooLong, match=r"65 tokens .* the model's context of 64 tokens") as caught:
        check_text(_text((1,) * 55), MODEL, PLENTY)
    assert caught.value.metadata == {"limit_tokens": "64", "requested_tokens": "65"}
    assert caught.value.field == "prompt"
    with pytest.raises(ContextTooLong, match="context of 64 tokens"):
        check_labels(_labels(context_tokens=(1,) * 62), MODEL, PLENTY)


def test_a_request_larger_than_all_kv_memory_names_that_limit() -> None:
    with pytest.raises(ContextTooLong, match="the engine's KV memory of 40 tokens"):
        check_text(_text((1,) * 31), MODEL, 40)
    with pytest.raises(ContextTooLong, match="the engine's KV memory of 40 tokens"):
        check_labels(_labels(), MODEL, 40)


@pytest.mark.parametrize("prompt", [(), (97,), (-1,)])
def test_tokens_that_the_model_does_not_know_are_refused(prompt: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_text(_text(prompt), MODEL, PLENTY)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"context_tokens": ()}, "text"),
        ({"prior_tokens": (500,)}, "text"),
        ({"label_tokens": ((1,), ())}, "labels"),
        ({"label_tokens": ((1,),)}, "labels"),
        ({"labels": (), "label_tokens": ()}, "labels"),
    ],
)
def test_labels_without_tokens_are_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_labels(_labels(**changes), MODEL, PLENTY)
    assert caught.value.field == field


def test_an_answer_of_no_tokens_and_a_sample_without_a_seed_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least 1"):
        check_text(_text((1,), max_tokens=0), MODEL, PLENTY)
    with pytest.raises(InvalidArgument, match="seed"):
        check_text(_text((1,), temperature=1.0), MODEL, PLENTY)
