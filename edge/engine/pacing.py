"""How much of a prompt is read before the others get their next token. Pure.

While a prompt is read, the other requests' tokens and every cancellation wait, so prompts are read in slices
of bounded time. A slice is whole pieces of a fixed number of tokens: time decides how many pieces, never
where a prompt is cut. Products over quantized weights may round differently for different cuts, and the same
request must not give another answer because the machine was busy.
"""

from __future__ import annotations

# Weight of the newest measurement. A few pieces adapt, one disturbed piece does not mislead.
_GAIN = 0.3


class PrefillPacer:
    """The reading speed of one engine, and the slices that follow from it.

    Args:
        slice_s: Seconds that a slice may take. One piece is read even if it takes longer.
        slice_tokens: Most tokens of a slice, however fast the machine.
        piece_tokens: Tokens of a piece.
    """

    def __init__(self, *, slice_s: float, slice_tokens: int, piece_tokens: int) -> None:
        if slice_s <= 0 or not 1 <= piece_tokens <= slice_tokens:
            raise ValueError("a slice needs time and at least one piece")
        self._slice_s = slice_s
        self._slice_tokens = slice_tokens
        self._piece_tokens = piece_tokens
        self._piece_s = 0.0  # a piece's time, smoothed; short pieces take less, which errs on the safe side

    @property
    def piece_tokens(self) -> int:
        """Tokens of a whole piece."""
        return self._piece_tokens

    def allows(self, read_tokens: int, spent_s: float) -> bool:
        """Whether a slice that has read and spent so much may read another piece."""
        if read_tokens == 0:
            return True
        return (
            read_tokens + self._piece_tokens <= self._slice_tokens
            and spent_s + self._piece_s <= self._slice_s
        )

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from one run. Only whole pieces tell how long a whole piece takes."""
        if tokens == self._piece_tokens:
            self._piece_s += _GAIN * (seconds - self._piece_s) if self._piece_s else seconds
