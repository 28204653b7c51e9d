"""Scoring labels by their likelihood as continuations of a text. Pieces in, scores out.

The context is read once. The first token of every label is scored from the logits behind it; the others by
running the label from the same position, each label over the one before it. The same is done behind the
prior, unless these labels' priors are known. `protos.labels` says how scores become probabilities.

Nothing here runs the model: `LabelWork` is a `PrefillWork`, so a large label set is read in slices like a
long prompt and stalls nobody.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from edge.engine.model import Float32, Int64
from edge.engine.prefill import Piece, sum_logprobs
from edge.engine.protocol import LabelRequest
from edge.engine.sampler import RowMeter
from protos.labels import label_scores
from protos.values import LabelScore

_Key = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


class PriorCache:
    """Log-likelihoods of label sets behind their priors; the least recently used sets are forgotten."""

    def __init__(self, max_sets: int) -> None:
        self._max_sets = max_sets
        self._sets: OrderedDict[_Key, tuple[float, ...]] = OrderedDict()

    def get(self, request: LabelRequest) -> tuple[float, ...] | None:
        key = (request.prior_tokens, request.label_tokens)
        if key in self._sets:
            self._sets.move_to_end(key)
        return self._sets.get(key)

    def put(self, request: LabelRequest, priors: tuple[float, ...]) -> None:
        self._sets[(request.prior_tokens, request.label_tokens)] = priors
        while len(self._sets) > self._max_sets:
            self._sets.popitem(last=False)


class LabelWork:
    """All that one `LabelRequest` wants to have read."""

    def __init__(self, request: LabelRequest, *, meter: RowMeter, priors: PriorCache) -> None:
        self._request = request
        self._meter = meter
        self._priors = priors
        self._known_priors = priors.get(request)
        labels = [np.array(tokens, np.int64) for tokens in request.label_tokens]
        self._given = _Continuations(np.array(request.context_tokens, np.int64), labels, meter)
        self._prior = _Continuations(np.array(request.prior_tokens, np.int64), labels, meter)

    @property
    def done(self) -> bool:
        return self._given.done and (self._known_priors is not None or self._prior.done)

    @property
    def kv_length(self) -> int:
        return (self._prior if self._given.done else self._given).kv_length

    def next_piece(self, most_tokens: int) -> Piece:
        return (self._prior if self._given.done else self._given).next_piece(most_tokens)

    def accept(self, logits: Float32) -> None:
        if not self._given.done:
            self._given.accept(logits)
            return
        self._prior.accept(logits)
        if self._prior.done:
            self._known_priors = tuple(self._prior.scores)
            self._priors.put(self._request, self._known_priors)

    def result(self) -> tuple[LabelScore, ...]:
        """The scores in the order of the labels. Only when `done`."""
        assert self.done
        assert self._known_priors is not None
        return label_scores(self._request.labels, self._given.scores, self._known_priors)


class _Continuations:
    """The log-likelihood of each label behind one beginning."""

    def __init__(self, beginning: Int64, labels: list[Int64], meter: RowMeter) -> None:
        self._beginning = beginning
        self._labels = labels
        self._meter = meter
        self._read = 0  # tokens of the beginning in KV memory
        self._label = 0  # which label is being read
        self._label_read = 0  # how many of its tokens
        self._piece = 0
        self.scores = [0.0] * len(labels)

    @property
    def done(self) -> bool:
        return self._label == len(self._labels)

    @property
    def kv_length(self) -> int:
        return self._read + self._label_read

    def next_piece(self, most_tokens: int) -> Piece:
        if self._read < len(self._beginning):
            self._piece = min(most_tokens, len(self._beginning) - self._read)
            return Piece(self._beginning[self._read : self._read + self._piece], self._read, False)
        # The last token of a label is only predicted, never read.
        label, read = self._labels[self._label], self._label_read
        self._piece = min(most_tokens, len(label) - 1 - read)
        return Piece(label[read : read + self._piece], self._read + read, True)

    def accept(self, logits: Float32) -> None:
        if self._read < len(self._beginning):
            self._read += self._piece
            if self._read == len(self._beginning):
                self._score_first_tokens(logits[-1])
                self._skip_finished()
            return
        following = self._labels[self._label][self._label_read + 1 : self._label_read + self._piece + 1]
        self.scores[self._label] += sum_logprobs(self._meter, logits, following)
        self._label_read += self._piece
        self._skip_finished()

    def _score_first_tokens(self, logits: Float32) -> None:
        normalizer = self._meter.log_normalizer(logits)
        self.scores = [float(logits[label[0]]) - normalizer for label in self._labels]

    def _skip_finished(self) -> None:
        while not self.done and self._label_read >= len(self._labels[self._label]) - 1:
            self._label += 1
            self._label_read = 0
