"""Scorers: right is right in whatever clothes, wrong is wrong."""

from __future__ import annotations

import pytest

from router.scorers import BUILT_IN, agreement, choice, contains, exact, normalized, numeric


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("3 + 4 = 7\n#### 7", "7", True),
        ("#### 1,000", "1000", True),
        ("It costs $1,234.50 in total.", "1234.5", True),
        ("So she has 12.", "#### 12", True),
        ("#### 18 dollars, not 20", "18", True),
        ("The result is \u22125.", "-5", True),
        ("between 3-5", "5", True),
        ("#### 7 #### 8", "8", True),
        ("so 7", "8", False),
        ("no number here", "8", False),
        ("8", "no number here", False),
        ("", "", False),
        ("1.5", "1,5", False),
        ("9" * 200, "9" * 200, False),
    ],
)
def test_numeric_compares_the_final_numbers_in_value(answer: str, reference: str, right: bool) -> None:
    assert numeric(answer, reference) is right


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("B", "b", True),
        ("(c) because", "C", True),
        ("The answer is (D).", "D", True),
        ("Answer: b", "B", True),
        ("I first thought A), but the answer is **C**", "C", True),
        ("B because it fits", "B", True),
        ("A dog", "A", False),
        ("I do not know", "I", False),
        ("the answer is a dog", "A", False),
        ("", "A", False),
        ("", "", False),
    ],
)
def test_choice_finds_the_letter_and_no_words(answer: str, reference: str, right: bool) -> None:
    assert choice(answer, reference) is right


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("The Eiffel-Tower!", "eiffel tower", True),
        ("ﬁne", "Fine", True),
        ("a  b\n", "b", True),
        ("blue", "red", False),
    ],
)
def test_normalized_levels_case_punctuation_articles_and_forms(
    answer: str, reference: str, right: bool
) -> None:
    assert normalized(answer, reference) is right


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("It is Paris, of course.", "paris", True),
        ("Parisian food", "paris", False),
        ("anything", "", False),
        ("anything", "the", False),
    ],
)
def test_contains_wants_whole_words(answer: str, reference: str, right: bool) -> None:
    assert contains(answer, reference) is right


def test_exact_forgives_white_space_around_only() -> None:
    assert exact(" yes\n", "yes")
    assert not exact("Yes", "yes")


def test_agreement_takes_the_clouds_answer_for_right() -> None:
    assert agreement(numeric, edge_answer="so 7", cloud_answer="#### 7") == (True, True)
    assert agreement(numeric, edge_answer="so 8", cloud_answer="#### 7") == (False, True)


def test_the_built_in_ones_have_their_names_and_cannot_be_changed() -> None:
    assert set(BUILT_IN) == {"exact", "normalized", "numeric", "choice", "contains"}
    with pytest.raises(TypeError):
        BUILT_IN["mine"] = exact  # type: ignore[index]
