"""From token ids to text, one token at a time.

A token of a byte-level vocabulary may end inside a character; such an end decodes to U+FFFD. That is held
back until the character is complete, so what is emitted is whole characters, and joined it is what decoding
all tokens at once gives. A character that is never completed, because the answer ends there, is dropped.

Text that really contains U+FFFD, or bytes that are no text, comes through: an unfinished character is at most
three bytes, so after three tokens without a character nothing more can be waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

import tokenizers

_REPLACEMENT = "\ufffd"
_MOST_UNFINISHED = 3  # bytes of a UTF-8 character without its last


class Detokenizes(Protocol):
    """What the engine needs of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens. Special tokens have none; an unfinished character is U+FFFD."""
        ...

    def token_text(self, token_id: int) -> str:
        """How one token is shown by itself; special tokens by their name."""
        ...


class TokenizerText:
    """`Detokenizes` over a Hugging Face `tokenizer.json`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, tokenizer_json: Path) -> Self:
        """Read a file. Raises whatever `tokenizers` raises for a broken one."""
        return cls(tokenizers.Tokenizer.from_file(str(tokenizer_json)))

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> str:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text as it stands: special tokens where it names them, none added."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


class IncrementalText:
    """The text of one answer.

    Decoding restarts at the last place between two characters, with the tokens before it as context: some
    vocabularies (SentencePiece) write a token differently at the beginning of a text.
    """

    def __init__(self, tokenizer: Detokenizes) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []
        self._done_characters = 0  # of the text of context and pending

    def feed(self, token_id: int) -> str:
        """Take the next token; returns the whole characters it completes."""
        self._pending.append(token_id)
        text = self._tokenizer.decode(self._context + self._pending)
        if not text.endswith(_REPLACEMENT):
            new = text[self._done_characters :]
            if new:
                self._context, self._pending = self._pending, []
                self._done_characters = len(self._tokenizer.decode(self._context))
            return new
        whole = len(text.rstrip(_REPLACEMENT))
        if len(self._pending) > _MOST_UNFINISHED:
            whole = max(whole, len(text) - _MOST_UNFINISHED)
        new = text[self._done_characters : whole]
        self._done_characters = max(self._done_characters, whole)
        return new
