"""Selection takes the signals that help, leaves the rest, and says why it cannot."""

from __future__ import annotations

import numpy as np
import pytest

from router.calibration.errors import BadSignal, TooFewRows
from router.calibration.logistic import sigmoid
from router.calibration.selection import choose_signals


def table(rows: int, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    strong, weak, noise, other = rng.normal(size=(4, rows))
    good = rng.random(rows) < sigmoid(2 * strong + weak)
    return {"noise": noise, "weak": weak, "constant": np.ones(rows), "strong": strong, "other": other}, good


def test_the_strong_signal_comes_first_then_the_weak_one_and_no_noise() -> None:
    signals, good = table(1500)
    found = choose_signals(signals, good, rng=np.random.default_rng(1))
    assert found.names == ("strong", "weak")
    assert found.losses == tuple(sorted(found.losses, reverse=True))


def test_no_more_signals_than_allowed() -> None:
    signals, good = table(1500)
    assert choose_signals(signals, good, rng=np.random.default_rng(1), most=1).names == ("strong",)


def test_a_copy_of_a_signal_is_not_taken_twice() -> None:
    signals, good = table(800)
    signals["copy"] = signals["strong"] * 3 + 1
    found = choose_signals(signals, good, rng=np.random.default_rng(1))
    assert len({"strong", "copy"} & set(found.names)) == 1


def test_one_signal_is_taken_even_where_none_helps() -> None:
    signals, _ = table(200)
    good = np.random.default_rng(9).random(200) < 0.5
    assert len(choose_signals({"noise": signals["noise"]}, good, rng=np.random.default_rng(1)).names) == 1


def test_the_generator_decides_and_nothing_else() -> None:
    signals, good = table(300)
    first, second = (choose_signals(signals, good, rng=np.random.default_rng(7)) for _ in range(2))
    assert first == second


def test_only_constant_signals_are_refused() -> None:
    with pytest.raises(BadSignal, match="constant"):
        choose_signals({"a": np.ones(50)}, np.ones(50, dtype=bool), rng=np.random.default_rng(0))


def test_a_signal_with_nan_is_refused_by_name() -> None:
    column = np.ones(50)
    column[3] = np.nan
    with pytest.raises(BadSignal) as caught:
        choose_signals({"entropy": column}, np.ones(50, dtype=bool), rng=np.random.default_rng(0))
    assert caught.value.name == "entropy"


def test_too_few_rows_for_the_folds_are_refused() -> None:
    with pytest.raises(TooFewRows) as caught:
        choose_signals({"a": np.arange(9.0)}, np.ones(9, dtype=bool), rng=np.random.default_rng(0))
    assert caught.value.minimum == 10
