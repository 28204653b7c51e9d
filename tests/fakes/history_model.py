"""A `StepModel` without weights: its logits are a pure function of the tokens that a row holds.

Any mistake with rows (a wrong position, a stale key, a row that leaks into another) changes the logits.
"""

from __future__ import annotations

import zlib

import numpy as np

from edge.engine.model import Float32, Int64

_EMPTY = -1


class HistoryModel:
    """Its KV memory is the token ids themselves, shape (max_rows, context_tokens)."""

    def __init__(self, *, max_rows: int, context_tokens: int, vocab_size: int = 97) -> None:
        self.max_rows = max_rows
        self.context_tokens = context_tokens
        self.vocab_size = vocab_size
        self.kv_token_bytes = 8
        self.kv = np.full((max_rows, context_tokens), _EMPTY, np.int64)

    def prefill(self, row: int, tokens: Int64, start: int, *, all_logits: bool = False) -> Float32:
        end = start + len(tokens)
        self.kv[row, start:end] = tokens
        first = start + 1 if all_logits else end
        return np.stack([self._logits(row, length) for length in range(first, end + 1)])

    def decode(self, tokens: Int64, lengths: Int64) -> Float32:
        for row, (token, length) in enumerate(zip(tokens, lengths, strict=True)):
            self.kv[row, length] = token
        return np.stack([self._logits(row, int(length) + 1) for row, length in enumerate(lengths)])

    def move_row(self, source: int, target: int, length: int) -> None:
        self.kv[target, :length] = self.kv[source, :length]

    def release_row(self, row: int) -> None:
        self.kv[row] = _EMPTY

    def close(self) -> None:
        self.kv = np.zeros((0, 0), np.int64)

    def _logits(self, row: int, length: int) -> Float32:
        history = self.kv[row, :length]
        if (history == _EMPTY).any():
            raise AssertionError(f"row {row} reads a position that nobody wrote: {history.tolist()}")
        generator = np.random.default_rng(zlib.crc32(history.tobytes()))
        return generator.normal(scale=3.0, size=self.vocab_size).astype(np.float32)
