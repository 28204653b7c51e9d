"""The cloud model's tokenizer, for what is not a conversation: raw prompts, prefixes, labels, single tokens.

Conversations are rendered by the engine itself, whose template is the model's.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from protos.settings import SettingsError


class CloudTokenizer:
    """Reads `tokenizer.json`. Safe to call from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, directory: Path) -> CloudTokenizer:
        """Takes about a second; call it off the event loop.

        Raises:
            SettingsError: There is no usable `tokenizer.json`.
        """
        path = directory / "tokenizer.json"
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise SettingsError(f"cannot read the cloud model's {path}: {error}") from error

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        """Token ids. `special` adds what the model expects at the start of a text."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def token_text(self, token_id: int) -> str:
        """One token's text; a piece of a character is U+FFFD, an unknown id is empty."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text
