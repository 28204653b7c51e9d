"""Facts of a row, and the choice of a token."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge.engine.model import Float32
from edge.engine.sampler import RequestSampler, RowMeter, alternatives
from protos.values import SamplingParams

_ROWS = hnp.arrays(np.float32, st.integers(2, 200), elements=st.floats(-30, 30, width=32))


def _softmax(logits: Float32, temperature: float = 1.0) -> np.ndarray:
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def _row(vocab: int = 50, seed: int = 0) -> Float32:
    return np.random.default_rng(seed).normal(scale=2.0, size=vocab).astype(np.float32)


def _drawn(logits: Float32, count: int, **params: float) -> list[int]:
    sampling = SamplingParams(**({"temperature": 1.0, "seed": 5} | params))  # type: ignore[arg-type]
    sampler = RequestSampler(sampling, (), vocab_size=len(logits))
    return [sampler.choose(logits, int(logits.argmax())) for _ in range(count)]


@given(_ROWS)
def test_facts_are_those_of_the_raw_distribution(logits: Float32) -> None:
    before = logits.copy()
    facts = RowMeter(len(logits)).measure(logits)
    probabilities = _softmax(logits)
    second, first = np.sort(probabilities)[-2:]
    assert facts.best == int(logits.argmax())
    assert logits[facts.best] - facts.log_normalizer == pytest.approx(math.log(first), abs=1e-4)
    positive = probabilities[probabilities > 0]
    assert facts.entropy == pytest.approx(float(-(positive * np.log(positive)).sum()), abs=1e-3)
    assert facts.margin == pytest.approx(float(first - second), abs=1e-5)
    assert np.array_equal(logits, before)


def test_one_meter_measures_many_rows_without_mixing_them() -> None:
    meter = RowMeter(50)
    alone = [RowMeter(50).measure(_row(seed=seed)) for seed in range(4)]
    assert [meter.measure(_row(seed=seed)) for seed in range(4)] == alone
    assert meter.log_normalizer(_row(seed=2)) == pytest.approx(alone[2].log_normalizer)


def test_an_even_distribution_has_the_entropy_of_its_size_and_no_margin() -> None:
    facts = RowMeter(64).measure(np.zeros(64, np.float32))
    assert facts.entropy == pytest.approx(math.log(64), abs=1e-5)
    assert facts.margin == 0.0


def test_greedy_takes_the_most_probable_and_draws_nothing() -> None:
    logits = _row()
    sampler = RequestSampler(SamplingParams(), (), vocab_size=50)
    assert sampler.choose(logits, 7) == 7


def test_equal_seeds_give_equal_tokens_and_other_seeds_others() -> None:
    logits = _row()
    assert _drawn(logits, 40, seed=3) == _drawn(logits, 40, seed=3)
    assert _drawn(logits, 40, seed=3) != _drawn(logits, 40, seed=4)


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_every_seed_of_the_contract_is_a_seed(seed: int) -> None:
    assert len(_drawn(_row(), 3, seed=seed)) == 3


@pytest.mark.parametrize("cut", [{}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.9}])
def test_one_draw_per_token_whatever_is_cut_off(cut: dict[str, float]) -> None:
    """So that token n depends on the seed and n only, not on what the rows before it looked like."""
    flat, row = np.zeros(50, np.float32), _row()
    sampling = SamplingParams(temperature=1.0, seed=9, **cut)  # type: ignore[arg-type]
    first, second = (RequestSampler(sampling, (), vocab_size=50) for _ in range(2))
    first.choose(flat, 0)
    second.choose(row, int(row.argmax()))
    assert first.choose(row, 0) == second.choose(row, 0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_follow_the_tempered_distribution(temperature: float) -> None:
    logits, draws = _row(vocab=12), 20_000
    counts = np.bincount(_drawn(logits, draws, temperature=temperature), minlength=12)
    expected = _softmax(logits, temperature) * draws
    chi_square = ((counts - expected) ** 2 / np.maximum(expected, 1e-9))[expected > 5].sum()
    assert chi_square < 33  # 11 degrees of freedom, p = 0.0005


def test_top_k_leaves_the_k_most_probable() -> None:
    logits = _row()
    allowed = set(np.argsort(-logits)[:4].tolist())
    drawn = _drawn(logits, 600, top_k=4, temperature=2.0)
    assert set(drawn) == allowed


@given(_ROWS, st.floats(0.05, 0.99))
@settings(max_examples=50)
def test_top_p_leaves_the_smallest_set_that_reaches_p(logits: Float32, top_p: float) -> None:
    order = np.argsort(-logits, kind="stable")
    cumulative = np.cumsum(_softmax(logits)[order])
    # One token more than by definition: sums in another order may differ in the last digit.
    allowed = set(order[: int(np.searchsorted(cumulative, top_p - 1e-9)) + 2].tolist())
    assert set(_drawn(logits, 30, top_p=top_p)) <= allowed


def test_top_p_finds_a_nucleus_larger_than_its_first_guess() -> None:
    logits = np.zeros(5000, np.float32)
    drawn = _drawn(logits, 400, top_p=0.5)
    assert max(drawn) > 1000
    assert max(drawn) < 2600


def test_a_tiny_top_p_or_temperature_is_greedy() -> None:
    logits = _row()
    best = int(logits.argmax())
    assert set(_drawn(logits, 50, top_p=1e-9)) == {best}
    assert set(_drawn(logits, 50, temperature=1e-6)) == {best}


def test_a_repetition_penalty_weighs_down_what_prompt_and_answer_hold() -> None:
    logits = np.array([3.0, 2.9, 2.8, -1.0], np.float32)
    sampler = RequestSampler(SamplingParams(repetition_penalty=1.5), (0,), vocab_size=4)
    assert [sampler.choose(logits, 0) for _ in range(3)] == [1, 2, 0]


def test_a_repetition_penalty_pushes_negative_logits_further_down() -> None:
    logits = np.array([-1.0, -1.2, -9.0], np.float32)
    sampler = RequestSampler(SamplingParams(repetition_penalty=1.5), (0,), vocab_size=3)
    assert sampler.choose(logits, 0) == 1


def test_alternatives_are_the_most_probable_with_raw_log_probabilities() -> None:
    logits = _row()
    facts = RowMeter(50).measure(logits)
    found = alternatives(logits, 3, facts.log_normalizer)
    assert [token for token, _ in found] == np.argsort(-logits)[:3].tolist()
    assert [math.exp(logprob) for _, logprob in found] == pytest.approx(
        np.sort(_softmax(logits))[::-1][:3].tolist(), abs=1e-5
    )
    assert alternatives(logits, 0, facts.log_normalizer) == []
