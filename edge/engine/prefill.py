"""Reading a prompt into KV memory, piece by piece.

A `PrefillWork` hands out the pieces and takes their logits; the core decides how many tokens a piece may have
and runs it on whatever row the job holds at that moment. `edge.engine.labels` is the other implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edge.engine.model import Float32, Int64
from edge.engine.sampler import RowMeter


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens (shape (n,), int64) to run from position `start` on; `all_logits` as in `StepModel.prefill`."""

    tokens: Int64
    start: int
    all_logits: bool


class PrefillWork(Protocol):
    """What a job wants to have read."""

    @property
    def done(self) -> bool: ...

    @property
    def kv_length(self) -> int:
        """Positions of its row that are in use."""
        ...

    def next_piece(self, most_tokens: int) -> Piece:
        """The next piece, 1 to `most_tokens` tokens. Only when not `done`."""
        ...

    def accept(self, logits: Float32) -> None:
        """The logits of the last piece, see `StepModel.prefill`."""
        ...


class PromptWork:
    """Reads one prompt, and on demand measures how likely the model thinks it.

    Args:
        tokens: The prompt, shape (n,), int64, n at least 1.
        meter: None: the prompt's likelihood is not wanted. Otherwise every piece asks for all logits.
    """

    def __init__(self, tokens: Int64, *, meter: RowMeter | None = None) -> None:
        self._tokens = tokens
        self._meter = meter
        self._read = 0
        self._piece = 0
        self._logprob_sum = 0.0
        self._last_logits: Float32 | None = None

    @property
    def done(self) -> bool:
        return self._read == len(self._tokens)

    @property
    def kv_length(self) -> int:
        return self._read

    @property
    def last_logits(self) -> Float32:
        """Logits behind the whole prompt, shape (vocab,). Valid until the model's next call."""
        assert self.done
        assert self._last_logits is not None
        return self._last_logits

    @property
    def logprob_mean(self) -> float | None:
        """Mean log-probability of the prompt's tokens, the first excepted. None: not wanted, or one token."""
        if self._meter is None or len(self._tokens) < 2:
            return None
        return self._logprob_sum / (len(self._tokens) - 1)

    def next_piece(self, most_tokens: int) -> Piece:
        self._piece = min(most_tokens, len(self._tokens) - self._read)
        tokens = self._tokens[self._read : self._read + self._piece]
        return Piece(tokens, self._read, self._meter is not None)

    def accept(self, logits: Float32) -> None:
        if self._meter is not None:
            # Row i is what the model expected behind the piece's token i.
            following = self._tokens[self._read + 1 : self._read + self._piece + 1]
            self._logprob_sum += sum_logprobs(self._meter, logits[: len(following)], following)
        self._read += self._piece
        self._last_logits = logits[-1]


def sum_logprobs(meter: RowMeter, logits: Float32, tokens: Int64) -> float:
    """Sum of the log-probabilities of `tokens` (shape (n,)), one under each row of `logits` (n, vocab)."""
    return float(
        sum(
            float(row[token]) - meter.log_normalizer(row)
            for row, token in zip(logits, np.asarray(tokens), strict=True)
        )
    )
