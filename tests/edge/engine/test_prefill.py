"""Reading a prompt in pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.engine.prefill import PromptWork
from edge.engine.sampler import RowMeter
from tests.fakes.history_model import HistoryModel


def _read(tokens: list[int], piece_tokens: int, *, stats: bool) -> PromptWork:
    model = HistoryModel(max_rows=1, context_tokens=64)
    work = PromptWork(np.array(tokens, np.int64), meter=RowMeter(97) if stats else None)
    while not work.done:
        piece = work.next_piece(piece_tokens)
        assert piece.start == work.kv_length
        assert piece.all_logits == stats
        work.accept(model.prefill(0, piece.tokens, piece.start, all_logits=piece.all_logits))
    return work


@given(st.lists(st.integers(0, 96), min_size=1, max_size=20), st.integers(1, 24), st.booleans())
def test_the_logits_behind_the_prompt_do_not_depend_on_the_pieces(
    tokens: list[int], piece_tokens: int, stats: bool
) -> None:
    whole = HistoryModel(max_rows=1, context_tokens=64).prefill(0, np.array(tokens), 0)
    work = _read(tokens, piece_tokens, stats=stats)
    assert work.kv_length == len(tokens)
    assert np.array_equal(work.last_logits, whole[0])


@pytest.mark.parametrize("piece_tokens", [1, 2, 3, 5, 64])
def test_the_mean_log_probability_is_that_of_every_token_but_the_first(piece_tokens: int) -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    logits = HistoryModel(max_rows=1, context_tokens=64).prefill(0, np.array(tokens), 0, all_logits=True)
    wide = logits.astype(np.float64)
    logprobs = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    expected = np.mean([logprobs[i, token] for i, token in enumerate(tokens[1:])])
    assert _read(tokens, piece_tokens, stats=True).logprob_mean == pytest.approx(expected, abs=1e-4)


def test_there_is_no_mean_unless_asked_for_nor_for_a_single_token() -> None:
    assert _read([3, 1, 4], 64, stats=False).logprob_mean is None
    assert _read([3], 64, stats=True).logprob_mean is None
