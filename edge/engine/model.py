"""What a loaded model can do in one step. The seam between scheduling and numerics.

`edge.engine.core` decides which rows run; a `StepModel` runs them. ONNX Runtime and torch implement it.

A model owns a KV arena of `max_rows` rows. A row holds one request. Decoding always runs over the rows
0 … n-1, so the core keeps decoding rows packed at the front and moves rows when one leaves.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


class StepModel(Protocol):
    """A model and its KV memory. Synchronous, single-threaded, no knowledge of requests."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_tokens(self) -> int:
        """Most tokens that a row can hold."""
        ...

    @property
    def max_rows(self) -> int: ...

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of KV memory that one token of one row takes, keys and values, all layers."""
        ...

    def prefill(self, row: int, tokens: Int64, start: int, *, all_logits: bool = False) -> Float32:
        """Run `tokens` (shape (n,), int64) on `row`, whose first `start` positions are in KV memory.

        Returns:
            Logits, float32: shape (n, vocab) when `all_logits`, else (1, vocab) for the last position.
        """
        ...

    def decode(self, tokens: Int64, lengths: Int64) -> Float32:
        """One step of the rows 0 … n-1.

        Args:
            tokens: Shape (n,), int64: each row's newest token, not yet in KV memory.
            lengths: Shape (n,), int64: how many positions of each row are in KV memory (before this step).

        Returns:
            Logits, float32, shape (n, vocab). Valid until the next call.
        """
        ...

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of `source` over `target`."""
        ...

    def release_row(self, row: int) -> None:
        """Give the row's memory back to the system; its content is gone."""
        ...

    def close(self) -> None: ...
