"""The label format is a contract between tiers; the scores are a softmax of likelihood less prior."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.labels import label_context, label_continuation, label_prior_context, label_scores

finite = st.floats(min_value=-2000, max_value=0)


def test_the_strings_are_fixed_to_the_letter() -> None:
    assert label_context("My card is lost", "Topic") == "My card is lost\nTopic:"
    assert label_prior_context("Topic") == "Topic:"
    assert label_continuation("lost card") == " lost card"


@given(st.lists(st.tuples(finite, finite), min_size=2, max_size=128))
def test_probabilities_add_up_to_one_and_follow_the_gain(pairs: list[tuple[float, float]]) -> None:
    labels = [f"l{i}" for i in range(len(pairs))]
    scores = label_scores(labels, [p[0] for p in pairs], [p[1] for p in pairs])
    assert [s.label for s in scores] == labels
    assert math.isclose(sum(s.probability for s in scores), 1.0, rel_tol=1e-9)
    best = max(scores, key=lambda s: s.probability)
    largest_gain = max(given - prior for given, prior in pairs)
    # Gains closer than a rounding error have the same probability, and either may be the best.
    gain = best.log_likelihood - best.prior_log_likelihood
    assert math.isclose(gain, largest_gain, rel_tol=1e-9, abs_tol=1e-9)


def test_a_label_that_is_likely_anyway_gains_nothing_from_it() -> None:
    rare, common = label_scores(["rare", "common"], [-10.0, -2.0], [-14.0, -1.0])
    assert rare.probability > common.probability


@pytest.mark.parametrize(
    ("given", "prior"), [([], []), ([-1.0], []), ([-math.inf, -1.0], [-1.0, -1.0]), ([math.nan], [-1.0])]
)
def test_likelihoods_that_cannot_be_compared_are_refused(given: list[float], prior: list[float]) -> None:
    with pytest.raises(ValueError, match=r"one likelihood|not finite"):
        label_scores(["a"] if len(given) == 1 else ["a", "b"][: len(given)], given, prior)
