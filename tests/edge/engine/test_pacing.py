"""Slices of prompt reading."""

from __future__ import annotations

import pytest

from edge.engine.pacing import PrefillPacer


def _pacer() -> PrefillPacer:
    return PrefillPacer(slice_s=0.05, slice_tokens=64, piece_tokens=16)


def test_a_slice_has_at_least_one_piece_even_on_a_slow_machine() -> None:
    pacer = _pacer()
    pacer.observe(16, 3.0)
    assert pacer.allows(0, 0.0)
    assert not pacer.allows(16, 3.0)


def test_a_slice_ends_before_the_piece_that_would_not_fit_its_time() -> None:
    pacer = _pacer()
    pacer.observe(16, 0.02)
    assert pacer.allows(16, 0.02)
    assert not pacer.allows(32, 0.04)


def test_a_slice_ends_at_its_tokens_on_a_fast_machine() -> None:
    pacer = _pacer()
    pacer.observe(16, 0.0001)
    assert pacer.allows(48, 0.0003)
    assert not pacer.allows(64, 0.0004)


def test_one_disturbed_piece_does_not_mislead_and_several_adapt() -> None:
    pacer = _pacer()
    for _ in range(10):
        pacer.observe(16, 0.01)
    pacer.observe(16, 0.05)
    assert pacer.allows(16, 0.02)
    for _ in range(20):
        pacer.observe(16, 0.05)
    assert not pacer.allows(16, 0.02)


def test_the_end_of_a_prompt_tells_nothing_about_whole_pieces() -> None:
    pacer = _pacer()
    pacer.observe(16, 0.04)
    for _ in range(20):
        pacer.observe(3, 0.001)
    assert not pacer.allows(16, 0.02)


@pytest.mark.parametrize(("slice_s", "slice_tokens", "piece_tokens"), [(0, 64, 16), (1, 8, 16), (1, 8, 0)])
def test_impossible_slices_are_refused(slice_s: float, slice_tokens: int, piece_tokens: int) -> None:
    with pytest.raises(ValueError, match="a slice needs"):
        PrefillPacer(slice_s=slice_s, slice_tokens=slice_tokens, piece_tokens=piece_tokens)
