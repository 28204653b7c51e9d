"""Label likelihoods, against their definition."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from edge.engine.labels import LabelWork, PriorCache
from edge.engine.protocol import LabelRequest
from edge.engine.sampler import RowMeter
from tests.fakes.history_model import HistoryModel

CONTEXT = (5, 6, 7, 8, 9)
PRIOR = (8, 9)
LABELS = ((11,), (12, 13), (12, 14, 15, 16, 17), (20, 21, 22))


def _request(**changes: object) -> LabelRequest:
    fields: dict[str, object] = {
        "request_id": "r",
        "context_tokens": CONTEXT,
        "prior_tokens": PRIOR,
        "labels": tuple("abcd"),
        "label_tokens": LABELS,
    }
    return LabelRequest(**(fields | changes))  # type: ignore[arg-type]


def _model() -> HistoryModel:
    return HistoryModel(max_rows=1, context_tokens=32)


def _run(work: LabelWork, model: HistoryModel, piece_tokens: int) -> int:
    runs = 0
    while not work.done:
        piece = work.next_piece(piece_tokens)
        assert 1 <= len(piece.tokens) <= piece_tokens
        work.accept(model.prefill(0, piece.tokens, piece.start, all_logits=piece.all_logits))
        runs += 1
    return runs


def _likelihood(beginning: Sequence[int], label: Sequence[int]) -> float:
    """By definition, in one pass without reuse."""
    text = np.array([*beginning, *label], np.int64)
    logits = _model().prefill(0, text, 0, all_logits=True).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return float(sum(logprobs[len(beginning) - 1 + i, token] for i, token in enumerate(label)))


@pytest.mark.parametrize("piece_tokens", [1, 2, 3, 64])
def test_scores_are_the_likelihoods_by_definition_however_they_are_cut(piece_tokens: int) -> None:
    work = LabelWork(_request(), meter=RowMeter(97), priors=PriorCache(4))
    _run(work, _model(), piece_tokens)
    scores = work.result()
    for score, label in zip(scores, LABELS, strict=True):
        assert score.log_likelihood == pytest.approx(_likelihood(CONTEXT, label), abs=1e-3)
        assert score.prior_log_likelihood == pytest.approx(_likelihood(PRIOR, label), abs=1e-3)
    gains = [math.exp(score.log_likelihood - score.prior_log_likelihood) for score in scores]
    assert [score.probability for score in scores] == pytest.approx([g / sum(gains) for g in gains], rel=1e-6)


def test_labels_of_one_token_need_no_run_of_their_own() -> None:
    work = LabelWork(
        _request(label_tokens=((1,), (2,), (3,), (4,))), meter=RowMeter(97), priors=PriorCache(4)
    )
    assert _run(work, _model(), 64) == 2  # context and prior


def test_known_priors_are_not_read_again_and_give_the_same_scores() -> None:
    priors, meter = PriorCache(4), RowMeter(97)
    first = LabelWork(_request(), meter=meter, priors=priors)
    runs = _run(first, _model(), 64)
    second = LabelWork(_request(request_id="s"), meter=meter, priors=priors)
    assert _run(second, _model(), 64) == runs / 2
    assert second.result() == first.result()


@pytest.mark.parametrize("changes", [{"prior_tokens": (9, 8)}, {"label_tokens": LABELS[::-1]}])
def test_priors_of_another_cue_or_set_are_not_taken(changes: dict[str, object]) -> None:
    priors, meter = PriorCache(4), RowMeter(97)
    _run(LabelWork(_request(), meter=meter, priors=priors), _model(), 64)
    assert priors.get(_request(**changes)) is None


def test_the_least_recently_used_priors_are_forgotten() -> None:
    priors = PriorCache(2)
    one, two, three = (_request(prior_tokens=(token,)) for token in (1, 2, 3))
    priors.put(one, (0.0,))
    priors.put(two, (0.0,))
    assert priors.get(one) is not None
    priors.put(three, (0.0,))
    assert priors.get(two) is None
    assert priors.get(one) is not None


def test_the_row_length_covers_what_a_move_has_to_keep() -> None:
    model = HistoryModel(max_rows=2, context_tokens=32)
    work = LabelWork(_request(), meter=RowMeter(97), priors=PriorCache(4))
    row = 0
    while not work.done:
        piece = work.next_piece(2)
        work.accept(model.prefill(row, piece.tokens, piece.start, all_logits=piece.all_logits))
        model.move_row(row, 1 - row, work.kv_length)
        model.release_row(row)
        row = 1 - row
    assert work.result()[2].log_likelihood == pytest.approx(_likelihood(CONTEXT, LABELS[2]), abs=1e-3)
