"""One answer: from logits to events."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edge.engine.answer import Answer
from edge.engine.model import Float32
from edge.engine.protocol import EngineRequest, Tokens
from edge.engine.sampler import RowMeter
from protos.errors import InternalFault
from protos.values import FinishReason, SamplingParams
from tests.fakes.letters import ByteTokenizer

VOCAB = 260
EOS = frozenset({256, 257})


def _answer(**sampling: object) -> Answer:
    fields: dict[str, object] = {"max_tokens": 50}
    params = SamplingParams(**(fields | sampling))  # type: ignore[arg-type]
    return Answer(
        EngineRequest(request_id="r", prompt_tokens=(1,), sampling=params),
        tokenizer=ByteTokenizer(),
        eos_token_ids=EOS,
        meter=RowMeter(VOCAB),
        vocab_size=VOCAB,
    )


def _wants(token: int, second: int = 0) -> Float32:
    """Logits with a first and a second choice."""
    logits = np.zeros(VOCAB, np.float32)
    logits[second], logits[token] = 4.0, 6.0
    return logits


def _write(answer: Answer, text: bytes | list[int]) -> list[Tokens | None]:
    return [answer.push(_wants(token)) for token in text]


def _shown(events: list[Tokens | None]) -> list[str]:
    return [event.text for event in events if event is not None]


def test_every_token_brings_its_raw_statistics() -> None:
    event = _answer(temperature=1e-9, seed=1).push(_wants(65))
    assert event is not None
    weights = np.exp(_wants(65).astype(np.float64))
    probabilities = weights / weights.sum()
    (stat,) = event.stats
    assert stat.token_id == 65
    assert stat.logprob == pytest.approx(math.log(probabilities[65]), abs=1e-5)
    assert stat.margin == pytest.approx(probabilities[65] - probabilities[0], abs=1e-5)
    assert stat.entropy == pytest.approx(float(-(probabilities * np.log(probabilities)).sum()), abs=1e-4)
    assert (event.text, event.alternatives, event.pieces) == ("A", (), ())


@pytest.mark.parametrize("end", sorted(EOS))
def test_each_end_of_text_token_ends_it_and_is_no_part_of_it(end: int) -> None:
    answer = _answer()
    events = _write(answer, [72, 105, end])
    assert _shown(events) == ["H", "i"]
    assert events[-1] is None
    assert (answer.finished, answer.count, answer.last_token) == (FinishReason.STOP, 2, 105)


def test_max_tokens_ends_it() -> None:
    answer = _answer(max_tokens=3)
    assert _shown(_write(answer, b"abc")) == ["a", "b", "c"]
    assert answer.finished is FinishReason.LENGTH


def test_a_stop_string_ends_it_and_is_not_shown() -> None:
    answer = _answer(stop=("\nUser",))
    events = _write(answer, b"Hi\nUser")
    assert "".join(_shown(events)) == "Hi"
    assert answer.finished is FinishReason.STOP
    assert answer.count == 7


def test_a_stop_string_that_never_came_is_shown_at_the_end_of_text() -> None:
    answer = _answer(stop=("\nUser",))
    events = _write(answer, [*b"Hi\nUs", 256])
    assert "".join(_shown(events)) == "Hi\nUs"
    assert events[-1] == Tokens(stats=(), text="\nUs")


def test_a_stop_string_that_never_came_is_shown_at_max_tokens() -> None:
    answer = _answer(stop=("\nUser",), max_tokens=5)
    events = _write(answer, b"Hi\nUs")
    assert _shown(events) == ["H", "i", "", "", "\nUs"]
    assert answer.finished is FinishReason.LENGTH


def test_a_stop_string_at_the_last_token_is_a_stop() -> None:
    answer = _answer(stop=("c",), max_tokens=3)
    assert "".join(_shown(_write(answer, b"abc"))) == "ab"
    assert answer.finished is FinishReason.STOP


def test_a_character_of_four_tokens_comes_with_the_last() -> None:
    assert _shown(_write(_answer(), "👍".encode())) == ["", "", "", "👍"]


def test_alternatives_and_pieces_come_when_asked_for() -> None:
    event = _answer(logprobs=2).push(_wants(65, second=66))
    assert event is not None
    (ranked,) = event.alternatives
    assert [(other.token_id, other.token) for other in ranked] == [(65, "A"), (66, "B")]
    assert ranked[0].logprob == pytest.approx(event.stats[0].logprob)
    assert event.pieces == ("A",)
    none = _answer(logprobs=0).push(_wants(65))
    assert none is not None
    assert (none.alternatives, none.pieces) == (((),), ("A",))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_distribution_are_our_bug_and_said_so(bad: float) -> None:
    logits = _wants(65)
    logits[100] = bad
    with pytest.raises(InternalFault):
        _answer().push(logits)
