"""A tokenizer without a file: token ids are bytes plus an offset, so that characters can be cut anywhere."""

from __future__ import annotations

from collections.abc import Sequence


class ByteTokenizer:
    """Ids 0 … 255 are bytes; larger ids are special tokens, which have no text."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def token_text(self, token_id: int) -> str:
        return f"<{token_id}>" if token_id >= 256 else self.decode([token_id])

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())
