"""How a classification is put to a model, on both tiers, to the letter.

A label's score is the log-likelihood of its text behind the message and a cue, less its log-likelihood
behind the cue alone (pointwise mutual information). Both tiers must build the same strings, or their
probabilities could not be compared. Nothing here tokenizes: context and continuation are tokenized apart
and joined, so that the border between them never moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from protos.values import LabelScore


def label_context(text: str, kind: str) -> str:
    """What stands before the label: the message, a line break, and the cue. No space at the end."""
    return f"{text}\n{kind}:"


def label_prior_context(kind: str) -> str:
    """The same without the message."""
    return f"{kind}:"


def label_continuation(label: str) -> str:
    """The label as it continues either context: one space before it."""
    return f" {label}"


def label_scores(
    labels: Sequence[str], log_likelihoods: Sequence[float], prior_log_likelihoods: Sequence[float]
) -> tuple[LabelScore, ...]:
    """Turn likelihoods (natural logarithms, one per label) into scores in the order of `labels`.

    The probabilities are the softmax of likelihood less prior.

    Raises:
        ValueError: The lengths differ, there is no label, or a likelihood is not finite.
    """
    if not labels or not len(labels) == len(log_likelihoods) == len(prior_log_likelihoods):
        raise ValueError("one likelihood and one prior per label")
    gains = [given - prior for given, prior in zip(log_likelihoods, prior_log_likelihoods, strict=True)]
    if not all(math.isfinite(gain) for gain in gains):
        raise ValueError("a likelihood is not finite")
    largest = max(gains)
    weights = [math.exp(gain - largest) for gain in gains]
    total = math.fsum(weights)
    return tuple(
        LabelScore(
            label=label,
            probability=weight / total,
            log_likelihood=given,
            prior_log_likelihood=prior,
        )
        for label, weight, given, prior in zip(
            labels, weights, log_likelihoods, prior_log_likelihoods, strict=True
        )
    )
