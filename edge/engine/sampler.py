"""From a row of logits to a token, and to what the model thought of it.

Facts (log-probability, entropy, margin) are always under the raw distribution: temperature 1, no penalty, no
truncation. Confidence must not depend on how a caller wants to sample.

Sampling follows the usual order: repetition penalty (Keskar et al. 2019, "CTRL"), temperature, top-k, top-p
(Holtzman et al. 2020), and then inverts the cumulative distribution at one uniform number.

Invariants
- A request draws exactly one number per token from a generator of its own, so equal seeds and equal logits
  give equal tokens, whoever shares the batch. Greedy requests draw none.
- No function changes the logits it is given.

Vocabularies are large (49 152 and 151 936 here) and this runs for every token, so a row is passed over few
times, in buffers that are reused and fit the second-level cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge.engine.model import Float32
from protos.values import SamplingParams

# Candidates looked at first when top-p has to find its nucleus; nearly always enough.
_NUCLEUS_GUESS = 256


@dataclass(frozen=True, slots=True)
class RowFacts:
    """One row under the raw distribution.

    Attributes:
        best: The most probable token.
        log_normalizer: Logarithm of the sum of exponentiated logits, in nats.
        entropy: In nats.
        margin: Probability of the most probable token less that of the second.
    """

    best: int
    log_normalizer: float
    entropy: float
    margin: float


class RowMeter:
    """Computes `RowFacts`. Owns the scratch memory; one per engine, not shared between threads."""

    def __init__(self, vocab_size: int) -> None:
        self._shifted = np.empty(vocab_size, np.float32)
        self._weights = np.empty(vocab_size, np.float32)
        self._ones = np.ones(vocab_size, np.float32)

    def measure(self, logits: Float32) -> RowFacts:
        """Facts of one row, shape (vocab,), float32."""
        shifted, weights = self._shifted, self._weights
        best = int(logits.argmax())
        top = float(logits[best])
        np.subtract(logits, top, out=shifted)
        np.exp(shifted, out=weights)
        # Dot products run at memory speed; `sum` takes twice as long.
        total = float(weights.dot(self._ones))
        weighted = float(weights.dot(shifted))
        weights[best] = 0.0
        second = float(weights.max())
        log_total = math.log(total)
        return RowFacts(
            best=best,
            log_normalizer=top + log_total,
            entropy=max(0.0, log_total - weighted / total),
            margin=(1.0 - second) / total,
        )

    def log_normalizer(self, logits: Float32) -> float:
        """Only the logarithm of the sum of exponentiated logits of one row, in nats."""
        top = float(logits.max())
        np.subtract(logits, top, out=self._shifted)
        np.exp(self._shifted, out=self._weights)
        return top + math.log(float(self._weights.dot(self._ones)))


class RequestSampler:
    """Chooses the tokens of one request."""

    def __init__(self, params: SamplingParams, prompt_tokens: Sequence[int], *, vocab_size: int) -> None:
        self._params = params
        self._seen: npt.NDArray[np.bool_] | None = None
        if params.repetition_penalty != 1.0:
            self._seen = np.zeros(vocab_size, np.bool_)
            self._seen[np.asarray(prompt_tokens, np.int64)] = True
        self._generator = None if params.greedy else np.random.Generator(np.random.PCG64(params.seed))

    def choose(self, logits: Float32, best: int) -> int:
        """The next token of the text.

        Args:
            logits: One row, shape (vocab,), float32, as the model gave it.
            best: Its most probable token, see `RowFacts`.
        """
        if self._seen is not None:
            logits = _penalized(logits, self._seen, self._params.repetition_penalty)
            best = int(logits.argmax())
        token = best if self._generator is None else self._draw(logits, float(self._generator.random()))
        if self._seen is not None:
            self._seen[token] = True
        return token

    def _draw(self, logits: Float32, uniform: float) -> int:
        params = self._params
        vocab = len(logits)
        if 0 < params.top_k < vocab:
            candidates = _largest(logits, params.top_k)
            weights = _weights(logits[candidates], params.temperature)
            total = float(weights.sum())
        elif params.top_p < 1.0:
            everything = _weights(logits, params.temperature)
            total = float(everything.sum())
            candidates, weights = _nucleus_candidates(logits, everything, params.top_p * total)
        else:
            # Nothing to cut off, so nothing to sort.
            cumulative = np.cumsum(_weights(logits, params.temperature))
            return _invert(cumulative, uniform)
        cumulative = np.cumsum(weights)
        if params.top_p < 1.0:
            # The token that reaches top_p belongs to the nucleus, so at least one is left.
            kept = int(np.searchsorted(cumulative, params.top_p * total)) + 1
            cumulative = cumulative[:kept]
        return int(candidates[_invert(cumulative, uniform)])


def alternatives(logits: Float32, count: int, log_normalizer: float) -> list[tuple[int, float]]:
    """The `count` most probable tokens of a row with their log-probabilities, most probable first."""
    if count <= 0:
        return []
    tokens = _largest(logits, min(count, len(logits)))
    return [(int(token), float(logits[token]) - log_normalizer) for token in tokens]


def _largest(logits: Float32, count: int) -> npt.NDArray[np.int64]:
    """The tokens of the `count` largest logits, largest first; equal ones by token id."""
    if count >= len(logits):
        return np.argsort(-logits, kind="stable")
    tokens = np.sort(np.argpartition(logits, -count)[-count:])
    return tokens[np.argsort(-logits[tokens], kind="stable")]


def _weights(logits: Float32, temperature: float) -> npt.NDArray[np.float64]:
    """Unnormalized probabilities. In double precision: a tiny temperature makes large exponents."""
    scaled: npt.NDArray[np.float64] = (logits - logits.max()).astype(np.float64)
    scaled /= temperature
    np.exp(scaled, out=scaled)
    return scaled


def _nucleus_candidates(
    logits: Float32, everything: npt.NDArray[np.float64], needed: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The most probable tokens, largest first, until their weights reach `needed`."""
    count = _NUCLEUS_GUESS
    while True:
        candidates = _largest(logits, count)
        weights = everything[candidates]
        if count >= len(logits) or float(weights.sum()) >= needed:
            return candidates, weights
        count *= 8


def _penalized(logits: Float32, seen: npt.NDArray[np.bool_], penalty: float) -> Float32:
    changed = logits.copy()
    of_seen = logits[seen]
    changed[seen] = np.where(of_seen > 0, of_seen / penalty, of_seen * penalty)
    return changed


def _invert(cumulative: npt.NDArray[np.float64], uniform: float) -> int:
    """The first index whose cumulative weight exceeds `uniform` of the total."""
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(index, len(cumulative) - 1)
