"""What every `StepModel` promises, held against each implementation by the same tests.

Two ways of computing one thing may differ by rounding only. Where activations are rounded to int8, the last
bit of a sum decides between two codes, and over some thirty layers such flips grow to a part of the variant's
own distance from the reference. So each case says how far apart two distributions may be; `nf4`, which
computes in float32, and the fake hold the logic of rows tightly.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from edge.engine.model import Float32, Int64, StepModel
from tests.fakes.history_model import HistoryModel

ROWS = 4
CONTEXT = 256
THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`divergence` bounds the KL divergence, in nats, between two ways of computing one distribution."""

    build: Callable[[pytest.FixtureRequest], StepModel]
    divergence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A loaded model with prompts of different lengths that are in its vocabulary."""

    model: Any
    divergence: float
    prompts: tuple[Int64, ...]

    def same(self, left: Float32, right: Float32) -> None:
        """Assert that two arrays of logits, shape (n, vocab), give the same distributions."""
        assert left.shape == right.shape
        farthest = float(_divergence(left, right).max())
        assert farthest <= self.divergence


def _divergence(left: Float32, right: Float32) -> Float32:
    p, q = (
        x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (left.astype(float), right.astype(float))
    )
    return np.maximum((np.exp(p) * (p - q)).sum(axis=-1), 0.0)


def _ort(variant: str) -> Callable[[pytest.FixtureRequest], StepModel]:
    def build(request: pytest.FixtureRequest) -> StepModel:
        from edge.engine.ort_model import OrtModel

        store = request.getfixturevalue("release_store")
        directory = store / "support-bot" / "1" / "edge" / variant
        return OrtModel.load(directory, max_rows=ROWS, context_tokens=CONTEXT, threads=THREADS)

    return build


def _torch(variant: Any) -> Callable[[pytest.FixtureRequest], StepModel]:
    def build(request: pytest.FixtureRequest) -> StepModel:
        from edge.engine.torch_model import TorchModel

        weights = request.getfixturevalue("edge_reference_weights")
        return TorchModel.load(
            weights, variant=variant, max_rows=ROWS, context_tokens=CONTEXT, threads=THREADS
        )

    return build


def _fake(request: pytest.FixtureRequest) -> StepModel:
    return HistoryModel(max_rows=ROWS, context_tokens=CONTEXT)


CASES = [
    pytest.param(Case(build=_fake, divergence=0.0), id="fake"),
    pytest.param(Case(build=_ort("int4"), divergence=0.1), id="int4", marks=pytest.mark.model),
    pytest.param(Case(build=_torch("nf4"), divergence=1e-6), id="torch-nf4", marks=pytest.mark.model),
    pytest.param(
        Case(build=_torch("llm-int8"), divergence=0.1), id="torch-llm-int8", marks=pytest.mark.model
    ),
]


@pytest.fixture(scope="module", params=CASES)
def loaded(request: pytest.FixtureRequest) -> Iterator[Subject]:
    model = request.param.build(request)
    # Consecutive ids make a text that real models are unsure of, which leaves no room for luck.
    generator = np.random.default_rng(7)
    prompts = tuple(generator.integers(3, model.vocab_size, size) for size in (5, 48, 131))
    yield Subject(model=model, divergence=request.param.divergence, prompts=prompts)
    model.close()
    gc.collect()


@pytest.fixture
def subject(loaded: Subject) -> Iterator[Subject]:
    yield loaded
    for row in range(ROWS):
        loaded.model.release_row(row)


def _continuation(subject: Subject, steps: int) -> Int64:
    """Tokens to feed after each prompt, shape (prompts, steps)."""
    return np.random.default_rng(11).integers(3, subject.model.vocab_size, (len(subject.prompts), steps))


def _alone(subject: Subject, prompt: Int64, continuation: Int64) -> Float32:
    """Logits of a row that nobody shares a step with, shape (steps, vocab)."""
    subject.model.prefill(0, prompt, 0)
    seen = [
        subject.model.decode(token[None], np.array([len(prompt) + step]))[0].copy()
        for step, token in enumerate(continuation)
    ]
    subject.model.release_row(0)
    return np.stack(seen)


def test_prefill_returns_the_last_position_unless_all_are_asked_for(subject: Subject) -> None:
    prompt = subject.prompts[1]
    every = subject.model.prefill(0, prompt, 0, all_logits=True).copy()
    last = subject.model.prefill(1, prompt, 0)
    assert every.shape == (len(prompt), subject.model.vocab_size)
    assert last.shape == (1, subject.model.vocab_size)
    assert every.dtype == last.dtype == np.float32
    subject.same(every[-1:], last)


@pytest.mark.parametrize("chunk", [1, 16, 20])
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(subject: Subject, chunk: int) -> None:
    prompt = subject.prompts[1]
    whole = subject.model.prefill(0, prompt, 0, all_logits=True).copy()
    parts = [
        subject.model.prefill(1, prompt[at : at + chunk], at, all_logits=True).copy()
        for at in range(0, len(prompt), chunk)
    ]
    subject.same(whole, np.concatenate(parts))


def test_a_decode_step_gives_the_logits_of_a_prefill_over_the_same_tokens(subject: Subject) -> None:
    prompt, continuation = subject.prompts[1], _continuation(subject, 6)[1]
    text = np.concatenate([prompt, continuation])
    at_once = subject.model.prefill(1, text, 0, all_logits=True)[len(prompt) :].copy()
    subject.same(at_once, _alone(subject, prompt, continuation))


def test_rows_of_different_lengths_decode_together_as_they_do_alone(subject: Subject) -> None:
    continuation = _continuation(subject, 8)
    alone = [_alone(subject, p, c) for p, c in zip(subject.prompts, continuation, strict=True)]
    for row, prompt in enumerate(subject.prompts):
        subject.model.prefill(row, prompt, 0)
    lengths = np.array([len(prompt) for prompt in subject.prompts])
    for step in range(continuation.shape[1]):
        together = subject.model.decode(continuation[:, step], lengths + step)
        subject.same(np.stack([logits[step] for logits in alone]), together)


def test_a_prefill_between_steps_leaves_the_decoding_rows_as_they_were(subject: Subject) -> None:
    prompt, continuation = subject.prompts[1], _continuation(subject, 6)[1]
    alone = _alone(subject, prompt, continuation)
    subject.model.prefill(0, prompt, 0)
    for step, token in enumerate(continuation):
        logits = subject.model.decode(token[None], np.array([len(prompt) + step]))
        subject.same(alone[step][None], logits)
        subject.model.prefill(1, subject.prompts[2][step * 8 : step * 8 + 8], step * 8)


def test_a_moved_row_goes_on_as_if_it_had_not_moved(subject: Subject) -> None:
    prompt, continuation = subject.prompts[1], _continuation(subject, 4)[1]
    alone = _alone(subject, prompt, continuation)
    subject.model.prefill(0, subject.prompts[2], 0)
    subject.model.prefill(3, prompt, 0)
    subject.model.move_row(3, 0, len(prompt))
    subject.model.release_row(3)
    for step, token in enumerate(continuation):
        logits = subject.model.decode(token[None], np.array([len(prompt) + step]))
        subject.same(alone[step][None], logits)


def test_a_released_row_leaves_nothing_to_its_next_request(subject: Subject) -> None:
    short = subject.prompts[0]
    fresh = subject.model.prefill(2, short, 0, all_logits=True).copy()
    subject.model.release_row(2)
    subject.model.prefill(2, subject.prompts[2], 0)
    subject.model.release_row(2)
    subject.same(fresh, subject.model.prefill(2, short, 0, all_logits=True))


def test_a_row_can_be_filled_to_the_last_token_of_its_context(subject: Subject) -> None:
    assert subject.model.context_tokens == CONTEXT
    text = np.resize(subject.prompts[2], CONTEXT)
    at_once = subject.model.prefill(1, text, 0).copy()
    subject.model.prefill(0, text[:-1], 0)
    subject.same(at_once, subject.model.decode(text[-1:], np.array([CONTEXT - 1])))


def test_the_model_says_what_it_has_room_for(subject: Subject) -> None:
    assert subject.model.max_rows == ROWS
    assert subject.model.kv_token_bytes > 0
