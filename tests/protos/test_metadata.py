"""Reading metadata: the first value wins, and bytes that are no text are none."""

from __future__ import annotations

from protos.metadata import API_KEY, first, first_bytes


def test_the_first_value_of_a_key_counts() -> None:
    pairs = (("other", "x"), (API_KEY, "one"), (API_KEY, "two"))
    assert first(pairs, API_KEY) == "one"
    assert first_bytes(pairs, API_KEY) == b"one"


def test_absent_keys_and_bytes_that_are_no_text_are_none() -> None:
    assert first(None, API_KEY) is None
    assert first((), API_KEY) is None
    assert first(((API_KEY, b"\xff"),), API_KEY) is None
