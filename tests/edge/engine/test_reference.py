"""The float32 build against transformers: the same 64 greedy tokens, whoever shares the batch.

The reference reads prompt and answer in one pass without a cache. Its most probable token at every position
is the answer's next one exactly when its own greedy decoding would have written that answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from edge.engine.model import Int64, StepModel

pytestmark = pytest.mark.model

ANSWER_TOKENS = 64
ROWS = 16
PROMPTS = (
    "Where is my parcel?",
    "I want to return a pair of shoes that I bought two weeks ago. How do I do that?",
    "My card was charged twice for the same order.",
    "How long does a bank transfer take?",
    "I forgot my PIN and have been locked out of using my card. What now?",
    "Can I change the delivery address after I have ordered?",
    "The hotel called and said I left my phone in the room.",
    "¿Dónde puedo cambiar mi dinero a euros?",
    "Warum wurde meine Überweisung zurückgewiesen? Der Empfänger heißt Müller.",
    "私の注文はいつ届きますか。",
    "Привет! Как отменить подписку?",
    "Is 🍕 delivered on Sundays? My order number is #4711 👍🏽.",
    "Hi",
    "Write a Python function that adds two numbers.",
    "List the first five prime numbers.",
    "Janet's ducks lay 16 eggs per day. She eats three for breakfast every morning. How many are left?",
    (
        "Summarize our policy in one sentence. "
        "Items may be returned within thirty days, unused, in their original packaging, with the receipt. "
        "The refund goes to the card that was used for the payment and takes five to seven working days. "
        "Items on sale are excluded, as are gift cards and perishable goods."
    ),
    "Translate into French: the invoice is attached.",
    "I am writing to complain. "
    + "I have called your hotline and nobody picked up. " * 12
    + "What will you do?",
    "A customer says: 'the app crashes when I tap Pay'. " * 4 + "Answer politely.",
)


@pytest.fixture(scope="module")
def prompts(release_store: Path) -> tuple[Int64, ...]:
    path = release_store / "support-bot" / "1" / "edge" / "tokenizer" / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    texts = (f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n" for prompt in PROMPTS)
    return tuple(np.array(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)


@pytest.fixture(scope="module")
def model(release_store: Path) -> Iterator[StepModel]:
    from edge.engine.ort_model import OrtModel

    directory = release_store / "support-bot" / "1" / "edge" / "fp32"
    loaded = OrtModel.load(directory, max_rows=ROWS, context_tokens=512, threads=2)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def reference(edge_reference_weights: Path) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(
        edge_reference_weights, dtype=torch.float32, local_files_only=True
    ).eval()


def _reference_choices(reference: Any, prompt: Int64, answer: list[int]) -> list[int]:
    """The reference's most probable token at each position of the answer, given what comes before."""
    import torch

    text = torch.tensor([[*prompt.tolist(), *answer[:-1]]])
    with torch.inference_mode():
        logits = reference(text, use_cache=False).logits[0, len(prompt) - 1 :]
    choices: list[int] = logits.argmax(dim=-1).tolist()
    return choices


def _alone(model: StepModel, prompt: Int64) -> list[int]:
    answer = [int(model.prefill(0, prompt, 0)[0].argmax())]
    while len(answer) < ANSWER_TOKENS:
        lengths = np.array([len(prompt) + len(answer) - 1])
        answer.append(int(model.decode(np.array(answer[-1:]), lengths)[0].argmax()))
    model.release_row(0)
    return answer


def _in_a_full_batch(model: StepModel, prompts: tuple[Int64, ...]) -> list[list[int]]:
    """All answers through `ROWS` rows: a waiting prompt joins between steps as soon as a row is free.

    The first prompts start one step apart, so the rows are always at different places of their answers.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    waiting, rows = list(range(len(prompts))), list[int]()
    while waiting or rows:
        if waiting and len(rows) < ROWS:
            joining = waiting.pop(0)
            answers[joining] = [int(model.prefill(len(rows), prompts[joining], 0)[0].argmax())]
            rows.append(joining)
        tokens = np.array([answers[request][-1] for request in rows])
        lengths = np.array([len(prompts[request]) + len(answers[request]) - 1 for request in rows])
        for request, chosen in zip(rows, model.decode(tokens, lengths).argmax(axis=-1), strict=True):
            answers[request].append(int(chosen))
        for row in reversed(range(len(rows))):
            if len(answers[rows[row]]) < ANSWER_TOKENS:
                continue
            last = len(rows) - 1
            if row != last:
                moved = rows[last]
                model.move_row(last, row, len(prompts[moved]) + len(answers[moved]) - 1)
                rows[row] = moved
            model.release_row(last)
            rows.pop()
    return answers


def test_a_lone_request_gets_the_tokens_of_transformers(
    model: StepModel, reference: Any, prompts: tuple[Int64, ...]
) -> None:
    for prompt in prompts:
        answer = _alone(model, prompt)
        assert answer == _reference_choices(reference, prompt, answer)


def test_a_full_ragged_batch_gets_the_tokens_of_transformers(
    model: StepModel, reference: Any, prompts: tuple[Int64, ...]
) -> None:
    for prompt, answer in zip(prompts, _in_a_full_batch(model, prompts), strict=True):
        assert len(answer) == ANSWER_TOKENS
        assert answer == _reference_choices(reference, prompt, answer)
