"""Stop strings across any borders."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.engine.stops import StopMatcher

_TEXT = st.text(alphabet="ab ", max_size=40)
_STOPS = st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), max_size=3)


def _feed(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(piece) for piece in pieces)
    return shown + matcher.flush(), matcher.stopped


def _first_complete(stops: list[str], text: str) -> tuple[str, bool]:
    """By definition: walk the text until one is complete."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


@given(_TEXT, _STOPS, st.lists(st.integers(0, 40), max_size=8))
def test_the_shown_text_ends_before_the_first_complete_stop_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    assert _feed(stops, pieces) == _first_complete(stops, text)


@given(_TEXT, _STOPS)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for length, character in enumerate(text, start=1):
        shown += matcher.feed(character)
        if matcher.stopped:
            return
        held = text[len(shown) : length]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_stop_string_over_three_pieces_is_never_shown() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert [matcher.feed(piece) for piece in ("Hello\n", "Us", "er: hi")] == ["Hello", "", ""]
    assert matcher.stopped
    assert matcher.feed("more") == matcher.flush() == ""


def test_a_false_start_comes_out_with_the_next_piece() -> None:
    matcher = StopMatcher(["###"])
    assert [matcher.feed(piece) for piece in ("a##", "b")] == ["a", "##b"]


@pytest.mark.parametrize("tail", ["#", "##"])
def test_a_false_start_at_the_end_is_text(tail: str) -> None:
    matcher = StopMatcher(["###"])
    assert matcher.feed("a" + tail) == "a"
    assert matcher.flush() == tail
