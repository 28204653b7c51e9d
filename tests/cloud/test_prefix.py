"""A continuation joins its prefix without a doubled space and without losing a character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud.prefix import PrefixJoin


@pytest.mark.parametrize(
    ("prefix", "pieces", "whole"),
    [
        ("The capital of", [" France"], "The capital of France"),
        ("The capital of ", [" France"], "The capital of France"),
        ("The capital of ", ["France"], "The capital of France"),
        ("a  ", [" ", " ", " b"], "a   b"),
        ("a ", [" ", "", " b"], "a  b"),
        ("a ", ["\n", " b"], "a \n b"),
        ("", [" a"], " a"),
        ("  ", ["a  ", " b"], "  a   b"),
        ("a\n", ["\n b"], "a\n\n b"),
    ],
)
def test_prefix_and_continuation_read_as_one_text(prefix: str, pieces: list[str], whole: str) -> None:
    join = PrefixJoin.of(prefix)
    assert prefix + "".join(join.take(piece) for piece in pieces) == whole


@given(st.text(alphabet=" ab\n"), st.lists(st.text(alphabet=" ab\n")))
def test_only_leading_spaces_ever_go_and_no_more_than_the_prefix_ends_with(
    prefix: str, pieces: list[str]
) -> None:
    join = PrefixJoin.of(prefix)
    taken = "".join(join.take(piece) for piece in pieces)
    said = "".join(pieces)
    assert said.endswith(taken)
    gone = said[: len(said) - len(taken)]
    assert gone.strip(" ") == ""
    assert len(gone) <= len(prefix) - len(prefix.rstrip(" "))
    assert join.shown_to_model == prefix.rstrip(" ")
