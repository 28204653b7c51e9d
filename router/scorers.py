"""Judging an answer against a reference: right or wrong. Pure functions of two texts.

Built in: `exact`, `normalized`, `numeric`, `choice`, `contains`. `agreement` compares with the cloud's
answer instead of a reference, by any of them, so that no labels are needed. Packages may add more under the
entry point group `forebay.scorers`; loading them is I/O and not done here.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from types import MappingProxyType

# (answer, reference) -> whether the answer is right.
Scorer = Callable[[str, str], bool]

ENTRY_POINT_GROUP = "forebay.scorers"

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
# A thousands comma belongs to a number only when three digits follow; a sentence's full stop does not.
_NUMBER = re.compile(
    r"(?:(?<![\d)])[-+\u2212])?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)(?:[eE][-+]?\d{1,3})?"
)
_FINAL_MARK = "####"
_LONGEST_NUMBER = 64
# "answer is (B)", "Answer: b"; not "the answer is a dog".
_CHOICE_SAID = re.compile(r"[Aa]nswer(?:\s+is)?\s*[:=]?\s*\**\(?(?:([A-Z])\b|([a-z])(?=\s*[).:*]|\s*$))")
_CHOICE_ALONE = re.compile(r"^\W*([A-Za-z])\s*(?:[).:\]*]|$|\n)")
# A and I alone are words as well.
_CHOICE_MARKED = re.compile(r"\(([A-Za-z])\)|\b([B-HJ-Z])\b")


def exact(answer: str, reference: str) -> bool:
    """Equal but for white space around them."""
    return answer.strip() == reference.strip()


def normalized(answer: str, reference: str) -> bool:
    """Equal once case, punctuation, articles, Unicode forms and white space are levelled (as in SQuAD)."""
    return _level(answer) == _level(reference)


def contains(answer: str, reference: str) -> bool:
    """The levelled reference stands in the levelled answer as whole words. An empty reference never does."""
    wanted = _level(reference)
    return bool(wanted) and f" {wanted} " in f" {_level(answer)} "


def numeric(answer: str, reference: str) -> bool:
    """The final numbers are equal in value (GSM8K): after the last `####` where there is one, else the last
    one.

    `1,000`, `$1000` and `1000.00` are the same number. No number on either side: wrong.
    """
    wanted = final_number(reference)
    return wanted is not None and final_number(answer) == wanted


def choice(answer: str, reference: str) -> bool:
    """The chosen letter is the reference's: said ("the answer is B"), leading ("B)"), or marked ("(B)")."""
    wanted = chosen_letter(reference)
    return wanted is not None and chosen_letter(answer) == wanted


def agreement(scorer: Scorer, *, edge_answer: str, cloud_answer: str) -> tuple[bool, bool]:
    """Edge right and cloud right where only the cloud's answer is known: it counts as right."""
    return scorer(edge_answer, cloud_answer), True


BUILT_IN: Mapping[str, Scorer] = MappingProxyType(
    {"exact": exact, "normalized": normalized, "numeric": numeric, "choice": choice, "contains": contains}
)


def final_number(text: str) -> Decimal | None:
    """The number that a worked answer ends in; None when there is none."""
    _, mark, tail = text.rpartition(_FINAL_MARK)
    found = [match.group() for match in _NUMBER.finditer(tail if mark else text) if match.group()]
    if mark and found:
        return _decimal(found[0])
    return _decimal(found[-1]) if found else None


def chosen_letter(text: str) -> str | None:
    """The option letter of a multiple-choice answer, upper case; None when none is chosen."""
    said = _CHOICE_SAID.findall(text)
    if said:
        return str(said[-1][0] or said[-1][1]).upper()
    alone = _CHOICE_ALONE.match(text)
    if alone is not None:
        return alone.group(1).upper()
    marked = _CHOICE_MARKED.search(text)
    return None if marked is None else str(marked.group(1) or marked.group(2)).upper()


def _level(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text).casefold()
    bare = "".join(" " if mark in string.punctuation else mark for mark in folded)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def _decimal(text: str) -> Decimal | None:
    if len(text) > _LONGEST_NUMBER:
        return None
    try:
        return Decimal(text.replace(",", "").replace("\u2212", "-"))
    except InvalidOperation:
        return None
